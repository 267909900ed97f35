"""What of a model and its optimizer is saved, and under which names.

Owns:      the names in a checkpoint, which are torch's own where torch has one.
Takes:     the shards of masters and moments, the counters, what the user adds.
Gives:     a nested dict for DCP to write.
Invariant: no name contains a rank, and every tensor has its parameter's shape: any number of ranks can read it.

    model.<name>                    FP32 masters, frozen parameters, buffers (rank 0's); tied ones once, by all names
    optim.state.<name>.<key>        moments, step counts
    optim.param_groups.<i>.<key>    options; `params` are names
    shardmp.state                   JSON: counters, loss scale, `extra`, modules' extra state that is no tensor
    shardmp.ranks                   JSON, a row for each rank: random numbers, `per_rank`
    shardmp.tensors.<i>             the tensors in `extra`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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


# What wrappers put into a parameter's name: torch.compile, checkpoint_wrapper, FSDP. The model is the same without them.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_EXTRA = "_extra_state"


def plain_name(name: str) -> str:
    """A name as the model without wrappers has it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def saved_names(model: ShardedModule) -> dict[int, str]:
    """By the id of each parameter its name in a checkpoint: the one place where such names are made.

    Raises:
        ValueError: two parameters would have one name.
    """
    parameters = model._parameters_
    names = {id(param): name for name, param in model.module.named_parameters()}
    for part in parameters.buckets:  # as shard() called them, whatever was tied or wrapped since
        names.update(
            (id(p), parameters._names[slot.param]) for slot, p in zip(part.bucket.slots, part.params, strict=True)
        )
    found = {number: plain_name(name) for number, name in names.items()}
    first: dict[str, int] = {}
    for number, plain in found.items():
        other = first.setdefault(plain, number)
        if other != number:
            raise ValueError(f"model: {names[other]} and {names[number]} would both be saved as {plain}: rename one")
    return found


@dataclass
class Weights:
    """A model's weights as this rank sees them, by their names in a checkpoint.

    Attributes:
        names: of the trainable parameters, by their index in the layout.
        shards: this rank's pieces of the FP32 masters.
        shapes: of all trainable parameters that have elements.
        whole: what every rank holds: frozen parameters, buffers. buffers: those of them that are.
        aliases: further keys of tied ones, by the key under which they are saved.
        extra: modules whose `get_extra_state` is saved, by the key that it has in `state_dict`.
    """

    names: list[str]
    shards: dict[str, FlatShard]
    shapes: dict[str, torch.Size]
    whole: dict[str, Tensor]
    buffers: set[str]
    aliases: dict[str, str]
    extra: dict[str, nn.Module]

    @classmethod
    def of(cls, model: ShardedModule) -> Weights:
        """All weights of a model.

        Raises:
            TypeError, ValueError: what could not be restored: by the name that it has in the model.
        """
        parameters = model._parameters_
        saved = saved_names(model)
        found = cls([plain_name(name) for name in parameters._names], {}, {}, {}, set(), {}, {})
        for part in parameters.buckets:
            found.shapes.update((saved[id(param)], param.shape) for param in part.params)
        for key, value in _entries(model.module):
            if isinstance(value, nn.Module):
                found.extra[key] = value
                continue
            name = saved.setdefault(id(value), key)
            if key != name:
                found.aliases[key] = name
            if name not in found.shapes:
                found.whole[name] = value.detach()
                if not isinstance(value, nn.Parameter):
                    found.buffers.add(name)
        for part in parameters.buckets:
            for piece in part.bucket.pieces(model._collectives.rank):
                name = found.names[piece.param]
                local = part.master[piece.offset : piece.offset + piece.hi - piece.lo]
                found.shards[name] = FlatShard(local, found.shapes[name], piece.lo)
        return found

    def keys(self) -> list[str]:
        """All keys of the model's state dict."""
        return [*self.shapes, *self.whole, *self.aliases, *self.extra]


