"""Reading and writing a checkpoint's files, for torch.distributed.checkpoint (DCP).

Owns:      DCP's storage writer and reader.
Takes:     DCP's plans; this rank's tensors, or where their values are to go.
Gives:     one file a rank in DCP's own format, which plain DCP reads, with a manifest beside it.
Invariant: a tensor is written from where it lies and read to where it belongs, and its checksum is compared on the way;
           nothing that is read can run code: see unpickling.py.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from . import container, directory
from .archive_reading import read_archive
from .checksum import crc32
from .manifest import MANIFEST, METADATA, STRETCH, CheckpointError, Manifest, Record, altered
from .new_file import NewFile
from .regular_files import opened

_SIGN = 2**26  # bytes of one tensor after which a writer says that it goes on


class Told:
    """Who is told where a rank is: nobody, where it is alone with its files."""

    def at(self, place: str) -> None:
        """It is there now."""

    def moved(self) -> None:
        """It has got on."""


# -- writing


@dataclass(frozen=True)
class _Written:
    """What a rank has written: travels to rank 0 as DCP's storage data, in plain tuples, of which there may be many.

    `items` are (name, offsets or None, the record's values).
    """

    file: str
    items: list[tuple[str, tuple[int, ...] | None, tuple[int, ...]]]


class Writer(StorageWriter):
    """Writes a checkpoint into `path`, an empty directory, and makes it complete.

    Args:
        aliases: further names of tensors, by the name under which they are written (tied parameters).
        about: the manifest's other entries.
        past_cache: write what takes the least CPU time, not what is done soonest: see new_file.py.
        joint: is told which file this rank is at.
    """

    def __init__(
        self,
        path: Path,
        aliases: Mapping[str, str],
        about: Mapping[str, Any],
        past_cache: bool,
        joint: Told | None = None,
    ) -> None:
        self._joint = joint or Told()
        self.path = path
        self._aliases = aliases
        self._about = about
        self._past_cache = past_cache

    def reset(self, checkpoint_id: Any = None) -> None:
        """DCP's: the path is given already."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP's: nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """DCP's: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """A file for each rank."""
        return [replace(plan, storage_data=self.file_name(rank)) for rank, plan in enumerate(plans)]

    @staticmethod
    def file_name(rank: int) -> str:
        """A rank's file, named as DCP's own writer does."""
        return f"__{rank}_0.distcp"

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's items into its file, one after the other, and sync it."""
        written = _Written(plan.storage_data, [])
        size = 0
        if plan.items:
            self._joint.at(f"writing {self.path / written.file}")
            with NewFile(self.path / written.file, self._past_cache) as file:
                for item in plan.items:
                    record = _write_item(file, item, planner.resolve_data(item), self._joint)
                    where = None if item.index.offset is None else tuple(item.index.offset)
                    written.items.append((item.index.fqn, where, record.values))
                self._joint.at(f"syncing {self.path / written.file}")
                file.finish()
                size = file.size
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(written.file), size, written)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are on the disk: `.metadata`, the manifest, and the name of a complete checkpoint."""
        records: dict[str, list[Record]] = {}
        found: dict[MetadataIndex, _StorageInfo] = {}
        for written in (result.storage_data for rank in results for result in rank):
            for name, offsets, values in written.items:
                record = Record(*values)
                records.setdefault(written.file, []).append(record)
                index = MetadataIndex(name, offsets)
                found[index] = _StorageInfo(written.file, record.offset, record.length)
        metadata.storage_data = found
        metadata.storage_meta = StorageMeta()
        metadata.version = "1.0.0"
        self._add_aliases(metadata)
        content = pickle.dumps(metadata)
        sizes = {name: kept[-1].offset + kept[-1].length for name, kept in records.items()}
        sizes[METADATA] = len(content)
        manifest = Manifest(metadata_crc=crc32(content), files=sizes, records=records, **self._about)
        for file_name, text in ((METADATA, content), (MANIFEST, manifest.dump())):
            self._joint.at(f"writing {self.path / file_name}")
            with (self.path / file_name).open("xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        self._joint.at(f"completing {directory.committed(self.path)}")
        directory.commit(self.path)

    def _add_aliases(self, metadata: Metadata) -> None:
        """A tied parameter is in the file once, and in the table under each of its names."""
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = ("model", alias.removeprefix("model."))
            for index, info in list(metadata.storage_data.items()):
                if index.fqn == name:
                    metadata.storage_data[MetadataIndex(alias, index.offset, index.index)] = info

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """DCP's."""
        return True


