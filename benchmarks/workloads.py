"""The models that are timed, and their batches.

Owns:      what a contestant trains: parameters, batches and losses, all from fixed seeds.
Takes:     a workload's name; the step's and the rank's number.
Gives:     a `Workload`: a fresh FP32 model, and the loss of a batch as a function of what computes the forward.
Invariant: every contestant sees the same initial values and the same batches, whatever it does to the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig
from text import read_text, split_text

Forward = Callable[[Tensor], Tensor]

CONTEXT = 128


class Wide(nn.Module):
    """Residual linear layers: few products for each parameter, so that what is timed is exchange and update."""

    def __init__(self, width: int = 2048, depth: int = 15) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


@lru_cache(maxsize=1)
def windows() -> Tensor:
    """(places, CONTEXT + 1) uint8: Python's own documentation, byte by byte."""
    return split_text(read_text(None), CONTEXT)[0].unfold(0, CONTEXT + 1, 1)


def text_loss(batch: int) -> Callable[[Forward, int, int], Tensor]:
    """The mean cross entropy, FP32, of `batch` windows of CONTEXT tokens."""

    def loss(forward: Forward, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        places = torch.randint(len(windows()), (batch,), generator=generator)
        tokens = windows()[places].long()
        return F.cross_entropy(forward(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def wide_loss(forward: Forward, step: int, rank: int) -> Tensor:
    """The mean square, FP32, of what the layers add to one row of 2048 random numbers."""
    x = torch.randn(1, 2048, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (forward(x).float() - x).square().mean()


@dataclass(frozen=True)
class Workload:
    """What is trained.

    about: for the heading of its table.
    make: the model, in FP32 on the CPU.
    blocks: the modules that are sharded as units where a library wants units.
    loss: (forward, step, rank) to a 0-dim FP32 loss; `forward` takes the model's input and gives its output.
    """

    about: str
    make: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]
    loss: Callable[[Forward, int, int], Tensor]

    def build(self) -> nn.Module:
        """A fresh model with the values of seed 0."""
        torch.manual_seed(0)
        return self.make()


WORKLOADS = {
    "gpt": Workload(
        f"6 layers of width 384, 4 x {CONTEXT} tokens per rank: bound by products",
        lambda: GPT(GPTConfig(layers=6, width=384, heads=6, context=CONTEXT)),
        lambda model: list(model.blocks),
        text_loss(4),
    ),
    "wide": Workload(
        "15 residual Linear(2048, 2048) with GELU, one row per rank: bound by exchange and update",
        Wide,
        lambda model: list(model.layers),
        wide_loss,
    ),
    "tiny": Workload(
        f"1 layer of width 32, 1 x {CONTEXT} tokens per rank: shows that the benchmark works, and no speed",
        lambda: GPT(GPTConfig(layers=1, width=32, heads=2, context=CONTEXT)),
        lambda model: list(model.blocks),
        text_loss(1),
    ),
}
