"""Interrupted anywhere: a call is broken off at each of its moments, and what is left is looked at.

Owns       the tracer: which lines of shardmp run in a call, in threads that it starts too, and which of its functions
           return; an exception at one of these moments.
Takes      a `Trial`: how to make a fresh state, the call, and what must hold afterwards.
Gives      a `Tally`: how many lines there were, how often each outcome was seen, and each moment after which it was none.
Invariant: each exception meets a state of its own, and is raised once.

A moment is a line that is about to run, at its first or its last time in the call, or a function's return, whose value is
lost: that is how Ctrl-C and a failed allocation come, after a C function has done its work.
"""

from __future__ import annotations

import dis
import functools
import gc
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import shardmp

OURS = str(Path(shardmp.__file__).parent)
KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError)
# What a suspended frame hands out is no return, and raising there would end it without its `finally`.
_SUSPENDS = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
WORDS = "injected by the test"


@dataclass(frozen=True)
class Moment:
    """The `count`th time that a line is about to run, or that a function returns from it."""

    file: str
    line: int
    event: str
    count: int

    @property
    def is_first(self) -> bool:
        """Whether it is a line's first time."""
        return self.event == "line" and self.count == 1

    def __str__(self) -> str:
        when = "" if self.count == 1 else f", time {self.count}"
        return f"{Path(self.file).name}:{self.line} ({self.event}{when})"


def _traced(trace: Callable[..., Any], call: Callable[[], Any]) -> Any:
    before = sys.gettrace()
    gc.collect()  # what is left of other trials ends here, and not at a moment of this one
    gc.disable()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
        gc.enable()


def moments_of(call: Callable[[], Any]) -> list[Moment]:
    """All moments of a call, in order of their first time."""
    seen: Counter[tuple[str, int, str]] = Counter()

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if _is_moment(frame, event):
            seen[frame.f_code.co_filename, frame.f_lineno, event] += 1
        return local

    _traced(lambda frame, event, arg: local if _is_ours(frame.f_code) else None, call)
    return [Moment(*place, count) for place, times in seen.items() for count in dict.fromkeys((1, times))]


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def _is_moment(frame: FrameType, event: str) -> bool:
    if event == "return":
        return not frame.f_code.co_flags & _SUSPENDS
    return event == "line" and frame.f_lasti not in _ends_of_with(frame.f_code)


@functools.cache
def _ends_of_with(code: CodeType) -> set[int]:
    """Where `with` calls `__exit__`: the tracer sees its line again, but Python looks for no signal there."""
    instructions = list(dis.get_instructions(code))
    found = set()
    for index, instruction in enumerate(instructions):
        rest = instructions[index:]
        while rest and rest[0].opname in ("SWAP", "NOP", "COPY", "PUSH_EXC_INFO"):
            rest = rest[1:]
        nones = [i.opname == "LOAD_CONST" and i.argval is None for i in rest[:3]]
        if nones == [True] * 3 or (rest and rest[0].opname == "WITH_EXCEPT_START"):
            found.add(instruction.offset)
    return found


def interrupted_at(
    call: Callable[[], Any], moment: Moment, kind: type[BaseException]
) -> tuple[bool, BaseException | None]:
    """Make the call and raise at one moment of it: whether the moment came, and what came out of the call."""
    count = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == moment.event and frame.f_lineno == moment.line and _is_moment(frame, event):
            count += 1
            if count == moment.count:
                raise kind(WORDS)
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename == moment.file and count < moment.count else None

    came_out: BaseException | None = None
    try:
        _traced(trace, call)
    except BaseException as error:
        came_out = error
    return count >= moment.count, came_out


# -- trials


class Trial:
    """One kind of call. A subclass makes a fresh state, makes the call, and says what is left after an exception."""

    name = ""
    thorough = False
    """Raise both kinds at each moment; otherwise they take turns."""
    others = 0.25
    """The share of the moments that are no line's first time which is tried; those are tried all."""

    def make(self) -> Any:
        """A fresh state, the same each time."""
        raise NotImplementedError

    def call(self, state: Any) -> Any:
        """The call that is interrupted."""
        raise NotImplementedError

    def outcome(self, state: Any, error: BaseException | None) -> str:
        """What is left: "before", "after" or "refused".

        Raises:
            AssertionError: anything else.
        """
        raise NotImplementedError


@dataclass
class Tally:
    """What the interruptions of one trial have left."""

    name: str
    lines: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        tried = sum(self.outcomes.values()) + len(self.failures)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.name}: {self.lines} lines, {tried} interruptions: {counts}, {len(self.failures)} failed"


def interrupt_everywhere(trial: Trial, *, share: float = 1.0, seed: int = 0, only: Iterable[Moment] = ()) -> Tally:
    """Interrupt a call at each of its moments, by each kind of exception.

    Args:
        share: of the interruptions, chosen by `seed`.
        only: these moments alone, to look at a failure.
    """
    trial.call(trial.make())  # what is made once in a process, such as caches, is made before
    gc.collect()
    gc.freeze()  # collecting torch's own objects before each call would take longer than the call
    state = trial.make()
    moments = moments_of(lambda: trial.call(state))
    tally = Tally(trial.name, len({(m.file, m.line) for m in moments if m.event == "line"}))
    chance = random.Random(f"{seed} {trial.name}")
    chosen = list(only) or [m for m in moments if m.is_first or trial.thorough or chance.random() < trial.others]
    cases = [
        (moment, kind)
        for number, moment in enumerate(chosen)
        for kind in (KINDS if trial.thorough else KINDS[number % 2 :][:1])
    ]
    if share < 1:
        cases = chance.sample(cases, max(1, round(share * len(cases))))
    for moment, kind in cases:
        state = trial.make()
        came, error = interrupted_at(lambda state=state: trial.call(state), moment, kind)  # type: ignore[misc]
        try:
            assert came, "the moment did not come again: the call is not the same each time"
            tally.outcomes[trial.outcome(state, error)] += 1
        except BaseException as failure:
            where = traceback.extract_tb(failure.__traceback__)[-1]
            text = f"{type(failure).__name__}: {failure}"
            tally.failures.append(f"{kind.__name__} at {moment}: {text} ({Path(where.filename).name}:{where.lineno})")
            del failure
    gc.unfreeze()
    return tally
