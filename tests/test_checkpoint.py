"""Checkpoints: saved at any number of ranks, loaded at any other, nothing lost, all by bits."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal, masters
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_step import Net, adamw, loss_for
from torch import Tensor, nn

import shardmp
import shardmp.update
from shardmp import Precision, codec

pytestmark = pytest.mark.filterwarnings("ignore:.*random")

POLICY = Precision(init_scale=2.0**10, growth_interval=3, hysteresis=2)
EXACT = {"precision": POLICY, "reduce": "exact", "average": "micro_batches", "max_grad_norm": 0.5}
MICRO_BATCHES = 8


def build(make_optimizer: Any = adamw, **options: Any) -> Any:
    plain = Net()
    return shardmp.shard(plain, make_optimizer(plain), **{**EXACT, **options})


def train(model: Any, optimizer: Any, steps: range, *, overflow_at: tuple[int, ...] = ()) -> None:
    """Steps of the same micro-batches, dealt to the ranks there are; `exact` makes the result independent of them."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in steps:
        for first in range(0, MICRO_BATCHES, ranks):
            number = first + rank
            scale = 1e6 if step in overflow_at and number == MICRO_BATCHES - 1 else 1.0
            loss = loss_for(step, number, 0, scale=scale) if number < MICRO_BATCHES else None
            optimizer.backward(None if loss is None else loss(model))
        optimizer.step()
        optimizer.zero_grad()


