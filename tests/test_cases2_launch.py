"""How `shardmp launch` ends: Ctrl-C in one line, and a failure in the words of the rank that failed first."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardmp

ROOT = Path(__file__).parents[1]


def launch(*arguments: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a terminal starts a command."""
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ = {**kept, "PYTHONPATH": str(Path(shardmp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardmp.cli", "launch", "--nproc-per-node", "2", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environ, start_new_session=True, **pipes)


def test_ctrl_c_ends_the_demo_in_one_line(tmp_path: Path) -> None:
    """`make demo` starts by `shardmp launch`; the terminal sends SIGINT to torchrun and to both ranks."""
    assert "$(BIN)/shardmp launch --nproc-per-node 2 examples/train_gpt.py" in (ROOT / "Makefile").read_text()
    metrics = tmp_path / "metrics.jsonl"
    tiny = ["--layers", "1", "--width", "32", "--heads", "2", "--steps", "100000", "--metrics", str(metrics)]
    with launch(str(ROOT / "examples" / "train_gpt.py"), *tiny) as demo:
        deadline = time.monotonic() + 100
        while not (metrics.exists() and '"step": 2' in metrics.read_text()) and time.monotonic() < deadline:
            assert demo.poll() is None
            time.sleep(0.05)
        os.killpg(demo.pid, signal.SIGINT)
        out, said = demo.communicate(timeout=60)
    assert demo.returncode == 130, said
    assert out.splitlines()[-1].startswith("stopped by Ctrl-C after step ")
    assert said.strip() == ""


SCRIPT = """
import os, signal, sys
import torch
import shardmp

world = shardmp.init()
model = torch.nn.Linear(4, 4)
model, optimizer = shardmp.shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
if world.rank == 1:
    if sys.argv[1] == "raises":
        raise ValueError("the data of this rank\\nis bad")
    os.kill(os.getpid(), signal.SIGKILL)
optimizer.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raises", "failed first: ValueError: the data of this rank is bad"),
        ("killed", "SIGKILL ended it (out of memory?)"),
    ],
)
def test_a_failure_ends_in_the_words_of_the_rank_that_failed_first(what: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with launch(str(script), what) as launched:
        _, said = launched.communicate(timeout=120)
    assert launched.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith("shardmp launch: error: rank 1 (host "), said[-2000:]
    assert says in last


def test_a_rank_of_same_bits_writes_its_line_at_once() -> None:
    """print writes a text and its end separately, and lines of two ranks on one pipe mixed."""
    tree = ast.parse((ROOT / "examples" / "same_bits.py").read_text())
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if call.startswith("print(")]
    assert [call for call in calls if call.startswith("sys.stdout.write(f'masters ")]


def test_the_package_tells_its_version_and_its_names_alone() -> None:
    from importlib.metadata import version

    assert shardmp.__version__ == version("shardmp")
    shown = {name for name in dir(shardmp) if not (name.startswith("__") and name.endswith("__"))}
    assert shown == set(shardmp.__all__) - {"__version__"}
    for name in shardmp.__all__:
        assert getattr(shardmp, name) is not None
