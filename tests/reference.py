"""Mixed-precision training on N ranks, written plainly in one process: what the library must equal bit for bit.

Owns   nothing of the library, which it doesn't import: whole FP32 masters, an ordinary torch optimizer on them.
Takes  a model, an optimizer, and for every step, backward and rank a function that makes a loss from a model.
Gives  masters, optimizer state, and the scale, skip flag and norm of each step.
Invariant: each line that rounds a number says so. Sums go in rank order; backwards in the order in which they ran.

How a step goes (N ranks, loss scale S):
    w16   = fp16(w)                                     the forward and backward of every rank, in 16 bits
    g_r   = d (S * loss_r) / d w16                      16 bits
    g     = fp32(g_0) + fp32(g_1) + ...                 FP32, in rank order (two hops: host by host); then backward
                                                        after backward
    norm  = |g| / (S * divisor)                         FP64, from FP32 sums of squares of blocks
    w     = w - optimizer(g / fp32(S * divisor * clip)) FP32, unless the norm is not finite
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[Any], Tensor]
Backward = Sequence[Loss | None]  # one entry per rank; None: a rank without data
Step = Sequence[Backward]
Hosts = Sequence[Sequence[int]] | None  # the ranks of each host, where the sum takes two hops

NORM_LAYERS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)


def fp32(number: float) -> float:
    """A Python float (FP64) rounded to FP32."""
    return torch.tensor(number, dtype=torch.float32).item()


# --------------------------------------------------------------------------------------------------------------------
# The loss scale


@dataclass
class LossScale:
    """The scale of "Mixed Precision Training", section 3.2, with hysteresis. `scale` is the next loss's, an FP32 number;
    factors are FP32 too."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    static_scale: float | None = None

    def __post_init__(self) -> None:
        self.scale = self.init_scale if self.static_scale is None else self.static_scale
        self.left = self.hysteresis
        self.clean_steps = 0

    def update(self, skipped: bool) -> None:
        if self.static_scale is not None:
            return
        if skipped:
            self.clean_steps = 0
            self.left = max(self.left - 1, 0)
            if self.left == 0:
                self.scale = max(fp32(self.scale * fp32(self.backoff_factor)), self.min_scale)
            return
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.clean_steps = 0
            self.left = self.hysteresis
            self.scale = min(fp32(self.scale * fp32(self.growth_factor)), self.max_scale)


# --------------------------------------------------------------------------------------------------------------------
# The norm


def blocks_of(numel: int) -> int:
    """Elements of a block of the norm. Blocks are counted from the parameter's start, the last is padded with zeros."""
    return 1024 if numel >= 1024 else 64


def sum_of_squares(gradients: Sequence[Tensor], numels: Sequence[int]) -> float:
    """The sum of squares of padded FP32 gradients: blocks in FP32, which FP64 then adds exactly.

    Exactly: each sum is split into multiples of nine units, which FP64 adds without rounding in any order. What is
    left below the last unit is dropped. Only the last addition, over the nine, rounds.
    """
    units = [2.0**exponent for exponent in (60, 34, 8, -18, -44, -70, -96, -122, -148)]
    bins = [0.0] * len(units)
    for gradient, numel in zip(gradients, numels, strict=True):
        blocks = gradient.view(-1, blocks_of(numel))
        for square in torch.sum(blocks * blocks, dim=1).tolist():  # rounds to FP32, in torch's cascade
            rest = square
            for index, unit in enumerate(units):
                magic = 1.5 * 2.0**52 * unit
                part = (rest + magic) - magic  # rest rounded to a multiple of the unit
                bins[index] += part
                rest -= part
    total = 0.0
    for value in reversed(bins):  # rounds to FP64
        total += value
    return total


# --------------------------------------------------------------------------------------------------------------------
# The model of one rank


