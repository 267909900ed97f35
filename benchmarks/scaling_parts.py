"""One part of `scaling.py`, measured in this process.

Owns:      the models whose size grows, and what is counted and timed in their steps.
Takes:     the options of `scaling.py`; for `parameters` rank and world size from the environment, and a store's file.
Gives:     rows of plain figures, by part.
Invariant: what is counted is counted in real steps; only the peers are not there in `ranks`, `start` and `tensors`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore  # private, but the only one that there is

import shardmp

LAYER = 1024


# -- models


def layers(count: int, shapes: Sequence[tuple[int, int]] = ((LAYER, LAYER),)) -> nn.Module:
    """`count` linear layers without bias, of (in, out) `shapes` in turn, each followed by a normalisation."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(*shapes[index % len(shapes)], bias=False) for index in range(count))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = F.layer_norm(layer(x), (layer.out_features,))  # else 500 layers make numbers vanish
            return x

    torch.manual_seed(0)
    return Layers()


def vectors(count: int) -> nn.Module:
    """`count` parameters of 8 elements."""

    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors = nn.ParameterList(nn.Parameter(torch.full((8,), 1e-3)) for _ in range(count))

        def forward(self, x: Any) -> Any:
            for vector in self.vectors:
                x = x + vector
            return x

    return Vectors()


def llama(layers: int = 32, width: int = 4096, hidden: int = 11008, vocabulary: int = 32000) -> nn.Module:
    """The shapes of a model of 6.7e9 parameters, on the meta device; it has no forward."""

    def block() -> nn.Module:
        square = {name: nn.Linear(width, width, bias=False) for name in ("query", "key", "value", "out")}
        wide = {name: nn.Linear(width, hidden, bias=False) for name in ("gate", "up")}
        norms = {name: nn.RMSNorm(width) for name in ("attention_norm", "mlp_norm")}
        return nn.ModuleDict({**square, **wide, "down": nn.Linear(hidden, width, bias=False), **norms})

    with torch.device("meta"):
        head = nn.Linear(width, vocabulary, bias=False)
        return nn.ModuleList(
            [nn.Embedding(vocabulary, width), *(block() for _ in range(layers)), nn.RMSNorm(width), head]
        )


# -- tools


Step = Callable[[], None]


