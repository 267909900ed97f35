"""Messages between two ranks: what a tag says, who talks to whom in which order, and where rows land.

Owns:      the kinds of messages.
Takes:     ranks, rows and their places.
Gives:     `Message`, which `Collectives` starts, and the order of peers.
Invariant: both ends of a message find the same tag; messages under one tag between two ranks come in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch import Tensor

from .exchange import Part

# What a message is, in the lowest three bits of its tag; READ is added to the kind of the rows that were read.
SIXTEEN_BITS, GATHER, FP32, CROSSING, READ, PUBLISHED, TAKEN = 0, 1, 2, 3, 4, 5, 7


class Message(NamedTuple):
    """One tensor that is sent to, or received from, a rank of the group."""

    sends: bool
    data: Tensor
    peer: int
    tag: int


class Staged:
    """The work of a message through host memory, for tensors on a GPU under gloo, which sends and receives only there."""

    def __init__(self, work: Any, host: Tensor, place: Tensor | None) -> None:
        self._work, self._host, self._place = work, host, place

    def wait(self) -> None:
        """Wait until it is sent, or has arrived; then it goes to its place."""
        self._work.wait()
        if self._place is not None:
            self._place.copy_(self._host)


class Forwarded:
    """The work of sending on what a thread waits for."""

    def __init__(self, future: Future[list[Any]]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until it has been sent."""
        for work in self._future.result():
            work.wait()


def landing(row: Sequence[Part], place: Tensor) -> list[Part]:
    """Where a far member's row lands, cut as our own."""
    return [Part(part.offset, place[part.offset : part.offset + part.data.numel()]) for part in row]


def pairs(me: int, count: int) -> list[tuple[int, int]]:
    """From whom to receive and to whom to send, by distance: everybody talks to another one at each moment."""
    return [((me - distance) % count, (me + distance) % count) for distance in range(1, count)]
