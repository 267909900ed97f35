"""Small models and ways of looking that several test files share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import shardmp
from shardmp import tensorcore
from shardmp.collectives import Collectives
from shardmp.neighbours import SWITCH, Neighbours
from shardmp.products import VARIABLE


class Weights(nn.Module):
    """The model W of the cases: one parameter, `(w * x).float().sum()`."""

    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4) if values is None else values.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).float().sum()


def sharded(model: nn.Module, optimizer: Callable[..., Any] = torch.optim.SGD, lr: float = 0.5, **options: Any) -> Any:
    """`shard` with an optimizer made on the spot; keywords that `shard` knows go there, the rest to the optimizer."""
    known = {"precision", "stage", "reduce", "average", "max_grad_norm", "bucket_mb", "overlap", "buffers", "group"}
    ours = {key: options.pop(key) for key in list(options) if key in known}
    return shardmp.shard(model, optimizer(model.parameters(), lr=lr, **options), **ours)


def masters(optimizer: shardmp.ShardedOptimizer) -> dict[str, Tensor]:
    """All whole FP32 masters. Collective."""
    return {name: optimizer.master(name).clone() for name in optimizer._names}


def same_on_all_ranks(value: Any) -> bool:
    """Whether every rank holds an equal value (tensors by bits). Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return all(equal(told[0], other) for other in told)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


class _Late:
    """Works whose rows arrive only when they are awaited."""

    def __init__(self, works: list[Any], moves: list[tuple[Tensor, Tensor]]) -> None:
        self._works, self._moves = works, moves

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for target, source in self._moves:
            target.copy_(source)


@contextlib.contextmanager
def late_gathers() -> Iterator[None]:
    """Until a gather is awaited, the peers' rows hold NaN: a read that does not wait shows at once, and always.

    Rows come through sockets, as from another host: those of neighbours are there when `step` returns.
    """
    start_gather, read_rows = Collectives.start_gather, Collectives.read_neighbours_rows

    def start(self: Collectives, tag: int, rows: Tensor) -> list[Any]:
        arriving = rows.clone()
        neighbours, self.neighbours = self.neighbours, Neighbours()
        works = start_gather(self, tag, arriving)
        self.neighbours = neighbours
        moves = []
        for peer in range(self.world_size):
            if peer != self.rank:
                rows[peer].fill_(torch.nan)
                moves.append((rows[peer], arriving[peer]))
        return [_Late(works, moves)] if works else []

    Collectives.start_gather = start  # type: ignore[method-assign]
    Collectives.read_neighbours_rows = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Collectives.start_gather = start_gather  # type: ignore[method-assign]
        Collectives.read_neighbours_rows = read_rows  # type: ignore[method-assign]


@contextlib.contextmanager
def through_sockets() -> Iterator[None]:
    """Models that are sharded here send rows through sockets, on one host too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        yield


@contextlib.contextmanager
def products_apart(setting: str | None = None) -> Iterator[None]:
    """Products are all torch's at first, whatever was enabled in this process before, which comes back in the end.

    Args:
        setting: what SHARDMP_PRODUCTS says meanwhile; None leaves the choice to the kind of CPU.
    """
    before = {dtype: tensorcore.in_use(dtype) for dtype in (torch.float16, torch.bfloat16)}
    tensorcore.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(VARIABLE, raising=False)
            if setting is not None:
                patch.setenv(VARIABLE, setting)
            yield
    finally:
        tensorcore.disable()
        for dtype, choice in before.items():
            tensorcore.enable(dtype, choice)


class OnDevice(TorchFunctionMode):
    """Tensors that a test makes without naming a device lie on this one, with the values that they have on the CPU.

    `torch.set_default_device` would refuse the generators of the CPU that most tests seed.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "device": self._device})
        return func(*args, **kwargs).to(self._device)


class Calls(TorchDispatchMode):
    """Counts the operators that make the host wait for the device, and the largest storage that is made."""

    WAITS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in self.WAITS:
            self.waits.append(name)
        out = func(*args, **(kwargs or {}))
        given = {_pointer(value) for value in _tensors((args, kwargs))}
        for value in _tensors(out):
            if _pointer(value) not in given:
                self.largest = max(self.largest, value.untyped_storage().nbytes())
        return out


def _pointer(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
