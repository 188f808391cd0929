"""The dictionary in a pickle of CIFAR's "python version", read without ever unpickling it.

A pickle is a program for a small machine. The machine here knows numbers, texts, lists, tuples and
dictionaries; of all that a pickle may name it knows what NumPy writes for an array of bytes, and
calls none of it. What a file can make it do and hold is bounded.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPERATIONS = 2_000_000  # CIFAR-100 has some 300,000
BITS = 128  # of a whole number
NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy dtype": "dtype",
    "numpy ndarray": "",  # only ever an argument of _reconstruct
    "_codecs encode": "encode",
}


class RefusedError(ValueError):
    """A pickle asks for what no data file holds."""


def batch(pickled: bytes, source: str) -> dict[str, Any]:
    """The dictionary in a pickle of numbers, texts, lists and arrays of bytes; nothing else."""
    try:
        found = _Machine().run(pickled)
        if isinstance(found, dict):
            return {
                key.decode("latin1") if isinstance(key, bytes) else key: (
                    value.array if isinstance(value, _Array) else value
                )
                for key, value in found.items()
            }
    except RefusedError as refused:
        raise ValueError(f"{source} is refused: {refused}; no such data file does") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{source} is truncated or damaged ({reason:.200}); remove it and fetch it again"
        ) from None
    raise ValueError(f"{source} holds a {type(found).__name__}, expected a dictionary")


def _refuse(why: str) -> NoReturn:
    raise RefusedError(why)


class _Named:
    """Stands for something of a module; it is never imported."""

    def __init__(self, name: str) -> None:
        if name not in NAMES:
            _refuse(f"it asks for {name.replace(' ', '.', 1)!r:.80}".replace("'", ""))
        self.part = NAMES[name]


class _Byte:
    """Stands for the one dtype that there is."""


class _Array:
    """Stands for an array until its bytes come."""

    array: NDArray[np.uint8]

    def fill(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _Byte(), bool() | 0 | 1 as by_columns, bytes(raw)):
                # Only numbers are shown: a tuple can hold itself many times over, twice as often
                # with every byte of the file.
                if not all(type(n) is int and n >= 0 for n in shape):
                    _refuse("it holds an array of a shape that is none")
                if math.prod(shape) != len(raw):
                    _refuse(f"it holds an array of shape {shape} with {len(raw):,} bytes")
                array = np.frombuffer(raw, np.uint8)
                self.array = array.reshape(shape, order="F" if by_columns else "C")
            case _:
                _refuse("it holds an array other than of bytes")


class _Machine:
    """A stack, marks in it, and a memory of what was on top."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memory: dict[int, Any] = {}
        self.left = 0  # letters that it can have as bytes, as each is there once

    def run(self, pickled: bytes) -> Any:
        self.left = len(pickled)
        for count, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
            if count > OPERATIONS:
                _refuse(f"it has more than {OPERATIONS:,} operations")
            name = operation.name
            if name == "STOP":
                break
            if name in _VALUES:
                self.stack.append(_VALUES[name](argument))
            elif name in _STEPS:
                _STEPS[name](self, argument)
            else:
                _refuse(f"it asks for {name} {argument or ''!s:.80}".rstrip())
        return self.pop()

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("nothing is there to be taken")
        return self.stack.pop()

    def several(self, count: int | None = None) -> list[Any]:
        """As many as these from the top, or all above the last mark."""
        if count is not None:
            return [self.pop() for _ in range(count)][::-1]
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def top(self, kind: type[Any]) -> Any:
        found = self.stack[-1]
        if not isinstance(found, kind):
            raise ValueError(f"a {kind.__name__} is expected, not a {type(found).__name__}")
        return found

    def append(self, found: list[Any]) -> None:
        self.top(list).extend(found)

    def set_items(self, found: list[Any]) -> None:
        if not all(isinstance(key, str | bytes) for key in found[::2]):
            _refuse("it holds a dictionary of other things than names")
        self.top(dict).update(zip(found[::2], found[1::2], strict=True))

    def new_dict(self, found: list[Any]) -> None:
        self.stack.append({})
        self.set_items(found)

    def name(self, module_and_name: str) -> None:
        self.stack.append(_Named(module_and_name))

    def name_from_stack(self) -> None:
        module, name = self.several(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is expected")
        self.name(f"{module} {name}")

    def call(self) -> None:
        what, arguments = self.several(2)
        if not isinstance(what, _Named) or not isinstance(arguments, tuple):
            _refuse("it calls what is no function")
        match what.part, arguments:
            case "array", _:
                self.stack.append(_Array())
            case "dtype", ("u1" | b"u1", *_):
                self.stack.append(_Byte())
            case "dtype", (str(kind) | bytes(kind), *_):
                _refuse(f"it holds an array of dtype {kind!r:.80}")
            case "encode", (str(text), "latin1" | b"latin1"):  # how Python 3 writes bytes of old
                self.left -= len(text)
                if self.left < 0:
                    _refuse("it asks for the same bytes again and again")
                self.stack.append(text.encode("latin1"))
            case "encode", (str(), str(encoding)):
                _refuse(f"it asks for an encoding by {encoding!r:.80}")
            case _:
                _refuse("it calls what is no function")

    def build(self) -> None:
        what, state = self.several(2)
        if isinstance(what, _Array):
            what.fill(state)
        elif not isinstance(what, _Byte):  # of which it is byte order and fields, so nothing
            _refuse(f"it changes a {type(what).__name__.lstrip('_')}")
        self.stack.append(what)

    def remember(self, place: int | None) -> None:
        self.memory[len(self.memory) if place is None else place] = self.stack[-1]

    def recall(self, place: int) -> None:
        self.stack.append(self.memory[place])


def _number(value: int) -> int:
    if value.bit_length() > BITS:
        _refuse(f"it holds a number of {value.bit_length():,} bits")
    return value


def _bytes(text: str) -> bytes:
    return text.encode("latin1")


_VALUES: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_DICT": lambda _: {},
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _number),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), float),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _bytes),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), str),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), bytes),
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda *_: None,
    "FRAME": lambda *_: None,
    "MARK": lambda on, _: on.marks.append(len(on.stack)),
    "TUPLE": lambda on, _: on.stack.append(tuple(on.several())),
    "TUPLE1": lambda on, _: on.stack.append(tuple(on.several(1))),
    "TUPLE2": lambda on, _: on.stack.append(tuple(on.several(2))),
    "TUPLE3": lambda on, _: on.stack.append(tuple(on.several(3))),
    "LIST": lambda on, _: on.stack.append(on.several()),
    "APPEND": lambda on, _: on.append(on.several(1)),
    "APPENDS": lambda on, _: on.append(on.several()),
    "DICT": lambda on, _: on.new_dict(on.several()),
    "SETITEM": lambda on, _: on.set_items(on.several(2)),
    "SETITEMS": lambda on, _: on.set_items(on.several()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": lambda on, _: on.name_from_stack(),
    "REDUCE": lambda on, _: on.call(),
    "BUILD": lambda on, _: on.build(),
}
