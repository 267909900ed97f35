"""A backward inside another one.

Owns:      how it is recognised: by Python's frames.
Takes:     the moment at which the first gradient of a backward has arrived.
Gives:     an error where that backward runs inside another's.
Invariant: the end of the inner backward is never taken for the end of backward.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


def refuse_inside_another_backward() -> None:
    """Where a loss is scaled, backward begins with it; a plain `loss.backward()` begins with the first gradient, which may
    lie in a backward that a custom function runs inside its own: the end of that one is not the end of backward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION_BACKWARD:
            raise RuntimeError(
                "a gradient arrived from a backward inside loss.backward() (reentrant activation checkpointing runs one): call "
                "optimizer.backward(loss), or use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        frame = frame.f_back
