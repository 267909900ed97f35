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
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from . import codec, directory
from .agreed import refuse_other_arguments
from .agreement import Joint
from .checksum import crc32
from .collectives import Collectives
from .flat_shard import FlatShard
from .manifest import CheckpointError
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .planning import ShortPlanner
from .saved_state import Saved
from .storage import Writer

# Ten steps of a thread's priority: a tenth of the share of one that trains, on a core that both want.
_NICE = 10


class Saving:
    """A save, under way or done. `path` is the checkpoint's, once it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_complete = False
        self._is_told = False  # whether somebody was told that it failed

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
            error, self._error, self._is_told = self._error, None, True
            raise error
        if not self._is_complete:
            raise RuntimeError(f"the save to {self.path} failed: {self.path.name} is not complete")
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        work()
        self._is_complete = True

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                _give_way()
                self._run(work)
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


_saving: weakref.WeakKeyDictionary[Collectives, Saving] = weakref.WeakKeyDictionary()
_snapshots: weakref.WeakKeyDictionary[Collectives, Tensor] = weakref.WeakKeyDictionary()


def wait_for_save(collectives: Collectives) -> None:
    """Wait until what is saved in the background is complete; its error, where it failed, is raised here."""
    if collectives in _saving:
        saving = _saving[collectives]
        if saving._thread is not None:
            saving._thread.join()  # an interruption leaves it in the table
        del _saving[collectives]
        if not saving._is_told:
            saving.wait()


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
    place = directory.named(root, "save(directory)")
    collectives = _collectives_of(model, optimizer)
    wait_for_save(collectives)
    doing = f"shardmp.save() of step {optimizer.steps if step is None else step}"
    collectives.at(doing)
    with Joint(collectives, doing) as joint, torch.no_grad():
        collectives.refuse_after_failure()
        optimizer.refuse_withheld()
        path, state, aliases = _prepared(joint, place, model, optimizer, step, extra, per_rank, keep, background)
    writing = _Writing(collectives, path, doing, aliases, keep, background)
    saving = Saving(writing.final)
    if background:
        _saving[collectives] = saving
        saving._start(lambda: writing.run(state))
    else:
        saving._run(lambda: writing.run(state))
    return saving


def _collectives_of(model: Any, optimizer: Any) -> Collectives:
    if not isinstance(model, ShardedModule) or not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"expected the model and the optimizer that shard() returned, got {type(model).__name__} and "
            f"{type(optimizer).__name__}"
        )
    return optimizer._collectives


def _prepared(
    joint: Joint,
    root: Path,
    model: ShardedModule,
    optimizer: ShardedOptimizer,
    step: int | None,
    extra: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any] | None,
    keep: int | None,
    background: bool,
) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """(where to write, what, the tied names), when all ranks have found that they can."""
    collectives = optimizer._collectives
    number = optimizer.steps if step is None else step
    made: list[Saved] = []
    copies: list[dict[str, Any]] = []

    def check() -> tuple[int, dict[str, Any], dict[str, int]]:
        optimizer.refuse_between_steps("shardmp.save()")
        _check_arguments(model, optimizer, number, keep)
        values = _states_of(extra)
        digests = {key: _checksum(value, f"extra[{key!r}]") for key, value in values.items()}
        own = {"random": codec.random_state(collectives.device), "values": _states_of(per_rank)}
        made.append(Saved(model, optimizer, values, codec.dumps(own, "per_rank")))
        return made[0].row_length, {"step": number, "keep": keep, "background": background}, digests

    told = joint.together(check)
    joint.alike(lambda: refuse_other_arguments("shardmp.save()", [arguments for _, arguments, _ in told]))
    joint.alike(lambda: _refuse_differences([digests for _, _, digests in told]))
    saved = made[0]

    def begin() -> str:
        saved.add_row(max(length for length, _, _ in told))
        copies.append(_snapshot(collectives, saved.state) if background else saved.state)
        return str(directory.begin(root, number, joint.at)) if joint.rank == 0 else ""

    path = Path(joint.together(begin)[0])
    return path, copies[0], saved.aliases


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


def _states_of(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Objects are saved by their `state_dict`, values as they are."""
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in (values or {}).items()}


