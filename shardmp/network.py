"""This host on the network: its interfaces and addresses, which of them leads to another host, and names.

Owns:      the variables that choose an interface for gloo and NCCL, and every look-up that has a time limit.
Takes:     names, addresses, a mapping of environment variables.
Gives:     addresses as text, names of interfaces, an open connection's address.
Invariant: no process is started, and nothing here waits longer than it says. (`hostname -I`, which others call, is
           missing on some systems, and takes the first card rather than the right one.)
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

CONNECT_LIMIT = 2.0  # seconds for one attempt to connect to one address
RESOLVE_LIMIT = 8.0  # seconds for a name; with one attempt to connect an error comes within 10 s

GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"

_SIOCGIFCONF = 0x8912
_IFREQ = 40  # bytes of Linux's struct ifreq on 64 bits: 16 of name, then the address


@functools.cache
def host_id() -> str:
    """A text that two processes share exactly if they can meet on the loopback interface.

    The host's name alone does not tell: hosts of a cluster may share one, and containers on one machine have their own.
    """
    boot, namespace = "", ""
    with contextlib.suppress(OSError):  # no /proc on macOS
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{socket.gethostname()}/{boot}/{namespace}"


# -- interfaces


def interfaces() -> dict[str, list[str]]:
    """Each interface that exists and its addresses, IPv4 first; on macOS no addresses are known."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    if sys.platform == "linux":
        for name, address in (*_ipv4_addresses(), *_ipv6_addresses()):
            found.setdefault(name, []).append(address)
    return found


def _ipv4_addresses() -> list[tuple[str, str]]:
    import fcntl  # not on every system that can import this module

    buffer = array.array("B", bytes(_IFREQ * 512))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
    entries = [buffer[start : start + _IFREQ].tobytes() for start in range(0, length, _IFREQ)]
    return [(entry[:16].split(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])) for entry in entries]


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Global addresses before link-local ones, which need a scope."""
    found = []
    with contextlib.suppress(OSError):  # IPv6 may be off
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            found.append((int(scope, 16), name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return [(name, address) for scope, name, address in sorted(found, key=lambda entry: entry[0])]


def describe_interfaces() -> str:
    """The interfaces of this host as an error names them."""
    return ", ".join(f"{name} ({', '.join(found) or 'no address'})" for name, found in interfaces().items())


def source_address(address: str) -> str | None:
    """The own address from which packets to `address` (a number, not a name) leave; None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of a datagram socket: looks the route up, sends nothing
        return str(probe.getsockname()[0]).partition("%")[0]
    return None


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None if none has, or on macOS."""
    for name, addresses in interfaces().items():
        if address in addresses:
            return name
    return None


def is_own(address: str) -> bool:
    """Whether `address` belongs to this host: what is sent to it does not leave."""
    return is_loopback(address) or source_address(address) == address


def is_loopback(address: str) -> bool:
    """Whether `address` (a number) means "this host" on every host."""
    return address == "::1" or address.startswith("127.")


def check_named_interfaces(environ: Mapping[str, str]) -> None:
    """An interface that the user named must exist here; otherwise gloo and NCCL fail late, with little said.

    gloo takes exact names; NCCL takes prefixes, "=name" for exact ones, and "^" before what is not to be used.

    Raises:
        ValueError: it does not. The message lists those that exist.
    """
    names = list(interfaces())
    for variable in (GLOO, TENSORPIPE, NCCL):
        text = environ.get(variable, "")
        if not text:
            continue
        if variable == NCCL:
            excluded, exact = text.startswith("^"), text.lstrip("^").startswith("=")
            wanted = [part for part in text.lstrip("^=").split(",") if part]
            matched = [name for name in names if any(name == w if exact else name.startswith(w) for w in wanted)]
            good = len(matched) < len(names) if excluded else bool(matched)
        else:
            good = all(part in names for part in text.split(","))
        if not good:
            raise ValueError(
                f"environment variable {variable}={text!r} names no interface of host {socket.gethostname()}, which has "
                f"{describe_interfaces()}: name one of them, or unset {variable} to take the one that leads to MASTER_ADDR"
            )


def choose_interface(environ: MutableMapping[str, str], master: str) -> None:
    """Name the interface that leads to `master` (a number) for gloo and NCCL, where the user named none.

    Left to itself gloo resolves the host's own name, which may give nothing, 127.0.1.1, or the address of a bridge.
    """
    source = source_address(master)
    name = interface_of(source) if source else None
    if name:
        for variable, value in ((GLOO, name), (TENSORPIPE, name), (NCCL, f"={name}")):  # NCCL's eth1 would fit eth10
            if not environ.get(variable):
                environ[variable] = value


def gloo_address(environ: Mapping[str, str], master: str) -> tuple[str, str]:
    """The address at which gloo will listen, and its interface's name ("" where unknown)."""
    name = environ.get(GLOO, "").split(",")[0]
    addresses = interfaces().get(name, [])
    if addresses:
        return addresses[0], name
    return source_address(master) or "127.0.0.1", name


# -- names and connections


def resolve(name: str, limit: float = RESOLVE_LIMIT) -> list[str]:
    """The addresses of `name`, of both families; none if it has none or the answer takes longer than `limit` seconds."""
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    # getaddrinfo has no time limit of its own, and a name server that does not answer takes minutes.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(limit)
    return list(found)


def connect(addresses: Sequence[str], port: int, limit: float = CONNECT_LIMIT) -> tuple[str | None, str]:
    """The first of `addresses` that takes a connection at `port`, else None; and what happened with each."""
    said = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=limit):
                return address, ""
        except OSError as error:
            said.append(f"{address} port {port}: {'no answer' if isinstance(error, TimeoutError) else error.strerror}")
    return None, "; ".join(said)


class Door:
    """Listens at an own address for as long as it is open, and hands its token to who connects.

    The token tells the caller that it has reached this process, and not one that has the same address elsewhere.
    """

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(8)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), caller:
                caller.settimeout(CONNECT_LIMIT)
                caller.sendall(self.token.encode())

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(CONNECT_LIMIT)


def knock(address: str, port: int, token: str) -> str:
    """Why the door of this token was not reached at `address`; empty if it was. Takes 2 seconds for each of two waits."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_LIMIT) as connection:
            answer = connection.recv(len(token), socket.MSG_WAITALL).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {CONNECT_LIMIT:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == token else "another process answers there"
