"""The same training on 1, 2 and 4 ranks: one hash of the FP32 masters with reduce="exact", three with "fp32".

    python examples/same_bits.py

Trains a small byte-level GPT for ten steps of eight micro-batches, clipping active, on 1, 2 and 4 processes of this
machine, and prints a hash of all master weights. Addition of floating-point numbers depends on its order, so with
"fp32" the number of ranks shows in the last bits; "exact" adds FP16 gradients in FP64, where nothing is rounded.
"""

import argparse
import hashlib
import subprocess
import sys

import rich
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from rich.table import Table

import shardmp

STEPS, MICRO_BATCHES = 10, 8
RANKS = (1, 2, 4)


def train(reduce: str) -> str:
    """This rank's part of the training; the hash of the whole masters, the same on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a product's last bit may depend on the number of threads
    world = shardmp.init()
    model = GPT(GPTConfig(context=32, layers=2, width=64, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = shardmp.shard(model, optimizer, reduce=reduce, average="micro_batches", max_grad_norm=0.5)
    for step in range(STEPS):
        for number in range(world.rank, MICRO_BATCHES, world.world_size):  # dealt in turn
            generator = torch.Generator().manual_seed(1000 * step + number)
            tokens = torch.randint(0, 256, (2, 33), generator=generator)
            logits = model(tokens[:, :-1])
            optimizer.backward(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for name, _ in model.named_parameters():
        digest.update(optimizer.master(name).cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def hash_on(ranks: int, reduce: str) -> str:
    """The hash that `ranks` processes agree on."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, __file__, "--reduce", reduce], capture_output=True, text=True, check=False)
    hashes = {line.removeprefix("masters ") for line in done.stdout.splitlines() if line.startswith("masters ")}
    if done.returncode or len(hashes) != 1:
        raise SystemExit(f"{ranks} ranks with reduce={reduce!r} failed:\n{done.stdout}{done.stderr}")
    return hashes.pop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--reduce", choices=("exact", "fp32"), help="be one rank of a training (used by the script itself)"
    )
    reduce = parser.parse_args().reduce
    if reduce is not None:
        sys.stdout.write(f"masters {train(reduce)}\n")  # one write: print makes two, and lines of ranks would mix
        sys.stdout.flush()
        return
    table = Table("reduce", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS), "different hashes")
    for reduce in ("exact", "fp32"):
        found = [hash_on(ranks, reduce) for ranks in RANKS]
        table.add_row(reduce, *found, str(len(set(found))))
    rich.print(table)


if __name__ == "__main__":
    main()
