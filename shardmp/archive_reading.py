"""Values and tensors from the archives of `torch.save`, by a reader of ours.

Owns:      the zip directory, the names that a value's pickle may call, and the tensors among the values.
Takes:     the bytes of an archive that anybody may have written: a piece of a file, or a mapped file.
Gives:     plain values, tensors that are views of those bytes, and records of everything else.
Invariant: no size is believed before it has been compared with the bytes that are there; nothing is decompressed.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checksum import crc32
from .pickle_reading import DTYPES, Global, PickleError, check_plain, checked_key, read_pickle
from .regular_files import shown

_END, _END_64, _WHERE_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_FULL_16, _FULL_32 = 2**16 - 1, 2**32 - 1
_AT_ONCE = 2**20
_MOST_DIMS = 64  # of a tensor in torch
_TENSOR_CLASSES = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))


class ArchiveError(ValueError):
    """The bytes are not an archive of `torch.save`."""


def read_archive(data: Any, records: bool = False) -> Any:
    """The value in an archive.

    Args:
        data: a writable buffer; tensors are views of it.
        records: give records of objects of unknown classes; otherwise they are an error.

    Raises:
        ArchiveError, PickleError: it is damaged, compressed, or holds what is not read here.
    """
    archive = _Archive(data)
    content = archive.content("data.pkl")
    order = archive.entries.get("byteorder")
    if order is not None and bytes(archive.content("byteorder")) != b"little":
        raise ArchiveError("it was written on a machine of another byte order")
    makers = {**PLAIN_MAKERS, **archive.makers()}
    value = read_pickle(content, makers, archive.find_storage)
    check_plain(value, len(content), records)
    return value


@dataclass(frozen=True)
class _Entry:
    """A member: where its bytes are, and their CRC-32; 0 where torch was told to compute none."""

    begin: int
    length: int
    crc: int


@dataclass(frozen=True)
class _Storage:
    """The bytes of a storage, and the dtype that its class says; None where the tensor says it."""

    data: Tensor
    dtype: torch.dtype | None


class _Archive:
    def __init__(self, data: Any) -> None:
        self._data = memoryview(data)
        self._bytes = torch.frombuffer(data, dtype=torch.uint8) if len(data) else None
        self.entries = dict(_entries(self._data))
        self._storages: dict[tuple[str, torch.dtype | None], _Storage] = {}
        self._left = 16 * len(data) + 2**24  # bytes of tensors, of which several may be views of the same

    def content(self, name: str) -> memoryview:
        """The bytes of a member, compared with its checksum."""
        entry = self.entries.get(name)
        if entry is None:
            raise ArchiveError(f"{name} is missing in it")
        found = self._data[entry.begin : entry.begin + entry.length]
        crc = 0
        for at in range(0, entry.length if entry.crc else 0, _AT_ONCE):
            crc = crc32(found[at : at + _AT_ONCE], crc)
        if crc != entry.crc:
            raise ArchiveError(f"{name} in it does not have the checksum that was written")
        return found

    def find_storage(self, about: Any) -> _Storage:
        """The storage that a persistent id names: ("storage", class, key, device, number of elements)."""
        if type(about) is not tuple or len(about) != 5 or about[0] != "storage":
            raise PickleError("a persistent id that is not of a storage")
        kind, key, count = about[1], about[2], about[4]
        if kind not in _STORAGES or type(key) is not str or type(count) is not int:
            raise PickleError(f"a storage of the class {kind if isinstance(kind, Global) else shown(kind)}")
        dtype = _STORAGES[kind]
        if (key, dtype) not in self._storages:
            length = len(self.content(f"data/{key}"))
            if count != length // (dtype.itemsize if dtype else 1) or length % (dtype.itemsize if dtype else 1):
                raise PickleError(f"storage {shown(key)} states {shown(count)} elements, and has {length} bytes")
            begin = self.entries[f"data/{key}"].begin
            assert self._bytes is not None
            self._storages[key, dtype] = _Storage(self._bytes[begin : begin + length], dtype)
        return self._storages[key, dtype]

    def makers(self) -> dict[tuple[str, str], Callable[..., Any]]:
        """What makes tensors; their attributes, hooks and whether they want a gradient are not looked at."""

        def of_dtype(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
            return self._tensor(storage, offset, size, stride, None)

        def with_dtype(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any) -> Tensor:
            return self._tensor(storage, offset, size, stride, dtype)

        def parameter(value: Any, *rest: Any) -> Tensor:
            if not isinstance(value, Tensor):
                raise PickleError(f"a parameter of {shown(value)}")
            return value

        def with_attributes(function: Any, kind: Any, arguments: Any, *rest: Any) -> Tensor:
            if function not in made or kind not in _TENSOR_CLASSES or type(arguments) is not tuple:
                raise PickleError(f"a tensor of the class {kind if isinstance(kind, Global) else shown(kind)}")
            return made[function](*arguments)

        made: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): of_dtype,
            ("torch._utils", "_rebuild_tensor_v3"): with_dtype,
            ("torch._utils", "_rebuild_parameter"): parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): parameter,
        }
        return {**made, ("torch._tensor", "_rebuild_from_type_v2"): with_attributes}

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> Tensor:
        """A view of a storage; never of more elements than the storage has."""
        if not isinstance(storage, _Storage) or (dtype is not None and dtype not in _TENSOR_DTYPES):
            raise PickleError(f"a tensor of {shown(storage)} and {shown(dtype)}")
        dtype = dtype or storage.dtype
        sizes, strides = _dims(size), _dims(stride)
        if dtype is None or len(sizes) != len(strides) or type(offset) is not int or offset < 0:
            raise PickleError("a tensor whose dtype, sizes, strides and offset do not fit together")
        count, last = 1, offset
        for length, step in zip(sizes, strides, strict=True):
            count *= length
            last += (length - 1) * step
        there = storage.data.numel() // dtype.itemsize
        if count and (last >= there or count > there):
            raise PickleError(f"a tensor of {shown(count)} elements up to {shown(last)} in a storage of {there}")
        self._left -= count * dtype.itemsize
        if self._left < 0:
            raise PickleError("its tensors are views of the same bytes too often")
        if not count:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        data = storage.data[: there * dtype.itemsize]
        if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
            data = data.clone()
        return torch.as_strided(data.view(dtype), sizes, strides, data.view(dtype).storage_offset() + offset)


def _dims(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, torch.Size) or len(value) > _MOST_DIMS:
        raise PickleError("the sizes of a tensor are not a short tuple")
    if any(type(number) is not int or not 0 <= number < 2**62 for number in value):
        raise PickleError("a size or stride of a tensor is not a number from 0 on")
    return tuple(value)


# -- the zip directory


def _entries(data: memoryview) -> Any:
    """(name, entry) of all members, named without the folder that all are in."""
    directory, count = _directory(data)
    at, folder = 0, None
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise ArchiveError("its directory is truncated")
        mark, _, _, flags, method, _, _, crc, packed, length, *more = _ENTRY.unpack_from(directory, at)
        named, extra, comment, _, _, _, offset = more
        if mark != b"PK\1\2":
            raise ArchiveError("its directory is damaged")
        at += _ENTRY.size
        text, fields = bytes(directory[at : at + named]), bytes(directory[at + named : at + named + extra])
        at += named + extra + comment
        if at > len(directory):
            raise ArchiveError("its directory is truncated")
        length, packed, offset = _wide(fields, length, packed, offset)
        name = text.decode("utf-8", "replace")
        if method or packed != length or flags & 1:
            raise ArchiveError(f"{shown(name)} in it is compressed or encrypted, which torch.save does not do")
        first, _, rest = name.partition("/")
        folder = first if folder is None else folder
        if first != folder or not re.fullmatch(r"[A-Za-z0-9_./-]{1,200}", rest):
            raise ArchiveError(f"{shown(name)} in it is not a name that torch.save gives")
        yield rest, _Entry(_content(data, text, offset, length), length, crc)
    if at != len(directory):
        raise ArchiveError("its directory has other entries than it states")


def _directory(data: memoryview) -> tuple[memoryview, int]:
    """The directory's bytes, and how many entries it states."""
    end = len(data) - _END.size
    if end < 0 or bytes(data[end : end + 4]) != b"PK\5\6":
        raise ArchiveError("it is not an archive of torch.save, or is truncated")
    _, _, _, _, count, length, offset, _ = _END.unpack_from(data, end)
    if count == _FULL_16 or _FULL_32 in (length, offset):
        locator = end - _WHERE_64.size
        if locator < 0:
            raise ArchiveError("its directory is truncated")
        mark, _, end, _ = _WHERE_64.unpack_from(data, locator)
        if mark != b"PK\6\7" or end > locator - _END_64.size:
            raise ArchiveError("its directory is damaged")
        mark, _, _, _, _, _, _, count, length, offset = _END_64.unpack_from(data, end)
        if mark != b"PK\6\6":
            raise ArchiveError("its directory is damaged")
    if offset + length > end or count * _ENTRY.size > length:
        raise ArchiveError(f"its directory states {count} entries in {length} bytes from {offset} on")
    return data[offset : offset + length], count


