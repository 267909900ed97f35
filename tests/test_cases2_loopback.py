"""Stores listen on loopback alone where MASTER_ADDR is loopback: seen by their sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from listening import listening

import shardmp
from shardmp import rendezvous


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
        ("127.0.1.1", {"127.0.1.1"}),
        ("node0", {"::", "0.0.0.0"}),
    ],
)
def test_a_store_listens_where_its_host_is(host: str, addresses: set[str]) -> None:
    before = listening(os.getpid())
    store = rendezvous.serve(0, host)
    found = {address for address, port in listening(os.getpid()) - before if port == store.port}
    assert found
    assert found <= addresses
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_in_use_is_told_as_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy, pytest.raises(RuntimeError, match="in use by another process"):
        rendezvous.serve(busy.getsockname()[1], "127.0.0.1")


RANK = """
import os, shardmp, torch.distributed as dist
from listening import listening
world = shardmp.init()
if world.rank == 0:
    own = os.getpid() if "TORCHELASTIC_RUN_ID" not in os.environ else os.getppid()
    print(*sorted({address for pid in (os.getpid(), own) for address, port in listening(pid)}))
dist.barrier()
dist.destroy_process_group()
"""


def run(command: list[str], **environ: str) -> subprocess.Popen[str]:
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    source = [str(Path(shardmp.__file__).parents[1]), str(Path(__file__).parent)]
    environ = {**kept, "PYTHONPATH": os.pathsep.join(source), **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def test_nothing_of_a_run_on_one_host_can_be_reached_from_another(tmp_path: Path) -> None:
    """The agent's stores under `shardmp launch`, and rank 0's own where RANK and the like are set by hand."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with run([sys.executable, "-m", "shardmp.cli", "launch", "--nproc-per-node", "2", str(script)]) as launched:
        out, said = launched.communicate(timeout=120)
    assert launched.returncode == 0, said
    assert out == "127.0.0.1\n"

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    each = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [run([sys.executable, str(script)], RANK=str(rank), LOCAL_RANK=str(rank), **each) for rank in range(2)]
    outs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    assert outs[0][0] == "127.0.0.1\n"