def kept_in_fp32(model: nn.Module, keep: Sequence[type | str]) -> tuple[list[nn.Module], set[str]]:
    """The outermost modules that compute in FP32, and the names of the parameters that are FP32."""
    classes = tuple(item for item in keep if isinstance(item, type))
    patterns = [item for item in keep if isinstance(item, str)]

    def named(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    found = {name: m for name, m in model.named_modules() if isinstance(m, classes) or named(name)}
    outermost = {
        name: module
        for name, module in found.items()
        if not any(name != outer and (outer == "" or name.startswith(f"{outer}.")) for outer in found)
    }
    inside = {id(p) for module in outermost.values() for p in module.parameters()}
    every_name = list(model.named_parameters(remove_duplicate=False))
    parameters = {name for name, p in every_name if id(p) in inside or named(name)}
    return list(outermost.values()), parameters


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `dtype`, through tuples, lists and dicts; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, (tuple, list)):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


def compute_in_fp32(module: nn.Module, output: torch.dtype | None) -> None:
    """FP32 in and inside; its output too, or cast to a dtype where there is no autocast to cast it for the next layer.

    Batch and instance norm compute in FP32 by themselves, from 16 bits to 16 bits.
    """
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(torch.empty(0).device.type, enabled=False):
            if isinstance(module, nn.modules.batchnorm._NormBase):
                result = inner(*args, **kwargs)
            else:
                result = inner(*cast(args, torch.float32), **cast(kwargs, torch.float32))
        return result if output is None else cast(result, output)

    module.forward = forward


class Replica:
    """One rank's 16-bit model, as a loss function sees it: called, it returns FP32; attributes are the model's."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, keep: Sequence[type | str], autocast: bool) -> None:
        self.model = copy.deepcopy(model)
        self.dtype = dtype
        self.autocast = autocast
        if dtype != torch.float32:
            for module in kept_in_fp32(self.model, keep)[0]:
                compute_in_fp32(module, None if autocast else dtype)
        self.parameters = dict(self.model.named_parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.dtype == torch.float32:
            return self.model(*args, **kwargs)
        if not self.autocast:
            args, kwargs = cast(args, self.dtype), cast(kwargs, self.dtype)
        with torch.autocast(torch.empty(0).device.type, dtype=self.dtype, enabled=self.autocast):
            output = self.model(*args, **kwargs)
        return cast(output, torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


# --------------------------------------------------------------------------------------------------------------------
# Masters and the optimizer


@dataclass
class Master:
    """A parameter's FP32 master: flat, padded with zeros, so that no element falls into a kernel's scalar tail, where
    torch's kernels may round differently. `gradient` is padded alike; None as long as no rank has had one this step."""

    name: str
    shape: torch.Size
    dtype: torch.dtype  # of the parameter that ranks compute with
    flat: nn.Parameter
    gradient: Tensor | None = None
    used: bool = False

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def whole(self, flat: Tensor) -> Tensor:
        """A padded flat tensor without its padding, in the parameter's shape."""
        return flat.detach()[: self.numel].reshape(self.shape).clone()


