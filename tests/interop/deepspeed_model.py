"""The model and the runs whose DeepSpeed checkpoints are imported: deepspeed_run.py trains them, the tests load them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Stage, 16-bit format, and what else the configuration has.
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "bf16-1": (1, "bf16", {}),
    "bf16-2": (2, "bf16", {}),
    "bf16-3": (3, "bf16", {}),
    "fp16-1": (1, "fp16", {}),
    "fp16-2": (2, "fp16", {}),
    "fp16-3": (3, "fp16", {}),
    "fp32-accumulation": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),  # another class: BF16_Optimizer
    "round-robin": (2, "bf16", {"zero_optimization": {"round_robin_gradients": True}}),
    "sub-groups": (3, "fp16", {"zero_optimization": {"sub_group_size": 20}}),
}
UNSHARDED = "unsharded"
WINDOW, HYSTERESIS, CLIP = 2, 2, 0.5


class Small(nn.Module):
    """Sizes that no number of ranks divides; a tied, a frozen and a one-element parameter, buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 7)
        self.fixed = nn.Linear(7, 5, bias=False)
        self.fixed.requires_grad_(False)
        self.outer = nn.Linear(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.register_buffer("seen", torch.tensor([5, 7]))
        self.register_buffer("mean", torch.tensor([0.1, 0.3, 0.7]))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = F.gelu(self.inner(self.tokens(tokens))) * self.gain
        return F.cross_entropy(self.head(self.outer(self.fixed(hidden))).float(), targets)


def make_optimizer(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Two groups: matrices decay, the rest does not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, **options)


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (6,), generator=generator), torch.randint(0, 11, (6,), generator=generator)
