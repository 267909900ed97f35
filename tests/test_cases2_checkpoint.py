"""The D cases about checkpoints: names, extra state, groups, values in place, directories; see cases-2.md of the project.

Each is the kind behind a case: what is saved comes back, or it is an error on every rank before anything is changed.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from case_tools import fp16
from helpers import equal, masters, sharded
from ranks import run_ranks
from test_checkpoint import moments
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import shardmp
from shardmp import CheckpointError, directory, in_place
from shardmp.exporting import Contents
from shardmp.manifest import Manifest
from shardmp.optimizer_families import match_groups

pytestmark = pytest.mark.filterwarnings("ignore:.*(random|passing over|latest checkpoint|left over|old checkpoint)")
POLICY = fp16(8.0)


def step(model: Any, optimizer: Any, times: int = 1) -> None:
    for _ in range(times):
        optimizer.backward(model(torch.ones(3, 4)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "masters": masters(optimizer),
        "moments": moments(optimizer),
        "model": {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, Tensor)},
        "counters": optimizer.counters(),
    }


# -- D11: names


def two_layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def wrapped(how: str, seed: int = 0) -> nn.Module:
    plain = two_layers(seed)
    if how == "checkpoint_wrapper":
        plain[0] = checkpoint_wrapper(plain[0])
    elif how == "compile":
        plain[0] = torch.compile(plain[0], backend="eager")
    elif how == "both":
        plain[0] = torch.compile(checkpoint_wrapper(plain[0]), backend="eager")
    elif how == "renaming hook":
        plain._register_state_dict_hook(
            lambda module, state, prefix, local: state.update({"first.weight": state.pop("0.weight")})
        )
    return plain


def by_position(optimizer: Any) -> list[Tensor]:
    return [optimizer.master(name).clone() for name in optimizer._names]


def save_wrapped(root: Path, how: str) -> list[Tensor]:
    model, optimizer = sharded(wrapped(how), torch.optim.AdamW, 0.1, precision=POLICY)
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    return by_position(optimizer)


def load_wrapped(root: Path, hows: list[str]) -> list[list[Tensor]]:
    found = []
    for how in hows:
        model, optimizer = sharded(wrapped(how, seed=7), torch.optim.AdamW, 0.1, precision=POLICY)
        shardmp.load(root, model, optimizer)
        found.append(by_position(optimizer))
        assert optimizer._update.piece_states is not None
        step(model, optimizer)
    return found


WRAPPERS = ["plain", "checkpoint_wrapper", "compile", "both", "renaming hook"]


@pytest.mark.parametrize("how", ["checkpoint_wrapper", "both", "renaming hook"])
def test_d11_a_wrapped_model_saves_and_loads_into_itself_and_into_any_other(how: str, tmp_path: Path) -> None:
    """pytorch/pytorch#117399; names in a checkpoint are those of the model without wrappers."""
    expected = run_ranks(save_wrapped, 2, tmp_path, how)[0]
    for found in run_ranks(load_wrapped, 1, tmp_path, WRAPPERS)[0]:
        assert equal(found, expected)
    names = Contents(tmp_path)
    assert {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"} <= {e.name for e in names.entries()}


def parametrised(root: Path) -> bool:
    def make(seed: int) -> Any:
        plain = two_layers(seed)
        parametrizations.weight_norm(plain[0])
        return sharded(plain, torch.optim.AdamW, 0.1, precision=POLICY)

    model, optimizer = make(0)
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    expected = everything(model, optimizer)
    other, fresh = make(1)
    shardmp.load(root, other, fresh)
    return equal(everything(other, fresh), expected)


def test_d11_a_parametrised_layer_comes_back(tmp_path: Path) -> None:
    assert run_ranks(parametrised, 2, tmp_path) == [True, True]


class Unsaveable(nn.Linear):
    """Its state dict has on rank 1 what cannot be stored."""

    def __init__(self, what: str) -> None:
        super().__init__(4, 2)
        self.what = what

    def get_extra_state(self) -> Any:
        return (lambda: 1) if self.what == "function" and dist.get_rank() == 1 else 1

    def set_extra_state(self, state: Any) -> None:
        pass


class NoWayBack(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


def refused(root: Path, what: str) -> str:
    if what == "no way back":
        plain: nn.Module = nn.Sequential(NoWayBack(4, 2))
    else:
        plain = nn.Sequential(Unsaveable(what))
    if what == "hook" and dist.get_rank() == 1:
        plain._register_state_dict_hook(lambda module, state, prefix, local: state.update({"made": torch.ones(1)}))
    model, optimizer = sharded(plain, precision=POLICY)
    with pytest.raises(TypeError) as caught:
        shardmp.save(root, model, optimizer)
    step(model, optimizer)  # nothing was changed, and all ranks go on
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("function", "model: 0._extra_state: a function cannot be stored"),
        ("hook", "model: made in its state_dict is a Tensor that is no parameter, buffer or extra state"),
        ("no way back", r"model: 0 (NoWayBack) has get_extra_state() but no set_extra_state()"),
    ],
)
def test_what_cannot_be_saved_is_an_error_on_all_ranks_and_by_name(what: str, said: str, tmp_path: Path) -> None:
    for error in run_ranks(refused, 2, tmp_path, what):
        assert said in error
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


