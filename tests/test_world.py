"""`init` for real: plain processes with a launcher's variables, alone, with torchrun, and beside a user's own group."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_worker import PRELOADED
from ranks import on_ranks

import shardmp
from shardmp import launcher, world

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC",
    "OMPI_",
    "PMI_",
    "MPI_",
    "SLURM_",
    "PET_",
    "GLOO_",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """The tests' own environment may be a cluster's."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def variables(rank: int, world_size: int, port: int, **other: str) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), **address, **other}


def processes(work: Callable[[], Any], environs: Sequence[Mapping[str, str]], seconds: float = 60.0) -> list[Any]:
    """What `work` returned, or said when it raised, in one process per environment (forked where torch is imported)."""
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(PRELOADED)
    pipes, started = [], []
    for environ in environs:
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(work, dict(environ), theirs, sys.path))
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    deadline, outcomes = time.monotonic() + seconds, []
    for pipe in pipes:
        there = pipe.poll(max(0.0, deadline - time.monotonic()))
        outcomes.append(pipe.recv() if there else "did not end in time")
    for process in started:
        process.join(5)
        process.kill()
    return outcomes


def _run(work: Callable[[], Any], environ: dict[str, str], pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            del os.environ[name]
    os.environ.update(environ)
    try:
        outcome = work()
    except Exception as error:
        sys.excepthook(type(error), error, None)  # as where a script ends
        outcome = f"{type(error).__name__}: {error}"
    pipe.send(outcome)
    pipe.close()


def join_and_sum() -> tuple[Any, ...]:
    """One rank's life: joins twice, sums over the group and over the control group."""
    sums = []
    for _ in range(2):
        here = shardmp.init(backend="gloo", timeout=20, arrival_timeout=40)
        value = torch.full((2,), 1.0 + here.rank)
        dist.all_reduce(value)
        dist.all_reduce(value, group=world.control_group())
        sums.append(value.tolist())
        dist.destroy_process_group()
    return here.rank, here.world_size, here.host, sums, os.environ.get("GLOO_SOCKET_IFNAME", "")


# -- one rank alone


def test_one_rank_alone_makes_no_group_and_touches_no_network(monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: pytest.fail("opened a socket"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("looked a name up"))
    here = shardmp.init(backend="gloo")
    assert (here.rank, here.world_size, here.local_rank, here.backend) == (0, 1, 0, None)
    assert (here.device, here.host) == (torch.device("cpu"), socket.gethostname())
    assert not dist.is_initialized()


def test_a_slurm_step_or_mpirun_of_one_task_is_one_rank_alone(monkeypatch):
    """No MPI is loaded, and no address is needed."""
    for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert shardmp.init(backend="gloo").backend is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"backend": "mpi"}, "expected 'gloo', 'nccl' or None, got 'mpi'"),
        ({"timeout": 0}, r"init\(timeout=...\): expected more than 0 seconds"),
        ({"arrival_timeout": timedelta(seconds=-1)}, r"init\(arrival_timeout=...\): expected more than 0 seconds"),
    ],
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        shardmp.init(**arguments)


def test_more_local_ranks_than_gpus_are_refused_before_any_network_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: pytest.fail("opened a socket"))
    for name, value in variables(2, 3, 29500, LOCAL_RANK="2").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="LOCAL_RANK=2 but this host has 2 GPUs"):
        shardmp.init()


def test_a_task_to_which_slurm_shows_its_own_gpu_alone_takes_that_one(monkeypatch):
    """`srun --gpus-per-task=1`: local rank 3 sees one GPU, number 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="has 1 GPUs"):
        world._device(3, "nccl")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert world._device(3, "nccl") == torch.device("cuda", 0)


def test_mpirun_without_mpi4py_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(
        RuntimeError, match=r"Open MPI started this process as rank 0 of 2, .* pip install 'shardmp\[mpi\]'"
    ):
        shardmp.init(backend="gloo")


def test_mpi4py_of_another_mpi_is_refused_in_place_of_n_worlds_of_one(monkeypatch):
    """open-mpi/ompi#11861, pytorch/pytorch#2823: each process is rank 0 of 1, and trains alone."""

    class Communicator:
        Get_size = staticmethod(lambda: 1)
        Get_rank = staticmethod(lambda: 0)

    class Library:
        COMM_WORLD = Communicator
        Get_library_version = staticmethod(lambda: "Open MPI v5.0.11, package: x")

    from shardmp import mpi

    found = launcher.detect({"PMI_RANK": "0", "PMI_SIZE": "2"})
    with pytest.raises(
        RuntimeError, match=r"MPICH started .* rank 0 of 2, but mpi4py, .* linked to Open MPI v5.0.11, is rank 0 of 1"
    ):
        mpi._check_world(Library, found)


