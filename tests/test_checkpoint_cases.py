"""The cases about checkpoints that users of other libraries have met, and what Checkpoints does in a script."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import Calls, Weights, equal, masters, sharded
from ranks import run_ranks
from test_checkpoint import build, train, whole
from test_train_gpt import EXAMPLES, TINY, environment, lines_of
from torch import Tensor, nn

import shardmp
from shardmp import Precision, directory
from shardmp.new_file import NewFile
from shardmp.scaler import LossScaler

SMALL = Precision(init_scale=8.0)  # nothing overflows
pytestmark = pytest.mark.filterwarnings("ignore:.*random")


# -- C05


def scale_and_counters(root: Path, load: bool) -> Any:
    policy = Precision(init_scale=1.0 if load else 8.0, growth_interval=4, hysteresis=2)
    model, optimizer = sharded(Weights(), lr=0.0, precision=policy)
    if not load:
        for _ in range(3):
            optimizer.backward(model(torch.ones(4)))
            optimizer.step()
        shardmp.save(root, model, optimizer)
        return None
    shardmp.load(root, model, optimizer)
    after_load = optimizer.counters()
    optimizer.backward(model(torch.ones(4)))
    optimizer.step()
    return after_load, optimizer.loss_scale


def test_c05_scale_and_growth_counter_go_on(tmp_path: Path) -> None:
    run_ranks(scale_and_counters, 2, tmp_path, False)
    for counters, scale in run_ranks(scale_and_counters, 2, tmp_path, True):
        assert counters["steps"] == 3
        scaler = counters["scaler"]
        assert (scaler["scale"], scaler["growth"], scaler["hysteresis"]) == (8.0, 3, 2)
        assert scale == 16.0


def test_a_verdict_that_a_shared_scale_still_waits_for_is_saved() -> None:
    policy = Precision(init_scale=8.0, hysteresis=1)
    scaler, other = (LossScaler(policy, torch.device("cpu")) for _ in range(2))
    for one in (scaler, other):
        one.users += [lambda: None, lambda: None]
    scaler.update(torch.tensor(1.0), torch.tensor(False))
    other.load(json.loads(json.dumps(scaler.state())))
    assert other.scale.item() == 8.0
    for one in (scaler, other):
        one.settle()
        assert (one.scale.item(), one.hysteresis.item()) == (4.0, 0)
    fixed = LossScaler(Precision(static_scale=2.0), torch.device("cpu"))
    fixed.load(scaler.state())
    assert fixed.scale.item() == 2.0  # a fixed scale is the run's own


# -- every step of a run with overflows


def run_saved_at_every_step(root: Path, num_steps: int, overflow_at: tuple[int, ...]) -> Any:
    model, optimizer = build()
    shardmp.save(root, model, optimizer)
    for step in range(num_steps):
        train(model, optimizer, range(step, step + 1), overflow_at=overflow_at)
        shardmp.save(root, model, optimizer)
    return whole(model, optimizer)


def resumed_at(root: Path, steps: list[int], num_steps: int, overflow_at: tuple[int, ...]) -> list[Any]:
    found = []
    for step in steps:
        model, optimizer = build()
        shardmp.load(root, model, optimizer, step=step)
        train(model, optimizer, range(step, num_steps), overflow_at=overflow_at)
        found.append(whole(model, optimizer))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_resumed_from_any_step_of_a_run_with_overflows_the_end_is_the_same(ranks: int, tmp_path: Path) -> None:
    overflow_at = (1, 2, 5)
    expected = run_ranks(run_saved_at_every_step, 2, tmp_path, 7, overflow_at)[0]
    assert expected["counters"]["skipped"] == 3
    for found in run_ranks(resumed_at, ranks, tmp_path, list(range(8)), 7, overflow_at)[0]:
        assert equal(found, expected)


# -- the end of C18


class Odd(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])

    def forward(self, scale: float) -> Tensor:
        return sum((p.float() * scale).sum() for p in self.params)


def odd_sizes(root: Path, shapes: list[tuple[int, ...]]) -> None:
    options = {"optimizer": torch.optim.SGD, "lr": 2.0**-4, "momentum": 0.5, "precision": SMALL}
    model, optimizer = sharded(Odd(*shapes), **options)
    for scale in (1.0, 1.0):
        optimizer.backward(model(scale))
        optimizer.step()
    shardmp.save(root, model, optimizer)
    other, fresh = sharded(Odd(*shapes), **options)
    shardmp.load(root, other, fresh)
    for one, two in ((model, optimizer), (other, fresh)):
        two.backward(one(-1.0))
        two.step()
    assert equal(masters(optimizer), masters(fresh))
    assert {tuple(value.shape) for value in masters(fresh).values()} == set(shapes)
    # 1 - (1 + 1.5 - 0.25) / 16: the momentum came along
    assert all(bool((value == 0.859375).all()) for value in masters(fresh).values())


@pytest.mark.parametrize("shapes", [[(5,), (2, 3), (7,), (1,)], [(5,)], [(), (0, 4), (3,)]], ids=str)
def test_c18_odd_sizes_and_ranks_with_padding_alone_survive(shapes: list, tmp_path: Path) -> None:
    run_ranks(odd_sizes, 4, tmp_path, shapes)


# -- C36


def adam_run(root: Path, load: bool) -> Any:
    model, optimizer = sharded(Weights(torch.ones(5)), torch.optim.Adam, 2.0**-6, precision=SMALL)
    if not load:
        for _ in range(2):
            optimizer.backward(model(torch.ones(5)))
            optimizer.step()
        shardmp.save(root, model, optimizer)
        return None
    shardmp.load(root, model, optimizer)
    before = optimizer.master("w").clone()
    optimizer.backward(model(-torch.ones(5)))
    optimizer.step()
    counts = {rest["step"].item() for _, _, rest in optimizer._update.piece_states()}
    return before, optimizer.master("w"), counts


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_c36_moments_come_along_to_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    run_ranks(adam_run, 2, tmp_path, False)
    told = run_ranks(adam_run, ranks, tmp_path, True)
    for before, after, _ in told:
        assert torch.allclose(before, torch.full((5,), 0.96875), rtol=0, atol=1e-6)
        assert torch.allclose(after, torch.full((5,), 0.9646564), rtol=0, atol=1e-6)
    assert set.union(*(counts for _, _, counts in told)) == {3.0}


# -- C37: ranks agree on what to load


def load_from_own(roots: list[Path]) -> Any:
    model, optimizer = sharded(Weights(torch.ones(5)), torch.optim.Adam, 2.0**-6, precision=SMALL)
    return shardmp.load(roots[dist.get_rank()], model, optimizer).path


def test_c37_rank_0_says_which_checkpoint_where_rank_1_sees_a_newer_one(tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    for root, times in zip(roots, (1, 2), strict=True):
        for _ in range(times):
            run_ranks(adam_run, 2, root, False)
    assert run_ranks(load_from_own, 2, roots) == [roots[0] / "step-000000002.1"] * 2


# -- C41


def random_numbers(root: Path, load: bool) -> Any:
    rank = dist.get_rank()
    model, optimizer = sharded(Weights())
    if load:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = shardmp.load(root, model, optimizer)
        drawn = torch.rand(3), random.random(), float(np.random.rand())
        return drawn, loaded.per_rank, [str(warning.message) for warning in caught]
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    torch.rand(rank + 1)
    shardmp.save(root, model, optimizer, per_rank={"position": 10 * rank, "tensor": torch.full((2,), rank)})
    return torch.rand(3), random.random(), float(np.random.rand())


def test_c41_each_rank_has_its_own_random_state_back(tmp_path: Path) -> None:
    expected = run_ranks(random_numbers, 2, tmp_path, False)
    assert not equal(expected[0], expected[1])
    for rank, (drawn, per_rank, _) in enumerate(run_ranks(random_numbers, 2, tmp_path, True)):
        assert equal(drawn, expected[rank])
        assert equal(per_rank, {"position": 10 * rank, "tensor": torch.full((2,), rank)})
    told = run_ranks(random_numbers, 3, tmp_path, True)
    assert "saved by 2 ranks and is loaded by 3" in " ".join(told[0][2])
    assert all(per_rank is None for _, per_rank, _ in told)


# -- C42


class Named(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for index, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(torch.full((3, 2), float(index + 1))))

    def forward(self) -> Tensor:
        return sum(p.float().sum() for p in self.parameters())


def save_named(root: Path) -> None:
    model, optimizer = sharded(Named("AB"), torch.optim.AdamW, 0.5)
    optimizer.backward(model())
    optimizer.step()
    shardmp.save(root, model, optimizer)


def load_named(root: Path) -> None:
    model, optimizer = sharded(Named("xABn"), torch.optim.SGD, 0.5)
    before = masters(optimizer)
    with pytest.raises(ValueError, match=r"missing in the checkpoint: n, x; unexpected in it: none"):
        shardmp.load(root, model)
    assert equal(masters(optimizer), before)
    loaded = shardmp.load(root, model, strict=False)
    assert (loaded.missing, loaded.unexpected) == (["n", "x"], [])
    after = masters(optimizer)
    assert equal({key: after[key] for key in "xn"}, {key: before[key] for key in "xn"})
    assert not torch.equal(after["A"], before["A"])
    # The masters were renewed: a step without learning brings the loaded weights, not the old ones.
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.backward(model())
    optimizer.step()
    assert torch.equal(model.state_dict()["A"].float(), after["A"].half().float())
    assert torch.equal(optimizer.master("A"), after["A"])


class Prefixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = Named("AB")

    def forward(self) -> Tensor:
        return self.other()


def load_prefixed(root: Path) -> None:
    model, optimizer = sharded(Prefixed(), torch.optim.AdamW, 0.5)
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"no key of the model is in the checkpoint; the model has other.A, other.B"
        ):
            shardmp.load(root, model, optimizer, strict=strict)


def load_wrong(root: Path) -> None:
    model, optimizer = sharded(Named("AB"), torch.optim.SGD, 0.5, momentum=0.9)
    with pytest.raises(ValueError, match=r"(momentum_buffer|AdamW)"):
        shardmp.load(root, model, optimizer)
    other = Named("AB")
    other.A = nn.Parameter(torch.zeros(2, 3))
    model, optimizer = sharded(other, torch.optim.AdamW, 0.5)
    with pytest.raises(ValueError, match=r"model.A: expected shape \(2, 3\), the checkpoint has \(3, 2\)"):
        shardmp.load(root, model, optimizer, strict=False)
    groups = Named("AB")
    made = torch.optim.AdamW([{"params": [groups.A]}, {"params": [groups.B]}])
    with pytest.raises(ValueError, match="2 parameter groups, the checkpoint 1"):
        shardmp.load(root, *shardmp.shard(groups, made))


def test_c42_keys_are_reported_and_nothing_matched_is_an_error(tmp_path: Path) -> None:
    run_ranks(save_named, 2, tmp_path)
    run_ranks(load_named, 2, tmp_path)
    run_ranks(load_prefixed, 2, tmp_path)
    run_ranks(load_wrong, 2, tmp_path)


# -- C50 (c)


def save_alone(root: Path) -> Any:
    model, optimizer = sharded(Weights())
    if dist.get_rank() == 1:
        time.sleep(9)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        shardmp.save(root, model, optimizer)
    with pytest.raises(RuntimeError, match="failed before"):
        shardmp.save(root, model, optimizer)
    return str(caught.value), time.monotonic() - start


def test_c50_a_rank_that_saves_alone_gets_an_error_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    message, seconds = run_ranks(save_alone, 2, tmp_path, fresh=True, group_timeout=3.0)[0]
    assert "shardmp.save() of step 0" in message
    assert "rank 1" in message
    assert seconds < 8
    assert not directory.complete(tmp_path)


# -- when saving is refused, and what is in `extra`


class Counting:
    """An object with a state, as a data loader is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": {(1, 2): {3}}, "table": np.arange(3), "half": torch.ones(2).half()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == {(1, 2): {3}}
        assert state["table"].tolist() == [0, 1, 2]
        assert equal(state["half"], torch.ones(2).half())
        self.count = state["count"]


