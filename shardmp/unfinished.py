"""A `shard` that does not come to its end: from its first change to its last, model and optimizer refuse.

Owns:      the refusals, and their words.
Takes:     the user's model and optimizer, before anything of them is changed.
Gives:     a forward and a step that raise until `lift`.
Invariant: whatever stops `shard` between (an error, Ctrl-C, memory that runs out), nothing trains on half of it.

The FP32 model is released bucket by bucket, so there is nothing to go back to. The refusals come first and go last, so that no
handler has to run for them to hold.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer


class Unfinished:
    """What refuses while `shard` takes over a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        def step(*args: Any, **kwargs: Any) -> NoReturn:
            self._refuse()

        # A scheduler that was made on it before looks for this mark before it trusts that steps are counted.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        step.given_to_shard = True  # type: ignore[attr-defined]  # for a second `shard`
        optimizer.step = step  # type: ignore[method-assign]
        self._hooks = [module.register_forward_pre_hook(self._refuse) for module in model.modules()]

    def _refuse(self, *args: Any) -> NoReturn:
        raise RuntimeError(
            "shardmp.shard() of this model and its optimizer was interrupted, or raised, after it had begun to take them over: "
            "make both anew and call shard() again"
        )

    def lift(self) -> None:
        """All is taken over."""
        for hook in self._hooks:
            hook.remove()
