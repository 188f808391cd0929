"""What a suite of faults gives: a row for each kind of fault.

A suite is a module of this package with ``check(effort, seed)``, which yields rows. An effort of 1
is the whole suite, as ``make faults`` runs it; the tests run a small part of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kind of fault: how often it was done, and how often it did not end as promised."""

    fault: str  # what was done: "SIGKILL in a step"
    promise: str  # what must come of it: "resumes, weights bit-identical"
    tried: int
    wrong: int = 0
    remark: str = ""  # how it went, in a few words: "87 MiB at most"


def share(whole: float, effort: float, least: int = 1) -> int:
    """So many of the whole as an effort asks for."""
    return max(least, math.ceil(whole * effort))


def table(rows: Iterable[Row]) -> str:
    """Rows as Markdown."""
    lines = ["| fault | what must come of it | tried | wrong | |", "|---|---|--:|--:|---|"]
    for row in rows:
        cells = (row.fault, row.promise, f"{row.tried:,}", f"{row.wrong:,}", row.remark)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