# -- D13: extra state


class Counting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.kind = kind
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x)

    def get_extra_state(self) -> Any:
        values = {
            "tensor": torch.tensor([self.count]),
            "number": self.count,
            "dict": {"count": self.count, "seen": {(1, 2): torch.full((3,), self.count)}, "table": np.arange(3)},
        }
        return values[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "dict":
            assert state["table"].tolist() == [0, 1, 2]
            assert state["seen"][1, 2].tolist() == [state["count"]] * 3
        self.count = int(state["count"] if self.kind == "dict" else state)


def extra_state(root: Path, kind: str, background: bool) -> tuple[int, int]:
    model, optimizer = sharded(nn.Sequential(Counting(kind)), precision=POLICY)
    step(model, optimizer, 3)
    saving = shardmp.save(root, model, optimizer, background=background)
    step(model, optimizer)
    saving.wait()
    found = []
    for with_optimizer in (True, False):
        other, fresh = sharded(nn.Sequential(Counting(kind)), precision=POLICY)
        shardmp.load(root, other, fresh if with_optimizer else None)
        found.append(other.module[0].count)
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["tensor", "number", "dict"])
def test_d13_extra_state_comes_back(kind: str, tmp_path: Path) -> None:
    for background in (False, True):
        assert run_ranks(extra_state, 2, tmp_path / str(background), kind, background) == [(3, 3)] * 2


# -- D10, D24: optimizers and groups


def adam_into_adamw(root: Path) -> tuple[Tensor, list[str]]:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4096))

        def forward(self) -> Tensor:
            return self.w.float().sum()

    def run(model: Any, optimizer: Any) -> None:
        optimizer.backward(model())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = sharded(Plain(), torch.optim.Adam, 0.5, weight_decay=0.5, precision=POLICY)
    run(model, optimizer)
    shardmp.save(root, model, optimizer)
    other, fresh = sharded(Plain(), torch.optim.AdamW, 0.5, weight_decay=0.5, precision=POLICY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardmp.load(root, other, fresh)
    run(other, fresh)
    return fresh.master("w").clone(), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_d10_adams_checkpoint_in_adamw_goes_on_as_in_torch(ranks: int, tmp_path: Path) -> None:
    """pytorch/pytorch#146157: it became Adam with L2 (0.00441), or was refused where a rank held no piece."""
    parameter = nn.Parameter(torch.ones(4096))
    first = torch.optim.Adam([parameter], 0.5, weight_decay=0.5)
    parameter.grad = torch.ones(4096)
    first.step()
    second = torch.optim.AdamW([parameter], 0.5, weight_decay=0.5)
    second.load_state_dict(first.state_dict())
    second.step()
    for found, _ in run_ranks(adam_into_adamw, ranks, tmp_path):
        assert torch.allclose(found, parameter.detach(), rtol=0, atol=1e-6)
        assert found[0].item() == pytest.approx(-0.110176, abs=1e-5)
    told = run_ranks(adam_into_adamw, 1, tmp_path / "again")[0][1]
    assert any("the checkpoint has the state of Adam, the optimizer is AdamW" in text for text in told)


def other_class(root: Path) -> list[str]:
    model, optimizer = sharded(two_layers(), torch.optim.Adam, 0.1, precision=POLICY)
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    found = []
    for make in (torch.optim.RAdam, torch.optim.NAdam, torch.optim.SGD):
        other, fresh = sharded(two_layers(), make, 0.1, precision=POLICY)
        step(other, fresh)
        before = everything(other, fresh)
        with pytest.raises(ValueError) as caught:
            shardmp.load(root, other, fresh)
        assert equal(everything(other, fresh), before)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("ranks", [1, 5])
def test_d10_a_state_of_the_same_keys_and_another_meaning_is_refused_on_every_rank(ranks: int, tmp_path: Path) -> None:
    for errors in run_ranks(other_class, ranks, tmp_path):
        for name, error in zip(("RAdam", "NAdam", "SGD"), errors, strict=True):
            assert f"the checkpoint has the state of Adam, the optimizer is {name}" in error


def grouped(kind: str, *, swapped: bool = False, moved: bool = False) -> Any:
    plain = two_layers()
    options: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "amsgrad": (torch.optim.Adam, {"amsgrad": True}, {}),
        "centered": (torch.optim.RMSprop, {"centered": True}, {}),
        "momentum": (torch.optim.RMSprop, {"momentum": 0.5}, {"centered": True}),
        "sgd": (torch.optim.SGD, {"momentum": 0.5}, {}),
        "maximize": (torch.optim.AdamW, {"weight_decay": 0.25}, {"lr": 0.0625}),
    }
    make, first, second = options[kind]
    weights, biases = [plain[0].weight, plain[1].weight], [plain[0].bias, plain[1].bias]
    if moved:
        weights, biases = [plain[0].weight], [plain[1].weight, *biases]
    groups = [{"params": weights, **first}, {"params": biases, **second}]
    return shardmp.shard(plain, make(groups[::-1] if swapped else groups, lr=0.125), precision=POLICY)


