"""What is wrong with a cluster, judged from what its ranks have said and measured.

Owns:      every threshold's meaning, and the words of each finding: which host, what was expected, what was found, the cure.
Takes:     plain data: each rank's facts, the links between ends, wrong elements, closed ports.
Gives:     a list of `Finding`.
Invariant: pure: the same data gives the same findings; a finding always names a host and a cure.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from . import host_facts

# Another value of these can end in wrong numbers, a hang or a crash; of the other versions it is worth knowing.
_SERIOUS = ("shardmp", "shardmp source", "torch", "cuda", "nccl")
_LOCKED = 2**30  # bytes: what NCCL registers with an InfiniBand card
# gloo keeps a connection to each rank for each of its groups (default, control, checkpoints), besides files and libraries.
_FILES, _FILES_PER_RANK = 512, 4


@dataclass(frozen=True)
class Thresholds:
    """From where on a figure is a finding.

    Attributes:
        clock: seconds between a host's clock and rank 0's.
        shared_memory: bytes that must be free in /dev/shm.
        slow: a host or a link below this part of what the median host reaches is slow.
        bandwidth: bytes per second that every link must reach; None asks for none.
        latency: seconds that no link may exceed; None asks for none.
    """

    clock: float = 1.0
    shared_memory: int = 2**30
    slow: float = 0.5
    bandwidth: float | None = None
    latency: float | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `severity` is "error" or "warning"; `hosts` are those to look at."""

    check: str
    hosts: tuple[str, ...]
    text: str
    cure: str
    severity: str = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.text}. {self.cure}"


@dataclass(frozen=True)
class Cluster:
    """Who is here: `facts` by rank, `hosts` as the ranks of each, in the order of their lowest ranks."""

    facts: Sequence[Mapping[str, Any]]
    hosts: Sequence[Sequence[int]]

    @staticmethod
    def of(facts: Sequence[Mapping[str, Any]]) -> Cluster:
        together: dict[str, list[int]] = {}
        for rank, said in enumerate(facts):
            together.setdefault(said["host_id"], []).append(rank)
        return Cluster(facts, list(together.values()))

    def name(self, rank: int) -> str:
        """The host of a rank, told from another one of the same name."""
        name = str(self.facts[rank]["host"])
        mine = next(ranks for ranks in self.hosts if rank in ranks)
        same = [ranks for ranks in self.hosts if self.facts[ranks[0]]["host"] == name]
        return name if len(same) == 1 else f"{name} (rank {mine[0]})"

    @property
    def firsts(self) -> list[int]:
        """The lowest rank of each host."""
        return [ranks[0] for ranks in self.hosts]


# -- what each host says of itself


def differences(cluster: Cluster) -> list[Finding]:
    """Versions, variables, GPUs and cards that are not the same everywhere."""
    versions = [said["versions"] for said in cluster.facts]
    cure = "Install the same everywhere: one image, or one environment on a shared file system"
    found = []
    for name in dict.fromkeys(name for said in versions for name in said):
        if name == "shardmp source" and len({said["shardmp"] for said in versions}) > 1:
            continue  # another version has other files
        severity = "error" if name in _SERIOUS else "warning"
        found += _difference(cluster, "versions", name, [said.get(name) for said in versions], cure, severity)
    variables = [host_facts.alike(said["environment"]) for said in cluster.facts]
    for name in dict.fromkeys(name for said in variables for name in said):
        cure = f"Set {name} to the same value on all hosts, or unset it on all"
        found += _difference(cluster, "environment", name, [said.get(name) for said in variables], cure, "warning")
    cards = [said["interface"] for said in cluster.facts]
    cure = "Give the cards of one network the same MTU: packets that are too long for one of them vanish"
    found += _difference(cluster, "interfaces", "the interface's MTU", [card["mtu"] for card in cards], cure, "error")
    cure = "Look at the slower card's cable, port and driver (`ethtool`)"
    speeds = [card["speed"] for card in cards]
    found += _difference(cluster, "interfaces", "the interface's speed in Mbit/s", speeds, cure, "warning")
    cure = "Train on GPUs of one kind: the slowest sets the pace, and their kernels round differently"
    found += _difference(cluster, "GPUs", "the GPU", [said["gpu"] for said in cluster.facts], cure, "warning")
    return found


def _difference(
    cluster: Cluster, check: str, name: str, values: Sequence[Hashable], cure: str, severity: str
) -> list[Finding]:
    """One finding where the ranks' values differ: the hosts of the smaller groups are the ones to look at."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1:
        return []
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    said = [f"{'not set' if value is None else value} on {_places(cluster, ranks)}" for value, ranks in ordered]
    others = [rank for _, ranks in ordered[1:] for rank in ranks]
    return [Finding(check, _hosts(cluster, others), f"{name} is {', '.join(said)}", cure, severity)]


def _hosts(cluster: Cluster, ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cluster.name(rank) for rank in ranks))


def _places(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Ranks as an error names them: by their hosts, and by number where a host's ranks are not all among them."""
    names = []
    for host in cluster.hosts:
        mine = [rank for rank in host if rank in ranks]
        if mine:
            numbers = "" if len(mine) == len(host) else f" (rank {', '.join(map(str, mine))})"
            names.append(cluster.name(host[0]) + numbers)
    shown = names[:8]
    return ("host " if len(names) == 1 else "hosts ") + ", ".join(shown) + (" and others" if len(names) > 8 else "")


