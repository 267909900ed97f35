"""`shardmp doctor`: what is wrong with a cluster, before a job finds out.

Owns:      the visit's beginning and end, its watch, and the verdict that all ranks share.
Takes:     `Settings`; who this rank is comes from the launcher, through `shardmp.init`.
Gives:     on rank 0 a report of JSON's types, on every rank the findings.
Invariant: every rank ends with the same verdict, or with an error that names who is missing; never a hang, as each stage
           has a deadline and a watch ends this process where even that fails.

Each rank writes what it has found to the store, where it arrives also after a collective has failed; after such a failure
the later stages are left out.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from . import budgets
from .doctor_board import Board
from .doctor_findings import Thresholds
from .doctor_visit import Visit, store_of
from .world import MOST_SECONDS, init

_MOST_MIB = 2**14
FOUND = 1  # exit code where something is wrong
_MARGIN = 30.0  # seconds beyond a stage's own deadline after which the watch ends this process


@dataclass(frozen=True)
class Settings:
    """What the options of `shardmp doctor` say.

    Attributes:
        run: the training whose collectives are forecast; its ranks are replaced by those that are here.
        thresholds: from where on a figure is a finding.
        every_rank: pairs are all ranks, not the first of each host.
        most_bytes: of one transfer.
        arrival_timeout, timeout: seconds for all ranks to arrive, and for one collective.
        strict: warnings count as errors.
        backend: "gloo", "nccl" or None, as in `shardmp.init`.

    Raises:
        ValueError: a time, size or threshold that is not above 0, or too large.
    """

    run: budgets.Run | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    every_rank: bool = False
    most_bytes: int = 2**24
    arrival_timeout: float = 120.0
    timeout: float = 30.0
    strict: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        given = self.thresholds
        for option, value, most in (
            ("--max-skew", given.clock, math.inf),
            ("--min-shm", given.shared_memory, math.inf),
            ("--slow", given.slow, math.inf),
            ("--min-mb-per-s", given.bandwidth, math.inf),
            ("--max-latency-ms", given.latency, math.inf),
            ("--pair-mb", self.most_bytes / 2**20, _MOST_MIB),
            ("--arrival-timeout", self.arrival_timeout, MOST_SECONDS),
            ("--timeout", self.timeout, MOST_SECONDS),
        ):
            if value is not None and not 0 < value <= most:
                limit = "" if most == math.inf else f" and at most {most:g}"
                raise ValueError(f"{option}: expected more than 0{limit}, got {value:g}")
        if given.slow >= 1:
            raise ValueError(f"--slow: expected a part below 1 of the usual bandwidth, got {given.slow:g}")


@dataclass(frozen=True)
class Verdict:
    """What a rank leaves with.

    Attributes:
        ok: the same on all ranks.
        findings: as text, the same on all ranks.
        report: rank 0's; None elsewhere.
        speaks: whether this rank prints for its host.
        leave: to be called when this rank has printed; returns when all have.
    """

    ok: bool
    findings: tuple[str, ...]
    report: dict[str, Any] | None
    speaks: bool
    leave: Callable[[], None]


def examine(settings: Settings) -> Verdict:
    """The whole visit, on every rank.

    Raises:
        ValueError: variables that cannot be right, as `init` raises it.
        RuntimeError: the ranks do not meet, or rank 0 is lost on the way. The message names who is missing, or which hosts
            do not reach each other.
    """
    # gloo's connect phase may take five times the time-out (pytorch/gloo#520).
    with _watch("the meeting of the ranks", settings.arrival_timeout + 6 * settings.timeout):
        world = init(settings.backend, settings.timeout, settings.arrival_timeout)
    start = time.monotonic()
    board = Board(store_of(world), world.rank, world.world_size, 2 * settings.timeout)
    visit = Visit(
        world,
        board,
        settings.thresholds,
        timeout=settings.timeout,
        every_rank=settings.every_rank,
        most_bytes=settings.most_bytes,
        run=settings.run,
    )
    with _watch("the exchange of facts", visit.limit):
        visit.facts()
    for name, stage in visit.stages.items():
        with _watch(f"the stage {name!r}", 4 * visit.limit):
            if not stage():
                break
    with _watch("the verdict", visit.limit):
        return _conclude(visit, settings.strict, time.monotonic() - start)


def _conclude(visit: Visit, strict: bool, seconds: float) -> Verdict:
    board, report = visit.board, None
    if visit.first:
        ok = not any(strict or finding.severity == "error" for finding in visit.findings)
        report = assemble(visit, ok, seconds)
        board.decide("verdict", {"ok": ok, "findings": [str(finding) for finding in visit.findings]})
    decided = board.decided("verdict")

    def leave() -> None:
        with _watch("the end", visit.limit):
            board.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    speaks = any(visit.world.rank == ranks[0] for ranks in visit.hosts)
    return Verdict(decided["ok"], tuple(decided["findings"]), report, speaks, leave)


def assemble(visit: Visit, ok: bool, seconds: float) -> dict[str, Any]:
    """The report: bytes, bytes per second and seconds."""
    assert visit.cluster is not None
    hosts = [{"host": visit.cluster.name(ranks[0]), "ranks": ranks} for ranks in visit.hosts]
    return {
        "ok": ok,
        "world_size": visit.world.world_size,
        "seconds": seconds,
        "hosts": hosts,
        "findings": [asdict(finding) for finding in visit.findings],
        "thresholds": asdict(visit.thresholds),
        **visit.report,
    }


@contextmanager
def _watch(what: str, seconds: float) -> Iterator[None]:
    """End this process where something is long over its time: a store whose host is cut off answers nothing, ever."""

    def give_up() -> None:
        print(
            f"shardmp doctor: error: on host {socket.gethostname()}, pid {os.getpid()}, {what} has not ended within "
            f"{seconds + _MARGIN:.0f} s: the host of rank 0 is dead, stopped or cut off",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FOUND)

    timer = threading.Timer(seconds + _MARGIN, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
