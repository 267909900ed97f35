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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checksum import crc32

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 1
STRETCH = 2**20  # bytes read at a time: their checksum is taken while they are in the cache


class CheckpointError(RuntimeError):
    """A checkpoint's files are not what was written."""


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
            whole = json.loads(path.read_bytes())
            body: dict[str, Any] = whole["body"]
            intact = whole["crc32"] == crc32(_canonical(body))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: this checkpoint is not complete") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is truncated or altered: {error}") from None
        if not intact:
            raise CheckpointError(f"{path} is altered: it does not have the checksum that it states")
        if body.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path} was written by shardmp {body['shardmp']}, in a format that this one cannot read"
            )
        body["records"] = {name: [Record(*values) for values in found] for name, found in body["records"].items()}
        return cls(**body)

    def check_sizes(self, directory: Path) -> None:
        """That every file is there and as long as it was; looks at no content but that of `.metadata`.

        Raises:
            CheckpointError: the first file that is not.
        """
        for name, size in self.files.items():
            path = directory / name
            try:
                found = path.stat().st_size
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; it had {size} bytes") from None
            if found != size:
                raise CheckpointError(f"{path} has {found} bytes; {size} were written")
        path = directory / METADATA
        if crc32(path.read_bytes()) != self.metadata_crc:
            raise CheckpointError(f"{path} is altered: its checksum is not the one in {MANIFEST}")

    def check_contents(self, directory: Path, names: Sequence[str]) -> None:
        """That the named files have the bytes that were written.

        Raises:
            CheckpointError: the first place that has not.
        """
        buffer = memoryview(bytearray(STRETCH))
        for name in names:
            with (directory / name).open("rb", buffering=0) as file:
                for record in self.records[name]:
                    shell = read_crc(file.fileno(), record.offset, record.head, buffer)
                    tail = record.offset + record.head + record.data
                    shell = read_crc(file.fileno(), tail, record.tail, buffer, shell)
                    data = read_crc(file.fileno(), record.offset + record.head, record.data, buffer)
                    if (shell, data) != (record.shell_crc, record.data_crc):
                        raise altered(directory / name, record)


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
