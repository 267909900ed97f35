"""Host names that lie, several networks, IPv6, busy ports, missing ranks: a start, or a clear error on every rank.

Ranks start from the static variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), one on each host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from netlab import Lab, Process, wait_for_all

pytestmark = pytest.mark.cluster

START_LIMIT = 30.0
ERROR_LIMIT = 10.0
ARRIVAL = 3.0

LISTEN = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print('{"event": "listening"}', flush=True)
listener.accept()
sys.stdin = socket.socketpair()[0].recv(1)
"""

StartRanks = Callable[..., list[Process]]


def assert_starts(ranks: Sequence[Process], masters: str | None = None) -> None:
    wait_for_all(ranks, "joined", START_LIMIT)
    hashes = {event["masters"] for event in wait_for_all(ranks, "masters", 30)}
    assert hashes == {masters} if masters else len(hashes) == 1
    assert [rank.wait(10) for rank in ranks] == [0] * len(ranks)


def messages_of(ranks: Sequence[Process], limit: float = ERROR_LIMIT) -> list[str]:
    """What `init` raised on each rank, none later than `limit` seconds after its call."""
    errors = wait_for_all(ranks, "error", limit + 5)
    assert all(error["at"] == "init" and error["seconds"] <= limit for error in errors), errors
    assert [rank.wait(10) for rank in ranks] == [1] * len(ranks)
    return [error["message"] for error in errors]


@pytest.mark.parametrize("name", ["unknown", "127.0.1.1", "docker0"])
def test_own_name_that_leads_nowhere_does_not_matter(
    name: str, make_lab: Callable[..., Lab], start_ranks: StartRanks, two_rank_masters: str
) -> None:
    """ray-project/ray#37461, aws-samples/aws-do-eks#69, pytorch/pytorch#150532: gloo binds what the name resolves to."""
    lab = make_lab(2)
    for host in lab.hosts:
        if name == "docker0":
            host.add_bridge("docker0", "172.30.0.1/16")
        address = {"127.0.1.1": "127.0.1.1", "docker0": "172.30.0.1"}.get(name)
        host.write_hosts(*([f"{address} {host.name}"] if address else []))
    assert_starts(start_ranks(lab.hosts), two_rank_masters)


def test_master_name_that_is_loopback_on_its_own_host_starts(
    make_lab: Callable[..., Lab], start_ranks: StartRanks, two_rank_masters: str
) -> None:
    """Debian writes `127.0.1.1 node0` on node0 itself; the others know node0 by its address."""
    lab = make_lab(2)
    lab.hosts[0].write_hosts(f"127.0.1.1 {lab.hosts[0].name}")
    assert_starts(start_ranks(lab.hosts, master=lab.hosts[0].name), two_rank_masters)


def test_unknown_master_name_is_an_error_that_names_it(make_lab: Callable[..., Lab], start_ranks: StartRanks) -> None:
    """deepspeedai/DeepSpeed#826, pytorch/pytorch#131691 (names were looked up again for 1800 s).

    Rank 0 needs no name to open its store, which others may know by it: it says who did not come.
    """
    lab = make_lab(2)
    ranks = start_ranks(lab.hosts, "--arrival-timeout", str(ARRIVAL), master="nowhere.example")
    first, second = messages_of(ranks)
    assert "rank 1" in first
    assert "MASTER_ADDR" in second
    assert "nowhere.example" in second


@pytest.mark.parametrize("network", [0, 1])
def test_traffic_takes_the_interface_that_routes_to_the_master(
    network: int, make_lab: Callable[..., Lab], start_ranks: StartRanks, tmp_path: Path
) -> None:
    """deepspeedai/DeepSpeed#5136: the first interface was taken, and the address that the user gave was ignored."""
    lab = make_lab(2, num_networks=2)
    master = lab.hosts[0].addresses[network]
    options = ("--width", "1024", "--layers", "1", "--steps", "6", "--gates", f"{tmp_path}:2,6")
    ranks = start_ranks(lab.hosts, *options, master=master)
    sent = []
    for step in (2, 6):
        wait_for_all(ranks, "gate", 60, step=step)
        sent.append([lab.hosts[1].sent_bytes(f"eth{number}") for number in (0, 1)])
        (tmp_path / str(step)).touch()
    used, idle = (sent[1][number] - sent[0][number] for number in (network, 1 - network))
    assert used > 4 * 2 * 1024 * 1024  # 4 steps: half of 2 bytes per parameter, twice
    assert idle < 10_000  # neighbour discovery at most
    assert_starts(ranks)


def test_ipv6_master_address_starts(
    make_lab: Callable[..., Lab], start_ranks: StartRanks, two_rank_masters: str
) -> None:
    """pytorch/pytorch#131691."""
    lab = make_lab(2)
    assert_starts(start_ranks(lab.hosts, master=lab.hosts[0].ipv6), two_rank_masters)


