"""The probe finds what kind of optimizer a class is, says why it refuses one, and leaves no trace."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardmp
from shardmp.probe import probe


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.Linear(40, 4))


class Descent(torch.optim.Optimizer):
    """Plain descent; what a class adds is in `update`, which is called for each parameter after its gradient is read."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def before(self) -> None:
        """What is done once a step."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """The gradient that is followed."""
        return p.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(group, p), alpha=group["lr"])


# -- what is refused, and why


class ByParameter(Descent):
    """LAMB's trust ratio."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad * (p.norm() / p.grad.norm())


class Clipped(Descent):
    """Clips a gradient's root mean square at 2, as StableAdamW does: the first small gradients show nothing."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad / max(1.0, p.grad.square().mean().sqrt().item() / 2)


class OverAll(Descent):
    """Normalises by the norm over all parameters, also of other groups."""

    def before(self) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._norm = torch.stack(norms).norm().item()

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad / self._norm


class Distance(Descent):
    """D-Adaptation: an estimate over all parameters in the group, which for now changes no weight."""

    def before(self) -> None:
        for group in self.param_groups:
            group["d"] = sum(p.grad.abs().sum().item() for p in group["params"])


class Matrices(Descent):
    """Gradient centralisation of matrices."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad - p.grad.mean(dim=1, keepdim=True) if p.dim() == 2 else p.grad


class OnlyMatrices(Descent):
    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad - p.grad.mean(dim=1, keepdim=True)


class Convolutions(Descent):
    """Treats parameters of four dimensions otherwise."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad - p.grad.mean(dim=(1, 2, 3), keepdim=True) if p.dim() == 4 else p.grad


class Noise(Descent):
    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return p.grad + torch.randn_like(p)


class Rebinding(Descent):
    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        p.data = p.data - group["lr"] * p.grad
        return torch.zeros_like(p)


class Nested(Descent):
    """State in a list, which no piece of a checkpoint would find."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        self.state[p].setdefault("averages", [torch.zeros_like(p)])[0].lerp_(p.grad, 0.1)
        return p.grad


class Blocks(Descent):
    """One number of state for 256 elements."""

    def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
        self.state[p]["largest"] = nn.functional.pad(p.grad.view(-1), (0, -p.numel() % 256)).view(-1, 256).amax(1)
        return p.grad


class Outside(Descent):
    """State in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.sums: list[Tensor] = []

    def before(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.sums = [a + p.grad for a, p in zip(self.sums or [0.0] * len(params), params, strict=True)]


class Nobodys(Descent):
    """A count in `state` that is no parameter's."""

    def before(self) -> None:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index]


class Unsaved(Descent):
    """Counts in an object that no checkpoint can hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counter = Count()

    def before(self) -> None:
        self.counter.value += 1


class Count:
    value = 0

    def __init__(self) -> None:
        self.value = 0


class Wrapper(Descent):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Cached(Descent):
    """Steps parameters that it remembers from its constructor."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.remembered = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.remembered:
            if p.grad is not None:
                p.sub_(p.grad)


