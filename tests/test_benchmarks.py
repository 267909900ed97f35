"""The comparison with peers: its options, its arithmetic, and that nothing a contestant does ends or blocks a run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # where the program's own imports look when it runs as a script

import bounds  # noqa: E402
import launching  # noqa: E402
import measuring  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
from deepspeed_peer import remove_stale_locks  # noqa: E402

JOB = measuring.Job("ddp-fp32", "tiny", 1e-4, None, steps=1, warmup=0, record=False, timeout=30, out="")


def figures(cpu: float, wall: float = 1.0) -> dict[str, float]:
    return {"cpu_ms": cpu, "wall_ms": wall, "wire_mb": 2.0, "peak_mib": 100.0, "faults": 0.0}


def made_case(**rows: list[dict[str, float] | None]) -> dict[str, Any]:
    """A case of the named contestants (with _ for -) with these rounds."""
    named = {name.replace("_", "-"): rounds for name, rounds in rows.items()}
    names = [name for name in named if name not in bounds.PARTS]
    case = peers.new_case("tiny", None, 2, [*names, *(["parts"] if "sum" in named else [])], {})
    case["rows"].update(named)
    return case


# -- options


def test_options_are_lists_of_known_names_in_the_order_given() -> None:
    options = peers.parse(
        ["--models", "wide,gpt", "--contestants", "shardmp-bf16,ddp-fp32,shardmp-bf16", "--clip", "off,on"]
    )
    assert options.models == ["wide", "gpt"]
    assert options.contestants == ["shardmp-bf16", "ddp-fp32"]
    assert options.clip == ["off", "on"]
    assert peers.parse([]).contestants == peers.DEFAULT
    assert peers.parse(["--contestants", "all"]).contestants == peers.EVERYBODY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contestants", "ddp-fp8"], "--contestants: unknown 'ddp-fp8'; expected some of shardmp-fp16"),
        (["--models", "gpt,narrow"], "--models: unknown 'narrow'"),
        (["--clip", "2"], "--clip: unknown '2'; expected some of off, on"),
        (["--rounds", "0"], "--rounds: expected a number above 0, got 0"),
        (["--warmup", "-1"], "--warmup: expected a number of at least 0, got -1"),
        (["--again", "/nowhere.json"], "--again: expected the JSON of an earlier run, got /nowhere.json"),
    ],
)
def test_a_wrong_option_ends_with_exit_code_2_and_says_what_was_expected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        peers.parse(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_every_default_contestant_is_one_of_all_and_every_library_takes_part() -> None:
    assert set(peers.DEFAULT) <= set(peers.EVERYBODY)
    libraries = {peers.contestant_of(name).library for name in peers.DEFAULT if name != "parts"}
    assert libraries == {"shardmp", "DDP", "FSDP2", "DeepSpeed", "bound"}


# -- arithmetic


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() -> None:
    """A machine that gets slower from round to round slows both, and the ratio is still theirs."""
    assert report.ratio([50, 100, 210], [100, 200, 400]) == 0.5
    assert report.ratio([50, None, 210], [100, 200, 400]) == pytest.approx(0.5125)
    assert report.ratio([None], [1.0]) is None
    assert report.ratio([], [1.0]) is None


def test_the_best_peer_is_the_fastest_that_did_all_its_rounds_and_is_neither_ours_nor_a_bound() -> None:
    case = made_case(
        ddp_fp32=[figures(100)],
        shardmp_fp16=[figures(10)],
        compute_fp16=[figures(5)],
        fsdp2_bf16=[figures(80)],
        fsdp2_fp16=[figures(90)],
        ddp_bf16_hook=[figures(70)],
        deepspeed_zero2_fp16=[figures(20)],
    )
    case["failures"]["deepspeed-zero2-fp16"] = "failed in round 2: it did"
    assert report.best_peer(case, "cpu_ms") == "ddp-bf16-hook"
    assert report.best_peer(case, "cpu_ms", sharded=True) == "fsdp2-bf16"
    assert report.best_peer(case, "cpu_ms", sharded=True, precision="fp16") == "fsdp2-fp16"
    assert report.best_peer(case, "cpu_ms", precision="fp8") is None


def test_the_limit_is_compute_and_the_three_parts_of_the_same_round() -> None:
    case = made_case(
        shardmp_fp16=[figures(22), figures(44)],
        compute_fp16=[figures(10), figures(20)],
        exchange=[figures(5), figures(10)],
        sum=[figures(3), figures(6)],
        update=[figures(2), figures(4)],
    )
    assert report.limits(case, "fp16", "cpu_ms") == [20, 40]
    assert report.limits(case, "bf16", "cpu_ms") == []
    assert "| shardmp-fp16 |  |  |  | 2.20 | 1.10 |" in (report.beside_table(case) or "")


def test_figures_of_ranks_are_means_but_the_slowest_rank_and_the_largest_memory() -> None:
    told = [{"ddp-fp32": {**figures(10, wall=1), "losses": [1.0, 2.0]}}]
    told.append({"ddp-fp32": {**figures(20, wall=3), "losses": [3.0, 3.0]}})
    told[1]["ddp-fp32"]["peak_mib"] = 120.0
    found = launching.combine(told)["ddp-fp32"]
    assert (found["cpu_ms"], found["wall_ms"], found["peak_mib"]) == (15, 3, 120)
    assert found["losses"] == [2.0, 2.5]


def test_losses_are_shown_beside_ddps_with_the_largest_difference_on_the_way() -> None:
    rows = {"ddp-fp32": [5.0, 4.0], "shardmp-fp16": [5.25, 3.875], "fsdp2-fp16": "failed: it did"}
    table = report.loss_table({"model": "gpt", "steps": 2, "lr": 3e-4, "rows": rows})
    assert "| shardmp-fp16 | 3.8750 | -0.1250 | 0.2500 |" in table
    assert "| fsdp2-fp16 | failed: it did |" in table


# -- rounds


def test_a_failed_contestant_becomes_a_row_that_says_why_and_is_launched_no_more() -> None:
    launched: list[str] = []

    def launch_one(name: str, clip: float | None) -> dict[str, Any]:
        launched.append(name)
        if name == "fsdp2-bf16" and launched.count(name) == 2:
            raise launching.LaunchError("rank 1 was ended by SIGKILL", "its last words")
        if name == "ddp-bf16-hook":
            raise launching.LaunchError("not done after 3 s (ranks 0 | 1)")
        return {row: figures(100.0) for row in peers.rows_of(name)}

    names = ["ddp-fp32", "ddp-bf16-hook", "fsdp2-bf16", "parts"]
    case = peers.new_case("tiny", None, 2, names, {"deepspeed-zero2-bf16": "skipped: deepspeed is not installed"})
    for number in range(3):
        peers.run_round(case, number, names, launch_one)
    assert launched.count("ddp-fp32") == launched.count("parts") == 3
    assert launched.count("fsdp2-bf16") == 2
    assert launched.count("ddp-bf16-hook") == 1
    table = report.case_table(case)
    assert "| ddp-bf16-hook | failed in round 1: not done after 3 s (ranks 0 / 1) |" in table
    assert "then failed in round 2: rank 1 was ended by SIGKILL" in table
    assert [one is None for one in case["rows"]["fsdp2-bf16"]] == [False, True, True]


def test_rounds_begin_with_another_contestant_each_time() -> None:
    """Whoever comes after the same neighbour each time would be measured with what that one leaves behind."""
    launched: list[str] = []

    def launch_one(name: str, clip: float | None) -> dict[str, Any]:
        launched.append(name)
        return {name: figures(1.0)}

    names = ["ddp-fp32", "shardmp-fp16"]
    case = peers.new_case("tiny", None, 2, names, {})
    for number in range(2):
        peers.run_round(case, number, names, launch_one)
    assert launched == ["ddp-fp32", "shardmp-fp16", "shardmp-fp16", "ddp-fp32"]


def test_a_contestant_without_its_library_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = argparse.Namespace(
        contestants=["ddp-fp32", "deepspeed-zero2-bf16"], extensions=tmp_path, same_allocator=False
    )
    unable = peers.find_unable(options, peers.Launcher(options), None)
    assert unable == {"deepspeed-zero2-bf16": "skipped: deepspeed is not installed"}


def test_results_are_shown_again_from_their_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = made_case(ddp_fp32=[figures(100)], shardmp_fp16=[figures(50)], deepspeed_zero2_bf16=[None])
    case["failures"]["deepspeed-zero2-bf16"] = "skipped: deepspeed is not installed"
    results = {"machine": peers.machine(), "allocator": "the stock", "rounds": 1, "steps": 10, "cases": [case]}
    (tmp_path / "peers.json").write_text(json.dumps(results))
    peers.main(["--again", str(tmp_path / "peers.json"), "--markdown", str(tmp_path / "peers.md")])
    shown = capsys.readouterr().out
    assert "| shardmp-fp16 | 50.0 | 0.50 | 0.50 |" in shown
    assert "| deepspeed-zero2-bf16 | skipped: deepspeed is not installed |" in shown
    assert (tmp_path / "peers.md").read_text() == shown.removesuffix("\n")


# -- launches


@pytest.fixture
def rank_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the place of what ranks run; gives the folder where it can leave files (its $LEFT)."""

    def put(text: str) -> Path:
        (tmp_path / "measuring.py").write_text(textwrap.dedent(text))
        monkeypatch.setattr(launching, "HERE", tmp_path)
        return tmp_path

    return put


