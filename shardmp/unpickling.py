"""Unpickling what DCP has pickled, without running what is in it.

Owns:      the list of what a checkpoint's pickles may name.
Takes:     `.metadata`, and the values of a checkpoint that are not tensors.
Gives:     DCP's records and plain values; an error for everything else.
Invariant: a crafted file can run no code: DCP's own reader would unpickle whatever stands there.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from . import container
from .manifest import METADATA, CheckpointError


def _get_member(owner: Any, name: str) -> Any:
    """Some Pythons pickle a member of an enumeration by `getattr`."""
    if owner is not dcp_metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"getattr of {owner!r}")
    return owner[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    (found.__module__, found.__qualname__): found
    for found in (
        dcp_metadata.Metadata,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        OrderedDict,
    )
}
_ALLOWED |= {("torch", str(value).removeprefix("torch.")): value for value in container.STORAGES}
_ALLOWED |= {
    ("torch", name): getattr(torch, name)
    for name in ("bool", "int8", "int16", "complex64", "complex128", "uint16", "uint32", "uint64", "Size")
}
_ALLOWED |= {("torch", name): getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
_ALLOWED |= {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): _get_member,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}


class _SafeUnpickler(pickle.Unpickler):
    """Makes the plain records of DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return _ALLOWED[module, name]


def read_metadata(path: Path) -> Metadata:
    """DCP's `.metadata`, unpickled through an allow-list.

    Raises:
        CheckpointError: it is missing or damaged, or would run code.
    """
    try:
        with (path / METADATA).open("rb") as file:
            found = _SafeUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path / METADATA} is missing") from None
    except Exception as error:  # of whatever kind: the bytes may be any
        raise CheckpointError(f"{path / METADATA} was not unpickled: {error}") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path / METADATA} holds {type(found).__name__}, not the metadata of a checkpoint")
    for info in found.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{path / METADATA} names a file outside of the checkpoint: {info.relative_path}")
    return found


class SafePlanner(DefaultLoadPlanner):
    """DCP's own planner on a flat state dict, except that what it unpickles may only be plain values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """One value that is not a tensor."""
        name = read_item.dest_index.fqn
        value.seek(0)
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except Exception as error:  # of whatever kind: the bytes may be any
            raise CheckpointError(f"{name} was not unpickled: {error}") from None
