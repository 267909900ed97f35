"""What the tests of real cases share: the model of the cases, the stages, and short ways to read results.

Owns   nothing. Takes a sharded model or optimizer. Gives plain values, the same on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmp

STAGES = pytest.mark.parametrize("stage", [1, 2])


class Weights(nn.Module):
    """The cases' model W: named parameters of ones; each is multiplied by its input and summed in FP32."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, **inputs: Any) -> Tensor:
        terms = [(self.get_parameter(name) * x).float().sum() for name, x in inputs.items() if x is not None]
        return torch.stack(terms).sum()


def fp16(scale: float, **options: Any) -> shardmp.Precision:
    return shardmp.Precision(init_scale=scale, **options)


def value(model: nn.Module, name: str = "w") -> list:
    """A parameter as it is read through the wrapper."""
    return dict(model.named_parameters())[name].detach().float().tolist()


def one_step(model: nn.Module, optimizer: Any, **inputs: Any) -> Any:
    optimizer.backward(model(**inputs))
    report = optimizer.step()
    optimizer.zero_grad()
    return report


def states(optimizer: Any) -> list[dict[str, Any]]:
    """The torch optimizer's state of this rank's pieces (none where a rank holds only padding)."""
    return list(optimizer._update.inner.state.values())
