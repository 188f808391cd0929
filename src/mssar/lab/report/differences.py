"""How much lower the error is with MS-SAR than without it or with SE: found in the tables, and
drawn as points with their intervals. Lengths in pixels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mssar.lab.report.content import Claim, Difference, Row, Table
from mssar.lab.report.groups import Side, judged, known_mean
from mssar.lab.report.phrases import plus_minus, spelt
from mssar.lab.report.plane import Axis, Box, Text
from mssar.lab.report.tables import WEIGHT_DECAY

WIDTH, LEFT, RIGHT = 400, 100, 88  # names stand on the left, numbers on the right
TOP, HEADING, ROW, BETWEEN, BOTTOM = 4, 22, 22, 10, 46
RADIUS = 5.5
SE = "mssar scales=1"  # as the table of scales calls it


def differences(made: Sequence[Table]) -> list[Difference]:
    """Of the main table's networks, the deepest first, where there are runs enough of both; and
    before them the means over networks of one family."""
    rows = {table.name: [row for row in table.rows if row.n] for table in made}
    main = rows.get("table3", [])
    ours = [row for row in main if row.recalibration == "mssar" and not row.additional]
    networks = list(dict.fromkeys(row.network for row in ours))
    ours.sort(key=lambda row: -networks.index(row.network))
    datasets = list(dict.fromkeys(row.dataset for row in main))
    found = [
        _Compared(Difference(row.network, row.dataset, claim, row.runs, row.remark), row, other)
        for row in ours
        for claim, other in _claims(row, main, rows.get("table4", []))
        if claim.margin is not None
    ]
    means = sorted(_means(found), key=lambda one: datasets.index(one.dataset))
    return [*means, *(one.found for one in found)]


class _Compared(NamedTuple):
    found: Difference
    row: Row
    other: Row


def _claims(row: Row, main: Sequence[Row], scales: Sequence[Row]) -> Iterator[tuple[Claim, Row]]:
    """And the row of the main table that it is compared with."""
    others = {
        other.recalibration: other
        for other in main
        if (other.network, other.dataset) == (row.network, row.dataset)
    }
    if row.claim and (none := others.get(row.claim.against)):
        yield row.claim, none
    if se := others.get("se"):
        for other in scales:  # the paper's own comparison, where there is one
            if other.runs == row.runs and other.claim and other.claim.against == SE:
                yield Claim(**{**vars(other.claim), "against": "se"}), se
                return
        yield judged("se", None, (_side(row), _side(se))), se


def _means(found: Sequence[_Compared]) -> Iterator[Difference]:
    """Over those of a family that have every comparison that any of it has, if there are two."""
    families = defaultdict[tuple[str, str], list[_Compared]](list)
    for one in found:
        families[one.row.network.rstrip("0123456789"), one.row.dataset].append(one)
    for (family, dataset), some in families.items():
        against = defaultdict[str, list[_Compared]](list)
        for one in some:
            against[one.found.claim.against].append(one)
        common = set.intersection(*({one.row.network for one in ones} for ones in against.values()))
        for other, ones in against.items():
            of = [one for one in ones if one.row.network in common] if len(common) > 1 else ones
            if len(of) > 1:
                yield _mean(f"mean of {len(of)} {family}s", dataset, other, of)


def _mean(name: str, dataset: str, other: str, of: Sequence[_Compared]) -> Difference:
    published = known_mean([one.found.claim.published for one in of])
    pairs = ((_side(one.row), _side(one.other)) for one in of)
    doubted = [one.row.network for one in of if other == "none" and WEIGHT_DECAY in one.row.remark]
    return Difference(
        name,
        dataset,
        judged(other, published, *pairs),
        tuple(run for one in of for run in one.row.runs),
        "; ".join(f"{network}: {WEIGHT_DECAY}" for network in doubted),
        networks=tuple(one.row.network for one in of),
    )


def _side(row: Row) -> Side:
    return Side(row.mean or 0.0, row.spread or 0.0, row.n)


class Line(NamedTuple):
    """One difference: its name and numbers, its point and interval, and where the paper's is."""

    name: Text
    numbers: Text
    x: float
    y: float
    interval: Box
    paper: float | None


class Drawn(NamedTuple):
    """All that ``differences.svg`` draws, in its order."""

    said: str  # in words
    ticks: list[tuple[Box, Text]]
    zero: Box
    axis: Text
    headings: list[tuple[Text, str]]  # and a remark
    lines: list[Line]
    height: float
    width: int = WIDTH
    radius: float = RADIUS


def drawn(found: Sequence[Difference]) -> Drawn | None:
    """A heading for each network and data set, and under it a line for each difference."""
    if not found:
        return None
    axis = Axis([0.0, *_ends(found)], LEFT, WIDTH - RIGHT)
    headings, lines, y, before = [], list[Line](), float(TOP), None
    for one in found:
        name = f"{one.network} on {spelt(one.dataset)}"
        if name != before:
            y += HEADING + (BETWEEN if before else 0)
            headings.append((Text("heading", 0, y - 6, name, "start"), _remark(one)))
            before = name
        lines.append(_line(one.claim, axis, y + ROW / 2))
        y += ROW
    ticks = [
        (
            Box(axis.at(number), TOP, axis.at(number), y),
            Text("number", axis.at(number), y + 18, text),
        )
        for number, text in axis.ticks()
    ]
    zero = Box(axis.at(0), TOP, axis.at(0), y)
    scale = Text("axis", (LEFT + WIDTH - RIGHT) / 2, y + 38, "points lower with MS-SAR")
    return Drawn("; ".join(map(_said, found)), ticks, zero, scale, headings, lines, y + BOTTOM)


def _remark(one: Difference) -> str:
    """A mean's stands at its network, further down."""
    return "see below" if one.networks and one.remark else one.remark


def _ends(found: Iterable[Difference]) -> Iterator[float]:
    for claim in (one.claim for one in found):
        gain, margin = claim.gain or 0.0, claim.margin or 0.0
        yield from (gain - margin, gain + margin, claim.published or 0.0)


def _line(claim: Claim, axis: Axis, y: float) -> Line:
    gain, margin = claim.gain or 0.0, claim.margin or 0.0
    x = axis.at(gain)
    return Line(
        Text("name", 12, y + 4.5, f"against {spelt(claim.against)}", "start"),
        Text("number", WIDTH, y + 4.5, plus_minus(gain, margin).replace("-", "\u2212"), "end"),
        x,
        y,
        Box(axis.at(gain - margin), y, axis.at(gain + margin), y),
        None if claim.published is None else axis.at(claim.published),
    )


def _said(one: Difference) -> str:
    claim = one.claim
    paper = "" if claim.published is None else f", the paper {claim.published:.2f}"
    return (
        f"{one.network} on {spelt(one.dataset)} against {spelt(claim.against)}: "
        f"{plus_minus(claim.gain, claim.margin)}{paper}"
    )
