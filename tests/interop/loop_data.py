"""What the loops of docs/interop.md train here: a small model, 20 samples, and a note of what each rank saw and got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEEN: list[tuple[Tensor, Tensor]] = []


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 6))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(20, 20, generator=generator)
    return DataLoader(
        TensorDataset(inputs, torch.randint(0, 6, (20,), generator=generator)), batch_size=2, shuffle=True
    )


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    SEEN.append((inputs.clone(), targets.clone()))
    return F.cross_entropy(model(inputs), targets)


def write(folder: Path, rank: int, model: nn.Module, optimizer: Any) -> None:
    """This rank's batches in order, and its masters."""
    masters = {name: optimizer.master(name).clone() for name, _ in model.named_parameters()}
    torch.save({"seen": SEEN, "masters": masters}, folder / f"rank{rank}.pt")
