"""Optimizers of bitsandbytes and torchao: elementwise ones equal the plain reference, blockwise ones are refused by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import reference
import torch
from ranks import on_ranks
from test_step import Net, assert_equal, expect, plan, train
from torch import nn

import shardmp

LIMITS = {"timeout": 240.0, "group_timeout": 120.0}
MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}

# State of 32 bits, every element on its own.
ELEMENTWISE = [
    ("bitsandbytes", "AdamW32bit", {"lr": 0.01, "weight_decay": 0.1}),
    ("bitsandbytes", "Lion32bit", {"lr": 0.001}),
    ("bitsandbytes", "RMSprop32bit", {"lr": 0.001}),
]
# One scale for a block of 128 or 256 elements of the state, or a norm over the whole parameter.
WHOLE = [
    ("bitsandbytes", "AdamW8bit", {"lr": 0.01}),
    ("bitsandbytes", "PagedAdamW8bit", {"lr": 0.01}),
    ("bitsandbytes", "Lion8bit", {"lr": 0.01}),
    ("bitsandbytes", "SGD8bit", {"lr": 0.01, "momentum": 0.9}),
    ("bitsandbytes", "LAMB", {"lr": 0.01}),
    ("bitsandbytes", "LARS", {"lr": 0.01, "momentum": 0.9}),
    ("torchao", "AdamW8bit", {"lr": 0.01}),
    ("torchao", "AdamW4bit", {"lr": 0.01}),
    ("torchao", "AdamWFp8", {"lr": 0.01}),
]


def optimizer_class(library: str, name: str) -> Any:
    pytest.importorskip(library)
    return getattr(importlib.import_module(MODULES[library]), name)


def eager(function: Any = None, **_: Any) -> Any:
    """In the place of torch.compile, with which torchao's step takes a quarter of a minute a class."""
    return eager if function is None else function


@pytest.mark.parametrize(("library", "name", "options"), WHOLE)
@on_ranks(2, **LIMITS)
def test_optimizers_with_blockwise_or_whole_state_are_refused_by_name(
    library: str, name: str, options: dict[str, Any]
) -> None:
    """bitsandbytes-foundation/bitsandbytes#2080, pytorch/ao#4912: the size of a rank's piece decided on 8 or 32 bits.

    Below 4096 elements they keep FP32 state: a trial on a small matrix takes them for elementwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", eager)
        cls = optimizer_class(library, name)
        model = nn.Linear(128, 96)
        words = rf"optimizer {name} \(group 0\) needs whole parameters: a trial step on pieces"
        with pytest.raises(TypeError, match=words):
            shardmp.shard(model, cls(model.parameters(), **options), precision="fp32")


@pytest.mark.parametrize(("library", "name", "options"), ELEMENTWISE)
@on_ranks(2, **LIMITS)
def test_elementwise_optimizers_of_bitsandbytes_equal_the_reference(
    world_size: int, library: str, name: str, options: dict[str, Any]
) -> None:
    cls = optimizer_class(library, name)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return cls(model.parameters(), **options)

    steps = plan(world_size, 3, 2)
    run = expect(Net, make_optimizer, steps, loss_scale=reference.LossScale(init_scale=256.0), max_grad_norm=0.5)
    assert run.skipped_steps == 0
    start = dict(Net().named_parameters())
    moved = [each for each, master in run.masters.items() if not torch.equal(master, start[each].float())]
    assert len(moved) == len(start) - 1, "all but the unused one"
    policy = shardmp.Precision(init_scale=256.0)
    for stage in (1, 2):
        found = train(Net, make_optimizer, steps, precision=policy, stage=stage, bucket_mb=0.004, max_grad_norm=0.5)
        assert_equal(found, run)
