"""Words and numbers as the page writes them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


def spelt(name: str) -> str:
    """As people write it."""
    return str(wording()["names"].get(name, name))


def plus_minus(mean: float | None, spread: float | None = None) -> str:
    if mean is None:
        return ""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}".replace("-", "\u2212")


@cache
def asset(name: str) -> str:
    return (files("mssar.lab.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def wording() -> dict[str, Any]:
    return tomllib.loads(asset("words.toml"))
