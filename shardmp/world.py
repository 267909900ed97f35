"""Who am I: rank, world size, device, and the process group that joins the ranks.

Owns:      the reading of the launcher's environment and the call of `init_process_group`.
Takes:     the environment of `torchrun`, a process group that the user has made, or nothing (one rank alone).
Gives:     a frozen `World`.
Invariant: one rank alone touches no network and needs no process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among its peers: `device` is where its model belongs, `backend` None for one rank alone."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str | None


def _number(name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}: expected an integer, got {text!r}") from None
    if value < 0:
        raise ValueError(f"environment variable {name}: expected 0 or more, got {value}")
    return value


def _check_launcher() -> bool:
    """Whether a launcher set this process up as one of several.

    Raises:
        ValueError: the variables are set by halves, or contradict each other. Before any network call.
    """
    found = [name for name in _LAUNCHER if os.environ.get(name)]
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return False
    missing = [name for name in _LAUNCHER if name not in found]
    if missing:
        raise ValueError(
            f"the environment sets {', '.join(found)} but not {', '.join(missing)}: start with torchrun, which sets "
            "all of them, or unset them to run on one rank"
        )
    rank, world_size = (_number(name, os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if not rank < world_size:
        raise ValueError(
            f"environment variables RANK={rank} and WORLD_SIZE={world_size}: a rank is below the world size"
        )
    return True


def _device(local_rank: int, backend: str | None) -> torch.device:
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={local_rank} but this host has {torch.cuda.device_count()} GPUs: start fewer processes on it, "
            "or call shardmp.init(backend='gloo') to train on the CPU"
        )
    return torch.device("cuda", local_rank)


def init(backend: str | None = None, timeout: timedelta | float = DEFAULT_TIMEOUT) -> World:
    """Join the ranks that the launcher started; `shard` calls it when it has not been called.

    A process group that exists already is used as it is. Otherwise `torchrun`'s variables are read. Without any, this
    process is one rank alone: no process group is made, and no network is touched.

    Args:
        backend: "nccl" or "gloo"; by default NCCL where there is a GPU, else gloo.
        timeout: seconds (or a timedelta) after which a collective that a peer has not joined raises.

    Raises:
        ValueError: an unknown backend, a timeout that is not positive, variables that are half-set or contradict.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"init(backend=...): expected 'gloo', 'nccl' or None, got {backend!r}")
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ValueError(f"init(timeout=...): expected more than 0 seconds, got {limit.total_seconds()}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("init(backend='nccl'): this process sees no GPU; use backend='gloo'")
    local_rank = _number("LOCAL_RANK", os.environ.get("LOCAL_RANK") or "0")
    if dist.is_initialized():
        used = str(dist.get_backend())
        return World(dist.get_rank(), dist.get_world_size(), local_rank, _device(local_rank, used), used)
    if not _check_launcher():
        return World(0, 1, 0, _device(0, backend), None)
    used = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(local_rank, used)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(used, timeout=limit)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, used)
