"""Who is where, and who has fallen silent: what the ranks tell each other through the store.

Owns:      this rank's place ("step 3, backward 2"), and the inquiry after a collective has failed.
Takes:     who the ranks are (host, process), once; the place, at each backward and step; the error of a collective.
Gives:     one sentence that names the rank and the host at fault, and where everybody was.
Invariant: an inquiry ends within GRACE + LINGER seconds and never raises, whatever has become of the store.

[Note: the inquiry] One dead, stopped or cut-off rank fails all: the first time-out closes the connections of who meets
it, whose peers fail in turn. So each rank that fails says so in the store, with what it sees of the processes of its own
host, and waits a moment for the others. Who says nothing is at fault, or sits where its place shows. The store lives in
rank 0's process, unless a launcher keeps it: rank 0 lingers until the others have read.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .world import host_id

GRACE = 2.5  # seconds in which a rank that is still there says that it failed too
LINGER = 1.0  # seconds for which rank 0, and its store with it, stays for the others to read
_LISTED = 64  # in a larger world only those at fault are listed, not where everybody was

RAISED = "shardmp/raised/{}"  # by global rank: written by the hook of `world` when a rank ends by an exception


@dataclass(frozen=True)
class Member:
    """One rank's process, as its peers know it: `rank` is its number among all ranks."""

    rank: int
    host: str
    host_id: str
    pid: int
    pid_namespace: str
    started: str

    @classmethod
    def myself(cls, rank: int) -> Member:
        """This process."""
        pid = os.getpid()
        return cls(rank, socket.gethostname(), host_id(), pid, _pid_namespace(), _stat(pid)[1])

    @classmethod
    def unmet(cls, rank: int) -> Member:
        """A rank of which only the number is known."""
        return cls(rank, "unknown", "", 0, "", "")

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"


