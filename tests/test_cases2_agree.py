"""What all ranks must agree on is compared in every step: D04, D08, and others of their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Calls, Weights, equal, masters, same_on_all_ranks, sharded
from ranks import on_ranks, run_ranks
from torch import Tensor, nn

import shardmp

Change = Callable[[shardmp.ShardedOptimizer], Any]


class Wide(nn.Module):
    """The parameter of D08, whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 1024))

    def forward(self) -> Tensor:
        return self.w.float().sum()


def everything(optimizer: shardmp.ShardedOptimizer) -> list[Any]:
    """Masters, moments and the loss scale's state, of this rank. Collective."""
    states = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in {**own, **rest}.items()}
        for _, own, rest in optimizer._update.piece_states()
    ]
    return [masters(optimizer), states, optimizer._losses.scaler.state(), optimizer.skipped_steps]


def differ(model: nn.Module, optimizer: shardmp.ShardedOptimizer, rank: int, change: Change, repair: Change) -> str:
    """A good step, one with `change` on the last rank, the error of the next, and, after `repair`, a good one again."""
    last = torch.distributed.get_world_size() - 1
    optimizer.backward(model())
    assert not optimizer.step().skipped
    before = everything(optimizer)
    if rank == last:
        change(optimizer)
    optimizer.backward(model())
    report = optimizer.step()
    assert report.withheld
    assert equal(before, everything(optimizer))
    optimizer.backward(model())
    with pytest.raises(ValueError, match="step 2 has written nothing: ranks have different options") as error:
        optimizer.step()
    assert equal(before, everything(optimizer))
    if rank == last:
        repair(optimizer)
    report = optimizer.step()  # the gradients have waited
    assert not report.skipped
    assert report.step == optimizer.steps == 2  # the one that was withheld was none
    assert not equal(before[0], masters(optimizer))
    assert same_on_all_ranks(masters(optimizer))
    return str(error.value)


def option(key: str, value: Any, number: int = 0) -> Change:
    def write(optimizer: shardmp.ShardedOptimizer) -> None:
        optimizer.param_groups[number][key] = value

    return write


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2, 3)
def test_d08_a_learning_rate_of_one_rank_disruptcnn_3(rank: int, world_size: int, stage: int) -> None:
    """Half the parameter moved by 1.0 and half by 0.5, in silence."""
    policy = shardmp.Precision(init_scale=16.0)
    model, optimizer = sharded(Wide(), lr=1.0, precision=policy, stage=stage)
    said = differ(model, optimizer, rank, option("lr", 0.5), option("lr", 1.0))
    good = ", ".join(map(str, range(world_size - 1)))
    assert f"group 0, option 'lr': 1.0 on rank {good}; 0.5 on rank {world_size - 1}" in said
    assert "ReduceLROnPlateau fed with its own loss: feed it report.loss" in said
    assert torch.equal(optimizer.master("w"), torch.full((4, 1024), -2.0))


