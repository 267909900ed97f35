"""What an exception leaves half done refuses to go on, and says what was broken off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import masters, sharded
from ranks import on_ranks
from torch import nn

import shardmp
from shardmp import api
from shardmp.update import Update


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("of the test")])
def test_a_model_and_an_optimizer_whose_shard_was_broken_off_refuse(error: BaseException) -> None:
    """Some parameters were FP16 views and the optimizer's state was gone, and both went on in silence."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    class Broken(Update):
        def __init__(self, *args: object) -> None:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Update", Broken)
        with pytest.raises(type(error)):
            shardmp.shard(model, optimizer)
    for act in (optimizer.step, lambda: model(torch.ones(2, 8)), lambda: model[0](torch.ones(2, 8))):
        with pytest.raises(RuntimeError, match=r"shard\(\).*was interrupted.*make both anew"):
            act()
    with pytest.raises(TypeError, match="was given to shard"):
        shardmp.shard(model, optimizer)


def test_a_model_that_shard_refuses_before_it_changes_anything_trains_on() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="stage"):
        shardmp.shard(model, optimizer, stage=7)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert model.weight.dtype == torch.float32


def test_a_sharded_model_is_called_without_the_refusals_of_shard() -> None:
    model, _ = sharded(nn.Sequential(nn.Linear(8, 8)))
    assert not [
        hook
        for module in model.module.modules()
        for hook in module._forward_pre_hooks.values()
        if "_refuse" in str(hook)
    ]


@on_ranks(1, 2)
def test_a_backward_that_is_broken_off_in_its_end_is_no_backward(rank: int, tmp_path: Path) -> None:
    """The gradients were summed and the micro-batch was not counted: the next step divided by too little."""
    model, optimizer = sharded(nn.Linear(8, 8), torch.optim.SGD, 0.1, average="micro_batches")

    def interrupt() -> None:
        raise KeyboardInterrupt

    optimizer._gradients.at_end.insert(0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.backward(model(torch.ones(2, 8)).mean())
    optimizer._gradients.at_end.remove(interrupt)
    for act in (
        optimizer.step,
        lambda: optimizer.backward(model(torch.ones(2, 8)).mean()),
        lambda: shardmp.save(tmp_path, model, optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"backward raised KeyboardInterrupt.*restart from the last checkpoint"):
            act()


def test_a_plain_backward_that_is_broken_off_is_told_at_the_next() -> None:
    """Without our `backward` nobody catches the exception; what has begun and not ended is seen by whoever comes next."""
    model, optimizer = sharded(nn.Linear(8, 8), precision="bf16")
    loss = model(torch.ones(2, 8)).mean()

    def interrupt() -> None:
        raise KeyboardInterrupt

    optimizer._gradients.at_end.insert(0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    optimizer.zero_grad()
    for act in (optimizer.step, lambda: optimizer.backward(model(torch.ones(2, 8)).mean())):
        with pytest.raises(RuntimeError, match="backward.*did not finish"):
            act()


@on_ranks(1, 2)
def test_keys_that_differ_raise_when_what_fits_has_been_loaded_into_masters(rank: int) -> None:
    model, optimizer = sharded(nn.Linear(8, 8, bias=False), torch.optim.SGD, 0.0)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"weight": torch.full((8, 8), 0.1), "other": torch.ones(2)})
    assert torch.equal(masters(optimizer)["weight"], torch.full((8, 8), 0.1).half().float())
    optimizer.backward(model(torch.ones(2, 8)).mean())
    optimizer.step()


def test_weights_that_are_loaded_in_part_refuse_to_step(tmp_path: Path) -> None:
    model, optimizer = sharded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    class Interrupting(dict[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            if key == "1.weight":
                raise KeyboardInterrupt
            return super().__getitem__(key)

    values = Interrupting({key: value * 2 for key, value in model.state_dict().items()})
    model.module[1]._register_load_state_dict_pre_hook(lambda *_: values["1.weight"])
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(values)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) raised KeyboardInterrupt"):
        shardmp.save(tmp_path, model, optimizer)
