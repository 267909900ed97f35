"""shardmp beside its peers and beside what the machine can do: CPU and wall time, bytes on the wire, memory, loss.

    python benchmarks/peers.py                           # both models, the best of each library, 2 ranks, 3 rounds
    python benchmarks/peers.py --models wide --contestants all --clip off,on --rounds 5 --same-allocator
    python benchmarks/peers.py --contestants shardmp-fp16,fsdp2-fp16-keep --losses
    python benchmarks/peers.py --again runs/peers.json --chart docs/peers.png        # draw again, measure nothing

Every contestant runs in processes of its own, one thread each, on the same model, data, seeds and AdamW (DDP FP32 as
the measure of all). Rounds are interleaved and begin with another contestant each time. CPU time is that of the process,
all threads and system time included. Bytes are read from the loopback interface's counters: let nothing else use it. The
peak is the process's high-water mark, reset before the measured steps; "above imports" leaves out what Python and torch
take. 16-bit products are shardmp's for all but the contestants named -stock, where the CPU has no units for them.

A contestant that fails or hangs is a row that says why, and takes part in no further round. The lower bounds are launched
like contestants: compute alone, the exchange of the fewest bytes, the FP32 sum, the update on the shard.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bounds import BOUNDS, PARTS
from contestants import CONTESTANTS, Contestant
from deepspeed_peer import remove_stale_locks
from launching import LaunchError, launch
from measuring import Job
from report import BASE, chart, markdown
from workloads import WORKLOADS

# One or two of each library, in the variants that send and compute least; what a run of some ten minutes holds.
DEFAULT = [
    BASE,
    "shardmp-fp16",
    "shardmp-bf16",
    "ddp-bf16-hook",
    "fsdp2-bf16-keep-reduce16",
    "fsdp2-fp16-keep-reduce16",
    "deepspeed-zero2-bf16",
    "deepspeed-zero2-fp16",
    "compute-fp16",
    "parts",
]
EVERYBODY = [*CONTESTANTS, *BOUNDS, "parts"]
# glibc's own settings: the heap is not trimmed, and blocks up to 1 GB come from it: freed memory isn't faulted in again.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}
TIMED_LR = 1e-4
LOSS_LR = 3e-4
LOSS_STEPS = 30
BUILD_TIMEOUT = 1800.0
CLIPS = {"off": None, "on": 1.0}

Launch = Callable[[str, float | None], dict[str, dict[str, Any]]]


# -- options


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked; lists are lists. Ends the process with exit code 2 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,wide", help=f"comma-separated, of: {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--contestants", help=f"comma-separated, of: all, {', '.join(EVERYBODY)}; {','.join(DEFAULT)} where not given"
    )
    parser.add_argument("--clip", default="off", help="comma-separated: off, on (at a norm of 1.0)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps in a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--same-allocator", action="store_true", help="glibc settings of a kept heap, for all")
    parser.add_argument("--losses", action="store_true", help=f"also {LOSS_STEPS} steps of gpt, losses beside {BASE}'s")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a launch is ended")
    parser.add_argument("--json", type=Path, default=Path("runs/peers.json"), help="where the figures of all rounds go")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this file")
    parser.add_argument("--chart", type=Path, help="draw a chart into this PNG (needs matplotlib)")
    parser.add_argument(
        "--extensions", type=Path, default=Path("runs/torch_extensions"), help="DeepSpeed's compiled parts"
    )
    parser.add_argument(
        "--again", type=Path, metavar="JSON", help="show the results of an earlier run; measure nothing"
    )
    options = parser.parse_args(argv)
    for name in ("ranks", "rounds", "steps", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: expected a number above 0, got {getattr(options, name)}")
    if options.warmup < 0:
        parser.error(f"--warmup: expected a number of at least 0, got {options.warmup}")
    if options.contestants is None:
        options.contestants = ",".join(DEFAULT)
    if options.contestants == "all":
        options.contestants = ",".join(EVERYBODY)
    allowed = {"models": list(WORKLOADS), "contestants": EVERYBODY, "clip": list(CLIPS)}
    for name, known in allowed.items():
        given = list(dict.fromkeys(getattr(options, name).split(",")))
        unknown = [one for one in given if one not in known]
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(map(repr, unknown))}; expected some of {', '.join(known)}")
        setattr(options, name, given)
    if options.chart and importlib.util.find_spec("matplotlib") is None:
        parser.error("--chart: matplotlib is missing: pip install 'shardmp[plot]'")
    if options.again and not options.again.is_file():
        parser.error(f"--again: expected the JSON of an earlier run, got {options.again}, which is not there")
    return options


# -- the rounds


def contestant_of(name: str) -> Contestant | None:
    return CONTESTANTS.get(name) or BOUNDS.get(name)


def new_case(
    model: str, clip: float | None, ranks: int, names: Sequence[str], unable: Mapping[str, str]
) -> dict[str, Any]:
    """A table's worth of results, without a round yet; contestants that are `unable`, for a reason, have failed already."""
    workload = WORKLOADS[model]
    case: dict[str, Any] = {
        "model": model,
        "about": workload.about,
        "clip": clip,
        "ranks": ranks,
        "parameters": sum(p.numel() for p in workload.build().parameters()),
        "contestants": {},
        "rows": {},
        "failures": dict(unable),
    }
    for name in names:
        contestant = contestant_of(name)
        if contestant is None:
            for part, about in PARTS.items():
                case["contestants"][part] = {"library": "part", "precision": "fp16", "sharded": False, "about": about}
        else:
            fields = ("library", "precision", "sharded", "about")
            case["contestants"][name] = {field: getattr(contestant, field) for field in fields}
        for row in rows_of(name):
            case["rows"][row] = []
    return case


