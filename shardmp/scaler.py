"""The loss scale as a state machine.

Owns:      the loss scale, its growth and hysteresis counters.
Takes:     the global verdict alone: whether the step is skipped, and whether a loss was itself not finite.
Gives:     the scale for the next losses, on the device; nothing here waits for the host.
Invariant: every rank holds the same state, because all take the same verdict.

The rule is that of "Mixed Precision Training" (arXiv 1710.03740, section 3.2) with the hysteresis of apex and
Megatron: a skipped step uses one unit; at zero the scale backs off, and goes on doing so at each further skip; a
growing scale refills it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .precision import Precision


class LossScaler:
    """Dynamic, static, or fixed at 1 (BF16 and FP32)."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self.dynamic = precision.has_loss_scale and precision.static_scale is None
        self.scale = torch.tensor(precision.first_scale, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int64, device=device)
        self.hysteresis = torch.tensor(precision.hysteresis, dtype=torch.int64, device=device)
        self.hopeless = torch.zeros((), dtype=torch.int64, device=device)
        """Skips in a row that a smaller scale cannot cure: at the minimum, under a fixed scale, or by a bad loss."""
        self.users: list[Any] = []
        """Weak references to those who scale their losses by it, in the order of `shard`."""
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, found_inf: Tensor, loss_not_finite: Tensor, judged: Tensor | None = None) -> None:
        """Take one step's verdict: move at once, or at `settle` where several users share the scale.

        Args:
            found_inf: 0-dim FP32, 1.0 where nothing was written, else 0.0.
            loss_not_finite: 0-dim bool, whether a loss of the step was inf or NaN before it was scaled.
            judged: 0-dim bool; where it is False the step was withheld, and nothing moves. None: it is True.
        """
        skip = found_inf != 0
        if judged is None:
            judged = torch.ones_like(skip)
        flags = skip & judged, loss_not_finite & judged, judged
        if self._pending is not None:
            before = self._pending
            flags = flags[0] | before[0], flags[1] | before[1], flags[2] | before[2]
        self._pending = flags
        if len(self.users) <= 1:
            self.settle()

    def settle(self) -> None:
        """Move once by all verdicts since the last time; nothing where there is none."""
        if self._pending is None:
            return
        (skip, incurable, judged), self._pending = self._pending, None
        if self.dynamic:
            incurable = incurable | (self.scale <= self.precision.min_scale)
            self._move(skip, judged)
        else:
            incurable = torch.ones_like(skip)
        # One more, none, or as many as before.
        self.hopeless = torch.where(judged & ~(skip & incurable), 0, self.hopeless + (skip & incurable))

    def _move(self, skip: Tensor, judged: Tensor) -> None:
        policy = self.precision
        self.hysteresis = torch.where(skip, (self.hysteresis - 1).clamp_(min=0), self.hysteresis)
        backed_off = (self.scale * policy.backoff_factor).clamp_(min=policy.min_scale)
        self.scale = torch.where(skip & (self.hysteresis == 0), backed_off, self.scale)
        self.growth = torch.where(skip, torch.zeros_like(self.growth), self.growth + judged)
        grow = self.growth >= policy.growth_interval
        grown = (self.scale * policy.growth_factor).clamp_(max=policy.max_scale)
        self.scale = torch.where(grow, grown, self.scale)
        self.hysteresis = torch.where(grow, torch.full_like(self.hysteresis, policy.hysteresis), self.hysteresis)
        self.growth = torch.where(grow, torch.zeros_like(self.growth), self.growth)

    # -- saved and loaded

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers; waits for the device."""
        pending = None if self._pending is None else [bool(flag) for flag in self._pending[:2]]
        pending = pending if self._pending is not None and bool(self._pending[2]) else None
        numbers = {name: getattr(self, name).item() for name in ("scale", "growth", "hysteresis", "hopeless")}
        return {"dynamic": self.dynamic, "pending": pending, **numbers}

    def load(self, state: dict[str, Any]) -> None:
        """Go on as `state` was; a scale that is fixed, here or there, stays this one's own."""
        moving = ("scale", "growth", "hysteresis") if self.dynamic and state["dynamic"] else ()
        for name in ("hopeless", *moving):
            setattr(self, name, torch.full_like(getattr(self, name), state[name]))
        device, pending = self.scale.device, state["pending"]
        self._pending = pending and tuple(
            torch.tensor(flag, dtype=torch.bool, device=device) for flag in (*pending, True)
        )
