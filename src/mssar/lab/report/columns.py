"""The columns of a page's tables; their macros in ``cells.html`` say what is written into each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mssar.lab.report.content import ORDER, Comparison, Table
from mssar.lab.report.phrases import spelt

# As they are sorted.
OUTCOMES = ("holds", "lower", "none", "unclear", "higher", "reversed", "open")


def _some(of: Table | Comparison) -> bool:
    return bool(of.rows)


class Column(NamedTuple):
    """A key is that of a field, unless what rows are sorted by is said."""

    key: str
    heading: str
    there: Callable[[Any], bool] = _some  # whether a table, or a comparison, has it
    by: Callable[[Any], float | str | None] | None = None

    def value(self, row: Any) -> float | str | None:
        """What a row is sorted by; None comes last."""
        found = getattr(row, self.key) if self.by is None else self.by(row)
        return None if found == "" else found


def columns(of: Table | Comparison, known: Sequence[Column]) -> list[Column]:
    return [column for column in known if column.there(of)]


def _any(name: str) -> Callable[[Any], bool]:
    return lambda of: any(getattr(row, name) not in (None, "") for row in of.rows)


def _rank(row: Any) -> str:
    kind = row.recalibration
    place = ORDER.index(kind) if kind in ORDER else len(ORDER)
    return f"{place} {kind} {row.options}"


TABLE = (
    Column("network", "Network"),
    Column("recalibration", "Recalibration", by=_rank),
    Column(
        "dataset",
        "Data set",
        lambda of: len({row.dataset for row in of.rows}) > 1,
        lambda row: spelt(row.dataset),
    ),
    Column("published", "Published, %", _any("published")),
    Column("mean", "Ours, %"),
    Column("difference", "Difference", _any("published")),
    Column("published5", "Top-5 published, %", _any("published5")),
    Column("mean5", "Top-5 ours, %", _any("mean5")),
    Column(
        "claim",
        "Claim",
        _any("claim"),
        lambda row: OUTCOMES.index(row.outcome) if row.claim else None,
    ),
    Column("remark", "Remark", _any("remark")),
)
COMPARED = (
    Column("recalibration", "Recalibration", by=_rank),
    Column("mean", "Error, %"),
    Column("claim", "Against none", by=lambda row: row.claim and row.claim.gain),
    Column("params", "Parameters"),
    Column("macs", "Multiply-adds"),
    Column("ms", "ms a step", lambda of: bool(of.measured)),
    Column("ratio", "Over none", lambda of: bool(of.measured)),
    Column("peak", "MiB a step", _any("peak")),
)
