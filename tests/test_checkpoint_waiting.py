"""Waiting around a checkpoint: a slow disk is waited for; a rank that is stopped, gone or stuck is named in time.

Each on real ranks, blocking and in the background; limits are shortened, the logic is the same.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import equal, masters, sharded
from ranks import run_ranks
from torch import nn

import shardmp
from shardmp import beats, directory
from shardmp.agreement import Joint
from shardmp.beats import Line, NoAnswer, Others
from shardmp.faults import Member, Roll
from shardmp.storage import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:(a save in the background failed|.*random)")
TIMEOUT = 4.0


def build(width: int = 64) -> Any:
    torch.manual_seed(3)
    return sharded(nn.Linear(width, width), torch.optim.AdamW, 0.1)


def step(model: Any, optimizer: Any) -> None:
    optimizer.backward(model(torch.ones(2, 64)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def failure(act: Callable[[], Any]) -> tuple[str, str, float]:
    """The error's class and text, and after how many seconds it came."""
    started = time.monotonic()
    try:
        act()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "nothing", time.monotonic() - started


def on_rank_1(owner: Any, name: str, first: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Before rank 1 makes this call something happens to it."""
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        first()
        return real(*args, **options)

    if dist.get_rank() == 1:
        patch.setattr(owner, name, call)


# -- stopped


def stopped(root: Path, how: str) -> Any:
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    model, optimizer = build()
    shardmp.save(root, model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        where = (Reader, "read_data") if how == "load" else (Writer, "write_data")
        on_rank_1(*where, lambda: os.kill(os.getpid(), signal.SIGSTOP), patch)
        if how == "load":
            told = failure(lambda: shardmp.load(root, model, optimizer))
        else:
            told = failure(lambda: shardmp.save(root, model, optimizer, background=how == "background").wait())
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGCONT)
    afterwards = [
        failure(act)[1] for act in (lambda: step(model, optimizer), lambda: shardmp.save(root, model, optimizer))
    ]
    return *told, afterwards, [t.name for t in threading.enumerate() if t.name.startswith("shardmp")]


@pytest.mark.parametrize("how", ["blocking", "background", "load"])
def test_d22_a_rank_that_is_stopped_is_named_within_the_time_out(how: str, tmp_path: Path) -> None:
    told = run_ranks(stopped, 3, tmp_path, how, fresh=True, group_timeout=TIMEOUT)
    for rank, (kind, text, seconds, afterwards, threads) in enumerate(told):
        assert kind == "RuntimeError"  # also on the one that was stopped, which is woken later
        assert f"rank {rank} (host {socket.gethostname()}, pid " in text
        assert "rank 1 (host " in text
        assert "is stopped (SIGSTOP)" in text  # with the age of its last sign, where it has given one
        assert rank == 1 or seconds < TIMEOUT + 5
        assert all("failed before" in refusal for refusal in afterwards)
        assert not threads
    assert [path.name for path in directory.complete(tmp_path)] == ["step-000000000.1"]


# -- killed, and the process's end

WORKER = """
    import os, signal, sys, time
    import torch, shardmp
    from shardmp.storage import Writer
    torch.set_num_threads(1)
    world = shardmp.init(timeout=4)
    how, background = sys.argv[1], sys.argv[2] == "background"
    model = torch.nn.Linear(16, 16)
    model, optimizer = shardmp.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    shardmp.save(sys.argv[3], model, optimizer)
    if world.rank == 1:
        Writer.write_data = lambda *args: os.kill(os.getpid(), getattr(signal, how))
    print(time.time(), flush=True)
    try:
        saving = shardmp.save(sys.argv[3], model, optimizer, background=background)
        if how == "SIGKILL":
            saving.wait()
        # else the main thread ends here, and the process waits for the one that saves
    except RuntimeError as error:
        print(f"{time.time()} {error}", flush=True)
        sys.exit(3)
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("how", "mode"), [("SIGKILL", "blocking"), ("SIGKILL", "background"), ("SIGSTOP", "background")]
)
def test_d22_a_process_that_is_gone_is_named_at_once_and_every_process_ends(
    how: str, mode: str, tmp_path: Path, free_port: int
) -> None:
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    command = [sys.executable, "-c", textwrap.dedent(WORKER), how, mode, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(n), "LOCAL_RANK": str(n)}, stdout=-1, stderr=-1, text=True)
        for n in range(2)
    ]
    try:
        out, error = ranks[0].communicate(timeout=90)
        ended = time.time()
    finally:
        for process in ranks:
            process.kill()
    began, _, said = out.partition("\n")
    if how == "SIGKILL":
        assert ranks[0].returncode == 3, error
        seconds, _, said = said.partition(" ")
        assert float(seconds) - float(began) < 3.5
        assert f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}) is gone: it was killed" in said
    else:
        assert ended - float(began) < 4 + 5 + 2  # and the interpreter's own end
        assert f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}) is stopped (SIGSTOP)" in error
    assert [path.name for path in directory.complete(tmp_path)] == ["step-000000000.1"]


