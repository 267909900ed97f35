"""The start under mpirun: MPI carries the address of the store, and nothing else.

Owns:      every call of mpi4py, which is needed under an MPI launcher only.
Takes:     a `Launched` of Open MPI or MPICH.
Gives:     the same with an address that all ranks have reached, and on rank 0 the store that listens there.
Invariant: N processes that mpirun started are N ranks of one world, or each of them raises.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import TCPStore

from . import network, rendezvous
from .launcher import Launched

_INSTALL = "pip install 'shardmp[mpi]'"
_FORWARDING = 0.5  # seconds for mpirun to fetch what was printed: what is in its pipes at an abort is lost


def bootstrap(launched: Launched) -> tuple[Launched, TCPStore | None]:
    """Open the store on rank 0, and agree on an address of it that all ranks reach.

    An explicit MASTER_ADDR is used as it is; otherwise all addresses of rank 0's host are tried, because the first one
    may belong to a network that the others do not have (deepspeedai/DeepSpeed#5136).

    Raises:
        RuntimeError: mpi4py is missing, or belongs to another MPI than mpirun; no address is reached by all ranks.
    """
    mpi = _load(launched)
    world = mpi.COMM_WORLD
    _check_world(mpi, launched)
    shared = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_size = shared.Get_rank(), shared.Get_size()
    shared.Free()
    store, offer = _open(launched, local_size) if world.Get_rank() == 0 else (None, None)
    addresses, port, error = world.bcast(offer)
    if error:
        raise RuntimeError(error)
    reached = [network.connect([address], port)[0] is not None for address in addresses]
    by_all = world.allreduce(sum(1 << index for index, good in enumerate(reached) if good), op=mpi.BAND)
    if not by_all:
        lines = world.allgather([address for address, good in zip(addresses, reached, strict=True) if good])
        told = "; ".join(f"rank {rank}: {', '.join(line) or 'none'}" for rank, line in enumerate(lines))
        raise RuntimeError(
            f"no address of rank 0's host is reached by all ranks at port {port}. Of {', '.join(addresses)} were reached by "
            f"{told}. Set MASTER_ADDR to an address that all hosts reach, or let firewalls pass this port (MASTER_PORT)"
        )
    agreed = addresses[(by_all & -by_all).bit_length() - 1]
    return replace(launched, local_rank=local_rank, local_world_size=local_size, master=(agreed, port)), store


def _load(launched: Launched) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but finds no MPI library
        raise RuntimeError(
            f"{launched.launcher} started this process as rank {launched.rank} of {launched.world_size}, and mpi4py is "
            f"needed to join the others: {_INSTALL} ({error})"
        ) from error
    return MPI


def _check_world(mpi: Any, launched: Launched) -> None:
    """An mpi4py of another MPI than mpirun's makes N worlds of one rank, silently."""
    size, rank = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank()
    if (rank, size) != (launched.rank, launched.world_size):
        library = mpi.Get_library_version().strip("\0\n ").splitlines()[0].split(",")[0]
        raise RuntimeError(
            f"{launched.launcher} started this process as rank {launched.rank} of {launched.world_size}, but mpi4py, which "
            f"is linked to {library}, is rank {rank} of {size}: start with the mpirun of that library, or install an mpi4py "
            f"for {launched.launcher} (its binary wheels take another library by MPI4PY_MPIABI)"
        )


def _open(launched: Launched, local_size: int) -> tuple[TCPStore | None, tuple[list[str], int, str]]:
    """Rank 0's store, and what the other ranks are told: addresses, port, and what is wrong."""
    name, port = launched.master or ("", 0)
    try:
        store = rendezvous.serve(port, name or ("127.0.0.1" if local_size == launched.world_size else ""))
    except RuntimeError as error:
        return None, ([], 0, str(error))
    if name:
        addresses = network.resolve(name)
    elif local_size == launched.world_size:
        addresses = ["127.0.0.1"]
    else:
        every = [address for found in network.interfaces().values() for address in found]
        addresses = [a for a in every if not network.is_loopback(a) and not a.startswith("fe80")]
    problem = "" if addresses else f"MASTER_ADDR={name} does not resolve" if name else "rank 0's host has no address"
    return store, (addresses, store.port, problem)


def abort() -> None:
    """End all ranks of the job; to be called by one that has failed. Nothing where MPI is not in use."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        time.sleep(_FORWARDING)
        loaded.COMM_WORLD.Abort(1)
