"""What one rank does otherwise than the others: a row for every public option, argument and call.

Owns   the rows, and the training that a row changes on one rank.
Takes  nothing from the library but its public names; the list of what needs a row comes from `inspect`.
Gives  how each rank ended: an error's text, or a digest of masters, parameters, loss scale and skips.
Invariant: a row says "error" with words that every rank must hear, or "equal": all ranks end with the same bits.

A row is keyed as `what_is_public` names things: "shard(stage)", "Precision(max_skips)", "group(lr)",
"ShardedOptimizer.step(divide_by)", "ShardedModule.no_sync()", "save(extra)".
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardmp

Act = Callable[["Training"], Any]


class Net(nn.Module):
    """Enough for two buckets on two ranks, and a buffer."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 8)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) * scale


@dataclass
class Training:
    """One rank's training of three steps; `odd` is whether this rank is the one that differs."""

    odd: bool
    directory: Path
    model: Any = None
    optimizer: Any = None
    told: list[Any] = field(default_factory=list)  # what must be equal besides weights

    def otherwise(self, usual: Any, odd: Any) -> Any:
        """`odd` on the rank that differs, `usual` on the others."""
        return odd if self.odd else usual

    def loss(self, step: int = 7) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(10 * step + dist.get_rank())
        return self.model(torch.randn(4, 8, generator=generator)).square().mean()

    def step(self, number: int, **options: Any) -> None:
        self.optimizer.backward(self.loss(number))
        self.optimizer.step(**options)
        self.optimizer.zero_grad()

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, p in self.model.named_parameters():
            for value in (p, self.optimizer.master(name)):
                found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        report = self.optimizer.report
        words = (self.optimizer.loss_scale, self.optimizer.skipped_steps, report.grad_norm, report.loss, self.told)
        found.update(repr(words).encode())
        return found.hexdigest()


def make(t: Training, *, model: int = 40, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
    """Shard a model of so many hidden units; keywords of `shard`, then those of the optimizer's group."""
    known = inspect.signature(shardmp.shard).parameters
    ours = {key: options.pop(key) for key in list(options) if key in known}
    plain = Net(model)
    ours = {"precision": shardmp.Precision(init_scale=256.0), "bucket_mb": 0.001, **ours}
    whole = optimizer(plain.parameters(), lr=0.01)
    whole.param_groups[0].update(options)
    t.model, t.optimizer = shardmp.shard(plain, whole, **ours)


def train(t: Training, act: Act = lambda t: None, **options: Any) -> str:
    """Three steps; `act` is called before the second one."""
    make(t, **options)
    t.step(1)
    act(t)
    t.step(2)
    t.step(3)
    return t.digest()


@dataclass(frozen=True)
class Row:
    """What a rank does, and what is right: words of the error that all ranks raise; None where all end equal."""

    run: Callable[[Training], Any]
    error: str | None = None


# -- rows by kind


def of_shard(name: str, odd: Any, error: str = "rank", **usual: Any) -> Row:
    return Row(lambda t: train(t, **({name: odd} if t.odd else usual)), error)


def of_precision(name: str, odd: Any) -> Row:
    def run(t: Training) -> str:
        return train(t, precision=shardmp.Precision(init_scale=256.0, **({name: odd} if t.odd else {})))

    if name == "init_scale":
        return Row(lambda t: train(t, precision=shardmp.Precision(init_scale=t.otherwise(256.0, odd))), "precision")
    if name == "param":
        return Row(lambda t: train(t, precision=t.otherwise("fp16", odd)), "precision")
    return Row(run, "precision")


def of_group(name: str, odd: Any) -> Row:
    """Written into a group after the first step."""

    def write(t: Training) -> None:
        if t.odd:
            t.optimizer.param_groups[0][name] = odd

    return Row(lambda t: train(t, write), name)


def of_groups_at_shard(name: str, odd: Any) -> Row:
    return Row(lambda t: train(t, **({name: odd} if t.odd else {})), name)


def only_odd(act: Act, error: str | None = None, **options: Any) -> Row:
    """A call that the others do not make."""
    return Row(lambda t: train(t, lambda t: act(t) if t.odd else None, **options), error)


def all_do(act: Act, error: str | None = None, **options: Any) -> Row:
    return Row(lambda t: train(t, act, **options), error)


def reading(call: Act) -> Row:
    """A look that is no collective: it changes nothing, and its value is the same wherever it is taken."""
    return only_odd(call)


OTHER_OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "betas": (0.8, 0.9),
    "eps": 1e-6,
    "weight_decay": 0.5,
    "amsgrad": True,
    "foreach": True,
    "maximize": True,
    "capturable": True,
    "differentiable": True,
    "fused": False,
    "decoupled_weight_decay": False,
}


