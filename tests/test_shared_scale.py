"""Several models under one loss, or with losses in turn, that share a loss scale: `shard(..., scaler=other)`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reference
import torch
from helpers import masters, same_on_all_ranks, sharded
from ranks import on_ranks
from test_step import expect
from torch import Tensor, nn
from torch.nn import functional as F

import shardmp
from shardmp import Precision

POLICY = Precision(init_scale=256.0, growth_interval=3)


def build(seed: int, *sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(sizes):
        layers += [nn.Linear(first, second), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)


def pair(**options: Any) -> Any:
    """An encoder and a head in two optimizers, sharing the encoder's scale."""
    options = {"precision": POLICY, **options}
    encoder, first = sharded(build(0, 8, 40, 16), torch.optim.AdamW, 0.01, **options)
    plain = build(1, 16, 40, 3)
    head, second = shardmp.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), scaler=first, **options)
    return encoder, first, head, second


class Whole(nn.Module):
    """The same two models as one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = build(0, 8, 40, 16), build(1, 16, 40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Two(torch.optim.Optimizer):
    """The two optimizers behind one `step`, as the plain reference wants it."""

    def __init__(self, model: Whole) -> None:
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(model.encoder.parameters(), lr=0.01, fused=True),
            torch.optim.SGD(model.head.parameters(), lr=0.1, fused=True),
        ]
        super().__init__([{"params": list(part.parameters())} for part in (model.encoder, model.head)], {})

    def step(self) -> None:  # type: ignore[override]
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups[0]["params"] = group["params"]  # the masters
            part.step()


def loss_of(output: Tensor, step: int, rank: int, ranks: int) -> Tensor:
    """In the third step the last rank's is so large that its gradients overflow in both models."""
    return F.mse_loss(output, batch(step, rank)[1]) * (1e8 if (step, rank) == (2, ranks - 1) else 1.0)


@pytest.mark.parametrize("by_head", [False, True])
@on_ranks(1, 2, 3)
def test_two_models_under_one_loss_train_as_one(rank: int, world_size: int, by_head: bool) -> None:
    def on(step: int, rank: int) -> reference.Loss:
        return lambda model: loss_of(model(batch(step, rank)[0]), step, rank, world_size)

    steps = [[[on(step, r) for r in range(world_size)]] for step in range(7)]
    expected = expect(Whole, Two, steps, loss_scale=reference.LossScale(init_scale=256.0, growth_interval=3))
    encoder, first, head, second = pair()
    scales = []
    for step in range(7):
        (second if by_head else first).backward(loss_of(head(encoder(batch(step, rank)[0])), step, rank, world_size))
        reports = first.step(), second.step()
        assert reports[0].skipped == reports[1].skipped == (step == 2)
        assert reports[0].loss == reports[1].loss
        assert reports[0].loss_scale == reports[1].loss_scale
        scales.append(reports[0].loss_scale)
        first.zero_grad()
        second.zero_grad()
    assert scales == [256, 256, 256, 128, 128, 128, 256]  # once a step, though two verdicts came
    assert first.skipped_steps == second.skipped_steps == 1
    for name, master in masters(first).items():
        assert torch.equal(expected.masters[f"encoder.{name}"], master), name
    for name, master in masters(second).items():
        assert torch.equal(expected.masters[f"head.{name}"], master), name


@on_ranks(2)
def test_an_overflow_in_one_model_lowers_the_common_scale_once_and_skips_that_model_alone(rank: int) -> None:
    encoder, first, head, second = pair()
    before = masters(second)
    x, y = batch(0, rank)
    first.backward(F.mse_loss(head(encoder(x)), y))
    head.module[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    second.zero_grad()
    first.zero_grad()
    first.backward(F.mse_loss(head(encoder(x)), y))
    assert not first.step().skipped
    assert second.step().skipped
    assert all(torch.equal(before[name], master) for name, master in masters(second).items())
    first.scale(F.mse_loss(head(encoder(x)), y))
    assert first.loss_scale == second.loss_scale == 128.0


@on_ranks(2)
def test_the_scale_stays_while_another_models_gradients_wait(rank: int) -> None:
    """Else they would be unscaled by another scale than theirs."""
    encoder, first, head, second = pair(precision=Precision(init_scale=256.0, growth_interval=1))
    x, y = batch(0, rank)
    first.backward(F.mse_loss(head(encoder(x)), y))
    expected = second.full_grad("0.weight")
    first.step()  # would let the scale grow
    second.backward(F.mse_loss(head(encoder(x).detach()), y))
    assert second.report is None
    report = second.step()
    assert report.loss_scale == 256.0
    assert report.grad_norm > 1.2 * expected.norm().item()  # both backwards, unscaled by the one scale
    first.scale(F.mse_loss(head(encoder(x)), y))
    assert first.loss_scale == 512.0  # once, for both verdicts


@on_ranks(1, 2)
def test_a_gan_with_losses_in_turn_trains(rank: int, world_size: int) -> None:
    """The discriminator's gradients from the generator's loss are dropped by its zero_grad, as in plain torch."""
    policy = Precision(init_scale=1024.0)
    generator, g_optimizer = sharded(build(0, 4, 24, 6), torch.optim.AdamW, 0.01, precision=policy)
    plain = build(1, 6, 24, 1)
    discriminator, d_optimizer = shardmp.shard(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.01), precision=policy, scaler=g_optimizer
    )
    start, history = masters(g_optimizer), []
    for step in range(12):
        draw = torch.Generator().manual_seed(10 * step + rank)
        real, noise = torch.randn(16, 6, generator=draw) + 2, torch.randn(16, 4, generator=draw)
        fake = generator(noise)
        d_optimizer.zero_grad()
        real_loss = F.softplus(-discriminator(real)).mean()
        d_optimizer.backward(real_loss + F.softplus(discriminator(fake.detach())).mean())
        history.append(d_optimizer.step())
        g_optimizer.zero_grad()
        g_optimizer.backward(F.softplus(-discriminator(fake)).mean())
        history.append(g_optimizer.step())
    assert not any(report.skipped for report in history)
    assert history[-2].loss < history[0].loss  # the discriminator has learned something
    assert any(not torch.equal(start[name], master) for name, master in masters(g_optimizer).items())
    assert same_on_all_ranks((masters(g_optimizer), masters(d_optimizer)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scaler": 3}, TypeError, "expected a ShardedOptimizer, got int"),
        ({"precision": "bf16"}, ValueError, "only FP16 has a loss scale to share, got precision 'bf16' beside 'fp16'"),
        ({"precision": Precision(init_scale=8.0, hysteresis=2)}, ValueError, "init_scale, hysteresis differ"),
    ],
)
def test_what_cannot_share_a_scale_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    _, first = sharded(nn.Linear(2, 2))
    with pytest.raises(error, match=words):
        plain = nn.Linear(2, 2)
        shardmp.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), **{"scaler": first, **options})
