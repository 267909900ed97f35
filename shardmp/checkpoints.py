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

from . import directory
from .agreement import together
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
        extra, per_rank: as in `shardmp.save`; values that are not objects may be changed between steps in `self.extra`
            and `self.per_rank`, where `resume` puts what it has read.
        background: write while training goes on.

    Raises:
        ValueError: `every` or `keep` is not a whole number above 0.
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
        self.root = Path(root)
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
            CheckpointError: there are some, but none is intact. Whatever else `shardmp.load` raises.
        """
        found = together(self._optimizer._collectives, lambda: bool(directory.complete(self.root)))
        if not found[0]:
            return None
        try:
            loaded = self._load(None)
        except CheckpointError as damage:
            if self._optimizer._collectives.rank == 0:
                warnings.warn(f"the latest checkpoint is damaged: {damage}", stacklevel=2)
            loaded = self._load("latest good")
        for mine, read in ((self.extra, loaded.extra), (self.per_rank, loaded.per_rank or {})):
            mine.update({key: value for key, value in read.items() if not hasattr(mine.get(key), "load_state_dict")})
        return loaded

    def _load(self, step: str | None) -> Loaded:
        objects = [
            {key: value for key, value in values.items() if hasattr(value, "load_state_dict")}
            for values in (self.extra, self.per_rank)
        ]
        return load(self.root, self._model, self._optimizer, step=step, extra=objects[0], per_rank=objects[1])

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
        wait_for_save(self._optimizer)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._optimizer.stop_requested = True
