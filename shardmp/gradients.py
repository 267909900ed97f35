"""From autograd's gradients to this rank's FP32 gradient shard, while backward goes on.

Owns:      the hooks on parameters, the 16-bit send buffers, the fixed order of launches, the FP32 gradient shard.
Takes:     gradients as autograd leaves them in `.grad`, in any order, on any subset of the parameters.
Gives:     the shard with the sum over ranks and backwards, its blocks' squares, who had gradients, who brought inf or NaN.
Invariant: every rank launches the same buckets in the same order; when backward returns, all of them are summed.

[Note: who owns a gradient] A hook takes `.grad` away as soon as autograd has written it. A small gradient is copied
into the bucket's send buffer and freed. A large contiguous one is the send buffer itself: it is kept, unwritten,
until the exchange is over; where neighbours read it, until they say so, for which one bucket more may wait. Send
buffers and landing rows are pooled: as many exist as buckets were ever in flight at one time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .bucket_gradients import Borrowed, BucketGradients, Flight, Pool
from .collectives import Collectives
from .exact import MAX_PAIRED, MAX_TERMS
from .exchange import Part, sum_squares
from .layout import BLOCK, Layout
from .nested_backward import refuse_inside_another_backward
from .ranges import in_range

# Exchanges in flight before the oldest is awaited: one arrives while the next is filled.
WINDOW = 2


class Gradients:
    """The gradients of all trainable parameters.

    Args:
        layout: where each parameter lies.
        parameters: the trainable parameters, by their index in the layout.
        names: their names, for errors.
        collectives: the shard group.
        dtypes: the dtype of each bucket by the layout's word for it.
        native: sum with the backend's own reduce-scatter, in the wire's dtype.
        exact: sum in FP64, which no order can change.
        local_sums: stage 1: under `no_sync` whole gradients are added up locally, in FP32.
        overlap: let exchanges run while backward goes on.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        collectives: Collectives,
        dtypes: dict[str, torch.dtype],
        *,
        native: bool,
        exact: bool,
        local_sums: bool,
        overlap: bool,
    ) -> None:
        self.layout = layout
        self.names = names
        self.native = native
        self.exact = exact
        self.local_sums = local_sums
        self.window = WINDOW if overlap else 0
        self._collectives = collectives
        device = collectives.device
        self.buckets = [
            BucketGradients(bucket, collectives.rank, dtypes[bucket.dtype], device, direct=not native, exact=exact)
            for bucket in layout.buckets
        ]
        self._owner = {slot.param: found for found in self.buckets for slot in found.bucket.slots}
        self._route = collectives.route
        self._far, hosts = collectives.far_members, self._route.num_hosts
        self._sends: dict[torch.dtype, Pool] = {}
        self._landings: dict[torch.dtype, Pool] = {}
        for dtype in {bucket.dtype for bucket in self.buckets}:
            sizes = [found.bucket for found in self.buckets if found.dtype == dtype]
            self._sends[dtype] = Pool(max(bucket.size for bucket in sizes), dtype, device)
            landing = self._far * hosts * max(bucket.shard for bucket in sizes)
            self._landings[dtype] = Pool(landing, dtype, device)
        shard = max((bucket.shard for bucket in layout.buckets), default=0)
        # Of any bucket: where local FP32 sums land, the sums of this host's ranks, and where other hosts' sums land.
        sums = torch.float64 if exact else torch.float32
        self._local_landings = Pool(self._far * hosts * shard, torch.float32, device)
        self._host_sums = Pool(hosts * shard, sums, device)
        self._host_landings = Pool((hosts - 1) * shard, sums, device)
        self._owners = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *(b.owners for b in self.buckets)])
        self._flying: list[Flight] = []  # in the first hop, or in the only one
        self._crossing: list[Flight] = []  # in the second
        self._read: list[Flight] = []  # summed here; neighbours may not have read all of our rows
        self._next = 0
        self.in_backward = False
        self.synchronising = True  # False under no_sync in stage 1
        self.armed = True  # False between step and the next scaled loss, where losses are scaled
        self.peers: Callable[[], list[Gradients]] = lambda: [self]  # of models under the same loss
        self.check_begin: Callable[[], None] = lambda: None
        self.at_begin: Callable[[], None] = lambda: None
        self.at_end: list[Callable[[], None]] = []
        self.backwards = 0
        self._one_expected = True
        self.seen: list[bool] = [False] * len(names)
        self._held = self.seen
        self.reset()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_for(index))
            for index, parameter in enumerate(parameters)
            if parameter.numel()
        ]

    def reset(self) -> None:
        """This step's backwards are used up: forget what they have brought."""
        if self.backwards:  # a second reset tells nothing of how many there will be
            self._one_expected = self.backwards == 1
        if self.seen != self._held:
            self._held = [held or seen for held, seen in zip(self._held, self.seen, strict=True)]
        self.backwards = 0
        self.reduced = False
        self.seen = [False] * len(self.names)
        self.brought = torch.zeros(self.layout.ranks + 1, 2, dtype=torch.float64, device=self._collectives.device)
        self._local: list[Tensor | None] = [None] * len(self.buckets)
        self._locally_summed = False

    def drop(self, *, set_to_none: bool) -> None:
        """What `zero_grad` does.

        Args:
            set_to_none: no parameter has a gradient any more; otherwise each that had one, since it was last taken away,
                takes part in the next step with a gradient of zero or more, as in torch.
        """
        self.reset()
        if set_to_none:
            self._held = [False] * len(self.names)
        self.seen = list(self._held)

    @property
    def unsynced(self) -> bool:
        """Whether the last backward was under `no_sync`, and no other has reduced what it has brought."""
        return self._locally_summed

    # -- one backward

    def begin(self) -> None:
        """The first gradient, or the gradient of the loss itself, has been reached: a backward begins."""
        if self.in_backward:
            return
        self._collectives.refuse_after_failure()
        self.refuse_to_begin()
        self.in_backward = True  # first, and False last: what is broken off between is seen by whoever comes next
        self.backwards += 1
        self._next = 0
        self._locally_summed |= not self.synchronising
        for bucket in self.buckets:
            bucket.arrived.clear()
            if bucket.exact is not None and self.reduced:
                bucket.exact.widen()
        self.at_begin()

    def refuse_to_begin(self) -> None:
        """Raise where a further backward must not begin; nothing has been changed.

        Raises:
            RuntimeError: a gradient is there that no backward has brought, or a frozen parameter is frozen no longer.
            ValueError: with `exact`, more gradients than FP64 adds without rounding.
        """
        self.check_begin()
        if self.exact and (self.backwards + 1) * self.layout.ranks > MAX_TERMS:
            raise ValueError(
                f"reduce='exact': {self.backwards + 1} backwards on {self.layout.ranks} ranks before a step are more than "
                f"{MAX_TERMS} gradients, the most that FP64 adds without rounding: step more often, or use reduce='fp32'"
            )

    def begin_in_autograd(self) -> None:
        """As `begin`, from inside a backward, whose end will be the end of ours.

        The engine's callback is private in torch; DistributedDataParallel and FSDP2 stand on it too.
        """
        if not self.in_backward:
            refuse_inside_another_backward()
            self.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_all)

    def _end_all(self) -> None:
        # Models are reached in different order on different ranks, and what ends their backward has one order.
        for gradients in self.peers():
            if gradients.in_backward:
                gradients.end()

    def _hook_for(self, index: int) -> Callable[[Tensor], None]:
        # The garbage collector does not see the hooks of a tensor: a strong reference would keep a dropped model alive.
        owner = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            gradients = owner()
            if gradients is None:
                return
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                raise RuntimeError(
                    f"the gradient of {gradients.names[index]} was taken away by a post-accumulate-grad hook that was "
                    "registered before shard(): remove it; optimizer.step() updates every parameter"
                )
            gradients._receive(index, gradient)

        return hook

    def _receive(self, index: int, gradient: Tensor) -> None:
        name = self.names[index]
        if not self.armed:
            raise RuntimeError(
                f"a gradient of {name} arrived though no loss was scaled since the last step: call "
                "optimizer.backward(loss), or optimizer.scale(loss).backward(), in place of loss.backward(), and leave a "
                "GradScaler out: the update would be off by the loss scale"
            )
        if gradient.is_sparse:
            raise TypeError(f"the gradient of {name} is sparse: make its layer with sparse=False")
        self.begin_in_autograd()
        bucket = self._owner[index]
        if index in bucket.arrived:
            raise RuntimeError(
                f"{name} received a second gradient in one backward (reentrant activation checkpointing does that): use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self.seen[index] = True
        gradient = gradient.to(bucket.dtype)  # `p.grad_dtype` may make it another one than what is sent and summed
        if self._locally_summed:
            bucket.arrived.add(index)
            slot = bucket.slots[index]
            local = self._local_sum(bucket)[slot.start : slot.start + slot.numel]
            local.view(gradient.shape).add_(gradient)
        else:
            bucket.take(index, gradient, lambda: self._flat(bucket))
        if self.synchronising and not self._must_keep_order():
            self._launch_complete()

    def _must_keep_order(self) -> bool:
        """NCCL knows no tags: models under one loss, which backward reaches in any order, are launched at its end."""
        return self._collectives.device.type == "cuda" and len(self.peers()) > 1

    def _flat(self, bucket: BucketGradients) -> Tensor:
        if bucket.flat is None:
            bucket.flat = self._sends[bucket.dtype].get()
        return bucket.flat

    def _local_sum(self, bucket: BucketGradients) -> Tensor:
        found = self._local[bucket.bucket.index]
        if found is None:
            found = torch.zeros(bucket.bucket.size, dtype=torch.float32, device=self._collectives.device)
            self._local[bucket.bucket.index] = found
        return found

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if len(bucket.arrived) < len(bucket.slots):
                return
            self._launch(bucket)

    def end(self) -> None:
        """Backward is over: launch the rest, absent gradients as zeros, and wait until all is summed."""
        if self.synchronising:
            while self._next < len(self.buckets):
                self._launch(self.buckets[self._next])
            self._land_all()
            self.reduced = True
            self._local = [None] * len(self.buckets)
            self._locally_summed = False
        for then in self.at_end:
            then()
        self.in_backward = False

    @in_range("shardmp.reduce")
    def _land_all(self) -> None:
        while self._flying:
            self._land()
        while self._crossing:
            self._land_from_hosts()
        while self._read:
            self._take_back()

    @in_range("shardmp.reduce")
    def _launch(self, bucket: BucketGradients) -> None:
        self._next += 1
        local = self._local_sum(bucket) if self._locally_summed else None
        if self.native:
            self._flying.append(self._launch_native(bucket, local))
        else:
            self._flying.append(self._launch_exchange(bucket, local))
        bucket.flat, bucket.direct = None, {}
        while len(self._flying) > self.window:
            self._land()

    def _launch_exchange(self, bucket: BucketGradients, local: Tensor | None) -> Flight:
        shape = (self._far, self._route.num_hosts, bucket.bucket.shard)
        landing = Borrowed(self._landings[bucket.dtype] if local is None else self._local_landings, shape)
        if local is not None:
            rows = [[Part(0, row)] for row in local.view(bucket.bucket.ranks, -1)]
        else:
            rows = bucket.rows(lambda: self._flat(bucket))
        exchange = self._collectives.start_exchange(bucket.bucket.index, rows, landing.tensor)
        return Flight(bucket, exchange, [landing, *self._borrowed_flat(bucket)])

    def _launch_native(self, bucket: BucketGradients, local: Tensor | None) -> Flight:
        if local is None:
            bucket.rows(lambda: self._flat(bucket))
        flat = self._flat(bucket)[: bucket.bucket.size] if local is None else local
        total = torch.empty(bucket.bucket.shard, dtype=flat.dtype, device=flat.device)
        exchange = self._collectives.start_native(flat.view(bucket.bucket.ranks, -1), total)
        return Flight(bucket, exchange, self._borrowed_flat(bucket), total)

    def _borrowed_flat(self, bucket: BucketGradients) -> list[Borrowed]:
        return [] if bucket.flat is None else [Borrowed(self._sends[bucket.dtype], (), bucket.flat)]

    def _land(self) -> None:
        """The oldest exchange is awaited and summed; where there is a second hop, its sums go across."""
        flight = self._flying.pop(0)
        if flight.total is not None:
            self._add_native(flight, flight.total)
            return
        if self._route.num_hosts == 1:
            self._sum_shard(flight, self._route.members)
            return
        bucket, hosts = flight.bucket, self._route.num_hosts
        sums = Borrowed(self._host_sums, (hosts, bucket.bucket.shard))
        squares = torch.empty(hosts, bucket.bucket.shard // BLOCK, dtype=torch.float32, device=sums.tensor.device)
        self._collectives.finish_exchange(flight.exchange, sums.tensor, accumulate=False, squares=squares)
        rows, members = flight.exchange.rows, self._route.members
        self._blame(bucket.culprits(rows, members, self._route.across, sums.tensor, squares))
        self._have_read(flight)
        landing = Borrowed(self._host_landings, (hosts - 1, bucket.bucket.shard))
        exchange = self._collectives.start_crossing(bucket.bucket.index, sums.tensor, landing.tensor)
        self._crossing.append(Flight(bucket, exchange, [sums, landing]))
        while len(self._crossing) > self.window:
            self._land_from_hosts()

    def _land_from_hosts(self) -> None:
        self._sum_shard(self._crossing.pop(0), [None] * self._route.num_hosts)

    def _sum_shard(self, flight: Flight, sources: Sequence[int | None]) -> None:
        bucket, exact = flight.bucket, flight.bucket.exact
        shard, over = bucket.shard, dict[str, Tensor]()
        if exact is not None:
            # Where the step before had several backwards, splitting the sums would be a detour.
            wide = self.reduced or not self._one_expected or self.layout.ranks > MAX_PAIRED
            are_fp16 = bucket.dtype == torch.float16 and self._route.num_hosts == 1
            shard, over = exact.receive(len(sources) if are_fp16 else None, wide=wide)
        squares = bucket.block_squares.view(1, -1)
        self._collectives.finish_exchange(
            flight.exchange, shard.view(1, -1), accumulate=self.reduced, squares=squares, **over
        )
        bucket.square_units()
        self._blame(
            bucket.culprits(flight.exchange.rows, sources, [self._collectives.rank], shard.view(1, -1), squares)
        )
        self._have_read(flight)

    def _have_read(self, flight: Flight) -> None:
        """The rows of a hop are used up here; ours are, once the neighbours say so."""
        self._collectives.say_read(flight.exchange)
        self._read.append(flight)
        while len(self._read) > self._collectives.unread:
            self._take_back()

    def _take_back(self) -> None:
        flight = self._read.pop(0)
        self._collectives.wait_until_read(flight.exchange)
        flight.give_back()

    def _add_native(self, flight: Flight, total: Tensor) -> None:
        bucket = flight.bucket
        self._collectives.finish_native(flight.exchange)
        if self.reduced:
            bucket.shard.add_(total.float())
        else:
            bucket.shard.copy_(total)
        sum_squares(bucket.shard.view(-1, BLOCK), bucket.block_squares)
        bucket.square_units()
        shard, squares = bucket.shard.view(1, -1), bucket.block_squares.view(1, -1)
        self._blame(bucket.culprits([], [], [self._collectives.rank], shard, squares))  # the sum hides who brought what
        flight.give_back()

    def _blame(self, counts: Tensor | None) -> None:
        if counts is not None:
            self.brought += counts

    # -- what the others read

    def round(self, index: int) -> None:
        """The update may read the FP32 shard of a bucket: exact sums are rounded here, once."""
        exact = self.buckets[index].exact
        if exact is not None:
            exact.round()

    @property
    def num_hosts(self) -> int:
        """Hosts of the reduction's second hop; 1 where there is none, as in the backend's own reduction."""
        return 1 if self.native else self._route.num_hosts

    def squares(self) -> tuple[Tensor, Tensor]:
        """Sums of squares of this rank's blocks, FP64, and the parameter that each belongs to."""
        squares = torch.cat([bucket.squares() for bucket in self.buckets])
        return squares, self._owners

    def absent(self) -> list[int]:
        """Parameters that had no gradient on this rank since the last step."""
        return [index for index, seen in enumerate(self.seen) if not seen and index in self._owner]

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of the sums."""
        return 8 if self.exact else 4

    @property
    def bytes(self) -> int:
        """Bytes of the gradient shard, and of local whole sums while `no_sync` keeps them."""
        local = [found for found in self._local if found is not None]
        sums = [bucket.shard if bucket.exact is None else bucket.exact.wide for bucket in self.buckets]
        return sum(tensor.numel() * tensor.element_size() for tensor in sums + local)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the send buffers, landing rows and hosts' sums that exist."""
        pools = [*self._sends.values(), *self._landings.values(), self._local_landings]
        pools += [self._host_sums, self._host_landings]
        return sum(pool.bytes for pool in pools)
