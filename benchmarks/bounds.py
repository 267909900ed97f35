"""What no sharded step can do without: compute, the exchange of the fewest bytes, the sum, the update.

Owns:      the lower bounds, each as a function that is called once a step.
Takes:     a workload; for the parts, the number of its parameters, on a running process group.
Gives:     a `Trainer` that only computes, and the parts by name.
Invariant: every buffer is made once, and nothing is done that a sharded 16-bit step with FP32 masters could leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contestants import DTYPES, Contestant, Settings, Trainer
from torch import Tensor, nn
from workloads import Workload

# Elements of a bucket, 8 MiB in 16 bits (fewer, larger messages cost gloo less, and shardmp's buckets are as large), and
# of a tile that stays in the cache.
BUCKET = 2**22
TILE = 2**17
IN_FLIGHT = 2


def _compute(precision: str) -> Callable[[Workload, Settings], Trainer]:
    """Forward and backward, the whole model in one dtype; each gradient is dropped as it comes, so that memory is reused."""

    def make(workload: Workload, settings: Settings) -> Trainer:
        dtype = DTYPES[precision]
        model = workload.build().to(dtype)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)

        def forward(x: Tensor) -> Tensor:
            return model(x.to(dtype) if x.is_floating_point() else x)

        return Trainer(forward, lambda loss: loss.backward())

    return make


def _drop(parameter: nn.Parameter | Tensor) -> None:
    parameter.grad = None


BOUNDS: dict[str, Contestant] = {
    f"compute-{precision}": Contestant(
        "bound", precision, False, f"forward and backward alone, all in {precision.upper()}", _compute(precision)
    )
    for precision in DTYPES
}
PARTS = {
    "exchange": "gradients to their owners and parameters back, 16 bits, point to point, in buckets of 8 MiB",
    "sum": "the FP32 sum of the ranks' 16-bit gradients of this rank's shard, by tiles",
    "update": "fused AdamW on this rank's FP32 shard, and its rounding to 16 bits",
}


def make_parts(parameters: int) -> dict[str, Callable[[], None]]:
    """The parts of a step beyond compute, by name, for so many parameters in FP16; they keep their buffers."""
    ranks = dist.get_world_size()
    shard = -(-parameters // ranks)
    return {"exchange": _exchange(shard), "sum": _sum(shard, ranks), "update": _update(shard)}


def _exchange(shard: int) -> Callable[[], None]:
    """All rows of a matrix (ranks, shard) to their owners, then everybody's row to everybody, in place."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = torch.zeros(ranks, shard, dtype=torch.float16)
    step = BUCKET // ranks
    cuts = [slice(start, min(start + step, shard)) for start in range(0, shard, step)]
    landing = torch.zeros(IN_FLIGHT, ranks, step, dtype=torch.float16)
    pairs = [((rank - distance) % ranks, (rank + distance) % ranks) for distance in range(1, ranks)]

    def scatter(number: int, cut: slice) -> list[Any]:
        works = []
        for source, to in pairs:
            works.append(
                dist.irecv(landing[number % IN_FLIGHT, source, : cut.stop - cut.start], source, tag=2 * number)
            )
            works.append(dist.isend(rows[to, cut], to, tag=2 * number))
        return works

    def gather(number: int, cut: slice) -> list[Any]:
        works = []
        for source, to in pairs:
            works.append(dist.irecv(rows[source, cut], source, tag=2 * number + 1))
            works.append(dist.isend(rows[rank, cut], to, tag=2 * number + 1))
        return works

    def exchange() -> None:
        for start in (scatter, gather):
            flying: list[list[Any]] = []
            for number, cut in enumerate(cuts):
                if len(flying) == IN_FLIGHT:
                    _wait(flying.pop(0))
                flying.append(start(number, cut))
            for works in flying:
                _wait(works)

    return exchange


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _sum(shard: int, ranks: int) -> Callable[[], None]:
    rows, total = torch.zeros(ranks, shard, dtype=torch.float16), torch.zeros(shard)
    scratch = torch.zeros(TILE)

    def add() -> None:
        for start in range(0, shard, TILE):
            tile = total[start : start + TILE]
            tile.copy_(rows[0, start : start + TILE])
            for row in rows[1:, start : start + TILE]:
                tile.add_(scratch[: tile.numel()].copy_(row))

    return add


def _update(shard: int) -> Callable[[], None]:
    master = nn.Parameter(torch.ones(shard))
    master.grad = torch.full((shard,), 1e-3)
    rounded = torch.zeros(shard, dtype=torch.float16)
    optimizer = torch.optim.AdamW([master], lr=1e-4, fused=True)

    def update() -> None:
        optimizer.step()
        rounded.copy_(master.detach())

    return update
