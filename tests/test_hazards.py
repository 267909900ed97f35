"""Hazards of models, second part: what users do to a model around the step is right, or refused by name.

Right means: the masters of a plain process that does the same, bit for bit (reference.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from helpers import late_gathers, masters, sharded
from ranks import on_ranks
from test_step import assert_equal, expect, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import shardmp

STAGES = pytest.mark.parametrize("stage", [1, 2])
POLICY = shardmp.Precision(init_scale=256.0)
TINY = 1e-5  # MiB: a bucket for each parameter


class Small(nn.Module):
    """Two layers around a norm layer, which stays FP32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(20, 40), nn.LayerNorm(40), nn.Linear(40, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def batch(step: int, rank: int, number: int = 0) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def plan(world_size: int, loss: Callable[[Any, Tensor], Tensor] = mean_square, steps: int = 3) -> list[reference.Step]:
    def one(step: int, rank: int) -> reference.Loss:
        return lambda model: loss(model, batch(step, rank))

    return [[[one(step, rank) for rank in range(world_size)]] for step in range(steps)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def check(
    world_size: int, make: Callable[[], nn.Module], loss: Callable[[Any, Tensor], Tensor] = mean_square, **options: Any
) -> None:
    """Three steps with the library are the reference's, by bits; tiny buckets, and gathers that come late."""
    steps = plan(world_size, loss)
    scale = reference.LossScale(init_scale=256.0)
    keep = options.pop("keep_fp32", reference.NORM_LAYERS)
    expected = expect(make, adamw, steps, loss_scale=scale, keep_fp32=keep, max_grad_norm=1.0, fused=True)
    assert expected.skipped_steps == 0
    policy = shardmp.Precision(init_scale=256.0, keep_fp32=keep)
    with late_gathers():
        found = train(make, adamw, steps, precision=policy, bucket_mb=TINY, max_grad_norm=1.0, **options)
    assert_equal(found, expected)


def step_once(model: Any, optimizer: shardmp.ShardedOptimizer, step: int = 0) -> Any:
    optimizer.backward(mean_square(model, batch(step, dist.get_rank() if dist.is_initialized() else 0)))
    return optimizer.step()


# --------------------------------------------------------------------------------------------------------------------
# Autograd


class Reentrant(nn.Module):
    """Each parameter is used once, the last ones inside of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.block = nn.Linear(20, 30), nn.Sequential(nn.Linear(30, 40), nn.GELU(), nn.Linear(40, 20))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=True)


@STAGES
@on_ranks(2)
def test_reentrant_checkpointing_is_right_where_each_parameter_is_used_once(world_size: int, stage: int) -> None:
    """pytorch/pytorch#81296 is about reuse; once is what most models do, and their inner backward ends early."""
    for average in ("ranks", "micro_batches"):
        check(world_size, Reentrant, stage=stage, average=average)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@on_ranks(2)
def test_reentrant_checkpointing_under_a_plain_backward_is_refused_by_name(precision: str) -> None:
    """Where no loss is scaled, the end of the inner backward would be taken for the end, and one backward for two."""
    model, optimizer = sharded(Reentrant(), precision=precision, average="micro_batches")
    with pytest.raises(RuntimeError, match=r"optimizer.backward\(loss\).*use_reentrant=False"):
        mean_square(model, batch(0, 0)).backward()

    plain = Reentrant()
    mean_square(plain, batch(0, 0)).backward()
    model, optimizer = sharded(Reentrant(), lr=1.0, precision=precision, average="micro_batches")
    optimizer.backward(mean_square(model, batch(0, 0)))
    norm = torch.stack([p.grad.square().sum() for p in plain.parameters()]).sum().sqrt().item()
    assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-2)


@STAGES
@on_ranks(2)
def test_several_forwards_before_one_backward_are_one_micro_batch(world_size: int, stage: int) -> None:
    """Siamese and contrastive models: each parameter's hook fires once for all of its uses."""

    def contrast(model: Any, x: Tensor) -> Tensor:
        return (model(x) - model(-x)).square().mean() + mean_square(model, 2 * x)

    check(world_size, Small, contrast, stage=stage)


def penalised(model: Any, x: Tensor) -> Tensor:
    """The gradient penalty of arXiv 1704.00028."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.float().square().mean() + (gradient.norm(dim=1) - 1).square().mean()


class Smooth(nn.Module):
    """Without a norm layer in between: a critic as one has it in a penalised GAN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(20, 40), nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@STAGES
@on_ranks(2)
def test_a_gradient_penalty_is_right(world_size: int, stage: int) -> None:
    """Double backward: `autograd.grad` fires no hook of ours, and its graph reaches the parameters by `backward`."""
    check(world_size, Smooth, penalised, stage=stage)


@on_ranks(2)
def test_a_penalty_on_the_gradients_of_parameters_is_right(world_size: int) -> None:
    """Gradients with respect to parameters are not those that are reduced: they start no backward of ours."""

    def loss(model: Any, x: Tensor) -> Tensor:
        weights = [model.first.weight, model.second.weight]
        gradients = torch.autograd.grad(mean_square(model, x), weights, create_graph=True)
        return mean_square(model, x) + sum(g.float().square().sum() for g in gradients)

    check(world_size, Smooth, loss)


@on_ranks(2)
def test_create_graph_in_backward_is_refused_with_what_to_write() -> None:
    """Gradients go into shards; a graph through them would end there in silence, or fail in the reduction."""
    model, optimizer = sharded(Smooth(), precision=POLICY)
    with pytest.raises(ValueError, match=r"torch.autograd.grad\(..., create_graph=True\)"):
        optimizer.backward(mean_square(model, batch(0, 0)), create_graph=True)
    assert not step_once(model, optimizer).skipped  # nothing was begun


class Doubled(nn.Module):
    """Calls a part with weights that are computed from its own, as meta-learning and hypernetworks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Small()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * 1.5 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


@STAGES
@on_ranks(2)
def test_functional_call_is_right_inside_of_the_model_and_around_it(world_size: int, stage: int) -> None:
    """`torch.func.functional_call` exchanges parameters for the time of a call."""
    check(world_size, Doubled, stage=stage)
    outputs = []
    for around in (False, True):
        model, optimizer = sharded(Small(), precision=POLICY, bucket_mb=TINY, stage=stage)
        for step in range(2):
            with late_gathers():
                weights = dict(model.named_parameters())
                x = batch(step, dist.get_rank())
                output = torch.func.functional_call(model, weights, (x,)) if around else model(x)
                optimizer.backward(output.square().mean())
                optimizer.step()
        outputs.append(masters(optimizer))
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in outputs[0])


# --------------------------------------------------------------------------------------------------------------------
# The user's hooks


@STAGES
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_tensor_hooks_on_parameters_act_on_the_scaled_gradient(world_size: int, stage: int, when: str) -> None:
    """They run before a gradient is taken into its bucket; here they multiply by a power of two, which is exact."""

    def hook(model: nn.Module) -> None:
        model.first.weight.register_hook(lambda gradient: gradient * 4)
        model.norm.bias.register_hook(lambda gradient: gradient * 0.5)

    def hooked() -> nn.Module:
        model = Small()
        hook(model)
        return model

    steps, scale = plan(world_size), reference.LossScale(init_scale=256.0)

    class Hooked(Small):  # the reference copies its model, and copies have no hooks: the same by arithmetic
        def forward(self, x: Tensor) -> Tensor:
            weight, bias = Times.apply(self.first.weight, 4.0), Times.apply(self.norm.bias, 0.5)
            x = F.linear(x, weight, self.first.bias)
            with torch.autocast("cpu", enabled=False):
                x = F.layer_norm(x.float(), (40,), self.norm.weight, bias)
            return self.second(torch.tanh(x))

    expected = expect(Hooked, adamw, steps, loss_scale=scale, fused=True)
    assert any(not torch.equal(expected.masters[n], m) for n, m in expect(Small, adamw, steps).masters.items())
    if when == "before":
        found = train(hooked, adamw, steps, precision=POLICY, stage=stage)
    else:
        plain = Small()
        model, optimizer = shardmp.shard(plain, adamw(plain), precision=POLICY, stage=stage)
        hook(plain)
        for step in range(3):
            optimizer.backward(mean_square(model, batch(step, dist.get_rank())))
            optimizer.step()
        found = model, optimizer, expected.trace
    assert_equal(found, expected)


class Times(torch.autograd.Function):
    """The identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


@on_ranks(2)
def test_post_accumulate_hooks_from_before_see_the_scaled_gradient_and_later_ones_see_none() -> None:
    """torch runs them in the order of registration, and shard's takes the gradient away."""
    plain, seen = Small(), []
    plain.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model, optimizer = sharded(plain, precision=POLICY)
    plain.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    optimizer.backward(mean_square(model, batch(0, 0)))
    assert torch.equal(seen[0].float() / 256, optimizer.full_grad("first.weight"))
    assert seen[1:] == [None]


@on_ranks(2)
def test_a_hook_that_takes_gradients_away_is_refused_by_name() -> None:
    """An optimizer step in a hook: it would update FP16 weights, and nothing would be left to reduce."""

    def take(parameter: Tensor) -> None:
        parameter.grad = None

    plain = Small()
    plain.second.bias.register_post_accumulate_grad_hook(take)
    model, optimizer = sharded(plain, precision=POLICY)
    with pytest.raises(RuntimeError, match=r"gradient of second.bias was taken away.*remove it"):
        optimizer.backward(mean_square(model, batch(0, 0)))


@STAGES
@on_ranks(2)
def test_forward_hooks_that_keep_activations_keep_them_for_the_same_loss(world_size: int, stage: int) -> None:
    """Feature losses: the kept tensor is of this forward, in 16 bits, and its gradients reach the parameters."""

    def loss(model: Any, x: Tensor) -> Tensor:
        kept = []
        handle = model.first.register_forward_hook(lambda module, inputs, output: kept.append(output))
        out = model(x)
        handle.remove()
        return out.square().mean() + kept[0].float().square().mean()

    check(world_size, Small, loss, stage=stage)


# --------------------------------------------------------------------------------------------------------------------
# Weights that are computed, and adapters


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def weight_normed() -> nn.Module:
    model = Small()
    parametrizations.weight_norm(model.first)
    return model


def parametrised() -> nn.Module:
    model = Small()
    register_parametrization(model.first, "weight", Square(), unsafe=True)
    return model


def old_weight_norm() -> nn.Module:
    model = Old()
    model.split()
    return model


class Old(Small):
    """`torch.nn.utils.weight_norm`, whose weight is an attribute: `deepcopy` refuses it, so it is made on demand."""

    def split(self) -> None:
        weight = self.first.weight.detach()
        self.g = nn.Parameter(weight.norm(dim=1, keepdim=True))
        self.v = nn.Parameter(weight.clone())
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, torch._weight_norm(self.v, self.g, 0), self.first.bias)
        return self.second(torch.tanh(self.norm(x)))


