"""The header of a checkpoint of ours: the JSON in the tensor `shardmp.state`.

Owns:      which fields it must have, and of what kind they are.
Takes:     an opened checkpoint.
Gives:     the header, checked; None where shardmp has not written the checkpoint.
Invariant: whoever reads a field finds it there, and of its type. Fields that are not known here are left as they are.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .regular_files import TABLE_LIMIT, CheckpointError, is_count, is_tensor_name, shown
from .saved_state import STATE
from .storage import Reader


def read_header(reader: Reader) -> dict[str, Any] | None:
    """The header of the checkpoint that `reader` has opened.

    Raises:
        CheckpointError: it is damaged; the error names the field.
    """
    saved = reader.metadata.state_dict_metadata.get(STATE)
    if saved is None:
        return None
    where = f"{reader.path}: {STATE}"
    size = saved.size if isinstance(saved, TensorStorageMetadata) and saved.properties.dtype == torch.uint8 else ()
    if len(size) != 1 or size[0] > TABLE_LIMIT:
        raise CheckpointError(f"{where} is not a text of at most {TABLE_LIMIT} bytes")
    try:
        return _checked(json.loads(reader.read_tensor(STATE).numpy().tobytes()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _checked(found: Any) -> dict[str, Any]:
    _expect(type(found) is dict, "header", found, "an object")
    counters = found.get("counters")
    _expect(type(counters) is dict, "counters", counters, "an object")
    for name in ("steps", "skipped"):
        _expect(is_count(counters.get(name), 2**53), name, counters.get(name), "a count")
    _check_scaler(counters.get("scaler"))
    for name in ("optimizer", "extra"):
        _expect(type(found.get(name)) is str, name, found.get(name), "a text")
    buffers = found.get("buffers")
    _expect(type(buffers) is list and all(map(is_tensor_name, buffers)), "buffers", buffers, "a list of names")
    extra = json.loads(found["extra"])
    _expect(type(extra) is dict, "extra", extra, "JSON of an object")
    return found


def _check_scaler(scaler: Any) -> None:
    _expect(type(scaler) is dict and type(scaler.get("dynamic")) is bool, "scaler", scaler, "the state of a loss scale")
    for name in ("growth", "hysteresis", "hopeless"):
        _expect(is_count(scaler.get(name), 2**53), f"scaler.{name}", scaler.get(name), "a count")
    scale = scaler.get("scale")
    good = is_count(scale, 2**127) or (type(scale) is float and 0 <= scale <= 2.0**127)
    _expect(good, "scaler.scale", scale, "a number from 0 to 2^127")
    pending = scaler.get("pending", "nothing")
    good = pending is None or (
        type(pending) is list and len(pending) in (2, 3) and all(type(one) is bool for one in pending)
    )
    _expect(good, "scaler.pending", pending, "null or flags")


def _expect(good: bool, field: str, found: Any, expected: str) -> None:
    if not good:
        raise ValueError(f"{field}: expected {expected}, found {shown(found)}")
