"""The scripts in launch/: clean for shellcheck, their variables become the right options, and one real start.

Real starts of mpirun and srun are in tests/cluster; here a stand-in prints what it was called with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
SCRIPTS = sorted(path.name for path in (ROOT / "launch").iterdir() if path.is_file())
TINY = [
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--context",
    "16",
    "--eval-batches",
    "2",
    "--sample-bytes",
    "8",
]
OPEN_MPI, HYDRA = "mpirun (Open MPI) 5.0.11", "HYDRA build details:\n    Version: 4.0.2"


def run(name: str, *arguments: str, timeout: float = 20, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of launch/ in this environment, without what a launcher or a user may have set in it."""
    prefixes = ("SLURM_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC_", "OMP_", "NCCL_", "GLOO_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "LD_LIBRARY_PATH")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}
    command = [str(ROOT / "launch" / name), *arguments]
    return subprocess.run(
        command, env={**plain, **variables}, capture_output=True, text=True, timeout=timeout, check=False
    )


def stand_in(path: Path, version: str = "") -> str:
    """A program that prints a line per argument, or `version` when asked for it; then RANK and OMP_NUM_THREADS."""
    path.write_text(
        f"#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit; fi\n"
        'printf "%s\\n" "$@"\necho "RANK=${RANK-unset} OMP_NUM_THREADS=${OMP_NUM_THREADS-unset}"\n'
    )
    path.chmod(0o755)
    return str(path)


def pair_at(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_clean_and_says_how_it_is_used(name: str) -> None:
    shellcheck = Path(sysconfig.get_path("scripts"), "shellcheck")
    checked = subprocess.run(
        [shellcheck, ROOT / "launch" / name], capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stdout
    top = (ROOT / "launch" / name).read_text().split("set -euo pipefail")[0]
    assert f"launch/{name} --steps" in top
    assert os.access(ROOT / "launch" / name, os.X_OK)


def test_all_three_ways_are_there() -> None:
    assert SCRIPTS == ["mpirun.sh", "slurm.sbatch", "torchrun.sh"]


# -- torchrun.sh


def test_torchrun_trains_on_two_ranks(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    done = run(
        "torchrun.sh",
        *TINY,
        "--steps",
        "2",
        "--metrics",
        str(metrics),
        timeout=120,
        NPROC_PER_NODE="2",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[0]["ranks"] == 2
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]


def test_torchrun_passes_each_variable_on_as_its_option(tmp_path: Path) -> None:
    python = stand_in(tmp_path / "python")
    values = {
        "NNODES": "1:4", "NPROC_PER_NODE": "8", "RDZV_ENDPOINT": "node0:29500", "RDZV_ID": "job 7", "NODE_RANK": "3",
        "MAX_RESTARTS": "2", "LOG_DIR": "my logs", "SHUTDOWN_TIMEOUT": "60",
    }  # fmt: skip
    done = run(
        "torchrun.sh", "--lr", "a b", PYTHON=python, SCRIPT="my train.py", SEPARATE_STORE="1", DRY_RUN="1", **values
    )
    words = done.stdout.splitlines()
    assert words[:3] == ["-m", "shardmp.cli", "launch"]
    for variable, value in values.items():
        assert pair_at(words, f"--{variable.lower().replace('_', '-')}") == value
    assert words[-6:-1] == ["--separate-store", "--dry-run", "my train.py", "--lr", "a b"]


def test_torchrun_without_variables_starts_the_example_on_this_machine(tmp_path: Path) -> None:
    words = run("torchrun.sh", PYTHON=stand_in(tmp_path / "python")).stdout.splitlines()
    ranks = "gpu" if shutil.which("nvidia-smi") else "2"
    assert words[:-1] == ["-m", "shardmp.cli", "launch", "--nnodes", "1", "--nproc-per-node", ranks, EXAMPLE]


# -- mpirun.sh


def test_open_mpi_gets_hosts_and_variables_by_name(tmp_path: Path) -> None:
    mpirun = stand_in(tmp_path / "mpirun", OPEN_MPI)
    done = run(
        "mpirun.sh", "--lr", "1", PYTHON="python9", MPIRUN=mpirun, NP="4", HOSTS="node0:2,node1:2", OVERSUBSCRIBE="1",
        NCCL_DEBUG="WARN", EXPORT="MY_TOKEN_FILE UNSET_ONE", MY_TOKEN_FILE="t",
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[:2] == ["-np", "4"]
    assert pair_at(words, "--host") == "node0:2,node1:2"
    assert pair_at(words, "--bind-to") == "none"  # or all threads of a rank share a core
    assert "--oversubscribe" in words
    exported = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    assert {"PATH", "OMP_NUM_THREADS", "NCCL_DEBUG", "MY_TOKEN_FILE"} <= set(exported)
    assert not {"UNSET_ONE", "RANK", "GLOO_SOCKET_IFNAME"} & set(exported)
    assert words[-5:] == ["python9", EXAMPLE, "--lr", "1", "RANK=unset OMP_NUM_THREADS=1"]


def test_root_starts_open_mpi_only_when_that_was_asked_for(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed's image wraps mpirun so that it always allows root; Open MPI has its reasons to ask."""
    mpirun = stand_in(tmp_path / "mpirun", OPEN_MPI)
    assert "--allow-run-as-root" not in run("mpirun.sh", PYTHON="python9", MPIRUN=mpirun).stdout
    asked = run("mpirun.sh", PYTHON="python9", MPIRUN=mpirun, ALLOW_RUN_AS_ROOT="1").stdout
    assert ("--allow-run-as-root" in asked) == (os.getuid() == 0)


def test_mpich_gets_none_of_open_mpis_options(tmp_path: Path) -> None:
    mpirun = stand_in(tmp_path / "mpirun", HYDRA)
    asked = {"OVERSUBSCRIBE": "1", "ALLOW_RUN_AS_ROOT": "1", "OMP_NUM_THREADS": "3"}
    done = run("mpirun.sh", PYTHON="python9", MPIRUN=mpirun, HOSTS="node0:2,node1:2", **asked)
    expected = ["-np", "2", "-hosts", "node0:2,node1:2", "python9", EXAMPLE, "RANK=unset OMP_NUM_THREADS=3"]
    assert done.stdout.splitlines() == expected


def test_a_missing_mpirun_is_an_error_that_says_what_to_install() -> None:
    done = run("mpirun.sh", PYTHON="python9", MPIRUN="/no/such/mpirun")
    assert done.returncode == 2
    assert "pip install 'shardmp[mpi]'" in done.stderr


# -- slurm.sbatch


def in_a_job(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The batch script with stand-ins for srun and scontrol. CODES: the exit code of each call of srun."""
    script = Path(stand_in(tmp_path / "srun"))
    script.write_text(f"{script.read_text()}set -- $(cat {tmp_path}/codes)\ncode=$1\nshift\n")
    with script.open("a") as file:
        file.write(f'echo "$@" > {tmp_path}/codes\nexit "${{code:-0}}"\n')
    (tmp_path / "codes").write_text(variables.pop("CODES", "0"))
    stand_in(tmp_path / "scontrol")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    given = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": "python9", "DOCTOR": "0", **variables}
    return run("slurm.sbatch", *arguments, PATH=path, **given)


def test_slurm_starts_the_ranks_themselves_and_ends_with_the_first_failure(tmp_path: Path) -> None:
    """A RANK that the submitting shell had exported does not reach the tasks: it would contradict Slurm's."""
    done = in_a_job(tmp_path, "--lr", "1", SLURM_CPUS_PER_TASK="8", SLURM_GPUS_ON_NODE="8", RANK="0", WORLD_SIZE="1")
    expected = [
        "--kill-on-bad-exit=1",
        "--label",
        "--cpus-per-task=8",
        "--gpu-bind=none",
        "python9",
        EXAMPLE,
        "--lr",
        "1",
    ]
    assert done.stdout.splitlines() == [*expected, "RANK=unset OMP_NUM_THREADS=1"]


def test_slurm_without_gpus_binds_none(tmp_path: Path) -> None:
    done = in_a_job(tmp_path)
    assert done.stdout.splitlines()[:-1] == ["--kill-on-bad-exit=1", "--label", "python9", EXAMPLE]


def test_the_batch_script_run_by_hand_says_sbatch() -> None:
    done = run("slurm.sbatch")
    assert done.returncode == 2
    assert "sbatch launch/slurm.sbatch" in done.stderr


def test_a_job_submitted_elsewhere_says_which_script_is_missing(tmp_path: Path) -> None:
    done = in_a_job(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2
    assert f"no script {tmp_path}/examples/train_gpt.py" in done.stderr


SRUN = ["--kill-on-bad-exit=1", "--label", "python9"]
ENVIRONMENT = "RANK=unset OMP_NUM_THREADS=1"


def test_the_doctor_comes_first_and_the_job_follows_only_where_nothing_is_wrong(tmp_path: Path) -> None:
    doctor = [*SRUN, "-m", "shardmp.cli", "doctor"]
    well = in_a_job(tmp_path, DOCTOR="1", DOCTOR_OPTIONS="--params 7e9")
    assert well.stdout.splitlines() == [*doctor, "--params", "7e9", ENVIRONMENT, *SRUN, EXAMPLE, ENVIRONMENT]
    ill = in_a_job(tmp_path, DOCTOR="1", CODES="1")
    assert ill.stdout.splitlines() == [*doctor, ENVIRONMENT]
    assert ill.returncode == 1
    assert "DOCTOR=0" in ill.stderr


def requeued(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether scontrol was asked to queue the job again."""
    return done.stdout.splitlines()[-3:] == ["requeue", "7", "RANK=unset OMP_NUM_THREADS=1"]


def test_a_job_whose_ranks_were_told_to_stop_is_queued_again_if_it_can_resume(tmp_path: Path) -> None:
    """143 = 128 + SIGTERM, with which ranks leave that have saved. A run that cannot resume would start over for ever."""
    resumes = ("--resume", "auto")
    assert requeued(in_a_job(tmp_path, *resumes, CODES="143"))
    assert requeued(in_a_job(tmp_path, *resumes, CODES="143", DOCTOR="1"))  # told so while the doctor was there
    assert requeued(in_a_job(tmp_path, CODES="143", MAX_REQUEUES="3", SLURM_RESTART_COUNT="2"))
    for arguments, variables in (
        ((), {"CODES": "143"}),
        (resumes, {"CODES": "1"}),
        (resumes, {"CODES": "0"}),
        (resumes, {"CODES": "143", "MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}),
    ):
        done = in_a_job(tmp_path, *arguments, **variables)
        assert not requeued(done)
        assert done.returncode == int(variables["CODES"])


def test_a_cancelled_job_is_not_queued_again(tmp_path: Path) -> None:
    """scancel tells the batch script as well as the ranks; `scancel --signal=TERM` and the time limit tell the ranks alone."""
    script = tmp_path / "srun-that-is-cancelled"
    script.write_text("#!/bin/sh\nkill -TERM $PPID\nexit 143\n")
    script.chmod(0o755)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").symlink_to(script)
    stand_in(folder / "scontrol")
    done = run(
        "slurm.sbatch", "--resume", "auto", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID="7",
        SLURM_SUBMIT_DIR=str(ROOT), DOCTOR="0",
    )  # fmt: skip
    assert done.returncode == 143
    assert not requeued(done)