CASES: dict[str, tuple[Any, dict[str, Any], Change, Change, str]] = {
    "betas": (
        torch.optim.AdamW,
        {},
        option("betas", (0.5, 0.999)),
        option("betas", (0.9, 0.999)),
        "group 0, option 'betas': [0.9, 0.999] on rank 0; [0.5, 0.999] on rank 1",
    ),
    "weight_decay": (
        torch.optim.RMSprop,
        {},
        option("weight_decay", 0.5),
        option("weight_decay", 0.0),
        "option 'weight_decay': 0 on rank 0; 0.5 on rank 1",
    ),
    "momentum": (
        torch.optim.SGD,
        {"momentum": 0.5},
        option("momentum", 0.25),
        option("momentum", 0.5),
        "option 'momentum': 0.5 on rank 0; 0.25 on rank 1",
    ),
    "a tensor": (
        torch.optim.AdamW,
        {"lr": torch.tensor(0.5), "fused": True},
        lambda optimizer: optimizer.param_groups[0]["lr"].mul_(1 + 2**-23),
        lambda optimizer: optimizer.param_groups[0]["lr"].fill_(0.5),
        "option 'lr': tensor(0.5, torch.float32) on rank 0; tensor(0.5000000596046448, torch.float32) on rank 1",
    ),
    "an option of the user's": (
        torch.optim.SGD,
        {},
        option("warmup", [10, "linear"]),
        lambda optimizer: optimizer.param_groups[0].pop("warmup"),
        "option 'warmup': nothing on rank 0; [10, 'linear'] on rank 1",
    ),
    "max_grad_norm": (
        torch.optim.SGD,
        {"max_grad_norm": 1.0},
        lambda optimizer: setattr(optimizer, "max_grad_norm", 2.0),
        lambda optimizer: setattr(optimizer, "max_grad_norm", 1.0),
        "the norm to clip at (max_grad_norm, clip_grad_norm_): 1.0 on rank 0; 2.0 on rank 1",
    ),
    "clip_grad_norm_": (
        torch.optim.SGD,
        {},
        lambda optimizer: optimizer.clip_grad_norm_(1.0),
        lambda optimizer: None,
        "the norm to clip at (max_grad_norm, clip_grad_norm_): None on rank 0; 1.0 on rank 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_any_option_of_one_rank_withholds_the_step_and_is_named(rank: int, case: str) -> None:
    make, options, change, repair, words = CASES[case]
    policy = shardmp.Precision(init_scale=16.0)
    model, optimizer = sharded(Wide(), make, **{"lr": 0.5, "precision": policy, **options})
    assert words in differ(model, optimizer, rank, change, repair)


@on_ranks(2)
def test_reading_the_report_of_a_withheld_step_names_the_rank_and_its_own_options(rank: int) -> None:
    model, optimizer = sharded(Wide(), lr=1.0)
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    optimizer.backward(model())
    report = optimizer.step()
    for read in (lambda: report.skipped, lambda: report.loss, lambda: report.grad_norm, optimizer.synchronize):
        with pytest.raises(ValueError, match="ranks 1 have other options than rank 0") as error:
            read()
        assert f"This is rank {rank}, which has" in str(error.value)
        assert f"option 'lr': {1.0 if rank == 0 else 0.5}" in str(error.value)
    assert "withheld" in repr(report)


def rank_0_alone_reads() -> str:
    rank = torch.distributed.get_rank()
    model, optimizer = sharded(Wide(), lr=1.0)
    optimizer.param_groups[0]["lr"] = (1.0, 0.5)[rank]
    optimizer.backward(model())
    report = optimizer.step()
    try:
        if rank == 0:
            print(report.loss)
        else:
            optimizer.backward(model())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def test_where_one_rank_alone_reads_the_report_and_stops_the_others_error_says_why_too() -> None:
    for rank, said in enumerate(run_ranks(rank_0_alone_reads, 2, group_timeout=2, fresh=True)):
        assert "step 1 has written nothing: ranks 1 have other options than rank 0" in said
        assert f"This is rank {rank}, which has" in said


@on_ranks(2)
def test_loading_a_checkpoint_on_all_ranks_repairs_weights_that_one_rank_has_loaded(rank: int, tmp_path: Any) -> None:
    model, optimizer = sharded(Weights(), lr=0.5, precision="bf16")
    shardmp.save(tmp_path, model, optimizer)
    for alone in (False, True):
        if rank == 1:
            model.load_state_dict({"w": torch.full((4,), 3.0)})
        shardmp.load(tmp_path, model, None if alone else optimizer)
        for step in range(2):
            optimizer.backward(model(torch.ones(4)))
            optimizer.step()
            assert optimizer.master("w").tolist() == [0.5 - 0.5 * step] * 4


@on_ranks(2)
def test_a_load_with_its_optimizer_on_one_rank_only_is_an_error(rank: int, tmp_path: Any) -> None:
    model, optimizer = sharded(Weights(), lr=0.5, precision="bf16")
    shardmp.save(tmp_path, model, optimizer)
    with pytest.raises(ValueError, match=r"load.*optimizer: None on rank 0; given on rank 1"):
        shardmp.load(tmp_path, model, optimizer if rank else None)
    optimizer.backward(model(torch.ones(4)))
    assert not optimizer.step().withheld  # nothing was loaded, and training goes on


@on_ranks(2)
def test_save_says_it_too(rank: int, tmp_path: Any) -> None:
    model, optimizer = sharded(Wide(), lr=1.0)
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    optimizer.backward(model())
    optimizer.step()
    with pytest.raises(ValueError, match=r"option 'lr': 1\.0 on rank 0; 0\.5 on rank 1"):
        shardmp.save(tmp_path, model, optimizer)


def shard_with(options: list[dict[str, Any]]) -> str:
    model = Wide()
    rank = torch.distributed.get_rank()
    try:
        shardmp.shard(model, torch.optim.AdamW(model.parameters(), **options[rank]))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"lr": 0.25}, "rank 0 has \"group 0, option 'lr': 0.5\", rank 1 has \"group 0, option 'lr': 0.25\""),
        ({"lr": 0.5, "betas": (0.5, 0.9)}, "option 'betas': (0.5, 0.9)"),
        ({"lr": torch.tensor(0.5)}, "option 'lr': tensor(0.5, torch.float32)"),
        ({"lr": 0.5, "amsgrad": True}, "option 'amsgrad': True"),
    ],
)
def test_options_that_differ_at_shard_are_named(other: dict[str, Any], words: str) -> None:
    for said in run_ranks(shard_with, 2, [{"lr": 0.5}, other]):
        assert words in said


