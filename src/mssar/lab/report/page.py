"""A page as one file of HTML that needs nothing else: no server, no network, not even scripts.

The tables are made here, so that they can be read without a script and by a screen reader. The
scripts in ``assets`` add sorting, provenance and the figures.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from html import escape
from string import Template
from typing import Any, NamedTuple

from mssar.lab.report import compared
from mssar.lab.report.content import ORDER, Claim, Page, Row, Table, plain
from mssar.lab.report.phrases import (
    asset,
    cell,
    marked,
    opening,
    plus_minus,
    recalibrated,
    signed,
    spelt,
    wording,
)

SCRIPTS = (
    "dom.js",
    "tables.js",
    "provenance.js",
    "charts.js",
    "curves.js",
    "zoom.js",
    "readings.js",
    "points.js",
    "times.js",
    "maps.js",
    "overlay.js",
    "histogram.js",
    "page.js",
)
DIGITS = 5  # significant, of every number in the data

# In JSON these stand only inside strings, where an escape means the same. So nothing in the data
# can end its script element or be taken for a line's end.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def html(page: Page, home: str | None = None) -> str:
    """The whole page; on a site it has a link to where that begins."""
    words = wording()
    of = words[page.kind]
    theme, echarts, script = _scripts()
    parts = {
        "kind": page.kind,
        "policy": policy(live=page.live),
        "title": escape(page.title),
        "home": f'<a href="{escape(home)}">Documentation</a>\n' if home else "",
        "lead": marked(of["lead"]),
        "findings": "".join(f"<li>{marked(line)}</li>" for line in page.findings),
        "progress": _progress(page),
        "schematic": asset("schematic.html"),
        "tables": tables(page),
        "made_how": marked(of.get("made", "")),
        "stamp": _stamp(page),
        "problems": _problems(page),
        "style": asset("page.css"),
        "theme": theme,
        "names": _json({"names": words["names"], "kind": page.kind}),
        "data": _json(_rounded(plain(page))),
        "echarts": echarts,
        "script": script,
    }
    for name in ("tables", "curves", "cost", "times", "maps", "histogram"):
        parts[f"words_{name}"] = _explanation(of[name])
        parts[f"empty_{name}"] = marked(of[name].get("empty", ""))
    return _encodable(Template(asset("page.html")).substitute(parts))


def news(page: Page) -> str:
    """What a live page asks for: the same data, and its tables."""
    return _encodable(_json({"page": _rounded(plain(page)), "tables": tables(page)}))


@cache
def policy(*, live: bool) -> str:
    """Only what is in the file may run or style it, and nothing is fetched but news.

    No 'unsafe-inline': ECharts sets styles through the DOM, which the policy leaves alone.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, _scripts()))}",
            f"style-src {_hash(asset('page.css'))}",
            "img-src data:",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


@cache
def _scripts() -> tuple[str, str, str]:
    """All that runs: the theme, the plotting library, and the page's own."""
    own = "(() => {\n'use strict';\n" + "\n".join(map(asset, SCRIPTS)) + "})();\n"
    return asset("theme.js"), asset("echarts.min.js"), own


def tables(page: Page) -> str:
    """All tables, each in a region of its own that can be scrolled."""
    if not page.tables and not page.comparisons:
        return f'<p class="empty">{marked(wording()[page.kind]["tables"]["empty"])}</p>'
    made = [compared.article(one, number) for number, one in enumerate(page.comparisons)]
    made += [_table(table, number) for number, table in enumerate(page.tables)]
    return "\n".join(made)


# As these are sorted.
_RANK = {kind: place for place, kind in enumerate(ORDER)}
_VERDICTS = ("holds", "none", "unclear", "reversed", "open")


class _Column(NamedTuple):
    key: str
    heading: str
    cell: Callable[[Row], str]  # HTML
    value: Callable[[Row], float | str | None]  # what it is sorted by
    there: Callable[[list[Row]], bool] = bool  # whether a table of these rows has it


def _any(has: Callable[[Row], Any]) -> Callable[[list[Row]], bool]:
    return lambda rows: any(has(row) not in (None, "") for row in rows)


_COLUMNS = (
    _Column(
        "network",
        "Network",
        lambda r: f'<span class="name">{escape(r.network)}</span>',
        lambda r: r.network,
    ),
    _Column(
        "recalibration",
        "Recalibration",
        lambda r: recalibrated(r.recalibration, r.options),
        lambda r: f"{_RANK.get(r.recalibration, 9)} {r.recalibration} {r.options}",
    ),
    _Column(
        "dataset",
        "Data set",
        lambda r: escape(spelt(r.dataset)),
        lambda r: spelt(r.dataset),
        lambda rows: len({row.dataset for row in rows}) > 1,
    ),
    _Column(
        "published",
        "Published, %",
        lambda r: plus_minus(r.published, r.published_spread),
        lambda r: r.published,
        _any(lambda r: r.published),
    ),
    _Column("mean", "Ours, %", lambda r: _ours(r), lambda r: r.mean),
    _Column(
        "difference",
        "Difference",
        lambda r: signed(r.difference),
        lambda r: r.difference,
        _any(lambda r: r.published),
    ),
    _Column(
        "published5",
        "Top-5 published, %",
        lambda r: plus_minus(r.published5, None),
        lambda r: r.published5,
        _any(lambda r: r.published5),
    ),
    _Column(
        "mean5",
        "Top-5 ours, %",
        lambda r: opening(r.runs, plus_minus(r.mean5, None)),
        lambda r: r.mean5,
        _any(lambda r: r.mean5),
    ),
    _Column(
        "claim",
        "Claim",
        lambda r: _claim(r.claim) if r.claim else "",
        lambda r: _VERDICTS.index(r.claim.verdict) if r.claim else None,
        _any(lambda r: r.claim),
    ),
    _Column("remark", "Remark", lambda r: escape(r.remark), lambda r: r.remark or None)._replace(
        there=_any(lambda r: r.remark)
    ),
)


