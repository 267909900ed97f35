"""The GPU check: its options, the arithmetic on traces, and that a part which fails or hangs is a row of its table."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # where the program's own imports look when it runs as a script

import gpu  # noqa: E402
import gpu_parts  # noqa: E402
from gpu_training import Device  # noqa: E402

# -- options


def test_options_are_known_parts_in_the_order_given() -> None:
    options = gpu.parse(["--parts", "update,memory,update", "--cpu"])
    assert (options.parts, options.cpu, options.budget) == (["update", "memory"], True, 240.0)
    assert gpu.parse([]).parts == list(gpu.PARTS)
    assert gpu.PARTS.keys() == gpu_parts.PARTS.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "update,speed"], "--parts: unknown 'speed'; expected some of synchronisation, "),
        (["--budget", "0"], "--budget: expected a number above 0, got 0"),
        (["--patience", "nan"], "--patience: expected a number above 0, got nan"),
    ],
)
def test_a_wrong_option_ends_with_exit_code_2_and_says_what_was_expected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu.main(["--parts", "update"]) == 2
    assert "this process sees no CUDA device; --cpu runs" in capsys.readouterr().err


def test_the_tests_come_last_and_have_what_is_left_of_four_minutes() -> None:
    """They alone take as long as they are given; what hangs before them costs its own limit at most."""
    assert list(gpu.PARTS)[-1] == "tests"
    assert gpu.parse([]).budget <= 240
    assert all(part.seconds < 60 for name, part in gpu.PARTS.items() if name != "tests")


# -- intervals

points = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    """The unit steps [n, n + 1) that some interval covers."""
    return {step for begin, end in intervals for step in range(begin, end)}


@settings(max_examples=100, deadline=None)
@given(st.lists(points, max_size=8), st.lists(points, max_size=8))
def test_lengths_of_unions_and_overlaps_are_those_of_sets(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    assert gpu_parts.length(first) == len(covered(first))
    assert gpu_parts.overlap_of(first, second) == len(covered(first) & covered(second))
    merged = gpu_parts.union(first)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(merged))


def kernel(name: str, begin: float, end: float, stream: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}


def test_a_traces_nccl_kernels_are_told_from_those_that_compute_on_any_stream() -> None:
    """As torch.profiler writes them: kernels are complete events of category "kernel", times in microseconds."""
    events = [
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 10, 30, 20),
        kernel("sm90_xmma_gemm_f16f16", 5, 20, 7),
        kernel("vectorized_elementwise_kernel", 25, 28, 9),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "user_annotation", "name": "nccl:send", "ts": 0, "dur": 100},
        {"ph": "i", "cat": "kernel", "name": "no range", "ts": 0},
    ]
    sent, computed = gpu_parts.spans_of(events, Device("cuda"))
    assert sent == [(10, 30)]
    assert computed == [(5, 20), (25, 28)]
    assert gpu_parts.overlap_of(sent, computed) == 13


# -- the tests' part


def test_results_are_read_from_pytests_own_words_whole_or_cut_short_by_time() -> None:
    lines = [
        "tests/test_step.py::test_a[1ranks-1-fp16] PASSED   [ 20%]",
        "tests/test_step.py::test_a[2ranks-1-fp16] SKIPPED (needs 2 GPUs)  [ 40%]",
        "tests/test_gpu.py::test_b[BLOCK] FAILED   [ 60%]",
    ]
    good = gpu_parts.outcome_of("\n".join(lines[:2]), 0)
    assert (good["found"], good["met"]) == ("1 passed, 1 skipped", True)
    bad = gpu_parts.outcome_of("\n".join(lines), 1)
    assert (bad["found"], bad["met"]) == ("1 passed, 1 failed, 1 skipped: test_b[BLOCK]", False)
    assert bad["failed"] == ["tests/test_gpu.py::test_b[BLOCK]"]
    cut = gpu_parts.outcome_of("\n".join([*lines[:2], "!!!! session-timeout: 30.0 sec exceeded !!!!"]), 2)
    assert (cut["found"], cut["met"]) == ("1 passed, 1 skipped; the rest had no time left", True)
    assert not gpu_parts.outcome_of("ERROR: no such option", 4)["met"]
    assert not gpu_parts.outcome_of(lines[1], 0)["met"]  # nothing but skips shows nothing


# -- rows


def test_the_table_shows_ratios_to_shardmp_failures_and_what_was_not_measured() -> None:
    rows: dict[str, dict[str, Any]] = {
        "train-shardmp": {"found": "200 tokens/s", "met": None, "tokens_per_s": 200.0, "seconds": 3.0},
        "train-autocast": {"found": "100 tokens/s", "met": None, "tokens_per_s": 100.0, "seconds": 2.0},
        "update": {"found": "70% of a copy's", "met": False},
        "memory": {"failed": "rank 0 ended with exit code 1: ValueError: x"},
        "overlap": {"skipped": "one rank sends nothing"},
    }
    lines = gpu.table(rows).splitlines()
    assert lines[2:] == [
        "| train-shardmp | FP16 GPT | 200 tokens/s |  | 3.0 |",
        "| train-autocast | FP16 GPT | 100 tokens/s; shardmp is at 2.00 of it |  | 2.0 |",
        "| update | 85 % of a copy's bandwidth | 70% of a copy's | no |  |",
        f"| memory | {gpu.PARTS['memory'].goal} | FAILED: rank 0 ended with exit code 1: ValueError: x | no |  |",
        f"| overlap | {gpu.PARTS['overlap'].goal} | not measured: one rank sends nothing |  |  |",
    ]
    assert [name for name, row in rows.items() if gpu.is_bad(row)] == ["update", "memory"]


@pytest.fixture
def part_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a program in the place of the parts."""

    def put(code: str) -> None:
        (tmp_path / "gpu_parts.py").write_text("import json, os, sys, time\n" + textwrap.dedent(code))
        monkeypatch.setattr(gpu, "HERE", tmp_path)

    return put


