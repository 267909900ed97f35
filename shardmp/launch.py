"""torchrun's command for this node, and the store that outlives every node.

Owns:      the choice of torchrun's options: who hosts the rendezvous, from which address this node speaks, and what a
           node that comes back needs. Also the separate rendezvous store.
Takes:     a `Request` (what the user asked for), a `Place` (where this node is in the network), an environment.
Gives:     a frozen `Command`: arguments and the variables to set beside the environment.
Invariant: `build` is pure, and every mistake of the user is a ValueError that names the option before a rank starts.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from . import network

DEFAULT_STORE_PORT = 29500
DEFAULT_ID = "shardmp"
# A node that was silent for so long counts as gone: three missed signs of life, torch's own 3 x 5 s.
DEFAULT_KEEP_ALIVE = 15
# Each node that is lost or comes back costs the others one restart; without any, elastic ends at the first loss.
DEFAULT_ELASTIC_RESTARTS = 3
_MISSED_SIGNS = 3


@dataclass(frozen=True)
class Request:
    """What the user asked for, as the options of `shardmp launch` say it; times in seconds."""

    script: str
    arguments: tuple[str, ...] = ()
    nnodes: str = "1"
    nproc_per_node: str = "1"
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str = DEFAULT_ID
    separate_store: bool = False
    max_restarts: int | None = None
    keep_alive: int = DEFAULT_KEEP_ALIVE
    local_addr: str | None = None
    log_dir: str | None = None
    shutdown_timeout: int | None = None


@dataclass(frozen=True)
class Place:
    """Where this node is: whether the endpoint is one of its own addresses, and the address that the others reach."""

    owns_endpoint: bool
    address: str


@dataclass(frozen=True)
class Command:
    """torchrun's command line; `environment` holds only the variables that are set beside the caller's own."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """One line for a POSIX shell that does the same."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


# -- what was asked for


