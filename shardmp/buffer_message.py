"""The message in which rank 0's buffers reach all ranks: `buffers="broadcast"`.

Owns:      the layout of the one message, at the end of each backward.
Takes:     the wrapped model's buffers, as each rank has them now.
Gives:     the message, and whose bytes it has brought; the sizes that this rank has, to be compared in the step.
Invariant: every rank sends or expects the same number of bytes, and no buffer receives the bytes of another size.

[Note: a buffer that has changed its size] A rank cannot know whether the others' have too, and nothing waits to ask. So the
message keeps the layout that all ranks have agreed on, in `shard` or in a later step: in the place of a changed buffer
rank 0 sends what it sent before, and a rank whose own has changed leaves it alone. The step compares the sizes: where they
differ it writes nothing and an error follows; where all have the same new ones, the message takes them on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .buffers import as_bytes, unexpanded
from .collectives import Collectives

SIZE = "buffers='broadcast' (with 'local' each rank keeps its own), size of buffer"


class Kind(NamedTuple):
    """What a buffer's bytes mean."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{tuple(self.shape)} of {self.dtype}"


class BufferMessage:
    """The message in which the buffers of one model travel.

    Args:
        buffers: by name; all ranks have the same, of the same shapes and dtypes.
        collectives: the shard group.
    """

    def __init__(self, buffers: Iterable[tuple[str, Tensor]], collectives: Collectives) -> None:
        self._collectives = collectives
        self._kinds: dict[str, Kind] = {}
        self._sent: dict[str, Tensor] = {}  # rank 0's last bytes, by name, views of one message
        self._note(dict(buffers))
        self._agreed = self._kinds

    def _note(self, buffers: Mapping[str, Tensor]) -> None:
        kinds = {name: Kind(unexpanded(buffer).shape, buffer.dtype) for name, buffer in buffers.items()}
        if kinds != self._kinds:
            self._kinds = kinds
            # The dict itself: the ranks have agreed on it when it comes back in `Collectives.agreed`.
            self._collectives.facts[SIZE] = kinds

    def pack(self, buffers: Mapping[str, Tensor]) -> Tensor:
        """The message, to be broadcast from rank 0: as many bytes on every rank, uint8.

        Args:
            buffers: by name, as they are on this rank.
        """
        self._agreed = self._collectives.agreed.get(SIZE, self._agreed)
        self._note(buffers)
        rows = [self._bytes(name, buffers) for name in self._agreed]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=self._collectives.device), *rows])

    def unpack(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Of the message as it was received, the bytes of each buffer that they fit; on rank 0 none: it has them."""
        sizes = [kind.shape.numel() * kind.dtype.itemsize for kind in self._agreed.values()]
        rows = dict(zip(self._agreed, flat.split(sizes), strict=True))
        if self._collectives.rank == 0:
            self._sent = rows
            return
        for name, values in rows.items():
            if self._fits(name) and values.numel():
                yield name, values

    def _fits(self, name: str) -> bool:
        return self._kinds.get(name) == self._agreed[name]

    def _bytes(self, name: str, buffers: Mapping[str, Tensor]) -> Tensor:
        """A buffer's place in the message."""
        if self._fits(name):
            return as_bytes(unexpanded(buffers[name]))
        if name in self._sent:
            return self._sent[name]
        shape, dtype = self._agreed[name]
        return torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=self._collectives.device)
