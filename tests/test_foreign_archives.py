"""Archives, DeepSpeed's files and stored values that somebody else wrote; and what `export` may replace."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_tools import (
    archive,
    cheap,
    deepspeed_parts,
    name_of,
    save_small,
    tensors_of,
    write_deepspeed,
)  # fmt: skip
from ranks import run_ranks
from torch import nn
from typer.testing import CliRunner

import shardmp
from shardmp import CheckpointError, cli, codec, directory
from shardmp.archive_reading import read_archive
from shardmp.pickle_reading import PickleError

pytestmark = pytest.mark.filterwarnings("ignore:.*(random|torch.distributed is|passing over)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_small, 2, root)
    return directory.find(root, None)


# -- archives


def test_a_zip_of_two_gigabytes_in_two_megabytes_is_not_inflated(tmp_path: Path) -> None:
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
