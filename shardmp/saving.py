"""`save`: a checkpoint of any number of ranks, now or in the background.

Owns:      what the ranks agree on before they write, the background thread, and its snapshot.
Takes:     a model and an optimizer from `shard`; a directory that all ranks share.
Gives:     a complete checkpoint in the directory, or an error on every rank and the directory as it was.
Invariant: what is written is the state at the call, whatever is changed afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_by_plan

from . import codec, directory
from .agreement import dcp_is_quiet, group_for_files, meet, raise_first, together
from .checksum import crc32
from .collectives import Collectives
from .flat_shard import FlatShard
from .manifest import CheckpointError
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .planning import ShortPlanner
from .saved_state import to_save
from .storage import Writer

# Ten steps of a thread's priority: a tenth of the share of one that trains, on a core that both want.
_NICE = 10


class Saving:
    """A save, under way or done. `path` is the checkpoint's, once it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is complete.

        Raises:
            OSError, RuntimeError: it failed; on every rank. The older checkpoints are as they were.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            _give_way()
            try:
                work()
            except BaseException as error:
                self._error = error
                warnings.warn(f"a save in the background failed: {error}", stacklevel=1)

        # Not a daemon: the interpreter's end waits for it.
        self._thread = threading.Thread(target=run, name="shardmp-save")
        self._thread.start()


def _give_way() -> None:
    """Let the threads that train go first where no core is idle: on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))


_saving: weakref.WeakKeyDictionary[ShardedOptimizer, Saving] = weakref.WeakKeyDictionary()
_snapshots: weakref.WeakKeyDictionary[ShardedOptimizer, Tensor] = weakref.WeakKeyDictionary()


def wait_for_save(optimizer: ShardedOptimizer) -> None:
    """Wait until what is saved in the background is complete; its error, where it failed, is raised here."""
    if optimizer in _saving:
        _saving.pop(optimizer).wait()


def save(
    root: str | Path,
    model: ShardedModule,
    optimizer: ShardedOptimizer,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Write a checkpoint into a directory of checkpoints. Collective.

    It holds the FP32 masters, the optimizer's state and groups, the whole state of the loss scale, frozen parameters,
    rank 0's buffers, and the random state of each rank.

    Args:
        root: a directory that all ranks share.
        step: the checkpoint's number; by default how many steps the optimizer has made.
        extra: values, the same on every rank, and objects with `state_dict()` (schedulers, the position in the data).
        per_rank: the same, of each rank's own: they come back at the same number of ranks only.
        keep: afterwards, remove all checkpoints but the newest `keep`.
        background: return when the state is copied (in host memory: 12 bytes per parameter of the shard with Adam, kept
            for the next one), and write it while training goes on. The next save waits for it, and raises its error.

    Returns:
        A handle: `.wait()` returns the checkpoint's path.

    Raises:
        RuntimeError: between backward and step; after a collective failed.
        OverflowError: a master is beyond FP16's range: such a checkpoint could never train on.
        ValueError, TypeError: a bad argument; `extra` differs between ranks, or cannot be stored.
        OSError: a file could not be written; the directory's other checkpoints are as they were.
    """
    _check_types(model, optimizer)
    wait_for_save(optimizer)
    collectives = optimizer._collectives
    collectives.refuse_after_failure()
    optimizer.refuse_withheld()
    number = optimizer.steps if step is None else step
    meet(collectives, f"shardmp.save() of step {number}")
    made: list[_Values] = []

    def prepare() -> tuple[str, int, dict[str, int]]:
        optimizer.refuse_between_steps("shardmp.save()")
        _check_arguments(model, optimizer, number, keep)
        made.append(_Values(extra, per_rank, collectives))
        path = str(directory.begin(Path(root), number)) if collectives.rank == 0 else ""
        return path, len(made[0].row), made[0].digests

    with torch.no_grad():
        told = together(collectives, prepare)
        path, values = Path(told[0][0]), made[0]
        _refuse_differences([digests for _, _, digests in told], path, collectives.rank)
        width = max(length for _, length, _ in told)
        state, aliases = to_save(model, optimizer, values.text, values.tensors, values.row, width)
        if background:
            state = _snapshot(optimizer, state)
    writing = _Writing(collectives, path, number, aliases, keep, background)
    saving = Saving(writing.final)
    if background:
        saving._start(lambda: writing.run(state))
        _saving[optimizer] = saving
    else:
        writing.run(state)
    return saving


def _check_types(model: Any, optimizer: Any) -> None:
    if not isinstance(model, ShardedModule) or not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"expected the model and the optimizer that shard() returned, got {type(model).__name__} and "
            f"{type(optimizer).__name__}"
        )