def _second_model(t: Training) -> Any:
    plain = Net()
    return shardmp.shard(plain, torch.optim.AdamW(plain.parameters()), precision=shardmp.Precision(init_scale=256.0))


def _shared(t: Training) -> str:
    _, other = _second_model(t)
    return train(t, scaler=other if not t.odd else None)


def _group(t: Training) -> str:
    twice = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=2))
    return train(t, group=twice if t.odd else None)


def _closure(t: Training) -> None:
    def closure() -> Tensor:
        loss = t.loss()
        t.optimizer.backward(loss)
        return loss

    if t.odd:
        t.optimizer.step(closure)
    else:
        t.optimizer.backward(t.loss())
        t.optimizer.step()


def _zero_between(t: Training) -> None:
    t.optimizer.backward(t.loss())
    if t.odd:
        t.optimizer.zero_grad()
    t.optimizer.step()


def _model_zero_between(t: Training) -> None:
    t.optimizer.backward(t.loss())
    if t.odd:
        t.model.zero_grad()
    t.optimizer.step()


def _zero_kind(t: Training) -> None:
    t.optimizer.zero_grad(set_to_none=t.otherwise(True, False))


def _model_zero_kind(t: Training) -> None:
    t.model.zero_grad(set_to_none=t.otherwise(True, False))


def _scaled_by_hand(t: Training) -> None:
    loss = t.loss()
    if t.odd:
        t.optimizer.scale(loss).backward()
    else:
        t.optimizer.backward(loss)
    t.optimizer.step()


def _retained(t: Training) -> None:
    t.optimizer.backward(t.loss(), **t.otherwise({}, {"retain_graph": True}))
    t.optimizer.step()


def _no_data(t: Training) -> None:
    t.optimizer.backward(t.otherwise(t.loss(), None))
    t.optimizer.step()


def _join(t: Training) -> None:
    for batch in t.optimizer.join(range(t.otherwise(1, 3))):
        t.optimizer.backward(None if batch is None else t.loss(batch))
        t.optimizer.step()


def _full_grad(t: Training) -> None:
    t.optimizer.backward(t.loss())
    t.optimizer.full_grad(t.otherwise("first.weight", "second.weight"))


def _divide(t: Training) -> None:
    t.optimizer.backward(t.loss())
    t.optimizer.step(divide_by=t.otherwise(2.0, 3.0))


def _set_clip(t: Training) -> None:
    t.optimizer.max_grad_norm = t.otherwise(1.0, 0.5)


def _no_sync(t: Training) -> None:
    with t.model.no_sync() if t.odd else contextlib.nullcontext():
        t.optimizer.backward(t.loss())
    t.optimizer.backward(t.loss(8))
    t.optimizer.step()


def _last_under_no_sync(t: Training) -> None:
    t.optimizer.backward(t.loss())
    with t.model.no_sync() if t.odd else contextlib.nullcontext():
        t.optimizer.backward(t.loss(8))
    t.optimizer.step()


def _load_weights(t: Training) -> None:
    t.model.load_state_dict({name: value / 2 for name, value in t.model.state_dict().items()})


def _load_other_weights(t: Training) -> None:
    factor = t.otherwise(0.5, 0.25)
    t.model.load_state_dict({name: value * factor for name, value in t.model.state_dict().items()})


def _load_some_weights(t: Training) -> None:
    state = dict(t.model.state_dict())
    if t.odd:
        state.pop("second.bias")
    t.model.load_state_dict({name: value / 2 for name, value in state.items()}, strict=False)


def _larger_buffer(t: Training) -> None:
    if t.odd:
        t.model.module.calls = torch.zeros(5)


def _save(**odd: Any) -> Act:
    def act(t: Training) -> None:
        shardmp.save(t.directory, t.model, t.optimizer, **(odd if t.odd else {})).wait()

    return act


def _load(usual: Mapping[str, Any] | None = None, **odd: Any) -> Act:
    def act(t: Training) -> None:
        counter = _Counter()
        shardmp.save(t.directory, t.model, t.optimizer, extra={"counter": counter})
        given = {"extra": {"counter": counter}, **(usual or {})}
        loaded = shardmp.load(t.directory, t.model, **{"optimizer": t.optimizer, **given, **(odd if t.odd else {})})
        t.told.append(loaded.step)

    return act