def extras(root: Path) -> None:
    model, optimizer = sharded(Weights(), torch.optim.AdamW, 0.5, precision=SMALL)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    cosine = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    for _ in range(2):
        optimizer.backward(model(torch.ones(4)))
        optimizer.step()
        scheduler.step()
        cosine.step()
    extra = {"scheduler": scheduler, "cosine": cosine, "data": Counting(7), "best": 0.1 + 0.2, "worst": float("inf")}
    shardmp.save(root, model, optimizer, extra=extra)
    with pytest.raises(ValueError, match=r"'best' differs between rank 0 and rank 1; .*per_rank"):
        shardmp.save(root, model, optimizer, extra={"best": dist.get_rank()})
    with pytest.raises(TypeError, match=r"extra\['f'\]\[0\]: a function cannot be stored"):
        shardmp.save(root, model, optimizer, extra={"f": [extras]})
    optimizer.backward(model(torch.ones(4)))
    for refused in (lambda: shardmp.save(root, model, optimizer), lambda: shardmp.load(root, model, optimizer)):
        with pytest.raises(RuntimeError, match="between backward and step"):
            refused()
    optimizer.zero_grad()

    other, fresh = sharded(Weights(), torch.optim.AdamW, 0.5, precision=SMALL)
    later = torch.optim.lr_scheduler.MultiStepLR(fresh, [1, 3])
    later_cosine = torch.optim.lr_scheduler.OneCycleLR(fresh, 0.1, total_steps=9)
    data = Counting(0)
    objects = {"scheduler": later, "cosine": later_cosine, "data": data}
    loaded = shardmp.load(root, other, fresh, extra=objects)
    assert equal({**later.state_dict()}, {**scheduler.state_dict()})
    assert later_cosine.state_dict() == cosine.state_dict()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert data.count == 7
    assert (loaded.extra["best"], loaded.extra["worst"]) == (0.1 + 0.2, float("inf"))
    with pytest.raises(ValueError, match="the checkpoint has no 'nothing'"):
        shardmp.load(root, other, fresh, extra={"nothing": data})


