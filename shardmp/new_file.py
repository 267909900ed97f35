"""A large file that is written once, from front to back, and synced.

Owns:      the file's descriptor, and one buffer for what is under way to the disk.
Takes:     bytes, in any number of parts of any size.
Gives:     the file on the disk, or one that takes an older one's place; the system's error, with the file's name.
Invariant: the bytes are the same whichever way they take.

[Note: past the page cache] Through the page cache a file is on the disk soonest: the system has much under way at a time.
But the cache's memory is found, filled and given back page by page, which takes seven times the CPU time of a copy into
one kept buffer from which the disk reads by itself (O_DIRECT, where the file system knows it). A save that nobody waits for
goes past the cache: its CPU time is taken from the training.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from .regular_files import kind_of

_ALIGNMENT = 4096  # bytes: of addresses, offsets and lengths under O_DIRECT; no disk asks for more
_AT_ONCE = 2**23  # bytes of one write


class NewFile:
    """A file that must not be there yet. As a context it is closed at the end; it is complete after `finish()`.

    Args:
        past_cache: spare CPU time, not time: see the note above.

    Raises:
        OSError: from every method; it names the file.
    """

    def __init__(self, path: Path, past_cache: bool) -> None:
        self.size = 0
        self._path = path
        self._memory = mmap.mmap(-1, _AT_ONCE)  # of whole pages, so aligned
        self._buffer = np.frombuffer(self._memory, dtype=np.uint8)  # numpy lets other threads run while it copies
        self._filled = 0
        with self._named():
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if past_cache:
            _set_direct(self._descriptor, True)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, part: bytes | memoryview) -> None:
        """Append."""
        source = np.frombuffer(part, dtype=np.uint8)
        self.size += len(source)
        while len(source):
            taken = min(len(source), len(self._buffer) - self._filled)
            np.copyto(self._buffer[self._filled : self._filled + taken], source[:taken])
            self._filled, source = self._filled + taken, source[taken:]
            if self._filled == len(self._buffer):
                self._flush()

    def finish(self) -> None:
        """Write what is left, and sync."""
        self._filled += -self._filled % _ALIGNMENT  # whatever lies there: it is cut off again
        self._flush()
        with self._named():
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)

    def _flush(self) -> None:
        rest = memoryview(self._memory)[: self._filled]
        self._filled = 0
        with self._named():
            while rest:
                rest = rest[self._write(rest) :]

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            # A file system may open a file for O_DIRECT and refuse the write, as after one that a full disk cut short.
            if error.errno != errno.EINVAL or not _set_direct(self._descriptor, False):
                raise
            return os.write(self._descriptor, data)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes `target`'s name, in one rename, when it is complete and on the disk.

    Until then it has a random name beside it, which is removed where anything fails.

    Raises:
        OSError: `target` is there and is not a regular file, or cannot be written; it names `target`.
    """
    refuse_odd(target)
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        # O_EXCL follows no link, and takes nothing over.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        refuse_odd(target)
        os.replace(partial, target)
    except OSError as error:
        if error.filename is None or Path(error.filename) == partial:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def refuse_odd(target: Path) -> None:
    """That nothing is there, or a regular file: a rename would put a file in the place of a device or a link.

    Raises:
        FileExistsError: something else is.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = kind_of(os.lstat(target).st_mode)
        if kind:
            raise FileExistsError(errno.EEXIST, f"it is {kind}; expected a regular file, or a new name", str(target))


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Whether that changed anything: some file systems know nothing of O_DIRECT, and some systems don't."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & flag) == wanted or not flag:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ flag)
    except OSError:
        return False
    return True
