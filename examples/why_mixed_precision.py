"""Each technique of mixed precision, taken away: what is lost, in a real small training: two minutes of one CPU core.

    python examples/why_mixed_precision.py                        # tables
    python examples/why_mixed_precision.py --figure numbers.png   # and a figure (pip install 'shardmp[plot]')

A byte-level GPT of half a million parameters sees the same batches of Python's own documentation in every run. The seeds
are fixed, and one thread computes: a second run on the same machine gives the same figures.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from techniques import (
    BATCH,
    CONTEXT,
    FINE_LR,
    FULL,
    RECIPES,
    Batch,
    Gradients,
    Norm,
    Run,
    is_inner,
    sum_in_16_bits,
    train,
)
from text import Batches, read_text, split_text
from torch import Tensor

import shardmp
from shardmp import formats, tensorcore

HELD_OUT_BATCHES = 16
LENGTHS = (16, 256, 4096, 65536)
INPUTS = (1.0, 10.0, 100.0, 300.0)
FINE_TUNED = ("FP32", FULL.name, "no weight backup", "pure BF16")
LEARNING_RATES = (1e-3, 1e-4, 1e-5, 1e-6)


# -- what was found, as tables


def runs_table(title: str, runs: list[Run]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("run", no_wrap=True)
    for heading in ("training loss", "held out", "to FP32", "skipped", "weights unmoved", "gradients zero", "seconds"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.recipe.name,
            f"{run.last_loss:.3f}",
            f"{run.validation:.4f}",
            f"{run.validation - runs[0].validation:+.4f}",
            str(run.skipped),
            f"{run.unmoved:.1%}",
            f"{run.zero_gradients:.1%}",
            f"{run.seconds:.0f}",
        )
    return table


def underflow_table(seen: Gradients, scales: list[float]) -> Table:
    table = Table(
        "gradients", title="The FP32 run's gradients at its middle step, as FP16 would hold them", title_justify="left"
    )
    for heading in ("loss scale", "lost to zero", "subnormal", "in full", "overflow"):
        table.add_column(heading, justify="right")
    for name, values in (("of activations", seen.activations), ("of weights", seen.weights)):
        for scale in scales:
            found = formats.shares(values, formats.FP16, scale)
            figures = (found.underflow, found.subnormal, found.normal, found.overflow)
            table.add_row(name, f"{scale:g}", *(f"{figure:.2%}" for figure in figures))
    return table


def drift_of_sums(length: int, dtype: torch.dtype) -> float:
    """|sum - exact| / exact of `length` numbers |x|, x normal, added one after another in `dtype`; the mean of 64 sums."""
    numbers = torch.randn(length, 64, generator=torch.Generator().manual_seed(0)).abs_().half()
    exact = numbers.double().sum(0)
    given = numbers.to(dtype)  # FP16 to BF16 rounds: that is part of what is lost
    return ((sum_in_16_bits(given.t()).double() - exact).abs() / exact).mean().item()


def sums_table() -> Table:
    table = Table("numbers added", title="Relative error of a sum, by its length and accumulator", title_justify="left")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for heading in ("FP32", "FP16", "BF16"):
        table.add_column(heading, justify="right")
    for length in LENGTHS:
        table.add_row(str(length), *(f"{drift_of_sums(length, dtype):.1e}" for dtype in dtypes))
    return table


def unmoved_by(weights: Tensor, lr: float, dtype: torch.dtype) -> float:
    """The share of weights that an update of `lr`, AdamW's usual size, leaves as they are in `dtype`."""
    held = weights.to(dtype)
    return ((held.float() - lr).to(dtype) == held).double().mean().item()


def updates_table(weights: Tensor) -> Table:
    table = Table(
        "update", title="Weights of the trained model that an update of this size leaves unmoved", title_justify="left"
    )
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for heading in ("FP32", "FP16", "BF16"):
        table.add_column(heading, justify="right")
    for lr in LEARNING_RATES:
        table.add_row(f"{lr:g}", *(f"{unmoved_by(weights, lr, dtype):.1%}" for dtype in dtypes))
    return table


@torch.no_grad()
def norm_error(size: float, fp32: bool) -> float:
    """The largest error of a LayerNorm of FP16 numbers of standard deviation `size`, inside in FP32 or in FP16."""
    x = (size * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))).half()
    norm = Norm(128).half()
    norm.fp32 = fp32
    exact = torch.nn.functional.layer_norm(x.double(), (128,))
    return (norm(x).double() - exact).abs().max().item()


