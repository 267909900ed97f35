"""`ShardedModule`: the wrapper around the user's model.

Owns:      the forward (autocast, modules that stay FP32, the dtype of outputs) and what may read parameters when.
Takes:     the user's module, whose parameters are views of flat buckets by now.
Gives:     a module with the same keys and current values.
Invariant: no read through the wrapper or through a submodule's forward sees a bucket that is still being gathered.

[Note: every read] A wait on a module's own forward is not enough: MultiheadAttention never calls its `out_proj`, and
a parent may read `self.child.weight`. While a gather is under way the wrapper's forward therefore runs under a torch-
function mode, which sees the arguments of every torch call and waits for the buckets that they are views of, by
storage. A submodule called from outside the wrapper waits for everything.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .buffer_message import BufferMessage
from .buffers import Buffers
from .collectives import Collectives
from .gradients import Gradients
from .parameters import Parameters
from .precision import Precision

# Autocast on the CPU does not know their operators, which refuse FP32 inputs beside 16-bit weights.
CAST_BY_HAND = (nn.Bilinear, nn.AdaptiveLogSoftmaxWithLoss)
# Forwards whose kernels take a 16-bit input beside FP32 weights and statistics and compute in FP32; a cast input would be kept
# for backward, in 4 bytes an element. A subclass with a forward of its own may not.
_TAKES_16_BITS = (
    nn.modules.batchnorm._BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    nn.modules.instancenorm._InstanceNorm.forward,
)


class _WaitForReads(TorchFunctionMode):
    """Waits for a bucket when a torch call is about to read it."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._parameters.gathering:
            self._parameters.ready_for(args)
            if kwargs:
                self._parameters.ready_for(kwargs)
        return func(*args, **(kwargs or {}))


def cast_floating(value: Any, dtype: torch.dtype, *, parameters: bool = True) -> Any:
    """`value` with every floating tensor in it cast to `dtype`; integers, booleans and FP64 are left as they are.

    Lists, tuples, named tuples, dicts, dict-like outputs (such as transformers' ModelOutput) and dataclasses keep their
    type.

    Args:
        parameters: whether parameters are cast too: what a list of them is for, only the model knows.
    """
    if isinstance(value, nn.Parameter) and not parameters:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in (torch.float16, torch.bfloat16, torch.float32) else value
    cast = functools.partial(cast_floating, dtype=dtype, parameters=parameters)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(cast(item) for item in value)
    if isinstance(value, Mapping):
        items = {key: cast(item) for key, item in value.items()}
        try:
            return type(value)(**items) if type(value) is not dict else items
        except TypeError:
            return items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, cast(getattr(value, field.name)))  # frozen ones too
        return copied
    return value


