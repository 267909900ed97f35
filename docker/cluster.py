"""Runs compose.yaml for real: builds the image, trains on two nodes of two ranks, shows what came of it, and removes all.

    python docker/cluster.py                    20 steps of the example, on whatever engine this machine has
    python docker/cluster.py --steps 300        the whole example
    python docker/cluster.py --keep             leave containers and checkpoints (of an engine that runs anyway)

Owns:      one Compose project, its containers, network and volume; all are gone at the end.
Takes:     an `Engine`, Compose files, variables.
Gives:     what containers say, their state and their exit codes; as a command, exit code 0 where all of them trained, or
           where this machine has no engine: then it says why.
Invariant: every wait has a limit, and one that ends badly shows what the containers said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import image
from engine import KINDS, Engine, Unavailable, open_engine
from rich.console import Console

COMPOSE = image.ROOT / "docker" / "compose.yaml"
CACHE = image.ROOT / "build" / "cluster"
NODES = ("node0", "node1")
POLL = 0.2
SHOWN = 6000

T = TypeVar("T")


class Cluster:
    """One Compose project; a context manager that removes it, its volume included."""

    def __init__(self, engine: Engine, project: str, files: Sequence[Path] = (COMPOSE,), **variables: str) -> None:
        self.engine = engine
        self.project = project
        self.files = files
        self.variables: Mapping[str, str] = {"SHARDMP_IMAGE": image.TAG, **variables}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.compose("down", "--volumes", "--timeout", "1", limit=180)

    def compose(self, *arguments: str, limit: float = 120, **variables: str) -> str:
        """The output of a Compose command for this project; `variables` stand over the cluster's own."""
        # No .env of the user's: the run is to be the one that compose.yaml describes.
        options = ["--env-file", "/dev/null", "--project-name", self.project]
        options += [word for file in self.files for word in ("--file", str(file))]
        return self.engine.compose(*options, *arguments, limit=limit, env={**self.variables, **variables}).stdout

    def up(self, *services: str, **variables: str) -> None:
        """Start them (all, if none is named) and what they need."""
        self.compose("up", "--detach", "--no-build", *services, limit=180, **variables)

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    def state(self, service: str) -> dict[str, Any]:
        """`docker inspect`'s State: Status, ExitCode, Health."""
        said = self.engine.docker("inspect", "--format", "{{json .State}}", self.container(service)).stdout
        return json.loads(said)

    def health(self, service: str) -> str:
        return str(self.state(service)["Health"]["Status"])

    def log(self, service: str) -> str:
        done = self.engine.docker("logs", self.container(service), check=False)
        return done.stdout + done.stderr

    def run(self, service: str, *command: str, limit: float = 60) -> str:
        """A command in a running container."""
        return self.engine.docker("exec", self.container(service), *command, limit=limit).stdout

    def until(self, condition: Callable[[], T], limit: float, what: str) -> T:
        """What `condition` returns once it is true; where that takes longer than `limit` seconds, all logs."""
        deadline = time.monotonic() + limit
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {limit:g} s: {what}\n{self.report()}")
            time.sleep(POLL)
        return found

    def wait_for(self, service: str, text: str, limit: float, count: int = 1) -> None:
        """Until a container has said this so many times; an error as soon as it ends without."""

        def said() -> bool:
            ended = self.state(service)["Status"] == "exited"
            enough = self.log(service).count(text) >= count
            if ended and not enough:
                raise RuntimeError(f"{service} ended without {text!r}\n{self.report()}")
            return enough

        self.until(said, limit, f"{text!r} of {service}")

    def exit_codes(self, limit: float, nodes: Sequence[str] = NODES) -> list[int]:
        """Of all these, once they have ended."""
        over = {"exited", "dead"}
        self.until(lambda: all(self.state(node)["Status"] in over for node in nodes), limit, f"the end of {nodes}")
        return [int(self.state(node)["ExitCode"]) for node in nodes]

    def report(self) -> str:
        """What all containers said last."""
        listed = self.engine.docker(
            "ps", "--all", "--filter", f"label=com.docker.compose.project={self.project}"
        ).stdout
        services = [service for service in ("store", *NODES) if self.container(service) in listed]
        return "\n".join([listed, *(f"--- {service}:\n{self.log(service)[-SHOWN:]}" for service in services)])


def train(engine: Engine, steps: int, limit: float, keep: bool, say: Callable[[str], None]) -> int:
    """The example on all nodes; 0 where each container ended with 0."""
    cluster = Cluster(engine, "shardmp-cluster", STEPS=str(steps), SAVE_EVERY=str(max(1, steps // 2)))
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if not keep:
            stack.enter_context(cluster)
        cluster.up()
        cluster.until(lambda: cluster.health("node0") == "healthy", limit, "a healthy node0")
        say(cluster.compose("ps", "--format", "table {{.Service}}\t{{.Status}}").rstrip())
        say(f"healthy {time.monotonic() - start:.0f} s after `up`\n")
        codes = cluster.exit_codes(limit)
        say(printable(cluster.log("node0")))
        for node, code in zip(NODES, codes, strict=True):
            say(f"{node}: exit code {code}")
        if any(codes):
            print(cluster.log("node1"), file=sys.stderr)
            return 1
        volume = f"{cluster.project}_checkpoints:/checkpoints"
        inspect = ["run", "--rm", "--network", "none", "--volume", volume, image.TAG, "shardmp", "inspect"]
        about = engine.docker(*inspect, "/checkpoints/gpt").stdout.splitlines()
        say("\n".join([*about[:2], about[-1]]))
    return 0


def printable(text: str) -> str:
    """Without the control characters that a model of few steps writes into its sample: a picture cannot have them."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


def recorder() -> Console:
    """Prints at once, and keeps what it printed for a picture."""
    return Console(record=True, width=118, highlight=False, emoji=False, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("auto", *KINDS), default="auto", help="the container engine")
    parser.add_argument("--steps", type=int, default=20, help="steps of the example (default: 20)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each part (default: 600)")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder for images and wheels (default: build/cluster)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw the output as a terminal shows it")
    parser.add_argument("--keep", action="store_true", help="leave containers and checkpoints")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: containers and engine are removed first
    console = recorder()
    try:
        with open_engine(options.engine, options.cache / "engine") as engine:
            console.print(f"engine: {engine.kind}")
            start = time.monotonic()
            image.build(engine, options.cache)
            size = engine.docker("image", "inspect", "--format", "{{.Size}}", image.TAG).stdout
            console.print(f"image: {int(size) / 1e6:.0f} MB, built in {time.monotonic() - start:.0f} s")
            code = train(engine, options.steps, options.limit, options.keep, console.print)
            if options.picture is not None:
                console.save_svg(str(options.picture), title="make cluster")
            return code
    except Unavailable as reason:
        print(f"skipped: this machine has no container engine: {reason}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
