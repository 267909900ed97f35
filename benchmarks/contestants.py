"""Who takes part: shardmp and the peers, each set up as its users would.

Owns:      the list of contestants, and how each wraps a model and makes a step of a loss.
Takes:     a workload, and the settings that are equal for all (learning rate, clipping).
Gives:     a `Trainer` on this rank.
Invariant: all use AdamW with the same options, in its fastest form there; what a contestant does that its library does
           not do by itself is said in its `about`.

[Note: 16-bit products] Where a CPU has no 16-bit units, torch's own 16-bit products take 10 to 40 times as long as in
FP32. shardmp computes them itself (`tensorcore`); so as not to compare those, it lends them to every contestant but the
ones named `-stock`. Where the CPU has the units this changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Forward, Workload

import shardmp
from shardmp import tensorcore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What is equal for all: the learning rate, and the 2-norm at which gradients are clipped (None: not clipped)."""

    lr: float
    clip: float | None


@dataclass(frozen=True)
class Trainer:
    """A contestant on one rank.

    forward: the model's forward, input to output.
    step: all that follows a loss: backward, clipping, the update.
    finish: waits for what the last step left under way.
    skipped: how many steps so far were skipped because a gradient overflowed.
    facts: the contestant's own figures, for the JSON.
    """

    forward: Forward
    step: Callable[[Tensor], None]
    finish: Callable[[], None] = lambda: None
    skipped: Callable[[], int] = lambda: 0
    facts: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Contestant:
    """One row of the table.

    library: whose it is; "shardmp" or a peer.
    precision: "fp32", "bf16" or "fp16": what is multiplied, and what is sent unless `about` says else.
    sharded: whether optimizer state is sharded over ranks.
    make: sets it up on this rank.
    needs: a module without which it cannot run.
    """

    library: str
    precision: str
    sharded: bool
    about: str
    make: Callable[[Workload, Settings], Trainer]
    stock: bool = False
    needs: str | None = None

    def start(self, workload: Workload, settings: Settings) -> Trainer:
        if self.precision != "fp32" and not self.stock:
            tensorcore.enable(DTYPES[self.precision])
        return self.make(workload, settings)

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None


# -- shardmp


def make_shardmp(precision: str, **options: Any) -> Callable[[Workload, Settings], Trainer]:
    """What makes shardmp's trainer; `options` are those of `shard`."""

    def make(workload: Workload, settings: Settings) -> Trainer:
        plain = workload.build()
        adamw = torch.optim.AdamW(plain.parameters(), lr=settings.lr, fused=True)
        model, optimizer = shardmp.shard(plain, adamw, precision=precision, max_grad_norm=settings.clip, **options)

        def step(loss: Tensor) -> None:
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        return Trainer(
            model,
            step,
            optimizer.synchronize,
            lambda: optimizer.skipped_steps,
            lambda: {
                "memory": optimizer.memory(),
                "predicted_memory": optimizer.predicted_memory(),
                "predicted_wire_mb": optimizer.predicted_wire_bytes() / 1e6,
            },
        )

    return make


# -- torch's own


def _stepper(
    optimizer: Any, parameters: list[nn.Parameter], clip: float | None, scaler: Any
) -> Callable[[Tensor], None]:
    """The usual loop's step, with a GradScaler or without."""

    def step(loss: Tensor) -> None:
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def _grad_scaler(precision: str) -> tuple[Any, Callable[[], int]]:
    """A GradScaler where FP16 needs one, and how many steps it has skipped.

    It starts at 2^16 as shardmp does, and does not grow within a benchmark, so that its scale tells the skips.
    """
    if precision != "fp16":
        return None, lambda: 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    return scaler, lambda: round(16 - math.log2(scaler.get_scale()))


def _ddp(
    precision: str, *, hook: bool, view: bool = False, zero: bool = False
) -> Callable[[Workload, Settings], Trainer]:
    def make(workload: Workload, settings: Settings) -> Trainer:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.distributed.optim import ZeroRedundancyOptimizer

        plain = workload.build()
        model = DistributedDataParallel(plain, gradient_as_bucket_view=view)
        if hook:
            model.register_comm_hook(None, fp16_compress_hook)
        parameters = list(plain.parameters())
        optimizer: Any
        if zero:
            options = {"parameters_as_bucket_view": True, "lr": settings.lr, "fused": True}
            optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=settings.lr, fused=True)
        scaler, skipped = _grad_scaler(precision)

        def forward(x: Tensor) -> Tensor:
            dtype = DTYPES[precision]
            with contextlib.nullcontext() if precision == "fp32" else torch.autocast("cpu", dtype=dtype):
                return model(x)

        return Trainer(forward, _stepper(optimizer, parameters, settings.clip, scaler), skipped=skipped)

    return make


def _fsdp2(precision: str, *, keep: bool, reduce: str) -> Callable[[Workload, Settings], Trainer]:
    def make(workload: Workload, settings: Settings) -> Trainer:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = workload.build()
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=DTYPES[reduce])
        for module in (*workload.blocks(model), model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=not keep)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=settings.lr, fused=True)
        scaler, skipped = _grad_scaler(precision)
        return Trainer(model, _stepper(optimizer, parameters, settings.clip, scaler), skipped=skipped)

    return make