def own_checkpoint(root: Path, kind: str, by: str) -> bool:
    model, optimizer = grouped(kind)
    step(model, optimizer, 2)
    shardmp.save(root, model, optimizer)
    other, fresh = grouped(kind)
    for again in range(2):  # into a new program, and into one that runs
        if by == "resume":
            shardmp.Checkpoints(root, other, fresh).resume()
        else:
            shardmp.load(root, other, fresh)
        assert equal(everything(other, fresh), everything(model, optimizer)), again
        if not again:
            step(other, fresh)
    step(model, optimizer, 2)
    step(other, fresh, 2)
    return equal(everything(other, fresh), everything(model, optimizer))


@pytest.mark.parametrize("kind", ["amsgrad", "centered", "momentum", "sgd"])
def test_d24_options_of_one_group_alone_do_not_keep_a_program_from_its_own_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    for ranks, by in ((1, "load"), (2, "resume"), (3, "load")):
        assert all(run_ranks(own_checkpoint, ranks, tmp_path / str(ranks), kind, by))


def groups_in_another_order(root: Path) -> tuple[list[dict[str, Any]], bool]:
    model, optimizer = grouped("maximize")
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    other, fresh = grouped("maximize", swapped=True)
    for group in fresh.param_groups:
        group["lr"], group["weight_decay"] = 1.0, 0.0
    shardmp.load(root, other, fresh)
    step(model, optimizer)
    step(other, fresh)
    same = equal(masters(fresh), masters(optimizer))
    return [{k: group[k] for k in ("lr", "weight_decay")} for group in fresh.param_groups], same


def test_groups_are_known_by_their_parameters_and_not_by_their_number(tmp_path: Path) -> None:
    for groups, same in run_ranks(groups_in_another_order, 2, tmp_path):
        assert groups == [{"lr": 0.0625, "weight_decay": 0.01}, {"lr": 0.125, "weight_decay": 0.25}]
        assert same


def groups_cut_otherwise(root: Path) -> str:
    model, optimizer = grouped("maximize")
    shardmp.save(root, model, optimizer)
    other, fresh = grouped("maximize", moved=True)
    with pytest.raises(ValueError) as caught:
        shardmp.load(root, other, fresh)
    step(other, fresh)
    return str(caught.value)


def test_as_many_groups_of_other_parameters_are_refused_by_a_parameters_name(tmp_path: Path) -> None:
    for error in run_ranks(groups_cut_otherwise, 2, tmp_path):
        assert (
            "parameter groups differ: 1.weight is in group 1 of the optimizer and in group 0 of the checkpoint" in error
        )


def test_groups_are_matched_by_what_both_have() -> None:
    assert match_groups([["a", "b"], ["c"]], {0: ["c", "x"], 1: ["b", "a"]}) == {0: 1, 1: 0}
    assert match_groups([["a"], []], {0: ["a"], 1: []}) == {0: 0, 1: 1}
    for own, saved in (([["a"], ["b"]], {0: ["a", "b"], 1: []}), ([["a", "b"], []], {0: ["a"], 1: ["b"]})):
        with pytest.raises(ValueError, match="parameter groups differ: b is in group"):
            match_groups(own, saved)


