"""A step is one step: what a backward is, what a divisor and a scale may be, and what zeros are. D09, D15, D16, D25."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Weights, equal, masters, same_on_all_ranks, sharded
from ranks import on_ranks
from torch import Tensor, nn

from shardmp import Precision
from shardmp.scaler import LossScaler

SCALE_16 = Precision(init_scale=16.0)


# -- what is a backward


def line() -> nn.Module:
    layer = nn.Linear(4, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2, 3)
def test_d09_a_gradient_penalty_through_a_scaled_loss(rank: int, stage: int, of: str) -> None:
    """`autograd.grad` of a scaled loss counted as a backward, so that the update was half as large."""
    model, optimizer = sharded(line(), lr=1.0, precision=SCALE_16, stage=stage, average="micro_batches")
    x = torch.ones(1, 4, requires_grad=True)
    loss = model(x).sum()
    scaled = optimizer.scale(loss)
    if of == "input":
        (gradient,) = torch.autograd.grad(scaled, x, create_graph=True)
        penalty = 0.5 * (gradient / optimizer.loss_scale).square().sum()
    else:  # for a look at them
        torch.autograd.grad(scaled, list(model.module.parameters()), retain_graph=True)
        penalty = 0.5 * model.module.weight.float().square().sum()
    optimizer.backward(loss + penalty)
    report = optimizer.step()
    assert report.loss == 6.0
    assert optimizer.master("weight").tolist() == [[-1.0] * 4]


WAYS: dict[str, Callable[[Any, Tensor, Tensor], None]] = {
    "one loss": lambda optimizer, a, b: optimizer.backward(a + 2 * b),
    "a sum": lambda optimizer, a, b: (optimizer.scale(a) + 2 * optimizer.scale(b)).backward(),
    "a list": lambda optimizer, a, b: torch.autograd.backward([optimizer.scale(a), optimizer.scale(2 * b)]),
    "a list with gradients": lambda optimizer, a, b: torch.autograd.backward(
        [optimizer.scale(a), optimizer.scale(b)], [torch.tensor(1.0), torch.tensor(2.0)]
    ),
}


@pytest.mark.parametrize("average", ["ranks", "micro_batches"])
@on_ranks(1, 2)
def test_sums_and_lists_of_scaled_losses_are_one_micro_batch_with_their_sum_as_loss(average: str) -> None:
    for way, backward in WAYS.items():
        model, optimizer = sharded(Weights(), lr=0.125, precision=SCALE_16, average=average)
        for _ in range(2):
            backward(optimizer, model(torch.full((4,), 0.5)), model(torch.ones(4)))
        report = optimizer.step()
        assert report.loss == 10.0, way  # 4 x 0.5 + 2 x 4 x 1
        expected = 1 - 0.125 * 2.5 * (2 if average == "ranks" else 1)
        assert optimizer.master("w").tolist() == [expected] * 4, way


@on_ranks(1, 2)
def test_a_backward_that_reaches_no_parameter_joins_the_reduction(rank: int) -> None:
    for inputs in (False, True):
        model, optimizer = sharded(Weights(), lr=1.0, precision=SCALE_16)
        loss = model(torch.ones(4)) if rank == 0 else torch.ones((), requires_grad=True) * 1
        scaled = optimizer.scale(loss)
        if inputs and rank == 0:
            scaled.backward(inputs=list(model.module.parameters()))
        else:
            scaled.backward()
        report = optimizer.step()
        world_size = torch.distributed.get_world_size()
        assert report.loss == (4.0 + (world_size - 1)) / world_size
        assert optimizer.master("w").tolist() == [1 - 1 / world_size] * 4


@on_ranks(1, 2)
def test_a_second_backward_over_the_same_graph_adds_up() -> None:
    model, optimizer = sharded(Weights(), lr=0.25, precision=SCALE_16)
    loss = model(torch.ones(4))
    scaled = optimizer.scale(loss)
    scaled.backward(retain_graph=True)
    scaled.backward(retain_graph=True)
    optimizer.backward(loss)
    assert optimizer.step().loss == 4.0
    assert optimizer.master("w").tolist() == [0.25] * 4


class Scalar(nn.Module):
    """Its gradient does not read it, so that a forward of before a step has a backward after it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: float) -> Tensor:
        return self.w * x


