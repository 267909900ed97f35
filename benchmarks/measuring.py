"""One rank of one launch: run a contestant and write down what its steps cost. Started by `launching`, not by hand.

Owns:      the counters: CPU and wall time, bytes on the wire, memory, page faults.
Takes:     a job as JSON on the command line, rank and rendezvous from the environment, as torchrun gives them.
Gives:     a JSON file for this rank: figures by row.
Invariant: everything that is compared is measured by the same lines, after the same number of steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What a launch does.

    contestant: its name, of `contestants` or `bounds`, or one of OTHERS.
    steps, warmup: measured steps, and steps before them.
    record: keep the loss of every step.
    timeout: seconds after which a collective gives up.
    out: the folder for the ranks' results.
    """

    contestant: str
    model: str
    lr: float
    clip: float | None
    steps: int
    warmup: int
    record: bool
    timeout: float
    out: str


def die_with_parent() -> None:
    """Let the kernel end this process when the one that launched it is killed, which then cannot do so itself."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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


def measure(step: Callable[[int], None], finish: Callable[[], None], job: Job) -> dict[str, float]:
    """Run the steps, and give what one of the measured ones costs this process. Collective.

    Returns:
        cpu_ms (all threads, system time included), wall_ms, wire_mb (sent per rank), peak_mib, faults (page faults).
    """
    import torch.distributed as dist

    for number in range(job.warmup):
        step(number)
    finish()
    reset_peak()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    dist.barrier()
    sent, cpu, wall = sent_bytes(), time.process_time(), time.perf_counter()
    for number in range(job.warmup, job.warmup + job.steps):
        step(number)
    finish()  # what the last step left under way belongs to it
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    dist.barrier()
    sent = sent_bytes() - sent
    return {
        "cpu_ms": 1e3 * cpu / job.steps,
        "wall_ms": 1e3 * wall / job.steps,
        "wire_mb": sent / 1e6 / dist.get_world_size() / job.steps,
        "peak_mib": memory_mib("VmHWM"),
        "faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / job.steps,
    }


def run_contestant(job: Job) -> dict[str, Any]:
    """The one row of a contestant."""
    import torch
    import torch.distributed as dist
    from bounds import BOUNDS
    from contestants import CONTESTANTS, Settings
    from workloads import WORKLOADS

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports half of torch
    contestant, workload = {**CONTESTANTS, **BOUNDS}[job.contestant], WORKLOADS[job.model]
    imported = memory_mib("VmRSS")
    trainer = contestant.start(workload, Settings(job.lr, job.clip))
    rank, losses = dist.get_rank(), []

    def step(number: int) -> None:
        loss = workload.loss(trainer.forward, number, rank)
        trainer.step(loss)
        losses.append(loss.item())

    found: dict[str, Any] = dict(measure(step, trainer.finish, job))
    found["above_imports_mib"] = found["peak_mib"] - imported
    found["skipped"] = trainer.skipped()
    found["last_loss"] = losses[-1]
    if job.record:
        found["losses"] = losses
    return {job.contestant: {**found, **trainer.facts()}}


def run_parts(job: Job) -> dict[str, Any]:
    """A row for each part, one after the other in the same process."""
    from bounds import make_parts
    from workloads import WORKLOADS

    parameters = sum(p.numel() for p in WORKLOADS[job.model].build().parameters())
    rows = {}
    for name, part in make_parts(parameters).items():
        rows[name] = measure(lambda _, part=part: part(), lambda: None, job)
        del rows[name]["peak_mib"]  # of all three together: it says nothing
    return rows


def build_extensions(job: Job) -> dict[str, Any]:
    """No row: DeepSpeed's extensions are compiled, which takes minutes, outside of what is measured and timed."""
    from deepspeed_peer import build

    build()
    return {}


OTHERS = {"parts": run_parts, "build-extensions": build_extensions}


def main() -> None:
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # a launch that is out of time asks where we are
    import torch
    import torch.distributed as dist

    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))
    rows = OTHERS.get(job.contestant, run_contestant)(job)
    (Path(job.out) / f"{dist.get_rank()}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
