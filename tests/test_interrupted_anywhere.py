"""An exception at any moment of a call leaves the state of before or of after, or everything afterwards refuses.

One rank, a tiny model; Ctrl-C and memory that runs out, at each line of shardmp that runs and at each return, in the
threads of background saves too. `make test-fuzz` makes all interruptions, `make test` a seeded part.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import equal
from interrupted import KINDS, Trial, interrupt_everywhere
from torch import Tensor, nn

import shardmp
from shardmp import api

SHARE = 0.03  # of the interruptions: some 15 seconds
# Warnings of what went wrong are due here.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.BatchNorm1d(4))


MODEL = make_model()
SIGTERM = signal.getsignal(signal.SIGTERM)
INPUTS = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]


_probed: dict[type, Any] = {}


def sharded(optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """`shard`, with a probe that looks at a class once: it takes as long as all the rest."""
    plain = copy.deepcopy(MODEL)
    probe = api.probe

    def once(optimizer: Any, *args: Any) -> Any:
        if type(optimizer) not in _probed:
            _probed[type(optimizer)] = probe(optimizer, *args)
        return _probed[type(optimizer)]

    with mock.patch.object(api, "probe", once):
        return shardmp.shard(plain, optimizer(plain.parameters()), **options)


def cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    return [cloned(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass
class Run:
    """A model in training."""

    model: shardmp.ShardedModule
    optimizer: shardmp.ShardedOptimizer
    root: Path = Path()
    handle: Any = None
    kept: Any = None

    def backward(self, seed: int) -> None:
        self.optimizer.backward(self.loss(seed))

    def loss(self, seed: int) -> Tensor:
        return self.model(INPUTS[seed]).pow(2).mean()

    def train(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.backward(seed)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Masters, 16-bit parameters, moments, step counts, groups, the loss scale, buffers."""
        optimizer = self.optimizer
        found: dict[str, Any] = {
            "masters": [bucket.master for bucket in optimizer._parameters.buckets],
            "parameters": [bucket.flat for bucket in optimizer._parameters.buckets],
            "buffers": list(self.model.buffers()),
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "counters": optimizer.counters(),
        }
        found["moments"] = [(flat, rest) for _, flat, rest in optimizer._update.piece_states()]
        return cloned(found)


