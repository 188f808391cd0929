"""What a run leaves behind: one JSON line with its result, its course and its provenance."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mssar.lab import lines, values
from mssar.lab.values import AtLeastOne, Count, Percent, Seconds

SCHEMA = 1


@dataclass(frozen=True)
class Epoch:
    """One epoch's course; losses are means over images, errors in per cent."""

    epoch: int  # from 1
    lr: float
    train_loss: float
    train_error: Percent
    test_loss: float
    test_error: Percent
    test_error5: Percent
    seconds: Seconds  # training and testing, other runs on the same device included


@dataclass(frozen=True)
class Record:
    """A finished run. Errors are the last epoch's, in per cent; never the best epoch's."""

    id: str
    run: dict[str, Any]  # network, recalibration, options, dataset, recipe, seed
    data: dict[str, Any]  # checksum, number of classes and images
    execution: dict[str, Any]  # device, precision and whatever else decides how, not what
    environment: dict[str, Any]  # hardware and versions; earlier: of parts made otherwise
    code: dict[str, Any]  # version, commit
    command: str
    params: Count
    macs: Count
    epochs: tuple[Epoch, ...]
    error: Percent
    error5: Percent
    class_errors: tuple[Percent, ...]
    seconds: Seconds
    started: str  # ISO 8601, UTC
    finished: str
    interruptions: int  # times it was stopped and resumed
    schema: int = SCHEMA

    @property
    def conditions(self) -> tuple[str, str]:
        """The data's checksum and the precision: runs that differ in these are not compared."""
        return self.data["checksum"], str(self.execution.get("precision", ""))

    def as_line(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))


# What else these hold is kept as it is.
_WITHIN: dict[str, dict[str, Any]] = {
    "run": {"network": str, "recalibration": str, "options": dict, "dataset": str}
    | {"recipe": dict, "seed": int},
    "data": {"checksum": str, "classes": Count, "train": Count, "test": Count},
    "execution": {"together": AtLeastOne},
    "environment": {"hardware": str},
}


def parse(line: str) -> Record:
    """A record from its line; a ValueError says what is wrong with it."""
    found = values.decode(line, "record", SCHEMA)
    course = values.converted(found.get("epochs", []), list[Any], "epochs")
    epochs = [values.fitted(Epoch, one, f"epochs[{n}].") for n, one in enumerate(course)]
    record = values.fitted(Record, found, epochs=tuple(epochs))
    for within, known in _WITHIN.items():
        for name, kind in known.items():
            values.converted(found[within].get(name), kind, f"{within}.{name}")
    _check(record)
    return record


def _check(record: Record) -> None:
    """That its parts belong together."""
    for number, epoch in enumerate(record.epochs, 1):
        if epoch.epoch != number:
            raise ValueError(f"epochs: number {number} says it is {epoch.epoch!r:.60}")
    if not record.epochs:
        raise ValueError("epochs: there is none")
    planned = record.run["recipe"].get("epochs")
    if len(record.epochs) != planned:
        raise ValueError(f"epochs: {len(record.epochs)}, and the recipe has {planned!r:.60}")
    if record.error != record.epochs[-1].test_error:
        raise ValueError("error: not that of the last epoch")
    if len(record.class_errors) != record.data["classes"]:
        raise ValueError("class_errors: not one for each of data.classes")


def read(path: Path) -> list[Record]:
    """The records of a file, or of every ``*.jsonl`` in a folder; none where it is missing."""
    return list(lines.read(path, "record", parse))


def later(by_seed: dict[int, Record], record: Record) -> None:
    """Put a record in its seed's place, unless one is there that was finished later."""
    there = by_seed.setdefault(record.run["seed"], record)
    if record.finished > there.finished:
        by_seed[record.run["seed"]] = record


def append(path: Path, record: Record) -> None:
    """Add a line, whole or not at all, unless the record is there already."""
    line = record.as_line()
    parse(line)  # what cannot be read is not written
    lines.append(path, line, unless=f'"id":"{record.id}"')
