"""What `shard` took over is recognised at each backward and step, or refused by name.

Owns:      a record, made at the end of `shard`: the tree of modules, each parameter's homes and place, the groups of the
           optimizer, and the gradients that were there before.
Takes:     model and optimizer as their user has left them.
Gives:     nothing where they are as they were; else an error that names what changed, what that would mean, and the remedy.
Invariant: every trainable parameter that the model reads has masters, lies in its bucket, and is stepped by the group that
           it was given in. Nothing is changed, and nothing is sent: a rank whose error is its own says so where peers read it.

[Note: what a look costs] The tree is compared by identities, in half a microsecond for each module; only where it differs
are names looked at, and a change that concerns no trainable parameter (a loss module, a frozen part, a layer that was
removed) becomes the record. Parameters cost a tenth of a microsecond for their place, version and gradient each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from .parameters import Parameters


class Taken:
    """What one `shard` took over.

    Args:
        model: the plain model, whose trainable parameters lie in their buckets by now.
        optimizer: the plain optimizer.
        names, params: the trainable parameters, by index.
        frozen: the other parameters.
        parameters: the buckets.
        say: tells the other ranks why this one takes no part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        frozen: Sequence[tuple[str, nn.Parameter]],
        parameters: Parameters,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._names = names
        self._params = params
        self._frozen = frozen
        self._parameters = parameters
        self._say = say
        self._by_id = {id(p): name for name, p in zip(names, params, strict=True)}
        self._by_name = {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in self._by_id}
        self._homes = [
            (module, key, f"{path}.{key}" if path else key, p)
            for path, module in model.named_modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in self._by_id
        ]
        self._tree = _Tree(model)
        self._places = [p.data_ptr() for p in params]
        self._buckets = [bucket.flat.data_ptr() for bucket in parameters.buckets]
        self._groups = optimizer.param_groups
        self._listed = [list(group["params"]) for group in self._groups]
        self._ids = _ids(self._groups)
        # A parameter without elements has no hook of ours: what autograd leaves there says nothing.
        self._graded = [p for p in params if p.numel()]
        self._stale = [name for name, p in model.named_parameters() if p.grad is not None]
        for p in model.parameters():
            p.grad = None

    # -- gradients

    def drop_gradients(self) -> None:
        """The user has called `zero_grad`."""
        self._stale = []
        for p in self._graded:
            p.grad = None

    def check_backward(self) -> None:
        """Before a backward: no gradient is there that shard() did not bring, and what was frozen still is.

        Raises:
            RuntimeError: by the parameter's name.
        """
        self._raise(self._strange_gradient() or self._unfrozen())

    def _strange_gradient(self) -> str | None:
        if self._stale:
            return (
                f"parameter {self._stale[0]} had a .grad before shard(), which plain torch would add to the next "
                "one: shards have not seen it. Drop it with optimizer.zero_grad(), or step the plain optimizer before shard()"
            )
        if [p.grad for p in self._graded].count(None) == len(self._graded):
            return None
        found = next(self._by_id[id(p)] for p in self._graded if p.grad is not None)
        return (
            f"parameter {found} has a .grad that no backward of shardmp has left there: gradients live in shards, and this one "
            "would be lost. Bring it by a backward (of (p * gradient).sum()), or drop it with optimizer.zero_grad()"
        )

    def _unfrozen(self) -> str | None:
        for name, p in self._frozen:
            if p.requires_grad:
                return (
                    f"parameter {name} was frozen when shard() was called and has been unfrozen since: it has no master "
                    "weights and would not train. Unfreeze it before shard()"
                )
        return None

    # -- model and optimizer

    def check_step(self) -> None:
        """Before a step: model and optimizer are those that shard() took over.

        Raises:
            RuntimeError: by the parameter's or the group's name. (Writes through `p.data` have no version and are not seen.)
        """
        self._raise(
            self._strange_gradient()
            or self._unfrozen()
            or self._changed_tree()
            or self._moved()
            or self._written()
            or self._changed_groups()
        )

    def check_model(self) -> None:
        """After a forward has failed: whether a parameter was cast or moved. (`functional_call` exchanges some, for its time.)

        Raises:
            RuntimeError: it was, by its name.
        """
        self._raise(self._moved())

    def refuse(self, message: str) -> NoReturn:
        """Raise an error of this rank's own, which the others hear of where they wait for it."""
        self._say(message)
        raise RuntimeError(message)

    def _raise(self, message: str | None) -> None:
        if message is not None:
            self.refuse(message)

    def _changed_tree(self) -> str | None:
        if self._tree.is_unchanged():
            return None
        here = {id(module) for module in self._model.modules()}
        for module, key, name, p in self._homes:
            if id(module) in here and module._parameters.get(key) is not p:
                return _taken_out(name)
        for name, p in self._model.named_parameters(remove_duplicate=False):
            was_here = self._by_name.get(name, p)
            if was_here is not p:
                return (
                    f"parameter {name} {_size(p)} is not the one {_size(was_here)} that shard() took over: its module was "
                    "replaced, and the new one would never see an update. Replace modules before shard()"
                )
            if p.requires_grad and id(p) not in self._by_id:
                return (
                    f"parameter {name} {_size(p)} was added after shard(): it has no master weights and would not train. "
                    "Build the whole model before shard(), or freeze it with requires_grad_(False)"
                )
        self._tree = _Tree(self._model)
        return None

    def _moved(self) -> str | None:
        places = [p.data_ptr() for p in self._params]
        if places == self._places:
            return None
        name = next(n for n, old, new in zip(self._names, self._places, places, strict=True) if old != new)
        for bucket, place in zip(self._parameters.buckets, self._buckets, strict=True):
            if bucket.flat.data_ptr() != place:
                return (
                    f"parameter {name} was moved with its bucket: a tensor of the model was put into shared memory (a queue or "
                    "pipe of torch.multiprocessing does that, and share_memory_()), and other ranks would read the old place. "
                    "Send copies: {name: p.clone() for name, p in model.state_dict().items()}"
                )
        return _taken_out(name)

    def _written(self) -> str | None:
        versions = [p._version for p in self._params]
        if versions == self._parameters.versions:
            return None
        known = zip(self._names, versions, self._parameters.versions, strict=True)
        name = next(name for name, new, old in known if new != old)
        return (
            f"parameter {name} was written in place since the last step: its FP32 master has not seen it, and the next "
            "update would undo it. Write with model.load_state_dict({name: values, ...}, strict=False), on every rank"
        )

    def _changed_groups(self) -> str | None:
        groups = self._optimizer.param_groups
        if groups is self._groups and _ids(groups) == self._ids:
            return None
        if groups is not self._groups:
            what = "the list was replaced, and nobody would read the new groups"
        elif len(groups) != len(self._listed):
            what = f"shard() took over {len(self._listed)} groups, and now there are {len(groups)}"
        else:
            what = self._first_changed_group(groups)
        return (
            f"optimizer.param_groups: {what}. Give every parameter to its group before shard(), and afterwards change options "
            "only; to stop training a parameter, call its requires_grad_(False) or give its group lr 0"
        )

    def _first_changed_group(self, groups: Sequence[dict[str, Any]]) -> str:
        names = {id(p): name for name, p in self._frozen} | self._by_id
        for number, (group, old) in enumerate(zip(groups, self._listed, strict=True)):
            new = group.get("params", [])
            gone = [p for p in old if not _among(p, new)] + [p for p in new if not _among(p, old)]
            if gone:
                verb = "was taken out of" if _among(gone[0], old) else "was put into"
                return f"parameter {names.get(id(gone[0]), _size(gone[0]))} {verb} group {number}"
            if list(map(id, new)) != list(map(id, old)):
                return f"the parameters of group {number} were put into another order"
        raise AssertionError("groups differ, their parameters do not")


class _Tree:
    """Which modules and parameters a model had, by name and identity; what it holds keeps identities from being used again."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        # Live: the dicts of the modules, and views of them. All comparisons are loops in C.
        self._parts = [module._modules for module in modules]
        self._own = [module._parameters for module in modules]
        self._keys = [own.keys() for own in self._own]
        self._had_parts = [dict(parts) for parts in self._parts]
        self._had_keys = [set(keys) for keys in self._keys]
        self._had = [p for own in self._own for p in own.values()]
        self._ids = list(map(id, self._had))

    def is_unchanged(self) -> bool:
        if self._parts != self._had_parts or self._keys != self._had_keys:
            return False
        return [id(p) for own in self._own for p in own.values()] == self._ids


def _ids(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group.get("params", ()))) for group in groups]


def _among(p: Tensor, params: Sequence[Tensor]) -> bool:
    return any(p is other for other in params)


def _size(p: Tensor) -> str:
    return f"of shape {tuple(p.shape)}"


def _taken_out(name: str) -> str:
    return (
        f"parameter {name} was taken out of its bucket after shard(): its module was moved, cast, parametrised or "
        "wrapped, or the parameter replaced, and would never see an update again; do that before shard()"
    )
