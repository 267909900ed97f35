"""Schedule-free optimizers (arXiv 2405.15682): `train()` and `eval()` act on the masters, and are published.

The class here is the paper's SGD, written as the package `schedulefree` writes it; the package's own classes are tried in
tests/interop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import masters, same_on_all_ranks
from ranks import on_ranks
from torch import Tensor, nn

import shardmp


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": False})

    @torch.no_grad()
    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        for group in self.param_groups:
            group["weight_sum"] += group["lr"] ** 2
            c = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, c)
                    p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 4))


def data(step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


def make(model: nn.Module) -> torch.optim.Optimizer:
    return ScheduleFree(model.parameters(), lr=0.0625)


def train(model: Any, optimizer: Any, steps: range, backward: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model(data(step)).square().mean())
        optimizer.step()


def plain(modes: str) -> list[dict[str, Tensor]]:
    """Plain torch's weights after each of `modes`: t train(), e eval(), s three steps."""
    model, seen, steps = net(), [], 0
    optimizer: Any = make(model)
    for mode in modes:
        if mode == "s":
            train(model, optimizer, range(steps, steps + 3), lambda loss: loss.backward())
            steps += 3
        else:
            (optimizer.train if mode == "t" else optimizer.eval)()
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return seen


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bucket_mb", [None, 0.0001])
@on_ranks(1, 2, 3)
def test_train_and_eval_move_masters_and_parameters_as_in_plain_torch(bucket_mb: float | None) -> None:
    modes = "tsetseett"
    expected = plain(modes)
    for stage in (1, 2):
        model = net()
        model, optimizer = shardmp.shard(model, make(model), precision="fp32", stage=stage, bucket_mb=bucket_mb)
        steps = 0
        for mode, values in zip(modes, expected, strict=True):
            if mode == "s":
                train(model, optimizer, range(steps, steps + 3), optimizer.backward)
                steps += 3
            else:
                (optimizer.train if mode == "t" else optimizer.eval)()
            assert_close(masters(optimizer), values)
            assert_close(dict(model.named_parameters()), values)
            assert optimizer.param_groups[0]["train_mode"] is (mode != "e")


@on_ranks(1, 2)
def test_16_bit_parameters_are_the_rounding_of_the_masters_after_eval() -> None:
    model = net()
    model, optimizer = shardmp.shard(model, make(model), precision="bf16")
    optimizer.train()
    train(model, optimizer, range(3), optimizer.backward)
    before = masters(optimizer)
    optimizer.eval()
    for name, p in model.named_parameters():
        whole = optimizer.master(name)
        assert not torch.equal(whole, before[name])
        assert torch.equal(p, whole.to(p.dtype))
        assert same_on_all_ranks(p)


@pytest.mark.parametrize("mode", ["train", "eval"])
@on_ranks(1, 2, 3)
def test_a_checkpoint_in_either_mode_goes_on_as_plain_torch(mode: str, tmp_path: Path) -> None:
    model = net()
    model, optimizer = shardmp.shard(model, make(model), precision="fp32", bucket_mb=0.0001)
    optimizer.train()
    train(model, optimizer, range(3), optimizer.backward)
    getattr(optimizer, mode)()
    shardmp.save(tmp_path, model, optimizer)

    model = net()
    model, optimizer = shardmp.shard(model, make(model), precision="fp32")
    shardmp.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["train_mode"] is (mode == "train")
    assert optimizer.param_groups[0]["k"] == 3
    optimizer.train()
    train(model, optimizer, range(3, 6), optimizer.backward)
    way = "tsetse" if mode == "eval" else "tsse"
    *_, trained, evaluated = plain(way)
    assert_close(masters(optimizer), trained)
    optimizer.eval()
    assert_close(masters(optimizer), evaluated)


@on_ranks(1, 2)
def test_the_plain_optimizers_train_and_eval_are_the_sharded_ones() -> None:
    model = net()
    own: Any = make(model)
    model, optimizer = shardmp.shard(model, own, precision="fp32")
    own.train()
    train(model, optimizer, range(3), optimizer.backward)
    own.eval()
    assert_close(masters(optimizer), plain("tse")[2])


@on_ranks(2)
def test_a_method_that_fails_half_way_poisons() -> None:
    model = net()
    model, optimizer = shardmp.shard(model, make(model), precision="fp32")
    optimizer.train()
    train(model, optimizer, range(1), optimizer.backward)
    optimizer.param_groups[0]["beta"] = 0.0  # eval() divides by it
    with pytest.raises(ZeroDivisionError):
        optimizer.eval()
    optimizer.param_groups[0]["beta"] = 0.9
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        optimizer.eval()


@on_ranks(1)
def test_a_class_without_modes_has_none() -> None:
    model = net()
    _, optimizer = shardmp.shard(model, torch.optim.AdamW(model.parameters()))
    assert not hasattr(optimizer, "train")
    with pytest.raises(AttributeError, match=r"AdamW has no eval\(\)"):
        optimizer.eval()
