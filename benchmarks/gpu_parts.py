"""The parts of the GPU check, each in a process of its own. Started by `gpu`, not by hand.

Owns:      the measurements, and the reading of a trace's streams.
Takes:     a part's name, a device and a folder as JSON on the command line; rank and number of ranks from the environment.
Gives:     a JSON file for this rank: figures, `found` in words, `met`: whether the goal is reached (null: there is none), or
           `skipped`: why it cannot be measured here.
Invariant: what is measured is what `shardmp.shard` gives; on the CPU the same lines run, at sizes that show no speed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_training import CONTESTANTS, Device, NotHere, join, loss_of, sharded_gpt, train, two_ranks
from measuring import die_with_parent
from torch import nn

import shardmp

ROOT = Path(__file__).resolve().parents[1]

# Bytes that the update moves for an element of the shard: the fused kernel reads and writes parameter, gradient and two
# moments in FP32; the rounding reads 4 and writes 2; the look at the largest master reads 4.
FUSED_BYTES, UPDATE_BYTES, NEEDED_BYTES = 32, 42, 30
BANDWIDTH_GOAL = 0.85
OVERLAP_GOAL = 0.5
# What a step holds beside the five kinds of `memory()`: sums of blocks, tiles of scratch, cuBLAS's workspace.
MEMORY_SLACK = 2**25
Interval = tuple[float, float]


# -- the tests


def tests(device: Device, limit: float) -> dict[str, Any]:
    """`pytest -m gpu`; what its time limit leaves out is said, and is no failure."""
    if not device.is_cuda:
        raise NotHere("on the CPU these tests are `make test`")
    # The limit is for the session, whose ranks are then ended in good order.
    session = max(1.0, limit - 20)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "--timeout=60", f"--session-timeout={session}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "SHARDMP_TEST_DEVICE": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return outcome_of(done.stdout, done.returncode)


def outcome_of(output: str, code: int) -> dict[str, Any]:
    """What `pytest -v` has said: numbers of tests by result, and the names of those that failed."""
    results = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    counts = {word: sum(result == word for _, result in results) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failed = [name for name, result in results if result in ("FAILED", "ERROR")]
    out_of_time = "session-timeout:" in output
    words = ", ".join(f"{count} {word.lower()}" for word, count in counts.items() if count) or "no test ran"
    if failed:
        words += f": {', '.join(name.split('::')[-1] for name in failed[:3])}{' ...' * (len(failed) > 3)}"
    return {
        "found": words + "; the rest had no time left" * out_of_time,
        "met": not failed and counts["PASSED"] > 0 and (code == 0 or out_of_time),
        "counts": counts,
        "failed": failed,
        **({} if results else {"output": output[-2000:]}),
    }


# -- the update


class Flat(nn.Module):
    """Parameters without a forward."""

    def __init__(self, count: int, numel: int, device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((numel,), 0.5, device=device)) for _ in range(count))


def update(device: Device, limit: float) -> dict[str, Any]:
    """All that `step` does to the shard after the verdict, beside a copy of the same number of bytes."""
    count, numel = (64, 2**22) if device.is_cuda else (4, 2**16)
    plain = Flat(count, numel, device.kind)
    _, optimizer = shardmp.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True))
    place = optimizer._collectives.device
    verdict: Any = SimpleNamespace(
        grad_scale=torch.full((), 1024.0, device=place), found_inf=torch.zeros((), device=place)
    )
    for bucket in optimizer._gradients.buckets:
        bucket.shard.fill_(1e-3)
    buckets = range(len(optimizer._layout.buckets))

    def step() -> None:
        for index in buckets:
            optimizer._update.step_run([index], verdict, (), ())

    def publish() -> None:
        for index in buckets:
            optimizer._parameters.publish(index)

    source = torch.ones(count * numel, device=device.kind)
    target = torch.empty_like(source)
    rounds = 10 if device.is_cuda else 3
    copy = device.seconds(lambda: target.copy_(source), rounds)
    fused, rounding = device.seconds(step, rounds), device.seconds(publish, rounds)
    bandwidth = 8 * source.numel() / copy  # read and written
    elements = sum(bucket.shard.numel() for bucket in optimizer._gradients.buckets)

    def share(size: int, seconds: float) -> float:
        return size * elements / seconds / bandwidth

    whole = share(UPDATE_BYTES, fused + rounding)
    return {
        "found": f"{whole:.0%} of a copy's {bandwidth / 1e9:.0f} GB/s (fused AdamW alone {share(FUSED_BYTES, fused):.0%}; "
        f"counting only the {NEEDED_BYTES} bytes needed {share(NEEDED_BYTES, fused + rounding):.0%})",
        "met": whole >= BANDWIDTH_GOAL if device.is_cuda else None,
        "copy_gb_per_s": bandwidth / 1e9,
        "share": whole,
        "share_of_fused": share(FUSED_BYTES, fused),
        "share_of_needed": share(NEEDED_BYTES, fused + rounding),
        "us": {"copy": 1e6 * copy, "fused": 1e6 * fused, "rounding": 1e6 * rounding},
        "elements": elements,
    }


# -- memory


def memory(device: Device, limit: float) -> dict[str, Any]:
    """Bytes by kind, counted and predicted; on CUDA beside what the allocator holds."""
    batches = device.batches(3)
    before = torch.cuda.memory_allocated() if device.is_cuda else 0
    model, optimizer = sharded_gpt(device)
    for batch in batches:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
    optimizer.synchronize()
    device.sync()
    held, predicted = optimizer.memory(), optimizer.predicted_memory()
    exact = all(held[kind] == predicted[kind] for kind in held if kind != "buckets")
    exact = exact and held["buckets"] <= predicted["buckets"]
    total = sum(held.values())
    words = f"{total / 1e6:.1f} MB counted, {sum(predicted.values()) / 1e6:.1f} predicted"
    figures: dict[str, Any] = {"held": held, "predicted": predicted}
    if device.is_cuda:
        allocated = torch.cuda.memory_allocated() - before
        figures |= {"allocated": allocated, "peak": torch.cuda.max_memory_allocated() - before}
        exact = exact and total <= allocated <= 1.05 * total + MEMORY_SLACK
        words += f", {allocated / 1e6:.1f} allocated, {figures['peak'] / 1e6:.1f} at the peak (activations too)"
    return {"found": words, "met": exact, **figures}


# -- overlap


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same points in ascending intervals that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif begin < end:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    """How long the union of intervals is."""
    return sum(end - begin for begin, end in union(intervals))


def overlap_of(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both are."""
    return length(first) + length(second) - length([*first, *second])