@STAGES
@pytest.mark.parametrize("make", [weight_normed, parametrised, old_weight_norm])
@on_ranks(2)
def test_parametrised_weights_equal_the_reference(world_size: int, stage: int, make: Any) -> None:
    """The parameter is read by the parametrisation, which is no module that forward calls."""
    check(world_size, make, stage=stage)


def spectral_normed() -> nn.Module:
    model = Small()
    parametrizations.spectral_norm(model.first)
    return model


@pytest.mark.parametrize("kept", ["first", "first.parametrizations.weight.0"])
@on_ranks(2)
def test_spectral_norm_that_stays_fp32_equals_the_reference(world_size: int, kept: str) -> None:
    """Its buffers are FP32 and change in forward; the layer may stay FP32, or the parametrisation alone."""
    check(world_size, spectral_normed, keep_fp32=(kept, *reference.NORM_LAYERS))


@on_ranks(2)
def test_a_parametrisation_after_shard_is_refused_by_name(rank: int) -> None:
    """It makes new parameters, which nobody reduces: they would never train."""
    plain = Small()
    model, optimizer = sharded(plain, precision=POLICY)
    parametrizations.weight_norm(plain.first)
    with pytest.raises(RuntimeError, match=r"parameter first.weight was taken out.*parametrised.*before shard\(\)"):
        step_once(model, optimizer)


