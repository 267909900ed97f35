"""Ranks that start in a moment: a process that has imported torch forks each rank, which then moves to its host.

Owns   the forks; they end when it does, and it ends when its standard input does, that is, with the tests.
Takes  requests, one JSON line each: host, environment, the worker's arguments, log.
Gives  the fork's process id on standard output, and its exit code in the file LOG.rc.
Invariant: a fork stands where `ip netns exec HOST unshare --uts --ipc` would have put it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 0x1000, 0x4000, 0x80000, 2
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{arguments}: {os.strerror(error)}")


def enter(netns: str, hostname: str) -> None:
    """Move this process to a host: its network, its name, and the files over those in /etc."""
    handle = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    _call("setns", handle, CLONE_NEWNET)
    os.close(handle)
    _call("unshare", CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC)
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    _call("umount2", b"/sys", MNT_DETACH)  # its list of interfaces is that of the namespace it was mounted in
    _call("mount", netns.encode(), b"/sys", b"sysfs", 0, None)
    for path in Path("/etc/netns", netns).iterdir():
        _call("mount", bytes(path), b"/etc/" + path.name.encode(), None, MS_BIND, None)
    socket.sethostname(hostname)


def become(request: dict[str, Any]) -> None:
    os.setsid()
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    enter(request["netns"], request["hostname"])


def reap(logs: dict[int, str]) -> None:
    while logs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        path = Path(logs.pop(pid) + ".rc")
        path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
        path.with_suffix(".part").rename(path)  # whoever finds it finds it whole


def serve() -> dict[str, Any] | None:
    """The request of the fork that this process has become; None at the end of all requests."""
    logs: dict[int, str] = {}
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.02)
        reap(logs)
        if not readable:
            continue
        line = sys.stdin.readline()
        if not line:
            for pid in logs:
                os.kill(pid, signal.SIGKILL)
            return None
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        logs[pid] = request["log"]
        print(pid, flush=True)


def main() -> int:
    import cluster_worker
    import torch._dynamo  # the first torch.optim.Optimizer of a process imports it, for seconds

    assert torch.get_num_threads() == 1, "a process with threads is no good to fork from"
    gc.freeze()
    print("ready", flush=True)
    request = serve()
    if request is None:
        return 0
    become(request)
    return cluster_worker.main(request["arguments"])


if __name__ == "__main__":
    sys.exit(main())
