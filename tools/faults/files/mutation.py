"""Changes that happen to files, and those that people make to harm: in bytes, and in JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple, TypeAlias

Path: TypeAlias = tuple[Any, ...]  # keys and places, from the outermost value inwards


class Change(NamedTuple):
    """What was done, and what came of it."""

    what: str
    data: bytes


def flip(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def flipped(random: Random, data: bytes) -> Change:
    place, bit = random.randrange(len(data)), random.randrange(8)
    return Change(f"bit {bit} of byte {place}", flip(data, place, bit))


def several_flipped(random: Random, data: bytes) -> Change:
    changed = bytearray(data)
    places = [random.randrange(len(data)) for _ in range(random.randint(2, 40))]
    for place in places:
        changed[place] = random.randrange(256)
    return Change(f"bytes at {places[:6]}…", bytes(changed))


def cut(random: Random, data: bytes) -> Change:
    end = random.choice((0, 1, 7, 8, 9, len(data) - 1, random.randrange(len(data))))
    return Change(f"cut at {end} of {len(data)}", data[:end])


def inserted(random: Random, data: bytes) -> Change:
    place = random.choice((0, len(data), random.randrange(len(data))))
    more = random.randbytes(random.choice((1, 2, 8, 100)))
    return Change(f"{len(more)} bytes more at {place}", data[:place] + more + data[place:])


def removed(random: Random, data: bytes) -> Change:
    place, count = random.randrange(len(data)), random.choice((1, 2, 8, 100))
    return Change(f"{count} bytes fewer at {place}", data[:place] + data[place + count :])


def doubled(random: Random, data: bytes) -> Change:
    first, last = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return Change(f"{first} to {last} twice", data[:last] + data[first:])


def reordered(random: Random, data: bytes) -> Change:
    a, b, c, d = sorted(random.randrange(len(data) + 1) for _ in range(4))
    swapped = data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]
    return Change(f"{a} to {b} and {c} to {d} exchanged", swapped)


def zeroed(random: Random, data: bytes) -> Change:
    """As a hole in a file that was never written."""
    place, count = random.randrange(len(data)), random.choice((1, 16, 512, 4096))
    hole = bytes(min(count, len(data) - place))
    return Change(f"{len(hole)} zeros at {place}", data[:place] + hole + data[place + len(hole) :])


def huge(random: Random, data: bytes) -> Change:
    """A number that may be a size, as large as its bytes can say."""
    order = random.choice("<>")
    kind, value = random.choice(
        [("H", 0xFFFF), ("I", 0x7FFFFFFF), ("I", 0xFFFFFFFF), ("Q", 1 << 40), ("Q", (1 << 63) - 1)]
    )
    place = random.randrange(max(1, min(len(data), 200)))
    said = struct.pack(order + kind, value)
    changed = data[:place] + said + data[place + len(said) :]
    return Change(f"{value:,} as {order}{kind} at {place}", changed)


BYTES: tuple[Callable[[Random, bytes], Change], ...] = (
    *(flipped, several_flipped, cut, inserted, removed),
    *(doubled, reordered, zeroed, huge),
)


def changed(random: Random, data: bytes) -> Change:
    """One of all of these, and something other than it was."""
    while True:
        change = random.choice(BYTES)(random, data)
        if change.data != data:
            return change


class Deep:
    """Lists within lists, as JSON; a Python value would be too deep to be written."""

    def __init__(self, depth: int) -> None:
        self.text = "[" * depth + "]" * depth


class Twice(dict[str, Any]):
    """An object one of whose keys is there twice; the first is another's value."""

    key = ""
    first: Any = None


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1000, 1.5, -0.0, 1e-300, 1e99, 1e308),
    *(float("nan"), float("inf"), float("-inf"), 2**31, 2**53, 2**63, -(2**63), 10**18, 10**30),
    *(10**400, 10**4000, "", "a", "0", "regional", "mssar", "none", "..", "../../x", "/etc/passwd"),
    *("\ud800", "\0", "a\nb", "a" * 5000, "<script>", "nan", "1e999", "timm:resnet18", "timm:"),
    *([], {}, [[]], [None], ["a"], [0], [-1], [1, 2, 4], [10**9], [1] * 5000, {"a": 1}, {"": {}}),
    *({"weights": "self"}, {"name": "resnet8"}, {"schema": 1}, [{}], [[1], [2]], [float("nan")]),
)
DEEP = (Deep(100), Deep(990), Deep(100_000))


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """All values within a value, itself too."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, one in enumerate(value) if isinstance(value, list) else inner:
        yield from places(one, (*path, key))


def put(value: Any, path: Path, new: Any) -> Any:
    """A copy with something else in one place."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, list):
        return [put(one, tuple(rest), new) if i == key else one for i, one in enumerate(value)]
    return {k: put(one, tuple(rest), new) if k == key else one for k, one in value.items()}


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def text(value: Any) -> str:
    """JSON, with what Python's own writer has no way to say."""
    if isinstance(value, Deep):
        return value.text
    if isinstance(value, Twice):
        entries = [(value.key, value.first), *value.items()]
        return "{" + ",".join(f"{json.dumps(k)}:{text(v)}" for k, v in entries) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    if isinstance(value, int) and abs(value) >= 10**400:
        return "1" + "0" * (len(hex(value)) * 6 // 5)  # str has a limit, and so has to read it
    return json.dumps(value)


def restructured(random: Random, value: Any) -> tuple[str, Any]:
    """JSON with one or two values replaced, left out, renamed, moved or said twice."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2))):
        # Outer values are few: they are chosen as often as the many within them.
        deep = random.choice((1, 2, 3, 4, 9))
        path = random.choice([p for p in places(value) if 0 < len(p) <= deep] or [()])
        way = random.choice(("replace",) * 6 + ("deepen", "drop", "rename", "repeat", "move"))
        outer = at(value, path[:-1])
        if way == "replace" or not path or isinstance(outer, Twice):
            value = put(value, path, random.choice(HOSTILE))
        elif way == "deepen":
            value = put(value, path, random.choice(DEEP))
        elif way == "move":
            other = random.choice(list(places(value)))
            value = put(value, path, at(value, other))
        elif isinstance(outer, list):
            kept = [one for i, one in enumerate(outer) if way == "repeat" or i != path[-1]]
            value = put(value, path[:-1], kept + [outer[path[-1]]] * (way == "repeat"))
        elif way == "drop":
            value = put(value, path[:-1], {k: v for k, v in outer.items() if k != path[-1]})
        elif way == "rename":
            new = random.choice((str(path[-1]) + "x", "", "weights", "name", "\ud800", "__class__"))
            renamed = {new if k == path[-1] else k: v for k, v in outer.items()}
            value = put(value, path[:-1], renamed)
        else:
            twice = Twice(outer)
            twice.key, twice.first = path[-1], random.choice(HOSTILE)
            value = put(value, path[:-1], twice)
        done.append(f"{way} {'.'.join(map(str, path)):.80}")
    return ", ".join(done), value
