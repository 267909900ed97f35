"""The image and compose.yaml on a real engine: health, stops, losses, resumption, each with the real example or worker.

Nothing is simulated: containers are made by Docker Compose of the shipped files, on the engine that docker/engine.py finds.
A small override (model and intervals) makes it quick. Numbers in docstrings are the issues that the behaviour comes from.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import unavailable

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docker"))

import cluster as clusters  # noqa: E402
import image  # noqa: E402
from cluster import NODES, Cluster  # noqa: E402
from engine import Engine, Unavailable, open_engine  # noqa: E402

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

LIMIT = 600.0  # for what takes half a minute on an idle machine
TINY = ("--layers=1", "--width=32", "--heads=2", "--context=16", "--eval-batches=2", "--sample-bytes=8")
SAVED = r"stopped by SIGTERM after step (\d+) of \d+, saved in /checkpoints/gpt"
RESUMED = r"resumed after step (\d+) from \S+, saved by (\d+) ranks"
SIGNAL_RANKS = """
import os, pathlib, signal, sys
for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
        environment = path.read_bytes()
    except OSError:  # a health check that begins or ends
        continue
    if b"\\0LOCAL_RANK=" in environment:  # torchrun gives it to ranks, and has none itself
        os.kill(int(path.parent.name), signal.Signals[sys.argv[1]])
        print(path.parent.name)
"""


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine of this machine, with the image in it."""
    try:
        with open_engine(os.environ.get("SHARDMP_CLUSTER_ENGINE", "auto"), clusters.CACHE / "engine") as found:
            image.build(found, clusters.CACHE)
            yield found
    except Unavailable as reason:
        unavailable("containers", str(reason))


def override(folder: Path, node: dict[str, Any]) -> Path:
    """A Compose file (JSON is YAML) that changes both nodes, and lets their health be looked at each second."""
    health = {"healthcheck": {"interval": "1s", "timeout": "20s", "retries": 2, "start_period": "10m"}}
    path = folder / "compose.test.yaml"
    path.write_text(json.dumps({"services": {name: {**health, **node} for name in NODES}}))
    return path


def small(folder: Path) -> list[Path]:
    """The shipped file, and the example's smallest model: the shipped command with more options at its end."""
    command = re.findall(r"^    - (.*)$", clusters.COMPOSE.read_text().split("  command:\n")[1].split("\n\n")[0], re.M)
    return [clusters.COMPOSE, override(folder, {"command": [*command, *TINY]})]


def test_the_image_is_built_without_a_network_and_runs_as_nobody_special(engine: Engine) -> None:
    """Its base and wheels were there before. Labels, user, entry point and health check are what docker/README.md says."""
    if engine.online:
        pytest.skip("this engine has a network, so that the image was built with it")
    (about,) = json.loads(engine.docker("image", "inspect", image.TAG).stdout)
    config = about["Config"]
    assert config["User"] == "1000"
    assert config["Entrypoint"] == ["tini", "-g", "--"]
    assert config["Cmd"][:2] == ["shardmp", "launch"]
    check = config.get("Healthcheck") or about["Healthcheck"]
    assert check["Test"] == ["CMD", "python3", "/opt/shardmp/healthcheck.py"]
    assert config["Labels"]["org.opencontainers.image.title"] == "shardmp"
    command = "id -u; head -c 4 /proc/1/cmdline; echo; ls /opt/shardmp; ls -A /work; shardmp --version"
    said = engine.docker("run", "--rm", "--network", "none", image.TAG, "sh", "-c", command, limit=LIMIT).stdout.split(
        "\n"
    )
    assert said[:4] == ["1000", "tini", "examples", "healthcheck.py"]
    assert re.fullmatch(r"shardmp \S+, torch \S+", said[4])  # nothing lies in /work


@pytest.mark.parametrize(("size", "found"), [("64m", ["small"]), ("2g", [])])
def test_the_doctor_names_a_host_with_dockers_small_shared_memory(engine: Engine, size: str, found: list[str]) -> None:
    """NVIDIA/nccl#290, pytorch/torchtitan#853: 64 MB, what Docker gives, ended in "unhandled system error"."""
    where = ["run", "--rm", "--network", "none", "--hostname", "small", "--shm-size", size, image.TAG]
    done = engine.docker(*where, "shardmp", "doctor", "--json", limit=LIMIT, check=False)
    report = json.loads(done.stdout)
    named = [finding for finding in report["findings"] if finding["check"] == "shared memory"]
    assert [host for finding in named for host in finding["hosts"]] == found
    if found:
        assert done.returncode == 1
        assert "67.1 MB" in named[0]["text"]
        assert "--shm-size" in named[0]["cure"]


