"""A file that somebody else wrote ends in a right load or in one of our errors: soon, in little memory, and nothing else.

The crafted files are those of trials. The seeded ones change one thing in each structure that a checkpoint has.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_tools import (
    build,
    change_manifest,
    cheap,
    deepspeed_parts,
    ends_well,
    mutate_archive,
    mutate_pickle,
    mutate_tree,
    odd,
    rewrite_metadata,
    save_small,
    tensors_of,
    write_deepspeed,
    write_manifest,
)  # fmt: skip
from helpers import equal, masters
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from typer.testing import CliRunner

import shardmp
from shardmp import CheckpointError, cli, codec, container, directory
from shardmp.archive_reading import read_archive
from shardmp.checksum import crc32
from shardmp.exporting import Contents
from shardmp.pickle_reading import PickleError, Record, read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:.*(random|torch.distributed is|passing over)")
W = "model.inner.weight"


def name_of(value: Any) -> str:
    """Of a case: what its error must say."""
    return value if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_small, 2, root)
    return directory.find(root, None)


@pytest.fixture
def ours(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint with a manifest, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Path:
    """The same as plain DCP would have written it: nothing has a checksum but the archives."""
    path = Path(shutil.copytree(saved, tmp_path / "plain"))
    (path / "manifest.json").unlink()
    return path


def refusal(path: Path, tmp_path: Path) -> str:
    """The error of a read, of an export and of `shardmp inspect`, which says it in one line."""
    with cheap(), pytest.raises(CheckpointError) as caught:
        tensors_of(path)
    with cheap(), pytest.raises(CheckpointError):
        shardmp.export(path, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob(".*"))
    with cheap():
        done = CliRunner().invoke(cli.app, ["inspect", str(path)])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert len(done.stderr.splitlines()) == 1
    return str(caught.value)


# -- what lies under a name


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["FIFO", "a directory", "a device"])
def test_what_is_no_regular_file_is_refused_before_it_is_read(ours: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = ours / name
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    told = refusal(ours, tmp_path)
    assert str(path) in told
    assert kind in told


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_a_table_of_a_terabyte_is_not_taken_in(ours: Path, tmp_path: Path, name: str) -> None:
    """Sparse: it has a size, and nothing on the disk."""
    for size in (2**40, 2**27):
        os.truncate(ours / name, 0)
        os.truncate(ours / name, size)
        assert name in refusal(ours, tmp_path)


def test_a_fifo_as_latest_is_passed_over(ours: Path) -> None:
    os.mkfifo(ours.parent / "latest")
    with cheap():
        assert directory.find(ours.parent, None) == ours


# -- the manifest


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda body: body["files"].update({"../x": 1}), "names of files"),
        (lambda body: body["files"].update({"/etc/passwd": 1}), "names of files"),
        (lambda body: body["records"].update({"..": []}), "names of files"),
        (lambda body: body.update(step=-1), "step"),
        (lambda body: body.update(ranks="2"), "ranks"),
        (lambda body: body.update(more=1), "'more' is unknown"),
        (lambda body: body.pop("torch"), "'torch' is missing"),
        (lambda body: body.update(shardmp="\x1b[2J"), "shardmp"),
        (lambda body: body["records"]["__0_0.distcp"][0].__setitem__(2, 2**40), "records"),
        (lambda body: body["records"]["__0_0.distcp"][0].__setitem__(0, -8), "records"),
        (lambda body: body["records"]["__0_0.distcp"].pop(), "records"),
        (lambda body: body.update(format=2, shardmp="9.0.0"), "written by shardmp 9.0.0"),
    ],
    ids=name_of,
)
def test_a_manifest_is_checked_field_by_field(ours: Path, tmp_path: Path, change: Any, told: str) -> None:
    """Its checksum is right: whoever crafts it computes one."""
    change_manifest(ours, change)
    found = refusal(ours, tmp_path)
    assert "manifest.json" in found
    assert told in found


def test_a_manifest_nested_without_end_is_an_error(ours: Path, tmp_path: Path) -> None:
    (ours / "manifest.json").write_bytes(b'{"crc32":' + b"[" * 10**6)
    assert "manifest.json" in refusal(ours, tmp_path)


# -- .metadata


def _entry(found: Any) -> Any:
    return found.state_dict_metadata[W]


def _stored(found: Any) -> Any:
    return next(info for index, info in found.storage_data.items() if index.fqn == W)


def _longer(found: Any) -> None:
    _entry(found).size = torch.Size([2**40])
    _entry(found).chunks[:] = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]
    for index in [index for index in found.storage_data if index.fqn == W]:
        found.storage_data[MetadataIndex(W, torch.Size([0]))] = found.storage_data.pop(index)


def _overlap(found: Any) -> None:
    first = _entry(found).chunks[0]
    _entry(found).chunks.append(ChunkStorageMetadata(first.offsets, first.sizes))


def _same_bytes(found: Any) -> None:
    infos = [info for index, info in found.storage_data.items() if index.fqn.startswith("optim.state.inner.weight.exp")]
    infos[0].__dict__.update(infos[1].__dict__)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_longer, "needs 4398046511104 bytes"),
        (_overlap, "do not cover its shape"),
        (lambda found: _entry(found).chunks.pop(), "do not cover its shape"),
        (lambda found: setattr(_entry(found), "size", torch.Size([2**40, 5])), "do not cover its shape"),
        (lambda found: setattr(_stored(found), "length", 2**40), "which has"),
        (lambda found: setattr(_stored(found), "offset", 2**40), "which has"),
        (lambda found: setattr(_stored(found), "offset", -1), "offset -1"),
        (lambda found: setattr(_stored(found), "relative_path", "../x"), "outside of the checkpoint: '../x'"),
        (lambda found: setattr(_stored(found), "relative_path", "/etc/passwd"), "outside of the checkpoint"),
        (lambda found: setattr(_stored(found), "relative_path", "absent"), "absent is missing"),
        (_same_bytes, "are both at"),
        (lambda found: found.state_dict_metadata.update({"n" * 5000: _entry(found)}), "not the name of a tensor"),
        (lambda found: setattr(found, "storage_data", None), "expected two dicts"),
        (lambda found: setattr(_entry(found).properties, "dtype", torch.float64), "was not|is not a tensor|needs"),
    ],
    ids=name_of,
)
def test_what_metadata_states_is_held_against_the_files(plain: Path, tmp_path: Path, change: Any, told: str) -> None:
    rewrite_metadata(plain, change)
    found = refusal(plain, tmp_path)
    assert any(part in found for part in told.split("|")), found


def test_metadata_that_the_manifest_does_not_know_is_refused(ours: Path, tmp_path: Path) -> None:
    """Else the tensor would be read without a comparison."""
    rewrite_metadata(ours, lambda found: setattr(_stored(found), "length", _stored(found).length - 1))
    content = (ours / ".metadata").read_bytes()
    change_manifest(ours, lambda body: body.update(metadata_crc=crc32(content)))
    change_manifest(ours, lambda body: body["files"].update({".metadata": len(content)}))
    assert "of which the manifest says nothing" in refusal(ours, tmp_path)


BUILDS = {
    # pathlib.PosixPath.name = "safe", for everybody: whoever checks a path by its name lets all pass from then on.
    "an attribute of a class": b"cpathlib\nPosixPath\nN}\x8c\x04name\x8c\x04safes\x86b0",
    "a new object of a class": b"cpathlib\nPosixPath\n)\x81}\x8c\x04name\x8c\x04safesb0",
    "an attribute of a function": b"ctorch.serialization\n_get_layout\n}\x8c\x04name\x8c\x04safesb0",
    "an import": b"cthis\nthis\n0",
    "a call": b"cos\nsystem\n\x8c\x08touch /x\x85R0",
}


@pytest.mark.parametrize("what", BUILDS)
def test_a_pickle_changes_nothing_in_the_process(plain: Path, what: str) -> None:
    """The original follows: what it asks for before is not looked up, made, called or changed."""
    content = (plain / ".metadata").read_bytes()
    (plain / ".metadata").write_bytes(content[:2] + BUILDS[what].replace(b"0", b"") + b"\x94" + content[2:])
    found = ends_well(lambda: tensors_of(plain))
    assert isinstance(found, CheckpointError)
    assert isinstance(pathlib.PosixPath.name, property) or callable(getattr(pathlib.PosixPath.name, "__get__", None))
    assert Path("/a/b").name == "b"


def _repeated(count: int) -> bytes:
    """A tuple of a tuple of ... each twice: few bytes, 2^count leaves."""
    return b"\x80\x04N" + b"".join(b"q\x00h\x00\x86" for _ in range(count))


HOSTILE = {
    "a length of 2^40": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "a text of 2^62": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
    "an integer of 2 GiB": b"\x80\x04\x8b" + struct.pack("<L", 2**31 - 1) + b".",
    "a memo of 2^31 places": b"\x80\x04Nr\xff\xff\xff\x7f0.",
    "a frame of 2^63": b"\x80\x04\x95" + struct.pack("<Q", 2**63),
    "tuples nested a million deep": b"\x80\x04N" + b"\x85" * 10**5 + b".",
    "a key with 2^60 leaves": b"\x80\x04}" + _repeated(60)[2:] + b"Ns.",
    "a value with 2^60 leaves": _repeated(60) + b".",
    "a cycle": b"\x80\x04]q\x00h\x00a.",
    "keys with one hash": b"\x80\x04}(" + b"".join(
        b"\x8a\x0c" + (k * (2**61 - 1)).to_bytes(12, "little") + b"N" for k in range(1, 20000)
    ) + b"u.",
    "no end": b"\x80\x04N",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_pickle_costs_no_more_than_its_bytes(plain: Path, tmp_path: Path, what: str) -> None:
    (plain / ".metadata").write_bytes(HOSTILE[what])
    assert ".metadata" in refusal(plain, tmp_path)
    with cheap(), pytest.raises(ValueError, match=r"."):
        read_archive(bytearray(archive({"data.pkl": HOSTILE[what], "version": b"3\n"})))


def test_records_have_no_behaviour() -> None:
    found = read_pickle(b"\x80\x04cos\nsystem\n\x8c\x08touch /x\x85R}\x8c\x05stateK\x01sb.", {})
    assert isinstance(found, Record)
    assert (str(found.kind), found.arguments, found.state) == ("os.system", ("touch /x",), {"state": 1})
    with pytest.raises(PickleError, match="second state"):
        read_pickle(b"\x80\x04cos\nsystem\n)R}b}b.", {})


# -- archives


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, content in members.items():
            file.writestr(f"archive/{name}", content)
    return stream.getvalue()


def test_a_zip_of_two_gigabytes_in_two_megabytes_is_not_inflated(plain: Path, tmp_path: Path) -> None:
    """As a value of a checkpoint, and as a file of DeepSpeed's."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    packed, name = zeros * 2**11 + b"\x03\x00", b"archive/data.pkl"
    about = struct.pack("<5H3L2H", 20, 0, 8, 0, 33, 0, len(packed), 2**31, len(name), 0)
    entry = b"PK\1\2" + struct.pack("<H", 20) + about + struct.pack("<3H2L", 0, 0, 0, 0, 0) + name
    bomb = b"PK\3\4" + about + name + packed + entry
    bomb += b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 1, 1, len(entry), len(bomb) - len(entry), 0)
    with zipfile.ZipFile(io.BytesIO(bomb)) as file, file.open(name.decode()) as member:
        assert file.infolist()[0].file_size == 2**31
        assert member.read(3 * 2**20) == bytes(3 * 2**20), "it is a bomb indeed"
    assert len(bomb) < 3 * 2**20
    with cheap(), pytest.raises(ValueError, match="compressed"):
        read_archive(bytearray(bomb))
    write_deepspeed(tmp_path / "ds", deepspeed_parts())
    (tmp_path / "ds" / "mp_rank_00_model_states.pt").write_bytes(bomb)
    with cheap(), pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt was not read: .*compressed"):
        shardmp.import_deepspeed(tmp_path / "ds", tmp_path / "out")