def _entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What belongs to a state dict, by plain keys: parameters and buffers themselves, and modules that have extra state.

    `state_dict` says what belongs to it; hooks may give copies there, under other keys, which nobody could restore.

    Raises:
        TypeError: it holds something else, or the extra state of a module that cannot take it back.
    """
    modules = {plain_name(name): inner for name, inner in module.named_modules(remove_duplicate=False)}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    named = {plain_name(name): value for name, value in tensors}
    name_of = {id(value): plain_name(name) for name, value in reversed(tensors)}
    for key, value in module.state_dict(keep_vars=True).items():
        plain = plain_name(key)
        owner, _, last = plain.rpartition(".")
        if last == _EXTRA and owner in modules:
            if type(modules[owner]).set_extra_state is nn.Module.set_extra_state:
                raise TypeError(
                    f"model: {owner or 'the model'} ({type(modules[owner]).__name__}) has get_extra_state() but no "
                    "set_extra_state(): what is saved could not be restored"
                )
            yield plain, modules[owner]
        elif plain in named:
            yield plain, named[plain]
        elif id(value) in name_of:  # under a name of a hook's own
            yield name_of[id(value)], value
        else:
            raise TypeError(
                f"model: {key} in its state_dict is a {type(value).__name__} that is no parameter, buffer or extra state "
                "(a hook makes it), and could not be restored: use a buffer, or get_extra_state() and set_extra_state()"
            )


# -- saving


class Saved:
    """This rank's part of a checkpoint, nested as torch does it.

    Args:
        extra: the user's values, the same on all ranks; those of all ranks' own are `row`, in JSON.

    Attributes:
        state: by the names of the checkpoint, all but the rows.
        aliases: the tied names.

    Raises:
        TypeError, ValueError: something could not be restored; by its name.
    """

    def __init__(self, model: ShardedModule, optimizer: ShardedOptimizer, extra: Mapping[str, Any], row: bytes) -> None:
        weights = Weights.of(model)
        self._rank, self._ranks = model._collectives.rank, model._collectives.world_size
        self._row = row
        own: dict[str, Tensor] = {**weights.shards}
        own.update((name, weights.whole[name]) for name in _dealt(weights, self._rank, self._ranks))
        tensors: list[Tensor] = []
        text = codec.dumps(dict(extra), "extra", tensors)
        modules = _extra_states(weights, own, tensors, self._rank == 0)
        groups = groups_of(model, optimizer)
        optim: dict[str, Any] = {"state": _states(optimizer, weights.names)}
        ours: dict[str, Any] = {}
        if self._rank == 0:
            header = {
                "counters": optimizer.counters(),
                "optimizer": type(optimizer._original).__name__,
                "buffers": sorted(weights.buffers),
                "products": products_of(optimizer),
                "modules": modules,
                "extra": text.decode(),
            }
            ours["state"] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
            ours["tensors"] = {str(index): value for index, value in enumerate(tensors)}
            optim["param_groups"] = groups
        self.aliases = {f"model.{alias}": f"model.{name}" for alias, name in weights.aliases.items()}
        self.state = {"model": own, "optim": optim, "shardmp": ours}

    @property
    def row_length(self) -> int:
        """Bytes of this rank's own values."""
        return len(self._row)

    def add_row(self, width: int) -> None:
        """Put this rank's own values beside the others'; `width` is the length of the longest."""
        padded = torch.frombuffer(bytearray(self._row.ljust(width)), dtype=torch.uint8)
        self.state["shardmp"]["ranks"] = FlatShard(padded, (self._ranks, width), self._rank * width)


def _extra_states(weights: Weights, own: dict[str, Tensor], tensors: list[Tensor], first: bool) -> dict[str, str]:
    """What `get_extra_state` gives: one tensor goes to rank 0's weights, as plain DCP does; all else becomes JSON.

    Raises:
        TypeError: a value that cannot be stored; it names the module.
    """
    found = {}
    for key, module in weights.extra.items():
        value = module.get_extra_state()
        if isinstance(value, Tensor):
            weights.buffers.add(key)
            if first:
                own[key] = value.detach()
        else:
            found[key] = codec.dumps(value, f"model: {key}", tensors).decode()
    return found


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


def _states(optimizer: ShardedOptimizer, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """This rank's pieces of the optimizer's state; what is one value for a parameter, from the first of its owners."""
    found: dict[str, dict[str, Any]] = {}
    for piece, flat, rest in optimizer._update.piece_states():
        name, shape = names[piece.param], optimizer._shapes[piece.param]
        values: dict[str, Any] = {k: FlatShard(v[: piece.hi - piece.lo], shape, piece.lo) for k, v in flat.items()}
        if optimizer._layout.owners(piece.param)[0].rank == piece.rank:
            values.update(rest)
        if values:
            found[name] = values
    return found


def groups_by_name(model: ShardedModule, optimizer: ShardedOptimizer) -> list[list[str]]:
    """The names of each group's parameters.

    Raises:
        ValueError: a group has a parameter that the model does not have any more.
    """
    names = saved_names(model)
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"parameter {position} of group {number}, shape {tuple(param.shape)}, is not in the model any more"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def groups_of(model: ShardedModule, optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """The parameter groups, with names for parameters."""
    found = []
    for number, (group, names) in enumerate(zip(optimizer.param_groups, groups_by_name(model, optimizer), strict=True)):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for key, value in options.items():
            codec.dumps(value, f"param_groups[{number}][{key!r}]", [])
            options[key] = value.item() if isinstance(value, np.generic) else value
        found.append({**options, "params": names})
    return found