# -- a disk that takes its time


def slow_disk(root: Path, seconds: float, stale: float, how: str) -> tuple[tuple[str, str, float], bool]:
    """An fsync (or another call) of rank 1 sleeps, or until rank 0 has had its error."""
    model, optimizer = build()
    step(model, optimizer)
    flag = root.with_name("flag")

    def sleep() -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not flag.exists():
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beats, "STALE", stale)
        patch.setattr("shardmp.agreement.STALE", stale)
        if how == "load":
            shardmp.save(root, model, optimizer)
            on_rank_1(Reader, "_opened", sleep, patch)
            told = failure(lambda: shardmp.load(root, model, optimizer))
        elif how == "sweep":  # rank 0 alone removes what is left over
            (root / ".writing-old").mkdir(parents=True, exist_ok=True)
            dist.barrier()
            real = os.rmdir
            patch.setattr(os, "rmdir", lambda *args, **options: (sleep(), real(*args, **options)))
            told = failure(lambda: shardmp.save(root, model, optimizer))
        else:
            on_rank_1(os, "fsync", sleep, patch)
            saving = failure_or_saving(root, model, optimizer, how == "background")
            for _ in range(3):
                if how == "background":
                    step(model, optimizer)
            told = failure(saving)
        if told[0]:
            flag.touch()
    if told[0]:
        return told, False
    expected = masters(optimizer) if how != "background" else None
    shardmp.load(root, model, optimizer)
    return told, expected is None or equal(masters(optimizer), expected)


def failure_or_saving(root: Path, model: Any, optimizer: Any, background: bool) -> Callable[[], Any]:
    if background:
        return shardmp.save(root, model, optimizer, background=True).wait
    return lambda: shardmp.save(root, model, optimizer)


@pytest.mark.parametrize("how", ["blocking", "background", "load", "sweep"])
def test_d22_a_disk_is_waited_for_beyond_the_age_of_a_beat(how: str, tmp_path: Path) -> None:
    for (kind, text, _), is_right in run_ranks(
        slow_disk, 2, tmp_path / "run", 2.5, 1.0, how, fresh=True, group_timeout=20.0
    ):
        assert not kind, text
        assert is_right


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_d22_a_disk_that_does_not_answer_within_the_time_out_is_named_with_the_file(how: str, tmp_path: Path) -> None:
    told = run_ranks(slow_disk, 2, tmp_path / "run", 40.0, 30.0, how, fresh=True, group_timeout=3.0)
    for rank, ((kind, text, seconds), _) in enumerate(told):
        assert kind == "RuntimeError"
        assert "rank 1 (host " in text
        assert "is alive, but has not moved for" in text
        assert f"last at syncing {tmp_path / 'run'}" in text
        assert "__1_0.distcp" in text
        assert rank == 1 or seconds < 3 + 5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocking", "background"])
