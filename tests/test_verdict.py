"""The norm is free of order, and the verdict's numbers are the ones that the step divides by."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmp.verdict import BIN_UNITS, Lanes, Verdict, exact_sum_bins

squares = st.lists(
    st.floats(0, 2.0**60, allow_nan=False).map(lambda v: float(torch.tensor(v).float().double() ** 2 / 2.0**60)),
    min_size=1,
    max_size=200,
)


@settings(max_examples=100, deadline=None)
@given(squares, st.integers(0, 1000), st.integers(1, 7))
def test_bins_do_not_depend_on_how_blocks_are_dealt(values: list[float], seed: int, parts: int) -> None:
    whole = exact_sum_bins(torch.tensor(values, dtype=torch.float64))
    shuffled = values[:]
    random.Random(seed).shuffle(shuffled)
    dealt = [torch.tensor(shuffled[part::parts], dtype=torch.float64) for part in range(parts)]
    assert torch.equal(sum(exact_sum_bins(part) for part in dealt), whole)


@settings(max_examples=100, deadline=None)
@given(squares)
def test_bins_add_up_to_the_exact_sum_above_the_smallest_unit(values: list[float]) -> None:
    found = sum(Fraction(value) for value in exact_sum_bins(torch.tensor(values, dtype=torch.float64)).tolist())
    exact = sum(Fraction(value) for value in values)
    assert abs(found - exact) <= len(values) * Fraction(BIN_UNITS[-1]) / 2


def test_an_inf_or_nan_in_one_block_is_not_lost() -> None:
    for bad in (math.inf, math.nan):
        total = exact_sum_bins(torch.tensor([1.0, bad, 2.0], dtype=torch.float64)).sum()
        assert not total.isfinite()


def verdict(total: float, *, scale: float, max_norm: float | None, ranks: int = 2, losses: float = 6.0) -> Verdict:
    lanes = Lanes(params=1, ranks=ranks)
    vector = torch.zeros(sum(lanes.lengths().values()), dtype=torch.float64)
    vector[: len(BIN_UNITS)] = exact_sum_bins(torch.tensor([total], dtype=torch.float64))
    start = sum(list(lanes.lengths().values())[:4])
    vector[start + 2] = losses
    return Verdict(vector, lanes, torch.tensor(scale), "ranks", max_norm)


def test_the_norm_is_unscaled_and_averaged() -> None:
    found = verdict((8.0 * 2 * 1024) ** 2, scale=1024.0, max_norm=None)
    assert found.norm.item() == 8.0
    assert found.grad_scale.item() == 2048.0
    assert found.found_inf.item() == 0.0


def test_clipping_is_part_of_the_one_divisor() -> None:
    found = verdict((8.0 * 2 * 1024) ** 2, scale=1024.0, max_norm=1.0)
    assert found.grad_scale.item() == torch.tensor(2048.0 * (8.0 + 1e-6)).item()
    assert verdict(1.0, scale=1024.0, max_norm=1.0).grad_scale.item() == 2048.0


def test_the_flag_is_exactly_one() -> None:
    assert verdict(math.inf, scale=1.0, max_norm=None).found_inf.item() == 1.0
    assert verdict(math.nan, scale=1.0, max_norm=1.0).found_inf.item() == 1.0
