"""Number formats: what they hold, how a number is rounded to one, and what is lost.

Owns:      the formats' bits, the exact rounding of one number, and the same questions about tensors.
Takes:     numbers as exact fractions (or text, or bits), and tensors of any floating dtype.
Gives:     bits, neighbours, errors, and shares of a tensor that a format cannot hold. Pure: it knows nothing of training.
Invariant: rounding is to the nearest number, ties to the even one (IEEE 754); every figure of one number is exact.

A number of a format with e exponent and f fraction bits is (-1)^S x 2^(E - bias) x (1 + F / 2^f), with bias 2^(e-1) - 1; with
E = 0 it is subnormal, (-1)^S x 2^(1 - bias) x F / 2^f; E of all ones is inf (F = 0) or NaN. FP8 E4M3 has no inf: there only
all ones in E and F are NaN (arXiv 2209.05433).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

Number = Fraction | float
"""An exact number; a float only for inf and NaN, which a fraction cannot be."""


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: as people write it.
        exponent_bits, fraction_bits: without the sign; the significand has one bit more than the fraction, which is not
            stored.
        storage: bytes that a number takes in memory.
        dtype: torch's dtype, None where it has none.
        has_inf: whether all ones in the exponent are inf and NaN; else such numbers are numbers, but for the last (NaN).
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    storage: int
    dtype: torch.dtype | None
    has_inf: bool = True

    @property
    def bits(self) -> int:
        """Bits that mean something: TF32 has 19 of the 32 in which it is stored."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        exponent, fraction = 2**self.exponent_bits - 1, 2**self.fraction_bits - 1
        return self._value(exponent - 1, fraction) if self.has_inf else self._value(exponent, fraction - 1)

    @property
    def overflows_from(self) -> Fraction:
        """Half a spacing above the largest number: what is larger rounds to inf (NaN where there is no inf).

        Itself it goes to the even one of both, which is the largest number where that is even (FP8 E4M3).
        """
        top = 2**self.exponent_bits - (2 if self.has_inf else 1)
        return self.largest + Fraction(2) ** (top - self.bias - self.fraction_bits - 1)

    @property
    def smallest_normal(self) -> Fraction:
        """Below it numbers lose precision: each binade has one bit less."""
        return self._value(1, 0)

    @property
    def smallest(self) -> Fraction:
        """The smallest subnormal: half of it and less rounds to zero."""
        return self._value(0, 1)

    @property
    def epsilon(self) -> Fraction:
        """Spacing at 1."""
        return Fraction(1, 2**self.fraction_bits)

    @property
    def decimal_digits(self) -> float:
        """Decimal digits of the significand."""
        return (self.fraction_bits + 1) * math.log10(2)

    def _value(self, exponent: int, fraction: int) -> Fraction:
        part = Fraction(fraction, 2**self.fraction_bits)
        return (1 + part) * Fraction(2) ** (exponent - self.bias) if exponent else part * Fraction(2) ** (1 - self.bias)

    def decode(self, bits: int) -> Number:
        """The number that `bits` stand for.

        Raises:
            ValueError: there are not so many bits.
        """
        if not 0 <= bits < 2**self.bits:
            raise ValueError(f"{self.name} has {self.bits} bits, got {bits:#x}")
        negative, exponent, fraction = self.fields(bits)
        ones = exponent == 2**self.exponent_bits - 1
        if ones and self.has_inf:
            return math.nan if fraction else (-math.inf if negative else math.inf)
        if ones and fraction == 2**self.fraction_bits - 1:
            return math.nan
        value = self._value(exponent, fraction)
        return -value if negative else value

    def fields(self, bits: int) -> tuple[int, int, int]:
        """Sign, exponent and fraction, as they are stored."""
        fraction = bits & (2**self.fraction_bits - 1)
        exponent = bits >> self.fraction_bits & (2**self.exponent_bits - 1)
        return bits >> (self.bits - 1), exponent, fraction

    def encode(self, value: Number) -> int:
        """The bits of the number nearest to `value`, ties to even. A NaN is the format's quiet one."""
        sign = (1 if math.copysign(1.0, value) < 0 else 0) if isinstance(value, float) else int(value < 0)
        sign <<= self.bits - 1
        if isinstance(value, float) and math.isnan(value):
            return self._nan
        if isinstance(value, float) and math.isinf(value):
            return sign | self._beyond
        magnitude = abs(Fraction(value))
        if magnitude == 0:
            return sign
        exponent = max(_floor_log2(magnitude), 1 - self.bias)
        steps = round(magnitude / Fraction(2) ** (exponent - self.fraction_bits))  # Python rounds ties to even
        # `steps` counts spacings; one binade further its leading bit carries into the exponent, as it should.
        bits = ((exponent + self.bias - 1) << self.fraction_bits) + steps
        return sign | (bits if bits <= self._last else self._beyond)

    @property
    def _last(self) -> int:
        """Bits of the largest finite number."""
        ones = (2**self.exponent_bits - 1) << self.fraction_bits
        return ones - 1 if self.has_inf else ones + 2**self.fraction_bits - 2

    @property
    def _beyond(self) -> int:
        return self._last + 1

    @property
    def _nan(self) -> int:
        return (self._beyond | 1 << (self.fraction_bits - 1)) if self.has_inf else self._beyond