# -- several processes on one host


def test_ranks_with_torchs_variables_meet_twice():
    """Two jobs at once on one host (C54), each of which ends its group and makes another one."""
    ports = [free_port(), free_port()]
    environs = [variables(rank, 2, port) for port in ports for rank in range(2)]
    outcomes = processes(join_and_sum, environs)
    loopback = "lo" if sys.platform == "linux" else ""
    assert outcomes == [(rank, 2, socket.gethostname(), [[6.0, 6.0]] * 2, loopback) for rank in (0, 1, 0, 1)]


def join_without_help() -> Any:
    """Neither a name for this host nor a process to ask: whatever is started, fails."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"started {args}")

    # CLONE_NEWUTS alone as root, in a user namespace as anybody else, where the system lets one.
    if sys.platform == "linux" and any(ctypes.CDLL(None).unshare(flags) == 0 for flags in (0x4000000, 0x14000000)):
        socket.sethostname("no-such-host")
    subprocess.Popen, os.system, os.posix_spawn = refuse, refuse, refuse  # type: ignore[misc,assignment]
    os.environ["PATH"] = ""
    shardmp.init(backend="gloo", timeout=20, arrival_timeout=20)
    model = torch.nn.Linear(4, 4)
    model, optimizer = shardmp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    dist.destroy_process_group()
    return socket.gethostname()


def test_no_process_is_started_no_name_is_needed_and_nothing_is_built(tmp_path):
    """pytorch/pytorch#26166, deepspeedai/DeepSpeed#826 (C54): no `hostname -I`, no resolvable own name.

    pytorch/pytorch#189245, #190543 (C56): a lock file that a killed build of an extension has left is not waited for.
    """
    for name in ("shardmp", "fused_adam", "cpu_adam", "utils"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    port = free_port()
    environs = [variables(rank, 2, port, TORCH_EXTENSIONS_DIR=str(tmp_path)) for rank in range(2)]
    start = time.monotonic()
    names = processes(join_without_help, environs, 40)
    assert names == ["no-such-host"] * 2 if sys.platform == "linux" and os.geteuid() == 0 else len(set(names)) == 1
    assert time.monotonic() - start < 20 + 10  # the fork server's own import of torch is in it


def join_in_six_seconds() -> str:
    start = time.monotonic()
    try:
        shardmp.init(backend="gloo", timeout=20, arrival_timeout=6)
    except (RuntimeError, ValueError) as error:
        return f"{time.monotonic() - start:.1f} {error}"
    return "joined"


def test_a_port_in_use_is_an_error_on_every_rank_in_ten_seconds():
    """pytorch/pytorch#126510, #85604 (C54): the message names the port and the setting."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        outcomes = processes(join_in_six_seconds, [variables(rank, 2, port) for rank in range(2)])
    for outcome in outcomes:
        seconds, _, text = outcome.partition(" ")
        assert float(seconds) < 10
        assert f"port {port}" in text
        assert "MASTER_PORT" in text


def test_a_missing_rank_and_a_wrong_interface_are_named_in_time():
    port = free_port()
    environs = [variables(rank, 3, port) for rank in range(2)]
    outcomes = processes(join_in_six_seconds, [*environs, variables(2, 3, port, GLOO_SOCKET_IFNAME="enp9")])
    for outcome in outcomes[:2]:
        seconds, _, text = outcome.partition(" ")
        assert float(seconds) < 6 + 3
        assert "1 of 3 ranks have not arrived within 6 s: rank 2. Arrived: rank 0 (host" in text
    seconds, _, text = outcomes[2].partition(" ")
    assert float(seconds) < 2
    assert "GLOO_SOCKET_IFNAME='enp9' names no interface" in text


