"""What there is to show: records, timings and runs on their way, wherever they lie.

One bad line costs that line: it is named, with its file, and the rest is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mssar.lab import lines, records, timings
from mssar.lab.engine import checkpoint
from mssar.lab.engine.checkpoint import Progress
from mssar.lab.engine.result import NAME
from mssar.lab.records import Record
from mssar.lab.timings import Timing

T = TypeVar("T")


@dataclass
class Collection:
    """All that was found."""

    records: list[Record] = field(default_factory=list)  # each once
    timings: list[Timing] = field(default_factory=list)
    going: dict[Path, Progress] = field(default_factory=dict)  # by folder; not finished
    folders: dict[str, Path] = field(default_factory=dict)  # of finished runs, by their ids
    problems: list[str] = field(default_factory=list)


def collect(places: Iterable[Path]) -> Collection:
    """From files of lines, and folders with such files, with runs, or with folders of runs."""
    found, seen = Collection(), set[str]()
    for file in dict.fromkeys(file for place in places for file in _files(place)):
        _take(file, found, seen)
    return found


def below(place: Path) -> list[Path]:
    """Files that a page may be made of. Folders that vanish meanwhile are not there."""
    return sorted(
        Path(folder, name)
        for folder, _, names in os.walk(place)
        for name in names
        if name == NAME or name.endswith(".jsonl") or checkpoint.is_name(name)
    )


def _files(place: Path) -> list[Path]:
    """Files to read and folders of unfinished runs; or a file that is not there, to be named."""
    if not place.is_dir():
        return [place]
    files = below(place)
    lines = [path for path in files if path.suffix == ".jsonl"]
    runs = [path for path in files if path.name == NAME]
    begun = {path.parent for path in files if checkpoint.is_name(path.name)}
    return [*lines, *runs, *sorted(begun - {path.parent for path in runs})]


def _take(file: Path, found: Collection, seen: set[str]) -> None:
    if file.is_dir():
        _take_progress(file, found)
        return
    try:
        text = lines.text(file)
    except ValueError as error:
        found.problems.append(f"{file}: {error}")
        return
    except OSError as error:
        found.problems.append(f"{file}: {error.strerror or error}")
        return
    if not text.strip():
        found.problems.append(f"{file}: empty")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        if '"median_ms"' in line[:4000]:
            _add(timings.parse, line, where, found.timings.append, found)
        else:
            _add(records.parse, line, where, lambda one: _keep(one, file, found, seen), found)


def _add(
    parse: Callable[[str], T], line: str, where: str, keep: Callable[[T], None], found: Collection
) -> None:
    try:
        one = parse(line)
    except (ValueError, RecursionError) as error:
        found.problems.append(f"{where}: {str(error) or type(error).__name__}")
    else:
        keep(one)


def _keep(record: Record, file: Path, found: Collection, seen: set[str]) -> None:
    if file.name == NAME:
        found.folders[record.id] = file.parent
    if record.id not in seen:  # a run's own record is also in the file that collects them
        seen.add(record.id)
        found.records.append(record)


def _take_progress(folder: Path, found: Collection) -> None:
    for path in reversed(checkpoint.checkpoints(folder)):
        try:
            found.going[folder] = checkpoint.progress(path)
        except ValueError as error:
            if os.path.lexists(path):  # a run that goes on has put another in its place
                found.problems.append(str(error))
        else:
            return
