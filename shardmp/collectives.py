"""Everything that crosses between ranks.

Owns:      the calls of torch.distributed, the count of bytes that they send, and the memory of a failure.
Takes:     rows of 16-bit (or FP32) elements, and the FP32 (or FP64) shard into which they are summed; small vectors.
Gives:     the reduce-scatter in one hop or two (along the route and in the order of `exchange`), or the backend's own
           ("native"); the all-gather in place, the verdict's all-reduce, broadcasts at start-up.
Invariant: after one call has failed no other is made: ranks may be a step apart, and `step` and `save` must refuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, Part, Summation, route
from .faults import Member, Roll
from .world import control_group

_instances = 0  # the largest number that an instance of this process has

# Deprecated names since torch 2.13; 2.11 has only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        self.ranks = [0] if alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        self.failure: str | None = None
        self.sent_bytes = 0
        self._has_control = False
        unmet = [Member.unmet(rank) for rank in self.ranks]
        unmet[self.rank] = Member.myself(self.ranks[self.rank])
        self._roll = Roll(self.rank, unmet, "shardmp/0")
        number, members = self._meet()
        self._roll = Roll(self.rank, members, f"shardmp/{number}")
        self.route = route([member.host_id for member in members], self.rank)
        self._tag = number % 2**11 << 20  # of 31 bits; the bucket's number takes the rest
        self._sum = Summation(device)

    def _meet(self) -> tuple[int, list[Member]]:
        """A number that tells this instance's messages from those of others, the same on every rank; and who is here."""
        global _instances
        # Ranks may come late, from loading their data: this one waits as long as any collective does.
        told = self._gather((_instances, self._roll.members[self.rank]), self.group)
        _instances = 1 + max(number for number, _ in told)
        return _instances, [member for _, member in told]

    # -- where everybody is, and what happens when somebody is not there

    def at(self, place: str) -> None:
        """Tell the peers where this rank is ("step 3, backward 2"), for the error that names who was where."""
        self._roll.at(place)

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
            self.poison(f"{operation} at {self._roll.place}")
            raise RuntimeError(self._roll.explain(operation, str(error), self._is_broken)) from error

    def _is_broken(self, rank: int) -> bool:
        """Whether a message to `rank` cannot even be sent; through the control group, whose connections nothing has used."""
        if not self._has_control:
            return False
        try:
            dist.isend(torch.zeros(1), self.ranks[rank], control_group(self.group))  # not awaited: nobody receives it
        except RuntimeError:
            return True
        return False

    # -- point to point

    def _send(self, data: Tensor, to: int, tag: int) -> Any:
        self.sent_bytes += data.numel() * data.element_size()
        return self._isend(data, to, tag)

    def _isend(self, data: Tensor, to: int, tag: int) -> Any:
        return dist.isend(data, self.ranks[to], self.group, self._tag + tag)

    def _receive(self, data: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(data, self.ranks[source], self.group, self._tag + tag)

    # -- reduce-scatter

    def start_exchange(self, tag: int, rows: Sequence[Sequence[Part]], arrivals: Tensor) -> Exchange:
        """The first hop, or the only one: send to each member the rows that it sums, and receive ours from all of them.

        Args:
            tag: the bucket's number, the same on all ranks.
            rows: by destination rank, the parts that make up its row; our own are not copied. Every rank makes the same
                cuts of a row.
            arrivals: (members - 1, rows that this rank sums, shard) elements of the rows' dtype, where rows land.
        """
        members, columns = self.route.members, self.route.columns
        me = members.index(self.rank)
        found: list[list[Sequence[Part]]] = [[rows[row] for row in columns[me]] for _ in members]
        works = []
        # The dtype is part of the tag: a peer that reduces FP32 sums (stage 1 after no_sync) while this rank sends 16
        # bits must end in a time-out and an error, not in gloo's abort on unequal sizes.
        tag = 4 * tag + (2 if arrivals.dtype == torch.float32 else 0)
        with self._doing("reduce-scatter"):
            for index, (source, to) in enumerate(_pairs(me, len(members))):
                for place, row in enumerate(columns[me]):
                    landing = arrivals[index, place]
                    cuts = [Part(p.offset, landing[p.offset : p.offset + p.data.numel()]) for p in rows[row]]
                    found[source][place] = cuts
                    works += [self._receive(part.data, members[source], tag) for part in cuts]
                for row in columns[to]:
                    works += [self._send(part.data, members[to], tag) for part in rows[row]]
        return Exchange(works, found, [part.data for row in rows for part in row])

    def start_crossing(self, tag: int, sums: Tensor, arrivals: Tensor) -> Exchange:
        """The second hop: send each host's rank of our column its row of this host's sums, and receive ours.

        Args:
            sums: (hosts, shard) FP32 (exact: FP64), by host.
            arrivals: (hosts - 1, shard) of the same dtype, where the other hosts' sums of our row land.
        """
        across = self.route.across
        me = across.index(self.rank)
        found: list[list[Sequence[Part]]] = [[[Part(0, sums[me])]] for _ in across]
        works = []
        with self._doing("reduce-scatter across hosts"):
            for index, (source, to) in enumerate(_pairs(me, len(across))):
                found[source] = [[Part(0, arrivals[index])]]
                works.append(self._receive(arrivals[index], across[source], 4 * tag + 3))
                works.append(self._send(sums[to], across[to], 4 * tag + 3))
        return Exchange(works, found, [sums])

    def finish_exchange(
        self, exchange: Exchange, out: Tensor, *, accumulate: bool, squares: Tensor, rest: Tensor | None = None
    ) -> None:
        """Wait until the rows are there, then sum them: see `Summation`.

        Args:
            out: (rows, shard) FP32, or FP64.
            squares: (rows, shard / 1024) FP32.
            rest: (rows, shard) FP32 or nothing.
        """
        self._wait(exchange.works, "reduce-scatter")
        for index in range(out.size(0)):
            rows = [source[index] for source in exchange.rows]
            over = None if rest is None else rest[index]
            self._sum(rows, out[index], accumulate=accumulate, squares=squares[index], rest=over)

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
        """Send this rank's row of `rows` (N, shard) to everybody, and receive the others' in place.

        With two hops it crosses to the other hosts' ranks of this column, and a thread hands on what arrives from there,
        so that no rank waits for another one's next forward.
        """
        tag = 4 * tag + 1
        members, columns, across = self.route.members, self.route.columns, self.route.across
        me, here = members.index(self.rank), across.index(self.rank)
        foreign = [row for row in columns[me] if row != self.rank]
        own = rows[self.rank]
        works, crossing = [], []
        with self._doing("all-gather"):
            for source, to in _pairs(here, len(across)):
                crossing.append(self._receive(rows[across[source]], across[source], tag))
                works.append(self._send(own, across[to], tag))
            for source, to in _pairs(me, len(members)):
                others = [row for row in columns[source] if row != members[source]]
                works += [self._receive(rows[row], members[source], tag) for row in (members[source], *others)]
                works.append(self._send(own, members[to], tag))
        if crossing:
            self.sent_bytes += (len(members) - 1) * len(foreign) * own.numel() * own.element_size()
            peers = [members[to] for _, to in _pairs(me, len(members))]
            works.append(_Forwarded(self._forwarder.submit(self._hand_on, crossing, rows, foreign, peers, tag)))
        return works

    def _hand_on(self, crossing: list[Any], rows: Tensor, foreign: list[int], peers: list[int], tag: int) -> list[Any]:
        """In a thread: what came from other hosts goes to the ranks of this one."""
        for work in crossing:
            work.wait()
        return [self._isend(rows[row], peer, tag) for peer in peers for row in foreign]

    @cached_property
    def _forwarder(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "shardmp-gather")

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
                dist.broadcast(tensor, self.ranks[source], group=self.group)

    def gather_objects(self, value: object) -> list[Any]:
        """What each rank has said, in rank order, where all are about to speak: through the short-timeout control group."""
        found = self._gather(value, control_group(self.group) if self.world_size > 1 else None)
        self._has_control = self.world_size > 1
        return found

    def _gather(self, value: object, group: dist.ProcessGroup | None) -> list[Any]:
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self._doing("meeting of the ranks"):
            dist.all_gather_object(found, value, group=group)
        return found


class _Forwarded:
    """The work of sending on what a thread waits for."""

    def __init__(self, future: Future[list[Any]]) -> None:
        self._future = future

    def wait(self) -> None:
        for work in self._future.result():
            work.wait()


def _pairs(me: int, count: int) -> list[tuple[int, int]]:
    """From whom to receive and to whom to send, by distance: everybody talks to another one at each moment."""
    return [((me - distance) % count, (me + distance) % count) for distance in range(1, count)]