def moments(optimizer: Any) -> dict[str, Tensor]:
    """All whole state tensors, and step counts. Collective."""
    found: dict[str, Any] = {}
    told: list[Any] = [None] * torch.distributed.get_world_size()
    own = [
        (optimizer._names[piece.param], piece.lo, {k: v[: piece.hi - piece.lo].clone() for k, v in flat.items()}, rest)
        for piece, flat, rest in optimizer._update.piece_states()
    ]
    torch.distributed.all_gather_object(told, own)
    shapes = dict(zip(optimizer._names, optimizer._shapes, strict=True))
    for name, lo, flat, rest in (item for rank in told for item in rank):
        for key, value in flat.items():
            whole = found.setdefault(f"{name}.{key}", torch.full((shapes[name].numel(),), torch.nan))
            whole[lo : lo + value.numel()] = value
        for key, value in rest.items():
            assert equal(found.setdefault(f"{name}.{key}", value), value)
    return found


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that training depends on."""
    return {
        "masters": masters(optimizer),
        "moments": moments(optimizer),
        "model": {key: value.clone() for key, value in model.state_dict().items()},
        "counters": optimizer.counters(),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def run_and_save(root: Path, before: int, after: int, overflow_at: tuple[int, ...], options: dict[str, Any]) -> Any:
    model, optimizer = build(**options)
    train(model, optimizer, range(before), overflow_at=overflow_at)
    shardmp.save(root, model, optimizer)
    at_save = whole(model, optimizer)
    train(model, optimizer, range(before, before + after), overflow_at=overflow_at)
    return at_save, whole(model, optimizer)


def load_and_run(root: Path, before: int, after: int, overflow_at: tuple[int, ...], options: dict[str, Any]) -> Any:
    model, optimizer = build(**options)
    train(model, optimizer, range(50, 51))  # something else is there before
    loaded = shardmp.load(root, model, optimizer)
    assert loaded.step == before
    at_load = whole(model, optimizer)
    train(model, optimizer, range(before, before + after), overflow_at=overflow_at)
    return at_load, whole(model, optimizer)


def check_all(root: Path, saving: int, loading: tuple[int, ...], first: dict[str, Any], second: dict[str, Any]) -> None:
    told = run_ranks(run_and_save, saving, root, 3, 3, (1,), first)
    for ranks in loading:
        for found in run_ranks(load_and_run, ranks, root, 3, 3, (1,), second):
            assert equal(found, told[0])


@pytest.mark.parametrize("saving", [1, 2, 3])
def test_any_number_of_ranks_goes_on_as_the_unbroken_run(saving: int, tmp_path: Path) -> None:
    """Masters, moments, scale and counters are equal bit for bit after loading, and after three steps more."""
    check_all(tmp_path, saving, (1, 2, 3, 5), {"bucket_mb": 0.01}, {"bucket_mb": 0.004, "stage": 1})


@pytest.mark.slow
@pytest.mark.parametrize("saving", [1, 2, 3, 4, 5, 8])
def test_all_numbers_of_ranks_go_on_as_the_unbroken_run(saving: int, tmp_path: Path) -> None:
    check_all(tmp_path, saving, (1, 2, 3, 4, 5, 8), {"bucket_mb": 0.02, "stage": 1}, {"bucket_mb": 0.006})


def sgd_dampened(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.01)


def rprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Rprop(model.parameters(), lr=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [sgd_dampened, nadam, rprop, adagrad, amsgrad, plain_sgd])
def test_the_state_of_any_optimizer_comes_along(make: Any, tmp_path: Path) -> None:
    """Classes that step tile by tile and make their state late, a learning rate that is a tensor, no state at all."""
    options = {"make_optimizer": make, "bucket_mb": 0.01}
    check_all(tmp_path, 2, (3, 1), options, options)


def small_tiles(root: Path, load: bool) -> Any:
    tile, shardmp.update.UPDATE_TILE = shardmp.update.UPDATE_TILE, 512
    try:
        return (load_and_run if load else run_and_save)(root, 2, 2, (), {"make_optimizer": nadam})
    finally:
        shardmp.update.UPDATE_TILE = tile


def test_pieces_of_several_tiles_are_saved_as_one(tmp_path: Path) -> None:
    expected = run_ranks(small_tiles, 2, tmp_path, False)[0]
    assert equal(run_ranks(small_tiles, 3, tmp_path, True)[0], expected)
    assert equal(run_ranks(load_and_run, 1, tmp_path, 2, 2, (), {"make_optimizer": nadam})[0], expected)


@pytest.mark.parametrize("options", [{"reduce": "fp32"}, {"reduce": "native"}, {"precision": "bf16", "reduce": "fp32"}])
def test_every_reduction_goes_on_at_the_same_number_of_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"average": "ranks", **options}
    check_all(tmp_path, 3, (3,), options, {**options, "bucket_mb": 0.01} if options["reduce"] == "fp32" else options)


def precisions(root: Path, load: bool, precision: str) -> Any:
    plain = Net()
    model, optimizer = shardmp.shard(plain, adamw(plain), precision=precision)
    if load:
        shardmp.load(root, model, optimizer)
    else:
        train(model, optimizer, range(2))
        shardmp.save(root, model, optimizer)
    return masters(optimizer), moments(optimizer)


def test_masters_of_one_precision_train_on_in_another(tmp_path: Path) -> None:
    expected = run_ranks(precisions, 2, tmp_path, False, "fp16")[0]
    for precision in ("bf16", "fp32"):
        assert equal(run_ranks(precisions, 3, tmp_path, True, precision)[0], expected)


# -- the text of `extra`


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.lists(st.floats(width=32, allow_nan=False)).map(torch.tensor), st.integers(0, 9).map(np.arange),
    st.floats(allow_nan=False).map(np.float64),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner), st.dictionaries(st.text(), inner),
        st.dictionaries(keys, inner).map(OrderedDict), st.lists(inner).map(lambda items: deque(items, 7)),
        st.lists(st.integers()).map(Counter), st.sets(st.integers()),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(trees, st.booleans())
def test_what_is_decoded_is_what_was_encoded(value: Any, inline: bool) -> None:
    tensors: list[Tensor] | None = None if inline else []
    text = codec.dumps(value, "value", tensors)
    assert same(codec.loads(text, dict(enumerate(tensors or []))), value)


def same(a: Any, b: Any) -> bool:
    """Equal, with types and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
