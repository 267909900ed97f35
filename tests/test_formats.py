"""Formats against torch and numpy: every FP16, BF16 and FP8 number, and rounding at every place where it can go wrong."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardmp import formats
from shardmp.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, TF32, Format, parse, store

SMALL = [FP16, BF16, E4M3, E5M2]


def every_number(fmt: Format) -> Tensor:
    """All numbers of a format, as torch reads their bits."""
    assert fmt.dtype is not None
    count = 2**fmt.bits
    bits = torch.arange(count, dtype=torch.int32)
    return bits.to(torch.uint8 if fmt.storage == 1 else torch.uint16).view(fmt.dtype)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal values, signs of zeros included; NaN equals NaN."""
    nan = ours.isnan() & theirs.isnan()
    equal = (ours == theirs) & (torch.signbit(ours) == torch.signbit(theirs))
    return bool((nan | equal).all())


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_every_number_decodes_as_in_torch_and_encodes_back(fmt: Format) -> None:
    theirs = every_number(fmt).double()
    numbers = list(formats.all_numbers(fmt))
    assert same(torch.tensor([float(number) for number in numbers], dtype=torch.float64), restored(theirs))
    for bits, number in enumerate(numbers):
        if not (isinstance(number, float) and math.isnan(number)) and bits != 1 << (fmt.bits - 1):
            assert fmt.encode(number) == bits


