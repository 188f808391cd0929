"""A comparison as a table that can be sorted, and as a figure that needs no script."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import NamedTuple

from mssar.lab.report import plane
from mssar.lab.report.content import Compared, Comparison
from mssar.lab.report.phrases import (
    cell,
    marked,
    opening,
    plus_minus,
    recalibrated,
    signed,
    spelt,
)

NOTE = (
    "One network, one recipe, trained with each recalibration. Parameters and multiply-adds are "
    "the whole network's. A step is forward, backward and update; all were timed in turns."
)


class _Column(NamedTuple):
    key: str
    heading: str
    cell: Callable[[Compared], str]
    value: Callable[[Compared], float | str | None]


def _columns(of: Comparison) -> list[_Column]:
    base = next((row for row in of.rows if row.recalibration == "none"), None)

    def over(count: int, plain: int | None) -> str:
        return f" <small>+{count / plain - 1:.1%}</small>" if plain and count != plain else ""

    columns = [
        _Column(
            "recalibration",
            "Recalibration",
            lambda r: recalibrated(r.recalibration, r.options),
            lambda r: of.rows.index(r),
        ),
        _Column("mean", "Error, %", _error, lambda r: r.mean),
        _Column("gain", "Below none", lambda r: signed(r.gain), lambda r: r.gain),
        _Column(
            "params",
            "Parameters",
            lambda r: f"{r.params:,}{over(r.params, base.params if base else None)}",
            lambda r: r.params,
        ),
        _Column(
            "macs",
            "Multiply-adds",
            lambda r: f"{r.macs:,}{over(r.macs, base.macs if base else None)}",
            lambda r: r.macs,
        ),
    ]
    if of.measured:
        columns.append(_Column("ms", "ms a step", _step, lambda r: r.ms))
        columns.append(_Column("ratio", "Over none", lambda r: _times(r.ratio), lambda r: r.ratio))
    if any(row.peak is not None for row in of.rows):
        columns.append(_Column("peak", "MiB a step", _peak, lambda r: r.peak))
    return columns


def article(of: Comparison, number: int) -> str:
    """The table, and below it errors over times where these were measured."""
    columns = _columns(of)
    head = "".join(
        f'<th scope="col" role="columnheader" data-key="{c.key}">{c.heading}</th>' for c in columns
    )
    body = "\n".join(_row(row, columns, of) for row in of.rows)
    title = f"{of.network} on {spelt(of.dataset)}: recalibrations compared"
    about = NOTE
    about += f" Measured on {of.measured}." if of.measured else " The time was not measured."
    about += f" Not the usual recipe: {of.recipe}." if of.recipe else ""
    heading = f"comparison-{number}"
    return (
        f'<article class="results comparison" data-table="{heading}">'
        f'<h3 id="{heading}">{escape(title)}</h3><p>{marked(about)}</p>'
        f'<div class="filters"></div><div class="scroll" tabindex="0" role="region"'
        f' aria-labelledby="{heading}"><table role="table" aria-labelledby="{heading}">'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{body}\n</tbody></table></div>{_figure(of)}</article>'
    )


def _row(row: Compared, columns: list[_Column], of: Comparison) -> str:
    cells = [cell(c.key, c.key == "recalibration", c.value(row), c.cell(row)) for c in columns]
    key = escape("|".join((of.network, row.recalibration, row.options, of.dataset, "compared")))
    where = f'data-network="{escape(of.network)}" data-dataset="{escape(spelt(of.dataset))}"'
    return f'<tr role="row" data-row="{key}" {where} data-n="{row.n}">{"".join(cells)}</tr>'


def _error(row: Compared) -> str:
    return f"{opening(row.runs, plus_minus(row.mean, row.spread))} <small>(n={row.n})</small>"


def _step(row: Compared) -> str:
    if row.ms is None or row.low is None or row.high is None:
        return ""
    return f"{row.ms:.4g} <small>({row.low:.4g}–{row.high:.4g})</small>"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _peak(row: Compared) -> str:
    return "" if row.peak is None else f"{row.peak / 2**20:,.0f}"


def _figure(of: Comparison) -> str:
    points = [
        plane.Point(
            row.recalibration,
            spelt(row.recalibration) + (f" {row.options}" if row.options else ""),
            (row.ms, row.low or row.ms, row.high or row.ms),
            (row.mean, row.mean - (row.spread or 0), row.mean + (row.spread or 0)),
        )
        for row in of.rows
        if row.ms is not None
    ]
    if not points:
        return ""
    said = f"Error over the time of a step of training, {of.network} on {spelt(of.dataset)}"
    drawn = plane.svg(points, "ms a step of training", "error, %", f"{said}; in numbers above.")
    note = (
        "Strokes: one standard deviation over seeds either way, and the 20th to the 80th "
        "percentile of steps. Bottom left is best."
    )
    region = f'class="scroll" tabindex="0" role="region" aria-label="{escape(said)}"'
    return f"<div {region}>{drawn}</div><p>{note}</p>"
