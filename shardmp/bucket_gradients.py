"""One bucket's gradients: what is sent from where, this rank's FP32 shard of their sum, and what was wrong with it.

Owns:      the shard and its blocks' sums of squares; the plan of messages; the pool of buffers.
Takes:     gradients of single parameters, and the rows that peers have sent.
Gives:     the parts of each row, sums of squares, and who brought an inf or a NaN.
Invariant: every rank cuts a bucket into the same messages, wherever its own gradients happen to lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exact import ExactShard, on_grid
from .exchange import Exchange, Part, RemotePart, sum_squares
from .layout import BLOCK, UNIT, Bucket, Piece, Slot
from .neighbours import Remote

# A gradient from this size on is sent from where autograd left it: a message of its own costs less than the copy.
DIRECT_NUMEL = 2**18


@dataclass(frozen=True)
class Cut:
    """Elements [start, stop) of a bucket, all in one row; `param` is sent directly, None from the send buffer."""

    row: int
    start: int
    stop: int
    param: int | None


def cuts_of(bucket: Bucket, *, direct: bool) -> tuple[Cut, ...]:
    """How a bucket is divided into messages: by rows, and where a directly sent gradient begins or ends.

    The same on every rank: a gradient that turns out not to be contiguous is copied, but cut alike. Cuts are
    multiples of 1024, so the last incomplete block of a direct gradient travels in the send buffer.
    """
    spans: list[tuple[int, int, int | None]] = []
    position = 0
    for slot in bucket.slots:
        whole = slot.numel // BLOCK * BLOCK
        if direct and slot.numel >= DIRECT_NUMEL:
            if slot.start > position:
                spans.append((position, slot.start, None))
            spans.append((slot.start, slot.start + whole, slot.param))
            position = slot.start + whole
    if position < bucket.size:
        spans.append((position, bucket.size, None))
    cuts = []
    for start, stop, param in spans:
        for row in range(start // bucket.shard, (stop - 1) // bucket.shard + 1):
            first, last = max(start, row * bucket.shard), min(stop, (row + 1) * bucket.shard)
            cuts.append(Cut(row, first, last, param))
    return tuple(cuts)


class BucketGradients:
    """One bucket's part of the gradients: its shard, its blocks' squares, and what this backward has brought so far."""

    def __init__(
        self, bucket: Bucket, rank: int, dtype: torch.dtype, device: torch.device, *, direct: bool, exact: bool
    ) -> None:
        self.bucket = bucket
        self.dtype = dtype
        self.cuts = cuts_of(bucket, direct=direct)
        self.direct_params = {cut.param for cut in self.cuts if cut.param is not None}
        self.slots = {slot.param: slot for slot in bucket.slots}
        self.pieces: tuple[Piece, ...] = bucket.pieces(rank)
        self.exact = ExactShard(bucket.shard, device) if exact else None
        own = torch.zeros(bucket.shard, dtype=torch.float32, device=device) if self.exact is None else self.exact.narrow
        self.shard = own
        self.block_squares = torch.zeros(bucket.shard // BLOCK, dtype=torch.float32, device=device)
        self.flat: Tensor | None = None  # the send buffer, while this backward fills it
        self._places: dict[int, dict[int, Tensor]] = {}  # by send buffer and parameter: where a gradient goes
        self.direct: dict[int, Tensor] = {}  # gradients sent from where they lie
        self.arrived: set[int] = set()
        # Small parameters share blocks of 1024, so their squares are summed over units of 64.
        small = [piece for piece in self.pieces if self.slots[piece.param].is_small]
        large = [piece for piece in self.pieces if not self.slots[piece.param].is_small]
        self.units, of_units = _spans(small, UNIT, device)
        self.blocks, of_blocks = _spans(large, BLOCK, device)
        self.unit_squares = torch.zeros(len(self.units), dtype=torch.float32, device=device)
        self.owners = torch.cat((of_blocks, of_units))

    def take(self, param: int, gradient: Tensor, flat: Callable[[], Tensor]) -> None:
        """Put a parameter's gradient where it will be sent from."""
        assert gradient.dtype == self.dtype, (gradient.dtype, self.dtype)  # bytes are sent as they lie
        self.arrived.add(param)
        if self.exact is not None and gradient.dtype == torch.float32:
            gradient = on_grid(gradient)
        slot = self.slots[param]
        if param in self.direct_params and gradient.is_contiguous():
            whole = slot.numel // BLOCK * BLOCK
            values = gradient.view(-1)
            self.direct[param] = values
            if whole < slot.numel:
                flat()[slot.start + whole : slot.start + slot.numel].copy_(values[whole:])
            return
        self._place(flat(), slot, gradient.shape).copy_(gradient)

    def _place(self, flat: Tensor, slot: Slot, shape: torch.Size) -> Tensor:
        """A slot of a send buffer in the gradient's shape: made once, since it takes longer than a small gradient's copy."""
        places = self._places.setdefault(flat.data_ptr(), {})
        found = places.get(slot.param)
        if found is None:
            found = places[slot.param] = flat[slot.start : slot.start + slot.numel].view(shape)
        return found

    def rows(self, flat: Callable[[], Tensor]) -> list[list[Part]]:
        """The parts of each row, absent gradients and padding as zeros."""
        for slot in self.bucket.slots:
            if slot.param not in self.arrived:
                flat()[slot.start : slot.start + slot.numel].zero_()
        for start, stop in self.bucket.gaps:
            flat()[start:stop].zero_()
        rows: list[list[Part]] = [[] for _ in range(self.bucket.ranks)]
        for cut in self.cuts:
            if cut.param in self.direct:
                begin = self.slots[cut.param].start
                data = self.direct[cut.param][cut.start - begin : cut.stop - begin]
            else:
                data = flat()[cut.start : cut.stop]
            rows[cut.row].append(Part(cut.start - cut.row * self.bucket.shard, data))
        return rows

    def values(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the shard in FP32."""
        return self.shard[start:stop] if self.exact is None else self.exact.values(start, stop)

    def square_units(self) -> None:
        """Sum the squares of small parameters over their units of 64."""
        if len(self.units):
            total = self.shard if self.exact is None else self.exact.sums
            sum_squares(total.view(-1, UNIT).index_select(0, self.units).float(), self.unit_squares)

    def squares(self) -> Tensor:
        """Sums of squares, FP64, one for each entry of `owners`; scaled as the gradients are."""
        return torch.cat((self.block_squares.index_select(0, self.blocks), self.unit_squares)).double()

    def culprits(
        self,
        rows: Sequence[Sequence[Sequence[Part | RemotePart]]],
        sources: Sequence[int | None],
        owners: Sequence[int],
        sums: Tensor,
        squares: Tensor,
    ) -> Tensor | None:
        """Into how many pieces each source brought an inf or a NaN; None where the sums are finite.

        Args:
            rows: by source and by summed row, its parts.
            sources: whose rows they are; None for a sum that was looked at where it was made.
            owners: the ranks to which the summed rows belong.
            sums: (rows, shard) FP32.
            squares: (rows, shard / 1024) FP32, the sums' blocks.

        Returns:
            (N + 1, 2) FP64: by source rank the counts of inf and of NaN; the last row counts pieces where the sum is
            not finite though no row is known to be at fault. On a GPU a bucket counts as one piece.
        """
        if sums.device.type != "cpu":
            return self.culprits_unseen(rows, sources, sums)
        # On the CPU the host may look for free, and a clean bucket costs one pass over its blocks' squares.
        suspects = set(map(tuple, torch.nonzero(~squares.isfinite()).tolist()))
        if not suspects:
            return None
        counts = torch.zeros(self.bucket.ranks + 1, 2, dtype=torch.float64, device=sums.device)
        for index, owner in enumerate(owners):
            for piece in self.bucket.pieces(owner):
                blocks = range(piece.offset // BLOCK, (piece.offset + piece.length - 1) // BLOCK + 1)
                if not suspects.isdisjoint((index, block) for block in blocks):
                    counts += self._blame(piece, [row[index] for row in rows], sources, sums[index])
        return counts

    def culprits_unseen(
        self, rows: Sequence[Sequence[Sequence[Part | RemotePart]]], sources: Sequence[int | None], sums: Tensor
    ) -> Tensor:
        """As `culprits`, where the host must not look at the device: one pass over everything, in every step."""
        counts = torch.zeros(self.bucket.ranks + 1, 2, dtype=torch.float64, device=sums.device)
        known = [(number, source) for number, source in enumerate(sources) if source is not None]
        found = [
            torch.stack([inf_and_nan(_extreme(part.data)) for row in rows[number] for part in row]).amax(0)
            for number, _ in known
        ]
        if found:
            by_source = torch.stack(found)
            counts[[source for _, source in known]] = by_source
            counts[-1] = inf_and_nan(_extreme(sums)) * ~by_source.any()
        else:
            counts[-1] = inf_and_nan(_extreme(sums))
        return counts

    def _blame(
        self, piece: Piece, rows: Sequence[Sequence[Part | RemotePart]], sources: Sequence[int | None], total: Tensor
    ) -> Tensor:
        """1 for each source that brought an inf or a NaN into one piece of a row."""
        stop = piece.offset + piece.length
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=total.device)
        for number, parts in enumerate(rows):
            for part in parts:
                low, high = max(piece.offset, part.offset), min(stop, part.offset + part.data.numel())
                if low < high:
                    values = part.data[low - part.offset : high - part.offset]
                    found[number] += inf_and_nan(values if isinstance(values, Tensor) else values.read())
        counts = torch.zeros(self.bucket.ranks + 1, 2, dtype=torch.float64, device=total.device)
        for number, source in enumerate(sources):
            if source is not None:
                counts[source] = found[number].sign()
        counts[-1] = inf_and_nan(total[piece.offset : stop]) * ~found.any()
        return counts


def _spans(pieces: Sequence[Piece], step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which spans of `step` elements of the shard lie in each piece, and the parameter that each belongs to, both int64."""
    spans, owners = (
        [torch.empty(0, dtype=torch.int64, device=device)],
        [torch.empty(0, dtype=torch.int64, device=device)],
    )
    for piece in pieces:
        first, last = piece.offset // step, (piece.offset + piece.length) // step
        spans.append(torch.arange(first, last, dtype=torch.int64, device=device))
        owners.append(torch.full((last - first,), piece.param, dtype=torch.int64, device=device))
    return torch.cat(spans), torch.cat(owners)


def _extreme(values: Tensor | Remote) -> Tensor:
    """The largest magnitude, NaN where there is one: one kernel without a temporary."""
    return torch.linalg.vector_norm(values if isinstance(values, Tensor) else values.read(), torch.inf)


def inf_and_nan(values: Tensor) -> Tensor:
    """Whether there is an inf, and whether there is a NaN: two FP64 numbers, 0 or 1, on the device of `values`."""
    values = values.float()
    return torch.stack((values.isinf().any(), values.isnan().any())).double()


class Pool:
    """Buffers of one size that are handed out and come back."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._free: list[Tensor] = []
        self.bytes = 0

    def get(self) -> Tensor:
        """A free buffer, or a new one."""
        if self._free:
            return self._free.pop()
        buffer = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self.bytes += buffer.numel() * buffer.element_size()
        return buffer

    def put(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)


class Borrowed:
    """A buffer of a pool, seen in a shape; `buffer` where it has been taken already."""

    def __init__(self, pool: Pool, shape: tuple[int, ...], buffer: Tensor | None = None) -> None:
        self._pool = pool
        self._buffer = pool.get() if buffer is None else buffer
        self.tensor = self._buffer[: math.prod(shape)].view(shape)

    def give_back(self) -> None:
        """Return it to its pool."""
        self._pool.put(self._buffer)


@dataclass(frozen=True)
class Flight:
    """A bucket in one of its hops, and the buffers that the hop needs."""

    bucket: BucketGradients
    exchange: Exchange
    borrowed: list[Borrowed]
    total: Tensor | None = None  # of the backend's own reduction: (shard,) in the wire's dtype

    def give_back(self) -> None:
        """The hop needs its buffers no longer."""
        for buffer in self.borrowed:
            buffer.give_back()
