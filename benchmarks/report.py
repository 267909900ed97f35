"""What a comparison says: medians, ratios, tables, the chart.

Owns:      the arithmetic on measured rounds, and how it is shown.
Takes:     the results as `peers` writes them into its JSON.
Gives:     Markdown, and a PNG.
Invariant: a ratio is the median of the ratios of single rounds, so that a machine that drifts drifts for both; a
           contestant that failed is shown with its reason, and is nobody's measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Case = dict[str, Any]
BASE = "ddp-fp32"
# Libraries that are nobody's: compute alone, and the parts of a step beyond it.
BOUNDS = ("bound", "part")
COLOURS = {
    "shardmp": "tab:red",
    "DDP": "tab:blue",
    "ZeroRedundancyOptimizer": "tab:cyan",
    "FSDP2": "tab:purple",
    "DeepSpeed": "tab:green",
    "bound": "silver",
    "part": "silver",
}


# -- arithmetic


def values(case: Case, name: str, key: str) -> list[float | None]:
    """A figure of every round; None for a round that was not measured."""
    return [None if one is None else one.get(key) for one in case["rows"].get(name, [])]


def measured(case: Case, name: str, key: str) -> list[float]:
    return [value for value in values(case, name, key) if value is not None]


def limits(case: Case, precision: str, key: str) -> list[float | None]:
    """By round: compute alone + exchange + sum + update, what a sharded 16-bit step cannot do without."""
    parts = [name for name, facts in case["contestants"].items() if facts["library"] == "part"]
    rows = [values(case, name, key) for name in (f"compute-{precision}", *parts)]
    if not parts or not all(rows):
        return []
    return [None if None in one else sum(one) for one in zip(*rows, strict=True)]


def ratio(ours: Iterable[float | None], theirs: Iterable[float | None]) -> float | None:
    """The median over the rounds that both have; None where there is none."""
    found = [one / other for one, other in zip(ours, theirs, strict=False) if one is not None and other]
    return statistics.median(found) if found else None


def best_peer(case: Case, key: str, *, precision: str | None = None, sharded: bool = False) -> str | None:
    """The peer with the lowest median, of those that did all their rounds.

    Args:
        precision, sharded: look only at peers of this precision, and at those that shard optimizer state.
    """
    found = {}
    for name, facts in case["contestants"].items():
        fits = facts["library"] not in ("shardmp", *BOUNDS) and precision in (None, facts["precision"])
        if fits and (facts["sharded"] or not sharded) and name not in case["failures"] and measured(case, name, key):
            found[name] = statistics.median(measured(case, name, key))
    return min(found, key=lambda name: found[name]) if found else None


# -- Markdown


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(found: list[float]) -> str:
    """The median, and the lowest and highest round."""
    if not found:
        return ""
    digits = 0 if statistics.median(found) >= 100 else 1
    low, middle, high = (f"{value:.{digits}f}" for value in (min(found), statistics.median(found), max(found)))
    return middle if len(found) == 1 else f"{middle} ({low}-{high})"


def _line(cells: Iterable[str]) -> str:
    # An error's text, as it stands in a failed contestant's row, may hold what would end a cell.
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _table(head: list[str], lines: Iterable[list[str]]) -> list[str]:
    return [_line(head), f"|{'---|' * len(head)}", *map(_line, lines)]


def heading(case: Case) -> str:
    clip = "not clipped" if case["clip"] is None else f"clipped at {case['clip']:g}"
    return f"`{case['model']}`, {case['parameters'] / 1e6:.1f}M parameters, {case['ranks']} ranks, {clip}"


def case_table(case: Case) -> str:
    """All rows of one workload: contestants, then the lower bounds."""
    ideal = 4 * case["parameters"] * (case["ranks"] - 1) / case["ranks"] / 1e6
    best = {key: best_peer(case, key) for key in ("cpu_ms", "wall_ms")}
    head = ["", "CPU ms", "to DDP", "to best peer", "wall ms", "to DDP", "to best peer", f"MB sent (ideal {ideal:.1f})"]
    head += ["peak MiB", "to DDP", "above imports", "page faults", "loss"]
    lines = [_row(case, name, best, len(head)) for name in case["rows"]]
    about = [f"{case['about']}. Best peer: {best['cpu_ms']} in CPU time, {best['wall_ms']} in wall time."]
    return "\n".join([f"### {heading(case)}", "", *about, "", *_table(head, lines)])


def _row(case: Case, name: str, best: dict[str, str | None], num_cells: int) -> list[str]:
    if name in case["failures"] and not any(case["rows"][name]):
        return [name, case["failures"][name], *[""] * (num_cells - 2)]
    cells = [name]
    for key in ("cpu_ms", "wall_ms"):
        cells.append(_spread(measured(case, name, key)))
        cells.append(_cell(ratio(values(case, name, key), values(case, BASE, key)), 2))
        other = best[key]
        cells.append("" if other is None else _cell(ratio(values(case, name, key), values(case, other, key)), 2))
    cells.append(_cell(_median(case, name, "wire_mb"), 1))
    cells.append(_cell(_median(case, name, "peak_mib"), 0))
    cells.append(_cell(ratio(values(case, name, "peak_mib"), values(case, BASE, "peak_mib")), 2))
    cells += [_cell(_median(case, name, "above_imports_mib"), 0), _cell(_median(case, name, "faults"), 0)]
    skipped = _median(case, name, "skipped") or 0
    loss = _cell(_median(case, name, "last_loss"), 4) + (f" ({skipped:.0f} skipped)" if skipped else "")
    cells.append(f"then {case['failures'][name]}" if name in case["failures"] else loss)
    return cells


def _median(case: Case, name: str, key: str) -> float | None:
    found = measured(case, name, key)
    return statistics.median(found) if found else None


def beside_table(case: Case) -> str | None:
    """CPU time of each shardmp contestant to what it is held against; None where there is no shardmp contestant."""
    lines = []
    for name in case["rows"]:
        facts = case["contestants"][name]
        if facts["library"] != "shardmp" or not measured(case, name, "cpu_ms"):
            continue
        precision, ours = facts["precision"], values(case, name, "cpu_ms")
        cells = [name]
        for sharded, wanted in ((False, None), (True, None), (True, precision)):
            peer = best_peer(case, "cpu_ms", precision=wanted, sharded=sharded)
            found = None if peer is None else ratio(ours, values(case, peer, "cpu_ms"))
            cells.append("" if found is None else f"{found:.2f} ({peer})")
        cells.append(_cell(ratio(ours, values(case, f"compute-{precision}", "cpu_ms")), 2))
        cells.append(_cell(ratio(ours, limits(case, precision, "cpu_ms")) if precision != "fp32" else None, 2))
        lines.append(cells)
    if not lines:
        return None
    head = ["CPU time to", "the best peer", "the best sharded peer", "the best sharded peer of its precision"]
    head += ["compute alone", "compute + exchange + sum + update"]
    return "\n".join(_table(head, lines))


def loss_table(losses: dict[str, Any]) -> str:
    """The last loss of each contestant beside DDP FP32's, and the largest difference at any step."""
    base = losses["rows"].get(BASE)
    lines = []
    for name, found in losses["rows"].items():
        if isinstance(found, str):
            lines.append([name, found, "", ""])
            continue
        apart = [] if not isinstance(base, list) else [one - other for one, other in zip(found, base, strict=True)]
        shown = [f"{apart[-1]:+.4f}", f"{max(map(abs, apart)):.4f}"] if apart else ["", ""]
        lines.append([name, f"{found[-1]:.4f}", *shown])
    title = f"### Loss of `{losses['model']}` after {losses['steps']} steps at a learning rate of {losses['lr']:g}"
    head = ["", "loss", "to DDP FP32", "largest difference at a step"]
    return "\n".join([title, "", *_table(head, lines)])


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    machine = results["machine"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, DeepSpeed {machine['deepspeed']}, gloo, "
        f"one thread per rank, {results['allocator']} allocator; {machine['date']}, load average {machine['load']:.2f} "
        f"before. Medians of {results['rounds']} interleaved rounds of {results['steps']} steps (lowest-highest); CPU and "
        "bytes per rank and step, all ranks' mean; wall time of the slowest rank. A ratio is the median of the rounds' "
        "ratios."
    ]
    for case in results["cases"]:
        parts.append(case_table(case))
        beside = beside_table(case)
        if beside is not None:
            parts.append(beside)
    if results.get("losses"):
        parts.append(loss_table(results["losses"]))
    abouts = {name: facts["about"] for case in results["cases"] for name, facts in case["contestants"].items()}
    parts.append("\n".join(f"* `{name}`: {about}" for name, about in abouts.items()))
    return "\n\n".join(parts) + "\n"


