"""`shardmp launch` on several hosts: names that lie, a node that dies and comes back, node 0 that dies."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from netlab import Host, Lab, Process, wait_for_all

pytestmark = pytest.mark.cluster

SHARDMP = Path(sys.executable).parent / "shardmp"
WORKER = Path(__file__).parent / "cluster_worker.py"
KEEP_ALIVE = 3  # seconds
START_LIMIT = 90.0  # two imports of torch one after the other, on a busy machine
JOIN_LIMIT = 30.0
RESTART_LIMIT = 90.0


def launch(host: Host, *options: str, endpoint: str, worker: tuple[str, ...] = ()) -> Process:
    return host.start([str(SHARDMP), "launch", *options, "--rdzv-endpoint", endpoint, str(WORKER), *worker])


@pytest.mark.parametrize("name", ["unknown", "127.0.1.1", "docker0"])
def test_launch_by_address_starts_whatever_the_own_name_leads_to(
    name: str, make_lab: Callable[..., Lab], two_rank_masters: str
) -> None:
    """pytorch/pytorch#150532, pytorch/pytorch#73656, pytorch/pytorch#79388, pytorch/pytorch#69197: torchrun asks the
    host's name who hosts the rendezvous, and gives it to the ranks as MASTER_ADDR."""
    lab = make_lab(2)
    for host in lab.hosts:
        if name == "docker0":
            host.add_bridge("docker0", "172.30.0.1/16")
        address = {"127.0.1.1": "127.0.1.1", "docker0": "172.30.0.1"}.get(name)
        host.write_hosts(*([f"{address} {host.name}"] if address else []))
    endpoint = f"{lab.hosts[0].address}:29500"
    agents = [launch(host, "--nnodes", "2", endpoint=endpoint) for host in lab.hosts]
    joined = wait_for_all(agents, "joined", START_LIMIT)
    assert {event["host"] for event in joined} == {"node0", "node1"}
    assert max(event["seconds"] for event in joined) < JOIN_LIMIT
    assert {event["masters"] for event in wait_for_all(agents, "masters", 30)} == {two_rank_masters}
    assert [agent.wait(20) for agent in agents] == [0, 0]


def count_steps(agent: Process, world_size: int) -> int:
    return len(agent.all("step", world_size=world_size))


def test_elastic_node_dies_and_comes_back(make_lab: Callable[..., Lab]) -> None:
    """pytorch/pytorch#135712, kubeflow/trainer#1638, kubeflow/trainer#1478, pytorch/pytorch#147064: a node that came
    back hung, and took the others with it after a minute."""
    lab = make_lab(2)
    stop = lab.directory / "stop"
    endpoint = f"{lab.hosts[0].address}:29500"
    options = ("--nnodes", "1:2", "--keep-alive", str(KEEP_ALIVE))
    worker = ("--steps", "1000000", "--timeout", "5", "--until", str(stop))
    stays, dies = (launch(host, *options, endpoint=endpoint, worker=worker) for host in lab.hosts)
    wait_for_all([stays, dies], "step", START_LIMIT, world_size=2)
    lab.hosts[1].kill_all()
    stays.wait_for("step", RESTART_LIMIT, world_size=1)
    before = count_steps(stays, 2)
    back = launch(lab.hosts[1], *options, endpoint=endpoint, worker=worker)
    back.wait_for("step", RESTART_LIMIT, world_size=2)
    stays.wait_for("step", RESTART_LIMIT, world_size=2, count=before + 1)
    stop.touch()
    masters = wait_for_all([stays, back], "masters", 20, world_size=2)
    assert len({event["masters"] for event in masters}) == 1
    assert [agent.wait(20) for agent in (stays, back)] == [0, 0]


def test_node_0_dies_and_node_1_goes_on_beside_a_separate_store(make_lab: Callable[..., Lab]) -> None:
    """pytorch/pytorch#67742: the death of the node that hosts the rendezvous ended the job."""
    lab = make_lab(3)
    stop = lab.directory / "stop"
    host = lab.hosts[2]
    store = host.start([str(SHARDMP), "rendezvous", "--port", "29500"])
    options = ("--nnodes", "1:2", "--keep-alive", str(KEEP_ALIVE), "--separate-store")
    worker = ("--steps", "1000000", "--timeout", "5", "--until", str(stop))
    endpoint = f"{host.address}:29500"
    dies, stays = (launch(node, *options, endpoint=endpoint, worker=worker) for node in lab.hosts[:2])
    wait_for_all([dies, stays], "step", START_LIMIT, world_size=2)
    lab.hosts[0].kill_all()
    stays.wait_for("step", RESTART_LIMIT, world_size=1, rank=0)
    stop.touch()
    stays.wait_for("masters", 20, world_size=1)
    assert stays.wait(20) == 0
    store.signal(signal.SIGTERM)
    assert store.wait(10) == 0
