"""The example program: its parts as claims, and two short runs as a user makes them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # where the program's own imports look when it runs as a script
sys.path.insert(0, str(EXAMPLES.parent / "benchmarks"))

import timeline  # noqa: E402
import train_gpt  # noqa: E402
from display import Display, duration_text, scale_text  # noqa: E402
from gpt import GPT, GPTConfig, generate  # noqa: E402
from text import Batches, read_text, split_text  # noqa: E402

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--eval-batches", "2"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CPU = torch.device("cpu")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, on one thread and on the CPU."""
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**plain, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


def lines_of(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


# -- whole runs


def test_two_ranks_train_from_text_to_table(tmp_path: Path) -> None:
    """The command of the README, with a first loss scale that must overflow: it is skipped, named and recovered from."""
    metrics = tmp_path / "new" / "metrics.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--steps", "6", "--eval-every", "3", "--accumulate", "2", "--sample-bytes", "12", "--prompt", "Python é"]
    scale = ["--init-scale", str(2.0**32), "--metrics", str(metrics), "--profile", str(tmp_path / "traces" / "run")]
    command = [*launch, str(EXAMPLES / "train_gpt.py"), *TINY, *options, *scale]
    sockets = environment(SHARDMP_READ_NEIGHBOURS="0")  # as between hosts: there a forward waits for its parameters
    done = subprocess.run(command, env=sockets, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr

    lines = lines_of(metrics)
    assert [line["kind"] for line in lines] == [
        "options", "step", "step", "step", "validation", "step", "step", "step", "validation", "summary"
    ]  # fmt: skip
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(5.0 < line["loss"] < 6.0 for line in steps)  # an untrained model's: ln 256 = 5.55
    assert steps[0]["loss_scale"] == 2.0**32
    assert steps[0]["skipped"]
    assert steps[0]["grad_norm"] is None
    assert steps[1]["loss_scale"] == 2.0**31
    assert steps[1]["lr"] == steps[0]["lr"]  # the skipped step used up no part of the schedule

    skip = r"step 1: overflow, (inf|nan).* in the gradient of \S+.* on rank 0, 1: skipped, loss scale 2\^32 -> 2\^31"
    assert re.search(skip, done.stdout)
    assert done.stdout.count("step 1: overflow") == 1  # rank 0 alone speaks
    assert "step 3: validation loss 5." in done.stdout
    assert "Python é" in done.stdout
    summary = lines[-1]
    assert math.isfinite(summary["validation_loss"])
    buckets_in_flight = summary["held"].pop("buckets")
    assert buckets_in_flight <= summary["predicted"].pop("buckets")  # the formula is an upper bound there
    assert summary["held"] == summary["predicted"]
    assert summary["sent_per_step"] == summary["predicted_sent_per_step"]
    assert f"{summary['held']['moments'] / 1e6:.2f}" in done.stdout
    assert "sent per step" in done.stdout
    assert "trace of 3 steps in " in done.stdout
    for rank in (0, 1):
        check_trace(tmp_path / "traces" / f"run.rank{rank}.pt.trace.json", rank)


def check_trace(path: Path, rank: int) -> None:
    """Three steps after the warm-up, each with all of shardmp's ranges, in what Perfetto and TensorBoard's plugin read.

    Chrome's trace events: "X" is a range, `ts` and `dur` are microseconds. The plugin takes each `NAME.pt.trace.json` of a
    folder for a worker's, and the rank from `distributedInfo`.
    """
    trace = json.loads(path.read_text())
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
    ranges = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in ranges if event["name"].startswith("ProfilerStep#")]
    assert [step["name"] for step in steps] == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]  # counted from 0
    for step in steps:
        inside = {event["name"] for event in ranges if 0 <= event["ts"] - step["ts"] <= step["dur"]}
        own = {name.removeprefix("shardmp.") for name in inside if name.startswith("shardmp.")}
        assert own >= {"forward_wait", "reduce", "verdict", "update", "gather"}
        check_timeline(path, step["name"])


