"""The files of a DeepSpeed checkpoint, read without running what is in them.

Owns:      their names, which of them belong together, what is refused, and reading their pickles.
Takes:     a directory that DeepSpeed's `save_checkpoint` has written, or one tag's directory in it.
Gives:     what each rank saved; tensors are mapped from the files: a page is in memory while it is read.
Invariant: a crafted file can run no code, and DeepSpeed need not be installed: our own reader (archive_reading.py) makes
           tensors and plain values, and a record without behaviour of everything else.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archive_reading import read_archive
from .manifest import CheckpointError
from .pickle_reading import Record
from .regular_files import is_count, is_file_name, opened, read_whole, shown

# The layout of the files is the same in all of these; the tests run the newest.
OLDEST, NEWEST = (0, 14), (0, 19)

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_[0-9]{1,6}_)?mp_rank_([0-9]{1,6})_model_states\.pt")
_ENUMERATION = "deepspeed.runtime.zero.config.ZeroStageEnum"


class NotImported(ValueError):
    """A kind of checkpoint that is not imported, or one that does not say what it must; the message names the file."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of DeepSpeed.

    Attributes:
        path: its directory. version: of DeepSpeed. stage: 1, 2 or 3.
        models: in stage 3 what each rank's model file holds, else rank 0's alone.
        optimizers: what each rank's optimizer file holds.
    """

    path: Path
    version: str
    stage: int
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]

    @property
    def ranks(self) -> int:
        """The number of ranks that saved it."""
        return len(self.optimizers)


def find(root: Path, tag: str | None) -> Path:
    """The directory of a tag: the one named, `root` itself where it holds the files, or what `latest` names.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the tag is a path.
    """
    if tag is None and any(_OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name) for name in _names(root)):
        return root
    if tag is None:
        pointer = root / "latest"
        if not pointer.is_file():
            raise FileNotFoundError(f"{root}: no DeepSpeed checkpoint: neither *_optim_states.pt nor a file 'latest'")
        tag = read_whole(pointer, 4096).decode(errors="replace").strip()
    if not is_file_name(tag):
        raise NotImported(f"{root}: expected the name of a directory in it as the tag, got {shown(tag)}")
    if not (root / tag).is_dir():
        raise FileNotFoundError(f"{root / tag} does not exist; there are {', '.join(_names(root)) or 'no files'}")
    return root / tag


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def read(root: Path, tag: str | None) -> Saved:
    """What a checkpoint holds.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: a rank's file is missing, damaged, or of another save.
        ValueError: it is of a kind or version that is not imported; the message says which.
    """
    path = find(root, tag)
    names = _names(path)
    _refuse_by_name(path, names)
    files = _rank_files(path, names)
    first, name = next(iter(files.items()))
    found = {first: _load(path / name)}
    optimizer, version = _inner(found[first], path / name), _version(found[first], path / name)
    ranks = _count(optimizer, path / name)
    missing = next((rank for rank in range(min(ranks, len(files) + 1)) if rank not in files), None)
    if missing is not None:
        expected = name.replace(f"zero_pp_rank_{first}_", f"zero_pp_rank_{missing}_")
        raise CheckpointError(f"{path / expected} is missing: {name} says that {ranks} ranks have saved")
    if len(files) != ranks:
        raise CheckpointError(
            f"{path} has the files of {len(files)} ranks, but {name} says that {ranks} have saved: of two saves?"
        )
    found |= {rank: _load(path / other) for rank, other in files.items() if rank not in found}
    optimizers = [_inner(found[rank], path / files[rank]) for rank in range(ranks)]
    for rank, other in enumerate(optimizers):
        if _count(other, path / files[rank]) != ranks or _version(found[rank], path / files[rank]) != version:
            raise CheckpointError(f"{path / files[rank]} is not of the same save as {name}")
    # BF16_Optimizer names no stage, and lies as stage 1.
    stage = optimizer.get("zero_stage", 1)
    if isinstance(stage, Record) and str(stage.kind) == _ENUMERATION and len(stage.arguments) == 1:
        stage = stage.arguments[0]
    if type(stage) is not int or stage not in (1, 2, 3):
        raise NotImported(f"{path / name}: expected ZeRO stage 1, 2 or 3, found {shown(stage)}")
    models = _models(path, names, stage, ranks)
    return Saved(path, version, stage, models, optimizers)


def _refuse_by_name(path: Path, names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("expp_rank_") or "_expert_" in name:
            raise NotImported(f"{path / name}: mixture-of-experts (MoE) checkpoints are not imported")
        if re.match(r"layer_\d+", name):
            raise NotImported(f"{path / name}: pipeline-parallel checkpoints are not imported")
        if name == "offloaded_tensors":
            raise NotImported(f"{path / name}: optimizer state that is offloaded to NVMe is not imported")
        match = _OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name)
        if match and int(match[match.lastindex or 1]):
            raise NotImported(f"{path / name}: tensor-parallel checkpoints (mp_rank above 0) are not imported")


def _rank_files(path: Path, names: Iterable[str]) -> dict[int, str]:
    files: dict[int, str] = {}
    for name in names:
        match = _OPTIMIZER_FILE.fullmatch(name)
        if match and files.setdefault(int(match[1]), name) != name:
            raise CheckpointError(f"{path} has both {files[int(match[1])]} and {name}: two saves in one directory")
    if not files:
        raise NotImported(
            f"{path}: no *_optim_states.pt: expected a checkpoint of ZeRO stage 1, 2 or 3, of Adam or AdamW"
        )
    return dict(sorted(files.items()))


def _models(path: Path, names: Iterable[str], stage: int, ranks: int) -> list[dict[str, Any]]:
    wanted = ["mp_rank_00_model_states.pt"]
    if stage == 3:
        wanted = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    models = []
    for name in wanted:
        if name not in names:
            raise CheckpointError(f"{path / name} is missing")
        model = _load(path / name)
        _version(model, path / name)
        _refuse_parallel(model, path / name, ranks)
        models.append(model)
    return models


def _refuse_parallel(model: dict[str, Any], path: Path, ranks: int) -> None:
    dimensions = model.get("checkpoint_parallel_dimensions") or {}
    for kind, degree in (
        ("tensor-parallel", model.get("mp_world_size", 1)),
        ("tensor-parallel", dimensions.get("tp_degree", 1)),
        ("pipeline-parallel", dimensions.get("pp_degree", 1)),
    ):
        if degree not in (None, 1):
            raise NotImported(f"{path}: {kind} checkpoints are not imported (it says {shown(degree)})")
    if model.get("num_experts") or model.get("autoep_layers"):
        raise NotImported(f"{path}: mixture-of-experts (MoE) checkpoints are not imported")
    if model.get("dp_world_size") != ranks:
        raise CheckpointError(
            f"{path} is of {shown(model.get('dp_world_size'))} ranks, the optimizer's files of {ranks}: of two saves?"
        )


def _load(path: Path) -> dict[str, Any]:
    """A file of `torch.save`, its tensors mapped."""
    try:
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if not size:
                raise CheckpointError(f"{path} was not read: it is empty")
            # A private map: torch wants memory that could be written, and a write would not reach the file.
            data = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        found = read_archive(data, records=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} was not read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a dict, found {shown(found)}")
    return found


def _inner(found: dict[str, Any], path: Path) -> dict[str, Any]:
    inner = found.get("optimizer_state_dict")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path} has no optimizer_state_dict: it is not a file of DeepSpeed's ZeRO")
    return inner


def _version(found: dict[str, Any], path: Path) -> str:
    """Of the DeepSpeed that wrote a file.

    Raises:
        ValueError: it is not among those whose files are known.
    """
    version = found.get("ds_version")
    match = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if not match or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
        raise NotImported(f"{path}: expected files of DeepSpeed {oldest} to {newest}, found version {shown(version)}")
    return str(version)


def _count(optimizer: dict[str, Any], path: Path) -> int:
    """The number of ranks over which the optimizer is sharded.

    Raises:
        ValueError: it differs between groups (experts).
    """
    counts = optimizer.get("partition_count")
    found: list[Any] = counts if isinstance(counts, list) else [counts]
    if not found or not all(is_count(count) and count for count in found) or len(set(found)) != 1:
        told = ", ".join(map(shown, found[:8]))
        raise NotImported(f"{path}: expected one partition_count for all groups, found {told}: MoE is not imported")
    return int(found[0])
