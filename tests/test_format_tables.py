"""What the tables of formats say: figures known from elsewhere, and bad input refused."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from rich.table import Table

from shardmp import format_tables
from shardmp.formats import FORMATS


def cells(table: Table) -> list[list[str]]:
    """The table's rows as plain text."""
    return [list(row) for row in zip(*(list(column.cells) for column in table.columns), strict=True)]


def said(number: str, name: str = "fp16") -> dict[str, str]:
    """The answer about one number, by the names of its lines."""
    return dict(cells(format_tables.one_number(number, FORMATS[name])))


def test_the_table_of_formats_has_torchs_own_limits() -> None:
    rows = {row[0]: row[1:] for row in cells(format_tables.all_formats())}
    assert list(rows) == ["FP64", "FP32", "TF32", "BF16", "FP16", "FP8 E4M3", "FP8 E5M2"]
    for fmt in FORMATS.values():
        if fmt.dtype is None:
            continue
        limits = torch.finfo(fmt.dtype)
        _, size, largest, normal, subnormal, spacing, _ = rows[fmt.name]
        assert int(size) == fmt.dtype.itemsize
        assert float(largest) == pytest.approx(limits.max, rel=1e-5)
        assert float(normal) == pytest.approx(limits.smallest_normal, rel=1e-5)
        # torch names the spacing at 1; the smallest subnormal is that spacing at the smallest normal number.
        assert float(spacing) == pytest.approx(limits.eps, rel=1e-5)
        assert float(subnormal) == pytest.approx(limits.smallest_normal * limits.eps, rel=1e-5)


def test_range_and_precision_are_told_apart() -> None:
    """BF16 and FP16 take 16 bits each: one spends them on range, the other on digits; TF32 has both and saves nothing."""
    rows = {row[0]: row[1:] for row in cells(format_tables.all_formats())}
    assert rows["FP16"] == ["1+5+10", "2", "65504", "6.10352e-05", "5.96046e-08", "9.76562e-04", "3.3"]
    assert rows["BF16"] == ["1+8+7", "2", "3.38953e+38", "1.17549e-38", "9.18355e-41", "7.8125e-03", "2.4"]
    assert rows["TF32"][:2] == ["1+8+10", "4"]


def test_a_number_is_shown_with_bits_neighbours_errors_and_formula() -> None:
    assert said("0.00006666666") == {
        "bits (sign exponent fraction)": "0 00001 0001011110   (0x045e)",
        "stored value": "6.663799285888672e-05",
        "number below": "6.657838821411133e-05",
        "number above": "6.669759750366211e-05",
        "absolute error": "2.86671e-08",
        "relative error": "4.30007e-04",
        "class": "normal",
        "formula": "(-1)^0 x 2^(1-15) x (1 + 94/2^10)",
    }


@pytest.mark.parametrize("number", ["65504", "65519.99", "0x7bff", "0b0111101111111111", "0 11110 1111111111"])
def test_the_largest_number_is_shown_however_it_is_written(number: str) -> None:
    answer = said(number)
    assert answer["bits (sign exponent fraction)"] == "0 11110 1111111111   (0x7bff)"
    assert (answer["stored value"], answer["number below"], answer["number above"]) == ("65504", "65472", "inf")
    assert answer["absolute error"] == ("1.599e+01" if number == "65519.99" else "0")


@pytest.mark.parametrize(
    ("number", "name", "value", "kind"),
    [
        ("65520", "fp16", "inf", "inf: overflow, beyond 65504"),
        ("-65520", "fp16", "-inf", "inf: overflow, beyond 65504"),
        ("465", "e4m3", "NaN", "NaN: overflow, beyond 448"),
        ("1e400", "fp64", "inf", "inf: overflow, beyond 1.79769e+308"),
        ("1e-8", "fp16", "0", "zero: underflow, at most half of the smallest number"),
        ("0", "fp16", "0", "zero"),
        ("2^-24", "fp16", "5.960464477539063e-08 (2^-24)", "subnormal, 1 of 11 significant bits left"),
        ("9.2e-41", "bf16", "9.183549615799121e-41 (2^-133)", "subnormal, 1 of 8 significant bits left"),
        ("nan", "fp16", "NaN", "NaN"),
        ("-inf", "bf16", "-inf", "inf"),
    ],
)
def test_what_a_format_cannot_hold_is_named(number: str, name: str, value: str, kind: str) -> None:
    answer = said(number, name)
    assert (answer["stored value"], answer["class"]) == (value, kind)


def test_an_error_of_a_number_beyond_the_range_has_no_figure() -> None:
    assert said("65520")["absolute error"] == "not finite"
    assert said("1e-8")["relative error"] == "1"
    assert said("0")["relative error"] == "none"


def test_a_comparison_orders_one_number_by_what_each_format_keeps() -> None:
    rows = {row[0]: row[1:] for row in cells(format_tables.comparison("0.1"))}
    assert len(rows) == len(FORMATS)
    assert rows["FP16"] == ["0.0999755859375", "2.44141e-05", "2.44141e-04", "normal"]
    assert rows["BF16"] == ["0.10009765625", "9.76562e-05", "9.76562e-04", "normal"]
    assert float(rows["FP16"][2]) < float(rows["BF16"][2])
    far = {row[0]: row[1] for row in cells(format_tables.comparison("1e30"))}
    assert far["FP16"] == "inf"
    assert float(far["BF16"]) == pytest.approx(1e30, rel=2**-8)


def test_bits_belong_to_one_format_and_are_not_compared() -> None:
    for bits in ("0x7bff", "0 11110 1111111111"):
        with pytest.raises(ValueError, match="belong to one format"):
            format_tables.comparison(bits)


def test_an_unknown_format_and_a_missing_number_are_refused() -> None:
    with pytest.raises(ValueError, match="--in: expected one of fp64, fp32, .*got 'fp12'"):
        format_tables.answer("1", "fp12", compare=False)
    with pytest.raises(ValueError, match="--compare: expected a number"):
        format_tables.answer(None, "fp16", compare=True)


def test_the_table_of_formats_fits_110_columns() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(format_tables.all_formats())
    text = console.export_text()
    assert "FP8 E4M3" in text
    assert "…" not in text
