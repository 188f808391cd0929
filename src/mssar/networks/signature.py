"""The SHA-256 that a safetensors file of ours carries: of its numbers, and of its own header.

A file is eight bytes of the header's length, the header in JSON, and the numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NUMBERS, HEADER = "mssar.numbers", "mssar.header"
_OPEN = "0" * 64  # where the header's own will stand


def notes(numbers: Iterable[Any]) -> dict[str, str]:
    """What the metadata of a file with these numbers, as buffers, begins with."""
    digest = hashlib.sha256()
    for some in numbers:
        digest.update(some)
    return {HEADER: _OPEN, NUMBERS: digest.hexdigest()}


def sign(header: bytes) -> bytes:
    """A header with such notes, and its own SHA-256 among them."""
    return header.replace(_OPEN.encode(), hashlib.sha256(header).hexdigest().encode(), 1)


def require_good(path: Path, *, numbers: bool = True) -> None:
    """A ValueError where a bit was flipped; files that carry no SHA-256 pass.

    The file is one that safetensors has opened: its header has the length that it says.
    """
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        try:
            said = json.loads(header).get("__metadata__") or {}
        except RecursionError:  # which safetensors passes over
            raise ValueError("strange: its header is nested too deep") from None
        if HEADER in said or NUMBERS in said:  # they come together, or a bit of one was flipped
            own = said.get(HEADER, _OPEN)
            unsigned = header.replace(own.encode(), _OPEN.encode(), 1)
            if hashlib.sha256(unsigned).hexdigest() != own:
                raise ValueError("damaged: its header has another SHA-256 than it says")
        if not numbers or NUMBERS not in said:
            return
        if hashlib.file_digest(file, "sha256").hexdigest() != said[NUMBERS]:
            raise ValueError("damaged: its numbers have another SHA-256 than it says")
