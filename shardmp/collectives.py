"""Everything that crosses between ranks.

Owns:      the calls of torch.distributed, and the count of bytes that they send.
Takes:     rows of 16-bit (or FP32) elements, and the FP32 (or FP64) shard into which they are summed; small vectors.
Gives:     the reduce-scatter in one hop or two (along the route and in the order of `exchange`), or the backend's own
           ("native"); the all-gather in place, the verdict's all-reduce, broadcasts at start-up.
Invariant: after one call has failed no other is made: ranks may be a step apart, and `step` and `save` must refuse.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, Part, RemotePart, Summation, route
from .faults import Member, Roll
from .messages import (
    CROSSING,
    FP32,
    GATHER,
    PUBLISHED,
    READ,
    SIXTEEN_BITS,
    TAKEN,
    Forwarded,
    Message,
    Staged,
    landing,
    pairs,
)
from .neighbours import Neighbours, Remote
from .poison import Poison
from .world import control_group

_instances = 0  # the largest number that an instance of this process has

# Deprecated names since torch 2.13; 2.11 has only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _must_stage(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    return device.type == "cuda" and str(dist.get_backend(group)) == "gloo"


class Collectives(Poison):
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
        self.is_staged = not alone and _must_stage(group, device)
        self.sent_bytes = 0
        self.facts: dict[str, Any] = {}
        """What this rank's parts hold that must be the same on all: compared in every step, see `agreed`."""
        self.agreed: dict[str, Any] = {}  # facts of the last step that this rank knows to have been the same on all
        self._has_control = False
        unmet = [Member.unmet(rank) for rank in self.ranks]
        unmet[self.rank] = Member.myself(self.ranks[self.rank])
        self._roll = Roll(self.rank, unmet, "shardmp/0")
        self.neighbours = Neighbours()
        number, members = self._meet()
        self._roll = Roll(self.rank, members, f"shardmp/{number}")
        self.route = route([member.host_id for member in members], self.rank)
        self._tag = number % 2**11 << 20  # of 31 bits; the bucket's number and the kind take the rest
        self._sum = Summation(device)
        self._said = torch.zeros(1, dtype=torch.int64, device="cpu")  # in messages that only say that something is done

    def _meet(self) -> tuple[int, list[Member]]:
        """A number that tells this instance's messages from those of others, the same on every rank; and who is here."""
        global _instances
        # Ranks may come late, from loading their data: this one waits as long as any collective does.
        probe = self.neighbours.probe if self.device.type == "cpu" else None
        told = self._gather((_instances, self._roll.members[self.rank], probe), self.group)
        _instances = 1 + max(number for number, _, _ in told)
        members = [member for _, member, _ in told]
        readable = self.neighbours.try_reading(self.rank, members, [probe for _, _, probe in told])
        self.neighbours.agree(self.rank, members, self._gather(readable, self.group))
        return _instances, members

    # -- where everybody is, and what happens when somebody is not there

    def at(self, place: str) -> None:
        """Tell the peers where this rank is ("step 3, backward 2"), for the error that names who was where."""
        self._roll.at(place)

    @contextlib.contextmanager
    def all_or_nothing(self, operation: str) -> Iterator[None]:
        """What is done inside leaves a mix where it does not come to its end: then nothing more is done."""
        try:
            yield
        except BaseException as error:
            self.poison(f"{operation} raised {type(error).__name__}: {error}")
            raise

    @contextlib.contextmanager
    def _doing(self, operation: str) -> Iterator[None]:
        self.refuse_after_failure()
        try:
            yield
        except RuntimeError as error:
            self.poison(f"{operation} at {self._roll.place}")
            raise RuntimeError(self._roll.explain(operation, str(error), self._is_broken) + self.because()) from error
        except BaseException as error:  # Ctrl-C: what was under way is lost
            self.poison(f"{operation} at {self._roll.place}: {type(error).__name__}")
            raise

    def _is_broken(self, rank: int) -> bool:
        """Whether a message to `rank` cannot even be sent; through the control group, whose connections nothing has used."""
        if not self._has_control:
            return False
        try:
            dist.isend(self._said, self.ranks[rank], control_group(self.group))  # not awaited: nobody receives it
        except RuntimeError:
            return True
        return False

    # -- point to point

    def _start(self, messages: Sequence[Message]) -> list[Any]:
        """Start messages together: NCCL pairs them in order, and knows no tags; one by one they would wait in a circle."""
        self.sent_bytes += sum(m.data.numel() * m.data.element_size() for m in messages if m.sends)
        if self.device.type == "cpu" or self.is_staged:
            return [self._start_alone(message) for message in messages]
        start = {True: dist.isend, False: dist.irecv}
        operations = [dist.P2POp(start[m.sends], m.data, self.ranks[m.peer], self.group) for m in messages]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _start_alone(self, message: Message) -> Any:
        """Under gloo each message is on its way by itself."""
        sends, data, peer, tag = message
        start = self._isend if sends else self._receive
        if not self.is_staged:
            return start(data, peer, tag)
        host = data.cpu() if sends else torch.empty_like(data, device="cpu")
        return Staged(start(host, peer, tag), host, None if sends else data)

    def _isend(self, data: Tensor, to: int, tag: int) -> Any:
        return dist.isend(data, self.ranks[to], self.group, self._tag + tag)

    def _receive(self, data: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(data, self.ranks[source], self.group, self._tag + tag)

    # -- reduce-scatter

    @property
    def far_members(self) -> int:
        """Members of the first hop, other than this rank, whose rows come through sockets and need a place to land."""
        return len(self.route.members) - 1 - len(self.neighbours)

    @property
    def unread(self) -> int:
        """Exchanges whose rows neighbours may still be reading while the next one is summed."""
        return 1 if self.neighbours else 0

    def start_exchange(self, tag: int, rows: Sequence[Sequence[Part]], arrivals: Tensor) -> Exchange:
        """The first hop, or the only one: send to each member the rows that it sums, and receive ours from all of them.

        A neighbour is sent the addresses of its rows, and reads them while it sums.

        Args:
            tag: the bucket's number, the same on all ranks.
            rows: by destination rank, the parts that make up its row; our own are not copied. Every rank makes the same
                cuts of a row.
            arrivals: (far members, rows that this rank sums, shard) elements of the rows' dtype, where rows land.
        """
        members, columns = self.route.members, self.route.columns
        me = members.index(self.rank)
        own = [rows[row] for row in columns[me]]
        exchange = Exchange([], [[*own] for _ in members], [part.data for row in rows for part in row])
        # The dtype is part of the tag: a peer that reduces FP32 sums (stage 1 after no_sync) while this rank sends 16
        # bits must end in a time-out and an error, not in gloo's abort on unequal sizes.
        exchange.tag = 8 * tag + (FP32 if arrivals.dtype == torch.float32 else SIXTEEN_BITS)
        landings = iter(arrivals)
        messages: list[Message] = []
        with self._doing("reduce-scatter"):
            for source, to in pairs(me, len(members)):
                if members[source] in self.neighbours:
                    exchange.rows[source] = self._ask_for(members[source], own, arrivals.dtype, exchange)
                else:
                    landed = [landing(row, place) for row, place in zip(own, next(landings), strict=True)]
                    exchange.rows[source] = [*landed]
                    messages += [Message(False, p.data, members[source], exchange.tag) for row in landed for p in row]
                parts = [part.data for row in columns[to] for part in rows[row]]
                if members[to] in self.neighbours:
                    self._tell(members[to], parts, exchange)
                else:
                    messages += [Message(True, data, members[to], exchange.tag) for data in parts]
            exchange.works += self._start(messages)
        return exchange

    def _ask_for(
        self, source: int, own: Sequence[Sequence[Part]], dtype: torch.dtype, exchange: Exchange
    ) -> list[Sequence[Part | RemotePart]]:
        """A neighbour's rows, cut as our own, at the addresses that it is about to tell."""
        addresses = torch.zeros(sum(len(row) for row in own), dtype=torch.int64, device="cpu")
        exchange.works.append(self._receive(addresses, source, exchange.tag))
        told, index = addresses.numpy(), itertools.count()  # a look at them is no operator of torch
        return [
            [
                RemotePart(p.offset, Remote(self.neighbours, source, told, next(index), p.data.numel(), dtype))
                for p in row
            ]
            for row in own
        ]

    def _tell(self, to: int, parts: Sequence[Tensor], exchange: Exchange) -> None:
        """Let a neighbour know where its rows lie, and listen for when it has read them."""
        self.sent_bytes += sum(data.numel() * data.element_size() for data in parts)
        addresses = torch.tensor([data.data_ptr() for data in parts], dtype=torch.int64, device="cpu")
        exchange.sent.append(addresses)
        exchange.readers.append(to)
        exchange.works.append(self._isend(addresses, to, exchange.tag))
        exchange.read.append(self._receive(torch.empty_like(self._said), to, exchange.tag + READ))

    def say_read(self, exchange: Exchange) -> None:
        """The rows of an exchange have been used: their memory at the neighbours may be written again."""
        with self._doing("reduce-scatter"):
            exchange.read += [self._isend(self._said, peer, exchange.tag + READ) for peer in exchange.readers]

    def wait_until_read(self, exchange: Exchange) -> None:
        """Wait until the neighbours have read our rows of it."""
        self._wait(exchange.read, "reduce-scatter")

    def start_crossing(self, tag: int, sums: Tensor, arrivals: Tensor) -> Exchange:
        """The second hop: send each host's rank of our column its row of this host's sums, and receive ours.

        Args:
            sums: (hosts, shard) FP32 (exact: FP64), by host.
            arrivals: (hosts - 1, shard) of the same dtype, where the other hosts' sums of our row land.
        """
        across = self.route.across
        me = across.index(self.rank)
        found: list[list[Sequence[Part | RemotePart]]] = [[[Part(0, sums[me])]] for _ in across]
        messages = []
        for index, (source, to) in enumerate(pairs(me, len(across))):
            found[source] = [[Part(0, arrivals[index])]]
            messages.append(Message(False, arrivals[index], across[source], 8 * tag + CROSSING))
            messages.append(Message(True, sums[to], across[to], 8 * tag + CROSSING))
        with self._doing("reduce-scatter across hosts"):
            return Exchange(self._start(messages), found, [sums])

    def finish_exchange(
        self, exchange: Exchange, out: Tensor, *, accumulate: bool, squares: Tensor, **over: Tensor
    ) -> None:
        """Wait until the rows are there, then sum them: see `Summation`.

        Args:
            out: (rows, shard) FP32, or FP64.
            squares: (rows, shard / 1024) FP32.
            over: of a single row, `rest` or `kept`.
        """
        assert not over or out.size(0) == 1
        self._wait(exchange.works, "reduce-scatter")
        with self._doing("reduce-scatter"):
            for index in range(out.size(0)):
                rows = [source[index] for source in exchange.rows]
                self._sum(rows, out[index], accumulate=accumulate, squares=squares[index], **over)

    def start_native(self, rows: Tensor, out: Tensor) -> Exchange:
        """The backend's own reduce-scatter: sums in the wire's dtype, in the backend's order.

        Args:
            rows: (N, shard) elements, contiguous.
            out: (shard,) of the same dtype.
        """
        if self.world_size == 1:
            out.copy_(rows.view(-1))
            return Exchange([], [], [rows])
        self.sent_bytes += self.native_factor * (self.world_size - 1) * out.numel() * out.element_size()
        with self._doing("reduce-scatter"):
            work = _reduce_scatter(out, rows.view(-1), op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return Exchange([work], [], [rows])

    def finish_native(self, exchange: Exchange) -> None:
        """Wait until the sum is there."""
        self._wait(exchange.works, "reduce-scatter")

    @property
    def native_factor(self) -> int:
        """Bytes of the backend's own reduce-scatter, in rings: gloo sends an all-reduce's."""
        return 2 if self.device.type == "cpu" else 1

    # -- all-gather

    def start_gather(self, tag: int, rows: Tensor) -> list[Any]:
        """Send this rank's row of `rows` (N, shard) to everybody but neighbours, and receive theirs in place.

        With two hops it crosses to the other hosts' ranks of this column, and a thread hands on what arrives from there,
        so that no rank waits for another one's next forward.
        """
        if self.device.type == "cuda" and not self.is_staged:
            return self._start_nccl_gather(rows)
        tag = 8 * tag + GATHER
        members, columns, across = self.route.members, self.route.columns, self.route.across
        me, here = members.index(self.rank), across.index(self.rank)
        foreign = [row for row in columns[me] if row != self.rank]
        own = rows[self.rank]
        crossing: list[Message] = []
        inside: list[Message] = []
        for source, to in pairs(here, len(across)):
            crossing.append(Message(False, rows[across[source]], across[source], tag))
            inside.append(Message(True, own, across[to], tag))
        for source, to in pairs(me, len(members)):
            if members[source] not in self.neighbours:
                inside.append(Message(False, rows[members[source]], members[source], tag))
            others = [row for row in columns[source] if row != members[source]]
            inside += [Message(False, rows[row], members[source], tag) for row in others]
            if members[to] not in self.neighbours:
                inside.append(Message(True, own, members[to], tag))
        with self._doing("all-gather"):
            arriving, works = self._start(crossing), self._start(inside)
        if crossing:
            self.sent_bytes += (len(members) - 1) * len(foreign) * own.numel() * own.element_size()
            peers = [members[to] for _, to in pairs(me, len(members))]
            works.append(Forwarded(self._forwarder.submit(self._hand_on, arriving, rows, foreign, peers, tag)))
        return works

    def _start_nccl_gather(self, rows: Tensor) -> list[Any]:
        """NCCL crosses between hosts once by itself, and in its own order: a thread of ours would bring another one."""
        if self.world_size == 1:
            return []
        own = rows[self.rank]
        self.sent_bytes += (self.world_size - 1) * own.numel() * own.element_size()
        with self._doing("all-gather"):
            return [_all_gather(rows.view(-1), own, group=self.group, async_op=True)]

    def _hand_on(self, crossing: list[Any], rows: Tensor, foreign: list[int], peers: list[int], tag: int) -> list[Any]:
        """In a thread: what came from other hosts goes to the ranks of this one."""
        for work in crossing:
            work.wait()
        return [self._start_alone(Message(True, rows[row], peer, tag)) for peer in peers for row in foreign]

    @cached_property
    def _forwarder(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "shardmp-gather")

    def finish_gather(self, works: list[Any]) -> None:
        """Wait until every row is in place."""
        self._wait(works, "all-gather")

    def read_neighbours_rows(self, buckets: Sequence[Tensor], addresses: Sequence[Sequence[int]]) -> None:
        """Fill in the neighbours' rows of all buckets; every rank has written its own before it calls.

        Returns when the neighbours have read this rank's rows too: then it may write them.

        Args:
            buckets: (N, shard) each.
            addresses: by rank, where its buckets lie.
        """
        if not self.neighbours:
            return
        with self._doing("all-gather"):
            self._meet_neighbours(PUBLISHED)
            for rank in self.neighbours.ranks:
                for rows, address in zip(buckets, addresses[rank], strict=True):
                    row = rows[rank]
                    self.neighbours.read(rank, address + rank * row.numel() * row.element_size(), row)
            self._meet_neighbours(TAKEN)
        self.sent_bytes += len(self.neighbours) * sum(rows[0].numel() * rows.element_size() for rows in buckets)

    def _meet_neighbours(self, kind: int) -> None:
        """Wait until each neighbour has come here too."""
        peers = self.neighbours.ranks
        works = [self._receive(torch.empty_like(self._said), peer, kind) for peer in peers]
        works += [self._isend(self._said, peer, kind) for peer in peers]
        for work in works:
            work.wait()

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

    def gather_objects(self, value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
        """What each rank has said, in rank order.

        Args:
            group: of the same ranks; by default the control group with its short timeout, where all are about to speak.
        """
        if group is None and self.world_size > 1:
            group = control_group(self.group)
            self._has_control = True
        return self._gather(value, group)

    def _gather(self, value: object, group: dist.ProcessGroup | None) -> list[Any]:
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self._doing("meeting of the ranks"):
            dist.all_gather_object(found, value, group=group)
        return found