def norms_table() -> Table:
    table = Table("size of the input", title="Largest error of a LayerNorm, which should give 1", title_justify="left")
    for heading in ("FP32 inside", "FP16 inside"):
        table.add_column(heading, justify="right")
    for size in INPUTS:
        table.add_row(f"{size:g}", *(f"{norm_error(size, fp32):.1e}" for fp32 in (True, False)))
    return table


# -- the figure


def draw(runs: list[Run], seen: Gradients, path: Path) -> None:
    """Loss curves beside histograms of gradients against FP16's range, without and with the scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, *histograms) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for run in runs:
        # A mean over ten steps: single batches differ more than the runs do.
        smooth = torch.tensor(run.losses).unfold(0, min(10, len(run.losses)), 1).mean(1)
        curves.plot(smooth, label=run.recipe.name, linewidth=1.2)
    curves.set(xlabel="step", ylabel="training loss, mean of ten steps")
    curves.legend(fontsize=7)
    scale = next(run.scale for run in runs if run.recipe.scaled)
    for axes, (name, values) in zip(
        histograms, (("activation", seen.activations), ("weight", seen.weights)), strict=True
    ):
        exponents = torch.log2(values[values != 0].abs().double()).numpy()
        bins = range(-50, 17)
        for factor, label in ((1.0, "as they are"), (scale, f"times {scale:g}")):
            moved = exponents + torch.log2(torch.tensor(factor)).item()
            axes.hist(moved, bins=bins, weights=[100 / len(moved)] * len(moved), alpha=0.6, label=label)
        axes.axvspan(-50, -25, color="tab:red", alpha=0.12)
        axes.axvspan(-25, -14, color="tab:orange", alpha=0.12)
        for place, text in ((-45, "zero in FP16"), (-24, "subnormal"), (-10, "in full")):
            axes.text(place, 0.96, text, transform=axes.get_xaxis_transform(), fontsize=8)
        axes.set(xlabel=f"log2 of |{name} gradient|", ylabel="% of them", xlim=(-50, 16))
        axes.legend(fontsize=8, loc="center right")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


# -- the program


def batches(steps: int) -> tuple[list[Batch], list[Batch]]:
    training, held_out = split_text(read_text(None), CONTEXT)
    cpu = torch.device("cpu")
    drawn, kept = Batches(training, CONTEXT, BATCH, 0, cpu), Batches(held_out, CONTEXT, BATCH, 1, cpu)
    return [drawn.draw() for _ in range(steps)], [kept.draw() for _ in range(min(steps, HELD_OUT_BATCHES))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="of each run (default %(default)s)")
    parser.add_argument("--figure", type=Path, help="also draw a figure into this file (needs matplotlib)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps: expected at least 2, got {options.steps}")
    if options.figure and importlib.util.find_spec("matplotlib") is None:
        parser.error("--figure: matplotlib is missing: pip install 'shardmp[plot]'")
    torch.set_num_threads(1)  # a product's last bit may depend on the number of threads
    shardmp.init()
    for dtype in (torch.float16, torch.bfloat16):
        tensorcore.enable(dtype)
    drawn, held_out = batches(2 * options.steps)
    training, fresh = drawn[: options.steps], drawn[options.steps :]
    seen, runs = Gradients(), []
    for recipe in RECIPES:
        runs.append(train(recipe, training, held_out, seen=None if runs else seen))
        print(f"{recipe.name}: held-out loss {runs[-1].validation:.4f}, {runs[-1].seconds:.0f} s", flush=True)
    later = fresh[: max(2, options.steps // 3)]
    tuned = [train(recipe, later, held_out, start=runs[0].weights) for recipe in RECIPES if recipe.name in FINE_TUNED]
    scales = [1.0, next(run.scale for run in runs if run.recipe.scaled)]
    console = Console(width=110, highlight=False)  # lines are broken by a narrow terminal, not cut
    for table in (
        runs_table("One training, a technique taken away each time", runs),
        runs_table(f"Fine-tuning of the FP32 run's weights at a learning rate of {FINE_LR:g}", tuned),
        underflow_table(seen, scales),
        updates_table(torch.cat([w.flatten() for name, w in runs[0].weights.items() if is_inner(name)])),
        sums_table(),
        norms_table(),
    ):
        console.print(table)
    if options.figure:
        draw(runs, seen, options.figure)
        print(f"figure: {options.figure}")


if __name__ == "__main__":
    main()
