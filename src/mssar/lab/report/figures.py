"""Courses of training, errors over cost, and measured times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from mssar.lab import timings
from mssar.lab.engine.checkpoint import Progress
from mssar.lab.experiments.paper import ILSVRC2012, TABLE3
from mssar.lab.records import Epoch
from mssar.lab.report.content import Curve, Point, Timed
from mssar.lab.report.groups import Group, Name, commit_of, on_their_way, options_of
from mssar.lab.timings import Timing

QUANTITIES = ("train_loss", "test_loss", "train_error", "test_error")


def curves(groups: Iterable[Group], going: Iterable[Progress] = ()) -> list[Curve]:
    """Of finished runs by group, of the others each its own."""
    found = []
    for group in groups:
        courses = [record.epochs for record in group.records]
        found.append(_curve(group.name, group.name.label, courses, len(courses[0]), going=False))
    for progress in going:
        name, epochs = on_their_way(progress), [Epoch(**entry) for entry in progress.history]
        if name and epochs:
            label = f"{name.label}, seed {progress.run.get('seed')}"
            whole = progress.run["recipe"].get("epochs")
            length = whole if isinstance(whole, int) else len(epochs)
            found.append(_curve(name, label, [epochs], length, going=True))
    return found


def _curve(
    name: Name, label: str, courses: Sequence[Sequence[Epoch]], length: int, *, going: bool
) -> Curve:
    shortest = min(map(len, courses))
    columns = {
        quantity: [
            [float(getattr(course[at], quantity)) for course in courses] for at in range(shortest)
        ]
        for quantity in QUANTITIES
    }
    return Curve(
        label=label,
        network=name.network,
        recalibration=name.recalibration,
        options=name.particulars,
        dataset=name.dataset,
        n=len(courses),
        going=going,
        epochs=length,
        mean={q: [fmean(v) for v in column] for q, column in columns.items()},
        low={q: [min(v) for v in column] for q, column in columns.items()},
        high={q: [max(v) for v in column] for q, column in columns.items()},
    )


def points(groups: Iterable[Group], *, published: bool) -> list[Point]:
    """Errors over multiply-adds: the paper's where asked for, and ours."""
    found = []
    for row in (*TABLE3, *ILSVRC2012) if published else ():
        for dataset, error in row.errors.items():
            if row.macs and dataset != "top5":
                data = "ilsvrc2012" if dataset == "top1" else dataset
                spread = row.spread.get(dataset)
                said = (row.network, row.recalibration, "", data, True)
                found.append(Point(*said, error, spread, row.runs, row.macs, row.params))
    for group in groups:
        name, record = group.name, group.records[0]
        said = (name.network, name.recalibration, name.particulars, name.dataset, False)
        cost = (float(record.macs), float(record.params))
        found.append(Point(*said, group.mean, group.spread, group.n, *cost))
    return found


def times(measured: Sequence[Timing]) -> list[Timed]:
    """What was measured, in turns. Epochs of runs are no such thing: whatever else the machine did
    meanwhile would count as the cost of what was trained then."""
    return [
        Timed(
            one.network,
            one.recalibration,
            _options(one),
            "×".join(map(str, one.size[1:])),
            "inference" if one.what == "inference" else "training",
            one.environment["hardware"],
            one.batch,
            how(one),
            one.median_ms,
            one.p20_ms,
            one.p80_ms,
            timings.ratio(one, measured),
            _source(one),
        )
        for one in _latest(measured)
    ]


def _latest(measured: Sequence[Timing]) -> list[Timing]:
    """Of the same thing measured twice the later."""
    last: dict[Any, Timing] = {}
    for one in sorted(measured, key=lambda timing: timing.made):
        who = (one.network, one.recalibration, _options(one), one.environment["hardware"])
        last[(*who, one.size, one.what, one.batch, how(one))] = one
    return list(last.values())


def how(one: Timing) -> str:
    """In words: bf16, compiled. CUDA graphs are the rule."""
    graphed = one.graph or one.peak_bytes is None  # which a CPU has neither of
    said = (one.precision, "compiled" * one.compile, "" if graphed else "no graphs")
    return ", ".join(part for part in said if part)


def _options(one: Timing) -> str:
    return options_of(one.network, one.recalibration, one.options)


def _source(one: Timing) -> str:
    commit = commit_of(one.code, 7)
    torch = f"torch {one.environment.get('torch', '?')}"
    said = (one.command, f"mssar {one.code.get('version', '?')}", commit, torch, one.made[:10])
    return ", ".join(part for part in said if part)