def sharded_step(model: nn.Module, x: Tensor, **options: Any) -> tuple[shardmp.ShardedOptimizer, Step]:
    """The sharded optimizer, and a function that makes a whole step."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sharded, optimizer = shardmp.shard(model, adamw, **options)

    def step() -> None:
        optimizer.backward(sharded(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def median_time(step: Step, steps: int, clock: Callable[[], float]) -> float:
    """Seconds of a step by `clock`, after two that are not counted."""
    times = []
    for _ in range(steps + 2):
        start = clock()
        step()
        times.append(clock() - start)
    return statistics.median(times[2:])


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """This process is rank 0 of so many, the others of which do not exist."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Messages:
    """Counts what goes through torch.distributed while it is entered; what arrives is zeros."""

    NAMES = ("isend", "irecv", "all_reduce", "broadcast")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(self.NAMES, 0)

    def __enter__(self) -> Messages:
        self._real = {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self._real.items():
            setattr(dist, name, self._counting(name, real))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            if name == "irecv":
                tensor.zero_()  # fresh memory may hold NaN, and a skipped step is another step
            return real(tensor, *args, **kwargs)

        return call


# -- the parts


def count_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of ranks: bytes, messages, milliseconds."""
    count, rows = 32, []
    parameters = count * LAYER**2
    for ranks in arguments.ranks:
        with fake_ranks(ranks):
            optimizer, step = sharded_step(layers(count), torch.randn(1, LAYER))
            sent = optimizer.wire_bytes()
            with Messages() as messages:
                step()
            sent = optimizer.wire_bytes() - sent
            seconds = median_time(step, arguments.steps, time.perf_counter)
            counts = messages.counts
            if optimizer.skipped_steps or not counts["all_reduce"] or not counts["isend"]:
                raise RuntimeError(f"{ranks} ranks: not a step like others: {counts}, {optimizer.report}")
            held = optimizer.memory()
        rows.append({
            "ranks": ranks,
            "held": (sum(held.values()) - held["buckets"]) / parameters,
            "ideal_held": 2 + 16 / ranks,
            "in_flight": held["buckets"] / parameters,
            "sent": sent / parameters,
            "ideal_sent": 4 * (ranks - 1) / ranks,
            "messages": counts["isend"],
            "collectives": counts["all_reduce"] + counts["broadcast"],
            "step_ms": 1e3 * seconds,
        })  # fmt: skip
        del optimizer, step  # before the next ones are built
    return rows


def time_start(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of `shard()` at each number of ranks."""
    rows = []
    for ranks in arguments.ranks:
        model = llama()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with fake_ranks(ranks):
            start = time.perf_counter()
            shardmp.shard(model, adamw)
            seconds = time.perf_counter() - start
        parameters = sum(p.numel() for p in model.parameters())
        rows.append({"ranks": ranks, "parameters": parameters, "seconds": seconds})
    return rows


def time_parameters(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The row of one size, on this rank of several real ones."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}", rank=rank, world_size=ranks)
    count = max(1, round(arguments.size / LAYER**2))
    parameters = count * LAYER**2
    optimizer, step = sharded_step(layers(count), torch.randn(1, LAYER))
    for _ in range(3):
        step()
    optimizer.synchronize()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(arguments.steps):
        step()
    optimizer.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    held = sum(optimizer.memory().values())
    dist.barrier()
    dist.destroy_process_group()
    each = arguments.steps * parameters
    row = {"parameters": parameters, "step_ms": 1e3 * wall / arguments.steps, "held": held / parameters}
    return [{**row, "wall_ns": 1e9 * wall / each, "cpu_ns": 1e9 * cpu / each}]


def time_tensors(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row: what shardmp adds to tiny parameters, which is Python, and its share in the step of ordinary ones."""
    count = arguments.tensors
    model = layers(count, ((256, 512), (512, 1024), (1024, 512), (512, 256)))
    parameters = sum(p.numel() for p in model.parameters())
    buckets = max(1, round(2 * parameters / 2**23))
    with fake_ranks(2):
        ordinary = _time_on_zeros(model, torch.randn(128, 256), arguments.steps, bucket_mb=8)
        plain, ones = vectors(count), torch.ones(8)

        def plain_step() -> None:
            plain(ones).square().mean().backward()
            plain.zero_grad()

        base = median_time(plain_step, arguments.steps, time.thread_time)
        # As many buckets as the ordinary model has: a vector counts as 16 bytes.
        tiny = _time_on_zeros(vectors(count), ones, arguments.steps, bucket_mb=16 * count / buckets / 2**20)
    row = {"tensors": count, "parameters": parameters, "buckets": buckets, "ordinary_ms": 1e3 * ordinary}
    row |= {"tiny_ms": 1e3 * tiny, "plain_ms": 1e3 * base, "added_us": 1e6 * (tiny - base) / count}
    return [{**row, "share": (tiny - base) / ordinary}]


def _time_on_zeros(model: nn.Module, x: Tensor, steps: int, **options: Any) -> float:
    """CPU seconds of this thread in a step; what peers would send is zeros."""
    _, step = sharded_step(model, x, **options)
    with Messages():
        step()
    return median_time(step, steps, time.thread_time)


def measure(part: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a part."""
    torch.set_num_threads(1)
    if part != "parameters":
        with fake_ranks(2):  # the first call imports half of torch, which belongs to nobody's time
            sharded_step(layers(1), torch.randn(1, LAYER))
    parts = {"ranks": count_ranks, "start": time_start, "parameters": time_parameters, "tensors": time_tensors}
    return parts[part](arguments)
