"""The FP32 update of this rank's shard by an ordinary torch optimizer.

Owns:      the inner optimizer, which steps on pieces of the flat masters, and its state.
Takes:     the class, attributes and groups of the user's optimizer; the gradient shard; the verdict.
Gives:     updated masters. It calls no collective.
Invariant: the update of an element does not depend on where shards are cut; an optimizer cannot tell that it is sharded.

[Note: a step ONCE] A class whose `step()` changes more than parameters and their state (a counter in a group, an
attribute) is stepped exactly once a step, on every rank, over all of the rank's pieces; a skipped step does not step
it. In each group it has one small parameter more, of the rank's own (zeros, with zeros as gradient), so that a rank
without a piece counts as the others do. What it changes is written back to the user's groups and attributes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from . import codec, inner
from .gradients import Gradients
from .inner import options_of
from .layout import UNIT, Piece
from .parameters import Parameters
from .probe import Findings
from .routes import Route, deciding, takes_flags, try_options
from .tiles import Tile, at_least_fp32, batches, cut_state, elementwise_keys, seeded
from .verdict import Verdict

# Elements updated at a time where the optimizer makes temporaries: 1 MB of FP32 each.
UPDATE_TILE = 2**18


class Update:
    """The inner optimizer on this rank's pieces.

    Args:
        optimizer: the user's; its class, attributes, groups and state are taken over. Its state is cut and released.
        findings: what the probe has found of it.
        params: the trainable parameters, by index.
        parameters, gradients: the shards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        findings: Findings,
        params: Sequence[nn.Parameter],
        parameters: Parameters,
        gradients: Gradients,
    ) -> None:
        self.groups = optimizer.param_groups
        self.elementwise = frozenset(findings.state)
        self.applied_steps: Callable[[], int] = lambda: 0  # waits for the device
        self._original = optimizer
        self._findings = findings
        self._device = params[0].device
        self._brought = bool(optimizer.state)
        self._followed = deciding(self.groups)
        self._options = self._first = [options_of(group) for group in self.groups]
        self.inner = inner.fresh_copy(optimizer, [{**options, "params": []} for options in self._options])
        group_of = {id(p): number for number, group in enumerate(self.groups) for p in group["params"]}
        self._group_of = {index: group_of[id(p)] for index, p in enumerate(params)}
        self._parts = [
            (gradient.pieces, part.master, gradient.shard)
            for part, gradient in zip(parameters.buckets, gradients.buckets, strict=True)
        ]
        self.tiles: list[list[Tile]] = []  # by bucket
        self.states: dict[Piece, dict[str, Any]] = {}  # flat state of pieces that several tiles share
        self.own: list[Tile] = []  # ONCE: one for each group that has parameters
        self._choose_route()
        self._cut_state(optimizer, params)
        if self.on_device:
            self._make_state()

    def _choose_route(self) -> None:
        if self._findings.once:
            self.route = Route.ONCE
        else:
            self.route = Route.FUSED if takes_flags(self._original) else Route.TILED
        self.tiles = [
            [tile for piece in pieces for tile in self._tiles(piece, master, gradient)]
            for pieces, master, gradient in self._parts
        ]
        self.own = [self._own_tile(number) for number, group in enumerate(self.groups) if self.route is Route.ONCE]

    def _own_tile(self, group: int) -> Tile:
        """The rank's own small parameter in a group. Its state is what any parameter's would be after the same steps."""
        values = torch.zeros(2, UNIT, dtype=torch.float32, device=self._device)
        tile = Tile(Piece(-1, -1, -1, 0, UNIT, 0, UNIT), group, values[0], values[1], 0)
        if self._findings.seeds[group]:
            self.inner.state[tile.parameter] = seeded(self._findings.seeds[group], tile.parameter)
        return tile

    def _tiles(self, piece: Piece, master: Tensor, gradient: Tensor) -> Iterator[Tile]:
        size = UPDATE_TILE if self.route is Route.TILED else piece.length
        for start in range(0, piece.length, size):
            where = slice(piece.offset + start, piece.offset + min(start + size, piece.length))
            yield Tile(piece, self._group_of[piece.param], master[where], gradient[where], start)

    @property
    def on_device(self) -> bool:
        """Whether divisor and skip flag stay on the device."""
        return self.route is Route.FUSED

    @property
    def runs(self) -> list[list[int]]:
        """Indices of the buckets that are updated together, in the order in which the next forward reads them."""
        order = list(reversed(range(len(self.tiles))))
        return [order] if self.route is Route.ONCE else [[index] for index in order]

    def _all_tiles(self) -> Iterator[Tile]:
        for tiles in self.tiles:
            yield from tiles

    # -- state

    def _cut_state(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """The user's state becomes that of this rank's pieces, in FP32 where it was of 16-bit parameters."""
        # The probe sees no state that comes later.
        dtypes = {**dict.fromkeys(elementwise_keys(optimizer.state)), **self._findings.state}
        for tile in self._all_tiles():
            param = params[tile.piece.param]
            if optimizer.state.get(param):
                cut, rest = cut_state(tile, param, optimizer.state[param], dtypes)
                self.inner.state[tile.parameter] = {**cut, **{key: self._whole(value) for key, value in rest.items()}}
                self._join_state(tile)
        optimizer.state.clear()

    def _whole(self, value: Any) -> Any:
        """A piece's own copy of what is not cut; fused kernels take their step counts from where the parameters are."""
        if not isinstance(value, Tensor):
            return value
        value = value.to(at_least_fp32(value.dtype), copy=True)
        return value.to(self._device) if self.on_device else value

    def _make_state(self) -> None:
        """Give every piece the state that torch would give it at its first step."""
        for tiles in self.tiles:
            self._make_momentum(tiles)
            new = [tile for tile in tiles if not self.inner.state.get(tile.parameter)]
            if new and not isinstance(self.inner, SGD):  # a step that is skipped makes the state and changes nothing
                one = torch.ones((), dtype=torch.float32, device=new[0].parameter.device)
                self._step(new, grad_scale=one, found_inf=one)

    def _make_momentum(self, tiles: Sequence[Tile]) -> None:
        """SGD's buffers as zeros: momentum x 0 + gradient is what torch's first step stores."""
        if isinstance(self.inner, SGD):
            for tile in tiles:
                state = self.inner.state[tile.parameter]
                if self.groups[tile.group]["momentum"] and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(tile.parameter)

    def _join_state(self, tile: Tile) -> None:
        """Let the tiles of one piece hold views of one flat state, as a checkpoint wants it."""
        piece = tile.piece
        if tile.parameter.numel() == piece.length:
            return
        flat = self.states.setdefault(piece, {})
        state = self.inner.state[tile.parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == tile.parameter.shape:
                if key not in flat:
                    flat[key] = torch.zeros(piece.length, dtype=value.dtype, device=value.device)
                view = flat[key][tile.start : tile.start + value.numel()]
                if view.data_ptr() != value.data_ptr():
                    state[key] = view.copy_(value)

    def piece_states(self) -> Iterator[tuple[Piece, dict[str, Tensor], dict[str, Any]]]:
        """Each piece, its state tensors with an element for each of the piece's, and the rest (step counts)."""
        for tile in self._all_tiles():
            if tile.start:
                continue
            state, flat = self.inner.state.get(tile.parameter, {}), self.states.get(tile.piece, {})
            own = {
                key: flat.get(key, value)
                for key, value in state.items()
                if isinstance(value, Tensor) and value.shape == tile.parameter.shape
            }
            yield tile.piece, own, {k: v for k, v in state.items() if k not in own and v is not None}

    def set_states(self, states: Mapping[Piece, tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
        """Take over the states of pieces, as `piece_states` gives them; a piece that has none starts anew."""
        self.states.clear()
        self.inner.state.clear()
        for tile in self._all_tiles():
            flat, rest = states.get(tile.piece, ({}, {}))
            numel = tile.parameter.numel()
            own: dict[str, Any] = {key: value[tile.start : tile.start + numel] for key, value in flat.items()}
            own |= {key: self._whole(value) for key, value in rest.items()}
            if own:
                self.inner.state[tile.parameter] = own
            if flat and numel < tile.piece.length:
                self.states[tile.piece] = flat
        for tile in self.own:
            like = next((s for p, s in states.items() if self._group_of[p.param] == tile.group), ({}, {}))
            own = {key: torch.zeros(UNIT, dtype=v.dtype, device=self._device) for key, v in like[0].items()}
            own |= {key: self._whole(value) for key, value in like[1].items()}
            if own:
                self.inner.state[tile.parameter] = own
        self._brought |= any(flat or rest for flat, rest in states.values())
        if self.on_device:
            self._make_state()

    def extra_state(self) -> str | None:
        """What a class that steps ONCE changes beside parameters, their state and its groups' options, as JSON; or None.

        The same on every rank.
        """
        if self.route is not Route.ONCE:
            return None
        attributes = {key: value for key, value in vars(self._original).items() if key in self._findings.attributes}
        value = {
            "attributes": attributes,
            "options": [sorted(self._findings.options & group.keys()) for group in self.groups],
            "own": [[tile.parameter.detach(), dict(self.inner.state.get(tile.parameter, {}))] for tile in self.own],
        }
        return codec.dumps(value, f"optimizer {type(self.inner).__name__}").decode()

    def set_extra_state(self, text: str | None) -> None:
        """Take over what `extra_state` gave, after `set_states` and after the groups have their options."""
        if text is None or self.route is not Route.ONCE:
            return
        value = codec.loads(text.encode())
        for key in self._findings.attributes:
            if key not in value["attributes"]:
                vars(self._original).pop(key, None)
        vars(self._original).update(self._on_device(value["attributes"]))
        for group, there in zip(self.groups, value["options"], strict=True):
            for key in self._findings.options & group.keys() - set(there):
                del group[key]
        for tile, (parameter, state) in zip(self.own, value["own"], strict=True):
            tile.parameter.data.copy_(parameter)
            self.inner.state[tile.parameter] = self._on_device(state)

    def _on_device(self, values: dict[str, Any]) -> dict[str, Any]:
        return {k: v.to(self._device) if isinstance(v, Tensor) and v.dim() else v for k, v in values.items()}

    def _moments(self) -> Iterator[tuple[Tensor, Tensor]]:
        for tile in self._all_tiles():
            for value in self.inner.state.get(tile.parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == tile.parameter.shape:
                    yield tile.parameter, value

    @property
    def moments(self) -> int:
        """State tensors that an element has, as far as steps have made them."""
        counts: dict[Tensor, int] = defaultdict(int)
        for parameter, _ in self._moments():
            counts[parameter] += 1
        return max(counts.values(), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments that this rank holds."""
        return sum(value.numel() * value.element_size() for _, value in self._moments())

    # -- one step

    def left_out(self, verdict: Verdict, absent: Sequence[int]) -> Container[int] | None:
        """Parameters that this step must not touch, as far as the host must know; None where it is skipped.

        Where kernels take no flags the host waits for the verdict; also once where an option has been written that decides
        which kernel or state the class has.

        Args:
            absent: parameters that had no gradient on this rank. A rank that used all of its parameters knows that
                none is left out.

        Raises:
            ValueError: the class cannot go on with the options that were written, on every rank; nothing has been changed.
        """
        written = deciding(self.groups) != self._followed
        if (written or not self.on_device) and bool(verdict.found_inf):
            return None  # what was written acts at the next step that is applied
        if written:
            self._follow()
        if self.on_device:
            return ()
        return verdict.unused() if absent else ()

    def _follow(self) -> None:
        """Options were written that decide which kernel or state the class has: go on with them, as torch would."""
        stepped = self._brought or self.applied_steps() > 0
        options = [options_of(group) for group in self.groups]
        try_options(self.inner, self._findings, self._first, self._options, options, self._device, stepped=stepped)
        is_other = self.on_device != takes_flags(self._original)
        if self.route is not Route.ONCE and (is_other or not stepped):
            states = {piece: (flat, rest) for piece, flat, rest in self.piece_states()} if stepped else {}
            self._choose_route()
            self.set_states(states)
        self._options, self._followed = options, deciding(self.groups)

    def _step(self, tiles: Sequence[Tile], **flags: Tensor) -> None:
        with self._on_tiles(tiles):
            self.inner.__dict__.update(flags)
            for tile in tiles:
                tile.parameter.grad = tile.gradient
            inner.step(self.inner)
            for flag in flags:  # other kernels refuse them
                del self.inner.__dict__[flag]
            for tile in tiles:
                tile.parameter.grad = None

    def step_run(
        self, run: Sequence[int], verdict: Verdict, left_out: Container[int] | None, absent: Sequence[int]
    ) -> None:
        """Update this rank's pieces of the buckets of a run, except those of the parameters `left_out`.

        Args:
            left_out: as `left_out` said; None skips.
            absent: parameters without a gradient on this rank: a flag of their own tells kernels whether any rank had one.
        """
        if left_out is None:
            return
        tiles = [tile for index in run for tile in self.tiles[index] if tile.piece.param not in left_out]
        if self.route is Route.ONCE:
            self._step_once(tiles, verdict, left_out)
        elif self.on_device:
            self._step_fused(tiles, verdict, absent)
        else:
            for batch in batches(tiles, UPDATE_TILE):
                for tile in batch:
                    tile.gradient.div_(verdict.grad_scale)
                self._step(batch)
                for tile in batch:
                    self._join_state(tile)

    def _step_fused(self, tiles: Sequence[Tile], verdict: Verdict, absent: Sequence[int]) -> None:
        self._make_momentum(tiles)
        doubtful = {param: [tile for tile in tiles if tile.piece.param == param] for param in absent}
        seen = [tile for tile in tiles if tile.piece.param not in doubtful] if absent else tiles
        for some, found_inf in ((seen, verdict.found_inf), *((doubtful[p], verdict.skips(p)) for p in absent)):
            if some:
                self._step(some, grad_scale=verdict.grad_scale, found_inf=found_inf)

    def _step_once(self, tiles: Sequence[Tile], verdict: Verdict, left_out: Container[int]) -> None:
        """One step for all groups, also where this rank has no piece: a group whose parameters had gradients counts."""
        stepping = {number for param, number in self._group_of.items() if param not in left_out}
        with self._all_at_once():
            for tile in tiles:
                tile.parameter.grad = tile.gradient.div_(verdict.grad_scale)
            for tile in self.own:
                tile.parameter.grad = tile.gradient.zero_() if tile.group in stepping else None
            inner.step(self.inner)
            for tile in (*tiles, *self.own):
                tile.parameter.grad = None

    def call(self, method: str) -> None:
        """Let the class's own method act on the masters: `train` and `eval` of schedule-free optimizers."""
        with self._all_at_once():
            getattr(self.inner, method)()
        for tile in self._all_tiles():
            self._join_state(tile)

    @contextlib.contextmanager
    def _on_tiles(self, tiles: Sequence[Tile]) -> Iterator[None]:
        """The inner optimizer's groups have the user's options, and these tiles as parameters."""
        for index, (own, theirs) in enumerate(zip(self.inner.param_groups, self.groups, strict=True)):
            own.clear()
            own.update(options_of(theirs))
            if self.on_device:
                own["fused"], own["foreach"] = True, False
            own["params"] = [tile.parameter for tile in tiles if tile.group == index]
        yield
        for group in self.inner.param_groups:
            group["params"] = []

    @contextlib.contextmanager
    def _all_at_once(self) -> Iterator[None]:
        """The inner optimizer has all pieces, and the rank's own; what it changes is the user's afterwards."""
        ours, theirs = vars(self.inner), vars(self._original)
        for key in self._findings.attributes & theirs.keys():
            ours[key] = theirs[key]
        with self._on_tiles([*self._all_tiles(), *self.own]):
            for own in self.inner.param_groups:
                if "foreach" in own and own["foreach"] is None and self.route is Route.ONCE:
                    own["foreach"] = False  # or temporaries of the whole shard exist at one time
            yield
        for key in self._findings.attributes & ours.keys():
            theirs[key] = ours[key]
        for own, group in zip(self.inner.param_groups, self.groups, strict=True):
            for key in options_of(group).keys() - own.keys():
                del group[key]
            group.update({key: value for key, value in options_of(own).items() if key not in ("fused", "foreach")})
        self._options = [options_of(group) for group in self.groups]
        self._followed = deciding(self.groups)
