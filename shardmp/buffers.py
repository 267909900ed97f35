"""Rank 0's buffers for all ranks: `buffers="broadcast"`.

Owns:      the layout of the one message in which they travel, at the end of each backward.
Takes:     the wrapped model's buffers, as each rank has them now.
Gives:     the same values on every rank; the sizes that this rank has, to be compared in the step.
Invariant: every rank sends or expects the same number of bytes, and no buffer receives the bytes of another size.

[Note: a buffer that has changed its size] A rank cannot know whether the others' have too, and nothing waits to ask. So the
message keeps the layout that all ranks have agreed on, in `shard` or in a later step: in the place of a changed buffer
rank 0 sends what it sent before, and a rank whose own has changed leaves it alone. The step compares the sizes: where they
differ it writes nothing and an error follows; where all have the same new ones, the message takes them on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .collectives import Collectives

SIZE = "buffers='broadcast' (with 'local' each rank keeps its own), size of buffer"


class Kind(NamedTuple):
    """What a buffer's bytes mean."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{tuple(self.shape)} of {self.dtype}"


class Buffers:
    """The buffers of one model.

    Args:
        module: the model; all ranks have the same buffers, by name, shape and dtype.
        collectives: the shard group.
    """

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._module = module
        self._collectives = collectives
        self._kinds: dict[str, Kind] = {}
        self._sent: dict[str, Tensor] = {}  # rank 0's last bytes, by name, views of one message
        self._note({name: Kind(buffer.shape, buffer.dtype) for name, buffer in module.named_buffers()})
        self._agreed = self._kinds

    def _note(self, kinds: dict[str, Kind]) -> None:
        if kinds != self._kinds:
            self._kinds = kinds
            # The dict itself: the ranks have agreed on it when it comes back in `Collectives.agreed`.
            self._collectives.facts[SIZE] = kinds

    @torch.no_grad()
    def broadcast(self) -> None:
        """At the end of a backward, also on a rank without data, which runs no forward."""
        if self._collectives.world_size == 1:
            return
        self._agreed = self._collectives.agreed.get(SIZE, self._agreed)
        buffers = dict(self._module.named_buffers())
        self._note({name: Kind(buffer.shape, buffer.dtype) for name, buffer in buffers.items()})
        rows = {name: self._bytes(name, buffers.get(name)) for name in self._agreed}
        flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=self._collectives.device), *rows.values()])
        if not flat.numel():
            return
        self._collectives.broadcast(flat)
        sent = dict(zip(rows, flat.split([row.numel() for row in rows.values()]), strict=True))
        if self._collectives.rank == 0:
            self._sent = sent
            return
        for name, values in sent.items():
            if self._is_agreed(name) and values.numel():
                # The clone aligns the bytes for wider types.
                buffers[name].copy_(values.clone().view(buffers[name].dtype).view(buffers[name].shape))

    def _is_agreed(self, name: str) -> bool:
        return self._kinds.get(name) == self._agreed[name]

    def _bytes(self, name: str, buffer: Tensor | None) -> Tensor:
        """A buffer's place in the message."""
        if buffer is not None and self._is_agreed(name):
            return buffer.contiguous().view(-1).view(torch.uint8)
        if name in self._sent:
            return self._sent[name]
        shape, dtype = self._agreed[name]
        return torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=self._collectives.device)
