"""A part of a flattened tensor, as torch.distributed.checkpoint (DCP) wants to see it.

Owns:      the wrapper by which a piece of a flat shard is saved and loaded under the whole parameter's name and shape.
Takes:     the piece's elements, 1-D, and where they begin in the flattened parameter.
Gives:     boxes of the N-D parameter, each of them a view of the piece: nothing is copied on save or on load.
Invariant: the boxes of all ranks' pieces are the whole parameter, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .layout import boxes


class FlatShard(Tensor):
    """Elements [lo, lo + local.numel()) of a tensor of `shape`, flattened.

    DCP asks whether a value is a Tensor before it looks for the three methods below, so this is one, without storage.
    """

    local: Tensor
    lo: int
    _boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], lo: int) -> FlatShard:
        # A parameter without a box would lose its name: those without elements are saved as plain tensors.
        assert local.dim() == 1
        assert 0 < local.numel() <= math.prod(shape) - lo
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        self.local, self.lo = local, lo
        self._boxes = boxes(lo, lo + local.numel(), tuple(shape))
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a FlatShard is for saving and loading alone")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatShard(elements {self.lo} to {self.lo + self.local.numel()} of shape {tuple(self.shape)})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in self._boxes]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for start, offsets, sizes in self._boxes:
            if torch.Size(offsets) == index.offset:
                return self.local[start : start + math.prod(sizes)].view(sizes)
        raise KeyError(index)
