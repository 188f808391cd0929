"""Where commands print: standard output, wide enough for tables also without a terminal; and apart
from that, since it may be JSON, what is said meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=120)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def say(line: str) -> None:
    typer.echo(line, err=True)


def complain(lines: Iterable[str]) -> None:
    for line in lines:
        say(f"mssar: {line}")


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {what}{'s' * (number != 1)}"
