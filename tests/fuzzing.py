"""Random trainings against the plain reference: what a `Configuration` is, how it is drawn, run, checked and made smaller.

Owns   the ranges from which models, optimizers, options, backwards and overflows are drawn.
Takes  a seed; or a configuration, as a failure prints it.
Gives  None where every bit is right, else a text that says what differs.
Invariant: a configuration is plain data, the same seed draws the same one anywhere, and it alone decides a run.

Two kinds of right: without `exact` masters, 16-bit parameters, buffers, norms, scales and skips equal those of reference.py,
which shares no code with the library; with `exact` they equal those of one rank, for any dealing of the same micro-batches and
through a checkpoint that is saved on one number of ranks and loaded on another.
"""

from __future__ import annotations

import dataclasses
import math
import random
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardmp
import shardmp.update
from shardmp import tensorcore
from shardmp.update import takes_flags

WORDS = 13  # of the embedding
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Configuration:
    """One training. Every field's default is its plainest value, to which a failing configuration is reduced."""

    seed: int = 0
    ranks: int = 1
    width: int = 8
    layers: tuple[str, ...] = ("linear",)
    tied: bool = False
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = (("lr", 0.05),)
    groups: int = 1  # the parameters are dealt to so many groups in turn, each with an lr of its own
    precision: str = "fp32"
    scale: tuple[tuple[str, Any], ...] = ()
    autocast: bool = True
    stage: int = 2
    reduce: str = "fp32"
    average: str = "ranks"
    max_grad_norm: float | None = None
    bucket_mb: float | None = None
    overlap: bool = True
    no_sync: bool = False
    tile: int | None = None  # elements of an update's tile; None: the library's own
    backwards: tuple[int, ...] = (1, 1)  # of each step
    idle: tuple[tuple[int, int, int], ...] = ()  # (step, backward, rank) without data
    loud: tuple[tuple[int, int, int], ...] = ()  # (step, backward, rank) whose loss overflows FP16
    schedule: bool = False  # the lr of every group is halved after each step
    divide_by: float | None = None
    history: int = 0  # steps that the plain optimizer has made before `shard`
    between: bool = False  # after each step: an evaluation, and the model's own weights loaded into it
    resume: tuple[int, int] | None = (
        None  # before this step saved, and loaded on so many ranks (the same, but for `exact`)
    )


# -- drawing

OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "AdamW": (
        {"lr": 0.01},
        {"lr": 0.01, "amsgrad": True, "weight_decay": 0.3},
        {"lr": 0.003, "betas": (0.5, 0.9), "foreach": False, "fused": False},
        {"lr": 0.003, "maximize": True},
    ),
    "Adam": ({"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "foreach": True}),
    "SGD": (
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.5},
    ),
    "RMSprop": ({"lr": 0.003}, {"lr": 0.003, "centered": True, "momentum": 0.5}),
    "Adagrad": ({"lr": 0.05}, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "NAdam": ({"lr": 0.003},),
    "RAdam": ({"lr": 0.003},),
    "Adamax": ({"lr": 0.003},),
    "Adadelta": ({"lr": 1.0},),
    "ASGD": ({"lr": 0.01},),
    "Rprop": ({"lr": 0.001},),
}
LAYERS = (
    "linear",
    "bare",  # linear without a bias
    "norm",
    "rms",
    "gelu",
    "twice",  # one linear, applied two times
    "kept",  # a linear that stays FP32
    "gain",  # a parameter of no dimension
    "bias",  # one parameter, read by the parent
    "frozen",
    "unused",
    "empty",  # a parameter without elements
    "attention",
    "checkpointed",
    "sometimes",  # used by even micro-batches alone
    "batchnorm",
    "convolution",
)


def draw(seed: int) -> Configuration:
    """The configuration of a seed."""
    dice = random.Random(seed)
    exact = dice.random() < 0.25
    precision = "fp16" if exact else dice.choice(("fp16", "fp16", "bf16", "fp32"))
    layers = tuple(dice.choice(LAYERS) for _ in range(dice.randint(1, 6)))
    if exact:  # batch statistics are of whatever rank 0 has seen last
        layers = tuple(layer for layer in layers if layer != "batchnorm") or ("linear",)
    steps = dice.randint(2, 4)
    ranks = dice.randint(2, 3) if exact else dice.randint(1, 3)
    most = dice.choice((1, 1, 2, 3))
    backwards = tuple(dice.randint(1, most) for _ in range(steps))
    places = [(s, b, r) for s in range(steps) for b in range(backwards[s]) for r in range(ranks)]
    stage = dice.choice((1, 2))
    optimizer = dice.choice(list(OPTIMIZERS))
    options = dice.choice(OPTIMIZERS[optimizer])
    scale: dict[str, Any] = {}
    if precision == "fp16":
        scale = {"init_scale": 2.0 ** dice.randint(0, 16)}
        if dice.random() < 0.3:
            scale |= {"growth_interval": dice.randint(1, 3), "growth_factor": dice.choice((2.0, 1.5))}
        if dice.random() < 0.3:
            scale |= {"hysteresis": dice.randint(1, 3), "backoff_factor": dice.choice((0.5, 0.25, 0.7))}
        if dice.random() < 0.15:
            scale = {"static_scale": 2.0 ** dice.randint(0, 12)}
    return Configuration(
        seed=seed,
        ranks=ranks,
        width=dice.choice((3, 8, 40, 72)),
        layers=layers,
        tied=dice.random() < 0.3,
        optimizer=optimizer,
        options=tuple(options.items()),
        groups=dice.randint(1, 3),
        precision=precision,
        scale=tuple(scale.items()),
        autocast="frozen" in layers or dice.random() < 0.8,  # frozen parameters stay FP32, and nobody else would cast
        stage=stage,
        reduce="exact" if exact else "fp32",
        average="micro_batches" if exact else dice.choice(("ranks", "micro_batches")),
        max_grad_norm=dice.choice((None, 0.1, 0.5, 2.0)),
        bucket_mb=dice.choice((None, 0.0005, 0.004, 0.02)),
        overlap=dice.random() < 0.7,
        no_sync=stage == 1 and not exact and dice.random() < 0.4,
        tile=dice.choice((None, 1024)),
        backwards=backwards,
        idle=tuple(place for place in places if dice.random() < 0.06),
        loud=tuple(place for place in places if dice.random() < 0.04),
        schedule=dice.random() < 0.3,
        divide_by=dice.choice((0.5, 3.0)) if dice.random() < 0.15 else None,
        history=dice.choice((0, 0, 0, 1, 3)),
        between=dice.random() < 0.2,
        resume=(dice.randint(1, steps - 1), dice.randint(1, 3) if exact else ranks) if dice.random() < 0.3 else None,
    )


# -- the model and its losses


def kept(configuration: Configuration) -> tuple[type | str, ...]:
    """`keep_fp32`: a pattern must match something."""
    return (*reference.NORM_LAYERS, *(["*kept*"] if "kept" in configuration.layers else []))


class Layer(nn.Module):
    """One layer of a random model, from `width` features to `width`."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("linear", "twice", "frozen", "sometimes", "checkpointed", "unused"):
            self.inner = nn.Linear(width, width)
            self.inner.requires_grad_(kind != "frozen")
        elif kind == "kept":
            self.kept = nn.Linear(width, width)
        elif kind == "bare":
            self.inner = nn.Linear(width, width, bias=False)
        elif kind in ("norm", "rms"):
            self.inner = {"norm": nn.LayerNorm, "rms": nn.RMSNorm}[kind](width)
        elif kind == "batchnorm":
            self.inner = nn.BatchNorm1d(width)
        elif kind == "convolution":
            self.inner = nn.Conv1d(1, 1, 3, padding=1)
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(width, 1, batch_first=True)
        elif kind == "gain":
            self.gain = nn.Parameter(torch.tensor(1.25))
        elif kind == "bias":
            self.bias = nn.Parameter(torch.linspace(-1, 1, width))
        elif kind == "empty":
            self.nothing = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: Tensor, even: bool) -> Tensor:
        kind = self.kind
        if kind == "gelu":
            return F.gelu(x)
        if kind == "gain":
            return x * self.gain
        if kind == "bias":
            return x + self.bias
        if kind in ("unused", "empty") or (kind == "sometimes" and not even):
            return x
        if kind == "kept":
            return x + self.kept(x)
        if kind == "twice":
            return self.inner(F.gelu(self.inner(x)))
        if kind == "attention":
            return x + self.inner(x, x, x, need_weights=False)[0]
        if kind == "checkpointed":
            return x + checkpoint(self.inner, x, use_reentrant=False)
        if kind == "batchnorm":
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        if kind == "convolution":
            return x + self.inner(x.flatten(0, 1).unsqueeze(1)).view(x.shape)
        return self.inner(x)


class Model(nn.Module):
    """An embedding, the layers, and a head that may be the embedding."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        torch.manual_seed(configuration.seed)
        self.embedding = nn.Embedding(WORDS, configuration.width)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleList(Layer(kind, configuration.width) for kind in configuration.layers)
        self.head = nn.Linear(configuration.width, WORDS, bias=False)
        if configuration.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, even: bool) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, even)
        return self.head(x)


