"""What is written after an option: times, and numbers or names with commas between them."""

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


def places(text: str) -> str | list[str]:
    """Names of modules or patterns with commas between them; the words for all blocks and SEs."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ValueError(f"--where takes names of modules, as in layer4.*,*.bn2; got {text!r}")
    return names[0] if names in (["blocks"], ["se"]) else names
