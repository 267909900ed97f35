"""The heartbeat: each step touches a file, nothing else happens, and docker/healthcheck.py reads its age."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import Weights, sharded

from shardmp import heartbeat
from shardmp.precision import Precision

ROOT = Path(__file__).resolve().parent.parent
LONG_AGO = 1e9


def aged(path: Path, seconds: float = LONG_AGO) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def check_health(value: str | None, *options: str, **variables: str) -> tuple[int, str]:
    """Exit code and line of the image's health check."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SHARDMP_")}
    if value is not None:
        environment["SHARDMP_HEARTBEAT"] = value
    command = [sys.executable, str(ROOT / "docker" / "healthcheck.py"), *options]
    done = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


# -- the touches


def test_shard_and_each_step_touch_the_ranks_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is made; a skipped step is a step as well, since training goes on."""
    monkeypatch.setenv("SHARDMP_HEARTBEAT", str(tmp_path / "beats" / "{rank}-of-{local_rank}"))
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.0)
    _, optimizer = sharded(model := Weights(), precision=Precision("fp16", init_scale=2.0))
    file = tmp_path / "beats" / "0-of-0"
    assert time.time() - file.stat().st_mtime < 60
    for value in (1.0, float("inf")):
        aged(file)
        optimizer.backward(model(torch.full((4,), value)))
        assert time.time() - file.stat().st_mtime > LONG_AGO / 2
        optimizer.step()
        assert time.time() - file.stat().st_mtime < 60
    assert optimizer.skipped_steps == 1


def test_steps_touch_once_in_an_interval(tmp_path: Path) -> None:
    """A step of a millisecond must not make a thousand system calls a second, over NFS perhaps."""
    file = tmp_path / "beat"
    beating = heartbeat.Heartbeat(file)
    beating.beat()
    aged(file)
    for _ in range(100):
        beating.beat()
    assert time.time() - file.stat().st_mtime > LONG_AGO / 2
    beating._next = 0.0  # as if the interval were over
    beating.beat()
    assert time.time() - file.stat().st_mtime < 60


def test_without_the_variable_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for environ in ({}, {"SHARDMP_HEARTBEAT": ""}):
        beating = heartbeat.start(0, 0, environ)
        beating.beat()
        assert beating.path is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["a file in the place of its folder", "a folder in its own place"])
def test_a_path_that_cannot_be_written_is_an_error_at_shard(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "taken" / "beat" if where.startswith("a file") else tmp_path
    (tmp_path / "taken").touch()
    monkeypatch.setenv("SHARDMP_HEARTBEAT", str(path))
    with pytest.raises(ValueError, match=re.escape(f"SHARDMP_HEARTBEAT={path}: rank 0 cannot write {path}")):
        sharded(Weights())


def test_another_word_in_braces_is_an_error_at_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMP_HEARTBEAT", "/nowhere/{node}")
    with pytest.raises(ValueError, match=r"\{node\} is none of \{rank\} and \{local_rank\}"):
        sharded(Weights())


def test_a_file_that_has_become_unwritable_is_never_an_error_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is worth more than its heartbeat; the file's age tells whoever looks."""
    monkeypatch.setenv("SHARDMP_HEARTBEAT", str(tmp_path / "beats" / "beat"))
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.0)
    _, optimizer = sharded(model := Weights())
    (tmp_path / "beats" / "beat").unlink()
    (tmp_path / "beats").rmdir()
    optimizer.backward(model(torch.ones(4)))
    optimizer.step()
    assert optimizer.steps == 1
    assert not (tmp_path / "beats").exists()


# -- the ages


def test_ages_are_those_of_all_ranks_files_and_of_no_other(tmp_path: Path) -> None:
    """Names with brackets are taken as they are."""
    folder = tmp_path / "run[1]"
    text = str(folder / "{rank}.{local_rank}")
    assert heartbeat.ages(text) == {}
    for rank in (0, 11):
        heartbeat.start(rank, rank % 8, {"SHARDMP_HEARTBEAT": text})
    (folder / "notes.txt").touch()
    aged(folder / "11.3", 100)
    found = heartbeat.ages(text)
    assert list(found) == [str(folder / "0.0"), str(folder / "11.3")]
    assert found[str(folder / "0.0")] < 60
    assert 90 < found[str(folder / "11.3")] < 160


def test_the_health_check_goes_by_the_slowest_rank(tmp_path: Path) -> None:
    text = str(tmp_path / "beat-{local_rank}")
    assert check_health(text) == (1, f"no rank has called shardmp.shard() yet: there is no file {text}")
    for rank in (0, 1):
        heartbeat.start(rank, rank, {"SHARDMP_HEARTBEAT": text})
    code, said = check_health(text)
    assert code == 0
    assert re.fullmatch(r"2 ranks, the slowest made a step \d+\.\d s ago", said)
    aged(tmp_path / "beat-1", 100)
    assert check_health(text)[0] == 0  # ten minutes by default
    for options, variables in ((("--max-age", "50"), {}), ((), {"SHARDMP_HEARTBEAT_MAX_AGE": "50"})):
        code, said = check_health(text, *options, **variables)
        assert code == 1
        assert re.fullmatch(rf"no step within 50 s: {re.escape(str(tmp_path))}/beat-1 1\d\d s ago", said)


def test_the_health_check_without_a_heartbeat_says_so() -> None:
    assert check_health(None) == (1, "SHARDMP_HEARTBEAT is not set: there is no heartbeat to look at")


def test_the_health_check_does_not_import_torch() -> None:
    """It runs every few seconds beside the training, and torch takes seconds of a core to import."""
    code = "import sys; sys.path.insert(0, 'docker'); import healthcheck; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.strip() == "False"
