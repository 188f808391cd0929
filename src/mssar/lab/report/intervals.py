"""Differences drawn as points with their intervals. Lengths in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mssar.lab.report.content import Claim, Difference
from mssar.lab.report.phrases import plus_minus, spelt
from mssar.lab.report.plane import Axis, Box, Text

WIDTH, LEFT, RIGHT = 400, 100, 88  # names stand on the left, numbers on the right
TOP, HEADING, ROW, BETWEEN, BOTTOM = 4, 22, 22, 10, 46
RADIUS = 5.5


class Line(NamedTuple):
    """One difference: its name and numbers, its point and interval, and where the paper's is."""

    name: Text
    numbers: Text
    x: float
    y: float
    interval: Box
    paper: float | None


class Drawn(NamedTuple):
    """All that ``differences.html`` draws, in its order."""

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
    return "see text" if one.networks and one.remark else one.remark


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