def spans_of(events: Sequence[dict[str, Any]], device: Device) -> tuple[list[Interval], list[Interval]]:
    """Communication and computation of a trace, in microseconds.

    On CUDA: NCCL's kernels, and all other kernels, on whatever streams. On the CPU: gloo's messages, and matrix products.
    """
    sent, computed = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        span, name, kind = (event["ts"], event["ts"] + event["dur"]), event["name"], event.get("cat", "")
        if device.is_cuda:
            if kind == "kernel":
                (sent if "nccl" in name.lower() else computed).append(span)
        elif name.startswith("gloo:"):
            sent.append(span)
        elif name in ("aten::mm", "aten::addmm", "aten::bmm"):
            computed.append(span)
    return sent, computed


def overlap(device: Device, limit: float) -> dict[str, Any]:
    """How much of the time of messages is under computation, on two ranks."""
    ranks = int(os.environ["GPU_RANKS"])
    if device.is_cuda and ranks < 2:
        raise NotHere("one rank sends nothing; two NCCL ranks need two GPUs")
    join("nccl" if device.is_cuda else "gloo")
    model, optimizer = sharded_gpt(device, bucket_mb=8 if device.is_cuda else 0.02)
    batches = device.batches(6)
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * device.is_cuda
    for batch in batches[:3]:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
    optimizer.synchronize()
    device.sync()
    with torch.profiler.profile(activities=kinds) as profiler:
        for batch in batches[3:]:
            optimizer.backward(loss_of(model, batch))
            optimizer.step()
        optimizer.synchronize()
        device.sync()
    where = Path(os.environ["GPU_STORE"] + f".trace{dist.get_rank()}.json")
    profiler.export_chrome_trace(str(where))
    sent, computed = spans_of(json.loads(where.read_text())["traceEvents"], device)
    if not sent or not computed:
        raise RuntimeError(
            f"the trace has {len(sent)} messages and {len(computed)} computations: expected some of both"
        )
    hidden = overlap_of(sent, computed) / length(sent)
    return {
        "found": f"{hidden:.0%} of {length(sent) / 3e3:.2f} ms of messages per step under computation, {ranks} ranks",
        # gloo's ranges end where they are awaited, not where they arrive.
        "met": hidden >= OVERLAP_GOAL if device.is_cuda else None,
        "hidden": hidden,
        "messages_ms": length(sent) / 3e3,
        "computation_ms": length(computed) / 3e3,
    }


# -- host synchronisation


def synchronisation(device: Device, limit: float) -> dict[str, Any]:
    """Ten clean steps in which torch raises where the host waits for a stream."""
    if not device.is_cuda:
        raise NotHere("torch reports waits of the host on CUDA alone")
    model, optimizer = sharded_gpt(device)
    batches = device.batches(13)
    reports = []
    for number, batch in enumerate(batches):
        if number == 3:  # by then buffers exist
            torch.cuda.set_sync_debug_mode("error")
        optimizer.backward(loss_of(model, batch))
        reports.append(optimizer.step())
    torch.cuda.set_sync_debug_mode("default")
    skipped = sum(report.skipped for report in reports)
    return {"found": f"none in ten steps ({skipped} skipped)", "met": not skipped}


PARTS: dict[str, Callable[[Device, float], dict[str, Any]]] = {
    "tests": tests,
    "update": update,
    "memory": memory,
    "overlap": overlap,
    "synchronisation": synchronisation,
    **{f"train-{name}": lambda device, limit, name=name: train(device, limit, name) for name in CONTESTANTS},
    "two-ranks": two_ranks,
}


def main() -> None:
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # a launch that is out of time asks where we are
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    try:
        row = PARTS[job["part"]](Device(job["device"]), job["limit"])
    except NotHere as reason:
        row = {"skipped": str(reason)}
    (Path(job["out"]) / f"{os.environ['GPU_RANK']}.json").write_text(json.dumps(row))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
