"""Tables fit a terminal of 80 columns, and are cut nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmp import cli

MODEL = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))\n"


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["formats"], ["FP8 E4M3", "1.79769e+308", "4.94066e-324", "2.22045e-16", "1+11+52"]),
        (["formats", "0.1"], ["0.0999755859375"]),
        (["formats", "1e-8", "--compare"], ["1.0011717677116394e-08", "underflow"]),
        (
            ["budget", "--params", "7B", "--ranks", "64", "--fits", "80GiB"],
            ["together", "0.00909", "29.3", "shardmp, stage 2"],
        ),
        (["budget", "--params", "900B", "--ranks", "8"], ["together"]),
        (
            ["budget", "--model", "model:make", "--batch", "8x64", "--device", "cpu"],
            ["dynamic", "static", "shardmp, stage 2"],
        ),
        (["doctor", "--params", "1M"], ["127.0.0.1"]),
    ],
    ids=lambda each: " ".join(each)[:40],
)
def test_a_table_fits_80_columns_uncut(
    arguments: list[str], whole: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80", "RANK": None, "WORLD_SIZE": None})
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\u2026" not in shown.stdout
    for each in whole:
        assert each in shown.stdout, shown.stdout