REFUSED = [
    (ByParameter, "needs whole parameters: .*reduces over each whole parameter"),
    (Clipped, "needs whole parameters: .*reduces over each whole parameter"),
    (OverAll, "needs whole parameters: .*reduces over all parameters"),
    (Distance, "needs whole parameters: its step.. writes 'd' into the group, .*: it reduces over all parameters"),
    (Matrices, "needs whole parameters: .*treats matrices otherwise than vectors"),
    (OnlyMatrices, "a trial step failed"),  # its vectors fail in plain torch too
    (Noise, "needs whole parameters: .*draws random numbers"),
    (Rebinding, "changed nothing: it gives parameters new tensors"),
    (Nested, "its state 'averages' is neither one number for each element nor the same on every piece"),
    (Blocks, "its state 'largest' is neither one number for each element nor the same"),
    (Outside, "its step.. writes the attribute 'sums'.*keeps state outside `state`"),
    (Nobodys, "keeps 'count' in its `state`, which is no parameter's"),
    (Unsaved, "its attribute 'counter', which step.. changes: a Count cannot be stored"),
    (Wrapper, "Wrapper wraps another optimizer .its attribute inner."),
    (Cached, "Cached .*changed nothing"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_pieces_would_change_is_refused_by_name_and_reason(make: Any, words: str) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=rf"(?s)optimizer {make.__name__}.*{words}|{words}"):
        shardmp.shard(model, make(model.parameters()))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_class_that_needs_matrices_is_refused_where_the_model_has_nothing_else() -> None:
    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(TypeError, match="OnlyMatrices.*needs whole parameters: a trial step on 1-D pieces failed"):
        shardmp.shard(model, OnlyMatrices(model.parameters()))


def test_a_rule_for_convolutions_is_found_where_the_model_has_some() -> None:
    probe(Convolutions(net().parameters()))
    with pytest.raises(TypeError, match="Convolutions.*treats matrices otherwise"):
        probe(Convolutions(nn.Conv2d(4, 8, 3).parameters()))


def test_the_reason_names_the_group_whose_options_make_it_so() -> None:
    class Optional(ByParameter):
        def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
            return super().change(group, p) if group["ratio"] else p.grad

    params = list(net().parameters())
    groups = [{"params": params[:2], "ratio": False}, {"params": params[2:4], "ratio": False}]
    probe(Optional(groups, ratio=True))
    with pytest.raises(TypeError, match=r"Optional \(group 2\) needs whole parameters"):
        probe(Optional([*groups, {"params": params[4:]}], ratio=True))


# -- what is found


class Counting(Descent):
    def before(self) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        self.param_groups[0]["calls"] = self.calls


class Config:
    def __init__(self) -> None:
        self.limit = 3.0


def test_options_and_attributes_that_a_step_changes_are_found() -> None:
    found = probe(Counting(net().parameters()))
    assert (found.options, found.attributes, found.once) == ({"calls"}, {"calls"}, True)
    params = list(net().parameters())
    assert probe(Counting([{"params": params[:1]}, {"params": params[1:]}])).once


def test_attributes_that_stay_as_they_are_do_not_matter() -> None:
    own = Descent(net().parameters())
    own.config, own.lock, own.names, own.weights = Config(), threading.Lock(), {"a": [1, 2]}, torch.ones(3)
    own.params = list(own.param_groups[0]["params"])
    own.bound = own.step
    assert not probe(own).once


def test_names_and_dtypes_of_state_are_found_also_of_what_comes_late() -> None:
    class Late(Descent):
        def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            if state["step"] > 3:
                state["seen"] = p.grad > 0
            return p.grad

    assert probe(Late(net().parameters())).state == {"seen": torch.bool}
    assert probe(torch.optim.AdamW(net().parameters())).state == dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)


def test_state_that_a_constructor_makes_is_where_a_trial_begins() -> None:
    class Ready(Descent):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"sum": torch.full_like(p, 0.5), "step": 0}

        def change(self, group: dict[str, Any], p: Tensor) -> Tensor:
            self.state[p]["step"] += 1
            return p.grad / self.state[p]["sum"].addcmul_(p.grad, p.grad).sqrt()

    found = probe(Ready(net().parameters()))
    assert found.state == {"sum": torch.float32}
    assert found.seeds[0]["sum"].unique().tolist() == [0.5]


# -- no trace


class Everything(Descent):
    """Changes all that a class can change, and draws from every generator."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, history=[], scale=torch.ones(()))
        self.calls: dict[str, list[int]] = {"calls": []}
        self.total = torch.zeros(())

    def before(self) -> None:
        torch.rand(1), random.random(), np.random.rand()
        self.calls["calls"].append(1)
        self.total += 1
        self.defaults["lr"] = 3.0
        for group in self.param_groups:
            group["history"].append(1)
            group["scale"].mul_(0.5)


def test_a_probe_changes_neither_the_optimizer_nor_generators_nor_runs_hooks() -> None:
    own = Everything(net().parameters())
    before = copy.deepcopy(own.__dict__)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    calls: list[int] = []
    own.register_step_pre_hook(lambda *_: calls.append(1))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        found = probe(own)
    finally:
        handle.remove()
    assert found.options == {"history", "scale"}
    assert found.attributes == {"calls", "total", "defaults"}
    assert calls == []
    assert own.calls == {"calls": []}
    assert own.total.item() == 0.0
    assert own.defaults["lr"] == before["defaults"]["lr"]
    assert own.param_groups[0]["history"] == []
    assert own.param_groups[0]["scale"].item() == 1.0
    assert not own.state
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))


def test_a_default_dtype_does_not_reach_the_trial() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert probe(Descent(nn.Linear(8, 8, dtype=torch.float32).parameters())).state == {}
        assert set(probe(torch.optim.AdamW(nn.Linear(8, 8).parameters())).state) == {"exp_avg", "exp_avg_sq"}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_rate_for_each_layer_does_not_make_a_trial_of_each() -> None:
    steps: list[int] = []

    class Seen(Descent):
        def before(self) -> None:
            steps.append(len(self.param_groups))

    layers = [nn.Linear(4, 4) for _ in range(40)]
    probe(Seen([{"params": list(layer.parameters()), "lr": 0.5**n} for n, layer in enumerate(layers)]))
    assert set(steps) == {1}
