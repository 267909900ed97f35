"""One training step's bytes on the wire, counted on each host's interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from netlab import Lab, Process, wait_for_all

pytestmark = pytest.mark.cluster

WIDTH, LAYERS = 1024, 4
PARAMETERS = LAYERS * WIDTH * WIDTH
WARM, MEASURED = 2, 4


def expected_bytes(num_hosts: int, per_host: int, reduce: str) -> float:
    """Per host and step, FP16. One hop: each rank sends 2 Psi/N bytes to each rank of another host, once for the
    reduction and once for the gather. Two hops (more than 2 ranks per host): each sum crosses once, in FP32 (FP64 where
    it is exact), and so does each gathered row."""
    across = PARAMETERS * (num_hosts - 1) / num_hosts
    if per_host > 2:
        return ({"fp32": 4, "exact": 8}[reduce] + 2) * across
    return 2 * (2 * per_host * across)


@pytest.mark.parametrize(
    ("num_hosts", "per_host", "reduce"),
    [(2, 1, "fp32"), (2, 2, "fp32"), (2, 3, "fp32"), (3, 1, "fp32"), (3, 2, "fp32"), (3, 3, "fp32"), (2, 3, "exact")],
)
def test_a_step_sends_what_the_formula_says(
    num_hosts: int,
    per_host: int,
    reduce: str,
    make_lab: Callable[..., Lab],
    start_ranks: Callable[..., list[Process]],
    tmp_path: Path,
) -> None:
    lab = make_lab(num_hosts)
    first, last = WARM + 1, WARM + 1 + MEASURED
    ranks = start_ranks(
        lab.hosts,
        *("--width", str(WIDTH), "--layers", str(LAYERS), "--steps", str(last)),
        *("--gates", f"{tmp_path}:{first},{last}", "--reduce", reduce),
        per_host=per_host,
    )

    def bytes_at(step: int) -> list[int]:
        wait_for_all(ranks, "gate", 60, step=step)
        sent = [host.sent_bytes() for host in lab.hosts]
        (tmp_path / str(step)).touch()
        return sent

    before = bytes_at(first)
    after = bytes_at(last)
    per_step = [(b - a) / MEASURED for a, b in zip(before, after, strict=True)]
    expected = expected_bytes(num_hosts, per_host, reduce)
    hashes = {event["masters"] for event in wait_for_all(ranks, "masters", 60)}
    assert len(hashes) == 1
    ratios = [round(sent / expected, 3) for sent in per_step]
    assert all(0.95 < ratio < 1.05 for ratio in ratios), f"sent / expected per host: {ratios}"
    assert [rank.wait(20) for rank in ranks] == [0] * len(ranks)
