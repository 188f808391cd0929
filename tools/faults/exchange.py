"""Parts of the program, taken out and put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def exchanged(parts: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Have attributes, each of a place and by its name, be others meanwhile."""
    before = [(place, name, getattr(place, name)) for place, name, _ in parts]
    for place, name, value in parts:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
