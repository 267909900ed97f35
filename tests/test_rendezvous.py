"""The store, the arrival barrier, and the check between hosts: ranks are threads, each with a connection of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardmp import network, reach, rendezvous
from shardmp.launcher import Launched
from shardmp.rendezvous import Host, Met, Patience

LIMIT = timedelta(seconds=10)


def launched(rank: int, world_size: int, port: int, **other: Any) -> Launched:
    return replace(Launched("environment", rank, world_size, 0, None, ("127.0.0.1", port)), **other)


def together(works: Sequence[Callable[[], Any]], seconds: float = 30.0) -> list[Any]:
    """What each returned, or the exception that it raised."""
    outcomes: list[Any] = [TimeoutError("did not end")] * len(works)

    def run(index: int) -> None:
        try:
            outcomes[index] = works[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return outcomes


def arrival(
    job: Launched, patience: float = 10.0, device: str = "", held: Any = None, agent: bool = False, generation: int = 1
) -> Callable[[], Met]:
    """One rank's arrival, as `init` does it. `held`: the store that this rank serves."""

    def arrive() -> Met:
        waits = Patience(patience)
        connect = (lambda: (held, "127.0.0.1")) if held is not None else lambda: rendezvous.join(job, waits, agent)
        return rendezvous.arrive(connect, job, device, waits, agent, generation)

    return arrive


@pytest.fixture
def store():
    return rendezvous.serve(0)


def test_ranks_that_are_all_there_meet(store):
    ranks = [launched(rank, 3, store.port) for rank in range(3)]
    met = together([arrival(ranks[0], held=store), arrival(ranks[1]), arrival(ranks[2])])
    assert [len(one.hosts) for one in met] == [1, 1, 1]
    assert met[0].hosts == [Host(socket.gethostname(), network.host_id(), 0)]
    met[0].store.set("key", "value")
    assert met[2].store.get("key") == b"value"


def test_rank_0_may_start_later():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def late() -> Met:
        time.sleep(1.5)
        return arrival(launched(0, 2, port), held=rendezvous.serve(port))()

    outcomes = together([late, arrival(launched(1, 2, port))])
    assert all(isinstance(outcome, Met) for outcome in outcomes), outcomes


def test_each_rank_that_is_there_names_the_missing_ones_and_those_that_came(store):
    """pytorch/gloo#520, NVIDIA/nccl#1260: who is missing? On all ranks within seconds of the deadline."""
    hosts = ("gpu0", "gpu0", "gpu1", "gpu1")
    ranks = [launched(rank, 4, store.port, hosts=hosts) for rank in range(4)]
    start = time.monotonic()
    outcomes = together([arrival(ranks[0], 1.0, held=store), arrival(ranks[2], 20.0)])
    assert time.monotonic() - start < 5
    assert str(outcomes[0]) == str(outcomes[1])
    text = str(outcomes[0])
    assert "2 of 4 ranks have not arrived within 1 s: rank 1 (host gpu0), rank 3 (host gpu1)" in text
    assert "Arrived: rank 0 (host " in text
    assert "rank 2 (host " in text.partition("Arrived")[2]
    assert "arrival_timeout" in text


def test_a_rank_whose_rank_0_never_comes_says_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (error,) = together([arrival(launched(1, 2, port), 0.5)])
    assert isinstance(error, RuntimeError)
    assert "rank 1 on host" in str(error)
    assert f"waited 0.5 s for rank 0, which has not arrived: MASTER_ADDR=127.0.0.1, 127.0.0.1 port {port}" in str(error)


def test_a_rank_0_that_comes_to_no_agents_store_is_missed(store):
    job = launched(1, 2, store.port, launcher="torchrun", local_world_size=1)
    (error,) = together([arrival(job, 0.5, agent=True)])
    assert "rank 0 (node 0) has not arrived within 0.5 s" in str(error)


def test_two_processes_with_one_rank_are_both_named(store):
    ranks = [launched(rank, 3, store.port) for rank in range(3)]
    outcomes = together([arrival(ranks[0], held=store), arrival(ranks[1]), arrival(ranks[1])])
    assert all("two processes are rank 1: rank 1 (host" in str(error) for error in outcomes), outcomes
    assert all(isinstance(error, RuntimeError) and "MASTER_PORT" in str(error) for error in outcomes)


