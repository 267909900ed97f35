"""Before the process group: the store, and who has arrived.

Owns:      the TCP store's opening and the arrival barrier; every text that says who is missing.
Takes:     a `Launched`, and how long to wait.
Gives:     a `Met`: the store for the process group (with a prefix of its own) and the hosts of the job.
Invariant: whatever is wrong, each rank that is there raises the same error, at the deadline or before.

[Note: the epoch] A store may outlive an attempt: torchrun's agent keeps its own across restarts, with the keys of dead
ranks in it, and TORCHELASTIC_RESTART_COUNT differs between nodes after a rejoin. So rank 0 writes a random number, the
epoch, under which everything else is written, and only the rank 0 that drew it opens the gate. A rank that finds a gate
already open, or its own place taken, in the agent's store has read an old epoch, and waits for the next one. In a store
that rank 0 itself holds, a taken place is a second process with this rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from . import network
from .launcher import Launched

HANDSHAKE = 10.0  # seconds in which what answers at the port must show that it is this job's store
LINGER = 3.0  # seconds for which a failing rank 0 keeps the store open for the others to read why
_LISTED = 16  # ranks that an error lists

_CONSTRUCTION = timedelta(seconds=60)  # the store's own time limit until the process group sets its
_EPOCH = "shardmp/epoch"
_generation = 0  # how often this process has met others: a later meeting must not read an earlier one's keys


@dataclass(frozen=True)
class Arrival:
    """What a rank says of itself."""

    rank: int
    world_size: int
    host: str
    host_id: str
    pid: int
    launcher: str
    device: str  # names a GPU among all of its host; empty on the CPU
    reached: str  # the address at which it found the store
    mark: str  # random: containers may share name and number

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid}, started by {self.launcher})"


@dataclass(frozen=True)
class Host:
    """A host of the job and its lowest rank."""

    name: str
    id: str
    first_rank: int


@dataclass(frozen=True)
class Met:
    """All ranks are there. `master` is the address at which other hosts reach rank 0's."""

    store: PrefixStore
    hosts: Sequence[Host]
    master: str


