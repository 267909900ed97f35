"""Reading a pickle without making anything of this process from it.

Owns:      what each opcode does.
Takes:     the bytes of a pickle that anybody may have written, and functions of ours for the names in it.
Gives:     plain values, and records of everything else: the class's name, its arguments, its state.
Invariant: no class or function is looked up by a name in the file, and no attribute of anything is set but of a new record.
           Time and memory are proportional to the bytes that were read, whatever lengths and numbers stand in them.

Python's own unpickler can be told which classes it may find, but it calls them, sets attributes on them (BUILD), takes
memory for a number in the file (the memo), and computes hashes of tuples that are nested without end.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .regular_files import shown

_MOST_NESTED = 100
_SCALARS = (str, int, float, bool, bytes, type(None), torch.dtype)


class PickleError(ValueError):
    """The bytes are not a pickle that is read here."""


class Global(NamedTuple):
    """A class or function that the file names; it is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """An object of the file. It has no behaviour.

    Attributes:
        kind: the name of its class, or of the function that would have made it.
        arguments: of that. state: what its attributes would have become, or None.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: Global, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, by what the file says."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


Makers = Mapping[tuple[str, str], Callable[..., Any]]
DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def read_pickle(data: Any, makers: Makers, find_storage: Callable[[Any], Any] | None = None) -> Any:
    """The value that a pickle describes.

    Args:
        data: a buffer of bytes.
        makers: by module and name, what is called in place of the function or class of that name.
        find_storage: what is called with a persistent id.

    Raises:
        PickleError: it is damaged, has an opcode that no checkpoint needs, or a maker refused its arguments.
    """
    machine = _Machine(data, makers, find_storage)
    try:
        return machine.run()
    except PickleError as error:
        raise PickleError(f"byte {machine.at}: {error}") from None
    except Exception as error:  # of whatever kind: the bytes may be any
        raise PickleError(f"byte {machine.at}: {type(error).__name__}: {shown(str(error))}") from None


def check_plain(value: Any, length: int, records: bool = False) -> None:
    """That whoever walks through `value` comes to an end soon: no cycles, no deep nesting, no part that is shared too often.

    Args:
        length: of the pickle, in bytes. records: whether records and names may be in it.

    Raises:
        PickleError: it is not plain.
    """
    left = 10_000 + 4 * length
    todo = [(value, 0)]
    while todo:
        found, depth = todo.pop()
        left -= 1
        if depth > _MOST_NESTED:
            raise PickleError(f"its values are nested more than {_MOST_NESTED} deep")
        if isinstance(found, (Record, Global)) and not records:
            kind = found.kind if isinstance(found, Record) else found
            raise PickleError(f"it asks for {kind}, which no checkpoint needs")
        parts: Any = ()
        if isinstance(found, dict):
            left -= len(found)
            parts = found.values()
        elif isinstance(found, Record):
            parts = (found.arguments, found.state)
        elif isinstance(found, (list, tuple)) and not isinstance(found, (torch.Size, Global)):
            parts = found
        left -= len(parts)
        if left < 0:
            raise PickleError("its values share parts too often")
        todo.extend((part, depth + 1) for part in parts)


class _Machine:
    """The stack machine of pickles, for what protocols 2 to 5 write of trees of values."""

    def __init__(self, data: Any, makers: Makers, find_storage: Callable[[Any], Any] | None) -> None:
        self.at = 0
        self._data = data
        self._end = len(data)
        self._makers = makers
        self._find_storage = find_storage
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, actions, stop = self._data, _ACTIONS, pickle.STOP[0]
        while True:
            if self.at >= self._end:
                raise PickleError("it ends before its value is complete")
            code = data[self.at]
            self.at += 1
            if code == stop:
                if len(self._stack) != 1 or self._marks:
                    raise PickleError("it does not end with one value")
                return self._stack[0]
            action = actions.get(code)
            if action is None:
                raise PickleError(f"opcode {code:#04x}, which no checkpoint needs")
            action(self)

    # -- bytes

    def _take(self, count: int) -> bytes:
        begin = self.at
        if count > self._end - begin:
            raise PickleError(f"it states a length of {count} bytes, {self._end - begin} are left")
        self.at = begin + count
        return bytes(self._data[begin : self.at])

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        text = bytes(self._data[self.at : min(self.at + 300, self._end)])
        count = text.find(b"\n")
        if count < 0:
            raise PickleError("the name of a class is longer than 300 bytes")
        self.at += count + 1
        return text[:count].decode()

    # -- plain values

    def _push_text(self, width: int) -> None:
        self._stack.append(str(self._take(self._number(width)), "utf-8", "surrogatepass"))

    def _push_bytes(self, width: int) -> None:
        self._stack.append(self._take(self._number(width)))

    def _push_long(self, width: int) -> None:
        count = self._number(width)
        if count > 255:
            raise PickleError(f"an integer of {count} bytes")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    # -- containers

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise PickleError("a mark is missing")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _push_marked(self, made: Callable[[list[Any]], Any]) -> None:
        value = made(self._since_mark())
        self._stack.append(value)

    def _push_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise PickleError("the stack is empty")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Record):  # of a subclass of list; its items are not looked at
            raise PickleError(f"items for {shown(target)}")

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise PickleError("a key without a value")
        if isinstance(target, Record):
            return
        if type(target) not in (dict, OrderedDict):
            raise PickleError(f"keys for {shown(target)}")
        target.update((checked_key(items[at]), items[at + 1]) for at in range(0, len(items), 2))

    def _add_to_set(self) -> None:
        items = self._since_mark()
        if type(self._stack[-1]) is not set:
            raise PickleError(f"members for {shown(self._stack[-1])}")
        self._stack[-1].update(map(checked_key, items))

    # -- the memo

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, width: int) -> None:
        self._memo[self._number(width)] = self._stack[-1]

    def _get(self, width: int) -> None:
        self._stack.append(self._memo[self._number(width)])

    # -- objects

    def _push_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > 600:
            raise PickleError("the name of a class is not a name")
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        found = DTYPES.get((module, name))
        self._stack.append(Global(module, name) if found is None else found)

    def _push_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_global(module, name)

    def _make(self, has_keywords: bool = False) -> None:
        """REDUCE, NEWOBJ and NEWOBJ_EX: what is called, and with what."""
        if has_keywords:
            self._stack.pop()
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise PickleError(f"a call of {shown(function)}")
        maker = self._makers.get(function)
        self._stack.append(Record(function, arguments) if maker is None else maker(*arguments))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Record):
            if target.state is not None:
                raise PickleError(f"a second state of {target.kind}")
            target.state = state
        elif not isinstance(target, OrderedDict):  # which may have attributes (a state dict's versions): not read
            raise PickleError(f"attributes for {shown(target)}")

    def _push_storage(self) -> None:
        if self._find_storage is None:
            raise PickleError("a persistent id")
        self._stack.append(self._find_storage(self._stack.pop()))


def checked_key(key: Any) -> Any:
    """A key whose hash takes no time, and that is not of a kind of which many can have the same hash."""
    if type(key) is int:
        if abs(key) >= 2**61 - 1:
            raise PickleError("a key is an integer of more than 60 bits")
    elif type(key) is tuple:
        if len(key) > 16 or any(type(part) not in _SCALARS for part in key):
            raise PickleError("a key is a long or nested tuple")
        for part in key:
            checked_key(part)
    elif not isinstance(key, (*_SCALARS, Record)) and type(key) is not torch.Size:
        raise PickleError(f"{shown(key)} as a key")
    return key


_Action = Callable[[_Machine], None]


def _pushing(value: Any) -> _Action:
    return lambda machine: machine._stack.append(value)


_ACTIONS: dict[int, _Action] = {
    code[0]: action
    for code, action in (
        (pickle.PROTO, lambda m: m._number(1)),
        (pickle.FRAME, lambda m: m._number(8)),
        (pickle.NONE, _pushing(None)),
        (pickle.NEWTRUE, _pushing(True)),
        (pickle.NEWFALSE, _pushing(False)),
        (pickle.BININT, lambda m: m._stack.append(int.from_bytes(m._take(4), "little", signed=True))),
        (pickle.BININT1, lambda m: m._stack.append(m._number(1))),
        (pickle.BININT2, lambda m: m._stack.append(m._number(2))),
        (pickle.LONG1, lambda m: m._push_long(1)),
        (pickle.LONG4, lambda m: m._push_long(4)),
        (pickle.BINFLOAT, lambda m: m._stack.append(struct.unpack(">d", m._take(8))[0])),
        (pickle.BINUNICODE, lambda m: m._push_text(4)),
        (pickle.SHORT_BINUNICODE, lambda m: m._push_text(1)),
        (pickle.BINUNICODE8, lambda m: m._push_text(8)),
        (pickle.BINBYTES, lambda m: m._push_bytes(4)),
        (pickle.SHORT_BINBYTES, lambda m: m._push_bytes(1)),
        (pickle.BINBYTES8, lambda m: m._push_bytes(8)),
        (pickle.BYTEARRAY8, lambda m: m._stack.append(bytearray(m._take(m._number(8))))),
        (pickle.EMPTY_LIST, lambda m: m._stack.append([])),
        (pickle.EMPTY_DICT, lambda m: m._stack.append({})),
        (pickle.EMPTY_SET, lambda m: m._stack.append(set())),
        (pickle.EMPTY_TUPLE, _pushing(())),
        (pickle.MARK, _Machine._mark),
        (pickle.TUPLE, lambda m: m._push_marked(tuple)),
        (pickle.TUPLE1, lambda m: m._push_tuple(1)),
        (pickle.TUPLE2, lambda m: m._push_tuple(2)),
        (pickle.TUPLE3, lambda m: m._push_tuple(3)),
        (pickle.FROZENSET, lambda m: m._push_marked(lambda items: frozenset(map(checked_key, items)))),
        (pickle.APPEND, lambda m: m._extend([m._stack.pop()])),
        (pickle.APPENDS, lambda m: m._extend(m._since_mark())),
        (pickle.SETITEM, lambda m: m._update([m._stack.pop(), m._stack.pop()][::-1])),
        (pickle.SETITEMS, lambda m: m._update(m._since_mark())),
        (pickle.ADDITEMS, _Machine._add_to_set),
        (pickle.MEMOIZE, _Machine._memoize),
        (pickle.BINPUT, lambda m: m._put(1)),
        (pickle.LONG_BINPUT, lambda m: m._put(4)),
        (pickle.BINGET, lambda m: m._get(1)),
        (pickle.LONG_BINGET, lambda m: m._get(4)),
        (pickle.GLOBAL, lambda m: m._push_global(m._line(), m._line())),
        (pickle.STACK_GLOBAL, _Machine._push_stack_global),
        (pickle.REDUCE, _Machine._make),
        (pickle.NEWOBJ, _Machine._make),
        (pickle.NEWOBJ_EX, lambda m: m._make(has_keywords=True)),
        (pickle.BUILD, _Machine._build),
        (pickle.BINPERSID, _Machine._push_storage),
    )
}
