"""What a forward and a backward hold, traced on fake tensors: `shardmp budget --batch`.

Owns:      the batch as people write it, and the three ways in which a model is traced: FP32, autocast, shardmp's own.
Takes:     a function that makes the model, a batch, a loss.
Gives:     `Activations` in bytes, and the largest batch that fits.
Invariant: no tensor is allocated and no kernel runs; bytes are those of the same run on real tensors of that device.

A fake tensor has a shape, a dtype and a device, and autograd keeps it as it keeps a real one. Kernels differ by device
(a CUDA kernel of attention or dropout keeps other tensors than a CPU's), and so does autocast: a trace speaks of its device.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from .api import _lift_what_stays_fp32
from .budget_words import build, first_line, function_at
from .module import ShardedModule
from .precision import DTYPES, Precision, as_precision
from .storages import ACTIVATIONS, COPIES, Storages

WAYS = ("FP32", "autocast", "shardmp")
MOST_ELEMENTS = 10**12
_BATCH_HELP = "shapes such as 4x128:int64, or ids=4x128:int64,labels=4x128:int64"
_BATCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *DTYPES.values(),
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

Make = Callable[[], nn.Module]
Loss = Callable[..., Tensor]


# -- the batch


@dataclass(frozen=True)
class Input:
    """A tensor of a batch; its name where it is a keyword of the forward."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Batch:
    """What the forward is called with. Its size is the first tensor's first dimension."""

    inputs: tuple[Input, ...]

    @property
    def size(self) -> int:
        return self.inputs[0].shape[0]

    def resized(self, size: int) -> Batch:
        """The same with another size: every tensor whose first dimension is the batch's."""
        return Batch(
            tuple(
                replace(one, shape=(size, *one.shape[1:])) if one.shape[0] == self.size else one for one in self.inputs
            )
        )

    def __str__(self) -> str:
        return ",".join(
            f"{one.name + '=' if one.name else ''}{'x'.join(map(str, one.shape))}:{str(one.dtype).removeprefix('torch.')}"
            for one in self.inputs
        )


def parse_batch(text: str) -> Batch:
    """A batch as people write it: "4x128:int64" is one tensor, "ids=4x128:int64,mask=4x128:bool" two keywords.

    Without a dtype it is float32.

    Raises:
        ValueError: it is not one.
    """
    found: list[Input] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?([0-9]{1,15}(?:x[0-9]{1,15}){0,63})(?::(\w+))?", part)
        if not match:
            raise ValueError(f"--batch: expected {_BATCH_HELP}, got {text!r}")
        name, shape, dtype = match[1], tuple(map(int, match[2].split("x"))), match[3] or "float32"
        if dtype not in _BATCH_DTYPES:
            raise ValueError(f"--batch: expected a dtype among {', '.join(_BATCH_DTYPES)}, got {dtype!r}")
        if not all(shape) or math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(f"--batch: expected sizes from 1 on, {MOST_ELEMENTS:.0e} elements at most, got {part!r}")
        if name is None and any(one.name for one in found):
            raise ValueError(f"--batch: a tensor without a name follows one with a name in {text!r}")
        if name is not None and any(one.name == name for one in found):
            raise ValueError(f"--batch: {name} is there twice in {text!r}")
        found.append(Input(name, shape, _BATCH_DTYPES[dtype]))
    return Batch(tuple(found))


def own_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The loss that the model's output holds (as those of transformers do when labels are given), else the output's mean.

    Raises:
        ValueError: the output holds no number that depends on a parameter.
    """
    output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise ValueError("the output holds no tensor that depends on a parameter: name a --loss")
    return torch.stack([leaf.float().mean() for leaf in found]).sum()


# -- the trace


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank's forward and backward hold beside parameters, gradients and buffers.

    Attributes:
        kept: alive between forward and backward: what autograd saved, and what else refers to a tensor.
        copies: 16-bit copies of FP32 weights, which autocast makes, alive between forward and backward.
        peak: the most that is alive at any moment, copies included, parameters' gradients not.
        most: the same with the gradients that exist at that moment, where backward leaves them in `.grad`.
        batch: the batch itself.
    """

    kept: int
    copies: int
    peak: int
    most: int
    batch: int

    @property
    def dynamic(self) -> int:
        """What comes and goes with a batch."""
        return self.peak + self.batch


