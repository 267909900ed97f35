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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from .manifest import MANIFEST, METADATA, CheckpointError, Manifest
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


def named(root: str | os.PathLike[str], what: str) -> Path:
    """The directory that a user has named.

    Raises:
        ValueError: the name is empty: as a path it would be the working directory. TypeError: it is no path.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise TypeError(f"{what}: expected a path, got {root!r}")
    if not os.fspath(root):
        raise ValueError(f"{what}: the name is empty; name a directory ('.' is the working directory)")
    return Path(root)


def begin(root: Path, step: int, at: Callable[[str], None] = lambda place: None) -> Path:
    """An empty directory to write into; what an interrupted save has left is removed.

    Args:
        at: is told what is removed or made, which may take long.

    Raises:
        OSError: the directory cannot be made.
    """
    at(f"making a directory in {root}")
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root, at, _WRITING, _REMOVING)
    newest = next(iter(complete(root)), None)
    match = _COMPLETE.fullmatch(newest.name) if newest else None
    serial = 1 + (int(match[2]) if match else 0)
    path = root / f"{_WRITING}{secrets.token_hex(4)}-step-{step:09}.{serial}"
    path.mkdir()
    return path


def commit(path: Path) -> Path:
    """All files of `path` are written and synced: make it a checkpoint, and the latest one.

    Raises:
        OSError: it is neither; the latest one is that of before.
    """
    root, final = path.parent, committed(path)
    sync_directory(path)
    # Written before anything has its name: a disk that is full by now shows here.
    pointer = _new_pointer(root, final.name)
    os.rename(path, final)
    try:
        sync_directory(root)
        os.replace(pointer, root / LATEST)
        sync_directory(root)
    except BaseException:
        if _pointed(root) != final:
            with contextlib.suppress(OSError):
                os.rename(final, path)
        raise
    return final


def committed(path: Path) -> Path:
    """The name that what is written at `path` will have."""
    return path.with_name(path.name[path.name.index("step-") :])


def _new_pointer(root: Path, name: str) -> Path:
    """A file that says `name`, on the disk, to become `latest`."""
    pointer = root / f"{_WRITING}{secrets.token_hex(4)}-{LATEST}"
    try:
        with pointer.open("x") as file:
            file.write(name + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        pointer.unlink(missing_ok=True)
        raise
    return pointer


def drop(path: Path) -> None:
    """A save has failed: remove what it wrote, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def keep_newest(root: Path, count: int, at: Callable[[str], None] = lambda place: None) -> None:
    """Remove complete checkpoints but the `count` newest, and the one that `latest` names; warn of what stays."""
    pointed = _pointed(root)
    for path in complete(root)[count:]:
        if path != pointed:
            at(f"removing {path}")
            try:
                # Under its own name, a checkpoint whose removal is interrupted would look complete.
                os.rename(path, root / f"{_REMOVING}{path.name}")
            except OSError as error:  # another user's, perhaps
                warnings.warn(f"the old checkpoint {path} was not removed: {error}", stacklevel=2)
    _sweep(root, at, _REMOVING)


def _sweep(root: Path, at: Callable[[str], None], *prefixes: str) -> None:
    """Remove what is left over; what cannot be removed disturbs nobody, and is warned of."""
    for path in root.iterdir():
        if path.name.startswith(prefixes):
            at(f"removing {path}")
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except FileNotFoundError:
                pass  # somebody else has
            except OSError as error:
                warnings.warn(f"{path}, left over by an earlier save, was not removed: {error}", stacklevel=2)


def _pointed(root: Path) -> Path | None:
    with contextlib.suppress(OSError, UnicodeDecodeError, CheckpointError):
        name = read_whole(root / LATEST, 256).decode().strip()
        if _COMPLETE.fullmatch(name) and (root / name).is_dir():
            return root / name
    return None


def _warn_of_pointer(root: Path) -> None:
    """`latest` is there and leads nowhere: say so, where another checkpoint is taken in its place."""
    newest = next(iter(complete(root)), None)
    if newest is not None and (root / LATEST).exists():
        try:
            name = repr(read_whole(root / LATEST, 256).decode().strip()[:100])
        except (OSError, UnicodeDecodeError, CheckpointError):
            name = "what cannot be read"
        warnings.warn(f"{root / LATEST} names {name}, which is no checkpoint here; taking {newest.name}", stacklevel=3)


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
        _warn_of_pointer(root)
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
    else:
        _warn_of_pointer(root)
    yield from (path for path in complete(root) if path != pointed)
    raise CheckpointError(f"{root}: no intact checkpoint ({len(complete(root))} tried)")


def manifest_of(path: Path) -> Manifest:
    """The manifest of a checkpoint, which is that of the step in its name.

    Raises:
        CheckpointError: it is missing or altered, or the directory was renamed.
    """
    manifest, step = Manifest.load(path), step_of(path)
    if step not in (None, manifest.step):
        raise CheckpointError(f"{path} holds a checkpoint of step {manifest.step}: the directory was renamed")
    return manifest


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
