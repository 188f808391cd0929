"""What is written after an option: times, and numbers with commas between them."""

from __future__ import annotations

import re


def seconds(text: str | None) -> float | None:
    """A time budget: ``90``, ``90s``, ``9m``, ``1h30m``."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip())
    if not found or not any(found.groups()):
        raise ValueError(f"--time-budget is a time such as 90s, 9m or 1h30m; got {text!r}")
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    if not (total := 3600 * hours + 60 * minutes + rest):
        raise ValueError(f"--time-budget must be more than nothing; got {text!r}")
    return float(total)


def integers(name: str, text: str, example: str) -> tuple[int, ...]:
    """Whole numbers with commas between them; an empty text has none."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"--{name} takes whole numbers, as in {example}; got {text!r}") from None


def pair(name: str, text: str, example: str) -> tuple[float, float]:
    """Two numbers with a comma between them."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} takes two numbers, as in {example}; got {text!r}") from None
    return low, high
