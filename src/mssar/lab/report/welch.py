"""How far two means may differ by chance: Welch's interval, for unequal spreads and few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

LEVEL = 0.95


def margin(*sides: tuple[float, int]) -> float:
    """Half the width of the interval around the difference of two means, or, of several pairs one
    behind the other, around the mean of their differences.

    Of a side the spread (sample standard deviation) and the number, which is at least two. Where
    none has a spread, nothing says how wide it is, and it has no end. No run may be on two sides.
    """
    variance, freedom = _apart(sides)
    return quantile(0.5 + LEVEL / 2, freedom) * math.sqrt(variance) if variance else math.inf


def p_value(difference: float, *sides: tuple[float, int]) -> float:
    """How often chance alone would make such a difference or a larger one."""
    variance, freedom = _apart(sides)
    return _beyond(abs(difference) / math.sqrt(variance), freedom) if variance else 1.0


def _apart(sides: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The variance of the difference, and its degrees of freedom."""
    pairs = len(sides) // 2
    parts = [(spread / pairs) ** 2 / n for spread, n in sides]
    variance = sum(parts)
    if not variance:
        return 0.0, 0.0
    uncertain = sum(part**2 / (n - 1) for part, (_, n) in zip(parts, sides, strict=True))
    return variance, variance**2 / uncertain


@lru_cache(maxsize=1024)
def quantile(share: float, freedom: float) -> float:
    """Of Student's t above its middle, by halving."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < share else (low, middle)
    return high


def _below(t: float, freedom: float) -> float:
    """The share of Student's t that lies below t ≥ 0."""
    return 1 - _beyond(t, freedom) / 2


def _beyond(t: float, freedom: float) -> float:
    """The share that lies beyond t ≥ 0 on either side; exact where it is next to nothing."""
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's way)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where it converges quickly
        return 1 - _beta(1 - x, b, a)
    c, d = 1.0, 1 / _kept(1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for part in (even, odd):
            d, c = 1 / _kept(1 + part * d), _kept(1 + part / c)
            total *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log + a * math.log(x) + b * math.log1p(-x)) * total / a


def _kept(value: float) -> float:
    """Off zero, which is divided by."""
    return value if abs(value) > 1e-300 else 1e-300
