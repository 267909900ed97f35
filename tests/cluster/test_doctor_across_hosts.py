"""`shardmp doctor` on three hosts: a healthy cluster is called so, and each fault is named with its host on every rank."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from netlab import Host, Lab, Process

import shardmp

pytestmark = pytest.mark.cluster

DOCTOR = (str(Path(sys.executable).parent / "shardmp"), "doctor")  # `python -m` would prefer the working directory
VISIT_LIMIT = 150.0  # seconds: three imports of torch on two cores, and the visit
# The hosts share the cores of one machine: whatever else runs on it halves a link. The capped one is at a tenth and less.
QUIET = ("--slow", "0.1")
SKEW = 90.0
OTHER_VERSION = "0.0.7"

# A clock of its own for one process: Linux has time namespaces for the monotonic clocks alone.
SKEWED = f"import time\nreal = time.time\ntime.time = lambda: real() + {SKEW}\n"
SMALL = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


def start(
    host: Host, rank: int, *options: str, world_size: int = 3, command: Sequence[str] = DOCTOR, **env: str
) -> Process:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": host.lab.hosts[0].address,
        "MASTER_PORT": "29500",
    }
    return host.start([*command, *options], {**own, **env})


def findings(report: Path) -> list[dict[str, Any]]:
    return json.loads(report.read_text())["findings"]


def test_a_healthy_cluster_is_called_healthy(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab(3)
    report = tmp_path / "report.json"
    options = ("--params", "1e6", "--strict", *QUIET, "--report", str(report))
    ranks = [start(host, rank, *options) for rank, host in enumerate(lab.hosts)]
    assert [rank.wait(VISIT_LIMIT) for rank in ranks] == [0, 0, 0], lab.report()
    found = json.loads(report.read_text())
    assert found["ok"]
    assert found["findings"] == []
    assert [host["host"] for host in found["hosts"]] == ["node0", "node1", "node2"]
    assert [said["interface"]["name"] for said in found["ranks"]] == ["eth0"] * 3
    assert {(link["first"], link["second"]) for link in found["links"]["measured"]} == {(0, 1), (0, 2), (1, 2)}
    assert max(abs(clock["clock"]) for clock in found["clocks"]) < 0.1  # one machine, one clock
    assert "Healthy: 3 ranks on 3 hosts" in ranks[0].output()
    assert "Healthy" not in ranks[1].output() + ranks[2].output()


@pytest.fixture(scope="module")
def ill(make_module_lab: Callable[..., Lab]) -> tuple[list[dict[str, Any]], list[str]]:
    """The findings, and what each rank printed, on three hosts with a fault each and two on the second."""
    lab = make_module_lab(3)
    small, odd, slow = lab.hosts
    slow.cap("100mbit")
    report = lab.directory / "report.json"
    ranks = [
        start(small, 0, *QUIET, "--report", str(report), command=("sh", "-c", SMALL, "sh", *DOCTOR)),
        start(odd, 1, PYTHONPATH=str(copy_of_the_package(lab.directory / "other", OTHER_VERSION, SKEWED))),
        start(slow, 2),
    ]
    assert [rank.wait(VISIT_LIMIT) for rank in ranks] == [1, 1, 1], lab.report()
    return findings(report), [rank.log.read_text() for rank in ranks]


def copy_of_the_package(folder: Path, number: str, at_start: str = "") -> Path:
    """A folder for PYTHONPATH with shardmp, called this version, and what is to run when the process starts."""
    source = Path(shardmp.__file__).parent
    shutil.copytree(source, folder / "shardmp", ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / f"shardmp-{number}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shardmp\nVersion: {number}\n")
    (folder / "sitecustomize.py").write_text(at_start)
    return folder


@pytest.mark.parametrize(
    ("check", "hosts", "text", "cure"),
    [
        ("bandwidth", ["node2"], r"host node2 \(rank 2\) sends at .* MB/s at best", "tc qdisc"),
        ("versions", ["node1"], rf"shardmp is .* on hosts node0, node2, {OTHER_VERSION} on host node1", "same"),
        ("clock", ["node1"], r"host node1 is (89\.9|90|90\.1) s ahead of that of host node0", "chrony"),
        ("shared memory", ["node0"], r"/dev/shm of host node0 has 67\.1 MB", "--shm-size"),
    ],
)
def test_a_fault_is_found_and_named_with_its_host_and_cure(
    check: str, hosts: list[str], text: str, cure: str, ill: tuple[list[dict[str, Any]], list[str]]
) -> None:
    """pytorch/torchtitan#915 (a slow node was found after hours), NVIDIA/nccl#290 (/dev/shm of a container)."""
    found, outputs = ill
    (finding,) = [one for one in found if one["check"] == check]
    assert finding["severity"] == "error"
    assert finding["hosts"] == hosts
    assert re.search(text, finding["text"])
    assert cure in finding["cure"]
    for output in outputs:
        assert re.search(text, output.replace("\n", " "))


