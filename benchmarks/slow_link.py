"""Step time over a slow link, beside the time of the computing alone and of the wire alone: is the overlap real?

    python benchmarks/slow_link.py                                  # two hosts, 1 Gbit/s, three models; needs root
    python benchmarks/slow_link.py --rate 200 --models gpt --rounds 3

Owns:      two hosts that are network namespaces of this machine, the shaping of the link between them.
Takes:     contestants and workloads as `peers.py` has them; a rate in Mbit/s.
Gives:     a table as Markdown, and all figures as JSON.
Invariant: nothing is left behind: hosts, processes and shaping go with the lab, also after Ctrl-C.

Wire is the bytes that left the host's interface, headers included, over the rate; each direction has the rate to itself.
Compute is forward and backward alone, in the contestant's precision, on both hosts at once. A step that hides its
communication takes max(compute, wire). "Free" is the same step without shaping. A step's time is the median from its
start to the start of the next, on the slower host.

[Note: two halves] shardmp reduces under backward and gathers under the next forward, half of the bytes each, and between
them lies the verdict, which needs every gradient. So no order of messages takes less than max(forward, wire / 2) +
max(backward, wire / 2), the "limit" in the table. With a backward of twice the forward's time it is max(compute, wire)
where wire is a third larger than compute or compute half as large again as wire, and 1.17 times that where they are
equal. The last bucket of the one half and the first of the other hide under nothing: small buckets mend that.

The models are those of `peers.py`, and `gpt-1`: `gpt` with one sequence per rank, whose computing takes about as long as
1 Gbit/s does for its bytes; `shardmp-fp16-1mb` has buckets of 1 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))

import netlab  # noqa: E402

CONTESTANTS = "shardmp-fp16,shardmp-fp16-1mb,shardmp-fp16-no-overlap,ddp-fp32,ddp-bf16-hook,fsdp2-bf16-keep"
PORT = 29500
BURST = 2**18  # bytes that may pass at once: more than the timer needs at 1 Gbit/s, and 2 ms of it
QUEUE_MS = 50

Results = dict[str, dict[str, list[dict[str, float]]]]  # by contestant and link ("slow", "free"), figures of each round


@dataclass(frozen=True)
class Job:
    """What both hosts run: a contestant of `contestants` or `bounds` on a workload, for so many steps."""

    contestant: str
    model: str
    steps: int
    warmup: int


# -- one rank


def sent_bytes(interface: str = "eth0") -> int:
    """Bytes that the host's interface has sent, from the kernel's counters."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"/proc/net/dev knows no interface {interface}")


def contestant_of(name: str) -> Any:
    """One of `contestants` or `bounds`, or the one that is only here."""
    from bounds import BOUNDS
    from contestants import CONTESTANTS as ALL
    from contestants import make_shardmp

    if name == "shardmp-fp16-1mb":
        return replace(ALL["shardmp-fp16"], about="shard(bucket_mb=1)", make=make_shardmp("fp16", bucket_mb=1))
    return {**ALL, **BOUNDS}[name]


def workload_of(name: str) -> Any:
    """One of `workloads`, or the one that is only here."""
    from workloads import WORKLOADS, text_loss

    if name == "gpt-1":
        return replace(WORKLOADS["gpt"], about=WORKLOADS["gpt"].about.replace("4 x", "1 x"), loss=text_loss(1))
    return WORKLOADS[name]


