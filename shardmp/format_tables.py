"""Number formats as tables for people: `shardmp formats`.

Owns:      how a figure is written.
Takes:     `formats`.
Gives:     rich tables.
Invariant: a stored value shows all digits that a double needs; other figures show six, or are exact with fewer.
"""

from __future__ import annotations

import math
from fractions import Fraction

from rich.table import Table

from .formats import FORMATS, Format, Number, Stored, parse


def answer(number: str | None, format_name: str, *, compare: bool) -> Table:
    """What `shardmp formats [NUMBER] [--in FORMAT] [--compare]` shows.

    Raises:
        ValueError: no such format, no number, or nothing to compare.
    """
    fmt = FORMATS.get(format_name.lower())
    if fmt is None:
        raise ValueError(f"--in: expected one of {', '.join(FORMATS)}, got {format_name!r}")
    if number is None:
        if compare:
            raise ValueError("--compare: expected a number to compare, got none")
        return all_formats()
    return comparison(number) if compare else one_number(number, fmt)


def all_formats() -> Table:
    """One row for each format: what it holds."""
    table = Table(
        title="Range is not precision: FP16 has more digits, BF16 more range.\nBelow the smallest normal number digits go.",
        title_justify="left",
    )
    table.add_column("format", no_wrap=True)
    for heading in (
        "sign+\nexp.+\nfract.",
        "bytes",
        "largest",
        "smallest\nnormal",
        "smallest\nsubnormal",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("spacing\nat 1", justify="right", no_wrap=True)
    table.add_column("dec.\ndig.", justify="right", no_wrap=True)
    for fmt in FORMATS.values():
        figures = (fmt.largest, fmt.smallest_normal, fmt.smallest, fmt.epsilon)
        table.add_row(
            fmt.name,
            f"1+{fmt.exponent_bits}+{fmt.fraction_bits}",
            str(fmt.storage),
            *(_short(figure) for figure in figures),
            f"{fmt.decimal_digits:.1f}",
        )
    # What hardware reads of a TF32 number are 19 of its 32 bits: it saves no memory.
    table.caption = "TF32 is FP32 in memory: a Tensor Core reads 19 of its 32 bits."
    table.caption_justify = "left"
    return table


def one_number(text: str, fmt: Format) -> Table:
    """How `text` is stored in `fmt`, in two columns.

    Raises:
        ValueError: `text` is no number.
    """
    stored = parse(text, fmt)
    table = Table(title=f"{text} in {fmt.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in (
        ("bits (sign exponent fraction)", f"{stored.bit_groups}   ({stored.bits:#0{2 + -(-fmt.bits // 4)}x})"),
        ("stored value", _full(stored.value)),
        ("number below", _full(stored.below)),
        ("number above", _full(stored.above)),
        ("absolute error", _error(stored.error, stored)),
        ("relative error", _error(stored.relative_error, stored)),
        ("class", stored.kind + _loss_of_digits(stored)),
        ("formula", stored.formula),
    ):
        table.add_row(name, value)
    return table


def comparison(text: str) -> Table:
    """One number in every format.

    Raises:
        ValueError: `text` is no decimal number: bits belong to one format.
    """
    if text.strip().lower().startswith(("0x", "0b")) or len(text.split()) > 1:
        raise ValueError(f"bits ({text!r}) belong to one format: compare a decimal number")
    table = Table(title=f"{text} in every format", title_justify="left")
    for heading in ("format", "stored value", "absolute error", "relative error", "class"):
        table.add_column(heading, justify="left" if heading in ("format", "class") else "right", overflow="fold")
    for fmt in FORMATS.values():
        stored = parse(text, fmt)
        errors = (_error(stored.error, stored), _error(stored.relative_error, stored))
        table.add_row(fmt.name, _full(stored.value), *errors, stored.kind + _loss_of_digits(stored))
    return table


def _loss_of_digits(stored: Stored) -> str:
    """What a subnormal number, or a zero that was none, has lost."""
    if stored.kind == "subnormal":
        _, _, fraction = stored.format.fields(stored.bits)
        return f", {fraction.bit_length()} of {stored.format.fraction_bits + 1} significant bits left"
    if stored.kind == "zero" and not (isinstance(stored.given, Fraction) and stored.given == 0):
        return ": underflow, at most half of the smallest number"
    if stored.kind in ("inf", "NaN") and not isinstance(stored.given, float):
        return f": overflow, beyond {_short(stored.format.largest)}"
    return ""


def _error(error: Fraction | None, stored: Stored) -> str:
    if error is None:
        return "not finite" if stored.kind in ("inf", "NaN") else "none"
    return "0" if not error else _short(error)


def _short(value: Fraction) -> str:
    """Six digits, or all of them where an integer is not long. Beyond FP64's range as well."""
    if value.denominator == 1 and abs(value) < 10**7:
        return str(value.numerator)
    if not value:
        return "0"
    magnitude = abs(value)
    exponent = math.floor(_log10(magnitude))
    digits = magnitude / Fraction(10) ** exponent
    if digits >= 10:
        digits, exponent = digits / 10, exponent + 1
    elif digits < 1:
        digits, exponent = digits * 10, exponent - 1
    return f"{'-' if value < 0 else ''}{float(digits):.6g}e{exponent:+03d}"


def _log10(value: Fraction) -> float:
    return (math.log2(value.numerator) - math.log2(value.denominator)) * math.log10(2)


def _full(value: Number | None) -> str:
    """All digits where they are few, as Python writes a double; a power of two beside a small one."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else ("-inf" if value < 0 else "inf")
    if value.denominator == 1 and abs(value) < 10**16:
        return str(value.numerator)
    try:
        text = repr(float(value)) if Fraction(float(value)) == value and float(value) else _short(value)
    except OverflowError:
        text = _short(value)
    return f"{text} ({_power(value)})" if _power(value) else text


def _power(value: Fraction) -> str:
    """`2^-24` where `value` is a power of two, else nothing."""
    if value.numerator == 1 and value.denominator & (value.denominator - 1) == 0 and value.denominator > 1:
        return f"2^-{value.denominator.bit_length() - 1}"
    return ""
