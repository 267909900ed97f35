"""`shardmp launch` ends with a code that tells a preemption from a crash (torchrun alone ends with 1 in each case)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, pathlib, signal, sys, time
def stop(*_):
    if sys.argv[1] == "saves":
        sys.exit(143)
if sys.argv[1] == "lingers":
    if os.environ["LOCAL_RANK"] == "0":
        sys.exit(143)
    time.sleep(60)
signal.signal(signal.SIGTERM, stop)
if sys.argv[1] == "fails":
    sys.exit(3)
if sys.argv[1] == "leaves":
    sys.exit(143)
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code"), [("saves", 143), ("ignores", 137), ("leaves", 143), ("lingers", 143), ("fails", 1)]
)
def test_exit_code_says_how_the_ranks_ended(what: str, code: int, tmp_path: Path) -> None:
    """SIGTERM: ranks that leave in time, and one that must be killed. Then ranks that left because another node was told to,
    one of them ended by torchrun in its last moment, and one that failed. Whoever restarts jobs goes by this number alone."""
    script, ready = tmp_path / "script.py", tmp_path / "ready"
    script.write_text(SCRIPT)
    ranks = "2" if what == "lingers" else "1"
    command = [
        sys.executable,
        "-m",
        "shardmp.cli",
        "launch",
        "--nproc-per-node",
        ranks,
        "--shutdown-timeout",
        "2",
        str(script),
        what,
        str(ready),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if what in ("saves", "ignores"):
                deadline = time.monotonic() + 60
                while not ready.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.terminate()
            assert process.wait(60) == code
        finally:
            process.kill()
