"""What the first rank shows while a run goes on, and what it writes down; every other rank's Display is silent.

In a terminal there is a progress bar, elsewhere a plain line every few seconds. The metrics file is JSON Lines, flushed
line by line: it is complete whenever and however a run ends. Nothing here is a collective.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from shardmp import ShardedOptimizer, StepReport

PLAIN_INTERVAL = 5.0  # seconds between two plain lines where there is no terminal


def scale_text(scale: float) -> str:
    """A loss scale as people speak of it: 2^16."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def duration_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class NumbersBelow(Progress):
    """A progress bar with a line of numbers below it: both fit a terminal of 80 columns."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.numbers)


class Display:
    """Shows and records a run of `steps` steps; `with` runs the progress bar.

    Args:
        active: whether this rank shows and writes anything.
        steps: of the whole run.
        metrics: the JSON Lines file, made anew.
        append: go on in a file that is there, for a run that is resumed.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, active: bool, steps: int, metrics: Path, append: bool = False) -> None:
        self.active = active
        self.steps = steps
        self.console = Console(quiet=not active, highlight=False)
        self._file: TextIO | None = None
        if active:
            sys.stdout.reconfigure(errors="replace")  # a sample may hold what this terminal cannot show
            try:
                metrics.parent.mkdir(parents=True, exist_ok=True)
                self._file = metrics.open("a" if append else "w", encoding="utf-8")
            except OSError as error:
                raise ValueError(f"--metrics {metrics}: {error.strerror}") from None
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self._bar = NumbersBelow(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=self.console,
            expand=True,
            transient=True,  # the last numbers are said in the summary
            disable=not (active and terminal),
        )
        self._task = self._bar.add_task("", total=steps)
        self._ends: deque[float] = deque(maxlen=11)  # when the last ten steps ended: the speed that is shown
        self._last_plain = -math.inf

    def __enter__(self) -> "Display":
        self._bar.start()
        self._ends.append(time.monotonic())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def release(self) -> None:
        """Gives the terminal its cursor and a fresh line, before an exit without clean-up."""
        self.console.show_cursor()
        self.console.print()

    def say(self, text: str, end: str = "\n") -> None:
        """Text above the progress bar, or among the plain lines, where a line stays one line however long it is."""
        self.console.print(text, end=end, markup=False, soft_wrap=not self.console.is_terminal)

    def write(self, kind: str, **values: Any) -> None:
        """One line of the metrics file. An inf or a NaN becomes null: strict JSON has no word for it."""
        if self._file is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self._file.write(json.dumps({"kind": kind, **finite}, default=str) + "\n")
            self._file.flush()

    def step(self, step: int, report: StepReport, optimizer: ShardedOptimizer, lr: float, tokens: int) -> None:
        """A step's numbers: into the file, onto the bar or a plain line, and a line of its own for each overflow."""
        if not self.active:
            return
        self._ends.append(time.monotonic())
        seconds = self._ends[-1] - self._ends[-2]
        mean = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        overflow, skipped_steps = report.overflow, optimizer.skipped_steps
        self.write(
            "step",
            step=step,
            loss=report.loss,
            loss_scale=report.loss_scale,
            grad_norm=report.grad_norm,
            skipped=report.skipped,
            skipped_steps=skipped_steps,
            overflow=overflow and str(overflow),
            lr=lr,
            tokens_per_second=tokens / seconds,
        )
        if overflow:
            scales = f"{scale_text(report.loss_scale)} -> {scale_text(optimizer.loss_scale)}"
            self.say(f"step {step}: overflow, {overflow}: skipped, loss scale {scales}")
        norm = "-" if report.skipped else f"{report.grad_norm:.2f}"
        left = f"{duration_text(mean * (self.steps - step))} left"
        numbers = (
            f"loss {report.loss:.3f}  scale {scale_text(report.loss_scale)}  norm {norm}  {skipped_steps} skipped  "
            f"{tokens / mean:,.0f} tokens/s"
        )
        self._bar.numbers = numbers
        self._bar.update(self._task, completed=step, description=left)
        if self._bar.disable and (step in (1, self.steps) or self._ends[-1] - self._last_plain >= PLAIN_INTERVAL):
            self._last_plain = self._ends[-1]
            self.say(f"step {step}/{self.steps}  {numbers}  {left}")

    def validation(self, step: int, loss: float) -> None:
        self.write("validation", step=step, loss=loss)
        self.say(f"step {step}: validation loss {loss:.3f}")
        self._ends.clear()  # validation is no part of the next step's time
        self._ends.append(time.monotonic())

    def summary(
        self,
        losses: dict[str, float],
        optimizer: ShardedOptimizer,
        unsharded: dict[str, int],
        sent: float,
        backwards: int,
    ) -> None:
        """The run's last losses, and a rank's bytes: counted, by the formulas, and in the same training unsharded.

        Args:
            losses: by name.
            optimizer: says what it holds and what it should hold.
            unsharded: bytes by kind.
            sent: bytes per step that this rank was seen to send.
            backwards: per step; each is reduced.
        """
        columns = {"held": optimizer.memory(), "predicted": optimizer.predicted_memory(), "unsharded": unsharded}
        predicted_sent = optimizer.predicted_wire_bytes(backwards)
        skipped_steps = optimizer.skipped_steps
        self.write(
            "summary",
            steps=self.steps,
            skipped_steps=skipped_steps,
            **losses,
            **columns,
            sent_per_step=sent,
            predicted_sent_per_step=predicted_sent,
        )
        said = ", ".join(f"{name.replace('_', ' ')} {loss:.3f}" for name, loss in losses.items())
        self.say(f"{self.steps} steps, {skipped_steps} skipped: {said}\n")
        self.say("MB per rank; unsharded is plain mixed precision with FP32 masters, 16 bytes per parameter")
        table = Table()
        table.add_column()
        for heading in columns:
            table.add_column(heading, justify="right")
        for kind in unsharded:
            name = "buckets in flight" if kind == "buckets" else kind
            table.add_row(name, *(f"{column[kind] / 1e6:,.2f}" for column in columns.values()))
        table.add_section()
        table.add_row("together", *(f"{sum(column.values()) / 1e6:,.2f}" for column in columns.values()))
        table.add_row("sent per step", f"{sent / 1e6:,.2f}", f"{predicted_sent / 1e6:,.2f}", "-")
        self.console.print(table)
