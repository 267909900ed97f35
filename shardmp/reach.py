"""Whether the hosts reach each other at the addresses that gloo is about to use.

Owns:      the short connections between hosts before the process group is made.
Takes:     the hosts that have met, and the interfaces that were chosen.
Gives:     nothing, or one error on all ranks that names both hosts, their addresses and interfaces.
Invariant: ends within 15 seconds; one host alone tries nothing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import PrefixStore

from . import network
from .rendezvous import Met, linger

LIMIT = 15.0  # seconds for all of it
_DOORS = 5.0  # seconds for the others to say where they listen
_ALL = 16  # hosts up to which each tries each


@dataclass(frozen=True)
class _Door:
    """Where the first rank of a host can be reached, as gloo will be."""

    address: str
    interface: str
    port: int
    token: str


def check_hosts(met: Met, rank: int, world_size: int, environ: Mapping[str, str]) -> None:
    """Try the connections that gloo is about to make, from each host's first rank to other hosts', 2 s each.

    gloo's own mesh fails at once on the side that is refused, and waits five times the timeout on the other
    (pytorch/gloo#520). Up to 16 hosts try each other; of more, each tries the next one and that of rank 0.

    Raises:
        RuntimeError: one is not reached. The same text on every rank.
    """
    firsts = [host.first_rank for host in met.hosts]
    if len(firsts) == 1:
        return
    place, deadline, door = PrefixStore("reach", met.store), time.monotonic() + LIMIT, None
    try:
        if rank in firsts:
            address, interface = network.gloo_address(environ, met.master)
            try:
                door = network.Door(address)
                place.set(f"door/{rank}", json.dumps(asdict(_Door(address, interface, door.port, door.token))))
                problem = _knock_at_others(place, met, firsts.index(rank))
            except OSError as error:
                problem = (
                    f"host {socket.gethostname()} cannot listen at its own address {address} on {interface}: {error}"
                )
            if problem:
                place.compare_set("verdict", "", problem)
            if place.add("count", 1) == len(firsts):
                place.compare_set("verdict", "", "reached")
        while not place.check(["verdict"]):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "the hosts did not finish trying each other's addresses: is one of them stopped or dead?"
                )
            time.sleep(0.01)
        verdict = place.get("verdict").decode()
    finally:
        if door is not None:
            door.close()
    if verdict != "reached":
        linger(place, rank == 0, world_size)
        raise RuntimeError(verdict)


def _knock_at_others(place: PrefixStore, met: Met, own: int) -> str:
    """What is wrong with the way to the other hosts; empty if nothing is."""
    number = len(met.hosts)
    targets = range(number) if number <= _ALL else {(own + 1) % number, 0}
    here, doors = None, {}
    deadline = time.monotonic() + _DOORS
    for target in {*targets, own}:
        key = f"door/{met.hosts[target].first_rank}"
        while not place.check([key]):
            if place.check(["verdict"]):
                return ""  # another host has found something, which is what all will say
            if time.monotonic() > deadline:
                return (
                    f"host {met.hosts[target].name} (rank {met.hosts[target].first_rank}) has not said where it listens"
                )
            time.sleep(0.01)
        door = _Door(**json.loads(place.get(key)))
        if target == own:
            here = door
        else:
            doors[target] = door
    assert here is not None
    with ThreadPoolExecutor(max(1, len(doors))) as threads:
        said = threads.map(lambda door: network.knock(door.address, door.port, door.token), doors.values())
        wrong = [
            (met.hosts[target], door, text) for (target, door), text in zip(doors.items(), said, strict=True) if text
        ]
    if not wrong:
        return ""
    ways = "; ".join(
        f"to host {host.name} (rank {host.first_rank}, {door.address} on {door.interface or 'an unknown interface'}): {text}"
        for host, door, text in wrong[:4]
    )
    return (
        f"host {met.hosts[own].name} (rank {met.hosts[own].first_rank}, {here.address} on "
        f"{here.interface or 'an unknown interface'}) cannot connect {ways}. Set {network.GLOO} on each host to the interface "
        "of a network that all hosts share, and let firewalls pass connections between them"
    )