class Adapted(nn.Module):
    """LoRA (arXiv 2106.09685) as one writes it: a frozen base in FP16, adapters in FP32, one of them at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Small().requires_grad_(False).half()
        self.down, self.up = nn.Linear(20, 4, bias=False), nn.Linear(4, 20, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@STAGES
@on_ranks(2)
def test_adapters_on_a_frozen_base_equal_the_reference_and_leave_it_alone(world_size: int, stage: int) -> None:
    """huggingface/peft#1249, deepspeedai/DeepSpeed#2615: with a frozen FP16 base that has a norm layer."""
    policy = shardmp.Precision(init_scale=256.0, keep_fp32=("down", "up"))
    steps = plan(world_size)
    expected = expect(
        Adapted,
        trainable,
        steps,
        loss_scale=reference.LossScale(init_scale=256.0),
        keep_fp32=("down", "up"),
        fused=True,
    )
    before = {name: p.clone() for name, p in Adapted().base.named_parameters()}
    found = train(Adapted, trainable, steps, precision=policy, stage=stage)
    assert_equal(found, expected)
    assert sorted(expected.masters) == ["down.weight", "up.weight"]
    for name, p in found[0].base.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[name])


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


# --------------------------------------------------------------------------------------------------------------------
# Evaluation


@STAGES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_rank_0_may_evaluate_alone_while_weights_arrive(rank: int, world_size: int, stage: int, mode: Any) -> None:
    """A forward sends nothing, so nobody waits for it; what it reads is awaited, and training goes on unchanged."""
    steps, x = plan(world_size, steps=4), batch(9, 0)
    evaluated = []

    def evaluate(model: Any, optimizer: Any) -> None:
        if rank == 0:
            model.eval()
            with mode():
                evaluated.append(model(x).clone())
            model.train()

    scale = reference.LossScale(init_scale=256.0)
    expected = expect(Small, adamw, steps, loss_scale=scale, fused=True)
    with late_gathers():
        found = train(Small, adamw, steps, precision=POLICY, stage=stage, bucket_mb=TINY, between=evaluate)
    assert_equal(found, expected)
    if rank == 0:
        plain = reference.Replica(Small(), torch.float16, reference.NORM_LAYERS, True)
        for name, p in plain.parameters.items():
            p.data = expected.masters[name].to(torch.float32 if name.startswith("norm") else torch.float16)
        with torch.no_grad():
            assert torch.equal(evaluated[-1], plain(x))
    assert len(evaluated) == (4 if rank == 0 else 0)


@on_ranks(2)
def test_the_average_of_the_masters_is_that_of_the_references_masters(world_size: int) -> None:
    """EMA on `optimizer.master`, which is a collective: every rank reads every name, in the same order."""
    steps = plan(world_size, steps=3)
    averages: dict[str, Tensor] = {}

    def average(model: Any, optimizer: shardmp.ShardedOptimizer) -> None:
        for name, _ in model.named_parameters():
            averages[name] = averages.get(name, torch.zeros(())).lerp(optimizer.master(name), 0.25)

    model, _, _ = train(Small, adamw, steps, precision=POLICY, between=average)
    right: dict[str, Tensor] = {}
    for count in (1, 2, 3):
        expected = expect(Small, adamw, steps[:count], loss_scale=reference.LossScale(init_scale=256.0), fused=True)
        for name, master in expected.masters.items():
            right[name] = right.get(name, torch.zeros(())).lerp(master, 0.25)
    assert all(torch.equal(averages[name], right[name]) for name in right)

    plain, x = reference.Replica(Small(), torch.float16, reference.NORM_LAYERS, True), batch(9, 0)
    for name, p in plain.parameters.items():
        p.data = right[name] if name.startswith("norm") else right[name].half()
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, averages, (x,)), plain(x))
