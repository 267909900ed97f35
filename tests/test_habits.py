"""Habits from other tools: each is right, or an error that says what to write. Every recipe of docs/recipes.md runs."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from helpers import masters, same_on_all_ranks, sharded
from ranks import on_ranks
from test_step import assert_equal, expect, train
from torch import Tensor, nn
from torch.nn import functional as F

import shardmp

STAGES = pytest.mark.parametrize("stage", [1, 2])
POLICY = shardmp.Precision(init_scale=256.0)
RECIPES = Path(__file__).parents[1] / "docs" / "recipes.md"


def small() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))


def batch(step: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 8, generator=draw), torch.randint(0, 5, (rows,), generator=draw)


def loss_on(x: Tensor, y: Tensor, factor: float = 1.0, reduction: str = "mean") -> reference.Loss:
    return lambda model: F.cross_entropy(model(x), y, reduction=reduction) * factor


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def right(steps: list[reference.Step], make: Callable[[], nn.Module] = small, **options: Any) -> reference.Run:
    scale = reference.LossScale(init_scale=options.pop("init_scale", 256.0))
    expected = expect(make, adamw, steps, loss_scale=scale, fused=True, **options)
    assert expected.skipped_steps == 0
    return expected


def assert_masters(optimizer: shardmp.ShardedOptimizer, expected: reference.Run) -> None:
    found = masters(optimizer)
    assert found.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        assert torch.equal(found[name], master), name


# --------------------------------------------------------------------------------------------------------------------
# Losses and averages


@STAGES
@on_ranks(2)
def test_a_loss_divided_by_the_accumulation_is_the_mean_over_micro_batches(world_size: int, stage: int) -> None:
    """huggingface/accelerate#3481: with "ranks" the user divides, with "micro_batches" the library does."""

    def steps(factor: float) -> list[reference.Step]:
        return [
            [[loss_on(*batch(10 * s + b, r), factor) for r in range(world_size)] for b in range(2)] for s in range(3)
        ]

    divided = train(small, adamw, steps(0.5), precision=shardmp.Precision(init_scale=512.0), stage=stage)
    assert_equal(divided, right(steps(0.5), init_scale=512.0))
    counted = train(small, adamw, steps(1.0), precision=POLICY, stage=stage, average="micro_batches")
    assert_equal(counted, right(steps(1.0), average="micro_batches"))
    assert_masters(
        divided[1], right(steps(1.0), average="micro_batches")
    )  # twice the scale makes the same FP16 numbers


@STAGES
@on_ranks(2)
def test_a_shorter_window_at_the_end_of_an_epoch_is_averaged_over_what_it_has(world_size: int, stage: int) -> None:
    """Three micro-batches in windows of two: a fixed divisor would halve the last update."""
    one = [[loss_on(*batch(number, rank)) for rank in range(world_size)] for number in range(3)]
    steps = [one[:2], one[2:]]
    found = train(small, adamw, steps, precision=POLICY, stage=stage, average="micro_batches", max_grad_norm=0.1)
    assert_equal(found, right(steps, average="micro_batches", max_grad_norm=0.1))


@STAGES
@on_ranks(2)
def test_token_weighted_losses_weigh_every_token_alike(rank: int, world_size: int, stage: int) -> None:
    """A mean of the ranks' means would weigh the four tokens of rank 0 as much as the twelve of rank 1.

    The reference divides by ranks alone: it gets an eighth of the loss at eight times the scale, which is exact.
    """
    rows = [4, 12]
    data = [[batch(step, r, rows[r]) for r in range(world_size)] for step in range(3)]
    expected = right(
        [[[loss_on(*data[step][r], 1 / 8, "sum") for r in range(world_size)]] for step in range(3)], init_scale=2048.0
    )
    plain = small()
    model, optimizer = shardmp.shard(plain, adamw(plain), precision=POLICY, stage=stage)
    for step in range(3):
        x, y = data[step][rank]
        optimizer.backward(F.cross_entropy(model(x), y, reduction="sum"))
        tokens = torch.tensor(float(len(y)), dtype=torch.float64)
        dist.all_reduce(tokens)
        optimizer.step(divide_by=tokens)
    assert_masters(optimizer, expected)


