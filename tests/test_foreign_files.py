"""A file that somebody else wrote ends in a right load or in one of our errors: soon, in little memory, and nothing else.

The crafted files are those of trials: names, the manifest, the metadata. See also test_foreign_archives.py and _mutants.py.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_tools import (
    archive,
    change_manifest,
    cheap,
    ends_well,
    name_of,
    rewrite_metadata,
    save_small,
    tensors_of,
)  # fmt: skip
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from typer.testing import CliRunner

import shardmp
from shardmp import CheckpointError, cli, directory
from shardmp.archive_reading import read_archive
from shardmp.checksum import crc32
from shardmp.pickle_reading import PickleError, Record, read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:.*(random|torch.distributed is|passing over)")
W = "model.inner.weight"


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
