"""Where commands print: standard output, wide enough for tables also without a terminal."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=120)
