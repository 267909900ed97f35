"""The loss scale moves as the papers and torch's GradScaler say, by the verdict alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmp.precision import Precision
from shardmp.scaler import LossScaler


def run(precision: Precision, skips: list[bool], bad_loss: list[bool] | None = None) -> tuple[list[float], LossScaler]:
    scaler = LossScaler(precision, torch.empty(0).device)
    scales = []
    for step, skip in enumerate(skips):
        bad = bool(bad_loss and bad_loss[step])
        scaler.update(torch.tensor(float(skip)), torch.tensor(bad))
        scales.append(scaler.scale.item())
    return scales, scaler


def test_it_halves_on_a_skip_and_doubles_after_the_interval() -> None:
    scales, _ = run(Precision(init_scale=8.0, growth_interval=2), [True, False, False, False, True, False, False])
    assert scales == [4, 4, 8, 8, 4, 4, 8]


def test_a_skip_starts_the_interval_anew() -> None:
    scales, _ = run(
        Precision(init_scale=8.0, growth_interval=3, hysteresis=5), [False, False, True, False, False, False]
    )
    assert scales == [8, 8, 8, 8, 8, 16]


def test_hysteresis_bears_skips_is_not_refilled_by_clean_steps_and_is_refilled_by_growth() -> None:
    policy = Precision(init_scale=8.0, growth_interval=2, hysteresis=2)
    scales, _ = run(policy, [True, False, True, True, False, False, True, True])
    #                bears 1, clean, backs off, and again, clean, grows (refilled), bears 1, backs off
    assert scales == [8, 8, 4, 2, 2, 4, 4, 2]


def test_it_stays_between_its_bounds() -> None:
    low, _ = run(Precision(init_scale=4.0, min_scale=2.0, growth_interval=100), [True] * 4)
    assert low == [2, 2, 2, 2]
    high, _ = run(Precision(init_scale=4.0, max_scale=8.0, growth_interval=1), [False] * 4)
    assert high == [8, 8, 8, 8]


def test_a_static_scale_never_moves() -> None:
    scales, _ = run(Precision(static_scale=128.0), [True, False, True])
    assert scales == [128, 128, 128]


@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_bf16_and_fp32_have_scale_one(param: str) -> None:
    scales, _ = run(Precision(param=param), [True, False, True])
    assert scales == [1, 1, 1]


def test_hopeless_skips_count_only_what_a_smaller_scale_cannot_cure() -> None:
    _, falling = run(Precision(init_scale=8.0, min_scale=2.0), [True, True, True, True])
    assert falling.hopeless.item() == 2  # at 8 and at 4 it could still back off
    _, cured = run(Precision(init_scale=2.0, min_scale=2.0), [True, True, False])
    assert cured.hopeless.item() == 0
    _, loss = run(Precision(init_scale=8.0), [True, True], [True, True])
    assert loss.hopeless.item() == 2
    _, static = run(Precision(static_scale=8.0), [True, True])
    assert static.hopeless.item() == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_with_hysteresis_one_it_moves_as_torchs_grad_scaler(skips: list[bool], interval: int) -> None:
    scales, scaler = run(Precision(init_scale=256.0, growth_interval=interval, min_scale=2.0**-40), skips)
    scale, growth = torch.tensor(256.0), torch.tensor(0, dtype=torch.int32)
    for skip, ours in zip(skips, scales, strict=True):
        torch._amp_update_scale_(scale, growth, torch.tensor(float(skip)), 2.0, 0.5, interval)
        assert ours == min(scale.item(), 2.0**32)
        if scale.item() > 2.0**32:
            break
    else:
        assert scaler.growth.item() == growth.item()
