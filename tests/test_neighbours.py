"""Rows of ranks on the same host are read from their memory: the same bits as through sockets, on any mixture of hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import masters, sharded, through_sockets
from ranks import on_ranks
from test_step import Net, adamw, assert_equal, expect, plan, train
from test_two_hops import on_hosts
from torch import nn

from shardmp.collectives import Collectives
from shardmp.faults import Member
from shardmp.neighbours import SWITCH, Neighbours, Remote

CAN_READ = sys.platform == "linux"
pytestmark = pytest.mark.skipif(not CAN_READ, reason="process_vm_readv is Linux's")


def neighbours_of(optimizer: Any) -> Neighbours:
    return optimizer._collectives.neighbours


@pytest.mark.parametrize("names", ["aa", "aab", "abab", "aaabbb"])
@on_ranks(2, 3, 4, 6)
def test_ranks_of_one_host_read_each_other_and_no_others(rank: int, world_size: int, names: str) -> None:
    if len(names) != world_size:
        return
    with on_hosts(names):
        _, optimizer = sharded(nn.Linear(4, 4))
    expected = [peer for peer in range(world_size) if peer != rank and names[peer] == names[rank]]
    assert neighbours_of(optimizer).ranks == expected
    assert optimizer._collectives.far_members == (
        world_size - 1 - len(expected) if names != "aaabbb" else 0  # two hops: the first is inside the host
    )


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False}, {"stage": 1, "no_sync": True}])
@on_ranks(2, 3)
def test_masters_equal_the_reference_through_sockets_and_through_a_mixture(
    world_size: int, precision: str, options: dict[str, Any]
) -> None:
    """Everywhere else in these tests all ranks are neighbours."""
    steps = plan(world_size, 3, 2, overflow_at=1)
    dtype = {"fp16": torch.float16, "fp32": torch.float32}[precision]
    no_sync = bool(options.get("no_sync"))
    expected = expect(Net, adamw, steps, dtype=dtype, fused=True, no_sync=no_sync)
    for bucket_mb in (0.001, 8):
        with through_sockets():
            found = train(Net, adamw, steps, precision=precision, bucket_mb=bucket_mb, **options)
        assert not neighbours_of(found[1])
        assert_equal(found, expected)
        with on_hosts("aab"[-world_size:]):
            found = train(Net, adamw, steps, precision=precision, bucket_mb=bucket_mb, **options)
        assert_equal(found, expected)


@on_ranks(2, 3)
def test_a_rank_that_forbids_it_sends_through_sockets_and_the_others_go_on(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0" if rank == 1 else "1")
        torch.manual_seed(0)
        model, optimizer = sharded(nn.Linear(64, 64), torch.optim.AdamW, 0.01)
    assert neighbours_of(optimizer).ranks == ([2 - rank] if world_size == 3 and rank != 1 else [])
    with through_sockets():
        torch.manual_seed(0)
        twin, twin_optimizer = sharded(nn.Linear(64, 64), torch.optim.AdamW, 0.01)
    for step in range(3):
        x = torch.ones(2, 64) * (rank + step + 1)
        for one, its in ((model, optimizer), (twin, twin_optimizer)):
            its.backward(one(x).square().mean())
            its.step()
    ours, theirs = masters(optimizer), masters(twin_optimizer)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@on_ranks(2)
def test_rows_of_neighbours_need_no_place_to_land(rank: int) -> None:
    """2 ranks and a bucket of 1 MiB: only send buffers, where sockets need half as much again."""

    def held() -> int:
        model, optimizer = sharded(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), bucket_mb=0.25)
        optimizer.backward(model(torch.ones(1, 256)).mean())
        optimizer.step()
        assert optimizer.memory()["buckets"] <= optimizer.predicted_memory()["buckets"]
        return sum(pool.bytes for pool in optimizer._gradients._landings.values())

    assert held() == 0
    with through_sockets():
        assert held() > 0


@on_ranks(2)
def test_a_step_returns_when_neighbours_have_taken_their_rows(rank: int) -> None:
    """So a rank may write its parameters right after its step (an average of weights for an evaluation does), and no
    forward waits for anything."""
    model, optimizer = sharded(nn.Linear(512, 512, bias=False), torch.optim.SGD, 0.5)
    optimizer.backward(model(torch.ones(1, 512)).mean())
    optimizer.step()
    assert not optimizer._parameters.gathering
    weight = next(model.module.parameters())
    expected = optimizer.master("weight").half()
    if rank == 0:
        weight.data.fill_(7.0)  # through .data: no version counts it
    else:
        dist.barrier()
        assert torch.equal(weight, expected)
    if rank == 0:
        dist.barrier()


def test_a_neighbour_that_is_gone_is_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    member = Member(3, "host", "id", process.pid, "namespace", "")
    neighbours = Neighbours()
    neighbours.agree(0, [member, member], [[1], [0]])
    remote = Remote(neighbours, 1, torch.zeros(1, dtype=torch.int64).numpy(), 0, 8, torch.float16)
    with pytest.raises(RuntimeError, match=f"memory of rank 1 .pid {process.pid}.*No such process"):
        remote.read()


def test_a_slice_of_remote_elements_is_read_from_its_own_address() -> None:
    values = torch.arange(10, dtype=torch.float16)
    member = Member(0, "host", "id", os.getpid(), "namespace", "")
    neighbours = Neighbours()
    neighbours.agree(0, [member, member], [[1], [0]])
    remote = Remote(neighbours, 1, torch.tensor([0, values.data_ptr()]).numpy(), 1, 10, torch.float16)
    assert torch.equal(remote[3:8][1:4].read(), values[4:7])
    into = torch.zeros(2, dtype=torch.float16)
    assert remote[8:10].read(into) is into
    assert torch.equal(into, values[8:])


def test_a_process_is_not_its_own_neighbour() -> None:
    """With torch's fake process group every rank looks like this very process."""
    own = Member(0, "host", "id", os.getpid(), "namespace", "")
    neighbours = Neighbours()
    assert neighbours.try_reading(0, [own, own], [neighbours.probe] * 2) == []


@on_ranks(2)
def test_bytes_count_as_sent_whichever_way_they_take(rank: int) -> None:
    def sent() -> int:
        model, optimizer = sharded(nn.Linear(256, 256), torch.optim.AdamW, 0.01)
        before = optimizer.wire_bytes()
        optimizer.backward(model(torch.ones(1, 256)).mean())
        optimizer.step()
        assert optimizer.wire_bytes() - before == optimizer.predicted_wire_bytes()
        return optimizer.wire_bytes() - before

    near = sent()
    with through_sockets():
        assert sent() == near


@on_ranks(2)
def test_an_overflow_names_the_rank_whose_rows_were_read(rank: int) -> None:
    model, optimizer = sharded(nn.Linear(64, 64), torch.optim.SGD, 0.1)
    assert isinstance(optimizer._collectives, Collectives)
    optimizer.backward(model(torch.ones(2, 64)).mean() * (float("inf") if rank == 1 else 1.0))
    report = optimizer.step()
    assert report.skipped
    assert report.overflow is not None
    assert report.overflow.ranks == (1,)
