"""Whose 16-bit products a model trains with on a CPU, torch's or `tensorcore`'s: a table, and the choice read from it.

Owns:      the kinds of operator, the table, the flags that decide, and SHARDMP_PRODUCTS.
Takes:     a dtype; the processor's flags, torch's version, the variable; what the other ranks offer.
Gives:     "torch" or "own" for each kind of operator.
Invariant: the choice is a function of flags, version and variable alone. Nothing is timed at start: a busy machine would
choose otherwise than an idle one, and bits would depend on the load.

[Note: the table]
`benchmarks/products.py` measures a machine and prints its rows, and shows what the choice costs beside the better of the
two. A row holds for CPUs that have all of its flags; the first such row whose `since` torch has reached is read. Each
entry says where it is from: MEASURED by that program on the row's kind of CPU, with both times as multiples of FP32's;
REPORTED from users' machines or from earlier runs, with the figures that there are; or ASSUMED, without figures. What
nobody has timed is "own" unless the entry's row gives a reason: our product costs FP32's time and the casts on every CPU,
whereas torch's may cost a hundred times that.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["KINDS", "agreed", "choose", "chosen_here", "flags", "offer", "warn_of_differences"]

TORCH, OWN = "torch", "own"
VARIABLE = "SHARDMP_PRODUCTS"

MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD = "matrix product", "convolution", "convolution backward"
ATTENTION, RECURRENT = "attention", "recurrent layer"
KINDS = (MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION, RECURRENT)

FP16, BF16 = torch.float16, torch.bfloat16
NAMES = {FP16: "fp16", BF16: "bf16"}
Choice = dict[str, str]
# A rank's own choice, and the kinds whose products may be torch's on that rank.
Offer = tuple[Choice, frozenset[str]]

# Of /proc/cpuinfo, the instructions that decide how fast 16-bit products are; x86, then ARM.
_FEATURES = frozenset(
    ("avx512f", "avx512_bf16", "avx512_fp16", "avx_ne_convert", "amx_bf16", "amx_fp16", "bf16", "asimdhp")
)
# What torch itself says: it hands products of the dtype to oneDNN here. Without that it emulates them.
_ONEDNN = {FP16: "onednn_fp16", BF16: "onednn_bf16"}

MEASURED, REPORTED, ASSUMED = "measured", "reported", "assumed"


@dataclass(frozen=True)
class Entry:
    """Who computes one kind of operator, and from where that is known.

    Attributes:
        who: TORCH or OWN. whence: MEASURED, REPORTED or ASSUMED.
        torch, own: the time of each as a multiple of FP32's; inf where torch has no kernel, None where nobody took it.
    """

    who: str
    whence: str
    torch: float | None = None
    own: float | None = None


@dataclass(frozen=True)
class Row:
    """Who computes products of `dtype` on CPUs that have all flags in `needs`, from torch `since` on."""

    cpu: str
    dtype: torch.dtype
    needs: frozenset[str]
    since: tuple[int, int]
    entries: Mapping[str, Entry]


_NEVER = float("inf")
_OURS = Entry(OWN, ASSUMED)
_THEIRS = Entry(TORCH, ASSUMED)

# From the most special CPU to the least. [Note: the table]
TABLE: tuple[Row, ...] = (
    Row(
        "AMX-FP16 (Xeon 6)",
        FP16,
        frozenset({"onednn_fp16", "amx_fp16"}),
        (2, 11),
        {
            MATRIX: Entry(TORCH, REPORTED),
            CONVOLUTION: _OURS,
            CONVOLUTION_BACKWARD: _OURS,
            ATTENTION: _OURS,
            RECURRENT: Entry(OWN, ASSUMED, torch=_NEVER),
        },
    ),
    Row(
        "AVX512-FP16 (Xeon of the 4th generation and later)",
        FP16,
        frozenset({"onednn_fp16", "avx512_fp16"}),
        (2, 11),
        {
            MATRIX: Entry(TORCH, REPORTED, torch=1.0, own=1.1),
            CONVOLUTION: _OURS,  # a transposed one is computed as a backward
            CONVOLUTION_BACKWARD: Entry(OWN, REPORTED, torch=150.0),
            ATTENTION: _OURS,
            RECURRENT: Entry(OWN, REPORTED, torch=_NEVER),
        },
    ),
    Row(
        "other units for FP16 (AVX-NE-CONVERT, ARM)",
        FP16,
        frozenset({"onednn_fp16"}),
        (2, 11),
        {
            MATRIX: _OURS,
            CONVOLUTION: _OURS,
            CONVOLUTION_BACKWARD: _OURS,
            ATTENTION: _OURS,
            RECURRENT: Entry(OWN, ASSUMED, torch=_NEVER),
        },
    ),
    Row(
        "no units for FP16 (AVX2)",  # measured on an EPYC of the 3rd generation, torch 2.13
        FP16,
        frozenset(),
        (2, 11),
        {
            MATRIX: Entry(OWN, MEASURED, torch=10.7, own=1.26),
            CONVOLUTION: Entry(OWN, MEASURED, torch=22.2, own=1.17),
            CONVOLUTION_BACKWARD: Entry(OWN, MEASURED, torch=14.0, own=1.03),
            ATTENTION: Entry(OWN, MEASURED, torch=6.5, own=1.16),
            RECURRENT: Entry(OWN, MEASURED, torch=_NEVER, own=1.0),
        },
    ),
    Row(
        "AMX-BF16 (Xeon of the 4th generation and later)",
        BF16,
        frozenset({"onednn_bf16", "amx_bf16"}),
        (2, 11),
        {
            MATRIX: Entry(TORCH, REPORTED),
            # The same tiles multiply here, and no backward of oneDNN's is missing in BF16.
            CONVOLUTION: _THEIRS,
            CONVOLUTION_BACKWARD: _THEIRS,
            ATTENTION: _THEIRS,
            RECURRENT: _OURS,
        },
    ),
    Row(
        "AVX512-FP16 without AMX",
        BF16,
        frozenset({"onednn_bf16", "avx512_fp16"}),
        (2, 11),
        {
            MATRIX: Entry(OWN, REPORTED, torch=1.8, own=1.15),
            CONVOLUTION: _OURS,
            CONVOLUTION_BACKWARD: _OURS,
            ATTENTION: _OURS,
            RECURRENT: _OURS,
        },
    ),
    Row(
        "AVX512-BF16 without AVX512-FP16 (EPYC of the 4th generation and later)",
        BF16,
        frozenset({"onednn_bf16", "avx512_bf16"}),
        (2, 11),
        {
            MATRIX: Entry(TORCH, REPORTED, torch=0.43),
            # The same instruction multiplies here, and torch's attention had its part in the figure of a GPT, 0.6.
            CONVOLUTION: _THEIRS,
            CONVOLUTION_BACKWARD: _THEIRS,
            ATTENTION: Entry(TORCH, REPORTED, torch=0.6),
            RECURRENT: _OURS,
        },
    ),
    Row(
        "ARM with BF16",
        BF16,
        frozenset({"onednn_bf16", "bf16"}),
        (2, 11),
        {
            # Its matrix instruction does four times FP32's products. The rest has no such instruction in torch.
            MATRIX: _THEIRS,
            CONVOLUTION: _OURS,
            CONVOLUTION_BACKWARD: _OURS,
            ATTENTION: _OURS,
            RECURRENT: _OURS,
        },
    ),
    Row(
        "AVX512 without BF16, AVX-NE-CONVERT: oneDNN computes BF16 in FP32",
        BF16,
        frozenset({"onednn_bf16"}),
        (2, 11),
        {
            MATRIX: _OURS,
            CONVOLUTION: _OURS,
            CONVOLUTION_BACKWARD: _OURS,
            ATTENTION: _OURS,
            RECURRENT: _OURS,
        },
    ),
    Row(
        "no units for BF16 (AVX2)",  # measured on an EPYC of the 3rd generation, torch 2.13
        BF16,
        frozenset(),
        (2, 11),
        {
            MATRIX: Entry(OWN, MEASURED, torch=9.1, own=1.23),
            CONVOLUTION: Entry(OWN, MEASURED, torch=11.8, own=1.11),
            CONVOLUTION_BACKWARD: Entry(OWN, MEASURED, torch=11.0, own=1.1),
            ATTENTION: Entry(OWN, MEASURED, torch=3.9, own=1.24),
            RECURRENT: Entry(OWN, MEASURED, torch=_NEVER, own=1.0),
        },
    ),
)


# -- the choice, pure


def row_for(dtype: torch.dtype, has: frozenset[str], torch_version: str, table: Sequence[Row] = TABLE) -> Row:
    """The table's row for this CPU and this torch."""
    version = _version(torch_version)
    return next(row for row in table if row.dtype is dtype and row.needs <= has and row.since <= version)


