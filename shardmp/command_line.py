"""What every command of `shardmp` does alike: errors, exit codes, help, and how things are printed.

Owns:      the one place where an exception becomes one line and an exit code; what `--help` shows of each command.
Takes:     a command's function; text and tables to print.
Gives:     `command`, the decorator that makes a command, `say` and `show`.
Invariant: no command ends with a traceback, whatever it was given (SHARDMP_TRACEBACK=1 asks for one): what the user did
           wrong is one line on stderr and exit code 2, what failed or was found damaged is one line and exit code 1.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperCommand

USAGE_ERROR, FAILURE = 2, 1
PIPE_CLOSED = 141  # a shell's code for SIGPIPE, which is what `cat` would end with
COLUMNS = 80  # the narrowest terminal that tables are made for
TRACEBACK = "SHARDMP_TRACEBACK"
_MACHINE = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # no mistake of the user's


def say(text: str, stderr: bool = True) -> None:
    """One message as it is: never wrapped, so that it can be copied and searched for.

    Names out of files are in it: what is not printable (an escape sequence) does not reach the terminal as it is.
    """
    text = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
    Console(stderr=stderr, highlight=False, emoji=False).print(text, soft_wrap=True, markup=False)


def show(found: RenderableType) -> None:
    """Tables on stdout, uncut: in 80 columns without vertical lines where they are too wide with them."""
    console = Console(highlight=False, width=max(COLUMNS, Console().width))
    for table in found.renderables if isinstance(found, Group) else [found]:
        if isinstance(table, Table) and Measurement.get(console, console.options, table).maximum >= console.width:
            table.box, table.padding, table.pad_edge, table.show_edge = box.SIMPLE_HEAD, (0, 0), False, False
            for column in table.columns:
                column.overflow, column.no_wrap = "fold", column.justify == "right"
    console.print(found)


def command(app: typer.Typer, name: str, example: str, **settings: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a function a command of `app`; `example` is a whole command line, which its help shows."""
    return app.command(name, cls=_Command, epilog=f"Example: {example}", **settings)


class _Command(TyperCommand):
    """A command whose help is whole and whose errors are one line."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        # Left to itself, the list of commands cuts each text after some forty letters.
        self.short_help = (self.help or "").split("\n\n")[0].replace("\n", " ")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Numbers are finite: an inf or a NaN passes every comparison with a bound that is written carelessly."""
        rest = super().parse_args(ctx, args)
        for option in self.params:
            value = ctx.params.get(option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"expected a finite number, got {value}", ctx=ctx, param=option)  # type: ignore[arg-type]
        return rest

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # what this terminal cannot show
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # here, and not when Python ends, where its failure would be a traceback
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            _leave_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            if hasattr(error, "show") or os.environ.get(TRACEBACK):
                raise  # a mistake in the options, which is printed with the usage; or a traceback that was asked for
            text, code = told(error)
            _leave_stdout()
            with contextlib.suppress(OSError):
                say(f"shardmp {self.name}: error: {text}")
            raise typer.Exit(code) from None


def _leave_stdout() -> None:
    """What could not be written stays unwritten: Python tries once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def told(error: Exception) -> tuple[str, int]:
    """An exception as one line, and the exit code for it."""
    from .manifest import CheckpointError

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, CheckpointError):
        return text, FAILURE
    if isinstance(error, MemoryError):
        return f"not enough memory: {text}", FAILURE
    if isinstance(error, OSError):
        return text, FAILURE if error.errno in _MACHINE else USAGE_ERROR
    if isinstance(error, (ValueError, OverflowError)) or type(error) is RuntimeError:
        return text, USAGE_ERROR
    return f"unexpected {type(error).__name__}: {text} ({TRACEBACK}=1 shows where)", FAILURE