class Roll:
    """The ranks of a group, and what each has said.

    Args:
        rank: this rank's number in the group.
        members: the group's ranks in order.
        key: where in the store this group writes; its own among all groups.
    """

    def __init__(self, rank: int, members: Sequence[Member], key: str) -> None:
        self.rank = rank
        self.members = members
        self.place = "shard()"
        self.key = key

    def at(self, place: str) -> None:
        """Tell the peers where this rank is."""
        self.place = place
        if len(self.members) > 1:
            with contextlib.suppress(Exception):  # a store that is gone shows in the collective itself
                _store().set(f"{self.key}/place/{self.rank}", place)

    def explain(self, operation: str, error: str, is_broken: Callable[[int], bool] = lambda rank: False) -> str:
        """Why `operation` failed with `error`, after asking the others: [Note: the inquiry].

        Args:
            is_broken: whether the connection to a rank of the group is broken: its system closes it when a process ends.
        """
        found: list[str] = []
        # A store whose host is cut off answers nothing and has no time-out of its own.
        inquiry = threading.Thread(target=self._inquire, args=(is_broken, found.append), daemon=True)
        inquiry.start()
        inquiry.join(GRACE + LINGER)
        cause = found[0] if found else self.store_is_silent("does not answer")
        return f"{self.members[self.rank]} at {self.place}: {operation} failed: {cause} [{_first_sentence(error)}]"

    def store_is_silent(self, what: str) -> str:
        """What is said where the store does not answer: who holds it, and what is seen of its process."""
        first, own = self.members[0], self.members[self.rank]
        state = self.state_of(0)
        if state in _SAID:
            return f"{first} {_SAID[state]}, and the store in it"
        return (
            f"the store {what}: host {first.host} of rank {first.rank} is dead, stopped or cut off from host {own.host}"
        )

    def state_of(self, rank: int) -> str:
        """ "gone", "stopped" or "running", as far as this process can see that of `rank`; else empty."""
        own, member = self.members[self.rank], self.members[rank]
        is_seen = member.host_id == own.host_id and own.pid_namespace and member.pid_namespace == own.pid_namespace
        return _state_of(member) if is_seen else ""

    # -- the inquiry, in its thread

    def _inquire(self, is_broken: Callable[[int], bool], answer: Callable[[str], None]) -> None:
        try:
            store = _store()
            text, present = self._ask(store, is_broken)
        except Exception:  # of whatever kind the store's are: the connection to it is lost
            answer(self.store_is_silent("is gone"))
            return
        answer(text)  # before the wait for others: it must not cost this rank what it knows
        with contextlib.suppress(Exception):
            self._linger(store, present)

    def _ask(self, store: Store, is_broken: Callable[[int], bool]) -> tuple[str, int]:
        """What is said of the fault, and how many ranks have said that they failed."""
        deadline, pause = time.monotonic() + GRACE, 0.05
        silent = list(range(len(self.members)))
        while True:
            # Anew each time: a process that is being killed closes its connections before it is seen to end.
            store.set(f"{self.key}/failed/{self.rank}", json.dumps(self._neighbours()))
            silent = self._silent(store, silent)
            if not silent or time.monotonic() > deadline or all(self._is_known(store, rank) for rank in silent):
                break
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, 0.4)
        guilty = self._most_certain(store, silent, is_broken)
        reasons = [self._reason(store, rank) for rank in guilty[:8]]
        if len(guilty) > 8:
            reasons.append(f"{len(guilty) - 8} more ranks are silent")
        text = "; ".join(reasons) or "all ranks are there, but not at the same place"
        if len(self.members) <= _LISTED:
            text += ". " + self._places(store)
        return text, len(self.members) - len(silent)

    def _silent(self, store: Store, ranks: Sequence[int]) -> list[int]:
        """Which of `ranks` have not said that they failed; by halves, since one question may name many keys."""
        if store.check([f"{self.key}/failed/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return self._silent(store, ranks[:half]) + self._silent(store, ranks[half:])

    def _most_certain(self, store: Store, silent: Sequence[int], is_broken: Callable[[int], bool]) -> Sequence[int]:
        """Of the silent ranks those that are surely at fault; else those that nobody sees; else all, who live.

        With two hops a rank whose own peers still wait may be silent until its time-out, and is innocent.
        """
        states = {rank: self._state(store, rank) or "" for rank in silent}
        certain = [
            rank
            for rank in silent
            if states[rank] in _SAID or is_broken(rank) or store.check([RAISED.format(self.members[rank].rank)])
        ]
        return certain or [rank for rank in silent if not states[rank]] or silent

    def _is_known(self, store: Store, rank: int) -> bool:
        """Whether it is certain that `rank` won't speak any more."""
        return self._neighbours().get(rank) in _SAID or store.check([RAISED.format(self.members[rank].rank)])

    def _reason(self, store: Store, rank: int) -> str:
        member = self.members[rank]
        raised = _read(store, RAISED.format(member.rank))
        state = raised or {**_SAID, **_ALIVE}.get(self._state(store, rank) or "")
        last = _read(store, f"{self.key}/place/{rank}")
        return f"{member} {state or 'does not answer: its process or host is dead, stopped or cut off'}" + (
            f", last at {last}" if last else ""
        )

    def _state(self, store: Store, rank: int) -> str | None:
        """What a rank on the same host sees of the process of `rank`."""
        for other, member in enumerate(self.members):
            if member.host_id == self.members[rank].host_id and other != rank:
                told = _read(store, f"{self.key}/failed/{other}")
                state = json.loads(told).get(str(rank)) if told else None
                if state is not None:
                    return str(state)
        return None

    def _neighbours(self) -> dict[int, str]:
        """The state of each process that this one can see: of its own host and process namespace."""
        states = {rank: self.state_of(rank) for rank in range(len(self.members))}
        return {rank: state for rank, state in states.items() if state}

    def _places(self, store: Store) -> str:
        places = [
            f"rank {member.rank}: {_read(store, f'{self.key}/place/{rank}') or 'unknown'}"
            for rank, member in enumerate(self.members)
        ]
        return f"Where each rank was last: {'; '.join(places)}. All ranks must make the same backwards and steps"

    def _linger(self, store: Store, readers: int) -> None:
        count = store.add(f"{self.key}/read", 1)
        deadline = time.monotonic() + LINGER
        while self.members[self.rank].rank == 0 and count < readers and time.monotonic() < deadline:
            time.sleep(0.05)
            count = store.add(f"{self.key}/read", 0)


# What is said of a process that will not speak, and of one that could.
_SAID = {"gone": "is gone: it was killed, or ended without a word", "stopped": "is stopped (SIGSTOP)"}
_ALIVE = {"running": "is alive, but takes no part"}


def _first_sentence(error: str) -> str:
    """gloo's errors go on with general advice."""
    return error.partition(". ")[0][:200]


def _store() -> Store:
    # Looked up at each use: see `Collectives`.
    return dist.distributed_c10d._get_default_store()


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process, from Linux's /proc; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    is_ending = int(fields[6]) & 0x4  # PF_EXITING, include/linux/sched.h
    return "X" if is_ending else fields[0], fields[19]


def _state_of(member: Member) -> str:
    letter, started = _stat(member.pid)
    if not letter or started != member.started or letter in "ZX":
        return "gone"
    return "stopped" if letter in "Tt" else "running"
