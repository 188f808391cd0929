"""Words and numbers as the page writes them, in HTML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any


def marked(words: str) -> str:
    """A text in sentences: its code is marked, and the layer's name stays on one line."""
    coded = re.sub("`(.+?)`", r"<code>\1</code>", escape(words, quote=False))
    return coded.replace("MS-SAR", '<span class="whole">MS-SAR</span>')


def spelt(name: str) -> str:
    """As people write it."""
    return str(wording()["names"].get(name, name))


def plus_minus(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}".replace("-", "\u2212")


def opening(runs: Sequence[str], number: str) -> str:
    """One of our numbers, which opens the runs behind it."""
    if not runs or not number:
        return number
    ids = escape(json.dumps(runs))
    return f'<button type="button" class="runs" data-runs="{ids}">{number}</button>'


def cell(key: str, heads: bool, value: float | str | None, html: str) -> str:
    """A table's cell, which is sorted by a value; one that heads its row is announced as that."""
    kind = "th" if heads else "td"
    scope = ' scope="row" role="rowheader"' if heads else ' role="cell"'
    sort = "" if value is None else f' data-value="{escape(str(value))}"'
    return f'<{kind}{scope} class="{key}"{sort}>{html}</{kind}>'


def recalibrated(recalibration: str, options: str) -> str:
    """A recalibration by its colour and name, and what is not usual of it."""
    mark = f'<i class="mark" data-recalibration="{escape(recalibration)}"></i>'
    return f"{mark}{escape(spelt(recalibration))}" + (
        f" <small>{escape(options)}</small>" if options else ""
    )


@cache
def asset(name: str) -> str:
    return (files("mssar.lab.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def wording() -> dict[str, Any]:
    return tomllib.loads(asset("words.toml"))
