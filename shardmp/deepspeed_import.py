"""`import_deepspeed`: a checkpoint of DeepSpeed's ZeRO as one of ours, with the same bits.

Owns:      where in DeepSpeed's flat tensors the elements of a parameter lie, and what its counters are here.
Takes:     what `save_checkpoint` has written with ZeRO stage 1, 2 or 3 and Adam or AdamW, at any number of ranks.
Gives:     a checkpoint that `shardmp.load` continues from, and the options of `shard` that go with it.
Invariant: each element of a master or moment is written from where it lies in the file of the rank that saved it: nothing
           is put together in memory.

In stages 1 and 2 a group's parameters lie one after the other, which is cut into equal partitions. In stage 3 each
parameter is cut, and a rank has its parts one after the other, in one or more tensors ("sub-groups") for each group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import deepspeed_files, directory
from .deepspeed_files import NotImported, Saved
from .deepspeed_values import extra_of, groups_of, optimizer_name, options_of, scaler_state, torch_state
from .flat_shard import FlatShard
from .manifest import CheckpointError
from .planning import ShortPlanner
from .regular_files import is_count, is_tensor_name, shown
from .storage import Writer

_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


@dataclass(frozen=True)
class Imported:
    """What an import has made.

    Attributes:
        path, step: the checkpoint, and the steps that the run had made, skipped ones included.
        version, stage, ranks: of the DeepSpeed that wrote it, its ZeRO stage, its number of ranks.
        options: for `shard`, as the run had them.
        dropped: names of values that cannot be stored without a pickle, and are left out.
    """

    path: Path
    step: int
    version: str
    stage: int
    ranks: int
    options: str
    dropped: list[str]


@dataclass(frozen=True)
class _Piece:
    """Elements [lo, hi) of a parameter, which lie in a rank's flat tensor of that index from `start` on."""

    name: str
    shape: torch.Size
    flat: int
    start: int
    lo: int
    hi: int


def import_deepspeed(
    source: str | Path, target: str | Path, *, tag: str | None = None, optimizer: str | None = None
) -> Imported:
    """Make a checkpoint of ours from one of DeepSpeed. Not a collective; DeepSpeed need not be installed.

    It has the FP32 masters, both moments, step counts, parameter groups, the loss scale and its counters, frozen
    parameters and buffers in the dtypes that DeepSpeed gave them, and in `extra` its "lr_scheduler" and "client_state".

    Args:
        source: what was given to `save_checkpoint`, or a tag's directory.
        target: a directory of checkpoints; the new one becomes its latest.
        tag: which checkpoint; by default that which `latest` names.
        optimizer: "Adam" or "AdamW", where the files do not say which it was.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: a rank's file is missing, damaged, or of another save.
        ValueError: it is of a kind, version or optimizer that is not imported.
        OSError: the checkpoint could not be written; the target's others are as they were.
    """
    if optimizer not in (None, "Adam", "AdamW"):
        raise ValueError(f"optimizer: expected 'Adam' or 'AdamW', got {optimizer!r}")
    try:
        saved = deepspeed_files.read(Path(source), tag)
        states, aliases, dropped = _states_of_ranks(saved, optimizer)
        options, step = options_of(saved), saved.models[0]["global_steps"]
    except (CheckpointError, NotImported, OSError, KeyboardInterrupt):
        raise
    except Exception as error:  # of whatever kind: the files may hold anything
        told = f"{type(error).__name__}: {shown(str(error))}"
        raise CheckpointError(f"{source} is not as DeepSpeed writes it: {told}") from error
    about = {"step": step, "ranks": saved.ranks, "torch": torch.__version__, "shardmp": version("shardmp")}
    path = directory.begin(Path(target), step)
    try:
        _write(states, Writer(path, aliases, about, past_cache=False))
    except BaseException:
        directory.drop(path)
        raise
    return Imported(directory.committed(path), step, saved.version, saved.stage, saved.ranks, options, dropped)


def _states_of_ranks(saved: Saved, optimizer: str | None) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    """What each rank would save, further names of tied weights, and the names of values that are left out."""
    model = saved.models[0]
    _check_tables(saved)
    weights, buffers, aliases = _other_weights(saved)
    text, tensors, dropped = extra_of(model)
    header = {
        "counters": {
            "steps": model["global_steps"],
            "skipped": model["skipped_steps"],
            "scaler": scaler_state(saved.optimizers[0].get("loss_scaler")),
        },
        "optimizer": optimizer_name(saved, optimizer),
        "buffers": sorted(buffers),
        "extra": text,
    }
    states = [_rank_state(saved, rank) for rank in range(saved.ranks)]
    for state, own in zip(states, weights, strict=True):
        state["model"].update(own)
    states[0]["optim"]["param_groups"] = groups_of(saved)
    states[0]["shardmp"] = {
        "state": torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8),
        "tensors": {str(index): value for index, value in enumerate(tensors)},
    }
    return states, aliases, dropped


