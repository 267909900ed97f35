"""The loops of docs/interop.md for Accelerate and Fabric, run for real, and what of theirs is refused."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import loop_data
import pytest
import reference
import torch
from ranks import on_ranks, run_ranks
from test_step import expect
from torch import nn

import shardmp

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "interop.md"
POLICY = shardmp.Precision(init_scale=256.0)
CLIP = 0.5  # the loops' max_grad_norm


def start(script: str, folder: Path) -> str:
    """The script on two ranks of torchrun; what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(HERE / script), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def expected(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The reference's masters on the batches that the ranks saw, the learning rate halved after each step."""

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> reference.Loss:
        return lambda model: loop_data.loss_of(model, inputs, targets)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = loop_data.make_optimizer(model)

        def halve(*_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

        optimizer.register_step_post_hook(halve)
        return optimizer

    steps = [[[loss(*batch) for batch in batches]] for batches in zip(*(rank["seen"] for rank in ranks), strict=True)]
    run = expect(loop_data.make_model, make_optimizer, steps, fused=True, max_grad_norm=CLIP)
    applied = [step for step in run.trace if not step.skipped]
    assert len(applied) > 5
    assert any(step.norm > CLIP for step in applied)
    return run.masters


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_documented_loops_share_out_the_data_and_equal_the_reference(name: str, tmp_path: Path) -> None:
    """huggingface/accelerate and Lightning bring data, logging and launching; the step stays ours, bit for bit."""
    pytest.importorskip({"accelerate": "accelerate", "fabric": "lightning_fabric"}[name])
    output = start(f"loop_{name}.py", tmp_path)
    assert output.count("epoch 1: loss ") == 1, "rank 0 alone prints"
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for epoch in (slice(0, 5), slice(5, 10)):
        rows = torch.cat([inputs for rank in ranks for inputs, _ in rank["seen"][epoch]])
        assert rows.shape[0] == len(rows.unique(dim=0)) == 20, "each sample once an epoch, on one rank"
    assert not torch.equal(ranks[0]["seen"][0][0], ranks[0]["seen"][5][0]), "another order in the second epoch"
    masters = run_ranks(expected, 1, ranks)[0]
    weights = torch.load(tmp_path / "weights.pt")
    assert weights.keys() == masters.keys()
    for key, master in masters.items():
        for rank in ranks:
            assert torch.equal(rank["masters"][key], master), key
        assert torch.equal(weights[key], master.to(weights[key].dtype)), key
    if name == "fabric":
        with (tmp_path / "metrics" / "version_0" / "metrics.csv").open() as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["0", "1"]


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_the_page_shows_the_loops_that_are_tested(name: str) -> None:
    script = (HERE / f"loop_{name}.py").read_text()
    loop = script.split("# [in the docs]\n")[1].split("# [end]\n")[0]
    assert loop in DOCUMENT.read_text()


def trained(steps: int) -> tuple[Any, Any, torch.Tensor]:
    model = loop_data.make_model()
    model, optimizer = shardmp.shard(model, loop_data.make_optimizer(model), precision=POLICY)
    inputs, targets = next(iter(loop_data.make_loader()))
    for _ in range(steps):
        optimizer.backward(loop_data.loss_of(model, inputs, targets))
        optimizer.step()
    return model, optimizer, loop_data.loss_of(model, inputs, targets)


def tools() -> tuple[Any, Any]:
    accelerate, lightning = pytest.importorskip("accelerate"), pytest.importorskip("lightning_fabric")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return accelerate.Accelerator(cpu=True), fabric


@on_ranks(1, timeout=120.0)
def test_backward_of_accelerate_or_fabric_is_refused_with_the_call_to_write() -> None:
    """Their backward knows nothing of the loss scale: every update would be 65536 times too small."""
    for tool in tools():
        model, optimizer, loss = trained(0)
        with pytest.raises(RuntimeError, match=r"call optimizer.backward\(loss\)"):
            tool.backward(loss)


@on_ranks(1, timeout=120.0)
def test_a_sharded_model_that_accelerate_or_fabric_would_move_is_refused() -> None:
    accelerator, fabric = tools()
    model, optimizer, _ = trained(0)
    with pytest.raises(RuntimeError, match=r"after shard\(\) would take its parameters out of their buckets"):
        accelerator.prepare(model)
    with pytest.raises(RuntimeError, match=r"after shard\(\) would take its parameters out of their buckets"):
        fabric.setup(model, optimizer)


@on_ranks(1, timeout=120.0)
def test_optimizers_that_accelerate_or_fabric_wrapped_are_refused() -> None:
    """Their step is that of the plain optimizer inside: on shards of ours it would change nothing, in silence."""
    for wrap in [tool.prepare if hasattr(tool, "prepare") else tool.setup for tool in tools()]:
        plain = loop_data.make_model()
        plain_optimizer = loop_data.make_optimizer(plain)
        model, optimizer = wrap(plain, plain_optimizer)
        with pytest.raises(TypeError, match=r"wraps another optimizer.*plain one"):
            shardmp.shard(model, optimizer, precision=POLICY)
        assert [id(p) for p in plain_optimizer.param_groups[0]["params"]] == [id(p) for p in plain.parameters()]


@on_ranks(1, timeout=120.0)
def test_copies_of_the_weights_are_saved_whole_by_accelerate(tmp_path: Path) -> None:
    """It writes one tensor of each storage, and parameters are views of a few: the page says to copy them first."""
    from safetensors.torch import load_file

    accelerator, _ = tools()
    model, optimizer, _ = trained(2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save(weights, tmp_path / "weights.safetensors", safe_serialization=True)
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == weights.keys()
    for name, value in found.items():
        assert torch.equal(value, optimizer.master(name).to(value.dtype))