# -- the chart


def chart(results: dict[str, Any], path: Path) -> None:
    """CPU time relative to DDP FP32 as bars, wall time as dots, a panel for each workload. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = results["cases"]
    rows = max(len(case["rows"]) for case in cases)
    size = (6.5 * len(cases), 1.2 + 0.32 * rows)
    figure, panels = pyplot.subplots(1, len(cases), figsize=size, layout="constrained", squeeze=False)
    for axes, case in zip(panels[0], cases, strict=True):
        names = [name for name in case["rows"] if _to_base(case, name, "cpu_ms") is not None]
        names.sort(key=lambda name: _to_base(case, name, "cpu_ms") or 0, reverse=True)
        cpu = [_to_base(case, name, "cpu_ms") or 0 for name in names]
        libraries = [case["contestants"][name]["library"] for name in names]
        places = range(len(names))
        axes.barh(places, cpu, color=[COLOURS[library] for library in libraries], height=0.7)
        axes.set_yticks(places, [f"{name}  {value:.2f}" for name, value in zip(names, cpu, strict=True)], fontsize=8)
        wall = [_to_base(case, name, "wall_ms") or 0 for name in names]
        axes.plot(wall, places, "o", color="black", markersize=4, label="wall time")
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlim=(0, 1.12 * max(cpu + wall, default=1)), xlabel="CPU time, relative to DDP FP32")
        axes.set_title(heading(case).replace("`", ""), fontsize=9)
        axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _to_base(case: Case, name: str, key: str) -> float | None:
    return ratio(values(case, name, key), values(case, BASE, key))