@pytest.mark.parametrize("with_another", [False, True])
@on_ranks(1, 2)
def test_a_loss_scaled_before_a_step_and_run_after_it_is_unscaled_by_its_own_scale(with_another: bool) -> None:
    policy = Precision(init_scale=4.0, growth_interval=1)
    model, optimizer = sharded(Scalar(), lr=0.125, precision=policy)
    early = optimizer.scale(model(2.0))
    optimizer.backward(model(1.0))
    optimizer.step()  # the scale is 8 from here on
    if with_another:
        optimizer.backward(model(1.0))
    early.backward()
    report = optimizer.step()
    assert report.grad_norm == (3.0 if with_another else 2.0)
    assert optimizer.master("w").item() == 1 - 0.125 * (4 if with_another else 3)


# -- a backward under no_sync that nothing reduces


@pytest.mark.parametrize("who", ["all ranks", "the last rank"])
@on_ranks(1, 2, 3)
def test_d15_a_backward_and_then_no_sync_is_an_error_on_all_ranks_and_writes_nothing(
    rank: int, world_size: int, who: str
) -> None:
    """The second was dropped, and counted."""
    model, optimizer = sharded(Weights(), lr=2.0**-4, precision=SCALE_16, stage=1)
    before = masters(optimizer)
    optimizer.backward(model(torch.ones(4)))
    if who == "all ranks" or rank == world_size - 1:
        with model.no_sync():
            optimizer.backward(model(torch.ones(4)))
    report = optimizer.step()
    assert report.withheld
    assert equal(before, masters(optimizer))
    with model.no_sync():
        optimizer.backward(model(torch.ones(4)))
    optimizer.backward(model(torch.ones(4)))
    named = ", ".join(map(str, range(world_size) if who == "all ranks" else [world_size - 1]))
    with pytest.raises(RuntimeError, match=rf"step 1 .*under no_sync\(\) on rank {named}, so"):
        optimizer.step()
    optimizer.step()
    assert optimizer.master("w").tolist() == [0.875] * 4  # both backwards of the second step
    assert optimizer.skipped_steps == 0
    assert optimizer.loss_scale == 16.0


# -- divisors and scales


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
@on_ranks(1, 2)
def test_a_divisor_on_the_device_that_is_no_positive_number_writes_nothing_and_raises(
    rank: int, world_size: int, bad: float
) -> None:
    """nan made every master NaN with `skipped=False`, 0 was ignored, -1 climbed."""
    for make in (torch.optim.AdamW, torch.optim.RMSprop):
        model, optimizer = sharded(Weights(), make, 0.5, precision=SCALE_16)
        before = masters(optimizer)
        for on in ({world_size - 1}, set(range(world_size))):
            optimizer.backward(model(torch.ones(4)))
            report = optimizer.step(divide_by=torch.tensor(bad if rank in on else 2.0))
            assert report.withheld
            with pytest.raises(ValueError, match="expected one finite number above 0"):
                report.skipped  # noqa: B018
            optimizer.backward(model(torch.ones(4)))
            with pytest.raises(ValueError, match=r"divide_by=\.\.\.\): expected one finite number above 0, the same"):
                optimizer.step()
            assert equal(before, masters(optimizer))
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 0
        assert optimizer.loss_scale == 16.0


@on_ranks(2, 3)
def test_divisors_that_differ_write_nothing_and_raise(rank: int, world_size: int) -> None:
    """Rank 0's word was used, and the error came afterwards."""
    model, optimizer = sharded(Weights(), lr=0.5, precision=SCALE_16)
    before = masters(optimizer)
    divisors = [2.0, torch.tensor(2.0), 4][-world_size:]
    for divide_by, words in (
        (4.0 if rank == 0 else 2.0, r"got \[4\.0, 2\.0"),
        (None if rank == 0 else 2.0, r"step\(divide_by=\.\.\.\): None on rank 0; given on rank 1"),
        (divisors[rank], r"got \[2\.0, .*4\.0\]"),
    ):
        optimizer.backward(model(torch.ones(4)))
        assert optimizer.step(divide_by=divide_by).withheld
        optimizer.backward(model(torch.ones(4)))
        with pytest.raises(ValueError, match=words):
            optimizer.step(divide_by=2.0)
        assert equal(before, masters(optimizer))
        optimizer.zero_grad()
    optimizer.backward(model(torch.ones(4)))
    optimizer.step(divide_by=torch.tensor(2.0 * world_size))
    assert optimizer.master("w").tolist() == [0.75] * 4


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("divide_by", [2.0**124, 2.0**-160])
@on_ranks(1, 2)
def test_a_divisor_that_fp32_cannot_hold_beside_the_scale_skips_and_says_so(divide_by: float, make: Any) -> None:
    model, optimizer = sharded(Weights(), make, 0.5, precision=SCALE_16)
    before = masters(optimizer)
    optimizer.backward(model(torch.ones(4)))
    report = optimizer.step(divide_by=divide_by)
    assert report.skipped
    assert report.overflow is not None
    assert report.overflow.kind == "divisor"
    assert "loss scale x divisor x clipping" in str(report.overflow)
    assert equal(before, masters(optimizer))
    assert optimizer.loss_scale == 8.0
    optimizer.backward(model(torch.ones(4)))
    assert not optimizer.step().skipped