def raise_or_read() -> Any:
    here = shardmp.init(backend="gloo", timeout=20, arrival_timeout=40)
    if here.rank == 1:
        raise ValueError("x" * 400)
    store = dist.distributed_c10d._get_default_store()
    store.wait(["shardmp/raised/1"], timedelta(seconds=15))
    return store.get("shardmp/raised/1").decode()


def test_a_rank_that_raises_tells_its_peers():
    port = free_port()
    told, raised = processes(raise_or_read, [variables(rank, 2, port) for rank in range(2)])
    assert told == "raised ValueError: " + "x" * (300 - len("raised ValueError: "))
    assert raised.startswith("ValueError: xxx")


def test_the_hook_is_put_up_once_and_passes_on_to_the_one_before(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args[0]))
    world._report_exceptions()
    first = sys.excepthook
    world._report_exceptions()
    assert sys.excepthook is first
    for error in (ValueError("x"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    assert seen == [ValueError, KeyboardInterrupt]


def test_torchs_own_hook_around_ours_still_prints_before_the_end(monkeypatch):
    """torch wraps the hook that it finds and prints when that has returned: an end of all ranks inside would print nothing."""
    events: list[str] = []
    monkeypatch.setattr(world.mpi, "abort", lambda: events.append("end"))
    monkeypatch.setattr(sys, "excepthook", lambda *args: events.append("print"))
    world._report_exceptions()
    inner = sys.excepthook

    def torchs(*args: Any) -> None:
        inner(*args)
        events.append("print by torch")

    sys.excepthook = torchs
    world._report_exceptions()
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    assert events == ["print", "print by torch", "end"]


SCRIPT = """
import os, time
import shardmp, torch, torch.distributed as dist
start = time.monotonic()
world = shardmp.init(backend="gloo", timeout=20, arrival_timeout=30)
assert time.monotonic() - start < 30, time.monotonic() - start
value = torch.ones(1)
dist.all_reduce(value)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and world.rank == 1:
    os._exit(1)
if attempt == 0:
    time.sleep(30)
print(f"<attempt {attempt} rank {world.rank} of {world.world_size} local {world.local_rank} sum {value.item()}>", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_starts_and_starts_again_over_its_agents_store(tmp_path):
    """pytorch/pytorch#191989: a store of one's own under torchrun; and the dead attempt's keys are still in it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        str(script),
    ]
    root = str(Path(shardmp.__file__).parents[1])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"<attempt 1 rank {rank} of 2 local {rank} sum 2.0>" in done.stdout


# -- beside a user's own process group


@on_ranks(2)
def test_a_process_group_that_exists_is_used_as_it_is(rank):
    os.environ["SLURM_LOCALID"] = str(rank)
    here = shardmp.init()
    del os.environ["SLURM_LOCALID"]
    assert (here.rank, here.world_size, here.backend, here.local_rank) == (rank, 2, "gloo", rank)


@on_ranks(3)
def test_the_control_group_is_made_once_for_each_group_and_kept_nowhere(rank):
    """Ranks outside take no part, and ranks may have made different numbers of groups before."""
    everybody = world.control_group()
    assert world.control_group(dist.group.WORLD) is everybody
    assert dist.get_backend(everybody) == "gloo"
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    pair = dist.new_group([2, 0], use_local_synchronization=False)
    if rank != 1:
        control = world.control_group(pair)
        assert world.control_group(pair) is control
        assert control is not everybody
        assert dist.get_process_group_ranks(control) == dist.get_process_group_ranks(pair)
        value = torch.full((1,), 1.0 + rank)
        dist.all_reduce(value, group=control)
        assert value.item() == 4
    value = torch.ones(1)
    dist.all_reduce(value, group=everybody)
    assert value.item() == 3
    kept = (dist.ProcessGroup, dist.Store)
    assert not [name for name, value in vars(world).items() if isinstance(value, kept)]


@on_ranks(2, group_timeout=60)
def test_the_control_group_has_a_short_time_limit_of_its_own(rank):
    control = world.control_group()
    assert control._get_backend(torch.device("cpu")).options._timeout == world.CONTROL_TIMEOUT