def node_range(nnodes: str) -> tuple[int, int]:
    """The smallest and the largest number of nodes in "N" or "MIN:MAX".

    Raises:
        ValueError: another form, or not 1 <= MIN <= MAX.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nnodes.strip(), re.ASCII)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"--nnodes {nnodes}: expected N or MIN:MAX with 1 <= MIN <= MAX, for instance 2 or 1:4")
    return low, high


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 address stands in brackets.

    Raises:
        ValueError: no host, no port, or a port outside 1..65535.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):(\d{1,5})", endpoint.strip(), re.ASCII)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(
            f"--rdzv-endpoint {endpoint}: expected HOST:PORT with a port in 1..65535, for instance node0:29500, "
            "10.0.0.1:29500 or [fd00::1]:29500"
        )
    return match[1] or match[2], int(match[3])


def _check_numbers(request: Request) -> None:
    """What is wrong in an option for itself."""
    processes = request.nproc_per_node
    if processes not in ("auto", "gpu", "cpu") and not re.fullmatch(r"0*[1-9]\d{0,5}", processes, re.ASCII):
        raise ValueError(f"--nproc-per-node {processes}: expected a number from 1 on, or auto, gpu or cpu")
    if request.keep_alive < _MISSED_SIGNS:
        raise ValueError(f"--keep-alive {request.keep_alive}: expected {_MISSED_SIGNS} seconds or more")
    for option, value in (("--max-restarts", request.max_restarts), ("--shutdown-timeout", request.shutdown_timeout)):
        if value is not None and value < 0:
            raise ValueError(f"{option} {value}: expected 0 or more")
    if not request.rdzv_id.strip():
        raise ValueError("--rdzv-id: expected a name that all nodes of this job share, got an empty one")


def check(request: Request) -> None:
    """Whether the options make sense together; looks at no network and no file but the script.

    Raises:
        ValueError: names the option, what was expected, and the cure.
    """
    low, high = node_range(request.nnodes)
    _check_numbers(request)
    if not Path(request.script).is_file():
        raise ValueError(f"script {request.script}: no such file in {Path.cwd()}; its own options stand behind it")
    if request.rdzv_endpoint is None:
        if high > 1:
            raise ValueError(
                f"--nnodes {request.nnodes} needs --rdzv-endpoint HOST:PORT: an address of one node (or of the host that "
                "runs `shardmp rendezvous`), the same on every node"
            )
        for option, given in (
            ("--separate-store", request.separate_store),
            ("--local-addr", request.local_addr is not None),
        ):
            if given:
                raise ValueError(f"{option} needs --rdzv-endpoint HOST:PORT; one node alone needs neither")
    if request.node_rank is None:
        return
    if low != high:
        raise ValueError(
            f"--node-rank {request.node_rank} with --nnodes {request.nnodes}: elastic nodes get their ranks"
        )
    if not 0 <= request.node_rank < high:
        raise ValueError(f"--node-rank {request.node_rank}: expected 0..{high - 1}, as --nnodes is {request.nnodes}")
    if request.separate_store:
        raise ValueError("--node-rank with --separate-store: with fixed ranks node 0 hosts the store; leave one out")
    if request.max_restarts and high > 1:
        raise ValueError(
            f"--node-rank with --max-restarts {request.max_restarts}: nodes with fixed ranks do not hear of each other's "
            "restarts; leave --node-rank out"
        )


# -- where this node is


def locate(endpoint: str, several: bool, local_addr: str | None) -> Place:
    """Compares the endpoint with all addresses of this host's interfaces, never through its host name.

    torchrun asks `gethostname` instead, and then neither node hosts the rendezvous where the name is unknown, or
    resolves to 127.0.1.1 as Debian writes it (pytorch/pytorch#73656, #79388, #150532).

    Args:
        endpoint: HOST:PORT, the same on every node.
        several: whether the job has more than one node.
        local_addr: the address that the user named for this node, which wins.

    Raises:
        ValueError: the endpoint does not resolve, is a loopback address of several nodes, or has no route.
    """
    host, _ = split_endpoint(endpoint)
    if local_addr is not None and not (_is_number(local_addr) and network.is_own(local_addr)):
        raise ValueError(f"--local-addr {local_addr}: this host has {network.describe_interfaces()}; name one of these")
    if several and (host.startswith("localhost") or (_is_number(host) and network.is_loopback(host))):
        raise ValueError(
            f"--rdzv-endpoint {endpoint}: a loopback address, which every node takes for itself; name an address of one "
            f"node that the others reach (this one has {network.describe_interfaces()})"
        )
    found = _resolve(host)
    if not found:
        raise ValueError(
            f"--rdzv-endpoint {endpoint}: this host cannot resolve {host}; give the node's IP address, or add the name "
            "to DNS or to /etc/hosts of every node"
        )
    own = [address for address in found if network.is_own(address)]
    if own:
        return Place(True, local_addr or _address_for_others(endpoint, own, several))
    source = next(filter(None, map(network.source_address, found)), None)
    if source is None:
        raise ValueError(
            f"--rdzv-endpoint {endpoint}: this host has no route to {', '.join(found)}; it has "
            f"{network.describe_interfaces()}: is the address right, and the interface up?"
        )
    return Place(False, local_addr or source)


def _resolve(host: str) -> list[str]:
    """A pod's name appears in the cluster's DNS a moment after the pod: an unknown one is asked for again."""
    deadline = time.monotonic() + network.RESOLVE_LIMIT
    while not (found := network.resolve(host)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _leads_out(address: str) -> bool:
    """Neither loopback nor link-local, which would need an interface beside it."""
    return not (network.is_loopback(address) or ip_address(address).is_link_local)


def _address_for_others(endpoint: str, own: list[str], several: bool) -> str:
    """The address of this node where the endpoint is its own; a name may lead to 127.0.1.1 here, and elsewhere not."""
    reachable = [address for address in own if not network.is_loopback(address)]
    if reachable or not several:
        return (reachable or own)[0]
    cards = [[a for a in addresses if _leads_out(a)] for addresses in network.interfaces().values()]
    cards = [addresses for addresses in cards if addresses]
    if len(cards) == 1:
        return cards[0][0]
    raise ValueError(
        f"--rdzv-endpoint {endpoint}: on this host the name leads to {own[0]}, which no other node reaches; add "
        f"--local-addr with the address that they reach (this host has {network.describe_interfaces()}), or give that "
        "address as the endpoint on every node"
    )


# -- torchrun's command


def build(request: Request, place: Place | None, environ: Mapping[str, str]) -> Command:
    """torchrun's command for a checked request; `place` is None for one node alone. Pure: starts and asks nothing."""
    low, high = node_range(request.nnodes)
    restarts = request.max_restarts
    if restarts is None:
        restarts = DEFAULT_ELASTIC_RESTARTS if low != high else 0
    arguments = [sys.executable, "-m", "shardmp.torchrun", "--nnodes", request.nnodes.strip()]
    arguments += ["--nproc-per-node", request.nproc_per_node, "--max-restarts", str(restarts)]
    environment: dict[str, str] = {}
    remarks: list[str] = []
    if place is None:
        # MASTER_ADDR is the local address: by default the host's own name, which need not resolve.
        arguments += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        arguments += _rendezvous_options(request, place)
        remarks.append(_who_hosts(request, place))
        if request.separate_store and request.rdzv_id == DEFAULT_ID:
            remarks.append("the store outlives jobs, and the name of one that is over can't be used: give --rdzv-id")
        if low != high or restarts or request.separate_store:
            # torch 2.11 to 2.14: a new agent that joins a later round waits for a key that nobody writes, as long as
            # the agents' store is shared with the ranks (pytorch/pytorch#135712).
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if request.shutdown_timeout is not None:
        arguments += ["--shutdown-timeout", str(request.shutdown_timeout)]
    if request.log_dir is not None:
        arguments += ["--log-dir", request.log_dir, "--tee", "3"]
        if "PYTHONUNBUFFERED" not in environ:
            environment["PYTHONUNBUFFERED"] = "1"
    if "OMP_NUM_THREADS" not in environ and request.nproc_per_node.isdigit() and int(request.nproc_per_node) > 1:
        environment["OMP_NUM_THREADS"] = "1"
        remarks.append("OMP_NUM_THREADS is not set: 1 thread per rank, as torchrun does")
    arguments += [request.script, *request.arguments]
    return Command(tuple(arguments), environment, tuple(remarks))


def _rendezvous_options(request: Request, place: Place) -> list[str]:
    """Where the agents meet. With --node-rank ranks are fixed and node 0 hosts; else c10d hands them out."""
    endpoint = str(request.rdzv_endpoint)
    options = ["--rdzv-endpoint", endpoint, "--rdzv-id", request.rdzv_id, "--local-addr", place.address]
    if request.node_rank is not None:
        return ["--rdzv-backend", "static", "--node-rank", str(request.node_rank), *options]
    conf = {
        "is_host": int(place.owns_endpoint and not request.separate_store),
        "keep_alive_interval": request.keep_alive // _MISSED_SIGNS,
        "keep_alive_max_attempt": _MISSED_SIGNS,
    }
    return ["--rdzv-backend", "c10d", *options, "--rdzv-conf", ",".join(f"{key}={conf[key]}" for key in conf)]


def _who_hosts(request: Request, place: Place) -> str:
    hosts = request.node_rank == 0 if request.node_rank is not None else place.owns_endpoint
    if request.separate_store:
        role = "expects `shardmp rendezvous` at"
    elif hosts:
        role = "hosts the rendezvous at"
    else:
        role = "joins the rendezvous at"
    return f"this node {role} {request.rdzv_endpoint} and speaks from {place.address}"


def plan(request: Request, environ: Mapping[str, str]) -> Command:
    """Checks the request, looks where this node is, and builds the command.

    Kubeflow's PET_MASTER_ADDR and PET_MASTER_PORT stand for an endpoint that was not given.

    Raises:
        ValueError: names the option, what was expected, and the cure.
    """
    if request.rdzv_endpoint is None and environ.get("PET_MASTER_ADDR") and environ.get("PET_MASTER_PORT"):
        host = environ["PET_MASTER_ADDR"]
        endpoint = f"{f'[{host}]' if ':' in host else host}:{environ['PET_MASTER_PORT']}"
        request = replace(request, rdzv_endpoint=endpoint)
    check(request)
    if request.shutdown_timeout is not None:
        _check_torchrun_has("--shutdown-timeout")
    place = None
    if request.rdzv_endpoint is not None:
        place = locate(request.rdzv_endpoint, node_range(request.nnodes)[1] > 1, request.local_addr)
    return build(request, place, environ)


def _check_torchrun_has(option: str) -> None:
    """Asks the installed torchrun, which takes seconds to import: only for options that some versions lack."""
    import torch
    from torch.distributed.run import get_args_parser

    if not any(option in action.option_strings for action in get_args_parser()._actions):
        raise ValueError(f"{option}: the torchrun of torch {torch.__version__} does not have it; leave it out")


def start(command: Command) -> NoReturn:
    """Becomes torchrun: the process id stays, so a signal to this process reaches the agent."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command.arguments[0], command.arguments, {**os.environ, **command.environment})


# -- the separate store


def serve_store(host: str, port: int, ready: Callable[[int], None]) -> None:
    """Runs the store in which agents meet, until SIGINT or SIGTERM.

    In a process (a host, a container) of its own it makes every node expendable: the job goes on whichever node dies.

    Args:
        host: the address to listen on; empty for every address, of IPv4 and IPv6.
        port: the port; 0 for a free one.
        ready: called with the port once the store answers.

    Raises:
        ValueError: the host is no address of this machine, or the port is outside 0..65535.
        RuntimeError: the port is in use.
    """
    if not 0 <= port < 65536:
        raise ValueError(f"--port {port}: expected 0..65535")
    listener = _listen(host, port)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # After the handlers: the import takes seconds, and a signal may come meanwhile.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not declared so

    bound = listener.getsockname()[1]
    # The socket is handed over already bound: TCPStore would listen on every address, whatever host it is given.
    store = TCPStore(
        host or "127.0.0.1",
        bound,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    ready(bound)
    stop.wait()
    del store


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            raise RuntimeError(
                f"--port {port}: in use on this host; end the process that listens there, or choose another port here and "
                "in every node's --rdzv-endpoint"
            ) from None
        if failure.errno == errno.EACCES:
            raise RuntimeError(f"--port {port}: this user may not listen there; choose a port above 1023") from None
        raise ValueError(f"--host {host}: not an address of this host ({_reason(failure)}); leave it out") from None


def _reason(failure: OSError) -> str:
    """What the system says, without the address that Python adds to it."""
    number = failure.errno or 0
    return os.strerror(number) if number > 0 else str(failure.strerror)  # getaddrinfo's own numbers are negative
