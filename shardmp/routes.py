"""Which way an optimizer is stepped, and what of its groups decides it.

Owns:      the choice of a route, and what follows where an option is written later that decides a kernel or a state.
Takes:     the optimizer's class and groups, which every rank has alike.
Gives:     a `Route`; an error, on every rank, where torch could not go on with what was written.
Invariant: nothing is changed here, and ranks come to the same end.

[Note: three routes] Adam, AdamW, Adagrad and SGD have fused kernels that take a divisor and a skip flag from the
device: FUSED. They step bucket by bucket on whole pieces, and nothing waits for the host. Their state exists before the
first step with the values that torch would give: a skipped first step would otherwise leave SGD's momentum
uninitialised. Other classes, and SGD with momentum and dampening (whose first step differs), wait for the flag on the
host and step tile by tile, so that temporaries are one tile: TILED. Classes that change more than parameters and their
state are stepped ONCE, see `Update`; their temporaries may be as large as their shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from . import inner
from .layout import UNIT
from .probe import Findings, brief, trial_options
from .tiles import seeded

# Options beside flags that decide what state or which kernel a class has, where they are not 0.
_DECIDING = ("momentum", "dampening")


class Route(Enum):
    """How an optimizer is stepped: see [Note: three routes]."""

    FUSED = "bucket by bucket; kernels take divisor and skip flag from the device"
    TILED = "tile by tile"
    ONCE = "once a step, over all pieces"


def takes_flags(optimizer: Optimizer) -> bool:
    """Whether every group can run the fused kernels with divisor and skip flag on the device."""
    if type(optimizer) not in (Adam, AdamW, Adagrad, SGD):
        return False
    for group in optimizer.param_groups:
        if any(p.is_meta for p in group["params"]):  # there are no kernels to take them
            return False
        chosen = group.get("fused") or (group.get("fused") is None and group.get("foreach") is None)
        if not chosen or group.get("differentiable"):
            return False
        if isinstance(optimizer, SGD) and group["momentum"] and group["dampening"]:
            return False
        if isinstance(optimizer, Adagrad) and any(p.device.type != "cpu" for p in group["params"]):
            return False
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    kind: Any = type(optimizer)
    return all(honours_flags(kind, device) for device in devices)


@cache
def honours_flags(kind: Any, device: torch.device) -> bool:
    """Whether a class's fused kernel divides by the attribute `grad_scale` and skips by `found_inf`.

    Both are torch's agreement with its GradScaler; a kernel that knew nothing of them would train without a word.
    """
    results = []
    for scale, skip in ((1.0, 0.0), (4.0, 0.0), (4.0, 1.0)):
        parameter = nn.Parameter(torch.ones(UNIT, dtype=torch.float32, device=device))
        optimizer = kind([parameter], lr=0.25, fused=True)
        parameter.grad = torch.full_like(parameter, scale)
        optimizer.grad_scale = torch.full((), scale, dtype=torch.float32, device=device)
        optimizer.found_inf = torch.full((), skip, dtype=torch.float32, device=device)
        inner.step(optimizer)
        results.append(parameter.detach())
    plain, scaled, skipped = results
    return torch.equal(plain, scaled) and bool((skipped == 1).all()) and not torch.equal(plain, skipped)


def _decides(key: str, value: Any) -> bool:
    return value is None or isinstance(value, bool) or key in _DECIDING


def deciding(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of the groups decides which state or kernel the class has: flags, options that are left to it, momentum.

    Of the rest, that it is there.
    """
    return [
        {
            key: (bool(value) if key in _DECIDING else value) if _decides(key, value) else ...
            for key, value in group.items()
        }
        for group in groups
    ]


def try_options(
    optimizer: Optimizer,
    findings: Findings,
    first: Sequence[dict[str, Any]],
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    device: torch.device,
    *,
    stepped: bool,
) -> None:
    """Whether the class can go on with the options of `after`, as it would in torch.

    Args:
        first: the groups' options at the beginning, where counters among them were those of a new state.
        before: up to now. stepped: whether a step was made with them.

    Raises:
        ValueError: it cannot; every rank finds the same.
    """
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        parameter = nn.Parameter(torch.ones(UNIT, dtype=torch.float32, device=device))
        start, then = (
            {
                key: value if _decides(key, value) else first[number].get(key, value)
                for key, value in options.items()
                if key in first[number] or key not in findings.options
            }
            for options in (old, new)
        )
        trial = inner.trial_copy(optimizer, [{**trial_options(start if stepped else then), "params": [parameter]}])
        if findings.seeds[number]:
            trial.state[parameter] = seeded(findings.seeds[number], parameter)
        parameter.grad = torch.ones_like(parameter)
        was, now = deciding([old, new])
        written = [key for key in {**was, **now} if was.get(key) != now.get(key)]
        try:
            with torch.no_grad():
                if stepped:
                    inner.step(trial)
                own = trial.param_groups[0]
                for key in written:
                    own.pop(key, None)
                    if key in then:
                        own[key] = then[key]
                for _ in range(2):
                    inner.step(trial)
        except Exception as error:
            changed = ", ".join(f"{key} from {brief(old.get(key))} to {brief(new.get(key))}" for key in written)
            raise ValueError(
                f"optimizer {type(optimizer).__name__}, group {number}: {changed} was written after shard(), and the class "
                f"cannot go on with it ({type(error).__name__}: {error}): write it before the first step, or before shard()"
            ) from error
