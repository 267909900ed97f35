"""What a training would hold and send: `shardmp.budget` and the command `shardmp budget`.

Owns:      a run that is only planned, its figures, and the answers: what fits, when communication hides.
Takes:     a number of parameters or a function that makes the model, a batch, and the options of `shard` that cost something.
Gives:     figures as plain data.
Invariant: every figure of ours is `budgeting`'s for the layout that `shard` would make; nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import budget_words as words
from . import budgeting
from .gradients import WINDOW
from .layout import MIB, Entry, Layout, plan
from .precision import DTYPES, Precision, as_precision

if TYPE_CHECKING:  # imported where a batch is traced: torch's fake tensors take a second
    from .activations import Loss, Make, Traced

ITEMSIZE = words.ITEMSIZE
MOST_RANKS = 2**16
STAGES = (1, 2)
STATE = ("parameters", "gradients", "masters", "moments")  # static: what a rank holds from step to step


@dataclass(frozen=True)
class Run:
    """A training that is planned.

    Attributes:
        entries: what trains, in order of registration.
        ranks, ranks_per_host: of the shard group.
        stage, precision, bucket_mb, exact: as `shard` has them; `exact` is `reduce="exact"`.
        moments: FP32 state tensors per parameter (AdamW 2, SGD with momentum 1, plain SGD 0).
        backwards: per step.
        rest: bytes of frozen parameters and buffers.
    """

    entries: tuple[Entry, ...]
    ranks: int = 1
    ranks_per_host: int = 1
    stage: int = 2
    precision: str = "fp16"
    bucket_mb: float | None = None
    moments: int = 2
    backwards: int = 1
    exact: bool = False
    rest: int = 0

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
        bucket_bytes = None if self.bucket_mb is None else max(1, int(self.bucket_mb * MIB))
        return plan(self.entries, self.ranks, bucket_bytes=bucket_bytes, itemsize=ITEMSIZE)

    def memory(self, layout: Layout) -> dict[str, int]:
        """Bytes of the rank that holds most, by kind: those of `budgeting.memory`, and temporaries.

        Stage 1 with the sums of its `no_sync`, where it has backwards for it.
        """
        rank = 0  # padding, which has no moments, lies at a bucket's end: no rank holds more than the first
        held = budgeting.memory(
            layout,
            rank,
            ITEMSIZE,
            moments=self.moments,
            window=WINDOW,
            local_sums=self.stage == 1 and self.backwards > 1 and not self.exact,
            hosts=self.hosts,
            sum_itemsize=self.sum_itemsize,
        )
        small = budgeting.temporaries(layout, rank, ITEMSIZE, sum_itemsize=self.sum_itemsize, backwards=self.backwards)
        return held | {"temporaries": small}

    def together(self) -> int:
        """Bytes of the rank that holds most, activations apart."""
        return sum(self.memory(self.layout()).values()) + self.rest

    def reductions(self) -> int:
        """Backwards that reduce: stage 1 adds up the others locally."""
        return 1 if self.stage == 1 and not self.exact else self.backwards

    def sent(self, layout: Layout) -> int:
        """Bytes that each rank sends in a step."""
        return budgeting.wire_bytes(
            layout, ITEMSIZE, backwards=self.reductions(), hosts=self.hosts, sum_itemsize=self.sum_itemsize
        )


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
    if run.stage not in STAGES:
        raise ValueError(
            f"--stage: this version has stages 1 and 2, got {run.stage} (the ZeRO paper's stage 3 is in the table)"
        )
    if run.exact and run.precision != "fp16":
        raise ValueError(f"--exact: FP16 alone has an exact sum, got --precision {run.precision}")


def planned(
    model: Make | str | None = None,
    *,
    parameters: float | str | None = None,
    ranks: int = 8,
    ranks_per_host: int | None = None,
    stage: int = 2,
    precision: str | Precision = "fp16",
    moments: int = 2,
    backwards: int = 1,
    bucket_mb: float | None = None,
    exact: bool = False,
) -> Run:
    """The run that these words describe: see `budget`.

    Raises:
        ValueError: an option out of its range, named as the command names it.
    """
    if not isinstance(precision, Precision) and precision not in DTYPES:
        raise ValueError(f"--precision: expected one of {', '.join(DTYPES)}, got {precision!r}")
    words.check_bucket_mb(bucket_mb)
    if (parameters is None) == (model is None):
        raise ValueError(f"expected either --params or --model, got {'none' if model is None else 'both'}")
    policy, rest = as_precision(precision), 0
    if model is None:
        entries = words.entries_of_count(words.count(str(parameters)), policy.param, bucket_mb)
    else:
        built = words.build(words.function_at(model, "--model") if isinstance(model, str) else model)
        entries, rest = words.entries_of_model(built, policy), words.rest_of_model(built)
    per_host = words.usual_ranks_per_host(ranks) if ranks_per_host is None else ranks_per_host
    run = Run(entries, ranks, per_host, stage, policy.param, bucket_mb, moments, backwards, exact, rest)
    check(run)
    return run


# -- figures


def figures(run: Run) -> dict[str, Any]:
    """What is held and sent: bytes, unless a name says otherwise."""
    layout = run.layout()
    psi, moments = run.parameters, run.moments
    memory: dict[str, dict[str, Any] | None] = {
        "FP32, one device": budgeting.fp32_memory(psi, moments=moments),
        "mixed precision, one device": budgeting.unsharded_memory(psi, moments=moments),
    }
    for stage in (1, 2, 3):
        memory[f"ZeRO paper, stage {stage}"] = budgeting.zero_memory(psi, run.ranks, stage, moments=moments)
    for stage in STAGES:
        memory[f"shardmp, stage {stage}"] = replace(run, stage=stage).memory(layout)
    memory["shardmp, stage 3"] = None  # not in this version
    card = budgeting.card_bytes(layout, ITEMSIZE, ranks_per_host=run.ranks_per_host, sum_itemsize=run.sum_itemsize)
    return {
        "parameters": psi,
        "ranks": run.ranks,
        "ranks_per_host": run.ranks_per_host,
        "stage": run.stage,
        "precision": run.precision,
        "backwards": run.backwards,
        "buckets": len(layout.buckets),
        "padding": sum(bucket.size for bucket in layout.buckets) / psi - 1,
        "memory": memory,
        "frozen_and_buffers": run.rest,
        "sent_per_rank_and_step": run.sent(layout),
        "sent_by_ddp_fp32": 8 * psi * (run.ranks - 1) // run.ranks,
        "sent_per_host_card_and_step": run.reductions() * card["reduction"] + card["gather"] + card["verdict"],
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


# -- activations


def dynamic_figures(run: Run, traced: Traced) -> dict[str, Any]:
    """What comes and goes with a batch beside what stays, in each way of training; bytes.

    "ratio" is dynamic to static. "most" is what a device holds at the worst moment: on one device gradients come while
    activations go, so it is less than the sum of both.
    """
    ours = run.memory(run.layout())
    whole = budgeting.fp32_memory(run.parameters, moments=run.moments)
    rows = {}
    for way, found in traced.found.items():
        if way == "shardmp":
            name, static = f"shardmp, stage {run.stage}", sum(ours[kind] for kind in STATE)
            most = sum(ours.values()) + found.dynamic
        else:
            name = "FP32, one device" if way == "FP32" else "autocast on FP32 weights, one device"
            static = sum(whole.values())
            most = static + max(0, found.most - whole["gradients"]) + found.batch
        rows[name] = {
            "kept_for_backward": found.kept,
            "copies_of_weights": found.copies,
            "peak": found.peak,
            "batch": found.batch,
            "static": static,
            "ratio": found.dynamic / static,
            "most": most + run.rest,
        }
    return {"device": traced.device.type, "batch": str(traced.batch), "memory": rows}


# -- what fits


def smallest_fit(run: Run, limit: int, dynamic: int = 0) -> Run | None:
    """`run` on the fewest ranks of one host, at the stage that holds least there, or None where no number does.

    Args:
        limit: bytes for everything.
        dynamic: bytes of activations and batch.

    Of stages that need the same ranks the one that sends least is taken, then the one that was asked for. Where `shard`'s own
    buckets, which grow with the ranks, are too large for any number of them, buckets of 8 MiB are tried.
    """
    found = _smallest(run, limit - dynamic)
    return _smallest(replace(run, bucket_mb=8.0), limit - dynamic) if found is None and run.bucket_mb is None else found


def _smallest(run: Run, limit: int) -> Run | None:
    differ = run.backwards > 1 and not run.exact
    tried = (_fewest(replace(run, stage=stage), limit) for stage in (STAGES if differ else (run.stage,)))
    fitting = [found for found in tried if found]
    return min(fitting, key=lambda one: (one.ranks, one.sent(one.layout()), one.stage != run.stage), default=None)


def _fewest(run: Run, limit: int, whole_hosts: int | None = None) -> Run | None:
    """On one host; or on hosts of `whole_hosts` ranks each, which need buffers for their second hop."""
    step = whole_hosts or 1
    if sum(entry.numel * ITEMSIZE[entry.dtype] for entry in run.entries) > limit:
        return None  # parameters, which are whole on every rank

    def tried(number: int) -> Run:
        return replace(run, ranks=number * step, ranks_per_host=whole_hosts or number)

    high = 1
    while tried(high).together() > limit:
        high *= 2
        if high * step > MOST_RANKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tried(middle).together() <= limit else (middle, high)
    return tried(high)


def fit_figures(run: Run, limit: int, traced: Traced | None) -> dict[str, Any]:
    """The fewest ranks that fit, with this batch where there is one, and the largest batch on the ranks that were named."""
    dynamic = traced.ours if traced else 0
    best = smallest_fit(run, limit, dynamic)
    on_hosts = best and _fewest(
        replace(run, stage=best.stage, bucket_mb=best.bucket_mb), limit - dynamic, run.ranks_per_host
    )
    batch = None
    if traced:
        from .activations import largest

        state = run.together()
        batch = largest(lambda size: state + traced.ours_at(size), traced.batch.size, limit) if state < limit else 0
    in_zero = sum(budgeting.unsharded_memory(run.parameters, moments=run.moments).values())
    return {
        "limit": limit,
        "ranks": best and best.ranks,
        "stage": best and best.stage,
        "bucket_mb": best and best.bucket_mb,
        "ranks_on_whole_hosts": on_hosts and on_hosts.ranks,
        "largest_batch": batch,
        "ranks_in_zero_stage_3": -(-in_zero // limit),
    }


# -- the whole answer


def budget(
    model: Make | str | None = None,
    *,
    parameters: float | str | None = None,
    ranks: int = 8,
    ranks_per_host: int | None = None,
    stage: int = 2,
    precision: str | Precision = "fp16",
    moments: int = 2,
    backwards: int = 1,
    bucket_mb: float | None = None,
    exact: bool = False,
    batch: str | None = None,
    loss: Loss | str | None = None,
    device: str | None = None,
    fits: int | str | None = None,
    flops: float | None = None,
    link: float | None = None,
) -> dict[str, Any]:
    """Predict what each rank of a training holds and sends; nothing is allocated.

    Args:
        model: a function that makes the model, or "package.module:function".
        parameters: in place of a model: how many there are (7e9, "7B").
        ranks: over which the state is sharded.
        ranks_per_host: by default the largest divisor of `ranks` up to 8.
        stage, precision, bucket_mb: as `shard` has them. exact: `reduce="exact"`.
        moments: FP32 states per parameter: AdamW 2, SGD with momentum 1.
        backwards: per step.
        batch: of one rank and backward: "4x128:int64", or "ids=4x128:int64,labels=4x128:int64" for keywords of the
            forward; without a dtype float32. The batch size is the first dimension of the first tensor, and of every other
            tensor that has the same one. Needs a model: a forward and a backward are traced.
        loss: a function (or its name) that is called with the model and the batch's tensors and gives the loss; by default
            the loss that the model's output holds, else the mean of its output.
        device: "cpu" or "cuda", whose kernels are traced; by default CUDA where torch sees a GPU.
        fits: bytes of a device (or "16GiB"): finds the fewest ranks, and the largest batch where there is a batch.
        flops, link: FLOP/s of a rank, and bytes per second of a host's card (of a rank's link on one host): finds the
            tokens from which communication is hidden.

    Returns:
        Plain data, as `shardmp budget --json` prints it: bytes, unless a name says otherwise; None where nothing was asked.

    Raises:
        ValueError: an option out of its range, named as the command names it.
    """
    if (flops is None) != (link is None):
        raise ValueError("--flops, --link: expected both or none: operations and bytes per second")
    if flops is not None and link is not None and not (flops > 0 and link > 0):
        raise ValueError(f"--flops, --link: expected numbers above 0, got {flops:g} and {link:g}")
    if batch is None and (loss is not None or device is not None):
        raise ValueError("--loss, --device: they are for the trace of a --batch, which is missing")
    if batch is not None and model is None:
        raise ValueError("--batch: a forward is traced, which needs a --model in place of --params")
    limit = words.size(fits) if isinstance(fits, str) else fits
    run = planned(
        model,
        parameters=parameters,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        stage=stage,
        precision=precision,
        moments=moments,
        backwards=backwards,
        bucket_mb=bucket_mb,
        exact=exact,
    )
    traced = None
    if batch is not None and model is not None:
        from .activations import trace

        traced = trace(model, batch, loss, as_precision(precision), device)
    return figures(run) | {
        "activations": dynamic_figures(run, traced) if traced else None,
        "tokens_that_hide": tokens_that_hide(run, flops, link) if flops is not None and link is not None else None,
        "fits": fit_figures(run, limit, traced) if limit is not None else None,
    }
