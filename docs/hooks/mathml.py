"""Formulas become MathML while the site is built: no script for the reader to load, no network.

arithmatex marks them; here each mark is replaced. latex2mathml passes over much that it does not
know, so what it returns is checked, and a formula that fails the checks fails the build.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

MARK = re.compile(r'<(?P<tag>span|div) class="arithmatex">(?P<latex>.*?)</(?P=tag)>', re.DOTALL)

# How many parts a construct has; latex2mathml drops those that are missing.
PARTS = {
    "mfrac": 2,
    "mroot": 2,
    "msub": 2,
    "msup": 2,
    "munder": 2,
    "mover": 2,
    "msubsup": 3,
    "munderover": 3,
}


def mathml(latex: str, *, display: bool) -> str:
    """The formula as MathML; ``ValueError`` where it has no faithful conversion."""
    bare = latex.replace(r"\{", "").replace(r"\}", "")
    if not bare.strip() or bare.count("{") != bare.count("}"):
        raise ValueError(f"braces do not match, or nothing is between them: {latex}")
    try:
        converted = convert(latex, display="block" if display else "inline")
        tree = ElementTree.fromstring(converted)
    except Exception as error:
        raise ValueError(f"not converted ({error or type(error).__name__}): {latex}") from error
    for element in tree.iter():
        name = element.tag.split("}")[-1]
        if "\\" in (element.text or ""):
            raise ValueError(f"unknown command {element.text}: {latex}")
        if len(element) != PARTS.get(name, len(element)):
            raise ValueError(f"{name} lacks a part: {latex}")
    # A function's name is an identifier: as an operator it would be set apart from its brackets.
    return re.sub(r"<mo>([a-z]{2,})</mo>", r"<mi>\1</mi>", converted)


def replace(page: str) -> str:
    """A page's HTML with MathML in place of arithmatex's marks."""

    def one(mark: re.Match[str]) -> str:
        latex = html.unescape(mark["latex"]).strip()
        display = mark["tag"] == "div"
        opening, closing = (r"\[", r"\]") if display else (r"\(", r"\)")
        if not (latex.startswith(opening) and latex.endswith(closing)):
            raise ValueError(f"not what arithmatex writes: {latex}")
        formula = mathml(latex[2:-2].strip(), display=display)
        return f'<div class="formula" tabindex="0">{formula}</div>' if display else formula

    replaced = MARK.sub(one, page)
    if 'class="arithmatex"' in replaced:
        raise ValueError("a formula was left as it is")
    return replaced


def on_page_content(page_html: str, /, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the HTML of every page."""
    try:
        return replace(page_html)
    except ValueError as error:
        raise PluginError(f"{page.file.src_path}: {error}") from error
