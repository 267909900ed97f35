"""torch's 16-bit products beside shardmp's own on this CPU, operator by operator.

Owns:      the operators, in the sizes of small training runs; the two ways to compute each.
Takes:     nothing but this machine, on one thread.
Gives:     a table of times with what shardmp chooses here (`shardmp.products`), beside the better of the two; with --rows
           this CPU's rows for the table in shardmp/products.py.
Invariant: the choice itself is never made from these times while a program runs; who changes the table does it here.

    python benchmarks/products.py                # what is chosen, beside the better of the two (aim: at most 1.1)
    python benchmarks/products.py --rows         # Row(...) for shardmp/products.py
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardmp import products, tensorcore
from shardmp.products import (
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    KINDS,
    MATRIX,
    NAMES,
    OWN,
    RECURRENT,
    TORCH,
)

AIM = 1.1
FP32 = "fp32"
Work = Callable[[], object]
# Makes the work in a dtype; `scale` divides the sizes, for a trial.
Make = Callable[[torch.dtype, int], Work]


@dataclass
class Operator:
    """One operator in one size. times: CPU seconds in each round, by dtype's name and who computes; none where it cannot."""

    kind: str
    name: str
    make: Make
    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def seconds(self, dtype: str, who: str) -> float:
        """The median of the rounds; inf where torch has no kernel."""
        found = self.times.get((dtype, who))
        return statistics.median(found) if found else math.inf

    def to_fp32(self, dtype: str, who: str) -> float:
        return self.seconds(dtype, who) / self.seconds(FP32, TORCH)


