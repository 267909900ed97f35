"""One small vector decides a step for all ranks.

Owns:      the vector's lanes, their one all-reduce, and what the sum says: on the device for the update, on the host
in its lanes for people (`report`). Takes:     sums of squares of the gradient shard's blocks, counts, the loss; never a
gradient. Gives: `Verdict` (norm, skip flag and divisor as 0-dim tensors).
Invariant: the norm is the same bit for bit however the blocks are dealt to ranks and buckets, since its sum is exact.

[Note: sums free of order] A square v is split into multiples of fixed units, 2^60, 2^34, ..., each a factor of 2^26
below the one before: q = (v + C) - C with C = 1.5 x 2^52 x unit rounds v to a multiple of the unit, and v - q goes on
to the next. The sum of up to 2^27 such multiples has at most 53 bits, so FP64 adds them without rounding in any order
(Demmel and Nguyen, "Parallel Reproducible Summation", IEEE TC 2015). Only the last addition, over the bins, rounds,
and its order is fixed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .collectives import Collectives
from .ranges import in_range

BIN_UNITS = tuple(2.0**exponent for exponent in range(60, -149, -26))


def exact_sum_bins(values: Tensor) -> Tensor:
    """Sums of `values` (FP64, 1-D) by unit: one FP64 number for each of `BIN_UNITS`, exact in any order.

    An inf or a NaN among the values makes the bins not finite.
    """
    rest = values.clone()
    bins = []
    for unit in BIN_UNITS:
        magic = 1.5 * 2.0**52 * unit
        part = (rest + magic).sub_(magic)
        rest -= part
        bins.append(part.sum())
    return torch.stack(bins)


@dataclass
class Contribution:
    """What this rank brings to the verdict.

    Attributes:
        squares, owners: FP64 sums of squares of blocks, and int64 indices of the parameters they belong to.
        had_gradient: for each parameter, whether this rank had a gradient for it. brought: (N + 1, 2) FP64, see
        `Gradients`. losses: FP64 (4,): the sum of the losses, how many were not finite, how many micro-batches there
        were, and for how
            many of them the loss is known.
        too_large: 0-dim FP64, 1 + the index of a parameter whose master the last update made too large, or 0.
        divide_by: this rank's word for the divisor, or None.
        checksum: of all that ranks must have alike, whether `divide_by` is given too; see `agreed`.
        unsynced: whether this rank's last backward was under `no_sync` and has not been reduced.
        stop: whether this rank was asked to stop.
    """

    squares: Tensor
    owners: Tensor
    had_gradient: Sequence[bool]
    brought: Tensor
    losses: Tensor
    too_large: Tensor
    divide_by: float | Tensor | None
    checksum: float | Tensor
    unsynced: bool
    stop: bool


@dataclass(frozen=True)
class Lanes:
    """Where each number lies in the vector, for `params` parameters and `ranks` ranks."""

    params: int
    ranks: int

    def split(self, values: Sequence[float]) -> dict[str, Sequence[float]]:
        """The vector's lanes by name."""
        lanes, position = {}, 0
        for name, length in self.lengths().items():
            lanes[name] = values[position : position + length]
            position += length
        return lanes

    def lengths(self) -> dict[str, int]:
        """The lanes in order."""
        return {
            "bins": len(BIN_UNITS),
            "squares": self.params,
            "had_gradient": self.params,
            "brought": 2 * (self.ranks + 1),
            "losses": 4,
            "stop": 1,
            "too_large": self.ranks,
            "divide_by": self.ranks,
            "checksum": self.ranks,
            "unsynced": self.ranks,
        }


def check_divisor(divide_by: float | Tensor | None) -> None:
    """What the host can see of `step(divide_by=...)`; a tensor's value is looked at on the device.

    Raises:
        TypeError, ValueError: it is not a number above 0, nor a tensor of one.
    """
    if divide_by is None:
        return
    if isinstance(divide_by, Tensor):
        if divide_by.numel() != 1:
            raise ValueError(f"step(divide_by=...): expected one number, got shape {tuple(divide_by.shape)}")
        if divide_by.is_complex() or divide_by.dtype == torch.bool:
            raise TypeError(f"step(divide_by=...): expected a real number, got {divide_by.dtype}")
        return
    if isinstance(divide_by, bool) or not isinstance(divide_by, numbers.Real):
        raise TypeError(f"step(divide_by=...): expected a number or a 0-dim tensor, got {divide_by!r}")
    if not (math.isfinite(divide_by) and divide_by > 0):
        raise ValueError(f"step(divide_by=...): expected a finite number above 0, got {divide_by}")