def test_nothing_else_is_found(ill: tuple[list[dict[str, Any]], list[str]]) -> None:
    """Another version has other files: that is one finding, not two."""
    assert sorted(one["check"] for one in ill[0] if one["severity"] == "error") == [
        "bandwidth", "clock", "shared memory", "versions",
    ]  # fmt: skip


def visit_behind_a_firewall(lab: Lab, report: Path) -> list[Process]:
    options = ("--arrival-timeout", "20", "--timeout", "10", "--report", str(report))
    ranks = [start(host, rank, *options) for rank, host in enumerate(lab.hosts)]
    assert [rank.wait(VISIT_LIMIT) for rank in ranks] == [1, 1, 1], lab.report()
    return ranks


@pytest.mark.usefixtures("firewall")
def test_a_blocked_master_port_is_named_by_those_that_are_outside(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab(3)
    lab.hosts[0].block("29500")
    first, *others = visit_behind_a_firewall(lab, tmp_path / "report.json")
    for rank in others:
        assert "port 29500: no answer" in rank.output()
        assert "firewall" in rank.output()
    (finding,) = findings(tmp_path / "report.json")
    assert finding["check"] == "meeting"
    assert "2 of 3 ranks have not arrived" in finding["text"]
    assert "rank 1" in finding["text"]
    assert finding["text"] in first.output()


@pytest.mark.usefixtures("firewall")
def test_a_host_whose_other_ports_are_blocked_is_named_on_every_rank(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """The store's port alone was let through, which is not where gloo and NCCL listen."""
    lab = make_lab(3)
    lab.hosts[1].block("30000:65535")
    ranks = visit_behind_a_firewall(lab, tmp_path / "report.json")
    (finding,) = findings(tmp_path / "report.json")
    for text in (finding["text"], *(rank.output() for rank in ranks)):
        assert "node1 (rank 1" in text
        assert "firewalls" in text


def test_a_rank_that_stops_in_the_middle_is_named_and_the_others_end(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """NVIDIA/nccl#1260: who hangs? hours of search."""
    lab = make_lab(3)
    stops = copy_of_the_package(tmp_path / "stops", version("shardmp"))
    with (stops / "shardmp" / "doctor_wire.py").open("a") as file:
        file.write("\n\ndef check_values(*_):\n    import os, signal\n\n    os.kill(os.getpid(), signal.SIGSTOP)\n")
    report = tmp_path / "report.json"
    options = ("--timeout", "5", "--report", str(report))
    first, second = (start(host, rank, *options) for rank, host in enumerate(lab.hosts[:2]))
    start(lab.hosts[2], 2, *options, PYTHONPATH=str(stops))
    assert [rank.wait(VISIT_LIMIT) for rank in (first, second)] == [1, 1], lab.report()
    (finding,) = [one for one in findings(report) if one["check"] == "values"]
    assert finding["hosts"] == ["node2"]
    assert "rank 2 on host node2 has not answered" in finding["text"]
    for rank in (first, second):
        assert "rank 2 on host node2 has not answered" in rank.output()
