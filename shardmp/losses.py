"""From a loss to the scaled loss that backward starts from, and what a step must know of its losses.

Owns:      the loss scale that was used since the last step, and the sums of the losses themselves.
Takes:     a loss; the shared state of the loss scale.
Gives:     the scaled loss; the verdict's loss lanes; gradients that are armed: they may arrive.
Invariant: the scale does not move while gradients that it has scaled wait for their step, whoever shares it.

[Note: what is a backward] Gradients begin to arrive with the first one of a parameter, or with that of a leaf that
every scaled loss hangs on: autograd adds to a leaf's `.grad` in `backward`, not in `autograd.grad`, so the latter counts
as no backward, and a backward that reaches no parameter does. One backward is one micro-batch, of however many scaled
losses: its loss is their sum, each times the gradient with which autograd entered it.

[Note: a shared scale] Models under one loss share a scale. A backward through a scaled loss arms the gradients of all of
them, and each that it reaches counts the loss as its own. The scale moves when the next loss is scaled, once, by all
verdicts since; a model alone moves it at each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .gradients import Gradients
from .scaler import LossScaler


class _Scaled(torch.autograd.Function):
    """A loss times the loss scale. Backward takes the scale of the step that the gradients wait for, which need not be
    the one that this loss was multiplied by: it may have been scaled before the last step.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, begins: Tensor, scale: Tensor, reach: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.reach = reach
        return loss * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.reach(gradient), gradient, None, None


class Losses:
    """The losses of one optimizer since its last step.

    Attributes:
        used_scale: 0-dim FP32, the loss scale of the gradients that wait for a step.
        sums: FP64 (4,): the sum of the losses, how many were not finite, how many micro-batches there were, and for how
            many of them the loss is known.
    """

    def __init__(self, scaler: LossScaler, gradients: Gradients) -> None:
        self.scaler = scaler
        self._gradients = gradients
        self._needs_scale = scaler.precision.has_loss_scale
        self._reached: Tensor | None = None  # the loss whose backward runs, 0-dim FP64
        scaler.users.append(weakref.ref(self))
        gradients.peers = self._gradients_in_order
        gradients.at_end.append(self._count)
        self.reset()

    def reset(self) -> None:
        """Forget the losses, and let no gradient arrive until the next one is scaled."""
        self.used_scale = self.scaler.scale
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.scaler.scale.device)
        self._reached = None
        self._gradients.armed = not self._needs_scale

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, in FP32.

        Raises:
            TypeError, ValueError: the loss is not one number of a graph.
        """
        _check(loss)
        users = list(self._users())
        if not any(user._gradients.backwards for user in users):
            self.scaler.settle()
        for user in users:
            user.used_scale = self.scaler.scale
        value = loss.detach().reshape(()).to(self.sums.device, torch.float64, non_blocking=True)
        begins = torch.empty((), dtype=torch.float32, device=loss.device, requires_grad=True)
        begins.register_post_accumulate_grad_hook(self._begin)
        scaled: Tensor = _Scaled.apply(
            loss.float(), begins, self.scaler.scale, lambda gradient: self._reach(value, gradient)
        )
        return scaled

    def _begin(self, leaf: Tensor) -> None:
        leaf.grad = None
        self._gradients.begin_in_autograd()

    def _reach(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Autograd has reached a scaled loss: gradients may arrive. Gives the scale that they are to have."""
        entered = gradient.detach().reshape(()).to(value.device, torch.float64, non_blocking=True)
        for user in self._users():
            user._gradients.armed = True
            user._reached = value * entered if user._reached is None else user._reached + value * entered
        torch.autograd.Variable._execution_engine.queue_callback(self._forget)
        return self.used_scale

    def _forget(self) -> None:
        """At autograd's end: what was no backward of ours brought no loss."""
        for user in self._users():
            if not user._gradients.in_backward:
                user._reached = None

    def skip_micro_batch(self) -> None:
        """A backward without data counts as no micro-batch: called before it ends."""
        self._reached = torch.empty(0, dtype=torch.float64, device=self.sums.device)

    def _count(self) -> None:
        """At the end of a backward; of a plain `loss.backward()` (BF16, FP32) the value is not known."""
        value, self._reached = self._reached, None
        if value is None:
            self.sums[2] += 1
        elif value.numel():
            one = torch.ones_like(value)
            self.sums += torch.stack((value, (~value.isfinite()).double(), one, one))
        for user in self._users():
            if not user._gradients.backwards:  # this loss does not depend on its model
                user._gradients.armed = not self._needs_scale
                user._reached = None

    def _users(self) -> Iterator[Losses]:
        for reference in self.scaler.users:
            user = reference()
            if user is not None:
                yield user

    def _gradients_in_order(self) -> list[Gradients]:
        return [user._gradients for user in self._users()]


def _check(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss: expected a tensor, got {type(loss).__name__}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss: expected one floating-point number, got shape {tuple(loss.shape)} and {loss.dtype}: reduce it "
            "(loss.mean()) first"
        )
    if not loss.requires_grad:
        raise ValueError("loss: it depends on no parameter; on a rank without data call optimizer.backward(None)")
