"""Looking at a checkpoint and taking the weights out of it, without a model and without ranks.

Owns:      the safetensors file, and what `shardmp inspect` says.
Takes:     a checkpoint of any number of ranks.
Gives:     consolidated weights under the plain model's keys; names, shapes, dtypes, bytes and whether all is intact.
Invariant: one tensor is in memory at a time; a file is complete or not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import directory
from .header import read_header
from .manifest import CheckpointError
from .new_file import refuse_odd, replacing
from .precision import DTYPES
from .storage import Reader
from .unpickling import read_metadata

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PREFIX = "model."
_ABOUT = "__metadata__"  # in safetensors' header, beside the tensors' names


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: its name, shape, dtype, and in how many pieces it was written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: int

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Contents:
    """An opened checkpoint.

    Args:
        root: a checkpoint, or a directory of them.
        step: which one; None is the latest.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: a file is missing or truncated, or the manifest is altered.
    """

    def __init__(self, root: str | Path, step: int | None = None) -> None:
        self.path = directory.find(directory.named(root, "directory"), step)
        self.manifest = directory.manifest_of(self.path) if directory.is_ours(self.path) else None
        if self.manifest is not None:
            self.manifest.check_sizes(self.path)
        self.reader = Reader(self.path, read_metadata(self.path, self.manifest), self.manifest)
        self.header: dict[str, Any] = read_header(self.reader) or {}

    def entries(self) -> Iterator[Entry]:
        """All tensors by name; a tied one under each of its names."""
        for name, found in sorted(self.reader.tensors()):
            yield Entry(name, tuple(found.size), found.properties.dtype, len(found.chunks))

    def tied(self) -> dict[str, str]:
        """Names of tensors that are in the file under another name, and that name."""
        first: dict[Any, str] = {}
        tied = {}
        for index, info in self.reader.metadata.storage_data.items():
            place = info.relative_path, info.offset
            name = first.setdefault(place, index.fqn)
            if name != index.fqn:
                tied[index.fqn] = name
        return tied

    def verify(self) -> None:
        """Compare every byte with its checksum.

        Raises:
            CheckpointError: the first place that was altered; or there are no checksums (plain DCP has written it).
        """
        if self.manifest is None:
            raise CheckpointError(f"{self.path} has no manifest.json, and so no checksums: shardmp has not written it")
        self.manifest.check_contents(self.path, sorted(self.manifest.records))


def export(root: str | Path, target: str | Path, *, dtype: str = "fp32", step: int | None = None) -> Path:
    """Write a checkpoint's weights into one safetensors file. Not a collective: call it on one rank, or afterwards.

    Trainable and frozen parameters have `dtype`, buffers their own. Tied parameters are written once; the file's metadata
    names their other keys.

    Args:
        root: a checkpoint, or a directory of them.
        target: the file to write.
        dtype: "fp32" (the masters), "fp16" or "bf16".
        step: which one; None is the latest.

    Raises:
        ValueError: another dtype, or a checkpoint without a model.
        OverflowError: a weight beyond the dtype's range.
        FileNotFoundError, CheckpointError: as of `shardmp.load`.
        FileExistsError: the target is a directory, a device, a link, or anything else that is not a regular file.
        OSError: the target cannot be written; what was there before is as it was.
    """
    if dtype not in DTYPES:
        raise ValueError(f"export(dtype=...): expected {', '.join(map(repr, DTYPES))}, got {dtype!r}")
    place = directory.named(target, "export(target)")
    refuse_odd(place)
    contents = Contents(directory.named(root, "export(directory)"), step)
    tied = contents.tied()
    buffers = {_PREFIX + name for name in contents.header.get("buffers", ())}
    saved = dict(contents.reader.tensors())
    names = sorted(name for name in saved if name.startswith(_PREFIX) and name not in tied)
    if not names:
        raise ValueError(f"{contents.path} has no model: no name begins with {_PREFIX!r}")
    kinds = {name: saved[name].properties.dtype for name in names}
    for name, kind in kinds.items():
        if kind.is_floating_point and name not in buffers:
            kinds[name] = DTYPES[dtype]
        if kinds[name] not in _SAFETENSORS or _key(name) == _ABOUT:
            raise ValueError(f"{name} is {kind}, for which safetensors has no word")
    about = {"format": "pt", "step": str(contents.manifest.step if contents.manifest else "")}
    about["tied"] = json.dumps({_key(alias): _key(name) for alias, name in tied.items() if name.startswith(_PREFIX)})
    header = _header(names, saved, kinds, about)
    _write(place, header, (_converted(contents.reader, name, kinds[name]) for name in names))
    return place


def _key(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _header(
    names: list[str], saved: dict[str, TensorStorageMetadata], kinds: dict[str, torch.dtype], about: dict[str, str]
) -> bytes:
    entries: dict[str, Any] = {_ABOUT: about}
    position = 0
    for name in names:
        end = position + saved[name].size.numel() * kinds[name].itemsize
        entries[_key(name)] = {
            "dtype": _SAFETENSORS[kinds[name]],
            "shape": list(saved[name].size),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _converted(reader: Reader, name: str, dtype: torch.dtype) -> Tensor:
    value = reader.read_tensor(name)
    found = value.to(dtype)
    if found.dtype != value.dtype and not torch.equal(found.isfinite(), value.isfinite()):
        raise OverflowError(
            f"{name} holds {value.abs().max().item()}, beyond the range of {dtype}: export as fp32 or bf16"
        )
    return found


def _write(target: Path, header: bytes, tensors: Iterator[Tensor]) -> None:
    with replacing(target) as file:
        file.write(header)
        for tensor in tensors:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    directory.sync_directory(target.parent)
