"""What a run leaves behind: one JSON line with its result, its course and its provenance."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mssar.lab import lines

SCHEMA = 1


@dataclass(frozen=True)
class Epoch:
    """One epoch's course; losses are means over images, errors in per cent."""

    epoch: int  # from 1
    lr: float
    train_loss: float
    train_error: float
    test_loss: float
    test_error: float
    test_error5: float
    seconds: float  # training and testing, other runs on the same device included


@dataclass(frozen=True)
class Record:
    """A finished run. Errors are the last epoch's, in per cent; never the best epoch's."""

    id: str
    run: dict[str, Any]  # network, recalibration, options, dataset, recipe, seed
    data: dict[str, Any]  # checksum, number of classes and images
    execution: dict[str, Any]  # device, precision and whatever else decides how, not what
    environment: dict[str, Any]  # hardware and versions
    code: dict[str, Any]  # version, commit
    command: str
    params: int
    macs: int
    epochs: tuple[Epoch, ...]
    error: float
    error5: float
    class_errors: tuple[float, ...]
    seconds: float
    started: str  # ISO 8601, UTC
    finished: str
    interruptions: int  # times it was stopped and resumed
    schema: int = SCHEMA

    def as_line(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))


_KINDS: lines.Kinds = {
    **lines.KINDS,
    "tuple[Epoch, ...]": (list,),
    "tuple[float, ...]": (list,),
}
_RUN = {
    "network": str,
    "recalibration": str,
    "options": dict,
    "dataset": str,
    "recipe": dict,
    "seed": int,
}
_INNER: dict[str, dict[str, type]] = {
    "data": {"checksum": str, "classes": int, "train": int, "test": int},
    "execution": {"together": int},
    "environment": {"hardware": str},
}


def parse(line: str) -> Record:
    """A record from its line; a ValueError says what is wrong with it."""
    found = lines.decode(line, "record", SCHEMA)
    lines.check_fields(Record, found, _KINDS)
    lines.check_finite(found)
    for name, kind in _RUN.items():
        value = found["run"].get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"run.{name}: expected {kind.__name__}")
    for within, named in _INNER.items():
        for name, kind in named.items():
            value = found[within].get(name)
            if type(value) is not kind or (isinstance(value, int) and value < 1):
                raise ValueError(f"{within}.{name}: expected {kind.__name__}; got {value!r:.60}")
    for number, epoch in enumerate(found["epochs"], 1):
        if not isinstance(epoch, dict):
            raise ValueError(f"epochs: number {number} is no object")
        lines.check_fields(Epoch, epoch, _KINDS, f"epochs[{number}].")
        if epoch["epoch"] != number:
            raise ValueError(f"epochs: number {number} says it is {epoch['epoch']}")
    if not found["epochs"]:
        raise ValueError("epochs: there is none")
    planned = found["run"]["recipe"].get("epochs")
    if len(found["epochs"]) != planned:
        raise ValueError(f"epochs: {len(found['epochs'])}, and the recipe has {planned!r:.60}")
    for name in ("params", "macs"):
        if found[name] < 1:
            raise ValueError(f"{name}: expected 1 or more; got {found[name]!r:.60}")
    epochs = tuple(Epoch(**epoch) for epoch in found["epochs"])
    record = Record(**{**found, "epochs": epochs, "class_errors": tuple(found["class_errors"])})
    _check_errors(record)
    return record


def _check_errors(record: Record) -> None:
    if not all(type(error) in (int, float) for error in record.class_errors):
        raise ValueError("class_errors: expected numbers")
    errors = [record.error, record.error5, *record.class_errors]
    for epoch in record.epochs:
        errors += [epoch.train_error, epoch.test_error, epoch.test_error5]
    for error in errors:
        if not 0 <= error <= 100:
            raise ValueError(f"an error is in per cent, 0 to 100; got {error!r:.60}")
    if record.seconds < 0 or any(epoch.seconds < 0 for epoch in record.epochs):
        raise ValueError("seconds: below 0")
    if record.error != record.epochs[-1].test_error:
        raise ValueError("error: not that of the last epoch")
    if len(record.class_errors) != record.data.get("classes"):
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
