"""What people say of a run that is only planned: numbers, sizes, functions.

Owns:      the words of `shardmp budget`'s options, and what they mean.
Takes:     text, or the function itself.
Gives:     integers, layout entries, models on the meta device.
Invariant: a word that is not understood is a ValueError that names its option and what was expected.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from .layout import MIB, Entry
from .precision import DTYPES, Precision, as_precision

ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}
MOST_PARAMETERS = 10**13
MOST_MATRICES = 5 * 10**6  # above what MOST_PARAMETERS makes in buckets of the usual size
MOST_BYTES = 2**50
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "b": 1}


# -- numbers


def count(text: str) -> int:
    """A number of parameters: "7e9", "7B", "124M".

    Raises:
        ValueError: it is not one.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    try:
        value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value <= MOST_PARAMETERS:
        raise ValueError(f"--params: expected a number from 1 to {MOST_PARAMETERS:.0e} (7e9, 7B, 124M), got {text!r}")
    return round(value)


def size(text: str, option: str = "--fits") -> int:
    """Bytes: "16GiB", "80 GB".

    Raises:
        ValueError: they are not.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    bytes_of = float(found[1]) * _UNITS.get(found[2], 0) if found else 0.0
    if not 1 <= bytes_of <= MOST_BYTES:
        raise ValueError(f"{option}: expected a size such as 16GiB or 80GB, up to 1024TiB, got {text!r}")
    return int(bytes_of)


def usual_ranks_per_host(ranks: int) -> int:
    """As many as hosts usually have: the largest divisor up to 8."""
    return max(number for number in range(1, 9) if ranks % number == 0) if ranks > 0 else 1


# -- functions


def function_at(path: str, option: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, from the working directory as well.

    Raises:
        ValueError: there is none.
    """
    module_name, _, function_name = path.partition(":")
    if not (module_name and function_name):
        raise ValueError(f"{option}: expected package.module:function, got {path!r}")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        found: Any = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {path}: {error}") from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ValueError(f"{option} {path}: the import of {module_name} raised {first_line(error)}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(found):
        raise ValueError(f"{option} {path}: expected a function, got {type(found).__name__}")
    return found


def build(make: Callable[[], Any], device: str | torch.device = "meta") -> nn.Module:
    """The model that `make` makes on a device without values, which allocates no weight.

    Args:
        make: called without arguments.
        device: "meta", or any device under fake tensors.

    Raises:
        ValueError: it gives no model, or needs the value of a tensor.
    """
    # Truncated normal numbers are drawn again until they lie inside, which needs values.
    no_draw = patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor)
    try:
        with torch.device(device), no_draw:
            model = make()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--model: it is called without arguments, and made without values: {first_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model: expected an nn.Module, got {type(model).__name__}")
    return model


def first_line(error: BaseException) -> str:
    """An error in one line, its type before it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- what trains


def check_bucket_mb(bucket_mb: float | None) -> None:
    """None leaves it to `shard`.

    Raises:
        ValueError: no size that `shard` takes.
    """
    if bucket_mb is not None and not 0 < bucket_mb <= 2**14:
        raise ValueError(f"--bucket-mb: expected a size above 0 and at most 16384, got {bucket_mb:g}")


def entries_of_count(parameters: int, precision: str, bucket_mb: float | None) -> tuple[Entry, ...]:
    """A model of which only the size is known: matrices of so many MiB, by default 8, and a last one with the rest.

    Raises:
        ValueError: too many of them to plan with.
    """
    numel = max(1, int((bucket_mb or 8.0) * MIB) // ITEMSIZE[precision])
    whole, rest = divmod(parameters, numel)
    if whole > MOST_MATRICES:
        raise ValueError(
            f"--bucket-mb {bucket_mb:g}: {whole:,} buckets; expected a size that makes {MOST_MATRICES:,} at most"
        )
    return tuple(Entry(f"matrix {index}", n, precision) for index, n in enumerate([numel] * whole + [rest]) if n)


def entries_of_model(model: nn.Module, precision: str | Precision) -> tuple[Entry, ...]:
    """What `shard` would train in `model`, in order of registration.

    Raises:
        ValueError: nothing trains.
    """
    policy = as_precision(precision)
    kept = policy.fp32_parameters(model)
    entries = tuple(
        Entry(name, p.numel(), "fp32" if name in kept else policy.param)
        for name, p in model.named_parameters()
        if p.requires_grad
    )
    if not any(entry.numel for entry in entries):
        raise ValueError("--model: it has no parameter that trains")
    return entries


def rest_of_model(model: nn.Module) -> int:
    """Bytes of what does not train and lies whole on each rank: frozen parameters, buffers."""
    tensors = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
