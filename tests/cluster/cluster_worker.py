"""One rank of a small training with shardmp, as a user's script would be, that tells the tests what happens.

Owns   nothing but its process.
Takes  options on the command line; who it is comes from the launcher's environment through `shardmp.init`.
Gives  lines of JSON on standard output: began, joined, gate, step, error, refused, masters.
Invariant: seeds, data and sizes are fixed, so equal world sizes end in equal masters whatever started them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardmp

GATE_LIMIT = 60.0


def say(event: str, **fields: Any) -> None:
    """One write per line, so that lines of several ranks in one file stay whole."""
    os.write(1, (json.dumps({"event": event, **fields, "time": time.time()}) + "\n").encode())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--reduce", choices=("fp32", "exact"), default="fp32")
    parser.add_argument("--timeout", type=float, default=30.0)
    parser.add_argument("--arrival-timeout", type=float, default=None)
    parser.add_argument("--gates", default="", help="DIR:STEP,STEP: before such a step wait for the file DIR/STEP")
    parser.add_argument("--until", default=None, help="train until this file exists (all ranks leave at the same step)")
    parser.add_argument("--fault", default="", help="KIND:RANK:STEP,..., KIND raise or absent")
    parser.add_argument("--limit", type=int, default=240, help="seconds that this process may live")
    return parser.parse_args(arguments)


class Model(nn.Module):
    """A few linear layers; `fails` makes the next forward raise."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("this rank was told to fail in forward")
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


def batch(step: int, rank: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, width, generator=generator)


def digest(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Hashes of the whole masters and of this rank's own FP16 weights. Collective."""
    masters, weights = hashlib.sha256(), hashlib.sha256()
    for name, parameter in model.named_parameters():
        masters.update(optimizer.master(name).numpy().tobytes())
        weights.update(parameter.detach().numpy().tobytes())
    return {"masters": masters.hexdigest(), "weights": weights.hexdigest()}


def join(options: argparse.Namespace) -> shardmp.World:
    arrival = {} if options.arrival_timeout is None else {"arrival_timeout": options.arrival_timeout}
    start = time.monotonic()
    try:
        world = shardmp.init(timeout=options.timeout, **arrival)
    except Exception as error:
        say("error", at="init", type=type(error).__name__, message=str(error), seconds=time.monotonic() - start)
        raise
    say(
        "joined",
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        seconds=time.monotonic() - start,
        interface=os.environ.get("GLOO_SOCKET_IFNAME"),
    )
    return world


def gate(options: argparse.Namespace, rank: int, step: int) -> None:
    directory, _, steps = options.gates.partition(":")
    if str(step) in steps.split(","):
        say("gate", step=step, rank=rank)
        deadline = time.monotonic() + GATE_LIMIT
        while not Path(directory, str(step)).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody opened the gate before step {step}")
            time.sleep(0.01)


def stop_wanted(options: argparse.Namespace, world: shardmp.World) -> bool:
    """Decided by all ranks together, as a rank may see the file a step before another."""
    if options.until is None:
        return False
    wanted = torch.tensor(int(Path(options.until).exists()))
    if world.world_size > 1:
        torch.distributed.all_reduce(wanted)
    return bool(wanted)


def train(options: argparse.Namespace, world: shardmp.World) -> None:
    torch.manual_seed(0)
    inner = Model(options.width, options.layers)
    model, optimizer = shardmp.shard(
        inner,
        torch.optim.AdamW(inner.parameters(), lr=1e-3),
        max_grad_norm=1.0,
        reduce=options.reduce,
        average="micro_batches",  # with one of them per rank and step the same as the mean over ranks
    )
    faults = options.fault.split(",")
    for step in range(1, options.steps + 1):
        if f"absent:{world.rank}:{step}" in faults:
            say("absent", step=step)
            time.sleep(60)
        inner.fails = f"raise:{world.rank}:{step}" in faults
        began = time.monotonic()
        try:
            optimizer.synchronize()  # the last step's gather is over: whoever counts bytes counts whole steps
            gate(options, world.rank, step)
            optimizer.backward(model(batch(step, world.rank, options.width)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            say("error", at="step", step=step, type=type(error).__name__, message=str(error), rank=world.rank)
            say("refused", message=refusal(optimizer), rank=world.rank)
            raise
        say("step", step=step, rank=world.rank, world_size=world.world_size, seconds=time.monotonic() - began)
        if stop_wanted(options, world):
            break
    say("masters", rank=world.rank, world_size=world.world_size, step=step, **digest(model, optimizer))


def refusal(optimizer: Any) -> str:
    """What a step after a failure says; nothing is what it must not say."""
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    signal.alarm(options.limit)
    torch.set_num_threads(1)
    say("began")
    world = join(options)
    train(options, world)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
