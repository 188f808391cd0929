"""Points on a plane as SVG: each with its reach both ways, and its name beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 680, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 30, 46
RADIUS, LINE, LETTER = 5.5, 14.0, 6.7  # of a dot; of text, its height and a letter's width


class Point(NamedTuple):
    """``kind`` gives the colour; x and y are a value with what it reaches from and to."""

    kind: str
    name: str
    x: tuple[float, float, float]
    y: tuple[float, float, float]


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        apart = self.right < other.left or other.right < self.left
        return not (apart or self.bottom < other.top or other.bottom < self.top)


class _Axis:
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


def svg(points: Sequence[Point], x_name: str, y_name: str, label: str) -> str:
    """A figure that scales, in the colours of the page."""
    x = _Axis([v for p in points for v in p.x], LEFT, WIDTH - RIGHT)
    y = _Axis([v for p in points for v in p.y], HEIGHT - BOTTOM, TOP)
    parts = []
    for number, text in x.ticks():
        at = x.at(number)
        parts.append(f'<line class="rule" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 18, text, "number", "middle"))
    for number, text in y.ticks():
        at = y.at(number)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(_text(LEFT - 8, at + 4, text, "number", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, "axis", "middle"))
    parts.append(_text(8, TOP - 12, y_name, "axis", "start"))
    parts += [_point(p, x, y) for p in points]
    parts += _names(points, x, y)
    said = f'role="img" aria-label="{escape(label)}"'
    return f'<svg class="plane" viewBox="0 0 {WIDTH} {HEIGHT}" {said}>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _point(p: Point, x: _Axis, y: _Axis) -> str:
    (cx, left, right), (cy, low, high) = map(x.at, p.x), map(y.at, p.y)
    return (
        f'<g class="point" data-recalibration="{escape(p.kind)}">'
        f'<line x1="{cx}" x2="{cx}" y1="{low}" y2="{high}" stroke-width="1.5"/>'
        f'<line x1="{left}" x2="{right}" y1="{cy}" y2="{cy}" stroke-width="1.5"/>'
        f'<circle cx="{cx}" cy="{cy}" r="{RADIUS}"/></g>'
    )


def _names(points: Sequence[Point], x: _Axis, y: _Axis) -> list[str]:
    """Each where nothing else is, if there is such a place near it; on strokes if it must."""
    taken = []
    for p in points:
        cx, cy = x.at(p.x[0]), y.at(p.y[0])
        taken.append(_Box(cx - RADIUS, cy - RADIUS, cx + RADIUS, cy + RADIUS))
    strokes = [_Box(x.at(p.x[0]), y.at(p.y[2]), x.at(p.x[0]), y.at(p.y[1])) for p in points]
    strokes += [_Box(x.at(p.x[1]), y.at(p.y[0]), x.at(p.x[2]), y.at(p.y[0])) for p in points]
    made = []
    for p in points:
        cx, cy, wide = x.at(p.x[0]), y.at(p.y[0]), LETTER * len(p.name)
        rows = [0.0, *(s * LINE * n for n in (1, 2, 3) for s in (-1, 1))]
        places = [
            (left, cy + row) for row in rows for left in (cx + RADIUS + 5, cx - RADIUS - 5 - wide)
        ]
        boxes = [_Box(a, b - LINE / 2, a + wide, b + LINE / 2) for a, b in places]
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
        made.append(_text(round(box.left, 1), round(box.bottom - 3, 1), p.name, "name", "start"))
    return made