def choose(
    dtype: torch.dtype, has: frozenset[str], torch_version: str, setting: str | None, table: Sequence[Row] = TABLE
) -> Choice:
    """TORCH or OWN for each of KINDS.

    Args:
        has: the CPU's flags, as `flags` gives them.
        setting: what SHARDMP_PRODUCTS says, None where it is not set. TORCH is torch's wherever torch has a kernel.
    """
    if setting == OWN:
        return dict.fromkeys(KINDS, OWN)
    if setting == TORCH:
        return {kind: TORCH if torch_has(kind, dtype, has) else OWN for kind in KINDS}
    return {kind: row_for(dtype, has, torch_version, table).entries[kind].who for kind in KINDS}


def torch_has(kind: str, dtype: torch.dtype, has: frozenset[str]) -> bool:
    """Whether torch can train with its own products at all, however slowly.

    Under autocast an LSTM's layers are oneDNN's, which has no FP16 LSTM for training on any CPU, and a BF16 one only where
    it has BF16 ("could not create a primitive descriptor for the LSTM forward propagation primitive").
    """
    return kind != RECURRENT or (dtype is BF16 and _ONEDNN[BF16] in has)


def agreed(offers: Sequence[Offer]) -> Choice:
    """What all ranks compute with, by rank: rank 0's choice where all ranks are able, else ours."""
    choice, _ = offers[0]
    able = frozenset.intersection(*(able for _, able in offers))
    return {kind: TORCH if choice[kind] == TORCH and kind in able else OWN for kind in KINDS}


