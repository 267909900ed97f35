"""Slurm of three nodes: launch/slurm.sbatch starts, stops with a saved step, is queued again and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from netlab import until
from slurmlab import Slurm

from shardmp.exporting import Contents

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "cluster_worker.py"
TINY = (
    *("--layers", "1", "--width", "32", "--heads", "2", "--context", "16"),
    *("--eval-batches", "1", "--eval-every", "100000", "--sample-bytes", "4"),
)
START_LIMIT = 120.0  # of a job: each of its ranks imports torch
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
TWO = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")


def submit(slurm: Slurm, *options: str, script: tuple[str, ...] = (), **variables: str) -> int:
    """launch/slurm.sbatch with these options of sbatch, variables, and arguments of the training script."""
    env = {"PYTHON": sys.executable, "DOCTOR": "0", **variables}
    job = (str(ROOT / "launch" / "slurm.sbatch"), *script)
    return slurm.submit(*TWO, *options, *job, env=env, cwd=ROOT)


def train(folder: Path, *more: str) -> tuple[str, ...]:
    """Arguments of the example: a tiny model that saves into a folder and resumes from there."""
    where = ("--checkpoints", str(folder / "run"), "--resume", "auto", "--metrics", str(folder / "metrics.jsonl"))
    return (*TINY, *where, *more)


def steps_of(folder: Path) -> list[int]:
    """The steps that rank 0 has written down, in order."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [line["step"] for line in lines if line["kind"] == "step"]


def has_trained(slurm: Slurm, job: int, folder: Path, step: int) -> None:
    """Wait until a step is done; an error as soon as the job has ended before."""

    def done() -> bool:
        if steps_of(folder)[-1:] >= [step]:
            return True
        assert slurm.show(job)["JobState"] not in OVER, slurm.output(job)
        return False

    until(done, START_LIMIT, lambda: f"step {step} of job {job}:\n{slurm.output(job)[-3000:]}")


def saved_step(slurm: Slurm, job: int) -> int:
    """The step after which the run says that it was stopped and saved."""
    found = re.findall(r"stopped by SIGTERM after step (\d+)", slurm.output(job))
    assert found, slurm.output(job)
    return int(found[-1])


def test_sbatch_runs_the_doctor_then_trains(slurm: Slurm, tmp_path: Path) -> None:
    """Three nodes; torchtitan's multinode_trainer.slurm asked `hostname --ip-address`, which was a loopback address
    (nebius/nebius-solutions-library#177): no address is asked for here."""
    job = submit(slurm, "--nodes=3", script=train(tmp_path, "--steps", "3"), DOCTOR="1")
    shown = slurm.wait_for_state(job, *OVER, limit=2 * START_LIMIT)
    output = slurm.output(job)
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert "Healthy: 3 ranks on 3 hosts" in output
    assert output.index("Healthy") < output.index("3 x cpu")
    assert steps_of(tmp_path) == [1, 2, 3]


def test_scancel_saves_the_same_step_on_all_ranks_and_does_not_queue_the_job_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    """pytorch/pytorch#119856, pytorch/pytorch#68258: the checkpoint was cut short by SIGKILL."""
    job = submit(slurm, script=train(tmp_path, "--steps", "1000000"))
    has_trained(slurm, job, tmp_path, 5)
    slurm.run("scancel", str(job))
    shown = slurm.wait_for_state(job, *OVER, limit=40)
    slurm.wait_for_output(job, "stopped by SIGTERM", 40)
    assert shown["JobState"] == "CANCELLED"
    step = saved_step(slurm, job)
    assert step == steps_of(tmp_path)[-1] >= 5
    saved = Contents(tmp_path / "run")
    saved.verify()
    assert saved.manifest is not None
    assert (saved.manifest.step, saved.manifest.ranks) == (step, 2)
    assert shown["Restarts"] == "0"
    assert "queued again" not in slurm.output(job)


def test_the_time_limit_saves_and_requeues_and_the_job_resumes(slurm: Slurm, tmp_path: Path) -> None:
    """--signal=TERM@120: Slurm sends it to the ranks alone when at most two minutes are left; it looks every 30 s."""
    job = submit(slurm, "--time=30", script=train(tmp_path, "--steps", "1000000"))
    has_trained(slurm, job, tmp_path, 5)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    slurm.wait_for_output(job, "is queued again", 100)
    step = saved_step(slurm, job)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    slurm.wait_for_output(job, f"resumed after step {step} from", 30 + START_LIMIT)
    has_trained(slurm, job, tmp_path, step + 3)
    slurm.run("scancel", str(job))
    shown = slurm.wait_for_state(job, "CANCELLED", limit=40)
    assert shown["Restarts"] == "1"
    seen = steps_of(tmp_path)
    assert seen == list(range(1, len(seen) + 1))  # each step once: none was lost or made twice


def test_a_preempted_job_saves_and_is_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    """In the partition's grace time Slurm tells the ranks alone, and calls a job that then ends by itself failed."""
    job = submit(slurm, script=train(tmp_path, "--steps", "1000000"))
    has_trained(slurm, job, tmp_path, 3)
    urgent = slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap", "true")
    slurm.wait_for_output(job, "is queued again", 60)
    assert Contents(tmp_path / "run", saved_step(slurm, job)).manifest is not None
    assert slurm.wait_for_state(urgent, *OVER, limit=60)["JobState"] == "COMPLETED"
    shown = slurm.wait_for_state(job, "PENDING", "RUNNING", limit=30)
    assert shown["Restarts"] == "1"
    slurm.run("scancel", str(job))


def test_a_killed_worker_ends_the_job_in_seconds(slurm: Slurm, tmp_path: Path) -> None:
    """--kill-on-bad-exit: the other rank would wait for its time-out."""
    job = submit(slurm, script=train(tmp_path, "--steps", "1000000"))
    has_trained(slurm, job, tmp_path, 3)
    victim = next(filter(is_rank, slurm.nodes[0].pids()))
    start = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    shown = slurm.wait_for_state(job, *OVER, limit=40)
    assert shown["JobState"] == "FAILED"
    assert time.monotonic() - start < 20
    assert "queued again" not in slurm.output(job)
    until(lambda: not any(map(is_rank, slurm.nodes[1].pids())), 20, slurm.lab.report)


def is_rank(pid: int) -> bool:
    """Whether a process is a rank of the example: `python .../train_gpt.py ...`, not the srun that names it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(words) > 1 and words[1].endswith(b"train_gpt.py")


def test_a_batch_script_that_forgets_srun_is_told_so(slurm: Slurm) -> None:
    """huggingface/accelerate#2816: N tasks were asked for, one process ran, and waited for the others."""
    job = slurm.submit(*TWO, "--wrap", f"{sys.executable} {WORKER}")
    shown = slurm.wait_for_state(job, *OVER, limit=START_LIMIT)
    assert shown["JobState"] == "FAILED"
    assert "start with srun" in slurm.output(job)