def refusal(act: Any) -> str:
    """What our RuntimeError says; anything else is no refusal."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refuses(run: Run, operation: str) -> None:
    """After a failure nothing is stepped and nothing is saved, and the words name the operation."""
    for act in (
        run.optimizer.step,
        lambda: shardmp.save(run.root / "refused", run.model, run.optimizer),
        lambda: run.train(9),
        lambda: shardmp.save(run.root / "refused", run.model, run.optimizer),
    ):
        words = refusal(act)
        assert operation in words, words
        assert "restart from the last checkpoint" in words, words
    assert not (run.root / "refused").exists()


# ----------------------------------------------------------------------------------------------------------------------
# The step


class Training(Trial):
    """What is called between two steps of a run; afterwards it goes on as if nothing had been, or refuses.

    Args:
        optimizer: makes the torch optimizer.
        options: of `shard`.
    """

    operation = "step"

    def __init__(self, name: str, optimizer: Any, **options: Any) -> None:
        self.name = name
        self._optimizer, self._options = optimizer, options
        self._references: dict[str, dict[str, Any]] = {}

    def start(self) -> Run:
        options = {"precision": shardmp.Precision(init_scale=2.0**10), "max_grad_norm": 0.5, "bucket_mb": 0.001}
        run = Run(*sharded(self._optimizer, **{**options, **self._options}))
        run.train(1)
        run.optimizer.zero_grad()
        return run

    def make(self) -> Run:
        run = self.start()
        run.backward(2)
        return run

    def call(self, state: Run) -> None:
        state.optimizer.step()

    def outcome(self, state: Run, error: BaseException | None) -> str:
        before, after = self.reference("before"), self.reference("after")
        if state.optimizer._collectives.failure is not None:
            assert error is not None
            refuses(state, self.operation)
            return "refused"
        found = state.state()
        made = equal(found, after)
        assert made or equal(found, before), "the state is neither that of before nor that of after"
        assert error is not None or made
        if not made:
            self.call(state)
            assert equal(state.state(), after), "the call, repeated, did not lead to what it should"
        state.train(3)
        assert equal(state.state(), self.reference("next")), "the next step was another"
        return "after" if made else "before"

    def reference(self, which: str) -> dict[str, Any]:
        """The states of a run that nothing interrupts."""
        if not self._references:
            run = self.make()
            self._references["before"] = run.state()
            self.call(run)
            self._references["after"] = run.state()
            run.train(3)
            self._references["next"] = run.state()
        return self._references[which]


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def rmsprop(parameters: Any) -> Any:
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5)


def sgd_with_dampening(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.5, dampening=0.25)


class Thorough(Training):
    thorough = True


class Overflowing(Training):
    """A step that is skipped, and lowers the loss scale."""

    def make(self) -> Run:
        run = self.start()
        run.optimizer.backward(run.loss(2) * 1e30)
        return run


class AfterNoSync(Training):
    """Stage 1, with local sums of an earlier backward."""

    def make(self) -> Run:
        run = self.start()
        with run.model.no_sync():
            run.backward(4)
        run.backward(2)
        return run


STEPS = [
    Thorough("step, AdamW in FP16", adamw),
    Training("step, AdamW in BF16", adamw, precision="bf16"),
    Training("step, AdamW, exact", adamw, reduce="exact", average="micro_batches"),
    Training("step, RMSprop, tile by tile", rmsprop),
    Training("step, SGD with dampening", sgd_with_dampening),
    Overflowing("a skipped step", adamw),
    Overflowing("a skipped step, tile by tile", rmsprop),
    AfterNoSync("step after no_sync, stage 1", adamw, stage=1, average="micro_batches"),
]


# ----------------------------------------------------------------------------------------------------------------------
# What is called between steps


class Accumulating(Training):
    """A call that changes what waits for the step: afterwards, where nothing refuses, the next step is one of `futures`."""

    def futures(self) -> list[Any]:
        """Runs that nothing interrupts, each up to where the interrupted one may stand; the call made once, or not."""
        return [lambda run: None, self.call]

    def after(self, run: Run) -> None:
        """What the user does next."""
        run.backward(3)
        run.optimizer.step()

    def outcome(self, state: Run, error: BaseException | None) -> str:
        if state.optimizer._collectives.failure is not None:
            assert error is not None
            refuses(state, self.operation)
            return "refused"
        try:
            self.after(state)
        except RuntimeError:
            refuses(state, self.operation)
            return "refused"
        found = state.state()
        names = ("before", "after")
        for name in names:
            if equal(found, self.reference(name)):
                return name
        raise AssertionError("the next step was another")

    def reference(self, which: str) -> dict[str, Any]:
        if not self._references:
            for name, future in zip(("before", "after"), self.futures(), strict=True):
                run = self.make()
                future(run)
                self.after(run)
                self._references[name] = run.state()
        return self._references[which]


class Backward(Accumulating):
    """A backward, in the middle of a step's others."""

    operation = "backward"

    def make(self) -> Run:
        run = super().make()
        run.kept = run.loss(5)
        return run

    def call(self, state: Run) -> None:
        state.optimizer.backward(state.kept)


class DroppedBackward(Backward):
    """As users do it: what the interrupted backward has left is dropped."""

    def after(self, run: Run) -> None:
        run.model.zero_grad()
        super().after(run)


class BackwardWithoutData(Backward):
    def call(self, state: Run) -> None:
        state.optimizer.backward(None)


class PlainBackward(DroppedBackward):
    """The torch way, without our `backward`; in BF16 the loss need not be scaled."""

    def call(self, state: Run) -> None:
        state.kept.backward()


class ScaledBackward(DroppedBackward):
    def call(self, state: Run) -> None:
        state.optimizer.scale(state.kept).backward()


class BackwardInNoSync(Backward):
    def call(self, state: Run) -> None:
        with state.model.no_sync():
            state.optimizer.backward(state.kept)


class Forward(Accumulating):
    operation = "forward"

    def call(self, state: Run) -> None:
        state.loss(5)

    def after(self, run: Run) -> None:
        super().after(run)
        for buffer in run.model.buffers():
            buffer.zero_()  # as in plain torch, a forward may have counted


class ZeroGrad(Accumulating):
    operation = "zero_grad"

    def call(self, state: Run) -> None:
        state.model.zero_grad()


class LoadedWeights(Accumulating):
    """Weights from a state dict: masters are renewed, or nothing steps."""

    operation = "load_state_dict"

    def make(self) -> Run:
        run = self.start()
        run.kept = {key: value * 0.5 for key, value in run.model.state_dict().items()}
        return run

    def call(self, state: Run) -> None:
        state.model.load_state_dict(state.kept)


BETWEEN = [
    Forward("forward", adamw),
    Backward("backward", adamw, average="micro_batches"),
    DroppedBackward("backward, dropped", adamw, average="micro_batches"),
    DroppedBackward("backward, exact, dropped", adamw, reduce="exact", average="micro_batches"),
    BackwardWithoutData("backward(None)", adamw, average="micro_batches"),
    PlainBackward("loss.backward(), dropped", adamw, precision="bf16", average="micro_batches"),
    ScaledBackward("scale(loss).backward(), dropped", adamw, average="micro_batches"),
    BackwardInNoSync("backward under no_sync, stage 1", adamw, stage=1, average="micro_batches"),
    ZeroGrad("zero_grad", adamw, average="micro_batches"),
    LoadedWeights("load_state_dict", adamw),
]


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


