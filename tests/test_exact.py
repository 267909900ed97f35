"""Invariant 3: with `reduce="exact"` the FP32 masters are bit for bit the same for any number of ranks and any dealing.

The same for 1, 2, 3, 4, 6 and 8 ranks, contiguous and round-robin dealing of 24 micro-batches, stages 1 and 2, any bucket
size, one and two hops; clipping active, an overflow in between, tied, unused and FP32-kept parameters among them.
"""

from __future__ import annotations

import hashlib
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import masters, sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks, run_ranks
from test_step import Net, adamw, loss_for
from test_two_hops import on_hosts
from torch import Tensor, nn

import shardmp
from shardmp.exact import check_model, on_grid

MICRO_BATCHES = 24
STEPS = 30


def hash_of(values: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def share(dealing: str) -> list[int]:
    """This rank's micro-batches."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    each = MICRO_BATCHES // ranks
    return (
        list(range(rank, MICRO_BATCHES, ranks)) if dealing == "in turn" else list(range(rank * each, (rank + 1) * each))
    )


def run(
    dealing: str = "blocks", hosts: str = "", steps: int = STEPS, reduce: str = "exact", **options: Any
) -> tuple[str, list[bool]]:
    """Hash of the masters after a training whose 11th step overflows, and which steps were skipped."""

    def whole() -> tuple[str, list[bool]]:
        model = Net()
        options.setdefault("max_grad_norm", 0.5)
        wrapped, optimizer = shardmp.shard(
            model, adamw(model), reduce=reduce, average="micro_batches", precision="fp16", **options
        )
        skipped = []
        for step in range(steps):
            for number in share(dealing):
                loud = step == 10 and number == 17
                optimizer.backward(loss_for(step, number, 0, scale=1e6 if loud else 1.0)(wrapped))
            skipped.append(optimizer.step().skipped)
            optimizer.zero_grad()
        return hash_of(masters(optimizer)), skipped

    if not hosts:
        return whole()
    with on_hosts(hosts):
        return whole()


VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"dealing": "in turn", "bucket_mb": 0.001}),
    (2, {"stage": 1, "overlap": False}),
    (3, {"dealing": "in turn", "bucket_mb": 0.004}),
    (4, {"dealing": "in turn", "stage": 1, "bucket_mb": 0.001, "overlap": False}),
    (6, {"hosts": "aaabbb", "dealing": "in turn"}),
    (8, {"dealing": "in turn"}),
    (8, {"hosts": "aaaabbbb", "stage": 1}),
]


@pytest.fixture(scope="module")
def one_rank() -> tuple[str, list[bool]]:
    return run_ranks(run, 1)[0]


@pytest.mark.parametrize(("ranks", "options"), VARIANTS)
def test_one_hash_for_any_number_of_ranks_and_any_dealing(
    ranks: int, options: Any, one_rank: tuple[str, list[bool]]
) -> None:
    results = run_ranks(run, ranks, **options)
    assert one_rank[1].count(True) >= 1
    assert one_rank[1][10]
    assert {skipped == one_rank[1] for _, skipped in results} == {True}
    assert {found for found, _ in results} == {one_rank[0]}


def test_without_exact_the_hashes_differ() -> None:
    """Else the tests above would prove nothing."""
    found = {run_ranks(run, ranks, reduce="fp32", steps=12)[0][0] for ranks in (1, 2, 3)}
    assert len(found) == 3


@pytest.mark.parametrize("backwards", [[1, 1, 3, 1, 1], [2, 1, 2, 1, 1], [1, 2, 1, 4, 4]])
@on_ranks(1, 2, 3)
def test_the_sum_stays_exact_where_the_number_of_backwards_changes(
    rank: int, world_size: int, backwards: list[int]
) -> None:
    """A first backward's sum is kept as its rows or as two FP32 numbers, and widened to FP64 if another one follows."""
    generator = torch.Generator().manual_seed(3)
    model, optimizer = sharded(
        nn.Linear(64, 64, bias=False),
        torch.optim.SGD,
        1.0,
        reduce="exact",
        average="micro_batches",
        precision=shardmp.Precision(init_scale=1.0, growth_interval=10**6),
    )
    expected = optimizer.master("weight").clone()
    for count in backwards:
        total = torch.zeros(64, 64, dtype=torch.float64)
        for _ in range(count):
            rows = torch.randn(world_size, 64, 64, generator=generator) * 2.0 ** torch.randint(
                -20, 10, (world_size, 64, 64), generator=generator
            )
            rows = rows.half()
            total += rows.double().sum(0)
            optimizer.backward((model.module.weight * rows[rank]).float().sum())  # whose gradient is rows[rank]
        assert torch.equal(optimizer.full_grad("weight"), (total.float() / (1.0 * world_size * count)))
        optimizer.step()
        expected -= total.float() / (1.0 * world_size * count)
        assert torch.equal(optimizer.master("weight"), expected)


@on_ranks(1, 3)
def test_the_sum_is_exact_where_fp32_would_lose_a_term(rank: int, world_size: int) -> None:
    """2^15, 2^-24 and -2^15: in FP32, in this order, the middle one is lost."""
    model, optimizer = sharded(
        nn.Linear(1, 1, bias=False),
        torch.optim.SGD,
        1.0,
        reduce="exact",
        average="micro_batches",
        precision=shardmp.Precision(init_scale=1.0),
    )
    before = optimizer.master("weight").clone()
    values = [2.0**15, 2.0**-24, -(2.0**15)]
    for value in values if world_size == 1 else values[rank : rank + 1]:
        optimizer.backward((model.module.weight * torch.tensor(value, dtype=torch.float16)).float().sum())
    assert torch.equal(optimizer.full_grad("weight"), torch.full((1, 1), 2.0**-24) / 3.0)
    report = optimizer.step()
    assert report.grad_norm == pytest.approx(2.0**-24 / 3, rel=1e-6)
    assert torch.equal(optimizer.master("weight"), before - torch.tensor(2.0**-24) / 3.0)


@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=400, deadline=None)
def test_a_gradient_of_a_kept_parameter_is_put_on_fp16s_grid(value: float) -> None:
    found = on_grid(torch.tensor([value])).item()
    if abs(value) > 65504:
        assert found == (torch.inf if value > 0 else -torch.inf)
        return
    scaled = Fraction(found) * 2**24
    assert scaled.denominator == 1
    assert abs(Fraction(found) - Fraction(value)) <= Fraction(1, 2**25)


