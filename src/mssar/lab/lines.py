"""Files of JSON lines that outlive a program: read strictly, added to whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from mssar.durable import make_folder, write_whole

T = TypeVar("T")

LONGEST = 1 << 28  # bytes of a file


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
        if unless is not None and any(unless in line and is_whole(line) for line in there):
            return ()
        return added

    add(path, fresh)


def add(path: Path, chosen: Callable[[list[str]], Sequence[str]]) -> None:
    """Add the lines that are chosen in view of those that are there, all or none of them.

    The file is written anew: one that is added to in its place can be cut off within a line, by a
    power cut or before the eyes of whoever reads it. A lock keeps others from adding meanwhile.
    """
    path = Path(os.path.realpath(path))  # a link stays one, and has the lock of the file
    make_folder(path.parent)
    with FileLock(path.with_name(f".{path.name}.lock")):
        require_regular(path)
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):  # someone else did not finish a line
            before += b"\n"
        there = before.decode("utf-8", "replace").split("\n")
        if added := chosen(there):
            write_whole(path, before + "".join(f"{line}\n" for line in added).encode())


def is_whole(line: str) -> bool:
    """Half a record does not count as that record."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
