"""What the ranks do together around a checkpoint, so that a failure on one is a failure on all.

Owns:      how errors travel between ranks.
Takes:     a piece of work for each rank; the errors that DCP has collected.
Gives:     what each rank has returned, or one error on every rank, which names the rank that it comes from.
Invariant: no rank goes on where another one could not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from .collectives import Collectives
from .manifest import CheckpointError
from .world import control_group

T = TypeVar("T")
# A rank may write for long while the others wait for it.
TIMEOUT = timedelta(minutes=30)
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, RuntimeError, OSError, FileNotFoundError, OverflowError, CheckpointError)
}


def together(collectives: Collectives, work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """`work` on every rank, and what each has returned; an error on one is an error on all, which names its rank.

    Args:
        group: `group_for_files`, where the work reads files and takes one rank much longer than another.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as mistake:
        error = mistake
    kinds = [kind.__name__ for kind in type(error).__mro__]
    told = collectives.gather_objects((kinds, str(error), value), group)
    if error is not None:
        raise error
    for rank, (kinds, message, _) in enumerate(told):
        if "NoneType" not in kinds:
            raise next((_KINDS[kind] for kind in kinds if kind in _KINDS), RuntimeError)(f"rank {rank}: {message}")
    return [value for _, _, value in told]


def meet(collectives: Collectives, place: str) -> None:
    """All ranks are here: a rank that is missing shows within the group's own time-out, and the error names it."""
    collectives.at(place)
    collectives.all_reduce(torch.zeros(1, dtype=torch.float64, device=collectives.device))


def raise_first(error: CheckpointException, doing: str, alone: bool = False) -> NoReturn:
    """DCP's collection of errors as the first of them; without its rank where DCP has run for this one alone."""
    rank, (cause, _) = sorted(error.failures.items())[0]
    message = f"{doing} failed{'' if alone else f' on rank {rank}'}: {cause}"
    if isinstance(cause, OSError):
        raise OSError(cause.errno, message) from None
    raise CheckpointError(message) from None


def group_for_files(collectives: Collectives) -> dist.ProcessGroup | None:
    """The process group in which checkpoints are written and read; None where a rank is alone."""
    return control_group(collectives.group, "checkpoints", TIMEOUT) if collectives.world_size > 1 else None


@contextmanager
def dcp_is_quiet() -> Iterator[None]:
    """DCP warns where it is to run for one rank alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
