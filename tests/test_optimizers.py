"""Any elementwise torch optimizer equals itself on whole FP32 masters, bit for bit; others are refused at construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Calls, sharded
from ranks import on_ranks
from test_step import Net, assert_equal, expect, plan, train
from torch import nn

import shardmp
import shardmp.update
from shardmp.probe import probe
from shardmp.routes import takes_flags


class SignMomentum(torch.optim.Optimizer):
    """A user's own: Lion (arXiv 2302.06675), with an argument that its groups do not tell."""

    def __init__(self, params: Any, lr: float, *, beta: float) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    p.sub_(state["momentum"].lerp(p.grad, 1 - self.beta).sign_(), alpha=group["lr"])
                    state["momentum"].lerp_(p.grad, 0.01)


class TrustRatio(torch.optim.Optimizer):
    """LAMB-like: the step of each parameter is scaled by |p| / |g|."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=(group["lr"] * p.norm() / p.grad.norm()).item())


class WholeNorm(TrustRatio):
    """Normalises by the norm over all parameters of a group: cutting one does not show it, separate ranks do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in used]).norm()
            for p in used:
                p.sub_(p.grad / norm, alpha=group["lr"])


class LateState(torch.optim.Optimizer):
    """Plain descent that begins to average its gradients at the third step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] == 3:
                    state["average"] = torch.zeros_like(p)
                if "average" in state:
                    state["average"].mul_(0.5).add_(p.grad, alpha=0.5)
                p.sub_(state.get("average", p.grad), alpha=group["lr"])


Make = Callable[[nn.Module], torch.optim.Optimizer]


def two_groups(make: Any, first: dict[str, Any], second: dict[str, Any], **options: Any) -> Make:
    """Groups with different options, interleaved in the model, so that they meet in buckets and shards."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return make([{"params": params[::2], **first}, {"params": params[1::2], **second}], **options)

    return made