def _wide(fields: bytes, *values: int) -> list[int]:
    """Sizes and offset, of which those that 32 bits do not hold are in the extra field of kind 1."""
    found, at = list(values), 0
    wanted = [index for index, value in enumerate(values) if value == _FULL_32]
    while wanted and at + 4 <= len(fields):
        kind, length = struct.unpack_from("<HH", fields, at)
        if kind == 1 and length >= 8 * len(wanted) and at + 4 + 8 * len(wanted) <= len(fields):
            for index, value in zip(wanted, struct.unpack_from(f"<{len(wanted)}Q", fields, at + 4), strict=True):
                found[index] = value
            return found
        at += 4 + length
    if wanted:
        raise ArchiveError("a size in its directory is missing")
    return found


def _content(data: memoryview, name: bytes, offset: int, length: int) -> int:
    """Where a member's bytes begin."""
    if offset + _LOCAL.size > len(data):
        raise ArchiveError(f"{shown(name)} in it begins behind its end")
    mark, *_, named, extra = _LOCAL.unpack_from(data, offset)
    begin = offset + _LOCAL.size + named + extra
    if mark != b"PK\3\4" or bytes(data[offset + _LOCAL.size : offset + _LOCAL.size + named]) != name:
        raise ArchiveError(f"{shown(name)} in it has another header than its directory says")
    if begin + length > len(data):
        raise ArchiveError(f"{shown(name)} in it has {length} bytes, {max(0, len(data) - begin)} are there")
    return begin


