"""Signs of life: what a rank says while others wait for it, and whom one waits for in vain.

Owns:      the thread that speaks to the store and writes this rank's beats; how old a beat may be.
Takes:     who the ranks are; where this rank is, told by whoever reads or writes a file.
Gives:     answers of the store, each within a limit; one sentence that names the rank that all wait for in vain.
Invariant: no caller sits in a call of the store, which may never answer; the thread keeps no process alive.

[Note: how long to wait] A rank may write for as long as its disk needs: it beats, and its place or its count of pieces
moves. One whose beat is older than STALE seconds (or the group's time-out, if that is shorter) is stopped or cut off. One
that beats while nothing moves for the whole time-out waits for its disk, and is named with the file it is at. One whose
process is gone is named at once: who shares its host sees that, and others see their connection to it closed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from .faults import RAISED, Roll

__all__ = ["BEAT", "STALE", "Line", "NoAnswer", "Others"]

BEAT = 2.0  # seconds between two beats
STALE = 30.0  # seconds after which a beat is too old
_LOOKED_AT = 64  # ranks whose beats are read at a time: more are missing only where few are waiting


class Speaker(Protocol):
    """Whose beats they are."""

    def connect(self) -> Store:
        """The store; called in the thread."""

    def beat(self, store: Store) -> None:
        """Write this rank's beat."""


class Line:
    """A connection to the store, used by one thread that beats between two questions.

    Args:
        speaker: gives the store and writes this rank's beat; without it the thread ends.
        every: seconds between two beats.
    """

    def __init__(self, speaker: Speaker, every: float) -> None:
        self._speaker, self._every = weakref.ref(speaker), every
        self._questions: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon: it may hang in the store when the process ends.
        self._thread = threading.Thread(target=self._run, name="shardmp-beats", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Store], Any], limit: float) -> Any:
        """What `question` returns when it is given the store.

        Raises:
            NoAnswer: not within `limit` seconds. Whatever the store raises: it is gone.
        """
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        return answer.result(limit)

    def end(self) -> None:
        """Beat no more. Waits for the thread, unless the store does not answer it."""
        self._questions.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        store: Store | None = None
        due = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                asked = self._questions.get(timeout=max(0.0, due - time.monotonic()))
                if asked is None:
                    return
                question, answer = asked
                try:
                    store = store or self._connect()
                    answer.set_result(question(store))
                except BaseException as error:  # of whatever kind: it belongs to who asked
                    answer.set_exception(error)
                del asked, question, answer  # what was asked may hold the speaker
            if time.monotonic() >= due:
                due = time.monotonic() + self._every
                speaker = self._speaker()
                if speaker is None:
                    return
                with contextlib.suppress(Exception):  # a store that is gone shows in the next answer
                    store = store or speaker.connect()
                    speaker.beat(store)
                del speaker

    def _connect(self) -> Store:
        speaker = self._speaker()
        assert speaker is not None  # it asks
        return speaker.connect()


@dataclass
class _Sign:
    """What was last seen of a rank, and since when: its beat, and where it is in its work."""

    beat: str
    beat_since: float
    place: str
    place_since: float


class Others:
    """The beats of the ranks that this one waits for.

    Args:
        key: where in the store a rank's beat stands, as `key/rank`.
        timeout: seconds in which something must move, the process group's own.
        is_broken: whether the connection to a rank of the group is closed.
    """

    def __init__(self, roll: Roll, key: str, timeout: float, is_broken: Callable[[int], bool]) -> None:
        self._roll, self._key, self._timeout, self._is_broken = roll, key, timeout, is_broken
        self._stale = min(timeout, STALE)
        self._signs: dict[int, _Sign] = {}

    def read(self, store: Store, missing: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Of some of the missing ranks the beat, and what they said when they raised; in the thread of the line."""
        found = {}
        for rank in missing[:_LOOKED_AT]:
            raised = RAISED.format(self._roll.members[rank].rank)
            found[rank] = _text(store, f"{self._key}/{rank}"), _text(store, raised)
        return found

    def whom_in_vain(self, read: dict[int, tuple[str, str]]) -> str:
        """Why one of the missing ranks will not come; empty where all may."""
        now = time.monotonic()
        for rank, (beat, raised) in read.items():
            sign = self._signs.setdefault(rank, _Sign(beat, now, "", now))
            place = json.dumps(json.loads(beat)[1:]) if beat else ""
            if beat != sign.beat:
                sign.beat, sign.beat_since = beat, now
            if place != sign.place:
                sign.place, sign.place_since = place, now
            state = self._roll.state_of(rank)
            reason = raised or self._reason(rank, state, now - sign.beat_since, now - sign.place_since, bool(beat))
            if reason:
                where = json.loads(beat)[1] if beat else ""
                return f"{self._roll.members[rank]} {reason}{f', last at {where}' if where else ''}"
        return ""

    def _reason(self, rank: int, state: str, silent: float, still: float, has_come: bool) -> str:
        if state == "gone":
            return "is gone: it was killed, or ended without a word"
        if not has_come:  # it may be busy with something else until the group's own time-out
            if still < self._timeout:
                return ""
            return {"stopped": "is stopped (SIGSTOP)", "running": "is alive, but takes no part"}.get(
                state, "does not answer: its process or host is dead, stopped or cut off"
            )
        if silent >= self._stale:
            said = "is stopped (SIGSTOP)" if state == "stopped" else "is stopped, or its host is dead or cut off"
            return f"{said}: its last sign of life is {silent:.0f} s old"
        if not state and silent > 2 * BEAT + 1 and self._is_broken(rank):
            return "is gone: its connection is closed"
        if still >= self._timeout:
            return f"is alive, but has not moved for {still:.0f} s (init(timeout=...) waits longer)"
        return ""


def _text(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
