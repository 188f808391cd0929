"""What recalibration costs in time, as measured: one JSON line a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from mssar.lab import lines, values
from mssar.lab.values import Count

SCHEMA = 1
WHAT = ("training", "inference")  # a step, or a pass through the network
LONGEST = 1e9  # milliseconds


@dataclass(frozen=True)
class Timing:
    """How long a batch takes. Timings that were measured in turns share ``made``."""

    network: str
    recalibration: str
    options: dict[str, Any]
    size: tuple[Annotated[int, Meta(ge=3, le=3)], Count, Count]  # of one image: 3, H, W
    classes: Count
    what: str  # training or inference
    batch: Count
    precision: str
    graph: bool
    compile: bool
    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: Count
    peak_bytes: Count | None  # most that was held at a time, data set apart; None on a CPU
    environment: dict[str, Any]  # hardware and versions
    code: dict[str, Any]  # version, commit
    command: str
    made: str  # ISO 8601, UTC
    schema: int = SCHEMA

    def as_line(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))


_CONDITIONS = attrgetter(
    *("made", "command", "environment", "network", "size", "classes"),
    *("what", "batch", "precision", "graph", "compile"),
)


def parse(line: str) -> Timing:
    """A timing from its line; a ValueError says what is wrong with it."""
    timing = values.fitted(Timing, values.decode(line, "timing", SCHEMA))
    if timing.what not in WHAT:
        raise ValueError(f"what: expected {' or '.join(WHAT)}; got {timing.what!r:.60}")
    if not 0 < timing.p20_ms <= timing.median_ms <= timing.p80_ms < LONGEST:
        raise ValueError("p20_ms, median_ms, p80_ms: expected milliseconds in ascending order")
    values.converted(timing.environment.get("hardware"), str, "environment.hardware")
    _check_time(timing.made)
    return timing


def _check_time(made: str) -> None:
    try:
        utc = datetime.fromisoformat(made).utcoffset() == timedelta(0)
    except ValueError:
        utc = False
    if not utc:
        raise ValueError(f"made: expected a time in UTC, ISO 8601; got {made!r:.60}")


def read(path: Path) -> list[Timing]:
    """The timings of a file, or of every ``*.jsonl`` in a folder; none where it is missing."""
    return list(lines.read(path, "timing", parse))


def append(path: Path, *measured: Timing) -> None:
    """Add lines, all or none of them: what was measured in turns stays together."""
    added = [timing.as_line() for timing in measured]
    for line in added:
        parse(line)  # what cannot be read is not written
    lines.append(path, *added)


def ratio(timing: Timing, among: Iterable[Timing]) -> float | None:
    """Its median over that of the network without recalibration, measured in turns with it; None
    where that is not among them."""
    for other in among:
        if other.recalibration == "none" and _CONDITIONS(other) == _CONDITIONS(timing):
            return timing.median_ms / other.median_ms
    return None