def _check_arguments(model: ShardedModule, optimizer: ShardedOptimizer, step: Any, keep: Any) -> None:
    if model._collectives is not optimizer._collectives:
        raise ValueError("the optimizer is not the one that shard() returned with this model")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"save(step=...): expected a whole number from 0, got {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"save(keep=...): expected a whole number from 1, got {keep!r}")
    too_large = int(optimizer._parameters.too_large().item())
    if too_large:
        raise OverflowError(
            f"the master weights of {optimizer._names[too_large - 1]} are beyond 65504, the largest FP16 number: the run "
            "has diverged, and is not saved"
        )


class _Values:
    """What the user adds, and the random state, as bytes.

    Attributes:
        text, tensors: `extra`. digests: a checksum of each of its values. row: this rank's own.
    """

    def __init__(
        self, extra: Mapping[str, Any] | None, per_rank: Mapping[str, Any] | None, collectives: Collectives
    ) -> None:
        values = _states_of(extra)
        self.tensors: list[Tensor] = []
        self.text = codec.dumps(values, "extra", self.tensors)
        self.digests = {key: _checksum(value, f"extra[{key!r}]") for key, value in values.items()}
        own = {"random": codec.random_state(collectives.device), "values": _states_of(per_rank)}
        self.row = codec.dumps(own, "per_rank")


def _states_of(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Objects are saved by their `state_dict`, values as they are."""
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in (values or {}).items()}


def _checksum(value: Any, where: str) -> int:
    tensors: list[Tensor] = []
    crc = crc32(codec.dumps(value, where, tensors))
    for tensor in tensors:
        crc = crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _refuse_differences(told: Sequence[Mapping[str, int]], path: Path, rank: int) -> None:
    for other, digests in enumerate(told):
        different = [key for key in {**told[0], **digests} if told[0].get(key) != digests.get(key)]
        if different:
            if rank == 0:
                directory.drop(path)
            raise ValueError(
                f"save(extra=...): {different[0]!r} differs between rank 0 and rank {other}; what each rank has of its own "
                "goes into per_rank"
            )


class _Writing:
    """The collective part of a save that may run in a thread: it uses a process group of its own."""

    def __init__(
        self,
        collectives: Collectives,
        path: Path,
        step: int,
        aliases: Mapping[str, str],
        keep: int | None,
        background: bool,
    ) -> None:
        self.final = directory.committed(path)
        self._collectives = collectives
        self._group = group_for_files(collectives)
        self._path = path
        self._keep = keep
        about = {
            "step": step,
            "ranks": collectives.world_size,
            "torch": torch.__version__,
            "shardmp": version("shardmp"),
        }
        self._writer = Writer(path, aliases, about, past_cache=background)

    def run(self, state: dict[str, Any]) -> None:
        """Write, and make it complete.

        Raises:
            OSError, CheckpointError: a rank could not write; on every rank.
        """
        first = self._collectives.rank == 0
        group, self._group = self._group, None
        try:
            # The filters, which all threads share, are left as they are where there is nothing to filter.
            with dcp_is_quiet() if group is None else contextlib.nullcontext():
                save_by_plan(
                    state,
                    storage_writer=self._writer,
                    planner=ShortPlanner(),
                    process_group=group,
                    no_dist=group is None,
                )
        except CheckpointException as error:
            if first:
                directory.drop(self._path)
            raise_first(error, f"writing {self.final}")
        except RuntimeError as error:
            self._collectives.poison(f"shardmp.save() to {self.final}")
            raise CheckpointError(f"writing {self.final} failed: a rank is gone or does not answer: {error}") from error
        if first and self._keep is not None:
            try:
                directory.keep_newest(self.final.parent, self._keep)
            except OSError as error:  # the new checkpoint is complete all the same
                warnings.warn(f"old checkpoints were not removed: {error}", stacklevel=2)


def _snapshot(optimizer: ShardedOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """All tensors of `state`, copied into one buffer on the host, which is kept: fresh memory costs more than the copy."""
    tensors = list(_tensors(state))
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // 64) * 64
    on_gpu = optimizer._collectives.device.type == "cuda"
    buffer = _snapshots.get(optimizer)
    if buffer is None or buffer.numel() < size:
        buffer = _snapshots[optimizer] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    copies: dict[int, Tensor] = {}
    for tensor, start in zip(tensors, starts, strict=True):
        copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies[id(tensor)] = copy.copy_(tensor, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize(optimizer._collectives.device)
    return _replaced(state, copies)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, FlatShard):
        yield value.local
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _replaced(value: Any, copies: Mapping[int, Tensor]) -> Any:
    if isinstance(value, FlatShard):
        return FlatShard(copies[id(value.local)], value.shape, value.lo)
    if isinstance(value, Tensor):
        return copies[id(value)]
    if isinstance(value, dict):
        return {key: _replaced(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, copies) for item in value)
    return value
