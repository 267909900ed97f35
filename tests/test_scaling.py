"""The benchmarks of growth and of a slow link: their arithmetic, and a short run of what needs no idle machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import slow_link  # noqa: E402


def rounds(**figures: list[float]) -> list[dict[str, float]]:
    """One dict for each round."""
    return [dict(zip(figures, values, strict=True)) for values in zip(*figures.values(), strict=True)]


def test_a_step_over_a_slow_link_is_held_against_the_larger_of_compute_and_wire() -> None:
    """125 MB at 1000 Mbit/s take 1000 ms; medians over three rounds are 1100 ms for the step and 300 ms for compute."""
    compute = rounds(step_ms=[300, 290, 900], forward_ms=[100, 100, 100])
    slow = rounds(step_ms=[1100, 1000, 5000], sent_mb=[125, 125, 125])
    free = rounds(step_ms=[400, 410, 420])
    results = {"compute-fp16": {"slow": [], "free": compute}, "shardmp-fp16": {"slow": slow, "free": free}}
    (row,) = slow_link.rows(results, rate=1000)
    assert (row["wire_ms"], row["compute_ms"], row["free_ms"]) == (1000, 300, 410)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["limit_ms"] == 1000  # max(100, 500) + max(200, 500)
    assert "| shardmp-fp16 | 1100 | 125 | 1000 | 300 | 1.10 | 1000 | 410 |" in slow_link.table("wide", [row], 1000)


def test_where_compute_and_wire_are_equal_no_order_of_messages_hides_all() -> None:
    """The gather hides under a third of compute, the reduction under two thirds: C/2 + 2C/3 with W = C."""
    compute = rounds(step_ms=[600], forward_ms=[200])
    other = rounds(step_ms=[800], sent_mb=[75])
    results = {"compute-fp32": {"slow": [], "free": compute}}
    results |= {name: {"slow": other, "free": other} for name in ("shardmp-fp32", "ddp-fp32")}
    ours, ddp = slow_link.rows(results, rate=1000)
    assert ours["wire_ms"] == ours["compute_ms"] == 600
    assert ours["limit_ms"] == 700
    assert "limit_ms" not in ddp  # it sends everything under backward


@pytest.mark.slow
def test_bytes_follow_the_formulas_and_a_large_model_starts_in_seconds_on_1024_ranks(tmp_path: Path) -> None:
    """Counted in real steps of rank 0 in torch's fake process group; `shard()` of 6.7e9 parameters within 5 s (twice that
    where the machine is busy)."""
    out = tmp_path / "scaling.json"
    options = ["--parts", "ranks,start", "--ranks", "2,64,1024", "--steps", "1", "--json", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    for row in parts["ranks"]:
        assert row["held"] == pytest.approx(row["ideal_held"], rel=0.001)
        assert row["sent"] == pytest.approx(row["ideal_sent"], rel=0.001)
        assert row["collectives"] == 1  # the verdict
    (start,) = (row["seconds"] for row in parts["start"] if row["ranks"] == 1024)
    assert start < 10.0


def test_unknown_parts_are_refused_by_name() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), "--parts", "ranks,speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--parts: expected of ranks, start, parameters, tensors; got speed" in done.stderr