def test_a_part_that_hangs_is_a_row_that_says_so(part_script: Any) -> None:
    part_script("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); time.sleep(600)")
    began = time.monotonic()
    row = gpu.run("update", "cpu", 2, limit=1.5)
    assert row["failed"] == "not done after 1.5 s (ranks 0, 1)"
    assert time.monotonic() - began < 30


def test_a_part_that_fails_is_a_row_with_its_reason_and_one_that_succeeds_is_rank_0s(part_script: Any) -> None:
    part_script(
        """
        job, rank = json.loads(sys.argv[1]), os.environ["GPU_RANK"]
        if job["part"] == "memory":
            raise ValueError("of the part")
        with open(f"{job['out']}/{rank}.json", "w") as out:
            json.dump({"found": f"rank {rank} on {job['device']}", "met": True}, out)
        """
    )
    assert gpu.run("memory", "cpu", 1, limit=60)["failed"] == "rank 0 ended with exit code 1: ValueError: of the part"
    row = gpu.run("update", "cpu", 2, limit=60)
    assert (row["found"], row["met"]) == ("rank 0 on cpu", True)


def test_parts_share_the_budget_and_what_it_leaves_out_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[str, int, float]] = []

    def run(name: str, device: str, ranks: int, limit: float) -> dict[str, Any]:
        limits.append((name, ranks, limit))
        clock[0] += 50.0
        return {"found": "done", "met": True}

    clock = [0.0]
    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    rows = gpu.run_all(gpu.parse(["--parts", "memory,overlap,tests", "--budget", "90", "--patience", "2"]), gpus=4)
    assert limits == [("memory", 1, 60.0), ("overlap", 2, 40.0)]
    assert rows["tests"] == {"failed": "no time left of the budget of 90 s"}


@pytest.mark.parametrize("name", ["memory", "update", "train-shardmp"])
def test_a_part_of_one_rank_runs_on_the_cpu(name: str) -> None:
    row = gpu_parts.PARTS[name](Device("cpu"), 60.0)
    assert row["found"]
    assert row.get("met") is not False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_the_cpu_every_part_that_makes_sense_there_runs_from_launch_to_table(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--cpu", "--json", str(tmp_path / "gpu.json")]
    command += ["--budget", "800", "--patience", "10"]  # of a busy machine
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert list(rows) == list(gpu.PARTS)
    assert {name for name, row in rows.items() if "skipped" in row} == {"tests", "synchronisation"}
    assert rows["memory"]["held"]["masters"] == rows["memory"]["predicted"]["masters"] > 0
    assert rows["memory"]["met"]
    assert rows["two-ranks"]["met"]
    assert 0 < rows["overlap"]["hidden"] <= 1
    assert rows["update"]["share"] > 0
    assert rows["update"]["elements"] == 4 * 2**16
    losses = [rows[f"train-{name}"]["loss"] for name in ("shardmp", "autocast", "fsdp2")]
    assert losses == pytest.approx([losses[0]] * 3, abs=0.01)  # the same steps, but for roundings
    assert "| update | 85 % of a copy's bandwidth |" in done.stdout
