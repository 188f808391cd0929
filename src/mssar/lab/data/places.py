"""Where data sets lie."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir

VARIABLE = "MSSAR_DATA"


def folder(data_dir: Path | None = None) -> Path:
    """``data_dir``, else ``$MSSAR_DATA``, else the user's cache folder. It need not exist."""
    given = data_dir or os.environ.get(VARIABLE) or user_cache_dir("mssar")
    place = Path(given).expanduser()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file; name the folder that holds the data sets")
    return place