def test_schedulers_and_any_object_with_state_come_back(tmp_path: Path) -> None:
    run_ranks(extras, 2, tmp_path)
    assert [path.name for path in directory.complete(tmp_path)] == ["step-000000002.1"]


def buffers_and_frozen(root: Path) -> None:
    def make(value: float) -> Any:
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        plain[0].requires_grad_(False).half()
        with torch.no_grad():
            plain[0].weight.fill_(value)
        return sharded(plain, torch.optim.AdamW, 0.1, precision="fp16")

    model, optimizer = make(0.5)
    optimizer.backward(model(torch.full((3, 4), float(dist.get_rank()))).sum())
    optimizer.step()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    shardmp.save(root, model, optimizer)
    model, optimizer = make(0.25)
    shardmp.load(root, model, optimizer)
    assert equal(dict(model.state_dict()), expected)


def test_buffers_and_frozen_parameters_come_back_with_their_dtypes(tmp_path: Path) -> None:
    run_ranks(buffers_and_frozen, 3, tmp_path)


def diverged(root: Path) -> None:
    model, optimizer = build()
    name = optimizer._names[0]
    for piece in optimizer._layout.pieces(dist.get_rank()):
        if piece.param == 0:
            part = optimizer._parameters.buckets[piece.bucket]
            part.master[piece.offset] = 70000.0
            part.round()
    with pytest.raises(OverflowError, match=rf"{name} are beyond 65504"):
        shardmp.save(root, model, optimizer)
    for options in ({"every": 0}, {"keep": True}, {"keep": 2.0}):
        with pytest.raises(ValueError, match=rf"Checkpoints\({next(iter(options))}=...\): expected a whole number"):
            shardmp.Checkpoints(root, model, optimizer, **options)


