"""The package schedulefree: its classes equal themselves in plain torch, in training and in evaluation, and when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import masters
from ranks import on_ranks
from test_schedule_free import assert_close, net, train
from torch import nn

import shardmp

CLASSES = ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"]


def made(name: str, model: nn.Module) -> Any:
    schedulefree = pytest.importorskip("schedulefree")
    options = {} if name == "RAdamScheduleFree" else {"warmup_steps": 2}
    return getattr(schedulefree, name)(model.parameters(), lr=0.0625, weight_decay=0.01, **options)


@pytest.mark.parametrize("name", CLASSES)
@on_ranks(1, 2, 3)
def test_classes_of_schedulefree_equal_plain_torch(name: str, tmp_path: Path) -> None:
    for bucket_mb, mode in ((None, "train"), (0.0001, "eval")):
        plain = net()
        reference = made(name, plain)
        model = net()
        model, optimizer = shardmp.shard(model, made(name, model), precision="fp32", bucket_mb=bucket_mb)
        for each in (reference, optimizer):
            each.train()
        train(plain, reference, range(6), lambda loss: loss.backward())
        train(model, optimizer, range(6), optimizer.backward)
        for each in (reference, optimizer):
            getattr(each, mode)()
        assert_close(masters(optimizer), {key: p.detach() for key, p in plain.named_parameters()})
        shardmp.save(tmp_path / mode, model, optimizer)
        model = net()
        model, optimizer = shardmp.shard(model, made(name, model), precision="fp32")
        shardmp.load(tmp_path / mode, model, optimizer)
        for each in (reference, optimizer):
            each.train()
        train(plain, reference, range(6, 9), lambda loss: loss.backward())
        train(model, optimizer, range(6, 9), optimizer.backward)
        for each in (reference, optimizer):
            each.eval()
        assert_close(masters(optimizer), {key: p.detach() for key, p in plain.named_parameters()})
        kept = {key: value for key, value in reference.param_groups[0].items() if key != "params"}
        assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == kept


@pytest.mark.parametrize("library", ["prodigyopt", "pytorch_optimizer"])
def test_prodigy_is_refused_as_it_reduces_over_all_parameters(library: str) -> None:
    prodigy = pytest.importorskip(library).Prodigy
    model = net()
    with pytest.raises(TypeError, match="optimizer Prodigy .*needs whole parameters: .*reduces over all parameters"):
        shardmp.shard(model, prodigy(model.parameters()))
