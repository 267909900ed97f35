"""What wraps a sharded model or takes it apart after `shard` is refused by name, with what to write; never a silent no-op."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import masters, sharded
from ranks import on_ranks
from test_hazards import POLICY, STAGES, Small, Smooth, step_once
from torch import nn

# --------------------------------------------------------------------------------------------------------------------
# Wrappers around and inside


@on_ranks(2)
def test_other_data_parallel_wrappers_around_it_are_refused_with_what_to_write() -> None:
    """DistributedDataParallel reduced a second time in silence; DataParallel copies parameters out of their buckets."""
    model, _ = sharded(Small(), precision=POLICY)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel around a sharded model.*call the model itself"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="DataParallel around a sharded model.*torchrun"):
        model._replicate_for_data_parallel()  # what DataParallel calls on GPUs; on a CPU it only calls the model


@on_ranks(2)
def test_fully_shard_around_it_is_refused_by_name() -> None:
    """FSDP2 replaces the parameters: nothing trained, and the norm was 0."""
    from torch.distributed.fsdp import fully_shard

    model, optimizer = sharded(Smooth(), precision=POLICY)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"first.weight was taken out of its bucket.*wrapped"):
        step_once(model, optimizer)


@on_ranks(1, 2)
def test_wrappers_inside_are_refused_by_name(world_size: int) -> None:
    """A part that reduces on its own would see gradients of one rank, and FP16 sums."""
    inside = nn.Sequential(nn.Linear(20, 20), nn.DataParallel(nn.Linear(20, 20)))
    with pytest.raises(TypeError, match=r"1 \(DataParallel\) shards or replicates already"):
        sharded(inside, precision=POLICY)
    if dist.is_initialized():
        inside = nn.Sequential(nn.Linear(20, 20), nn.parallel.DistributedDataParallel(nn.Linear(20, 20)))
        with pytest.raises(TypeError, match=r"1 \(DistributedDataParallel\) shards or replicates already"):
            sharded(inside, precision=POLICY)


@on_ranks(1, 2)
def test_synchronised_batch_norm_is_refused_on_the_cpu_by_name() -> None:
    """torch has no CPU kernel for it, and says so only in the first forward, without the layer's name."""
    with pytest.raises(TypeError, match=r"1 \(SyncBatchNorm\) has no CPU kernel.*BatchNorm"):
        sharded(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), precision=POLICY)


# --------------------------------------------------------------------------------------------------------------------
# What takes a model apart after `shard`


def refused_at_the_next_step(act: Callable[[Any], Any], words: str) -> None:
    plain = Small()
    model, optimizer = sharded(plain, precision=POLICY)
    before = masters(optimizer)
    act(plain)
    with pytest.raises(RuntimeError, match=words):
        step_once(model, optimizer)
    after = masters(optimizer)
    # The norm layer's parameters are FP32, and their masters are the parameters themselves.
    assert all(torch.equal(before[name], after[name]) for name in before if "norm" not in name)


def replace(model: Any) -> None:
    model.second.weight = nn.Parameter(torch.zeros(20, 40, dtype=torch.float16))


def replace_data(model: Any) -> None:
    model.second.weight.data = torch.zeros(20, 40, dtype=torch.float16)


@pytest.mark.parametrize(
    "act", [lambda model: model.float(), lambda model: model.bfloat16().float(), replace, replace_data]
)
def test_casting_the_inner_model_or_replacing_a_parameter_is_refused_by_name(act: Any) -> None:
    """The masters would move, and the weights that forward reads never would: in silence."""
    refused_at_the_next_step(act, r"parameter \w+.\w+ was taken out of its bucket.*before shard\(\)")


def test_a_model_that_is_frozen_as_a_whole_after_shard_is_told_at_its_loss() -> None:
    """A loss without a graph; in plain torch it is an error of autograd."""
    model, optimizer = sharded(Small(), precision=POLICY)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="loss: it depends on no parameter"):
        step_once(model, optimizer)
    model.requires_grad_(True)
    assert not step_once(model, optimizer).skipped


def test_casting_to_what_it_is_changes_nothing() -> None:
    """`.cpu()` and `.half()` on parts that are there and FP16 already leave parameters where they are."""
    plain = Small()
    model, optimizer = sharded(plain, precision=POLICY)
    plain.cpu()
    plain.first.half()
    step_once(model, optimizer)
    optimizer.synchronize()
    assert torch.equal(plain.first.weight, optimizer.master("first.weight").half())


@torch.no_grad()
def clamp(model: Any) -> None:
    for p in model.parameters():
        p.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    "act",
    [clamp, lambda model: model.second.reset_parameters(), lambda model: model.load_state_dict(Small().state_dict())],
)
def test_writes_into_parameters_are_refused_by_name_with_what_to_write(act: Any) -> None:
    """deepspeedai/DeepSpeed#762: the masters have not seen them, and the next step would undo them in silence."""
    refused_at_the_next_step(act, r"parameter \w+.\w+ was written in place.*model.load_state_dict")


@STAGES
@on_ranks(2)
def test_weights_are_clamped_by_loading_them(rank: int, stage: int) -> None:
    """The weight clipping of arXiv 1701.07875: masters that change take the new value, the others keep theirs."""
    model, optimizer = sharded(Small(), torch.optim.AdamW, 0.01, precision=POLICY, stage=stage)
    limit = 2.0**-4
    for step in range(3):
        step_once(model, optimizer, step)
        before = masters(optimizer)
        model.load_state_dict({name: p.clamp(-limit, limit) for name, p in model.state_dict().items()})
        for name, master in masters(optimizer).items():
            assert torch.equal(master, before[name].clamp(-limit, limit))
            assert torch.equal(dict(model.named_parameters())[name].float(), master.half().float()) or "norm" in name
    assert any((m.abs() == limit).any() for m in masters(optimizer).values())


@pytest.mark.parametrize("which", ["model", "inner model", "optimizer"])
def test_copies_and_pickles_are_refused_with_what_to_write(which: str) -> None:
    """A copy drops hooks and views: it would train nothing, or part the ranks."""
    plain = Small()
    model, optimizer = sharded(plain, precision=POLICY)
    victim = {"model": model, "inner model": plain, "optimizer": optimizer}[which]
    with pytest.raises(RuntimeError, match=r"deepcopy.*before shard\(\)"):
        copy.deepcopy(victim)
    with pytest.raises(RuntimeError, match=r"cannot be pickled.*shardmp.save"):
        pickle.dumps(victim)