FP64 = Format("FP64", 11, 52, 8, torch.float64)
FP32 = Format("FP32", 8, 23, 4, torch.float32)
TF32 = Format("TF32", 8, 10, 4, None)
BF16 = Format("BF16", 8, 7, 2, torch.bfloat16)
FP16 = Format("FP16", 5, 10, 2, torch.float16)
E4M3 = Format("FP8 E4M3", 4, 3, 1, torch.float8_e4m3fn, has_inf=False)
E5M2 = Format("FP8 E5M2", 5, 2, 1, torch.float8_e5m2)

FORMATS = {
    "fp64": FP64,
    "fp32": FP32,
    "tf32": TF32,
    "bf16": BF16,
    "fp16": FP16,
    "e4m3": E4M3,
    "e5m2": E5M2,
}


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


# -- one number


@dataclass(frozen=True)
class Stored:
    """A number as a format stores it.

    Attributes:
        given: the number that was to be stored.
        format: the format.
        bits: what is stored.
        value: the number that the bits stand for.
        below, above: its neighbours; None beyond the ends.
    """

    given: Number
    format: Format
    bits: int
    value: Number
    below: Number | None
    above: Number | None

    @property
    def kind(self) -> str:
        """normal, subnormal, zero, inf or NaN."""
        if isinstance(self.value, float):
            return "NaN" if math.isnan(self.value) else "inf"
        if not self.value:
            return "zero"
        return "normal" if abs(self.value) >= self.format.smallest_normal else "subnormal"

    @property
    def error(self) -> Fraction | None:
        """|stored - given|, exact; None where one of them is not finite."""
        if isinstance(self.value, float) or isinstance(self.given, float):
            return None
        return abs(self.value - self.given)

    @property
    def relative_error(self) -> Fraction | None:
        """The error as a share of the given number; None where there is none, and for zero."""
        if self.error is None or isinstance(self.given, float) or not self.given:
            return None
        return self.error / abs(self.given)

    @property
    def bit_groups(self) -> str:
        """Sign, exponent and fraction, each in binary."""
        sign, exponent, fraction = self.format.fields(self.bits)
        return f"{sign} {exponent:0{self.format.exponent_bits}b} {fraction:0{self.format.fraction_bits}b}"

    @property
    def formula(self) -> str:
        """The number as its fields make it."""
        sign, exponent, fraction = self.format.fields(self.bits)
        fmt = self.format
        if self.kind in ("inf", "NaN"):
            return f"exponent {exponent} is all ones: {self.kind}"
        steps = f"{fraction}/2^{fmt.fraction_bits}"
        if exponent:
            return f"(-1)^{sign} x 2^({exponent}-{fmt.bias}) x (1 + {steps})"
        return f"(-1)^{sign} x 2^(1-{fmt.bias}) x ({steps})"