def restored(values: Tensor) -> Tensor:
    """Fractions have no negative zero."""
    return torch.where(values == 0, torch.zeros_like(values), values)


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_fields_are_the_bits_in_their_order(fmt: Format) -> None:
    sign, exponent, fraction = formats.decompose(every_number(fmt))
    rebuilt = (sign << (fmt.bits - 1)) | (exponent << fmt.fraction_bits) | fraction
    assert torch.equal(rebuilt, torch.arange(2**fmt.bits))
    assert exponent.max() == 2**fmt.exponent_bits - 1
    assert fraction.max() == 2**fmt.fraction_bits - 1


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_rounding_between_all_neighbours_is_torchs(fmt: Format) -> None:
    """Every number, every middle of two, and what lies next to it on both sides."""
    finite = every_number(fmt).double()
    finite = finite[finite.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    last = torch.tensor([float(fmt.overflows_from), -float(fmt.overflows_from)], dtype=torch.float64)
    points = torch.cat((finite, middles, last))
    up, down = torch.full_like(points, torch.inf), torch.full_like(points, -torch.inf)
    points = torch.cat((points, points.nextafter(up), points.nextafter(down)))
    # torch casts FP64 through FP32, which would round twice: only what FP32 holds can be compared with it.
    exact = points.float().double() == points
    theirs = points[exact].float().to(fmt.dtype).double()
    ours = formats.round_to(points[exact], fmt)
    assert same(restored(ours), restored(theirs))
    assert exact.sum() > finite.numel()
    for number in points[:: max(1, len(points) // 3000)].tolist():  # one by one, in exact arithmetic
        expected = formats.round_to(torch.tensor([number], dtype=torch.float64), fmt)
        found = fmt.decode(fmt.encode(Fraction(number)))
        assert same(restored(torch.tensor([float(found)], dtype=torch.float64)), restored(expected))


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_fp16_and_fp32_round_as_numpy_does(value: float) -> None:
    with np.errstate(over="ignore"):
        for fmt, kind in ((FP16, np.float16), (FP32, np.float32)):
            found = fmt.decode(fmt.encode(Fraction(value)))
            assert float(found) == float(kind(value))
    assert FP64.decode(FP64.encode(Fraction(value))) == Fraction(value)


@pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=lambda fmt: fmt.name)
def test_the_ends_are_torchs(fmt: Format) -> None:
    if fmt.dtype is None:
        assert (fmt.largest, fmt.epsilon) == ((2 - Fraction(1, 1024)) * Fraction(2) ** 127, Fraction(1, 1024))
        return
    info = torch.finfo(fmt.dtype)
    assert fmt.largest == Fraction(info.max)
    assert fmt.smallest_normal == Fraction(info.smallest_normal)
    assert fmt.epsilon == Fraction(info.eps)
    assert fmt.bits == info.bits
    assert formats.format_of(fmt.dtype) is fmt


def test_known_values() -> None:
    largest = parse("0 11110 1111111111", FP16)
    assert largest.value == 65504
    assert largest.formula == "(-1)^0 x 2^(30-15) x (1 + 1023/2^10)"
    assert largest.above == math.inf
    assert float(FP16.smallest) == pytest.approx(5.96e-8, rel=1e-3)
    assert float(BF16.smallest) == pytest.approx(9.2e-41, rel=2e-3)
    assert float(store(Fraction("0.00006666666"), FP16).value) == 6.663799285888672e-05
    assert parse("65519.99", FP16).value == 65504
    assert parse("65520", FP16).value == math.inf
    assert parse("65520", FP16).kind == "inf"
    assert parse("0x7c01", FP16).kind == "NaN"
    assert parse("0 11111 0000000000", FP16).kind == "inf"
    assert E4M3.largest == 448
    assert E5M2.largest == 57344
    assert (FP16.overflows_from, E4M3.overflows_from) == (65520, 464)


def test_a_number_between_two_has_errors_and_neighbours() -> None:
    stored = parse("0.1", FP16)
    assert stored.kind == "normal"
    assert stored.bit_groups == "0 01011 1001100110"
    assert stored.value == Fraction(0.0999755859375)
    assert stored.below == stored.value - Fraction(2) ** -14
    assert stored.above == stored.value + Fraction(2) ** -14
    assert stored.error == Fraction(1, 10) - stored.value
    assert stored.relative_error == stored.error * 10


def test_neighbours_of_zero_of_a_power_and_of_the_ends() -> None:
    zero = parse("0", FP16)
    assert (zero.kind, zero.below, zero.above) == ("zero", -FP16.smallest, FP16.smallest)
    one = parse("1", FP16)
    assert (one.below, one.above) == (1 - Fraction(1, 2048), 1 + Fraction(1, 1024))
    minus = parse("-1", FP16)
    assert (minus.below, minus.above) == (-1 - Fraction(1, 1024), -1 + Fraction(1, 2048))
    assert parse("-65504", FP16).below == -math.inf
    assert parse("inf", FP16).below == 65504
    assert (parse("448", E4M3).above, parse("448", E4M3).below) == (None, 416)
    assert parse("nan", FP16).below is None
    assert parse("-0", FP16).bits == 0x8000


@pytest.mark.parametrize(
    ("text", "bits"),
    [("0x7bff", 0x7BFF), ("0b0111101111111111", 0x7BFF), ("2^-24", 1), ("1/3", 0x3555), ("1e-8", 0), ("-inf", 0xFC00)],
)
def test_every_way_to_write_a_number(text: str, bits: int) -> None:
    assert parse(text, FP16).bits == bits


@pytest.mark.parametrize(
    "text", ["", "sixty", "0x1ffff", "0b101", "0 1111 1111111111", "1/0", "2^x", "1e999999999", "0xzz"]
)
def test_bad_input_says_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number in FP16: expected a decimal number .* or 16 bits"):
        parse(text, FP16)


def test_tf32_keeps_fp16s_digits_and_fp32s_range() -> None:
    assert TF32.bits == 19
    assert TF32.epsilon == FP16.epsilon
    assert TF32.smallest_normal == FP32.smallest_normal
    assert TF32.decode(TF32.encode(Fraction(1) + Fraction(1, 4096))) == 1


def test_ulp_is_the_distance_to_the_next_number() -> None:
    for fmt in (FP16, BF16, E5M2):
        numbers = every_number(fmt).double()
        numbers = numbers[numbers.isfinite() & (numbers >= 0)].unique()
        spacing = formats.ulp(numbers[:-1], fmt)
        assert torch.equal(spacing, numbers[1:] - numbers[:-1])
    assert formats.ulp(torch.tensor([65505.0]), FP16).isnan().all()


def test_shares_count_each_element_once() -> None:
    values = torch.tensor(
        [0.0, 1e-9, 3e-8, 5e-5, 1.0, 65504.0, 65520.0, -1e6, torch.inf, torch.nan], dtype=torch.float64
    )
    found = formats.shares(values, FP16)
    assert (found.zero, found.underflow, found.subnormal, found.normal, found.overflow, found.not_finite) == (
        pytest.approx((0.1, 0.1, 0.2, 0.2, 0.2, 0.2))
    )
    assert sum(vars(found).values()) == pytest.approx(1.0)
    scaled = formats.shares(values, FP16, scale=2.0**10)
    assert scaled.underflow == 0.0
    assert scaled.overflow == pytest.approx(0.3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50), st.integers(-20, 20)
)
def test_shares_are_those_of_torchs_cast(values: list[float], exponent: int) -> None:
    tensor = torch.tensor(values) * 2.0**exponent
    cast = tensor.half()
    found = formats.shares(tensor, FP16)
    finite = tensor.isfinite()
    assert found.overflow == pytest.approx((finite & cast.isinf()).double().mean().item())
    assert found.underflow == pytest.approx(((tensor != 0) & (cast == 0)).double().mean().item())
    error = formats.rounding_error(tensor, FP16)
    kept = cast.isfinite() & finite
    assert torch.equal(error[kept], (cast.double() - tensor.double())[kept])


def test_what_is_not_a_floating_dtype_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"expected a floating dtype .* got torch.int32"):
        formats.decompose(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="without elements"):
        formats.shares(torch.zeros(0), FP16)
