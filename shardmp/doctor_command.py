"""What `shardmp doctor` makes of its options, and what it prints where.

Owns:      options to `Settings`, the report's way to the screen and to a file, the exit code.
Takes:     the options' values; how to print comes from the command line's module.
Gives:     an exit code, the same on every rank.
Invariant: rank 0 prints the report, the first rank of each host the findings; no rank leaves before all have printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from . import budget_words, budgets, doctor, doctor_report
from .doctor_findings import Finding, Thresholds
from .launcher import detect
from .precision import DTYPES

Say = Callable[[str], None]
Show = Callable[[RenderableType], None]


def planned(
    params: str | None, precision: str, stage: int, bucket_mb: float | None, backwards: int, exact: bool
) -> budgets.Run | None:
    """The training whose step is forecast; None where no size was given.

    Raises:
        ValueError: an option out of its range.
    """
    if params is None:
        return None
    if precision not in DTYPES:
        raise ValueError(f"--precision: expected one of {', '.join(DTYPES)}, got {precision!r}")
    budget_words.check_bucket_mb(bucket_mb)
    entries = budget_words.entries_of_count(budget_words.count(params), precision, bucket_mb)
    run = budgets.Run(entries, stage=stage, precision=precision, bucket_mb=bucket_mb, backwards=backwards, exact=exact)
    budgets.check(run)
    return run


def thresholds(
    slow: float, min_mb_per_s: float | None, max_latency_ms: float | None, max_skew: float, min_shm: str
) -> Thresholds:
    """The options' units become bytes and seconds.

    Raises:
        ValueError: `min_shm` is no size.
    """
    return Thresholds(
        clock=max_skew,
        shared_memory=budget_words.size(min_shm, "--min-shm"),
        slow=slow,
        bandwidth=None if min_mb_per_s is None else 1e6 * min_mb_per_s,
        latency=None if max_latency_ms is None else max_latency_ms / 1e3,
    )


def run(settings: doctor.Settings, as_json: bool, path: Path | None, say: Say, show: Show) -> int:
    """Examine, print, and leave together with the other ranks.

    Args:
        as_json: rank 0 prints the report as JSON, in place of tables.
        path: rank 0 writes it here as well; None for nowhere.
        say, show: one message on stderr; a table on stdout.

    Raises:
        ValueError: variables that cannot be right. OSError: the file cannot be written.
    """
    try:
        verdict = doctor.examine(settings)
    except RuntimeError as error:
        say(f"shardmp doctor: error: {error}")
        if _is_first():
            _give(_not_met(error), as_json, path)
        return doctor.FOUND
    try:
        if verdict.report is not None:
            if not as_json:
                show(doctor_report.tables(verdict.report))
            _give(verdict.report, as_json, path)
        if verdict.speaks:
            for finding in verdict.findings:
                say(f"shardmp doctor: {finding}")
    finally:
        verdict.leave()
    return 0 if verdict.ok else doctor.FOUND


def _give(report: dict[str, Any], as_json: bool, path: Path | None) -> None:
    text = json.dumps(report, indent=2)
    if as_json:
        print(text, flush=True)
    if path is not None:
        path.write_text(text + "\n")


def _is_first() -> bool:
    """Whether this is rank 0 as the launcher says it: the ranks have not met."""
    with contextlib.suppress(ValueError):
        return detect(os.environ).rank == 0
    return False


def _not_met(error: RuntimeError) -> dict[str, Any]:
    """The report where the ranks did not meet: what `examine` has raised is the one finding."""
    finding = Finding("meeting", (socket.gethostname(),), str(error), "The message says what to look at")
    return {"ok": False, "findings": [asdict(finding)]}