def with_attribute(value: Any) -> Any:
    value.mine = 3
    return value


VALUES = {
    "numbers": (1, -2, 2**70, 0.1, True, None, 1j),
    "texts": ["a", "\u00fc", b"ab\0", bytearray(b"q")],
    "containers": {"a": (1, [2, {3: ()}]), (1, "b"): {4, 5}, None: OrderedDict(a=1), 2.5: Counter("aab")},
    "torch": [torch.Size([1, 2]), torch.device("cpu"), torch.float16],
    "shapes": [torch.arange(12.0).view(3, 4).t(), torch.tensor(3), torch.empty(0, 3), torch.arange(9)[2:5]],
    "dtypes": [torch.ones(3).to(dtype) for dtype in (
        torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint16, torch.bool, torch.complex64, torch.float8_e5m2
    )],
    "a shared storage": [torch.arange(6).view(2, 3)] * 2,
    "attributes": [with_attribute(torch.ones(2)), with_attribute(nn.Parameter(torch.ones(2)).requires_grad_(False))],
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("checksums", [True, False])
def test_what_torch_save_writes_is_read_as_torch_reads_it(what: str, checksums: bool) -> None:
    stream = io.BytesIO()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(VALUES[what], stream)
    finally:
        torch.serialization.set_crc32_options(True)
    found = read_archive(bytearray(stream.getvalue()))
    stream.seek(0)
    expected = torch.load(stream, weights_only=False)
    assert repr(found) == repr(expected).replace("Parameter containing:\n", "")
    assert type(found) is type(expected)


def tensor_pickle(numel: int, offset: int, size: Any, stride: Any) -> bytes:
    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, {})

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(value, Storage) else None

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(Tensor())
    return stream.getvalue()


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ((4, 0, (4,), (1,)), None),
        ((2**40, 0, (4,), (1,)), "states 1099511627776 elements, and has 16 bytes"),
        ((4, 0, (2**40,), (0,)), "a tensor of 1099511627776 elements"),
        ((4, 0, (2**40,), (1,)), "a tensor of 1099511627776 elements"),
        ((4, 1, (4,), (1,)), "up to 4 in a storage of 4"),
        ((4, -1, (4,), (1,)), "do not fit together"),
        ((4, 0, (4,), (-1,)), "not a number from 0 on"),
        ((4, 0, (2**61,) * 70, (1,) * 70), "not a short tuple"),
    ],
    ids=str,
)
def test_a_tensor_has_no_more_elements_than_its_storage(about: Any, told: str | None) -> None:
    content = archive({"data.pkl": tensor_pickle(*about), "data/0": torch.arange(4.0).numpy().tobytes()})
    with cheap():
        if told is None:
            assert torch.equal(read_archive(bytearray(content)), torch.arange(4.0))
        else:
            with pytest.raises(PickleError, match=told):
                read_archive(bytearray(content))


