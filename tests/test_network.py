"""This host's interfaces, which of them leads where, and look-ups that end in time."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from shardmp import network
from shardmp.network import GLOO, NCCL, TENSORPIPE

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="addresses of interfaces are read from Linux's /proc and ioctl"
)

TWO_CARDS = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.7", "fd00::7"],
    "eth1": ["10.1.0.7"],
    "docker0": ["172.17.0.1"],
    "ib0": [],
}


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: TWO_CARDS)


@linux
def test_the_loopback_interface_has_its_addresses():
    assert "127.0.0.1" in network.interfaces()["lo"]
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("198.51.100.77") is None


@linux
def test_every_interface_that_the_system_names_is_listed():
    assert set(network.interfaces()) >= {name for _, name in socket.if_nameindex()}


def test_no_process_is_started_to_find_addresses(monkeypatch):
    """deepspeedai/DeepSpeed#826, #6497: `hostname -I` is missing on some systems, and knows no order."""
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))
    monkeypatch.setenv("PATH", "")
    network.interfaces()
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.host_id()


def test_addresses_of_this_host_are_known_as_its_own():
    assert network.is_own("127.0.0.1")
    assert network.is_own("127.0.1.1")
    assert network.is_own("::1")
    assert not network.is_own("198.51.100.77")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (GLOO, "eth0"),
        (GLOO, "eth0,eth1"),
        (TENSORPIPE, "ib0"),
        (NCCL, "eth"),
        (NCCL, "=eth0"),
        (NCCL, "^docker,lo"),
        (NCCL, "^=lo"),
        (NCCL, "enp,ib"),
    ],
)
def test_interfaces_that_exist_are_accepted_in_each_librarys_own_form(two_cards, variable, text):
    network.check_named_interfaces({variable: text})


@pytest.mark.parametrize(
    ("variable", "text"),
    [(GLOO, "eth"), (GLOO, "eth0,enp3s0"), (NCCL, "enp"), (NCCL, "=eth"), (NCCL, "^lo,eth,docker,ib")],
)
def test_an_interface_that_does_not_exist_is_refused_and_the_existing_ones_are_listed(two_cards, variable, text):
    """pytorch/pytorch#29482: NCCL_SOCKET_IFNAME=eth0 in a container without one, "no socket interface found"."""
    with pytest.raises(ValueError, match=rf"{variable}=.* names no interface .* eth1 \(10.1.0.7\), docker0") as caught:
        network.check_named_interfaces({variable: text})
    assert "ib0 (no address)" in str(caught.value)


def test_the_interface_that_leads_to_the_master_is_chosen_where_the_user_named_none(two_cards, monkeypatch):
    """deepspeedai/DeepSpeed#5136: not the first card. NCCL takes prefixes, and eth1 is one of eth10."""
    monkeypatch.setattr(network, "source_address", lambda master: "10.1.0.7")
    environ = {NCCL: "ib0", GLOO: ""}
    network.choose_interface(environ, "10.1.0.1")
    assert environ == {NCCL: "ib0", GLOO: "eth1", TENSORPIPE: "eth1"}
    fresh: dict[str, str] = {}
    network.choose_interface(fresh, "10.1.0.1")
    assert fresh[NCCL] == "=eth1"


def test_no_interface_is_chosen_where_none_is_known(monkeypatch):
    """macOS, whose addresses are not read; and a host without a route to the master."""
    monkeypatch.setattr(network, "interfaces", lambda: {"en0": [], "lo0": []})
    environ: dict[str, str] = {}
    network.choose_interface(environ, "127.0.0.1")
    assert environ == {}
    assert network.gloo_address(environ, "127.0.0.1") == ("127.0.0.1", "")


def test_gloo_listens_where_its_variable_says(two_cards):
    assert network.gloo_address({GLOO: "eth1,eth0"}, "10.0.0.1") == ("10.1.0.7", "eth1")


def test_names_are_resolved_and_unknown_ones_give_nothing():
    assert set(network.resolve("localhost")) & {"127.0.0.1", "::1"}
    assert network.resolve("10.0.0.1") == ["10.0.0.1"]
    assert network.resolve("fd00::7") == ["fd00::7"]
    assert network.resolve("no-such-host.invalid", 2.0) == []
    assert network.resolve("a..b") == []


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch):
    """pytorch/pytorch#131691: look-ups that were tried again for 1800 s."""
    released = threading.Event()

    def look_up(*args: Any, **kwargs: Any) -> Any:
        released.wait(20)
        raise socket.gaierror("late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    start = time.monotonic()
    assert network.resolve("slow.example", 0.2) == []
    assert time.monotonic() - start < 2
    released.set()


def test_both_families_are_tried_until_one_answers():
    """pytorch/pytorch#131691: an IPv6 address that leads nowhere comes first in many answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.connect(["::1", "127.0.0.1"], port)[0] == "127.0.0.1"
    address, said = network.connect(["127.0.0.1"], port)
    assert address is None
    assert f"127.0.0.1 port {port}: Connection refused" in said


def test_a_door_tells_its_caller_who_answers():
    door = network.Door("127.0.0.1")
    try:
        assert network.knock("127.0.0.1", door.port, door.token) == ""
        assert network.knock("127.0.0.1", door.port, "0" * 16) == "another process answers there"
    finally:
        door.close()
    assert network.knock("127.0.0.1", door.port, door.token) == "Connection refused"


def test_a_door_that_nobody_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(network, "CONNECT_LIMIT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert network.knock("127.0.0.1", silent.getsockname()[1], "0" * 16).startswith("no answer")
        assert time.monotonic() - start < 3