class Stateful:
    """A scheduler, say: what `extra` restores."""

    def __init__(self) -> None:
        self.position = torch.zeros((), dtype=torch.int64, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"].clone()


class Checkpointing(Training):
    """A directory with one checkpoint, of step 1, and a run that is at step 2."""

    others = 0.1

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, adamw)
        self._options_of_call = options
        self._number = itertools.count()

    def make(self) -> Run:
        run = self.start()
        run.kept = Stateful()
        run.root = self._template / str(next(self._number))
        if not (self._template / "old").exists():
            shardmp.save(self._template / "old", run.model, run.optimizer, extra={"position": run.kept})
        shutil.copytree(self._template / "old", run.root)
        run.kept.position += 5
        run.train(2)
        run.optimizer.zero_grad()
        return run

    def outcome(self, state: Run, error: BaseException | None) -> str:
        try:
            return self.left(state, error)
        finally:
            for thread in threading.enumerate():
                if thread.name == "shardmp-save":
                    thread.join()
            signal.signal(signal.SIGTERM, SIGTERM)
            shutil.rmtree(state.root)

    def left(self, state: Run, error: BaseException | None) -> str:
        raise NotImplementedError

    def everything(self, run: Run) -> dict[str, Any]:
        return {**run.state(), "position": run.kept.position.clone(), "random": torch.get_rng_state()}

    @functools.cached_property
    def _directory(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="shardmp-interrupted-")

    @property
    def _template(self) -> Path:
        return Path(self._directory.name)

    @functools.cached_property
    def reader(self) -> Run:
        return self.start()

    def resumed(self, root: Path, **options: Any) -> dict[str, Any]:
        """What another process finds."""
        run = self.reader
        run.kept = Stateful()
        shardmp.load(root, run.model, run.optimizer, extra={"position": run.kept}, **options)
        found = run.state()
        found["position"] = run.kept.position
        return found


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Saved(Checkpointing):
    """`save`: the older checkpoint is as it was, what looks complete loads, and the run goes on or refuses."""

    operation = "save"

    def call(self, state: Run) -> None:
        saving = shardmp.save(
            state.root, state.model, state.optimizer, extra={"position": state.kept}, **self._options_of_call
        )
        assert saving.wait().is_dir()

    def left(self, state: Run, error: BaseException | None) -> str:
        for thread in threading.enumerate():
            if thread.name == "shardmp-save":
                thread.join()
        old = files(self._template / "old")
        there = files(state.root)
        if "keep" not in self._options_of_call:
            assert {name: there.get(name) for name in old if name != "latest"} == {
                name: content for name, content in old.items() if name != "latest"
            }, "the older checkpoint is another"
        new = any(path.name.startswith("step-000000002") for path in state.root.iterdir())
        for options in ({}, {"step": "latest good"}) if new else ({},):
            found = self.resumed(state.root, **options)
            which = [name for name in ("old", "new") if equal(found, self.reference(name))]
            assert which, "what was loaded is neither checkpoint"
            assert error is not None or which == ["new"], "save returned, and its checkpoint is not there"
        assert equal(state.state(), self.reference("before")), "saving has changed the run"
        if state.optimizer._collectives.failure is not None:
            assert error is not None
            refuses(state, self.operation)
            return "refused"
        if "background" in self._options_of_call:  # what the thread met is told once
            with contextlib.suppress(*KINDS, RuntimeError, OSError):
                self.call(state)
        self.call(state)
        assert equal(self.resumed(state.root), self.reference("new")), "the next save was another"
        assert not [path for path in state.root.iterdir() if path.name.startswith(".")], "leftovers"
        state.train(3)
        assert equal(state.state(), self.reference("next"))
        return "after" if new else "before"

    def reference(self, which: str) -> dict[str, Any]:
        if not self._references:
            run = self.make()
            self._references["before"] = run.state()
            self._references["old"] = self.resumed(run.root)
            self.call(run)
            self._references["new"] = self.resumed(run.root)
            run.train(3)
            self._references["next"] = run.state()
        return self._references[which]


