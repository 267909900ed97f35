"""The lab itself: what the other tests take for granted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import netlab
import pytest
from netlab import Host, Lab

pytestmark = pytest.mark.cluster

KILLED_RUN = """
import sys
from pathlib import Path
from netlab import Lab, until
with Lab(Path(sys.argv[1]), 1) as lab:
    lab.hosts[0].start(["sh", "-c", "setsid sleep 100 & sleep 100"])
    until(lambda: len(lab.hosts[0].pids()) == 3, 10, lab.report)
    print(lab.name, flush=True)
    sys.stdin.read()
"""


def reaches(host: Host, address: str) -> bool:
    """Whether a TCP packet from the host is answered, if only by a refusal."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], 9), 0.5)"
    output = host.start([sys.executable, "-c", code, address])
    output.wait(10)
    return "ConnectionRefusedError" in output.output()


def test_host_reaches_its_peers_until_it_is_cut_off_and_nothing_else(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    first, second = lab.hosts
    assert reaches(first, second.address)
    second.cut()
    assert not reaches(first, second.address)
    second.mend()
    assert reaches(first, second.address)
    assert "default" not in netlab.ip("-n", first.netns, "route")
    assert not reaches(first, "192.0.2.1")


@pytest.mark.usefixtures("firewall")
def test_firewall_drops_new_connections_to_its_own_host_alone(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    first, second = lab.hosts
    second.block("9")
    assert not reaches(first, second.address)
    assert reaches(second, first.address)


def test_processes_know_their_own_host_name_and_files(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    lab.hosts[1].write_hosts("10.1.2.3 elsewhere")
    process = lab.hosts[1].start(["sh", "-c", "hostname; grep elsewhere /etc/hosts; ls /sys/class/net"])
    assert process.wait(10) == 0
    assert process.output().split() == ["node1", "10.1.2.3", "elsewhere", "eth0", "lo"]


def test_process_ends_at_its_limit(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(1)
    assert lab.hosts[0].start(["sleep", "100"], limit=1).wait(10) == -signal.SIGALRM


def test_what_a_killed_run_has_left_is_removed_by_the_next(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    make_lab(1)  # or skip
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(netlab.__file__).parent,
    )
    assert killed.stdout is not None
    name = killed.stdout.readline().strip()
    netns = f"{name}-node0"
    killed.kill()
    killed.communicate(timeout=10)
    assert (netlab.MOUNTS / netns).exists()
    assert netlab.ip("netns", "pids", netns).split()  # what left its session outlives the run
    netlab.sweep()
    assert not [path for folder in (netlab.MOUNTS, netlab.NAMES) for path in folder.glob(f"{name}*")]