class ShardedModule(nn.Module):
    """The user's model, trained by a `ShardedOptimizer`. Made by `shardmp.shard`.

    `state_dict()`, `parameters()`, `named_parameters()` and their like have the unwrapped model's keys and current
    values. Unknown attributes are those of the wrapped model, which is `module`; its methods run on current weights and in
    the policy's precision.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        collectives: Collectives,
        parameters: Parameters,
        gradients: Gradients,
        *,
        broadcast_buffers: bool,
        drop_gradients: Callable[[bool], None],
        check_model: Callable[[], None],
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._precision = precision
        self._collectives = collectives
        self._parameters_ = parameters
        self._gradients = gradients
        self._drop_gradients = drop_gradients
        self._check_model = check_model
        self._in_forward = False
        self._buffers_of_rank_0 = Buffers(module)
        for name, inner in module.named_modules():
            inner.register_forward_pre_hook(self._before_submodule)
            inner.zero_grad = functools.partial(self._zero_grad_of, name)
            if isinstance(inner, CAST_BY_HAND) and next(inner.parameters()).dtype == precision.dtype:
                inner.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        for kept in precision.fp32_modules(module).values():
            self._compute_in_fp32(kept)
        if broadcast_buffers:
            self._buffer_message = BufferMessage(module.named_buffers(), collectives)
            gradients.at_end.append(self._broadcast_buffers)
        self._is_built = True

    # -- forward

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward in `precision`; its floating outputs come back in FP32 (`Precision.output`)."""
        if self._parameters_.gathering and self._has_compiled_parts():
            self._parameters_.all_ready()  # Dynamo would trace the waiting mode; a compiled part reads everything at once
        args, kwargs = self._inputs(args, kwargs)
        with self._explained(), self._reads_wait(), self._autocast():
            output = self.module(*args, **kwargs)
        return cast_floating(output, torch.float32) if self._precision.output == "fp32" else output

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._precision.autocast:
            return args, kwargs
        return cast_floating(args, self._precision.dtype), cast_floating(kwargs, self._precision.dtype)

    def _has_compiled_parts(self) -> bool:
        return any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in self.modules())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        policy = self._precision
        if not policy.autocast or policy.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._collectives.device.type, policy.dtype)

    @contextlib.contextmanager
    def _reads_wait(self) -> Iterator[None]:
        if self._in_forward or not self._parameters_.gathering:
            yield
            return
        self._in_forward = True
        try:
            with _WaitForReads(self._parameters_):
                yield
        finally:
            self._in_forward = False
        self._parameters_.all_ready()  # what this forward did not read; nothing is left to hide it under

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Torch's words for a part that was cast or moved name neither the part nor who did it."""
        try:
            yield
        except RuntimeError:
            self._check_model()
            raise

    def _before_submodule(self, module: nn.Module, args: Any) -> None:
        if not self._in_forward:
            self._parameters_.all_ready()

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floating(args, self._precision.dtype), cast_floating(kwargs, self._precision.dtype)

    def _compute_in_fp32(self, kept: nn.Module) -> None:
        """Give a module a forward with autocast off. Not by hooks: Dynamo cannot trace a region that they share."""
        inner = kept.forward
        device, policy = self._collectives.device.type, self._precision
        takes_16_bits = type(kept).forward in _TAKES_16_BITS

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, enabled=False):
                if not takes_16_bits:
                    args, kwargs = cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)
                output = inner(*args, **kwargs)
            # Without autocast nobody would cast the FP32 output for the next layer.
            return output if policy.autocast else cast_floating(output, policy.dtype)

        kept.forward = forward

    # -- gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing, as in DistributedDataParallel.

        Stage 1 adds whole gradients up in FP32 (4 bytes per parameter while it does), and the next backward outside
        reduces them. Stage 2 reduces each backward, and needs no such promise: there this changes nothing.
        """
        before = self._gradients.synchronising
        try:
            self._gradients.synchronising = before and not self._gradients.local_sums
            yield
        finally:
            self._gradients.synchronising = before

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Rank 0's buffers, in one call, at the end of a backward: a rank without data runs no forward."""
        if self._collectives.world_size == 1:
            return
        buffers = dict(self.module.named_buffers())
        flat = self._buffer_message.pack(buffers)
        if not flat.numel():
            return
        self._collectives.broadcast(flat)
        for name, values in self._buffer_message.unpack(flat):
            self._buffers_of_rank_0.write(buffers[name], values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were accumulated since the last step."""
        self._drop_gradients(set_to_none)

    def _zero_grad_of(self, name: str, set_to_none: bool = True) -> None:
        """`zero_grad` of the wrapped model, or of a part of it, in whose place it is."""
        if not name:
            self._drop_gradients(set_to_none)
        elif self._gradients.backwards:
            raise RuntimeError(
                f"{name}.zero_grad() between backward and step: gradients of a part are in shards already, with those of all. "
                "Keep a part out of a loss with requires_grad_(False) or detach(), or drop all with optimizer.zero_grad()"
            )

    # -- the same keys and current values as the unwrapped model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped model's, up to date."""
        self._parameters_.all_ready()
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The wrapped model's."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped model's: parameters are the rounding of the masters; for FP32 masters see `optimizer.master`."""
        self._parameters_.all_ready()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, on every rank the same, and renew the masters from them.

        Raises:
            ValueError: `assign=True`, which would take parameters out of their buckets.
            RuntimeError: keys or shapes differ; what fits has been loaded, as in torch.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the sharded parameters; use assign=False")
        self._parameters_.all_ready()
        result, refusal = None, None
        with self._collectives.all_or_nothing("load_state_dict()"):
            try:
                result = self.module.load_state_dict(state_dict, strict=strict)
            except RuntimeError as error:
                if not str(error).startswith("Error(s) in loading state_dict"):
                    raise
                refusal = error  # torch raises it when it has loaded what fits
            self._parameters_.renew_masters()
        if refusal is not None:
            raise refusal
        return result

    # -- attributes, which are the wrapped model's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
        return self._in_precision(found) if inspect.ismethod(found) else found

    def _is_own(self, name: str) -> bool:
        return "_is_built" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_built" in self.__dict__ and name == "module":
            raise RuntimeError("model.module = ... after shard(): the new module would not train; shard a new model")
        if self._is_own(name):
            super().__setattr__(name, value)
        if name == "training" or not self._is_own(name):
            setattr(self.module, name, value)  # where the wrapped model's code reads it

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """The wrapped model's."""
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """The wrapped model's; a trainable parameter is refused at the next step, since it has no masters."""
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        """The wrapped model's; trainable parameters in it are refused at the next step, since they have no masters."""
        self.module.add_module(*args, **kwargs)

    register_module = add_module

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        """The wrapped model's."""
        return self.module.register_state_dict_pre_hook(hook)

    def register_state_dict_post_hook(self, hook: Any) -> Any:
        """The wrapped model's."""
        return self.module.register_state_dict_post_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        """The wrapped model's."""
        return self.module.register_load_state_dict_pre_hook(hook)

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """The wrapped model's."""
        return self.module.register_load_state_dict_post_hook(hook)

    def _in_precision(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the wrapped model (such as transformers' `generate`) on current weights, computed as forward does.

        Its floating outputs come back as those of forward do; a parameter that it returns stays the parameter.
        """

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._parameters_.all_ready()
            args, kwargs = self._inputs(args, kwargs)
            with self._explained(), self._autocast():
                output = method(*args, **kwargs)
            return self._items(output) if inspect.isgenerator(output) else self._result(output)

        return call

    def _items(self, generator: Iterator[Any]) -> Iterator[Any]:
        """What a method that is a generator yields: its body runs between the items, and reads weights there."""
        while True:
            self._parameters_.all_ready()
            with self._explained(), self._autocast():
                try:
                    item = next(generator)
                except StopIteration:
                    return
            yield self._result(item)

    def _result(self, output: Any) -> Any:
        return cast_floating(output, torch.float32, parameters=False) if self._precision.output == "fp32" else output

    # -- what would silently break the flat views

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        raise RuntimeError(
            "moving or casting a model after shard() would take its parameters out of their buckets: move or cast it "
            "before, and choose the dtype with shard(precision=...)"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # The first thing that DistributedDataParallel asks a module for.
        raise RuntimeError(
            "DistributedDataParallel around a sharded model: its gradients are reduced already; call the model itself, and "
            "model.no_sync() where you called DDP's"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError("DataParallel around a sharded model: start one rank for each device, with torchrun")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "deepcopy of a sharded model would share its collectives: copy the plain model before shard(), or load "
            "model.state_dict() into a new one"
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("a sharded model cannot be pickled: save model.state_dict(), or use shardmp.save")
