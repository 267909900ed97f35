"""Where more than two ranks share a host, rows are summed inside hosts first and cross between hosts once, in FP32.

Here hosts are only told apart; tests/cluster has real ones and counts the bytes on their cards.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import same_on_all_ranks, sharded
from ranks import on_ranks
from test_step import DTYPES, Net, adamw, assert_equal, expect, plan, train
from torch import nn

import shardmp.faults
from shardmp.exchange import route

# Rank by rank: two hosts in blocks, two hosts in turn (as Slurm's cyclic distribution deals them), three hosts.
PLACEMENTS = {"blocks": "aaabbb", "in turn": "ababab", "three": "aaabbbccc"}


@contextlib.contextmanager
def on_hosts(names: str) -> Iterator[list[list[int]]]:
    """Let `shard` believe that rank r runs on host names[r]; gives each host's ranks."""
    before = shardmp.faults.host_id
    shardmp.faults.host_id = lambda: names[dist.get_rank()]
    try:
        yield [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
    finally:
        shardmp.faults.host_id = before


@pytest.mark.parametrize(
    ("names", "hops"),
    [("aaabbb", 2), ("ababab", 2), ("aaaabbbbcccc", 2), ("aabb", 1), ("ab", 1), ("aaaa", 1), ("aaabb", 1)],
)
def test_two_hops_where_hosts_have_more_than_two_ranks_each_and_as_many(names: str, hops: int) -> None:
    routes = [route(names, rank) for rank in range(len(names))]
    for rank, found in enumerate(routes):
        assert (found.num_hosts > 1) == (hops == 2)
        own = found.columns[found.members.index(rank)]
        assert rank in own
        if hops == 2:
            assert own == found.across
            assert {names[member] for member in found.members} == {names[rank]}
            assert [names[peer] for peer in found.across] == list(dict.fromkeys(names))
    # Every row of every source is summed exactly once in the first hop, and every host's sum of it once in the second.
    summed = [
        (source, row) for me in range(len(names)) for source in routes[me].members for row in column(routes[me], me)
    ]
    assert len(summed) == len(set(summed)) == len(names) ** 2
    assert all(me in routes[peer].across for me in range(len(names)) for peer in routes[me].across)


def column(found: Any, rank: int) -> tuple[int, ...]:
    return found.columns[found.members.index(rank)]


@pytest.mark.parametrize(("placement", "precision"), [("blocks", p) for p in DTYPES] + [("in turn", "fp16")])
@on_ranks(6)
def test_masters_equal_the_reference_that_adds_host_by_host(world_size: int, placement: str, precision: str) -> None:
    compare(world_size, PLACEMENTS[placement], precision)


@on_ranks(9)
def test_masters_on_three_hosts_equal_the_reference(world_size: int) -> None:
    compare(world_size, PLACEMENTS["three"], "fp16")


def compare(world_size: int, names: str, precision: str) -> None:
    with on_hosts(names) as hosts:
        for bucket_mb, overlap, backwards in itertools.product((0.001, 8), (True, False), (1, 2)):
            steps = plan(world_size, 3, backwards, overflow_at=1)
            found = train(
                Net, adamw, steps, precision=precision, bucket_mb=bucket_mb, overlap=overlap, max_grad_norm=0.5
            )
            options = {"dtype": DTYPES[precision], "max_grad_norm": 0.5, "fused": True, "hosts": hosts}
            assert_equal(found, expect(Net, adamw, steps, **options))
            assert found[1]._collectives.route.num_hosts == len(hosts)


@on_ranks(6)
def test_local_sums_of_stage_1_take_two_hops_too(world_size: int) -> None:
    with on_hosts("aaabbb") as hosts:
        steps = plan(world_size, 2, 3)
        found = train(Net, adamw, steps, stage=1, no_sync=True)
        assert_equal(found, expect(Net, adamw, steps, no_sync=True, fused=True, hosts=hosts))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize(("value", "kind"), [(torch.inf, "inf"), (torch.nan, "nan")])
@on_ranks(6)
def test_who_brought_an_overflow_is_known_across_hosts(rank: int, bad: int, value: float, kind: str) -> None:
    with on_hosts("aaabbb"):
        model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01, bucket_mb=0.01)
        x = torch.ones(2, 64)
        loss = model(x).mean() * (value if rank == bad else 1.0)
        optimizer.backward(loss)
        report = optimizer.step()
    assert report.skipped
    assert report.overflow is not None
    assert report.overflow.ranks == (bad,)
    assert report.overflow.kind in (kind, "nan", "inf and nan")
    assert report.overflow.loss_not_finite


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@on_ranks(6)
def test_bytes_sent_and_held_are_the_predicted_ones(precision: str) -> None:
    with on_hosts("aaabbb"):
        model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01, precision=precision, bucket_mb=0.02)
        for _ in range(2):
            sent = optimizer.wire_bytes()
            optimizer.backward(model(torch.ones(1, 64)).mean())
            optimizer.backward(model(torch.ones(1, 64)).mean())
            optimizer.step()
            assert optimizer.wire_bytes() - sent == optimizer.predicted_wire_bytes(backwards=2)
        assert 0 < optimizer.memory()["buckets"] <= optimizer.predicted_memory()["buckets"]


@on_ranks(6)
def test_one_rank_may_evaluate_alone_right_after_a_step(rank: int) -> None:
    """What crosses hosts is handed on by a thread, not by the other ranks' next forward."""
    with on_hosts("aaabbb"):
        model, optimizer = sharded(layers(), torch.optim.SGD, 0.1, bucket_mb=0.01)
        optimizer.backward(model(torch.ones(2, 64)).mean())
        optimizer.step()
        if rank == 0:
            with torch.no_grad():
                alone = model(torch.ones(1, 64))
            assert alone.isfinite().all()
        else:
            time.sleep(0.5)
        dist.barrier()
        assert same_on_all_ranks(model(torch.ones(1, 64)).detach())
