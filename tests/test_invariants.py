"""The invariants of the design that are not about bits: see docs in each test."""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Calls, Weights, equal, masters, same_on_all_ranks, sharded
from ranks import on_ranks, run_ranks
from torch import Tensor, nn

import shardmp
from shardmp.collectives import Collectives
from shardmp.exchange import TILE
from shardmp.parameters import Parameters

PRECISIONS = ["fp16", "bf16", "fp32"]


class Branches(nn.Module):
    """Each parameter is used by the ranks that the call names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        return torch.stack([self.parts[index](x) for index in use]).sum(0)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """The collectives that are started, with the bucket's number or the vector's size, in order."""
    calls: list[tuple[str, int]] = []
    saved = {name: getattr(Collectives, name) for name in ("start_exchange", "start_gather", "all_reduce", "broadcast")}

    def wrap(name: str) -> Any:
        def call(self: Collectives, first: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, first.numel() if isinstance(first, Tensor) else first))
            return saved[name](self, first, *args, **kwargs)

        return call

    for name in saved:
        setattr(Collectives, name, wrap(name))
    try:
        yield calls
    finally:
        for name, method in saved.items():
            setattr(Collectives, name, method)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2, 3)
def test_1_every_rank_makes_the_same_collectives_whatever_its_graph_used(rank: int, stage: int) -> None:
    model, optimizer = sharded(Branches(), torch.optim.AdamW, 0.01, stage=stage, bucket_mb=0.0006)
    with recorded() as calls:
        for step in range(4):
            for backward in range(2):
                use = [[0, 1, 2, 3, 4], [4, 3], [rank], [(rank + step) % 5, 2]][(step + backward + rank) % 4]
                optimizer.backward(model(torch.ones(2, 16), use).mean())
            optimizer.backward(None if rank == step % 2 else model(torch.ones(2, 16), [rank]).mean())
            optimizer.step()
    assert sum(name == "start_exchange" for name, _ in calls) == 4 * 3 * len(optimizer._layout.buckets)
    assert len(optimizer._layout.buckets) > 2
    assert same_on_all_ranks(calls)
    assert same_on_all_ranks(masters(optimizer))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop])
@on_ranks(1, 2, 3)
def test_4_an_overflow_on_one_rank_leaves_everything_but_the_scale_bit_unchanged(
    rank: int, world_size: int, precision: str, make: Any
) -> None:
    policy = shardmp.Precision(init_scale=256.0) if precision == "fp16" else precision
    model, optimizer = sharded(Branches(), make, 0.01, precision=policy, max_grad_norm=1.0)

    def step(bad: bool) -> shardmp.StepReport:
        x = torch.ones(2, 16) * (torch.inf if bad and rank == world_size - 1 else 1.0)
        optimizer.backward(model(x, [0, 1, 2, 3, 4]).square().mean())
        return optimizer.step()

    def everything() -> list[Any]:
        state = [list(value.values()) for value in optimizer._update.inner.state.values()]
        return [masters(optimizer), {k: v.clone() for k, v in model.state_dict().items()}, _clone(state)]

    assert not step(False).skipped
    before = everything()
    scale = optimizer.loss_scale
    report = step(True)
    assert report.skipped
    assert report.overflow is not None
    assert report.overflow.ranks == (world_size - 1,)
    after = everything()
    assert equal(before, after)
    assert optimizer.loss_scale == (scale / 2 if precision == "fp16" else 1.0)
    assert same_on_all_ranks((optimizer.loss_scale, optimizer.skipped_steps))
    assert not step(False).skipped
    assert not equal(before[0], masters(optimizer))


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_clone(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2)
def test_5_the_scale_that_scaled_is_the_one_that_unscales_on_every_step_of_growth(stage: int) -> None:
    """DeepSpeed 0.19 updates with half the gradient on the step where the scale grows (DeepSpeed#8588)."""
    policy = shardmp.Precision(init_scale=4.0, growth_interval=1, keep_fp32=())
    model, optimizer = sharded(Weights(), lr=1.0, precision=policy, stage=stage)
    for step in range(1, 6):
        optimizer.backward(model(torch.full((4,), 0.5)))
        report = optimizer.step()
        assert optimizer.master("w").tolist() == [1 - 0.5 * step] * 4
        assert report.grad_norm == 1.0
        assert report.loss_scale == 4.0 * 2 ** (step - 1)
        assert optimizer.loss_scale == 4.0 * 2**step


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@on_ranks(1, 2)
def test_7_backward_and_step_never_make_the_host_wait(precision: str, make: Any) -> None:
    model, optimizer = sharded(Branches(), make, 0.01, precision=precision, max_grad_norm=1.0)
    for step in range(5):
        loss = model(torch.ones(2, 16), [0, 1, 2, 3, 4]).mean()
        with Calls() as calls:
            optimizer.backward(loss)
            optimizer.step()
        assert calls.waits == [], step


@on_ranks(2)
def test_7_a_class_without_a_fused_kernel_waits_once_a_step() -> None:
    model, optimizer = sharded(Branches(), torch.optim.RMSprop, 0.01, bucket_mb=0.0006)
    for _ in range(3):
        loss = model(torch.ones(2, 16), [0, 1, 2, 3, 4]).mean()
        with Calls() as calls:
            optimizer.backward(loss)
            optimizer.step()
        waits = [name for name in calls.waits if name == "aten::is_nonzero"]
        assert len(waits) <= 1


def fail_in_backward(rank: int) -> tuple[str, str, float]:
    """Rank 1 makes one backward less; returns the first error, the error of the next call, and the seconds it took."""
    model, optimizer = sharded(Branches(), torch.optim.SGD, 0.01)
    use = [0, 1, 2, 3, 4]
    optimizer.backward(model(torch.ones(2, 16), use).mean())
    optimizer.step()
    started = time.monotonic()
    try:
        optimizer.backward(model(torch.ones(2, 16), use).mean())
        if rank == 0:
            optimizer.backward(model(torch.ones(2, 16), use).mean())
        optimizer.step()
        first = "nothing"
    except RuntimeError as error:
        first = str(error)
    took = time.monotonic() - started
    try:
        optimizer.step()
        second = "nothing"
    except RuntimeError as error:
        second = str(error)
    return first, second, took


def on_this_rank() -> tuple[str, str, float]:
    return fail_in_backward(dist.get_rank())


def test_10_unequal_numbers_of_backwards_end_in_an_error_that_names_who_was_where_and_poison() -> None:
    results = run_ranks(on_this_rank, 2, group_timeout=3, fresh=True)
    for rank, (first, second, took) in enumerate(results):
        assert first.startswith(f"rank {rank} (host {socket.gethostname()}, pid ")
        assert ") at step 2, " in first
        assert took < 3 + 5
        assert "a collective failed before" in second
        assert "restart from the last checkpoint" in second
    assert any("rank 0: step 2, backward 2" in first for first, _, _ in results)
    assert any("rank 1: step 2, after backward 1" in first for first, _, _ in results)


@on_ranks(1, 2)
def test_10_a_backward_that_raised_poisons(world_size: int) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("of the user")

    model, optimizer = sharded(Branches(), torch.optim.SGD, 0.01)
    x = model.module.parts[0](torch.ones(2, 16).half())
    with pytest.raises(ArithmeticError, match="of the user"):
        optimizer.backward(Raises.apply(x).float().mean())
    with pytest.raises(RuntimeError, match="backward raised ArithmeticError: of the user"):
        optimizer.step()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(1, 2)
def test_11_nothing_of_the_whole_models_fp32_size_is_made(world_size: int, precision: str) -> None:
    for make in (torch.optim.AdamW, torch.optim.RMSprop):
        layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        whole = 4 * sum(p.numel() for p in layers.parameters())
        assert whole / 4 > 4 * TILE  # a tile's size does not depend on the model's
        with Calls() as calls:
            model, optimizer = sharded(layers, make, 0.01, precision=precision, bucket_mb=0.5)
            for _ in range(2):
                optimizer.backward(model(torch.ones(1, 512)).mean())
                optimizer.step()
        assert 0 < calls.largest < whole / 4


@on_ranks(2)
def test_11_the_whole_fp32_model_is_released_bucket_by_bucket() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    storages = [weakref.ref(p.data.untyped_storage()) for p in layers.parameters()]
    total: list[int] = []
    build = Parameters._build

    def counted(self: Parameters, *args: Any) -> Any:
        found = build(self, *args)
        total.append(sum(p.dtype == torch.float32 for p in layers.parameters()))
        return found

    Parameters._build = counted  # type: ignore[method-assign]
    try:
        sharded(layers, bucket_mb=0.001)
    finally:
        Parameters._build = build  # type: ignore[method-assign]
    assert total == sorted(total, reverse=True)
    assert total[-1] == 0
    assert len(set(total)) > 3
    assert all(reference() is None for reference in storages)
