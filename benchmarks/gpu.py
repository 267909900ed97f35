"""Checks a GPU in at most four minutes: tests, update, memory, overlap, host synchronisation, training beside others.

    python benchmarks/gpu.py                             # one GPU or more; results in runs/gpu.json, and a table
    python benchmarks/gpu.py --parts update,overlap      # some of it
    python benchmarks/gpu.py --cpu                       # the same lines on the CPU at tiny sizes: no speed, in a minute

Owns:      the order of the parts, their processes and time limits, the table.
Takes:     parts, device and budget as options.
Gives:     a row for each part as Markdown, all figures as JSON; exit code 1 where a part failed or missed its goal.
Invariant: a part that fails or hangs is a row that says why; no process outlives the command; the budget holds.

`tests` runs `pytest -m gpu`. `update` compares what a step does after its verdict with a copy of as many bytes. `memory`
counts, predicts, and asks the allocator. `overlap` reads a trace of two NCCL ranks, and needs two GPUs: one rank sends
nothing. `synchronisation` makes ten steps in which torch raises where the host waits. `train-*` trains a GPT of 86M
parameters in FP16 with shardmp, with autocast and GradScaler, with FSDP2. `two-ranks` is two gloo ranks on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launching
from launching import LaunchError

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """A row of the table: what it checks, its share of the budget in seconds, and its ranks for so many GPUs."""

    goal: str
    seconds: float
    ranks: Callable[[int], int] = lambda gpus: 1


# The most important first: what finds no time left is not run.
PARTS = {
    "synchronisation": Part("no wait of the host in ten clean steps", 30),
    "memory": Part("bytes as predicted; the allocator within 5 % and 32 MiB", 30),
    "update": Part("85 % of a copy's bandwidth", 30),
    "train-shardmp": Part("FP16 GPT", 40),
    "train-autocast": Part("FP16 GPT", 40),
    "train-fsdp2": Part("FP16 GPT", 40),
    "overlap": Part("half of the messages' time under computation", 45, lambda gpus: min(gpus, 2)),
    "two-ranks": Part("two gloo ranks share one GPU", 40, lambda gpus: 2),
    "tests": Part("all pass", 150),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked. Ends the process with exit code 2 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of: {', '.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, at tiny sizes")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for all parts together")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on each part's own limit, for a busy machine"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/gpu.json"), help="where all figures go")
    options = parser.parse_args(argv)
    for name in ("budget", "patience"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name}: expected a number above 0, got {getattr(options, name):g}")
    given = list(dict.fromkeys(options.parts.split(",")))
    unknown = [name for name in given if name not in PARTS]
    if unknown:
        parser.error(f"--parts: unknown {', '.join(map(repr, unknown))}; expected some of {', '.join(PARTS)}")
    options.parts = given
    return options


def environment_of(cpu: bool) -> dict[str, str]:
    """What all ranks' environments have in common."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        found.pop(name, None)
    for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        found["GLOO_SOCKET_IFNAME"] = loopback
    return {**found, "CUDA_VISIBLE_DEVICES": ""} if cpu else found


def run(name: str, device: str, ranks: int, limit: float) -> dict[str, Any]:
    """One part in processes of its own; rank 0's row, or one that says why there is none."""
    common = environment_of(device == "cpu")
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        job = json.dumps({"part": name, "device": device, "limit": limit, "out": folder})
        processes: list[subprocess.Popen[bytes]] = []
        began = time.monotonic()
        try:
            for rank in range(ranks):
                own = {"GPU_STORE": f"{folder}/store", "GPU_RANK": str(rank), "GPU_RANKS": str(ranks)}
                with (Path(folder) / f"{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, str(HERE / "gpu_parts.py"), job],
                            env={**common, **own},
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
            launching.wait(processes, limit, Path(folder))
            row = json.loads((Path(folder) / "0.json").read_text())
        except LaunchError as error:
            row = {"failed": str(error), "details": error.details}
        finally:
            for process in processes:
                launching.end(process)
        return {**row, "seconds": round(time.monotonic() - began, 1)}


def run_all(options: argparse.Namespace, gpus: int) -> dict[str, dict[str, Any]]:
    """All rows, by part, within the budget."""
    deadline = time.monotonic() + options.budget
    rows: dict[str, dict[str, Any]] = {}
    for name in options.parts:
        part, left = PARTS[name], deadline - time.monotonic()
        if left < 5:
            rows[name] = {"failed": f"no time left of the budget of {options.budget:g} s"}
        else:
            ranks = 2 if options.cpu and name == "overlap" else part.ranks(gpus)
            rows[name] = run(name, "cpu" if options.cpu else "cuda", ranks, min(part.seconds * options.patience, left))
        print(f"{name}: {said(rows[name])}", file=sys.stderr, flush=True)
    return rows


def said(row: dict[str, Any]) -> str:
    """A row in words."""
    if "skipped" in row:
        return f"not measured: {row['skipped']}"
    return f"FAILED: {row['failed']}" if "failed" in row else row["found"]


def is_bad(row: dict[str, Any]) -> bool:
    """Whether a part failed or missed its goal."""
    return "failed" in row or row.get("met") is False


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown; training beside others as ratios to shardmp."""
    lines = ["| part | goal | found | reached | s |", "|---|---|---|---|---|"]
    own = rows.get("train-shardmp", {}).get("tokens_per_s")
    for name, row in rows.items():
        words = said(row)
        if own and name.startswith("train-") and name != "train-shardmp" and "tokens_per_s" in row:
            words += f"; shardmp is at {own / row['tokens_per_s']:.2f} of it"
        reached = "no" if is_bad(row) else {True: "yes", None: ""}[row.get("met")]
        lines.append(f"| {name} | {PARTS[name].goal} | {words} | {reached} | {row.get('seconds', '')} |")
    return "\n".join(lines)


def machine(cpu: bool) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    if not cpu:
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, print."""
    options = parse(sys.argv[1:] if argv is None else argv)
    facts = machine(options.cpu)
    if not options.cpu and not facts["gpus"]:
        print("gpu.py: error: this process sees no CUDA device; --cpu runs the parts on the CPU", file=sys.stderr)
        return 2
    rows = run_all(options, len(facts["gpus"]))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    print(table(rows))
    return int(any(map(is_bad, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