class Loaded(Checkpointing):
    """`load`: all of before, all of the checkpoint, or a refusal until another load has come to its end."""

    operation = "load"

    def call(self, state: Run) -> None:
        shardmp.load(state.root, state.model, state.optimizer, extra={"position": state.kept}, **self._options_of_call)

    def make(self) -> Run:
        run = super().make()
        torch.manual_seed(7)
        return run

    def left(self, state: Run, error: BaseException | None) -> str:
        found = self.everything(state)
        made = equal(found, self.reference("after"))
        refused = state.optimizer._collectives.failure is not None
        if refused:
            for act in (state.optimizer.step, lambda: shardmp.save(state.root, state.model, state.optimizer)):
                words = refusal(act)
                assert "load" in words, words
        else:
            assert made or equal(found, self.reference("before")), "the state is neither that of before nor of after"
        assert error is not None or made
        try:
            self.call(state)
        except RuntimeError as words:
            if not refused or "restart from the last checkpoint" not in str(words):
                raise
            return "refused"
        assert equal(self.everything(state), self.reference("after")), "the next load was another"
        state.train(3)
        assert equal(state.state(), self.reference("next"))
        return "refused" if refused else "after" if made else "before"

    def reference(self, which: str) -> dict[str, Any]:
        if not self._references:
            run = self.make()
            self._references["before"] = self.everything(run)
            self.call(run)
            self._references["after"] = self.everything(run)
            run.train(3)
            self._references["next"] = run.state()
        return self._references[which]


class Resumed(Loaded):
    """`Checkpoints.resume`, past a latest checkpoint that is damaged."""

    def make(self) -> Run:
        run = super().make()
        newer = shardmp.save(run.root, run.model, run.optimizer, extra={"position": run.kept}).path
        (newer / "__0_0.distcp").write_bytes(b"")
        return run

    def call(self, state: Run) -> None:
        # Its handler of SIGTERM is taken back by `outcome`.
        checkpoints = shardmp.Checkpoints(state.root, state.model, state.optimizer, extra={"position": state.kept})
        try:
            checkpoints.resume()
        finally:
            checkpoints.close()


CHECKPOINTS = [
    Saved("save"),
    Saved("save in the background", background=True),
    Saved("save that removes older ones", keep=1),
    Loaded("load"),
    Loaded("load of the latest good one", step="latest good"),
    Resumed("resume past a damaged one"),
]


# ----------------------------------------------------------------------------------------------------------------------
# shard


class Sharding(Trial):
    """`shard`: the plain model and optimizer train as if nothing had been, or both refuse."""

    def __init__(self, name: str, optimizer: Any, **options: Any) -> None:
        self.name = name
        self._optimizer, self._options = optimizer, options

    def make(self) -> Any:
        plain = copy.deepcopy(MODEL)
        plain[2].bias.requires_grad_(False)
        optimizer = self._optimizer(plain.parameters())
        self.steps(plain, optimizer)
        optimizer.zero_grad()
        return plain, optimizer

    def call(self, state: Any) -> None:
        shardmp.shard(*state, bucket_mb=0.001, **self._options)

    def steps(self, plain: nn.Module, optimizer: Any) -> list[Tensor]:
        for inputs in INPUTS[:2]:
            optimizer.zero_grad()
            plain(inputs).pow(2).mean().backward()
            optimizer.step()
        return [value.detach().clone() for value in plain.state_dict().values()]

    def outcome(self, state: Any, error: BaseException | None) -> str:
        plain, optimizer = state
        if "step" not in vars(optimizer):
            assert error is not None
            assert equal(self.steps(plain, optimizer), self.steps(*self.make())), "the plain model trains otherwise"
            return "before"
        words = refusal(optimizer.step)
        assert "shard()" in words, words
        with pytest.raises(TypeError, match="was given to shard"):
            self.call(state)
        if "interrupted" not in words:
            return "after"
        if any(module._forward_pre_hooks for module in plain.modules()):
            forward = refusal(lambda: plain(INPUTS[0]))
            assert "interrupted" in forward, forward
        else:
            assert equal(list(plain.state_dict().values()), list(self.make()[0].state_dict().values()))
        return "refused"


SHARDING = [Sharding("shard in FP16", adamw), Sharding("shard in BF16, tile by tile", rmsprop, precision="bf16")]

EVERYTHING = [*STEPS, *BETWEEN, *CHECKPOINTS, *SHARDING]


@pytest.mark.parametrize("trial", EVERYTHING, ids=lambda trial: trial.name)
def test_a_seeded_part_of_the_interruptions(trial: Trial) -> None:
    hold(trial, SHARE / 2 if isinstance(trial, Checkpointing) else SHARE)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trial", EVERYTHING, ids=lambda trial: trial.name)
def test_every_interruption(trial: Trial) -> None:
    hold(trial, 1.0)


def hold(trial: Trial, share: float) -> None:
    tally = interrupt_everywhere(trial, share=share)
    print(f"\n{tally}")
    assert not tally.failures, "\n".join([str(tally), *tally.failures[:40]])
