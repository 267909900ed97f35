"""Checkpoints side by side in one directory, each of them complete or not there.

Owns:      the names in the directory, the order of writing, and what is removed when.
Takes:     a directory that all ranks share; a step.
Gives:     where to write, and where the newest complete checkpoint is.
Invariant: a directory named step-... is complete: it got its name, by one rename, when all of it was on the disk.

    step-000000500.7    complete; the seventh that was written here
    latest              the name of the one to resume from; moved last
    .writing-...        not complete: removed when the next one begins
    .removing-...       an old one on its way out

Rank 0 alone changes the directory. Numbers behind the step order checkpoints by when they were written: a run that was
resumed from an older step writes newer checkpoints of smaller steps. What is being written has a random name: two runs that
save here at once, which they should not, cannot write into one checkpoint. The one that began first gets an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from .manifest import MANIFEST, METADATA, CheckpointError
from .regular_files import read_whole

LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{9,})\.(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None where it has none."""
    found = _COMPLETE.fullmatch(path.name)
    return int(found[1]) if found else None


def complete(root: Path) -> list[Path]:
    """All complete checkpoints, the newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            match = _COMPLETE.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[2]), path))
    return [path for _, path in sorted(found, reverse=True)]


def begin(root: Path, step: int) -> Path:
    """An empty directory to write into; what an interrupted save has left is removed.

    Raises:
        OSError: the directory cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    newest = next(iter(complete(root)), None)
    match = _COMPLETE.fullmatch(newest.name) if newest else None
    serial = 1 + (int(match[2]) if match else 0)
    path = root / f"{_WRITING}{secrets.token_hex(4)}-step-{step:09}.{serial}"
    path.mkdir()
    return path


def commit(path: Path) -> Path:
    """All files of `path` are written and synced: make it a checkpoint, and the latest one."""
    root, final = path.parent, committed(path)
    sync_directory(path)
    os.rename(path, final)
    sync_directory(root)
    _point_to(root, final.name)
    return final


def committed(path: Path) -> Path:
    """The name that what is written at `path` will have."""
    return path.with_name(path.name[path.name.index("step-") :])


def _point_to(root: Path, name: str) -> None:
    pointer = root / f"{_WRITING}{secrets.token_hex(4)}-{LATEST}"
    with pointer.open("w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(pointer, root / LATEST)
    sync_directory(root)


def drop(path: Path) -> None:
    """A save has failed: remove what it wrote, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def keep_newest(root: Path, count: int) -> None:
    """Remove complete checkpoints but the `count` newest, and the one that `latest` names."""
    pointed = _pointed(root)
    for path in complete(root)[count:]:
        if path != pointed:
            # Under its own name, a checkpoint whose removal is interrupted would look complete.
            os.rename(path, root / f"{_REMOVING}{path.name}")
    _sweep(root, _REMOVING)


def _sweep(root: Path, *prefixes: str) -> None:
    for path in root.iterdir():
        if path.name.startswith(prefixes or (_WRITING, _REMOVING)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _pointed(root: Path) -> Path | None:
    with contextlib.suppress(OSError, UnicodeDecodeError, CheckpointError):
        name = read_whole(root / LATEST, 256).decode().strip()
        if _COMPLETE.fullmatch(name) and (root / name).is_dir():
            return root / name
    return None


def find(root: Path, step: int | str | None) -> Path:
    """The checkpoint of a step (the newest of it), or the one that `latest` names, or else the newest.

    A directory that holds a checkpoint itself, also one that plain DCP has written, is that checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    if os.path.lexists(root / METADATA):
        return root
    if step in (None, "latest"):
        pointed = _pointed(root)
        if pointed is not None:
            return pointed
    for path in complete(root):
        if step in (None, "latest", step_of(path)):
            return path
    wanted = "complete checkpoint" if step in (None, "latest") else f"complete checkpoint of step {step}"
    steps = sorted({str(step_of(path)) for path in complete(root)}, key=int)
    there = f"there are steps {', '.join(steps)}" if steps else "nor any other"
    if not root.is_dir():
        there = "the directory does not exist"
    raise FileNotFoundError(f"{root}: no {wanted}: {there}")


def newest_first(root: Path) -> Iterator[Path]:
    """The checkpoint that `latest` names, then all others, the newest first.

    Raises:
        CheckpointError: at the end, where none was good enough for the caller.
    """
    pointed = _pointed(root)
    if pointed is not None:
        yield pointed
    yield from (path for path in complete(root) if path != pointed)
    raise CheckpointError(f"{root}: no intact checkpoint ({len(complete(root))} tried)")


def is_ours(path: Path) -> bool:
    """Whether shardmp has written the checkpoint at `path`, and so a manifest: also one that has lost it."""
    return step_of(path) is not None or os.path.lexists(path / MANIFEST)


def sync_directory(path: Path) -> None:
    """Let the names in a directory reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