class _Counter:
    def __init__(self) -> None:
        self.count = 5

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _other_root(t: Training) -> None:
    with tempfile.TemporaryDirectory() as other:
        shardmp.save(t.otherwise(t.directory, Path(other)), t.model, t.optimizer).wait()


def _load_from_elsewhere(t: Training) -> None:
    shardmp.save(t.directory, t.model, t.optimizer)
    t.told.append(shardmp.load(t.otherwise(t.directory, t.directory / "nowhere"), t.model, t.optimizer).step)


def _run_of(t: Training, *, root: Path | None = None, **options: Any) -> shardmp.Checkpoints:
    return shardmp.Checkpoints(root or t.directory, t.model, t.optimizer, **{"background": False, **options})


def _checkpoints(*, elsewhere: bool = False, **odd: Any) -> Callable[[Training], str]:
    """Checkpoints after each of two steps, then a resumption; `elsewhere`: in another directory where a rank differs."""

    def run(t: Training) -> str:
        make(t)
        root = t.directory / "elsewhere" if t.odd and elsewhere else None
        checkpoints = _run_of(t, root=root, **{"every": 1, **(odd if t.odd else {})})
        try:
            for number in (1, 2):
                t.step(number)
                checkpoints.after_step()
            loaded = checkpoints.resume()
            t.told.append(None if loaded is None else loaded.step)
        finally:
            checkpoints.close()
        t.step(3)
        return t.digest()

    return run


def _checkpoints_call(call: Callable[[shardmp.Checkpoints], Any]) -> Callable[[Training], str]:
    """A call that the others do not make."""

    def run(t: Training) -> str:
        make(t)
        checkpoints = _run_of(t)
        try:
            t.step(1)
            checkpoints.save()
            if t.odd:
                call(checkpoints)
            t.step(2)
            t.step(3)
        finally:
            checkpoints.close()
        return t.digest()

    return run


def _count_otherwise(t: Training) -> None:
    counters = t.optimizer.counters()
    counters["scaler"]["scale"] = 8.0
    t.optimizer.load_counters(counters)


def _stop(t: Training) -> None:
    t.optimizer.stop_requested = t.odd
    t.step(5)
    t.told.append(t.optimizer.report.stop)


def _withheld(t: Training) -> str:
    """One rank looks at a step that was withheld, and the others go on."""
    make(t)
    t.step(1)
    if t.odd:
        t.optimizer.param_groups[0]["lr"] = 0.5
    t.step(2)
    if t.odd:
        t.optimizer.report.raise_withheld()
    t.step(3)
    return t.digest()


def _saved(t: Training, look: Callable[[shardmp.Saving], Any]) -> None:
    saving = shardmp.save(t.directory, t.model, t.optimizer, background=True)
    if t.odd:
        look(saving)
    t.step(4)
    saving.wait()


def _scheduled(t: Training, method: str) -> str:
    """A class with `train` and `eval`, of which one rank calls one: it is collective."""
    make(t, optimizer=_Averaging)
    t.step(1)
    if t.odd:
        getattr(t.optimizer, method)()
    t.step(2)
    t.step(3)
    return t.digest()


class _Averaging(torch.optim.SGD):
    """Plain descent, whose `eval` halves the parameters and whose `train` brings them back."""

    def eval(self) -> None:
        self._times(0.5)

    def train(self) -> None:
        self._times(2.0)

    @torch.no_grad()
    def _times(self, factor: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor)


def _replace(t: Training, name: str, value: Any) -> None:
    setattr(t.model, name, value)


_REPORTED = ("loss", "stop", "overflow")

