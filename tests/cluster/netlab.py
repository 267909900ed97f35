"""Hosts that are network namespaces of this machine.

Owns   the namespaces, their switches, name files, processes and logs; all of it is gone when the lab is left.
Takes  how many hosts and networks; commands to run on a host, each with an outer limit in seconds.
Gives  processes whose printed events can be waited for, cuts of a host's link, and the bytes that a link has sent.
Invariant: nothing reaches the machine's own network (the switch has no route out of it), and what a killed run has left
           is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

PREFIX = "shardmplab"
NAMES = Path("/etc/netns")  # `ip netns exec` lays a namespace's files from here over those in /etc
MOUNTS = Path("/run/netns")
EVENT = '{"event"'
POLL = 0.02
LIMIT = 240.0
SHOWN_OUTPUT = 3000
PR_SET_PDEATHSIG = 1
FIREWALL = ("iptables", "-A", "INPUT", "-i", "eth+", "-p", "tcp", "--syn")

T = TypeVar("T")
_labs = itertools.count()


def until(condition: Callable[[], T], limit: float, what: Callable[[], str]) -> T:
    """What `condition` returns once it is true; `what` says what was awaited if that takes more than `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit} s: {what()}")
        time.sleep(POLL)
    return found


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def cannot_run() -> str | None:
    """Why this machine cannot hold a lab; None where it can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need Linux with iproute2 and util-linux"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "probe", "type", "bridge")
    except RuntimeError as error:
        return f"network namespaces need root with CAP_SYS_ADMIN and CAP_NET_ADMIN ({error})"
    finally:
        _remove(name)
    return None


def cannot_block() -> str | None:
    """Why hosts here can have no firewall; None where they can."""
    if shutil.which("iptables") is None:
        return "needs iptables"
    name = f"{PREFIX}-{os.getpid()}-firewall"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, *FIREWALL, "--dport", "1", "-j", "DROP")
    except RuntimeError as error:
        return f"the kernel takes no rule of iptables ({error})"
    finally:
        _remove(name)
    return None


class Process:
    """A process on a host: its output in one file, in which lines of JSON are events that can be waited for."""

    def __init__(self, host: Host, pid: int, log: Path, poll: Callable[[], int | None]) -> None:
        self.host = host
        self.pid = pid
        self.log = log
        self.poll = poll
        """The exit code, negative for a signal; None while it runs."""
        self._read = 0
        self._events: list[dict[str, Any]] = []

    @property
    def events(self) -> list[dict[str, Any]]:
        with self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may still be on its way
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if EVENT in line:  # a launcher may put the rank before it
                self._events.append(json.loads(line[line.index(EVENT) :]))
        return self._events

    def all(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"event": kind, **fields}.items()
        return [event for event in self.events if wanted <= event.items()]

    def first(self, kind: str, **fields: Any) -> dict[str, Any] | None:
        return next(iter(self.all(kind, **fields)), None)

    def output(self) -> str:
        """The end of what it printed, events apart."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if '"event": "step"' not in line)[-SHOWN_OUTPUT:]

    def wait(self, limit: float) -> int:
        """Its exit code, at most `limit` seconds from now."""
        until(lambda: self.poll() is not None, limit, lambda: f"the end of {self}")
        code = self.poll()
        assert code is not None
        return code

    def wait_for(self, kind: str, limit: float, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The `count`-th event of a kind with these fields; an error as soon as the process ends without it."""

        def found() -> list[dict[str, Any]]:
            ended = self.poll() is not None
            matching = self.all(kind, **fields)[count - 1 :]
            if ended and not matching:
                raise RuntimeError(f"no event {kind!r} {fields or ''}: {self}")
            return matching

        return until(found, limit, lambda: f"event {kind!r} {fields or ''} of {self}")[0]

    def signal(self, number: int) -> None:
        """To its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def __str__(self) -> str:
        code = self.poll()
        state = "still running" if code is None else f"ended with {code}"
        return f"process {self.pid} on {self.host.name} ({state}):\n{self.output()}"


class Host:
    """A network namespace with its own host name, name files and one interface per network (eth0, eth1, ...)."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab = lab
        self.number = number
        self.name = f"node{number}"
        self.netns = f"{lab.name}-{self.name}"
        self.addresses = [f"10.{77 + network}.0.{10 + number}" for network in range(lab.num_networks)]
        self.ipv6 = f"fd77::{10 + number}"

    @property
    def address(self) -> str:
        return self.addresses[0]

    def write_hosts(self, *lines: str) -> None:
        """What this host knows of names; holds for processes that are started from now on."""
        (NAMES / self.netns / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{line}\n" for line in lines))

    def sent_bytes(self, interface: str = "eth0") -> int:
        """What the interface has sent since the lab began, with headers."""
        (link,) = json.loads(ip("-n", self.netns, "-j", "-s", "link", "show", interface))
        return int(link["stats64"]["tx"]["bytes"])

    def add_bridge(self, name: str, address: str) -> None:
        """An interface that leads nowhere, such as a container engine's."""
        ip("-n", self.netns, "link", "add", name, "type", "bridge")
        ip("-n", self.netns, "addr", "add", address, "dev", name)
        ip("-n", self.netns, "link", "set", name, "up")

    def cut(self, network: int = 0) -> None:
        """Pull the cable: packets are lost in both directions, and nobody is told."""
        ip("-n", self.lab.switch, "link", "set", f"port{network}-{self.number}", "nomaster")

    def mend(self, network: int = 0) -> None:
        ip("-n", self.lab.switch, "link", "set", f"port{network}-{self.number}", "master", f"switch{network}")

    def cap(self, rate: str, network: int = 0) -> None:
        """What this host sends is shaped to a rate, such as 100mbit; what it receives is not."""
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        self.run("tc", "qdisc", "add", "dev", f"eth{network}", "root", *shape)

    def block(self, ports: str) -> None:
        """A firewall: new connections to these TCP ports (N or N:M) of this host are dropped, and nobody is told."""
        self.run(*FIREWALL, "--dport", ports, "-j", "DROP")

    def run(self, *command: str) -> None:
        """A command that sets something up in this host's network."""
        ip("netns", "exec", self.netns, *command)

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.netns).split()]

    def kill_all(self) -> None:
        """The host loses its power, its network stays."""
        _kill_all(self.netns)

    def enter(self) -> list[str]:
        """The start of a command line that runs the rest of it on this host."""
        return [
            *("ip", "netns", "exec", self.netns, "unshare", "--uts", "--ipc", "--"),
            *("sh", "-c", 'hostname "$0" && exec "$@"', self.name),
        ]

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        limit: float = LIMIT,
        enter: Sequence[str] | None = None,
    ) -> Process:
        """Run a command here. It is killed after `limit` seconds, and with the test process.

        `enter` is another start of the command line than the host's usual one.
        """
        log = self.lab.new_log(self)

        def begin() -> None:  # both hold across exec, neither is inherited by the command's own children
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.alarm(int(limit))

        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*(self.enter() if enter is None else enter), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(env),
                start_new_session=True,
                # Safe here: no thread of the tests could hold a lock while it forks.
                preexec_fn=begin,  # noqa: PLW1509
            )
        return self.lab.own(Process(self, popen.pid, log, popen.poll))


class Lab:
    """Some hosts on common switches; a context manager."""

    def __init__(self, directory: Path, num_hosts: int, num_networks: int = 1) -> None:
        self.directory = directory
        self.name = f"{PREFIX}-{os.getpid()}-{next(_labs)}"
        self.num_networks = num_networks
        self.switch = f"{self.name}-switch"
        self.hosts = [Host(self, number) for number in range(num_hosts)]
        self.processes: list[Process] = []

    def __enter__(self) -> Lab:
        sweep()
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    def _build(self) -> None:
        ip("netns", "add", self.switch)
        for network in range(self.num_networks):
            ip("-n", self.switch, "link", "add", f"switch{network}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"switch{network}", "up")
        for host in self.hosts:
            ip("netns", "add", host.netns)
            ip("-n", host.netns, "link", "set", "lo", "up")
            for network, address in enumerate(host.addresses):
                port, interface = f"port{network}-{host.number}", f"eth{network}"
                veth = ("type", "veth", "peer", "name", interface, "netns", host.netns)
                ip("-n", self.switch, "link", "add", port, *veth)
                ip("-n", self.switch, "link", "set", port, "master", f"switch{network}", "up")
                ip("-n", host.netns, "addr", "add", f"{address}/24", "dev", interface)
                ip("-n", host.netns, "link", "set", interface, "up")
            ip("-n", host.netns, "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
            (NAMES / host.netns).mkdir(parents=True)
            (NAMES / host.netns / "resolv.conf").write_text("")  # no name server: what hosts does not say is unknown
            host.write_hosts(*(f"{other.address} {other.name}" for other in self.hosts))

    def new_log(self, host: Host) -> Path:
        return self.directory / f"{host.name}-{len(self.processes)}.log"

    def own(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def stands_still(self, processes: Sequence[Process], seconds: float) -> None:
        """Wait until no process has said anything for this long."""
        last, since = -1, time.monotonic()

        def quiet() -> bool:
            nonlocal last, since
            said = sum(len(process.events) for process in processes)
            if said != last:
                last, since = said, time.monotonic()
            return time.monotonic() - since > seconds

        until(quiet, 10 * seconds + 10, lambda: f"silence of\n{self.report()}")

    def report(self) -> str:
        """All processes and what they printed, for a test that failed."""
        return "\n\n".join(map(str, self.processes))

    def down(self) -> None:
        for process in self.processes:
            process.kill()
        for name in [*(host.netns for host in self.hosts), self.switch]:
            _remove(name)
        for process in self.processes:  # reap
            with contextlib.suppress(TimeoutError):
                process.wait(5)


def sweep() -> None:
    """Remove what runs that were killed have left. Namespaces of live processes are theirs."""
    leftovers = {path.name for folder in (MOUNTS, NAMES) if folder.is_dir() for path in folder.iterdir()}
    for name in leftovers:
        match = re.match(rf"{PREFIX}-(\d+)-", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(name)


def wait_for_all(processes: Sequence[Process], kind: str, limit: float, **fields: Any) -> list[dict[str, Any]]:
    """The first such event of each process; an error as soon as one of them ends without it."""

    def found() -> list[dict[str, Any]] | None:
        ended = [process for process in processes if process.poll() is not None]
        events = [process.first(kind, **fields) for process in processes]
        for process, event in zip(processes, events, strict=True):
            if event is None and process in ended:
                raise RuntimeError(f"no event {kind!r} {fields or ''}: {process}")
        return [event for event in events if event is not None] if None not in events else None

    def missing() -> str:
        return "\n".join(f"event {kind!r} {fields or ''} of {p}" for p in processes if p.first(kind, **fields) is None)

    events = until(found, limit, missing)
    assert events is not None
    return events


def _remove(name: str) -> None:
    if (MOUNTS / name).exists():
        _kill_all(name)
        ip("netns", "del", name)
    if NAMES.is_dir():
        shutil.rmtree(NAMES / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            NAMES.rmdir()


def _kill_all(netns: str) -> None:
    """Also those that left their process group, as the workers of an elastic agent do."""

    def none_left() -> bool:
        pids = [int(pid) for pid in ip("netns", "pids", netns).split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    until(none_left, 10, lambda: f"the end of all processes in {netns}")


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """What the tests' own environment must not decide is left out: a launcher's variables, and the interface."""
    foreign = re.compile(
        r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|GLOO_|NCCL_|TORCHELASTIC_|PET_|OMPI_|PMI|MPI|PRTE_|SLURM_|KUBERNETES_).*"
    )
    own = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**own, **threads, "PYTHONUNBUFFERED": "1", **(env or {})}
