"""`load`: a checkpoint for any number of ranks.

Owns:      which checkpoint is read, and the order of checking, reading and taking over.
Takes:     a directory; a model and an optimizer from `shard`.
Gives:     both as they were saved, or an error on every rank.
Invariant: until all is checked nothing is changed; after a read that failed half-way nothing steps or saves.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import codec, directory, in_place, products
from .agreed import LOADED, refuse_other_arguments
from .agreement import Joint
from .checksum import crc32
from .collectives import Collectives
from .header import read_header
from .manifest import MANIFEST, CheckpointError, Manifest
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .saved_state import RANKS, TENSORS, products_of
from .saving import wait_for_save
from .storage import Reader
from .targets import Targets
from .unpickling import SafePlanner, read_metadata


@dataclass(frozen=True)
class Loaded:
    """What a load has found.

    Attributes:
        path, step: the checkpoint; the step is None in one that shardmp has not written.
        ranks: the number of ranks that saved it, or None.
        extra: the values of `save(extra=...)`; per_rank: this rank's own, or None at another number of ranks.
        missing, unexpected: with `strict=False`, keys that the checkpoint or the model does not have.
    """

    path: Path
    step: int | None
    ranks: int | None
    extra: dict[str, Any]
    per_rank: dict[str, Any] | None
    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class _Found:
    """A checkpoint that every rank has opened."""

    path: Path
    manifest: Manifest | None
    reader: Reader
    header: dict[str, Any] | None


def load(
    root: str | Path,
    model: ShardedModule,
    optimizer: ShardedOptimizer | None = None,
    *,
    step: int | str | None = None,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Loaded:
    """Read a checkpoint that any number of ranks has written, ours or plain DCP's with torch's names. Collective.

    Args:
        root: a directory of checkpoints, or one checkpoint.
        optimizer: None loads weights alone: the masters are renewed from them, moments and loss scale stay.
        step: which one; None is the latest. "latest good" takes the newest whose every byte is as it was written.
        extra, per_rank: what to restore in place, by the names under which it was saved: objects with
            `load_state_dict()`, tensors, and dicts and lists of tensors.
        strict: names that the checkpoint or the model lacks are an error; otherwise they are returned.
        cast: convert between floating dtypes; otherwise another dtype is an error.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError, TypeError: names, shapes, dtypes or groups differ; nothing has been changed.
        CheckpointError: a file is missing, truncated or altered. Where that shows only while reading, weights are mixed,
            and `step` and `save` refuse until another `load` has succeeded.
        RuntimeError: between backward and step; a rank is gone, or waits for its disk without end.
    """
    place = directory.named(root, "load(directory)")
    collectives = _collectives_of(model)
    wait_for_save(collectives)
    mixed = collectives.failure
    is_curable = mixed == _MIXED or (mixed == _MIXED_WITH_STATE and optimizer is not None)
    if is_curable:
        collectives.failure = None
    collectives.at("shardmp.load()")
    try:
        with Joint(collectives, "shardmp.load()") as joint, torch.no_grad():
            collectives.refuse_after_failure()
            user = _User(extra, per_rank) if optimizer is not None else _User(None, None)
            return _load(joint, collectives, place, step, model, optimizer, user, strict=strict, cast=cast)
    except BaseException:
        if is_curable:
            collectives.poison(str(mixed))  # it still is
        raise


_MIXED = "shardmp.load() failed half-way, and weights are mixed: load another checkpoint"
_MIXED_WITH_STATE = (
    "shardmp.load() failed half-way, and weights and moments are mixed: load another checkpoint, with the optimizer"
)


def _load(
    joint: Joint,
    collectives: Collectives,
    root: Path,
    step: int | str | None,
    model: ShardedModule,
    optimizer: ShardedOptimizer | None,
    user: _User,
    *,
    strict: bool,
    cast: bool,
) -> Loaded:
    given: dict[str, Any] = {"step": step, "optimizer": "None" if optimizer is None else "given"}
    given |= {"strict": strict, "cast": cast, "names in extra": user.names}
    told_arguments = joint.together(lambda: given)
    joint.alike(lambda: refuse_other_arguments("shardmp.load()", told_arguments))
    found = _open(joint, root, step)
    made: list[Targets] = []

    def check() -> tuple[list[str], list[str]]:
        if model._gradients.backwards or model._gradients.in_backward:
            raise RuntimeError("shardmp.load() between backward and step: call step() or zero_grad() before")
        if optimizer is not None and model._collectives is not optimizer._collectives:
            raise ValueError("load(optimizer): it is not the one that shard() returned with this model")
        made.append(Targets(model, optimizer, found.reader, found.header, cast=cast))
        told = made[0].check(strict)
        if optimizer is not None:
            user.read(found, collectives, strict)
        made[0].prepare()
        return told

    told = joint.together(check)
    targets = made[0]
    missing, unexpected = ([*dict.fromkeys(key for rank in told for key in rank[side])] for side in (0, 1))
    with collectives.all_or_nothing("shardmp.load()"):
        try:
            model._parameters_.all_ready()  # a gather may still send rows that are about to change
            joint.together(lambda: _fill(found, targets.targets))
            targets.publish()

            def take_over() -> None:
                targets.take_over()
                user.restore(collectives)

            joint.together(take_over)
        except BaseException:
            if joint.is_agreed:  # on all ranks, which another load makes whole
                collectives.poison(_MIXED if optimizer is None else _MIXED_WITH_STATE)
            raise
    if optimizer is not None and found.header is not None and collectives.rank == 0:
        products.warn_of_differences(str(found.path), found.header.get("products"), products_of(optimizer))
    manifest = found.manifest
    collectives.facts[LOADED] = (
        f"shardmp.load of {found.path}, {'without' if optimizer is None else 'with'} its optimizer"
    )
    return Loaded(
        found.path,
        manifest.step if manifest else None,
        manifest.ranks if manifest else None,
        user.values,
        user.row,
        missing,
        unexpected,
    )


def _collectives_of(model: Any) -> Collectives:
    if not isinstance(model, ShardedModule):
        raise TypeError(f"load(model): expected the model that shard() returned, got {type(model).__name__}")
    return model._collectives


def _open(joint: Joint, root: Path, step: int | str | None) -> _Found:
    """Rank 0 chooses, all ranks open the same, and see the same."""
    joint.at(f"looking into {root}")
    if step == "latest good":
        path = _newest_intact(joint, root)
    else:
        path = joint.together(lambda: directory.find(root, step) if joint.rank == 0 else Path())[0]

    found: list[_Found] = []

    def opened() -> int | None:
        joint.at(f"opening {path}")
        manifest = directory.manifest_of(path) if directory.is_ours(path) else None
        if manifest is not None and joint.rank == 0:
            manifest.check_sizes(path)
        metadata = read_metadata(path, manifest)
        reader = Reader(path, metadata, manifest, joint)
        found.append(_Found(path, manifest, reader, read_header(reader)))
        return None if manifest is None else crc32((path / MANIFEST).read_bytes())

    told = joint.together(opened)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise CheckpointError(f"{path / MANIFEST} has other content on rank {rank} than on rank 0: is it shared?")
    return found[0]


def _newest_intact(joint: Joint, root: Path) -> Path:
    """The newest checkpoint whose every byte is as it was written; each rank compares its share of the files."""
    candidates = directory.newest_first(root)
    while True:
        path = joint.together(lambda: next(candidates) if joint.rank == 0 else Path())[0]

        def intact(path: Path = path) -> None:
            joint.at(f"comparing {path}")
            manifest = directory.manifest_of(path)
            manifest.check_sizes(path)
            for name in sorted(manifest.records)[joint.rank :: joint.world_size]:
                joint.at(f"comparing {path / name}")
                manifest.check_contents(path, [name])

        try:
            joint.together(intact)
        except (CheckpointError, OSError) as damage:
            joint.go_on()
            if joint.rank == 0:
                warnings.warn(f"passing over a checkpoint: {damage}", stacklevel=3)
            continue
        return path


def _fill(found: _Found, targets: dict[str, Any]) -> None:
    """Fill the tensors among the targets, and put the values that are not tensors in their places.

    Each rank plans for itself: what the others read changes nothing in it.
    """
    planner = SafePlanner()
    try:
        planner.set_up_planner(targets, found.reader.metadata, is_coordinator=False)
        found.reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    except OSError as error:
        raise OSError(error.errno, f"reading {found.path} failed: {error}") from error
    except Exception as error:  # of whatever kind: the bytes may be any
        raise CheckpointError(f"reading {found.path} failed: {error}") from error


class _User:
    """The user's objects and values, and the random state.

    Attributes:
        names: those of `extra`. values: what was saved as `extra`. row: this rank's own, or None.
    """

    def __init__(self, extra: Mapping[str, Any] | None, per_rank: Mapping[str, Any] | None) -> None:
        self._extra, self._per_rank = dict(extra or {}), dict(per_rank or {})
        self.names = list(self._extra)
        self.values: dict[str, Any] = {}
        self.row: dict[str, Any] | None = None
        self._random: dict[str, Any] | None = None

    def read(self, found: _Found, collectives: Collectives, strict: bool) -> None:
        """What was saved, which nothing takes over yet.

        Raises:
            ValueError, TypeError: it does not fit what it is to be restored into.
        """
        if found.header is None:
            return
        own: dict[str, Tensor] = {
            name: torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            for name, saved in found.reader.tensors()
            if name == RANKS or name.startswith(TENSORS)
        }
        _fill(found, own)
        tensors = {int(name.removeprefix(TENSORS)): value for name, value in own.items() if name != RANKS}
        self.values = codec.loads(found.header["extra"].encode(), tensors)
        _check_fit("extra", self._extra, self.values, strict)
        if RANKS not in own:  # what was imported from elsewhere has no random states
            return
        rows = own[RANKS]
        if len(rows) == collectives.world_size:
            row = codec.loads(rows[collectives.rank].numpy().tobytes())
            self._random, self.row = row["random"], row["values"]
            _check_fit("per_rank", self._per_rank, row["values"], strict)
        elif collectives.rank == 0:
            warnings.warn(
                f"{found.path} was saved by {len(rows)} ranks and is loaded by {collectives.world_size}: the ranks' random "
                "states and per_rank are not restored",
                stacklevel=4,
            )

    def restore(self, collectives: Collectives) -> None:
        """Everything as it was."""
        if self._random is not None:
            codec.set_random_state(self._random, collectives.device)
        for targets, values in ((self._extra, self.values), (self._per_rank, self.row or {})):
            for name, target in targets.items():
                if name in values:
                    in_place.restore(target, values[name])


def _check_fit(option: str, targets: Mapping[str, Any], values: Mapping[str, Any], strict: bool) -> None:
    for name, target in targets.items():
        if not in_place.is_kept(target):
            raise TypeError(
                f"load({option}=...): {name!r} is a {type(target).__name__}, which cannot be restored in place; expected an "
                "object with load_state_dict(), a tensor, or a container of them. Plain values are in what load returns"
            )
        if name in values:
            in_place.check(target, values[name], f"load({option}=...): {name!r}")
        elif strict:
            raise ValueError(
                f"load({option}=...): the checkpoint has no {name!r}; it has {', '.join(map(str, values)) or 'none'}"
            )
