"""What the step does where the host must not look at the device: on CUDA. Here the same functions run on CPU tensors."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers import masters, sharded, through_sockets
from ranks import on_ranks
from torch import Tensor, nn

import shardmp
from shardmp import collectives
from shardmp.bucket_gradients import BucketGradients
from shardmp.exchange import Part
from shardmp.layout import Entry, plan


@pytest.mark.parametrize("bad", [{}, {0: [torch.inf]}, {1: [torch.nan]}, {0: [-torch.inf], 2: [torch.inf, torch.nan]}])
def test_who_brought_inf_or_nan_is_known_without_looking(bad: dict[int, list[float]]) -> None:
    """The same ranks and kinds as on the CPU; how many pieces is not counted, and a NaN hides an inf beside it."""
    layout = plan([Entry("a", 3000, "fp16"), Entry("b", 70, "fp16")], 3, bucket_bytes=1 << 20, itemsize={"fp16": 2})
    bucket = BucketGradients(layout.buckets[0], 0, torch.float16, torch.device("cpu"), direct=False, exact=False)
    shard = bucket.bucket.shard
    values = torch.ones(3, shard, dtype=torch.float16)
    for rank, wrong in bad.items():
        values[rank, 5 : 5 + len(wrong)] = torch.tensor(wrong, dtype=torch.float16)
    rows = [[[Part(0, row[:1024]), Part(1024, row[1024:])]] for row in values]
    sums = values.float().sum(0).view(1, -1)
    squares = sums.view(1, -1, 1024).square().sum(2)
    seen = bucket.culprits(rows, range(3), [0], sums, squares)
    unseen = bucket.culprits_unseen(rows, range(3), sums)
    assert unseen.shape == (4, 2)
    ranks = torch.nonzero(unseen[:-1].sum(1)).view(-1).tolist()
    assert ranks == sorted(bad)
    assert bool(unseen[-1].any()) is False
    if not bad:
        assert seen is None
        return
    assert seen is not None
    assert ranks == torch.nonzero(seen[:-1].sum(1)).view(-1).tolist()
    nan = [rank for rank, wrong in bad.items() if torch.tensor(wrong).isnan().any()]
    assert torch.nonzero(unseen[:-1, 1]).view(-1).tolist() == nan


def test_a_sum_that_overflows_without_a_culprit_is_counted_without_looking() -> None:
    layout = plan([Entry("a", 2000, "fp32")], 2, bucket_bytes=1 << 20, itemsize={"fp32": 4})
    bucket = BucketGradients(layout.buckets[0], 0, torch.float32, torch.device("cpu"), direct=False, exact=False)
    values = torch.full((2, bucket.bucket.shard), 3e38)
    sums = values.sum(0).view(1, -1)
    counts = bucket.culprits_unseen([[[Part(0, row)]] for row in values], range(2), sums)
    assert counts.tolist() == [[0, 0], [0, 0], [1, 0]]


def test_a_master_too_large_for_fp16_is_found_without_looking() -> None:
    model, optimizer = sharded(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), bucket_mb=0.001)
    parameters = optimizer._parameters
    names = [name for name, _ in model.module.named_parameters()]
    assert parameters.too_large_unseen() == 0
    for name in names:
        for value, expected in (
            (65504.0, 0),
            (65519.9, 0),
            (65520.0, 1 + names.index(name)),
            (-1e6, 1 + names.index(name)),
        ):
            for bucket in parameters.buckets:
                for piece in bucket.pieces:
                    if piece.param == names.index(name):
                        bucket.master[piece.offset] = value
                bucket.round()
            assert parameters.too_large_unseen() == parameters.too_large() == expected
        for bucket in parameters.buckets:
            bucket.master.zero_()
            bucket.round()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_in_any_shape_trains(shape: tuple[int, ...]) -> None:
    masters = []
    for reshaped in (False, True):
        torch.manual_seed(0)
        precision = shardmp.Precision(init_scale=16.0)
        model, optimizer = sharded(nn.Linear(4, 1), torch.optim.SGD, 0.5, precision=precision)
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        optimizer.backward(loss.reshape(shape) if reshaped else loss)
        report = optimizer.step()
        assert not report.skipped
        assert report.loss == loss.item()
        masters.append(optimizer.master("weight"))
    assert torch.equal(*masters)


@on_ranks(2, 3)
def test_messages_through_host_memory_bring_the_same_bits_and_bytes(rank: int) -> None:
    """As under gloo for models on a GPU; here both memories are the host's."""

    def trained() -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(3)
        model, optimizer = sharded(nn.Sequential(nn.Linear(64, 600), nn.Linear(600, 64)), bucket_mb=0.05)
        before = optimizer.wire_bytes()
        for step in range(3):
            optimizer.backward(model(torch.full((2, 64), 0.1 * (rank + step))).square().mean())
            optimizer.step()
        return masters(optimizer), optimizer.wire_bytes() - before

    with through_sockets():
        expected, sent = trained()
        with patch.object(collectives, "_must_stage", lambda group, device: True):
            found, staged = trained()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert staged == sent > 0
