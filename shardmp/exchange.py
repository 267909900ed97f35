"""How rows of gradients travel to the ranks that own them, in one hop or two, and how they are summed.

Owns:      the route (who sums what with whom) and the sum of rows in a fixed order.
Takes:     which rank is on which host; rows as parts that lie in memory.
Gives:     a `Route`, and sums in FP32 (or FP64) whose order is the same on every run.
Invariant: a row is r0 + r1 + ... in rank order; with two hops the hosts' sums, each in rank order, in host order.

[Note: two hops] Where M hosts have G > 2 ranks each, a host's card would carry each element G times. So the ranks of a
host first sum among themselves what goes to the same place of every host, and send one FP32 sum across: 4 Psi (M-1)/M
bytes leave a host in place of 2 G Psi (M-1)/M. Rank g of a host deals with the rows of the g-th rank of every host,
its column. With G = 2 both cost the same, and one hop rounds less often. The rows of an all-gather cross once, to the
rank of the same column, which hands them on inside its host: 2 Psi (M-1)/M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .neighbours import Remote

# Elements of a tile of the sum: its scratch stays in the cache (1 MB in FP32), and calls cost little beside it. On a GPU
# a launch costs as much as some MB.
TILE = 2**18
CUDA_TILE = 2**22


@dataclass(frozen=True)
class Part:
    """Elements [offset, offset + data.numel()) of a row, lying in `data` (1-D, contiguous)."""

    offset: int
    data: Tensor


@dataclass(frozen=True)
class RemotePart:
    """As `Part`, where the elements lie in a neighbour's memory."""

    offset: int
    data: Remote


@dataclass(frozen=True)
class Route:
    """With whom this rank sums what: [Note: two hops].

    Attributes:
        members: the ranks of the first hop, this one among them, in rank order.
        columns: for each member the rows that it sums in the first hop, in host order.
        across: the ranks of the second hop, this one among them, in host order; this rank alone where one hop suffices.
    """

    members: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    across: tuple[int, ...]

    @property
    def num_hosts(self) -> int:
        """Hosts among which the second hop goes; 1 where there is none."""
        return len(self.across)


def route(hosts: Sequence[str], rank: int) -> Route:
    """The route of `rank`, where rank r runs on host `hosts[r]`; the same kind for all ranks."""
    together: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        together.setdefault(host, []).append(number)
    groups = list(together.values())  # in order of their lowest rank
    size = len(groups[0])
    if len(groups) == 1 or size <= 2 or any(len(group) != size for group in groups):
        everybody = tuple(range(len(hosts)))
        return Route(everybody, tuple((row,) for row in everybody), (rank,))
    columns = tuple(zip(*groups, strict=True))
    members = tuple(together[hosts[rank]])
    return Route(members, columns, columns[members.index(rank)])


@dataclass
class Exchange:
    """A hop under way: what is awaited, what must not be written meanwhile, and what has arrived.

    Attributes:
        rows: by source, in the order of the sum, and by row: the parts that make it up.
        readers: neighbours whose memory is read for it, and which read ours.
        read: for each of them, what says that it has read.
        tag: the tag under which they say so.
    """

    works: list[Any]
    rows: list[list[Sequence[Part | RemotePart]]]
    sent: list[Tensor] = field(default_factory=list)  # kept alive until the exchange is over
    readers: list[int] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)
    tag: int = 0


class Summation:
    """Sums rows of any floating dtype in FP32 or FP64, as `out` is, tile by tile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tile = TILE if device.type == "cpu" else CUDA_TILE
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        for name in ("total", "scratch"):  # FP64's come with the first exact sum
            self._buffer(name, torch.float32, 0)

    def __call__(
        self,
        rows: Sequence[Sequence[Part | RemotePart]],
        out: Tensor,
        *,
        accumulate: bool,
        squares: Tensor,
        rest: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """Put rows[0] + rows[1] + ... into `out`, or add it to what is there.

        Args:
            rows: each cut alike and covering `out`.
            out: (shard,) FP32 or FP64.
            squares: FP32, one for each 1024 elements of `out`; receives the sum of squares of each block of the
                result, rounded to FP32, taken while the tile is in the cache.
            rest: (shard,) FP32 like `out`: sum in FP64, and put here what its rounding in `out` leaves over.
            kept: (rows, shard) of the rows' dtype: put the rows themselves here.
        """
        dtype = out.dtype if rest is None else torch.float64
        for pieces in zip(*rows, strict=True):
            for start in range(0, pieces[0].data.numel(), self._tile):
                stop = min(start + self._tile, pieces[0].data.numel())
                offset = pieces[0].offset + start
                place = out[offset : offset + stop - start]
                total = self._buffer("total", dtype, stop - start) if accumulate or rest is not None else place
                tiles: list[Tensor | Remote] = [piece.data[start:stop] for piece in pieces]
                if kept is not None:
                    places = kept[:, offset : offset + stop - start]
                    tiles = [_fill(place, tile) for place, tile in zip(places, tiles, strict=True)]
                self._add(tiles, total)
                if accumulate:
                    place.add_(total)
                elif rest is not None:
                    place.copy_(total)
                    rest[offset : offset + stop - start] = total.sub_(self._as(place, torch.float64))
                scratch = self._buffer("scratch", torch.float32, stop - start)
                blocks = squares[offset // 1024 : (offset + stop - start) // 1024]
                result = place if out.dtype == torch.float32 else scratch.copy_(place)
                sum_squares(result.view(-1, 1024), blocks, scratch)

    def _add(self, rows: Sequence[Tensor | Remote], total: Tensor) -> None:
        total.copy_(self._widened(self._here(rows[0]), total.dtype))
        for row in rows[1:]:
            total.add_(self._as(self._here(row), total.dtype))

    def _here(self, row: Tensor | Remote) -> Tensor:
        """A neighbour's tile is read into the cache, and only there."""
        return row if isinstance(row, Tensor) else row.read(self._buffer("landing", row.dtype, row.numel()))

    def _as(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """`row` in `dtype`: on the CPU FP32 += FP16 is seven times slower than a copy into scratch and an addition."""
        if self._device.type != "cpu":
            return row
        row = self._widened(row, dtype)
        return row if row.dtype == dtype else self._buffer("scratch", dtype, row.numel()).copy_(row)

    def _widened(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """16 bits on the way to FP64 go through FP32: from 16 bits to 64, torch has no vectorised kernel."""
        if dtype == torch.float64 and row.element_size() == 2 and self._device.type == "cpu":
            return self._buffer("scratch", torch.float32, row.numel()).copy_(row)
        return row

    def _buffer(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        found = self._buffers.get((name, dtype))
        if found is None:
            found = torch.empty(self._tile, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = found
        return found[:numel]


def _fill(place: Tensor, tile: Tensor | Remote) -> Tensor:
    return place.copy_(tile) if isinstance(tile, Tensor) else tile.read(place)


def sum_squares(blocks: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """The sum of squares of each row of `blocks` in FP32; a row's result depends on its own elements alone.

    On the CPU torch adds a row in a cascade, so that rounding grows with the logarithm of its length; a norm's kernel adds
    one by one. On a GPU its order depends on the number of rows: there halves are added, rows being powers of two long.
    """
    squares = torch.mul(blocks, blocks, out=None if scratch is None else scratch.view(blocks.shape))
    if blocks.device.type == "cpu":
        torch.sum(squares, dim=1, out=out)
        return
    while squares.size(1) > 1:
        half = squares.size(1) // 2
        squares = squares[:, :half] + squares[:, half:]
    out.copy_(squares[:, 0])
