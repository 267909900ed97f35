"""What the ranks do together around a checkpoint, so that a failure on one is a failure on all.

Owns:      how values and errors travel between ranks while files are read and written.
Takes:     a piece of work for each rank.
Gives:     what each rank has returned, or one error on every rank, which names the rank that it comes from.
Invariant: no rank goes on where another one could not; every wait ends, and can be interrupted (Ctrl-C).

Values go through the store: a wait in a collective could neither be interrupted, nor tell a slow disk from a rank that
is gone. See beats.py for whom is waited how long.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .beats import BEAT, STALE, Line, NoAnswer, Others
from .collectives import Collectives
from .faults import LINGER
from .manifest import CheckpointError
from .storage import Told
from .world import DEFAULT_TIMEOUT

T = TypeVar("T")
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, RuntimeError, OSError, FileNotFoundError, OverflowError, CheckpointError)
}
_LOOK = 1.0  # seconds between two looks at those who are missing
_NEVER = 2**40  # more than there are ranks
_PART = 2**20  # bytes of one value in the store, which takes 8 MiB
_numbers: weakref.WeakKeyDictionary[Collectives, Any] = weakref.WeakKeyDictionary()


class Joint(Told):
    """Something that all ranks of a group do together. As a context: who leaves it by an error tells the others.

    Args:
        collectives: of the group. They are poisoned where this rank, or another one, leaves the common order.
        doing: what it is, for errors.
    """

    def __init__(self, collectives: Collectives, doing: str) -> None:
        self._collectives, self._doing = collectives, doing
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self._place, self._moved, self._beats, self._phase = "", 0, 0, 0
        self._end = ""  # "agreed": all ranks raise the same; "failed": a rank is not there any more
        self._own_parts: list[str] = []
        self._line: Line | None = None
        if self.world_size > 1:
            number = next(_numbers.setdefault(collectives, itertools.count()))
            self._roll = collectives._roll
            self._key = f"{self._roll.key}/joint/{number}"
            self._timeout = _timeout_of(collectives)
            self._limit = min(self._timeout, STALE)
            self._others = Others(self._roll, f"{self._key}/beat", self._timeout, collectives._is_broken)

    def __enter__(self) -> Joint:
        if self.world_size > 1:
            self._line = Line(self, min(BEAT, self._limit / 4))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is None:
            return
        try:
            if error is not None and not self._end:
                said = f"raised {type(error).__name__}: {error}"
                self._collectives.poison(f"{self._doing} {said}")
                with contextlib.suppress(Exception):  # a store that is gone tells them more
                    said = f"{self._roll.members[self.rank]} {said}"[:500]
                    self._line.ask(lambda store: store.set(f"{self._key}/fault", said), 1.0)
            elif self._end != "failed":
                self._leave(self._line)
        finally:
            self._line.end()

    def at(self, place: str) -> None:
        """This rank is there now ("syncing /runs/a/..."): what it is named with where the others wait in vain."""
        self._place = place
        self._moved += 1

    def moved(self) -> None:
        """This rank has got on with what it does."""
        self._moved += 1

    def together(self, work: Callable[[], T], *, for_first: bool = False) -> list[T]:
        """`work` on every rank, and what each has returned; an error on one is an error on all, which names its rank.

        Args:
            for_first: what is returned is large, and goes to rank 0 alone; the others get an empty list.

        Raises:
            RuntimeError: a rank is gone, stopped, or waits for its disk without end; by its name.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = work()
        except Exception as mistake:
            error = mistake
        if self.world_size == 1:
            if error is not None:
                self._end = "agreed"
                raise error
            return [value]  # type: ignore[list-item]
        kinds = [kind.__name__ for kind in type(error).__mro__] if error is not None else []
        head = kinds, str(error), getattr(error, "errno", None), None if for_first else value
        told = self._exchange(head, value if for_first else None)
        if error is not None:
            self._end = "agreed"
            raise error
        for rank, (kinds, message, errno, _) in enumerate(told):
            if kinds:
                self._end = "agreed"
                raise _as_error(kinds, f"rank {rank}: {message}", errno)
        if for_first:
            readers = range(self.world_size if self.rank == 0 else 0)
            return self._read([f"{self._key}/{self._phase}/whole/{rank}" for rank in readers])
        return [found for _, _, _, found in told]

    def alike(self, check: Callable[[], None]) -> None:
        """A check of what all ranks have been told alike: its error is the same on all of them."""
        try:
            check()
        except Exception:
            self._end = "agreed"
            raise

    @property
    def is_agreed(self) -> bool:
        """Whether it ends by an error that all ranks raise."""
        return self._end == "agreed"

    def go_on(self) -> None:
        """The error that all ranks have raised is caught by all."""
        self._end = ""

    # -- through the store

    def _exchange(self, head: Any, whole: Any) -> list[Any]:
        """What each rank has said, when all have."""
        self._phase += 1
        here = f"{self._key}/{self._phase}"

        def say(store: Store) -> None:
            if whole is not None:
                self._own_parts = _put(store, f"{here}/whole/{self.rank}", whole)
            _put(store, f"{here}/head/{self.rank}", head)
            store.add(f"{here}/count", 1)

        self._ask(say)
        look, pause = time.monotonic() + _LOOK / 4, 0.0005
        while self._ask(lambda store: store.add(f"{here}/count", 0)) < self.world_size:
            if time.monotonic() >= look:
                self._look(here)
                look = time.monotonic() + min(_LOOK, self._limit / 4)
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        return self._read([f"{here}/head/{rank}" for rank in range(self.world_size)])

    def _read(self, keys: Sequence[str]) -> list[Any]:
        return [self._ask(functools.partial(_get, key=key)) for key in keys]

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        assert self._line is not None
        try:
            return self._line.ask(question, self._limit)
        except NoAnswer:
            self._fail(self._roll.store_is_silent("does not answer"), tell=False)
        except RuntimeError:  # what the store raises when its connection is lost
            self._fail(self._roll.store_is_silent("is gone"), tell=False)

    def _look(self, here: str) -> None:
        """Whether one of those who are missing will not come, or somebody knows of one.

        Who gives up on a rank takes the phase's count away first: the rank may come after all, and must not go on alone.

        Raises:
            RuntimeError: yes, by name.
        """

        def ask(store: Store) -> tuple[str, dict[int, tuple[str, str]]]:
            fault = f"{self._key}/fault"
            if store.check([fault]):
                store.add(f"{self._key}/read", 1)
                return store.get(fault).decode(), {}
            return "", self._others.read(store, _absent(store, f"{here}/head", range(self.world_size)))

        told, read = self._ask(ask)
        if told:
            self._fail(told, tell=False)
        reason = self._others.whom_in_vain(read)
        if reason and self._ask(lambda store: _take_away(store, f"{here}/count", self.world_size)):
            self._fail(reason, tell=True)

    def _fail(self, reason: str, *, tell: bool) -> NoReturn:
        """The error that names the rank at fault, after telling the others."""
        line = self._line
        assert line is not None
        self._end = "failed"
        self._collectives.poison(f"{self._doing}: {reason}")
        if tell:
            with contextlib.suppress(Exception):  # they find it by themselves
                line.ask(lambda store: store.set(f"{self._key}/fault", reason), 1.0)
                self._linger(line, f"{self._key}/read", self.world_size - 2)
        own = self._roll.members[self.rank]
        raise RuntimeError(f"{own} at {self._doing}: waiting for all ranks failed: {reason}")

    def _leave(self, line: Line) -> None:
        """The last one clears what was said; rank 0, in whose process the store may be, stays until all have read."""

        def leave(store: Store) -> None:
            if store.add(f"{self._key}/left", 1) == self.world_size:
                for key in self._keys():
                    store.delete_key(key)
            for key in self._own_parts:  # rank 0 has read them: it has come to a later phase
                store.delete_key(key)

        with contextlib.suppress(Exception):  # what matters has been said
            line.ask(leave, 1.0)
            self._linger(line, f"{self._key}/left", self.world_size)

    def _linger(self, line: Line, key: str, readers: int) -> None:
        if self._collectives.ranks[self.rank] != 0:
            return
        deadline, pause = time.monotonic() + LINGER, 0.0005
        while line.ask(lambda store: store.add(key, 0), 1.0) < readers and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _keys(self) -> list[str]:
        """What was said, but the count of those who have left, which is still read: a number stays of each joint work."""
        keys = [f"{self._key}/beat/{rank}" for rank in range(self.world_size)]
        for phase in range(1, self._phase + 1):
            keys.append(f"{self._key}/{phase}/count")
            keys += [f"{self._key}/{phase}/head/{rank}" for rank in range(self.world_size)]
        return keys

    # -- in the thread of the line

    def connect(self) -> Store:
        """A connection of its own: while the process group's waits for a peer, nobody else can use it."""
        store: Any = dist.distributed_c10d._get_default_store()
        return store.clone()

    def beat(self, store: Store) -> None:
        """Say that this rank lives, and where it is."""
        self._beats += 1
        store.set(f"{self._key}/beat/{self.rank}", json.dumps([self._beats, self._place, self._moved]))