def _write(states: Sequence[dict[str, Any]], writer: Writer) -> None:
    """What ranks do together in a save, one after the other: a file for each of DeepSpeed's ranks."""
    planners = [ShortPlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)


# -- where the elements are


def _check_tables(saved: Saved) -> None:
    """That counters are counts, and names are names of one parameter each.

    Raises:
        CheckpointError: the first that is not.
    """
    model = saved.models[0]
    for key in ("global_steps", "skipped_steps"):
        if not is_count(model[key], 2**53):
            raise CheckpointError(f"{saved.path}: expected a count as {key}, found {shown(model[key])}")
    names = [name for shapes in model["param_shapes"] for name in shapes]
    tied = model.get("shared_params") or {}
    for name in (
        *names,
        *(model.get("module") or ()),
        *(model.get("frozen_param_shapes") or ()),
        *tied,
        *tied.values(),
    ):
        if not is_tensor_name(name):
            raise CheckpointError(f"{saved.path}: {shown(name)} is not the name of a parameter")
    counts = Counter((*names, *tied))
    for name in counts:
        if counts[name] > 1:
            raise CheckpointError(f"{saved.path}: {shown(name)} is there twice")
    for rank in range(saved.ranks):
        numbers = [index for group in torch_state(saved, rank)["param_groups"] for index in group["params"]]
        if numbers != list(range(len(_masters(saved, rank)))):
            raise CheckpointError(f"{saved.path}: the groups of rank {rank} are not those of its flat tensors")


def _pieces(saved: Saved, rank: int) -> list[_Piece]:
    """All of a rank's pieces.

    Raises:
        CheckpointError: the flat tensors do not have the elements that the parameters need.
    """
    groups = saved.models[0]["param_shapes"]
    flats = _masters(saved, rank)
    if len(flats) != len(groups):
        raise CheckpointError(
            f"{saved.path}: rank {rank} has {len(flats)} flat groups, the model's file describes {len(groups)}"
        )
    found = list(_cut_each(saved, groups, rank) if saved.stage == 3 else _cut_flat(saved, groups, rank))
    for piece in found:
        end = piece.start + piece.hi - piece.lo
        if end > flats[piece.flat].numel():
            raise CheckpointError(
                f"{saved.path}: {piece.name} needs {end} elements of group {piece.flat} of rank {rank}, which has "
                f"{flats[piece.flat].numel()}"
            )
    return found


def _masters(saved: Saved, rank: int) -> list[Tensor]:
    """A rank's flat FP32 masters.

    Raises:
        ValueError: they are not FP32.
    """
    key = "fp32_flat_groups" if saved.stage == 3 else "single_partition_of_fp32_groups"
    flats = saved.optimizers[rank][key]
    if type(flats) is not list or not all(isinstance(flat, Tensor) for flat in flats):
        told = ", ".join(shown(flat) for flat in flats[:4]) if type(flats) is list else shown(flats)
        raise CheckpointError(f"{saved.path}: expected a list of tensors as {key} of rank {rank}, found {told}")
    for flat in flats:
        if flat.dtype != torch.float32:
            raise NotImported(f"{saved.path}: expected FP32 masters, found {flat.dtype} ({key})")
    return [flat.detach().view(-1) for flat in flats]


def _cut_flat(saved: Saved, groups: Sequence[dict[str, Any]], rank: int) -> Iterator[_Piece]:
    """Stages 1 and 2: [rank x partition, (rank + 1) x partition) of each group's parameters in a row."""
    optimizer = saved.optimizers[rank]
    gaps = optimizer.get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for index, shapes in enumerate(groups):
        partition = _partition(saved, rank, index)
        if partition != _partition(saved, 0, index):
            raise CheckpointError(f"{saved.path}: group {index} of rank {rank} has another length than that of rank 0")
        first, begin = rank * partition, 0
        for (name, shape), gap in zip(shapes.items(), gaps[index], strict=True):
            if not is_count(gap):
                raise CheckpointError(f"{saved.path}: expected a count behind {name}, found {shown(gap)}")
            end = begin + torch.Size(shape).numel()
            lo, hi = max(begin, first), min(end, first + partition)
            if lo < hi:
                yield _Piece(name, torch.Size(shape), index, lo - first, lo - begin, hi - begin)
            begin = end + gap
        if rank == saved.ranks - 1 and begin > first + partition:
            raise CheckpointError(f"{saved.path}: group {index} needs {begin} elements, {first + partition} were saved")


def _partition(saved: Saved, rank: int, index: int) -> int:
    """Elements of a group that are a rank's, with the padding at the group's end."""
    optimizer = saved.optimizers[rank]
    padding = optimizer["group_paddings"][index]
    if not is_count(padding):
        raise CheckpointError(f"{saved.path}: expected counts as group_paddings of rank {rank}, found {shown(padding)}")
    # BF16_Optimizer, which names no stage, keeps the padding; the others save without it.
    return _masters(saved, rank)[index].numel() + (padding if "zero_stage" in optimizer else 0)


