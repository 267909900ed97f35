"""`shardmp formats` as a user types it."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from shardmp import cli


def formats(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["formats", *arguments])


def test_without_a_number_every_format_is_shown_uncut() -> None:
    shown = formats()
    assert shown.exit_code == 0
    for part in ("FP8 E4M3", "1+11+52", "1.79769e+308", "9.18355e-41", "TF32 is FP32 in memory"):
        assert part in shown.stdout
    assert "…" not in shown.stdout


def test_a_number_is_shown_in_fp16_unless_another_format_is_named() -> None:
    assert "0 00001 0001011110" in formats("0.00006666666").stdout
    assert "0 01110001 0001100" in formats("0.00006666666", "--in", "bf16").stdout
    assert "0 00001 0001011110" in formats("0.00006666666", "--in", "FP16").stdout


@pytest.mark.parametrize("number", ["-0.1", "-1e-8", "-inf", "-0"])
def test_a_negative_number_is_not_taken_for_an_option(number: str) -> None:
    shown = formats(number)
    assert shown.exit_code == 0, shown.output
    assert f"{number} in FP16" in shown.stdout
    assert "│ 1 " in shown.stdout or ")  1 " in shown.stdout or ") 1 " in shown.stdout  # the sign bit


def test_compare_shows_all_formats() -> None:
    shown = formats("65520", "--compare")
    assert shown.exit_code == 0
    assert shown.stdout.count("overflow, beyond") == 3  # FP16 and both FP8
    assert "65536" in shown.stdout  # BF16 and TF32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["12x"], "'12x' is not a number in FP16: expected a decimal number"),
        (["0x12345"], "FP16 has 16 bits, got 17"),
        (["1", "--in", "fp12"], "--in: expected one of fp64, fp32, tf32, bf16, fp16, e4m3, e5m2, got 'fp12'"),
        (["--compare"], "--compare: expected a number"),
        (["0x7bff", "--compare"], "belong to one format"),
        (["--compar"], "'--compar' is not a number in FP16"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    shown = formats(*arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.output
