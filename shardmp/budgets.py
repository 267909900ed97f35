"""What a training would hold and send: `shardmp budget`.

Owns:      a run that is only planned, and how its figures are written.
Takes:     a number of parameters or a model, and the options of `shard` that cost something.
Gives:     figures as plain data, tables of them, and the smallest number of ranks that fits.
Invariant: every figure of ours is `budgeting`'s for the layout that `shard` would make; nothing is allocated.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import nn

from . import budgeting
from .gradients import WINDOW
from .layout import Entry, Layout, plan
from .precision import DTYPES, as_precision

ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}
MOST_RANKS = 2**16
MOST_PARAMETERS = 10**13
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "b": 1}


@dataclass(frozen=True)
class Run:
    """A training that is planned.

    Attributes:
        entries: what trains, in order of registration.
        ranks, ranks_per_host: of the shard group.
        stage, precision, bucket_mb, exact: as `shard` has them; `exact` is `reduce="exact"`.
        moments: FP32 state tensors per parameter (AdamW 2, SGD with momentum 1, plain SGD 0).
        backwards: per step.
    """

    entries: tuple[Entry, ...]
    ranks: int = 1
    ranks_per_host: int = 1
    stage: int = 2
    precision: str = "fp16"
    bucket_mb: float = 8.0
    moments: int = 2
    backwards: int = 1
    exact: bool = False

    @property
    def parameters(self) -> int:
        """Psi."""
        return sum(entry.numel for entry in self.entries)

    @property
    def hosts(self) -> int:
        """Of the second hop, as `budgeting` counts them: 1 where one hop suffices."""
        return self.ranks // self.ranks_per_host if self.ranks_per_host > 2 else 1

    @property
    def sum_itemsize(self) -> int:
        return 8 if self.exact else 4

    def layout(self) -> Layout:
        """The one that `shard` would make."""
        bucket_bytes = max(1, int(self.bucket_mb * 2**20))
        return plan(self.entries, self.ranks, bucket_bytes=bucket_bytes, itemsize=ITEMSIZE)

    def memory(self, layout: Layout) -> dict[str, int]:
        """Bytes of the rank that holds most, by kind. Stage 1 with the sums of its `no_sync`, where it has backwards for it."""
        return budgeting.memory(
            layout,
            0,  # padding, which has no moments, lies at a bucket's end: no rank holds more than the first
            ITEMSIZE,
            moments=self.moments,
            window=WINDOW,
            local_sums=self.stage == 1 and self.backwards > 1 and not self.exact,
            hosts=self.hosts,
            sum_itemsize=self.sum_itemsize,
        )

    def reductions(self) -> int:
        """Backwards that reduce: stage 1 adds up the others locally."""
        return 1 if self.stage == 1 and not self.exact else self.backwards


# -- what the user says


def entries_of_count(parameters: int, precision: str, bucket_mb: float) -> tuple[Entry, ...]:
    """A model of which only the size is known: matrices that each fill a bucket, and a last one with the rest."""
    size = max(1, int(bucket_mb * 2**20) // ITEMSIZE[precision])
    whole, rest = divmod(parameters, size)
    return tuple(
        Entry(f"matrix {index}", numel, precision) for index, numel in enumerate([size] * whole + [rest]) if numel
    )


def entries_of_model(model: nn.Module, precision: str) -> tuple[Entry, ...]:
    """What `shard` would train in `model`, in order of registration."""
    policy = as_precision(precision)
    kept = policy.fp32_parameters(model)
    return tuple(
        Entry(name, p.numel(), "fp32" if name in kept else policy.param)
        for name, p in model.named_parameters()
        if p.requires_grad
    )


def entries_of(params: str | None, model: str | None, precision: str, bucket_mb: float) -> tuple[Entry, ...]:
    """What trains, by `--params` or `--model`.

    Raises:
        ValueError: both, neither, or nothing that trains.
    """
    if precision not in DTYPES:
        raise ValueError(f"--precision: expected one of {', '.join(DTYPES)}, got {precision!r}")
    if not 0 < bucket_mb <= 2**20:
        raise ValueError(f"--bucket-mb: expected a size above 0, got {bucket_mb:g}")
    if (params is None) == (model is None):
        raise ValueError(f"expected either --params or --model, got {'none' if params is None else 'both'}")
    if model is None:
        assert params is not None
        return entries_of_count(count(params), precision, bucket_mb)
    entries = entries_of_model(build(model), precision)
    if not any(entry.numel for entry in entries):
        raise ValueError(f"--model {model}: it has no parameter that trains")
    return entries


def build(path: str) -> nn.Module:
    """The model that `package.module:function` makes, on the meta device: no weight is allocated.

    Raises:
        ValueError: there is no such function, or it gives no model.
    """
    module_name, _, function_name = path.partition(":")
    if not (module_name and function_name):
        raise ValueError(f"--model: expected package.module:function, got {path!r}")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        make: Any = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {path}: {error}") from None
    finally:
        sys.path.remove(str(Path.cwd()))
    try:
        with torch.device("meta"):
            model = make()
    except TypeError as error:
        raise ValueError(f"--model {path}: it is called without arguments: {error}") from None
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {path}: expected an nn.Module, got {type(model).__name__}")
    return model


def count(text: str) -> int:
    """A number of parameters: "7e9", "7B", "124M".

    Raises:
        ValueError: it is not one.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    try:
        value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value <= MOST_PARAMETERS:
        raise ValueError(f"--params: expected a number from 1 to {MOST_PARAMETERS:.0e} (7e9, 7B, 124M), got {text!r}")
    return round(value)