def padded(values: Tensor) -> Tensor:
    block = blocks_of(values.numel())
    flat = torch.zeros(-(-values.numel() // block) * block, dtype=values.dtype)
    flat[: values.numel()] = values.detach().reshape(-1)
    return flat


# State of torch's optimizers that is one number, also where the parameter is one.
COUNTS = ("step", "mu_product", "eta", "mu")


def on_masters(optimizer: Optimizer, model: nn.Module, masters: dict[str, Master], fused: bool) -> Optimizer:
    """The user's optimizer with the masters in the place of the model's parameters: the same groups and options."""
    master_of = {id(p): masters[name].flat for name, p in model.named_parameters() if name in masters}
    for group in optimizer.param_groups:
        group["params"] = [master_of[id(p)] for p in group["params"] if id(p) in master_of]
        if fused:
            group["fused"], group["foreach"] = True, False
    for p in list(optimizer.state):
        state = optimizer.state.pop(p)
        if id(p) in master_of:
            optimizer.state[master_of[id(p)]] = {
                key: padded(value)
                if isinstance(value, Tensor) and value.shape == p.shape and key not in COUNTS
                else value
                for key, value in state.items()
            }
    if fused and isinstance(optimizer, torch.optim.SGD):
        # torch's fused kernel takes no parameter whose momentum is to come beside one whose momentum is there already.
        for group in optimizer.param_groups:
            for p in group["params"] if group["momentum"] else ():
                optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
    return optimizer


# --------------------------------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True)
class StepTrace:
    """What one step did: the scale used, whether it was skipped, the norm before clipping, the mean loss."""

    scale: float
    skipped: bool
    norm: float
    loss: float | None


@dataclass
class Run:
    """The end of a reference run. `state` holds per parameter name what the optimizer keeps, without padding."""

    masters: dict[str, Tensor]
    state: dict[str, dict[str, Any]]
    scale: float
    trace: list[StepTrace] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the parameters that ranks compute with
    buffers: dict[str, Tensor] = field(default_factory=dict)  # rank 0's

    @property
    def skipped_steps(self) -> int:
        return sum(step.skipped for step in self.trace)


def backward_on_ranks(
    masters: dict[str, Master], replicas: Sequence[Replica], losses: Backward, scale: float
) -> tuple[dict[str, list[Tensor | None]], list[float]]:
    """One backward on every rank from the rounded masters: per parameter the ranks' gradients, and the losses."""
    gradients: dict[str, list[Tensor | None]] = {name: [] for name in masters}
    values = []
    for replica, loss_function in zip(replicas, losses, strict=True):
        for name, master in masters.items():
            replica.parameters[name].data = master.whole(master.flat).to(master.dtype)  # rounds
            replica.parameters[name].grad = None
        if loss_function is not None:
            loss = loss_function(replica)
            values.append(loss.item())
            (loss.float() * scale).backward()
        for name in masters:
            gradients[name].append(replica.parameters[name].grad)
    for replica in replicas[1:]:  # every rank has rank 0's buffers after a backward
        for own, first in zip(replica.model.buffers(), replicas[0].model.buffers(), strict=True):
            own.copy_(first)
    return gradients, values


def sum_over_ranks(gradients: Sequence[Tensor | None], master: Master, hosts: Hosts = None) -> Tensor:
    """r0 + r1 + ... in FP32, in rank order; with two hops on each host first. An absent gradient is zeros."""
    rows = [torch.zeros_like(master.flat) if g is None else padded(g.float()) for g in gradients]
    sums = [add(rows[rank] for rank in host) for host in hosts or [range(len(rows))]]
    return add(sums).detach()


def add(rows: Iterable[Tensor]) -> Tensor:
    """rows[0] + rows[1] + ..., from the left."""
    total, *rest = rows
    for row in rest:
        total = total + row  # rounds
    return total


def gradients_of_step(
    masters: dict[str, Master], replicas: Sequence[Replica], step: Step, scale: float, no_sync: bool, hosts: Hosts
) -> list[float]:
    """All backwards of a step into `Master.gradient`; returns the losses."""
    losses: list[float] = []
    local: dict[str, list[Tensor | None]] = {name: [None] * len(replicas) for name in masters}
    for backward in step:
        found, values = backward_on_ranks(masters, replicas, backward, scale)
        losses += values
        for name, master in masters.items():
            master.used |= any(gradient is not None for gradient in found[name])
            if no_sync:  # stage 1: every rank adds up its own backwards in FP32 first
                for rank, gradient in enumerate(found[name]):
                    if gradient is not None:
                        before = local[name][rank]
                        local[name][rank] = gradient.float() if before is None else before + gradient  # rounds
            else:
                total = sum_over_ranks(found[name], master, hosts)
                master.gradient = total if master.gradient is None else master.gradient + total  # rounds
    if no_sync:
        for name, master in masters.items():
            master.gradient = sum_over_ranks(local[name], master, hosts)
    return losses


@torch.no_grad()
def apply_step(
    masters: dict[str, Master], optimizer: Optimizer, factor: float, max_grad_norm: float | None
) -> tuple[bool, float]:
    """Norm, clipping and update; `factor` is loss scale times divisor. Returns whether it was skipped, and the norm."""
    gradients = [master.gradient for master in masters.values() if master.gradient is not None]
    total = sum_of_squares(gradients, [master.numel for master in masters.values()])
    if not math.isfinite(total):
        return True, total
    # FP64, by torch's square root: one in a hundred is a last bit away from the correctly rounded math.sqrt.
    norm = torch.tensor(total, dtype=torch.float64).sqrt().item() / factor
    clip = 1.0 if max_grad_norm is None else max(1.0, (norm + 1e-6) / max_grad_norm)
    grad_scale = torch.tensor(factor * clip, dtype=torch.float32)  # rounds once
    for master in masters.values():
        if master.used and master.gradient is not None:
            master.flat.grad = master.gradient / grad_scale  # rounds
    optimizer.step()
    return False, norm


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: Sequence[Step],
    *,
    dtype: torch.dtype = torch.float16,
    loss_scale: LossScale | None = None,
    keep_fp32: Sequence[type | str] = NORM_LAYERS,
    autocast: bool = True,
    average: str = "ranks",
    max_grad_norm: float | None = None,
    divide_by: float | None = None,
    fused: bool = False,
    no_sync: bool = False,
    hosts: Hosts = None,
    after_step: Callable[[Optimizer], None] = lambda optimizer: None,
) -> Run:
    """Train as N ranks would, N being the number of losses of a backward.

    Args:
        loss_scale: the scale's settings, for FP16 (by default 65536, dynamic); BF16 and FP32 have scale 1.
        divide_by: the divisor of every step's summed gradient, in place of the average.
        fused: step with torch's fused kernels, as the library does where the class has them.
        no_sync: each step's backwards but the last ran under `no_sync()` of stage 1.
        hosts: the ranks of each host, in the order in which the hosts' sums are added; None for one hop.
        after_step: called after each step, as a schedule would be.
    """
    model = make_model()
    scaler = loss_scale or (LossScale() if dtype == torch.float16 else LossScale(static_scale=1.0))
    kept = kept_in_fp32(model, keep_fp32)[1]
    masters = {
        name: Master(name, p.shape, torch.float32 if name in kept else dtype, nn.Parameter(padded(p.float())))
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    optimizer = on_masters(make_optimizer(model), model, masters, fused)
    replicas = [Replica(model, dtype, keep_fp32, autocast) for _ in steps[0][0]]
    run = Run({}, {}, scaler.scale)
    for step in steps:
        for master in masters.values():
            master.gradient, master.used, master.flat.grad = None, False, None
        scale = scaler.scale
        losses = gradients_of_step(masters, replicas, step, scale, no_sync, hosts)
        divisor = len(replicas) if average == "ranks" else max(1, len(losses))
        divisor = divisor if divide_by is None else divide_by
        skipped, norm = apply_step(masters, optimizer, scale * divisor, max_grad_norm)
        scaler.update(skipped)
        after_step(optimizer)
        run.trace.append(StepTrace(scale, skipped, norm, fp32(sum(losses) / len(losses)) if losses else None))
    run.scale = scaler.scale
    run.dtypes = {name: master.dtype for name, master in masters.items()}
    run.buffers = {name: buffer.clone() for name, buffer in replicas[0].model.named_buffers()}
    for name, master in masters.items():
        run.masters[name] = master.whole(master.flat)
        run.state[name] = {
            key: master.whole(value) if isinstance(value, Tensor) and value.shape == master.flat.shape else value
            for key, value in optimizer.state.get(master.flat, {}).items()
        }
    return run
