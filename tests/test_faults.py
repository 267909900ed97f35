"""C50: a rank that raises, is absent, stopped or killed: every other rank says which it was, where, and in time.

On one host; tests/cluster has several hosts and cut links. Sources: NVIDIA/nccl#395, NVIDIA/nccl#1260, NVIDIA/nccl#1324,
hpcaitech/ColossalAI#5003, deepspeedai/DeepSpeed#7991, deepspeedai/DeepSpeed#801, deepspeedai/DeepSpeed#2993.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import sharded
from ranks import run_ranks
from torch import nn

from shardmp import faults
from shardmp.faults import GRACE, LINGER, Member, Roll

TIMEOUT = 3.0


def train(steps: int) -> tuple[Any, Any]:
    model, optimizer = sharded(nn.Linear(16, 16), torch.optim.SGD, 0.1)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: Any, optimizer: Any) -> None:
    optimizer.backward(model(torch.ones(2, 16)).mean())
    optimizer.step()
    optimizer.zero_grad()


def failure(act: Any) -> tuple[str, float]:
    """The error's text, and after how many seconds it came."""
    started = time.monotonic()
    try:
        act()
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "nothing", time.monotonic() - started


def rank_1_stops(pids: list[int]) -> tuple[str, float, str]:
    model, optimizer = train(2)
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 wakes it
    text, took = failure(lambda: one_step(model, optimizer))
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGCONT)
    return text, took, failure(optimizer.step)[0]


def test_a_stopped_rank_is_named_with_its_place_and_the_others_refuse_to_go_on() -> None:
    results = run_ranks(rank_1_stops, 3, [0, 0, 0], group_timeout=TIMEOUT, fresh=True)
    for rank in (0, 2):
        text, took, afterwards = results[rank]
        assert text.startswith(f"rank {rank} (host {socket.gethostname()}, pid ")
        assert ") at step 3, backward 1: reduce-scatter failed: rank 1 (host " in text
        assert "is stopped (SIGSTOP), last at step 2, after backward 1" in text
        assert took < TIMEOUT + 5
        assert "a collective failed before" in afterwards


def rank_1_does_not_step() -> tuple[str, float]:
    model, optimizer = train(1)
    optimizer.backward(model(torch.ones(2, 16)).mean())
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT + GRACE + LINGER)  # it caught an error of its own and is busy with something else
        return "", 0.0
    return failure(lambda: (optimizer.step(), one_step(model, optimizer)))


def test_c50b_a_rank_that_does_not_call_step_is_named_by_the_others() -> None:
    (text, took), _ = run_ranks(rank_1_does_not_step, 2, group_timeout=TIMEOUT, fresh=True)
    assert "verdict failed: rank 1 (host " in text
    assert "is alive, but takes no part, last at step 2, backward 1" in text
    assert took < 4 + 5


WORKER = """
    import os, signal, sys, time
    import torch, shardmp
    torch.set_num_threads(1)
    world = shardmp.init(timeout=4)
    model = torch.nn.Linear(16, 16)
    model, optimizer = shardmp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    started = time.monotonic()
    try:
        for step in range(1, 5):
            if world.rank == 1 and step == 3:
                if sys.argv[1] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("the loader of rank 1")
            optimizer.backward(model(torch.ones(2, 16)).mean())
            optimizer.step()
            started = time.monotonic()
    except RuntimeError as error:
        print(f"{time.monotonic() - started:.2f} {error}", flush=True)
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "is gone: it was killed, or ended without a word"),
        ("raise", "raised ZeroDivisionError: the loader of rank 1"),
    ],
)
def test_c50a_a_killed_rank_and_one_that_raised_are_named_within_seconds(how: str, said: str, free_port: int) -> None:
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    command = [sys.executable, "-c", textwrap.dedent(WORKER), how]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=-1, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    try:
        (out, error), (_, its_error) = (process.communicate(timeout=90) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert ranks[0].returncode == 3, error
    assert ranks[1].returncode == (-signal.SIGKILL if how == "kill" else 1)
    seconds, _, text = out.partition(" ")
    assert float(seconds) < 4 + 5
    assert text.startswith(f"rank 0 (host {socket.gethostname()}, pid ")
    assert f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}) {said}, last at step 2, after backward 1" in text
    assert how == "kill" or "ZeroDivisionError: the loader of rank 1" in its_error


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_store_that_is_gone_is_said_so_and_delays_nothing() -> None:
    """No process group, so no store: as where rank 0's host has died."""
    members = [Member(0, "a", "a", 1, "", "1"), Member(1, "b", "b", 2, "", "2")]
    started = time.monotonic()
    text = Roll(1, members, "shardmp/1").explain("verdict", "Connection closed by peer. Long advice.")
    assert time.monotonic() - started < 1
    assert text == (
        "rank 1 (host b, pid 2) at shard(): verdict failed: the store is gone: host a of rank 0 is dead, stopped or cut off "
        "from host b [Connection closed by peer]"
    )


def test_rank_0_names_the_culprit_though_it_waits_in_vain_for_others_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store in it answers: the whole grace for silent ranks, and the stay for one that never reads, change nothing."""
    store = dist.HashStore()
    monkeypatch.setattr(faults, "_store", lambda: store)
    members = [Member(0, "a", "a", 1, "", "1"), Member(1, "a", "a", 2, "", "2"), Member(2, "b", "b", 3, "", "3")]
    store.set("shardmp/1/failed/1", "{}")
    started = time.monotonic()
    text = Roll(0, members, "shardmp/1").explain("verdict", "Connection closed by peer. Long advice.")
    assert time.monotonic() - started < GRACE + LINGER + 0.5
    assert "verdict failed: rank 2 (host b, pid 3) does not answer: its process or host is dead" in text