@pytest.mark.parametrize("average", ["ranks", "micro_batches"])
@pytest.mark.parametrize("counts", [(3, 2), (1, 3), (0, 2)])
@on_ranks(2)
def test_join_lets_ranks_with_unequal_numbers_of_batches_end_together(
    rank: int, world_size: int, average: str, counts: tuple[int, int]
) -> None:
    """pytorch/pytorch#38174: a rank whose data ends first left the others waiting in their reduction."""

    def maybe(step: int, r: int) -> reference.Loss | None:
        return loss_on(*batch(step, r)) if step < counts[r] else None

    steps = [[[maybe(step, r) for r in range(world_size)]] for step in range(max(counts))]
    plain = small()
    model, optimizer = shardmp.shard(plain, adamw(plain), precision=POLICY, average=average)
    rounds = 0
    for given in optimizer.join([batch(step, rank) for step in range(counts[rank])]):
        optimizer.backward(None if given is None else F.cross_entropy(model(given[0]), given[1]))
        optimizer.step()
        rounds += 1
    assert rounds == max(counts)
    assert_masters(optimizer, right(steps, average=average))


# --------------------------------------------------------------------------------------------------------------------
# GradScaler, clipping, gradients and state


@on_ranks(2)
def test_a_grad_scaler_around_it_is_refused_with_what_to_write() -> None:
    """A second scale: its step would look for gradients where none are, and say that no inf checks were recorded."""
    x, y = batch(0, 0)
    model, optimizer = sharded(small(), precision=POLICY)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(RuntimeError, match=r"no loss was scaled.*optimizer.backward\(loss\)"):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    for precision in ("fp16", "bf16"):
        model, optimizer = sharded(small(), precision=precision)
        before = masters(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        loss = scaler.scale(F.cross_entropy(model(x), y))
        optimizer.backward(loss) if precision == "fp16" else loss.backward()
        with pytest.raises(RuntimeError, match=r"GradScaler around.*leave the GradScaler out.*optimizer.step\(\)"):
            scaler.step(optimizer)
        assert all(torch.equal(before[name], master) for name, master in masters(optimizer).items())


@STAGES
@on_ranks(2)
def test_torchs_clipping_sees_nothing_and_the_optimizers_own_clips(rank: int, world_size: int, stage: int) -> None:
    """It cannot be told that it was called: it asks each parameter for `.grad`, which is None. So it is documented."""
    steps = [[[loss_on(*batch(step, r)) for r in range(world_size)]] for step in range(2)]
    for limit in (None, 0.05):
        plain = small()
        model, optimizer = shardmp.shard(plain, adamw(plain), precision=POLICY, stage=stage)
        for step in steps:
            optimizer.backward(step[0][rank](model))
            assert all(p.grad is None for p in model.parameters())
            if limit is None:
                assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item() == 0.0
            else:
                optimizer.clip_grad_norm_(limit)
            assert optimizer.step().grad_norm > 0.05
        assert_masters(optimizer, right(steps, max_grad_norm=limit))


@on_ranks(2)
def test_the_state_of_a_parameter_is_refused_with_what_to_write() -> None:
    """`optimizer.state[p]` was an empty dict in silence; each rank holds pieces of flat shards."""
    model, optimizer = sharded(small(), torch.optim.AdamW, precision=POLICY)
    optimizer.backward(F.cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]))
    optimizer.step()
    parameter = next(model.parameters())
    with pytest.raises(KeyError, match=r"pieces of the state.*shardmp.save.*optimizer.master"):
        optimizer.state[parameter]
    assert parameter not in optimizer.state
    assert optimizer.state.get(parameter) is None


@on_ranks(2)
def test_zero_grad_of_either_optimizer_at_any_place_between_steps_is_right(rank: int, world_size: int) -> None:
    """Before backward, after step or never: gradients of a done step are gone. The old optimizer's does as ours."""
    steps = [[[loss_on(*batch(step, r)) for r in range(world_size)]] for step in range(3)]
    expected = right(steps)
    for place in ("before", "after", "old", "never"):
        plain = small()
        old = adamw(plain)
        model, optimizer = shardmp.shard(plain, old, precision=POLICY)
        for step in steps:
            if place == "before":
                optimizer.zero_grad(set_to_none=False)
            optimizer.backward(step[0][rank](model))
            optimizer.step()
            if place == "after":
                model.zero_grad()
            if place == "old":
                old.zero_grad()
        assert_masters(optimizer, expected)


