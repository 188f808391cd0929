"""Records of finished runs, from the runs' own folders into the files that are read.

Anybody may collect at any time, again and again, several at once: what is there is not added. No
clock is asked, for those of two machines differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mssar.lab import lines, records
from mssar.lab.cluster.sweep import Sweep
from mssar.lab.engine.result import finished
from mssar.lab.records import Record
from mssar.lab.run import Run


def key(record: Record) -> str:
    """What was trained, on which data, in which precision: a sweep trains that once."""
    how = (record.data["checksum"], record.execution.get("precision"))
    return json.dumps([record.run, *how], sort_keys=True)


def of(sweep: Sweep, runs: Iterable[Run]) -> tuple[dict[Run, Record], list[str]]:
    """The records of some of a sweep's runs so far, and what is wrong with others."""
    found, problems = dict[Run, Record](), list[str]()
    for run in runs:
        try:
            if record := finished(Path(sweep.order.runs) / run.name):
                found[run] = record
        except ValueError as error:  # the others are no worse for it
            problems.append(str(error))
    return found, problems


def into(sweep: Sweep, found: Mapping[Run, Record]) -> tuple[list[Record], list[str]]:
    """Add records to their files, unless they are there already; those that were added, and what
    is wrong with files."""
    files: dict[str, list[Record]] = {}
    for run, record in found.items():
        files.setdefault(sweep.order.record_in[run.name], []).append(record)
    added, problems = list[Record](), list[str]()
    for file, some in files.items():
        if problem := obstacle(Path(file)):
            problems.append(f"{sweep.name}: nothing is recorded in {file}: {problem}")
        else:
            added += _add(Path(file), some)
    return added, problems


def obstacle(path: Path) -> str | None:
    """Why no record is added to a file. Whoever asks how far a sweep is has records collected, and
    a stranger may have written which file that is."""
    place = Path(os.path.realpath(path))  # a link is what it leads to
    if place.suffix != ".jsonl":
        return "a file of records ends in .jsonl"
    if place.is_symlink():
        return "it is a link that leads to itself"
    if not place.parent.is_dir():
        return "there is no such folder"
    try:
        first = next(iter(lines.text(place).splitlines()), "") if place.exists() else ""
    except ValueError as error:
        return str(error)
    known = not first or _readable([first])
    begun = first.startswith("{") and not lines.is_whole(first)  # a record, cut off
    return None if known or begun else "it holds something else"


def _add(path: Path, found: Sequence[Record]) -> list[Record]:
    """Where locks mean nothing two tasks may have trained the same run, and the one that was later
    replaced the other's record in the folder. The first that was collected stays.
    """
    added = list[Record]()

    def fresh(there: list[str]) -> list[str]:
        known = {key(record) for record in _readable(there)}
        for record in found:
            if key(record) not in known:
                known.add(key(record))
                added.append(record)
        return [record.as_line() for record in added]

    lines.add(path, fresh)
    return added


def _readable(there: Iterable[str]) -> list[Record]:
    """Half a line is no record."""
    parsed = []
    for line in there:
        with suppress(ValueError):
            parsed.append(records.parse(line))
    return parsed


def collect(sweep: Sweep) -> tuple[list[Record], list[str]]:
    """Bring a sweep's records together; those that are new, and what is wrong with others."""
    found, problems = of(sweep, sweep.runs)
    added, more = into(sweep, found)
    return added, problems + more
