"""Real cases of optimizers that are stepped once a step, of options written later, of hooks, and of 16-bit state.

D01, D26 and D27 of the second list, each with others of its kind. Plain torch on the same data is the oracle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import masters, same_on_all_ranks
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardmp
from shardmp.routes import Route, honours_flags

LR = 2.0**-6


class GroupCounter(torch.optim.Optimizer):
    """NVIDIA/TransformerEngine#1986: Adam, whose count of steps for the bias correction is in the group."""

    def __init__(self, params: Any, lr: float, *, averaged: bool = False) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        self.averaged = averaged
        self.calls: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls.append(len(self.calls) + 1)
        for group in self.param_groups:
            group["step"] += 1
            t = group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                denominator = (state["v"] / (1 - 0.99**t)).sqrt_().add_(1e-8)
                p.addcdiv_(state["m"], denominator, value=-group["lr"] / (1 - 0.9**t))


class Halving(torch.optim.Optimizer):
    """Each step is half as long as the one before: t = 1, 2, ... in the group."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * 2.0 ** -group["t"])


class AttributeCounter(torch.optim.Optimizer):
    """As `Halving`, with the count in an attribute, and a record in a list."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.t = 0
        self.record: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        self.record.append(self.t)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * 2.0**-self.t)


class FirstOfGroup(Halving):
    """Counts only in groups that have parameters with gradients, and makes its state at the count of one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["t"] += 1
            for p in params:
                if group["t"] == 1:
                    self.state[p]["sum"] = torch.zeros_like(p)
                self.state[p]["sum"].add_(p.grad)
                p.sub_(p.grad, alpha=group["lr"] * 2.0 ** -group["t"])


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 4))


def data(step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


def in_two_groups(make: Callable[..., Any], model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return make([{"params": params[:2]}, {"params": params[2:], "lr": LR / 2}], lr=LR, **options)


def plain(make: Callable[..., Any], steps: int) -> dict[str, Tensor]:
    model = net()
    optimizer = in_two_groups(make, model)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.backward(model(data(step)).square().mean())
        optimizer.step()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


# -- D01


@pytest.mark.parametrize("bucket_mb", [None, 0.0001])
@on_ranks(1, 2, 3)
def test_d01a_a_counter_in_the_group_gives_plain_torchs_weights(bucket_mb: float | None) -> None:
    """NVIDIA/TransformerEngine#1986, deepspeedai/DeepSpeed#1823."""
    expected = plain(GroupCounter, 3)
    for stage in (1, 2):
        plain_model = net()
        own = in_two_groups(GroupCounter, plain_model)
        model, optimizer = shardmp.shard(plain_model, own, precision="fp32", stage=stage, bucket_mb=bucket_mb)
        train(model, optimizer, range(3))
        assert_close(masters(optimizer), expected)
        assert [group["step"] for group in optimizer.param_groups] == [3, 3]
        assert own.calls == [1, 2, 3]
        assert optimizer.param_groups is own.param_groups


