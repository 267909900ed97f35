"""An exception anywhere inside a step leaves nothing that could go on with a mix of two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import equal, masters, sharded
from ranks import on_ranks
from torch import Tensor, nn

import shardmp
from shardmp.collectives import Collectives
from shardmp.parameters import Parameters
from shardmp.poison import Poison
from shardmp.update import Update


def layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def raise_at_the_second_call(patch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException) -> None:
    method, calls = getattr(owner, name), []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise error
        return method(self, *args, **kwargs)

    patch.setattr(owner, name, call)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("of the user")])
@pytest.mark.parametrize(("owner", "name"), [(Update, "step_run"), (Parameters, "publish")])
@on_ranks(1)
def test_after_an_exception_inside_step_everything_refuses(
    owner: type, name: str, error: BaseException, tmp_path: Path
) -> None:
    """In the trial 4 of 8 parameters were one update ahead, and `zero_grad` and `save` wrote the mix."""
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.1, bucket_mb=0.005)
    optimizer.backward(model(torch.ones(2, 32)).mean())
    with pytest.MonkeyPatch.context() as patch:
        raise_at_the_second_call(patch, owner, name, error)
        with pytest.raises(type(error)):
            optimizer.step()
    words = f"step 1 raised {type(error).__name__}"
    optimizer.zero_grad()
    for refuses in (
        lambda: optimizer.backward(model(torch.ones(2, 32)).mean()),
        optimizer.step,
        lambda: shardmp.save(tmp_path, model, optimizer),
    ):
        with pytest.raises(RuntimeError, match=words):
            refuses()


@on_ranks(1, 2)
def test_what_step_refuses_before_it_begins_leaves_everything_as_it_was(rank: int) -> None:
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.1)
    before = masters(optimizer)
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.step()
    optimizer.backward(model(torch.ones(2, 32)).mean())
    with pytest.raises(TypeError, match="divide_by"):
        optimizer.step(divide_by="4")
    assert equal(before, masters(optimizer))
    assert not optimizer.step().skipped


def test_a_reason_is_kept_though_the_exceptions_own_words_raise() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ArithmeticError("no words")

    found = Poison()
    with pytest.raises(ArithmeticError), found.all_or_nothing("step 7"):
        raise Mute
    assert found.failure == "step 7 raised Mute"


@on_ranks(1)
def test_ctrl_c_while_a_collective_waits_poisons() -> None:
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.1)
    collectives: Collectives = optimizer._collectives

    class Interrupted:
        def wait(self) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collectives.finish_gather([Interrupted()])
    with pytest.raises(RuntimeError, match="all-gather at .*KeyboardInterrupt"):
        optimizer.backward(model(torch.ones(2, 32)).mean())