# -- values in place


def values_in_place(root: Path) -> bool:
    model, optimizer = sharded(two_layers(), precision=POLICY)
    ema = {"w": torch.arange(3.0), "inner": {"count": 3, "array": np.arange(4)}, "list": [torch.ones(2), "text"]}
    extra = {"ema": ema, "best": 0.5, "history": [1, 2], "recent": deque([1], 2)}
    per_rank = {"own": {"seen": torch.full((2,), float(dist.get_rank()))}}
    checkpoints = shardmp.Checkpoints(root, model, optimizer, extra=extra, per_rank=per_rank)
    checkpoints.save()
    held = ema["w"], ema["inner"], ema["list"][0], extra["history"], per_rank["own"]["seen"]
    ema["w"].zero_()
    ema["inner"]["count"], ema["inner"]["array"][:] = 7, 0
    ema["list"][0].zero_()
    extra["history"].append(3)
    per_rank["own"]["seen"].fill_(9.0)
    checkpoints.extra["best"] = 1.0
    checkpoints.resume()
    checkpoints.close()
    assert held[0] is ema["w"]
    assert ema["w"].tolist() == [0.0, 1.0, 2.0]
    assert (held[1]["count"], held[1]["array"].tolist()) == (3, [0, 1, 2, 3])
    assert held[2].tolist() == [1.0, 1.0]
    assert held[3] == [1, 2]
    assert held[4].tolist() == [dist.get_rank()] * 2
    return checkpoints.extra["best"] == 0.5 and checkpoints.extra["history"] is held[3]


def test_checkpoints_restores_dicts_of_tensors_where_they_are(tmp_path: Path) -> None:
    assert run_ranks(values_in_place, 2, tmp_path) == [True, True]


def values_that_do_not_fit(root: Path) -> list[str]:
    model, optimizer = sharded(two_layers(), precision=POLICY)
    shardmp.save(root, model, optimizer, extra={"ema": {"w": torch.ones(3)}, "n": 1})
    step(model, optimizer)
    before = everything(model, optimizer)
    found = []
    for wrong in ({"w": torch.ones(4)}, {"w": torch.ones(3).half()}, {"v": torch.ones(3)}, [torch.ones(3)], 5):
        mine = wrong if dist.get_rank() == 1 else {"w": torch.zeros(3)}
        with pytest.raises((ValueError, TypeError)) as caught:
            shardmp.load(root, model, optimizer, extra={"ema": mine})
        found.append(str(caught.value))
        assert equal(everything(model, optimizer), before)
        assert not isinstance(mine, dict) or "w" not in mine or mine["w"].sum() in (0, 3, 4)
    step(model, optimizer)
    with pytest.raises(TypeError, match="has state_dict\\(\\) but no load_state_dict"):
        shardmp.Checkpoints(root, model, optimizer, extra={"half": HalfAnObject()})
    return found


class HalfAnObject:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


def test_values_that_do_not_fit_are_named_on_every_rank_before_anything_is_changed(tmp_path: Path) -> None:
    said = ["shape (4,)", "torch.float16", "no such entry", "expected a list", "cannot be restored in place"]
    for errors in run_ranks(values_that_do_not_fit, 2, tmp_path):
        for error, part in zip(errors, said, strict=True):
            assert part in error


def test_in_place_keeps_what_others_hold() -> None:
    inner = torch.zeros(2)
    target = {"a": [inner, 1], "b": (inner, {"x": 1}), "c": {1, 2}}
    value = {"a": [torch.ones(2), 2], "b": (torch.full((2,), 3.0), {"x": 2}), "c": {3}}
    in_place.check(target, value, "extra")
    assert in_place.restore(target, value) is target
    assert target["a"][0] is inner
    assert inner.tolist() == [3.0, 3.0]
    assert (target["a"][1], target["b"][1], target["c"]) == (2, {"x": 2}, {3})


# -- a load that raises half-way


class Raising:
    def __init__(self, rank: int, kind: type[BaseException]) -> None:
        self.rank, self.kind = rank, kind

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == self.rank:
            raise self.kind("the user's own")


