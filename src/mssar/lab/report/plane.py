"""Points on a plane: each with its reach both ways, and its name beside it. Lengths in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mssar.lab.report.content import Comparison
from mssar.lab.report.phrases import spelt

WIDTH, HEIGHT = 680, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 30, 46
RADIUS, LINE, LETTER = 5.5, 14.0, 6.7  # of a dot; of text, its height and a letter's width


class Point(NamedTuple):
    """``kind`` gives the colour; x and y are a value with what it reaches from and to."""

    kind: str
    name: str
    x: tuple[float, float, float]
    y: tuple[float, float, float]


class Box(NamedTuple):
    """Or a line, if it has no width or no height."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        apart = self.right < other.left or other.right < self.left
        return not (apart or self.bottom < other.top or other.bottom < self.top)


class Axis:
    """Numbers to pixels, over a range that has some air around it."""

    def __init__(self, numbers: Sequence[float], start: float, end: float) -> None:
        low, high = min(numbers), max(numbers)
        air = 0.08 * (high - low) or abs(high) * 0.1 or 1.0
        self.low, self.high, self.start, self.end = low - air, high + air, start, end

    def at(self, number: float) -> float:
        share = (number - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """About five round numbers, and how they are written."""
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        places = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        return [(n * step, f"{n * step:.{places}f}") for n in range(first, last + 1)]


class Text(NamedTuple):
    """``anchor`` is the part of it that x is the place of."""

    kind: str
    x: float
    y: float
    text: str
    anchor: str = "middle"


class Plane(NamedTuple):
    """All that ``plane.svg`` draws, in its order."""

    label: str
    ticks: list[tuple[Box, Text]]
    axes: tuple[Text, Text]
    points: list[tuple[Point, float, float, tuple[Box, Box]]]  # each where it is, and its strokes
    names: list[Text]
    width: int = WIDTH
    height: int = HEIGHT
    radius: float = RADIUS


def compared(of: Comparison) -> Plane | None:
    """Errors over the time of a step, where that was measured."""
    points = [
        Point(
            row.recalibration,
            spelt(row.recalibration) + (f" {row.options}" if row.options else ""),
            (row.ms, row.low or row.ms, row.high or row.ms),
            (row.mean, row.mean - (row.spread or 0), row.mean + (row.spread or 0)),
        )
        for row in of.rows
        if row.ms is not None
    ]
    label = f"Error over the time of a step of training, {of.network} on {spelt(of.dataset)}"
    return plane(points, "ms a step of training", "error, %", label) if points else None


def plane(points: Sequence[Point], x_name: str, y_name: str, label: str) -> Plane:
    x = Axis([v for p in points for v in p.x], LEFT, WIDTH - RIGHT)
    y = Axis([v for p in points for v in p.y], HEIGHT - BOTTOM, TOP)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    ticks = []
    for number, text in x.ticks():
        at = x.at(number)
        ticks.append((Box(at, TOP, at, bottom), Text("number", at, bottom + 18, text)))
    for number, text in y.ticks():
        at = y.at(number)
        ticks.append((Box(LEFT, at, right, at), Text("number", LEFT - 8, at + 4, text, "end")))
    axes = (
        Text("axis", (LEFT + right) / 2, HEIGHT - 8, x_name),
        Text("axis", 8, TOP - 12, y_name, "start"),
    )
    placed = []
    for p in points:
        (cx, begin, end), (cy, low, high) = map(x.at, p.x), map(y.at, p.y)
        placed.append((p, cx, cy, (Box(cx, high, cx, low), Box(begin, cy, end, cy))))
    return Plane(label, ticks, axes, placed, _names(placed))


def _names(placed: Sequence[tuple[Point, float, float, tuple[Box, Box]]]) -> list[Text]:
    """Each where nothing else is, if there is such a place near it; on strokes if it must."""
    taken = [Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for _, x, y, _ in placed]
    strokes = [stroke for *_, both in placed for stroke in both]
    made = []
    for p, cx, cy, _ in placed:
        wide = LETTER * len(p.name)
        rows = [0.0, *(s * LINE * n for n in (1, 2, 3) for s in (-1, 1))]
        places = [
            (left, cy + row) for row in rows for left in (cx + RADIUS + 5, cx - RADIUS - 5 - wide)
        ]
        boxes = [Box(a, b - LINE / 2, a + wide, b + LINE / 2) for a, b in places]
        free = [
            box
            for box in boxes
            if box.left > LEFT
            and box.right < WIDTH - 2
            and box.top > TOP - LINE
            and box.bottom < HEIGHT - BOTTOM
            and not any(box.meets(other) for other in taken)
        ]
        clear = [box for box in free if not any(box.meets(stroke) for stroke in strokes)]
        box = (clear or free or boxes)[0]
        taken.append(box)
        at = round(box.left, 1), round(box.bottom - 3, 1)
        made.append(Text("name", *at, p.name, "start"))
    return made