def size(text: str, option: str = "--fits") -> int:
    """Bytes: "16GiB", "80 GB".

    Raises:
        ValueError: they are not.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"{option}: expected a size such as 16GiB or 80GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def usual_ranks_per_host(ranks: int) -> int:
    """As many as hosts usually have: the largest divisor up to 8."""
    return max(number for number in range(1, 9) if ranks % number == 0) if ranks > 0 else 1


def check(run: Run) -> None:
    """Refuse what `shard` would refuse.

    Raises:
        ValueError: an option out of its range.
    """
    for name, value, low, high in (
        ("--ranks", run.ranks, 1, MOST_RANKS),
        ("--ranks-per-host", run.ranks_per_host, 1, run.ranks),
        ("--moments", run.moments, 0, 8),
        ("--backwards", run.backwards, 1, 10**6),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name}: expected {low} to {high}, got {value}")
    if run.ranks % run.ranks_per_host:
        raise ValueError(f"--ranks-per-host: expected a divisor of {run.ranks} ranks, got {run.ranks_per_host}")
    if run.stage not in (1, 2):
        raise ValueError(f"--stage: this version has stages 1 and 2, got {run.stage}")
    if run.exact and run.precision != "fp16":
        raise ValueError(f"--exact: FP16 alone has an exact sum, got --precision {run.precision}")


# -- figures


def figures(run: Run) -> dict[str, Any]:
    """Everything that `shardmp budget --json` prints: bytes, unless a name says otherwise."""
    layout = run.layout()
    psi, moments = run.parameters, run.moments
    memory: dict[str, dict[str, Any]] = {
        "FP32, one device": budgeting.fp32_memory(psi, moments=moments),
        "plain mixed precision, one device": budgeting.unsharded_memory(psi, moments=moments),
    }
    for stage in (1, 2, 3):
        memory[f"ZeRO paper, stage {stage}"] = budgeting.zero_memory(psi, run.ranks, stage, moments=moments)
    memory[f"shardmp, stage {run.stage}"] = run.memory(layout)
    reductions = run.reductions()
    sent = budgeting.wire_bytes(layout, ITEMSIZE, backwards=reductions, hosts=run.hosts, sum_itemsize=run.sum_itemsize)
    card = budgeting.card_bytes(layout, ITEMSIZE, ranks_per_host=run.ranks_per_host, sum_itemsize=run.sum_itemsize)
    return {
        "parameters": psi,
        "ranks": run.ranks,
        "ranks_per_host": run.ranks_per_host,
        "stage": run.stage,
        "precision": run.precision,
        "buckets": len(layout.buckets),
        "padding": sum(bucket.size for bucket in layout.buckets) / psi - 1,
        "memory": memory,
        "sent_per_rank_and_step": sent,
        "sent_by_ddp_fp32": 8 * psi * (run.ranks - 1) // run.ranks,
        "sent_per_host_card_and_step": reductions * card["reduction"] + card["gather"] + card["verdict"],
    }


def tokens_that_hide(run: Run, flops: float, link: float) -> float:
    """Tokens per rank and backward from which communication hides behind computation.

    A forward takes 2 Psi operations a token and the gather runs under it; a backward takes 4 Psi, and the reduction runs
    under it. The slower way counts: the host's card where there are several hosts, else the rank's own link.

    Args:
        flops: of one rank, per second, as it reaches them.
        link: bytes per second of the card, or of the rank's link.
    """
    layout, psi = run.layout(), run.parameters
    card = budgeting.card_bytes(layout, ITEMSIZE, ranks_per_host=run.ranks_per_host, sum_itemsize=run.sum_itemsize)
    if run.ranks == run.ranks_per_host:
        one_way = (run.ranks - 1) * sum(bucket.shard * ITEMSIZE[bucket.dtype] for bucket in layout.buckets)
        card = {"reduction": one_way, "gather": one_way}
    return max(card["gather"] / (2 * psi), card["reduction"] / (4 * psi)) * flops / link


def smallest_fit(run: Run, limit: int) -> Run | None:
    """`run` on the fewest ranks whose state and buckets stay within `limit` bytes; None where no number does."""

    def fits(ranks: int) -> bool:
        # Several hosts need more buffers than one; what is asked for is ranks, so they are taken as one host.
        tried = replace(run, ranks=ranks, ranks_per_host=ranks)
        return sum(tried.memory(tried.layout()).values()) <= limit

    high = 1
    while not fits(high):
        high *= 2
        if high > MOST_RANKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return replace(run, ranks=high, ranks_per_host=high)


def report(
    run: Run, *, fits: str | None = None, flops: float | None = None, link: float | None = None
) -> dict[str, Any]:
    """`figures`, and the answers to further questions: what fits, and when communication hides.

    Raises:
        ValueError: an option out of its range, or half of a question.
    """
    check(run)
    if (flops is None) != (link is None):
        raise ValueError("--flops, --link: expected both or none: operations and bytes per second")
    found = figures(run)
    if flops is not None and link is not None:
        if not (flops > 0 and link > 0):
            raise ValueError(f"--flops, --link: expected numbers above 0, got {flops:g} and {link:g}")
        found["tokens_that_hide"] = tokens_that_hide(run, flops, link)
    if fits is not None:
        limit = size(fits)
        best = smallest_fit(run, limit)
        found["fits"] = {"limit": limit, "ranks": best and best.ranks, "stage": best and best.stage}
    return found


# -- tables


def tables(found: dict[str, Any]) -> Group:
    """The figures for people: three digits are enough to plan with."""
    unit, bytes_of_unit = ("GB", 1e9) if found["parameters"] >= 5e8 else ("MB", 1e6)

    def said(value: float) -> str:
        number = value / bytes_of_unit
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"

    memory = Table(
        title=f"{unit} per rank: {found['parameters']:,} parameters, {found['ranks']} ranks, {found['precision']}",
        title_justify="left",
    )
    memory.add_column("")
    for kind in (*budgeting.KINDS, "together"):
        memory.add_column("in flight" if kind == "buckets" else kind, justify="right")
    for name, kinds in found["memory"].items():
        if name.startswith("shardmp"):
            memory.add_section()
        memory.add_row(name, *(said(kinds[kind]) for kind in budgeting.KINDS), said(sum(kinds.values())))
    wire = Table(title=f"{unit} on the wire per step", title_justify="left", show_header=False)
    wire.add_column()
    wire.add_column(justify="right")
    wire.add_row("sent by each rank", said(found["sent_per_rank_and_step"]))
    wire.add_row("the same in DDP, FP32", said(found["sent_by_ddp_fp32"]))
    hosts = f"through the card of each host of {found['ranks_per_host']} ranks"
    wire.add_row(hosts, said(found["sent_per_host_card_and_step"]))
    return Group(memory, wire, *_remarks(found))


def _remarks(found: dict[str, Any]) -> list[str]:
    """What the tables do not say by themselves."""
    said = [
        "Two copies of the weights, and where is the saving? On one device there is none in this state: 2 + 2 + 4 bytes "
        "in place of 4 + 4. Mixed precision halves the activations, which are not in this table, and the bytes on the "
        "wire; sharding divides the rest by the ranks.",
    ]
    if found["padding"] > 0.02:
        said.append(
            f"Padding is {found['padding']:.0%} of the parameters: a shard is a multiple of 1024 elements, and "
            f"{found['ranks']} ranks cut each of {found['buckets']} buckets. A larger --bucket-mb (bucket_mb) mends it."
        )
    if "tokens_that_hide" in found:
        said.append(
            f"Communication hides behind computation from {found['tokens_that_hide']:,.0f} tokens per rank and backward."
        )
    if "fits" in found:
        said.append(_fit_text(found))
    return said


def _fit_text(found: dict[str, Any]) -> str:
    asked = found["fits"]
    if asked["ranks"] is None:
        least = ITEMSIZE[found["precision"]] * found["parameters"] / 2**30
        answer = f"no number of ranks holds it: the parameters alone, whole on each rank, take {least:,.1f} GiB"
    else:
        answer = f"{asked['ranks']} ranks at stage {asked['stage']} are the fewest that hold it"
    return f"In {asked['limit'] / 2**30:,.1f} GiB, activations apart: {answer}."