def half_way(root: Path, kind: type[BaseException]) -> tuple[str, str]:
    model, optimizer = sharded(two_layers(), torch.optim.AdamW, 0.1, precision=POLICY)
    step(model, optimizer)
    thing = Raising(1, kind)
    shardmp.save(root, model, optimizer, extra={"thing": thing})
    step(model, optimizer)
    with pytest.raises(BaseException) as caught:
        shardmp.load(root, model, optimizer, extra={"thing": thing})
    for refused_call in (
        lambda: step(model, optimizer),
        lambda: shardmp.save(root, model, optimizer),
        lambda: shardmp.load(root, model),  # weights alone would leave moments mixed
    ):
        with pytest.raises(RuntimeError, match="failed before"):
            refused_call()
    if kind is ArithmeticError:
        with pytest.raises(FileNotFoundError):
            shardmp.load(root / "nowhere", model, optimizer)
        with pytest.raises(RuntimeError, match="failed half-way"):
            step(model, optimizer)  # it still is
        shardmp.load(root, model, optimizer)
        step(model, optimizer)
    return type(caught.value).__name__, str(caught.value)


def test_a_users_object_that_raises_on_one_rank_is_an_error_on_all_and_another_load_makes_it_whole(
    tmp_path: Path,
) -> None:
    told = run_ranks(half_way, 2, tmp_path, ArithmeticError)
    assert told[1] == ("ArithmeticError", "the user's own")
    assert told[0] == ("RuntimeError", "rank 1: the user's own")


def test_ctrl_c_in_a_load_is_raised_as_itself_and_the_others_are_told(tmp_path: Path) -> None:
    told = run_ranks(half_way, 2, tmp_path, KeyboardInterrupt, fresh=True)
    assert told[1] == ("KeyboardInterrupt", "the user's own")
    assert told[0][0] == "RuntimeError"
    assert "raised KeyboardInterrupt: the user's own" in told[0][1]
    assert "rank 1 " in told[0][1]


# -- D29 and directories


def empty_names() -> list[str]:
    model, optimizer = sharded(two_layers(), precision=POLICY)
    found = []
    for call in (
        lambda: shardmp.save("", model, optimizer),
        lambda: shardmp.load("", model, optimizer),
        lambda: shardmp.Checkpoints("", model, optimizer),
        lambda: shardmp.export("", "weights.safetensors"),
        lambda: shardmp.export("somewhere", ""),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))
    with pytest.raises(TypeError, match="expected a path, got None"):
        shardmp.save(None, model, optimizer)  # type: ignore[arg-type]
    step(model, optimizer)
    return found


def test_d29_an_empty_name_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for errors in run_ranks(empty_names, 2):
        assert all("the name is empty" in error for error in errors)
    assert not list(tmp_path.iterdir())


def leftovers(root: Path, elsewhere: Path) -> list[str]:
    model, optimizer = sharded(two_layers(), precision=POLICY)
    monkeypatch = pytest.MonkeyPatch()
    real = os.rmdir

    def rmdir(path: Any, **options: Any) -> None:  # as another user's directory in one with a sticky bit
        if "theirs" in str(path):
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, optimizer)
            shardmp.save(root, model, optimizer, keep=1)
    monkeypatch.undo()
    assert elsewhere.exists()
    return [str(warning.message) for warning in caught if "left over" in str(warning.message)]