def check_timeline(path: Path, name: str) -> None:
    """What benchmarks/timeline.py draws of a step: its phases in their order, and each range in the phase it belongs to."""
    spans = timeline.read_spans(path)
    (step,) = (step for step in timeline.steps_of(spans, path) if step.name == name)
    lanes = timeline.lanes_of(spans, step)
    (forward,), (backward,), (update,) = lanes["forward"], lanes["backward"], lanes["step()"]
    assert step.begin == forward.begin < forward.end == backward.begin < backward.end
    assert backward.end <= update.begin < update.end <= step.end
    for lane in ("verdict", "update", "gather"):
        assert all(update.begin <= span.begin < span.end <= update.end for span in lanes[lane])
    assert all(forward.end <= span.begin < span.end <= backward.end for span in lanes["reduce"])


def test_ctrl_c_on_one_rank_stops_both_after_the_same_step(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--steps", "100000", "--metrics", str(metrics)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **address),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        deadline = time.monotonic() + 80
        while not (metrics.exists() and '"step": 2' in metrics.read_text()):
            if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
                for rank in ranks:
                    rank.kill()
                pytest.fail(f"the ranks did not train: {[rank.communicate() for rank in ranks]}")
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGINT)
        outputs = [rank.communicate(timeout=30) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130]
    lines = lines_of(metrics)
    stopped = lines[-1]
    assert stopped["kind"] == "stopped"
    assert stopped["step"] == sum(line["kind"] == "step" for line in lines)
    assert f"stopped by Ctrl-C after step {stopped['step']} of 100000" in outputs[0][0]
    assert outputs[1] == ("", "")
    assert "Traceback" not in outputs[0][1]


# -- mistakes: one line, status 2, before any process group


