"""``mssar report``: the page."""

from __future__ import annotations

import errno
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mssar.lab.commands import options as opt
from mssar.lab.commands.console import complain, counted, say

if TYPE_CHECKING:
    from mssar.lab.report.collect import Collection
    from mssar.lab.report.content import Page
    from mssar.lab.report.serve import Source

RECORDS = Path("records")
PORT = 8017


def report(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PLACE…",
            help="Files of records and timings, and folders with such or with runs. "
            "records and runs, if none is named; with --demo runs/demo.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    demo: Annotated[
        bool, typer.Option("--demo", help="The demo's page: shorter, and explained.")
    ] = False,
    maps: Annotated[
        bool, typer.Option("--maps/--no-maps", help="Show what layers see in test images.")
    ] = True,
    data_dir: opt.DataDir = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it to this machine, and follow what changes.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve; 0: any.")] = PORT,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Make a page of records and checkpoints: the paper's numbers and ours, side by side.

    It is one file that needs nothing else. Nothing is trained.

    \b
    mssar report
    mssar report runs/demo --demo -o demo.html
    mssar report --serve
    """
    from mssar.lab.report import build
    from mssar.lab.report.collect import collect
    from mssar.lab.report.serve import Source

    chosen = _places(places, demo=demo)
    looked = build.Maps(data_dir, say) if maps else None
    make = build.demo if demo else build.reproduction

    def page(live: bool) -> tuple[Page, Collection]:
        found = collect(chosen)
        return make(found, looked, live=live), found

    if serve:
        _serve(Source(chosen, lambda: page(True)[0]), port, show)
        return
    made, found = page(False)
    things = (("record", found.records), ("timing", found.timings), ("unfinished run", found.going))
    if not any(some for _, some in things):
        _refuse(chosen, found, output)
    write(made, output)
    complain(made.problems)
    said = [counted(len(some), name) for name, some in things if some]
    typer.echo(f"{output}: {', '.join(said) or 'nothing was found to show'}")
    if show:
        webbrowser.open(output.resolve().as_uri())
    if made.problems and not said:
        raise typer.Exit(1)


def write(page: Page, output: Path) -> None:
    """The page as a file, whole or not at all."""
    from mssar.durable import write_whole
    from mssar.lab.report import page as pages

    if not output.parent.is_dir():
        raise ValueError(f"there is no folder {output.parent} for {output.name}")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is there and is no file; name another with --output")
    write_whole(output, pages.html(page).encode())


def _refuse(chosen: list[Path], found: Collection, output: Path) -> None:
    """No empty page of files that hold nothing, nor over one that shows something."""
    if not output.exists() and all(place.is_dir() for place in chosen):
        return
    first, *more = found.problems or [f"nothing lies in {', '.join(map(str, chosen))}"]
    others = f" ({len(more)} more like it)" if more else ""
    kept = f"; {output} stays as it is" if output.exists() else ""
    raise ValueError(f"nothing to show: {first}{others}{kept}")


def _places(places: list[Path] | None, *, demo: bool) -> list[Path]:
    for place in places or ():
        if not place.exists():
            raise ValueError(f"there is no {place}; name files of records, or folders")
    usual = (opt.RUNS / "demo",) if demo else (RECORDS, opt.RUNS)
    found = places or [place for place in usual if place.exists()]
    if not found:
        lacking = " nor ".join(map(str, usual))
        raise ValueError(
            f"there is {'no' if demo else 'neither'} {lacking} here; name files of records or "
            "folders, or train something first: mssar demo"
        )
    return found


def _serve(source: Source, port: int, show: bool) -> None:
    from mssar.lab.report.serve import Server

    try:
        server = Server(source, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"port {port} is in use; --port 0 takes any that is free") from None
    say("collecting")
    source.page()  # so that the first look is quick, and trouble is seen here
    typer.echo(f"{server.url}  (Ctrl-C ends it)")
    if show:
        webbrowser.open(server.url)
    with server:
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")
