"""The doctor's report for people.

Owns:      the tables and what stands in them.
Takes:     the report of `doctor.assemble`.
Gives:     a rich renderable.
Invariant: shows no figure that is not in the report; what would be too long for a screen is cut, and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from .environment_report import limit

_ROWS = 32  # hosts that the table lists
_COLUMNS = 12  # ends up to which there is a matrix


def tables(report: Mapping[str, Any]) -> RenderableType:
    """Who is here, links, the step's collectives, values; findings are lines of their own, not cut to a table's width."""
    parts: list[RenderableType] = []
    if "ranks" in report:
        parts += [_title(f"Who is here: {_count(report)}"), _hosts(report), _versions(report)]
    if "links" in report:
        parts += _links(report)
    if "step" in report:
        parts += _step(report)
    if "values" in report and not report["values"]["wrong"]:
        said = report["values"]
        operations, dtypes = ", ".join(said["operations"]), ", ".join(said["dtypes"])
        parts.append(Text(f"Right on every rank, in {dtypes}: {operations}."))
    if report["ok"]:
        parts.append(Text(f"Healthy: {_count(report)}, {report['seconds']:.1f} s.", style="green"))
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _count(report: Mapping[str, Any]) -> str:
    ranks, hosts = report["world_size"], len(report["hosts"])
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}"


# -- who is here


def _hosts(report: Mapping[str, Any]) -> Table:
    table = Table()
    for name in ("host", "ranks", "device", "interface", "clock", "/dev/shm free", "locked memory"):
        table.add_column(name)
    clocks = {said["rank"]: said for said in report.get("clocks", ())}
    for host in report["hosts"][:_ROWS]:
        ranks = host["ranks"]
        said = report["ranks"][ranks[0]]
        card, shared = said["interface"], said["shared_memory"]
        clock = clocks.get(ranks[0])
        table.add_row(
            host["host"],
            _range(ranks),
            said["gpu"] or f"cpu, {said['cpu']['usable']} cores",
            f"{card['name']} {card['addresses'][0] if card['addresses'] else ''}",
            "" if clock is None else f"{1e3 * clock['clock']:+.2f} ± {1e3 * clock['clock_error']:.2f} ms",
            "not there" if shared is None else decimal(shared["free"]),
            limit("locked memory", said["limits"]["locked memory"]),
        )
    if len(report["hosts"]) > _ROWS:
        table.add_row(f"and {len(report['hosts']) - _ROWS} more", *[""] * 6)
    return table


def _range(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _versions(report: Mapping[str, Any]) -> Text:
    """What is the same on all ranks; what is not is among the findings."""
    first = report["ranks"][0]["versions"]
    alike = [
        f"{name} {value}"
        for name, value in first.items()
        if all(said["versions"].get(name) == value for said in report["ranks"])
    ]
    return Text(f"The same on every rank: {', '.join(alike)}.")


# -- links


def _links(report: Mapping[str, Any]) -> list[RenderableType]:
    ends, measured = report["links"]["ends"], report["links"]["measured"]
    names = _names(report)
    between = [said for said in measured if said["first"] in ends and said["second"] in ends]
    inside = [said for said in measured if said not in between]
    speeds = {(s["first"], s["second"]): s["to"] for s in between} | {
        (s["second"], s["first"]): s["from"] for s in between
    }
    late = {(s["first"], s["second"]): s["latency"] for s in between}
    late |= {(second, first): value for (first, second), value in late.items()}
    parts: list[RenderableType] = []
    if 1 < len(ends) <= _COLUMNS:
        parts += [_title("MB/s, from the row to the column")]
        parts += [_matrix(ends, names, speeds, lambda speed: f"{speed / 1e6:,.0f}")]
        parts += [_title("ms, one way"), _matrix(ends, names, late, lambda seconds: f"{1e3 * seconds:.3f}")]
    elif between:
        parts.append(Text(f"Links between {len(ends)} ends: {_spread(list(speeds.values()), list(late.values()))}."))
    if inside:
        both = [said[way] for said in inside for way in ("to", "from")]
        parts.append(Text(f"Links inside the hosts: {_spread(both, [said['latency'] for said in inside])}."))
    return parts


def _names(report: Mapping[str, Any]) -> dict[int, str]:
    """Ends as the matrix calls them: the host, and the rank where several of one host are there."""
    ends = report["links"]["ends"]
    found: dict[int, str] = {}
    for host in report["hosts"]:
        mine = [rank for rank in host["ranks"] if rank in ends]
        found |= {rank: host["host"] if len(mine) == 1 else f"{host['host']}:{rank}" for rank in mine}
    return found


def _matrix(
    ends: Sequence[int],
    names: Mapping[int, str],
    values: Mapping[tuple[int, int], float],
    said: Callable[[float], str],
) -> Table:
    table = Table()
    table.add_column("")
    for end in ends:
        table.add_column(names[end], justify="right")
    for row in ends:
        cells = [said(values[row, column]) if (row, column) in values else "" for column in ends]
        table.add_row(names[row], *cells)
    return table


def _spread(speeds: Sequence[float], latencies: Sequence[float]) -> str:
    low, middle, high = (f"{value / 1e6:,.0f}" for value in (min(speeds), statistics.median(speeds), max(speeds)))
    return f"{low} to {high} MB/s, median {middle}; up to {1e3 * max(latencies):.3f} ms one way"


# -- the step


def _step(report: Mapping[str, Any]) -> list[RenderableType]:
    step = report["step"]
    title = (
        f"One step of {step['parameters']:,} parameters in {step['precision']}, stage {step['stage']}: "
        f"{1e3 * step['seconds']:,.1f} ms on the wire, at least"
    )
    table = Table()
    table.add_column("collective")
    for name in ("calls", "sent by each rank", "through each host's card", "ms"):
        table.add_column(name, justify="right")
    for row in step["collectives"]:
        table.add_row(
            row["operation"],
            f"{row['calls']:,}",
            decimal(row["rank_bytes"]),
            decimal(row["card_bytes"]),
            f"{1e3 * row['seconds']:,.1f}",
        )
    return [_title(title), table]