class Ones(nn.Module):
    """Parameters of ones in several sizes; each gradient is 1. Rank 2 of 3 has a piece of the largest alone."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(2500))
        self.small = nn.Parameter(torch.ones(3))

    def forward(self, small: bool = True) -> Tensor:
        return self.large.float().sum() + (self.small.float().sum() if small else 0.0)


@pytest.mark.parametrize("make", [Halving, AttributeCounter, FirstOfGroup])
@pytest.mark.parametrize("bucket_mb", [None, 0.0001])
@on_ranks(1, 2, 3)
def test_d01b_every_rank_and_bucket_counts_each_applied_step_once(make: Any, bucket_mb: float | None) -> None:
    model = Ones()
    groups = [{"params": [model.large]}, {"params": [model.small]}]
    policy = shardmp.Precision(init_scale=2.0**16, hysteresis=1)
    model, optimizer = shardmp.shard(model, make(groups), precision=policy, bucket_mb=bucket_mb)
    applied = 0
    for _ in range(8):
        optimizer.backward(model())  # 2^16 overflows in FP16: the first step is skipped, and not counted
        applied += not optimizer.step().skipped
        if applied == 3:
            break
    assert optimizer.skipped_steps == 1
    for values in masters(optimizer).values():
        assert values.unique().tolist() == [0.125]
    counts = [group.get("t", optimizer._original.__dict__.get("t")) for group in optimizer.param_groups]
    assert counts == [3, 3]


@pytest.mark.parametrize("make", [Halving, AttributeCounter, FirstOfGroup])
@on_ranks(1, 2, 3)
def test_d01b_a_resumed_run_counts_on_at_four(make: Any, tmp_path: Path) -> None:
    def start() -> Any:
        model = Ones()
        groups = [{"params": [model.large]}, {"params": [model.small]}]
        return shardmp.shard(model, make(groups), precision="fp32", bucket_mb=0.0001)

    model, optimizer = start()
    for _ in range(3):
        optimizer.backward(model())
        optimizer.step()
    shardmp.save(tmp_path, model, optimizer)
    model, optimizer = start()
    shardmp.load(tmp_path, model, optimizer)
    optimizer.backward(model())
    optimizer.step()
    for values in masters(optimizer).values():
        assert values.unique().tolist() == [0.0625]
    if make is AttributeCounter:
        assert optimizer._original.t == 4
        assert optimizer._original.record == [1, 2, 3, 4]
    else:
        assert [group["t"] for group in optimizer.param_groups] == [4, 4]


@on_ranks(2)
def test_a_checkpoint_from_before_the_first_step_resets_the_counts(tmp_path: Path) -> None:
    class Late(Halving):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            super().step()

    model = Ones()
    model, optimizer = shardmp.shard(model, Late(model.parameters()), precision="fp32")
    shardmp.save(tmp_path, model, optimizer)
    optimizer.backward(model())
    optimizer.step()
    assert optimizer.param_groups[0]["calls"] == 1
    shardmp.load(tmp_path, model, optimizer)
    assert "calls" not in optimizer.param_groups[0]
    optimizer.backward(model())
    optimizer.step()
    assert optimizer.param_groups[0]["calls"] == 1
    assert masters(optimizer)["large"].unique().tolist() == [0.5]


@on_ranks(1, 3)
def test_a_group_without_any_gradient_does_not_count_where_torch_would_not() -> None:
    model = Ones()
    groups = [{"params": [model.large]}, {"params": [model.small]}]
    model, optimizer = shardmp.shard(model, FirstOfGroup(groups), precision="fp32")
    for _ in range(2):
        optimizer.backward(model(small=False))
        optimizer.step()
    assert [group["t"] for group in optimizer.param_groups] == [2, 0]
    assert masters(optimizer)["small"].tolist() == [1.0] * 3
    assert masters(optimizer)["large"].unique().tolist() == [0.25]


@on_ranks(1, 2)
def test_foreach_left_open_is_false_where_a_class_steps_once() -> None:
    seen: list[Any] = []

    class Foreach(Halving):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            for group in self.param_groups:
                group["foreach"] = None

        def step(self, closure: Any = None) -> None:
            seen.append(self.param_groups[0]["foreach"])
            super().step()

    model = Ones()
    model, optimizer = shardmp.shard(model, Foreach(model.parameters()), precision="fp32")
    seen.clear()
    optimizer.backward(model())
    optimizer.step()
    assert seen == [False]
    assert optimizer.param_groups[0]["foreach"] is None


@on_ranks(2)
def test_predicted_bytes_hold_for_a_class_that_steps_once(tmp_path: Path) -> None:
    model = net()
    model, optimizer = shardmp.shard(model, in_two_groups(GroupCounter, model), precision="fp16")
    train(model, optimizer, range(3))
    assert optimizer.memory() == optimizer.predicted_memory()


# -- D26: options written later


class One(nn.Module):
    """One parameter of ones; its gradient is `scale`."""

    def __init__(self, size: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, scale: float = 1.0) -> Tensor:
        return self.w.float().sum() * scale


def scalar(make: Any, **options: Any) -> tuple[Any, Any]:
    model = One()
    return shardmp.shard(model, make(model.parameters(), **options), precision="fp32")


def step(model: Any, optimizer: Any) -> float:
    optimizer.backward(model())
    optimizer.step()
    return round(optimizer.master("w").item(), 6)


@on_ranks(1, 2, 3)
def test_d26_momentum_and_dampening_written_before_the_first_step_act() -> None:
    """translated from torch's own tests of SGD."""
    model, optimizer = scalar(torch.optim.SGD, lr=0.1)
    assert optimizer._update.route is Route.FUSED
    optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
    assert [step(model, optimizer), step(model, optimizer)] == [0.9, 0.76]
    assert optimizer._update.route is Route.TILED