# -- DeepSpeed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model, first: first.update(partition_count=[10**9]), "rank_2_mp_rank_00_optim_states.pt is missing"),
        (lambda model, first: first.update(partition_count=[]), "partition_count"),
        (lambda model, first: first.update(group_paddings=[-6]), "group_paddings"),
        (lambda model, first: first.update(group_paddings=[2**40]), "needs 9 elements of group 0"),
        (lambda model, first: model["param_shapes"][0].update({"a.bias": torch.Size([2**40])}), "1099511627785"),
        (lambda model, first: model.update(global_steps=-1), "global_steps"),
        (lambda model, first: model.update(global_steps="../../x"), "global_steps"),
        (lambda model, first: model["shared_params"].update({"a.bias": "a.weight"}), "is there twice"),
        (lambda model, first: model["param_shapes"][0].update({"n" * 5000: torch.Size([0])}), "not the name"),
        (lambda model, first: first.update(loss_scaler="x"), "loss_scaler"),
        (lambda model, first: first.update(zero_stage=True), "ZeRO stage"),
    ],
    ids=name_of,
)
def test_what_deepspeeds_files_state_is_held_against_them(tmp_path: Path, change: Any, told: str) -> None:
    parts = deepspeed_parts()
    model, first = list(parts.values())[:2]
    change(model, first["optimizer_state_dict"])
    write_deepspeed(tmp_path / "ds", parts)
    with cheap(), pytest.raises((CheckpointError, ValueError), match=told):
        shardmp.import_deepspeed(tmp_path / "ds", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))
    done = CliRunner().invoke(cli.app, ["import-deepspeed", str(tmp_path / "ds"), str(tmp_path / "out")])
    assert done.exit_code in (1, 2)
    assert len(done.stderr.splitlines()) == 1


