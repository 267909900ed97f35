"""A tensor in the bytes that `torch.save` would write, without a copy of its elements.

Owns:      the archive (zip, stored) around the elements: what comes before them and what comes after.
Takes:     dtype and sizes of a contiguous tensor, and the CRC-32 of its elements.
Gives:     head and tail: head + elements + tail is a file that `torch.load(weights_only=True)` reads.
Invariant: the tail and the head are a function of dtype, sizes and checksum alone.

`torch.save` of a view writes its whole storage, and so needs a clone of each piece first: half of a save's time.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from .checksum import crc32

LIMIT_32 = 2**32 - 1
STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
}


class _Storage:
    """Stands for the storage in the pickle."""

    def __init__(self, kind: type, numel: int) -> None:
        self.id = ("storage", kind, "0", "cpu", numel)


class _Rebuilt:
    """Stands for the tensor in the pickle: is rebuilt as torch rebuilds one."""

    def __init__(self, storage: _Storage, sizes: Sequence[int]) -> None:
        self._storage, self._sizes = storage, tuple(sizes)

    def __reduce__(self) -> Any:
        strides = tuple(math.prod(self._sizes[dim + 1 :]) for dim in range(len(self._sizes)))
        values: Any = (self._storage, 0, self._sizes, strides, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, values


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, _Storage) else None


def _pickled(dtype: torch.dtype, sizes: Sequence[int]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Rebuilt(_Storage(STORAGES[dtype], math.prod(sizes)), sizes))
    return stream.getvalue()


def wrap(dtype: torch.dtype, sizes: Sequence[int], crc: int, limit: int = LIMIT_32) -> tuple[bytes, bytes]:
    """(head, tail) of a tensor's archive.

    Args:
        crc: CRC-32 of the elements' bytes.
        limit: sizes and offsets from here on are written in 64 bits.
    """
    archive = _Archive(limit)
    for name, content in (("data.pkl", _pickled(dtype, sizes)), ("byteorder", b"little"), ("version", b"3\n")):
        archive.entry(name, len(content), crc32(content))
        archive.written += content
    length = math.prod(sizes) * dtype.itemsize
    archive.entry("data/0", length, crc)
    return bytes(archive.written), archive.end(len(archive.written) + length)


class _Archive:
    """A zip file whose entries are stored as they are."""

    def __init__(self, limit: int) -> None:
        self.written = bytearray()
        self._limit = limit
        self._directory = bytearray()
        self._count = 0

    def entry(self, name: str, length: int, crc: int) -> None:
        """The header of an entry, whose content must follow."""
        path = f"archive/{name}".encode()
        large = length >= self._limit
        size, version = (LIMIT_32, 45) if large else (length, 20)
        extra = struct.pack("<HHQQ", 1, 16, length, length) if large else b""
        offset = len(self.written)
        common = struct.pack("<HHHHHLLLHH", version, 0, 0, 0, 33, crc, size, size, len(path), len(extra))
        self.written += b"PK\3\4" + common + path + extra
        directory = struct.pack("<HHHLL", 0, 0, 0, 0, offset)
        self._directory += b"PK\1\2" + struct.pack("<H", version) + common + directory + path + extra
        self._count += 1

    def end(self, offset: int) -> bytes:
        """The directory, which begins at `offset`."""
        length, count = len(self._directory), self._count
        large = offset >= self._limit
        tail = bytes(self._directory)
        if large:
            record = struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, length, offset)
            tail += b"PK\6\6" + record + b"PK\6\7" + struct.pack("<LQL", 0, offset + length, 1)
        shown = LIMIT_32 if large else offset
        return tail + b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, count, count, length, shown, 0)
