"""A trace of a few steps, for Perfetto (ui.perfetto.dev) and for TensorBoard's profiler plugin: both read the same file.

Every rank writes its own, `NAME.rank0.pt.trace.json` and so on: the plugin wants that ending, in a folder of their own.
shardmp's own ranges are named `shardmp.forward_wait`, `shardmp.reduce`, `shardmp.verdict`, `shardmp.update` and
`shardmp.gather`; docs/performance.md shows how to read them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

import shardmp

SKIPPED = 2  # steps that still make buffers and tune kernels
WARMUP = 1  # the profiler's own first step
TRACED = 3


def trace_file(name: Path, rank: int) -> Path:
    """Where a rank's trace goes; `name` may have the ending already."""
    stem = name.name.removesuffix(".json").removesuffix(".pt.trace")
    return name.with_name(f"{stem}.rank{rank}.pt.trace.json")


def check(name: Path, steps: int) -> None:
    """Make the folder of the traces.

    Raises:
        ValueError: it cannot be made, or `steps` are too few.
    """
    needed = SKIPPED + WARMUP + TRACED
    if steps < needed:
        raise ValueError(f"--profile: the trace is of steps {needed - TRACED + 1} to {needed}, --steps is {steps}")
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--profile {name}: {error.strerror}") from error


@contextmanager
def traced(
    name: Path | None, world: shardmp.World, optimizer: shardmp.ShardedOptimizer, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each step; after the last of the traced ones the trace is written. None traces nothing."""
    if name is None:
        yield lambda: None
        return
    where = trace_file(name, world.rank)

    def write(trace: profile) -> None:
        trace.export_chrome_trace(str(where))
        say(f"trace of {TRACED} steps in {where}: open it at ui.perfetto.dev")

    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(skip_first=SKIPPED, wait=0, warmup=WARMUP, active=TRACED, repeat=1)
    done = 0
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler:

        def step() -> None:
            nonlocal done
            done += 1
            if done == SKIPPED + WARMUP + TRACED:
                optimizer.synchronize()  # gloo ends a message's range where it is awaited; the profiler must be there still
            profiler.step()

        yield step
        optimizer.synchronize()