def store(value: Number, fmt: Format) -> Stored:
    """`value` rounded to `fmt`."""
    return look_at(fmt.encode(value), fmt, value)


def look_at(bits: int, fmt: Format, given: Number | None = None) -> Stored:
    """What `bits` stand for in `fmt`; `given` is the number that they were rounded from, by default the same."""
    value = fmt.decode(bits)
    below, above = _neighbours(value, bits, fmt)
    return Stored(value if given is None else given, fmt, bits, value, below, above)


def _neighbours(value: Number, bits: int, fmt: Format) -> tuple[Number | None, Number | None]:
    """The numbers next to `value`. Bits of one sign are in the order of magnitudes."""
    if isinstance(value, float) and math.isnan(value):
        return None, None
    sign = 1 << (fmt.bits - 1)
    magnitude = bits & ~sign
    if magnitude == 0:
        return -fmt.smallest, fmt.smallest
    inward = fmt.decode(bits - 1)
    outward = None if isinstance(value, float) else fmt.decode(bits + 1)
    if isinstance(outward, float) and math.isnan(outward):
        outward = None
    return (outward, inward) if bits & sign else (inward, outward)


def parse(text: str, fmt: Format) -> Stored:
    """A number as people write it, or its bits, in `fmt`.

    Args:
        text: a decimal number ("65504", "1e-8", "-0.1"), "inf" or "nan", a fraction or power ("2^-24", "1/3"), bits in
            hexadecimal ("0x7bff") or binary ("0b0111101111111111", "0 11110 1111111111").

    Raises:
        ValueError: it is none of these, or there are not so many bits in the format.
    """
    word = text.strip().lower()
    try:
        if word.startswith(("0x", "0b")):
            return look_at(_bits(word[2:].replace("_", "").replace(" ", ""), word[:2], fmt), fmt)
        groups = word.split()
        if len(groups) == 3 and [len(group) for group in groups] == [1, fmt.exponent_bits, fmt.fraction_bits]:
            return look_at(_bits("".join(groups), "0b", fmt), fmt)
        if word in ("inf", "+inf", "-inf", "nan", "infinity", "-infinity"):
            return store(float(word), fmt)
        if "^" in word:
            base, exponent = word.split("^")
            if abs(int(exponent)) > 5000:
                raise ValueError
            return store(Fraction(base) ** int(exponent), fmt)
        exponent_text = word.partition("e")[2]
        if exponent_text and abs(int(exponent_text)) > 5000:
            raise ValueError
        if word.startswith("-") and not Fraction(word):
            return look_at(1 << (fmt.bits - 1), fmt)  # a fraction has no negative zero
        return store(Fraction(word), fmt)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"{text!r} is not a number in {fmt.name}: expected a decimal number (65504, 1e-8), inf, nan, a power (2^-24), "
            f"or {fmt.bits} bits: hexadecimal (0x...), binary (0b...) or in groups of 1, {fmt.exponent_bits} and "
            f"{fmt.fraction_bits}{f' ({error})' if 'bits, got' in str(error) else ''}"
        ) from None


def _bits(digits: str, prefix: str, fmt: Format) -> int:
    if prefix == "0b" and len(digits) != fmt.bits:
        raise ValueError(f"{fmt.name} has {fmt.bits} bits, got {len(digits)}")
    value = int(digits, 16 if prefix == "0x" else 2)
    if value >= 2**fmt.bits:
        raise ValueError(f"{fmt.name} has {fmt.bits} bits, got {value.bit_length()}")
    return value


def all_numbers(fmt: Format) -> Iterator[Number]:
    """Every number of a small format, in the order of its bits."""
    return (fmt.decode(bits) for bits in range(2**fmt.bits))


