"""Files of JSON lines that outlive a program: read strictly, added to whole or not at all."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from mssar.durable import make_folder, write_whole

T = TypeVar("T")
Kinds = Mapping[str, tuple[type, ...]]  # what a field's annotation allows in JSON

LARGEST = 1e100  # of any number: no loss is as large, and sums of some stay finite
LONGEST = 1 << 28  # bytes of a file
DEEPEST = 50  # objects and lists within each other

KINDS: Kinds = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "dict[str, Any]": (dict,),
}


def decode(line: str, noun: str, schema: int) -> dict[str, Any]:
    """The object in a line, if it is of this schema; a noun says what a line of the file is."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no number that a {noun} may hold")

    try:
        found = json.loads(line, parse_constant=refuse, object_pairs_hook=_once)
        _check_depth(found)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"nested deeper than any {noun} is") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {noun} is a JSON object; got {type(found).__name__}")
    theirs = found.get("schema")
    if theirs != schema:
        newer = isinstance(theirs, int) and theirs > schema
        advice = "written by a newer mssar; update this one" if newer else f"not a {noun} of mssar"
        raise ValueError(f"schema {theirs!r:.60}, and {schema} is read here: {advice}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key said twice, readers take one or the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_plain(twice)}: said twice")
    return found


def _check_depth(found: Any) -> None:
    """What JSON's reader still bears may be too deep for what comes after it."""
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for some in inner for one in some if isinstance(one, dict | list)]
        if not level:
            return
    raise RecursionError


def check_fields(kind: type[Any], found: Mapping[str, Any], kinds: Kinds, within: str = "") -> None:
    """All of a dataclass's fields and no other, each of a kind that its annotation allows."""
    names = {f.name: str(f.type) for f in fields(kind)}
    for name in names:
        if name not in found:
            raise ValueError(f"{within}{name}: missing")
    for name in found:
        if name not in names:
            raise ValueError(f"{within}{_plain(name)}: unknown")
    for name, expected in names.items():
        value, allowed = found[name], kinds[expected]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{within}{name}: expected {expected}; got {value!r:.60}")


def _plain(name: str) -> str:
    """A name from elsewhere, on one line and not too long."""
    return name[:60] if name.isidentifier() else f"{name!r:.60}"


def check_finite(value: Any, path: str = "") -> None:
    """No number, however deep, that is infinite, as 1e999 is, or beyond all reason."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_finite(inner, f"{path}.{_plain(name)}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            check_finite(inner, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}: not finite")
    elif isinstance(value, int | float) and abs(value) > LARGEST:
        raise ValueError(f"{path}: too large a number")


def require_regular(path: Path) -> None:
    """A pipe would be waited for without end, and a device may have none."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a regular file")


def text(path: Path) -> str:
    """A file's contents, if they can be lines of ours; a ValueError does not name the file."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    if (size := path.stat().st_size) > LONGEST:
        raise ValueError(f"{size:,} bytes, and {LONGEST:,} are read here")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not text in UTF-8") from None


def read(path: Path, noun: str, parse: Callable[[str], T]) -> Iterator[T]:
    """The lines of a file, or of every ``*.jsonl`` in a folder; none where it is missing."""
    if path.is_dir():
        for file in sorted(path.glob("*.jsonl")):
            yield from read(file, noun, parse)
        return
    if not path.exists():
        return
    try:
        lines = text(path).split("\n")  # splitlines() has more ends than JSON lines
    except ValueError as error:
        raise ValueError(f"{path} holds no {noun}s: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def append(path: Path, *added: str, unless: str | None = None) -> None:
    """Add lines, all or none of them, unless one with this text in it is there already."""

    def fresh(there: list[str]) -> tuple[str, ...]:
        if unless is not None and any(unless in line and _is_whole(line) for line in there):
            return ()
        return added

    add(path, fresh)


def add(path: Path, chosen: Callable[[list[str]], Sequence[str]]) -> None:
    """Add the lines that are chosen in view of those that are there, all or none of them.

    The file is written anew: one that is added to in its place can be cut off within a line, by a
    power cut or before the eyes of whoever reads it. A lock keeps others from adding meanwhile.
    """
    path = path.resolve()  # a link stays one, and has the lock of the file
    make_folder(path.parent)
    with FileLock(path.with_name(f".{path.name}.lock")):
        require_regular(path)
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):  # someone else did not finish a line
            before += b"\n"
        there = before.decode("utf-8", "replace").split("\n")
        if added := chosen(there):
            write_whole(path, before + "".join(f"{line}\n" for line in added).encode())


def _is_whole(line: str) -> bool:
    """Half a record does not count as that record."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
