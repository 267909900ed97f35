"""Bytes per rank and bytes on the wire, predicted from the layout.

Owns:      the formulas.
Takes:     a layout and the options that cost something.
Gives:     bytes by kind, the same kinds that `ShardedOptimizer.memory()` counts tensor by tensor.
Invariant: tests hold every number to what is measured.

With Psi parameters and N ranks, in 16 bits: 2 Psi (parameters) + 4 Psi/N (gradient shard) + 4 Psi/N (masters) + 8
Psi/N (two moments) = 2 + 16/N bytes per parameter and rank, plus the buckets in flight; 4 Psi (N-1)/N bytes sent per
rank and step with one backward (ZeRO, arXiv 1910.02054, section 5, with the gradient shard in FP32).
"""

from __future__ import annotations

from collections import Counter

from .exchange import TILE
from .layout import BLOCK, UNIT, Layout
from .verdict import Lanes

KINDS = ("parameters", "gradients", "masters", "moments", "buckets")


def memory(
    layout: Layout,
    rank: int,
    itemsize: dict[str, int],
    *,
    moments: int,
    window: int,
    local_sums: bool,
    hosts: int = 1,
    sum_itemsize: int = 4,
    neighbours: int = 0,
) -> dict[str, int]:
    """Bytes that one rank holds between and during steps, by kind.

    Args:
        layout: the layout in question.
        rank: whose shards; only moments differ between ranks, since the padding at a bucket's end has none.
        itemsize: bytes per element of each of the layout's dtypes.
        moments: FP32 state tensors per parameter that the optimizer keeps (AdamW 2, SGD with momentum 1).
        window: exchanges in flight before the oldest is awaited.
        local_sums: whether stage 1 adds whole gradients up under `no_sync` (4 bytes per parameter while it does).
        hosts: hosts of the second hop; 1 where there is none.
        sum_itemsize: bytes of an element of the gradient shard: 4, and 8 with `reduce="exact"`.
        neighbours: ranks whose rows are read from their memory: they land nowhere, and one more bucket waits to be read.

    "buckets" is an upper bound in the usual order of gradients: a send buffer and the peers' rows for each exchange in
    flight, and for the bucket that is being filled; with two hops the FP32 sums of this host and of the others as well.
    """
    sizes = [(bucket.size, bucket.shard, itemsize[bucket.dtype]) for bucket in layout.buckets]
    shards = sum(shard for _, shard, _ in sizes)
    sends: dict[str, int] = {}
    of_dtype = Counter(bucket.dtype for bucket in layout.buckets)
    for bucket in layout.buckets:
        item = itemsize[bucket.dtype]
        in_flight = min(window + 1 + bool(neighbours), of_dtype[bucket.dtype])
        peers = (bucket.ranks - hosts * (1 + neighbours)) * bucket.shard
        sends[bucket.dtype] = max(sends.get(bucket.dtype, 0), in_flight * (bucket.size + peers) * item)
    in_flight = min(window + 1 + bool(neighbours), len(sizes))
    crossing = 0 if hosts == 1 else sum_itemsize * in_flight * (2 * hosts - 1) * max(shard for _, shard, _ in sizes)
    return {
        "parameters": sum(size * item for size, _, item in sizes),
        "gradients": sum_itemsize * shards + (4 * sum(size for size, _, _ in sizes) if local_sums else 0),
        "masters": 4 * sum(shard for _, shard, item in sizes if item < 4),  # FP32 parameters are their own masters
        "moments": 4 * moments * sum(piece.length for piece in layout.pieces(rank)),
        "buckets": sum(sends.values()) + crossing,
    }


def temporaries(
    layout: Layout, rank: int, itemsize: dict[str, int], *, sum_itemsize: int = 4, backwards: int = 1
) -> int:
    """Bytes beside `memory`: what a step makes and frees again, and small things that a rank keeps for it.

    Args:
        layout: the layout in question.
        rank: whose shards.
        itemsize: bytes per element of each of the layout's dtypes.
        sum_itemsize: bytes of an element of the gradient shard: 4, and 8 with `reduce="exact"`.
        backwards: per step; an exact shard is copied, bucket by bucket, when its second backward widens it.

    About 60 bytes for each 1024 elements of the shard (each 64 in parameters of less than 1024), and up to 2 MiB for sums
    (4 if exact). An optimizer without fused kernels takes three tiles, 3 MiB, more; one whose class is stepped once a step
    over all of the shard (docs/optimizers.md) may hold temporaries of the largest parameter's piece, or of its shard.
    """
    units = blocks = 0
    for bucket in layout.buckets:
        small = {slot.param for slot in bucket.slots if slot.is_small}
        for piece in bucket.pieces(rank):
            if piece.param in small:
                units += piece.length // UNIT
            else:
                blocks += piece.length // BLOCK
    shards = [bucket.shard for bucket in layout.buckets]
    # Where each block or unit lies (int64), whose it is (int64, twice), the units' FP32 squares; and all blocks' squares.
    kept = 24 * blocks + 28 * units + 4 * sum(shards) // BLOCK
    # While the verdict is made: the squares themselves, what is left of them, and two parts on their way into a bin.
    verdict = 4 * 8 * (blocks + units) + 2 * 8 * sum(Lanes(len(layout.entries), layout.ranks).lengths().values())
    # A sum and its scratch, and what lands of a neighbour's row.
    tiles = 2 * 4 * TILE + sum(TILE * itemsize[dtype] for dtype in {bucket.dtype for bucket in layout.buckets})
    if sum_itemsize == 8:
        tiles += 2 * 8 * TILE
        if backwards > 1:
            tiles += 8 * max(shards, default=0)
    return kept + verdict + tiles


