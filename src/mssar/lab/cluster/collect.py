"""Records of finished runs, from the runs' own folders into the files that are read.

Anybody may collect at any time, again and again, several at once: what is there is not added. No
clock is asked, for those of two machines differ.
"""

from __future__ import annotations

import json
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


def into(sweep: Sweep, found: Mapping[Run, Record]) -> list[Record]:
    """Add records to their files, unless they are there already; those that were added."""
    files: dict[str, list[Record]] = {}
    for run, record in found.items():
        files.setdefault(sweep.order.record_in[run.name], []).append(record)
    return [record for file, some in files.items() for record in _add(Path(file), some)]


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
    return into(sweep, found), problems
