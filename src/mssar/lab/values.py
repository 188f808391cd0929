"""Values from JSON that anyone may have written: msgspec finds what does not fit, and it is said on
one line."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")
Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
AtLeastOne = Annotated[float, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]

LARGEST = 1e100  # of any number: no loss is as large, and sums of some stay finite
DEEPEST = 50  # objects and lists within each other


def decode(line: str, noun: str, schema: int) -> dict[str, Any]:
    """The object in a line, if it is of this schema; a noun says what a line of the file is."""
    try:
        found = json.loads(line, object_pairs_hook=_once)
        if not isinstance(found, dict):
            raise ValueError(f"a {noun} is a JSON object; got {type(found).__name__}")
        check_numbers(found)
    except json.JSONDecodeError as error:
        said = error.msg.removesuffix(" at")  # as some of Python's own messages end
        raise ValueError(f"not JSON ({said} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"nested deeper than any {noun} is") from None
    theirs = found.get("schema")
    if theirs != schema:
        advice = f"not a {noun} of mssar"
        if isinstance(theirs, int) and theirs > schema:
            advice = "written by a newer mssar; update this one"
        elif isinstance(theirs, int) and theirs > 0:
            advice = "written by an older mssar; finish it with that, or remove it"
        raise ValueError(f"schema {theirs!r:.60}, and {schema} is read here: {advice}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key said twice, readers take one or the other, msgspec the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_plain(twice)}: said twice")
    return found


def check_numbers(value: Any, path: str = "", depth: int = 0) -> None:
    """No number that is not finite, as NaN and 1e999 are, or beyond all reason; a RecursionError
    where it is too deep, which JSON's reader may still bear."""
    if isinstance(value, dict | list):
        if depth == DEEPEST:
            raise RecursionError(f"nested deeper than {DEEPEST} times")
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in inner:
            within = f"[{name}]" if isinstance(name, int) else f".{_plain(name)}"
            check_numbers(one, f"{path}{within}".lstrip("."), depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}: not finite")
    elif isinstance(value, int | float) and abs(value) > LARGEST:
        raise ValueError(f"{path}: too large a number")


def _plain(name: str) -> str:
    """A name from elsewhere, on one line and not too long."""
    return name[:60] if name.isidentifier() else f"{name!r:.60}"


def fitted(kind: Callable[..., T], found: Mapping[str, Any], within: str = "", **made: Any) -> T:
    """A dataclass from an object that has its fields, each of its type, and no other.

    Those that are made already may be in it as well. A ValueError says where it does not fit.
    """
    known, given = _fields(kind), converted(found, dict[str, Any], within.rstrip("."))
    for name, (_, needed) in known.items():
        if needed and name not in given and name not in made:
            raise ValueError(f"{within}{name}: missing")
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{within}{_plain(name)}: unknown")
        if name not in made:
            made[name] = converted(value, known[name][0], f"{within}{name}")
    return kind(**made)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Types by name, and whether there is no default."""
    types = get_type_hints(kind, include_extras=True)
    return {
        field.name: (types[field.name], field.default is field.default_factory is MISSING)
        for field in fields(kind)
    }


def converted(value: Any, kind: type[T], name: str) -> T:
    """A value as a type has it: a tuple from a list, 1.0 from 1."""
    try:
        return msgspec.convert(value, kind)
    except UnicodeEncodeError:
        raise ValueError(f"{name}: half a character; got {value!a:.60}".lstrip(": ")) from None
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        for key, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[key or int(place)]
        said = said.partition(", got ")[0].replace("`", "")
        where = f"{name}{path.rstrip('`')}: ".lstrip(": ")
        raise ValueError(f"{where}{said[:1].lower()}{said[1:]}; got {value!r:.60}") from None