def _as_error(kinds: Sequence[str], message: str, errno: int | None) -> Exception:
    kind = next((_KINDS[kind] for kind in kinds if kind in _KINDS), RuntimeError)
    return OSError(errno, message) if issubclass(kind, OSError) and errno is not None else kind(message)


def _take_away(store: Store, count: str, ranks: int) -> bool:
    """Make a count one that is never reached; False where it was reached by now, and stays so."""
    if store.add(count, -_NEVER) + _NEVER < ranks:
        return True
    store.add(count, _NEVER)
    return False


def _absent(store: Store, key: str, ranks: Sequence[int]) -> list[int]:
    """Which of `ranks` have not written `key/rank`; by halves, since one question may name many keys."""
    if store.check([f"{key}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _absent(store, key, ranks[:half]) + _absent(store, key, ranks[half:])


def _put(store: Any, key: str, value: Any) -> list[str]:
    """Write a value; the keys that hold it, of which the first is written last."""
    data = pickle.dumps(value)
    parts = [data[start : start + _PART] for start in range(0, len(data), _PART)]
    keys = [key, *(f"{key}/{number}" for number in range(1, len(parts)))]
    for part_key, part in zip(keys[1:], parts[1:], strict=True):
        store.set(part_key, part)
    store.set(key, b"%d:%s" % (len(parts), parts[0]))
    return keys


def _get(store: Any, key: str) -> Any:
    count, _, first = store.get(key).partition(b":")
    rest = [store.get(f"{key}/{number}") for number in range(1, int(count))]
    return pickle.loads(b"".join([first, *rest]))


def _timeout_of(collectives: Collectives) -> float:
    """Seconds after which a collective of this group fails: `init(timeout=)`, or what the user gave to torch."""
    group = collectives.group or dist.group.WORLD
    assert group is not None  # more than one rank
    try:
        limit = group._get_backend(collectives.device).options._timeout
    except (RuntimeError, AttributeError):  # private, and not of every backend
        limit = DEFAULT_TIMEOUT
    return float(limit.total_seconds())
