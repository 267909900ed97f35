"""Invariant 2: the sharded step equals a plain single process with FP32 masters, bit for bit.

For stages 1 and 2, any bucket size, overlap on or off, any number of ranks and of backwards, and through overflows,
with clipping active. The reference (reference.py) is written plainly and shares no code with the library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import reference
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import shardmp
import shardmp.bucket_gradients
from shardmp import ShardedModule, ShardedOptimizer, tensorcore

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Net(nn.Module):
    """Sizes on all sides of 64 and 1024, norm layers kept in FP32, one tied and one unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(11, 40)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.first = nn.Linear(40, 72)
        self.norm = nn.LayerNorm(72)
        self.second = nn.Linear(72, 40)
        self.head = nn.Linear(40, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.second(F.gelu(self.norm(self.first(x)))) * self.gain
        return self.head(x)


def loss_for(step: int, backward: int, rank: int, *, scale: float = 1.0) -> reference.Loss:
    """A loss on data of its own."""
    generator = torch.Generator().manual_seed(step * 10_000 + backward * 100 + rank)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    targets = torch.randint(0, 11, (10,), generator=generator)

    def loss(model: Any) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets) * scale

    return loss


def plan(world_size: int, steps: int, backwards: int, *, overflow_at: int | None = None) -> list[reference.Step]:
    """Losses by step, backward and rank; at `overflow_at` the last rank's last loss is so large that FP16 overflows."""
    last = (overflow_at, backwards - 1, world_size - 1)
    return [
        [
            [loss_for(s, b, r, scale=1e6 if (s, b, r) == last else 1.0) for r in range(world_size)]
            for b in range(backwards)
        ]
        for s in range(steps)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 0.003, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def expect(*args: Any, dtype: torch.dtype = torch.float16, **kwargs: Any) -> reference.Run:
    """The reference's run, with the kernels that the library uses for 16-bit products on this CPU."""
    if dtype != torch.float32:
        tensorcore.enable(dtype)
    return reference.train(*args, dtype=dtype, **kwargs)


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: Sequence[reference.Step],
    *,
    no_sync: bool = False,
    between: Callable[[ShardedModule, ShardedOptimizer], None] = lambda *_: None,
    **options: Any,
) -> tuple[ShardedModule, ShardedOptimizer, list[reference.StepTrace]]:
    """This rank's part of the same training with the library."""
    plain = make_model()
    model, optimizer = shardmp.shard(plain, make_optimizer(plain), **options)
    rank = torch.distributed.get_rank()
    trace = []
    for step in steps:
        for number, backward in enumerate(step):
            loss = backward[rank]
            if no_sync and number < len(step) - 1:
                with model.no_sync():
                    optimizer.backward(None if loss is None else loss(model))
            else:
                optimizer.backward(None if loss is None else loss(model))
        report = optimizer.step()
        optimizer.zero_grad()
        between(model, optimizer)
        trace.append(reference.StepTrace(report.loss_scale, report.skipped, report.grad_norm, report.loss))
    return model, optimizer, trace


def assert_equal(found: tuple[Any, ShardedOptimizer, list[reference.StepTrace]], expected: reference.Run) -> None:
    """Masters, parameters, scales, skips and norms, all by bits."""
    model, optimizer, trace = found
    for ours, theirs in zip(trace, expected.trace, strict=True):
        assert (ours.scale, ours.skipped) == (theirs.scale, theirs.skipped)
        if not ours.skipped:
            assert ours.norm == theirs.norm
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6, nan_ok=True)
    for name, master in expected.masters.items():
        assert torch.equal(optimizer.master(name), master), f"masters of {name} differ"
    values = dict(model.named_parameters())
    for name, master in expected.masters.items():
        assert torch.equal(values[name], master.to(values[name].dtype)), f"{name} is not the rounding of its master"
    assert optimizer.loss_scale == expected.scale
    assert optimizer.skipped_steps == expected.skipped_steps


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("backwards", [1, 3])
@on_ranks(1, 2, 3, 4)
def test_masters_equal_the_reference_for_every_stage_bucket_size_and_overlap(
    world_size: int, precision: str, backwards: int
) -> None:
    steps = plan(world_size, 5, backwards, overflow_at=2)
    expected = expect(Net, adamw, steps, dtype=DTYPES[precision], max_grad_norm=0.5, fused=True)
    assert any(step.norm > 0.5 for step in expected.trace), "clipping is never active: this test tests too little"
    assert expected.skipped_steps == (1 if precision == "fp16" else 0)
    for stage, bucket_mb, overlap in itertools.product([1, 2], [1e-6, 0.004, 8], [True, False]):
        found = train(
            Net, adamw, steps, precision=precision, stage=stage, bucket_mb=bucket_mb, overlap=overlap, max_grad_norm=0.5
        )
        assert_equal(found, expected)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@on_ranks(2, 3)
