"""A checkpoint's values on their way into a model and its optimizer.

Owns:      what must agree before anything is read, where each value goes, and what follows from it.
Takes:     the metadata of a checkpoint, ours or one that plain DCP has written with torch's names.
Gives:     a flat dict of targets, views of the shards, for DCP to read into.
Invariant: everything is checked by name, shape and dtype before anything is changed: DCP itself casts in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .flat_shard import FlatShard
from .layout import Piece
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .saved_state import Weights

# How a group's update is computed is this machine's matter, not the checkpoint's.
_KERNELS = {"fused", "foreach", "capturable", "differentiable", "params", "param_names"}


class Targets:
    """A checkpoint's values on their way into a model and, where there is one, its optimizer.

    Args:
        cast: let floating dtypes differ.

    Attributes:
        targets: by name in the checkpoint, where DCP reads to; None where it puts a plain value.
    """

    def __init__(
        self,
        model: ShardedModule,
        optimizer: ShardedOptimizer | None,
        metadata: Metadata,
        header: dict[str, Any] | None,
        *,
        cast: bool,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = model._parameters_
        self._model = model
        self._saved = metadata.state_dict_metadata
        self._header = header
        self._cast = cast
        self._weights = Weights.of(model)
        self._prefix = self._find_prefix()
        self._states: dict[Piece, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        self.targets: dict[str, Any] = {}

    def _find_prefix(self) -> str:
        """Most checkpoints have the model under "model."; one of a model alone may not."""
        keys = self._weights.keys()
        return max(("model.", ""), key=lambda prefix: sum(prefix + key in self._saved for key in keys))

    # -- checks, which change nothing

    def check(self, strict: bool) -> tuple[list[str], list[str]]:
        """(missing, unexpected) keys of the model and, in foreign checkpoints, missing state of the optimizer.

        Raises:
            ValueError: keys differ and `strict`; no key agrees; a shape differs; groups differ.
            TypeError: a dtype differs.
        """
        weights = self._weights
        keys = set(weights.keys())
        there = {key for key in keys if self._source(key) is not None}
        missing = sorted(keys - there)
        others = ("optim.", "shardmp.") if not self._prefix else ()
        unexpected = sorted(
            name.removeprefix(self._prefix)
            for name in self._saved
            if name.startswith(self._prefix)
            and not name.startswith(others)
            and name.removeprefix(self._prefix) not in keys
        )
        if keys and not there:
            raise ValueError(
                f"no key of the model is in the checkpoint; the model has {_some(sorted(keys))}, the checkpoint "
                f"{_some(sorted(self._saved))}"
            )
        for key in weights.shapes:
            self._check_tensor(self._source(key), weights.shapes[key], torch.float32)
        for key, value in weights.whole.items():
            self._check_tensor(self._source(key), value.shape, value.dtype if value.numel() else None)
        if self._optimizer is not None:
            missing += self._check_optimizer(self._optimizer)
        if strict and (missing or unexpected):
            raise ValueError(
                f"keys differ: missing in the checkpoint: {_some(missing) or 'none'}; unexpected in it: "
                f"{_some(unexpected) or 'none'} (strict=False loads what agrees)"
            )
        return missing, unexpected

    def _source(self, key: str) -> str | None:
        """The name in the checkpoint of a key of the model; of tied ones that which is there."""
        aliases = self._weights.aliases
        name = aliases.get(key, key)
        for one in (name, key, *(alias for alias, canonical in aliases.items() if canonical == name)):
            if self._prefix + one in self._saved:
                return self._prefix + one
        return None

    def _check_tensor(self, name: str | None, shape: torch.Size, dtype: torch.dtype | None) -> None:
        if name is None:
            return
        saved = self._saved[name]
        if not isinstance(saved, TensorStorageMetadata):
            raise TypeError(f"{name}: expected a tensor in the checkpoint, found a plain value")
        if saved.size != shape:
            raise ValueError(f"{name}: expected shape {tuple(shape)}, the checkpoint has {tuple(saved.size)}")
        found = saved.properties.dtype
        castable = self._cast and found.is_floating_point and dtype is not None and dtype.is_floating_point
        if dtype not in (None, found) and not castable:
            raise TypeError(f"{name}: expected {dtype}, the checkpoint has {found} (cast=True converts)")

    def _check_optimizer(self, optimizer: ShardedOptimizer) -> list[str]:
        """Names of optimizer state that the checkpoint should have and has not."""
        self._check_groups(optimizer)
        states = self._saved_states()
        expected = self._expected_keys(optimizer)
        own_class = type(optimizer._original).__name__
        missing = []
        for index, name in enumerate(optimizer._names):
            found = states.get(name, {})
            for key, full in found.items():
                saved = self._saved[full]
                shape = optimizer._shapes[index]
                if isinstance(saved, TensorStorageMetadata) and saved.size not in (shape, torch.Size(())):
                    raise ValueError(
                        f"{full}: expected shape {tuple(shape)} or (), the checkpoint has {tuple(saved.size)}"
                    )
                if key in expected and isinstance(saved, TensorStorageMetadata):
                    self._check_tensor(full, saved.size, expected[key])
            # Of our own checkpoint a parameter without state never had one.
            if optimizer._shapes[index].numel() and (found or self._header is None):
                missing += [f"optim.state.{name}.{key}" for key in expected if key not in found]
        if self._header is not None and self._header["optimizer"] != own_class and not (expected and not missing):
            raise ValueError(
                f"the checkpoint has the state of {self._header['optimizer']}, the optimizer is {own_class}; load weights "
                "alone with shardmp.load(directory, model)"
            )
        return missing

    def _expected_keys(self, optimizer: ShardedOptimizer) -> dict[str, torch.dtype | None]:
        """The state that every parameter has, as far as it exists: step counts' dtypes are the class's matter."""
        found: dict[str, torch.dtype | None] = {}
        for _, flat, rest in optimizer._update.piece_states():
            found.update({key: value.dtype for key, value in flat.items()} | dict.fromkeys(rest))
        return found

    def _check_groups(self, optimizer: ShardedOptimizer) -> None:
        if not any(name.startswith("optim.") for name in self._saved):
            raise ValueError(
                "the checkpoint has no optimizer (no name begins with 'optim.'); load weights alone with "
                "shardmp.load(directory, model)"
            )
        saved = {name.split(".")[2] for name in self._saved if name.startswith("optim.param_groups.")}
        if saved and len(saved) != len(optimizer.param_groups):
            raise ValueError(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(saved)}"
            )

    def _saved_states(self) -> dict[str, dict[str, str]]:
        """By parameter and key, the full name in the checkpoint."""
        found: dict[str, dict[str, str]] = {}
        for full in self._saved:
            if full.startswith("optim.state."):
                name, _, key = full.removeprefix("optim.state.").rpartition(".")
                found.setdefault(self._weights.aliases.get(name, name), {})[key] = full
        return found

    # -- targets

    def prepare(self) -> None:
        """Make `targets`: views of the shards, where the checkpoint has a value for them."""
        for key, value in (*self._weights.shards.items(), *self._weights.whole.items()):
            source = self._source(key)
            if source is not None:
                self.targets[source] = value
        if self._optimizer is not None:
            self._prepare_states(self._optimizer)
            for name in self._saved:
                if name.startswith("optim.param_groups."):
                    self.targets[name] = self._placeholder(name)

    def _placeholder(self, name: str) -> Tensor | None:
        saved = self._saved[name]
        if isinstance(saved, TensorStorageMetadata):
            return torch.empty(saved.size, dtype=saved.properties.dtype, device=self._model._collectives.device)
        return None

    def _prepare_states(self, optimizer: ShardedOptimizer) -> None:
        saved = self._saved_states()
        device = self._model._collectives.device
        for piece, flat, _ in optimizer._update.piece_states():
            name, shape = optimizer._names[piece.param], optimizer._shapes[piece.param]
            own: dict[str, Tensor] = {}
            rest: dict[str, Any] = {}
            for key, full in saved.get(name, {}).items():
                found = self._saved[full]
                named = bool(shape) or key in optimizer._update.elementwise
                if isinstance(found, TensorStorageMetadata) and found.size == shape and named:
                    own[key] = (
                        flat[key]
                        if key in flat
                        else torch.zeros(piece.length, dtype=found.properties.dtype, device=device)
                    )
                    self.targets[full] = FlatShard(own[key][: piece.hi - piece.lo], shape, piece.lo)
                else:
                    rest[key] = full
                    self.targets[full] = self._placeholder(full)
            self._states[piece] = own, rest

    # -- after the read

    def apply(self, read: Mapping[str, Any]) -> None:
        """The targets hold what was read: let every rank have the masters' rounding, the optimizer its state.

        Args:
            read: the targets again, with the values that are not tensors.
        """
        parameters = self._parameters
        for index in reversed(range(len(parameters.buckets))):
            parameters.publish(index)
        parameters.finish_publishing()
        parameters.all_ready()
        parameters.note_versions()
        if self._optimizer is None:
            return
        states = {
            piece: (flat, {key: read[full] for key, full in rest.items()})
            for piece, (flat, rest) in self._states.items()
        }
        self._optimizer._update.set_states(states)
        for number, key, value in _group_values(read):
            group = self._optimizer.param_groups[number]
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value.item() if isinstance(value, Tensor) else value
        if self._header is not None:
            self._optimizer.load_counters(self._header["counters"])


def _group_values(read: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    for name, value in read.items():
        if name.startswith("optim.param_groups."):
            number, _, key = name.removeprefix("optim.param_groups.").partition(".")
            if key not in _KERNELS:
                yield int(number), key, value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