# -- one training: started, stood still, stopped at one node, resumed on another number of nodes


@dataclass
class Run:
    """What was seen of a training whose node1 was stopped, and of the next one, on node0 alone."""

    health: dict[str, list[str]]  # each status that a node went through
    codes: list[int]
    log: str
    resumed_code: int
    resumed_log: str


@pytest.fixture(scope="module")
def run(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    files = small(tmp_path_factory.mktemp("run"))
    with Cluster(engine, "shardmp-test-run", files, STEPS="1000000", HEARTBEAT_MAX_AGE="5") as cluster:
        cluster.up()
        health: dict[str, list[str]] = {node: [] for node in NODES}

        def reach(status: str) -> None:
            def all_there() -> bool:
                for node, seen in health.items():
                    now = cluster.health(node)
                    if seen[-1:] != [now]:
                        seen.append(now)
                return all(seen[-1:] == [status] for seen in health.values())

            cluster.until(all_there, LIMIT, f"health {status}")

        reach("healthy")
        assert len(cluster.run("node1", "python3", "-c", SIGNAL_RANKS, "SIGSTOP").split()) == 2
        reach("unhealthy")
        cluster.run("node1", "python3", "-c", SIGNAL_RANKS, "SIGCONT")
        reach("healthy")
        cluster.compose("stop", "node1", limit=LIMIT)
        codes = cluster.exit_codes(LIMIT)
        log = cluster.log("node0") + cluster.log("node1")
        match = re.search(SAVED, log)
        assert match, cluster.report()
        cluster.compose("down")  # the volume stays
        cluster.up("node0", NNODES="1", STEPS=str(int(match[1]) + 5))
        (resumed,) = cluster.exit_codes(LIMIT, ["node0"])
        yield Run(health, codes, log, resumed, cluster.log("node0"))


def test_a_node_is_starting_then_healthy_and_unhealthy_while_a_rank_stands_still(run: Run) -> None:
    """The check looks at the age of the last step: the processes of a training that hangs are all alive. Both nodes, as
    the ranks of one wait for those of the other."""
    for seen in run.health.values():
        assert seen[-3:] == ["healthy", "unhealthy", "healthy"]
        assert seen[:-3] in ([], ["starting"])
    assert ["starting"] in [seen[:1] for seen in run.health.values()]


def test_docker_stop_of_one_node_saves_one_step_of_all_ranks(run: Run) -> None:
    """pytorch/pytorch#119856, C52: SIGTERM reaches the ranks of one container, and all ranks end with the same step, which
    one complete checkpoint has. 143 = 128 + SIGTERM on both nodes: neither was killed (137), neither failed (1)."""
    assert len(re.findall(SAVED, run.log)) == 1  # the first rank speaks for all
    assert "SIGKILL" not in run.log
    assert run.codes == [143, 143]


def test_a_training_goes_on_from_the_volume_on_another_number_of_nodes(run: Run) -> None:
    """Four ranks saved on SIGTERM; two go on from that very step, to the end."""
    saved = re.search(SAVED, run.log)
    resumed = re.search(RESUMED, run.resumed_log)
    assert saved
    assert resumed, run.resumed_log
    assert (resumed[1], resumed[2]) == (saved[1], "4")
    assert f"{int(saved[1]) + 5} steps" in run.resumed_log
    assert run.resumed_code == 0


# -- losses


def test_a_killed_node_leaves_the_others_training_and_comes_back(engine: Engine, tmp_path: Path) -> None:
    """pytorch/pytorch#67742, pytorch/pytorch#135712: node0 is killed, and node1 goes on with its own rank from
    the last checkpoint; node0 is started again and takes part again. Then both are stopped, and have saved."""
    elastic = {"NNODES": "1:2", "NPROC_PER_NODE": "1", "MAX_RESTARTS": "5", "KEEP_ALIVE": "10", "SAVE_EVERY": "5"}
    with Cluster(engine, "shardmp-test-elastic", small(tmp_path), STEPS="1000000", **elastic) as cluster:

        def resumptions() -> list[int]:
            """The number of ranks that had saved, for each resumption after a loss or a return, in order of time."""
            listed = []
            for node in NODES:
                done = engine.docker("logs", "--timestamps", cluster.container(node), check=False)
                lines = (done.stdout + done.stderr).splitlines()
                listed += [(line, int(match[2])) for line in lines if (match := re.search(RESUMED, line))]
            return [ranks for _, ranks in sorted(listed)]

        cluster.up()
        cluster.until(lambda: newest(cluster, "node0") > 0, LIMIT, "a first checkpoint")
        engine.docker("kill", cluster.container("node0"))
        assert cluster.exit_codes(LIMIT, ["node0"]) == [137]
        cluster.until(lambda: resumptions()[-1:] == [2], LIMIT, "node1 alone, from what two ranks have saved")
        before = newest(cluster, "node1")
        cluster.until(lambda: newest(cluster, "node1") > before, LIMIT, "a checkpoint of node1 alone")
        engine.docker("start", cluster.container("node0"))
        cluster.until(lambda: resumptions()[-1:] == [1], LIMIT, "both nodes, from what one rank has saved")
        assert resumptions() == [2, 1]
        cluster.until(lambda: cluster.health("node0") == "healthy", LIMIT, "a healthy node0")
        cluster.compose("stop", *NODES, limit=LIMIT)
        assert 137 not in cluster.exit_codes(LIMIT)


def checkpoints(cluster: Cluster, node: str = "node0") -> str:
    """What lies in the run's directory; nothing before there is one."""
    listing = "import pathlib; print(*(path.name for path in pathlib.Path('/checkpoints/gpt').glob('*')))"
    return cluster.engine.docker("exec", cluster.container(node), "python3", "-c", listing, check=False).stdout


def newest(cluster: Cluster, node: str) -> int:
    return max((int(step) for step in re.findall(r"(?<!\S)step-(\d+)", checkpoints(cluster, node))), default=-1)


def test_a_node_without_its_network_is_named_by_the_ranks_of_the_other(engine: Engine, tmp_path: Path) -> None:
    """NVIDIA/nccl#1260: who hangs? The cable is pulled (`docker network disconnect`); after the time-out each side names
    the host that it does not reach, and the job ends with a failure on the side that the store is on."""
    worker = ["/tests/cluster_worker.py", "--steps=1000000", "--timeout=8", "--limit=600"]
    launch = [
        "shardmp",
        "launch",
        "--nnodes=2",
        "--rdzv-endpoint=store:29500",
        "--separate-store",
        "--shutdown-timeout=5",
    ]
    node = {
        "command": [*launch, *worker],
        "volumes": [f"{Path(__file__).parent}:/tests:ro"],
        "stop_grace_period": "10s",
    }
    with Cluster(engine, "shardmp-test-cut", [clusters.COMPOSE, override(tmp_path, node)]) as cluster:
        cluster.up()
        for name in NODES:
            cluster.wait_for(name, '"event": "step"', LIMIT)
        rank = {name: json.loads(first_event(cluster.log(name), "joined"))["rank"] for name in NODES}
        other = next(name for name in NODES if rank[name] == 1)
        network = f"{cluster.project}_cluster"
        engine.docker("network", "disconnect", network, cluster.container(other))
        start = time.monotonic()
        first = next(name for name in NODES if rank[name] == 0)
        cluster.wait_for(first, '"at": "step"', LIMIT)
        cluster.wait_for(other, '"at": "step"', LIMIT)
        assert time.monotonic() - start < 60
        seen_by_first, seen_by_other = (json.loads(first_event(cluster.log(name), "error")) for name in (first, other))
        assert f"rank 1 (host {other}" in seen_by_first["message"]
        assert "does not answer" in seen_by_first["message"]
        assert first in seen_by_other["message"]
        assert cluster.exit_codes(LIMIT, [first]) == [1]


def first_event(log: str, event: str) -> str:
    """The JSON of the worker's first line of this kind; a launcher may put the rank before it."""
    line = next(line for line in log.splitlines() if f'"event": "{event}"' in line)
    return line[line.index("{") :]
