"""Opening files that others wrote: whatever lies under a name, nothing waits, and nothing huge is taken in.

Owns:      what may be opened, how long it may be, and which names may stand in a file.
Takes:     paths; names and lengths that a file states.
Gives:     descriptors of regular files, their bytes, or an error that names the file.
Invariant: a FIFO, a device or a directory is refused before it is read; a length is compared before memory is taken.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}
TABLE_LIMIT = 2**28  # bytes of a table of contents; a million tensors' take half
NAME_LIMIT = 4096  # characters of a tensor's name


class CheckpointError(RuntimeError):
    """A checkpoint's files are not what was written."""


def kind_of(mode: int) -> str | None:
    """What a file of that mode is in words; None of a regular one."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file, to read; links are followed.

    Raises:
        FileNotFoundError: it is not there.
        CheckpointError: it is not a regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for one.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and os.path.lexists(path) and kind_of(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is {kind_of(os.lstat(path).st_mode)}, and was not opened: {error}") from None
        raise
    try:
        kind = kind_of(os.fstat(descriptor).st_mode)
        if kind:
            raise CheckpointError(f"{path} is {kind}; expected a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        FileNotFoundError: it is not there.
        CheckpointError: it is not a regular file.
    """
    found = path.stat()
    kind = kind_of(found.st_mode)
    if kind:
        raise CheckpointError(f"{path} is {kind}; expected a regular file")
    return found.st_size


def read_whole(path: Path, limit: int, begins: bytes = b"") -> bytes:
    """A small file's bytes.

    Args:
        limit: the most bytes that it may have. begins: its first ones, looked at before the others are read.

    Raises:
        FileNotFoundError: it is not there.
        CheckpointError: it is not a regular file, is longer, or begins otherwise.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes; expected at most {limit}")
        head = os.pread(descriptor, len(begins), 0)
        if head != begins:
            raise CheckpointError(f"{path} is truncated or altered: it begins with {head!r}, not with {begins!r}")
        parts = []
        left = size
        while left:
            part = os.read(descriptor, left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def is_file_name(name: Any) -> bool:
    """Whether a name in a table is that of a file beside it: no path, nothing that a terminal would act upon."""
    plain = isinstance(name, str) and 0 < len(name) <= 255 and name.isprintable()
    return plain and name not in (".", "..") and "/" not in name and "\\" not in name


def is_tensor_name(name: Any) -> bool:
    """Whether that may be the name of a tensor: any text of bounded length that can be written down again."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT or "\0" in name:
        return False
    return not any(0xD800 <= ord(char) < 0xE000 for char in name) if not name.isascii() else True


def is_count(value: Any, most: int = 2**62) -> bool:
    """Whether that is an integer from 0 on, and no bool."""
    return type(value) is int and 0 <= value <= most


def shown(value: Any) -> str:
    """A value of a file for an error: short, on one line, and never by a method of a nested value."""
    if isinstance(value, (str, bytes)):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, int) and abs(value) >= 2**200:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"
