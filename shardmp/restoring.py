"""`load`: a checkpoint for any number of ranks.

Owns:      which checkpoint is read, and the order of checking, reading and taking over.
Takes:     a directory; a model and an optimizer from `shard`.
Gives:     both as they were saved, or an error on every rank.
Invariant: until all is checked nothing is changed; after a read that failed half-way nothing steps or saves.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_into

from . import codec, directory, products
from .agreed import LOADED
from .agreement import dcp_is_quiet, group_for_files, meet, raise_first, together
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
        extra, per_rank: objects with `load_state_dict()`, by the names under which they were saved.
        strict: names that the checkpoint or the model lacks are an error; otherwise they are returned.
        cast: convert between floating dtypes; otherwise another dtype is an error.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError, TypeError: names, shapes, dtypes or groups differ; nothing has been changed.
        CheckpointError: a file is missing, truncated or altered. Where that shows only while reading, weights are mixed,
            and `step` and `save` refuse until another `load` has succeeded.
    """
    if optimizer is not None:
        wait_for_save(optimizer)
    collectives = _collectives_of(model)
    if collectives.failure == _HALF_LOADED:
        collectives.failure = None
    collectives.refuse_after_failure()
    meet(collectives, "shardmp.load()")
    found = _open(collectives, Path(root), step)
    targets, missing, unexpected = _check(collectives, model, optimizer, found, strict, cast, extra)
    own = _own_tensors(found) if optimizer is not None else {}
    with torch.no_grad():
        model._parameters_.all_ready()  # a gather may still send rows that are about to change
        targets.prepare()
        try:
            plain = _read(collectives, found, {**targets.targets, **own})
        except BaseException:
            collectives.poison(_HALF_LOADED)
            raise
        targets.apply(plain)
    values, row = _restore(collectives, found, own, extra, per_rank) if optimizer is not None else ({}, None)
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
        values,
        row,
        missing,
        unexpected,
    )


_HALF_LOADED = "shardmp.load() failed half-way, and weights are mixed; load another checkpoint"


def _collectives_of(model: Any) -> Collectives:
    if not isinstance(model, ShardedModule):
        raise TypeError(f"load(model): expected the model that shard() returned, got {type(model).__name__}")
    return model._collectives


def _open(collectives: Collectives, root: Path, step: int | str | None) -> _Found:
    """Rank 0 chooses, all ranks open the same, and see the same."""
    if step == "latest good":
        path = _newest_intact(collectives, root)
    else:
        path = together(collectives, lambda: directory.find(root, step) if collectives.rank == 0 else Path())[0]

    found: list[_Found] = []

    def opened() -> int | None:
        manifest = Manifest.load(path) if directory.is_ours(path) else None
        if manifest is not None and collectives.rank == 0:
            manifest.check_sizes(path)
        metadata = read_metadata(path, manifest)
        reader = Reader(path, metadata, manifest)
        found.append(_Found(path, manifest, reader, read_header(reader)))
        return None if manifest is None else crc32((path / MANIFEST).read_bytes())

    told = together(collectives, opened)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise CheckpointError(f"{path / MANIFEST} has other content on rank {rank} than on rank 0: is it shared?")
    return found[0]


def _newest_intact(collectives: Collectives, root: Path) -> Path:
    """The newest checkpoint whose every byte is as it was written; each rank compares its share of the files."""
    candidates = directory.newest_first(root)
    while True:
        path = together(collectives, lambda: next(candidates) if collectives.rank == 0 else Path())[0]

        def intact(path: Path = path) -> None:
            manifest = Manifest.load(path)
            manifest.check_sizes(path)
            manifest.check_contents(path, sorted(manifest.records)[collectives.rank :: collectives.world_size])

        try:
            together(collectives, intact, group_for_files(collectives))
        except (CheckpointError, OSError) as damage:
            if collectives.rank == 0:
                warnings.warn(f"passing over a checkpoint: {damage}", stacklevel=3)
            continue
        return path


def _check(
    collectives: Collectives,
    model: ShardedModule,
    optimizer: ShardedOptimizer | None,
    found: _Found,
    strict: bool,
    cast: bool,
    extra: Mapping[str, Any] | None,
) -> tuple[Targets, list[str], list[str]]:
    made: list[Targets] = []

    def check() -> tuple[list[str], list[str]]:
        if model._gradients.backwards or model._gradients.in_backward:
            raise RuntimeError("shardmp.load() between backward and step: call step() or zero_grad() before")
        if optimizer is not None and model._collectives is not optimizer._collectives:
            raise ValueError("load(optimizer): it is not the one that shard() returned with this model")
        made.append(Targets(model, optimizer, found.reader.metadata, found.header, cast=cast))
        if extra and found.header is not None:
            saved = json.loads(found.header["extra"])
            absent = [key for key in extra if key not in saved]
            if absent and strict:
                raise ValueError(
                    f"load(extra=...): the checkpoint has no {absent[0]!r}; it has {', '.join(saved) or 'none'}"
                )
        return made[0].check(strict)

    told = together(collectives, check)
    lists = [list(dict.fromkeys(key for rank in told for key in rank[side])) for side in (0, 1)]
    return made[0], lists[0], lists[1]


def _own_tensors(found: _Found) -> dict[str, Tensor]:
    """Where the user's values and the random states go."""
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        for name, saved in found.reader.tensors()
        if name == RANKS or name.startswith(TENSORS)
    }


def _read(collectives: Collectives, found: _Found, targets: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors among the targets, and give back all of them, with the values that are not tensors."""

    def read() -> None:
        try:
            # Each rank plans for itself: DCP would take all ranks' plans to rank 0 and back, and change nothing in them.
            with dcp_is_quiet():
                load_into(targets, storage_reader=found.reader, planner=SafePlanner(), no_dist=True)
        except CheckpointException as error:
            raise_first(error, f"reading {found.path}", alone=True)

    together(collectives, read, group_for_files(collectives))
    return targets


def _restore(
    collectives: Collectives,
    found: _Found,
    own: dict[str, Tensor],
    extra: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The user's objects and the random state, as they were."""
    if found.header is None:
        return {}, None
    tensors = {int(name.removeprefix(TENSORS)): value for name, value in own.items() if name != RANKS}
    values: dict[str, Any] = codec.loads(found.header["extra"].encode(), tensors)
    for name, target in (extra or {}).items():
        if name in values:
            target.load_state_dict(values[name])
    if RANKS not in own:  # what was imported from elsewhere has no random states
        return values, None
    rows = own[RANKS]
    if len(rows) != collectives.world_size:
        if collectives.rank == 0:
            warnings.warn(
                f"{found.path} was saved by {len(rows)} ranks and is loaded by {collectives.world_size}: the ranks' random "
                "states and per_rank are not restored",
                stacklevel=3,
            )
        return values, None
    row = codec.loads(rows[collectives.rank].numpy().tobytes())
    codec.set_random_state(row["random"], collectives.device)
    for name, target in (per_rank or {}).items():
        target.load_state_dict(row["values"][name])
    return values, row["values"]