def leave_with_status_2(options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """What the program printed to standard error while it refused these options."""
    monkeypatch.setattr(
        train_gpt.shardmp, "init", lambda: pytest.fail("joined the ranks before it looked at the options")
    )
    monkeypatch.setattr(train_gpt.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
    with pytest.raises(SystemExit) as left:
        train_gpt.main()
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "the file is empty"),
        (b"tiny", "4 bytes are too few: with --context 128 at least 1290 are needed"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_useless_text_is_one_line_from_rank_0_and_status_2(
    content: bytes | None,
    said: str,
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("RANK", str(rank))
    options = ["--text", str(path), "--metrics", str(tmp_path / "metrics")]
    printed = leave_with_status_2(options, monkeypatch, capsys)
    if rank == 0:
        assert printed.count("\n") == 1
        assert printed.startswith("train_gpt.py: error: --text")
        assert said in printed
    else:
        assert printed == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--precision", "bf16", "--init-scale", "8"], "bf16 has no loss scale"),
        (["--width", "100", "--heads", "3"], "width must be a multiple of heads, got width 100 and 3 heads"),
        (["--metrics", "/dev/null/metrics"], "--metrics /dev/null/metrics: "),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--steps", "5", "--profile"], "--profile: the trace is of steps 4 to 6, --steps is 5"),
        (["--profile", "/dev/null/folder/trace"], "--profile /dev/null/folder/trace: "),
        (["--lr", "nan"], "--lr: expected at least 0.0, got nan"),
        (["--batch", "two"], "--batch: invalid int value: 'two'"),
    ],
)
def test_bad_options_are_refused_by_name_before_any_process_group(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert said in leave_with_status_2(options, monkeypatch, capsys)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_one_rank_prints_the_help(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--help"])
    with pytest.raises(SystemExit) as left:
        train_gpt.main()
    assert left.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert ("--growth-interval" in printed.out) == (rank == 0)
    assert "None" not in printed.out  # every option says its default


# -- data


def test_the_default_text_is_the_same_every_time_and_splits_without_overlap() -> None:
    text = read_text(None)
    assert text == read_text(None)
    assert len(text) > 100_000
    training, held_out = split_text(text, context=128)
    assert bytes(training.tolist()) + bytes(held_out.tolist()) == text
    assert len(held_out) == len(text) // 10


def test_the_shortest_text_gives_one_held_out_window() -> None:
    training, held_out = split_text(bytes(90), context=8)
    assert (len(training), len(held_out)) == (81, 9)
    tokens, targets = Batches(held_out, 8, size=3, seed=0, device=CPU).draw()
    assert tokens.shape == targets.shape == (3, 8)
    with pytest.raises(ValueError, match="89 bytes are too few"):
        split_text(bytes(89), context=8)


def test_targets_are_the_next_bytes_and_seeds_decide_the_windows() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    tokens, targets = Batches(data, 16, size=4, seed=5, device=CPU).draw()
    assert torch.equal(tokens + 1, targets)
    assert tokens.dtype == torch.int64
    again, _ = Batches(data, 16, size=4, seed=5, device=CPU).draw()
    other_rank, _ = Batches(data, 16, size=4, seed=6, device=CPU).draw()
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other_rank)


# -- optimization


def test_matrices_decay_and_nothing_else_does() -> None:
    model = GPT(GPTConfig(context=8, layers=2, width=16, heads=2))
    decay, rest = train_gpt.parameter_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for parameter in decay["params"]}
    others = {names[id(parameter)] for parameter in rest["params"]}
    assert len(decayed) == 2 * 4 + 2  # four matrices in a block, the n-grams and the head
    assert "head.weight" in decayed
    assert {"token.weight", "position.weight", "norm.weight", "blocks.1.mlp.expand.bias"} <= others
    assert decayed | others == set(names.values())
    assert not decayed & others


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine_to_a_tenth() -> None:
    def factor(step: int) -> float:
        return train_gpt.lr_factor(step, steps=110, warmup=10)

    assert [factor(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.55)
    assert factor(110) == factor(500) == pytest.approx(0.1)
    assert train_gpt.lr_factor(0, steps=5, warmup=0) == 1.0
    assert train_gpt.lr_factor(3, steps=2, warmup=20) == 0.2  # a run shorter than its warm-up


# -- model


def test_a_byte_depends_on_the_bytes_before_it_alone() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, layers=2, width=16, heads=2)).eval()
    for parameter in model.parameters():  # blocks start as the identity: mix them in
        torch.nn.init.normal_(parameter)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_a_sample_is_a_function_of_its_seed_and_may_outgrow_the_context() -> None:
    model = GPT(GPTConfig(context=8, layers=1, width=16, heads=2)).eval()

    def sample(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(generate(model, torch.tensor([84]), length=20, context=8, generator=generator))

    assert len(sample(1)) == 20
    assert sample(1) == sample(1) != sample(2)


def test_the_demo_has_the_size_that_it_claims() -> None:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters())
    assert parameters == (6 * 12 + 4) * 384**2 + (6 * 13 + 1 + 2) * 384 + (256 + 128 + 256) * 384
    assert f"{parameters / 1e6:.1f}M" in train_gpt.__doc__


# -- display


def test_numbers_without_a_word_in_json_become_null(tmp_path: Path) -> None:
    display = Display(active=True, steps=1, metrics=tmp_path / "metrics")
    display.write("step", grad_norm=math.inf, loss=math.nan, step=3)
    assert lines_of(tmp_path / "metrics") == [{"kind": "step", "grad_norm": None, "loss": None, "step": 3}]


def test_a_silent_display_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with Display(active=False, steps=1, metrics=tmp_path / "metrics") as display:
        display.say("hello")
        display.validation(1, 2.0)
    assert not (tmp_path / "metrics").exists()
    assert capsys.readouterr().out == ""


def test_scales_and_durations_read_as_people_say_them() -> None:
    assert [scale_text(scale) for scale in (65536.0, 1.0, 0.5, 1000.0)] == ["2^16", "2^0", "2^-1", "1000"]
    assert [duration_text(seconds) for seconds in (0.4, 61.9, 3600)] == ["0:00", "1:01", "60:00"]
