"""The FP32 update of this rank's shard by an ordinary torch optimizer.

Owns:      the inner optimizer, which steps on pieces of the flat masters, and its state.
Takes:     the class and the groups of the user's optimizer; the gradient shard; the verdict.
Gives:     updated masters. It calls no collective.
Invariant: the update of an element does not depend on where shards are cut; temporaries are one tile.

[Note: two ways to skip] Adam, AdamW, Adagrad and SGD have fused kernels that take a divisor and a skip flag from the
device; they step on whole pieces and nothing waits for the host. Their state exists before the first step with the
values that torch would give: a skipped first step would otherwise leave SGD's momentum uninitialised. Every other
class, and SGD with momentum and dampening (whose first step differs), waits for the flag on the host and steps tile
by tile.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from .gradients import Gradients
from .layout import Piece
from .parameters import Parameters
from .verdict import Verdict

# Elements updated at a time where the optimizer makes temporaries: 1 MB of FP32 each.
UPDATE_TILE = 2**18


def fresh_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and attributes on other groups, without state, hooks, or a scheduler's wrapper.

    The constructor is not called: a user's class may take what the groups do not tell.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copy.__dict__[name] = OrderedDict()
    copy.state = defaultdict(dict)
    copy.param_groups = groups
    return copy


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def takes_flags(optimizer: Optimizer) -> bool:
    """Whether every group can run the fused kernels with divisor and skip flag on the device."""
    if type(optimizer) not in (Adam, AdamW, Adagrad, SGD):
        return False
    for group in optimizer.param_groups:
        if any(p.is_meta for p in group["params"]):  # there are no kernels to take them
            return False
        chosen = group.get("fused") or (group.get("fused") is None and group.get("foreach") is None)
        if not chosen or group.get("differentiable"):
            return False
        if isinstance(optimizer, SGD) and group["momentum"] and group["dampening"]:
            return False
        if isinstance(optimizer, Adagrad) and any(p.device.type != "cpu" for p in group["params"]):
            return False
    return True


# -- the probe


def probe(optimizer: Optimizer) -> set[str]:
    """Step a small random matrix whole and in pieces, each piece as its own rank would: the results must agree.

    It has 8192 elements: 8-bit optimizers (bitsandbytes, torchao) keep FP32 state below 4096, and would pass as elementwise.

    Returns:
        The names of the state tensors that have an element for each of the parameter's.

    Raises:
        TypeError: the class needs whole parameters, or something other than gradients; it names both.
    """
    name = type(optimizer).__name__
    keys: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        options = _probe_options(group)
        torch_state = torch.random.get_rng_state()
        generator = torch.Generator("cpu").manual_seed(20180215)
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        device = torch.device("cpu") if device.type == "meta" else device
        start, *gradients = (
            torch.randn(64, 128, generator=generator, dtype=torch.float32, device="cpu").to(device) for _ in range(3)
        )
        try:
            whole, found = _trial(optimizer, options, start, gradients, [(0, 8192)], as_matrix=True)
            pieces, _ = _trial(optimizer, options, start, gradients, [(0, 704), (704, 8192)], as_matrix=False)
        except Exception as error:
            raise TypeError(
                f"optimizer {name} (group {number}): a trial step on a piece of a parameter failed: {error}. Sharded "
                "state needs an elementwise optimizer, whose step() takes no closure and works on 1-D pieces"
            ) from error
        finally:
            torch.random.set_rng_state(torch_state)
        if torch.equal(whole, start.view(-1)):
            raise TypeError(
                f"optimizer {name} (group {number}): a trial step changed nothing. If it wraps another optimizer, hand in "
                "the plain one"
            )
        if not torch.allclose(whole, pieces, rtol=1e-6, atol=1e-7, equal_nan=True):
            worst = (whole - pieces).abs().max().item()
            raise TypeError(
                f"optimizer {name} (group {number}) needs whole parameters: a trial step on pieces differs by "
                f"{worst:.3g} from the step on the whole. Sharded state needs an elementwise optimizer (Adam, AdamW, "
                "SGD, RMSprop, ...)"
            )
        keys |= found
    return keys


def _probe_options(group: dict[str, Any]) -> dict[str, Any]:
    options = _options(group)
    if "lr" in options:  # a warm-up that starts at 0 would hide everything
        options["lr"] = torch.full_like(options["lr"], 0.0625) if isinstance(options["lr"], Tensor) else 0.0625
    return options


def _trial(
    optimizer: Optimizer,
    options: dict[str, Any],
    start: Tensor,
    gradients: Sequence[Tensor],
    cuts: Sequence[tuple[int, int]],
    *,
    as_matrix: bool,
) -> tuple[Tensor, set[str]]:
    results = []
    keys: set[str] = set()
    for first, last in cuts:
        values = start.clone() if as_matrix else start.view(-1)[first:last].clone()
        parameter = nn.Parameter(values)
        trial = fresh_copy(optimizer, [{**options, "params": [parameter]}])
        if isinstance(optimizer, Adagrad):
            trial.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32, device=parameter.device),
                "sum": torch.full_like(parameter, options["initial_accumulator_value"]),
            }
        for gradient in gradients:
            parameter.grad = gradient.clone() if as_matrix else gradient.view(-1)[first:last].clone()
            trial.step()
        results.append(parameter.detach().view(-1))
        state = trial.state[parameter]
        keys |= {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape}
    return torch.cat(results), keys


# -- the update


class Tile:
    """Elements of a piece that are updated at a time: a parameter of the inner optimizer and its gradient."""

    def __init__(self, piece: Piece, group: int, master: Tensor, gradient: Tensor, start: int) -> None:
        self.piece = piece
        self.group = group
        self.start = start  # from the piece's own start
        self.parameter = nn.Parameter(master)
        self.gradient = gradient


class Update:
    """The inner optimizer on this rank's pieces.

    Args:
        optimizer: the user's; its class, attributes, groups and state are taken over. Its state is cut and released.
        elementwise: the names of its state tensors that are cut; others (step counts) go to every piece.
        params: the trainable parameters, by index.
        parameters, gradients: the shards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        elementwise: set[str],
        params: Sequence[nn.Parameter],
        parameters: Parameters,
        gradients: Gradients,
    ) -> None:
        self.groups = optimizer.param_groups
        self.elementwise = frozenset(elementwise)
        self.on_device = takes_flags(optimizer)
        self._device = params[0].device
        self.inner = fresh_copy(optimizer, [{**_options(group), "params": []} for group in self.groups])
        group_of = {id(p): index for index, group in enumerate(self.groups) for p in group["params"]}
        self.tiles: list[list[Tile]] = []  # by bucket
        self.states: dict[Piece, dict[str, Any]] = {}  # flat state of pieces that several tiles share
        for part, gradient in zip(parameters.buckets, gradients.buckets, strict=True):
            tiles = [
                tile
                for piece in gradient.pieces
                for tile in self._tiles(piece, group_of[id(params[piece.param])], part.master, gradient.shard)
            ]
            self.tiles.append(tiles)
        self._cut_state(optimizer, elementwise, params)
        if self.on_device:
            self._make_state()

    def _tiles(self, piece: Piece, group: int, master: Tensor, gradient: Tensor) -> Iterator[Tile]:
        size = piece.length if self.on_device else UPDATE_TILE
        for start in range(0, piece.length, size):
            where = slice(piece.offset + start, piece.offset + min(start + size, piece.length))
            yield Tile(piece, group, master[where], gradient[where], start)

    # -- state

    def _cut_state(self, optimizer: Optimizer, elementwise: set[str], params: Sequence[nn.Parameter]) -> None:
        # The probe sees no state that comes later; of a 0-dim parameter a moment has a step count's shape.
        elementwise = elementwise | {
            key
            for param, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and param.dim() and value.shape == param.shape
        }
        for tile in (tile for tiles in self.tiles for tile in tiles):
            param = params[tile.piece.param]
            state = optimizer.state.get(param)
            if not state:
                continue
            length = tile.parameter.numel()
            lo = tile.piece.lo + tile.start
            own: dict[str, Any] = {}
            for key, value in state.items():
                if isinstance(value, Tensor) and key in elementwise:
                    flat = torch.zeros(length, dtype=value.dtype, device=tile.parameter.device)
                    cut = value.detach().reshape(-1)[lo : lo + length]
                    flat[: cut.numel()].copy_(cut)
                    own[key] = flat
                else:
                    own[key] = self._whole(value)
            self.inner.state[tile.parameter] = own
            self._join_state(tile)
        optimizer.state.clear()

    def _whole(self, value: Any) -> Any:
        """A piece's own copy of what is not cut; fused kernels take their step counts from where the parameters are."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self._device, copy=True) if self.on_device else value.clone()

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
        for tile in (tile for tiles in self.tiles for tile in tiles if not tile.start):
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
        for tile in (tile for tiles in self.tiles for tile in tiles):
            flat, rest = states.get(tile.piece, ({}, {}))
            numel = tile.parameter.numel()
            own: dict[str, Any] = {key: value[tile.start : tile.start + numel] for key, value in flat.items()}
            own |= {key: self._whole(value) for key, value in rest.items()}
            self.inner.state.pop(tile.parameter, None)
            if own:
                self.inner.state[tile.parameter] = own
            if flat and numel < tile.piece.length:
                self.states[tile.piece] = flat
        if self.on_device:
            self._make_state()

    def _moments(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter, state in self.inner.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    yield parameter, value

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

    def left_out(self, verdict: Verdict, absent: Sequence[int]) -> Container[int]:
        """Parameters that this step must not touch, as far as the host must know: where kernels take no flags it waits.

        Args:
            absent: parameters that had no gradient on this rank. A rank that used all of its parameters knows that
                none is left out.
        """
        if self.on_device:
            return ()
        if bool(verdict.found_inf):
            return range(len(verdict.vector))  # all
        return verdict.unused() if absent else ()

    def _step(self, tiles: Sequence[Tile], **flags: Tensor) -> None:
        for index, (own, theirs) in enumerate(zip(self.inner.param_groups, self.groups, strict=True)):
            own.update(_options(theirs))
            if self.on_device:
                own["fused"], own["foreach"] = True, False
            own["params"] = [tile.parameter for tile in tiles if tile.group == index]
        self.inner.__dict__.update(flags)
        for tile in tiles:
            tile.parameter.grad = tile.gradient
        self.inner.step()
        for tile in tiles:
            tile.parameter.grad = None
        for group in self.inner.param_groups:
            group["params"] = []

    def step_bucket(self, index: int, verdict: Verdict, left_out: Container[int], absent: Sequence[int]) -> None:
        """Update this rank's pieces of one bucket, except those of the parameters `left_out`.

        Args:
            absent: parameters without a gradient on this rank: a flag of their own tells kernels whether any rank had one.
        """
        tiles = [tile for tile in self.tiles[index] if tile.piece.param not in left_out]
        if not tiles:
            return
        if self.on_device:
            self._make_momentum(tiles)
            doubtful = {param: [tile for tile in tiles if tile.piece.param == param] for param in absent}
            seen = [tile for tile in tiles if tile.piece.param not in doubtful] if absent else tiles
            for some, found_inf in ((seen, verdict.found_inf), *((doubtful[p], verdict.skips(p)) for p in absent)):
                if some:
                    self._step(some, grad_scale=verdict.grad_scale, found_inf=found_inf)
            return
        for batch in _batches(tiles):
            for tile in batch:
                tile.gradient.div_(verdict.grad_scale)
            self._step(batch)
            for tile in batch:
                self._join_state(tile)


def _batches(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Runs of tiles of at most `UPDATE_TILE` elements together."""
    batch: list[Tile] = []
    for tile in tiles:
        if batch and sum(t.parameter.numel() for t in batch) + tile.parameter.numel() > UPDATE_TILE:
            yield batch
            batch = []
        batch.append(tile)
    if batch:
        yield batch