def _write_item(file: NewFile, item: WriteItem, value: Tensor | io.BytesIO, joint: Told) -> Record:
    offset = file.size
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype in container.STORAGES and value.numel():
            data = _bytes_of(value.contiguous())
            crc = crc32(data)
            head, tail = container.wrap(value.dtype, value.shape, crc)
            file.write(head)
            for at in range(0, len(data), _SIGN):
                file.write(data[at : at + _SIGN])
                joint.moved()
            file.write(tail)
            return Record(offset, len(head), len(data), len(tail), crc32(tail, crc32(head)), crc)
        stream = io.BytesIO()
        torch.save(value.clone(), stream)
        value = stream
    blob = value.getbuffer()
    file.write(blob)
    joint.moved()
    return Record(offset, len(blob), 0, 0, crc32(blob), 0)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read or to write."""
    values: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(values)


# -- reading


class Reader(StorageReader):
    """Reads a checkpoint; of one that plain DCP has written there is no manifest, and nothing is compared."""

    def __init__(self, path: Path, metadata: Metadata, manifest: Manifest | None, joint: Told | None = None) -> None:
        self.path = path
        self._joint = joint or Told()
        self.metadata = metadata
        self._records: dict[tuple[str, int], Record] = {}
        for name, records in manifest.records.items() if manifest else ():
            self._records.update({(name, record.offset): record for record in records})
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reset(self, checkpoint_id: Any = None) -> None:
        """DCP's: the path is given already."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP's: nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """DCP's: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """DCP's: nothing to add."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """DCP's."""
        return True

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read each archive that this rank needs a part of once, in the order of the files."""
        items = sorted(plan.items, key=lambda item: self._place(item.storage_index))
        for name, in_file in groupby(items, key=lambda item: self._place(item.storage_index)[0]):
            with self._opened(name) as descriptor:
                archives = [list(group) for _, group in groupby(in_file, key=lambda i: self._place(i.storage_index))]
                self._read_ahead(descriptor, [archive[0].storage_index for archive in archives])
                for archive in archives:
                    self._read(descriptor, archive, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_ahead(self, descriptor: int, indices: Sequence[MetadataIndex]) -> None:
        """Let the disk work while checksums are computed."""
        (_, first, _), (_, last, length) = self._place(indices[0]), self._place(indices[-1])
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(descriptor, first, last + length - first, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        self._joint.at(f"reading {self.path / name}")
        try:
            with opened(self.path / name) as descriptor:
                yield descriptor
        except FileNotFoundError:
            raise CheckpointError(f"{self.path / name} is missing") from None

    def _place(self, index: MetadataIndex) -> tuple[str, int, int]:
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self.path / METADATA}: {index.fqn} is in no file")
        return info.relative_path, info.offset, info.length

    def _read(self, descriptor: int, items: Sequence[ReadItem], planner: Any) -> None:
        index = items[0].storage_index
        if items[0].type == LoadItemType.BYTE_IO:
            stream = io.BytesIO(self._blob(descriptor, index))
            for item in items:
                planner.load_bytes(item, stream)
            return
        targets = [planner.resolve_tensor(item).detach() for item in items]
        first = targets[0]
        record = self._record(index)
        whole = len(items) == 1 and record.data == first.nbytes and first.dtype == self._dtype(index)
        if whole and first.device.type == "cpu" and first.is_contiguous():
            self._read_data(descriptor, index, record, _bytes_of(first))
        else:
            chunk = self.read_chunk(descriptor, index)
            for item, target in zip(items, targets, strict=True):
                part = chunk
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target.copy_(part)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def read_chunk(self, descriptor: int, index: MetadataIndex) -> Tensor:
        """One box of a tensor; good until the next one is read."""
        record = self._record(index)
        if not record.data:
            blob = self._blob(descriptor, index)
            try:
                found = read_archive(blob)
            except ValueError as error:
                raise CheckpointError(f"{self._where(index)} was not read: {error}") from None
            sizes, dtype = torch.Size(self._sizes(index)), self._dtype(index)
            if not isinstance(found, Tensor) or found.shape != sizes or found.dtype != dtype:
                raise CheckpointError(f"{self._where(index)} is not a tensor of {dtype} with the shape {tuple(sizes)}")
            return found
        if self._scratch.numel() < record.data:
            self._scratch = torch.empty(record.data, dtype=torch.uint8, device="cpu")
        data = self._scratch[: record.data]
        self._read_data(descriptor, index, record, _bytes_of(data))
        return data.view(self._dtype(index)).view(self._sizes(index))

    def _record(self, index: MetadataIndex) -> Record:
        name, offset, length = self._place(index)
        return self._records.get((name, offset)) or Record(offset, length, 0, 0, -1, 0)

    def _tensor(self, index: MetadataIndex) -> TensorStorageMetadata:
        return self._named(index.fqn)

    def _named(self, name: str) -> TensorStorageMetadata:
        found = self.metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{self.path / METADATA}: {name} is not a tensor")
        return found

    def _dtype(self, index: MetadataIndex) -> torch.dtype:
        return self._tensor(index).properties.dtype

    def _sizes(self, index: MetadataIndex) -> Sequence[int]:
        return next(chunk.sizes for chunk in self._tensor(index).chunks if chunk.offsets == index.offset)

    def _where(self, index: MetadataIndex) -> str:
        name, offset, length = self._place(index)
        return f"{self.path / name}: {index.fqn} in bytes {offset} to {offset + length}"

    def _read_data(self, descriptor: int, index: MetadataIndex, record: Record, data: memoryview) -> None:
        shell = memoryview(bytearray(record.head + record.tail))
        offset = record.offset + record.head
        shell_crc = self._fill(descriptor, index, record.offset, shell[: record.head])
        data_crc = self._fill(descriptor, index, offset, data)
        shell_crc = self._fill(descriptor, index, offset + record.data, shell[record.head :], shell_crc)
        if (shell_crc, data_crc) != (record.shell_crc, record.data_crc):
            raise altered(self.path / self._place(index)[0], record, index.fqn)

    def _blob(self, descriptor: int, index: MetadataIndex) -> bytearray:
        record = self._record(index)
        blob = bytearray(record.length)
        crc = self._fill(descriptor, index, record.offset, memoryview(blob))
        if record.shell_crc not in (-1, crc):
            raise altered(self.path / self._place(index)[0], record, index.fqn)
        return blob

    def _fill(self, descriptor: int, index: MetadataIndex, offset: int, part: memoryview, crc: int = 0) -> int:
        """Read the bytes from `offset` on; their CRC-32, which goes on from `crc`."""
        while part:
            count = os.preadv(descriptor, [part[:STRETCH]], offset)
            if not count:
                raise CheckpointError(f"{self._where(index)}: the file ends before")
            self._joint.moved()
            crc = crc32(part[:count], crc)
            part, offset = part[count:], offset + count
        return crc

    def read_value(self, name: str) -> Any:
        """A value that is not a tensor; tensors and plain values alone are unpickled.

        Raises:
            CheckpointError: it is not as it was written.
        """
        index = MetadataIndex(name)
        with self._opened(self._place(index)[0]) as descriptor:
            blob = self._blob(descriptor, index)
        try:
            return read_archive(blob)
        except ValueError as error:
            raise CheckpointError(f"{self._where(index)} was not read: {error}") from None

    def read_tensor(self, name: str) -> Tensor:
        """One whole tensor, from all the boxes that it was written in."""
        found = self._named(name)
        whole = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        for chunk in found.chunks:
            index = MetadataIndex(name, chunk.offsets)
            if not math.prod(chunk.sizes):
                continue
            with self._opened(self._place(index)[0]) as descriptor:
                target = whole
                for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    target = target.narrow(dim, start, length)
                target.copy_(self.read_chunk(descriptor, index))
        return whole

    def tensors(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        """All tensors by name."""
        for name, found in self.metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                yield name, found
