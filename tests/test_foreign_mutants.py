"""A thousand files that differ from a good one in one thing, seeded: a right load, or one of our errors, soon."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_tools import (
    archive,
    build,
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

import shardmp
from shardmp import container, directory
from shardmp.checksum import crc32
from shardmp.exporting import Contents

pytestmark = pytest.mark.filterwarnings("ignore:.*(random|torch.distributed is|passing over)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_small, 2, root)
    return directory.find(root, None)


@pytest.fixture
def ours(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint with a manifest, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


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
