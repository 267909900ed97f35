"""The files of a DeepSpeed checkpoint, read without running what is in them.

Owns:      their names, which of them belong together, what is refused, and reading their pickles.
Takes:     a directory that DeepSpeed's `save_checkpoint` has written, or one tag's directory in it.
Gives:     what each rank saved; tensors are mapped from the files: a page is in memory while it is read.
Invariant: a crafted file can run no code, and DeepSpeed need not be installed: torch's own restricted unpickler makes
           tensors and plain values, and a record without behaviour of everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .manifest import CheckpointError

# The layout of the files is the same in all of these; the tests run the newest.
OLDEST, NEWEST = (0, 14), (0, 19)

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_ENUMERATION = "deepspeed.runtime.zero.config.ZeroStageEnum"


class Record:
    """Stands for an object of a class that is not looked up: it has the object's attributes, and runs nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        """Whatever the object was made of is dropped."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


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
        tag = pointer.read_text(errors="replace").strip()
    if not tag or Path(tag).name != tag:
        raise ValueError(f"{root}: expected the name of a directory in it as the tag, got {tag!r}")
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
    for missing in sorted(set(range(ranks)) - set(files)):
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
    if stage not in (1, 2, 3):
        raise ValueError(f"{path / name}: expected ZeRO stage 1, 2 or 3, found {stage!r}")
    models = _models(path, names, stage, ranks)
    return Saved(path, version, stage, models, optimizers)


def _refuse_by_name(path: Path, names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("expp_rank_") or "_expert_" in name:
            raise ValueError(f"{path / name}: mixture-of-experts (MoE) checkpoints are not imported")
        if re.match(r"layer_\d+", name):
            raise ValueError(f"{path / name}: pipeline-parallel checkpoints are not imported")
        if name == "offloaded_tensors":
            raise ValueError(f"{path / name}: optimizer state that is offloaded to NVMe is not imported")
        match = _OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name)
        if match and int(match[match.lastindex or 1]):
            raise ValueError(f"{path / name}: tensor-parallel checkpoints (mp_rank above 0) are not imported")


def _rank_files(path: Path, names: Iterable[str]) -> dict[int, str]:
    files: dict[int, str] = {}
    for name in names:
        match = _OPTIMIZER_FILE.fullmatch(name)
        if match and files.setdefault(int(match[1]), name) != name:
            raise CheckpointError(f"{path} has both {files[int(match[1])]} and {name}: two saves in one directory")
    if not files:
        raise ValueError(
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
            raise ValueError(f"{path}: {kind} checkpoints are not imported (it says {degree})")
    if model.get("num_experts") or model.get("autoep_layers"):
        raise ValueError(f"{path}: mixture-of-experts (MoE) checkpoints are not imported")
    if model.get("dp_world_size") != ranks:
        raise CheckpointError(
            f"{path} is of {model.get('dp_world_size')} ranks, the optimizer's files of {ranks}: of two saves?"
        )


def _load(path: Path) -> dict[str, Any]:
    """A file of `torch.save`, its tensors mapped."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        stand_ins: list[Any] = [(int if name == _ENUMERATION else Record, name) for name in unknown]
        with torch.serialization.safe_globals(stand_ins):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of whatever kind: the bytes may be any
        # Torch's advice to read it without the restriction is left out.
        reason = " ".join(line for line in str(error).splitlines() if line and "weights_only" not in line)
        raise CheckpointError(f"{path} was not read: {reason}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a dict, found {type(found).__name__}")
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
        raise ValueError(f"{path}: expected files of DeepSpeed {oldest} to {newest}, found version {version!r}")
    return str(version)


def _count(optimizer: dict[str, Any], path: Path) -> int:
    """The number of ranks over which the optimizer is sharded.

    Raises:
        ValueError: it differs between groups (experts).
    """
    counts = optimizer.get("partition_count")
    found = counts if isinstance(counts, list) else [counts]
    if len(set(found)) != 1 or not isinstance(found[0], int) or found[0] < 1:
        raise ValueError(f"{path}: expected one partition_count for all groups, found {counts!r}: MoE is not imported")
    return found[0]
