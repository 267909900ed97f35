"""Pieces of parameters as an optimizer sees them: its parameters, and the state that each has.

Owns:      tiles, and how the state of a whole parameter becomes that of one of another size.
Takes:     views of the flat masters and gradients; the state that an optimizer brings.
Gives:     tiles in batches; state for them, which is FP32 where torch had made it from 16-bit parameters.
Invariant: the state of an element does not depend on where its parameter is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .layout import UNIT, Piece


class Tile:
    """Elements of a piece that are updated at a time: a parameter of the inner optimizer and its gradient."""

    def __init__(self, piece: Piece, group: int, master: Tensor, gradient: Tensor, start: int) -> None:
        self.piece = piece
        self.group = group
        self.start = start  # from the piece's own start
        self.parameter = nn.Parameter(master)
        self.gradient = gradient


def batches(tiles: Sequence[Tile], most: int) -> Iterator[list[Tile]]:
    """Runs of tiles of at most `most` elements together."""
    batch: list[Tile] = []
    for tile in tiles:
        if batch and sum(t.parameter.numel() for t in batch) + tile.parameter.numel() > most:
            yield batch
            batch = []
        batch.append(tile)
    if batch:
        yield batch


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype beside FP32 masters of state that a class has made from 16-bit parameters in `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def elementwise_keys(states: Mapping[Tensor, dict[str, Any]]) -> set[str]:
    """The names of state tensors that have their parameter's shape; in a 0-dim parameter's a step count has it too."""
    return {
        key
        for param, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and param.dim() and value.shape == param.shape
    }


def cut_state(
    tile: Tile, param: Tensor, state: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A parameter's state as a tile has it: what is cut, padded with zeros, and the rest.

    Args:
        dtypes: the names of what is cut, with the dtype that the class gives it beside FP32 masters, where it is known.
    """
    cut: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    lo = tile.piece.lo + tile.start
    for key, value in state.items():
        if not isinstance(value, Tensor) or key not in dtypes or value.numel() != param.numel():
            rest[key] = value
            continue
        length, dtype = tile.parameter.numel(), dtypes[key] or at_least_fp32(value.dtype)
        cut[key] = torch.zeros(length, dtype=dtype, device=tile.parameter.device)
        values = value.detach().reshape(-1)[lo : lo + length]
        cut[key][: values.numel()].copy_(values)
    return cut, rest


# -- the state of a parameter before its first step


def seed_of(group: dict[str, Any], states: Mapping[Tensor, dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """The state that a parameter of the group brings, as one of 64 elements would have it; empty where it brings none."""
    params = sorted((p for p in group["params"] if states.get(p)), key=lambda p: p.numel() < 2)
    if not params:
        return {}
    keys = elementwise_keys(states)
    seed: dict[str, Any] = {}
    for key, value in states[params[0]].items():
        if not isinstance(value, Tensor):
            seed[key] = value
            continue
        is_cut = value.numel() == params[0].numel() and (key in keys or (not keys and key != "step"))
        made = torch.zeros_like(value, device=device) if value.is_meta else value.detach().to(device)
        made = made.to(at_least_fp32(value.dtype), copy=True)
        seed[key] = made.reshape(-1)[:UNIT].repeat(UNIT)[:UNIT].clone() if is_cut else made
    return seed


def seeded(seed: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state that `seed` tells, for a parameter of any size."""
    state: dict[str, Any] = {}
    for key, value in seed.items():
        if not isinstance(value, Tensor):
            state[key] = value
        elif value.shape == (UNIT,):
            times = -(-parameter.numel() // UNIT)
            state[key] = value.repeat(times)[: parameter.numel()].view(parameter.shape)
        else:
            state[key] = value.clone()
    return state
