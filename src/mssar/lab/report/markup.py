"""HTML and SVG from the files in ``templates``: all that is put into them is text, and escaped."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mssar.lab.report.columns import COMPARED, TABLE, columns
from mssar.lab.report.intervals import drawn
from mssar.lab.report.phrases import plus_minus, signed, spelt, wording
from mssar.lab.report.plane import compared


def filled(name: str, **values: Any) -> str:
    """A template with these values in it."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("mssar.lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "json": json.dumps,
        "marked": _marked,
        "plus_minus": plus_minus,
        "signed": signed,
        "spelt": spelt,
        "spelt_within": _spelt_within,
    }
    made.globals |= {
        "COMPARED": COMPARED,
        "TABLE": TABLE,
        "columns": columns,
        "differences": drawn,
        "plane": compared,
        "wording": wording,
    }
    return made


def _marked(words: str) -> Markup:
    """A text in sentences: its code is marked, and the layer's name stays on one line."""
    coded = re.sub("`(.+?)`", r"<code>\1</code>", str(escape(words)))
    return Markup(coded.replace("MS-SAR", '<span class="whole">MS-SAR</span>'))


def _spelt_within(label: str) -> str:
    """A label with such names in it, as in "resnet20 mssar scales=1"."""
    return re.sub(r"(?<![\w=.-])\w+(?![\w=.-])", lambda word: spelt(word[0]), label)
