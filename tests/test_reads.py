"""Nobody reads a half-gathered weight: invariant 6, with gathers that arrive only when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import late_gathers, sharded
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F


class ReadsItsChild(nn.Module):
    """A parent that reads `self.child.weight` and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.child.weight, self.child.bias))


class KeepsAList(nn.Module):
    """Parameters read through a plain list and through views, not by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8) / 4), nn.Parameter(torch.randn(8, 8) / 4)
        self.listed = [self.a, self.b]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.stack([x @ weight.t(), x @ weight.detach().view(8, 8)]).sum(0)
        return x


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.to(weight.dtype) @ weight

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.to(weight.dtype).t() @ gradient


class UsesOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return OwnFunction.apply(self.first(x), self.weight)


class BranchesLater(nn.Module):
    """From the third forward on it reads what it has not read before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        return F.linear(x, self.second.weight) if self.calls >= 3 else self.third(x)


class Attends(nn.Module):
    """MultiheadAttention reads its out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        return self.norm(self.attention(x, x, x, need_weights=False)[0]).squeeze(0)


class Encoder(nn.Module):
    """TransformerEncoderLayer takes a fast path with all weights in one call when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(0)).squeeze(0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a parent reads its child": ReadsItsChild,
    "a plain list": KeepsAList,
    "an autograd function": UsesOwnFunction,
    "a branch taken late": BranchesLater,
    "MultiheadAttention": Attends,
    "TransformerEncoderLayer": Encoder,
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def train(name: str, steps: int, overlap: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the final weights, of a few steps in tiny buckets."""
    model, optimizer = sharded(make(name), torch.optim.Adam, 2.0**-6, bucket_mb=1e-4, overlap=overlap)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        if overlap and torch.distributed.get_world_size() > 1:
            assert optimizer._parameters.gathering, "nothing is being gathered: this test tests nothing"
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_training_never_reads_a_half_gathered_weight(name: str) -> None:
    expected, weights = train(name, 5, overlap=False)
    with late_gathers():
        found, found_weights = train(name, 5, overlap=True)
    assert found == expected
    assert all(torch.equal(found_weights[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["eval", "inference_mode", "no_grad", "submodule"])
@on_ranks(2)
def test_evaluation_right_after_a_step_sees_the_new_weights(name: str, way: str) -> None:
    plain = make(name)
    model, optimizer = sharded(make(name), torch.optim.SGD, 0.25, bucket_mb=1e-4)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with late_gathers():
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        if way == "submodule":
            target = model.module  # the plain module, called from outside the wrapper
            with torch.no_grad(), torch.autocast(x.device.type, torch.float16):
                found = target(x).float()
        else:
            model.train(way != "eval")
            with {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "eval": torch.no_grad}[way]():
                found = model(x).clone()
        assert found.isfinite().all()
        optimizer.synchronize()
    # The same numbers from a plain module that holds the rounding of the masters.
    for key, parameter in plain.named_parameters():
        parameter.data = optimizer.master(key)
        if "norm" not in key:
            parameter.data = parameter.data.half()
    if hasattr(plain, "calls"):
        plain.calls = 1
    plain.train(model.training)
    again, _ = sharded(plain, torch.optim.SGD, 0.25)
    with torch.no_grad():
        assert torch.equal(again(x), found)


@on_ranks(2)
def test_parameters_and_state_dict_are_the_rounding_of_the_masters(rank: int) -> None:
    with late_gathers():
        model, optimizer = sharded(make("a parent reads its child"), torch.optim.Adam, 0.01, bucket_mb=1e-4)
        for step in range(3):
            optimizer.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            read = [
                lambda: dict(model.named_parameters()),
                model.state_dict,
                lambda: dict(
                    zip([name for name, _ in model.module.named_parameters()], model.parameters(), strict=True)
                ),
            ][step]()
            values = {name: value.detach().clone() for name, value in read.items()}
            for name, value in values.items():
                assert value.dtype == torch.float16
                assert torch.equal(value, optimizer.master(name).half()), name


@on_ranks(2)
def test_raw_parameters_are_current_after_synchronize() -> None:
    with late_gathers():
        plain = make("a plain list")
        model, optimizer = sharded(plain, torch.optim.SGD, 0.25, bucket_mb=1e-4)
        optimizer.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
        optimizer.synchronize()
        values = plain.a.detach().clone()
        assert torch.equal(values, optimizer.master("a").half())


@on_ranks(1, 2)
def test_backward_through_a_forward_from_before_the_step_raises_as_in_torch() -> None:
    model, optimizer = sharded(make("a parent reads its child"), torch.optim.SGD, 0.25)
    x = torch.ones(2, 8)
    old = model(x).square().mean()
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(old)
