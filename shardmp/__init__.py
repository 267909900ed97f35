"""shardmp: sharded mixed-precision training for PyTorch.

model, optimizer = shardmp.shard(model, optimizer, precision="fp16", stage=2, max_grad_norm=1.0)
for tokens, targets in loader:
    loss = model(tokens, targets)
    optimizer.backward(loss)        # scales the loss; gradients are reduced while backward runs
    report = optimizer.step()       # unscale, clip, skip on overflow, FP32 update, all-gather
    optimizer.zero_grad()
"""

from .api import shard
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .precision import Precision
from .verdict import Overflow, StepReport
from .world import World, init

__all__ = [
    "Overflow",
    "Precision",
    "ShardedModule",
    "ShardedOptimizer",
    "StepReport",
    "World",
    "init",
    "shard",
]
