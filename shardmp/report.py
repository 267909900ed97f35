"""What a step did, for people.

Owns:      the copy of the verdict's numbers on its way to the host, and the words for what they say.
Takes:     a verdict, on the device; this rank's snapshot of what ranks must have alike.
Gives:     `StepReport`, whose fields wait only when read; the errors that follow from a step.
Invariant: reading is never a collective. Every rank reads the same, and so raises the same at the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from .agreed import Snapshot, differences
from .collectives import Collectives
from .precision import Precision
from .scaler import LossScaler
from .verdict import Verdict


@dataclass(frozen=True)
class Overflow:
    """Why a step was skipped.

    Attributes:
        step: the step, counted from 1.
        parameters: names of the parameters whose summed gradient is not finite, in order of registration.
        kind: "inf", "nan", "inf and nan", "norm" where every element is finite and only the sum of squares is not, or
            "divisor" where gradients are finite and loss scale x divisor x clipping is inf or 0 in FP32.
        ranks: the ranks that brought them; empty under `reduce="native"`, whose sum hides it.
        loss_not_finite: whether a loss was inf or NaN before it was scaled: then no smaller scale can help.
    """

    step: int
    parameters: tuple[str, ...]
    kind: str
    ranks: tuple[int, ...]
    loss_not_finite: bool

    def __str__(self) -> str:
        if self.kind == "divisor":
            return (
                "loss scale x divisor x clipping, by which gradients are divided, is not a finite FP32 number above 0"
            )
        shown = ", ".join(self.parameters[:3])
        more = f" and {len(self.parameters) - 3} more" if len(self.parameters) > 3 else ""
        who = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        loss = ", with a loss that was itself not finite" if self.loss_not_finite else ""
        return f"{self.kind} in the gradient of {shown}{more}{who}{loss}"


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

    @property
    def is_here(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def numbers(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()


class StepReport:
    """What one step did, equal on all ranks.

    Reading a field waits for the device the first time; it is never a collective. Of a step that was withheld reading
    raises what the next `step` or `save` would say, as far as this rank knows it: see `withheld`.

    Attributes (as properties):
        step: the step, counted from 1.
        skipped: whether the update was skipped because a gradient was not finite.
        grad_norm: 2-norm of the gradient, unscaled and averaged, before clipping; inf or NaN where skipped.
        loss_scale: the loss scale that was used, to scale and to unscale.
        loss: FP32 mean of the losses of all ranks and backwards, or None where none is known.
        overflow: why the step was skipped, or None.
        next_loss_scale: the loss scale after the step (one that is shared moves only when the next loss is scaled).
    """

    def __init__(
        self, step: int, verdict: Verdict, scaler: LossScaler, names: Sequence[str], own: Snapshot, rank: int
    ) -> None:
        self.step = step
        self._names = names
        self._lanes = verdict.lanes
        self.snapshot = own
        self._rank = rank
        others = (verdict.scale, verdict.skipped, verdict.withheld, scaler.hopeless, scaler.scale)
        extra = torch.stack((verdict.norm, *(number.double() for number in others)))
        self._numbers = _OnItsWay(torch.cat((extra, verdict.vector)))
        self._host: list[float] | None = None

    def _read(self) -> list[float]:
        if self._host is None:
            self._host = self._numbers.numbers()
        return self._host

    def _lane(self, name: str) -> Sequence[float]:
        return self._lanes.split(self._read()[6:])[name]

    def _known(self) -> list[float]:
        """The numbers, of a step that was not withheld."""
        if self.withheld:
            self.raise_withheld()
        return self._read()

    @property
    def grad_norm(self) -> float:
        return self._known()[0]

    @property
    def loss_scale(self) -> float:
        return self._known()[1]

    @property
    def skipped(self) -> bool:
        return self._known()[2] != 0.0

    @property
    def withheld(self) -> bool:
        """Whether nothing was written and nothing counted, for ranks disagreed or hold what was never reduced."""
        return self._read()[3] != 0.0

    @property
    def hopeless_skips(self) -> int:
        """Skips in a row, up to this step, that a smaller loss scale cannot cure."""
        return int(self._read()[4])

    @property
    def next_loss_scale(self) -> float:
        return self._known()[5]

    @property
    def arrived(self) -> bool:
        """Whether reading a field would not wait; False too where the device is gone."""
        try:
            return self._numbers.is_here
        except RuntimeError:
            return False

    @property
    def loss(self) -> float | None:
        self._known()
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
        other = "norm" if not all(map(math.isfinite, self._lane("bins"))) else "divisor"
        kinds = [kind for kind, count in zip(("inf", "nan"), brought.sum(0).tolist(), strict=True) if count]
        ranks = tuple(torch.nonzero(brought[:-1].sum(1)).view(-1).tolist())
        return Overflow(
            step=self.step,
            parameters=tuple(self._names[index] for index in bad),
            kind=" and ".join(kinds) or other,
            ranks=ranks,
            loss_not_finite=self._lane("losses")[1] > 0,
        )

    def check_update(self) -> None:
        """Raise where the step before made a master too large.

        Raises:
            OverflowError: a master weight beyond FP16's range.
        """
        for rank, index in enumerate(self._lane("too_large")):
            if index:
                raise OverflowError(
                    f"the master weights of {self._names[int(index) - 1]} (owned by rank {rank}) grew beyond 65504, "
                    f"the largest FP16 number, before step {self.step}: the run diverges; lower the learning rate, "
                    "clip the gradient, or train in BF16"
                )

    def check_skips(self, precision: Precision) -> None:
        """Raise where too many steps in a row were skipped for a cause that a smaller loss scale does not cure.

        Raises:
            RuntimeError: `Precision(max_skips=...)` of them, with the cause.
        """
        if self.hopeless_skips >= precision.max_skips:
            raise RuntimeError(
                f"{self.hopeless_skips} steps in a row were skipped {self._why_hopeless(precision)}; the last at step "
                f"{self.step}: {self.overflow}"
            )

    def _why_hopeless(self, precision: Precision) -> str:
        overflow = self.overflow
        if overflow is not None and overflow.loss_not_finite:
            return "with a loss that was itself not finite: look for the cause in the forward, not in the loss scale"
        if not precision.has_loss_scale:
            return f"because gradients were not finite ({precision.param} has no loss scale to lower)"
        if precision.static_scale is not None:
            return f"under the static loss scale {precision.static_scale}: choose a smaller one, or a dynamic one"
        return f"at the smallest loss scale, {precision.min_scale}: gradients overflow whatever the scale"

    def raise_withheld(self, collectives: Collectives | None = None) -> NoReturn:
        """Say why nothing was written.

        Args:
            collectives: where all ranks come here, so that each can be told what the others have. Collective with it.

        Raises:
            ValueError: ranks differ in what they must have alike, or a divisor is not finite and above 0.
            RuntimeError: a rank's last backward was under `no_sync`.
        """
        checksums, divisors = self._lane("checksum"), self._lane("divide_by")
        others = [rank for rank, value in enumerate(checksums) if value != checksums[0]]
        unsynced = [rank for rank, flag in enumerate(self._lane("unsynced")) if flag]
        start = f"step {self.step} has written nothing: "
        if others and collectives is not None:
            found = list(differences(collectives.gather_objects(self.snapshot.named())))
            raise ValueError(f"{start}ranks have different options{_listed(found, _SHOWN)}\n{_REMEDY}")
        if others:
            own = _listed([f"{name}: {value}" for name, value in self.snapshot.named().items()], 4 * _SHOWN)
            raise ValueError(
                f"{start}ranks {', '.join(map(str, others))} have other options than rank 0; the next step, or save, says "
                f"which. This is rank {self._rank}, which has{own}\n{_REMEDY}"
            )
        if unsynced:
            raise RuntimeError(
                f"{start}the last backward before it was under no_sync() on rank {', '.join(map(str, unsynced))}, so its "
                "gradients were never reduced: make the last backward before step() outside of no_sync()"
            )
        raise ValueError(
            f"{start}step(divide_by=...): expected one finite number above 0, the same on every rank, got {divisors} by "
            "rank; the gradients are gone, and everything else is as it was"
        )

    def why_withheld(self) -> str:
        """A line that says why, where it is known without waiting; else "". A rank that has read it may have stopped."""
        if not (self._numbers.is_here and self.withheld):
            return ""
        try:
            self.raise_withheld()
        except (ValueError, RuntimeError) as cause:
            return f"\n{cause}"

    def __repr__(self) -> str:
        if self.withheld:
            return f"StepReport(step={self.step}, withheld=True)"
        return (
            f"StepReport(step={self.step}, skipped={self.skipped}, grad_norm={self.grad_norm}, "
            f"loss_scale={self.loss_scale}, loss={self.loss}, overflow={self.overflow})"
        )


def _listed(lines: Sequence[str], most: int) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


_SHOWN = 8
_REMEDY = (
    "Give every rank the same. The commonest cause is a schedule that depends on a rank's own data, such as "
    "ReduceLROnPlateau fed with its own loss: feed it report.loss, which is the same on every rank. Masters, optimizer state "
    "and loss scale are as this step found them: after a repair on every rank (weights that one rank alone has loaded are "
    "loaded on all) training can go on; this step's gradients are gone."
)
