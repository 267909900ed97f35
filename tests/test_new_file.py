"""A checkpoint's file is the same whichever way it takes to the disk, and an error of the system names it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shardmp import new_file
from shardmp.new_file import NewFile

SIZES = (0, 1, 4095, 4096, 4097, 8192, 40_001)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_file, "_AT_ONCE", 8192)


def written(path: Path, parts: list[bytes], past_cache: bool) -> bytes:
    with NewFile(path, past_cache) as file:
        for part in parts:
            file.write(part)
        file.finish()
        assert file.size == sum(map(len, parts))
    return path.read_bytes()


def is_direct(file: NewFile) -> bool:
    return bool(fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_file_holds_what_was_written_in_parts_of_any_size(tmp_path: Path, size: int, past_cache: bool) -> None:
    content = os.urandom(size)
    for number, length in enumerate((1000, 8192, 50_000)):
        parts = [content[start : start + length] for start in range(0, size, length)]
        assert written(tmp_path / str(number), parts, past_cache) == content


def test_only_what_nobody_waits_for_goes_past_the_page_cache(tmp_path: Path) -> None:
    with NewFile(tmp_path / "soon", past_cache=False) as file:
        assert not is_direct(file)
    try:
        os.close(os.open(tmp_path / "trial", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system knows nothing of O_DIRECT")
    with NewFile(tmp_path / "cheap", past_cache=True) as file:
        assert is_direct(file)


def test_a_file_system_that_refuses_to_write_past_the_cache_writes_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    content = os.urandom(20_001)
    assert written(tmp_path / "file", [content], past_cache=True) == content


def test_a_write_that_the_system_cuts_short_goes_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:4096]))
    content = os.urandom(20_001)
    assert written(tmp_path / "file", [content], past_cache=False) == content


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        NewFile(tmp_path / "file", past_cache=True)

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left.*other"):
        written(tmp_path / "other", [b"1"], past_cache=True)
