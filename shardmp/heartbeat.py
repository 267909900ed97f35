"""The heartbeat: a file that a step touches, so that something outside can see a training that stands still.

Owns:      the file that SHARDMP_HEARTBEAT names, for this rank; how often it is touched; how old it is.
Takes:     the environment, this rank's number and its number on its host.
Gives:     a touch at each step, once a second at most; the ages for a health check.
Invariant: no step fails, waits or reads the device because of it: what cannot be written is an error at `shard`.

Only Python's own library is imported here: a health check runs every few seconds and must not import torch.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SHARDMP_HEARTBEAT"
PLACES = ("{rank}", "{local_rank}")
INTERVAL = 1.0  # seconds between two touches: what looks at the age counts in more than that


class Heartbeat:
    """Touches one file; without a file it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Touch the file now, as the first beat.

        Args:
            path: the file; its folder is made where it is missing. None: there is no heartbeat.

        Raises:
            OSError: the file cannot be written.
        """
        self.path = path
        self._next = 0.0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                os.utime(path)

    def beat(self) -> None:
        """Touch the file, unless that was done less than `INTERVAL` ago. Never raises."""
        if self.path is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL
        # A folder that is gone or full makes the file old, which is what whoever looks at it is to see.
        with contextlib.suppress(OSError):
            os.utime(self.path)


def start(rank: int, local_rank: int, environ: Mapping[str, str]) -> Heartbeat:
    """This rank's heartbeat, as SHARDMP_HEARTBEAT says: a path in which {rank} and {local_rank} stand for the numbers.

    Without either, all ranks touch the same file, and only a standstill of all of them makes it old.

    Raises:
        ValueError: the path has another {word}, or the file cannot be written.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return Heartbeat(None)
    check(text)
    path = Path(text.replace("{rank}", str(rank)).replace("{local_rank}", str(local_rank)))
    try:
        return Heartbeat(path)
    except OSError as error:
        raise ValueError(
            f"environment variable {VARIABLE}={text}: rank {rank} cannot write {path} ({error.strerror}); name a file in a "
            "folder in which this process may write, or unset it"
        ) from error


def ages(text: str) -> dict[str, float]:
    """Seconds since the last beat, by file, of all ranks that share this file system. Empty before the first.

    Args:
        text: what SHARDMP_HEARTBEAT is.

    Raises:
        ValueError: the path has another word in braces than {rank} and {local_rank}.
    """
    check(text)
    pattern = glob.escape(text)
    for place in PLACES:
        pattern = pattern.replace(place, "[0-9]*")
    now, found = time.time(), {}
    for name in sorted(glob.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found[name] = now - os.stat(name).st_mtime
    return found


def check(text: str) -> None:
    """Raises ValueError where the path has a placeholder that does not exist."""
    for place in re.findall(r"\{[^}]*\}", text):
        if place not in PLACES:
            raise ValueError(
                f"environment variable {VARIABLE}={text}: {place} is none of {' and '.join(PLACES)}, which alone are replaced"
            )
