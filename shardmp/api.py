"""`shard`: take over a model and its optimizer.

Owns:      the checks of what the user hands in, and the wiring of the parts.
Takes:     an ordinary module and an ordinary optimizer on its parameters, the same on every rank.
Gives:     `ShardedModule` and `ShardedOptimizer`.
Invariant: before the first tensor collective every rank knows that all ranks agree; a mistake on one rank raises on
all.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from . import exact, products, tensorcore
from .agreed import option_lines
from .buffers import unexpanded
from .checks import check_model, check_optimizer, check_scaler, trainable
from .collectives import Collectives
from .gradients import Gradients
from .layout import MIB, Entry, plan
from .module import ShardedModule
from .optimizer import ShardedOptimizer, check_max_norm
from .parameters import Parameters
from .precision import DTYPES, Precision, as_precision
from .probe import Findings, probe
from .refusals import retire
from .taken import Taken
from .unfinished import Unfinished
from .update import Update
from .world import World, init

ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Options:
    """The options of `shard`, checked."""

    stage: int
    reduce: str
    average: str
    max_grad_norm: float | None
    bucket_bytes: int | None
    overlap: bool
    buffers: str


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    precision: str | Precision = "fp16",
    stage: int = 2,
    reduce: str = "fp32",
    average: str = "ranks",
    max_grad_norm: float | None = None,
    bucket_mb: float | None = None,
    overlap: bool = True,
    buffers: str = "broadcast",
    scaler: ShardedOptimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[ShardedModule, ShardedOptimizer]:
    """Train `model` in mixed precision with FP32 masters and optimizer state sharded over ranks. Collective.

    Bytes per 16-bit parameter and rank, with Adam on N ranks: 2 + 16/N, plus the buckets in flight.

    Args:
        model: its trainable parameters become views of flat buckets in `precision`'s dtype, with rank 0's values. It moves
            to the rank's device (`World.device`); under gloo, whose device is the CPU, a model on a GPU stays there, and
            messages go through host memory: for ranks that share a GPU.
        optimizer: an elementwise optimizer on the model's own parameters. Its class, groups, state and step hooks are
            taken over; its own `step` raises from then on.
        precision: "fp16", "bf16", "fp32" or a `Precision`.
        stage: 1 or 2. Both shard masters, moments and gradient sums. Stage 1 reduces only outside `model.no_sync()`, for
            4 bytes per parameter while it accumulates; stage 2 reduces every backward.
        reduce: "fp32" sends 16 bits and sums in FP32 in rank order; "exact" (FP16, with `average="micro_batches"`) sums
            in FP64 without rounding, so that any number of ranks and any dealing of the same micro-batches give the same
            masters, for 4/N bytes more; "native" is the backend's own sum in 16 bits (less exact, and on gloo twice the
            bytes).
        average: "ranks": the mean over ranks of the sum of this step's backwards; "micro_batches": the mean over all.
        max_grad_norm: clip the unscaled, averaged gradient at this 2-norm; None never clips.
        bucket_mb: MiB of parameters after which a bucket is closed: larger ones send fewer messages, and hold more in
            flight. None: 8, and on more than 8 ranks 1 for each, up to an eighth of the parameters and 256.
        overlap: reduce under backward and gather under the next forward; no result depends on it.
        buffers: "broadcast" gives every rank rank 0's buffers at the end of each backward; "local" leaves them alone.
        group: the process group to shard over; by default all ranks.
        scaler: another model's `ShardedOptimizer`, on the same ranks in FP16, whose loss scale this one shares: for models
            under one loss, or with losses in turn. It moves once, when the next loss is scaled, by all verdicts since;
            its settings are those of `scaler`.

    Raises:
        TypeError, ValueError: a bad argument or model, by name; on every rank, and before any tensor is sent.
    """
    world = init()
    device = _device_of(model, world)
    collectives = Collectives(group, device)
    collectives.at("shard()")
    policy, options, findings = _agree(
        collectives,
        model,
        optimizer,
        (precision, stage, reduce, average, max_grad_norm, bucket_mb, overlap, buffers),
        scaler,
    )
    if device.type == "cpu" and policy.dtype != torch.float32:
        offers = collectives.gather_objects(products.offer(policy.dtype, tensorcore.in_use(policy.dtype)))
        tensorcore.enable(policy.dtype, products.agreed(offers))
    if device.type == "cuda":
        tensorcore.accumulate_in_fp32(policy.dtype)

    unfinished = Unfinished(model, optimizer)  # nothing of the user's is changed before
    _lift_what_stays_fp32(model, policy)
    names, params = trainable(model)
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    kept = policy.fp32_parameters(model)
    entries = [
        Entry(name, p.numel(), "fp32" if name in kept else policy.param) for name, p in zip(names, params, strict=True)
    ]
    layout = plan(entries, collectives.world_size, bucket_bytes=options.bucket_bytes, itemsize=ITEMSIZE)
    _share_the_rest(model, collectives)
    for entry, p in zip(entries, params, strict=True):
        if not p.numel():
            p.data = p.data.to(device, DTYPES[entry.dtype])
    parameters = Parameters(layout, params, names, collectives, DTYPES, overlap=options.overlap)
    gradients = Gradients(
        layout,
        params,
        names,
        collectives,
        DTYPES,
        native=options.reduce == "native",
        exact=options.reduce == "exact",
        local_sums=options.stage == 1 and options.reduce != "exact",
        overlap=options.overlap,
    )
    update = Update(optimizer, findings, params, parameters, gradients)
    taken = Taken(
        model,
        optimizer,
        names,
        params,
        frozen,
        parameters,
        lambda error: collectives.at(f"an error of its own: {error}"),
    )
    sharded = ShardedOptimizer(
        optimizer,
        names,
        params,
        layout,
        policy,
        collectives,
        parameters,
        gradients,
        update,
        taken,
        None if scaler is None else scaler.shared_scaler(),
        average=options.average,
        max_grad_norm=options.max_grad_norm,
    )
    retire(optimizer, sharded)
    _return_freed_memory()
    wrapped = ShardedModule(
        model,
        policy,
        collectives,
        parameters,
        gradients,
        broadcast_buffers=options.buffers == "broadcast",
        drop_gradients=sharded.zero_grad,
        check_model=taken.check_model,
    )
    unfinished.lift()
    return wrapped, sharded


def _options(policy: Precision, values: tuple[Any, ...]) -> _Options:
    stage, reduce, average, max_grad_norm, bucket_mb, overlap, buffers = values
    choices = {"stage": (stage, (1, 2)), "reduce": (reduce, ("fp32", "exact", "native"))}
    choices |= {"average": (average, ("ranks", "micro_batches")), "buffers": (buffers, ("broadcast", "local"))}
    for name, (value, allowed) in choices.items():
        if isinstance(value, bool) or value not in allowed:
            raise ValueError(f"shard({name}=...): expected {' or '.join(map(repr, allowed))}, got {value!r}")
    named = bucket_mb is not None
    if named and (isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb <= 2**14):
        raise ValueError(f"shard(bucket_mb=...): expected MiB, above 0 and at most 16384, or None, got {bucket_mb!r}")
    if not isinstance(overlap, bool):
        raise TypeError(f"shard(overlap=...): expected True or False, got {overlap!r}")
    if reduce == "exact":
        _check_exact(policy, average)
    norm = None if max_grad_norm is None else check_max_norm(max_grad_norm)
    size = max(1, int(bucket_mb * MIB)) if named else None
    return _Options(stage, reduce, average, norm, size, overlap, buffers)


def _check_exact(policy: Precision, average: str) -> None:
    if policy.param != "fp16":
        raise ValueError(
            f"shard(reduce='exact'): expected precision 'fp16', whose numbers FP64 adds without rounding, got {policy.param!r}"
        )
    if average != "micro_batches":
        raise ValueError(
            f"shard(reduce='exact'): expected average='micro_batches', which does not depend on the number of ranks, got "
            f"average={average!r}"
        )


# -- agreement

# Another rank's mistake is raised as what it is; of other errors their words are told.
_TOLD = {kind.__name__: kind for kind in (TypeError, ValueError)}


def _device_of(model: nn.Module, world: World) -> torch.device:
    """Where this rank trains."""
    devices: set[torch.device] = set()
    with contextlib.suppress(Exception):  # no model, or one that raises: `_agree` meets it again, and tells the others
        devices = {p.device for p in model.parameters()}
    kinds = {device.type for device in devices}
    if world.backend == "fake" and kinds <= {"meta"}:
        return torch.device("meta")  # a run that is only planned: everything but the numbers
    if world.backend == "gloo" and kinds == {"cuda"} and len(devices) == 1:
        return devices.pop()  # the user's choice, for ranks that share a GPU, which NCCL refuses
    return world.device


def _agree(
    collectives: Collectives,
    model: nn.Module,
    optimizer: Optimizer,
    values: tuple[Any, ...],
    scaler: Any,
) -> tuple[Precision, _Options, Findings]:
    """Check what this rank was given, and that all ranks were given the same.

    Raises:
        TypeError, ValueError: this rank's mistake, or another's, with its rank; on every rank.
        Exception: what the model, the optimizer or torch raised while they were looked at; the other ranks hear of it.
    """
    error: Exception | None = None
    found: tuple[Precision, _Options, Findings] | None = None
    lines: list[str] = []
    try:
        policy = as_precision(values[0])
        options = _options(policy, values[1:])
        check_scaler(policy, collectives, scaler)
        check_model(model, policy, collectives.device)
        check_optimizer(model, optimizer)
        if options.reduce == "native" and collectives.is_staged:
            raise ValueError(
                "shard(reduce='native'): gloo has no reduce-scatter of a GPU's tensors: use NCCL, or 'fp32'"
            )
        if options.reduce == "exact":
            exact.check_model(model, collectives.device)
        found = policy, options, probe(optimizer)
        lines = _fingerprint(model, optimizer, policy, options)
        lines.append(f"scaler: {'its own' if scaler is None else 'shared'}")
    except Exception as mistake:  # whatever it is, the others wait to hear of it
        error = mistake
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    told = collectives.gather_objects((type(error).__name__, str(error), digest))
    if error is not None:
        raise error
    for rank, (kind, message, _) in enumerate(told):
        if kind in _TOLD:
            raise _TOLD[kind](f"rank {rank}: {message}")
        if kind != "NoneType":
            raise RuntimeError(f"rank {rank}: shard() raised {kind}: {message}")
    if len({digest for _, _, digest in told}) > 1:
        _raise_first_difference(collectives.gather_objects(lines))
    assert found is not None
    return found


def _fingerprint(model: nn.Module, optimizer: Optimizer, policy: Precision, options: _Options) -> list[str]:
    """What must be equal on all ranks, a line for each item, in order."""
    lines = [
        f"parameters: {sum(1 for _ in model.named_parameters())}",
        f"buffers: {sum(1 for _ in model.named_buffers())}",
    ]
    for kind, items in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        lines += [
            f"{kind} {name}: shape {tuple(t.shape)}, {t.dtype}, requires_grad {t.requires_grad}" for name, t in items
        ]
    names = {id(p): name for name, p in model.named_parameters()}
    lines.append(f"optimizer: {type(optimizer).__name__} with {len(optimizer.param_groups)} groups")
    for number, group in enumerate(optimizer.param_groups):
        lines.append(f"group {number}: {', '.join(names[id(p)] for p in group['params'])}")
        lines += [f"group {number}, option {key!r}: {value}" for key, value in option_lines(group).items()]
    lines.append(f"precision: {policy}")
    lines.append(f"options: {options}")
    return lines


def _raise_first_difference(told: Sequence[Sequence[str]]) -> NoReturn:
    for index in range(max(map(len, told))):
        lines = [lines[index] if index < len(lines) else "nothing" for lines in told]
        for rank, line in enumerate(lines):
            if line != lines[0]:
                raise ValueError(
                    f"ranks were given different things: rank 0 has {lines[0]!r}, rank {rank} has {line!r}"
                )
    raise AssertionError("digests differ, lines do not")


# -- taking over


def _lift_what_stays_fp32(model: nn.Module, policy: Precision) -> None:
    """Frozen 16-bit parameters and buffers of modules that compute in FP32 become FP32, with the same values.

    Kernels take no 16-bit weights or statistics beside FP32 inputs: a base in half precision under adapters has them, and
    a model after `half()`.
    """
    for module in policy.fp32_modules(model).values():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.requires_grad and tensor.dtype in (torch.float16, torch.bfloat16):
                tensor.data = tensor.data.float()


@torch.no_grad()
def _share_the_rest(model: nn.Module, collectives: Collectives) -> None:
    """Move frozen parameters and buffers to the device and give every rank rank 0's values."""
    rest: list[torch.Tensor] = [p for p in model.parameters() if not p.requires_grad]
    rest += list(model.buffers())
    for tensor in rest:
        if tensor.device != collectives.device:
            tensor.data = tensor.data.to(collectives.device)
        if tensor.numel():
            values = unexpanded(tensor.detach()).contiguous()
            collectives.broadcast(values.view(-1).view(torch.uint8))
            if values.data_ptr() != tensor.data_ptr():
                unexpanded(tensor).copy_(values)


def _return_freed_memory() -> None:
    """Give the user's FP32 model, freed by now, back to the system: glibc keeps what lies between live blocks."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
