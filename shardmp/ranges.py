"""Named ranges of a step for profilers: shardmp.forward_wait, .reduce, .verdict, .update, .gather.

Owns nothing. Takes a name. Gives a context in which what is done bears that name in a trace of `torch.profiler`, and in
NVTX under `torch.autograd.profiler.emit_nvtx`. Invariant: without a profiler it costs a look at a flag; torch's own range costs
tens of microseconds then too, which is as much as a bucket's messages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.autograd import profiler

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_NOTHING = contextlib.nullcontext()


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context whose work is called `name` in traces."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def in_range(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """As a decorator: the function's work is called `name` in traces."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def ranged(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with named_range(name):
                return function(*args, **kwargs)

        return ranged

    return decorate
