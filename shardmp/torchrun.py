"""torchrun with an exit code that says how it ended, and a store that listens where it must.

Owns:      the exit code of `shardmp launch`, and the address of the agent's store.
Takes:     torchrun's arguments.
Gives:     143 where the ranks were stopped by SIGTERM and left in time, 137 where one had to be killed, and torchrun's
           own code (0, or 1 where a rank failed) in every other case.
Invariant: torchrun itself does all the rest: processes, signals, output.

The last line is ours: which rank failed first, and what it said. torchrun's own last lines are a traceback of itself and a
table without the error.

torchrun ends with 1 after a SIGTERM whether its ranks have saved and left, were killed while they saved, or had failed
before: whoever restarts jobs (a batch script, Docker, Kubernetes) could not tell a preemption from a crash.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import sys
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.run import main as torchrun

from .rendezvous import address_of, listener

FAILED = 1
STOPPED = 128 + signal.SIGTERM  # what a rank leaves with when it has saved because of SIGTERM
KILLED = 128 + signal.SIGKILL


class _Killings(logging.Handler):
    """Notes whether torchrun had to kill a rank that did not leave in time: it says so in its log alone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen = self.seen or "forcefully exiting" in str(record.msg)


class _NoInterrupts(logging.Filter):
    """Ctrl-C is no warning: the ranks have heard it from the terminal and say themselves how they end."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (("death signal" in text or "closing signal" in text) and re.search(r"\b(2|SIGINT)\b", text))


class _Store(TCPStore):
    """torch's store, which listens on loopback alone where its host is loopback: torch listens on every address."""

    def __init__(self, host_name: str, port: int, **options: Any) -> None:
        descriptor = listener(host_name, port) if options.get("is_master") else None
        if descriptor is not None:
            (host_name, port), options = address_of(descriptor), {**options, "master_listen_fd": descriptor}
        super().__init__(host_name, port, **options)


def main() -> None:
    """Run torchrun with this process's arguments, and end with the exit code that says how it went."""
    killings = _Killings()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(killings)
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_NoInterrupts())
    # The agents' meeting place, and the store that an agent keeps for its ranks.
    dist.TCPStore = c10d_rendezvous_backend.TCPStore = _Store  # type: ignore[attr-defined,assignment]
    try:
        torchrun(sys.argv[1:])
    except SignalException as end:
        sys.exit(KILLED if killings.seen else 128 + int(end.sigval))
    except ChildFailedError as failed:
        # Another node was told to stop: all ranks have saved the same step, and left with this code or, where torchrun's
        # own SIGTERM met them after their last act, by it. Before that a rank takes it as a wish to stop.
        codes = {failure.exitcode for failure in failed.failures.values()}
        if STOPPED not in codes or not codes <= {STOPPED, -signal.SIGTERM}:
            print(f"shardmp launch: error: {_first_failure(failed)}", file=sys.stderr, flush=True)
            sys.exit(FAILED)
        sys.exit(STOPPED)


def _first_failure(failed: ChildFailedError) -> str:
    """The rank that failed before the others, and its error as `world` has left it in the rank's error file."""

    def when(failure: ProcessFailure) -> tuple[int, int]:
        """torch's time stamps are whole seconds, in which the peers of a rank that failed fail too."""
        message = failure.error_file_data.get("message")
        exact = message["extraInfo"].get("nanoseconds") if isinstance(message, dict) else None
        return failure.timestamp, exact or 10**9 * failure.timestamp

    rank, first = min(failed.failures.items(), key=lambda each: when(each[1]))
    who = f"rank {rank} (host {socket.gethostname()}, pid {first.pid}) failed first: "
    if first.exitcode < 0:
        killed = signal.Signals(-first.exitcode).name
        return who + f"{killed} ended it" + (" (out of memory?)" if killed == "SIGKILL" else "")
    if first.error_file_data:
        message = first.error_file_data.get("message", "")
        text = message.get("message", "") if isinstance(message, dict) else message
        return who + " ".join(str(text).split())
    return who + f"exit code {first.exitcode}; what it said is above"


if __name__ == "__main__":
    main()