@dataclass(frozen=True)
class Patience:
    """How long this rank waits for the others, and since when."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return max(0.0, self.start + self.seconds - time.monotonic())


class _Lost(Exception):
    """The store has gone, or belongs to an earlier meeting: connect again."""


# -- the store


def listener(host: str, port: int) -> int | None:
    """The descriptor of a socket that listens for `host` alone; None where that is no loopback name, or does not work.

    Left to itself torch's store listens on every address of the host, and anybody who reaches it can read and write it.
    """
    name = host.strip("[]")
    found = ["127.0.0.1", "::1"] if name == "localhost" else [name] if network.is_loopback(name) else []
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # A port in use may be that of this process's own store, which torch then shares; else torch says what is wrong.
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=1024).detach()
    return None


def address_of(descriptor: int) -> tuple[str, int]:
    """Address and port at which a socket listens; it stays open."""
    with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as copy:
        address, port, *_ = copy.getsockname()
    return address, port


def serve(port: int, host: str = "") -> TCPStore:
    """The store, held by this process at `port` (0: any that is free), on loopback alone where `host` is loopback.

    Raises:
        RuntimeError: the port is in use, or the loopback interface is down.
    """
    try:
        # The own connection goes over loopback, so the own host's name need not resolve.
        own, bound, options = "127.0.0.1", port, {}
        descriptor = listener(host, port)
        if descriptor is not None:
            (own, bound), options = address_of(descriptor), {"master_listen_fd": descriptor}
        store = _make_store(60.0, own, bound, None, True, _CONSTRUCTION, False, multi_tenant=True, **options)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank 0 cannot open the store at port {port} of host {socket.gethostname()}: "
            f"{'in use by another process' if 'EADDRINUSE' in str(error) else error}. Set another port in MASTER_PORT, the "
            "same on all ranks, or start one host with `torchrun --standalone`, which takes a free one"
        ) from error
    if store is None:
        raise RuntimeError(f"rank 0 cannot connect to its own store at port {port} over 127.0.0.1: is the loopback up?")
    return store


def join(launched: Launched, patience: Patience, agent: bool) -> tuple[TCPStore, str]:
    """A connection to the store that rank 0 (or torchrun's agent) holds, and the address that answered.

    Args:
        patience: rank 0 may start later than this rank, within this time.
        agent: torchrun's agent holds the store.

    Raises:
        ValueError: MASTER_ADDR does not resolve, or leads to this host while rank 0 is on another.
        RuntimeError: nothing answers, or something else does.
    """
    assert launched.master is not None
    name, port = launched.master
    contact, pause = 0.0, 0.1
    while True:
        addresses = _addresses(launched, name)
        address, said = network.connect(addresses, port)
        if address is not None:
            contact = contact or time.monotonic()
            with contextlib.suppress(RuntimeError):
                store = _make_store(0.6 * HANDSHAKE, address, port, None, False, _CONSTRUCTION, False)
                if store is not None:
                    return store, address
            if time.monotonic() > contact + HANDSHAKE / 2:
                raise RuntimeError(f"what answers at {address} is not rank 0's store. {_port_taken(launched)}")
        elif launched.rank0_elsewhere and all(network.is_own(address) for address in addresses):
            raise ValueError(
                f"MASTER_ADDR={name} is {', '.join(addresses)}, which is host {socket.gethostname()} itself "
                f"({', '.join(network.interface_of(a) or 'loopback' for a in addresses)}), but rank 0 is on another host and "
                f"this is rank {launched.rank}: set MASTER_ADDR to an address of rank 0's host that all hosts can reach"
            )
        if not patience.left:
            holder = "torchrun's agent" if agent else "rank 0"
            raise RuntimeError(
                f"rank {launched.rank} on host {socket.gethostname()} waited {patience.seconds:g} s for {holder}"
                f"{launched.whereabouts(0)}, which has not arrived: MASTER_ADDR={name}, {said or f'port {port}'}. Is it "
                "started, with the same MASTER_ADDR and MASTER_PORT, and does a firewall let this port through? "
                "init(arrival_timeout=...) waits longer"
            )
        time.sleep(min(pause, patience.left))
        pause = min(1.5 * pause, 1.0)


def _make_store(seconds: float, *arguments: Any, **options: Any) -> TCPStore | None:
    """torch's store, made within `seconds`; None if that takes longer. Raises what its constructor raises.

    torch waits without end for a server that says nothing. And it asks the name server for the name of each address,
    only to print it, which takes ten seconds where there is none; a new thread reads RES_OPTIONS, and gives up sooner.
    """
    made: list[TCPStore] = []
    refused: list[RuntimeError] = []

    def make() -> None:
        try:
            made.append(TCPStore(*arguments, **options))
        except RuntimeError as error:
            refused.append(error)

    ours = "RES_OPTIONS" not in os.environ
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(seconds)
    if ours:
        os.environ.pop("RES_OPTIONS", None)
    if refused:
        raise refused[0]
    return made[0] if made else None


def _port_taken(launched: Launched) -> str:
    assert launched.master is not None
    return (
        f"Another process or another job uses port {launched.master[1]}: set another one in MASTER_PORT, the same on all "
        "ranks"
    )


def _addresses(launched: Launched, name: str) -> list[str]:
    limit = time.monotonic() + network.RESOLVE_LIMIT
    while (left := limit - time.monotonic()) > 0:
        addresses = network.resolve(name, left)
        if addresses:
            return addresses
        if launched.local_world_size == launched.world_size:
            return ["127.0.0.1"]
        time.sleep(0.5)  # a pod's name appears in the cluster's DNS a moment after the pod
    raise ValueError(
        f"MASTER_ADDR={name} does not resolve on host {socket.gethostname()} (rank {launched.rank}): set MASTER_ADDR to the IP "
        "address of rank 0's host, or to a name that every host knows (/etc/hosts, DNS)"
    )


# -- the arrival


def next_generation() -> int:
    """The number of this meeting in this process; all ranks must come to as many."""
    global _generation
    _generation += 1
    return _generation


def arrive(
    connect: Callable[[], tuple[TCPStore, str]],
    launched: Launched,
    device: str,
    patience: Patience,
    agent: bool,
    generation: int,
) -> Met:
    """Wait until all ranks are there.

    Args:
        connect: gives the store and the address that answered; called again when the store is lost.
        device: names this rank's GPU among all of its host; empty on the CPU.
        patience: how long all may take.
        agent: the store is that of torchrun's agent, and may hold the keys of dead ranks.
        generation: this process's number for this meeting, from `next_generation`.

    Raises:
        RuntimeError: ranks are missing at the deadline, two processes have one rank, the world sizes differ, two ranks
            use one GPU. The same text on every rank that is there.
    """
    mark = secrets.token_hex(4)
    while True:
        try:
            store, reached = connect()
            own = Arrival(
                launched.rank,
                launched.world_size,
                socket.gethostname(),
                network.host_id(),
                os.getpid(),
                launched.launcher,
                device,
                reached,
                mark,
            )
            return _Gate(store, own, launched, generation, patience, agent).pass_through()
        except _Lost:
            time.sleep(0.1)


class _Gate:
    """One rank's way through the arrival: [Note: the epoch]."""

    def __init__(
        self, store: TCPStore, own: Arrival, launched: Launched, generation: int, patience: Patience, agent: bool
    ) -> None:
        self.store, self.own, self.launched = store, own, launched
        self.generation, self.patience, self.agent = generation, patience, agent
        self.start = time.monotonic()
        self.over: set[str] = set()  # epochs that are not this meeting's

    def pass_through(self) -> Met:
        if self.own.rank == 0:
            said = {"nonce": secrets.token_hex(8), "job": self.launched.job, "generation": self.generation}
            self.store.set(_EPOCH, json.dumps({**said, "arrival": asdict(self.own)}))
        while True:
            epoch = self._epoch()
            place = PrefixStore(f"shardmp/{epoch['nonce']}", self.store)
            if not self._enter(epoch, place):
                self.over.add(epoch["nonce"])
                continue
            gate = self._wait(epoch, place)
            if gate is None:
                self.over.add(epoch["nonce"])
                continue
            if "error" in gate:
                self._fail(place, gate["error"])
            return Met(PrefixStore("group", place), [Host(*host) for host in gate["hosts"]], gate["master"])

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except RuntimeError as error:
            if self.own.rank == 0 or not self.patience.left:
                raise RuntimeError(
                    f"the store of rank 0{self.launched.whereabouts(0)} was lost while the ranks arrived: is rank 0 dead? "
                    f"({str(error)[:200]})"
                ) from error
            raise _Lost from error

    def _epoch(self) -> dict[str, Any]:
        """The newest epoch that may be this meeting's."""
        pause, stale = 0.01, False
        while True:
            if self._ask(self.store.check, [_EPOCH]):
                epoch: dict[str, Any] = json.loads(self._ask(self.store.get, _EPOCH))
                if epoch["nonce"] not in self.over and epoch["generation"] == self.generation:
                    return epoch
                stale = True
            if stale and not self.agent:
                raise _Lost  # a store of an earlier meeting in these processes, about to go
            if not self.agent and time.monotonic() > self.start + HANDSHAKE:
                raise RuntimeError(f"a store answers, but not that of this job. {_port_taken(self.launched)}")
            if not self.patience.left:
                raise RuntimeError(
                    f"rank 0{self.launched.whereabouts(0)} has not arrived within {self.patience.seconds:g} s; this "
                    f"is {self.own}. init(arrival_timeout=...) waits longer"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def _enter(self, epoch: dict[str, Any], place: PrefixStore) -> bool:
        """Write down that this rank is there; False if the epoch is an old one."""
        first = Arrival(**epoch["arrival"])
        open_already = self._ask(place.check, ["gate"])
        if self.agent and (open_already or first.world_size != self.own.world_size):
            return False
        if epoch["job"] != self.launched.job:
            raise RuntimeError(
                f"the store is that of {epoch['job'] or 'another job'}, rank 0 is {first}. {_port_taken(self.launched)}"
            )
        if first.world_size != self.own.world_size:
            self._refuse(
                place, f"{self.own} expects {self.own.world_size} ranks, but {first} expects {first.world_size}: "
            )
        text = json.dumps(asdict(self.own))
        there = self._ask(place.compare_set, f"at/{self.own.rank}", "", text).decode()
        if there != text:
            if self.agent:
                return False
            self._refuse(
                place, f"two processes are rank {self.own.rank}: {Arrival(**json.loads(there))} and {self.own}: "
            )
        if self._ask(place.add, "count", 1) == self.own.world_size:
            self._ask(place.set, "full", "1")
        return True

    def _refuse(self, place: PrefixStore, what: str) -> None:
        """End the meeting for all; alone, if it is over already."""
        text = f"{what}RANK and WORLD_SIZE do not fit together, or two jobs use one port. {_port_taken(self.launched)}"
        self._ask(place.compare_set, "gate", "", json.dumps({"error": text}))
        raise RuntimeError(text)

    def _wait(self, epoch: dict[str, Any], place: PrefixStore) -> dict[str, Any] | None:
        """What the gate says when it opens; None if this was an old epoch."""
        pause = 0.005
        while not self._ask(place.check, ["gate"]):
            if self.own.rank == 0 and self._ask(place.check, ["full"]):
                self._ask(place.compare_set, "gate", "", json.dumps(self._verdict(place)))
                continue
            if not self.patience.left:
                self._ask(place.compare_set, "gate", "", json.dumps({"error": self._who_is_missing(place)}))
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)
            if json.loads(self._ask(self.store.get, _EPOCH))["nonce"] != epoch["nonce"]:
                return None
        gate: dict[str, Any] = json.loads(self._ask(place.get, "gate"))
        return gate

    def _verdict(self, place: PrefixStore) -> dict[str, Any]:
        """Rank 0's, when all are there: the hosts, in the order of their lowest ranks, and the address of its own."""
        keys = [f"at/{rank}" for rank in range(self.own.world_size)]
        arrivals = [Arrival(**json.loads(text)) for text in self._ask(place.multi_get, keys)]
        hosts: dict[str, Host] = {}
        devices: dict[tuple[str, str], Arrival] = {}
        for arrival in arrivals:
            hosts.setdefault(arrival.host_id, Host(arrival.host, arrival.host_id, arrival.rank))
            other = devices.setdefault((arrival.host_id, arrival.device), arrival)
            if arrival.device and other is not arrival:
                return {
                    "error": f"{other} and {arrival} use the same GPU {arrival.device}: set LOCAL_RANK (0, 1, ... on each "
                    "host), or start fewer processes"
                }
        seen = [a.reached for a in arrivals if a.host_id != self.own.host_id and not network.is_loopback(a.reached)]
        return {
            "hosts": [(host.name, host.id, host.first_rank) for host in hosts.values()],
            "master": seen[0] if seen else "127.0.0.1",
        }

    def _who_is_missing(self, place: PrefixStore) -> str:
        missing, there = [], []
        for rank in range(self.own.world_size):
            key = f"at/{rank}"
            if self._ask(place.check, [key]):
                there.append(str(Arrival(**json.loads(self._ask(place.get, key)))))
            else:
                missing.append(f"rank {rank}{self.launched.whereabouts(rank)}")
        return (
            f"{len(missing)} of {self.own.world_size} ranks have not arrived within {self.patience.seconds:g} s: "
            f"{_some(missing)}. Arrived: {_some(there)}. {self._way()}Look at the output of the missing ranks; "
            "init(arrival_timeout=...) waits longer"
        )

    def _way(self) -> str:
        """How this host understands MASTER_ADDR, where it is a name: the missing ranks may understand it otherwise."""
        name = self.launched.master[0] if self.launched.master else ""
        found = network.resolve(name, 1.0)
        if not name or found == [name]:
            return ""
        said = (f"{a} ({network.interface_of(a) or 'of another host'})" for a in found)
        return f"MASTER_ADDR={name} is {', '.join(said) or 'unknown'} on host {self.own.host}. "

    def _fail(self, place: PrefixStore, text: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone by now; the text is what matters
            linger(place, self.own.rank == 0 and not self.agent, place.add("count", 0))
        raise RuntimeError(text)


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more


def linger(place: PrefixStore, holds_store: bool, readers: int) -> None:
    """Count this rank among those that have read why it failed; who holds the store waits until `readers` have."""
    read = place.add("read", 1)
    deadline = time.monotonic() + LINGER
    while holds_store and read < readers and time.monotonic() < deadline:
        time.sleep(0.02)
        read = place.add("read", 0)
