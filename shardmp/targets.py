"""A checkpoint's values on their way into a model and its optimizer.

Owns:      what must agree before anything is read, where each value goes, and what follows from it.
Takes:     the metadata of a checkpoint, ours or one that plain DCP has written with torch's names.
Gives:     a flat dict of targets, views of the shards, for DCP to read into.
Invariant: everything is checked by name, shape and dtype before anything is changed: DCP itself casts in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import codec
from .flat_shard import FlatShard
from .layout import Piece
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .optimizer_families import OF_THE_CLASS, check_class, match_groups
from .saved_state import TENSORS, Weights, groups_by_name, plain_name
from .storage import Reader

# How a group's update is computed is this machine's matter, not the checkpoint's.
_KERNELS = {"fused", "foreach", "capturable", "differentiable", "params", "param_names"}
_GROUPS, _STATES = "optim.param_groups.", "optim.state."


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
        reader: Reader,
        header: dict[str, Any] | None,
        *,
        cast: bool,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = model._parameters_
        self._model = model
        self._reader = reader
        self._saved = reader.metadata.state_dict_metadata
        # Also of a run whose model was wrapped otherwise: names are compared as they are without wrappers.
        self._by_name = {plain_name(name): name for name in self._saved}
        self._header = header
        self._cast = cast
        self._weights = Weights.of(model)
        self._prefix = self._find_prefix()
        self._group_of: dict[int, int] = {}  # by the group's number in the checkpoint
        self._modules: dict[str, Any] = {}  # extra state that is no tensor, by its key
        self._states: dict[Piece, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        self.targets: dict[str, Any] = {}

    def _find_prefix(self) -> str:
        """Most checkpoints have the model under "model."; one of a model alone may not."""
        keys = self._weights.keys()
        return max(("model.", ""), key=lambda prefix: sum(prefix + key in self._by_name for key in keys))

    # -- checks, which change nothing

    def check(self, strict: bool) -> tuple[list[str], list[str]]:
        """(missing, unexpected) keys of the model and, in foreign checkpoints, missing state of the optimizer.

        Raises:
            ValueError: keys differ and `strict`; no key agrees; a shape differs; groups differ.
            TypeError: a dtype differs.
        """
        weights = self._weights
        keys = set(weights.keys())
        self._read_modules()
        there = {key for key in keys if key in self._modules or self._source(key) is not None}
        missing = sorted(keys - there)
        others = ("optim.", "shardmp.") if not self._prefix else ()
        unexpected = sorted(
            name.removeprefix(self._prefix)
            for name in self._by_name
            if name.startswith(self._prefix)
            and not name.startswith(others)
            and name.removeprefix(self._prefix) not in keys
        )
        unexpected += sorted(set(self._saved_modules) - keys)
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
            if self._prefix + one in self._by_name:
                return self._by_name[self._prefix + one]
        return None

    @property
    def _saved_modules(self) -> dict[str, str]:
        return (self._header or {}).get("modules", {})

    def _read_modules(self) -> None:
        """Extra state that is not one tensor: it is made before anything is changed."""
        reader = self._reader

        class Tensors(dict[int, Tensor]):
            def __bool__(self) -> bool:
                return True

            def __missing__(self, number: int) -> Tensor:
                return reader.read_tensor(f"{TENSORS}{number}")

        for key, text in self._saved_modules.items():
            if key in self._weights.extra:
                self._modules[key] = codec.loads(text.encode(), Tensors())

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
        """Names of optimizer state that the checkpoint should have and has not: each rank looks at its own pieces'."""
        self._check_groups(optimizer)
        if self._header is not None:
            saved_class, own_class = self._header["optimizer"], type(optimizer._original).__name__
            check_class(saved_class, own_class)
            if saved_class != own_class and self._model._collectives.rank == 0:
                warnings.warn(
                    f"the checkpoint has the state of {saved_class}, the optimizer is {own_class}: state and options are taken "
                    f"over, but weights decay as in {own_class}",
                    stacklevel=5,
                )
        states = self._saved_states()
        expected = {
            piece.param: {key: value.dtype for key, value in flat.items()} | dict.fromkeys(rest)
            for piece, flat, rest in optimizer._update.piece_states()
        }
        missing = []
        for index, name in enumerate(self._weights.names):
            found = states.get(name, {})
            own = expected.get(index, {})
            for key, full in found.items():
                saved = self._saved[full]
                shape = optimizer._shapes[index]
                if isinstance(saved, TensorStorageMetadata) and saved.size not in (shape, torch.Size(())):
                    raise ValueError(
                        f"{full}: expected shape {tuple(shape)} or (), the checkpoint has {tuple(saved.size)}"
                    )
                if key in own and isinstance(saved, TensorStorageMetadata):
                    self._check_tensor(full, saved.size, own[key])
            # Of our own checkpoint a parameter without state never had one.
            if found or self._header is None:
                missing += [f"{_STATES}{name}.{key}" for key in own if key not in found]
        return missing

    def _check_groups(self, optimizer: ShardedOptimizer) -> None:
        if not any(name.startswith("optim.") for name in self._saved):
            raise ValueError(
                "the checkpoint has no optimizer (no name begins with 'optim.'); load weights alone with "
                "shardmp.load(directory, model)"
            )
        saved = {int(name.split(".")[2]) for name in self._saved if name.startswith(_GROUPS)}
        if saved and len(saved) != len(optimizer.param_groups):
            raise ValueError(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(saved)}"
            )
        members = {}
        for number in sorted(saved):
            full = f"{_GROUPS}{number}.params"
            names = self._reader.read_value(full) if full in self._saved else []
            members[number] = [self._canonical(name) for name in names if isinstance(name, str)]
        self._group_of = match_groups(groups_by_name(self._model, optimizer), members)

    def _canonical(self, name: str) -> str:
        """A saved name of a parameter, as it is called here: of tied ones that under which it is saved."""
        plain = plain_name(name)
        return self._weights.aliases.get(plain, plain)

    def _saved_states(self) -> dict[str, dict[str, str]]:
        """By parameter and key, the full name in the checkpoint."""
        found: dict[str, dict[str, str]] = {}
        for full in self._saved:
            if full.startswith(_STATES):
                name, _, key = full.removeprefix(_STATES).rpartition(".")
                found.setdefault(self._canonical(name), {})[key] = full
        return found

    # -- targets

    def prepare(self) -> None:
        """Make `targets`: views of the shards, where the checkpoint has a value for them."""
        for key, value in (*self._weights.shards.items(), *self._weights.whole.items()):
            source = self._source(key)
            if source is not None:
                self.targets[source] = value
        for key in self._weights.extra:
            source = self._source(key)
            if source is not None:
                self.targets[source] = self._placeholder(source)
        if self._optimizer is not None:
            self._prepare_states(self._optimizer)
            for name in self._saved:
                if name.startswith(_GROUPS):
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
            name, shape = self._weights.names[piece.param], optimizer._shapes[piece.param]
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

    def publish(self) -> None:
        """The masters are read: let every rank have their rounding. Collective."""
        parameters = self._parameters
        for index in reversed(range(len(parameters.buckets))):
            parameters.publish(index)
        parameters.finish_publishing()
        parameters.all_ready()
        parameters.note_versions()

    def take_over(self) -> None:
        """The targets hold what was read: let modules and the optimizer have their state."""
        for key, module in self._weights.extra.items():
            source = self._source(key)
            if key in self._modules:
                module.set_extra_state(self._modules[key])
            elif source is not None:
                module.set_extra_state(self.targets[source])
        if self._optimizer is None:
            return
        states = {
            piece: (flat, {key: self.targets[full] for key, full in rest.items()})
            for piece, (flat, rest) in self._states.items()
        }
        self._optimizer._update.set_states(states)
        for number, key, value in self._group_values():
            group = self._optimizer.param_groups[number]
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value.item() if isinstance(value, Tensor) else value
        if self._header is not None:
            self._optimizer.load_counters(self._header["counters"])

    def _group_values(self) -> Iterator[tuple[int, str, Any]]:
        """(number of the group here, option, value)."""
        assert self._optimizer is not None
        own = type(self._optimizer._original).__name__
        is_same = own == (self._header or {}).get("optimizer", own) and own != "AdamW"
        kept = _KERNELS if is_same else _KERNELS | OF_THE_CLASS
        for name, value in self.targets.items():
            if name.startswith(_GROUPS):
                number, _, key = name.removeprefix(_GROUPS).partition(".")
                if key not in kept and int(number) in self._group_of:
                    yield self._group_of[int(number)], key, value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
