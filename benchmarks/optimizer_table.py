"""The table of docs/optimizers.md: how each optimizer class of each library is stepped, or why it is refused.

    python benchmarks/optimizer_table.py

Owns:      the list of libraries, and how their classes are found: every subclass of torch's Optimizer that they export.
Takes:     what is installed of torch, schedulefree, prodigyopt, transformers, bitsandbytes, torchao, pytorch_optimizer.
Gives:     Markdown, a row for each class, made with its default options on a small model. It trains nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardmp.checks import check_optimizer
from shardmp.probe import probe
from shardmp.routes import takes_flags

LIBRARIES = {
    "torch": "torch.optim",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "transformers": "transformers.optimization",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
    "pytorch_optimizer": "pytorch_optimizer",
}
ROUTES = {
    "fused": "fused kernels, nothing waits for the host",
    "tiled": "tile by tile",
    "once": "once a step over the rank's whole shard",
}
# What a class's constructor asks for beside parameters.
ARGUMENTS = {"lr": 0.01, "momentum": 0.9, "num_iterations": 100, "total_steps": 100, "model": None}


def make_model() -> nn.Module:
    """Matrices of more than 4096 elements, which 8-bit classes keep in 8 bits, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 8))


def classes(library: str) -> Iterator[tuple[str, Any]]:
    """The optimizer classes that a library exports, by name.

    Raises:
        ImportError: it is not installed.
    """
    module = importlib.import_module(LIBRARIES[library])
    for name, value in sorted(vars(module).items()):
        if not inspect.isclass(value) or not issubclass(value, Optimizer) or value is Optimizer:
            continue
        if value.__module__.startswith("torch.optim") and library != "torch":
            continue
        if not inspect.isabstract(value) and not name.startswith(("_", "Base", "Optimizer")):
            yield name, value


def _made(kind: Any, model: nn.Module) -> Optimizer:
    """The class on the model's parameters; on its matrices alone where it takes no others."""
    wanted = [
        name
        for name, parameter in list(inspect.signature(kind).parameters.items())[1:]
        if parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if [name for name in wanted if name not in ARGUMENTS]:
        raise TypeError("its constructor takes more than parameters and numbers: " + ", ".join(wanted))
    options = {name: ARGUMENTS[name] for name in wanted}
    try:
        return kind(model.parameters(), **options)
    except Exception as error:
        if "momentum" in str(error):
            return kind(model.parameters(), **options, momentum=0.9)
        model.requires_grad_(False)
        matrices = [p.requires_grad_() for p in model.parameters() if p.dim() == 2]
        return kind(matrices, **options)


def row(kind: Any) -> tuple[str, str]:
    """(route or "refused", reason) of one class."""
    model = make_model()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            optimizer = _made(kind, model)
        except Exception as error:
            return "not tried", _short(error)
        try:
            check_optimizer(model, optimizer)
            found = probe(optimizer)
        except (TypeError, ValueError) as error:
            return "refused", _short(error)
        if found.once:
            changed = sorted(found.options | found.attributes)
            return "once", "writes " + ", ".join(f"`{name}`" for name in changed)
        return ("fused" if takes_flags(optimizer) else "tiled"), ""


def _short(error: Exception) -> str:
    """The part of a refusal that says why, as the table has it: without numbers that a machine may round otherwise."""
    text = " ".join(str(error).split())
    text = re.sub(r"^(shard\(optimizer\): )?optimizer \w+( \(group \d+\))?:? ", "", text)
    text = re.sub(r"needs whole parameters: ", "", text)
    text = re.sub(r"a trial step on pieces differs by \S+ from the step on the whole: ", "", text)
    text = re.sub(r"\. Sharded state needs an elementwise optimizer.*", "", text)
    text = re.sub(r", (\S+|-?\d\S*) on whole parameters and \S+ on pieces: ", ": ", text)
    return text.replace("|", "/")[:170]


def eager(function: Any = None, **_: Any) -> Any:
    """In the place of torch.compile, with which some classes' steps take a quarter of a minute."""
    return eager if function is None else function


def table(library: str) -> list[str]:
    """The rows of a library, as Markdown.

    Raises:
        ImportError: it is not installed.
    """
    compile_, torch.compile = torch.compile, eager  # type: ignore[assignment]
    try:
        lines = ["| class | stepped | because |", "|---|---|---|"]
        for name, kind in classes(library):
            result, why = row(kind)
            lines.append(f"| `{name}` | {result} | {why} |".replace("|  |", "| |"))
        return lines
    finally:
        torch.compile = compile_


def main() -> None:
    for library in LIBRARIES:
        print(f"\n### {library}\n")
        try:
            print("\n".join(table(library)))
        except ImportError as error:
            print(f"not installed here: {error}")


if __name__ == "__main__":
    main()