@on_ranks(2)
def test_numbers_that_are_equal_agree_whatever_their_type(rank: int) -> None:
    model, optimizer = sharded(Wide(), lr=(1, 1.0)[rank], weight_decay=(0.0, 0)[rank])
    optimizer.param_groups[0]["weight_decay"] = (-0.0, 0)[rank]
    optimizer.backward(model())
    assert not optimizer.step().withheld


@on_ranks(2)
def test_comparing_makes_nobody_wait_and_sends_no_further_message() -> None:
    model, optimizer = sharded(Wide(), torch.optim.AdamW, torch.tensor(0.5), fused=True)
    for step in range(3):
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        loss, sent = model(), optimizer.wire_bytes()
        with Calls() as calls:
            optimizer.backward(loss)
            optimizer.step()
        # Torch's own fused kernel reads an lr that is a tensor on the CPU.
        assert len(calls.waits) <= 1, calls.waits
        assert optimizer.wire_bytes() - sent == optimizer.predicted_wire_bytes()


@on_ranks(2)
def test_weights_that_one_rank_loads_are_an_error_until_all_have_loaded_them(rank: int) -> None:
    model, optimizer = sharded(Weights(), lr=0.5, precision="fp32")
    values = {"w": torch.full((4,), 3.0)}
    for round in range(2):  # the second: the error was caught, and nothing repaired
        if rank == 1 and round == 0:
            model.load_state_dict(values)
        optimizer.backward(model(torch.ones(4)))
        optimizer.step()
        optimizer.backward(model(torch.ones(4)))
        with pytest.raises(ValueError, match=r"weights loaded .*: nothing on rank 0; model\.load_state_dict, CRC-32"):
            optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(values)
    for _ in range(2):
        optimizer.backward(model(torch.ones(4)))
        optimizer.step()
    assert optimizer.master("w").tolist() == [2.0] * 4


@on_ranks(2)
def test_other_weights_on_one_rank_are_an_error(rank: int) -> None:
    model, optimizer = sharded(Weights(), lr=0.5)
    model.load_state_dict({"w": torch.full((4,), 3.0 + rank)})
    optimizer.backward(model(torch.ones(4)))
    assert optimizer.step().withheld
    optimizer.backward(model(torch.ones(4)))
    with pytest.raises(
        ValueError, match=r"weights loaded .*: model\.load_state_dict, CRC-32 .* on rank 0; .* on rank 1"
    ):
        optimizer.step()


class Masked(nn.Module):
    """A causal mask that a forward makes as large as its input, as in CoCa."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool).tril())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, size: int) -> Tensor:
        if len(self.mask) < size:
            self.mask = torch.ones(size, size, dtype=torch.bool).tril()
        return self.w.float().sum()


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2, 3)
def test_d04_a_buffer_that_one_rank_makes_larger_coca_17(rank: int, world_size: int, stage: int) -> None:
    """Rank 0's bytes lay over rank 1's mask: 43 visible pairs in place of 36."""
    for sizes in ((4, 8), (8, 4)):
        model, optimizer = sharded(Masked(), lr=1.0, stage=stage, precision=shardmp.Precision(init_scale=16.0))
        size = sizes[rank == world_size - 1]
        optimizer.backward(model(size))
        assert int(model.mask.sum()) == size * (size + 1) // 2
        assert optimizer.step().withheld
        optimizer.backward(model(size))
        with pytest.raises(ValueError, match=rf"size of buffer mask: \({sizes[0]}, .*\({sizes[1]}, "):
            optimizer.step()
        assert int(model.mask.sum()) == size * (size + 1) // 2
        assert optimizer.master("w").tolist() == [1.0] * 4
        optimizer.zero_grad()
        for _ in range(2):
            optimizer.backward(model(8))  # now every rank has one of 8 x 8
            optimizer.step()
        assert optimizer.master("w").tolist() == [-1.0] * 4


@on_ranks(2)
def test_buffers_that_grow_on_all_ranks_alike_are_broadcast_again_when_a_step_has_seen_it(rank: int) -> None:
    model, optimizer = sharded(Masked(), lr=1.0, precision=shardmp.Precision(init_scale=16.0))
    for step in range(4):
        loss = model(4)
        with torch.no_grad():
            model.module.count.fill_(10 * step + rank)
            model.module.mask[0, 3] = bool(rank)
        optimizer.backward(loss)
        assert not optimizer.step().skipped
        assert int(model.module.count) == 10 * step  # of a size that has not changed: at once
        assert bool(model.module.mask[0, 3]) == (rank == 1 and step < 2)
