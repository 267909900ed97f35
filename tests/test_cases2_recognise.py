"""Real cases D02 to D30 of what `shard()` takes over: recognised again afterwards, or refused by name on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_tools import STAGES, fp16, value
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD

import shardmp

# --------------------------------------------------------------------------------------------------------------------
# D02: a gradient of another dtype than its bucket's


class Matrix(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, size, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return (self.w.float() * x).sum()


@STAGES
@pytest.mark.parametrize("size", [4, 1024])  # copied into the send buffer, and sent from where autograd left it
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(1, 2, 3)
def test_d02_a_gradient_of_another_dtype_is_converted_pytorch_172074(
    rank: int, world_size: int, stage: int, size: int, dtype: torch.dtype
) -> None:
    """pytorch/pytorch#172074: `grad_dtype` lets autograd leave an FP32 gradient on a 16-bit parameter."""
    model = Matrix(size, dtype)
    model.w.grad_dtype = torch.float32
    precision: Any = fp16(16.0) if dtype == torch.float16 else "bf16"
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision=precision, stage=stage)
    optimizer.backward(model(0.5 * (1 + rank)))
    assert not optimizer.step().skipped
    expected = 1 - 0.5 * sum(range(1, world_size + 1)) / world_size
    assert torch.equal(optimizer.master("w"), torch.full((size, size), expected))


@on_ranks(1, 2)
def test_d02_a_16_bit_gradient_of_an_fp32_parameter_is_converted(rank: int) -> None:
    model = Matrix(600, torch.float32)
    model.w.grad_dtype = torch.float16
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision="fp32")
    optimizer.backward((model.w.half() * 0.5).float().sum() if rank else model(0.5))
    optimizer.step()
    assert torch.equal(optimizer.master("w"), torch.full((600, 600), 0.5))


@on_ranks(1, 2)
def test_d02_an_fp32_gradient_that_fp16_cannot_hold_is_an_overflow_under_no_sync_too(rank: int) -> None:
    model = Matrix(4, torch.float16)
    model.w.grad_dtype = torch.float32
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision=fp16(16.0), stage=1)
    with model.no_sync():
        optimizer.backward(model(8192.0))
    optimizer.backward(model(0.0))
    report = optimizer.step()
    assert report.skipped
    assert report.overflow.parameters == ("w",)
    assert value(model) == [[1.0] * 4] * 4
