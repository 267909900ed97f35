"""The whole parameters, in 16 bits, as views of flat buckets that are gathered under the next forward.

Owns:      the flat parameter buckets, this rank's FP32 master shards, and who may read what when.
Takes:     the model's FP32 parameters once, at the start; updated masters at each step.
Gives:     parameters that are the rounding of the masters wherever they are read through the wrapper.
Invariant: nobody reads a bucket that is not READY through the wrapper; a write is seen by autograd's version counters.

[Note: who writes a bucket] In `step` the owner rounds its master shard into its own row, and the peers' rows arrive
in place: neighbours' before `step` returns, others from then until `ready`, while the bucket is GATHERING. `p.data =
view` gives a parameter a version counter of its own, so each publication bumps the counters by hand: a backward
through a forward of before the step raises, as it does in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .agreed import LOADED
from .checksum import crc32
from .collectives import Collectives
from .exchange import TILE
from .layout import Bucket, Layout
from .ranges import in_range, named_range

FP16_LIMIT = 65520.0  # the smallest magnitude that rounds to inf; 65504 is the largest number


class State(Enum):
    """What may be done with a bucket's whole parameters."""

    GATHERING = "rows are arriving: nobody may read"
    READY = "the rounding of the masters, on every rank"


class BucketParameters:
    """One bucket: the flat whole parameters, and this rank's FP32 masters."""

    def __init__(self, bucket: Bucket, flat: Tensor, master: Tensor, params: Sequence[nn.Parameter], rank: int) -> None:
        self.bucket = bucket
        self.flat = flat  # (N * shard,) of the parameters' dtype
        self.master = master  # (shard,) FP32; this rank's row of `flat` itself where the parameters are FP32
        self.params = params
        self.own = flat.view(bucket.ranks, -1)[rank]
        self.state = State.READY
        self.works: list[Any] = []
        self._in_cache = flat.device.type == "cpu"
        tiles = -(-bucket.shard // TILE)
        # (min, max) of each tile of the masters; on the CPU
        self.extremes = torch.zeros(tiles, 2, dtype=torch.float32, device=flat.device)
        self.pieces = bucket.pieces(rank)

    @property
    def is_rounded(self) -> bool:
        """Whether parameters have fewer bits than masters."""
        return self.flat.dtype != torch.float32

    def round(self) -> None:
        """Put the rounding of the masters into this rank's row, and note how large they are."""
        if not self.is_rounded:
            return
        if not self._in_cache:
            self.own.copy_(self.master)
            return
        for tile, start in enumerate(range(0, self.bucket.shard, TILE)):
            masters = self.master[start : start + TILE]
            self.own[start : start + TILE].copy_(masters)
            if self.flat.dtype == torch.float16:
                torch.aminmax(masters, out=(self.extremes[tile, 0], self.extremes[tile, 1]))


class Parameters:
    """All trainable parameters of a model.

    Building it broadcasts rank 0's values, keeps this rank's FP32 masters, and turns every parameter into a view of its
    bucket, bucket by bucket: no whole FP32 copy exists beside the user's model, which is released on the way.

    Args:
        layout: where each parameter lies.
        parameters: the trainable parameters, by their index in the layout; any floating dtype.
        names: their names, for errors.
        collectives: the shard group.
        dtypes: the dtype of each bucket by the layout's word for it.
        overlap: gather under the next forward; otherwise at once.

    Raises:
        OverflowError: a parameter that FP16 cannot hold.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        collectives: Collectives,
        dtypes: dict[str, torch.dtype],
        *,
        overlap: bool,
    ) -> None:
        self._collectives = collectives
        self._names = names
        self._overlap = overlap
        self.buckets: list[BucketParameters] = []
        for bucket in layout.buckets:
            self.buckets.append(self._build(bucket, parameters, dtypes[bucket.dtype]))
        self._bucket_of_storage = {found.flat.untyped_storage().data_ptr(): found for found in self.buckets}
        self.gathering: set[int] = set()  # indices of buckets that are GATHERING
        self._addresses = collectives.gather_objects([found.flat.data_ptr() for found in self.buckets])
        self._params = parameters
        self.versions: list[int] = []
        """Of each parameter, when it was published: a newer one is a user's write."""
        self.note_versions()

    def _build(self, bucket: Bucket, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> BucketParameters:
        device, rank = self._collectives.device, self._collectives.rank
        whole = torch.zeros(bucket.size, dtype=torch.float32, device=device)
        if rank == 0:
            for slot in bucket.slots:
                whole[slot.start : slot.start + slot.numel].copy_(parameters[slot.param].detach().reshape(-1))
        self._collectives.broadcast(whole)
        if dtype == torch.float16 and not whole.is_meta:
            self._refuse_too_large(bucket, whole)
        flat = whole if dtype == torch.float32 else whole.to(dtype)
        own = whole.view(bucket.ranks, -1)[rank]
        master = own if dtype == torch.float32 else own.clone()
        for slot in bucket.slots:
            parameter = parameters[slot.param]
            parameter.data = flat[slot.start : slot.start + slot.numel].view(parameter.shape)
        return BucketParameters(bucket, flat, master, [parameters[slot.param] for slot in bucket.slots], rank)

    def _refuse_too_large(self, bucket: Bucket, whole: Tensor) -> None:
        low, high = torch.aminmax(whole)
        if low > -FP16_LIMIT and high < FP16_LIMIT:
            return
        for slot in bucket.slots:
            values = whole[slot.start : slot.start + slot.numel]
            if bool((values.abs() >= FP16_LIMIT).any()):
                raise OverflowError(
                    f"parameter {self._names[slot.param]} holds {values.abs().max().item()}, beyond 65504, the largest "
                    "FP16 number: keep it in FP32 (Precision(keep_fp32=...)) or train in BF16"
                )

    # -- publishing

    @in_range("shardmp.gather")
    def publish(self, index: int) -> None:
        """The masters of one bucket are updated: round them, and let every rank have them."""
        self.ready(index)  # nobody has read it since the step before
        found = self.buckets[index]
        found.round()
        torch.autograd.graph.increment_version(found.params)
        found.works = self._collectives.start_gather(index, found.flat.view(found.bucket.ranks, -1))
        if found.works:
            found.state = State.GATHERING
            self.gathering.add(index)

    @in_range("shardmp.gather")
    def finish_publishing(self) -> None:
        """Every bucket is published: take the neighbours' rows, and wait for the others' where nothing is to overlap."""
        rows = [found.flat.view(found.bucket.ranks, -1) for found in self.buckets]
        self._collectives.read_neighbours_rows(rows, self._addresses)
        if not self._overlap:
            self.all_ready()

    def ready(self, index: int) -> None:
        """Wait until one bucket is READY."""
        found = self.buckets[index]
        if found.state is State.GATHERING:
            with named_range("shardmp.forward_wait"):
                self._collectives.finish_gather(found.works)
            self.gathering.discard(index)
            found.state = State.READY  # last: until then whoever comes next waits again
            found.works = []

    def all_ready(self) -> None:
        """Wait until every bucket is READY, in the order in which they were published."""
        for index in sorted(self.gathering, reverse=True):
            self.ready(index)

    def ready_for(self, values: Any) -> None:
        """Wait for the buckets that any tensor among `values` (nested in lists, tuples and dicts) is a view of."""
        if isinstance(values, Tensor):
            if values.layout == torch.strided:
                found = self._bucket_of_storage.get(_storage(values))
                if found is not None:
                    self.ready(found.bucket.index)
        elif isinstance(values, (list, tuple)):
            for value in values:
                self.ready_for(value)
        elif isinstance(values, dict):
            for value in values.values():
                self.ready_for(value)

    def note_versions(self) -> None:
        """What is written into parameters from here on is a user's write."""
        self.versions = [parameter._version for parameter in self._params]

    # -- masters

    def too_large(self) -> Tensor:
        """1 + the index of a parameter whose master FP16 cannot hold, as 0-dim FP64; 0 where there is none."""
        if self._collectives.device.type != "cpu":
            return self.too_large_unseen()
        found = torch.zeros((), dtype=torch.float64, device=self._collectives.device)
        for bucket in self.buckets:
            # On the CPU the host may look for free; nothing is read where no tile is too large.
            tiles = torch.nonzero((bucket.extremes.abs() >= FP16_LIMIT).any(1)).view(-1).tolist()
            for tile in tiles:
                for piece in bucket.pieces:
                    low = max(piece.offset, tile * TILE)
                    high = min(piece.offset + piece.hi - piece.lo, (tile + 1) * TILE)
                    if low < high and bool((bucket.master[low:high].abs() >= FP16_LIMIT).any()):
                        found.fill_(piece.param + 1)
        return found

    def too_large_unseen(self) -> Tensor:
        """As `too_large`, where the host must not look at the device: such a master was rounded to inf."""
        rows, numbers = self._rounded_pieces
        if not rows:
            return torch.zeros((), dtype=torch.float64, device=numbers.device)
        extremes = torch.stack(torch._foreach_norm(rows, torch.inf))
        return torch.where(extremes.isinf(), numbers, torch.zeros_like(numbers)).amax()

    @cached_property
    def _rounded_pieces(self) -> tuple[list[Tensor], Tensor]:
        """This rank's pieces in FP16, and 1 + the index of each one's parameter."""
        found = [
            (bucket.own[piece.offset : piece.offset + piece.hi - piece.lo], piece.param + 1)
            for bucket in self.buckets
            if bucket.flat.dtype == torch.float16
            for piece in bucket.pieces
        ]
        numbers = torch.tensor([number for _, number in found], dtype=torch.float64, device="cpu")
        return [row for row, _ in found], numbers.to(self._collectives.device)

    def renew_masters(self) -> None:
        """The whole parameters were written: take this rank's masters from them, where they are not the same number.

        A master whose rounding is what the parameter holds is kept, so that reading weights and writing them back loses
        nothing.
        """
        for found in self.buckets:
            if not found.is_rounded:
                continue
            for start in range(0, found.bucket.shard, TILE):
                masters, values = found.master[start : start + TILE], found.own[start : start + TILE]
                changed = masters.to(values.dtype) != values
                masters.copy_(torch.where(changed, values.float(), masters))
        self._note_loaded()
        self.note_versions()

    def _note_loaded(self) -> None:
        """Let the ranks compare what was loaded: each has written the whole parameters, so all must have the same."""
        if self._collectives.world_size > 1 and self._collectives.device.type != "meta":
            digest = 0
            for found in self.buckets:
                for part in found.flat.view(torch.uint8).split(4 * TILE):
                    digest = crc32(part.cpu().numpy(), digest)
            self._collectives.facts[LOADED] = f"model.load_state_dict, CRC-32 {digest:08x}"


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # tensors without storage: fake, functional, wrapper subclasses
        return -1
