"""Other recalibrations in MS-SAR's place: a table for docs/results-modules.md.
tools/write-results puts it there."""

from __future__ import annotations

from collections.abc import Sequence

from scales import Table, told

from mssar.lab.records import Record
from mssar.lab.report.comparison import comparisons
from mssar.lab.report.content import ORDER, Comparison
from mssar.lab.report.groups import Group, claim, grouped
from mssar.lab.report.phrases import plus_minus, spelt
from mssar.lab.timings import Timing

NETWORK, DATASET = "resnet20", "cifar100"
OPEN = "no record yet"


def found(known: Sequence[Record]) -> dict[str, Group]:
    """By recalibration, in the order of a comparison; each with its own defaults."""
    groups = {
        group.name.recalibration: group
        for group in grouped(known)
        if (group.name.network, group.name.dataset) == (NETWORK, DATASET)
        and not group.name.particulars
    }
    return {kind: groups[kind] for kind in ORDER if kind in groups}


def beside(known: Sequence[Record], measured: Sequence[Timing]) -> Comparison:
    """The same, as the report has it."""
    (made,) = comparisons(found(known).values(), measured)
    return made


def errors(known: Sequence[Record], measured: Sequence[Timing]) -> Table:
    """Errors, differences and what each adds; time and memory of a step
    where they were measured for all that was trained."""
    groups, made = found(known), beside(known, measured)
    base, rows = made.base, {row.recalibration: row for row in made.rows}
    assert base is not None
    none, ours = groups["none"].records, groups["mssar"].records
    timed = all(row.ratio is not None for row in made.rows)
    weighed = all(row.peak for row in made.rows)  # not on a CPU
    head = ["module", "error, %", "lower than none", "MS-SAR lower than it"]
    head += ["parameters", "multiply-adds"]
    head += [*["a step, over none"] * timed, *["memory, over none"] * weighed]
    lines = []
    for kind in ORDER:
        if kind not in groups:
            lines.append([spelt(kind), OPEN, *[""] * (len(head) - 2)])
            continue
        row, runs = rows[kind], groups[kind].records
        line = [spelt(kind), f"{plus_minus(row.mean, row.spread)} (n={row.n})"]
        line.append("" if kind == "none" else told(claim("none", runs, none, None))[0])
        line.append("" if kind == "mssar" else told(claim(kind, ours, runs, None))[0])
        pairs = ((row.params, base.params), (row.macs, base.macs))
        line += [f"{count:,}" if row is base else _more(count, few) for count, few in pairs]
        line += [plus_minus(row.ratio)] * timed
        lines.append(line + [plus_minus((row.peak or 0) / (base.peak or 1))] * weighed)
    return head, lines, 1


def _more(count: int, base: int) -> str:
    """What is added, and its share."""
    return f"+{count - base:,}" + (f" (+{count / base - 1:.1%})" if count != base else "")


def conditions(known: Sequence[Record], measured: Sequence[Timing]) -> str:
    """How each was trained, where that is not the same for all."""
    return beside(known, measured).made


def left(known: Sequence[Record]) -> str:
    """What has no record."""
    return ", ".join(spelt(kind) for kind in ORDER if kind not in found(known))
