"""DCP's metadata, from a pickle that anybody may have written.

Owns:      which records and fields it has, and what must hold between its tables and the files.
Takes:     `.metadata`, and the values of a checkpoint that are not tensors.
Gives:     DCP's metadata and plain values; an error that names the file and the field for everything else.
Invariant: the file is read into records of ours (see pickle_reading.py), and torch's classes are made here, of checked
           fields. Every tensor is covered by its boxes exactly once, and every box by bytes that are there.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .archive_reading import PLAIN_MAKERS, read_archive
from .manifest import METADATA, CheckpointError, Manifest
from .pickle_reading import PickleError, Record, read_pickle
from .regular_files import TABLE_LIMIT, is_count, is_file_name, is_tensor_name, opened, shown, size_of

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_MOST_CORNERS = 2**22  # of the boxes of a tensor; a box has 2^dims of them
_Place = tuple[str, int, int]  # file, offset, length


def read_metadata(path: Path, manifest: Manifest | None = None) -> Metadata:
    """DCP's `.metadata` of the checkpoint at `path`. `planner_data` and `storage_meta`, which nothing needs, are None.

    Args:
        manifest: the checkpoint's own, where it has one: the tables must agree.

    Raises:
        CheckpointError: it is missing or damaged, or states what the files cannot hold.
    """
    where = path / METADATA
    try:
        return _Tables(path, manifest).metadata(_unpickled(where))
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or where} is missing") from None
    except PickleError as error:
        raise CheckpointError(f"{where} was not unpickled: {error}") from None


def _unpickled(where: Path) -> Any:
    """The records in the file, which is mapped: of a huge one no more is in memory than was looked at."""
    with opened(where) as descriptor:
        size = os.fstat(descriptor).st_size
        if not 0 < size <= TABLE_LIMIT:
            raise PickleError(f"it has {size} bytes; expected 1 to {TABLE_LIMIT}")
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
            return read_pickle(data, PLAIN_MAKERS)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes that a record states.

    Raises:
        PickleError: it is of another class.
    """
    if not isinstance(value, Record) or value.kind.name != kind or value.kind.module not in _MODULES:
        found = str(value.kind) if isinstance(value, Record) else shown(value)
        raise PickleError(f"expected {kind}, found {found}")
    if value.state is not None and not isinstance(value.state, dict):
        raise PickleError(f"{kind} has {shown(value.state)} in place of fields")
    return value.state or {}


class _Tables:
    """Makes torch's tables of records, and compares them with the files."""

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        self._path = path
        self._manifest = manifest
        self._sizes: dict[str, int] = dict(manifest.files) if manifest else {}
        self._records = {
            (name, record.offset): record
            for name, records in (manifest.records.items() if manifest else ())
            for record in records
        }

    def metadata(self, found: Any) -> Metadata:
        """The whole of it."""
        fields = _fields(found, "Metadata")
        entries, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        if type(entries) is not dict or type(stored) is not dict:
            raise PickleError("state_dict_metadata and storage_data: expected two dicts")
        tensors = {name: self._entry(name, value) for name, value in entries.items()}
        places = dict(self._place(index, info) for index, info in stored.items())
        if len(places) != len(stored):
            raise PickleError("storage_data has two places of one chunk")
        for index in places:
            if index.fqn not in tensors:
                raise PickleError(f"storage_data has {shown(index.fqn)}, of which nothing else is said")
        for name, entry in tensors.items():
            if isinstance(entry, TensorStorageMetadata):
                self._check_boxes(name, entry, places)
            elif MetadataIndex(name) not in places:
                raise PickleError(f"{shown(name)} is in no file")
        self._check_files(tensors, places)
        version = fields.get("version")
        return Metadata(tensors, storage_data=places, version=version if isinstance(version, str) else None)

    def _entry(self, name: Any, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if not is_tensor_name(name):
            raise PickleError(f"{shown(name)} is not the name of a tensor")
        if isinstance(value, Record) and value.kind.name == "BytesStorageMetadata":
            _fields(value, "BytesStorageMetadata")
            return BytesStorageMetadata()
        fields = _fields(value, "TensorStorageMetadata")
        size, boxes = fields.get("size"), fields.get("chunks")
        if type(size) is not torch.Size or type(boxes) is not list:
            raise PickleError(f"{shown(name)}: expected a size and a list of chunks")
        return TensorStorageMetadata(
            TensorProperties(dtype=_dtype(name, fields.get("properties"))),
            size,
            [_box(name, box, size) for box in boxes],
        )

    def _place(self, index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
        key, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name: Any = key.get("fqn")
        offset: Any = key.get("offset")
        if not is_tensor_name(name) or not (offset is None or type(offset) is torch.Size):
            raise PickleError(f"storage_data: expected a name and an offset, found {shown(name)} and {shown(offset)}")
        file: Any = place.get("relative_path")
        begin: Any = place.get("offset")
        length: Any = place.get("length")
        if not is_file_name(file):
            raise PickleError(f"{shown(name)}: it names a file outside of the checkpoint: {shown(file)}")
        if not is_count(begin) or not is_count(length) or not length:
            raise PickleError(f"{shown(name)}: offset {shown(begin)} and length {shown(length)} in {file}")
        if place.get("transform_descriptors"):
            raise PickleError(f"{shown(name)} is compressed in {file}, which is not read")
        return MetadataIndex(name, offset), _StorageInfo(file, begin, length)

    def _check_boxes(
        self, name: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]
    ) -> None:
        """That the boxes are the tensor, and that each has bytes enough."""
        if entry.size.numel() and not _is_covered(entry.size, entry.chunks):
            raise PickleError(f"{shown(name)}: its chunks do not cover its shape {tuple(entry.size)} exactly once")
        for box in entry.chunks:
            needed = math.prod(box.sizes) * entry.properties.dtype.itemsize
            info = places.get(MetadataIndex(name, box.offsets))
            if info is None and needed:
                raise PickleError(f"{shown(name)}: its chunk at {tuple(box.offsets)} is in no file")
            if info is not None and info.length < needed:
                raise PickleError(
                    f"{shown(name)}: its chunk at {tuple(box.offsets)} needs {needed} bytes, has {info.length}"
                )
            record = self._records.get((info.relative_path, info.offset)) if info else None
            if record is not None and record.data not in (0, needed):
                raise PickleError(
                    f"{shown(name)}: its chunk at {tuple(box.offsets)} needs {needed} bytes, the manifest says {record.data}"
                )

    def _check_files(self, tensors: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo]) -> None:
        """That every stretch is in its file, and is one tensor's; tied weights of a model share theirs."""
        owners: dict[_Place, str] = {}
        for index, info in places.items():
            place = info.relative_path, info.offset, info.length
            record = self._records.get(place[:2])
            if self._manifest is not None and (record is None or record.length != info.length):
                raise PickleError(f"{shown(index.fqn)} is at {_told(place)}, of which the manifest says nothing")
            owner = owners.setdefault(place, index.fqn)
            is_tie = index.fqn.startswith("model.") and tensors[owner] == tensors[index.fqn]
            if owner != index.fqn and not is_tie:
                raise PickleError(f"{shown(owner)} and {shown(index.fqn)} are both at {_told(place)}")
        end, last = 0, ""
        for place in sorted(owners):
            file, begin, length = place
            if file == last and begin < end:
                raise PickleError(f"{shown(owners[place])} at {_told(place)} begins within another")
            if begin + length > self._size(file):
                raise PickleError(f"{shown(owners[place])} is at {_told(place)}, which has {self._size(file)} bytes")
            last, end = file, begin + length

    def _size(self, file: str) -> int:
        if file not in self._sizes:
            self._sizes[file] = size_of(self._path / file)
        return self._sizes[file]


