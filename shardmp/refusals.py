"""What an ordinary optimizer can do and a sharded one cannot: errors that say what to write instead.

Owns:      the words.
Takes:     nothing.
Gives:     `Refusals`, the base of `ShardedOptimizer`, and `NoState`, its `state`.
Invariant: nothing that torch or a habit would ask of an optimizer is answered in silence with something useless.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer


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
        raise RuntimeError(
            "GradScaler around a ShardedOptimizer, which scales the loss itself: leave the GradScaler out; call "
            "optimizer.backward(loss) and optimizer.step()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: the layout is fixed."""
        raise NotImplementedError(
            "add_param_group() after shard(): the layout of shards is fixed; give every parameter to the optimizer, frozen "
            "or not, before shard()"
        )

    def state_dict(self) -> NoReturn:
        """Refused: state is sharded."""
        raise NotImplementedError(
            "state_dict(): the state is sharded over ranks; use shardmp.save(directory, model, optimizer)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refused: state is sharded."""
        raise NotImplementedError(
            "load_state_dict(): the state is sharded over ranks; use shardmp.load(directory, model, optimizer)"
        )


class NoState(defaultdict[Tensor, dict[str, Any]]):
    """`optimizer.state`: empty, and it says so."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise KeyError(
            "optimizer.state[p]: each rank holds pieces of the state; use shardmp.save(directory, model, optimizer), and "
            "optimizer.master(name) for FP32 weights"
        )