ROWS: dict[str, Row] = {
    # shard
    "shard(model)": of_shard("model", 48, "first.weight"),
    "shard(optimizer)": of_shard("optimizer", torch.optim.Adam, "optimizer"),
    "shard(precision)": of_shard("precision", "bf16", "precision"),
    "shard(stage)": of_shard("stage", 1, "options"),
    "shard(reduce)": of_shard("reduce", "native", "options"),
    "shard(average)": of_shard("average", "micro_batches", "options"),
    "shard(max_grad_norm)": of_shard("max_grad_norm", 0.25, "options"),
    "shard(bucket_mb)": of_shard("bucket_mb", 0.5, "options"),
    "shard(overlap)": of_shard("overlap", False, "options"),
    "shard(buffers)": of_shard("buffers", "local", "options"),
    "shard(scaler)": Row(_shared, "scaler"),
    "shard(group)": Row(_group, ""),
    # init, when the process group is there: each rank's own look at it
    "init(backend)": only_odd(lambda t: shardmp.init(backend="gloo")),
    "init(timeout)": only_odd(lambda t: shardmp.init(timeout=77)),
    "init(arrival_timeout)": only_odd(lambda t: shardmp.init(arrival_timeout=77)),
    # Precision
    "Precision(param)": of_precision("param", "bf16"),
    "Precision(init_scale)": of_precision("init_scale", 128.0),
    "Precision(growth_factor)": of_precision("growth_factor", 4.0),
    "Precision(backoff_factor)": of_precision("backoff_factor", 0.25),
    "Precision(growth_interval)": of_precision("growth_interval", 3),
    "Precision(hysteresis)": of_precision("hysteresis", 2),
    "Precision(min_scale)": of_precision("min_scale", 2.0),
    "Precision(max_scale)": of_precision("max_scale", 2.0**20),
    "Precision(max_skips)": of_precision("max_skips", 3),
    "Precision(static_scale)": of_precision("static_scale", 64.0),
    "Precision(keep_fp32)": of_precision("keep_fp32", ("second",)),
    "Precision(autocast)": of_precision("autocast", False),
    "Precision(output)": of_precision("output", "param"),
    # what the groups of an optimizer say
    **{f"group({name})": of_group(name, value) for name, value in OTHER_OPTIONS.items()},
    **{f"group({name}) at shard": of_groups_at_shard(name, value) for name, value in OTHER_OPTIONS.items()},
    # ShardedOptimizer
    "ShardedOptimizer.scale(loss)": all_do(_scaled_by_hand),
    "ShardedOptimizer.backward(loss)": all_do(_no_data),
    "ShardedOptimizer.backward(options)": all_do(_retained),
    "ShardedOptimizer.backward()": only_odd(lambda t: t.optimizer.backward(t.loss()), "backward"),
    "ShardedOptimizer.join(batches)": all_do(_join),
    "ShardedOptimizer.step(closure)": all_do(_closure),
    "ShardedOptimizer.step(divide_by)": all_do(_divide, "divide_by"),
    "ShardedOptimizer.zero_grad()": all_do(_zero_between, "zero_grad"),
    "ShardedOptimizer.zero_grad(set_to_none)": all_do(_zero_kind),
    "ShardedOptimizer.clip_grad_norm_(max_norm)": all_do(
        lambda t: t.optimizer.clip_grad_norm_(t.otherwise(1.0, 0.5)), "clip_grad_norm_"
    ),
    "ShardedOptimizer.max_grad_norm": all_do(_set_clip, "max_grad_norm"),
    "ShardedOptimizer.train": Row(lambda t: _scheduled(t, "train"), ""),
    "ShardedOptimizer.eval": Row(lambda t: _scheduled(t, "eval"), ""),
    "ShardedOptimizer.counters()": reading(lambda t: t.optimizer.counters()),
    "ShardedOptimizer.load_counters(counters)": only_odd(_count_otherwise, "loss scale"),
    "ShardedOptimizer.refuse_between_steps(operation)": reading(lambda t: t.optimizer.refuse_between_steps("this")),
    "ShardedOptimizer.refuse_withheld()": reading(lambda t: t.optimizer.refuse_withheld()),
    "ShardedOptimizer.shared_scaler()": reading(lambda t: t.optimizer.shared_scaler()),
    "ShardedOptimizer.shares_ranks_with(collectives)": reading(
        lambda t: t.optimizer.shares_ranks_with(t.optimizer._collectives)
    ),
    "ShardedOptimizer.loss_scale": reading(lambda t: t.optimizer.loss_scale),
    "ShardedOptimizer.skipped_steps": reading(lambda t: t.optimizer.skipped_steps),
    "ShardedOptimizer.steps": reading(lambda t: t.optimizer.steps),
    "ShardedOptimizer.memory()": reading(lambda t: t.optimizer.memory()),
    "ShardedOptimizer.predicted_memory()": reading(lambda t: t.optimizer.predicted_memory()),
    "ShardedOptimizer.wire_bytes()": reading(lambda t: t.optimizer.wire_bytes()),
    "ShardedOptimizer.predicted_wire_bytes(backwards)": reading(lambda t: t.optimizer.predicted_wire_bytes(2)),
    "ShardedOptimizer.synchronize()": reading(lambda t: t.optimizer.synchronize()),
    "ShardedOptimizer.master(name)": all_do(
        lambda t: t.optimizer.master(t.otherwise("first.weight", "second.weight")), "master"
    ),
    "ShardedOptimizer.full_grad(name)": all_do(_full_grad, "full_grad"),
    # ShardedModule
    "ShardedModule.forward()": all_do(lambda t: t.step(t.otherwise(4, 5))),
    "ShardedModule.forward() without a backward": reading(lambda t: t.model(torch.ones(2, 8), scale=2.0)),
    "ShardedModule.no_sync()": all_do(_no_sync, "no_sync", stage=1),
    "ShardedModule.no_sync() last": all_do(_last_under_no_sync, "no_sync", stage=1),
    "ShardedModule.zero_grad()": all_do(_model_zero_between, "zero_grad"),
    "ShardedModule.zero_grad(set_to_none)": all_do(_model_zero_kind),
    "ShardedModule.named_parameters()": reading(lambda t: dict(t.model.named_parameters())),
    "ShardedModule.named_buffers()": reading(lambda t: dict(t.model.named_buffers())),
    "ShardedModule.state_dict()": reading(lambda t: t.model.state_dict()),
    "ShardedModule.load_state_dict()": only_odd(_load_weights, "load_state_dict"),
    "ShardedModule.load_state_dict(state_dict)": all_do(_load_other_weights, "load_state_dict"),
    "ShardedModule.load_state_dict(strict)": all_do(_load_some_weights, "load_state_dict"),
    "ShardedModule.load_state_dict(assign)": only_odd(
        lambda t: t.model.load_state_dict(t.model.state_dict(), assign=True), ""
    ),
    "ShardedModule buffers": all_do(_larger_buffer, "buffer"),
    "ShardedModule.register_buffer()": only_odd(lambda t: t.model.register_buffer("late", torch.ones(3)), "late"),
    "ShardedModule.register_parameter()": only_odd(
        lambda t: t.model.register_parameter("late", nn.Parameter(torch.ones(3))), "late"
    ),
    "ShardedModule.register_module()": only_odd(lambda t: t.model.register_module("late", nn.Linear(2, 2)), "late"),
    "ShardedModule.add_module()": only_odd(lambda t: t.model.add_module("late", nn.Linear(2, 2)), "late"),
    **{
        f"ShardedModule.register_{name}(hook)": reading(
            lambda t, name=name: getattr(t.model, f"register_{name}")(lambda *_: None)
        )
        for name in (
            "state_dict_pre_hook",
            "state_dict_post_hook",
            "load_state_dict_pre_hook",
            "load_state_dict_post_hook",
        )
    },
    # save and load
    "save(root)": all_do(_other_root),  # rank 0's is the one
    "save(step)": all_do(_save(step=40), "step"),
    "save(extra)": all_do(_save(extra={"a": 1}), "extra"),
    "save(per_rank)": all_do(_save(per_rank={"a": 1})),
    "save(keep)": all_do(_save(keep=1), "keep"),
    "save(background)": all_do(_save(background=True), "background"),
    "save()": only_odd(lambda t: shardmp.save(t.directory, t.model, t.optimizer), ""),
    "load(root)": all_do(_load_from_elsewhere),
    "load(optimizer)": all_do(_load(optimizer=None), "optimizer"),
    "load(step)": all_do(_load(step=17), "step"),
    "load(extra)": all_do(_load(extra={}), "extra"),
    "load(per_rank)": all_do(_load(per_rank={"other": _Counter()}), "other"),
    "load(strict)": all_do(_load(strict=False), "strict"),
    "load(cast)": all_do(_load(cast=True), "cast"),
    "load()": only_odd(lambda t: shardmp.load(t.directory, t.model, t.optimizer), ""),
    # Checkpoints
    "Checkpoints(root)": Row(_checkpoints(elsewhere=True)),
    "Checkpoints(every)": Row(_checkpoints(every=2), "save"),
    "Checkpoints(keep)": Row(_checkpoints(keep=1), "keep"),
    "Checkpoints(extra)": Row(_checkpoints(extra={"a": 1}), "extra"),
    "Checkpoints(per_rank)": Row(_checkpoints(per_rank={"a": 1})),
    "Checkpoints(background)": Row(_checkpoints(background=True), "background"),
    "Checkpoints.save(background)": Row(_checkpoints_call(lambda c: c.save()), ""),
    "Checkpoints.resume()": Row(_checkpoints_call(lambda c: c.resume()), ""),
    "Checkpoints.after_step()": Row(_checkpoints_call(lambda c: c.after_step())),
    "Checkpoints.step": Row(_checkpoints_call(lambda c: c.step)),
    "Checkpoints.close()": Row(_checkpoints_call(lambda c: c.close())),
    # what a step and a save give
    **{
        f"StepReport.{name}": reading(lambda t, name=name: getattr(t.optimizer.report, name))
        for name in ("grad_norm", "loss_scale", "skipped", "withheld", "hopeless_skips", "next_loss_scale", "arrived")
    },
    **{f"StepReport.{name}": reading(lambda t, name=name: getattr(t.optimizer.report, name)) for name in _REPORTED},
    "StepReport.check_update()": reading(lambda t: t.optimizer.report.check_update()),
    "StepReport.check_skips(precision)": reading(lambda t: t.optimizer.report.check_skips(t.optimizer.precision)),
    "StepReport.raise_withheld(collectives)": Row(_withheld, "lr"),
    "StepReport.why_withheld()": reading(lambda t: t.optimizer.report.why_withheld()),
    "Saving.done": all_do(lambda t: _saved(t, lambda saving: saving.done)),
    "Saving.wait()": all_do(lambda t: _saved(t, lambda saving: saving.wait())),
    "stop_requested": all_do(_stop),
}


