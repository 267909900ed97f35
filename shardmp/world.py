"""Who am I: rank, world size, device, and the process group that joins the ranks.

Owns:      the call of `init_process_group`, the control groups, and the word that this rank leaves when it raises.
Takes:     a launcher's environment, a process group that the user has made, or nothing (one rank alone).
Gives:     a frozen `World`.
Invariant: one rank alone touches no network and needs no process group; no process is started; nothing here keeps a
           process group or a store alive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from . import mpi, network, reach, rendezvous
from .launcher import Launched, detect, local_rank_of
from .network import host_id

__all__ = ["CONTROL_TIMEOUT", "DEFAULT_TIMEOUT", "World", "control_group", "host_id", "init"]

DEFAULT_TIMEOUT = timedelta(minutes=10)
ARRIVAL_TIMEOUT = timedelta(minutes=2)
CONTROL_TIMEOUT = timedelta(seconds=30)
MOST_SECONDS = 1e6  # of a time limit: twelve days, as torch's own arithmetic ends at some hundred years


@dataclass(frozen=True)
class World:
    """This process among its peers: `device` is where its model belongs, `backend` None for one rank alone."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str | None
    host: str


def init(
    backend: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    arrival_timeout: timedelta | float = ARRIVAL_TIMEOUT,
) -> World:
    """Join the ranks that the launcher started; `shard` calls it when it has not been called.

    A process group that exists already is used as it is. Otherwise the environment says who started this process, in
    this order: torchrun; RANK and WORLD_SIZE with MASTER_ADDR and MASTER_PORT (set by hand, or by Kubeflow's
    PyTorchJob); Open MPI; MPICH and its descendants; Flux; Horovod; jsrun; a Slurm step; Kubeflow's TrainJob (PET_*).
    Without any of these, this process is one rank alone: no process group is made, and no network is touched.

    Where several ranks are started, they first wait for each other, at most `arrival_timeout`. Then the interface that
    leads to rank 0's host is chosen for gloo and NCCL (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) where the user named
    none, and hosts try whether they reach each other there, before the process group is made.

    Under mpirun, mpi4py carries rank 0's address (`pip install 'shardmp[mpi]'`), MASTER_ADDR and MASTER_PORT may be
    unset, and an exception on one rank ends all ranks. Everywhere, a rank that ends by an exception says so to its
    peers, whose errors then name it.

    Args:
        backend: "nccl" or "gloo"; by default NCCL where there is a GPU, else gloo.
        timeout: seconds (or a timedelta) after which a collective that a peer has not joined raises.
        arrival_timeout: seconds (or a timedelta) for which the ranks wait until all of them are there.

    Raises:
        ValueError: an unknown backend, a time that is not positive or beyond twelve days, variables that are half-set or
            contradict each other, a batch script that forgot srun, more local ranks than GPUs, an interface that
            does not exist, a MASTER_ADDR that does not resolve.
        RuntimeError: ranks are missing at the deadline, two processes are one rank, the port is in use, hosts do not
            reach each other, mpi4py is missing or belongs to another MPI. The message names ranks, hosts and the cure.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"init(backend=...): expected 'gloo', 'nccl' or None, got {backend!r}")
    limit, arrival = _positive("timeout", timeout), _positive("arrival_timeout", arrival_timeout)
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("init(backend='nccl'): this process sees no GPU; use backend='gloo'")
    if dist.is_initialized():
        used, local_rank = str(dist.get_backend()), local_rank_of(os.environ)
        _report_exceptions()
        device = _device(local_rank, used)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL takes the current one; its default is GPU 0 on every rank
        return World(dist.get_rank(), dist.get_world_size(), local_rank, device, used, _host())
    launched = detect(os.environ)
    if launched.world_size == 1 and launched.master is None:
        return World(0, 1, 0, _device(0, backend), None, _host())
    return _join(launched, backend or ("nccl" if torch.cuda.is_available() else "gloo"), limit, arrival)


def _host() -> str:
    return socket.gethostname()


def _positive(name: str, time_limit: timedelta | float) -> timedelta:
    seconds = time_limit.total_seconds() if isinstance(time_limit, timedelta) else time_limit
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"init({name}=...): expected seconds or a timedelta, got {time_limit!r}")
    if not 0 < seconds <= MOST_SECONDS:  # not so of NaN
        raise ValueError(f"init({name}=...): expected more than 0 seconds and at most {MOST_SECONDS:g}, got {seconds}")
    return timedelta(seconds=seconds)


def _device(local_rank: int, backend: str | None) -> torch.device:
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and (os.environ.get("SLURM_GPUS_PER_TASK") or os.environ.get("SLURM_GPU_BIND")):
        return torch.device("cuda", 0)  # Slurm shows each task its own GPU alone
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={local_rank} but this host has {torch.cuda.device_count()} GPUs: start fewer processes on it, "
            "or call shardmp.init(backend='gloo') to train on the CPU"
        )
    return torch.device("cuda", local_rank)


# -- several ranks


def _join(launched: Launched, backend: str, limit: timedelta, arrival: timedelta) -> World:
    _device(launched.local_rank, backend)  # more ranks than GPUs: before any network call
    network.check_named_interfaces(os.environ)
    held = None
    if launched.launcher in ("Open MPI", "MPICH"):
        _report_exceptions()  # from here on a rank that raises leaves the others in MPI's hands
        launched, held = mpi.bootstrap(launched)
    device = _device(launched.local_rank, backend)
    met = _meet(launched, held, device, rendezvous.Patience(arrival.total_seconds()))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    met.store.set_timeout(limit)
    try:
        dist.init_process_group(
            backend, timeout=limit, store=met.store, rank=launched.rank, world_size=launched.world_size
        )
    except RuntimeError as error:
        named = ", ".join(f"{name}={os.environ.get(name, '')}" for name in (network.GLOO, network.NCCL))
        raise RuntimeError(
            f"rank {launched.rank} on host {_host()}: {backend} could not connect the ranks ({named}): {error}"
        ) from error
    _report_exceptions()
    return World(launched.rank, launched.world_size, launched.local_rank, device, backend, _host())


def _meet(launched: Launched, held: Any, device: torch.device, patience: rendezvous.Patience) -> rendezvous.Met:
    """The store, all ranks there, the interface chosen, the hosts in reach of each other.

    Args:
        held: the store, where this rank holds one already.
    """
    assert launched.master is not None
    agent = launched.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if launched.rank == 0 and not agent:
        own = held or rendezvous.serve(launched.master[1], launched.master[0])
        connect: Callable[[], Any] = lambda: (own, "127.0.0.1")  # noqa: E731
    else:
        connect = lambda: rendezvous.join(launched, patience, agent)  # noqa: E731
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    generation = rendezvous.next_generation()

    def meet() -> rendezvous.Met:
        met = rendezvous.arrive(connect, launched, name, patience, agent, generation)
        network.choose_interface(os.environ, met.master)
        reach.check_hosts(met, launched.rank, launched.world_size, os.environ)
        return met

    # A store whose host is cut off answers nothing, and its calls have no time-out of their own.
    return _within(patience.left + 2 * rendezvous.HANDSHAKE + reach.LIMIT, meet, launched)


def _within(seconds: float, work: Callable[[], rendezvous.Met], launched: Launched) -> rendezvous.Met:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise RuntimeError(
            f"rank {launched.rank} on host {_host()}: the store at {launched.master} does not answer any more: its host is "
            "dead, stopped or cut off"
        )
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    met: rendezvous.Met = outcome[0]
    return met


# -- what a rank says when it raises


def _report_exceptions() -> None:
    """From now on an exception that ends this process is told to the peers, and under MPI ends them.

    torch puts a hook of its own around the present one at each init_process_group, and prints only when that has
    returned. So ours is put around torch's again, and one that is called inside another one only passes on.
    """
    if getattr(sys.excepthook, "tells_peers", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(error, "_shardmp_told", False):
            previous(kind, error, trace)
            return
        error._shardmp_told = True  # type: ignore[attr-defined]
        if not issubclass(kind, KeyboardInterrupt):
            # A store that is gone may answer never.
            teller = threading.Thread(target=_tell_peers, args=(f"raised {kind.__name__}: {error}"[:300],), daemon=True)
            teller.start()
            teller.join(1.0)
            _tell_launcher(kind, error)
        previous(kind, error, trace)
        mpi.abort()

    hook.tells_peers = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _tell_peers(text: str) -> None:
    with contextlib.suppress(Exception):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.distributed_c10d._get_default_store().set(f"shardmp/raised/{dist.get_rank()}", text)


def _tell_launcher(kind: type[BaseException], error: BaseException) -> None:
    """torchrun gives each rank a file for its error; `shardmp launch` ends with the words of the rank that failed first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        now = time.time_ns()
        said = {
            "message": f"{kind.__name__}: {error}",
            "extraInfo": {"timestamp": str(now // 10**9), "nanoseconds": now},
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": said}))


# -- the control group


def control_group(
    group: dist.ProcessGroup | None = None, purpose: str = "control", timeout: timedelta = CONTROL_TIMEOUT
) -> dist.ProcessGroup:
    """A gloo group over the ranks of `group` (None: all), whose collectives fail after 30 seconds: for small messages.

    A thread that speaks while training goes on needs one of its own, for its `purpose`.

    The first call for a group is a collective of its ranks; later ones find what it has made. Nothing is kept here: the
    group lives in torch's registry under a name derived from that of `group`, and goes with destroy_process_group. A
    reference would keep its threads alive into the interpreter's end, where they may abort the process.
    """
    registry = dist.distributed_c10d._world
    parent = group or dist.group.WORLD
    assert parent is not None  # the caller has a process group
    if dist.get_backend(parent) == "fake":  # torch's, of one process that plays a rank of many: nobody to connect to
        return parent
    ranks = dist.get_process_group_ranks(parent)
    members = hashlib.sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()[:8]
    name: Any = f"shardmp/{purpose}/{parent.group_name}/{members}"
    for known, its_name in registry.pg_names.items():
        if its_name == name:
            return known
    _choose_for_control(str(dist.get_backend(parent)))
    # dist.new_group numbers a group by those that this process has made before, which may be another number on each
    # rank; here the name is given, and no rank outside of the group takes part.
    made, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        "gloo",
        dist.distributed_c10d._get_default_store(),
        name,
        timeout=timeout,
        group_desc=f"{purpose} of {parent.group_name}",
    )
    registry.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    return made


def _choose_for_control(backend: str) -> None:
    """gloo's interface, where the user has made an NCCL group himself and so did not need one before."""
    address, chosen = os.environ.get("MASTER_ADDR"), dict[str, str]()
    if backend != "gloo" and address and not os.environ.get(network.GLOO):
        for found in network.resolve(address, network.CONNECT_LIMIT)[:1]:
            if not network.is_loopback(found):
                network.choose_interface(chosen, found)
    os.environ.update({name: value for name, value in chosen.items() if name == network.GLOO})