def test_a_run_that_has_diverged_is_not_saved(tmp_path: Path) -> None:
    run_ranks(diverged, 2, tmp_path)
    assert not directory.complete(tmp_path)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(1 << 16)) for _ in range(24)])


def largest_tensors(root: Path) -> Any:
    model, optimizer = sharded(Deep(), torch.optim.AdamW, 0.1, bucket_mb=0.5)
    with Calls() as saving:
        shardmp.save(root, model, optimizer)
    with Calls() as loading:
        shardmp.load(root, model, optimizer)
    return saving.largest, loading.largest


def test_no_tensor_of_the_models_size_is_made_in_a_save_or_a_load(tmp_path: Path) -> None:
    """Of 6 MB of masters; a load at another number of ranks needs room for one piece."""
    for saving, loading in run_ranks(largest_tensors, 2, tmp_path):
        assert max(saving, loading) <= 4 << 16


# -- in the background


def save_and_change(root: Path) -> Any:
    model, optimizer = build()
    train(model, optimizer, range(2))
    expected = whole(model, optimizer)
    saving = shardmp.save(root, model, optimizer, background=True)
    for part in optimizer._parameters.buckets:
        part.master.fill_(7.0)
    for _, flat, rest in optimizer._update.piece_states():
        for value in (*flat.values(), *rest.values()):
            value.fill_(7.0)
    train(model, optimizer, range(2, 3))  # its collectives run beside those of the save
    path = saving.wait()
    assert path == directory.find(root, None)
    shardmp.load(root, model, optimizer)
    return equal(whole(model, optimizer), expected)


def test_a_save_in_the_background_writes_the_values_at_the_call(tmp_path: Path) -> None:
    assert run_ranks(save_and_change, 2, tmp_path) == [True, True]


def priorities(root: Path) -> tuple[int, int]:
    model, optimizer = build()
    seen = []
    real = NewFile.write

    def noting(self: NewFile, part: Any) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(self, part)

    with unittest.mock.patch.object(NewFile, "write", noting):
        shardmp.save(root, model, optimizer, background=True).wait()
    return min(seen), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_what_is_written_in_the_background_gives_way_to_the_training(tmp_path: Path) -> None:
    for writing, training in run_ranks(priorities, 1, tmp_path):
        assert writing >= 10 > training


