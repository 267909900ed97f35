"""Starts the ranks of a launch, and makes sure that they end.

Owns:      the rank processes, each in a session of its own, and their time limit.
Takes:     a `Job`, a number of ranks, extra environment variables.
Gives:     the figures of a launch by row, or a `LaunchError` that says in a line what went wrong.
Invariant: when `launch` returns or raises, no process that it started is left, nor any that those started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from measuring import Job

HERE = Path(__file__).resolve().parent
POLL = 0.05
# Seconds that ranks get to say their last words once one has failed, or time is up.
GRACE = 2.0


class LaunchError(Exception):
    """A launch failed; the message is one line for the table, `details` the end of a rank's output."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def launch(job: Job, ranks: int, environment: Mapping[str, str], timeout: float) -> dict[str, dict[str, Any]]:
    """Run one job on so many ranks of this machine, one thread each.

    Args:
        job: its `out` is filled in here.
        environment: variables on top of this process's own.
        timeout: seconds for the whole launch, building of extensions included.

    Returns:
        Figures by row: times and bytes are means over ranks (wall time: the slowest), memory is the largest.

    Raises:
        LaunchError: a rank failed, or time was up.
    """
    from torch.distributed import TCPStore

    # The store lives here, on a port that the system chose: no rank can lose a race for it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # what a rank that hangs has said is in its log
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks are clients of this process's store
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **environment,
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, str(HERE / "measuring.py"), json.dumps(asdict(replace(job, out=folder)))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                with (Path(folder) / f"{rank}.log").open("wb") as log:
                    own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True))
            wait(processes, timeout, Path(folder))
        finally:
            for process in processes:
                end(process)
        return combine([json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)])


def wait(processes: list[subprocess.Popen[bytes]], timeout: float, folder: Path) -> None:
    """Wait until all ranks have ended well.

    Raises:
        LaunchError: one has not, or they take longer than `timeout` seconds; with the end of its log, in `folder`.
    """
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            _settle(processes)
            raise _failure(failed[0], codes[failed[0]] or 0, folder)
        if time.monotonic() > deadline:
            for process in processes:
                process.send_signal(signal.SIGUSR1)  # its stack goes into its log
            _settle(processes)
            waiting = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise LaunchError(
                f"not done after {timeout:g} s (ranks {waiting})", _tail(folder / f"{codes.index(None)}.log")
            )
        time.sleep(POLL)


def _settle(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL)


def _failure(rank: int, code: int, folder: Path) -> LaunchError:
    text = _tail(folder / f"{rank}.log")
    if code < 0:
        return LaunchError(f"rank {rank} was ended by {signal.Signals(-code).name}", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))]
    reason = (errors or lines or ["it wrote nothing"])[-1]
    return LaunchError(f"rank {rank} ended with exit code {code}: {reason[:200]}", text)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-4000:]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank's whole session: a compiler that it started must not go on, and hold a lock.

    Not its process group alone: ninja gives each compiler one of its own.
    """
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        others = _session(process.pid)
        if not others:
            return
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended, where the kernel tells (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def combine(told: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One set of figures by row from those of all ranks: rank 0's, but where ranks differ as the cost of a step does."""
    rows = {}
    for name, first in told[0].items():
        ranks = [one[name] for one in told]
        found = dict(first)
        for key in ("cpu_ms", "faults"):
            found[key] = statistics.mean(one[key] for one in ranks)
        for key in ("wall_ms", "peak_mib", "above_imports_mib"):
            if key in first:
                found[key] = max(one[key] for one in ranks)
        if "losses" in first:
            found["losses"] = [statistics.mean(step) for step in zip(*(one["losses"] for one in ranks), strict=True)]
        rows[name] = found
    return rows
