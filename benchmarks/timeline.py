"""Draws a rank's trace as a timeline, and adds up where the time of a step goes.

    python examples/train_gpt.py --profile runs/profile/train_gpt                       # or on several ranks
    python benchmarks/timeline.py runs/profile/train_gpt.rank0.pt.trace.json --out docs/timeline.png

Owns:      the reading of a trace, and the picture.
Takes:     a file of `torch.profiler` with shardmp's ranges, as `train_gpt.py --profile` writes it.
Gives:     a PNG of the last traced steps, and a table of milliseconds per step as Markdown.
Invariant: nothing is measured here: every bar is a range of the trace. "backward" goes from the first node of autograd to
           the end of the last reduction (over all backwards of the step), "forward" is what comes before it.

A message's bar ends where it is awaited, which is not where it has arrived: a long bar that nobody waits for costs nothing.
What costs is the lanes `forward wait` and `reduce`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANES = ("forward", "backward", "step()", "forward wait", "reduce", "verdict", "update", "gather")
MESSAGES = {"gloo:send": "C7", "gloo:recv": "C0", "gloo:all_reduce": "C3"}
NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Span:
    """A range of the trace: begin and end in ms."""

    name: str
    begin: float
    end: float


def read_spans(path: Path) -> list[Span]:
    """All ranges of a trace, in order of their begin.

    Raises:
        ValueError: the file is no trace of the profiler.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a trace of torch.profiler: {error}") from error
    whole = [event for event in events if event.get("ph") == "X"]
    spans = [Span(event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in whole]
    return sorted(spans, key=lambda span: span.begin)


def steps_of(spans: Sequence[Span], path: Path) -> list[Span]:
    """The profiler's steps.

    Raises:
        ValueError: there are none, or none with shardmp's ranges.
    """
    steps = [span for span in spans if span.name.startswith("ProfilerStep#")]
    if not steps or not any(span.name.startswith("shardmp.") for span in spans):
        raise ValueError(f"{path}: expected steps with ranges named shardmp.*, as train_gpt.py --profile writes them")
    return steps


def lanes_of(spans: Sequence[Span], step: Span) -> dict[str, list[Span]]:
    """The bars of one step by lane, messages apart."""
    inside = [span for span in spans if step.begin <= span.begin < step.end]
    found: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for span in inside:
        lane = span.name.removeprefix("shardmp.").replace("_", " ")
        if span.name.startswith("shardmp.") and lane in found:
            found[lane].append(span)
        elif span.name.endswith("#ShardedOptimizer.step"):
            found["step()"].append(span)
    nodes = [span for span in inside if span.name.startswith(NODE)]
    if nodes:  # what ends the backward, such as the last reductions, comes after the last node
        end = max([nodes[-1].end, *(span.end for span in found["reduce"])])
        found["backward"] = [Span("backward", nodes[0].begin, end)]
        found["forward"] = [Span("forward", step.begin, nodes[0].begin)]
    return found


def table(lanes: Sequence[dict[str, list[Span]]], steps: Sequence[Span]) -> str:
    """The medians over steps of each lane's milliseconds, as Markdown."""
    whole = statistics.median(step.end - step.begin for step in steps)
    lines = ["| | ms per step | of the step |", "|---|---|---|", f"| step | {whole:.1f} | |"]
    for lane in LANES:
        spent = statistics.median(sum(span.end - span.begin for span in one[lane]) for one in lanes)
        lines.append(f"| {lane} | {spent:.1f} | {spent / whole:.1%} |")
    return "\n".join(lines)


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans in as few rows as hold them without overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].end <= span.begin), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def draw(spans: Sequence[Span], steps: Sequence[Span], path: Path) -> None:
    """The steps as bars by lane, and the messages under way below them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    start, end = steps[0].begin, steps[-1].end
    shown = [lanes_of(spans, step) for step in steps]
    messages = [span for span in spans if span.name in MESSAGES and start <= span.begin < end]
    rows = rows_of(messages)
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(13, 6), sharex=True, layout="constrained", height_ratios=(len(LANES), 0.3 * len(rows) + 1)
    )

    def bars(axes: Any, found: Sequence[Span], y: float, height: float, colour: str) -> None:
        places = [(span.begin - start, max(span.end - span.begin, (end - start) / 3000)) for span in found]
        axes.broken_barh(places, (y - height / 2, height), facecolor=colour, edgecolor="white", linewidth=0.3)

    for number, lane in enumerate(LANES):
        for one in shown:
            bars(top, one[lane], -number, 0.7, f"C{number}")
    top.set_yticks([-number for number in range(len(LANES))], LANES)
    for step in steps:
        top.axvline(step.begin - start, color="0.3", linewidth=0.8)
    for number, row in enumerate(rows):
        for name, colour in MESSAGES.items():
            bars(below, [span for span in row if span.name == name], -number, 0.8, colour)
    handles = [mpl.patches.Patch(color=colour, label=name) for name, colour in MESSAGES.items()]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles))
    below.set(yticks=[], ylabel="messages under way", xlabel="ms", xlim=(0, end - start))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a rank's *.pt.trace.json")
    parser.add_argument("--out", type=Path, help="the PNG; without it only the table is printed")
    parser.add_argument("--steps", type=int, default=2, help="how many of the last traced steps are drawn")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: expected at least 1, got {arguments.steps}")
    try:
        spans = read_spans(arguments.trace)
        steps = steps_of(spans, arguments.trace)
    except ValueError as error:
        print(f"timeline.py: error: {error}", file=sys.stderr)
        return 2
    print(table([lanes_of(spans, step) for step in steps], steps))
    if arguments.out:
        draw(spans, steps[-arguments.steps :], arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
