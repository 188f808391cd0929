"""``mssar demo``: none, SE and MS-SAR on the embedded data, in minutes on a CPU."""

from __future__ import annotations

import math
import time
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mssar.lab import timings
from mssar.lab.commands import options as opt
from mssar.lab.commands import parse
from mssar.lab.commands.console import console, say
from mssar.lab.commands.groups import grouped, options_of
from mssar.lab.commands.leave import leave
from mssar.lab.commands.report import write
from mssar.lab.recipes import DEMO
from mssar.lab.timings import WHAT

if TYPE_CHECKING:
    from mssar.lab.engine.execution import Execution
    from mssar.lab.records import Record
    from mssar.lab.report.build import Maps
    from mssar.lab.run import Run

FOLDER = opt.RUNS / "demo"
PAGE = "report.html"
NETWORK = "resnet8"
RECALIBRATIONS = ("none", "se", "mssar")
SECONDS = 2.0  # for each measurement of time


@grouped
def demo(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="How many times, from other seeds.")] = 1,
    runs: Annotated[Path, typer.Option(help="Folder for the runs and their records.")] = FOLDER,
    restart: opt.Restart = False,
    time_budget: opt.Budget = None,
    how: Annotated[
        opt.How, options_of(opt.How, "device", "deterministic", "threads", "tensorboard")
    ],
    show: opt.Open = False,
) -> None:
    """Train a small network with no recalibration, SE and MS-SAR on pictures made on the spot.

    Each picture holds the same things; where they are decides the class. A page shows what the
    layer does on real pictures, at once, and at the end what came out here. What was interrupted
    goes on when it is called again.

    \b
    mssar demo
    mssar demo --seeds 3
    """
    from mssar.lab.display import results, watching
    from mssar.lab.engine import clock
    from mssar.lab.engine.runner import carry_out
    from mssar.lab.run import Run

    begun = clock.begun or time.monotonic()
    execution, budget = how.execution(), parse.seconds(time_budget)
    maps = _first(runs)
    asked = [
        Run(NETWORK, kind, dataset="arrangements", recipe=DEMO, seed=seed)
        for seed in range(seeds)
        for kind in RECALIBRATIONS
    ]
    outcome = carry_out(
        asked,
        execution,
        runs,
        width=None if execution.device.type == "cuda" else len(RECALIBRATIONS),  # see engine.hands
        budget=budget,
        watching=partial(watching, how.tensorboard),
        record_in=dict.fromkeys(asked, runs / "records.jsonl"),
        anew=restart,
    )
    if outcome.records:
        out = console()
        out.print(results(outcome.records, out.width))
        out.print(_honestly(outcome.records, seeds), highlight=False, soft_wrap=True)
        out.print(f"records: {runs / 'records.jsonl'}", highlight=False)
        needed = SECONDS * len(WHAT) * len(RECALIBRATIONS)
        in_time = budget is None or time.monotonic() + needed < begun + budget
        if in_time and not outcome.left:  # else the next call measures
            _time(asked[: len(RECALIBRATIONS)], execution, runs / "timings.jsonl", anew=restart)
        console().print(f"page:    {_page(runs, maps)}", highlight=False)
        if show:
            webbrowser.open((runs / PAGE).resolve().as_uri())
    leave(outcome, f"the same command{' without --restart' * (restart and outcome.moved)}")


def _time(asked: list[Run], how: Execution, path: Path, *, anew: bool) -> None:
    """How long a step takes, in turns, so that whatever else runs here slows all of them alike."""
    from mssar.lab.engine.timing import measure

    if anew:
        path.unlink(missing_ok=True)
    if path.exists():
        return
    found = [timing for what in WHAT for timing in measure(asked, what, how, SECONDS, say)]
    timings.append(path, *found)  # when all is measured: what was interrupted is measured again


def _first(runs: Path) -> Maps:
    """What the layer does on real pictures, before anything is trained: in words, and as a page,
    where there is none."""
    from mssar.lab.report import build
    from mssar.lab.report.phrases import wording

    say(wording()["demo"]["headline"])
    maps = build.Maps(None, say)
    if not (runs / PAGE).exists():
        runs.mkdir(parents=True, exist_ok=True)
        say(f"{_page(runs, maps)} has that as a figure; what is trained here comes at the end")
    return maps


def _page(runs: Path, maps: Maps) -> Path:
    """All that there is as a page, beside the records."""
    from mssar.lab.report import build
    from mssar.lab.report.collect import collect

    page = runs / PAGE
    write(build.demo(collect([runs]), maps), page)
    return page


def _honestly(found: list[Record], seeds: int) -> str:
    """How much of a difference the number of test images and seeds allows to believe in."""
    images = found[0].data["test"]
    share = sum(record.error for record in found) / len(found) / 100
    noise = 100 * math.sqrt(2 * share * (1 - share) / images / seeds)
    runs = "one run each" if seeds == 1 else f"{seeds} runs each"
    return (
        f"{runs}, {images:,} test images: chance alone moves a difference by about {noise:.1f} "
        "points, and another seed by more"
    )