def test_a_leftover_that_cannot_be_removed_is_warned_of_and_disturbs_nobody(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (root / ".writing-theirs-step-000000001.1").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    (root / ".writing-link").symlink_to(elsewhere)
    (root / ".removing-broken").symlink_to(tmp_path / "nothing")
    warned = run_ranks(leftovers, 2, root, elsewhere)
    assert any("theirs" in text for text in warned[0])
    assert (elsewhere / "file").read_text() == "precious"
    assert sorted(p.name for p in root.iterdir()) == [
        ".writing-theirs-step-000000001.1", "latest", "step-000000002.2"
    ]  # fmt: skip


def saved_steps(root: Path, count: int = 2) -> dict[int, Any]:
    model, optimizer = sharded(two_layers(), torch.optim.AdamW, 0.1, precision=POLICY)
    found = {}
    for number in range(1, count + 1):
        step(model, optimizer)
        shardmp.save(root, model, optimizer)
        found[number] = masters(optimizer)
    return found


def resumed(root: Path) -> tuple[int, Any, list[str]]:
    model, optimizer = sharded(two_layers(), torch.optim.AdamW, 0.1, precision=POLICY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardmp.Checkpoints(root, model, optimizer).resume()
    return optimizer.steps, masters(optimizer), [str(warning.message) for warning in caught]


def unreadable(root: Path) -> tuple[int, Any, list[str]]:
    """Reading rank 1's file of step 2 fails as a broken disk does."""
    from shardmp.storage import Reader

    real = Reader._opened

    def opened(self: Reader, name: str) -> Any:
        if "step-000000002" in str(self.path) and name.startswith("__1"):
            raise OSError(5, "Input/output error", str(self.path / name))
        return real(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "_opened", opened)
        broken_contents = Manifest.check_contents

        def contents(self: Any, path: Path, names: Any) -> None:
            if "step-000000002" in str(path):
                raise OSError(5, "Input/output error", str(path))
            broken_contents(self, path, names)

        patch.setattr(Manifest, "check_contents", contents)
        return resumed(root)


def test_resume_falls_back_where_the_latest_cannot_be_read(tmp_path: Path) -> None:
    expected = run_ranks(saved_steps, 2, tmp_path)[0]
    told = run_ranks(unreadable, 2, tmp_path)
    for number, found, _ in told:
        assert number == 1
        assert equal(found, expected[1])
    assert any("cannot be read" in text and "Input/output error" in text for text in told[0][2])


def test_resume_warns_where_latest_names_what_is_gone(tmp_path: Path) -> None:
    expected = run_ranks(saved_steps, 2, tmp_path)[0]
    (tmp_path / "latest").write_text("step-000000009.9\n")
    told = run_ranks(resumed, 2, tmp_path)
    for number, found, _ in told:
        assert number == 2
        assert equal(found, expected[2])
    assert any("'step-000000009.9'" in text and "taking step-000000002.2" in text for text in told[0][2])


def full_disk_at(root: Path, call: str) -> tuple[str, str, list[str]]:
    model, optimizer = sharded(two_layers(), torch.optim.AdamW, 0.1, precision=POLICY)
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    step(model, optimizer)
    real = getattr(os, call)

    def full(*args: Any, **options: Any) -> Any:
        names = [str(arg) if not isinstance(arg, int) else os.readlink(f"/proc/self/fd/{arg}") for arg in args]
        if any("latest" in name for name in names):
            raise OSError(28, "No space left on device")
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError) as caught:
            shardmp.save(root, model, optimizer)
    latest = directory.find(root, None).name
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith(".writing-"))
    dist.barrier()
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    return str(caught.value), latest, names


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_when_latest_is_written_leaves_the_older_one(call: str, tmp_path: Path) -> None:
    for error, latest, names in run_ranks(full_disk_at, 2, tmp_path, call):
        assert "No space left" in error
        assert latest == "step-000000001.1"
        assert names == ["latest", "step-000000001.1"]
    assert directory.find(tmp_path, None).name == "step-000000003.2"


def load_step(root: Path, number: int) -> str:
    model, optimizer = sharded(two_layers(), torch.optim.AdamW, 0.1, precision=POLICY)
    before = masters(optimizer)
    with pytest.raises(CheckpointError) as caught:
        shardmp.load(root, model, optimizer, step=number)
    assert equal(masters(optimizer), before)
    return str(caught.value)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    expected = run_ranks(saved_steps, 2, tmp_path, 3)[0]
    first, third = tmp_path / "step-000000001.1", tmp_path / "step-000000003.3"
    first.rename(tmp_path / "other")
    third.rename(tmp_path / "step-000000001.3")
    (tmp_path / "other").rename(tmp_path / "step-000000003.1")
    (tmp_path / "latest").write_text("step-000000003.1\n")
    for error in run_ranks(load_step, 2, tmp_path, 3):
        assert "holds a checkpoint of step 1: the directory was renamed" in error
    with pytest.raises(CheckpointError, match="holds a checkpoint of step 1"):
        shardmp.export(tmp_path, tmp_path / "weights.safetensors", step=3)
    for number, found, _ in run_ranks(resumed, 2, tmp_path):
        assert number == 2
        assert equal(found, expected[2])


def test_the_header_says_which_class_and_which_extra_state(tmp_path: Path) -> None:
    run_ranks(saved_steps, 1, tmp_path, 1)
    header = Contents(tmp_path).header
    assert (header["optimizer"], header["modules"]) == ("AdamW", {})
    assert json.loads(header["extra"]) == {}