def rows_of(name: str) -> list[str]:
    """The table's rows that a launch fills."""
    return list(PARTS) if name == "parts" else [name]


def run_round(case: dict[str, Any], number: int, names: Sequence[str], launch_one: Launch) -> None:
    """Launch everybody once, from another one each round, and write down figures or failures."""
    start = number % len(names)
    for name in (*names[start:], *names[:start]):
        rows = rows_of(name)
        found: dict[str, Any] = {}
        if not any(row in case["failures"] for row in rows):
            try:
                found = launch_one(name, case["clip"])
            except LaunchError as error:
                say(f"{name} failed: {error}\n{error.details}")
                case["failures"].update(dict.fromkeys(rows, f"failed in round {number + 1}: {error}"))
        for row in rows:
            case["rows"][row].append(found.get(row))
            if row in found:
                say(f"round {number + 1}, {case['model']}, {row}: {found[row]['cpu_ms']:.1f} ms of CPU")


def say(text: str) -> None:
    """Progress, on standard error: standard output is the report."""
    print(text, file=sys.stderr, flush=True)


def run_losses(
    names: Sequence[str], launch_one: Callable[[str], dict[str, dict[str, Any]]], steps: int
) -> dict[str, Any]:
    """The losses of so many steps for each contestant that trains, or why there are none."""
    rows: dict[str, Any] = {}
    for name in names:
        contestant = CONTESTANTS.get(name)
        if contestant is None:
            continue
        try:
            rows[name] = launch_one(name)[name]["losses"]
        except LaunchError as error:
            rows[name] = f"failed: {error}"
        say(f"losses of {name}: {rows[name] if isinstance(rows[name], str) else rows[name][-1]}")
    return {"model": "gpt", "steps": steps, "lr": LOSS_LR, "rows": rows}