def _there_and_back(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Work:
    grad = torch.ones_like(call())

    def work() -> object:
        return torch.autograd.grad(call(), leaves, grad)

    return work


def _linear(rows: int, inner: int, outer: int) -> Make:
    def make(dtype: torch.dtype, scale: int) -> Work:
        layer = nn.Linear(inner // scale, outer // scale, dtype=dtype, device="cpu")
        x = torch.randn(rows, inner // scale, dtype=dtype, device="cpu").requires_grad_()
        return _there_and_back(lambda: layer(x), (x, *layer.parameters()))

    return make


def _bmm(dtype: torch.dtype, scale: int) -> Work:
    a = torch.randn(24, 128 // scale, 64, dtype=dtype, device="cpu").requires_grad_()
    b = torch.randn(24, 64, 128 // scale, dtype=dtype, device="cpu").requires_grad_()
    return _there_and_back(lambda: a @ b, (a, b))


def _convolution(transposed: bool, backward: bool) -> Make:
    def make(dtype: torch.dtype, scale: int) -> Work:
        width = 64 // scale
        layer = (
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1, dtype=dtype, device="cpu")
            if transposed
            else nn.Conv2d(width, width, 3, padding=1, dtype=dtype, device="cpu")
        )
        x = torch.randn(8, width, 16, 16, dtype=dtype, device="cpu").requires_grad_()
        if not backward:
            return torch.no_grad()(lambda: layer(x))
        leaves = (x, *layer.parameters())
        y = layer(x)
        grad = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)

    return make


def _attention(dtype: torch.dtype, scale: int) -> Work:
    q, k, v = (
        torch.randn(4, 6, 128 // scale, 64, dtype=dtype, device="cpu").requires_grad_() for _ in range(3)
    )  # what a GPT of 384 has
    return _there_and_back(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v))


def _lstm(dtype: torch.dtype, scale: int) -> Work:
    layer = nn.LSTM(256 // scale, 256 // scale, dtype=dtype, device="cpu")
    x = torch.randn(32, 16, 256 // scale, dtype=torch.float32, device="cpu")

    def call() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16 if dtype is torch.float32 else dtype, enabled=dtype != torch.float32):
            return layer(x)[0]

    return _there_and_back(call, tuple(layer.parameters()))


def operators() -> list[Operator]:
    return [
        Operator(MATRIX, "Linear(384, 1536), 512 rows", _linear(512, 384, 1536)),
        Operator(MATRIX, "Linear(2048, 2048), 1 row", _linear(1, 2048, 2048)),
        Operator(MATRIX, "bmm, 24 x 128 x 64", _bmm),
        Operator(CONVOLUTION, "Conv2d(64, 64, 3)", _convolution(False, False)),
        Operator(CONVOLUTION, "ConvTranspose2d(64, 64, 4)", _convolution(True, False)),
        Operator(CONVOLUTION_BACKWARD, "Conv2d(64, 64, 3)", _convolution(False, True)),
        Operator(CONVOLUTION_BACKWARD, "ConvTranspose2d(64, 64, 4)", _convolution(True, True)),
        Operator(ATTENTION, "4 x 6 heads x 128 x 64, causal", _attention),
        Operator(RECURRENT, "LSTM(256, 256), 32 x 16", _lstm),
    ]


# -- measuring


def measure(rounds: int, scale: int, at_least: float) -> list[Operator]:
    """All operators in all ways, a round after the other, so that what disturbs the machine disturbs all alike.

    Args:
        at_least: seconds for which each is repeated in each round, at least once.
    """
    found = operators()
    ways = [(torch.float32, FP32, TORCH)] + [
        (dtype, name, who) for dtype, name in NAMES.items() for who in (TORCH, OWN)
    ]
    unable: set[tuple[int, str, str]] = set()
    for round_number in range(rounds + 1):  # the first is not counted
        for index, operator in enumerate(found):
            for dtype, name, who in ways:
                if (index, name, who) in unable:
                    continue
                seconds = _time(operator, dtype, who, scale, at_least)
                if seconds is None:
                    unable.add((index, name, who))
                elif round_number:
                    operator.times.setdefault((name, who), []).append(seconds)
    tensorcore.disable()
    return found


def _time(operator: Operator, dtype: torch.dtype, who: str, scale: int, at_least: float) -> float | None:
    """CPU seconds of one call; None where torch has no kernel."""
    tensorcore.disable()
    if who == OWN:
        tensorcore.enable(dtype, dict.fromkeys(KINDS, OWN))
    try:
        work = operator.make(dtype, scale)
        work()
    except RuntimeError as error:
        if who == TORCH and dtype is not torch.float32 and "primitive" in str(error):
            return None
        raise
    # CPU time: on one thread it is the wall's, but for what other processes take of it.
    calls, start = 0, time.process_time()
    while not calls or time.process_time() - start < at_least:
        work()
        calls += 1
    return (time.process_time() - start) / calls


# -- showing


def chosen(found: Sequence[Operator]) -> tuple[list[str], list[tuple[float, str]]]:
    """A table in Markdown, and how much longer than the better of the two each takes that shardmp chooses here."""
    lines = [
        "| product | dtype | torch, to FP32 | shardmp, to FP32 | chosen here | to the better |",
        "|---|---|---|---|---|---|",
    ]
    beside: list[tuple[float, str]] = []
    for operator in found:
        for dtype, name in NAMES.items():
            who = products.chosen_here(dtype)[operator.kind]
            both = {w: operator.to_fp32(name, w) for w in (TORCH, OWN)}
            ratio = both[who] / min(both.values())
            beside.append((ratio, f"{name} {operator.kind}, {operator.name}"))
            shown = ["no kernel" if math.isinf(value) else f"{value:.2f}" for value in both.values()]
            lines.append(
                f"| {operator.kind}: {operator.name} | {name} | {shown[0]} | {shown[1]} | {who} | {ratio:.2f} |"
            )
    return lines, beside


def summary(beside: Sequence[tuple[float, str]]) -> str:
    worst, where = max(beside)
    held = sum(ratio <= AIM for ratio, _ in beside)
    return f"products: {held} of {len(beside)} within {AIM} of the better of the two; the worst {worst:.2f} ({where})"


def rows(found: Sequence[Operator]) -> list[str]:
    """This CPU's rows for the table in shardmp/products.py; its name and flags are for who puts them in."""
    lines = [f"# {' '.join(sorted(products.flags())) or 'no flag that decides'}; torch {torch.__version__}"]
    for name in NAMES.values():
        lines.append(f"{name}:")
        for kind in KINDS:
            of = [operator for operator in found if operator.kind == kind]
            # The geometric mean over the sizes, as it does not depend on which of the two is the yardstick.
            both = {who: math.exp(statistics.fmean(math.log(o.to_fp32(name, who)) for o in of)) for who in (TORCH, OWN)}
            who = TORCH if both[TORCH] < both[OWN] else OWN
            taken = "_NEVER" if math.isinf(both[TORCH]) else f"{both[TORCH]:.2f}"
            lines.append(f"    {kind}: Entry({who.upper()}, MEASURED, torch={taken}, own={both[OWN]:.2f})")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all operators (default 5)")
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of each in each round (default 0.1)")
    parser.add_argument("--scale", type=int, default=1, help="divide the sizes by this, for a trial of the program")
    parser.add_argument("--rows", action="store_true", help="print this CPU's rows for shardmp/products.py")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the load average is {load:.1f}: something else is running, and times will be wrong", file=sys.stderr)
    found = measure(options.rounds, options.scale, options.seconds)
    if options.rows:
        print("\n".join(rows(found)))
        return
    lines, beside = chosen(found)
    print("\n".join([*lines, "", summary(beside)]))


if __name__ == "__main__":
    main()