def test_gradients_that_are_sent_from_where_they_lie_give_the_same_bits(world_size: int, precision: str) -> None:
    steps = plan(world_size, 3, 2)
    expected = expect(Net, adamw, steps, dtype=DTYPES[precision], fused=True)
    patch = pytest.MonkeyPatch()
    patch.setattr(shardmp.bucket_gradients, "DIRECT_NUMEL", 300)
    try:
        for bucket_mb in (1e-6, 0.004, 8):
            found = train(Net, adamw, steps, precision=precision, bucket_mb=bucket_mb)
            assert any(bucket.direct_params for bucket in found[1]._gradients.buckets)
            assert_equal(found, expected)
    finally:
        patch.undo()


@pytest.mark.parametrize("precision", DTYPES)
@on_ranks(1, 2, 3)
def test_no_sync_in_stage_1_adds_up_locally_in_fp32_and_reduces_in_fp32(world_size: int, precision: str) -> None:
    steps = plan(world_size, 3, 3)
    expected = expect(Net, adamw, steps, dtype=DTYPES[precision], max_grad_norm=0.5, fused=True, no_sync=True)
    for bucket_mb in (1e-6, 8):
        found = train(
            Net, adamw, steps, precision=precision, stage=1, bucket_mb=bucket_mb, max_grad_norm=0.5, no_sync=True
        )
        assert_equal(found, expected)


@on_ranks(1, 2)
def test_no_sync_in_stage_2_changes_nothing(world_size: int) -> None:
    steps = plan(world_size, 3, 3)
    expected = expect(Net, adamw, steps, fused=True)
    assert_equal(train(Net, adamw, steps, stage=2, no_sync=True), expected)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2, 3)
def test_the_mean_over_micro_batches_counts_ranks_without_data_as_none(world_size: int, stage: int) -> None:
    steps = plan(world_size, 3, 2)
    steps = [[step[0], [None if rank else step[1][0] for rank in range(world_size)]] for step in steps]
    expected = expect(Net, adamw, steps, average="micro_batches", max_grad_norm=0.5, fused=True)
    assert_equal(train(Net, adamw, steps, average="micro_batches", max_grad_norm=0.5, stage=stage), expected)


@on_ranks(1, 2)
def test_a_whole_step_without_data_on_one_rank_is_right(world_size: int) -> None:
    steps = plan(world_size, 2, 1)
    steps[1] = [[steps[1][0][0], *[None] * (world_size - 1)]]
    expected = expect(Net, adamw, steps, fused=True)
    assert_equal(train(Net, adamw, steps), expected)


@on_ranks(1, 2)
def test_zero_grad_between_backwards_drops_what_was_accumulated(world_size: int, rank: int) -> None:
    steps = plan(world_size, 2, 2)
    expected = expect(Net, adamw, [step[1:] for step in steps], fused=True)
    plain = Net()
    model, optimizer = shardmp.shard(plain, adamw(plain))
    trace = []
    for number, step in enumerate(steps):
        optimizer.backward(step[0][rank](model))
        (optimizer if number else model).zero_grad()
        optimizer.backward(step[1][rank](model))
        report = optimizer.step()
        trace.append(reference.StepTrace(report.loss_scale, report.skipped, report.grad_norm, report.loss))
    assert_equal((model, optimizer, trace), expected)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(2, 3)
