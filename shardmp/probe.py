"""What kind of optimizer a class is, found by steps on small parameters: how it must be stepped, or why it is refused.

Owns:      the trial: some parameters with the user's options, whole, and cut as three ranks cut them.
Takes:     the user's optimizer, which it leaves as it is, with the random state and the global hooks.
Gives:     `Findings`, or an error with the reason. The same on every rank.
Invariant: a class that passes gives the same masters, state and options wherever shards are cut.

[Note: what a trial is] All distinct groups together take several steps, with gradients that grow and shrink (some
classes clip by a norm, or change their rule after some steps). Once on whole parameters with as many dimensions as
the user's have; once as `Update` steps them: an optimizer for each rank, on padded 1-D pieces of a flat shard, and in
each group a small parameter of its own, so that a rank without a piece goes on counting. Masters, state and options
must come out alike. The large parameter has 8192 elements: 8-bit optimizers keep FP32 state below 4096, and would pass.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import codec, inner
from .inner import options_of
from .layout import UNIT, Entry, plan
from .tiles import seed_of, seeded

# What the gradients of each step are multiplied by.
FACTORS = (1.0, 8.0, 0.125, 4.0, 0.5)
RANKS = 3
_LR = 0.0625  # a warm-up that starts at 0 would hide everything


@dataclass(frozen=True)
class Findings:
    """What the probe has found of an optimizer.

    Attributes:
        state: the names of the state tensors that have an element for each of the parameter's, and their dtypes beside FP32
            masters.
        options: names that a step writes into groups. attributes: attributes of the optimizer that a step changes.
        seeds: for each group, the state that a parameter has before its first step: 64 elements of what is cut, by
            name. Empty where the class's constructor makes none.
    """

    state: dict[str, torch.dtype]
    options: frozenset[str]
    attributes: frozenset[str]
    seeds: tuple[dict[str, Any], ...]

    @property
    def once(self) -> bool:
        """Whether a step changes more than parameters and their state, so that it must be made once a step."""
        return bool(self.options or self.attributes)


@dataclass(frozen=True)
class _Member:
    """A parameter of a trial: the memory that it is a view of, and its gradient in each step."""

    group: int
    values: Tensor
    gradients: Sequence[Tensor]


def probe(optimizer: Optimizer) -> Findings:
    """Try the class, with the groups' options, on small parameters: whole, and in pieces as ranks have them.

    Raises:
        TypeError: the class needs whole parameters, or something other than gradients; it names both.
    """
    _refuse_by_sight(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    device = params[0].device if params and not params[0].is_meta else torch.device("cpu")
    random_state = codec.random_state(device)
    try:
        with torch.no_grad():
            return _Probe(optimizer, device).findings()
    finally:
        codec.set_random_state(random_state, device)


def _refuse_by_sight(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    other = inner.wraps_another(optimizer)
    if other is not None:
        raise TypeError(f"optimizer {name} wraps another optimizer (its attribute {other}); hand in the plain one")
    _refuse_state_of_none(optimizer)
    for hooks in inner.STATE_DICT_HOOKS:
        if getattr(optimizer, hooks, None):
            raise TypeError(
                f"optimizer {name} has hooks of its state_dict ({hooks}), which shardmp.save and load, that write and read "
                "shards, would not run: remove them before shard(), and save what they add with save(extra=...)"
            )


def _refuse_state_of_none(optimizer: Optimizer) -> None:
    for key, state in optimizer.state.items():
        if not isinstance(key, Tensor) or not isinstance(state, dict):
            raise TypeError(
                f"optimizer {type(optimizer).__name__} keeps {key if isinstance(key, str) else type(state).__name__!r} in its "
                "`state`, which is no parameter's: a shard would not have it. Keep it in a group, or in an attribute"
            )


def _shape(dims: int, *, large: bool) -> tuple[int, ...]:
    """A shape of so many dimensions, of 8192 or 96 elements."""
    shapes = ((8192,), (64, 128), (16, 16, 32), (8, 64, 4, 4)) if large else ((96,), (3, 32), (2, 3, 16), (2, 3, 4, 4))
    return (*shapes[min(max(dims, 1), 4) - 1], *(1,) * (dims - 4))


def _run(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    seeds: Sequence[dict[str, Any]],
    members: Sequence[_Member],
) -> Optimizer:
    """A trial of the class on these parameters, after its steps."""
    parameters = [nn.Parameter(member.values) for member in members]
    trial = inner.trial_copy(optimizer, [])
    for number, group in enumerate(groups):
        own = [p for p, member in zip(parameters, members, strict=True) if member.group == number]
        trial.param_groups.append({**trial_options(options_of(group)), "params": own})
    for parameter, member in zip(parameters, members, strict=True):
        if seeds[member.group]:
            trial.state[parameter] = seeded(seeds[member.group], parameter)
    _call(trial, "train")
    for number, factor in enumerate(FACTORS):
        for parameter, member in zip(parameters, members, strict=True):
            parameter.grad = member.gradients[number] * factor
        inner.step(trial)
        if number == 2:
            _call(trial, "eval")
            _call(trial, "train")
    return trial


def trial_options(options: dict[str, Any]) -> dict[str, Any]:
    """A trial's own copy of a group's options, with a rate of its own."""
    copied = copy.deepcopy(options)
    if "lr" in copied:
        lr = copied["lr"]
        copied["lr"] = torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR
    return copied


def _call(trial: Optimizer, name: str) -> None:
    """Call `train()` or `eval()`, where the class has it: schedule-free optimizers move the parameters there."""
    method = getattr(trial, name, None)
    if callable(method):
        method()


class _Probe:
    """One probe: the parameters of the trials, and what is compared."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self.device = device
        self.numbers = list(self._distinct())  # the groups in the trial, by their number in the optimizer
        self.groups = [optimizer.param_groups[number] for number in self.numbers]
        self.seeds = [seed_of(group, optimizer.state, device) for group in self.groups]
        generator = torch.Generator("cpu").manual_seed(20180215)

        def random(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

        self.starts: list[Tensor] = []
        self.gradients: list[list[Tensor]] = []
        self.owners: list[int] = []
        for number, group in enumerate(self.groups):
            dims = sorted({p.dim() for p in group["params"]} or {2}, reverse=True)
            for shape in (_shape(dims[0], large=True), *(_shape(each, large=False) for each in dims)):
                self.starts.append(random(shape))
                self.gradients.append([random(shape) for _ in FACTORS])
                self.owners.append(number)

    def _distinct(self) -> Iterator[int]:
        """One group of each set of options and dimensions: a rate for each layer would make a trial long."""
        seen: list[tuple[dict[str, Any], set[int]]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            found = {**options_of(group), "lr": 0.0}, {p.dim() for p in group["params"]}
            if not any(dims == found[1] and inner.same(options, found[0]) for options, dims in seen):
                seen.append(found)
                yield number

    # -- the trials

    def _members(self, *, flat: bool = False) -> list[_Member]:
        return [
            _Member(owner, start.reshape(-1).clone(), [g.reshape(-1) for g in gradients])
            if flat
            else _Member(owner, start.clone(), gradients)
            for owner, start, gradients in zip(self.owners, self.starts, self.gradients, strict=True)
        ]

    def _rank(self, rank: int) -> tuple[list[_Member], list[tuple[int, int, int]]]:
        """What a rank has of the parameters, as `Update` has it, and for each which elements of which they are."""
        entries = [Entry(str(index), start.numel(), "fp32") for index, start in enumerate(self.starts)]
        borders = [self.owners.index(number) for number in range(len(self.groups))]  # so that each group is cut
        layout = plan(entries, RANKS, bucket_bytes=2**40, itemsize={"fp32": 4}, borders=borders)
        members, places = [], []
        for piece in layout.pieces(rank):
            start, gradients = self.starts[piece.param].reshape(-1), self.gradients[piece.param]
            padded = [start.new_zeros(piece.length) for _ in range(1 + len(FACTORS))]
            for row, values in zip(padded, (start, *(g.reshape(-1) for g in gradients)), strict=True):
                row[: piece.hi - piece.lo].copy_(values[piece.lo : piece.hi])
            members.append(_Member(self.owners[piece.param], padded[0], padded[1:]))
            places.append((piece.param, piece.lo, piece.hi))
        for number in range(len(self.groups)):
            zeros = [torch.zeros(UNIT, dtype=torch.float32, device=self.device) for _ in range(1 + len(FACTORS))]
            members.append(_Member(number, zeros[0], zeros[1:]))
        return members, places

    def findings(self) -> Findings:
        before = torch.random.get_rng_state()
        whole = self._members()
        trial = self._whole(whole)
        is_random = not torch.equal(before, torch.random.get_rng_state())
        _refuse_state_of_none(trial)
        self._check_moved(whole, trial)
        pieces = [torch.zeros_like(start).view(-1) for start in self.starts]
        trials = []
        for rank in range(RANKS):
            members, places = self._rank(rank)
            try:
                other = _run(self.optimizer, self.groups, self.seeds, members)
            except Exception as error:
                self._refuse(0, f"a trial step on 1-D pieces failed: {error}", error)
            for member, (param, lo, hi) in zip(members, places, strict=False):
                pieces[param][lo:hi] = member.values[: hi - lo]
            trials.append((other, places))
        for index, (member, found) in enumerate(zip(whole, pieces, strict=True)):
            if not torch.allclose(member.values.view(-1), found, rtol=1e-6, atol=1e-7, equal_nan=True):
                worst = (member.values.view(-1) - found).abs().max().item()
                why = "it draws random numbers" if is_random else self._why(whole, trial)
                self._refuse(
                    self.owners[index],
                    f"a trial step on pieces differs by {worst:.3g} from the step on the whole: {why}",
                )
        options, attributes = self._changes(trial)
        self._check_changes(trial, [other for other, _ in trials], options, attributes)
        state = self._check_state(trial, trials)
        by_options = [self._like(number) for number in range(len(self.optimizer.param_groups))]
        return Findings(state, options, attributes, tuple(self.seeds[index] for index in by_options))

    def _like(self, number: int) -> int:
        """The group of the trial that stands for a group of the optimizer."""
        group = self.optimizer.param_groups[number]
        own = {**options_of(group), "lr": 0.0}
        dims = {p.dim() for p in group["params"]}
        for index, other in enumerate(self.groups):
            if dims == {p.dim() for p in other["params"]} and inner.same({**options_of(other), "lr": 0.0}, own):
                return index
        raise AssertionError("every group has one like it")

    def _whole(self, members: Sequence[_Member]) -> Optimizer:
        try:
            return _run(self.optimizer, self.groups, self.seeds, members)
        except Exception as error:
            raise TypeError(
                f"optimizer {self.name} (group {self.numbers[0]}): a trial step failed: {error}. Sharded state needs an "
                "elementwise optimizer, whose step() takes no closure and needs gradients alone"
            ) from error

    def _check_moved(self, members: Sequence[_Member], trial: Optimizer) -> None:
        for index, member in enumerate(members):
            if torch.equal(member.values, self.starts[index]):
                held = [p for group in trial.param_groups for p in group["params"]][index]
                why = (
                    "it gives parameters new tensors (p.data = ...) in place of writing into them"
                    if held.data_ptr() != member.values.data_ptr()
                    else "if it wraps another optimizer, hand in the plain one"
                )
                number = self.numbers[self.owners[index]]
                raise TypeError(f"optimizer {self.name} (group {number}): a trial step changed nothing: {why}")

    # -- the reasons

    def _refuse(self, owner: int, words: str, error: Exception | None = None) -> NoReturn:
        raise TypeError(
            f"optimizer {self.name} (group {self.numbers[owner]}) needs whole parameters: {words}. Sharded state needs an "
            "elementwise optimizer (Adam, AdamW, SGD, RMSprop, ...)"
        ) from error

    def _why(self, whole: Sequence[_Member], trial: Optimizer) -> str:
        """Where the step on pieces differs: by what."""
        for state in trial.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and type(value) is not Tensor:
                    return f"it keeps state in blocks ({key} is a {type(value).__name__}), which pieces would cut"
                if isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int8):
                    return f"it keeps state in blocks of 8 bits ({key}), which pieces would cut, or keep in FP32"
        flat = self._members(flat=True)
        try:
            _run(self.optimizer, self.groups, self.seeds, flat)
        except Exception as error:
            return f"it needs parameters with their dimensions (flattened ones fail: {error})"
        if self._differ(whole, flat):
            return "it treats matrices otherwise than vectors"
        alone = self._members()
        for member in alone:
            _run(self.optimizer, self.groups, self.seeds, [member])
        if self._differ(whole, alone):
            return "it reduces over all parameters"
        return "it reduces over each whole parameter"

    @staticmethod
    def _differ(one: Sequence[_Member], other: Sequence[_Member]) -> bool:
        pairs = zip(one, other, strict=True)
        return not all(
            torch.allclose(a.values.view(-1), b.values.view(-1), rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs
        )

    # -- state, options, attributes

    def _check_state(
        self, whole: Optimizer, trials: Sequence[tuple[Optimizer, Sequence[tuple[int, int, int]]]]
    ) -> dict[str, torch.dtype]:
        """The names of the state that is cut; what is not must be the same on the whole and on every piece."""
        cut: dict[str, torch.dtype] = {}
        parameters = [p for group in whole.param_groups for p in group["params"]]
        for trial, places in trials:
            pieces = _in_order(trial, [self.owners[param] for param, _, _ in places])
            for piece, (index, _, _) in zip(pieces, places, strict=True):
                state, own = whole.state[parameters[index]], trial.state[piece]
                for key in {**state, **own}:
                    a, b = state.get(key), own.get(key)
                    if type(a) is Tensor and type(b) is Tensor and _is_cut(a, parameters[index]) and _is_cut(b, piece):
                        cut[key] = a.dtype
                    elif not inner.same(a, b):
                        self._refuse(
                            self.owners[index],
                            f"its state {key!r} is neither one number for each element nor the same on every piece: "
                            f"{brief(a)} on the whole, {brief(b)} on a piece",
                        )
        return cut

    def _changes(self, trial: Optimizer) -> tuple[frozenset[str], frozenset[str]]:
        """The options and attributes that the steps of a trial have changed."""
        options: set[str] = set()
        for group, changed in zip(self.groups, trial.param_groups, strict=True):
            before, after = trial_options(options_of(group)), options_of(changed)
            options |= {key for key in {**before, **after} if not has_same(before, after, key)}
        before, after = inner.attributes_of(inner.trial_copy(self.optimizer, [])), inner.attributes_of(trial)
        return frozenset(options), frozenset(key for key in {**before, **after} if not has_same(before, after, key))

    def _check_changes(
        self, whole: Optimizer, trials: Sequence[Optimizer], options: frozenset[str], attributes: frozenset[str]
    ) -> None:
        """What a step changes beside parameters must be the same on every rank, and fit into a checkpoint."""
        for trial, key in itertools.product(trials, sorted(options)):
            for number, (a, b) in enumerate(zip(whole.param_groups, trial.param_groups, strict=True)):
                if not has_same(a, b, key):
                    self._refuse(
                        number,
                        f"its step() writes {key!r} into the group, {brief(a.get(key))} on whole parameters and "
                        f"{brief(b.get(key))} on pieces: it reduces over all parameters",
                    )
        for trial, key in itertools.product(trials, sorted(attributes)):
            a, b = vars(whole), vars(trial)
            if not has_same(a, b, key):
                self._refuse(
                    0,
                    f"its step() writes the attribute {key!r}, {brief(a.get(key))} on whole parameters and "
                    f"{brief(b.get(key))} on pieces: it reduces over all parameters, or keeps state outside `state`",
                )
        for key in sorted(options):
            for number, group in enumerate(whole.param_groups):
                codec.dumps(group.get(key), f"optimizer {self.name}: param_groups[{self.numbers[number]}][{key!r}]")
        for key in sorted(attributes):
            codec.dumps(vars(whole).get(key), f"optimizer {self.name}: its attribute {key!r}, which step() changes")


def _in_order(trial: Optimizer, owners: Sequence[int]) -> list[Tensor]:
    """The parameters of a trial in the order of its members, whose groups are `owners`."""
    rest = [iter(group["params"]) for group in trial.param_groups]
    return [next(rest[owner]) for owner in owners]


def _is_cut(value: Tensor, parameter: Tensor) -> bool:
    return value.shape == parameter.shape


def has_same(a: dict[str, Any], b: dict[str, Any], key: str) -> bool:
    """Whether both have equal values there, or both have none."""
    return (key in a) == (key in b) and inner.same(a.get(key), b.get(key))


def brief(value: Any) -> str:
    """A value in an error."""
    if isinstance(value, Tensor) and value.dim():
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)[:80]
