"""The budget against CUDA's own allocator: `torch.cuda.memory_allocated` and `max_memory_allocated`, within 2 percent."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traced_models import Attention

import shardmp
from shardmp import budgets
from shardmp.activations import Trace, parse_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, TOKENS = 1024, "16x512:int64"


class Large(nn.Module):
    """Large enough that 512 bytes of rounding in each block of the allocator are nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(4096, WIDTH)
        self.blocks = nn.Sequential(*(Attention(WIDTH, 16) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens_on_device() -> Tensor:
    return torch.randint(0, 4096, (16, 512), device="cuda")


def peak_beyond_now(step: Callable[[], None]) -> int:
    """The most that is allocated during `step` beyond what is allocated when it begins."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_what_a_rank_holds_is_what_the_allocator_says(precision: str) -> None:
    """Before the first backward no buffer is in flight yet; after a step those are held that the library counts."""
    torch.zeros(1, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = Large()
    wrapped, optimizer = shardmp.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), precision=precision)
    run = budgets.planned(Large, ranks=1, precision=precision)
    foreseen = run.memory(run.layout())
    static = sum(foreseen[kind] for kind in budgets.STATE)
    assert torch.cuda.memory_allocated() - before == pytest.approx(static, rel=0.02)
    held = optimizer.memory()
    assert {kind: held[kind] for kind in budgets.STATE} == {kind: foreseen[kind] for kind in budgets.STATE}
    assert wrapped(tokens_on_device()).dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_peak_of_a_sharded_forward_and_backward_is_the_traced_one(precision: str) -> None:
    """Warm: buffers of gradients, and the workspaces of matrix products, exist since the steps before.

    A large gradient is sent from where backward left it, and is then one of the buckets in flight.
    """
    model = Large()
    wrapped, optimizer = shardmp.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), precision=precision)
    tokens = tokens_on_device()
    for _ in range(3):
        optimizer.backward(loss_of(wrapped, tokens))
        optimizer.step()
    peak = peak_beyond_now(lambda: optimizer.backward(loss_of(wrapped, tokens)))
    found = Trace(Large, "shardmp", precision, loss_of, torch.device("cuda"))(parse_batch(TOKENS))
    assert peak == pytest.approx(found.peak, rel=0.02)


@pytest.mark.parametrize("way", ["FP32", "autocast"])
def test_the_peak_of_plain_training_is_the_traced_one(way: str) -> None:
    """With the gradients that exist at that moment: plain training leaves them in `.grad`."""
    model, tokens = Large().cuda(), tokens_on_device()

    def backward() -> None:
        with torch.autocast("cuda", torch.float16, enabled=way == "autocast"):
            loss = loss_of(model, tokens)
        loss.backward()

    for _ in range(2):
        backward()
        model.zero_grad(set_to_none=True)
    found = Trace(Large, way, "fp16", loss_of, torch.device("cuda"))(parse_batch(TOKENS))
    assert peak_beyond_now(backward) == pytest.approx(found.most, rel=0.02)


def test_the_largest_batch_that_is_found_runs_in_that_memory() -> None:
    """The whole answer: state, buckets and activations of a real step stay within the limit that was asked for."""
    limit = 4 * 2**30
    found = shardmp.budget(Large, ranks=1, batch=TOKENS, loss=loss_of, device="cuda", fits=limit)
    best = found["fits"]["largest_batch"]
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = Large()
    wrapped, optimizer = shardmp.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.backward(loss_of(wrapped, torch.randint(0, 4096, (best, 512), device="cuda")))
        optimizer.step()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    # Workspaces of matrix products are the libraries' own, and buckets in flight are an upper bound.
    assert 0.9 * limit < used < limit + 64 * 2**20