# -- tensors

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def format_of(dtype: torch.dtype) -> Format:
    """The format of a torch dtype.

    Raises:
        TypeError: it is not one of the floating dtypes that are known here.
    """
    for fmt in FORMATS.values():
        if fmt.dtype == dtype:
            return fmt
    raise TypeError(f"expected a floating dtype (FP64, FP32, BF16, FP16, FP8 E4M3 or E5M2), got {dtype}")


def decompose(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sign, exponent and fraction fields of each element, int64 tensors of the shape of `values`."""
    fmt = format_of(values.dtype)
    bits = values.view(_INTEGERS[fmt.storage]).long()
    fraction = bits & (2**fmt.fraction_bits - 1)
    exponent = bits >> fmt.fraction_bits & (2**fmt.exponent_bits - 1)
    return bits >> (fmt.bits - 1) & 1, exponent, fraction


def ulp(values: Tensor, fmt: Format) -> Tensor:
    """The spacing of `fmt` at the magnitude of each element, FP64; NaN where an element is beyond the format.

    In the subnormal range, and at zero, it is the smallest subnormal.
    """
    magnitude = values.double().abs()
    exponent = torch.frexp(magnitude).exponent.double() - 1  # magnitude in [2^exponent, 2^(exponent+1))
    exponent = torch.where(magnitude == 0, torch.full_like(exponent, -torch.inf), exponent)
    spacing = torch.exp2(exponent.clamp(min=1.0 - fmt.bias) - fmt.fraction_bits)
    return torch.where(magnitude <= float(fmt.largest), spacing, torch.full_like(spacing, torch.nan))


def round_to(values: Tensor, fmt: Format) -> Tensor:
    """Each element rounded to `fmt` (ties to even), FP64; inf, or NaN where the format has no inf, beyond its range.

    `values` of at most FP64: the result is exact for every format of fewer bits.
    """
    wide = values.double()
    spacing = ulp(wide.clamp(-float(fmt.largest), float(fmt.largest)), fmt)
    rounded = torch.round(wide / spacing) * spacing  # by a power of two, so both are exact; ties go to even
    # Below FP64's own smallest spacing nothing is left to round.
    rounded = torch.where(spacing == 0, wide, rounded)
    beyond = torch.full_like(wide, torch.inf if fmt.has_inf else torch.nan).copysign(wide)
    edge, largest_is_even = float(fmt.overflows_from), fmt._last % 2 == 0  # a tie goes to the even one
    return torch.where(wide.abs() > edge if largest_is_even else wide.abs() >= edge, beyond, rounded)


def rounding_error(values: Tensor, fmt: Format) -> Tensor:
    """stored - given for each element, FP64; inf where it overflows, NaN where it is not finite itself."""
    return round_to(values, fmt) - values.double()


@dataclass(frozen=True)
class Shares:
    """Shares of a tensor's elements, between 0 and 1, after a multiplication by a scale.

    Attributes:
        zero: zeros before any rounding.
        underflow: not zero, but rounded to zero.
        subnormal: kept, with fewer bits than the format has.
        normal: kept in full.
        overflow: inf (or NaN) though finite before.
        not_finite: inf or NaN before.
    """

    zero: float
    underflow: float
    subnormal: float
    normal: float
    overflow: float
    not_finite: float


def shares(values: Tensor, fmt: Format, scale: float = 1.0) -> Shares:
    """What becomes of the elements of `values`, times `scale`, in `fmt`.

    Raises:
        ValueError: there is no element.
    """
    if not values.numel():
        raise ValueError("shares of a tensor without elements")
    given = values.double().flatten()
    finite = given.isfinite()
    scaled = given * scale
    rounded = round_to(scaled, fmt)
    normal = rounded.abs() >= float(fmt.smallest_normal)
    kinds = {
        "zero": given == 0,
        "underflow": finite & (given != 0) & (rounded == 0),
        "subnormal": finite & (rounded != 0) & ~normal & rounded.isfinite(),
        "normal": finite & normal & rounded.isfinite(),
        "overflow": finite & ~rounded.isfinite(),
        "not_finite": ~finite,
    }
    return Shares(**{name: kind.double().mean().item() for name, kind in kinds.items()})
