"""Plain Python values as JSON and tensors, and back.

Owns:      what may stand in a checkpoint's `extra`: no pickle, so that reading can run no code.
Takes:     the values of schedulers, data loaders and users.
Gives:     JSON text, and the tensors that it names by number.
Invariant: decode(encode(x)) is x: types, floats to the last bit, the order of dicts.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .pickle_reading import DTYPES
from .regular_files import shown

_PAIRS: dict[str, Any] = {"map": dict, "ordered": OrderedDict, "counter": Counter}
_LISTS: dict[str, Any] = {"tuple": tuple, "set": set, "deque": deque}


def dumps(value: Any, where: str, tensors: list[Tensor] | None = None) -> bytes:
    """JSON of `value`.

    Args:
        where: what it is called, for the error.
        tensors: where its tensors are appended; None writes their bytes into the JSON (small ones).

    Raises:
        TypeError: something that cannot be stored, with its place.
    """
    return json.dumps(_encode(value, where, tensors), separators=(",", ":")).encode()


def loads(text: bytes, tensors: dict[int, Tensor] | None = None) -> Any:
    """The value of `dumps`.

    Raises:
        ValueError: the text is not what `dumps` writes.
    """
    try:
        return _decode(json.loads(text), tensors or {})
    except Exception as error:  # of whatever kind: the text may be any
        told = shown(error.args[0] if error.args else None)
        raise ValueError(f"a stored value is damaged: {type(error).__name__}: {told}") from None


def _encode(value: Any, where: str, tensors: list[Tensor] | None) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value.detach(), tensors)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return _tagged(kind, _text(array.tobytes()), dtype=array.dtype.str, shape=list(np.shape(value)))
    if type(value) is bytes:
        return _tagged("bytes", _text(value))
    if type(value) is list:
        return [_encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
    if type(value) is dict and "!" not in value and all(type(key) is str for key in value):
        return {key: _encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
    for name, made in _PAIRS.items():
        if type(value) is made:
            items = [[_encode(k, where, tensors), _encode(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]
            return _tagged(name, items)
    if isinstance(value, torch.Size):
        value = tuple(value)
    for name, made in _LISTS.items():
        if type(value) is made:
            more = {"maxlen": value.maxlen} if type(value) is deque else {}
            return _tagged(name, [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)], **more)
    raise TypeError(
        f"{where}: a {type(value).__name__} cannot be stored; expected None, numbers, strings, bytes, tensors, numpy arrays, "
        "and lists, tuples, sets and dicts of them, or an object with state_dict()"
    )


def _tagged(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"!": kind, "v": value, **more}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encode_tensor(value: Tensor, tensors: list[Tensor] | None) -> dict[str, Any]:
    if tensors is not None:
        tensors.append(value)
        return _tagged("tensor", len(tensors) - 1)
    data = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return _tagged("values", _text(data), dtype=str(value.dtype).removeprefix("torch."), shape=list(value.shape))


def _decode(value: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "!" not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind, content = value["!"], value["v"]
    if kind == "tensor":
        return tensors[content]
    if kind == "values":
        stored = base64.b64decode(content)
        dtype, shape = DTYPES["torch", value["dtype"]], value["shape"]
        if math.prod(shape) * dtype.itemsize != len(stored):
            raise ValueError(f"a tensor of {len(stored)} bytes has another shape")
        return torch.frombuffer(bytearray(stored) or bytearray(dtype.itemsize), dtype=dtype)[: math.prod(shape)].view(
            shape
        )
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in ("array", "number"):
        element = np.dtype(str(value["dtype"]))
        if element.hasobject:
            raise ValueError("an array of objects")
        array = np.frombuffer(bytearray(base64.b64decode(content)), element).reshape(value["shape"])
        return array if kind == "array" else array[()]
    if kind in _PAIRS:
        return _PAIRS[kind]({_decode(k, tensors): _decode(v, tensors) for k, v in content})
    items = [_decode(item, tensors) for item in content]
    return deque(items, value["maxlen"]) if kind == "deque" else _LISTS[kind](items)


# -- random numbers


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the generators that a training script draws from: Python's, numpy's, torch's, this device's."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue as `random_state` was.

    Raises:
        ValueError: it is not the state of random generators; no generator has been changed.
    """
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        if not 0 <= state["numpy"][2] <= 624:  # numpy takes any, and reads what lies behind its table
            raise ValueError("numpy's position is beyond its table")
    except Exception as error:  # of whatever kind: the values may be any
        raise ValueError(f"the stored random state is damaged: {error}") from None
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