def test_a_process_that_comes_when_all_are_there_is_told_so(store):
    ranks = [launched(rank, 2, store.port) for rank in range(2)]
    assert all(isinstance(met, Met) for met in together([arrival(ranks[0], held=store), arrival(ranks[1])]))
    (error,) = together([arrival(ranks[1])])
    assert "two processes are rank 1" in str(error)


def test_world_sizes_that_differ_are_named_on_all_ranks(store):
    outcomes = together([arrival(launched(0, 2, store.port), held=store), arrival(launched(1, 3, store.port))])
    assert len({str(error) for error in outcomes}) == 1
    assert "expects 3 ranks, but rank 0 (host" in str(outcomes[0])


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks(store):
    ranks = [launched(rank, 2, store.port) for rank in range(2)]
    outcomes = together([arrival(ranks[0], device="GPU-7", held=store), arrival(ranks[1], device="GPU-7")])
    assert all("use the same GPU GPU-7: set LOCAL_RANK" in str(error) for error in outcomes)


def test_a_second_meeting_in_the_same_processes_reads_nothing_of_the_first(store):
    """destroy_process_group, then init again: rank 1 may come to the old store before rank 0 has opened a new one."""
    ranks = [launched(rank, 2, store.port) for rank in range(2)]
    first = together([arrival(ranks[0], held=store), arrival(ranks[1])])

    def again() -> Met:
        time.sleep(0.5)
        return arrival(ranks[0], held=store, generation=2)()

    second = together([again, arrival(ranks[1], generation=2)])
    assert all(isinstance(met, Met) for met in second), second
    first[0].store.set("key", "old")
    assert not second[1].store.check(["key"])


def test_ranks_started_again_do_not_meet_the_dead_ones_in_an_agents_store(store):
    """pytorch/pytorch#108158: the agent's store keeps an earlier attempt's keys, and attempts have no common number."""
    ranks = [launched(rank, 2, store.port, launcher="torchrun") for rank in range(2)]
    dead = together([arrival(rank, agent=True) for rank in ranks])
    assert all(isinstance(met, Met) for met in dead), dead
    half = together([arrival(ranks[0], 0.5, agent=True)])  # an attempt that never came to all ranks
    assert "rank 1" in str(half[0])

    def late() -> Met:
        time.sleep(0.7)
        return arrival(ranks[0], agent=True)()

    new = together([late, arrival(ranks[1], agent=True)])
    assert all(isinstance(met, Met) for met in new), new
    new[0].store.set("key", "new")
    assert new[1].store.get("key") == b"new"
    assert not dead[0].store.check(["key"])


def test_a_port_in_use_is_named_with_its_variable():
    """deepspeedai/DeepSpeed#191, huggingface/accelerate#3312, pytorch/pytorch#85604."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"port {port} of host .*: in use .* another port in MASTER_PORT"):
            rendezvous.serve(port)


def test_a_server_that_is_no_store_is_found_out_in_ten_seconds(monkeypatch):
    """Both one that never answers, for which torch waits without end, and one that talks something else."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as chatty:

        def chat() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = chatty.accept()
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    caller.close()

        threading.Thread(target=chat, daemon=True).start()
        start = time.monotonic()
        ports = [server.getsockname()[1] for server in (silent, chatty)]
        outcomes = together([arrival(launched(1, 2, port)) for port in ports])
    assert time.monotonic() - start < 8
    for port, error in zip(ports, outcomes, strict=True):
        assert "is not rank 0's store" in str(error), error
        assert f"port {port}: set another one in MASTER_PORT" in str(error)


