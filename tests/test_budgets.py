"""`shardmp budget`: its figures are those of a real `shard`, of the ZeRO paper and of the routes that rows take."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sharded
from ranks import on_ranks
from torch import nn
from typer.testing import CliRunner

from shardmp import budgeting, budgets, cli
from shardmp.budgets import Run
from shardmp.exchange import route
from shardmp.layout import Entry, plan


def budget(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["budget", *arguments])


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 200), nn.LayerNorm(200), nn.Linear(200, 7, bias=False))


def planned(parameters: int, **options: Any) -> Run:
    return Run(budgets.entries_of_count(parameters, "fp16", 8.0), **options)


# -- against what is held and sent


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("make", "moments"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0)])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 3)
def test_a_budget_made_of_the_model_alone_is_what_ranks_hold_and_send(
    precision: str, make: Any, moments: int, stage: int, world_size: int
) -> None:
    with torch.device("meta"):
        entries = budgets.entries_of_model(small_model(), precision)
    run = Run(entries, world_size, world_size, stage, precision, bucket_mb=0.02, moments=moments)
    model, optimizer = sharded(small_model(), make, 0.01, precision=precision, stage=stage, bucket_mb=0.02)
    for _ in range(2):
        sent = optimizer.wire_bytes()
        optimizer.backward(model(torch.ones(1, 96)).mean())
        optimizer.step()
    held, foreseen = optimizer.memory(), run.memory(run.layout())
    if optimizer._collectives.rank == 0:  # the rank that a budget speaks of
        for kind in ("parameters", "gradients", "masters", "moments"):
            assert held[kind] == foreseen[kind], kind
    assert held["buckets"] <= foreseen["buckets"]
    assert optimizer.wire_bytes() - sent == budgets.figures(run)["sent_per_rank_and_step"]


@pytest.mark.parametrize(("ranks", "per_host"), [(8, 4), (9, 3), (8, 2), (4, 1), (4, 4)])
def test_bytes_through_a_hosts_card_are_those_that_the_routes_take_across(ranks: int, per_host: int) -> None:
    layout = plan(
        [Entry("a", 50_000, "fp16"), Entry("b", 7, "fp32")], ranks, bucket_bytes=2**20, itemsize=budgets.ITEMSIZE
    )
    row = sum(bucket.shard * budgets.ITEMSIZE[bucket.dtype] for bucket in layout.buckets)
    sums = 4 * sum(bucket.shard for bucket in layout.buckets)
    host = [rank // per_host for rank in range(ranks)]
    routes = [route([str(number) for number in host], rank) for rank in range(ranks)]
    reduction = gather = 0
    for me in range(per_host):  # the ranks of the first host
        found = routes[me]
        for member, rows in zip(found.members, found.columns, strict=True):
            reduction += row * len(rows) * (host[member] != 0)
            gather += row * (host[member] != 0)  # where one hop suffices everybody gets this rank's row from it
        reduction += sums * sum(host[peer] != 0 for peer in found.across)
        gather += row * sum(host[peer] != 0 for peer in found.across)
    card = budgeting.card_bytes(layout, budgets.ITEMSIZE, ranks_per_host=per_host)
    assert (card["reduction"], card["gather"]) == (reduction, gather)
    assert (card["verdict"] > 0) == (ranks > per_host)


def test_the_demo_counts_what_a_budget_of_its_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the README, which two ranks of `make demo` counted tensor by tensor and byte by byte."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "examples")
    gpt = importlib.import_module("gpt")
    with torch.device("meta"):
        entries = budgets.entries_of_model(gpt.GPT(gpt.GPTConfig()), "fp16")
    run = Run(entries, 2, 2, bucket_mb=4)
    counted = {"parameters": 23.04, "gradients": 23.02, "masters": 22.99, "moments": 45.98, "buckets": 22.28}
    assert {kind: round(size / 1e6, 2) for kind, size in run.memory(run.layout()).items()} == counted
    assert round(budgets.figures(run)["sent_per_rank_and_step"] / 1e6, 2) == 23.05


# -- against the ZeRO paper


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zeros_own_figure_for_7_5_billion_parameters_on_64_ranks(stage: int, gigabytes: float) -> None:
    found = sum(budgeting.zero_memory(7_500_000_000, 64, stage).values()) / 1e9
    assert found == pytest.approx(gigabytes, abs=0.05)


def test_ours_is_2_and_16_over_n_bytes_a_parameter_and_4_sent() -> None:
    run = planned(7_500_000_000, ranks=64, ranks_per_host=8)
    found = budgets.figures(run)
    ours = found["memory"]["shardmp, stage 2"]
    assert sum(ours[kind] for kind in budgeting.KINDS if kind != "buckets") == pytest.approx(7.5e9 * 2.25, rel=0.001)
    # Two hops: 2 bytes to each of the 7 others of the host for all 8 hosts' rows, 4 bytes across, and the gather's 2.
    sent = 7.5e9 * (2 * 7 * 8 / 64 + 4 * 7 / 64 + 2 * 63 / 64)
    assert found["sent_per_rank_and_step"] == pytest.approx(sent, rel=0.001)
    assert found["sent_per_host_card_and_step"] == pytest.approx(7.5e9 * (4 + 2) * 7 / 8, rel=0.001)


def test_fp32_and_plain_mixed_precision_hold_the_same_static_state_on_one_device() -> None:
    """The saving of mixed precision is not here: two copies of the weights take what halved gradients give."""
    assert (
        sum(budgeting.fp32_memory(10**9).values()) == sum(budgeting.unsharded_memory(10**9, moments=2).values()) == 16e9
    )


# -- what the options change


def test_stage_1_holds_whole_sums_where_it_has_backwards_to_add_up() -> None:
    psi = 10 * 2**22
    one, two = (
        planned(psi, ranks=4, ranks_per_host=4, stage=1),
        planned(psi, ranks=4, ranks_per_host=4, stage=1, backwards=2),
    )
    more = two.memory(two.layout())["gradients"] - one.memory(one.layout())["gradients"]
    assert more == 4 * psi
    sent = [budgets.figures(run)["sent_per_rank_and_step"] for run in (one, two)]
    assert sent[0] == sent[1]
    stage_2 = planned(psi, ranks=4, ranks_per_host=4, backwards=2)
    assert budgets.figures(stage_2)["sent_per_rank_and_step"] == pytest.approx(sent[0] * 6 / 4, rel=0.001)


def test_an_exact_sum_takes_4_bytes_more_of_each_shard() -> None:
    psi = 10 * 2**22
    usual, exact = (planned(psi, ranks=4, ranks_per_host=4, exact=flag) for flag in (False, True))
    assert exact.memory(exact.layout())["gradients"] - usual.memory(usual.layout())["gradients"] == 4 * psi / 4


def test_padding_is_named_where_many_ranks_cut_small_buckets() -> None:
    found = budgets.figures(planned(124_000_000, ranks=8192, ranks_per_host=8))
    assert found["padding"] == pytest.approx(0.96, abs=0.01)
    assert "A larger --bucket-mb" in budget("--params", "124M", "--ranks", "8192").stdout
    assert "Padding" not in budget("--params", "124M", "--ranks", "8").stdout


def test_tokens_that_hide_are_f_over_b_on_one_host() -> None:
    run = planned(10 * 2**22, ranks=8, ranks_per_host=8)
    assert budgets.tokens_that_hide(run, 3e14, 2e11) == pytest.approx(1500 * 7 / 8, rel=0.001)


def test_8192_ranks_take_seconds() -> None:
    began = time.perf_counter()
    assert budgets.figures(planned(7_000_000_000, ranks=8192, ranks_per_host=8))["ranks"] == 8192
    assert time.perf_counter() - began < 20


# -- --fits


def test_the_fewest_ranks_fit_and_one_less_does_not() -> None:
    limit = 16 * 2**30
    best = budgets.smallest_fit(planned(7_000_000_000), limit)
    assert best is not None
    one_less = planned(7_000_000_000, ranks=best.ranks - 1, ranks_per_host=best.ranks - 1)
    assert sum(best.memory(best.layout()).values()) <= limit < sum(one_less.memory(one_less.layout()).values())


def test_no_number_of_ranks_fits_where_the_parameters_alone_do_not() -> None:
    assert budgets.smallest_fit(planned(7_000_000_000), 13 * 10**9) is None
    said = budget("--params", "7e9", "--fits", "12GiB")
    assert "no number of ranks holds it" in said.stdout
    assert json.loads(budget("--params", "7e9", "--fits", "12GiB", "--json").stdout)["fits"]["ranks"] is None


# -- the command


def test_the_table_shows_zeros_terms_beside_ours() -> None:
    shown = budget("--params", "7.5e9", "--ranks", "64").stdout
    for line in ("plain mixed precision, one device", "ZeRO paper, stage 1", "ZeRO paper, stage 3", "shardmp, stage 2"):
        assert line in shown
    together = {
        line.split("│")[1].strip(): line.split("│")[-2].strip() for line in shown.splitlines() if "stage" in line
    }
    assert together["ZeRO paper, stage 1"] == "31.4"
    assert together["ZeRO paper, stage 2"] == "16.6"
    assert together["ZeRO paper, stage 3"] == "1.88"
    assert together["shardmp, stage 2"] == "16.9"
    assert "where is the saving?" in shown


def test_a_model_is_built_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "giant.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(10**6, 10**6)\nnumber = int\n"
    )
    monkeypatch.chdir(tmp_path)
    found = json.loads(budget("--model", "giant:make", "--ranks", "4", "--json").stdout)
    assert found["parameters"] == 10**12 + 10**6  # 4 TB if it were there
    for wrong, message in (
        ("giant", "package.module:function"),
        ("giant:nothing", "nothing"),
        ("absent:x", "--model absent:x: No module"),
    ):
        refused = budget("--model", wrong)
        assert refused.exit_code == 2
        assert message in refused.stderr
    assert "expected an nn.Module, got int" in budget("--model", "giant:number").stderr


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
    assert budgets.count(text) == value
    assert sum(entry.numel for entry in budgets.entries_of_count(int(value), "fp16", 8.0)) == value


@pytest.mark.parametrize(("text", "value"), [("16GiB", 2**34), ("80 GB", 80e9), ("1.5kib", 1536), ("100", 100)])
def test_sizes_are_written_as_people_write_them(text: str, value: float) -> None:
    assert budgets.size(text) == value


def test_a_host_is_taken_to_have_up_to_8_ranks() -> None:
    assert [budgets.usual_ranks_per_host(ranks) for ranks in (1, 6, 8, 12, 13, 64)] == [1, 6, 8, 6, 1, 8]
