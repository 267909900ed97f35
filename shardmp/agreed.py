"""What every rank must have alike in a step: options, the norm to clip at, sizes of buffers, weights that were loaded.

Owns:      the snapshot of all that, its checksum, and how a difference is told.
Takes:     the parameter groups as they are at a step, and `Collectives.facts`, where other parts note what must agree.
Gives:     one number for the verdict, on the device; after a step that was withheld, what differs, by name.
Invariant: nothing waits in a step; values that are equal, of whatever numeric type, have equal checksums.

[Note: the checksum] What the host knows is hashed to 51 bits, when it has changed. Tensors among the options (an `lr` on
the device) are mixed there, bit by bit, to 31 bits. Both are added, below 2^52, so that FP64 holds the number exactly.
"""

from __future__ import annotations

import hashlib
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .collectives import Collectives

# The layout knows which parameters a group has.
_NOT_OPTIONS = frozenset(("params", "param_names"))
_SIMPLE = frozenset((float, int, bool, str, type(None)))
_PRIME = 2**31 - 1
_NOTHING = "nothing"
# A fact that holds for one step.
LOADED = "weights loaded since the last step"


class _TensorOption(NamedTuple):
    """An option that is a tensor: elements [start, start + numel) of the snapshot's values."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int


class Snapshot(NamedTuple):
    """What this rank had at one step.

    Attributes:
        groups: by group, its options; clip: the norm to clip at; divided: whether `divide_by` was given; facts: what
            other parts have noted.
        values: the elements of all tensors among the options, FP64, on the device; None where there are none.
    """

    groups: list[dict[str, Any]]
    clip: float | None
    divided: bool
    facts: dict[str, Any]
    values: Tensor | None

    def named(self) -> dict[str, Any]:
        """All of it by the names that a user knows; waits for the device where options are tensors."""
        found = [] if self.values is None else self.values.tolist()
        named = {
            f"group {number}, option {key!r}": _told(value, found)
            for number, group in enumerate(self.groups)
            for key, value in group.items()
        }
        named["the norm to clip at (max_grad_norm, clip_grad_norm_)"] = self.clip
        named["step(divide_by=...)"] = "given" if self.divided else None
        for name, fact in self.facts.items():
            named.update(
                {f"{name} {key}": value for key, value in fact.items()} if type(fact) is dict else {name: fact}
            )
        return named


class Agreed:
    """The checksum of what must be the same on all ranks, taken at each step.

    Args:
        collectives: the shard group, and the facts that other parts note.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._parts: list[Any] = []  # of the last step, each with its own checksum: a schedule changes one of many
        self._checksums: list[int] = []
        self._hash = 0
        self._weights = torch.empty(2, 0, dtype=torch.int64, device=collectives.device)

    def take(
        self, groups: Sequence[dict[str, Any]], clip: float | None, *, divided: bool
    ) -> tuple[Snapshot, float | Tensor]:
        """This rank's snapshot and its checksum, which nothing has waited for."""
        if self._collectives.world_size == 1:
            return Snapshot([], clip, divided, {}, None), 0.0
        tensors: list[Tensor] = []
        options = [plain_options(group, tensors) for group in groups]
        known = (options, clip, divided, dict(self._collectives.facts))
        self._collectives.facts.pop(LOADED, None)
        parts = [*options, (clip, divided), *sorted(known[-1].items())]  # noted in another order where ranks differ
        if parts != self._parts:
            if len(parts) != len(self._parts):
                self._parts, self._checksums = [None] * len(parts), [0] * len(parts)
            for index, (part, before) in enumerate(zip(parts, self._parts, strict=True)):
                if part != before:
                    self._checksums[index] = checksum(part)
            self._parts, self._hash = parts, checksum(self._checksums)
        if not tensors:
            return Snapshot(*known, None), float(self._hash)
        device = self._collectives.device
        values = torch.cat([_elements(tensor).to(device, torch.float64, non_blocking=True) for tensor in tensors])
        values += 0.0  # of two zeros one
        return Snapshot(*known, values), self._mixed(values) + float(self._hash)

    def put_back(self, snapshot: Snapshot) -> None:
        """The step of this snapshot was withheld: weights that were loaded before it are to be compared once more."""
        self._collectives.facts = {**snapshot.facts, **self._collectives.facts}

    def _mixed(self, values: Tensor) -> Tensor:
        """Below 2^31, as 0-dim FP64: another number, with a chance of 1 - 2^-31, where a bit differs."""
        if self._weights.size(1) != values.numel():
            numbers = torch.arange(1, 2 * values.numel() + 1, dtype=torch.int64, device=values.device)
            self._weights = ((numbers * 0x5851F42D) % _PRIME % 2**30 | 1).view(2, -1)
        bits = values.view(torch.int64)
        low, high = bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF
        return ((low * self._weights[0] + high * self._weights[1]) % _PRIME).sum().remainder(_PRIME).double()


def plain_options(group: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """A group's options as values that can be kept, compared and sent; its tensors are appended to `tensors`."""
    return {
        key: value if type(value) in _SIMPLE else _plain(value, tensors)
        for key, value in group.items()
        if key not in _NOT_OPTIONS
    }


def option_lines(group: Mapping[str, Any]) -> dict[str, str]:
    """A group's options as words, by name; waits for the device where they are tensors."""
    tensors: list[Tensor] = []
    options = plain_options(group, tensors)
    values = [number for tensor in tensors for number in _elements(tensor).double().tolist()]
    return {key: str(_canonical(_told(value, values))) for key, value in sorted(options.items())}


def checksum(value: Any) -> int:
    """51 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(_canonical(value)).encode(), digest_size=8).digest(), "big") >> 13


def differences(told: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What differs between ranks, an item a line: its name, and each value with the ranks that have it.

    Args:
        told: by rank, what `Snapshot.named` gives.
    """
    for name in dict.fromkeys(name for one in told for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            ranks.setdefault(repr(_canonical(one.get(name, _NOTHING))), []).append(rank)
        if len(ranks) > 1:
            values = [
                f"{told[who[0]].get(name, _NOTHING)} on rank {', '.join(map(str, who))}" for who in ranks.values()
            ]
            yield f"{name}: {'; '.join(values)}"


def refuse_other_arguments(call: str, told: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a collective call was given other arguments on one rank than on another.

    Args:
        call: its name. told: by rank, the arguments that must be alike.

    Raises:
        ValueError: on every rank, with each argument that differs and who gave what.
    """
    found = list(differences(told))
    if found:
        raise ValueError(f"{call}: expected the same arguments on every rank, got {', and '.join(found)}")


def _elements(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        start = sum(_elements(tensor).numel() for tensor in tensors)
        tensors.append(value)
        return _TensorOption(str(value.dtype), tuple(value.shape), start, _elements(value).numel())
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, tensors) for key, item in value.items()}
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, torch.device):
        return value.type
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # a function, an object: by its name


def _told(value: Any, values: Sequence[float]) -> Any:
    """An option with the elements of its tensors in their places."""
    if isinstance(value, _TensorOption):
        found = values[value.start : value.start + value.numel]
        return f"tensor({found if value.shape else found[0]}, {value.dtype})"
    if isinstance(value, list):
        return [_told(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _told(item, values) for key, item in value.items()}
    return value


def _canonical(value: Any) -> Any:
    """`value` such that what is equal has one `repr`, and one order."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value) + 0.0
        except OverflowError:
            return value
    if isinstance(value, _TensorOption):
        return ("tensor", value.dtype, value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(_canonical(item) for item in value)
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    return value
