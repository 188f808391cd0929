"""A page as one file of HTML that needs nothing else: no server, no network, not even scripts.

The tables are HTML, so that they can be read without a script and by a screen reader. Scripts
add sorting, provenance and the figures.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from typing import Any

from markupsafe import Markup

from mssar.lab.report.content import ORDER, Page, plain
from mssar.lab.report.markup import filled
from mssar.lab.report.phrases import asset, wording

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
    "gallery.js",
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
    theme, echarts, script = map(Markup, _scripts())
    rows = [row for table in page.tables if table.name != "others" for row in table.rows]
    made = filled(
        "page.html",
        page=page,
        home=home,
        words=words[page.kind],
        papers=rows if page.kind == "reproduction" else [],
        made=re.sub(r"(:\d\d)(\.\d+)?(Z|\+00:00)$", " UTC", page.made.replace("T", " ", 1)),
        policy=Markup(policy(live=page.live)),
        style=Markup(asset("page.css")),
        theme=theme,
        names=_json({"names": words["names"], "kind": page.kind, "order": ORDER}),
        data=_json(_rounded(plain(page))),
        echarts=echarts,
        script=script,
    )
    return _encodable(made)


def news(page: Page) -> str:
    """What a live page asks for: the same data, its tables and its first figure."""
    drawn = filled("differences.html", page=page)
    made = {"page": _rounded(plain(page)), "tables": tables(page), "differences": drawn}
    return _encodable(_json(made))


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
    """All of them, without what is around."""
    return filled("tables.html", page=page, words=wording()[page.kind], home=None)


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


def _json(value: Any) -> Markup:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.translate(_ESCAPES))


def _encodable(text: str) -> str:
    """Without half characters, as names of files may hold."""
    return text.encode("utf-8", "replace").decode()


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