# -- what needs a row

# The order of a call's arguments is Python's; what no rank calls in a training has no ranks that could differ.
FUNCTIONS = (shardmp.shard, shardmp.init, shardmp.save, shardmp.load, shardmp.Checkpoints)
CLASSES = (
    shardmp.ShardedOptimizer,
    shardmp.ShardedModule,
    shardmp.Checkpoints,
    shardmp.Saving,
    shardmp.StepReport,
)
NOT_IN_A_TRAINING = {"CheckpointError", "Imported", "Loaded", "Overflow", "World", "budget", "export", "formats"} | {
    "import_deepspeed",
    "__version__",
}


def what_is_public() -> Iterator[str]:
    """Names of rows: each parameter of the functions, each field of `Precision`, each public method and property."""
    for function in FUNCTIONS:
        for name in inspect.signature(function).parameters:
            if function in (shardmp.save, shardmp.Checkpoints) and name in ("model", "optimizer"):
                continue  # what `shard` gave
            if (function, name) == (shardmp.load, "model"):
                continue
            yield f"{function.__name__}({name})"
    for name in inspect.signature(shardmp.Precision).parameters:
        yield f"Precision({name})"
    for name in torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults:
        yield f"group({name})"
        yield f"group({name}) at shard"
    for owner in CLASSES:
        for name, member in vars(owner).items():
            if name.startswith("_") and name != "__call__":
                continue
            if not inspect.isfunction(member):
                yield f"{owner.__name__}.{name}"
                continue
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            own = [p.name for p in inspect.signature(member).parameters.values() if p.name != "self"]
            if all(p.kind in kinds for p in inspect.signature(member).parameters.values() if p.name != "self"):
                own = []
            yield from (f"{owner.__name__}.{name}({argument})" for argument in own or [""])


# -- running a row


def ends(key: str, odd_rank: int, directory: str) -> tuple[str, str]:
    """How this rank ends: ("error", text), or ("value", digest)."""
    t = Training(dist.get_rank() == odd_rank, Path(directory))
    try:
        return "value", ROWS[key].run(t)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"


def wrong(key: str, found: list[tuple[str, str]]) -> str | None:
    """What is not as the row says; None where all is."""
    row = ROWS[key]
    listed = "\n".join(f"  rank {rank}: {kind} {text[:600]}" for rank, (kind, text) in enumerate(found))
    kinds = {kind for kind, _ in found}
    if row.error is None:
        return None if kinds == {"value"} and len({text for _, text in found}) == 1 else f"not equal:\n{listed}"
    if kinds != {"error"}:
        return f"not an error on every rank:\n{listed}"
    missing = [rank for rank, (_, text) in enumerate(found) if row.error not in text]
    return f"rank {missing[0]} does not hear of {row.error!r}:\n{listed}" if missing else None
