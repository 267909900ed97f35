"""Consolidated weights, and what `shardmp inspect` says of a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import masters, sharded
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import shardmp
from shardmp import CheckpointError, cli, directory

pytestmark = pytest.mark.filterwarnings("ignore:.*random")


class Tied(nn.Module):
    """The model of C39: tied weights, a frozen FP16 parameter, two buffers, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor([2.0]))
        self.frozen = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float16), requires_grad=False)
        self.register_buffer("mean", torch.tensor([0.1, 0.2]))
        self.register_buffer("count", torch.tensor(2**40 + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens) * self.frozen.float() * self.gain.float()).float().mean()


def save_tied(root: Path) -> Any:
    torch.manual_seed(1)
    plain = Tied()
    groups = [{"params": [plain.embed.weight]}, {"params": [plain.gain], "lr": 0.25}]
    model, optimizer = shardmp.shard(plain, torch.optim.SGD(groups, lr=0.5))
    optimizer.backward(model(torch.tensor([0, 1])))
    optimizer.step()
    shardmp.save(root, model, optimizer)
    return masters(optimizer)


def filled(path: Path) -> dict[str, Tensor]:
    """The file's tensors, tied ones under all their names."""
    found = load_file(path)
    with safe_open(path, "pt") as file:
        for alias, name in json.loads(file.metadata()["tied"]).items():
            found[alias] = found[name]
    return found


def test_c39_export_has_the_plain_models_keys_and_the_fp32_masters(tmp_path: Path) -> None:
    expected = run_ranks(save_tied, 2, tmp_path)[0]
    written = shardmp.export(tmp_path, tmp_path / "model.safetensors")
    assert "head.weight" not in load_file(written)  # once
    found = filled(written)
    plain = Tied().float()
    plain.frozen.data.zero_()
    plain.load_state_dict(found)
    assert torch.equal(plain.embed.weight, expected["embed.weight"])
    assert torch.equal(plain.head.weight, expected["embed.weight"])
    assert torch.equal(found["gain"], expected["gain"])
    assert torch.equal(found["frozen"], torch.full((3,), 2.0))
    assert found["frozen"].dtype == torch.float32
    assert torch.equal(found["mean"], torch.tensor([0.1, 0.2]))
    assert found["count"].item() == 2**40 + 1

    halves = filled(shardmp.export(tmp_path, tmp_path / "half.safetensors", dtype="fp16"))
    assert torch.equal(halves["embed.weight"], expected["embed.weight"].half())
    assert torch.equal(halves["mean"], torch.tensor([0.1, 0.2]))  # buffers keep their dtype
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "half.safetensors", "latest", "model.safetensors"
    ]  # fmt: skip


def test_an_export_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    run_ranks(save_large, 1, tmp_path)
    with pytest.raises(OverflowError, match=r"model.w holds 70000.0, beyond the range of torch.float16"):
        shardmp.export(tmp_path, tmp_path / "out.safetensors", dtype="fp16")
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match="expected 'fp16', 'bf16', 'fp32', got 'int8'"):
        shardmp.export(tmp_path, tmp_path / "out.safetensors", dtype="int8")
    with pytest.raises(FileNotFoundError):
        shardmp.export(tmp_path / "nowhere", tmp_path / "out.safetensors")
    path = directory.find(tmp_path, None) / "__0_0.distcp"
    os.truncate(path, 10)
    with pytest.raises(CheckpointError, match="__0_0.distcp has 10 bytes"):
        shardmp.export(tmp_path, tmp_path / "out.safetensors")


class Vector(nn.Module):
    def __init__(self, size: int, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), value))


def save_large(root: Path) -> None:
    model, optimizer = sharded(Vector(5, 70000.0), precision="bf16")
    shardmp.save(root, model, optimizer)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(1 << 18)) for _ in range(24)])


def save_deep(root: Path) -> None:
    model, optimizer = sharded(Deep())
    shardmp.save(root, model, optimizer)


PEAK = """
import resource, sys, shardmp
from shardmp.exporting import export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(sys.argv[1], sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """25 MB of weights in tensors of 1 MB: the process grows by a few of them."""
    run_ranks(save_deep, 2, tmp_path)
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(tmp_path / "out.safetensors")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout)
    assert (tmp_path / "out.safetensors").stat().st_size > 24 << 20
    assert grown < 12 << 10  # KB; the checkpoint's own code and tables are in it


def run_command(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardmp.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def invoke(*arguments: Any) -> Any:
    """As `run_command`, in this process: a start of the command takes seconds."""
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


def test_the_commands_say_what_is_in_a_checkpoint_and_whether_it_is_intact(tmp_path: Path) -> None:
    run_ranks(save_tied, 2, tmp_path)
    done = run_command("inspect", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 1, 2 ranks" in done.stdout
    assert "model.embed.weight  [4, 3]  float32  48 bytes, 1 pieces" in done.stdout
    assert "model.head.weight  [4, 3]  float32  tied to model.embed.weight" in done.stdout
    assert "intact" in done.stdout
    done = invoke("export", tmp_path, tmp_path / "out.safetensors", "--dtype", "bf16")
    assert done.exit_code == 0, done.stderr
    assert load_file(tmp_path / "out.safetensors")["gain"].dtype == torch.bfloat16

    path = directory.find(tmp_path, None) / "__1_0.distcp"
    changed = bytearray(path.read_bytes())
    changed[40] ^= 4
    path.write_bytes(changed)
    done = invoke("inspect", tmp_path)
    assert done.exit_code == 1
    assert "__1_0.distcp is altered" in done.stderr
    assert invoke("inspect", tmp_path, "--no-verify").exit_code == 0
    done = invoke("inspect", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "does not exist" in done.stderr