def failing_in_the_background(root: Path) -> str:
    model, optimizer = build()
    shardmp.save(root, model, optimizer, background=True).wait()
    full = unittest.mock.patch.object(NewFile, "_flush", side_effect=OSError(28, "No space left on device"))
    with warnings.catch_warnings(), full if dist.get_rank() == 1 else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        saving = shardmp.save(root, model, optimizer, background=True)
        train(model, optimizer, range(1))
        while not saving.done:
            time.sleep(0.01)
        with pytest.raises(OSError) as caught:
            shardmp.save(root, model, optimizer)
    shardmp.save(root, model, optimizer)
    return str(caught.value)


def test_an_error_in_the_background_reaches_the_next_call_on_every_rank(tmp_path: Path) -> None:
    for error in run_ranks(failing_in_the_background, 2, tmp_path):
        assert "No space left" in error
        assert "rank 1" in error
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-000000000.1", "step-000000001.2"]


# -- C52


def until_stopped(root: Path, rank_to_stop: int | None, step_to_stop: int) -> Any:
    model, optimizer = sharded(Weights(), lr=0.0625, precision=SMALL)
    checkpoints = shardmp.Checkpoints(root, model, optimizer, every=4)
    checkpoints.resume()
    first = checkpoints.step
    while checkpoints.step < 10:
        if checkpoints.step + 1 == step_to_stop and dist.get_rank() == rank_to_stop:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.backward(model(torch.ones(4)))
        optimizer.step()
        optimizer.zero_grad()
        try:
            checkpoints.after_step()
        except SystemExit as leaving:
            return first, checkpoints.step, leaving.code, optimizer.master("w")
    checkpoints.close()
    return first, checkpoints.step, 0, optimizer.master("w")


@pytest.mark.parametrize("others", [1, 2, 3])
def test_c52_sigterm_on_one_rank_stops_all_after_the_same_step(others: int, tmp_path: Path) -> None:
    for first, step, code, _ in run_ranks(until_stopped, 2, tmp_path, 1, 3):
        assert (first, step, code) == (0, 3, 143)
    assert [path.name for path in directory.complete(tmp_path)] == ["step-000000003.1"]
    for first, step, code, weights in run_ranks(until_stopped, others, tmp_path, None, 0):
        assert (first, step, code) == (3, 10, 0)
        assert torch.equal(weights, torch.full((4,), 0.375))
    assert [path.name for path in directory.complete(tmp_path)] == [
        "step-000000008.3", "step-000000004.2", "step-000000003.1"
    ]  # fmt: skip


def resume_with_damage(root: Path) -> int:
    model, optimizer = sharded(Weights(), lr=0.0625, precision=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shardmp.Checkpoints(root, model, optimizer).resume()
    return optimizer.steps


def test_resuming_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    run_ranks(until_stopped, 2, tmp_path, None, 0)
    newest = directory.complete(tmp_path)[0] / "__0_0.distcp"
    content = bytearray(newest.read_bytes())
    content[len(content) // 3] ^= 1
    newest.write_bytes(content)
    assert run_ranks(resume_with_damage, 2, tmp_path) == [4, 4]


def test_the_example_saves_on_sigterm_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """torchrun sends SIGTERM on; all ranks save the same step and leave with 143, and one rank goes on from there."""
    script, metrics = str(EXAMPLES / "train_gpt.py"), tmp_path / "metrics.jsonl"
    options = [*TINY, "--steps", "100000", "--eval-every", "100000", "--metrics", str(metrics), "--sample-bytes", "0"]
    options += ["--checkpoints", str(tmp_path / "run"), "--resume", "auto"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *options]
    with subprocess.Popen(
        launch, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not (metrics.exists() and len(lines_of(metrics)) > 4):
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=30)
        finally:
            job.kill()
    assert job.returncode != 0, output
    assert "stopped by SIGTERM after step" in output
    saved = directory.step_of(directory.complete(tmp_path / "run")[0])
    assert saved == lines_of(metrics)[-1]["step"]
    options[options.index("--steps") + 1] = str(saved + 2)
    done = subprocess.run(
        [sys.executable, script, *options], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {saved} " in done.stdout
    steps = [line["step"] for line in lines_of(metrics) if line["kind"] == "step"]
    assert steps == list(range(1, saved + 3))
