"""What one rank checks before it tells the others anything: the model, the optimizer, and a scaler to share.

Owns nothing. Takes what the user gave to `shard`. Gives errors that name the module, parameter or option, what was expected
and what came. Invariant: nothing is sent and nothing is changed.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import products, tensorcore
from .buffers import unexpanded
from .collectives import Collectives
from .module import ShardedModule
from .optimizer import ShardedOptimizer
from .precision import DTYPES, Precision
from .unfinished import Unfinished


def check_scaler(policy: Precision, collectives: Collectives, scaler: Any) -> None:
    """Whether a scale can be shared with the optimizer that the user named.

    Raises:
        TypeError, ValueError: no, by name.
    """
    if scaler is None:
        return
    if not isinstance(scaler, ShardedOptimizer):
        raise TypeError(f"shard(scaler=...): expected a ShardedOptimizer, got {type(scaler).__name__}")
    if not policy.has_loss_scale or not scaler.precision.has_loss_scale:
        raise ValueError(
            f"shard(scaler=...): only FP16 has a loss scale to share, got precision {policy.param!r} beside "
            f"{scaler.precision.param!r}; leave it out"
        )
    differing = policy.other_scale_options(scaler.precision)
    if differing:
        raise ValueError(
            f"shard(scaler=...): the loss scale is that of the other optimizer, but {', '.join(differing)} differ: give both "
            "the same Precision"
        )
    if not scaler.shares_ranks_with(collectives):
        raise ValueError("shard(scaler=...): the other optimizer is sharded over other ranks, which see other verdicts")


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in found], [p for _, p in found]


def check_model(model: nn.Module, policy: Precision, device: torch.device) -> None:
    """Whether the model can be sharded, and trained in this precision on this device.

    Raises:
        TypeError, ValueError: no, by name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard(model): expected an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        if isinstance(module, (ShardedModule, nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise TypeError(f"shard(model): {where} shards or replicates already; hand in the plain model")
        if isinstance(module, nn.SyncBatchNorm) and device.type == "cpu":
            raise TypeError(f"shard(model): {where} has no CPU kernel in torch; use BatchNorm, or train on GPUs")
        if any(
            isinstance(getattr(hook, "__self__", None), (ShardedModule, Unfinished))
            for hook in module._forward_pre_hooks.values()
        ):
            raise TypeError(f"shard(model): {where} was given to shard() before; hand in a new model")
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise TypeError(f"shard(model): {where} makes sparse gradients; make it with sparse=False")
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            _check_tensor(f"{kind} {name}", tensor, device)
    for name, p in model.named_parameters():
        if p.is_quantized:
            raise TypeError(f"shard(model): parameter {name} is quantised ({p.dtype}); expected a floating dtype")
        if p.requires_grad and p.dtype not in DTYPES.values():
            raise TypeError(
                f"shard(model): parameter {name} is {p.dtype}; trainable parameters are FP32, FP16 or BF16 (masters "
                "are FP32)"
            )
    _check_memory(model)
    _check_statistics(model, policy)
    if not trainable(model)[1]:
        raise ValueError("shard(model): no parameter requires a gradient")
    kept = tuple(policy.fp32_modules(model))
    if policy.dtype != torch.float32 and device.type == "cpu":
        products.setting()
        refused = tensorcore.refusals(model, kept, dtype=policy.dtype, autocast=policy.autocast)
        if refused:
            raise ValueError("shard(model): " + "; ".join(refused))


def _check_tensor(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Whether a parameter or buffer is one dense tensor of this process."""
    if nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"shard(model): {what} is lazy and has no shape yet: run one forward before the optimizer is made, and then shard()"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"shard(model): {what} is a {type(tensor).__name__}, which has its values in other tensors (fully_shard and tensor "
            "parallelism make such, and quantisation); expected a plain dense tensor: hand in the plain model"
        )
    if tensor.is_meta and device.type != "meta":
        raise TypeError(f"shard(model): {what} is on the meta device: materialise it first")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"shard(model): {what} has layout {tensor.layout}; expected a dense one"
            + (": keep its indices and values as two buffers" if what.startswith("buffer") else "")
        )


def _check_memory(model: nn.Module) -> None:
    """Trainable parameters move into buckets: none may share memory with another tensor of the model, or inside itself."""
    trains = {id(p) for p in trainable(model)[1]}
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and not tensor.is_meta:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        if id(tensor) in trains and unexpanded(tensor).numel() < tensor.numel():
            raise TypeError(
                f"shard(model): parameter {name} is expanded: several elements are one in memory, which no optimizer can step; "
                "make it from values.expand(...).contiguous(), or expand a smaller parameter in forward"
            )
    for sharing in by_storage.values():
        for (name, tensor), (other, p) in itertools.combinations(sharing, 2):
            if (id(p) in trains or id(tensor) in trains) and _overlap(tensor, p):
                raise TypeError(
                    f"shard(model): {name} and {other} share memory and are two tensors (tied through .data, or a view): they "
                    "would part in the first step. Let both be one nn.Parameter, or compute one from the other in forward"
                )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element's memory in common."""
    ends = [
        (t.storage_offset() * t.element_size(), sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in (a, b)
    ]
    (first, span), (second, other) = ends
    if first + (span + 1) * a.element_size() <= second or second + (other + 1) * b.element_size() <= first:
        return False
    if a.element_size() != b.element_size() or (a.is_contiguous() and b.is_contiguous()):
        return True
    start = min(a.storage_offset(), b.storage_offset())
    end = max(a.storage_offset() + span, b.storage_offset() + other) + 1
    marks = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - start).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - start).any())


def _check_statistics(model: nn.Module, policy: Precision) -> None:
    kept = policy.fp32_parameters(model)
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.track_running_stats
            and policy.param != "fp32"
        ):
            inside = [f"{name}.{inner}" if name else inner for inner, p in module.named_parameters() if p.requires_grad]
            if set(inside) - set(kept):
                raise ValueError(
                    f"shard(model): {name} ({type(module).__name__}) has FP32 statistics, and torch has no kernel for 16-bit "
                    f"weights beside them: keep it in FP32 with keep_fp32=({name!r},)"
                )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Whether the optimizer steps this model's trainable parameters, each once.

    Raises:
        TypeError, ValueError: no, by name.
    """
    if isinstance(optimizer, ShardedOptimizer):
        raise TypeError("shard(optimizer): it is sharded already")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"shard(optimizer): expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if getattr(vars(optimizer).get("step"), "given_to_shard", False):
        raise TypeError("shard(optimizer): it was given to shard() before; hand in a new one")
    if "param_groups" not in vars(optimizer):
        raise TypeError(f"shard(optimizer): {type(optimizer).__name__} wraps another optimizer; hand in the plain one")
    names = {id(p): name for name, p in model.named_parameters()}
    listed: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"shard(optimizer): parameter {position} of group {number}, shape {tuple(p.shape)}, is not one of "
                    "the model's: make the optimizer from model.parameters() after the model is final"
                )
            if id(p) in listed:
                raise ValueError(f"shard(optimizer): {names[id(p)]} is listed twice")
            listed.add(id(p))
    missing = [name for name, p in zip(*trainable(model), strict=True) if id(p) not in listed]
    if missing:
        raise ValueError(
            f"shard(optimizer): {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} require a gradient but are in no "
            "group: add them, or freeze them with requires_grad_(False)"
        )