def test_a_hanging_launch_is_ended_with_everything_that_its_ranks_started(rank_script: Callable[[str], Path]) -> None:
    """DeepSpeed's ranks start compilers, through ninja in process groups of their own: one that outlived its rank would
    go on to write what the next rank builds."""
    folder = rank_script(
        """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
        open(os.environ["LEFT"] + "/pid" + os.environ["RANK"], "w").write(str(child.pid))
        print("waiting for a lock", file=sys.stderr, flush=True)
        time.sleep(600)
        """
    )
    start = time.monotonic()
    with pytest.raises(launching.LaunchError, match=r"not done after 2 s \(ranks 0, 1\)") as error:
        launching.launch(JOB, 2, {"LEFT": str(folder)}, timeout=2)
    assert time.monotonic() - start < 20
    assert "waiting for a lock" in error.value.details
    for rank in range(2):
        assert is_gone(int((folder / f"pid{rank}").read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; where nobody reaps orphans it stays as a zombie."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_rank_that_fails_ends_the_launch_and_its_error_is_the_reason(rank_script: Callable[[str], Path]) -> None:
    rank_script(
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("Type fp16 is not supported on your device.")
        time.sleep(600)
        """
    )
    with pytest.raises(launching.LaunchError, match="rank 1 ended with exit code 1: ValueError: Type fp16 is not"):
        launching.launch(JOB, 2, {}, timeout=60)


def test_a_rank_that_is_killed_is_told_from_one_that_fails(rank_script: Callable[[str], Path]) -> None:
    rank_script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(launching.LaunchError, match="rank 0 was ended by SIGKILL"):
        launching.launch(JOB, 1, {}, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no signal at the parent's death")
def test_ranks_end_when_the_benchmark_itself_is_killed() -> None:
    """Left behind, a rank that waits for a lock would wait for ever."""
    rank = "import measuring, time; measuring.die_with_parent(); print('there', flush=True); time.sleep(600)"
    parent = f"""
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", {rank!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert is_gone(pid)


def test_locks_of_killed_builds_are_removed_and_what_they_built_stays(tmp_path: Path) -> None:
    """A killed build's lock makes every later run wait for ever, without a word (deepspeedai/DeepSpeedExamples#302)."""
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "cpu_adam.so").touch()
    remove_stale_locks(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["cpu_adam.so"]


def test_extensions_belong_to_one_run_at_a_time(tmp_path: Path) -> None:
    """A second run would take the first one's locks for stale ones."""
    with peers.extensions_folder(tmp_path) as first, peers.extensions_folder(tmp_path) as second:
        assert (first, second) == (True, False)
    with peers.extensions_folder(tmp_path) as third:
        assert third


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_comparison_runs_from_launch_to_report(tmp_path: Path) -> None:
    """DDP, shardmp, FSDP2 and the bounds on the tiny model: the bytes counted are those each is known to send."""
    names = "ddp-fp32,shardmp-fp16,fsdp2-bf16-keep,compute-fp16,parts"
    command = [
        sys.executable,
        str(BENCHMARKS / "peers.py"),
        "--models",
        "tiny",
        "--contestants",
        names,
        "--rounds",
        "1",
    ]
    command += ["--steps", "3", "--warmup", "1", "--clip", "on", "--json", str(tmp_path / "peers.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), cwd=tmp_path, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    case = json.loads((tmp_path / "peers.json").read_text())["cases"][0]
    assert case["failures"] == {}
    assert list(case["rows"]) == [
        "ddp-fp32",
        "shardmp-fp16",
        "fsdp2-bf16-keep",
        "compute-fp16",
        "exchange",
        "sum",
        "update",
    ]
    for name, (found,) in case["rows"].items():
        assert found["cpu_ms"] > 0, name
    losses = [case["rows"][name][0]["last_loss"] for name in ("ddp-fp32", "shardmp-fp16", "fsdp2-bf16-keep")]
    assert losses == pytest.approx([losses[0]] * 3, abs=0.02)
    assert "| shardmp-fp16 |" in done.stdout