def test_a_tag_is_the_name_of_a_directory(tmp_path: Path) -> None:
    for tag in ("..", ".", "a/b", "/etc", "a\0b", "n" * 300):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(ValueError, match="name of a directory"):
            shardmp.import_deepspeed(tmp_path, tmp_path / "out")


def test_the_imported_values_are_those_in_the_files(tmp_path: Path) -> None:
    write_deepspeed(tmp_path / "ds", deepspeed_parts())
    made = shardmp.import_deepspeed(tmp_path / "ds", tmp_path / "out")
    found = tensors_of(made.path)
    assert torch.equal(found["model.a.weight"], torch.arange(9.0).view(3, 3))
    assert torch.equal(found["optim.state.a.bias.exp_avg"], torch.tensor([9.0, 10, 11]) / 8)
    assert torch.equal(found["model.seen"], torch.tensor([2]))
    assert (made.step, made.ranks, made.stage) == (4, 2, 2)
    assert 'Precision("fp16", init_scale=256.0, growth_interval=100, hysteresis=2, min_scale=1.0)' in made.options


# -- export


@pytest.mark.parametrize("kind", ["a directory", "a FIFO", "a symbolic link"])
def test_export_replaces_nothing_but_a_regular_file(saved: Path, tmp_path: Path, kind: str) -> None:
    target, other = tmp_path / "out", tmp_path / "other"
    other.write_text("mine")
    if kind == "a directory":
        target.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(target)
    else:
        target.symlink_to(other)
    with cheap(), pytest.raises(FileExistsError, match=kind):
        shardmp.export(saved, target)
    assert other.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_export_refuses_a_device(saved: Path) -> None:
    with pytest.raises(FileExistsError, match=r"a device.*/dev/null"):
        shardmp.export(saved, "/dev/null")