@contextlib.contextmanager
def extensions_folder(path: Path) -> Iterator[bool]:
    """The folder of DeepSpeed's extensions, for this run alone; gives whether no other run has it."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "in-use").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


class Launcher:
    """Launches contestants with this run's options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._extensions = options.extensions.resolve()
        self._environment = {"TORCH_EXTENSIONS_DIR": str(self._extensions)}
        if options.same_allocator:
            self._environment.update(ALLOCATOR)

    def build_extensions(self) -> str | None:
        """Compile what DeepSpeed compiles at its first use; gives why that failed, or None."""
        remove_stale_locks(self._extensions)
        job = self._job("build-extensions", "tiny", None)
        say("building DeepSpeed's extensions, where they are not there yet ...")
        try:
            launch(job, 1, self._environment, BUILD_TIMEOUT)
        except LaunchError as error:
            say(error.details)
            return f"skipped: its extensions could not be built: {error}"
        return None

    def __call__(self, name: str, model: str, clip: float | None) -> dict[str, dict[str, Any]]:
        """One timed launch."""
        return self._launch(self._job(name, model, clip))

    def losses(self, name: str, steps: int) -> dict[str, dict[str, Any]]:
        """One launch whose losses are kept."""
        job = self._job(name, "gpt", CLIPS[self._options.clip[0]], lr=LOSS_LR, steps=steps, warmup=0, record=True)
        return self._launch(job)

    def _launch(self, job: Job) -> dict[str, dict[str, Any]]:
        contestant = contestant_of(job.contestant)
        if contestant is not None and contestant.library == "DeepSpeed":
            remove_stale_locks(self._extensions)
        return launch(job, self._options.ranks, self._environment, self._options.timeout)

    def _job(self, name: str, model: str, clip: float | None, **changes: Any) -> Job:
        options = self._options
        fields = {"lr": TIMED_LR, "steps": options.steps, "warmup": options.warmup, "record": False, **changes}
        return Job(contestant=name, model=model, clip=clip, timeout=options.timeout, out="", **fields)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all workloads, and their JSON."""
    results: dict[str, Any] = {
        "machine": machine(),
        "allocator": "the same kept-heap" if options.same_allocator else "the stock",
        "rounds": options.rounds,
        "steps": options.steps,
        "warmup": options.warmup,
        "cases": [],
        "losses": None,
    }
    launcher, names = Launcher(options), options.contestants
    with contextlib.ExitStack() as stack:
        # What was measured is kept, also of a run that is interrupted: see --again.
        stack.callback(lambda: write(options.json, json.dumps(results, indent=1)))
        unable = find_unable(options, launcher, stack)
        for model in options.models:
            cases = [new_case(model, CLIPS[clip], options.ranks, names, unable) for clip in options.clip]
            results["cases"] += cases
            for number in range(options.rounds):
                for case in cases:
                    run_round(case, number, names, lambda name, clip, model=model: launcher(name, model, clip))
        if options.losses:
            able = [name for name in names if name not in unable]
            results["losses"] = run_losses(able, lambda name: launcher.losses(name, LOSS_STEPS), LOSS_STEPS)
    return results


def find_unable(options: argparse.Namespace, launcher: Launcher, stack: contextlib.ExitStack) -> dict[str, str]:
    """By contestant, why it cannot run here. DeepSpeed's extensions are built, and its folder held for the whole run."""
    unable, able = {}, []
    for name in options.contestants:
        contestant = contestant_of(name)
        missing = None if contestant is None else contestant.missing()
        if missing is not None:
            unable[name] = f"skipped: {missing}"
        elif contestant is not None and contestant.library == "DeepSpeed":
            able.append(name)
    if able:
        reason = f"skipped: another benchmark is using {options.extensions}"
        if stack.enter_context(extensions_folder(options.extensions)):
            reason = launcher.build_extensions()
        if reason is not None:
            unable.update(dict.fromkeys(able, reason))
    return unable


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    versions = {}
    for package in ("torch", "deepspeed"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"the load average is {load:.1f}: something else is running, and times will be wrong")
    return {"cpu": cpu, "cores": os.cpu_count(), "load": load, "date": time.strftime("%Y-%m-%d"), **versions}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or take earlier results, and show them."""
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended, too
    results = json.loads(options.again.read_text()) if options.again else run(options)
    text = markdown(results)
    print(text)
    if options.markdown:
        write(options.markdown, text)
    if options.chart:
        chart(results, options.chart)


if __name__ == "__main__":
    main()
