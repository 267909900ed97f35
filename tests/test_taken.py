"""The record of what `shard` took over: what a look at it finds, what it lets pass, and what the other ranks hear."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_tools import fp16
from helpers import masters, sharded
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import shardmp


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.actor, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.actor(x) + self.frozen(x)).float().square().mean()

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        for layer in (self.actor, self.frozen):
            x = layer(x)
            yield x

    def trained(self) -> Iterator[nn.Parameter]:
        yield from self.actor.parameters()


def step(model: Any, optimizer: shardmp.ShardedOptimizer) -> Any:
    optimizer.backward(model(torch.ones(2, 4)))
    return optimizer.step()


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def exchanged_parameter(model: Any) -> None:
    model.critic[0].weight = nn.Parameter(model.critic[0].weight.detach().clone())


def same_value(model: Any) -> None:
    """A scalar that equals the old one is another parameter all the same."""
    model.critic[2].bias = nn.Parameter(model.critic[2].bias.detach().clone())


def unfrozen(model: Any) -> None:
    model.frozen.requires_grad_(True)


def unfrozen_copy(model: Any) -> None:
    model.frozen = nn.Linear(4, 4)


CHANGES: dict[Callable[[Any], Any], str] = {
    exchanged_parameter: "critic.0.weight was taken out",
    same_value: "critic.2.bias was taken out",
    unfrozen: "frozen.weight was frozen when shard.. was called",
    unfrozen_copy: r"frozen.weight of shape \(4, 4\) was added after shard",
    lambda model: model.double(): "actor.weight was taken out of its bucket.*cast",
    lambda model: model.critic[1].half(): "critic.1.weight was taken out of its bucket.*cast",
    lambda model: prune.l1_unstructured(model.actor, "weight", 0.5): "actor.weight was taken out.*parametrised",
    lambda model: register_parametrization(model.actor, "weight", Double()): "actor.weight was taken out.*parametrised",
    lambda model: nn.utils.weight_norm(model.actor): "actor.weight was taken out.*parametrised",
    lambda model: setattr(model.actor.weight, "data", torch.zeros(4, 4)): "actor.weight was taken out",
    lambda model: nn.init.zeros_(model.actor.weight): "actor.weight was written in place",
    lambda model: model.critic.append(nn.Linear(1, 1)): r"critic.3.weight of shape \(1, 1\) was added",
    lambda model: model.critic.__setitem__(0, nn.Linear(4, 4)): r"critic.0.weight .* is not the one",
    lambda model: model.share_memory(): "actor.weight was moved with its bucket",
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: CHANGES[change][:24])
def test_a_change_after_some_steps_is_refused_at_the_next_and_moves_nothing(change: Callable[[Any], Any]) -> None:
    plain = Parts()
    model, optimizer = sharded(plain, precision=fp16(16.0))
    step(model, optimizer)
    before = {
        name: values for name, values in masters(optimizer).items() if ".1." not in name
    }  # FP32: masters themselves
    change(plain)
    with pytest.raises(RuntimeError, match=CHANGES[change]):
        step(model, optimizer)
    assert all(torch.equal(optimizer.master(name), values) for name, values in before.items())


HARMLESS: list[Callable[[Any], Any]] = [
    lambda model: setattr(model, "loss", nn.CrossEntropyLoss()),
    lambda model: setattr(model, "frozen", nn.Linear(4, 4).requires_grad_(False)),
    lambda model: setattr(model, "frozen", nn.Identity()),
    lambda model: model.actor.register_forward_hook(lambda *_: None),
    lambda model: model.actor.register_buffer("seen", torch.zeros(3)),
    lambda model: setattr(model, "critic", nn.Sequential(*model.critic)),  # the same parameters by the same names
    lambda model: model.actor.requires_grad_(False),
    lambda model: model.actor.register_parameter("nothing", None),
]


@pytest.mark.parametrize("number", range(len(HARMLESS)))
def test_a_change_that_concerns_no_trainable_parameter_passes_and_becomes_the_record(number: int) -> None:
    plain = Parts()
    model, optimizer = sharded(plain, precision=fp16(16.0))
    step(model, optimizer)
    HARMLESS[number](plain)
    before = optimizer.master("critic.0.weight").clone()
    assert not step(model, optimizer).skipped
    assert not torch.equal(before, optimizer.master("critic.0.weight"))
    plain.late = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="late.weight of shape .* was added"):
        step(model, optimizer)


@pytest.mark.parametrize("call", [lambda model, x: model(x), lambda model, x: list(model.stream(x))])
def test_a_forward_that_fails_because_a_part_was_cast_says_so_and_other_failures_stay_what_they_are(call: Any) -> None:
    plain = Parts()
    model, _ = sharded(plain, precision=fp16(16.0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(model, torch.ones(2, 5))
    plain.actor.double()
    with pytest.raises(RuntimeError, match="parameter actor.weight was taken out of its bucket.*cast"):
        call(model, torch.ones(2, 4))


def test_a_change_that_is_taken_back_is_none() -> None:
    plain = Parts()
    model, optimizer = sharded(plain, precision=fp16(16.0))
    actor, plain.actor = plain.actor, nn.Linear(4, 4)
    plain.actor = actor
    assert not step(model, optimizer).skipped


def test_a_part_whose_gradients_wait_cannot_drop_them_alone() -> None:
    """In torch `model.actor.zero_grad()` drops what a critic's loss has left in the actor; here it was a silent no-op."""
    plain = Parts()
    model, optimizer = sharded(plain, precision=fp16(16.0))
    plain.actor.zero_grad()
    optimizer.backward(model(torch.ones(2, 4)))
    with pytest.raises(RuntimeError, match=r"^actor.zero_grad\(\) between backward and step.*requires_grad_\(False\)"):
        plain.actor.zero_grad()
    plain.zero_grad()
    with pytest.raises(RuntimeError, match="call backward first"):
        optimizer.step()


