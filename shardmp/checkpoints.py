"""`Checkpoints`: the few lines about checkpoints that a training script needs.

Owns:      when to save, and what happens on SIGTERM.
Takes:     a directory, a model and an optimizer from `shard`, and what else belongs to the run.
Gives:     a run that goes on from its latest intact checkpoint, at any number of ranks.
Invariant: all ranks save after the same step, also where one rank alone was told to stop.

    checkpoints = shardmp.Checkpoints("runs/a", model, optimizer, every=500, keep=3, extra={"scheduler": scheduler})
    checkpoints.resume()
    while checkpoints.step < num_steps:
        ...
        optimizer.step()
        scheduler.step()
        checkpoints.after_step()
    checkpoints.close()
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from . import directory, in_place
from .agreement import Joint
from .manifest import CheckpointError
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .report import StepReport
from .restoring import Loaded, load
from .saving import Saving, save, wait_for_save

# A shell's exit status for SIGTERM, 128 + 15: not 0, so that torchrun and Slurm know that the run is not at its end.
PREEMPTED = 143


class Checkpoints:
    """Saves every so many steps and on SIGTERM, and resumes.

    From its making to `close`, SIGTERM (preemption, `scancel`, a launcher that stops) on any rank lets all ranks finish
    the step that they are in, or on GPUs the one after it, save, and leave with exit status 143.

    Args:
        root: a directory that all ranks share.
        every: steps between two checkpoints; None saves on SIGTERM and by `save` alone.
        keep: so many of the newest are kept; None keeps all.
        extra, per_rank: as in `shardmp.save`. `resume` restores objects, tensors, dicts and lists in place; plain values
            (numbers, strings, None) stand in `self.extra` and `self.per_rank`, where they may be changed between steps.
        background: write while training goes on.

    Raises:
        ValueError: `every` or `keep` is not a whole number above 0; `root` is empty.
        TypeError: an object has `state_dict()` and no `load_state_dict()`, and so could not be resumed.
    """

    def __init__(
        self,
        root: str | Path,
        model: ShardedModule,
        optimizer: ShardedOptimizer,
        *,
        every: int | None = None,
        keep: int | None = 3,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        background: bool = True,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Checkpoints({name}=...): expected a whole number from 1, or None, got {value!r}")
        for option, values in (("extra", extra), ("per_rank", per_rank)):
            for key, value in (values or {}).items():
                if hasattr(value, "state_dict") and not in_place.is_object(value):
                    raise TypeError(
                        f"Checkpoints({option}=...): {key!r}, a {type(value).__name__}, has state_dict() but no "
                        "load_state_dict(): it could not be resumed"
                    )
        self.root = directory.named(root, "Checkpoints(root)")
        self.extra: dict[str, Any] = dict(extra or {})
        self.per_rank: dict[str, Any] = dict(per_rank or {})
        self._model, self._optimizer = model, optimizer
        self._every, self._keep, self._background = every, keep, background
        self._previous: StepReport | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._asked_to_stop)

    @property
    def step(self) -> int:
        """Steps that the optimizer has made, those before the resumption included."""
        return self._optimizer.steps

    def resume(self) -> Loaded | None:
        """Load the latest checkpoint, or where it is damaged the newest intact one; None where there is none. Collective.

        Raises:
            CheckpointError: there are some, but none is intact. Whatever else `shardmp.load` raises: what is in a
                checkpoint does not fit this run.
        """
        collectives = self._optimizer._collectives
        with Joint(collectives, "Checkpoints.resume()") as joint:
            joint.at(f"looking into {self.root}")
            found = joint.together(lambda: joint.rank == 0 and bool(directory.complete(self.root)))
        if not found[0]:
            return None
        try:
            loaded = self._load(None)
        except (CheckpointError, OSError) as damage:
            if collectives.rank == 0:
                warnings.warn(f"the latest checkpoint is damaged or cannot be read: {damage}", stacklevel=2)
            loaded = self._load("latest good")
        for mine, read in ((self.extra, loaded.extra), (self.per_rank, loaded.per_rank or {})):
            for key, value in read.items():
                own = mine.get(key)
                if not in_place.holds_elements(own):  # what does was restored by load
                    mine[key] = in_place.restore(own, value) if type(own) is type(value) else value
        return loaded

    def _load(self, step: str | None) -> Loaded:
        kept = [
            {key: value for key, value in values.items() if in_place.holds_elements(value)}
            for values in (self.extra, self.per_rank)
        ]
        return load(self.root, self._model, self._optimizer, step=step, extra=kept[0], per_rank=kept[1])

    def after_step(self) -> None:
        """Save where it is time; call it on all ranks after each step, when the scheduler has stepped.

        Raises:
            SystemExit: 143, after a save, where a rank was told to stop. Whatever `shardmp.save` raises, also of the one
                before, in the background.
        """
        report = self._optimizer.report
        assert report is not None
        # On a GPU this step's verdict is not known yet, and asking would wait for it; that of the step before is.
        on_gpu = self._optimizer._collectives.device.type == "cuda"
        known, self._previous = (self._previous if on_gpu else report), report
        if known is not None and known.stop:
            self.save(background=False)
            self.close()
            raise SystemExit(PREEMPTED)
        if self._every is not None and report.step % self._every == 0:
            self.save(background=self._background)

    def save(self, *, background: bool = False) -> Saving:
        """Save now. Collective."""
        return save(
            self.root,
            self._model,
            self._optimizer,
            extra=self.extra,
            per_rank=self.per_rank,
            keep=self._keep,
            background=background,
        )

    def close(self) -> None:
        """Wait for what is written in the background; SIGTERM is again what it was.

        Raises:
            OSError, CheckpointError: the last save failed.
        """
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None
        wait_for_save(self._optimizer._collectives)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._optimizer.stop_requested = True
