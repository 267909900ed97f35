"""`ShardedOptimizer`: the sharded mixed-precision step, to be read beside the papers.

Owns:      the order of a step, and what the user may do when.
Takes:     the parts that `shard` has wired: gradients, scaler, update, parameters, collectives.
Gives:     a `torch.optim.Optimizer` that keeps the user's parameter groups, and a `StepReport` for each step.
Invariant: all ranks make the same collectives in the same order; a skipped step changes nothing but the loss scale.

Papers: "Mixed Precision Training" (arXiv 1710.03740) and "ZeRO" (arXiv 1910.02054).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import heartbeat, modes
from .accounts import Accounts
from .agreed import Agreed, refuse_other_arguments
from .collectives import Collectives
from .gradients import Gradients
from .inner import STEP_HOOKS
from .launcher import local_rank_of
from .layout import Layout
from .losses import Losses
from .parameters import Parameters
from .precision import Precision
from .ranges import named_range
from .refusals import NoState, Refusals
from .report import StepReport
from .scaler import LossScaler
from .skip_log import SkipLog
from .taken import Taken
from .update import Update
from .verdict import Contribution, check_divisor, decide


class ShardedOptimizer(Accounts, Refusals):
    """An optimizer whose FP32 masters, moments and gradient sums are sharded over ranks. Made by `shardmp.shard`.

    It keeps the `param_groups` dicts of the optimizer that was handed in: schedulers made before or after act on it,
    and an `lr` written into a group holds at the next step.
    """

    def __init__(
        self,
        original: Optimizer,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        layout: Layout,
        precision: Precision,
        collectives: Collectives,
        parameters: Parameters,
        gradients: Gradients,
        update: Update,
        taken: Taken,
        scaler: LossScaler | None,
        *,
        average: str,
        max_grad_norm: float | None,
    ) -> None:
        # Optimizer.__init__ would copy the groups; __setstate__ (torch's own, for unpickling) takes them as they are.
        Optimizer.__setstate__(
            self,
            {"defaults": original.defaults, "state": NoState(), "param_groups": original.param_groups}
            | {
                hooks: getattr(original, hooks) for hooks in STEP_HOOKS
            },  # theirs: they run with this step, handles hold
        )
        self.precision = precision
        self._original = original
        for method in ("train", "eval"):  # of the plain one they would move weights that masters have not seen
            if callable(getattr(original, method, None)):
                setattr(original, method, getattr(self, method))
        self._names = list(names)
        self._shapes = [param.shape for param in params]
        self._index = {name: index for index, name in enumerate(names)}
        self._layout = layout
        self._collectives = collectives
        self._parameters = parameters
        self._gradients = gradients
        self._update = update
        self._taken = taken
        update.applied_steps = lambda: self._steps - self.skipped_steps
        self._losses = Losses(scaler or LossScaler(precision, collectives.device), gradients)
        self._skipped = torch.zeros((), dtype=torch.int64, device=collectives.device)
        self._average = average
        self._clip_once: float | None = None
        self._heartbeat = heartbeat.start(collectives.rank, local_rank_of(os.environ), os.environ)
        self._skip_log = SkipLog(precision, collectives.rank)
        weakref.finalize(self, self._skip_log.at_end)
        self._steps = 0
        self._max_grad_norm = max_grad_norm
        self._agreed = Agreed(collectives)
        self._told: StepReport | None = None  # that it was withheld, on every rank
        self.report: StepReport | None = None
        """The report of the last step; None before the first."""
        self.stop_requested = False
        """Whether this rank was asked to stop: the next step tells all ranks, in `StepReport.stop`."""
        gradients.check_begin = taken.check_backward
        gradients.at_begin = self._begin_backward

    def shared_scaler(self) -> LossScaler:
        """The loss scale, for another model under the same loss: see `shard(scaler=...)`."""
        return self._losses.scaler

    def shares_ranks_with(self, collectives: Collectives) -> bool:
        """Whether the same ranks, in the same order, take part in this optimizer's verdicts."""
        return self._collectives.ranks == collectives.ranks

    # -- losses and backward

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, in FP32; call `backward()` on it.

        Args:
            loss: 0-dim, real and floating; the mean over this rank's micro-batch.

        Raises:
            TypeError, ValueError: the loss is not one number of a graph.
        """
        return self._losses.scale(loss)

    def backward(self, loss: Tensor | None, **options: Any) -> None:
        """Scale the loss and run backward; gradients are reduced while it runs, and are summed when it returns.

        Args:
            loss: 0-dim; or None on a rank without data, which joins the reduction and counts as no micro-batch.
            options: for `Tensor.backward` (`retain_graph`, ...).
        """
        if options.get("create_graph"):
            raise ValueError(
                "backward(create_graph=True): gradients go into shards, where no graph reaches; for a penalty on gradients "
                "call torch.autograd.grad(..., create_graph=True), and then optimizer.backward(loss + penalty)"
            )
        scaled = None if loss is None else self.scale(loss)
        self._refuse_unfinished_backward()
        self._gradients.refuse_to_begin()
        with self._collectives.all_or_nothing("backward"):
            if scaled is not None:
                scaled.backward(**options)
            else:
                self._gradients.begin()
                self._losses.skip_micro_batch()
                self._gradients.end()

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, and then None as long as another rank has one left: every rank goes round as often.

            for batch in optimizer.join(loader):
                optimizer.backward(None if batch is None else loss_of(model, batch))
                optimizer.step()

        Each round asks all ranks in a small all-reduce whether anybody has a batch.
        """
        rest = iter(batches)
        while True:
            batch = next(rest, None)
            anybody = torch.tensor([float(batch is not None)], dtype=torch.float64, device=self._collectives.device)
            self._collectives.at(f"step {self._steps + 1}, join()")
            self._collectives.all_reduce(anybody)
            if not anybody.item():
                return
            yield batch

    def _refuse_unfinished_backward(self) -> None:
        """Between backwards none is under way: one that is has been broken off by an exception, and cannot be joined."""
        if self._gradients.in_backward:
            self._collectives.poison("a backward that did not finish")
        self._collectives.refuse_after_failure()

    def _begin_backward(self) -> None:
        how = "" if self._gradients.synchronising else " under no_sync()"
        self._collectives.at(f"step {self._steps + 1}, backward {self._gradients.backwards}{how}")

    # -- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, divide_by: float | Tensor | None = None) -> Any:
        """Unscale, clip, update the FP32 masters, and let every rank have their rounding.

        Args:
            closure: as in torch: called once, with gradients enabled; it calls `optimizer.backward`.
            divide_by: the divisor of the summed gradient, the same on every rank, in place of the average.

        Returns:
            The step's `StepReport`, or what the closure returned.

        Raises:
            RuntimeError: no backward since the last step; too many skips that a smaller scale cannot cure. Of the step
                before: its last backward was under `no_sync`.
            ValueError: of the step before: ranks had different options, or a divisor was not finite and above 0. It has
                changed nothing; where the cause is mended on every rank, a further call makes this step.
            OverflowError: a master that the update of the step before made too large for FP16.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._check_before_step(divide_by)
        with self._collectives.all_or_nothing(f"step {self._steps + 1}"):
            self._step(divide_by)
        return self.report if closure is None else value

    def _step(self, divide_by: float | Tensor | None) -> None:
        self._collectives.at(f"step {self._steps + 1}, after backward {self._gradients.backwards}")
        clip = self._max_grad_norm if self._clip_once is None else self._clip_once
        own, checksum = self._agreed.take(self.param_groups, clip, divided=divide_by is not None)
        verdict = decide(
            self._contribution(divide_by, checksum),
            self._collectives,
            scale=self._losses.used_scale,
            average=self._average,
            max_grad_norm=clip,
        )
        absent = self._gradients.absent()
        left_out = self._update.left_out(verdict, absent)
        for run in self._update.runs:  # in the order in which the next forward reads them
            with named_range("shardmp.update"):
                for index in run:
                    self._gradients.round(index)
                self._update.step_run(run, verdict, left_out, absent)
            for index in run:
                self._parameters.publish(index)
        self._parameters.finish_publishing()
        self._parameters.note_versions()
        scaler = self._losses.scaler
        scaler.update(verdict.found_inf, verdict.loss_not_finite, ~verdict.withheld)
        self._skipped += verdict.skipped
        self._steps += 1
        self.report = StepReport(self._steps, verdict, scaler, self._names, own, self._collectives.rank)
        self._skip_log.expect(self.report)
        self._collectives.why = self.report.why_withheld
        self._original._opt_called = True  # type: ignore[attr-defined]  # for a scheduler made before `shard`
        self._clip_once = None
        self._start_window()
        torch.clear_autocast_cache()  # an autocast region around the whole loop would keep old weights
        self._heartbeat.beat()

    def _contribution(self, divide_by: float | Tensor | None, checksum: float | Tensor) -> Contribution:
        squares, owners = self._gradients.squares()
        return Contribution(
            squares=squares,
            owners=owners,
            had_gradient=self._gradients.seen,
            brought=self._gradients.brought,
            losses=self._losses.sums,
            too_large=self._parameters.too_large(),
            divide_by=divide_by,
            checksum=checksum,
            unsynced=self._gradients.unsynced,
            stop=self.stop_requested,
        )

    def _check_before_step(self, divide_by: float | Tensor | None) -> None:
        self._refuse_unfinished_backward()
        if not self._gradients.reduced:
            cause = "every backward since was under no_sync()" if self._gradients.backwards else "call backward first"
            self._taken.refuse(f"step() without a gradient since the last step or zero_grad(): {cause}")
        check_divisor(divide_by)
        self._taken.check_step()
        self._look_at_last_step()

    def _look_at_last_step(self) -> None:
        """The host reads the verdict of the step before: by now it waits for nothing."""
        self.refuse_withheld()
        if self.report is None:
            return
        self._skip_log.tell()
        self.report.check_update()
        if self.report.withheld:
            return
        self._collectives.agreed = self.report.snapshot.facts
        self.report.check_skips(self.precision)

    def refuse_withheld(self) -> None:
        """Raise, once, where the last step has written nothing because ranks disagreed. Collective.

        Raises:
            ValueError, RuntimeError: on every rank the same; see `StepReport.raise_withheld`.
        """
        if self.report is not None and self.report.withheld and self._told is not self.report:
            self._told = self.report
            self._steps -= 1  # it was none
            self._agreed.put_back(self.report.snapshot)
            self.report.raise_withheld(self._collectives)

    def _start_window(self) -> None:
        self._gradients.reset()
        self._losses.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were accumulated since the last step.

        Args:
            set_to_none: as in torch: with False every parameter that had a gradient since the last `zero_grad()` takes
                part in the next step, with a gradient of zero where no backward brings another.
        """
        if self._gradients.in_backward:
            self._collectives.poison("zero_grad() inside a backward, or after one that did not finish")
        if self._collectives.failure is not None:
            return  # nothing more is done, and the next call that would says so
        with self._collectives.all_or_nothing("zero_grad()"):
            self._taken.drop_gradients()
            self._losses.reset()
            self._gradients.drop(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the next step at `max_norm` (2-norm of the unscaled, averaged gradient), whatever `max_grad_norm` says."""
        self._clip_once = check_max_norm(max_norm)

    @property
    def max_grad_norm(self) -> float | None:
        """Gradients of a larger 2-norm (unscaled, averaged) are scaled down to it; None never clips. May be written."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = None if value is None else check_max_norm(value)

    # -- schedule-free optimizers

    @property
    def train(self) -> Callable[[], None]:
        """`optimizer.train()`, where the class has it: its own, on the masters, which are published. Collective."""
        return self._on_masters("train")

    @property
    def eval(self) -> Callable[[], None]:
        """`optimizer.eval()`, as `train`: evaluate, or save, with the parameters that the class means for it."""
        return self._on_masters("eval")

    def _on_masters(self, method: str) -> Callable[[], None]:
        if not callable(getattr(self._original, method, None)):
            raise AttributeError(f"{type(self._original).__name__} has no {method}()")

        def call() -> None:
            self._taken.check_model()
            parts = (self._update, self._parameters, self._gradients, self._collectives)
            modes.call_on_masters(method, f"step {self._steps + 1}", *parts)

        return call

    # -- looking

    @property
    def loss_scale(self) -> float:
        """The loss scale that the next loss will be multiplied by."""
        return self._losses.scaler.scale.item()

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since the start."""
        return int(self._skipped.item())

    @torch.no_grad()
    def master(self, name: str) -> Tensor:
        """The FP32 master weights of one parameter, whole, on every rank. Collective.

        Raises:
            KeyError: no trainable parameter has this name.
            ValueError: ranks named different parameters.
        """
        buckets = self._parameters.buckets
        return self._whole("master", name, lambda index, start, stop: buckets[index].master[start:stop])

    @torch.no_grad()
    def full_grad(self, name: str) -> Tensor:
        """The FP32 gradient of one parameter, whole, unscaled and averaged, between backward and step. Collective.

        Raises:
            KeyError: no trainable parameter has this name.
            ValueError: ranks named different parameters.
            RuntimeError: there is no reduced gradient.
        """
        if not self._gradients.reduced:
            raise RuntimeError("full_grad() without a reduced gradient: call it between backward and step")
        buckets = self._gradients.buckets
        whole = self._whole("full_grad", name, lambda index, start, stop: buckets[index].values(start, stop))
        divisor: Tensor | float = self._collectives.world_size
        if self._average == "micro_batches":
            count = self._losses.sums[2:].clone()
            self._collectives.all_reduce(count)
            divisor = count[0].clamp(min=1.0)
        return whole.div_((self._losses.used_scale.double() * divisor).float())

    def _whole(self, call: str, name: str, values: Callable[[int, int, int], Tensor]) -> Tensor:
        """One parameter from the ranks' shards; `values` gives elements [start, stop) of this rank's shard of a bucket."""
        self._collectives.at(f"step {self._steps + 1}, {call}({name!r})")
        refuse_other_arguments(f"optimizer.{call}()", self._collectives.gather_objects({"name": name}))
        if name not in self._index:
            raise KeyError(f"no trainable parameter is called {name!r}; their names: {', '.join(self._names[:8])}, ...")
        index = self._index[name]
        shape = self._shapes[index]
        whole = torch.empty(shape.numel(), dtype=torch.float32, device=self._collectives.device)
        for piece in self._layout.owners(index) if shape.numel() else ():
            part = whole[piece.lo : piece.hi]
            if piece.rank == self._collectives.rank:
                part.copy_(values(piece.bucket, piece.offset, piece.offset + piece.hi - piece.lo))
            self._collectives.broadcast(part, piece.rank)
        return whole.view(shape)

    def synchronize(self) -> None:
        """Wait until every parameter is the rounding of its master: before reading raw inner parameters after `step`.

        Raises:
            ValueError, RuntimeError: the last step was withheld, and nothing has said so yet.
        """
        self._parameters.all_ready()
        if self.report is not None and self.report.withheld and self._told is not self.report:
            self.report.raise_withheld()
        self._skip_log.tell()

    # -- saved and loaded

    def refuse_between_steps(self, operation: str) -> None:
        """Raise where gradients wait for their step, or ranks may be a step apart.

        Raises:
            RuntimeError: a backward since the last step, or a collective that has failed.
        """
        self._refuse_unfinished_backward()
        if self._gradients.backwards:
            raise RuntimeError(
                f"{operation} between backward and step: gradients are not saved; call step() or zero_grad() before"
            )

    @property
    def steps(self) -> int:
        """Steps made, skipped ones included, those before a checkpoint was loaded too."""
        return self._steps

    def counters(self) -> dict[str, Any]:
        """Steps, skipped steps, the state of the loss scale, and what the optimizer's class counts, as plain values."""
        self._skip_log.tell()
        found = {"steps": self._steps, "skipped": self.skipped_steps, "scaler": self._losses.scaler.state()}
        extra = self._update.extra_state()
        return found if extra is None else {**found, "update": extra}

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Go on counting from there, without a report of the step before."""
        counted = {key: counters[key] for key in ("steps", "skipped")} | counters["scaler"]
        self._collectives.facts["loaded with the optimizer,"] = counted
        self._steps = counters["steps"]
        self._skipped.fill_(counters["skipped"])
        self._losses.scaler.load(counters["scaler"])
        self._update.set_extra_state(counters.get("update"))
        self.report = None
        self._start_window()


def check_max_norm(value: Any) -> float:
    """`value` as a norm to clip at.

    Raises:
        TypeError, ValueError: it is not a positive number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"max_grad_norm: expected a number or None, got {value!r}")
    if not value > 0:
        raise ValueError(f"max_grad_norm: expected a number above 0, got {value}")
    return float(value)