def limits(cluster: Cluster, thresholds: Thresholds) -> list[Finding]:
    """What a host has too little of."""
    found = []
    for ranks in cluster.hosts:
        said, host = cluster.facts[ranks[0]], cluster.name(ranks[0])
        shared, need = said["shared_memory"], thresholds.shared_memory
        if shared is not None and shared["free"] < need:
            found.append(
                Finding(
                    "shared memory",
                    (host,),
                    f"/dev/shm of host {host} has {decimal(shared['size'])}, {decimal(shared['free'])} of them free; "
                    f"expected {decimal(need)} (--min-shm) for NCCL and for data loaders' workers",
                    "Start the container with --shm-size 1g or --ipc host (Compose: shm_size, Kubernetes: an emptyDir with "
                    "medium Memory at /dev/shm), or remove what dead processes have left there",
                )
            )
        found += _locked_memory(said, host)
        files, wanted = said["limits"]["open files"], _FILES + _FILES_PER_RANK * len(cluster.facts)
        if files is not None and files < wanted:
            found.append(
                Finding(
                    "open files",
                    (host,),
                    f"a rank on host {host} may open {files} files; {len(cluster.facts)} ranks need {wanted}",
                    f"`ulimit -n {wanted}` before the launcher (containers: --ulimit nofile={wanted}:{wanted})",
                )
            )
        threads = sum(cluster.facts[rank]["cpu"]["threads"] for rank in ranks)
        usable = max(cluster.facts[rank]["cpu"]["cores"] for rank in ranks)
        if len(ranks) > 1 and threads > usable:
            found.append(
                Finding(
                    "threads",
                    (host,),
                    f"{len(ranks)} ranks on host {host} run {threads} threads on {usable} cores",
                    f"Set OMP_NUM_THREADS={max(1, usable // len(ranks))}",
                    "warning",
                )
            )
    return found


def _locked_memory(said: Mapping[str, Any], host: str) -> list[Finding]:
    locked = said["limits"]["locked memory"]
    if locked is None or locked >= _LOCKED or not (said["infiniband"] or said["gpus"]):
        return []
    return [
        Finding(
            "locked memory",
            (host,),
            f"a rank on host {host} may lock {decimal(locked)} of memory"
            + (": its InfiniBand card cannot register NCCL's buffers" if said["infiniband"] else ""),
            "`ulimit -l unlimited` before the launcher (containers: --ulimit memlock=-1:-1; Slurm: PropagateResourceLimits "
            "and LimitMEMLOCK=infinity of slurmd)",
            "error" if said["infiniband"] else "warning",
        )
    ]


# -- what was measured


def clocks(cluster: Cluster, offsets: Mapping[int, Mapping[str, float]], thresholds: Thresholds) -> list[Finding]:
    """Hosts whose clock is far from rank 0's.

    Args:
        offsets: by rank, "clock" (seconds ahead of rank 0's) and "clock_error".
    """
    far = {r: said for r, said in offsets.items() if abs(said["clock"]) - said["clock_error"] > thresholds.clock}
    cure = "Let chrony or systemd-timesyncd set the clock of every host: logs, file times and certificates rely on it"
    if far and len(far) == len(offsets) and len(far) > 1:
        hosts, text = (cluster.name(0),), f"the clock of host {cluster.name(0)} (rank 0) differs from all others'"
        return [
            Finding(
                "clock", hosts, text + f", by {-next(iter(far.values()))['clock']:+.3g} s from the next one's", cure
            )
        ]
    return [
        Finding(
            "clock",
            (cluster.name(rank),),
            f"the clock of host {cluster.name(rank)} is {abs(said['clock']):.3g} s "
            f"{'ahead of' if said['clock'] > 0 else 'behind'} that of host {cluster.name(0)}; expected at most "
            f"{thresholds.clock:g} s (--max-skew)",
            cure,
        )
        for rank, said in far.items()
    ]