def test_d22_an_fsync_of_40_s_passes(how: str, tmp_path: Path) -> None:
    for (kind, text, seconds), is_right in run_ranks(
        slow_disk, 2, tmp_path / "run", 40.0, 30.0, how, fresh=True, group_timeout=600.0, timeout=150.0
    ):
        assert not kind, text
        assert is_right
        assert seconds > 35


# -- Ctrl-C


def interrupted(root: Path, rank: int) -> tuple[str, str, float]:
    """SIGINT while this rank waits for another one (0), or in the midst of its own writing (1)."""
    model, optimizer = build()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            on_rank_1(Writer, "write_data", lambda: time.sleep(3), patch)
            if dist.get_rank() == 0:
                threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            on_rank_1(Writer, "write_data", lambda: os.kill(os.getpid(), signal.SIGINT), patch)
        told = failure(lambda: shardmp.save(root, model, optimizer))
    assert "failed before" in failure(lambda: step(model, optimizer))[1]
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_in_a_save_is_raised_as_itself_and_the_others_are_told(rank: int, tmp_path: Path) -> None:
    told = run_ranks(interrupted, 2, tmp_path, rank, fresh=True, group_timeout=20.0)
    kind, _, seconds = told[rank]
    assert kind == "KeyboardInterrupt"
    assert seconds < 2.5  # not when the other one is done
    kind, text, seconds = told[1 - rank]
    assert kind == "RuntimeError"
    assert f"rank {rank} (host " in text
    assert "raised KeyboardInterrupt" in text
    assert seconds < 6
    assert not directory.complete(tmp_path)


# -- what it leaves behind


def store_keys(root: Path) -> tuple[list[int], list[str]]:
    model, optimizer = build()
    counts = []
    for _ in range(4):
        shardmp.save(root, model, optimizer, background=True, keep=1).wait()
        shardmp.load(root, model, optimizer)
        dist.barrier()
        counts.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    return counts, [t.name for t in threading.enumerate() if t.name.startswith("shardmp")]


def test_a_save_and_a_load_leave_three_numbers_in_the_store_and_no_thread(tmp_path: Path) -> None:
    for counts, threads in run_ranks(store_keys, 3, tmp_path):
        assert counts[3] - counts[2] == counts[2] - counts[1] <= 3
        assert not threads


