"""What of a model and its optimizer is saved, and under which names.

Owns:      the names in a checkpoint, which are torch's own where torch has one.
Takes:     the shards of masters and moments, the counters, what the user adds.
Gives:     a nested dict for DCP to write.
Invariant: no name contains a rank, and every tensor has its parameter's shape: any number of ranks can read it.

    model.<name>                    FP32 masters, frozen parameters, buffers (rank 0's); tied ones once, by all names
    optim.state.<name>.<key>        moments, step counts
    optim.param_groups.<i>.<key>    options; `params` are names
    shardmp.state                   JSON: counters, loss scale, `extra`
    shardmp.ranks                   JSON, a row for each rank: random numbers, `per_rank`
    shardmp.tensors.<i>             the tensors in `extra`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import codec, tensorcore
from .flat_shard import FlatShard
from .module import ShardedModule
from .optimizer import ShardedOptimizer

STATE, RANKS, TENSORS = "shardmp.state", "shardmp.ranks", "shardmp.tensors."


@dataclass
class Weights:
    """A model's weights as this rank sees them, by the keys of its `state_dict`.

    Attributes:
        shards: this rank's pieces of the FP32 masters.
        shapes: of all trainable parameters that have elements.
        whole: what every rank holds: frozen parameters, buffers. buffers: those of them that are.
        aliases: further keys of tied ones, by the key under which they are saved.
    """

    shards: dict[str, FlatShard]
    shapes: dict[str, torch.Size]
    whole: dict[str, Tensor]
    buffers: set[str]
    aliases: dict[str, str]

    @classmethod
    def of(cls, model: ShardedModule) -> Weights:
        """All weights of a model.

        Raises:
            TypeError: its state dict holds what is not a tensor.
        """
        parameters = model._parameters_
        names = {
            id(param): parameters._names[slot.param]
            for found in parameters.buckets
            for slot, param in zip(found.bucket.slots, found.params, strict=True)
        }
        found = cls({}, {}, {}, set(), {})
        seen: dict[int, str] = {}
        for key, value in model.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"model: {key} in its state_dict is a {type(value).__name__}; only tensors are saved")
            name = names.get(id(value), key)
            first = seen.setdefault(id(value), name)
            if key != first:
                found.aliases[key] = first
            elif id(value) in names:
                found.shapes[key] = value.shape
            else:
                found.whole[key] = value.detach()
                if not isinstance(value, nn.Parameter):
                    found.buffers.add(key)
        for part in parameters.buckets:
            for piece in part.bucket.pieces(model._collectives.rank):
                name = parameters._names[piece.param]
                local = part.master[piece.offset : piece.offset + piece.hi - piece.lo]
                found.shards[name] = FlatShard(local, found.shapes[name], piece.lo)
        return found

    def keys(self) -> list[str]:
        """All keys of the model's state dict."""
        return [*self.shapes, *self.whole, *self.aliases]


# -- saving


def to_save(
    model: ShardedModule, optimizer: ShardedOptimizer, extra: bytes, tensors: Sequence[Tensor], row: bytes, width: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """This rank's part of a checkpoint, nested as torch does it, and the tied names.

    Args:
        extra: JSON of the user's values, whose tensors are `tensors`; the same on all ranks.
        row: JSON of this rank's own values. width: the length of the longest rank's.
    """
    weights = Weights.of(model)
    rank, ranks = model._collectives.rank, model._collectives.world_size
    own: dict[str, Tensor] = {**weights.shards}
    own.update((name, weights.whole[name]) for name in _dealt(weights, rank, ranks))
    padded = torch.frombuffer(bytearray(row.ljust(width)), dtype=torch.uint8)
    ours: dict[str, Any] = {"ranks": FlatShard(padded, (ranks, width), rank * width)}
    optim: dict[str, Any] = {"state": _states(optimizer)}
    if rank == 0:
        header = {
            "counters": optimizer.counters(),
            "optimizer": type(optimizer._original).__name__,
            "buffers": sorted(weights.buffers),
            "products": products_of(optimizer),
            "extra": extra.decode(),
        }
        ours["state"] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        ours["tensors"] = {str(index): value for index, value in enumerate(tensors)}
        optim["param_groups"] = groups_of(model, optimizer)
    aliases = {f"model.{alias}": f"model.{name}" for alias, name in weights.aliases.items()}
    return {"model": own, "optim": optim, "shardmp": ours}, aliases


def products_of(optimizer: ShardedOptimizer) -> dict[str, dict[str, str]]:
    """Whose 16-bit products the run computes with, by dtype and kind of operator; empty where that is no question."""
    precision = optimizer.precision
    if precision.param == "fp32" or optimizer._collectives.device.type != "cpu":
        return {}
    return {precision.param: tensorcore.in_use(precision.dtype)}


def _dealt(weights: Weights, rank: int, ranks: int) -> list[str]:
    """What `rank` writes of the tensors that all ranks hold: rank 0 the buffers; frozen ones go to who has least."""
    loads = [0] * ranks
    own = []
    for name, value in sorted(weights.whole.items(), key=lambda item: (-item[1].nbytes, item[0])):
        writer = 0 if name in weights.buffers else loads.index(min(loads))
        loads[writer] += value.nbytes
        if writer == rank:
            own.append(name)
    return own


def _states(optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """This rank's pieces of the optimizer's state; what is one value for a parameter, from the first of its owners."""
    found: dict[str, dict[str, Any]] = {}
    for piece, flat, rest in optimizer._update.piece_states():
        name, shape = optimizer._names[piece.param], optimizer._shapes[piece.param]
        values: dict[str, Any] = {k: FlatShard(v[: piece.hi - piece.lo], shape, piece.lo) for k, v in flat.items()}
        if optimizer._layout.owners(piece.param)[0].rank == piece.rank:
            values.update(rest)
        if values:
            found[name] = values
    return found


def groups_of(model: ShardedModule, optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """The parameter groups, with names for parameters."""
    names = {id(param): name for name, param in model.module.named_parameters()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for key, value in options.items():
            codec.dumps(value, f"param_groups[{number}][{key!r}]", [])
            options[key] = value.item() if isinstance(value, np.generic) else value
        found.append({**options, "params": [names[id(param)] for param in group["params"]]})
    return found
