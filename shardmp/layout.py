"""Where every parameter lies: buckets, shards and pieces, as pure integers.

Owns:      the rule that packs parameters into buckets and cuts buckets into shards.
Takes:     names, sizes and dtypes in order of registration; the number of ranks; the bucket size.
Gives:     frozen `Bucket`, `Slot` and `Piece` records that every other module obeys.
Invariant: the same on every rank, and no result of training depends on it.

[Note: alignment] A shard starts and ends at a multiple of 1024 elements, and so starts a parameter of 1024 elements
or more; smaller ones start at multiples of 64 and never cross a multiple of 1024. What lies between is padding: it is
zero and is updated like the rest. So a parameter's elements never fall into the scalar tail of a vectorised kernel
(torch's fused CPU kernels round differently there), and the blocks over which squares are summed, 1024 elements (64
in small parameters) counted from the parameter's start, never cross a shard: neither the number of ranks nor the
bucket size can change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

BLOCK = 1024
UNIT = 64
MIB = 2**20


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def usual_bucket_bytes(ranks: int, whole: int) -> int:
    """The size of a bucket where the user names none, for `whole` bytes of parameters.

    8 MiB; on more than 8 ranks 1 MiB for each, so that messages don't shrink to what their overhead costs. But no more
    than an eighth of the parameters, since overlap needs several buckets, nor than 256 MiB: about five are in flight. Never
    less than 16 KiB for each, since a shard has at least 1024 elements, and the rest would be padding.
    """
    return max(8 * MIB, ranks * MIB // 64, min(ranks * MIB, whole // 8, 256 * MIB))


@dataclass(frozen=True)
class Entry:
    """A parameter as the layout sees it: its name, its number of elements and the dtype it trains in ("fp16", ...)."""

    name: str
    numel: int
    dtype: str


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket: elements [start, start + numel), padded to `end`."""

    param: int
    start: int
    numel: int
    end: int

    @property
    def is_small(self) -> bool:
        """Whether blocks of 64 elements, not of 1024, are counted in it."""
        return self.numel < BLOCK


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one rank owns.

    Elements [lo, hi) of the flattened parameter lie at `offset` of the rank's shard of bucket `bucket`; `length`
    elements from there, padding included, belong to no other parameter.
    """

    param: int
    bucket: int
    rank: int
    offset: int
    length: int
    lo: int
    hi: int


def boxes(lo: int, hi: int, shape: Sequence[int]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Elements [lo, hi) of a flattened tensor of `shape` as boxes of the tensor itself: at most 2 x dimensions - 1.

    Returns:
        (start, offsets, sizes) of each: the box's elements lie in order from `lo + start` on, so it is a view of them.
    """
    if hi <= lo:
        return []
    if not shape:
        return [(0, (), ())]
    if len(shape) == 1:
        return [(0, (lo,), (hi - lo,))]
    row = math.prod(shape[1:])
    found = []

    def part_of_row(index: int, first: int, last: int) -> None:
        for start, offsets, sizes in boxes(first, last, shape[1:]):
            found.append((index * row + first - lo + start, (index, *offsets), (1, *sizes)))

    first, last = lo // row, (hi - 1) // row
    if first == last:
        part_of_row(first, lo - first * row, hi - first * row)
        return found
    begin, end = -(-lo // row), hi // row
    if lo % row:
        part_of_row(first, lo % row, row)
    if end > begin:
        found.append((begin * row - lo, (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])))
    if hi % row:
        part_of_row(end, 0, hi % row)
    return found


