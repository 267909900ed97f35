"""What is alive while a forward and a backward run, counted storage by storage.

Owns:      the count of bytes that operators make and that die again.
Takes:     every operator that runs in its context, on real tensors or on fake ones, and what existed before.
Gives:     bytes alive now and at their peak: activations, 16-bit copies of weights, gradients.
Invariant: the same code counts a run that is only planned and a real one; tests hold the one to the other.

A storage is counted from the operator that made it until nothing refers to it any more: views and in-place operators add
nothing. What a kernel uses inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS, COPIES, GRADIENTS = "activations", "copies of weights", "gradients"


@dataclass
class _Alive:
    """A storage that an operator has made: its weak reference must live as long as it does."""

    kind: str
    size: int
    reference: weakref.ref[Any]


class Storages(TorchDispatchMode):
    """Counts what operators make inside `with`.

    Args:
        weights: parameters, which exist already and are not counted; a copy of one in another dtype is a copy of weights.
        given: what else exists already.

    Attributes:
        bytes: alive now, by kind.
        peak: by kind, when activations and copies of weights together were most.
        most: the most that all kinds together have been.
    """

    def __init__(self, weights: Iterable[Tensor], given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = dict.fromkeys((ACTIVATIONS, COPIES, GRADIENTS), 0)
        self.peak = dict(self.bytes)
        self.most = 0
        # The storages themselves: an address would be given to another one once they are gone.
        self._weights = {id(storage): storage for storage in map(_storage, weights)}
        self._given = self._weights | {id(storage): storage for storage in map(_storage, given)}
        self._alive: dict[int, _Alive] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = ACTIVATIONS
        if func is torch.ops.aten._to_copy.default and id(_storage(args[0])) in self._weights:
            kind = COPIES
        for tensor in _tensors(out):
            self._see(tensor, kind)
        return out

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = _storage(tensor)
        key, size = id(storage), storage.nbytes()
        if key in self._given or key in self._alive or not size:
            return
        self._alive[key] = _Alive(kind, size, weakref.ref(storage, lambda _: self._gone(key)))
        self.bytes[kind] += size
        if self.bytes[ACTIVATIONS] + self.bytes[COPIES] > self.peak[ACTIVATIONS] + self.peak[COPIES]:
            self.peak = dict(self.bytes)
        self.most = max(self.most, sum(self.bytes.values()))

    def _gone(self, key: int) -> None:
        found = self._alive.pop(key)
        self.bytes[found.kind] -= found.size

    def is_gradient(self, tensor: Tensor) -> None:
        """From now on this is a parameter's gradient, which is no activation."""
        found = self._alive.get(id(_storage(tensor)))
        if found is not None:
            self.bytes[found.kind] -= found.size
            self.bytes[GRADIENTS] += found.size
            found.kind = GRADIENTS


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))
