"""What the GPU check trains, and beside what: one GPT in FP16, by shardmp, by plain autocast, by FSDP2; on two gloo ranks.

Owns:      the model, its batches, and how time is taken on a device.
Takes:     a device; for more than one rank the environment that `gpu` has set.
Gives:     a `Device`, sharded models, and the parts that train.
Invariant: contestants see the same initial values, batches, clipping and fused AdamW.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardmp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig


class NotHere(Exception):
    """What a part measures does not exist on this machine; the message says what it needs."""


class Device:
    """Where the parts run, and how time is taken there."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], rounds: int) -> float:
        """The median of some rounds, after one more that does not count."""
        found = []
        for _ in range(rounds + 1):
            self.sync()
            began = time.perf_counter()
            work()
            self.sync()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def config(self) -> tuple[GPTConfig, int]:
        """The GPT that is trained, and how many sequences make a batch."""
        if self.is_cuda:
            return GPTConfig(layers=12, width=768, heads=12, context=1024), 16
        return GPTConfig(layers=1, width=32, heads=2, context=32), 2

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Random bytes and their successors, on the device before anything is timed."""
        config, batch = self.config()
        generator = torch.Generator().manual_seed(0)
        shape = (count, batch, config.context + 1)
        tokens = torch.randint(0, 256, shape, generator=generator).to(self.kind)
        return [(one[:, :-1], one[:, 1:]) for one in tokens]


def loss_of(forward: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy, FP32."""
    tokens, targets = batch
    return F.cross_entropy(forward(tokens).float().flatten(0, 1), targets.flatten())


def sharded_gpt(device: Device, start: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """The GPT in FP16 with fused AdamW, made on the device `start`; its first scale overflows nowhere."""
    torch.manual_seed(0)
    plain = GPT(device.config()[0]).to(start)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    return shardmp.shard(plain, adamw, precision=shardmp.Precision(init_scale=1024.0), max_grad_norm=1.0, **options)


def join(backend: str) -> int:
    """The process group of this part's ranks, which `gpu` has started; gives the rank."""
    rank, ranks = int(os.environ["GPU_RANK"]), int(os.environ["GPU_RANKS"])
    options: dict[str, Any] = {}
    if backend == "nccl":
        options["device_id"] = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.environ["GPU_STORE"], ranks)
    limit = timedelta(seconds=20)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit, **options)
    return rank


# -- training


def train(device: Device, limit: float, contestant: str) -> dict[str, Any]:
    """Tokens per second of FP16 training, the same GPT, batches and fused AdamW for each contestant."""
    step = CONTESTANTS[contestant](device)
    warmup, steps = (5, 30) if device.is_cuda else (1, 3)
    batches = device.batches(warmup + steps)
    for batch in batches[:warmup]:
        step(batch)
    if device.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    device.sync()
    began = time.perf_counter()
    losses = [step(batch) for batch in batches[warmup:]]
    device.sync()
    seconds = time.perf_counter() - began
    config, batch_size = device.config()
    speed = steps * batch_size * config.context / seconds
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.is_cuda else None
    last = losses[-1].item()
    words = f"{speed:,.0f} tokens/s, loss {last:.3f}" + (f", peak {peak:,.0f} MiB" if peak else "")
    return {"found": words, "met": None, "tokens_per_s": speed, "peak_mib": peak, "loss": last}


Step = Callable[[tuple[Tensor, Tensor]], Tensor]


def _shardmp(device: Device) -> Step:
    model, optimizer = sharded_gpt(device)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        optimizer.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def _scaled(model: Any, parameters: list[nn.Parameter], device: Device, autocast: bool) -> Step:
    """The usual loop: GradScaler, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device.kind, init_scale=1024.0)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(device.kind, torch.float16) if autocast else contextlib.nullcontext():
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _autocast(device: Device) -> Step:
    torch.manual_seed(0)
    model = GPT(device.config()[0]).to(device.kind)
    return _scaled(model, list(model.parameters()), device, autocast=True)


def _fsdp2(device: Device) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    join("nccl" if device.is_cuda else "gloo")
    torch.manual_seed(0)
    model = GPT(device.config()[0]).to(device.kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    return _scaled(model, list(model.parameters()), device, autocast=False)


CONTESTANTS: dict[str, Callable[[Device], Step]] = {"shardmp": _shardmp, "autocast": _autocast, "fsdp2": _fsdp2}


# -- two gloo ranks


def two_ranks(device: Device, limit: float) -> dict[str, Any]:
    """Two gloo ranks train together, on one GPU, which NCCL refuses."""
    rank = join("gloo")
    model, optimizer = sharded_gpt(device, start=device.kind)  # under gloo it stays where it lies
    batches = device.batches(6)
    for step in range(3):
        optimizer.backward(loss_of(model, batches[2 * step + rank]))
        report = optimizer.step()
    values = [bucket.flat.float().double().sum().item() for bucket in optimizer._parameters.buckets]
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (values, report.loss))
    same = told[0] == told[1]
    return {
        "found": f"{'equal' if same else 'UNEQUAL'} parameters on {device.kind}, loss {report.loss:.3f}",
        "met": same,
    }
