"""The stages of a doctor's visit, on one rank.

Owns:      their order, what each rank does in them, and that all ranks leave a stage together.
Takes:     a `World`, a `Board`, the settings.
Gives:     on rank 0 the parts of the report and the findings.
Invariant: what fails on one rank is known to all before the next stage; a rank that does not come out of a stage is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from . import doctor_findings, doctor_forecast, doctor_wire, host_facts, network
from .budgets import Run
from .doctor_board import Board
from .doctor_findings import Cluster, Finding, Thresholds
from .world import World, control_group

DOORS = 8  # ports of each host that others try
PARTNERS = 16  # rounds of pairs, at most: of more than 17 ends each meets so many
AGAIN = 3  # times that slow links are measured again
# A rank behind a slow link comes late to its next pair, and the next one waits for it: longer than for a collective.
PATIENCE = 4

Measured = dict[tuple[int, int], dict[str, float]]


class Visit:
    """One rank's way through the stages.

    Args:
        timeout: seconds for one collective.
        every_rank: pairs are all ranks, not the first of each host.
        most_bytes: of one transfer.
        run: the training that is forecast, or None.

    Attributes:
        findings, report: rank 0's.
    """

    def __init__(
        self,
        world: World,
        board: Board,
        thresholds: Thresholds,
        *,
        timeout: float,
        every_rank: bool,
        most_bytes: int,
        run: Run | None,
    ) -> None:
        self.world, self.board, self.thresholds = world, board, thresholds
        self.timeout, self.every_rank, self.most_bytes, self.run = timeout, every_rank, most_bytes, run
        self.first = world.rank == 0
        self.findings: list[Finding] = []
        self.report: dict[str, Any] = {}
        self.hosts: list[list[int]] = []
        self.cluster: Cluster | None = None
        self._wire: doctor_wire.Wire | None = None

    @property
    def limit(self) -> float:
        """Seconds that a stage may take."""
        return 10 * self.timeout

    @property
    def stages(self) -> dict[str, Callable[[], bool]]:
        """By name and in order; each returns whether the next one makes sense. `facts` comes before them."""
        if self.world.world_size == 1:
            return {}
        ports = {"ports": self.ports} if len(self.hosts) > 1 else {}
        return {**ports, "values": self.values, "clocks": self.clocks, "links": self.links}

    def _together(self, topic: str, work: Callable[[], Any]) -> tuple[list[Any], bool]:
        """`work` on every rank; rank 0 gets what each has found, all hear whether every rank could do it."""
        told: dict[str, Any] = {"found": None, "error": "", "order": 0}
        try:
            told["found"] = work()
        except (RuntimeError, OSError) as error:
            told |= {"error": f"{error}"[:500], "order": self.board.cry()}
        self.board.say(topic, told)
        all_told: list[Any] = []
        if self.first:
            all_told = self.board.collect(topic, self.limit)
            self._blame(topic, all_told)
            self.board.decide(topic, all(one is not None and not one["error"] for one in all_told))
        going = bool(self.board.decided(topic, self.limit))
        return [one and one["found"] for one in all_told], going

    def _blame(self, topic: str, all_told: Sequence[Any]) -> None:
        """Findings for the ranks that have not come out of a stage, or else for the first that failed in it.

        Those that fail after it do so because it is not there.
        """
        assert self.cluster is not None
        blamed = {
            rank: "has not answered: it is dead, stopped or cut off" for rank, t in enumerate(all_told) if t is None
        }
        failed = [rank for rank, told in enumerate(all_told) if told is not None and told["error"]]
        if failed and not blamed:
            first = min(failed, key=lambda rank: all_told[rank]["order"])
            others = f" ({len(failed) - 1} others failed after it)" if len(failed) > 1 else ""
            blamed = {first: f"failed: {all_told[first]['error']}{others}"}
        stage, _, _ = topic.partition("/")
        cure = "Look at the output and the network of this host; leave it out if it stays so"
        for rank, what in blamed.items():
            host = self.cluster.name(rank)
            self.findings.append(Finding(stage, (host,), f"rank {rank} on host {host} {what}", cure))

    # -- who is here

    def facts(self) -> None:
        """Who is here, and what differs.

        Raises:
            RuntimeError: a rank has met the others and then said nothing; on every rank.
        """
        self.board.say("facts", self._my_facts())
        if self.first:
            facts = self.board.collect("facts", 2 * self.timeout)
            missing = [str(rank) for rank, said in enumerate(facts) if said is None]
            if missing:
                text = f"rank {', '.join(missing)} has met the others and has said nothing since: is it stopped?"
                self.board.decide("hosts", {"error": text})
            else:
                self.cluster = Cluster.of(facts)
                self.report["ranks"] = facts
                self.findings += doctor_findings.differences(self.cluster)
                self.findings += doctor_findings.limits(self.cluster, self.thresholds)
                self.board.decide("hosts", {"hosts": self.cluster.hosts})
        decided = self.board.decided("hosts", 2 * self.timeout)
        if "error" in decided:
            raise RuntimeError(decided["error"])
        self.hosts = decided["hosts"]

    def _my_facts(self) -> dict[str, Any]:
        found, device = host_facts.facts(), self.world.device
        return {
            **found,
            "rank": self.world.rank,
            "host_id": network.host_id(),
            "pid": os.getpid(),
            "launcher": host_facts.launcher(),
            "device": str(device),
            "backend": self.world.backend,
            "gpu": found["gpus"][device.index or 0]["name"] if device.type == "cuda" else None,
            "interface": host_facts.interface(os.environ.get(network.GLOO, "").split(",")[0] or "lo"),
        }

    # -- ports

    def ports(self) -> bool:
        """Each host opens some of the ports that the kernel gives, and other hosts try them."""
        mine = next(index for index, ranks in enumerate(self.hosts) if self.world.rank in ranks)
        opens = self.world.rank == self.hosts[mine][0]
        doors: list[network.Door] = []

        def work() -> list[dict[str, Any]]:
            if not opens:
                return []
            address, _ = network.gloo_address(os.environ, os.environ.get("MASTER_ADDR", "127.0.0.1"))
            doors.extend(network.Door(address) for _ in range(DOORS))
            listed = [(address, door.port, door.token) for door in doors]
            self.board.say("doors", {"open": listed, "range": host_facts.ports()})
            return self._knock(mine)

        told, going = self._together("ports", work)
        for door in doors:
            door.close()
        if self.first:
            assert self.cluster is not None
            closed = [{"from": rank, **entry} for rank, entries in enumerate(told) for entry in entries or ()]
            self.findings += doctor_findings.ports(self.cluster, closed)
        return going

    def _knock(self, mine: int) -> list[dict[str, Any]]:
        """At the doors of the next hosts, one host after the other."""
        found = []
        for distance in range(1, min(len(self.hosts), PARTNERS)):
            target = self.hosts[(mine + distance) % len(self.hosts)][0]
            offered = self.board.told_by("doors", target)
            with ThreadPoolExecutor(DOORS) as threads:
                said = list(threads.map(lambda door: (door[0], door[1], network.knock(*door)), offered["open"]))
            closed = [f"{address} port {port}: {text}" for address, port, text in said if text]
            if closed:
                found.append({"to": target, "closed": closed, "tried": len(said), "range": offered["range"]})
        return found

    # -- values and clocks

    def values(self) -> bool:
        """Collectives whose results are known, in every dtype."""
        world = self.world
        told, going = self._together(
            "values", lambda: doctor_wire.check_values(world.device, world.rank, world.world_size)
        )
        if self.first:
            assert self.cluster is not None
            wrong = [{"rank": rank, **entry} for rank, entries in enumerate(told) for entry in entries or ()]
            dtypes = [str(dtype).removeprefix("torch.") for dtype in doctor_wire.DTYPES]
            self.report["values"] = {"operations": doctor_wire.OPERATIONS, "dtypes": dtypes, "wrong": wrong}
            self.findings += doctor_findings.values(self.cluster, wrong)
        return going

    def clocks(self) -> bool:
        """Rank 0 asks the other ends, one after the other."""
        ends = self._ends()[1:]
        told, going = self._together("clocks", lambda: self._ask_clocks(ends))
        if self.first:
            assert self.cluster is not None
            offsets = {said["rank"]: said for said in told[0] or ()}
            self.report["clocks"] = list(offsets.values())
            self.findings += doctor_findings.clocks(self.cluster, offsets, self.thresholds)
        return going

    def _ask_clocks(self, ends: Sequence[int]) -> list[dict[str, float]]:
        wire = self.wire  # made by all ranks, also by those that have nothing to say
        if self.first:
            return [{"rank": end, **wire.ask_clock(end)} for end in ends]
        if self.world.rank in ends:
            wire.serve(0)
        return []

    @property
    def wire(self) -> doctor_wire.Wire:
        """Made at its first use, inside a stage: making its group is a collective."""
        if self._wire is None:
            words = control_group(purpose="doctor", timeout=timedelta(seconds=PATIENCE * self.timeout))
            self._wire = doctor_wire.Wire(self.world.device, words, self.most_bytes)
        return self._wire

    # -- links

    def _ends(self) -> list[int]:
        """The ranks whose links make the matrix."""
        if self.every_rank or len(self.hosts) == 1:
            return list(range(self.world.world_size))
        return [ranks[0] for ranks in self.hosts]

    def _judged(self) -> bool:
        """On one host without GPUs links are copies in memory, at whatever speed other processes leave."""
        return len(self.hosts) > 1 or self.world.device.type == "cuda"

    def links(self) -> bool:
        """Pairs of ends, those that look slow once more, and then pairs inside each host."""
        ends, rank = self._ends(), self.world.rank
        pairs = list(doctor_wire.pairs_of(ends, PARTNERS, rank))
        told, going = self._together("links", lambda: self._measure(pairs))
        measured = merged(told)
        for turn in range(AGAIN if self._judged() else 0):
            if not going:
                break
            if self.first:
                again = doctor_findings.to_measure_again(self._speeds(measured), self.thresholds)
                self.board.decide(f"again/{turn}", again)
            mine = [(a, b) for a, b in self.board.decided(f"again/{turn}") if rank in (a, b)]
            told, going = self._together(f"links/{turn}", partial(self._measure, mine))
            measured = merged([*told, [{"pair": pair, **found} for pair, found in measured.items()]])
        inside: Measured = {}
        if going and len(ends) < self.world.world_size:
            own = next(ranks for ranks in self.hosts if rank in ranks)
            inner = list(doctor_wire.pairs_of(own, PARTNERS, rank))
            told, going = self._together("links/inside", lambda: self._measure(inner))
            inside = merged(told)
        if self.first:
            self._judge_links(ends, measured, inside)
            if going and self.run is not None:
                ways = slowest(measured | inside, self._host_of())
                self.report["step"] = doctor_forecast.step(self.run, [len(ranks) for ranks in self.hosts], ways)
        return going

    def _host_of(self) -> dict[int, int]:
        """By rank, the number of its host."""
        return {rank: index for index, ranks in enumerate(self.hosts) for rank in ranks}

    def _speeds(self, measured: Measured) -> dict[tuple[int, int], float]:
        """Those of links that can be compared with each other: between hosts, where there are several."""
        host_of, several = self._host_of(), len(self.hosts) > 1
        return {(a, b): speed for (a, b), speed in speeds(measured).items() if not several or host_of[a] != host_of[b]}

    def _measure(self, pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        found = []
        for first, second in pairs:
            if self.world.rank == first:
                found.append({"pair": (first, second), **self.wire.ask(second)})
            else:
                self.wire.serve(first)
        return found

    def _judge_links(self, ends: Sequence[int], measured: Measured, inside: Measured) -> None:
        assert self.cluster is not None
        compared = self._speeds(measured)
        found = doctor_findings.slow_links(self.cluster, compared, self.thresholds, judged=self._judged())
        latencies = {pair: said["latency"] for pair, said in measured.items()}
        self.findings += [*found, *doctor_findings.late_links(self.cluster, latencies, self.thresholds)]
        links = [{"first": a, "second": b, **said} for (a, b), said in (measured | inside).items()]
        self.report["links"] = {"ends": list(ends), "measured": links}


def merged(told: Sequence[Sequence[Mapping[str, Any]] | None]) -> Measured:
    """Measurements by pair. Of several of one pair the best of each figure: noise only ever slows one down."""
    found: Measured = {}
    for said in (said for measurements in told for said in measurements or ()):
        best = found.setdefault((said["pair"][0], said["pair"][1]), {})
        for name, better in (("latency", min), ("to", max), ("from", max), ("both", max)):
            best[name] = better(best.get(name, said[name]), said[name])
    return found


def speeds(measured: Measured) -> dict[tuple[int, int], float]:
    """Bytes per second by sender and receiver."""
    found = {}
    for (first, second), said in measured.items():
        found[first, second], found[second, first] = said["to"], said["from"]
    return found


def slowest(measured: Measured, host_of: Mapping[int, int]) -> doctor_forecast.Ways:
    """The slowest link inside a host, and between hosts."""
    inner = [said for (a, b), said in measured.items() if host_of[a] == host_of[b]]
    outer = [said for (a, b), said in measured.items() if host_of[a] != host_of[b]]

    def worst(links: list[dict[str, float]]) -> tuple[float | None, float | None]:
        if not links:
            return None, None
        return min(said["both"] for said in links), max(said["latency"] for said in links)

    return doctor_forecast.Ways(*worst(inner), *worst(outer))


def store_of(world: World) -> Any:
    """Where the board is: the process group's store, or one in memory for a rank alone."""
    return HashStore() if world.backend is None else dist.distributed_c10d._get_default_store()
