"""Words and numbers as the page writes them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def spelt(name: str) -> str:
    """As people write it."""
    return str(wording()["names"].get(name, name))


def plus_minus(mean: float | None, spread: float | None = None) -> str:
    if mean is None:
        return ""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def scientific(value: float) -> str:
    """One digit, as in 0.002 and 2·10⁻⁸."""
    digit, _, power = f"{value:.1g}".partition("e")
    return f"{digit}·10{str(int(power)).translate(RAISED)}" if power else digit


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}".replace("-", "\u2212")


@cache
def asset(name: str) -> str:
    return (files("mssar.lab.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def wording() -> dict[str, Any]:
    return tomllib.loads(asset("words.toml"))
