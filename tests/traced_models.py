"""Small models of every kind of layer that keeps something for backward, and how their real runs are counted.

Owns   nothing. Takes  a name of `MODELS`. Gives  models, batches, losses, and what autograd saved in a real run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardmp.activations import Batch


class Attention(nn.Module):
    """Attention as torch's fused kernels compute it, causal, and a gated MLP on a residual stream."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.value, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.out(y)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.value(h))


class Language(nn.Module):
    """Token ids in, logits out; embeddings tied to the head; optionally recomputed in backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.token = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def image_classes(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().pow(2).mean()


def convolutions() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    return nn.Sequential(
        block(3, 16), nn.MaxPool2d(2), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 96), nn.GroupNorm(4, 96))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(32, 48, batch_first=True), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def adapters() -> nn.Module:
    """A frozen base and a small part that trains, beside a buffer."""
    base = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 96)).requires_grad_(False)
    base.register_buffer("table", torch.zeros(1000))
    return nn.Sequential(base, nn.Linear(96, 8, bias=False), nn.Linear(8, 96, bias=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], str, Callable[..., Tensor]]] = {
    "attention": (Language, "4x65:int64", next_token),
    "recomputed": (lambda: Language(recompute=True), "4x65:int64", next_token),
    "convolution": (convolutions, "8x3x32x32,8:int64", image_classes),
    "dropout": (dropout, "64x96", mean),
    "recurrent": (Recurrent, "16x6x32", mean),
    "adapters": (adapters, "64x96", mean),
}


def tensors(batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The batch on the CPU, as positions and keywords."""
    made = [(one.name, one.tensor(torch.device("cpu"))) for one in batch.inputs]
    return [t for name, t in made if name is None], {name: t for name, t in made if name is not None}


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, Any]]:
    """The storages that autograd saves inside, by identity: torch's own hooks see them, whoever counts."""
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def bytes_besides(saved: dict[int, Any], model: nn.Module, batch: list[Tensor]) -> int:
    """Bytes of saved storages that are neither the model's nor the batch's."""
    known = {id(t.untyped_storage()) for t in (*model.parameters(), *model.buffers(), *batch)}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in known)
