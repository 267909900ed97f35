"""Skipped steps are told (D17, D32): each once, on rank 0, at most one step late, with the cure at first."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from case_tools import STAGES, Weights, fp16, one_step
from ranks import on_ranks
from torch.optim import SGD

import shardmp
from shardmp import skip_log

INF, NAN = float("inf"), float("nan")


@contextlib.contextmanager
def lines_of(name: str = "shardmp") -> Iterator[list[str]]:
    """What is logged inside, as "LEVEL text"."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")

    handler = Keep()
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def sharded(precision: shardmp.Precision | str, stage: int = 2):
    model = Weights(w=4)
    return shardmp.shard(model, SGD(model.parameters(), lr=0.5), precision=precision, stage=stage)


def bad(rank: int, on: int, value: float) -> torch.Tensor:
    return torch.tensor([1.0, 1.0, 1.0, value if rank == on else 1.0])


@STAGES
@pytest.mark.parametrize("param", ["bf16", "fp32"])
@pytest.mark.parametrize(("value", "kind"), [(INF, "inf"), (NAN, "nan")])
@on_ranks(2, 3)
def test_d17_a_skip_without_a_loss_scale_is_told_without_one(
    rank: int, param: str, stage: int, value: float, kind: str
) -> None:
    """deepspeedai/DeepSpeed#8415: nothing was said until 50 skips in a row."""
    model, optimizer = sharded(param, stage)
    with lines_of() as said:
        one_step(model, optimizer, w=torch.ones(4))
        weight = dict(model.named_parameters())["w"]
        # The loss itself is finite.
        hook = weight.register_hook(lambda gradient: gradient + (bad(rank, 1, value) - 1).to(gradient.dtype))
        one_step(model, optimizer, w=torch.ones(4))
        hook.remove()
        assert said == []
        one_step(model, optimizer, w=torch.ones(4))
        one_step(model, optimizer, w=torch.ones(4))
    if rank:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"WARNING step 2 was skipped on all ranks: {kind} in the gradient of w on rank 1. ")
        assert "scale" not in line


@STAGES
@on_ranks(1, 2)
def test_d32_the_first_skip_is_told_with_its_cure(rank: int, world_size: int, stage: int) -> None:
    """pytorch/examples vae: 10 of 32 steps skipped from the default scale, and nothing said."""
    last = world_size - 1
    model, optimizer = sharded("fp16", stage)
    with lines_of() as said:
        for value in (128.0, 1.0, 1.0):
            one_step(model, optimizer, w=bad(rank, last, value / 32) * 0.25)
        optimizer.synchronize()
    if rank == 0:
        assert said[0] == (
            f"WARNING step 1 was skipped on all ranks: inf in the gradient of w on rank {last}; loss scale 65536 -> 32768. "
            "The default "
            "initial scale 65536 is lowered until gradients fit: normal in the first steps; "
            'Precision("fp16", init_scale=...) starts lower'
        )
    assert len(said) == (rank == 0)


@on_ranks(2)
def test_each_skip_is_one_line_and_the_advice_is_not_repeated(rank: int) -> None:
    model, optimizer = sharded(fp16(2.0**20, min_scale=2.0**-4))
    with lines_of() as said:
        for _ in range(9):
            one_step(model, optimizer, w=bad(rank, 1, 2.0**8))
        assert len(said) == (8 if rank == 0 else 0)  # one step late
        optimizer.synchronize()
        optimizer.synchronize()
        one_step(model, optimizer, w=torch.ones(4))
    if rank == 0:
        steps, scales = range(1, 10), [2**20 >> step for step in range(10)]
        assert len(said) == 9
        for step, line in zip(steps, said, strict=True):
            assert line.startswith(f"WARNING step {step} was skipped on all ranks: inf in the gradient of w")
            assert f"loss scale {scales[step - 1]:g} -> {scales[step]:g}" in line
        assert [step for step, line in zip(steps, said, strict=True) if "init_scale" in line] == [1, 4]
        assert "The initial scale 1.04858e+06" in said[0]


@on_ranks(2)
def test_what_cannot_be_cured_by_a_scale_is_told_so(rank: int) -> None:
    with lines_of() as said:
        model, optimizer = sharded("fp16")
        one_step(model, optimizer, w=bad(rank, 1, NAN))
        optimizer.synchronize()
        model, static = sharded(shardmp.Precision(static_scale=2.0**16))
        one_step(model, static, w=bad(rank, 1, 4.0))
        static.synchronize()
        model, smallest = sharded(fp16(4096.0, min_scale=4096.0))
        one_step(model, smallest, w=bad(rank, 1, 64.0))
        smallest.synchronize()
    if rank == 0:
        loss, fixed, lowest = said
        assert "with a loss that was itself not finite" in loss
        assert "comes from the data or the forward: no loss scale cures it" in loss
        assert "loss scale 65536, unchanged. The static loss scale 65536 is too large" in fixed
        assert "loss scale 4096, unchanged. The loss scale is at its smallest, 4096" in lowest
        assert "init_scale" not in "".join(said)


@on_ranks(2)
def test_a_late_skip_is_normal_alone_and_a_sign_in_a_row(rank: int) -> None:
    skip_log._EARLY, before = 2, skip_log._EARLY
    try:
        model, optimizer = sharded(fp16(2.0, growth_interval=1))
        with lines_of() as said:
            for step in range(40):
                one_step(model, optimizer, w=bad(rank, 1, 1.0 if step < 20 else 2.0**15))
            optimizer.synchronize()
    finally:
        skip_log._EARLY = before
    if rank == 0:
        advice = [line for line in said if ". " in line]
        assert "Now and then this is normal: after 1 steps without overflow" in advice[0]
        assert "steps in a row: gradients grow" in advice[2]
        assert "(again: rank 1's data and parameter w)" in advice[2]


@on_ranks(1, 2)
def test_a_save_tells_the_step_before(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded("bf16")
    with lines_of() as said:
        one_step(model, optimizer, w=bad(rank, 0, INF))
        shardmp.save(tmp_path / "checkpoint", model, optimizer)
    assert len(said) == (rank == 0)


@on_ranks(1)
def test_what_has_not_arrived_is_not_waited_for_at_the_end(rank: int) -> None:
    class Away:
        def numbers(self) -> list[float]:
            raise AssertionError("waited")

        @property
        def is_here(self) -> bool:
            raise RuntimeError("the device is gone")

    model, optimizer = sharded("bf16")
    report = one_step(model, optimizer, w=torch.full((4,), INF))
    with lines_of() as said:
        report._numbers = Away()
        optimizer._skip_log.at_end()
    assert said == []


SCRIPT = """
import torch, shardmp
model = torch.nn.Linear(4, 4)
model, optimizer = shardmp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
optimizer.backward(model(torch.full((1, 4), float("inf"))).sum())
optimizer.step()
print("done")
"""


@pytest.mark.parametrize("setup", ["", "import logging; logging.basicConfig()\n"])
def test_the_end_of_a_program_tells_its_last_step_once(setup: str, tmp_path: Path) -> None:
    """With Python's own last resort, and with a program's logging."""
    done = subprocess.run(
        [sys.executable, "-c", setup + SCRIPT], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "done\n"
    said = [line for line in done.stderr.splitlines() if "skipped" in line]
    assert len(said) == 1, done.stderr
    assert said[0].removeprefix("WARNING:shardmp:").startswith("step 1 was skipped on all ranks: ")