def ports(cluster: Cluster, closed: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Ports of a host that another one could not reach: a firewall between two hosts that reach each other elsewhere."""
    return [
        Finding(
            "ports",
            (cluster.name(entry["from"]), cluster.name(entry["to"])),
            f"host {cluster.name(entry['from'])} reaches host {cluster.name(entry['to'])} at some ports and not at others: "
            + "; ".join(entry["closed"][:3])
            + f" ({len(entry['closed'])} of {entry['tried']} tried)",
            "Let the firewalls of both hosts pass connections between them at "
            + (f"ports {entry['range'][0]} to {entry['range'][1]}" if entry["range"] else "every port"),
        )
        for entry in closed
    ]


def values(cluster: Cluster, wrong: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Collectives with wrong results."""
    found = []
    for entry in wrong:
        here, source = cluster.name(entry["rank"]), entry["source"]
        hosts = [here] if source is None else [here, cluster.name(source)]
        origin = "" if source is None else f" in what comes from rank {source} on host {cluster.name(source)}"
        found.append(
            Finding(
                "values",
                tuple(dict.fromkeys(hosts)),
                f"{entry['operation']} in {entry['dtype']} is wrong on rank {entry['rank']}, host {here}{origin}: element "
                f"{entry['element']} is {entry['got']:g}, expected {entry['expected']:g}",
                "Leave the host out, and test its memory, its GPU (dcgmi diag -r 3) and its network card; on GPUs try "
                "NCCL_P2P_DISABLE=1",
            )
        )
    return found


# -- links

Links = Mapping[tuple[int, int], float]
"""Bytes per second (or seconds) from one rank to another."""


def slow_links(cluster: Cluster, speeds: Links, thresholds: Thresholds, *, judged: bool = True) -> list[Finding]:
    """Hosts and links that are much slower than the others, and those below what was asked for.

    Args:
        speeds: bytes per second, by sending and receiving rank.
        judged: compare them with each other; else only with `thresholds.bandwidth`.
    """
    found: list[Finding] = []
    told: set[tuple[int, int]] = set()
    if judged and speeds:
        usual = _usual(speeds)
        for end in sorted({end for pair in speeds for end in pair}):
            for index, verb, side in ((0, "sends", "outgoing"), (1, "receives", "incoming")):
                mine = {pair: speed for pair, speed in speeds.items() if pair[index] == end}
                if len(mine) > 1 and max(mine.values()) < thresholds.slow * usual:
                    told |= mine.keys()
                    found.append(_slow_host(cluster, end, verb, side, max(mine.values()), usual))
        for pair, speed in speeds.items():
            if pair not in told and speed < thresholds.slow * usual:
                told.add(pair)
                found.append(_slow_pair(cluster, pair, speed, f"the usual here is {said(usual)}"))
    if thresholds.bandwidth is not None:
        for pair, speed in speeds.items():
            if pair not in told and speed < thresholds.bandwidth:
                wish = f"expected at least {said(thresholds.bandwidth)} (--min-mb-per-s)"
                found.append(_slow_pair(cluster, pair, speed, wish))
    return found


def _usual(speeds: Links) -> float:
    """What the median end reaches when it sends to its best partner: a capped minority does not move it."""
    best: dict[int, float] = {}
    for (sender, _), speed in speeds.items():
        best[sender] = max(best.get(sender, 0.0), speed)
    return statistics.median_high(best.values())


def said(speed: float) -> str:
    """A bandwidth in words."""
    return f"{speed / 1e6:,.3g} MB/s" if speed < 1e9 else f"{speed / 1e9:,.3g} GB/s"


_LINK_CURE = (
    "Look at the cable, the switch port, the card's negotiated speed (`ethtool`) and traffic shaping (`tc qdisc`)"
)


def _slow_host(cluster: Cluster, end: int, verb: str, side: str, best: float, usual: float) -> Finding:
    host = cluster.name(end)
    text = f"host {host} (rank {end}) {verb} at {said(best)} at best; the usual here is {said(usual)}"
    return Finding("bandwidth", (host,), text, f"{_LINK_CURE} of host {host}, {side} side")


def _slow_pair(cluster: Cluster, pair: tuple[int, int], speed: float, beside: str) -> Finding:
    sender, receiver = (cluster.name(end) for end in pair)
    text = f"host {sender} (rank {pair[0]}) sends to host {receiver} (rank {pair[1]}) at {said(speed)}; {beside}"
    cure = f"{_LINK_CURE} of host {sender}, outgoing side, and of host {receiver}, incoming side"
    return Finding("bandwidth", tuple(dict.fromkeys((sender, receiver))), text, cure)


def late_links(cluster: Cluster, latencies: Links, thresholds: Thresholds) -> list[Finding]:
    """Links that take longer than was asked for."""
    found = []
    for (first, second), seconds in latencies.items():
        if thresholds.latency is not None and seconds > thresholds.latency and first < second:
            hosts = tuple(dict.fromkeys((cluster.name(first), cluster.name(second))))
            text = f"between {' and '.join(f'host {host}' for host in hosts)} a message takes {1e3 * seconds:.3g} ms"
            text += f"; expected at most {1e3 * thresholds.latency:g} ms (--max-latency-ms)"
            found.append(Finding("latency", hosts, text, "Look for a detour, a busy host or power saving of the card"))
    return found


def to_measure_again(speeds: Links, thresholds: Thresholds) -> list[tuple[int, int]]:
    """Pairs that look slow: before a host is blamed they are measured once more, in case something else was running."""
    if not speeds:
        return []
    bound = max(thresholds.slow * _usual(speeds), thresholds.bandwidth or 0.0)
    return sorted({(min(pair), max(pair)) for pair, speed in speeds.items() if speed < bound})