def _cut_each(saved: Saved, groups: Sequence[dict[str, Any]], rank: int) -> Iterator[_Piece]:
    """Stage 3: a rank has the elements from rank x share on of each parameter, padded to a share."""
    for index, shapes in enumerate(groups):
        start = 0
        for name, shape in ((name, torch.Size(shape)) for name, shape in shapes.items()):
            share = -(-shape.numel() // saved.ranks)
            lo, hi = rank * share, min((rank + 1) * share, shape.numel())
            if lo < hi:
                yield _Piece(name, shape, index, start, lo, hi)
            start += share


# -- state


def _rank_state(saved: Saved, rank: int) -> dict[str, Any]:
    """What rank `rank` writes: views of its flat tensors under the parameters' names."""
    masters, states = _masters(saved, rank), _states(saved, rank)
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Any]] = {}
    for piece in _pieces(saved, rank):
        end = piece.start + piece.hi - piece.lo
        weights[piece.name] = FlatShard(masters[piece.flat][piece.start : end], piece.shape, piece.lo)
        if not states[piece.flat]:
            continue
        own = moments[piece.name] = {}
        for key, value in states[piece.flat].items():
            if isinstance(value, Tensor):
                if value.numel() < end:
                    raise CheckpointError(
                        f"{saved.path}: {key} of rank {rank} has {value.numel()} elements, needs {end}"
                    )
                own[key] = FlatShard(value[piece.start : end], piece.shape, piece.lo)
            elif piece.lo == 0:  # one value for the parameter: from whoever has its first element
                own[key] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
    return {"model": weights, "optim": {"state": moments}}


def _states(saved: Saved, rank: int) -> list[dict[str, Any]]:
    """For each flat tensor its moments, flat, and "step"; empty before the first step.

    Raises:
        ValueError: it is not the state of Adam. CheckpointError: ranks have made different numbers of steps.
    """
    found: list[dict[str, Any]] = []
    inner, first = torch_state(saved, rank), torch_state(saved, 0)
    for group in inner["param_groups"]:
        for index in group["params"]:
            state = dict(inner["state"].get(index, {}))
            other = set(state) - _MOMENTS - {"step"}
            if other:
                raise NotImported(
                    f"{saved.path}: expected the state of Adam or AdamW, found {', '.join(sorted(other))}"
                )
            moments = {key: value.detach().view(-1) for key, value in state.items() if key in _MOMENTS}
            for key, value in moments.items():
                if value.dtype != torch.float32:
                    raise NotImported(f"{saved.path}: expected FP32 moments, found {value.dtype} ({key})")
            if not moments:
                found.append({})
                continue
            step = float(state.get("step", group.get("step", 0)))
            if step != float(first["state"][index].get("step", group.get("step", 0))):
                raise CheckpointError(f"{saved.path}: rank {rank} has made {step:.0f} steps, rank 0 another number")
            found.append({**moments, "step": step})
    return found


# -- what is not sharded


def _other_weights(saved: Saved) -> tuple[list[dict[str, Tensor]], set[str], dict[str, str]]:
    """Frozen parameters and buffers by the rank that writes them, the names of buffers, further names of tied ones.

    Raises:
        ValueError: the model's state dict holds what is not a tensor; a weight's elements are nowhere.
    """
    model = saved.models[0]
    trained = {name for shapes in model["param_shapes"] for name in shapes}
    tied: dict[str, str] = dict(model.get("shared_params") or {})
    buffers = set(model.get("buffer_names") or ())
    shapes = (model.get("frozen_param_shapes") or {}) if saved.stage == 3 else {}
    found: list[dict[str, Tensor]] = [{} for _ in range(saved.ranks)]
    for name, shape in shapes.items():
        size = torch.Size(shape)
        share = -(-size.numel() // saved.ranks)
        for rank, other in enumerate(saved.models):
            lo, hi = rank * share, min((rank + 1) * share, size.numel())
            if lo < hi:
                fragment = other["frozen_param_fragments"][name].detach().view(-1)
                found[rank][name] = FlatShard(fragment[: hi - lo], size, lo)
        if not size.numel():
            found[0][name] = torch.empty(size, dtype=model["frozen_param_fragments"][name].dtype, device="cpu")
    for name, value in (model.get("module") or {}).items():
        if name in trained or name in tied or name in shapes:
            continue
        if not isinstance(value, Tensor):
            raise NotImported(
                f"{saved.path}: {name} in the model's state is a {type(value).__name__}; only tensors are saved"
            )
        if saved.stage == 3 and name not in buffers:
            raise NotImported(f"{saved.path}: nothing says where the elements of {name} are")
        found[0][name] = value.detach().contiguous()
    there = trained.union(*found)
    aliases = {f"model.{alias}": f"model.{name}" for alias, name in tied.items() if name in there}
    return found, buffers & set(found[0]), aliases