def _told(place: _Place) -> str:
    return f"bytes {place[1]} to {place[1] + place[2]} of {place[0]}"


def _dtype(name: str, properties: Any) -> torch.dtype:
    """Of a tensor's properties, whose other fields torch has given up.

    They are a tuple: dtype, layout, requires_grad, memory format, pin_memory.
    """
    kind = properties.kind.name if isinstance(properties, Record) else ""
    state = properties.state if kind == "TensorProperties" and properties.kind.module in _MODULES else None
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[0], torch.dtype):
        raise PickleError(f"{shown(name)}: expected the properties of a tensor, with its dtype")
    if state[1] is not torch.strided:
        raise PickleError(f"{shown(name)}: expected the layout torch.strided")
    return state[0]


def _box(name: str, value: Any, size: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata")
    offsets, sizes = fields.get("offsets"), fields.get("sizes")
    if type(offsets) is not torch.Size or type(sizes) is not torch.Size or not len(offsets) == len(sizes) == len(size):
        raise PickleError(f"{shown(name)}: a chunk has not the {len(size)} dimensions of its shape")
    if any(lo + length > whole for lo, length, whole in zip(offsets, sizes, size, strict=True)):
        raise PickleError(f"{shown(name)}: a chunk of {tuple(sizes)} at {tuple(offsets)} is beyond {tuple(size)}")
    return ChunkStorageMetadata(offsets, sizes)


def _is_covered(size: Sequence[int], boxes: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the boxes cover a shape exactly once.

    A box is the sum, over its corners, of all that lies beyond a corner, with alternating signs. So two sums of boxes are
    the same where their corners cancel out, and that takes no comparison of boxes with each other.
    """
    filled = [box for box in boxes if all(box.sizes)]
    cut = [dim for dim, whole in enumerate(size) if any(box.sizes[dim] != whole for box in filled)]
    if not cut:
        return len(filled) == 1
    if len(filled) << len(cut) > _MOST_CORNERS:
        raise PickleError(f"a tensor is cut into {len(filled)} chunks")
    corners: dict[tuple[int, ...], int] = {}
    stretches = [[(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in cut] for box in filled]
    for ends, weight in (*((ends, 1) for ends in stretches), ([(0, size[dim]) for dim in cut], -1)):
        for sides in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(end[side] for end, side in zip(ends, sides, strict=True))
            corners[corner] = corners.get(corner, 0) + weight * (-1) ** sum(sides)
    return not any(corners.values())


class SafePlanner(DefaultLoadPlanner):
    """DCP's own planner on a flat state dict, except that what it unpickles may only be plain values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """One value that is not a tensor."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = read_archive(bytearray(value.getbuffer()))
        except ValueError as error:
            raise CheckpointError(f"{name} was not unpickled: {error}") from None
