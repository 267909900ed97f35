"""mpirun of Open MPI and of MPICH: the same masters as under any launcher, no silent N worlds, an end for all."""

from __future__ import annotations

import ctypes.util
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from netlab import Host, Lab, Process, wait_for_all

pytestmark = pytest.mark.cluster

WORKER = Path(__file__).parent / "cluster_worker.py"
START_LIMIT = 90.0

# What mpirun calls in place of ssh: `AGENT HOST COMMAND...`, COMMAND for a shell. Each host has its own processes and
# folder for temporary files, as MPI's daemons would else meet each other's.
AGENT = """#!/bin/sh
host="$1"
shift
export TMPDIR="{directory}/$host"
mkdir -p "$TMPDIR"
exec ip netns exec "{lab}-$host" unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc \\
    sh -c 'hostname "$0" && eval "$1"' "$host" "$*"
"""


def open_mpi(host: Host, mpirun: Path, *options: str, worker: tuple[str, ...] = ()) -> Process:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [str(mpirun), *as_root, "-np", "2", *(options or ("--oversubscribe",))]
    return host.start([*command, sys.executable, str(WORKER), *worker])


def mpich_of_the_system(host: Host, hydra: Path, directory: Path, *worker: str) -> Process:
    """mpi4py's wheels look for MPICH under the name of the common ABI, which Debian's library does not have."""
    link = directory / "libmpi.so.12"
    if not link.exists():
        link.symlink_to(library("mpich"))
    env = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(directory)}
    return host.start([str(hydra), "-n", "2", sys.executable, str(WORKER), *worker], env)


def library(name: str) -> Path:
    """Where the loader finds a library: ctypes tells its name, the map of a process that has it tells its path."""
    soname = ctypes.util.find_library(name)
    assert soname is not None, f"lib{name} is not installed"
    ctypes.CDLL(soname)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Path(next(line.split()[-1] for line in lines if soname in line))


def assert_two_ranks_end_in(masters: str, job: Process, local_ranks: set[int]) -> None:
    for rank in (0, 1):
        job.wait_for("masters", START_LIMIT, rank=rank, world_size=2, masters=masters)
    assert {event["local_rank"] for event in job.all("joined")} == local_ranks
    assert job.wait(20) == 0


def test_two_open_mpi_jobs_at_once_on_one_host(
    make_lab: Callable[..., Lab], openmpi: Path, two_rank_masters: str
) -> None:
    """deepspeedai/DeepSpeed#191, huggingface/accelerate#3312: the second one met the first one's port."""
    lab = make_lab(1)
    jobs = [open_mpi(lab.hosts[0], openmpi) for _ in range(2)]
    wait_for_all(jobs, "masters", START_LIMIT)
    for job in jobs:
        assert_two_ranks_end_in(two_rank_masters, job, local_ranks={0, 1})


def test_open_mpi_across_hosts_without_ssh(make_lab: Callable[..., Lab], openmpi: Path, two_rank_masters: str) -> None:
    """deepspeedai/DeepSpeed#6875, deepspeedai/DeepSpeed#5136, deepspeedai/DeepSpeed#826, deepspeedai/DeepSpeed#2837.

    Each host has an interface that no other host reaches: MPI itself is told which to use, the library finds out.
    """
    lab = make_lab(2)
    agent = lab.directory / "agent"
    agent.write_text(AGENT.format(directory=lab.directory, lab=lab.name))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    for host in lab.hosts:
        host.add_bridge("docker0", "172.30.0.1/16")
    options = ("--prtemca", "plm_ssh_agent", str(agent), "--host", "node0:1,node1:1", "-x", "PATH")
    options += ("--mca", "btl_tcp_if_include", "eth0")
    job = open_mpi(lab.hosts[0], openmpi, *options)
    assert_two_ranks_end_in(two_rank_masters, job, local_ranks={0})
    assert {event["host"] for event in job.all("joined")} == {"node0", "node1"}


def test_mpich_on_one_host(make_lab: Callable[..., Lab], mpich: Path, two_rank_masters: str) -> None:
    lab = make_lab(1)
    job = mpich_of_the_system(lab.hosts[0], mpich, lab.directory)
    assert_two_ranks_end_in(two_rank_masters, job, local_ranks={0, 1})


def test_mpich_with_an_mpi4py_on_open_mpi_is_refused_by_every_rank(
    make_lab: Callable[..., Lab], mpich: Path, openmpi: Path
) -> None:
    """open-mpi/ompi#11861, pytorch/pytorch#2823: N trainings of one rank each, in silence."""
    lab = make_lab(1)
    job = lab.hosts[0].start([str(mpich), "-n", "2", sys.executable, str(WORKER)])
    for count in (1, 2):
        error = job.wait_for("error", START_LIMIT, count=count)
        assert error["type"] == "RuntimeError"
        assert error["seconds"] < 10
        assert "MPICH" in error["message"]
        assert "Open MPI" in error["message"]
    assert job.wait(20) != 0
    assert not job.all("masters")


@pytest.mark.parametrize("family", ["Open MPI", "MPICH"])
def test_rank_that_raises_ends_one_that_waits_elsewhere(
    family: str, make_lab: Callable[..., Lab], openmpi: Path, mpich: Path
) -> None:
    """Rank 0 is in no collective and would sleep for a minute."""
    lab = make_lab(1)
    worker = ("--fault", "absent:0:3,raise:1:3", "--timeout", "60")
    if family == "MPICH":
        job = mpich_of_the_system(lab.hosts[0], mpich, lab.directory, *worker)
    else:
        job = open_mpi(lab.hosts[0], openmpi, worker=worker)
    job.wait_for("absent", START_LIMIT)
    start = time.monotonic()
    assert job.wait(20) != 0
    assert time.monotonic() - start < 10
    assert "told to fail in forward" in job.log.read_text()
