"""The report of ``records/`` is a page of the site, made anew with it; nobody can forget to."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

NAME = "reproduction.html"  # in the site, and in its nav


def on_files(files: Files, /, *, config: Any) -> Files:
    """Called by MkDocs with everything that the site is made of."""
    place = Path(config.config_file_path).parent / "records"
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in sorted(place.rglob("*.jsonl")))
    files.append(File.generated(config, NAME, content=page(place, stamps)))
    return files


@cache
def page(place: Path, _stamps: tuple[tuple[str, int], ...]) -> str:
    """While the site is served, again only when a record has changed."""
    from mssar.lab.report.build import Maps, reproduction
    from mssar.lab.report.collect import collect
    from mssar.lab.report.page import html

    looked = Maps(None, lambda message: None)  # noqa: ARG005
    made = reproduction(collect([place]), looked)
    if made.problems:
        raise PluginError(f"{place}: {'; '.join(made.problems)}")
    return html(made, home="index.html")
