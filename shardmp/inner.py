"""A torch optimizer apart from its parameters: copies of it on other groups, and steps that are not the user's step.

Owns:      what of an optimizer object is torch's own, and what is its class's: options of groups, attributes.
Takes:     the optimizer that the user handed in.
Gives:     copies without state and hooks, for the update and for trials; a `step` without hooks.
Invariant: the user's optimizer is not changed, and a hook runs only where the user steps.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# What torch's GradScaler, and `Update`, tell a fused kernel.
FLAGS = ("grad_scale", "found_inf")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_DICT_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# What torch, its schedulers and the fused kernels keep on any optimizer.
_TORCHS = {"state", "param_groups", "step", *FLAGS, "_step_count", "_opt_called"}
_TORCHS |= {"_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", *STEP_HOOKS, *STATE_DICT_HOOKS}


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that its class keeps beside torch's own."""
    return {key: value for key, value in vars(optimizer).items() if key not in _TORCHS}


def fresh_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and attributes on other groups, without state, hooks, or a scheduler's wrapper.

    The constructor is not called: a user's class may take what the groups do not tell.
    """
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        is_own = isinstance(value, MethodType) and value.__self__ is optimizer
        made.__dict__[name] = MethodType(value.__func__, made) if is_own else value
    for name in ("step", *FLAGS):
        made.__dict__.pop(name, None)
    for name in (*STEP_HOOKS, *STATE_DICT_HOOKS):
        made.__dict__[name] = OrderedDict()
    made.state = defaultdict(dict)
    made.param_groups = groups
    return made


def trial_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """As `fresh_copy`, with attributes of its own: a trial may change them. Parameters among them become empty."""
    made = fresh_copy(optimizer, groups)
    memo: dict[int, Any] = {id(optimizer): made, id(optimizer.state): made.state, id(optimizer.param_groups): groups}
    for group in optimizer.param_groups:
        for p in group["params"]:
            memo[id(p)] = nn.Parameter(torch.empty(0, dtype=p.dtype, device=p.device), requires_grad=False)
    for name, value in attributes_of(made).items():
        with contextlib.suppress(Exception):  # a lock, a file, a process group: shared
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()` without torch's global hooks.

    Also where a class's `step` calls its parent's, each with a wrapper of torch's that runs them.
    """
    everywhere: tuple[Any, ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    held = [(hooks, dict(hooks)) for hooks in everywhere if hooks]
    for hooks, _ in held:
        hooks.clear()
    try:
        optimizer.step()
    finally:
        for hooks, kept in held:
            hooks.update(kept)


def wraps_another(optimizer: Optimizer) -> str | None:
    """The name of an attribute that is, or holds, another optimizer."""
    for name, value in attributes_of(optimizer).items():
        if any(isinstance(each, Optimizer) and each is not optimizer for each in _items(value)):
            return name
    return None


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    else:
        yield value


def same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two values of groups or attributes are equal; objects are compared by their attributes, so many levels deep."""
    if a is b or depth == 0 or isinstance(a, (Optimizer, nn.Module)):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], depth - 1) for key in a)
    if isinstance(a, Sequence) and not isinstance(a, (str, bytes)):
        return len(a) == len(b) and all(same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, (int, float, str, bytes, complex, set, frozenset)):
        return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
    return same(vars(a), vars(b), depth - 1) if hasattr(a, "__dict__") else True
