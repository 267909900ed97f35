"""Where a process listens, from /proc alone. Takes a process id; gives addresses and ports."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(descriptor))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and f"socket:[{words[9]}]" in own:
                digits, port = words[1].split(":")
                raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found
