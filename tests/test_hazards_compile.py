"""`torch.compile` of parts and of the whole, before and after `shard`: the weights are those of eager training.

The backend "aot_eager" traces forward and backward and runs the same kernels, so its bits are those of eager; inductor
fuses and rounds in other places, and needs a C++ compiler.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import late_gathers, masters, sharded
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmp

COMPILER = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
NEEDS_COMPILER = pytest.mark.skipif(not COMPILER, reason="inductor on the CPU needs a C++ compiler, and there is none")


class Blocks(nn.Module):
    """Residual blocks with a norm layer, which stays FP32 in the middle of a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def blocks_in_place(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def blocks_replaced(model: Any, backend: str) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def whole_in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def whole_wrapped(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def train(
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    make: Callable[[], nn.Module] = Blocks,
    **options: Any,
) -> list[Tensor]:
    """The masters after three steps, whose gathers come late, in the order of the names (which compiling changes)."""
    torch._dynamo.reset()
    plain = make() if before is None else before(make())
    model, optimizer = sharded(
        plain, torch.optim.AdamW, 0.01, precision=shardmp.Precision(init_scale=256.0), bucket_mb=1e-5, **options
    )
    called = model if after is None else after(model)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with late_gathers():
        for step in range(3):
            optimizer.backward(called(x * (step + 1)).square().mean())
            assert not optimizer.step().skipped
    return list(masters(optimizer).values())


def eager(**options: Any) -> list[Tensor]:
    found = train(**options)
    start = [p.detach() for p in Blocks().parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(found, start, strict=True))
    return found


@pytest.mark.parametrize(
    ("way", "stage"), [(blocks_in_place, 1), (blocks_replaced, 2), (whole_in_place, 1), (whole_wrapped, 2)]
)
@on_ranks(2, timeout=150)
def test_compiled_before_shard_trains_the_bits_of_eager(way: Any, stage: int) -> None:
    """Dynamo could not trace the layers that stay FP32; their autocast region was entered and left by hooks."""
    right = eager(stage=stage)
    found = train(before=functools.partial(way, backend="aot_eager"), stage=stage)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("way", [blocks_in_place, blocks_replaced, whole_in_place])
@on_ranks(2, timeout=150)
def test_compiled_after_shard_trains_the_bits_of_eager(way: Any) -> None:
    """Compiled parts read weights without a torch call that could wait: whole buckets are awaited before."""
    found = train(after=functools.partial(way, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, eager(), strict=True))


@pytest.mark.slow
@on_ranks(2, timeout=150)
def test_the_wrapper_in_torch_compile_trains_the_bits_of_eager() -> None:
    """It works, and takes longest to compile: Dynamo goes through each submodule on its own."""
    found = train(after=functools.partial(whole_wrapped, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, eager(), strict=True))


@on_ranks(2, timeout=150)
def test_compiled_blocks_with_activation_checkpointing_train_the_bits_of_eager() -> None:
    """Forward runs twice, the second time inside of backward."""
    found = train(before=functools.partial(blocks_in_place, backend="aot_eager"), make=Checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(found, eager(), strict=True))


@on_ranks(1, timeout=150)
def test_a_compiled_part_computes_kept_layers_in_fp32() -> None:
    """The norm of 300 x ones squares to 90000 before its mean, beyond FP16; the region must hold inside of a graph."""
    seen: list[torch.dtype] = []

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return super().forward(x)

    plain = nn.Sequential(nn.Linear(8, 8), Norm(8), nn.Linear(8, 1))
    plain.compile(backend="eager")
    model, optimizer = sharded(plain, precision=shardmp.Precision(init_scale=1.0))
    optimizer.backward(model(torch.ones(2, 8)).mean())
    assert seen
    assert set(seen) == {torch.float32}


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="inductor's threads do not survive the ranks' start there")
@pytest.mark.parametrize("way", [blocks_in_place, whole_wrapped])
@on_ranks(2, timeout=280)
def test_inductor_trains_what_eager_trains(way: Any) -> None:
    """Fused kernels round less often than FP16 operators one by one: equal within FP16's spacing, and not by bits."""
    found = train(before=functools.partial(way, backend="inductor"))
    for a, b in zip(found, eager(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=4e-3)
