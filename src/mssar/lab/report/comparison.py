"""Recalibrations beside each other: from records and timings of one network under one recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from mssar.lab import timings
from mssar.lab.records import Record
from mssar.lab.report.content import ORDER, Compared, Comparison
from mssar.lab.report.figures import how
from mssar.lab.report.groups import Group, claim, commit_of, options_of
from mssar.lab.report.phrases import spelt
from mssar.lab.timings import Timing

PAPER = ("none", "se", "mssar")  # which the paper's tables have already


def comparisons(
    groups: Iterable[Group], measured: Sequence[Timing], *, every: bool = False
) -> list[Comparison]:
    """Of networks that were trained with more than the paper has; with ``every`` of all. What is
    compared is on the same data and in one precision."""
    alike: dict[str, list[Group]] = {}
    for group in groups:
        alike_in = ("network", "dataset", "recipe", "weights", "normalisation")
        run = {name: group.run.get(name) for name in alike_in}
        key = json.dumps([run, group.conditions], sort_keys=True)
        alike.setdefault(key, []).append(group)
    return [
        _comparison(sorted(some, key=_place), measured)
        for some in alike.values()
        if every or any(group.name.recalibration not in PAPER for group in some)
    ]


def _place(group: Group) -> tuple[int, str]:
    kind = group.name.recalibration
    return ORDER.index(kind) if kind in ORDER else len(ORDER), group.name.options


def _comparison(groups: Sequence[Group], measured: Sequence[Timing]) -> Comparison:
    first = groups[0]
    times = _in_turns(groups, measured)
    base = next((group for group in groups if group.name.recalibration == "none"), None)
    one = next(iter(times.values()), None)
    said = ""
    if one:
        said = f"{one.environment['hardware']}, batch {one.batch}, {how(one)}"
    return Comparison(
        first.name.network,
        first.name.dataset,
        first.name.recipe,
        said,
        _made(groups),
        tuple(_row(group, base, times.get(_key(group)), list(times.values())) for group in groups),
    )


def _row(
    group: Group, base: Group | None, time: Timing | None, among: Sequence[Timing]
) -> Compared:
    other = None if base is None or base is group else base
    return Compared(
        recalibration=group.name.recalibration,
        options=group.name.options,
        mean=group.mean,
        spread=group.spread,
        n=group.n,
        claim=None if other is None else claim("none", group.records, other.records, None),
        params=group.records[0].params,
        macs=group.records[0].macs,
        ms=time.median_ms if time else None,
        low=time.p20_ms if time else None,
        high=time.p80_ms if time else None,
        ratio=timings.ratio(time, among) if time else None,
        peak=time.peak_bytes if time else None,
        runs=tuple(record.id for record in group.records),
    )


def _key(group: Group) -> tuple[str, str]:
    return group.name.recalibration, group.name.options


def _in_turns(groups: Sequence[Group], measured: Sequence[Timing]) -> dict[tuple[str, str], Timing]:
    """Steps of training that were timed together, with the batch and in the precision of the runs:
    of all such sets the one that has most of these, of several the latest. Times of different sets
    are not comparable, and of another step they would say nothing of these errors."""
    wanted, first = {_key(group) for group in groups}, groups[0]
    batch, (_, precision) = first.run["recipe"].get("batch"), first.conditions
    step = (first.name.network, "training", batch, precision)
    sets: dict[str, dict[tuple[str, str], Timing]] = {}
    for one in measured:
        key = (one.recalibration, options_of(one.network, one.recalibration, one.options))
        if (one.network, one.what, one.batch, one.precision) == step and key in wanted:
            together = (one.made, one.command, one.environment, one.size, one.batch, how(one))
            sets.setdefault(json.dumps(together, sort_keys=True), {})[key] = one
    return max(sets.values(), key=lambda some: (len(some), _when(some)), default={})


def _when(some: dict[tuple[str, str], Timing]) -> str:
    return next(iter(some.values())).made


def _made(groups: Sequence[Group]) -> str:
    """By which code, compiled or not and with how many as one, where that is not the same for all;
    those that are alike together."""
    alike: dict[str, list[str]] = {}
    for group in groups:
        ways = sorted({_way(record) for record in group.records})
        name = f"{spelt(group.name.recalibration)} {group.name.options}".rstrip()
        alike.setdefault(" and ".join(ways), []).append(name)
    several = len(alike) > 1 or any(" and " in way for way in alike)
    return "; ".join(f"{', '.join(names)} {way}" for way, names in alike.items() if several)


def _way(record: Record) -> str:
    how, made = record.execution, commit_of(record.code, 7)
    count = how.get("stacked", 1)
    said = [f"by `{made}`" if made else "", "compiled" if how.get("compile") else "uncompiled"]
    return ", ".join(part for part in (*said, f"{count} as one" if count > 1 else "") if part)