def two_models(root: Path) -> list[bool]:
    pairs = [build(), build(96)]
    for _, optimizer in pairs:
        with torch.no_grad():
            for part in optimizer._parameters.buckets:
                part.master.add_(1.0)
    expected = [masters(optimizer) for _, optimizer in pairs]
    savings = []
    for index, (model, optimizer) in enumerate(pairs):
        delay = 0.2 * dist.get_rank() * (1 - index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardmp.saving._give_way", functools.partial(time.sleep, delay))
            savings.append(shardmp.save(root / str(index), model, optimizer, background=True))
            time.sleep(0.05)
    for saving in savings:
        saving.wait()
    found = []
    for index, (model, optimizer) in enumerate(pairs):
        shardmp.load(root / str(index), model, optimizer)
        found.append(equal(masters(optimizer), expected[index]))
    return found


def test_two_models_saved_in_the_background_at_once_do_not_mix(tmp_path: Path) -> None:
    """Their threads come in another order on each rank."""
    assert run_ranks(two_models, 2, tmp_path) == [[True, True]] * 2


def large_plans(root: Path) -> bool:
    """What rank 0 is told is larger than one value of the store may be."""
    model, optimizer = build()
    collectives = optimizer._collectives
    with Joint(collectives, "a test") as joint:
        told = joint.together(lambda: bytes([joint.rank]) * (5 * 2**20 + 3), for_first=True)
        again = joint.together(lambda: joint.rank)
    assert again == list(range(joint.world_size))
    return [set(value) for value in told] == ([{n} for n in range(joint.world_size)] if joint.rank == 0 else [])


def test_what_goes_to_rank_0_may_be_large(tmp_path: Path) -> None:
    assert all(run_ranks(large_plans, 3, tmp_path))


def refused_alone(root: Path) -> tuple[str, float]:
    """Rank 1 has failed before, and saves all the same."""
    model, optimizer = build()
    if dist.get_rank() == 1:
        optimizer._collectives.poison("an error of its own")
    return failure(lambda: shardmp.save(root, model, optimizer))[1:]


def test_a_rank_that_refuses_to_save_tells_the_others(tmp_path: Path) -> None:
    (text, seconds), (own, _) = run_ranks(refused_alone, 2, tmp_path, group_timeout=20.0)
    assert "rank 1 (host " in text
    assert "an error of its own" in text
    assert seconds < 5
    assert "an error of its own" in own


# -- the parts


class _Speaker:
    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self.count = 0

    def connect(self) -> Any:
        return self._connect()

    def beat(self, store: Any) -> None:
        self.count += 1


def test_a_store_that_does_not_answer_is_left_and_one_that_is_gone_is_told() -> None:
    release = threading.Event()
    speaker = _Speaker(dist.HashStore)
    line = Line(speaker, 0.01)
    with pytest.raises(NoAnswer):
        line.ask(lambda store: release.wait(10), 0.1)
    release.set()
    assert line.ask(lambda store: store.add("n", 2), 5.0) == 2
    assert speaker.count > 0

    def lost() -> Any:
        raise RuntimeError("connection lost")

    other = _Speaker(lost)
    gone = Line(other, 1.0)
    with pytest.raises(RuntimeError, match="connection lost"):
        gone.ask(lambda store: store.add("n", 1), 5.0)
    line.end()
    gone.end()


def test_without_a_speaker_the_thread_ends() -> None:
    speaker = _Speaker(dist.HashStore)
    line = Line(speaker, 0.02)
    del speaker
    line._thread.join(5.0)
    assert not line._thread.is_alive()


def test_beats_of_another_host_are_judged_by_their_age_and_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("shardmp.beats.time.monotonic", lambda: now[0])
    members = [Member(0, "a", "a", 1, "", "1"), Member(1, "b", "b", 2, "", "2")]
    closed: list[int] = []
    others = Others(Roll(0, members, "k"), "k/beat", 100.0, lambda rank: rank in closed)

    def judged(seconds: float, beat: str, raised: str = "") -> str:
        now[0] = seconds
        return others.whom_in_vain({1: (beat, raised)})

    assert not judged(0, "")
    assert not judged(99, "")  # it has not come yet: as long as for any collective
    assert "does not answer" in judged(101, "")
    assert not judged(102, '[1, "writing x", 1]')
    assert not judged(131, '[1, "writing x", 1]')
    assert "its last sign of life is 31 s old, last at writing x" in judged(133, '[1, "writing x", 1]')
    assert not judged(134, '[2, "writing x", 1]')
    assert not judged(141, '[2, "writing x", 1]')
    closed.append(1)
    assert "its connection is closed" in judged(142, '[2, "writing x", 1]')
    assert not judged(143, '[3, "writing x", 1]')
    assert "has not moved for 101 s" in judged(203, '[4, "writing x", 1]')
    assert not judged(204, '[5, "writing x", 2]')
    assert "raised ValueError: x" in judged(205, '[5, "writing x", 2]', "raised ValueError: x")


def background_failure_is_told_once(root: Path) -> list[str]:
    model, optimizer = build()
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")

        def broken(*args: Any) -> Any:
            raise OSError(28, "No space left on device")

        patch.setattr(Writer, "write_data", broken)
        saving = shardmp.save(root, model, optimizer, background=True)
        kinds = [failure(saving.wait)[0], failure(saving.wait)[0]]
    assert any("a save in the background failed" in str(warning.message) for warning in caught)
    step(model, optimizer)
    return kinds


def test_a_save_that_failed_is_never_taken_for_complete(tmp_path: Path) -> None:
    assert run_ranks(background_failure_is_told_once, 2, tmp_path) == [["OSError", "RuntimeError"]] * 2
