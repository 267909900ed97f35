"""`shardmp budget` and `shardmp.budget`: what is said, what is printed, what is refused, and what a batch adds."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardmp
from shardmp import budget_words, budgets, cli
from shardmp.activations import Trace, parse_batch


def budget(*arguments: str, columns: int = 120) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, ["budget", *arguments])


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 200), nn.LayerNorm(200), nn.Linear(200, 7, bias=False))


# -- a model and its batch


GIVEN = """
import torch.nn.functional as F
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.hidden, self.head = nn.Embedding(256, 96), nn.Linear(96, 384), nn.Linear(384, 256)
        self.norm = nn.LayerNorm(384)
        self.register_buffer("table", __import__("torch").zeros(1000))
    def forward(self, tokens):
        return self.head(self.norm(F.gelu(self.hidden(self.token(tokens)))))

def frozen():
    model = Small()
    model.token.requires_grad_(False)
    return model

def loss(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

def giant():
    return nn.Linear(10**6, 10**6)

number = int
three = 3
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory."""
    (tmp_path / "given.py").write_text(GIVEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "given", raising=False)
    return "given"


def test_a_batch_shows_static_and_dynamic_memory_apart_for_each_way_of_training(given: str) -> None:
    arguments = ("--model", "given:Small", "--batch", "8x64:int64", "--loss", "given:loss", "--ranks", "2")
    found = json.loads(budget(*arguments, "--json").stdout)
    rows = found["activations"]["memory"]
    assert list(rows) == ["FP32, one device", "autocast on FP32 weights, one device", "shardmp, stage 2"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx((row["peak"] + row["batch"]) / row["static"])
        assert row["batch"] == 8 * 64 * 8
        assert row["kept_for_backward"] < row["peak"] < row["most"]
    assert rows["FP32, one device"]["static"] == 16 * found["parameters"]
    ours = found["memory"]["shardmp, stage 2"]
    assert rows["shardmp, stage 2"]["static"] == sum(ours[kind] for kind in budgets.STATE)
    together = sum(ours.values()) + rows["shardmp, stage 2"]["peak"] + rows["shardmp, stage 2"]["batch"]
    assert rows["shardmp, stage 2"]["most"] == together + 4000
    assert found["frozen_and_buffers"] == 4000
    shown = budget(*arguments).stdout
    assert "come and go with a batch of 8x64:int64 (kernels of cpu)" in shown
    assert "autocast on FP32 weights, one device" in shown


def test_fp32_has_no_row_of_autocast(given: str) -> None:
    found = budgets.budget("given:Small", batch="2x8:int64", loss="given:loss", precision="fp32")
    assert list(found["activations"]["memory"]) == ["FP32, one device", "shardmp, stage 2"]


def test_the_largest_batch_that_fits_was_traced_and_one_more_does_not_fit(given: str) -> None:
    limit = 20 * 2**20
    found = budgets.budget("given:Small", batch="8x64:int64", loss="given:loss", ranks=2, device="cpu", fits=limit)
    best = found["fits"]["largest_batch"]
    given_module = importlib.import_module("given")
    one = Trace(given_module.Small, "shardmp", "fp16", given_module.loss, torch.device("cpu"))
    state = budgets.planned("given:Small", ranks=2).together()
    totals = [state + one(parse_batch(f"{size}x64:int64")).dynamic for size in (best, best + 1)]
    assert totals[0] <= limit < totals[1]
    least = budgets.budget("given:Small", batch="8x64:int64", loss="given:loss", ranks=2, fits="1MiB")
    assert least["fits"]["largest_batch"] == 0


def test_frozen_parameters_lie_whole_on_each_rank(given: str) -> None:
    found = budgets.budget("given:frozen", ranks=4)
    assert found["frozen_and_buffers"] == 4 * 256 * 96 + 4000
    assert found["parameters"] == 96 * 384 + 384 + 384 * 256 + 256 + 2 * 384


def test_thousands_of_ranks_and_a_batch_take_seconds(given: str) -> None:
    began = time.perf_counter()
    found = budgets.budget("given:Small", ranks=8192, batch="8x64:int64", loss="given:loss")
    assert time.perf_counter() - began < 30
    assert found["activations"]["memory"]["shardmp, stage 2"]["most"] > 0


def test_the_public_functions_answer_what_the_command_prints(given: str) -> None:
    shown = json.loads(budget("--params", "7e9", "--ranks", "64", "--fits", "16GiB", "--json").stdout)
    assert shown == json.loads(json.dumps(shardmp.budget(parameters="7e9", ranks=64, fits="16GiB")))
    assert shardmp.formats.FORMATS["fp16"].largest == 65504.0
    # A whole policy is taken too: the norm of the small model has a bucket in FP32, unless it is not kept so.
    assert shardmp.budget(small_model)["buckets"] == 2
    assert shardmp.budget(small_model, precision=shardmp.Precision(keep_fp32=()))["buckets"] == 1


# -- the command


def test_the_table_shows_zeros_terms_beside_ours() -> None:
    shown = budget("--params", "7.5e9", "--ranks", "64").stdout
    for line in ("mixed precision, one device", "ZeRO paper, stage 1", "ZeRO paper, stage 3", "shardmp, stage 2"):
        assert line in shown
    together = {
        line.split("│")[1].strip(): line.split("│")[-2].strip() for line in shown.splitlines() if "stage" in line
    }
    assert together["ZeRO paper, stage 1"] == "31.4"
    assert together["ZeRO paper, stage 2"] == "16.6"
    assert together["ZeRO paper, stage 3"] == "1.88"
    assert float(together["shardmp, stage 2"]) == pytest.approx(17.4, abs=0.06)  # 0.45 of it in buckets of 64 MiB
    assert "where is the saving?" in shown


def test_a_model_is_built_without_its_weights(given: str) -> None:
    found = json.loads(budget("--model", "given:giant", "--ranks", "4", "--json").stdout)
    assert found["parameters"] == 10**12 + 10**6  # 4 TB if it were there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "given"], "--model: expected package.module:function, got 'given'"),
        (["--model", "given:nothing"], "nothing"),
        (["--model", "given:three"], "--model given:three: expected a function, got int"),
        (["--model", "absent:x"], "--model absent:x: No module"),
        (["--model", "given:number"], "expected an nn.Module, got int"),
        (["--model", "given:loss"], "--model: it is called without arguments"),
        (["--model", "given:Small", "--batch", "8x"], "--batch: expected shapes such as 4x128:int64"),
        (["--model", "given:Small", "--batch", "8x64"], "--batch 8x64:float32: FP32: "),
        (["--model", "given:Small", "--batch", "8x64:int64", "--loss", "given:no"], "--loss given:no"),
        (
            ["--model", "given:Small", "--batch", "8:int64", "--device", "tpu"],
            "--device: expected cpu or cuda, got 'tpu'",
        ),
        (["--model", "given:Small", "--loss", "given:loss"], "--loss, --device: they are for the trace of a --batch"),
        (["--params", "7e9", "--batch", "8:int64"], "--batch: a forward is traced, which needs a --model"),
    ],
)
def test_what_is_wrong_with_a_model_or_its_batch_is_one_message(given: str, arguments: list[str], message: str) -> None:
    refused = budget(*arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose kernels can be traced")
def test_kernels_of_cuda_are_refused_where_there_is_no_gpu(given: str) -> None:
    refused = budget("--model", "given:Small", "--batch", "8:int64", "--device", "cuda")
    assert refused.exit_code == 2
    assert "--device cuda: torch sees no GPU here" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either --params or --model, got none"),
        (["--params", "7e9", "--model", "a:b"], "expected either --params or --model, got both"),
        (["--params", "seven"], "--params: expected a number from 1"),
        (["--params", "-5"], "--params: expected a number from 1"),
        (["--params", "1e99"], "--params: expected a number from 1"),
        (["--params", "7e9", "--ranks", "0"], "--ranks: expected 1 to 65536, got 0"),
        (["--params", "7e9", "--ranks", "8", "--ranks-per-host", "3"], "expected a divisor of 8 ranks, got 3"),
        (["--params", "7e9", "--stage", "3"], "--stage: this version has stages 1 and 2, got 3"),
        (["--params", "7e9", "--precision", "fp8"], "--precision: expected one of fp16, bf16, fp32, got 'fp8'"),
        (["--params", "7e9", "--bucket-mb", "0"], "--bucket-mb: expected a size above 0"),
        (["--params", "7e9", "--exact", "--precision", "bf16"], "--exact: FP16 alone"),
        (["--params", "7e9", "--fits", "16 apples"], "--fits: expected a size such as 16GiB"),
        (["--params", "7e9", "--flops", "3e14"], "--flops, --link: expected both or none"),
    ],
)
def test_bad_options_are_one_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    shown = budget(*arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("text", "value"), [("7e9", 7e9), ("7B", 7e9), ("124M", 124e6), ("1.5k", 1500), ("12", 12), ("1e+3", 1000)]
)
def test_parameters_are_written_as_people_write_them(text: str, value: float) -> None:
    assert budget_words.count(text) == value
    assert sum(entry.numel for entry in budget_words.entries_of_count(int(value), "fp16", 8.0)) == value


@pytest.mark.parametrize(("text", "value"), [("16GiB", 2**34), ("80 GB", 80e9), ("1.5kib", 1536), ("100", 100)])
def test_sizes_are_written_as_people_write_them(text: str, value: float) -> None:
    assert budget_words.size(text) == value


def test_a_host_is_taken_to_have_up_to_8_ranks() -> None:
    assert [budget_words.usual_ranks_per_host(ranks) for ranks in (1, 6, 8, 12, 13, 64)] == [1, 6, 8, 6, 1, 8]