def test_named_interface_that_does_not_exist_is_an_error_that_lists_those_that_do(
    make_lab: Callable[..., Lab], start_ranks: StartRanks
) -> None:
    """pytorch/pytorch#29482."""
    lab = make_lab(2)
    for message in messages_of(start_ranks(lab.hosts, env={"GLOO_SOCKET_IFNAME": "enp3s0"})):
        assert "GLOO_SOCKET_IFNAME" in message
        assert "enp3s0" in message
        assert "eth0" in message


def test_interface_that_the_other_host_cannot_reach_is_an_error_on_every_rank(
    make_lab: Callable[..., Lab], start_ranks: StartRanks
) -> None:
    """pytorch/gloo#520: the side that is not refused waited 5 times the time-out."""
    lab = make_lab(3)
    for host in lab.hosts:
        host.add_bridge("docker0", "172.30.0.1/16")
    ranks = start_ranks(lab.hosts, env={"GLOO_SOCKET_IFNAME": "docker0"})
    for message in messages_of(ranks):
        assert "GLOO_SOCKET_IFNAME" in message
        assert "docker0" in message
        assert "node1" in message


def test_busy_port_is_an_error_that_names_it_on_every_rank(
    make_lab: Callable[..., Lab], start_ranks: StartRanks
) -> None:
    """pytorch/pytorch#126510, pytorch/pytorch#85604, deepspeedai/DeepSpeed#191, huggingface/accelerate#3312."""
    lab = make_lab(2)
    lab.hosts[0].start([sys.executable, "-c", LISTEN, "29500"]).wait_for("listening", 20)
    for message in messages_of(start_ranks(lab.hosts)):
        assert "29500" in message
        assert "MASTER_PORT" in message


def test_missing_rank_is_named_by_all_that_arrived(make_lab: Callable[..., Lab], start_ranks: StartRanks) -> None:
    """pytorch/torchtitan#915: a RendezvousTimeoutError did not say who was missing."""
    lab = make_lab(3)
    ranks = start_ranks(lab.hosts, "--arrival-timeout", str(ARRIVAL), absent=[1])
    for message in messages_of(ranks, ARRIVAL + 5):
        assert "rank 1" in message
        missing = message[: message.find("arrived")] if "arrived" in message else message
        assert "rank 2" not in missing


def test_host_behind_a_cut_is_named_as_missing(make_lab: Callable[..., Lab], start_ranks: StartRanks) -> None:
    """The one behind the cut names the address that it cannot reach."""
    lab = make_lab(2)
    lab.hosts[1].cut()
    first, second = start_ranks(lab.hosts, "--arrival-timeout", str(ARRIVAL))
    assert "rank 1" in messages_of([first], ARRIVAL + 5)[0]
    (message,) = messages_of([second], ARRIVAL + 5)
    assert lab.hosts[0].address in message
    assert "29500" in message


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_disagree_on_the_world_size_are_told(
    size: int, make_lab: Callable[..., Lab], start_ranks: StartRanks
) -> None:
    """One host was started with another number of ranks than the other."""
    lab = make_lab(2)
    first = start_ranks(lab.hosts, "--arrival-timeout", str(ARRIVAL), absent=[1])
    second = start_ranks(
        lab.hosts, "--arrival-timeout", str(ARRIVAL), env={"WORLD_SIZE": str(2 + size)}, absent=[0], master=None
    )
    for message in messages_of([*first, *second], ARRIVAL + 5):
        assert "WORLD_SIZE" in message or "world size" in message
        assert "2" in message
        assert str(2 + size) in message


# -- the variables of Slurm and Kubeflow, without either

UNSET = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")


def slurm_step(rank: int) -> dict[str, str]:
    return {
        **UNSET,
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }


def test_batch_script_without_srun_is_told_so(make_lab: Callable[..., Lab], start_ranks: StartRanks) -> None:
    """huggingface/accelerate#2816."""
    lab = make_lab(1)
    environment = slurm_step(0)
    del environment["SLURM_STEP_ID"]
    (message,) = messages_of(start_ranks(lab.hosts, env=environment))
    assert "srun" in message


def pytorch_job(rank: int) -> dict[str, str]:
    """Training operator v1: ranks are pods, and no variable speaks of one inside a pod."""
    return {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}


def train_job(rank: int) -> dict[str, str]:
    """Trainer v2, which speaks to torchrun, for one process in each pod."""
    pets = {
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29400",
    }
    return {**UNSET, **{f"PET_{name}": value for name, value in pets.items()}}


@pytest.mark.parametrize("variables", [slurm_step, pytorch_job, train_job])
def test_schedulers_variables_end_in_the_same_masters(
    variables: Callable[[int], dict[str, str]],
    make_lab: Callable[..., Lab],
    start_ranks: StartRanks,
    two_rank_masters: str,
) -> None:
    lab = make_lab(2)
    ranks = [start_ranks(lab.hosts, env=variables(rank), absent=[1 - rank])[0] for rank in (0, 1)]
    assert_starts(ranks, two_rank_masters)