# -- what values are made of


def _size(values: Any) -> torch.Size:
    if type(values) not in (tuple, list, torch.Size) or len(values) > 64:
        raise PickleError("a shape is not a short tuple")
    count = 1
    for value in values:
        if type(value) is not int or value < 0:
            raise PickleError(f"a shape has {shown(value)}")
        count *= max(value, 1)
    if count >= 2**62:
        raise PickleError("a shape has more than 2^62 elements")
    return torch.Size(values)


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise PickleError(f"bytes in the encoding {shown(encoding)}")
    return codecs.latin_1_encode(text)[0]


def _pairs(items: Any = ()) -> OrderedDict[Any, Any]:
    if type(items) not in (tuple, list) or any(type(pair) not in (tuple, list) or len(pair) != 2 for pair in items):
        raise PickleError("an OrderedDict that is not of pairs")
    return OrderedDict((checked_key(key), value) for key, value in items)


def _counter(counts: Any = None) -> Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise PickleError("a Counter that is not of counts")
    return Counter(counts)


def _members(items: Any = ()) -> Any:
    if type(items) not in (tuple, list):
        raise PickleError("a set that is not of a list")
    return map(checked_key, items)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise PickleError("a complex number that is not of two")
    return complex(real, imaginary)


def _bytearray(content: Any = b"") -> bytearray:
    if type(content) is not bytes:
        raise PickleError("a bytearray that is not of bytes")
    return bytearray(content)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > 40 or not (index is None or (type(index) is int and 0 <= index < 2**15)):
        raise PickleError("a device that is none")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise PickleError(f"the layout {shown(name)}; expected torch.strided")
    return torch.strided


PLAIN_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _pairs,
    ("collections", "Counter"): _counter,
    ("builtins", "set"): lambda items=(): set(_members(items)),
    ("builtins", "frozenset"): lambda items=(): frozenset(_members(items)),
    ("builtins", "complex"): _complex,
    ("builtins", "bytearray"): _bytearray,
}

_TENSOR_DTYPES = {
    dtype for dtype in DTYPES.values() if not re.search(r"q|bits|int[1-7]$|complex32|e8m0|x2", str(dtype))
}
_STORAGES: dict[Any, torch.dtype | None] = {
    ("torch.storage", "UntypedStorage"): None,
    **{
        ("torch", f"{name}Storage"): dtype
        for name, dtype in {
            "Double": torch.float64,
            "Float": torch.float32,
            "Half": torch.float16,
            "BFloat16": torch.bfloat16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
            "ComplexFloat": torch.complex64,
            "ComplexDouble": torch.complex128,
        }.items()
    },
}
