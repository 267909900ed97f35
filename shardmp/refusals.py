"""What an ordinary optimizer can do and a sharded one cannot: errors that say what to write instead.

Owns:      the words.
Takes:     nothing.
Gives:     `Refusals`, the base of `ShardedOptimizer`; `NoState`, its `state`; `retire`, for the optimizer that was handed in.
Invariant: nothing that torch or a habit would ask of either optimizer is answered in silence with something useless.

[Note: what GradScaler asks] Its `step` first asks for `_step_supports_amp_scaling`: of a sharded optimizer that is our error;
a plain one that has it gets its `step` called at once, and that is ours too. Its `unscale_` reads nothing but `param_groups`,
and finds no gradient anywhere: so a look at them from there is an error.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

_GRAD_SCALER = (
    "GradScaler around a ShardedOptimizer, which scales the loss itself: leave the GradScaler out; call "
    "optimizer.backward(loss) and optimizer.step()"
)
_NO_NEW_GROUP = (
    "add_param_group() after shard(): the layout of shards is fixed; give every parameter to the optimizer, frozen "
    "or not, before shard()"
)
_NO_STATE_DICT = "state_dict(): the state is sharded over ranks; use shardmp.save(directory, model, optimizer)"
_NO_LOAD = "load_state_dict(): the state is sharded over ranks; use shardmp.load(directory, model, optimizer)"


class Refusals(Optimizer):
    """An optimizer whose state is sharded: each method here raises."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "deepcopy of a ShardedOptimizer would share its collectives: copy model and optimizer before shard()"
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "a ShardedOptimizer cannot be pickled, its state is sharded: use shardmp.save(directory, model, optimizer)"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # The first thing that GradScaler.step asks an optimizer for.
        raise RuntimeError(_GRAD_SCALER)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The dicts of the optimizer that was handed in: options may be written, parameters stay where they are."""
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":
            raise RuntimeError(_GRAD_SCALER)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, value: Any) -> NoReturn:
        raise RuntimeError(
            "optimizer.param_groups = ... after shard(): its groups are those that were handed in; write options into them"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: the layout is fixed."""
        raise NotImplementedError(_NO_NEW_GROUP)

    def state_dict(self) -> NoReturn:
        """Refused: state is sharded."""
        raise NotImplementedError(_NO_STATE_DICT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refused: state is sharded."""
        raise NotImplementedError(_NO_LOAD)


class NoState(defaultdict[Tensor, dict[str, Any]]):
    """`optimizer.state`: empty, and it says so."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise KeyError(
            "optimizer.state[p]: each rank holds pieces of the state; use shardmp.save(directory, model, optimizer), and "
            "optimizer.master(name) for FP32 weights"
        )


def retire(optimizer: Optimizer, sharded: Optimizer) -> None:
    """From now on the optimizer that was handed in steps and keeps nothing; its `zero_grad` is the sharded one's."""

    def refuse(error: type[Exception], words: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> NoReturn:
            raise error(words)

        return method

    step = refuse(
        RuntimeError, "this optimizer was given to shardmp.shard(): step the ShardedOptimizer that it returned"
    )
    # A scheduler that was made on it before looks for this mark before it trusts that steps are counted.
    step._wrapped_by_lr_sched = True
    step.given_to_shard = True  # for a second `shard`
    optimizer.__dict__.update(
        step=step,
        zero_grad=sharded.zero_grad,
        state_dict=refuse(NotImplementedError, f"the plain optimizer's {_NO_STATE_DICT}"),
        load_state_dict=refuse(NotImplementedError, f"the plain optimizer's {_NO_LOAD}"),
        add_param_group=refuse(NotImplementedError, f"the plain optimizer's {_NO_NEW_GROUP}"),
        _step_supports_amp_scaling=True,
    )