# -- DeepSpeed, whose set-up is a module of its own


def _deepspeed(precision: str, stage: int, **options: bool) -> Callable[[Workload, Settings], Trainer]:
    def make(workload: Workload, settings: Settings) -> Trainer:
        from deepspeed_peer import make_deepspeed

        return make_deepspeed(workload, settings, precision, stage, **options)

    return make


# -- the list


def _list_shardmp() -> dict[str, Contestant]:
    found = {}
    variants: dict[str, dict[str, Any]] = {
        "shardmp-fp16": {},
        "shardmp-bf16": {},
        "shardmp-fp32": {},
        "shardmp-fp16-stage1": {"stage": 1},
        "shardmp-bf16-stage1": {"stage": 1},
        "shardmp-fp16-exact": {"reduce": "exact", "average": "micro_batches"},
        "shardmp-fp16-native": {"reduce": "native"},
        "shardmp-bf16-native": {"reduce": "native"},
        "shardmp-fp16-no-overlap": {"overlap": False},
    }
    for name, options in variants.items():
        precision = name.split("-")[1]
        shown = ", ".join(f"{key}={value!r}" for key, value in {"precision": precision, **options}.items())
        found[name] = Contestant("shardmp", precision, True, f"shard({shown})", make_shardmp(precision, **options))
    return found


def _list_ddp() -> dict[str, Contestant]:
    amp = "autocast over FP32 parameters, gradients sent by the FP16 compression hook"
    found = {
        "ddp-fp32": Contestant("DDP", "fp32", False, "DistributedDataParallel as it comes", _ddp("fp32", hook=False)),
        "ddp-fp32-view": Contestant(
            "DDP", "fp32", False, "with gradient_as_bucket_view", _ddp("fp32", hook=False, view=True)
        ),
    }
    for precision, more in (("bf16", ""), ("fp16", "; GradScaler")):
        make = _ddp(precision, hook=True)
        found[f"ddp-{precision}-hook"] = Contestant("DDP", precision, False, f"{precision.upper()} {amp}{more}", make)
        about = f"the same with torch's own {precision.upper()} products"
        found[f"ddp-{precision}-hook-stock"] = Contestant("DDP", precision, False, about, make, stock=True)
    for name, precision, hook in (("fp32", "fp32", False), ("bf16-hook", "bf16", True)):
        about = f"ddp-{name} with ZeroRedundancyOptimizer, parameters_as_bucket_view"
        made = _ddp(precision, hook=hook, zero=True)
        found[f"zero-redundancy-{name}"] = Contestant("ZeroRedundancyOptimizer", precision, True, about, made)
    return found


def _list_fsdp2() -> dict[str, Contestant]:
    found = {}
    for precision in ("bf16", "fp16"):
        for keep in (False, True):
            for reduce in ("fp32", precision):
                name = f"fsdp2-{precision}{'-keep' * keep}{'-reduce16' * (reduce != 'fp32')}"
                about = f"fully_shard by layer, {precision.upper()}, gradients reduced in {reduce.upper()}"
                about += ", parameters kept after forward" if keep else ", parameters freed after forward"
                about += "; GradScaler" * (precision == "fp16")
                make = _fsdp2(precision, keep=keep, reduce=reduce)
                found[name] = Contestant("FSDP2", precision, True, about, make)
        name = f"fsdp2-{precision}-keep-reduce16"
        about = f"{name} with torch's own {precision.upper()} products"
        found[f"{name}-stock"] = Contestant("FSDP2", precision, True, about, found[name].make, stock=True)
    return found


def _list_deepspeed() -> dict[str, Contestant]:
    found = {}
    for precision in ("bf16", "fp16"):
        patched = "; patched, it refuses FP16 on the CPU" if precision == "fp16" else ""
        for stage in (1, 2, 3):
            about = f"ZeRO-{stage} in {precision.upper()}, overlap, 8M-element buckets, its CPU Adam{patched}"
            found[f"deepspeed-zero{stage}-{precision}"] = Contestant(
                "DeepSpeed", precision, True, about, _deepspeed(precision, stage), needs="deepspeed"
            )
        base = f"deepspeed-zero2-{precision}"
        variants: tuple[tuple[str, str, dict[str, bool]], ...] = (
            ("torch-adam", "with torch's fused AdamW", {"torch_adam": True}),
            (
                "no-norm",
                "patched to leave out the norm that it computes even where it does not clip",
                {"no_norm": True},
            ),
        )
        for word, what, options in variants:
            about = f"{base} {what}{patched}"
            make = _deepspeed(precision, 2, **options)
            found[f"{base}-{word}"] = Contestant("DeepSpeed", precision, True, about, make, needs="deepspeed")
    return found


CONTESTANTS: dict[str, Contestant] = {**_list_shardmp(), **_list_ddp(), **_list_fsdp2(), **_list_deepspeed()}