@on_ranks(2)
def test_a_gradient_of_a_kept_parameter_beyond_65504_is_an_overflow(rank: int) -> None:
    model, optimizer = sharded(
        nn.LayerNorm(4),
        torch.optim.SGD,
        1.0,
        reduce="exact",
        average="micro_batches",
        precision=shardmp.Precision(init_scale=1.0),
    )
    optimizer.backward(model(torch.ones(1, 4)).sum() * (65505.0 if rank else 1.0))
    report = optimizer.step()
    assert report.skipped
    assert report.overflow.parameters == ("bias",)
    assert report.overflow.ranks == (1,)


class Random(nn.Module):
    """A small model by a seed: layers, tied or not, kept or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = torch.Generator().manual_seed(seed)
        width, depth = (int(torch.randint(low, high, (1,), generator=draw)) for low, high in ((3, 90), (1, 5)))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bool(seed % 2)) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) if (seed + k) % 3 == 0 else nn.Identity() for k in range(depth))
        if seed % 5 == 0 and depth > 1:
            self.layers[-1].weight = self.layers[0].weight
        self.spare = nn.Parameter(torch.ones(seed % 7))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return x


def random_model_hash(seed: int, dealing: str, bucket_mb: float) -> str:
    model = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped, optimizer = shardmp.shard(
        model,
        optimizer,
        reduce="exact",
        average="micro_batches",
        bucket_mb=bucket_mb,
        max_grad_norm=0.1,
        precision=shardmp.Precision(init_scale=1024.0),
    )
    for step in range(4):
        for number in share(dealing):
            x = torch.randn(2, model.width, generator=torch.Generator().manual_seed(100 * step + number))
            optimizer.backward(wrapped(x).square().mean())
        optimizer.step()
    return hash_of(masters(optimizer))


@pytest.mark.parametrize("seed", range(5))
def test_random_models_have_one_hash(seed: int) -> None:
    first = run_ranks(random_model_hash, 1, seed, "blocks", 8)[0]
    for ranks, dealing, bucket_mb in ((2, "in turn", 0.01), (3, "blocks", 0.001), (4, "in turn", 8)):
        assert set(run_ranks(random_model_hash, ranks, seed, dealing, bucket_mb)) == {first}


# -- where it cannot hold


def exact(model: nn.Module, **options: Any) -> Any:
    return sharded(model, torch.optim.SGD, 0.1, **{"reduce": "exact", "average": "micro_batches", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "expected precision 'fp16'.*got 'bf16'"),
        ({"precision": "fp32"}, "expected precision 'fp16'.*got 'fp32'"),
        ({"average": "ranks"}, "expected average='micro_batches'.*got average='ranks'"),
    ],
)
def test_what_would_break_the_promise_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact(nn.Linear(2, 2), **options)


def test_a_norm_over_all_ranks_batches_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"0 \(SyncBatchNorm\) computes with the statistics of all ranks"):
        check_model(nn.Sequential(nn.SyncBatchNorm(2)), torch.device("cpu"))


def test_dropout_and_running_statistics_are_named_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(2))
    with pytest.warns(
        UserWarning, match=r"1 \(Dropout\) draws random numbers.*3 \(BatchNorm1d\) keeps running"
    ) as found:
        exact(model)
    assert len(found) == 1
    assert "2 (Dropout)" not in str(found[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact(nn.Linear(2, 2))


def test_more_gradients_than_fp64_adds_exactly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmp.gradients.MAX_TERMS", 3)
    model, optimizer = exact(nn.Linear(2, 2))
    for _ in range(3):
        optimizer.backward(model(torch.ones(1, 2)).mean())
    with pytest.raises(ValueError, match="4 backwards on 1 ranks before a step are more than 3 gradients"):
        optimizer.backward(model(torch.ones(1, 2)).mean())


@pytest.mark.parametrize("hosts", ["", "aaabbb"])
@on_ranks(6)
def test_bytes_are_4_per_element_of_the_shard_more_and_as_predicted(hosts: str) -> None:
    with on_hosts(hosts or "a" * 6):
        model, optimizer = exact(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
        plain = sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.optim.SGD, 0.1)[1]
        for _ in range(2):
            sent = optimizer.wire_bytes()
            for _ in range(2):
                optimizer.backward(model(torch.ones(1, 64)).mean())
            optimizer.step()
            assert optimizer.wire_bytes() - sent == optimizer.predicted_wire_bytes(backwards=2)
    held, predicted = optimizer.memory(), optimizer.predicted_memory()
    assert held["gradients"] == predicted["gradients"] == 2 * plain.memory()["gradients"]
    assert held["buckets"] <= predicted["buckets"]
