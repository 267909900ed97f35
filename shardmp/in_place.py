"""The user's values, put back where they are: objects, and containers of tensors that somebody else holds too.

Owns:      what can be restored in place, and how.
Takes:     a target (an object with `load_state_dict`, a tensor, an array, a container of these) and what was saved of it.
Gives:     the target with the saved values in it; or an error, by the place in it, before anything is changed.
Invariant: no tensor that a caller holds is left with an old value in silence: it is written, or it is an error.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DICTS = (dict, OrderedDict, Counter)


def is_object(target: Any) -> bool:
    """Whether it has a state of its own."""
    return hasattr(target, "load_state_dict")


def is_kept(target: Any) -> bool:
    """Whether it is restored in place: it can change, so that somebody may hold it and expect the change."""
    kinds = (Tensor, np.ndarray, list, set, deque, *_DICTS)
    return is_object(target) or isinstance(target, kinds) or (isinstance(target, tuple) and any(map(is_kept, target)))


def check(target: Any, value: Any, where: str) -> None:
    """Whether `restore` can.

    Raises:
        TypeError, ValueError: no; it says at which place, what was expected and what was saved.
    """
    if is_object(target):
        return
    if isinstance(target, (Tensor, np.ndarray)):
        _check_elements(target, value, where)
    elif isinstance(target, _DICTS):
        _check_kind(target, value, where, dict)
        for key, item in target.items():
            if key in value:
                check(item, value[key], f"{where}[{key!r}]")
            elif holds_elements(item):
                raise ValueError(f"{where}[{key!r}]: the checkpoint has no such entry; it has {_some(list(value))}")
    elif isinstance(target, (list, tuple, deque)):
        _check_kind(target, value, where, type(target))
        if len(target) != len(value) and (isinstance(target, tuple) or any(map(holds_elements, target))):
            raise ValueError(f"{where}: expected {len(target)} items, the checkpoint has {len(value)}")
        for number, (item, saved) in enumerate(zip(target, value, strict=False)):
            check(item, saved, f"{where}[{number}]")
    elif isinstance(target, set):
        _check_kind(target, value, where, set)


def restore(target: Any, value: Any) -> Any:
    """Write `value`, which `check` has passed, into the target.

    Returns:
        What belongs in the target's place: itself, or the value where it cannot change.
    """
    if is_object(target):
        target.load_state_dict(value)
    elif isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(value)
    elif isinstance(target, np.ndarray):
        np.copyto(target, value)
    elif isinstance(target, _DICTS):
        made = {key: restore(target[key], item) if key in target else item for key, item in value.items()}
        target.clear()
        target.update(made)
    elif isinstance(target, (list, deque)):
        items = [restore(item, saved) for item, saved in zip(target, value, strict=False)]
        items += list(value)[len(items) :]
        target.clear()
        target.extend(items)
    elif isinstance(target, set):
        target.clear()
        target.update(value)
    elif isinstance(target, tuple) and is_kept(target):
        for item, saved in zip(target, value, strict=True):
            restore(item, saved)
    else:
        return value
    return target


def holds_elements(target: Any) -> bool:
    """Whether it is, or contains, a tensor, an array or an object: what somebody else may hold."""
    if isinstance(target, _DICTS):
        return any(map(holds_elements, target.values()))
    if isinstance(target, (list, tuple, deque)):
        return any(map(holds_elements, target))
    return isinstance(target, (Tensor, np.ndarray)) or is_object(target)


def _check_elements(target: Any, value: Any, where: str) -> None:
    _check_kind(target, value, where, Tensor if isinstance(target, Tensor) else np.ndarray)
    for what in ("shape", "dtype"):
        own, saved = getattr(target, what), getattr(value, what)
        if own != saved:
            raise ValueError(f"{where}: expected {what} {_plain(own)}, the checkpoint has {_plain(saved)}")


def _check_kind(target: Any, value: Any, where: str, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{where}: expected a {type(target).__name__}, the checkpoint has a {type(value).__name__}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value


def _some(keys: list[Any]) -> str:
    return ", ".join(map(repr, keys[:8])) + (" ..." if len(keys) > 8 else "") if keys else "none"
