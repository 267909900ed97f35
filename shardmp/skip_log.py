"""Skipped steps are told: one line each, on rank 0, to the logger "shardmp".

Owns:      the words of a skip: what overflowed, where, how the loss scale moved, and what cures it.
Takes:     the report of a step that is over.
Gives:     one WARNING for each skipped step; Python prints it to stderr where the program has set up no logging.
Invariant: nothing waits: a step is told when the host looks at its report anyway (the next step, `save`, `synchronize`),
           and at the end of the program only if its report has arrived.

[Note: cures] A line has its cure or its likely cause at the 1st, 4th, 16th, 64th, ... skip: every skip is told, the advice
is not repeated each time.
"""

from __future__ import annotations

import logging
import os

from .precision import Precision
from .report import Overflow, StepReport

logger = logging.getLogger("shardmp")
_EARLY = 100  # steps in which a scale that starts too high finds its place


class SkipLog:
    """What one optimizer has told of its skips.

    Args:
        precision: says whether there is a loss scale, and how it starts.
        rank: of the optimizer's ranks; the first one speaks.
    """

    def __init__(self, precision: Precision, rank: int) -> None:
        self._precision = precision
        self._speaks = rank == 0
        self._process = os.getpid()
        self._waiting: StepReport | None = None
        self._skips = 0
        self._overflow: Overflow | None = None  # of the last skip that was told
        self._in_a_row = 0

    def expect(self, report: StepReport) -> None:
        """A step has ended; whether it was skipped need not be known yet."""
        self._waiting = report

    def tell(self) -> None:
        """Log the last step if it was skipped and has not been told. Waits for its report as reading it does."""
        report, self._waiting = self._waiting, None
        if report is None or not self._speaks or report.withheld:
            return
        overflow = report.overflow
        if overflow is None:
            self._in_a_row = 0
            return
        self._skips += 1
        self._in_a_row += 1
        advice = f". {self._advice(report, overflow)}" if _is_power_of_4(self._skips) else ""
        self._overflow = overflow
        logger.warning("step %d was skipped on all ranks: %s%s%s", report.step, overflow, self._move(report), advice)

    def at_end(self) -> None:
        """At the end of the program, or of the optimizer: tell what has arrived by now."""
        if self._waiting is not None and self._process == os.getpid() and self._waiting.arrived:
            self.tell()

    def _move(self, report: StepReport) -> str:
        """How the loss scale moved; nothing in BF16 and FP32, which have none."""
        if not self._precision.has_loss_scale:
            return ""
        before, after = report.loss_scale, report.next_loss_scale
        return f"; loss scale {before:g}, unchanged" if before == after else f"; loss scale {before:g} -> {after:g}"

    def _advice(self, report: StepReport, overflow: Overflow) -> str:
        policy = self._precision
        if overflow.loss_not_finite:
            return "A loss that is inf or NaN comes from the data or the forward: no loss scale cures it"
        if not policy.has_loss_scale:
            return (
                f"Gradients of {policy.param} reach as far as FP32's: an inf or a NaN comes from the data, the model or a "
                f"run that diverges, not from the precision{self._where(overflow)}"
            )
        if policy.static_scale is not None:
            return f"The static loss scale {policy.static_scale:g} is too large for this gradient: choose a smaller one"
        if report.next_loss_scale <= policy.min_scale:
            return f"The loss scale is at its smallest, {policy.min_scale:g}: {self._diverges()}{self._where(overflow)}"
        if report.step <= _EARLY and report.loss_scale <= policy.init_scale:
            usual = "default " if policy.init_scale == Precision().init_scale else ""
            return (
                f"The {usual}initial scale {policy.init_scale:g} is lowered until gradients fit: normal in the first steps; "
                f'Precision("fp16", init_scale=...) starts lower'
            )
        if self._in_a_row < 3:
            return (
                f"Now and then this is normal: after {policy.growth_interval} steps without overflow the scale is tried "
                f"{policy.growth_factor:g} times as high"
            )
        return f"{self._in_a_row} steps in a row: {self._diverges()}{self._where(overflow)}"

    @staticmethod
    def _diverges() -> str:
        return (
            "gradients grow, as in a run that diverges: lower the learning rate, clip (max_grad_norm), or train in BF16"
        )

    def _where(self, overflow: Overflow) -> str:
        """What this skip and the one before have in common, which is where to look."""
        before = self._overflow
        if before is None:
            return ""
        ranks = set(before.ranks) & set(overflow.ranks)
        names = [name for name in overflow.parameters if name in before.parameters]
        said = [f"rank {', '.join(map(str, sorted(ranks)))}'s data"] if ranks and ranks != {0} else []
        said += [f"parameter {names[0]}"] if len(names) == 1 else []
        return f" (again: {' and '.join(said)})" if said else ""


def _is_power_of_4(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1