def warn_of_differences(path: str, saved: Any, now: Mapping[str, Choice]) -> None:
    """Warns where the run that saved a checkpoint computed otherwise than this one.

    Args:
        saved: as `now`, or anything else, since it was read from a file: by the dtype's name, the choice for each kind.
    """
    found = _differences(saved, now)
    if found:
        warnings.warn(
            f"{path} was saved by a run with other 16-bit products ({'; '.join(found)}): the run goes on, with other bits "
            f"than on its first CPU; {VARIABLE}=torch or {VARIABLE}=own on both makes the choice the same",
            stacklevel=3,
        )


def _differences(saved: Any, now: Mapping[str, Choice]) -> list[str]:
    found = []
    for name, choice in now.items():
        before = saved.get(name) if isinstance(saved, dict) else None
        for kind, who in choice.items():
            was = before.get(kind) if isinstance(before, dict) else None
            if was in (TORCH, OWN) and was != who:
                found.append(f"{name} {kind}: {_BY[was]} there, {_BY[who]} here")
    return found


_BY = {TORCH: "torch's", OWN: "shardmp's"}


def words(choice: Mapping[str, str]) -> str:
    """A choice for people."""
    parts = [
        (_BY[who], [kind for kind in KINDS if choice[kind] == who]) for who in (TORCH, OWN) if who in choice.values()
    ]
    if len(parts) == 1:
        return parts[0][0]
    return "; ".join(f"{whose} for {', '.join(kinds)}" for whose, kinds in parts)


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


# -- this process


def setting(environ: Mapping[str, str] = os.environ) -> str | None:
    """What SHARDMP_PRODUCTS says; None where it is not set.

    Raises:
        ValueError: neither "torch" nor "own".
    """
    value = environ.get(VARIABLE)
    if value not in (None, TORCH, OWN):
        raise ValueError(
            f"{VARIABLE}={value}: expected 'torch' (torch's 16-bit products, wherever it has them) or 'own' (shardmp's); "
            "unset, the kind of CPU decides"
        )
    return value


@cache
def flags() -> frozenset[str]:
    """What decides, of the flags of this process's CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # macOS
        text = ""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(line[1].split() if line else ()) & _FEATURES | {
        _ONEDNN[dtype] for dtype in _ONEDNN if _onednn_takes(dtype)
    }


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Whether torch hands products of this dtype to oneDNN here, which it does where the CPU has instructions for them.

    On x86 that is AVX512-FP16, AMX-FP16 or AVX-NE-CONVERT for FP16, and AVX512 or AVX-NE-CONVERT for BF16. A build without
    oneDNN lacks the operators.
    """
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{NAMES[dtype]}_supported", None)
    return supported is not None and bool(supported())


def chosen_here(dtype: torch.dtype) -> Choice:
    """This process's own choice.

    Raises:
        ValueError: SHARDMP_PRODUCTS is neither "torch" nor "own".
    """
    return choose(dtype, flags(), torch.__version__, setting())


def offer(dtype: torch.dtype, in_use: Mapping[str, str]) -> Offer:
    """What this rank tells the others.

    A CPU without units for the dtype is able only where SHARDMP_PRODUCTS=torch asks for the emulation.

    Args:
        in_use: who computes in this process now; what is ours, for an earlier model, stays ours.
    """
    said, has = setting(), flags()
    choice = chosen_here(dtype)
    willing = said == TORCH or (said is None and _ONEDNN[dtype] in has)
    able = frozenset(kind for kind in KINDS if willing and in_use[kind] == TORCH and torch_has(kind, dtype, has))
    return choice, able
