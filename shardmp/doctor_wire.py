"""What the doctor measures between ranks.

Owns:      its calls of torch.distributed: a conversation of two ranks, and three collectives whose results are known.
Takes:     a device, a group for words (gloo, on the CPU) and the default group for data; pairs of ranks.
Gives:     latency, bandwidth each way and both ways at once, the difference of two clocks, elements that are wrong.
Invariant: bytes and time of a pair are bounded, and each wait has the group's time-out; only disjoint pairs speak at once.

[Note: a pair] The first rank of a pair asks and holds the watch, the second serves: a word is (command, size). Sizes
grow eightfold until a transfer takes 40 ms or has the largest size, so that a slow link costs little and a fast one is
measured at full speed. What counts is the best of three transfers of a size: noise only ever slows one down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int32, torch.int64, torch.uint8),
)
OPERATIONS = ("all-reduce", "all-to-all", "all-gather")
PINGS = 12
FIRST_BYTES = 2**16
GROWTH = 8
ENOUGH = 0.04  # seconds of one transfer
LONG = 1.0  # seconds: no second try
TRIES = 3
_CHUNK = 1024  # elements for each rank in the collectives that are checked

# Deprecated names since torch 2.13; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Command(IntEnum):
    """What the serving rank of a pair is asked to do."""

    END = 0
    PING = 1  # answer with the own clock
    TAKE = 2  # receive `size` bytes, then say so
    GIVE = 3  # send `size` bytes
    BOTH = 4  # do both at once, then say so


class Wire:
    """This rank's conversations.

    Args:
        device: where data lies.
        words: a gloo group of all ranks.
        most_bytes: of the largest transfer.
    """

    def __init__(self, device: torch.device, words: dist.ProcessGroup, most_bytes: int) -> None:
        self._device, self._words, self._most = device, words, most_bytes
        self._out = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        self._in = torch.empty_like(self._out)

    # -- words

    def _tell(self, peer: int, first: float, second: float = 0.0) -> None:
        dist.send(torch.tensor([first, second], dtype=torch.float64, device="cpu"), peer, self._words)

    def _hear(self, peer: int) -> tuple[float, float]:
        word = torch.empty(2, dtype=torch.float64, device="cpu")
        dist.recv(word, peer, self._words)
        return float(word[0]), float(word[1])

    # -- a pair

    def serve(self, peer: int) -> None:
        """Answer until the asking rank ends the conversation."""
        while True:
            command, size = map(int, self._hear(peer))
            if command == Command.END:
                return
            if command == Command.PING:
                self._tell(peer, time.time())
                continue
            self._transfer(peer, size, gives=command != Command.TAKE, takes=command != Command.GIVE)
            if command != Command.GIVE:
                self._tell(peer, size)

    def ask(self, peer: int) -> dict[str, float]:
        """Measure the way to `peer` and back.

        Returns:
            "latency" in seconds one way; "clock", what the peer's clock is ahead of this one in seconds, and
            "clock_error", how far that may be off; "to", "from" and "both" in bytes per second one way.
        """
        found = self._pings(peer)
        for name, command in (("to", Command.TAKE), ("from", Command.GIVE), ("both", Command.BOTH)):
            found[name] = self._bandwidth(peer, command, found["latency"])
        self._tell(peer, Command.END)
        return found

    def ask_clock(self, peer: int) -> dict[str, float]:
        """Only "latency", "clock" and "clock_error" of `ask`."""
        found = self._pings(peer)
        self._tell(peer, Command.END)
        return found

    def _pings(self, peer: int) -> dict[str, float]:
        """Of some answers the quickest is the one to believe.

        The peer's clock was read between question and answer, most probably in the middle (Cristian 1989).
        """
        answers = []
        for _ in range(PINGS):
            wall, start = time.time(), time.perf_counter()
            self._tell(peer, Command.PING)
            clock, _ = self._hear(peer)
            answers.append((time.perf_counter() - start, clock, wall))
        trip, clock, wall = min(answers)
        return {"latency": trip / 2, "clock": clock - (wall + trip / 2), "clock_error": trip / 2}

    def _bandwidth(self, peer: int, command: Command, latency: float) -> float:
        size = min(FIRST_BYTES, self._most)
        while True:
            seconds = self._timed(peer, command, size)
            for _ in range(TRIES - 1):
                if (seconds < ENOUGH and size < self._most) or seconds > LONG:
                    break
                seconds = min(seconds, self._timed(peer, command, size))
            if seconds >= ENOUGH or size == self._most:
                return size / max(seconds - 2 * latency, 1e-9)
            size = min(GROWTH * size, self._most)

    def _timed(self, peer: int, command: Command, size: int) -> float:
        start = time.perf_counter()
        self._tell(peer, command, size)
        self._transfer(peer, size, gives=command != Command.GIVE, takes=command != Command.TAKE)
        if command != Command.GIVE:
            self._hear(peer)
        return time.perf_counter() - start

    def _transfer(self, peer: int, size: int, *, gives: bool, takes: bool) -> None:
        # Together: NCCL would wait for a receive before it starts the send behind it, on both sides.
        operations = [dist.P2POp(dist.irecv, self._in[:size], peer)] if takes else []
        operations += [dist.P2POp(dist.isend, self._out[:size], peer)] if gives else []
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def rounds(count: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of 0 .. count - 1, by the circle method: all pairs once, if there are at most `most` rounds.

    Of more, `most` that lie evenly among them: each number then has that many partners, near and far ones.
    """
    places = count + count % 2
    number = places - 1
    chosen = range(number) if number <= most else [index * number // most for index in range(most)]
    for turn in chosen:
        circle = [0, *(1 + (turn + place) % number for place in range(number))] if number > 0 else []
        pairs = [(circle[place], circle[places - 1 - place]) for place in range(places // 2)]
        yield [(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < count]


# -- collectives whose results are known


def check_values(device: torch.device, rank: int, world_size: int) -> list[dict[str, Any]]:
    """What the collectives get wrong on this rank, in every dtype; at most one element for each of them.

    Returns:
        For each wrong one "operation", "dtype", "source" (the rank whose elements are wrong; None for a sum),
        "element", "expected" and "got".
    """
    wrong = []
    for dtype in DTYPES:
        for operation, found, expected in _collectives(device, rank, world_size, dtype):
            places = (found.double() != expected.double()).nonzero()
            if len(places):
                place = int(places[0])
                wrong.append(
                    {
                        "operation": operation,
                        "dtype": str(dtype).removeprefix("torch."),
                        "source": None if operation == "all-reduce" else place // _CHUNK,
                        "element": place,
                        "expected": float(expected[place]),
                        "got": float(found[place]),
                    }
                )
    return wrong


def _collectives(
    device: torch.device, rank: int, world_size: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each operation's result, and what it should be: small whole numbers, exact in every dtype and every order."""
    total = torch.arange(world_size * _CHUNK, dtype=torch.int64, device=device)
    mine = _pattern(total) * (_adds(total, rank, world_size))
    reduced = mine.to(dtype)
    dist.all_reduce(reduced)
    yield "all-reduce", reduced, _pattern(total) * (1 + (total % world_size != (total + 3) % world_size).long())

    sent = _row(rank, total // _CHUNK, total).to(dtype)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    yield "all-to-all", received, _row(total // _CHUNK, rank, total)

    one = torch.arange(_CHUNK, dtype=torch.int64, device=device)
    gathered = torch.empty(world_size * _CHUNK, dtype=dtype, device=device)
    _all_gather(gathered, _row(rank, 0, one).to(dtype))
    yield "all-gather", gathered, _row(total // _CHUNK, 0, total)


def _pattern(index: Tensor) -> Tensor:
    return index % 5 + 1


def _adds(index: Tensor, rank: int, world_size: int) -> Tensor:
    """1 where `rank` contributes to an element of the sum: two ranks do, or one where both are the same."""
    return ((index % world_size == rank) | ((index + 3) % world_size == rank)).long()


def _row(source: Tensor | int, to: Tensor | int, index: Tensor) -> Tensor:
    """What rank `source` sends to rank `to`: another row for each of them."""
    return (index % _CHUNK + 7 * source + 13 * to) % 101


def pairs_of(ends: Sequence[int], most_rounds: int, rank: int) -> Iterator[tuple[int, int]]:
    """This rank's pairs among `ends`, in the order in which all ranks come to theirs."""
    for pairs in rounds(len(ends), most_rounds):
        for first, second in pairs:
            if rank in (ends[first], ends[second]):
                yield ends[first], ends[second]
