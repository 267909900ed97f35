"""A model's buffers, which rank 0 gives to the others while graphs of earlier forwards may still wait for their backward.

Owns:      how often each buffer was referred to when `shard` took it over.
Takes:     a buffer, and the values of rank 0.
Gives:     a buffer with those values.
Invariant: what autograd has kept for a backward that is to come keeps its values and its version.

[Note: a buffer that a graph keeps] A forward saves the buffers that it reads (a mask, a scale, BatchNorm's statistics), and
two forwards may come before the first backward. Writing such a buffer would be an error of autograd's, and writing it
behind autograd's back would change the second backward's gradients. So its module gets a new tensor there, and the graph
keeps the old one. A buffer that nobody keeps is written where it is: what else refers to it (a view that the model holds)
goes on seeing it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


def unexpanded(buffer: Tensor) -> Tensor:
    """The part of an expanded tensor that has memory of its own, as a view; the tensor itself where it is not expanded."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer


def _references(buffer: Tensor) -> float:
    """How many hold this tensor: its views and graphs; Python's variables together count as one.

    Torch's count is private: where a version has none, every buffer counts as kept.
    """
    count = getattr(buffer, "_use_count", None)
    return float("inf") if count is None else float(count())


class Buffers:
    """The buffers of one model.

    Args:
        model: the plain model, when no graph of it waits for its backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._usual = WeakIdKeyDictionary()
        for buffer in model.buffers():
            self._usual[buffer] = _references(buffer)

    def write(self, buffer: Tensor, flat: Tensor) -> None:
        """Give a buffer the values of rank 0.

        Args:
            buffer: one of the model's.
            flat: the bytes of its `unexpanded` part, one after the other, uint8.
        """
        kept = _references(buffer) > self._usual.get(buffer, 1.0)
        place = unexpanded(buffer)
        values = flat.clone().view(buffer.dtype).view(place.shape)  # the clone aligns the bytes for wider types
        if not kept:
            place.data.copy_(values)  # `data` has a version counter of its own
        elif buffer.device.type != "cpu" or not _same_bytes(values, place):  # a look at a GPU would wait for it
            self._replace(buffer, values.expand_as(buffer))

    def _replace(self, old: Tensor, new: Tensor) -> None:
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is old:
                    module._buffers[key] = new


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as flat uint8, copied only where they do not lie one after the other."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