@dataclass(frozen=True)
class Bucket:
    """A run of slots of one dtype, `ranks` equal shards of `shard` elements."""

    index: int
    dtype: str
    ranks: int
    shard: int
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.ranks * self.shard

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The [start, end) ranges that no parameter covers."""
        gaps, position = [], 0
        for slot in self.slots:
            if slot.start > position:
                gaps.append((position, slot.start))
            position = slot.start + slot.numel
        if position < self.size:
            gaps.append((position, self.size))
        return tuple(gaps)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` owns of this bucket's parameters, in order of offset."""
        begin, end = rank * self.shard, (rank + 1) * self.shard
        found = []
        for slot in self.slots:
            first, last = max(slot.start, begin), min(slot.end, end)
            lo, hi = first - slot.start, min(last, slot.start + slot.numel) - slot.start
            if first < last and lo < hi:
                found.append(Piece(slot.param, self.index, rank, first - begin, last - first, lo, hi))
        return tuple(found)


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which backward fills them (the reverse of registration)."""

    entries: tuple[Entry, ...]
    ranks: int
    buckets: tuple[Bucket, ...]
    home: dict[int, tuple[int, Slot]] = field(compare=False, repr=False)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What `rank` owns, bucket by bucket."""
        for bucket in self.buckets:
            yield from bucket.pieces(rank)

    def owners(self, param: int) -> tuple[Piece, ...]:
        """The pieces of one parameter, in rank order; together they are the whole parameter, once."""
        bucket, slot = self.home[param]
        where = self.buckets[bucket]
        ranks = range(slot.start // where.shard, (slot.start + slot.numel - 1) // where.shard + 1)
        return tuple(piece for rank in ranks for piece in where.pieces(rank) if piece.param == param)


def _pack(params: Sequence[tuple[int, int]]) -> tuple[list[Slot], int]:
    """Slots for (param, numel) in order, and the position behind the last."""
    slots, position = [], 0
    for param, numel in params:
        if numel >= BLOCK:
            start = round_up(position, BLOCK)
            end = start + round_up(numel, BLOCK)
        else:
            length = round_up(numel, UNIT)
            start = position
            if start // BLOCK != (start + length - 1) // BLOCK:
                start = round_up(position, BLOCK)
            end = start + length
        slots.append(Slot(param, start, numel, end))
        position = end
    return slots, position


def plan(
    entries: Sequence[Entry],
    ranks: int,
    *,
    bucket_bytes: int | None,
    itemsize: dict[str, int],
    borders: Sequence[int] = (),
) -> Layout:
    """Pack `entries` (order of registration) into buckets for `ranks` ranks.

    A bucket is closed once it holds `bucket_bytes` (None: `usual_bucket_bytes`) or more, where the dtype changes hands
    (each dtype has its own open bucket), and at each of `borders`: indices of entries in order of registration before
    which a bucket must not reach (stage 3's units). Buckets are numbered in the order in which the last of their
    gradients is expected. Entries without elements lie nowhere.
    """
    assert ranks >= 1
    if bucket_bytes is None:
        bucket_bytes = usual_bucket_bytes(ranks, sum(entry.numel * itemsize[entry.dtype] for entry in entries))
    assert bucket_bytes >= 1
    stops = set(borders)
    open_: dict[str, list[tuple[int, int]]] = {}
    filled: dict[str, int] = {}
    closed: list[tuple[str, list[tuple[int, int]]]] = []

    def close(dtype: str) -> None:
        if open_.get(dtype):
            closed.append((dtype, open_.pop(dtype)))
        filled[dtype] = 0

    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.numel:
            open_.setdefault(entry.dtype, []).append((index, entry.numel))
            filled[entry.dtype] = filled.get(entry.dtype, 0) + entry.numel * itemsize[entry.dtype]
            if filled[entry.dtype] >= bucket_bytes:
                close(entry.dtype)
        if index in stops:
            for dtype in sorted(open_):
                close(dtype)
    for dtype in sorted(open_):
        close(dtype)

    # In order of the gradient that comes last (the smallest index), so that a bucket is complete when its turn comes.
    closed.sort(key=lambda item: -min(param for param, _ in item[1]))
    buckets, home = [], {}
    for index, (dtype, params) in enumerate(closed):
        slots, end = _pack(params)
        shard = round_up(-(-end // ranks), BLOCK)
        buckets.append(Bucket(index, dtype, ranks, shard, tuple(slots)))
        home.update({slot.param: (index, slot) for slot in slots})
    return Layout(tuple(entries), ranks, tuple(buckets), home)