def test_a_method_that_is_a_generator_computes_in_precision_and_yields_fp32() -> None:
    plain = Parts()
    model, _ = sharded(plain, precision="fp16")
    first, second = model.stream(torch.ones(2, 4))
    with torch.autocast("cpu", torch.float16):
        right = plain.actor(torch.ones(2, 4))
    assert (first.dtype, second.dtype) == (torch.float32, torch.float32)
    assert torch.equal(first, right.float())
    assert [p is q for p, q in zip(model.trained(), plain.actor.parameters(), strict=True)] == [True, True]


def change_on_one_rank() -> str:
    plain = Parts()
    model, optimizer = sharded(plain, precision=fp16(16.0))
    step(model, optimizer)
    if torch.distributed.get_rank() == 1:
        plain.critic.append(nn.Linear(1, 1))
    started = time.monotonic()
    try:
        step(model, optimizer)
    except RuntimeError as error:
        if torch.distributed.get_rank() == 1:
            time.sleep(4)  # it lives, and takes no part
        assert time.monotonic() - started < 20
        return str(error)
    return "nothing was raised"


def test_where_one_rank_alone_differs_the_others_hear_which_and_why_within_the_timeout() -> None:
    heard, own = run_ranks(change_on_one_rank, 2, fresh=True, group_timeout=3.0)
    assert own.startswith("parameter critic.3.weight of shape (1, 1) was added after shard()")
    assert "rank 1" in heard
    assert "an error of its own: parameter critic.3.weight of shape (1, 1) was added after shard()" in heard


@on_ranks(1, 2)
def test_a_look_costs_no_operator_of_torch() -> None:
    """It runs in every step: nothing may be launched on a device for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    model, optimizer = sharded(Parts(), precision=fp16(16.0))
    step(model, optimizer)
    with Count():
        optimizer._taken.check_backward()
        optimizer._taken.check_step()
    assert Count.calls == 0
