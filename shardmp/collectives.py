"""Everything that crosses between ranks.

Owns:      the calls of torch.distributed, the count of bytes that they send, and the memory of a failure.
Takes:     rows of 16-bit (or FP32) elements, and the FP32 shard into which they are summed; small vectors.
Gives:     the reduce-scatter ("fp32": 16 bits on the wire, summed in FP32 in rank order; "native": the backend's sum),
           the all-gather in place, the verdict's all-reduce, broadcasts at start-up.
Invariant: after one call has failed no other is made: ranks may be a step apart, and `step` and `save` must refuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# A tile of the sum: its FP32 scratch (512 KB) stays in the second-level cache.
TILE = 2**17

_instances = 0  # the largest number that an instance of this process has

# Deprecated names since torch 2.13; 2.11 has only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Part:
    """Elements [offset, offset + data.numel()) of a row, lying in `data` (1-D, contiguous)."""

    offset: int
    data: Tensor


@dataclass
class Exchange:
    """A reduce-scatter under way: what is awaited, what must not be written meanwhile, and what has arrived."""

    works: list[Any]
    rows: list[Sequence[Part]]  # by source rank; each covers the whole shard
    sent: list[Tensor] = field(default_factory=list)  # kept alive until the exchange is over


class Collectives:
    """The collectives of one shard group.

    Args:
        group: the process group over which state is sharded; None for all ranks. Where there is no process group at all,
            this rank is alone and sends nothing.
        device: where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device = device
        alone = not dist.is_initialized()
        # The default group and its store are looked up at each use: a reference would keep their threads alive beyond
        # destroy_process_group, into the interpreter's end, where a thread that asks for the GIL aborts the process.
        self.group = None if alone or group is dist.group.WORLD else group
        self.rank = 0 if alone else dist.get_rank(group)
        self.world_size = 1 if alone else dist.get_world_size(group)
        self._global = [0] if alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        self._place = "shard()"
        self.failure: str | None = None
        self.sent_bytes = 0
        self._key = "shardmp/0/place"
        number = self._agree_on_number()
        self._key = f"shardmp/{number}/place"
        self._tag = number % 2**11 << 20  # of 31 bits; the bucket's number takes the rest
        # Peers by distance: every rank talks to another one at each moment, none is flooded.
        self._peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._sum = torch.empty(TILE, device=device)
        self._scratch = torch.empty(TILE, device=device)

    def _agree_on_number(self) -> int:
        """A number that tells this instance's messages from those of others, the same on every rank."""
        global _instances
        _instances = 1 + max(self.gather_objects(_instances))
        return _instances

    # -- where everybody is, and what happens when somebody is not there

    def at(self, place: str) -> None:
        """Tell the peers where this rank is ("step 3, backward 2"), for the error that names who was where."""
        self._place = place
        if self.world_size > 1:
            with contextlib.suppress(Exception):  # a store that is gone shows in the collective itself
                dist.distributed_c10d._get_default_store().set(f"{self._key}/{self.rank}", place)

    def refuse_after_failure(self) -> None:
        """Raise if a collective has failed before.

        Raises:
            RuntimeError: ranks may be a step apart; only a restart from a checkpoint is safe.
        """
        if self.failure is not None:
            raise RuntimeError(
                f"a collective failed before ({self.failure}); ranks may be a step apart, so nothing more is done: "
                "restart from the last checkpoint"
            )

    def poison(self, reason: str) -> None:
        """Remember that this rank left the common order of collectives."""
        self.failure = self.failure or reason

    @contextlib.contextmanager
    def _doing(self, operation: str) -> Iterator[None]:
        self.refuse_after_failure()
        try:
            yield
        except RuntimeError as error:
            self.poison(f"{operation} at {self._place}")
            raise RuntimeError(
                f"rank {self.rank} at {self._place}: {operation} failed: {error}. {self._who_is_where()}"
            ) from error

    def _who_is_where(self) -> str:
        places = []
        for rank in range(self.world_size):
            key = f"{self._key}/{rank}"
            place = "unknown"
            with contextlib.suppress(Exception):
                store = dist.distributed_c10d._get_default_store()
                if store.check([key]):
                    place = store.get(key).decode()
            places.append(f"rank {rank}: {place}")
        return "Where each rank was last: " + "; ".join(places) + ". All ranks must make the same backwards and steps"

    # -- point to point

    def _send(self, data: Tensor, to: int, tag: int) -> Any:
        self.sent_bytes += data.numel() * data.element_size()
        return dist.isend(data, self._global[to], self.group, self._tag + tag)

    def _receive(self, data: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(data, self._global[source], self.group, self._tag + tag)

    # -- reduce-scatter

    def start_exchange(self, tag: int, rows: Sequence[Sequence[Part]], arrivals: Tensor) -> Exchange:
        """Send row j to rank j and receive this rank's row from everybody.

        Args:
            tag: the bucket's number, the same on all ranks.
            rows: by destination rank, the parts that make up its row; the own row is not copied. The cuts of the own
                row are those that every peer makes of it.
            arrivals: (N - 1, shard) elements of the rows' dtype, where the peers' rows land.
        """
        own = rows[self.rank]
        received: list[Sequence[Part]] = [own] * self.world_size
        works = []
        # The dtype is part of the tag: a peer that reduces FP32 sums (stage 1 after no_sync) while this rank sends 16
        # bits must end in a time-out and an error, not in gloo's abort on unequal sizes.
        tag = 4 * tag + (2 if arrivals.dtype == torch.float32 else 0)
        with self._doing("reduce-scatter"):
            for index, peer in enumerate(self._peers):
                source = self._peers[-1 - index]  # who sends to us at this distance
                landing = arrivals[index]
                cuts = [Part(part.offset, landing[part.offset : part.offset + part.data.numel()]) for part in own]
                received[source] = cuts
                works += [self._receive(part.data, source, tag) for part in cuts]
                works += [self._send(part.data, peer, tag) for part in rows[peer]]
        return Exchange(works, received, [part.data for row in rows for part in row])

    def finish_exchange(self, exchange: Exchange, shard: Tensor, *, accumulate: bool, squares: Tensor) -> None:
        """Wait, then form r0 + r1 + ... in FP32 in rank order and put it into (or add it to) `shard`.

        Args:
            shard: FP32, the rank's share of the gradient.
            accumulate: add the sum to what is there, in place of overwriting it.
            squares: FP32, one for each 1024 elements of the shard; receives the sum of squares of each block of the
                result, taken while the tile is in the cache.
        """
        self._wait(exchange.works, "reduce-scatter")
        for pieces in zip(*exchange.rows, strict=True):
            for start in range(0, pieces[0].data.numel(), TILE):
                stop = min(start + TILE, pieces[0].data.numel())
                offset = pieces[0].offset + start
                out = shard[offset : offset + stop - start]
                total = self._sum[: stop - start] if accumulate else out
                self._add_rows([piece.data[start:stop] for piece in pieces], total)
                if accumulate:
                    out.add_(total)
                blocks = squares[offset // 1024 : (offset + stop - start) // 1024]
                sum_squares(out.view(-1, 1024), blocks, self._scratch[: stop - start])

    def _add_rows(self, rows: Sequence[Tensor], total: Tensor) -> None:
        total.copy_(rows[0])
        for row in rows[1:]:
            if row.dtype == torch.float32:
                total.add_(row)
            else:  # FP32 += FP16 is seven times slower than a copy into scratch and an addition
                scratch = self._scratch[: row.numel()]
                scratch.copy_(row)
                total.add_(scratch)

    def reduce_native(self, rows: Tensor, out: Tensor) -> None:
        """The backend's own reduce-scatter: sums in the wire's dtype, in the backend's order.

        Args:
            rows: (N, shard) elements, contiguous.
            out: (shard,) of the same dtype.
        """
        if self.world_size == 1:
            out.copy_(rows.view(-1))
            return
        self.sent_bytes += self.native_factor * (self.world_size - 1) * out.numel() * out.element_size()
        with self._doing("reduce-scatter"):
            _reduce_scatter(out, rows.view(-1), op=dist.ReduceOp.SUM, group=self.group)

    @property
    def native_factor(self) -> int:
        """Bytes of the backend's own reduce-scatter, in rings: gloo sends an all-reduce's."""
        return 2 if self.device.type == "cpu" else 1

    # -- all-gather

    def start_gather(self, tag: int, rows: Tensor) -> list[Any]:
        """Send this rank's row of `rows` (N, shard) to everybody, and receive the others' in place."""
        works = []
        with self._doing("all-gather"):
            for peer in reversed(self._peers):
                works.append(self._receive(rows[peer], peer, 4 * tag + 1))
            for peer in self._peers:
                works.append(self._send(rows[self.rank], peer, 4 * tag + 1))
        return works

    def finish_gather(self, works: list[Any]) -> None:
        """Wait until every row is in place."""
        self._wait(works, "all-gather")

    def _wait(self, works: list[Any], operation: str) -> None:
        with self._doing(operation):
            for work in works:
                work.wait()

    # -- whole tensors

    def all_reduce(self, vector: Tensor) -> None:
        """Sum a small FP64 vector over ranks, in place."""
        if self.world_size > 1:
            self.sent_bytes += 2 * vector.numel() * vector.element_size() * (self.world_size - 1) // self.world_size
            with self._doing("verdict"):
                dist.all_reduce(vector, group=self.group)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the tensor of rank `source` (of the group), in place."""
        if self.world_size > 1:
            if self.rank == source:
                self.sent_bytes += tensor.numel() * tensor.element_size()
            with self._doing("broadcast"):
                dist.broadcast(tensor, self._global[source], group=self.group)

    def gather_objects(self, value: object) -> list[Any]:
        """What each rank has said, in rank order; for start-up only."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self._doing("meeting of the ranks"):
            dist.all_gather_object(found, value, group=self.group)
        return found


def sum_squares(blocks: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """The sum of squares of each row of `blocks` in FP32; a row's result depends on its own elements alone.

    torch adds a row in a cascade, so that rounding grows with the logarithm of its length; a norm's kernel adds one by one.
    """
    squares = torch.mul(blocks, blocks, out=None if scratch is None else scratch.view(blocks.shape))
    torch.sum(squares, dim=1, out=out)
