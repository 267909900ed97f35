"""A checkpoint is complete or it is not there; what is damaged is found, named, and passed over."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import equal, masters, sharded
from ranks import RankError, run_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import shardmp
from shardmp import CheckpointError, directory, new_file, storage, world
from shardmp.manifest import Manifest
from shardmp.storage import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:passing over a checkpoint")


class Big(nn.Module):
    """Large enough for elements to be written from where they lie, and small ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(150, 300)
        self.second = nn.Linear(300, 70)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def build() -> Any:
    return sharded(Big(), torch.optim.AdamW, 0.01, bucket_mb=0.05)


def step(model: Any, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(optimizer.steps)
    optimizer.backward(model(torch.randn(4, 150, generator=generator)))
    optimizer.step()
    optimizer.zero_grad()


def save_steps(root: Path, *steps: int) -> dict[int, Any]:
    """A run that is saved after each of `steps`; the masters by step."""
    model, optimizer = build()
    found = {}
    while optimizer.steps < max(steps):
        step(model, optimizer)
        if optimizer.steps in steps:
            shardmp.save(root, model, optimizer)
            found[optimizer.steps] = masters(optimizer)
    return found


def load_masters(root: Path, which: Any = None) -> tuple[int, Any]:
    model, optimizer = build()
    loaded = shardmp.load(root, model, optimizer, step=which)
    return loaded.step, masters(optimizer)


def load_error(root: Path, which: Any = None) -> str:
    """The error of a load, the same kind on every rank; `step` and `save` refuse what is half loaded."""
    model, optimizer = build()
    with pytest.raises(CheckpointError) as caught:
        shardmp.load(root, model, optimizer, step=which)
    optimizer.backward(model(torch.ones(4, 150))) if optimizer._collectives.failure is None else None
    return str(caught.value)


# -- killed


CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")


def save_killed_at_every_call(root: Path) -> list[int]:
    """Save in a child that kills itself at its n-th call of the system; after each the last complete one must load."""
    model, optimizer = build()
    step(model, optimizer)
    shardmp.save(root, model, optimizer, keep=1)
    values = {1: masters(optimizer)}
    other, fresh = build()
    moments = []
    new_file._AT_ONCE = 4096
    for calls, places in ((CALLS, range(100)), (("write",), (0, 7, 30))):
        for number in places:
            child = os.fork()
            if not child:
                _kill_at(number, calls)
                step(model, optimizer)
                shardmp.save(root, model, optimizer, keep=1, background=calls is not CALLS).wait()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            loaded = shardmp.load(root, other, fresh)
            moments.append(loaded.step)
            if loaded.step == 2 and 2 not in values:  # complete before the kill: the step itself says what is right
                child_of = build()
                step(*child_of)
                step(*child_of)
                values[2] = masters(child_of[1])
            assert equal(masters(fresh), values[loaded.step])
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            if loaded.step == 2:
                shardmp.save(root, model, optimizer, keep=1)  # so that the next child starts from the same again
    return moments


def _kill_at(number: int, calls: Sequence[str]) -> None:
    left = [number]

    def killing(call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapper

    for name in calls:
        setattr(os, name, killing(getattr(os, name)))


def test_killed_at_any_call_of_the_system_the_last_complete_checkpoint_loads(tmp_path: Path) -> None:
    moments = run_ranks(save_killed_at_every_call, 1, tmp_path)[0]
    assert len(moments) > 15
    assert set(moments) == {1, 2}  # some moments are before and some after the checkpoint became complete


def save_and_die(root: Path, dying: int, where: str) -> None:
    save_steps(root, 1)
    rank = torch.distributed.get_rank()
    if rank == dying:
        call = getattr(storage.Writer, where)

        def die(self: Any, *args: Any, **kwargs: Any) -> None:
            if where == "write_data":
                call(self, *args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(storage.Writer, where, die)
    save_steps(root, 2)


@pytest.mark.parametrize(("dying", "where"), [(1, "write_data"), (0, "finish")])
def test_a_rank_killed_before_the_commit_leaves_the_older_checkpoint(dying: int, where: str, tmp_path: Path) -> None:
    """C37: rank 1 dies when its file is written, or rank 0 before the commit; both ranks load step 1."""
    with pytest.raises(RankError):
        run_ranks(save_and_die, 2, tmp_path, dying, where, fresh=True, group_timeout=3.0)
    assert [path.name for path in directory.complete(tmp_path)] == ["step-000000001.1"]
    assert any(path.name.startswith(".writing-") for path in tmp_path.iterdir())
    (first, values), (second, others) = run_ranks(load_masters, 2, tmp_path)
    assert first == second == 1
    assert equal(values, others)


def save_until_killed(root: Path, delay: float) -> None:
    model, optimizer = build()
    shardmp.save(root, model, optimizer, keep=2)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        step(model, optimizer)
        shardmp.save(root, model, optimizer, keep=2, background=True)


@pytest.mark.parametrize("delay", [0.05, 0.13, 0.21])
def test_killed_while_it_saves_in_the_background_all_ranks_load_the_same_step(delay: float, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(save_until_killed, 2, tmp_path, delay, fresh=True, group_timeout=3.0)
    (first, values), (second, others) = run_ranks(load_masters, 2, tmp_path)
    assert first == second
    assert equal(values, others)
    assert equal(
        values, run_ranks(save_steps, 2, tmp_path / "again", *range(1, first + 1))[0][first] if first else values
    )


# -- damaged


def files_of(root: Path, number: int) -> Path:
    return next(path for path in directory.complete(root) if directory.step_of(path) == number)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """Checkpoints of steps 1 and 2, by two ranks, and their masters."""
    return tmp_path, run_ranks(save_steps, 2, tmp_path, 1, 2)[0]


def check_older_loads(root: Path, values: dict[int, Any]) -> None:
    for number, found in run_ranks(load_masters, 2, root, "latest good"):
        assert number == 1
        assert equal(found, values[1])


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
def test_a_truncated_or_missing_file_is_named_and_the_older_checkpoint_loads(two: Any, name: str) -> None:
    root, values = two
    path = files_of(root, 2) / name
    os.truncate(path, path.stat().st_size - 8)
    assert all(name in error for error in run_ranks(load_error, 2, root))
    check_older_loads(root, values)
    path.unlink()
    assert all(name in error for error in run_ranks(load_error, 3, root))
    check_older_loads(root, values)


def test_any_altered_byte_is_found(two: Any) -> None:
    """Of heads, elements and tails, in every file; `latest good` passes the checkpoint over."""
    root, values = two
    path = files_of(root, 2)
    manifest = Manifest.load(path)
    places: list[tuple[str, int]] = [(".metadata", 10), ("manifest.json", 100)]
    for name, records in manifest.records.items():
        large = max(records, key=lambda record: record.data)
        assert large.data
        small = min(records, key=lambda record: record.length)
        places += [
            (name, large.offset + 3),
            (name, large.offset + large.head + 1000),
            (name, large.offset + large.length - 9),
        ]
        places.append((name, small.offset + small.head // 2))
    for name, place in places:
        original = (path / name).read_bytes()
        changed = bytearray(original)
        changed[place] ^= 0x20
        (path / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            _verify(path)
        assert all(name in error for error in run_ranks(load_error, 2, root)), (name, place)
        (path / name).write_bytes(original)
    _verify(path)
    changed = bytearray((path / name).read_bytes())
    changed[places[-1][1]] ^= 1
    (path / name).write_bytes(changed)
    check_older_loads(root, values)


def _verify(path: Path) -> None:
    manifest = Manifest.load(path)
    manifest.check_sizes(path)
    manifest.check_contents(path, list(manifest.records))


def half_loaded(root: Path) -> None:
    model, optimizer = build()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is altered"):
        shardmp.load(root, model, optimizer)
    for refused in (lambda: shardmp.save(root, model, optimizer), lambda: step(model, optimizer)):
        with pytest.raises(RuntimeError, match="failed half-way"):
            refused()
    assert shardmp.load(root, model, optimizer, step=1).step == 1
    step(model, optimizer)  # and all is well again


def test_after_a_load_that_failed_half_way_nothing_steps_or_saves(two: Any) -> None:
    root, _ = two
    path = files_of(root, 2) / "__1_0.distcp"
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    run_ranks(half_loaded, 2, root)


def load_from_a_slow_disk(root: Path, step: str | None) -> int | None:
    """The control group, which is for short messages, gives up after a second; rank 1 needs two for a file."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(world.control_group, "__defaults__", (None, "control", timedelta(seconds=1)))
    model, optimizer = build()
    if torch.distributed.get_rank() == 1:
        slow = Manifest.check_contents if step else Reader.read_data

        def slowly(*args: Any) -> Any:
            time.sleep(2)
            return slow(*args)

        monkeypatch.setattr(Manifest if step else Reader, slow.__name__, slowly)
    try:
        return shardmp.load(root, model, optimizer, step=step).step
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("step", [None, "latest good"])
def test_a_rank_may_read_for_longer_than_a_message_takes(two: Any, step: str | None) -> None:
    assert run_ranks(load_from_a_slow_disk, 2, two[0], step, fresh=True) == [2, 2]


def test_no_intact_checkpoint_is_an_error_that_says_so(two: Any) -> None:
    root, _ = two
    for number in (1, 2):
        os.truncate(files_of(root, number) / "__0_0.distcp", 5)
    for error in run_ranks(load_error, 2, root, "latest good"):
        assert "no intact checkpoint" in error


def load_missing(root: Path) -> list[str]:
    model, optimizer = build()
    found = []
    for where, which in ((root / "nowhere", None), (root, 7)):
        with pytest.raises(FileNotFoundError) as caught:
            shardmp.load(where, model, optimizer, step=which)
        found.append(str(caught.value))
    return found


def test_a_checkpoint_that_is_not_there_is_named_on_every_rank(two: Any) -> None:
    for nowhere, seven in run_ranks(load_missing, 2, two[0]):
        assert "nowhere" in nowhere
        assert "does not exist" in nowhere
        assert "step 7" in seven
        assert "there are steps 1, 2" in seven


# -- not written


def save_beyond_the_limit(root: Path) -> str:
    model, optimizer = build()
    step(model, optimizer)
    shardmp.save(root, model, optimizer)
    if torch.distributed.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    step(model, optimizer)
    with pytest.raises(OSError) as caught:
        shardmp.save(root, model, optimizer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shardmp.save(root, model, optimizer)  # with room again
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the system refuses in the middle of a write."""
    for error in run_ranks(save_beyond_the_limit, 2, tmp_path, fresh=True):
        assert "rank 1" in error
        assert "__1_0.distcp" in error
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-000000001.1", "step-000000002.2"]


def save_within_a_save(root: Path) -> Any:
    """A run saves; while it writes, another one saves the same step into the same directory."""
    (model, optimizer), (other, others) = build(), build()
    step(model, optimizer)
    step(other, others)
    with torch.no_grad():
        for part in others._parameters.buckets:
            part.master.mul_(2.0)
    real = Writer.write_data

    def interrupted(self: Writer, *args: Any) -> Any:
        Writer.write_data = real  # type: ignore[method-assign]
        written = real(self, *args)
        shardmp.save(root, other, others)
        return written

    Writer.write_data = interrupted  # type: ignore[method-assign]
    with pytest.raises(OSError) as caught:
        shardmp.save(root, model, optimizer)
    expected = masters(others)
    loaded = shardmp.load(root, model, optimizer, step="latest good")
    return str(caught.value), loaded.path.name, equal(masters(optimizer), expected)


def test_of_two_runs_that_save_at_once_one_is_whole_and_the_other_gets_an_error(tmp_path: Path) -> None:
    """A job that was thought dead, and its successor: no file of one may end up in the other's checkpoint."""
    for error, name, same in run_ranks(save_within_a_save, 1, tmp_path):
        assert "No such file" in error
        assert name == "step-000000001.1"
        assert same
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000000001.1"]


def save_fails(root: Path) -> str:
    model, optimizer = build()
    with pytest.raises(OSError) as caught:
        shardmp.save(root, model, optimizer)
    step(model, optimizer)  # training goes on
    return str(caught.value)


def test_a_directory_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in run_ranks(save_fails, 2, tmp_path / "file" / "run"):
        assert "file" in error
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if not os.access(closed, os.W_OK):  # root may write everywhere
        for error in run_ranks(save_fails, 2, closed):
            assert "closed" in error


def test_keep_removes_old_ones_when_the_new_one_is_complete(tmp_path: Path) -> None:
    run_ranks(save_and_keep, 2, tmp_path)
    assert [path.name for path in directory.complete(tmp_path)] == ["step-000000004.4", "step-000000003.3"]
    assert (tmp_path / "latest").read_text() == "step-000000004.4\n"
    assert len(list(tmp_path.iterdir())) == 3


def save_and_keep(root: Path) -> None:
    model, optimizer = build()
    for _ in range(4):
        step(model, optimizer)
        shardmp.save(root, model, optimizer, keep=2)


# -- crafted


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch EVIL",)


def test_a_crafted_file_runs_no_code(two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `.metadata` and in a value that is not a tensor: plain DCP would run it, from either."""
    root, _ = two
    monkeypatch.chdir(tmp_path)
    path = files_of(root, 2).rename(root / "foreign")
    (path / "manifest.json").unlink()  # a checkpoint that claims to be plain DCP's
    original = (path / ".metadata").read_bytes()

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    for error in run_ranks(load_error, 2, path):
        assert ".metadata" in error
        assert "system" in error
    with pytest.raises(Exception, match=".*"):
        FileSystemReader(path).read_metadata()
        raise RuntimeError("read")
    assert (tmp_path / "EVIL").exists()  # the file is dangerous indeed
    (tmp_path / "EVIL").unlink()

    (path / ".metadata").write_bytes(original)
    metadata = pickle.loads(original)
    for index, info in metadata.storage_data.items():
        if index.fqn == "optim.param_groups.0.lr":
            content = bytearray((path / info.relative_path).read_bytes())
            blob = pickle.dumps(Evil())
            content[info.offset : info.offset + info.length] = blob.ljust(info.length, b"\0")
            (path / info.relative_path).write_bytes(content)
    for error in run_ranks(load_error, 2, path):
        assert "optim.param_groups.0.lr" in error
    assert not (tmp_path / "EVIL").exists()


def test_metadata_may_not_name_files_elsewhere(two: Any) -> None:
    path = files_of(two[0], 2).rename(two[0] / "foreign")
    (path / "manifest.json").unlink()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for error in run_ranks(load_error, 2, path):
        assert "outside of the checkpoint" in error


def test_the_manifest_says_what_wrote_it(two: Any) -> None:
    body = json.loads((files_of(two[0], 2) / "manifest.json").read_text())["body"]
    assert (body["step"], body["ranks"], body["format"]) == (2, 2, 1)
    assert set(body["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_warnings_name_the_checkpoint_that_is_passed_over(two: Any) -> None:
    root, _ = two
    os.truncate(files_of(root, 2) / "__0_0.distcp", 5)
    assert "step-000000002.2" in run_ranks(load_with_warnings, 2, root)[0]


def load_with_warnings(root: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_masters(root, "latest good")
    return " ".join(str(warning.message) for warning in caught)