WRITTEN_LATER = [
    (torch.optim.SGD, {"momentum": 0.9}, {"dampening": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, {"dampening": 0.0, "nesterov": True}),
    (torch.optim.SGD, {}, {"momentum": 0.9}),
    (torch.optim.SGD, {}, {"maximize": True}),
    (torch.optim.Adam, {}, {"foreach": True}),
    (torch.optim.Adam, {"foreach": False}, {"foreach": None}),
    (torch.optim.Adam, {"fused": False}, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}),
    (torch.optim.AdamW, {}, {"maximize": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, {"centered": False}),
]


def by_torch(make: Any, first: dict[str, Any], then: dict[str, Any], before: int, after: int) -> list[float]:
    w = nn.Parameter(torch.ones(64))
    optimizer = make([w], lr=0.1, **first)
    values = []
    for number in range(before + after):
        if number == before:
            optimizer.param_groups[0].update(then)
        w.grad = torch.ones(64)
        optimizer.step()
        values.append(round(w[0].item(), 6))
    return values


@on_ranks(1, 2)
def test_d26_options_written_after_a_step_act_as_in_torch() -> None:
    for make, first, then in WRITTEN_LATER:
        for before in (0, 1, 3):
            model, optimizer = scalar(make, lr=0.1, **first)
            found = [step(model, optimizer) for _ in range(before)]
            optimizer.param_groups[0].update(then)
            found += [step(model, optimizer) for _ in range(3)]
            assert found == pytest.approx(by_torch(make, first, then, before, 3), abs=2e-6), (make, first, then, before)


STATE_IS_MISSING = [
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
]


@on_ranks(1, 2, 3)
def test_d26_state_that_an_option_needs_is_made_before_the_first_step_and_refused_on_all_ranks_after_it() -> None:
    for make, then in STATE_IS_MISSING:
        model, optimizer = scalar(make, lr=0.1)
        optimizer.param_groups[0].update(then)
        assert [step(model, optimizer) for _ in range(3)] == pytest.approx(by_torch(make, {}, then, 0, 3), abs=2e-6)

        model, optimizer = scalar(make, lr=0.1)
        step(model, optimizer)
        before = optimizer.master("w").item()
        optimizer.param_groups[0].update(then)
        optimizer.backward(model())
        name = next(iter(then))
        with pytest.raises(ValueError, match=rf"{make.__name__}, group 0: {name} from .* written after shard"):
            optimizer.step()
        assert optimizer._parameters.buckets[0].master.flatten()[0].item() in (before, 0.0)  # a rank with padding has 0


@on_ranks(2)
def test_an_option_taken_out_of_a_group_is_an_error_on_all_ranks() -> None:
    model, optimizer = scalar(torch.optim.RMSprop, lr=0.1)
    step(model, optimizer)
    del optimizer.param_groups[0]["momentum"]
    optimizer.backward(model())
    with pytest.raises(ValueError, match="group 0: momentum"):
        optimizer.step()


@on_ranks(1, 2)
def test_a_skipped_first_step_leaves_no_momentum_to_damp() -> None:
    model = One()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = shardmp.shard(model, own, precision=shardmp.Precision(init_scale=1.0))
    optimizer.backward(model(torch.inf))
    assert optimizer.step().skipped
    optimizer.param_groups[0]["dampening"] = 0.5
    for _ in range(2):
        optimizer.backward(model(1.0))
        optimizer.step()
    assert round(optimizer.master("w").item(), 6) == 0.76


@on_ranks(1, 2)
def test_a_schedule_of_momentum_costs_no_trial() -> None:
    model, optimizer = scalar(torch.optim.SGD, lr=0.1, momentum=0.9)
    route = optimizer._update._choose_route
    optimizer._update._choose_route = lambda: pytest.fail("the route was chosen anew")
    for momentum in (0.9, 0.8, 0.85):
        optimizer.param_groups[0]["momentum"] = momentum
        step(model, optimizer)
    optimizer._update._choose_route = route


# -- D27: hooks


@contextlib.contextmanager
def global_hooks(calls: list[str]) -> Iterator[None]:
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Subclass(torch.optim.AdamW):
    """Its step calls its parent's, which torch has wrapped too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, Halving, Subclass])
@on_ranks(1, 2, 3)
def test_d27_global_hooks_run_once_a_step_and_never_in_shard(make: Any) -> None:
    torch.optim.AdamW([torch.ones(1)])  # torch wraps a class's step when the first of it is made
    calls: list[str] = []
    model = net()
    own = make(model.parameters(), lr=0.1)
    with global_hooks(calls):
        model, optimizer = shardmp.shard(model, own, bucket_mb=0.0001, precision="fp32")
        assert calls == []
        for number in range(2):
            train(model, optimizer, range(1))
            assert calls == ["pre", "post"] * (number + 1)


@on_ranks(1, 2)
def test_hooks_of_the_users_optimizer_run_with_the_sharded_step_and_can_be_removed() -> None:
    model = net()
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls: list[Any] = []
    first = own.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    own.register_step_post_hook(lambda *_: calls.append("post"))
    model, optimizer = shardmp.shard(model, own, bucket_mb=0.0001, precision="fp32")
    assert calls == []
    train(model, optimizer, range(1))
    assert calls == [optimizer, "post"]
    first.remove()
    own.register_step_post_hook(lambda *_: calls.append("later"))
    train(model, optimizer, range(1))
    assert calls[2:] == ["post", "later"]


@pytest.mark.parametrize(
    "register",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_hooks_of_a_state_dict_that_no_save_would_run_are_refused(register: str) -> None:
    model = net()
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = getattr(own, register)(lambda *_: None)
    with pytest.raises(TypeError, match="AdamW has hooks of its state_dict"):
        shardmp.shard(model, own)
    handle.remove()
    shardmp.shard(model, own)


# -- state that the optimizer brings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(1, 2, 3)
def test_state_of_a_16_bit_model_becomes_fp32_on_every_rank(dtype: torch.dtype) -> None:
    """Adagrad makes its state in its constructor, in the model's dtype; a fused kernel refuses it beside FP32 masters."""
    makers = (
        torch.optim.Adagrad,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        lambda params: torch.optim.SGD(params, momentum=0.5),
        GroupCounter,
    )
    for make in makers:
        model = One(1500, dtype)
        own = make(model.parameters(), lr=2.0**-4) if make is GroupCounter else make(model.parameters())
        for _ in range(0 if make is torch.optim.Adagrad else 2):
            model.w.grad = torch.full_like(model.w, 0.5)
            own.step()
        own.zero_grad()
        brought = {key: value.clone() for key, value in own.state[model.w].items() if torch.is_tensor(value)}
        wrapped, optimizer = shardmp.shard(model, own, precision="fp32")
        count = 0
        for piece, flat, _ in optimizer._update.piece_states():
            count += 1
            for key, value in flat.items():
                assert value.dtype == torch.float32
                assert torch.equal(value[: piece.hi - piece.lo], brought[key].float()[piece.lo : piece.hi])
        assert sum(_counts(count)) >= 1
        optimizer.backward(wrapped())
        optimizer.step()
        whole = optimizer.master("w")
        assert whole.isfinite().all()
        assert len(whole.unique()) == 1
        assert same_on_all_ranks(whole)


def _counts(count: int) -> list[int]:
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, count)
    return told


# -- the kernels' flags


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_torchs_fused_kernels_honour_divisor_and_flag(kind: Any) -> None:
    assert honours_flags(kind, torch.device("cpu"))


def test_a_kernel_that_does_not_know_the_flags_is_noticed() -> None:
    class Deaf(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, fused: bool) -> None:
            super().__init__(params, {"lr": lr, "fused": fused})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    assert not honours_flags(Deaf, torch.device("cpu"))
