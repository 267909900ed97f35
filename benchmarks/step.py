"""CPU time, wall time, bytes on the wire and memory of one training step, beside DistributedDataParallel in FP32.

    python benchmarks/step.py                   # both models, 2 ranks, 3 interleaved rounds
    python benchmarks/step.py --models wide --rounds 5 --same-allocator

Every contestant runs in processes of its own, one thread each, on the same model, data, seeds and fused AdamW. Rounds
are interleaved, so that a machine that drifts drifts for all; medians are quoted, and ratios to `ddp-fp32` of the
same run. CPU time is that of the process, all threads and system time included. Bytes are read from the network
interface's counters. The peak is the process's own high-water mark, reset before the measured steps; "above imports"
leaves out what Python and torch take themselves.

The models: `gpt`, 6 layers of width 384, 4 x 128 tokens per rank (compute bound); `wide`, 15 residual Linear(2048,
2048) with GELU, 63M parameters, batch 1 (bound by communication and update).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTESTANTS = (
    "ddp-fp32",
    "shardmp-fp16",
    "shardmp-bf16",
    "shardmp-fp32",
    "shardmp-fp16-stage1",
    "shardmp-fp16-exact",
    "shardmp-fp16-native",
    "shardmp-fp16-no-overlap",
)
DEFAULT = "ddp-fp32,shardmp-fp16,shardmp-bf16"
# glibc's own settings: the heap is not trimmed, and blocks up to 1 GB come from it: freed memory isn't faulted in again.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}


# -- one contestant, in a process for each rank


def build(name: str) -> tuple[Any, Any]:
    """The model and a function that makes a batch's loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    if name == "gpt":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
        from gpt import GPT, GPTConfig

        model = GPT(GPTConfig(layers=6, width=384, heads=6, context=128))

        def loss(wrapped: Any, step: int, rank: int) -> Any:
            generator = torch.Generator().manual_seed(1000 * step + rank)
            tokens = torch.randint(0, 256, (4, 129), generator=generator)
            logits = wrapped(tokens[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        return model, loss

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(15))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + F.gelu(layer(x))
            return x

    def wide_loss(wrapped: Any, step: int, rank: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(1, 2048, generator=generator)
        return (wrapped(x).float() - x).square().mean()

    return Wide(), wide_loss


def sent_bytes() -> int:
    """Bytes that the loopback interface has sent, from the kernel's counters; 0 where there are none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[8])
    return 0


def reset_peak() -> None:
    """Start the high-water mark of resident memory anew, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_mib(field: str) -> float:
    """`VmHWM` (peak) or `VmRSS` of this process in MiB."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_stepper(contestant: str, model: Any) -> tuple[Any, Any, Any]:
    """The wrapped model, a function that does one step on a loss, and the sharded optimizer (or None)."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if contestant == "ddp-fp32":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)

        def step(loss: Any) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return wrapped, step, None
    import shardmp

    words = contestant.split("-")[1:]
    options: dict[str, Any] = {"precision": words[0]}
    if "stage1" in words:
        options["stage"] = 1
    if "native" in words:
        options["reduce"] = "native"
    if "exact" in words:
        options.update(reduce="exact", average="micro_batches")
    if "overlap" in words:
        options["overlap"] = False
    sharded, ours = shardmp.shard(model, optimizer, **options)

    def sharded_step(loss: Any) -> None:
        ours.backward(loss)
        ours.step()
        ours.zero_grad()

    return sharded, sharded_step, ours


def worker(arguments: argparse.Namespace) -> None:
    """Run one contestant on this rank, and let rank 0 write what was measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports half of torch
    imported = memory_mib("VmRSS")
    model, loss_of = build(arguments.model)
    parameters = sum(p.numel() for p in model.parameters())
    wrapped, step, ours = make_stepper(arguments.worker, model)
    del model
    losses = []
    for number in range(arguments.warmup):
        step(loss_of(wrapped, number, rank))
    reset_peak()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    dist.barrier()
    before = sent_bytes(), time.process_time(), time.perf_counter()
    for number in range(arguments.warmup, arguments.warmup + arguments.steps):
        loss = loss_of(wrapped, number, rank)
        step(loss)
        losses.append(loss.item())
    if ours is not None:
        ours.synchronize()  # the last gather belongs to these steps
    after = time.process_time(), time.perf_counter()
    dist.barrier()
    wire = (sent_bytes() - before[0]) / ranks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    found = {
        "cpu_ms": 1e3 * (after[0] - before[1]) / arguments.steps,
        "wall_ms": 1e3 * (after[1] - before[2]) / arguments.steps,
        "wire_mb": wire / 1e6 / arguments.steps,
        "peak_mib": memory_mib("VmHWM"),
        "above_imports_mib": memory_mib("VmHWM") - imported,
        "faults": faults / arguments.steps,
        "parameters": parameters,
        "last_loss": losses[-1],
    }
    if ours is not None:
        found["memory"] = ours.memory()
        found["predicted_memory"] = ours.predicted_memory()
        found["predicted_wire_mb"] = ours.predicted_wire_bytes() / 1e6
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, found)
    if rank == 0:
        found["cpu_ms"] = statistics.mean(one["cpu_ms"] for one in everybody)
        for key in ("peak_mib", "above_imports_mib"):
            found[key] = max(one[key] for one in everybody)
        Path(arguments.out).write_text(json.dumps(found))
    dist.destroy_process_group()


# -- the rounds


def launch(contestant: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One round of one contestant."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if arguments.same_allocator:
        environment.update(ALLOCATOR)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(arguments.ranks),
        ]
        command += [__file__, "--worker", contestant, "--model", model, "--out", str(out)]
        command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{contestant} on {model} failed:\n{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def table(model: str, results: dict[str, list[dict[str, Any]]], ranks: int) -> str:
    """Medians over rounds, and ratios to DDP of the same round, as Markdown."""

    def median(name: str, key: str) -> float:
        return statistics.median(one[key] for one in results[name])

    parameters = next(iter(results.values()))[0]["parameters"]
    ideal = 4 * parameters * (ranks - 1) / ranks / 1e6
    lines = [
        f"`{model}`: {parameters / 1e6:.1f}M parameters, {ranks} ranks; ideal wire in 16 bits {ideal:.1f} MB",
        "",
        "| contestant | CPU ms | to DDP | wall ms | to DDP | wire MB | peak MiB | to DDP | above imports | to DDP "
        "| page faults | loss |",
        f"|{'---|' * 12}",
    ]
    base = results.get("ddp-fp32")
    for name, rounds in results.items():
        cells = [name]
        for key in ("cpu_ms", "wall_ms"):
            values = [one[key] for one in rounds]
            cells.append(f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})")
            ratios = [one[key] / other[key] for one, other in zip(rounds, base or rounds, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
        cells.append(f"{median(name, 'wire_mb'):.1f}")
        for key in ("peak_mib", "above_imports_mib"):
            cells.append(f"{median(name, key):.0f}")
            cells.append(f"{median(name, key) / median('ddp-fp32' if base else name, key):.2f}")
        cells.append(f"{median(name, 'faults'):.0f}")
        cells.append(f"{median(name, 'last_loss'):.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,wide", help="comma-separated: gpt, wide")
    parser.add_argument("--contestants", default=DEFAULT, help=f"comma-separated, of: {', '.join(CONTESTANTS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured steps in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--same-allocator", action="store_true", help="glibc settings of a kept heap, for all")
    parser.add_argument("--json", default="runs/step.json", help="where the figures of all rounds go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    names = arguments.contestants.split(",")
    unknown = set(names) - set(CONTESTANTS)
    if unknown:
        parser.error(f"unknown contestants: {', '.join(sorted(unknown))}")
    everything: dict[str, Any] = {}
    for model in arguments.models.split(","):
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                results[name].append(launch(name, model, arguments))
        everything[model] = results
        print(table(model, results, arguments.ranks), end="\n\n", flush=True)
    path = Path(arguments.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"options": vars(arguments), "results": everything}, indent=1))


if __name__ == "__main__":
    main()