LRS = ({"lr": 0.01}, {"lr": 0.003, "weight_decay": 0.1})
OPTIMIZERS: dict[str, tuple[Make, bool]] = {
    "AdamW fused": (two_groups(torch.optim.AdamW, {"lr": 0.01}, {"betas": (0.8, 0.9)}, fused=True), True),
    "AdamW": (two_groups(torch.optim.AdamW, *LRS), True),
    "AdamW amsgrad": (two_groups(torch.optim.AdamW, *LRS, amsgrad=True), True),
    "AdamW foreach": (two_groups(torch.optim.AdamW, *LRS, foreach=True), False),
    "AdamW plain": (two_groups(torch.optim.AdamW, *LRS, foreach=False, fused=False), False),
    "AdamW tensor lr": (two_groups(torch.optim.AdamW, {"lr": torch.tensor(0.01)}, {}, fused=False), False),
    "Adam": (two_groups(torch.optim.Adam, *LRS), True),
    "Adam maximize": (two_groups(torch.optim.Adam, {"lr": 0.001}, {"lr": 0.002}, maximize=True), True),
    "SGD": (two_groups(torch.optim.SGD, {"lr": 0.1}, {"lr": 0.05, "weight_decay": 0.1}), True),
    "SGD momentum": (
        two_groups(torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, lr=0.05),
        True,
    ),
    "SGD dampening": (two_groups(torch.optim.SGD, {"dampening": 0.5}, {}, lr=0.05, momentum=0.9), False),
    "RMSprop": (two_groups(torch.optim.RMSprop, {"momentum": 0.9}, {"centered": True}, lr=0.001), False),
    "Adagrad": (two_groups(torch.optim.Adagrad, {"lr": 0.05}, {"lr_decay": 0.1}, initial_accumulator_value=0.1), True),
    "Adagrad plain": (two_groups(torch.optim.Adagrad, {"lr": 0.05}, {}, foreach=False), False),
    "late state": (lambda model: LateState(model.parameters(), lr=0.1), False),
    "NAdam": (two_groups(torch.optim.NAdam, *LRS), False),
    "RAdam": (two_groups(torch.optim.RAdam, *LRS), False),
    "Adamax": (two_groups(torch.optim.Adamax, *LRS), False),
    "Adadelta": (two_groups(torch.optim.Adadelta, {"lr": 1.0}, {}), False),
    "Rprop": (two_groups(torch.optim.Rprop, {"lr": 0.001}, {}), False),
    "a user's own": (two_groups(SignMomentum, {"lr": 0.001}, {"lr": 0.002}, lr=0.1, beta=0.9), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 3)
def test_masters_equal_the_same_optimizer_on_whole_masters(world_size: int, name: str) -> None:
    make, fused = OPTIMIZERS[name]
    assert takes_flags(make(Net())) == fused
    steps = plan(world_size, 6, 1, overflow_at=2)
    steps[0] = plan(world_size, 1, 1, overflow_at=0)[0]  # the first step is skipped: state must not start from it
    expected = expect(Net, make, steps, max_grad_norm=0.5, fused=fused)
    assert [step.skipped for step in expected.trace][:3] == [True, False, True]
    patch = pytest.MonkeyPatch()
    patch.setattr(shardmp.update, "UPDATE_TILE", 1024)  # several tiles in a piece
    try:
        model, optimizer, trace = train(Net, make, steps, max_grad_norm=0.5, bucket_mb=0.004)
    finally:
        patch.undo()
    assert_equal((model, optimizer, trace), expected)
    assert optimizer.master("unused").tolist() == [1.0] * 3  # without a gradient: no decay, no step


@pytest.mark.parametrize("name", ["AdamW", "AdamW plain", "RMSprop", "Adagrad", "SGD momentum", "NAdam", "late state"])
@on_ranks(1, 2)
def test_state_that_the_optimizer_brings_is_cut_into_shards(world_size: int, name: str) -> None:
    make, fused = OPTIMIZERS[name]

    def with_history(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        values = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            for index, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * step + index)
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        optimizer.zero_grad()
        for p, value in zip(model.parameters(), values, strict=True):
            p.data.copy_(value)  # the history is in the state alone
        return optimizer

    steps = plan(world_size, 3, 1)
    expected = expect(Net, with_history, steps, fused=fused)
    fresh = expect(Net, make, steps, fused=fused)
    assert not torch.equal(expected.masters["first.weight"], fresh.masters["first.weight"])
    assert_equal(train(Net, with_history, steps, bucket_mb=0.004), expected)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD momentum"])
@on_ranks(1, 2)
def test_an_lr_written_into_a_group_and_schedulers_old_and_new_hold_at_the_next_step(
    world_size: int, name: str
) -> None:
    make, fused = OPTIMIZERS[name]
    steps = plan(world_size, 4, 1)
    finals = []
    for when in ("before", "after", "by hand"):
        plain = Net()
        original = make(plain)
        schedule = torch.optim.lr_scheduler.LambdaLR
        old = schedule(original, lambda step: 0.5**step) if when == "before" else None
        model, optimizer = shardmp.shard(plain, original)
        new = schedule(optimizer, lambda step: 0.5**step) if when == "after" else None
        assert optimizer.param_groups is original.param_groups
        for step in steps:
            optimizer.backward(step[0][torch.distributed.get_rank()](model))
            optimizer.step()
            scheduler = old or new
            if scheduler is not None:
                scheduler.step()
            else:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5
        finals.append({key: optimizer.master(key).clone() for key in ("first.weight", "embed.weight")})
    for other in finals[1:]:
        assert all(torch.equal(other[key], finals[0][key]) for key in other)
    expected = expect(Net, make, steps, fused=fused)
    assert not torch.equal(expected.masters["first.weight"], finals[0]["first.weight"])


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
@on_ranks(1, 2)
def test_temporaries_of_the_update_are_one_tile(make: Any) -> None:
    model = nn.Linear(1024, 2048, bias=False)  # 2M elements, 8 MB of FP32
    patch = pytest.MonkeyPatch()
    patch.setattr(shardmp.update, "UPDATE_TILE", 2**15)
    try:
        wrapped, optimizer = sharded(model, make, 0.01, bucket_mb=8)
        for _ in range(2):
            optimizer.backward(wrapped(torch.ones(1, 1024)).mean())
            verdict_at = optimizer._update.step_run
            largest: list[int] = []

            def watched(*args: Any, of: Any = verdict_at, into: list[int] = largest) -> None:
                with Calls() as calls:
                    of(*args)
                into.append(calls.largest)

            optimizer._update.step_run = watched
            optimizer.step()
            optimizer._update.step_run = verdict_at
        assert max(largest) <= 4 * 2**15  # in the second step, when state exists
    finally:
        patch.undo()


# -- the probe


class Closure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS.*closure"),
        (torch.optim.Adafactor, "Adafactor.*needs whole parameters"),
        (torch.optim.Muon, "Muon"),
        (lambda params: TrustRatio(params, lr=0.1), "TrustRatio.*needs whole parameters"),
        (lambda params: WholeNorm(params, lr=0.1), "WholeNorm.*needs whole parameters"),
        (torch.optim.SparseAdam, "SparseAdam"),
        (lambda params: Closure(params, lr=0.1), "Closure.*closure"),
    ],
)
def test_classes_that_are_not_elementwise_are_refused_with_the_reason(make: Any, words: str) -> None:
    """KellerJordan/Muon#45: norms and matrices over arbitrary pieces give wrong updates without an error."""
    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(TypeError, match=words):
        shardmp.shard(model, make(list(model.parameters())))
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_probe_changes_nothing(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name][0](model)
    before = torch.random.get_rng_state()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = {key: dict(value) for key, value in optimizer.state.items()}
    probe(optimizer)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert states.keys() == optimizer.state.keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Net().parameters(), strict=True))


def test_a_learning_rate_of_zero_does_not_hide_a_class_from_the_probe() -> None:
    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(TypeError, match="needs whole parameters"):
        probe(TrustRatio(model.parameters(), lr=0.0))


@on_ranks(1, 2)
def test_eps_zero_in_padding_and_unused_elements_does_not_reach_others() -> None:
    """0 / 0 in the padding of a shard is NaN; it must stay there."""
    model = nn.Linear(5, 3)
    wrapped, optimizer = sharded(model, torch.optim.Adam, 0.01, eps=0.0, precision=shardmp.Precision(init_scale=64.0))
    for _ in range(3):
        optimizer.backward(wrapped(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum())
        assert not optimizer.step().skipped
    assert optimizer.master("weight").isfinite().all()
    assert optimizer.master("bias").isfinite().all()