def usual_device() -> torch.device:
    """This machine's: CUDA's kernels can be traced only where torch sees a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Trace:
    """A model as one way of training has it, on fake tensors.

    Args:
        make: makes the model, in FP32.
        way: "FP32"; "autocast", FP32 weights in torch's own way; "shardmp", as the wrapper that `shard` returns.
        precision: the 16 bits of the latter two.
        loss: called with the model and the batch's tensors; gives the loss.
        device: whose kernels are traced.
    """

    def __init__(
        self,
        make: Make,
        way: str,
        precision: str | Precision = "fp16",
        loss: Loss = own_loss,
        device: torch.device | None = None,
    ) -> None:
        assert way in WAYS
        self._device = device or usual_device()
        self._way, self._policy, self._loss = way, as_precision(precision), loss
        self._mode = _OneMode()
        with self._inside(), warnings.catch_warnings():
            # A deep copy asks whether a tensor has memory, and torch warns of the question.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            model = build(make, self._device)
            weights = [p for p in model.parameters() if p.requires_grad]
            self._weights = weights
            self.model = self._sharded(model) if way == "shardmp" else model
            self._rest = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
            for weight in weights:
                weight.register_post_accumulate_grad_hook(self._take if way == "shardmp" else self._keep)
        self._storages = Storages([])

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with self._mode, torch.device(self._device):
            yield

    def _sharded(self, model: nn.Module) -> nn.Module:
        """The model in the wrapper that `shard` puts around it, on parameters of `shard`'s dtypes."""
        policy, parts = self._policy, _NoParts(self._device)
        _lift_what_stays_fp32(model, policy)
        kept = policy.fp32_parameters(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32 if name in kept else policy.dtype)
        none = {"broadcast_buffers": False, "drop_gradients": lambda _: None, "check_model": lambda: None}
        return ShardedModule(model, policy, parts, parts, parts, **none)  # type: ignore[arg-type]

    def _keep(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._storages.is_gradient(parameter.grad)

    def _take(self, parameter: Tensor) -> None:
        parameter.grad = None  # into its bucket, and freed: [Note: who owns a gradient] in gradients

    @property
    def rest(self) -> int:
        """Bytes of what does not train, whole on each rank: frozen parameters and buffers."""
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in self._rest)}
        return sum(storage.nbytes() for storage in storages.values())

    def __call__(self, batch: Batch) -> Activations:
        """Trace a forward and a backward.

        Raises:
            ValueError: the model cannot be run on this batch, or needs the values of a tensor; it says why.
        """
        gc.collect()  # what an earlier trace has left in a cycle would be freed during this one
        with self._inside():
            inputs = [(one.name, one.tensor(self._device)) for one in batch.inputs]
            args = [tensor for name, tensor in inputs if name is None]
            kwargs = {name: tensor for name, tensor in inputs if name is not None}
            given = [tensor for _, tensor in inputs]
            self._storages = storages = Storages(self._weights, [*self._rest, *given])
            try:
                with storages:
                    with self._autocast():
                        loss = self._loss(self.model, *args, **kwargs)
                    kept = dict(storages.bytes)
                    loss.backward()
            except (Exception, SystemExit) as error:
                raise ValueError(f"--batch {batch}: {self._way}: {first_line(error)}") from error
            finally:
                for weight in self._weights:
                    weight.grad = None
        return Activations(
            kept=kept[ACTIVATIONS],
            copies=kept[COPIES],
            peak=storages.peak[ACTIVATIONS] + storages.peak[COPIES],
            most=storages.most,
            batch=sum(tensor.untyped_storage().nbytes() for tensor in given),
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._way != "autocast":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._policy.dtype)


class _OneMode(FakeTensorMode):
    """A mode of which no copy exists: a fake tensor holds its mode, and a deep copy of a module copies what tensors hold.

    torch refuses to mix tensors of two modes, and every `nn.TransformerEncoder` deep-copies its layer.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneMode:
        return self


class _NoParts:
    """What `ShardedModule` asks of the parts that `shard` wires, where nothing is gathered and nothing reduced."""

    gathering: frozenset[int] = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_ready(self) -> None:
        """Always: nothing is under way."""


# -- what a budget asks


@dataclass(frozen=True)
class Traced:
    """The ways in which a model can be trained here, traced with one batch."""

    batch: Batch
    device: torch.device
    traces: dict[str, Trace]
    found: dict[str, Activations]

    @property
    def ours(self) -> int:
        """Bytes that this batch brings and takes, as shardmp runs the model."""
        return self.found["shardmp"].dynamic

    def ours_at(self, size: int) -> int:
        """The same at another batch size."""
        return self.traces["shardmp"](self.batch.resized(size)).dynamic


def trace(model: Make | str, batch: str, loss: Loss | str | None, policy: Precision, device: str | None) -> Traced:
    """Trace a model in FP32, under autocast and as shardmp runs it.

    Raises:
        ValueError: no such device here; a batch that the model does not take.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here, and only where it does can CUDA's kernels be traced")
    place = torch.device(device) if device else usual_device()
    make = function_at(model, "--model") if isinstance(model, str) else model
    step = function_at(loss, "--loss") if isinstance(loss, str) else loss
    made = parse_batch(batch)
    ways = [way for way in WAYS if way != "autocast" or policy.dtype != torch.float32]
    traces = {way: Trace(make, way, policy, step or own_loss, place) for way in ways}
    return Traced(made, place, traces, {way: one(made) for way, one in traces.items()})


def largest(bytes_of: Callable[[int], int], first: int, limit: int, most: int = 2**24) -> int:
    """The largest batch size whose bytes stay within `limit`; 0 where not even 1 does.

    Bytes grow with the batch, nearly in proportion: the size is guessed from a line through two sizes, and then tried;
    the answer was tried itself, and so was the next larger size, which does not fit.

    Args:
        bytes_of: bytes at a batch size.
        first: a size to begin with.
        most: no larger batch is tried.
    """
    tried: dict[int, int] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = bytes_of(size)
        return tried[size] <= limit

    low, high = 0, most + 1  # low fits or is 0; high does not fit
    guess = min(first, most)
    while high - low > 1:
        low, high = (guess, high) if fits(guess) else (low, guess)
        guess = _guess(tried, low, high, limit)
    return low


def _guess(tried: dict[int, int], low: int, high: int, limit: int) -> int:
    """A size strictly between `low` and `high`: where the line through the nearest two sizes meets the limit."""
    sizes = sorted(tried, key=lambda size: abs(tried[size] - limit))[:2]
    if len(sizes) == 1:
        guess = 2 * sizes[0] if low else sizes[0] // 2
    elif len(tried) > 8 or tried[sizes[0]] == tried[sizes[1]]:  # no line: halve what is left
        guess = (low + high) // 2
    else:
        a, b = sizes
        guess = int(a + (limit - tried[a]) * (b - a) / (tried[b] - tried[a]))
    return max(low + 1, min(high - 1, guess))  # where the guess is `low`, whether the next one fits is left to know