def _table(table: Table, number: int) -> str:
    rows = list(table.rows)
    columns = [column for column in _COLUMNS if column.there(rows)]
    # Roles are said although they are the elements' own: on a phone rows are no table to a browser.
    head = "".join(
        f'<th scope="col" role="columnheader" data-key="{c.key}">{c.heading}</th>' for c in columns
    )
    body = "\n".join(_row(row, columns) for row in rows)
    of = {row.dataset for row in rows}
    about = [marked(table.note)] if table.note else []
    if len(of) == 1:
        about.append(f"Data set: {escape(spelt(of.pop()))}.")
    if table.left:
        runs = "run" if table.left == 1 else "runs"
        about.append(f"{table.left:,} more {runs} would give every row three seeds.")
    return (
        f'<article class="results" data-table="{escape(table.name)}">'
        f'<h3 id="table-{number}">{escape(table.title)}</h3><p>{" ".join(about)}</p>'
        f'<div class="filters"></div><div class="scroll" tabindex="0" role="region"'
        f' aria-labelledby="table-{number}"><table role="table" aria-labelledby="table-{number}">'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{body}\n</tbody></table></div></article>'
    )


def _row(row: Row, columns: list[_Column]) -> str:
    cells = [cell(c.key, c.key == "network", c.value(row), c.cell(row)) for c in columns]
    key = escape("|".join((row.network, row.recalibration, row.options, row.dataset)))
    where = f'data-network="{escape(row.network)}" data-dataset="{escape(spelt(row.dataset))}"'
    where += f' data-n="{row.n}"'
    return f'<tr role="row" data-row="{key}" {where}>{"".join(cells)}</tr>'


def _ours(row: Row) -> str:
    if row.mean is None:
        return '<span class="open">not run yet</span>'
    return f"{opening(row.runs, plus_minus(row.mean, row.spread))} <small>(n={row.n})</small>"


def _claim(claim: Claim) -> str:
    symbol, words = wording()["verdicts"][claim.verdict]
    verdict = f'<span class="verdict" data-verdict="{claim.verdict}"><span aria-hidden="true">'
    said = []
    if claim.gain is not None:
        margin = "" if claim.margin is None else f" ± {claim.margin:.2f}"
        below = "below" if claim.gain >= 0 else "above"
        said.append(f"{abs(claim.gain):.2f}{margin} {below} {escape(_named(claim.against))}")
    else:
        said.append(f"against {escape(_named(claim.against))}")
    if claim.published is not None:
        said.append(f"published: {claim.published:.2f}".replace("-", "\u2212"))
    return f"{verdict}{symbol}</span> {words}</span><small>{'; '.join(said)}</small>"


def _explanation(words: dict[str, str]) -> str:
    """A paragraph, or for newcomers three with a heading each."""
    if "notice" not in words:
        return f'<p class="words">{marked(words["look"])}</p>'
    asked = {
        "look": "What is this?",
        "notice": "What to notice",
        "caution": "What not to conclude",
    }
    said = "".join(f"<div><dt>{q}</dt><dd>{marked(words[k])}</dd></div>" for k, q in asked.items())
    return f'<dl class="words">{said}</dl>'


def _progress(page: Page) -> str:
    """How many of the paper's results there are; the demo has no such number."""
    rows = [row for table in page.tables if table.name != "others" for row in table.rows]
    if page.kind != "reproduction" or not rows:
        return ""
    done = sum(row.n > 0 for row in rows)
    return (
        f'<progress aria-labelledby="so-far" max="{len(rows)}" value="{done}"></progress>'
        f'<span id="so-far">{done} of {len(rows)} results so far</span>'
    )


def _stamp(page: Page) -> str:
    shown = re.sub(r"(:\d\d)(\.\d+)?(Z|\+00:00)$", " UTC", page.made.replace("T", " ", 1))
    when = f'<time datetime="{escape(page.made)}">{escape(shown)}</time>'
    return f"Made {when} by mssar {escape(page.version)}."


def _problems(page: Page) -> str:
    if not page.problems:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in page.problems)
    return f'<h3>What could not be read</h3><ul class="problems">{lines}</ul>'


def _named(label: str) -> str:
    """A label with such names in it, as in "resnet20 mssar scales=1"."""
    return re.sub(r"(?<![\w=.-])\w+(?![\w=.-])", lambda word: spelt(word[0]), label)


def _rounded(value: Any) -> Any:
    """To five significant digits; what is no number to JSON is nothing."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = float(f"{value:.{DIGITS}g}")
        return int(value) if value.is_integer() else value
    return value


def _json(value: Any) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def _encodable(text: str) -> str:
    """Without half characters, as names of files may hold."""
    return text.encode("utf-8", "replace").decode()


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