def test_native_sums_in_the_wires_dtype(world_size: int, precision: str) -> None:
    steps = plan(world_size, 3, 2)
    expected = expect(Net, adamw, steps, dtype=DTYPES[precision], fused=True)
    _, optimizer, trace = train(Net, adamw, steps, precision=precision, reduce="native", bucket_mb=0.004)
    for ours, theirs in zip(trace, expected.trace, strict=True):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-2)
    for name, master in expected.masters.items():
        assert torch.allclose(optimizer.master(name), master, atol=2e-2)


@on_ranks(1, 2)
def test_dynamic_scales_follow_the_reference_through_growth_and_many_overflows(world_size: int) -> None:
    settings: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 2, "hysteresis": 2, "max_scale": 2.0**22}
    steps = plan(world_size, 14, 1)
    expected = expect(Net, adamw, steps, loss_scale=reference.LossScale(**settings), fused=True)
    assert 2 <= expected.skipped_steps <= 12
    found = train(Net, adamw, steps, precision=shardmp.Precision(**settings))
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "options", [{"keep_fp32": ()}, {"keep_fp32": (nn.LayerNorm, "first", "*.bias")}, {"autocast": False}]
)
@on_ranks(1, 2)
def test_what_stays_fp32_stays_it_as_in_the_reference(world_size: int, options: dict[str, Any]) -> None:
    steps = plan(world_size, 3, 1)
    keep = options.get("keep_fp32", reference.NORM_LAYERS)
    autocast = options.get("autocast", True)
    make: Callable[[], nn.Module] = Net if autocast else Plain
    expected = expect(make, adamw, steps, keep_fp32=keep, autocast=autocast, fused=True)
    assert_equal(train(make, adamw, steps, precision=shardmp.Precision(**options)), expected)


class Plain(nn.Module):
    """Runs in 16 bits from end to end, without autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.norm, self.head = nn.Embedding(11, 40), nn.LayerNorm(40), nn.Linear(40, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


@on_ranks(1, 2)
def test_full_grad_is_the_unscaled_average_and_clipping_for_one_step_is_for_one_step(
    world_size: int, rank: int
) -> None:
    steps = plan(world_size, 2, 2)
    plain = Net()
    policy = shardmp.Precision(init_scale=256.0)
    model, optimizer = shardmp.shard(plain, torch.optim.SGD(plain.parameters(), lr=1.0), precision=policy)
    for backward in steps[0]:
        optimizer.backward(backward[rank](model))
    before = {name: optimizer.master(name).clone() for name, _ in plain.named_parameters()}
    gradients = {name: optimizer.full_grad(name).clone() for name in before}
    norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item()
    report = optimizer.step()
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.equal(optimizer.master(name), before[name] - gradient)

    for limit in (norm / 8, None):
        if limit is not None:
            optimizer.clip_grad_norm_(limit)
        before = {name: optimizer.master(name).clone() for name in before}
        for backward in steps[1]:
            optimizer.backward(backward[rank](model))
        report = optimizer.step()
        moved = sum((optimizer.master(n) - before[n]).double().square().sum().item() for n in before) ** 0.5
        assert moved == pytest.approx(min(report.grad_norm, limit or report.grad_norm), rel=1e-4)


@pytest.mark.parametrize("average", ["ranks", "micro_batches"])
@on_ranks(1, 2)
def test_divide_by_replaces_the_average(world_size: int, rank: int, average: str) -> None:
    for divisor in (6, 6.0, torch.tensor(6.0)):
        plain = nn.Linear(3, 1, bias=False)
        nn.init.ones_(plain.weight)
        policy = shardmp.Precision(init_scale=8.0)
        model, optimizer = shardmp.shard(
            plain, torch.optim.SGD(plain.parameters(), lr=1.0), precision=policy, average=average
        )
        for _ in range(2):
            optimizer.backward(model(torch.full((1, 3), 3.0)).sum())
        optimizer.step(divide_by=divisor)
        assert optimizer.master("weight").tolist() == [[1.0 - world_size] * 3]