def _checksum(value: Any, where: str) -> int:
    tensors: list[Tensor] = []
    crc = crc32(codec.dumps(value, where, tensors))
    for tensor in tensors:
        crc = crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _refuse_differences(told: Sequence[Mapping[str, int]]) -> None:
    """Raises on every rank: all were told the same."""
    for other, digests in enumerate(told):
        different = [key for key in {**told[0], **digests} if told[0].get(key) != digests.get(key)]
        if different:
            raise ValueError(
                f"save(extra=...): {different[0]!r} differs between rank 0 and rank {other}; what each rank has of its own "
                "goes into per_rank"
            )


class _Writing:
    """The part of a save that may run in a thread."""

    def __init__(
        self,
        collectives: Collectives,
        path: Path,
        doing: str,
        aliases: Mapping[str, str],
        keep: int | None,
        background: bool,
    ) -> None:
        self.final = directory.committed(path)
        self._path = path
        self._keep = keep
        step = directory.step_of(self.final)
        about = {
            "step": step,
            "ranks": collectives.world_size,
            "torch": torch.__version__,
            "shardmp": version("shardmp"),
        }
        # Made here, since all ranks must make such things in one order: the thread comes when it comes.
        self._joint = Joint(collectives, f"{doing} in the background" if background else doing)
        self._writer = Writer(path, aliases, about, past_cache=background, joint=self._joint)

    def run(self, state: dict[str, Any]) -> None:
        """Write, and make it complete.

        Raises:
            OSError, CheckpointError: a rank could not write; on every rank.
            RuntimeError: a rank is gone, or waits for its disk without end.
        """
        with self._joint as joint:
            try:
                told = joint.together(lambda: self._write(state), for_first=True)
                joint.together(lambda: self._finish(told) if joint.rank == 0 else None)
            except BaseException:
                if joint.rank == 0 and joint.is_agreed:  # nobody writes any more
                    directory.drop(self._path)
                raise

    def _write(self, state: dict[str, Any]) -> tuple[SavePlan, list[WriteResult]]:
        """This rank's file; what stands in it."""
        planner = ShortPlanner()
        planner.set_up_planner(state, is_coordinator=self._joint.rank == 0)
        plan = planner.create_local_plan()
        file = replace(plan, storage_data=self._writer.file_name(self._joint.rank))
        with self._named(f"writing {self.final} failed on rank {self._joint.rank}"):
            return plan, self._writer.write_data(planner.finish_plan(file), planner).value()

    def _finish(self, told: Sequence[tuple[SavePlan, list[WriteResult]]]) -> None:
        """On rank 0: the tables, and the name of a complete checkpoint; then what is older may go."""
        with self._named(f"completing {self.final} failed on rank 0"):
            _, metadata = ShortPlanner().create_global_plan([plan for plan, _ in told])
            self._writer.finish(metadata, [written for _, written in told])
        if self._keep is not None:
            directory.keep_newest(self.final.parent, self._keep, self._joint.at)

    @staticmethod
    @contextlib.contextmanager
    def _named(doing: str) -> Iterator[None]:
        """Errors say what was written, and on which rank."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"{doing}: {error}") from error
        except Exception as error:
            raise CheckpointError(f"{doing}: {error}") from error


def _snapshot(collectives: Collectives, state: dict[str, Any]) -> dict[str, Any]:
    """All tensors of `state`, copied into one buffer on the host, which is kept: fresh memory costs more than the copy."""
    tensors = list(_tensors(state))
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // 64) * 64
    on_gpu = collectives.device.type == "cuda"
    buffer = _snapshots.get(collectives)
    if buffer is None or buffer.numel() < size:
        buffer = _snapshots[collectives] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    copies: dict[int, Tensor] = {}
    for tensor, start in zip(tensors, starts, strict=True):
        copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies[id(tensor)] = copy.copy_(tensor, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize(collectives.device)
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
