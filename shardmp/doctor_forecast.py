"""How long the collectives of a training step will take on the links that the doctor has measured.

Owns:      the formula from bytes and bandwidths to seconds.
Takes:     a planned run (`budgets.Run`), the ranks of each host, the slowest link inside a host and between hosts.
Gives:     for each collective of a step: calls, bytes per rank and per host's card, seconds.
Invariant: every byte is `budgeting`'s; seconds are a lower bound, as nothing but the links is counted.

A collective takes as long as its slowest way: max(card bytes / speed between hosts, bytes inside the host / speed there),
and a latency for each call. Speeds are those with both directions busy, as in the exchange of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import budgeting
from .budget_words import ITEMSIZE
from .budgets import Run


@dataclass(frozen=True)
class Ways:
    """The slowest link of each kind: bytes per second one way while both are busy, and seconds; None where there is none."""

    inner_speed: float | None
    inner_latency: float | None
    outer_speed: float | None
    outer_latency: float | None

    @property
    def latency(self) -> float:
        return max(self.inner_latency or 0.0, self.outer_latency or 0.0)

    def seconds(self, inner_bytes: float, card_bytes: float) -> float:
        """Of so many bytes from a rank to others of its host, and through a host's card, at the same time."""
        inner = inner_bytes / self.inner_speed if self.inner_speed else 0.0
        outer = card_bytes / self.outer_speed if self.outer_speed else 0.0
        return max(inner, outer)


def step(run: Run, ranks_of_hosts: Sequence[int], ways: Ways) -> dict[str, Any]:
    """The collectives of one step.

    Args:
        run: its `ranks` and `ranks_per_host` are replaced by those of the hosts.
        ranks_of_hosts: how many ranks each host has.

    Returns:
        "collectives", rows with "operation", "calls", "rank_bytes", "card_bytes" and "seconds"; "seconds" of all.
    """
    ranks, hosts = sum(ranks_of_hosts), len(ranks_of_hosts)
    alike = len(set(ranks_of_hosts)) == 1
    per_host = ranks_of_hosts[0] if alike else 1
    run = replace(run, ranks=ranks, ranks_per_host=per_host)
    layout = run.layout()
    rows = sum(bucket.shard * ITEMSIZE[bucket.dtype] for bucket in layout.buckets)
    sums = run.sum_itemsize * sum(bucket.shard for bucket in layout.buckets)
    card = budgeting.card_bytes(layout, ITEMSIZE, ranks_per_host=per_host, sum_itemsize=run.sum_itemsize)
    if not alike:  # one hop: each rank of a host deals with each of the others
        worst = max(size * (ranks - size) for size in ranks_of_hosts)
        card = {**card, "reduction": worst * rows, "gather": worst * rows}
    two_hops = run.hosts > 1
    inner = (ranks - hosts if two_hops else max(ranks_of_hosts) - 1) * rows
    reduction = (ranks - hosts) * rows + (hosts - 1) * sums if two_hops else (ranks - 1) * rows
    lanes = budgeting.wire_bytes(layout, ITEMSIZE, backwards=0) - (ranks - 1) * rows
    calls, hops = run.reductions() * len(layout.buckets), 2 if two_hops else 1
    trips = 2 * math.ceil(math.log2(ranks)) if ranks > 1 else 0
    found = [
        _row("reduce-scatter", calls, run.reductions(), reduction, inner, card["reduction"], hops, ways),
        _row("all-gather", len(layout.buckets), 1, (ranks - 1) * rows, inner, card["gather"], hops, ways),
        _row("all-reduce of the verdict", 1, 1, lanes, lanes, card["verdict"], trips, ways),
    ]
    return {
        "parameters": run.parameters,
        "precision": run.precision,
        "stage": run.stage,
        "backwards": run.backwards,
        "buckets": len(layout.buckets),
        "collectives": found,
        "seconds": sum(row["seconds"] for row in found),
    }


def _row(
    operation: str, calls: int, times: int, rank_bytes: int, inner: int, card: int, trips: int, ways: Ways
) -> dict[str, Any]:
    """One collective; bytes are those of one time, `trips` the latencies of one call."""
    seconds = times * ways.seconds(inner, card) + calls * trips * ways.latency
    return {
        "operation": operation,
        "calls": calls,
        "rank_bytes": times * rank_bytes,
        "card_bytes": times * card,
        "seconds": seconds,
    }
