"""The table of contents of a checkpoint: every file, every tensor's bytes in it, and their checksums.

Owns:      manifest.json, and what is an intact checkpoint.
Takes:     records of what was written; a directory.
Gives:     the manifest, or an error that names the file that is missing, truncated or altered.
Invariant: any byte of a checkpoint that is not what was written is found before it can reach a parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .checksum import crc32
from .regular_files import TABLE_LIMIT, CheckpointError, is_count, is_file_name, opened, read_whole, shown, size_of

__all__ = ["FORMAT", "MANIFEST", "METADATA", "STRETCH", "CheckpointError", "Manifest", "Record", "altered", "read_crc"]

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 1
STRETCH = 2**20  # bytes read at a time: their checksum is taken while they are in the cache


@dataclass(frozen=True)
class Record:
    """One archive in a file: `head` bytes, `data` bytes of elements, `tail` bytes, from `offset` on.

    What `torch.save` has made, which is not looked into, is all head.
    """

    offset: int
    head: int
    data: int
    tail: int
    shell_crc: int  # CRC-32 of head and tail
    data_crc: int

    @property
    def length(self) -> int:
        return self.head + self.data + self.tail

    @property
    def values(self) -> tuple[int, ...]:
        """As `Record(*values)` takes them."""
        return self.offset, self.head, self.data, self.tail, self.shell_crc, self.data_crc


@dataclass
class Manifest:
    """What a checkpoint holds; `metadata_crc` is the CRC-32 of DCP's own `.metadata`."""

    step: int
    ranks: int
    torch: str
    shardmp: str
    metadata_crc: int
    files: dict[str, int]
    records: dict[str, list[Record]] = field(default_factory=dict)

    def dump(self) -> bytes:
        """As JSON, with a checksum of its own."""
        body = {**self.__dict__, "format": FORMAT}
        body["records"] = {name: [r.values for r in found] for name, found in self.records.items()}
        return b'{"crc32":%d,"body":%s}\n' % (crc32(_canonical(body)), _canonical(body))

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read and check manifest.json.

        Raises:
            CheckpointError: it is missing or altered, or of a later format.
        """
        path = directory / MANIFEST
        try:
            whole = json.loads(read_whole(path, TABLE_LIMIT, _BEGINS))
            body: dict[str, Any] = whole["body"]
            intact = whole["crc32"] == crc32(_canonical(body))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: this checkpoint is not complete") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is truncated or altered: {error}") from None
        if not intact:
            raise CheckpointError(f"{path} is altered: it does not have the checksum that it states")
        try:
            return cls(**_checked(body))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def check_sizes(self, directory: Path) -> None:
        """That every file is there and as long as it was; looks at no content but that of `.metadata`.

        Raises:
            CheckpointError: the first file that is not.
        """
        for name, size in self.files.items():
            path = directory / name
            try:
                found = size_of(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; it had {size} bytes") from None
            if found != size:
                raise CheckpointError(f"{path} has {found} bytes; {size} were written")
        path = directory / METADATA
        with opened(path) as descriptor:
            crc = read_crc(descriptor, 0, self.files[METADATA], memoryview(bytearray(STRETCH)))
        if crc != self.metadata_crc:
            raise CheckpointError(f"{path} is altered: its checksum is not the one in {MANIFEST}")

    def check_contents(self, directory: Path, names: Sequence[str]) -> None:
        """That the named files have the bytes that were written.

        Raises:
            CheckpointError: the first place that has not.
        """
        buffer = memoryview(bytearray(STRETCH))
        for name in names:
            with opened(directory / name) as descriptor:
                for record in self.records[name]:
                    shell = read_crc(descriptor, record.offset, record.head, buffer)
                    tail = record.offset + record.head + record.data
                    shell = read_crc(descriptor, tail, record.tail, buffer, shell)
                    data = read_crc(descriptor, record.offset + record.head, record.data, buffer)
                    if (shell, data) != (record.shell_crc, record.data_crc):
                        raise altered(directory / name, record)


_BEGINS = b'{"crc32":'


def _checked(body: Any) -> dict[str, Any]:
    """The fields of a manifest, each compared with what it may be.

    Raises:
        ValueError: the first that may not be so, by its name.
    """
    if type(body) is not dict:
        raise ValueError(f"expected an object, found {shown(body)}")
    if body.pop("format", None) != FORMAT:
        written = f" was written by shardmp {body['shardmp']}" if "shardmp" in body else ""
        raise ValueError(f"it{written or ' is'} in a format that this shardmp cannot read")
    names = {field.name for field in fields(Manifest)}
    if body.keys() != names:
        odd = sorted(body.keys() ^ names)[0]
        raise ValueError(f"the field {shown(odd)} is {'missing' if odd in names else 'unknown'}")
    for name, most in (("step", 2**62), ("ranks", 2**24), ("metadata_crc", 2**32 - 1)):
        if not is_count(body[name], most):
            raise ValueError(f"{name}: expected a number from 0 to {most}, found {shown(body[name])}")
    for name in ("torch", "shardmp"):
        if type(body[name]) is not str or not body[name].isprintable() or len(body[name]) > 100:
            raise ValueError(f"{name}: expected a version, found {shown(body[name])}")
    for name in ("files", "records"):
        if type(body[name]) is not dict or not all(map(is_file_name, body[name])):
            raise ValueError(f"{name}: expected names of files in the checkpoint's directory")
    for name, size in body["files"].items():
        if not is_count(size):
            raise ValueError(f"files: expected the bytes of {name}, found {shown(size)}")
    if METADATA not in body["files"]:
        raise ValueError(f"files: {METADATA} is missing")
    return {**body, "records": {name: _records(name, found, body["files"]) for name, found in body["records"].items()}}


def _records(name: str, found: Any, sizes: dict[str, int]) -> list[Record]:
    """The archives in a file, one behind the other."""
    width = len(fields(Record))
    if type(found) is not list or any(
        type(values) is not list or len(values) != width or any(type(value) is not int for value in values)
        for values in found
    ):
        raise ValueError(f"records: expected lists of {width} numbers for {name}")
    made, end = [], 0
    for values in found:
        record = Record(*values)
        if min(values) < 0 or record.offset != end or max(record.shell_crc, record.data_crc) >= 2**32:
            raise ValueError(f"records: that at {shown(record.offset)} of {name} is not behind the one before")
        end += record.length
        made.append(record)
    if end != sizes.get(name):
        raise ValueError(f"records: those of {name} have {shown(end)} bytes, the file has {sizes.get(name)}")
    return made


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def altered(path: Path, record: Record, what: str = "") -> CheckpointError:
    """The error of bytes whose checksum is wrong."""
    where = f"bytes {record.offset} to {record.offset + record.length}" + (f" ({what})" if what else "")
    return CheckpointError(f"{path} is altered: {where} do not have the checksum that was written")


def read_crc(descriptor: int, offset: int, length: int, buffer: memoryview, crc: int = 0) -> int:
    """CRC-32 of a stretch of a file; of what there is of it where the file ends before."""
    while length:
        count = os.preadv(descriptor, [buffer[: min(length, len(buffer))]], offset)
        if not count:
            return ~crc
        crc = crc32(buffer[:count], crc)
        offset, length = offset + count, length - count
    return crc