def test_another_jobs_store_is_found_out(store, monkeypatch):
    """A plain torch job holds the port, or a job of ours under another name."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE", 1.0)
    (error,) = together([arrival(launched(1, 2, store.port))])
    assert "a store answers, but not that of this job" in str(error)
    ranks = [launched(0, 2, store.port, job="Slurm job 1 step 0"), launched(1, 2, store.port, job="Slurm job 2 step 0")]
    outcomes = together([arrival(ranks[0], 2.0, held=store), arrival(ranks[1])])
    assert "the store is that of Slurm job 1 step 0" in str(outcomes[1])


def test_a_master_that_is_this_host_though_rank_0_is_elsewhere_is_refused_at_once():
    """127.0.1.1 in /etc/hosts, or a bridge with the same address on every host (ray-project/ray#37461)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = time.monotonic()
    (error,) = together([arrival(launched(1, 2, port, rank0_elsewhere=True), 60.0)])
    assert isinstance(error, ValueError)
    assert "MASTER_ADDR=127.0.0.1 is 127.0.0.1, which is host" in str(error)
    assert time.monotonic() - start < 5


def test_a_master_that_does_not_resolve_is_refused_or_is_this_host(store, monkeypatch):
    """pytorch/pytorch#150532: workers that wait for a name which only one node knows."""
    monkeypatch.setattr(network, "RESOLVE_LIMIT", 0.5)
    name = ("no-such-host.invalid", store.port)
    (error,) = together([arrival(launched(1, 2, store.port, master=name))])
    assert isinstance(error, ValueError)
    assert "MASTER_ADDR=no-such-host.invalid does not resolve on host" in str(error)
    one_host = [launched(rank, 2, store.port, master=name, local_world_size=2) for rank in range(2)]
    outcomes = together([arrival(one_host[0], held=store), arrival(one_host[1])])
    assert all(isinstance(met, Met) for met in outcomes), outcomes


def test_a_store_that_goes_while_ranks_arrive_ends_them_in_time(store):
    """Rank 0 is killed before the others have come."""
    holder = [store]
    port = store.port
    client = dist.TCPStore("127.0.0.1", port, None, False, LIMIT, False)
    client.set("shardmp/epoch", json.dumps({"nonce": "n", "job": "", "generation": 1, "arrival": _arrival(0, 2)}))
    del client

    def kill() -> None:
        time.sleep(0.5)
        holder.clear()

    del store
    (_, error) = together([kill, arrival(launched(1, 2, port), 2.0)])
    assert isinstance(error, RuntimeError)


def _arrival(rank: int, world_size: int) -> dict[str, Any]:
    return vars(rendezvous.Arrival(rank, world_size, "h", "h", 1, "environment", "", "127.0.0.1", "m"))


# -- between hosts


def hosts_try(names: Sequence[str], addresses: Sequence[str], ranks: int, monkeypatch: Any) -> list[Any]:
    """`check_hosts` on `ranks` ranks, dealt in turn to hosts that listen at `addresses`."""
    monkeypatch.setattr(network, "gloo_address", lambda environ, master: (environ["address"], "lo"))
    hosts = [Host(name, name, index) for index, name in enumerate(names)]
    met = Met(dist.PrefixStore("group", dist.HashStore()), hosts, "127.0.0.1")

    def check(rank: int) -> None:
        reach.check_hosts(met, rank, ranks, {"address": addresses[rank % len(names)]})

    return together([lambda rank=rank: check(rank) for rank in range(ranks)])


@pytest.mark.parametrize("number", [1, 2, 3, 18])
def test_hosts_that_reach_each_other_go_on(monkeypatch, number):
    names = [f"node{index}" for index in range(number)]
    assert hosts_try(names, ["127.0.0.1"] * number, number + 1, monkeypatch) == [None] * (number + 1)


def test_hosts_that_do_not_are_named_on_every_rank_with_address_and_interface(monkeypatch):
    """pytorch/gloo#520: gloo fails at once on one side, and waits five times the timeout on the other."""
    monkeypatch.setattr(network, "knock", lambda address, port, token: "no answer" if address == "127.0.0.2" else "")
    start = time.monotonic()
    outcomes = hosts_try(["node0", "node1", "node2"], ["127.0.0.1", "127.0.0.2", "127.0.0.3"], 4, monkeypatch)
    assert time.monotonic() - start < 10
    assert len({str(error) for error in outcomes}) == 1
    text = str(outcomes[3])
    assert "cannot connect to host node1 (rank 1, 127.0.0.2 on lo): no answer" in text
    assert text.startswith(("host node0 (rank 0, 127.0.0.1 on lo)", "host node2 (rank 2, 127.0.0.3 on lo)"))
    assert "Set GLOO_SOCKET_IFNAME" in text


def test_a_host_that_cannot_listen_at_its_own_address_is_named(monkeypatch):
    outcomes = hosts_try(["node0", "node1"], ["127.0.0.1", "198.51.100.77"], 2, monkeypatch)
    assert all("198.51.100.77" in str(error) or "has not said where it listens" in str(error) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
