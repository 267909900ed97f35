"""shardmp: sharded mixed-precision training for PyTorch.

model, optimizer = shardmp.shard(model, optimizer, precision="fp16", stage=2, max_grad_norm=1.0)
for tokens, targets in loader:
    loss = model(tokens, targets)
    optimizer.backward(loss)        # scales the loss; gradients are reduced while backward runs
    report = optimizer.step()       # unscale, clip, skip on overflow, FP32 update, all-gather
    optimizer.zero_grad()
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from . import formats
    from .api import shard
    from .budgets import budget
    from .checkpoints import Checkpoints
    from .deepspeed_import import Imported, import_deepspeed
    from .exporting import export
    from .manifest import CheckpointError
    from .module import ShardedModule
    from .optimizer import ShardedOptimizer
    from .precision import Precision
    from .report import Overflow, StepReport
    from .restoring import Loaded, load
    from .saving import Saving, save
    from .world import World, init

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Imported",
    "Loaded",
    "Overflow",
    "Precision",
    "Saving",
    "ShardedModule",
    "ShardedOptimizer",
    "StepReport",
    "World",
    "__version__",
    "budget",
    "export",
    "formats",
    "import_deepspeed",
    "init",
    "load",
    "save",
    "shard",
]

# Loaded at first use: the `shardmp` command starts torchrun without importing torch, which takes seconds, itself.
_HOME = {
    "CheckpointError": "manifest",
    "Checkpoints": "checkpoints",
    "Imported": "deepspeed_import",
    "Loaded": "restoring",
    "Overflow": "report",
    "Precision": "precision",
    "Saving": "saving",
    "ShardedModule": "module",
    "ShardedOptimizer": "optimizer",
    "StepReport": "report",
    "World": "world",
    "budget": "budgets",
    "export": "exporting",
    "import_deepspeed": "deepspeed_import",
    "init": "world",
    "load": "restoring",
    "save": "saving",
    "shard": "api",
}


def __getattr__(name: str) -> Any:
    if name == "formats":  # the one public name that is a module
        return import_module(".formats", __name__)
    if name == "__version__":
        return version("shardmp")
    if name not in _HOME:
        raise AttributeError(f"module 'shardmp' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    """The public names: neither what this module imports, nor submodules that something has imported."""
    return sorted({*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__spec__"})
