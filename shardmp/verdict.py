"""One small vector decides a step for all ranks.

Owns:      the vector's lanes, their one all-reduce, and what the sum says: on the device for the update, on the host
for people. Takes:     sums of squares of the gradient shard's blocks, counts, the loss; never a gradient. Gives:
`Verdict` (norm, skip flag and divisor as 0-dim tensors) and `StepReport`, whose fields wait only when read.
Invariant: the norm is the same bit for bit however the blocks are dealt to ranks and buckets, since its sum is exact.

[Note: sums free of order] A square v is split into multiples of fixed units, 2^60, 2^34, ..., each a factor of 2^26
below the one before: q = (v + C) - C with C = 1.5 x 2^52 x unit rounds v to a multiple of the unit, and v - q goes on
to the next. The sum of up to 2^27 such multiples has at most 53 bits, so FP64 adds them without rounding in any order
(Demmel and Nguyen, "Parallel Reproducible Summation", IEEE TC 2015). Only the last addition, over the bins, rounds,
and its order is fixed.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Overflow:
    """Why a step was skipped.

    Attributes:
        step: the step, counted from 1.
        parameters: names of the parameters whose summed gradient is not finite, in order of registration.
        kind: "inf", "nan", "inf and nan", or "norm" where every element is finite and only the sum of squares is not.
        ranks: the ranks that brought them; empty under `reduce="native"`, whose sum hides it.
        loss_not_finite: whether a loss was inf or NaN before it was scaled: then no smaller scale can help.
    """

    step: int
    parameters: tuple[str, ...]
    kind: str
    ranks: tuple[int, ...]
    loss_not_finite: bool

    def __str__(self) -> str:
        shown = ", ".join(self.parameters[:3])
        more = f" and {len(self.parameters) - 3} more" if len(self.parameters) > 3 else ""
        who = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        loss = ", with a loss that was itself not finite" if self.loss_not_finite else ""
        return f"{self.kind} in the gradient of {shown}{more}{who}{loss}"


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
        stop: whether this rank was asked to stop.
    """

    squares: Tensor
    owners: Tensor
    had_gradient: Sequence[bool]
    brought: Tensor
    losses: Tensor
    too_large: Tensor
    divide_by: float | Tensor | None
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
        }


class Verdict:
    """The verdict on one step, equal on all ranks.

    Args:
        vector: the all-reduced vector.
        lanes: its order.
        scale: the loss scale that was used, 0-dim FP32.
        average: "ranks" or "micro_batches".
        max_grad_norm: clip above it; None never does.

    Attributes:
        norm: 0-dim FP64, the 2-norm of the gradient, unscaled and averaged, before clipping.
        found_inf: 0-dim FP32, exactly 0.0 or 1.0 (torch's fused kernels test for equality with 1).
        grad_scale: 0-dim FP32, the one number by which the summed gradient is divided: scale x divisor x clipping,
            computed in FP64 and rounded once.
    """

    def __init__(self, vector: Tensor, lanes: Lanes, scale: Tensor, average: str, max_grad_norm: float | None) -> None:
        self.vector = vector
        self.lanes = lanes
        self.scale = scale
        parts = dict(zip(lanes.lengths(), vector.split(list(lanes.lengths().values())), strict=True))
        self.losses = parts["losses"]
        micro_batches = self.losses[2].clamp(min=1.0)
        usual = micro_batches if average == "micro_batches" else torch.full_like(micro_batches, lanes.ranks)
        # Rank 0's word counts on all ranks, so that no shard is divided by another number; a difference raises later.
        named = parts["divide_by"][0]
        divisor = torch.where(named != 0, named, usual)
        self._had_gradient = parts["had_gradient"]
        total = parts["bins"][-1]
        for larger in reversed(parts["bins"][:-1].unbind()):  # smallest unit first; a cumsum has no fixed order on CUDA
            total = total + larger
        factor = scale.double() * divisor
        self.norm = total.sqrt() / factor
        self.found_inf = (~total.isfinite()).float()
        if max_grad_norm is not None:
            factor = factor * ((self.norm + 1e-6) / max_grad_norm).clamp(min=1.0)
        self.grad_scale = factor.float()

    @property
    def loss_not_finite(self) -> Tensor:
        """0-dim bool: a loss of this step was inf or NaN before it was scaled."""
        return self.losses[1] > 0

    def skips(self, param: int) -> Tensor:
        """0-dim FP32, 1.0 where the step must not touch the parameter: an overflow, or no rank had a gradient for it."""
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
    too_large, divide_by = torch.zeros(2, ranks, dtype=torch.float64, device=device)
    too_large[rank] = own.too_large
    if own.divide_by is not None:
        divide_by[rank : rank + 1] = own.divide_by
    pinned = device.type == "cuda"  # or the copy would wait
    host = torch.tensor([*map(float, own.had_gradient)], dtype=torch.float64, device="cpu", pin_memory=pinned)
    host = host.to(device, non_blocking=True)
    stop = torch.full((1,), float(own.stop), dtype=torch.float64, device=device)
    vector = torch.cat(
        (exact_sum_bins(own.squares), squares, host, own.brought.view(-1), own.losses, stop, too_large, divide_by)
    )
    collectives.all_reduce(vector)
    return Verdict(vector, lanes, scale, average, max_grad_norm)