class Verdict:
    """The verdict on one step, equal on all ranks.

    Args:
        vector: the all-reduced vector.
        lanes: its order.
        scale: the loss scale that was used, 0-dim FP32.
        average: "ranks" or "micro_batches".
        max_grad_norm: clip above it; None never does.
        divided: whether the user has named the divisor.

    Attributes:
        norm: 0-dim FP64, the 2-norm of the gradient, unscaled and averaged, before clipping.
        grad_scale: 0-dim FP32, the one number by which the summed gradient is divided: scale x divisor x clipping,
            computed in FP64 and rounded once.
        withheld: 0-dim bool: ranks disagree, named no proper divisor, or hold gradients that were never reduced. Nothing
            is written, the loss scale stays, and it counts as no skip; an error follows.
        skipped: 0-dim bool: the step is judged, and the gradient or `grad_scale` is not finite (or the latter is 0).
        found_inf: 0-dim FP32, exactly 0.0 or 1.0 (torch's fused kernels test for equality with 1): either of the two.
    """

    def __init__(
        self,
        vector: Tensor,
        lanes: Lanes,
        scale: Tensor,
        average: str,
        max_grad_norm: float | None,
        *,
        divided: bool = False,
    ) -> None:
        self.vector = vector
        self.lanes = lanes
        self.scale = scale
        parts = dict(zip(lanes.lengths(), vector.split(list(lanes.lengths().values())), strict=True))
        self.losses = parts["losses"]
        micro_batches = self.losses[2].clamp(min=1.0)
        divisor = micro_batches if average == "micro_batches" else torch.full_like(micro_batches, lanes.ranks)
        self.withheld = parts["unsynced"].any()
        if lanes.ranks > 1:
            self.withheld |= (parts["checksum"] != parts["checksum"][0]).any()
        if divided:
            named = parts["divide_by"]
            divisor = named[0]
            self.withheld |= ~((named == divisor) & (named > 0) & named.isfinite()).all()
        self._had_gradient = parts["had_gradient"]
        total = parts["bins"][-1]
        for larger in reversed(parts["bins"][:-1].unbind()):  # smallest unit first; a cumsum has no fixed order on CUDA
            total = total + larger
        factor = scale.double() * divisor
        self.norm = total.sqrt() / factor
        if max_grad_norm is not None:
            factor = factor * ((self.norm + 1e-6) / max_grad_norm).clamp(min=1.0)
        self.grad_scale = factor.float()
        fine = total.isfinite() & self.grad_scale.isfinite() & (self.grad_scale > 0)
        self.found_inf = (~fine | self.withheld).float()
        self.skipped = ~(fine | self.withheld)

    @property
    def loss_not_finite(self) -> Tensor:
        """0-dim bool: a loss of this step was inf or NaN before it was scaled."""
        return self.losses[1] > 0

    def skips(self, param: int) -> Tensor:
        """0-dim FP32, 1.0 where the step must not touch the parameter: none at all, or no rank had a gradient for it."""
        return torch.maximum(self.found_inf, (self._had_gradient[param] == 0).float())

    def unused(self) -> set[int]:
        """Parameters without a gradient on any rank; waits for the device."""
        had = self.lanes.split(self.vector.tolist())["had_gradient"]
        return {index for index, count in enumerate(had) if not count}


@in_range("shardmp.verdict")
def decide(
    own: Contribution,
    collectives: Collectives,
    *,
    scale: Tensor,
    average: str,
    max_grad_norm: float | None,
) -> Verdict:
    """All-reduce what every rank brings, and judge."""
    device = own.squares.device
    params, ranks, rank = len(own.had_gradient), collectives.world_size, collectives.rank
    lanes = Lanes(params, ranks)
    squares = torch.zeros(params, dtype=torch.float64, device=device).index_add_(0, own.owners, own.squares)
    rows = torch.zeros(4, ranks, dtype=torch.float64, device=device)
    too_large, divide_by, checksum, unsynced = rows
    too_large[rank] = own.too_large
    checksum[rank] = own.checksum
    if own.unsynced:
        unsynced[rank] = 1.0
    if own.divide_by is not None:
        divide_by[rank : rank + 1] = own.divide_by
    pinned = device.type == "cuda"  # or the copy would wait
    host = torch.tensor([*map(float, own.had_gradient)], dtype=torch.float64, device="cpu", pin_memory=pinned)
    host = host.to(device, non_blocking=True)
    stop = torch.full((1,), float(own.stop), dtype=torch.float64, device=device)
    vector = torch.cat(
        (exact_sum_bins(own.squares), squares, host, own.brought.view(-1), own.losses, stop, rows.view(-1))
    )
    collectives.all_reduce(vector)
    return Verdict(vector, lanes, scale, average, max_grad_norm, divided=own.divide_by is not None)