def wire_bytes(
    layout: Layout,
    itemsize: dict[str, int],
    *,
    backwards: int = 1,
    native_factor: int = 1,
    hosts: int = 1,
    sum_itemsize: int = 4,
) -> int:
    """Bytes that one rank sends in a step: a reduce-scatter in each of `backwards`, one verdict, one all-gather.

    Args:
        native_factor: what the backend's own reduce-scatter sends, in rings (gloo: 2).
        hosts: hosts of the second hop; 1 where there is none. It sends (hosts - 1) rows of sums, those of this rank's
            column; the all-gather's two hops send as much as one.
        sum_itemsize: bytes of an element of the sums: 4, and 8 with `reduce="exact"`.
    """
    peers = layout.ranks - 1
    rows = sum(bucket.shard * itemsize[bucket.dtype] for bucket in layout.buckets)
    reduction = peers * rows * native_factor
    if hosts > 1:
        shards = sum(bucket.shard for bucket in layout.buckets)
        reduction = (layout.ranks - hosts) * rows + (hosts - 1) * sum_itemsize * shards
    lanes = sum(Lanes(len(layout.entries), layout.ranks).lengths().values())
    return backwards * reduction + peers * rows + 2 * 8 * lanes * peers // layout.ranks


def card_bytes(
    layout: Layout,
    itemsize: dict[str, int],
    *,
    ranks_per_host: int,
    sum_itemsize: int = 4,
) -> dict[str, int]:
    """Bytes that leave a host through its network card: in each "reduction", in the step's "gather", in its "verdict".

    Args:
        ranks_per_host: of every host; the ranks are a multiple of it.

    With more than two ranks on a host gradients cross as sums and rows of the gather once ([Note: two hops] in exchange);
    else each rank deals with every rank of the other hosts.
    """
    hosts = layout.ranks // ranks_per_host
    if hosts == 1:
        return {"reduction": 0, "gather": 0, "verdict": 0}
    rows = sum(bucket.shard * itemsize[bucket.dtype] for bucket in layout.buckets)
    to_others = ranks_per_host * (layout.ranks - ranks_per_host)
    reduction = gather = to_others * rows
    if ranks_per_host > 2:
        across = ranks_per_host * (hosts - 1)
        reduction = across * sum_itemsize * sum(bucket.shard for bucket in layout.buckets)
        gather = across * rows
    lanes = sum(Lanes(len(layout.entries), layout.ranks).lengths().values())
    # The all-reduce is a ring of ranks: one border of it leaves the host.
    return {"reduction": reduction, "gather": gather, "verdict": 2 * 8 * lanes * (layout.ranks - 1) // layout.ranks}


def zero_memory(parameters: int, ranks: int, stage: int, *, moments: int = 2) -> dict[str, float]:
    """What the ZeRO paper (arXiv 1910.02054, figure 1) counts: 16-bit parameters and gradients, FP32 optimizer state.

    Args:
        stage: 0 for none of it, which is plain mixed precision; 1 shards the state, 2 gradients too, 3 parameters too.
    """
    whole = {name: float(size) for name, size in unsharded_memory(parameters, moments=moments).items()}
    sharded = ("masters", "moments", "gradients", "parameters")[: (0, 2, 3, 4)[stage]]
    return {name: size / ranks if name in sharded else size for name, size in whole.items()}


def fp32_memory(parameters: int, *, moments: int = 2) -> dict[str, int]:
    """FP32 training on one device: the parameters are their own masters."""
    return {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "masters": 0,
        "moments": 4 * moments * parameters,
        "buckets": 0,
    }


def unsharded_memory(parameters: int, *, moments: int) -> dict[str, int]:
    """Plain mixed precision on one device, ZeRO's 16 bytes per parameter with two moments: 2 + 2 + 4 + 4 x moments."""
    return {
        "parameters": 2 * parameters,
        "gradients": 2 * parameters,
        "masters": 4 * parameters,
        "moments": 4 * moments * parameters,
        "buckets": 0,
    }