class _OnItsWay:
    """A vector that is copied to the host from now on: reading it waits for what was enqueued before, and nothing after."""

    def __init__(self, vector: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = vector
        if vector.is_cuda:
            self._host = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()


class StepReport:
    """What one step did, equal on all ranks.

    Reading a field waits for the device the first time; it is never a collective.

    Attributes (as properties):
        step: the step, counted from 1.
        skipped: whether the update was skipped because a gradient was not finite.
        grad_norm: 2-norm of the gradient, unscaled and averaged, before clipping; inf or NaN where skipped.
        loss_scale: the loss scale that was used, to scale and to unscale.
        loss: FP32 mean of the losses of all ranks and backwards, or None where none is known.
        overflow: why the step was skipped, or None.
    """

    def __init__(self, step: int, verdict: Verdict, hopeless: Tensor, names: Sequence[str]) -> None:
        self.step = step
        self._names = names
        self._lanes = verdict.lanes
        extra = torch.stack((verdict.norm, verdict.scale.double(), verdict.found_inf.double(), hopeless.double()))
        self._numbers = _OnItsWay(torch.cat((extra, verdict.vector)))
        self._host: list[float] | None = None

    def _read(self) -> list[float]:
        if self._host is None:
            self._host = self._numbers.numbers()
        return self._host

    def _lane(self, name: str) -> Sequence[float]:
        return self._lanes.split(self._read()[4:])[name]

    @property
    def grad_norm(self) -> float:
        return self._read()[0]

    @property
    def loss_scale(self) -> float:
        return self._read()[1]

    @property
    def skipped(self) -> bool:
        return self._read()[2] != 0.0

    @property
    def hopeless_skips(self) -> int:
        """Skips in a row, up to this step, that a smaller loss scale cannot cure."""
        return int(self._read()[3])

    @property
    def loss(self) -> float | None:
        total, _, _, count = self._lane("losses")
        return torch.tensor(total / count, dtype=torch.float32, device="cpu").item() if count else None

    @property
    def stop(self) -> bool:
        """Whether a rank was asked to stop."""
        return self._lane("stop")[0] > 0

    @property
    def overflow(self) -> Overflow | None:
        """Why the step was skipped, or None."""
        if not self.skipped:
            return None
        squares = torch.tensor(self._lane("squares"), dtype=torch.float64, device="cpu")
        bad = torch.nonzero(~squares.isfinite()).view(-1).tolist()
        brought = torch.tensor(self._lane("brought"), dtype=torch.float64, device="cpu").view(-1, 2)
        kinds = [kind for kind, count in zip(("inf", "nan"), brought.sum(0).tolist(), strict=True) if count]
        ranks = tuple(torch.nonzero(brought[:-1].sum(1)).view(-1).tolist())
        return Overflow(
            step=self.step,
            parameters=tuple(self._names[index] for index in bad),
            kind=" and ".join(kinds) or "norm",
            ranks=ranks,
            loss_not_finite=self._lane("losses")[1] > 0,
        )

    def check_update(self) -> None:
        """Raise where the step before made a master too large, or ranks named different divisors.

        Raises:
            OverflowError: a master weight beyond FP16's range.
            ValueError: `divide_by` differs between ranks.
        """
        for rank, index in enumerate(self._lane("too_large")):
            if index:
                raise OverflowError(
                    f"the master weights of {self._names[int(index) - 1]} (owned by rank {rank}) grew beyond 65504, "
                    f"the largest FP16 number, before step {self.step}: the run diverges; lower the learning rate, "
                    "clip the gradient, or train in BF16"
                )
        divisors = self._lane("divide_by")
        if len(set(divisors)) > 1:
            raise ValueError(
                f"step(divide_by=...) at step {self.step}: expected the same number on every rank, got {divisors}"
            )

    def __repr__(self) -> str:
        return (
            f"StepReport(step={self.step}, skipped={self.skipped}, grad_norm={self.grad_norm}, "
            f"loss_scale={self.loss_scale}, loss={self.loss}, overflow={self.overflow})"
        )
