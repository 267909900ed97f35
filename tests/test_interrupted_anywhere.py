"""An exception at any moment of a call leaves the state of before or of after, or everything afterwards refuses.

One rank, a tiny model; Ctrl-C and memory that runs out, at each line of shardmp that runs and at each return, in the
threads of background saves too. `make test-fuzz` makes all interruptions, `make test` a seeded part.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import equal
from interrupted import Trial, interrupt_everywhere
from torch import Tensor, nn

import shardmp
from shardmp import api

SHARE = 0.1
# Warnings of what went wrong are due here.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.BatchNorm1d(4))


MODEL = make_model()
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
        assert operation in words and "restart from the last checkpoint" in words, words
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
        except RuntimeError as refused:
            assert "restart from the last checkpoint" in str(refused), refused
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
        run.optimizer.zero_grad()
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


@pytest.mark.parametrize("trial", STEPS + BETWEEN, ids=lambda trial: trial.name)
def test_a_seeded_part_of_the_interruptions_of_training(trial: Trial, tmp_path: Path) -> None:
    hold(trial, SHARE, tmp_path)


@pytest.mark.fuzz
@pytest.mark.parametrize("trial", STEPS + BETWEEN, ids=lambda trial: trial.name)
def test_every_interruption_of_training(trial: Trial, tmp_path: Path) -> None:
    hold(trial, 1.0, tmp_path)


def hold(trial: Trial, share: float, tmp_path: Path) -> None:
    tally = interrupt_everywhere(trial, share=share)
    print(f"\n{tally}")
    assert not tally.failures, "\n".join([str(tally), *tally.failures[:40]])