@pytest.mark.parametrize("name", ["static_scale", "init_scale", "min_scale", "max_scale"])
def test_d16_scales_are_fp32_numbers_whose_reciprocals_are(name: str) -> None:
    for value in (2.0**-160, 2.0**-127, 2.0**127 * 1.001, 2.0**130):
        with pytest.raises(ValueError, match=rf"Precision\({name}=\.\.\.\): expected from 2\^-126 to 2\^127"):
            Precision(**{"min_scale": 2.0**-126, "max_scale": 2.0**127, name: value})
    Precision(min_scale=2.0**-126, max_scale=2.0**127, init_scale=2.0**-126)
    Precision(min_scale=2.0**-126, max_scale=2.0**127, init_scale=2.0**127)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
def test_d16_the_extreme_scales_move_between_their_bounds(scale: float) -> None:
    policy = Precision(min_scale=2.0**-126, max_scale=2.0**127, init_scale=scale, growth_interval=1)
    scaler = LossScaler(policy, torch.device("cpu"))
    for skip in (1.0, 1.0, 0.0, 0.0):
        scaler.update(torch.tensor(skip), torch.tensor(False))
        assert 2.0**-126 <= scaler.scale.item() <= 2.0**127


def test_a_withheld_step_moves_no_scale_whoever_shares_it() -> None:
    scaler = LossScaler(Precision(init_scale=8.0, growth_interval=2, hysteresis=2), torch.device("cpu"))
    yes, no = torch.tensor(True), torch.tensor(False)
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    scaler.update(zero, no, yes)
    before = scaler.state()
    scaler.update(one, no, no)
    assert scaler.state() == before
    scaler.users = [None, None]
    scaler.update(one, yes, no)
    scaler.update(zero, no, yes)
    scaler.settle()
    assert scaler.scale.item() == 16.0  # by the other's verdict alone
    assert scaler.hopeless.item() == 0


@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_hopeless_skips_survive_a_checkpoint_without_a_loss_scale(param: str) -> None:
    first, second = (LossScaler(Precision(param=param), torch.device("cpu")) for _ in range(2))
    for _ in range(3):
        first.update(torch.tensor(1.0), torch.tensor(False))
    second.load(first.state())
    second.update(torch.tensor(1.0), torch.tensor(False))
    assert second.hopeless.item() == 4
    assert second.scale.item() == 1.0


# -- zeros


class TwoScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("through", ["optimizer", "model"])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2, 3)
def test_d25_zeros_are_gradients_and_none_stays_none(rank: int, through: str, stage: int) -> None:
    """`zero_grad(set_to_none=False)` was ignored: 0.85 in place of 0.576662."""
    for set_to_none in (False, True):
        plain, kept = TwoScalars(), TwoScalars()
        torchs = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5, fused=True)
        model, optimizer = sharded(
            kept, torch.optim.AdamW, 0.1, weight_decay=0.5, precision=SCALE_16, stage=stage, max_grad_norm=None
        )
        for step in range(4):
            torchs.zero_grad(set_to_none)
            (optimizer if through == "optimizer" else model).zero_grad(set_to_none)
            (plain.b if step else plain.a).backward()
            optimizer.backward((kept.b if step else kept.a) * 1.0)
            torchs.step()
            assert not optimizer.step().skipped
            for name in ("a", "b"):
                assert optimizer.master(name).item() == getattr(plain, name).item(), (step, name)
        assert round(optimizer.master("a").item(), 6) == (0.85 if set_to_none else 0.576662)
        assert same_on_all_ranks(masters(optimizer))


def test_zero_grad_after_step_does_not_change_how_exact_expects_the_next_backwards() -> None:
    model, optimizer = sharded(Weights(), lr=0.5, precision=SCALE_16, reduce="exact", average="micro_batches")
    for backwards, expected in ((3, False), (1, True), (2, False)):
        for _ in range(backwards):
            optimizer.backward(model(torch.ones(4)))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer._gradients._one_expected is expected