def test_export_leaves_what_lies_under_the_old_temporary_name(saved: Path, tmp_path: Path) -> None:
    """A link there was followed: the file that it named was overwritten."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".out.partial").symlink_to(mine)
    shardmp.export(saved, tmp_path / "out")
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "mine", "out"]


def test_an_export_that_fails_leaves_the_file_before_and_nothing_else(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    shardmp.export(saved, target)
    before = target.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        shardmp.export(saved, target, dtype="bf16")
    monkeypatch.undo()
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- values in `extra`


@pytest.mark.parametrize(
    "value",
    [
        {"!": "values", "v": "AAAA", "dtype": "load", "shape": [1]},
        {"!": "values", "v": "AAAA", "dtype": "float32", "shape": [2**40, 2**40]},
        {"!": "values", "v": "AAAA", "dtype": "uint8", "shape": [-3]},
        {"!": "array", "v": "AAAAAAAAAAA=", "dtype": "O", "shape": [1]},
        {"!": "array", "v": "AAAA", "dtype": "<f4", "shape": [2**40]},
        {"!": "tensor", "v": 5},
        {"!": "set", "v": [[]]},
        {"!": "system"},
        {"!": []},
    ],
    ids=str,
)
def test_a_damaged_value_is_an_error(value: Any) -> None:
    with cheap(), pytest.raises(ValueError, match="stored value is damaged"):
        codec.loads(json.dumps(value).encode())


def test_a_random_state_that_points_beyond_its_table_is_refused() -> None:
    """numpy takes any position and reads there."""
    device = torch.device("cpu")
    state = codec.random_state(device)
    bad = {
        **state,
        "numpy": (*state["numpy"][:2], 10**6, *state["numpy"][3:]),
        "torch": torch.zeros(5, dtype=torch.uint8),
    }
    before = random.getstate()
    with pytest.raises(ValueError, match="random state is damaged"):
        codec.set_random_state(bad, device)
    with pytest.raises(ValueError, match="numpy's position"):
        codec.set_random_state({**bad, "torch": state["torch"]}, device)
    assert random.getstate() == before


# -- seeded


def _manifests(path: Path, generator: random.Random) -> Iterator[str]:
    name = path / "manifest.json"
    whole = name.read_bytes()
    for _ in range(120):
        body = json.loads(whole)["body"]
        what = mutate_tree(body, generator)
        write_manifest(name, body)
        yield what


def _pickles(path: Path, generator: random.Random) -> Iterator[str]:
    name = path / ".metadata"
    whole = name.read_bytes()
    for _ in range(250):
        content, what = mutate_pickle(whole, generator)
        name.write_bytes(content)
        yield what


def _records(path: Path, generator: random.Random) -> Iterator[str]:
    """Places and sizes of one tensor's records are others'."""
    whole = (path / ".metadata").read_bytes()
    numbers = (-1, 0, 1, 5, 2**31, 2**40, 2**63 - 1)

    def change(found: Any) -> None:
        info = generator.choice(list(found.storage_data.values()))
        entry = generator.choice([one for one in found.state_dict_metadata.values() if hasattr(one, "chunks")])
        box = generator.choice(entry.chunks)
        for _ in range(generator.choice((1, 1, 2))):
            one, name = generator.choice(
                [(info, "offset"), (info, "length"), (info, "relative_path"), (box, "offsets"), (box, "sizes"),
                 (entry, "size"), (entry, "chunks"), (entry.properties, "dtype")]
            )  # fmt: skip
            setattr(
                one, name, generator.choice((odd(generator), generator.choice(numbers), torch.Size([3]), torch.int8))
            )

    for _ in range(150):
        (path / ".metadata").write_bytes(whole)
        rewrite_metadata(path, change)
        yield "a record"


def _headers(path: Path, generator: random.Random) -> Iterator[str]:
    """The JSON in shardmp.state, in an archive of the same length whose checksum is right."""
    found = pickle.loads((path / ".metadata").read_bytes())
    info = next(info for index, info in found.storage_data.items() if index.fqn == "shardmp.state")
    length = found.state_dict_metadata["shardmp.state"].size.numel()
    file = path / info.relative_path
    whole = file.read_bytes()
    begin = whole.index(b'{"counters"', info.offset)
    text = whole[begin : begin + length]
    for _ in range(80):
        header = json.loads(text)
        header["extra"] = json.loads(header["extra"])
        what = mutate_tree(header, generator)
        if isinstance(header, dict) and isinstance(header.get("extra"), dict):
            header["extra"] = json.dumps(header["extra"])
        new = json.dumps(header).encode().ljust(length)[:length]
        head, tail = container.wrap(torch.uint8, (length,), crc32(new))
        file.write_bytes(whole[: info.offset] + head + new + tail + whole[info.offset + info.length :])
        yield what


def _archives(path: Path, generator: random.Random) -> Iterator[str]:
    """The archive of one tensor or value."""
    found = pickle.loads((path / ".metadata").read_bytes())
    for _ in range(150):
        info = generator.choice(list(found.storage_data.values()))
        file = path / info.relative_path
        whole = file.read_bytes()
        content, what = mutate_archive(whole[info.offset : info.offset + info.length], generator)
        file.write_bytes(whole[: info.offset] + content.ljust(info.length, b"\0") + whole[info.offset + info.length :])
        yield f"{what} of {info}"
        file.write_bytes(whole)


def read_all(path: Path, model: Any, optimizer: Any) -> Any:
    shardmp.load(path, model, optimizer)
    return masters(optimizer)


def fuzz(kind: str, path: Path, saved: Path, seed: int) -> tuple[int, int, list[str]]:
    """(mutants, those that were read, those that were read as something else)."""
    model, optimizer = build()
    expected, weights = tensors_of(saved), read_all(saved, model, optimizer)
    with cheap():  # what is imported at a first use
        shardmp.load(path, model, optimizer)
    generator = random.Random(seed)
    count, right, wrong = 0, 0, []
    for what in MUTATIONS[kind](path, generator):
        count += 1
        try:
            found = ends_well(lambda: tensors_of(path))
            loaded = ends_well(lambda: read_all(path, model, optimizer))
        except BaseException as error:
            raise AssertionError(f"{kind} {count} of seed {seed}: {what}") from error
        if not isinstance(found, Exception):
            right += 1
            if kind in ("archives", "manifests") and not equal(found, expected):
                wrong.append(what)
        if kind in ("archives", "manifests") and not isinstance(loaded, Exception) and not equal(loaded, weights):
            wrong.append(f"load: {what}")
    return count, right, wrong


MUTATIONS: dict[str, Callable[[Path, random.Random], Iterator[str]]] = {
    "manifests": _manifests,
    "pickles": _pickles,
    "records": _records,
    "headers": _headers,
    "archives": _archives,
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_mutant_of_a_checkpoint_ends_well(saved: Path, ours: Path, kind: str) -> None:
    """In a right load where a checksum or nothing else could tell, or in an error of ours; and is cheap: see `ends_well`."""
    if kind != "manifests":
        (ours / "manifest.json").unlink()
        ours = ours.rename(ours.with_name("plain"))
    ((count, right, wrong),) = run_ranks(fuzz, 1, kind, ours, saved, 7, timeout=120)
    assert count >= 80
    assert right < count
    assert not wrong


def _deepspeed_values(folder: Path, generator: random.Random) -> Iterator[str]:
    for _ in range(120):
        parts = deepspeed_parts()
        what = mutate_tree(parts, generator, lambda one: one.choice((odd(one), torch.Size([2**40]), torch.ones(3))))
        try:
            write_deepspeed(
                folder, {name: part for name, part in parts.items() if "/" not in name and "\0" not in name}
            )
        except (OSError, ValueError, RuntimeError, AttributeError):
            continue  # a name that no file can have
        yield what


def _deepspeed_archives(folder: Path, generator: random.Random) -> Iterator[str]:
    write_deepspeed(folder, deepspeed_parts())
    files = sorted(folder.iterdir())
    for number in range(200):
        file = generator.choice(files)
        whole = file.read_bytes()
        if number % 2:
            content, what = mutate_archive(whole, generator)
        else:
            members = {
                name.partition("/")[2]: zipfile.ZipFile(file).read(name) for name in zipfile.ZipFile(file).namelist()
            }
            members["data.pkl"], what = mutate_pickle(members["data.pkl"], generator)
            content = archive(members)
        file.write_bytes(content)
        yield f"{what} of {file.name}"
        file.write_bytes(whole)


@pytest.mark.parametrize("mutants", [_deepspeed_values, _deepspeed_archives])
def test_every_mutant_of_deepspeeds_files_ends_well(tmp_path: Path, mutants: Any) -> None:
    (tmp_path / "ds").mkdir()
    count = right = 0
    for what in mutants(tmp_path / "ds", random.Random(3)):
        count += 1
        try:
            found = ends_well(lambda: tensors_of(shardmp.import_deepspeed(tmp_path / "ds", tmp_path / "out").path))
        except BaseException as error:
            raise AssertionError(f"{count}: {what}") from error
        right += not isinstance(found, Exception)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if mutants is _deepspeed_values:
            shutil.rmtree(tmp_path / "ds")
    assert count >= 100
    assert 0 < right < count


def test_what_a_first_read_imports_is_there(saved: Path) -> None:
    """The files' own reader is Contents; a reader of ours that reads nothing would pass all of the above."""
    contents = Contents(saved)
    assert contents.header["optimizer"] == "AdamW"
    assert contents.tied() == {"model.head.weight": "model.embed.weight"}
    contents.verify()
