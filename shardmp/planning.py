"""The plan of a save, in few words.

Owns:      DCP's save planner: what each rank writes, and the table of all tensors that rank 0 makes of it.
Takes:     each rank's state dict: pieces as `FlatShard`s, whole tensors and plain values on one rank alone.
Gives:     DCP's `Metadata`, which is checked: the pieces of every tensor are the tensor, once.
Invariant: a rank tells where its pieces begin and end; boxes are worked out where they are needed.

DCP's own planner sends every box as an object, twice, and compares all ranks' for duplicates, which here cannot be: with
256 ranks and 172,000 boxes that takes rank 0 many seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from .flat_shard import FlatShard
from .layout import boxes


class ShortPlanner(DefaultSavePlanner):
    """DCP's own planner, except for what travels between ranks."""

    def create_local_plan(self) -> SavePlan:
        """This rank's items stay here; (name, dtype, shape, lo, hi) of each tensor go to rank 0."""
        self._own = super().create_local_plan()
        entries = [(name, *_described(value)) for name, value in self.state_dict.items()]
        return SavePlan([], planner_data=(self.mappings, entries))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The table of all tensors.

        Raises:
            ValueError: the ranks' pieces of a tensor are not the tensor: they come of different layouts.
        """
        found: dict[str, Any] = {}
        mappings: dict[str, Any] = {}
        counts: dict[str, int] = {}
        chunks = functools.cache(_chunks)  # master and moments, and layers of one shape, have the same
        for plan in all_plans:
            names, entries = plan.planner_data
            mappings.update(names)
            for name, dtype, shape, lo, hi in entries:
                if dtype is None:
                    found[name] = BytesStorageMetadata()
                    continue
                if name not in found:
                    found[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
                counts[name] = counts.get(name, 0) + hi - lo
                found[name].chunks += chunks(shape, lo, hi)
        for name, count in counts.items():
            if count != math.prod(found[name].size):
                raise ValueError(
                    f"{name}: the ranks' pieces have {count} elements, its shape is {tuple(found[name].size)}"
                )
        return [SavePlan([]) for _ in all_plans], Metadata(found, planner_data=mappings)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's items again, with where they go."""
        self.plan = dataclasses.replace(self._own, storage_data=new_plan.storage_data)
        return self.plan


def _described(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return None, (), 0, 0
    lo, numel = (value.lo, value.local.numel()) if isinstance(value, FlatShard) else (0, value.numel())
    return value.dtype, tuple(value.shape), lo, lo + numel


def _chunks(shape: tuple[int, ...], lo: int, hi: int) -> list[ChunkStorageMetadata]:
    if lo == hi:  # a tensor without elements has one box without elements
        return [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))]
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in boxes(lo, hi, shape)]
