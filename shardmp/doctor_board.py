"""Where the ranks of a doctor's visit write what they have found.

Owns:      the keys in the store, and every wait for what another rank writes.
Takes:     a store, this rank and the number of ranks.
Gives:     to rank 0 what each rank has said, to all what rank 0 has decided.
Invariant: no wait is without a deadline, and nothing here needs a process group: the report arrives also when a
           collective has just failed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any


class Board:
    """The store's page for this visit.

    Args:
        store: of torch.distributed; a `HashStore` for one rank alone.
        grace: seconds for which the others are waited for after one has failed, and for which rank 0 may be late.
    """

    def __init__(self, store: Any, rank: int, world_size: int, grace: float) -> None:
        self._store, self._grace = store, grace
        self.rank, self.world_size = rank, world_size

    def say(self, topic: str, value: Any) -> None:
        """What this rank has found; `value` is of JSON's types."""
        self._store.set(f"doctor/{topic}/{self.rank}", json.dumps(value))

    def cry(self) -> int:
        """Something has failed here: who waits for what can't come any more need not wait to the deadline.

        Returns:
            as which rank this one has failed, counted from 1.
        """
        return int(self._store.add("doctor/cries", 1))

    def collect(self, topic: str, seconds: float) -> list[Any]:
        """Rank 0's: what each rank has said, in rank order; None for those that have not in `seconds`."""
        keys = [f"doctor/{topic}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + seconds

        def over() -> bool:
            nonlocal deadline
            if self._store.add("doctor/cries", 0) > 0:
                deadline = min(deadline, time.monotonic() + self._grace)
            return bool(self._store.check(keys)) or time.monotonic() > deadline

        _poll(over)
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def told_by(self, topic: str, rank: int) -> Any:
        """What another rank has said, within the grace.

        Raises:
            RuntimeError: it has said nothing.
        """
        return self._read(f"doctor/{topic}/{rank}", self._grace, f"rank {rank} has not said anything about {topic}")

    def decide(self, topic: str, value: Any) -> None:
        """Rank 0's word to all."""
        self._store.set(f"doctor/{topic}", json.dumps(value))

    def decided(self, topic: str, seconds: float = 0.0) -> Any:
        """What rank 0 has said.

        Args:
            seconds: how long rank 0 may need for it, beyond the grace.

        Raises:
            RuntimeError: it has said nothing within the time, or is gone.
        """
        return self._read(f"doctor/{topic}", 2 * self._grace + seconds, f"rank 0 has not said anything about {topic}")

    def _read(self, key: str, seconds: float, otherwise: str) -> Any:
        deadline = time.monotonic() + seconds
        _poll(lambda: self._store.check([key]) or time.monotonic() > deadline)
        if not self._store.check([key]):
            raise RuntimeError(f"{otherwise} within {seconds:.0f} s: it is stopped, or its host is")
        return json.loads(self._store.get(key))

    def leave(self) -> None:
        """All leave together, when each has printed: a launcher ends all ranks when the first has left with an error."""
        with contextlib.suppress(RuntimeError):  # the store may go with rank 0
            self._wait_for_all("doctor/printed")
            if self.rank == 0:
                self.decide("leave", True)
            self.decided("leave")
            self._wait_for_all("doctor/gone")

    def _wait_for_all(self, key: str) -> None:
        """Rank 0 waits until all are at this point; the others go on."""
        self._store.add(key, 1)
        deadline = time.monotonic() + self._grace
        if self.rank == 0:
            _poll(lambda: self._store.add(key, 0) >= self.world_size or time.monotonic() > deadline)


def _poll(over: Callable[[], object]) -> None:
    """Look again and again, ever less often: a thousand ranks ask one store."""
    pause = 0.005
    while not over():
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)
