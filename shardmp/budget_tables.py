"""The figures of `shardmp budget` for people.

Owns:      tables, and the sentences below them.
Takes:     what `budgets.budget` has found.
Gives:     something that rich prints.
Invariant: nothing is computed here but units: every number is in the plain data as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group
from rich.table import Table

from . import budgeting
from .budget_words import ITEMSIZE

_HEADS = {"parameters": "params", "gradients": "grads", "buckets": "in\nflight", "temporaries": "temp."}


def tables(found: dict[str, Any]) -> Group:
    """All of it: three digits are enough to plan with."""
    unit, bytes_of_unit = ("GB", 1e9) if found["parameters"] >= 5e8 else ("MB", 1e6)

    def said(value: float) -> str:
        number = value / bytes_of_unit
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"

    parts: list[Any] = [_memory(found, unit, said)]
    if found["activations"]:
        parts.append(_activations(found, unit, said))
    return Group(*parts, _wire(found, unit, said), *_remarks(found))


def _memory(found: dict[str, Any], unit: str, said: Callable[[float], str]) -> Table:
    table = Table(
        title=f"{unit} per rank: {found['parameters']:,} parameters, {found['ranks']} ranks, {found['precision']}",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    kinds = (*budgeting.KINDS, "temporaries")
    for kind in (*kinds, "together"):
        table.add_column(_HEADS.get(kind, kind), justify="right")
    for name, row in found["memory"].items():
        if name.endswith("stage 1"):
            table.add_section()
        if row is None:
            table.add_row(f"{name}: to come")
        else:
            values = (said(row[kind]) if kind in row else "" for kind in kinds)
            table.add_row(name, *values, said(sum(row.values())))
    return table


def _activations(found: dict[str, Any], unit: str, said: Callable[[float], str]) -> Table:
    traced = found["activations"]
    table = Table(
        title=f"{unit} that come and go with a batch of {traced['batch']} (kernels of {traced['device']})",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    heads = ("kept", "copies", "dynamic", "static", "ratio", "most\nat once")
    for head in heads:
        table.add_column(head, justify="right")
    for name, row in traced["memory"].items():
        table.add_row(
            name,
            *(said(row[kind]) for kind in ("kept_for_backward", "copies_of_weights")),
            said(row["peak"] + row["batch"]),
            said(row["static"]),
            f"{row['ratio']:.2f}",
            said(row["most"]),
        )
    return table


def _wire(found: dict[str, Any], unit: str, said: Callable[[float], str]) -> Table:
    table = Table(title=f"{unit} on the wire per step", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("sent by each rank", said(found["sent_per_rank_and_step"]))
    table.add_row("the same in DDP, FP32", said(found["sent_by_ddp_fp32"]))
    hosts = f"through the card of each host of {found['ranks_per_host']} ranks"
    table.add_row(hosts, said(found["sent_per_host_card_and_step"]))
    return table


def _remarks(found: dict[str, Any]) -> list[str]:
    """What the tables do not say by themselves."""
    said = [
        "Two copies of the weights, and where is the saving? On one device there is none in this state: 2 + 2 + 4 bytes "
        "in place of 4 + 4. Mixed precision halves the bytes on the wire and most of the activations"
        + (", see above; " if found["activations"] else " (--model with --batch counts them); ")
        + "sharding divides the rest by the ranks.",
    ]
    if found["activations"]:
        said.append(
            "kept: tensors that wait for backward; copies: 16-bit copies of FP32 weights; dynamic: the most that a forward "
            "and a backward hold, copies and batch included; ratio: dynamic to static; most at once: with the static state, "
            "and with the gradients that exist at that moment."
        )
    if found["frozen_and_buffers"]:
        size = found["frozen_and_buffers"] / 2**20
        said.append(f"Frozen parameters and buffers take {size:,.1f} MiB more on each rank.")
    if found["padding"] > 0.02:
        said.append(
            f"Padding is {found['padding']:.0%} of the parameters: a shard is a multiple of 1024 elements, and "
            f"{found['ranks']} ranks cut each of {found['buckets']} buckets. A larger --bucket-mb (bucket_mb) mends it."
        )
    if found["tokens_that_hide"] is not None:
        said.append(
            f"Communication hides behind computation from {found['tokens_that_hide']:,.0f} tokens per rank and backward."
        )
    if found["fits"]:
        said += _fit_texts(found)
    return said


def _fit_texts(found: dict[str, Any]) -> list[str]:
    asked, with_batch = found["fits"], bool(found["activations"])
    where = f"In {asked['limit'] / 2**30:,.1f} GiB, " + ("with this batch" if with_batch else "activations apart")
    if asked["ranks"] is None:
        least = ITEMSIZE[found["precision"]] * found["parameters"] / 2**30
        said = [
            f"{where}: no number of ranks holds it: the parameters, whole on each rank, take {least:,.1f} GiB by themselves. "
            f"ZeRO's stage 3, which this version does not have, would hold the state on {asked['ranks_in_zero_stage_3']} ranks."
        ]
    else:
        hosts = ""
        if asked["ranks"] > found["ranks_per_host"] and asked["ranks_on_whole_hosts"]:
            hosts = f", on whole hosts of {found['ranks_per_host']}: {asked['ranks_on_whole_hosts']}"
        buckets = "" if asked["bucket_mb"] is None else f", with --bucket-mb {asked['bucket_mb']:g} (bucket_mb)"
        said = [
            f"{where}: the fewest ranks that hold it are {asked['ranks']}, at stage {asked['stage']}{buckets}{hosts}."
        ]
    if asked["largest_batch"] is not None:
        said.append(
            f"On {found['ranks']} ranks at stage {found['stage']} the largest batch that fits is {asked['largest_batch']:,}."
            if asked["largest_batch"]
            else f"On {found['ranks']} ranks at stage {found['stage']} not even a batch of 1 fits."
        )
    return said