@on_ranks(2)
def test_zero_grad_between_backward_and_step_is_an_error_at_the_step() -> None:
    """As the plain loop would be: nothing is left to step with."""
    model, optimizer = sharded(small(), precision=POLICY)
    optimizer.backward(loss_on(*batch(0, 0))(model))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"step\(\) without a gradient.*call backward first"):
        optimizer.step()


# --------------------------------------------------------------------------------------------------------------------
# Models that were halved, parameters that rest


@STAGES
@on_ranks(2)
def test_a_model_that_was_halved_before_trains_from_its_rounded_weights(world_size: int, stage: int) -> None:
    """Masters are FP32 all the same; what `half()` has rounded away is lost, which is why shard() should do it."""
    steps = [[[loss_on(*batch(step, r)) for r in range(world_size)]] for step in range(3)]

    def halved() -> nn.Module:
        return small().half()

    expected = right(steps, halved)
    assert any(not torch.equal(master, right(steps).masters[name]) for name, master in expected.masters.items())
    assert_equal(train(halved, adamw, steps, precision=POLICY, stage=stage), expected)


@STAGES
@on_ranks(2)
def test_what_is_frozen_after_shard_rests_and_trains_on_when_it_is_unfrozen(world_size: int, stage: int) -> None:
    """No update, no decay, no change of its moments, as in torch for a parameter without gradient."""

    def resting(step: int, rank: int) -> reference.Loss:
        def loss(model: Any) -> Tensor:
            first = getattr(model, "0")
            first.requires_grad_(step not in (1, 2))
            return loss_on(*batch(step, rank))(model)

        return loss

    steps = [[[resting(step, r) for r in range(world_size)]] for step in range(4)]
    at_rest: list[Tensor] = []
    found = train(
        small, adamw, steps, precision=POLICY, stage=stage, between=lambda m, o: at_rest.append(o.master("0.weight"))
    )
    assert_equal(found, right(steps))
    assert torch.equal(at_rest[0], at_rest[2])
    assert not torch.equal(at_rest[2], at_rest[3])


# --------------------------------------------------------------------------------------------------------------------
# docs/recipes.md


def recipes() -> dict[str, str]:
    """The code blocks of the page, by their heading."""
    found: dict[str, str] = {}
    heading = ""
    for part in re.split(r"^(#+ [^\n]*|```python\n.*?^```)$", RECIPES.read_text(), flags=re.MULTILINE | re.DOTALL):
        if part.startswith("#"):
            heading = part.lstrip("# ")
        elif part.startswith("```python"):
            assert heading not in found, f"two blocks under {heading!r}"
            found[heading] = part.removeprefix("```python\n").removesuffix("```")
    return found


@pytest.mark.parametrize("heading", recipes())
@on_ranks(2, timeout=150)
def test_recipes_run_and_train(rank: int, heading: str) -> None:
    """A page that is not run is wrong within a month. Ranks agree on the weights that it leaves, which have moved."""
    compile_module = nn.Module.compile
    nn.Module.compile = functools.partialmethod(compile_module, backend="aot_eager")  # no C++ compiler is asked for
    original = small()
    plain = copy.deepcopy(original)
    first = small()
    model, optimizer = shardmp.shard(first, adamw(first), precision=POLICY)
    x, y = batch(0, rank)
    given = {"torch": torch, "nn": nn, "F": F, "dist": dist, "copy": copy, "shardmp": shardmp, "rank": rank}
    given |= {"original": original, "plain": plain, "model": model, "optimizer": optimizer, "x": x, "y": y}
    given |= {"loader": [(x, y), batch(1, rank)], "loss_function": F.cross_entropy, "state": original.state_dict()}
    try:
        exec(compile(recipes()[heading], f"{RECIPES.name}: {heading}", "exec"), given)
    finally:
        nn.Module.compile = compile_module
    optimizer = given["optimizer"]
    found = masters(optimizer)
    assert same_on_all_ranks(found)
    assert all(value.isfinite().all() for value in found.values())
    if "optimizer.step" in recipes()[heading]:
        assert optimizer.skipped_steps == 0
        start = dict(original.named_parameters())
        assert any(name not in start or not torch.equal(start[name], value) for name, value in found.items())


def test_every_recipe_has_a_block_that_is_run() -> None:
    """A heading whose block the pattern misses would be run by nobody."""
    headings = re.findall(r"^### (.*)$", RECIPES.read_text(), flags=re.MULTILINE)
    assert headings == list(recipes())