def loss_of(configuration: Configuration, step: int, backward: int, rank: int) -> reference.Loss | None:
    """The loss of one micro-batch; None on a rank without data."""
    place = (step, backward, rank)
    if place in configuration.idle:
        return None
    generator = torch.Generator("cpu").manual_seed(hash((configuration.seed, *place)) % 2**31)
    tokens = torch.randint(0, WORDS, (2, 4), generator=generator)
    targets = torch.randint(0, WORDS, (8,), generator=generator)
    # With `exact` another dealing gives a micro-batch to another rank: which layers it uses must not depend on that.
    even = (step + backward + rank) % 2 == 0

    def loss(model: Any) -> Tensor:
        value = F.cross_entropy(model(tokens, even).flatten(0, 1), targets)
        return value * 1e9 if place in configuration.loud else value

    return loss


def optimizer_of(configuration: Configuration, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    options = dict(configuration.options)
    shares = [params[number :: configuration.groups] for number in range(configuration.groups)]
    groups = [{"params": share, "lr": options["lr"] / 2**number} for number, share in enumerate(shares) if share]
    optimizer = getattr(torch.optim, configuration.optimizer)(groups, **options)
    before = [p.detach().clone() for p in params]
    for step in range(configuration.history):
        for number, p in enumerate(params):
            generator = torch.Generator("cpu").manual_seed(configuration.seed + 100 * step + number)
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()
    for p, values in zip(params, before, strict=True):  # the history is in the state alone
        p.data.copy_(values)
    return optimizer


def _halve(configuration: Configuration, optimizer: torch.optim.Optimizer) -> None:
    if configuration.schedule:
        for group in optimizer.param_groups:
            group["lr"] /= 2


# -- a run


@dataclass
class Found:
    """The end of a run, the same on every rank."""

    masters: dict[str, Tensor]
    values: dict[str, Tensor]  # parameters and buffers as `state_dict` gives them
    trace: list[tuple[float, bool, float, float | None]]  # scale, skipped, norm, loss of each step
    scale: float


def _sharded(configuration: Configuration) -> tuple[Any, Any]:
    plain = Model(configuration)
    scale = dict(configuration.scale)
    policy = shardmp.Precision(
        configuration.precision, keep_fp32=kept(configuration), autocast=configuration.autocast, **scale
    )
    return shardmp.shard(
        plain,
        optimizer_of(configuration, plain),
        precision=policy,
        stage=configuration.stage,
        reduce=configuration.reduce,
        average=configuration.average,
        max_grad_norm=configuration.max_grad_norm,
        bucket_mb=configuration.bucket_mb,
        overlap=configuration.overlap,
    )


def _losses(configuration: Configuration, step: int) -> list[reference.Loss | None]:
    """This rank's losses of one step. The micro-batches are those of `ranks` ranks, on any number of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == configuration.ranks:
        return [loss_of(configuration, step, b, rank) for b in range(configuration.backwards[step])]
    places = [(b, r) for b in range(configuration.backwards[step]) for r in range(configuration.ranks)]
    own = [loss_of(configuration, step, *place) for place in places[rank::ranks]]
    return own + [None] * (math.ceil(len(places) / ranks) - len(own))


def run(configuration: Configuration, first: int, last: int, directory: str) -> Found:
    """Steps `first` to `last` on this rank; a checkpoint of the steps before is loaded, one of those here is saved."""
    patch = pytest.MonkeyPatch()
    if configuration.tile is not None:
        patch.setattr(shardmp.update, "UPDATE_TILE", configuration.tile)
    try:
        model, optimizer = _sharded(configuration)
        if first:
            shardmp.load(directory, model, optimizer)
        trace = []
        for step in range(first, last):
            losses = _losses(configuration, step)
            for number, loss in enumerate(losses):
                with model.no_sync() if configuration.no_sync and number < len(losses) - 1 else _nothing():
                    optimizer.backward(None if loss is None else loss(model))
            report = optimizer.step(divide_by=configuration.divide_by)
            optimizer.zero_grad()
            _halve(configuration, optimizer)
            if configuration.between:
                _between(configuration, model)
            trace.append((report.loss_scale, report.skipped, report.grad_norm, report.loss))
        if last < len(configuration.backwards):
            shardmp.save(directory, model, optimizer)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        found = {name: optimizer.master(name).clone() for name in names}
        values = {name: value.clone() for name, value in model.state_dict().items()}
        return Found(found, values, trace, optimizer.loss_scale)
    finally:
        patch.undo()


@torch.no_grad()
def _between(configuration: Configuration, model: Any) -> None:
    model.eval()
    loss = loss_of(configuration, 99, 0, 0)
    assert loss is not None
    assert math.isfinite(loss(model).item())
    model.train()
    model.load_state_dict(model.state_dict())


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def run_in_parts(configuration: Configuration, parts: Sequence[tuple[int, int, int]]) -> Found:
    """The whole training, on `ranks` ranks from step `first` to `last` for each part; all ranks must agree."""
    traces: list[tuple[float, bool, float, float | None]] = []
    with tempfile.TemporaryDirectory() as directory:
        for ranks, first, last in parts:
            ends = run_ranks(run, ranks, configuration, first, last, directory)
            for rank, end in enumerate(ends[1:], 1):
                difference = differ(end, ends[0], same_loss=True)
                if difference:
                    raise AssertionError(f"rank {rank} against rank 0: {difference}")
            traces += ends[0].trace
    return dataclasses.replace(ends[0], trace=traces)


def expected(configuration: Configuration) -> Found:
    """What the reference gives."""
    dtype = DTYPES[configuration.precision]
    if dtype != torch.float32:
        tensorcore.enable(dtype)
    steps: list[reference.Step] = [
        [[loss_of(configuration, s, b, r) for r in range(configuration.ranks)] for b in range(count)]
        for s, count in enumerate(configuration.backwards)
    ]
    scale = dict(configuration.scale)
    plain = Model(configuration)
    result = reference.train(
        lambda: Model(configuration),
        lambda model: optimizer_of(configuration, model),
        steps,
        dtype=dtype,
        loss_scale=reference.LossScale(**scale) if dtype == torch.float16 else None,
        keep_fp32=kept(configuration),
        autocast=configuration.autocast,
        average=configuration.average,
        max_grad_norm=configuration.max_grad_norm,
        fused=takes_flags(optimizer_of(configuration, plain)),
        no_sync=configuration.no_sync,
        divide_by=configuration.divide_by,
        after_step=lambda optimizer: _halve(configuration, optimizer),
    )
    values = {name: value.to(result.dtypes[name]) for name, value in result.masters.items()}
    trace = [(step.scale, step.skipped, step.norm, step.loss) for step in result.trace]
    return Found(result.masters, values | result.buffers, trace, result.scale)


def differ(found: Found, right: Found, *, same_loss: bool = False) -> str | None:
    """What differs first, in the order in which a fault would show; None where every bit is equal."""
    for step, (ours, theirs) in enumerate(zip(found.trace, right.trace, strict=True)):
        for what, a, b in zip(("loss scale", "skipped"), ours, theirs, strict=False):
            if a != b:
                return f"step {step + 1}: {what} is {a}, expected {b}"
        if not ours[1] and ours[2] != theirs[2]:
            return f"step {step + 1}: the norm is {ours[2]!r}, expected {theirs[2]!r}"
        if (ours[3] is None) != (theirs[3] is None):
            return f"step {step + 1}: the loss is {ours[3]}, expected {theirs[3]}"
        # The mean of FP64 losses may be added in another order by the reference; between ranks it is one number.
        if ours[3] is not None and not _close(ours[3], theirs[3], 0.0 if same_loss else 1e-6):
            return f"step {step + 1}: the loss is {ours[3]}, expected {theirs[3]}"
    for kind, mine, other in (("master", found.masters, right.masters), ("value", found.values, right.values)):
        for name, value in other.items():
            if not torch.equal(mine[name], value) and not _both_nan(mine[name], value):
                worst = (mine[name].double() - value.double()).abs().max().item()
                return f"the {kind} of {name} differs by up to {worst:.3g}"
    if found.scale != right.scale:
        return f"the loss scale is {found.scale} at the end, expected {right.scale}"
    return None


def _close(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(abs(a), abs(b))


def _both_nan(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def check(configuration: Configuration) -> str | None:
    """None where the run is right to the bit, else what is wrong."""
    last = len(configuration.backwards)
    try:
        right = (
            run_in_parts(configuration, [(1, 0, last)]) if configuration.reduce == "exact" else expected(configuration)
        )
        parts = [(configuration.ranks, 0, last)]
        if configuration.resume is not None:
            step, ranks = configuration.resume
            parts = [(configuration.ranks, 0, step), (ranks, step, last)]
        return differ(run_in_parts(configuration, parts), right, same_loss=False)
    except RankError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()


# -- making a failing one smaller


def shrink(configuration: Configuration, fails: Callable[[Configuration], bool], tries: int = 60) -> Configuration:
    """A plainer configuration that fails too: fields at their defaults, layers and backwards left out, one at a time."""
    plainer = True
    while plainer:
        plainer = False
        for candidate in _plainer(configuration):
            if tries <= 0:
                return configuration
            tries -= 1
            if fails(candidate):
                configuration, plainer = candidate, True
                break
    return configuration


def _plainer(configuration: Configuration) -> list[Configuration]:
    found = []
    for field in dataclasses.fields(Configuration):
        if field.name in ("seed", "optimizer", "options", "reduce", "average", "layers", "backwards"):
            continue
        if getattr(configuration, field.name) != field.default:
            found.append(dataclasses.replace(configuration, **{field.name: field.default}))
    if configuration.reduce != "exact" and configuration.average != "ranks":
        found.append(dataclasses.replace(configuration, average="ranks"))
    if configuration.optimizer != "SGD":
        found.append(dataclasses.replace(configuration, optimizer="SGD", options=(("lr", 0.05),)))
    for number in range(len(configuration.layers)):
        layers = configuration.layers[:number] + configuration.layers[number + 1 :]
        found.append(dataclasses.replace(configuration, layers=layers))
    if len(configuration.backwards) > 1 and (configuration.resume or (0, 0))[0] < len(configuration.backwards) - 1:
        found.append(dataclasses.replace(configuration, backwards=configuration.backwards[:-1]))
    if max(configuration.backwards) > 1:
        found.append(dataclasses.replace(configuration, backwards=(1,) * len(configuration.backwards)))
    usable = [c for c in found if c.reduce != "exact" or (c.precision == "fp16" and c.average == "micro_batches")]
    return [c for c in usable if not (c.no_sync and c.stage != 1)]


def as_script(configuration: Configuration) -> str:
    """A program that runs one configuration again: `cd tests`, then `python` with this on standard input."""
    fields = [
        f"    {field.name}={getattr(configuration, field.name)!r},"
        for field in dataclasses.fields(configuration)
        if getattr(configuration, field.name) != field.default
    ]
    return "\n".join(
        ["from fuzzing import Configuration, check", "", "print(check(Configuration(", *fields, ")) or 'right')", ""]
    )