def worker(job: Job) -> None:
    """Run a contestant on this rank, and print its figures as an event for `netlab`."""
    import torch
    import torch.distributed as dist
    from contestants import Settings

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, workload = dist.get_rank(), workload_of(job.model)
    trainer = contestant_of(job.contestant).start(workload, Settings(lr=1e-4, clip=None))
    forwards = []

    def step(number: int) -> None:
        start = time.perf_counter()
        loss = workload.loss(trainer.forward, number, rank)
        forwards.append(time.perf_counter() - start)
        trainer.step(loss)

    for number in range(job.warmup):
        step(number)
    trainer.finish()
    dist.barrier()
    sent, cpu, skipped = sent_bytes(), time.process_time(), trainer.skipped()
    starts = [time.perf_counter()]
    for number in range(job.warmup, job.warmup + job.steps):
        step(number)
        starts.append(time.perf_counter())
    trainer.finish()
    ended = time.perf_counter()
    found = {
        "step_ms": 1e3 * statistics.median(after - before for before, after in itertools.pairwise(starts)),
        "forward_ms": 1e3 * statistics.median(forwards[job.warmup :]),
        "mean_ms": 1e3 * (ended - starts[0]) / job.steps,  # with what the last step left under way
        "cpu_ms": 1e3 * (time.process_time() - cpu) / job.steps,
        "sent_mb": (sent_bytes() - sent) / 1e6 / job.steps,
        "skipped": trainer.skipped() - skipped,
    }
    print(json.dumps({"event": "figures", **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# -- the hosts and their link


def shape(lab: netlab.Lab, rate: float | None) -> None:
    """Let each host send at most `rate` Mbit/s; None takes the limit away."""
    limit = ["tbf", "rate", f"{rate}mbit", "burst", str(BURST), "latency", f"{QUEUE_MS}ms"]
    for host in lab.hosts:
        host.run("tc", "qdisc", "replace", "dev", "eth0", "root", *(["noqueue"] if rate is None else limit))


def launch(lab: netlab.Lab, job: Job, limit: float) -> dict[str, float]:
    """One round of one contestant on all hosts; figures of the slower one, and the larger count of bytes."""
    ranks = []
    for rank, host in enumerate(lab.hosts):
        names = {"RANK": rank, "WORLD_SIZE": len(lab.hosts), "LOCAL_RANK": 0, "MASTER_PORT": PORT}
        env = {key: str(value) for key, value in names.items()}
        env |= {"MASTER_ADDR": lab.hosts[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
        command = [sys.executable, str(HERE / "slow_link.py"), "--worker", json.dumps(asdict(job))]
        ranks.append(host.start(command, env, limit))
    try:
        told = netlab.wait_for_all(ranks, "figures", limit)
        for rank in ranks:
            rank.wait(30)
    finally:
        for rank in ranks:
            rank.kill()
    return {key: max(one[key] for one in told) for key in told[0] if key != "event"}


# -- the table


def rows(results: Results, rate: float) -> list[dict[str, Any]]:
    """Medians over rounds: for each contestant its step, wire and compute in ms, and step / max(compute, wire).

    Args:
        results: those of bounds have the free link alone.
        rate: Mbit/s.
    """

    def median(name: str, link: str, key: str) -> float:
        return statistics.median(one[key] for one in results[name][link])

    found = []
    for name in results:
        if name.startswith("compute-"):
            continue
        bound = f"compute-{precision_of(name)}"
        compute, forward = (median(bound, "free", key) for key in ("step_ms", "forward_ms"))
        sent = median(name, "slow", "sent_mb")
        wire = 1e3 * sent * 8 / rate
        step = median(name, "slow", "step_ms")
        row = {"contestant": name, "step_ms": step, "sent_mb": sent, "wire_ms": wire, "compute_ms": compute}
        row |= {"forward_ms": forward, "ratio": step / max(compute, wire), "free_ms": median(name, "free", "step_ms")}
        if name.startswith("shardmp"):
            row["limit_ms"] = max(forward, wire / 2) + max(compute - forward, wire / 2)
        found.append(row)
    return found


def table(model: str, found: Sequence[dict[str, Any]], rate: float) -> str:
    """The rows as Markdown."""
    lines = [f"`{model}`, two hosts, {rate:g} Mbit/s", ""]
    lines += [
        "| contestant | step ms | MB sent | wire ms | compute ms | step / max(compute, wire) | limit ms | free ms |"
    ]
    lines += [f"|{'---|' * 8}"]
    for row in found:
        cells = [f"{row[key]:.0f}" for key in ("step_ms", "sent_mb", "wire_ms", "compute_ms")]
        cells += [f"{row['ratio']:.2f}", f"{row['limit_ms']:.0f}" if "limit_ms" in row else "", f"{row['free_ms']:.0f}"]
        lines.append(f"| {' | '.join([row['contestant'], *cells])} |")
    return "\n".join(lines)


def precision_of(contestant: str) -> str:
    """The precision in which a contestant computes: the word in its name."""
    return next(word for word in contestant.split("-") if word in ("fp16", "bf16", "fp32"))


# -- the command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wide,gpt,gpt-1", help="comma-separated: wide, gpt, gpt-1, tiny")
    parser.add_argument("--contestants", default=CONTESTANTS, help="comma-separated, of those of peers.py")
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s in each direction")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="measured steps in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one launch")
    parser.add_argument("--json", type=Path, default=Path("runs/slow_link.json"), help="where all figures go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, lowest in (("rate", 1), ("rounds", 1), ("steps", 1), ("warmup", 1), ("timeout", 1)):
        if not getattr(arguments, name) >= lowest:
            parser.error(f"--{name}: expected at least {lowest}, got {getattr(arguments, name):g}")
    if not arguments.worker:
        check_names(parser, arguments)
    return arguments


def check_names(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Models and contestants must be known, and able to run here."""
    from contestants import CONTESTANTS as ALL
    from workloads import WORKLOADS

    for option, known in (("models", {*WORKLOADS, "gpt-1"}), ("contestants", {*ALL, "shardmp-fp16-1mb"})):
        unknown = set(getattr(arguments, option).split(",")) - known
        if unknown:
            parser.error(f"--{option}: expected of {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")
    for name in arguments.contestants.split(","):
        if missing := contestant_of(name).missing():
            parser.error(f"--contestants {name}: {missing}")


def measure(lab: netlab.Lab, model: str, arguments: argparse.Namespace) -> Results:
    """All rounds of one model, interleaved."""
    names = arguments.contestants.split(",")
    bounds = sorted({f"compute-{precision_of(name)}" for name in names})
    found: Results = {name: {"slow": [], "free": []} for name in [*bounds, *names]}
    for _ in range(arguments.rounds):
        for link in ("free", "slow"):
            shape(lab, arguments.rate if link == "slow" else None)
            for name in found:
                if link == "slow" and name in bounds:
                    continue  # they send nothing
                job = Job(name, model, arguments.steps, arguments.warmup)
                found[name][link].append(launch(lab, job, arguments.timeout))
    return found


def main() -> int:
    """Build the lab, run the rounds, print the tables."""
    arguments = parse()
    if arguments.worker:
        worker(Job(**json.loads(arguments.worker)))
        return 0
    reason = netlab.cannot_run()
    if reason is None and shutil.which("tc") is None:
        reason = "the link is shaped by tc, which is part of iproute2"
    if reason is not None:
        print(f"slow_link.py: error: {reason}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"options": {key: str(value) for key, value in vars(arguments).items()}, "models": {}}
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder, netlab.Lab(Path(folder), 2) as lab:
        for model in arguments.models.split(","):
            results = measure(lab, model, arguments)
            found = rows(results, arguments.rate)
            report["models"][model] = {"rows": found, "rounds": results}
            print(table(model, found, arguments.rate), end="\n\n", flush=True)
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
