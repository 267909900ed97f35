"""What a sharded optimizer holds and sends, measured and predicted.

Owns:      the count, tensor by tensor.
Takes:     the parts of a `ShardedOptimizer`.
Gives:     `Accounts`, a base of it: bytes by kind, beside what `budgeting` says.
Invariant: measured and predicted bytes are equal; a test holds them to each other.
"""

from __future__ import annotations

from torch import Tensor

from . import budgeting
from .collectives import Collectives
from .gradients import Gradients
from .layout import Layout
from .parameters import Parameters
from .update import Update


class Accounts:
    """Bytes of an optimizer whose parts are set."""

    _collectives: Collectives
    _gradients: Gradients
    _layout: Layout
    _parameters: Parameters
    _update: Update

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for training, counted tensor by tensor: see `budgeting.KINDS`."""
        return {
            "parameters": sum(_bytes(bucket.flat) for bucket in self._parameters.buckets),
            "gradients": self._gradients.bytes,
            "masters": sum(_bytes(bucket.master) for bucket in self._parameters.buckets if bucket.is_rounded),
            "moments": self._update.state_bytes,
            "buckets": self._gradients.buffer_bytes,
        }

    def predicted_memory(self) -> dict[str, int]:
        """What `memory` should say, by `budgeting`."""
        return budgeting.memory(
            self._layout,
            self._collectives.rank,
            self._itemsize,
            moments=self._update.moments,
            window=self._gradients.window,
            local_sums=False,
            sum_itemsize=self._gradients.sum_itemsize,
            hosts=self._gradients.num_hosts,
            neighbours=0 if self._gradients.native else len(self._collectives.neighbours),
        )

    def wire_bytes(self) -> int:
        """Bytes that this rank has sent since it was built."""
        return self._collectives.sent_bytes

    def predicted_wire_bytes(self, backwards: int = 1) -> int:
        """Bytes that this rank sends in a step of so many backwards, by `budgeting`."""
        factor = self._collectives.native_factor if self._gradients.native else 1
        hosts = self._gradients.num_hosts
        return budgeting.wire_bytes(
            self._layout,
            self._itemsize,
            backwards=backwards,
            native_factor=factor,
            hosts=hosts,
            sum_itemsize=self._gradients.sum_itemsize,
        )

    @property
    def _itemsize(self) -> dict[str, int]:
        return {found.bucket.dtype: found.flat.element_size() for found in self._parameters.buckets}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
