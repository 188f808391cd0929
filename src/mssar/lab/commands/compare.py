"""``mssar compare``: one network under one recipe, with each of several recalibrations."""

from __future__ import annotations

import math
import time
import webbrowser
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from mssar.lab import timings
from mssar.lab.commands import options as opt
from mssar.lab.commands import parse, sweeps
from mssar.lab.commands import submission as sub
from mssar.lab.commands.console import console, print_json, say
from mssar.lab.commands.groups import grouped, options_of
from mssar.lab.commands.leave import LEFT_OVER, leave
from mssar.lab.commands.report import write
from mssar.lab.commands.train import combinations
from mssar.lab.recipes import RECIPES
from mssar.lab.report.content import ORDER, Claim, Compared, Comparison
from mssar.options import OPTIONS

if TYPE_CHECKING:
    from mssar.lab.engine.execution import Execution
    from mssar.lab.records import Record
    from mssar.lab.report.collect import Collection
    from mssar.lab.run import Run
    from mssar.lab.timings import Timing

FOLDER = opt.RUNS / "compare"
PAGE = 5.0  # seconds of a time budget that the page may take


@grouped
def compare(
    *,
    net: Annotated[str, typer.Argument(help="The network.")] = "resnet20",
    modules: Annotated[str, typer.Option(help="What is compared.")] = ",".join(ORDER),
    dataset: opt.Dataset = "arrangements",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from seeds 0, 1, …")] = 3,
    reduction: Annotated[
        int | None,
        typer.Option(
            help=f"{OPTIONS['reduction'].help.rstrip('.')}; each its own by default.", min=1
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help=f"{', '.join(RECIPES)}; the paper's for the network.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Other than the recipe's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Other than the recipe's.")] = None,
    seconds: Annotated[float, typer.Option(help="For each measurement of time; 0: none.")] = 3.0,
    records: Annotated[
        Path | None,
        typer.Option(help="A file for records; RUNS/records.jsonl.", show_default=False),
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            "--timings", help="A file for timings; RUNS/timings.jsonl.", show_default=False
        ),
    ] = None,
    as_json: opt.AsJson = False,
    show: opt.Open = False,
    data_dir: opt.DataDir = None,
    runs: opt.Runs = FOLDER,
    time_budget: opt.Budget = None,
    how: Annotated[opt.How, options_of(opt.How, but="sync_bn")],
    submission: Annotated[sub.Submission, options_of(sub.Submission)],
) -> None:
    """Train a network with each recalibration, and show error, size, time and memory together.

    none, se and mssar are ours; eca, cbam, coord, ela and ge are timm's, simam has no parameters.
    What lies beside RECORDS is not trained again, what was interrupted goes on. At the end a step
    of training is timed with each, in turns, and RUNS/report.html shows all of it.

    \b
    mssar compare resnet8 --modules none,se,simam,mssar --epochs 4 --seeds 2
    mssar compare resnet20 --dataset cifar100 --seeds 3 --time-budget 9m
    mssar compare resnet20 --dataset cifar100 --submit local
    """
    from mssar.lab.engine import clock
    from mssar.lab.engine.timing import TooLongError
    from mssar.lab.engine.world import launched, leads
    from mssar.lab.report import build
    from mssar.lab.report.collect import collect

    begun = clock.begun or time.monotonic()
    if submission.told(runs):
        return
    if not 0 <= seconds < math.inf:
        raise ValueError(f"--seconds is 0 or more; got {seconds:g}")
    for option, place in (("--records", records), ("--timings", times)):
        if place and place.suffix != ".jsonl":
            raise ValueError(f"{option} is a file that ends in .jsonl; got {place}")
    kinds = list(dict.fromkeys(part.strip() for part in modules.split(",")))
    options = {} if reduction is None else {"reduction": reduction}
    given = {"epochs": epochs, "batch": batch}
    changes = {name: value for name, value in given.items() if value is not None}
    # Seed by seed, so that what is unfinished already compares something; a stack has them all.
    asked = combinations([net], kinds, options, dataset, range(seeds), recipe, changes)
    for run in asked:
        run.check()
    submission.check()
    how = submission.settled(how)
    how = replace(how, compile=bool(how.compile))  # as what is timed afterwards
    record_in, timed_in = records or runs / "records.jsonl", times or runs / "timings.jsonl"
    budget = parse.seconds(time_budget)
    checksum = submission.checksum(dataset, data_dir)
    timings.read(timed_in)  # what cannot be added to is said before anything is trained
    sweeps.gather(runs)
    beside = record_in.parent.glob("*.jsonl")
    known = _wanted(collect(sorted(beside)), asked, checksum, how.precision).records
    done = [record.run for record in known]
    before = time.monotonic()
    outcome = sub.carry_out(
        [run for run in asked if run.as_dict() not in done],
        how,
        runs,
        submission,
        data_dir=data_dir,
        budget=budget,
        record_in=dict.fromkeys(asked, record_in),
    )
    if outcome is None:
        return
    if not leads():
        leave(outcome, "the same command")
        return
    trained = time.monotonic() - before if outcome.moved else 0.0
    timed: list[Timing] = []
    short: TooLongError | None = None
    needed = 0.0  # seconds of a call that only times, without the measuring
    if seconds and not launched() and not outcome.left and not outcome.failures:
        end = math.inf if budget is None else begun + budget - clock.RESERVE - PAGE
        try:
            timed = _time(asked[: len(kinds)], how.execution(), seconds, timed_in, end)
        except TooLongError as error:
            short, needed = error, time.monotonic() - begun - trained + clock.RESERVE + PAGE
    places = [*sorted(record_in.parent.glob("*.jsonl")), timed_in, runs]
    found = _wanted(collect(p for p in places if p.exists()), asked, checksum, how.precision)
    if found.records:
        page = runs / "report.html"
        runs.mkdir(parents=True, exist_ok=True)  # nothing was trained, if all was recorded
        made = build.side_by_side(found, build.Maps(data_dir, say), timed=timed)
        write(made, page)
        (first, *_) = made.comparisons
        print_json(asdict(first)) if as_json else _print_table(first, record_in, page)
        if show:
            webbrowser.open(page.resolve().as_uri())
    leave(outcome, "the same command")
    if short is None:
        return
    # Not status 75 where the same call would come no further: who calls again would for ever.
    assert budget is not None
    if budget < needed + short.seconds:
        enough = math.ceil(needed + 2 * short.seconds)  # on a busier machine
        more = "or more" if short.known else "and as much more as it takes to set up, not known yet"
        raise ValueError(
            "all is trained, and there was no time to time steps: give a --time-budget of "
            f"{enough}s {more}; or none, or fewer --seconds"
        )
    say("mssar: too little is left of the time budget to time steps; the same command does it")
    raise typer.Exit(LEFT_OVER)


def _wanted(
    found: Collection, asked: list[Run], checksum: str | None, precision: str | None
) -> Collection:
    """Of what was found only what is compared, on the same data and in the same precision."""
    from mssar.lab.report.collect import Collection

    wanted = [run.as_dict() for run in asked]

    def belongs(record: Record) -> bool:
        same = checksum in (None, record.data["checksum"]) and record.run in wanted
        return same and record.execution.get("precision") == precision

    return Collection(
        [record for record in found.records if belongs(record)],
        found.timings,
        {place: going for place, going in found.going.items() if going.run in wanted},
        found.folders,
    )


def _time(asked: list[Run], how: Execution, seconds: float, path: Path, end: float) -> list[Timing]:
    """A step of training with each, in turns: as it was measured here by this code in this way the
    last time, or is now, if there is time for it until ``end``."""
    from mssar.lab.engine import provenance
    from mssar.lab.engine.timing import measure

    conditions = {
        "batch": asked[0].recipe.batch,
        "precision": how.precision,
        "graph": how.graphed,
        "compile": how.compile,
    }
    here = provenance.code()["source"], _versions(provenance.environment(how.device))
    before: dict[str, list[Timing]] = {}
    for one in timings.read(path):
        alike = all(getattr(one, name) == value for name, value in conditions.items())
        there = one.code.get("source"), _versions(one.environment)
        if alike and there == here and one.what == "training":
            before.setdefault(one.made, []).append(one)
    wanted = [(run.network, run.recalibration, run.as_dict()["options"]) for run in asked]
    for _, some in sorted(before.items(), reverse=True):
        known = [(one.network, one.recalibration, one.options) for one in some]
        if all(key in known for key in wanted):
            return some
    made = measure(asked, "training", how, seconds, say, end)
    timings.append(path, *made)  # when all is measured: what was interrupted is measured again
    return made


def _versions(environment: dict[str, Any]) -> dict[str, Any]:
    """Hardware and software; how many threads there are now is the last training's affair."""
    return {name: value for name, value in environment.items() if name != "threads"}


def _print_table(made: Comparison, record_in: Path, page: Path) -> None:
    out = console()
    measured = f"; steps: {made.measured}" if made.measured else ""
    recipe = f", {made.recipe}" if made.recipe else ""
    out.print(f"{made.network} on {made.dataset}{recipe}{measured}", highlight=False)
    peaks = any(row.peak is not None for row in made.rows)
    table = Table("", box=box.SIMPLE_HEAD)
    headings = ("error, %", "below none", "parameters", "multiply-adds", "ms a step", "20–80%")
    for heading in (*headings, "over none", *["MiB"] * peaks):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in made.rows:
        table.add_row(*_cells(row, peaks))
    out.print(table)
    out.print(f"records: {record_in}\npage:    {page}", highlight=False)


def _apart(claim: Claim | None) -> str:
    """With its interval, where there are runs enough."""
    if claim is None or claim.gain is None:
        return ""
    return f"{claim.gain:+.2f}" + ("" if claim.margin is None else f" ± {claim.margin:.2f}")


def _cells(row: Compared, peaks: bool) -> list[str]:
    spread = "" if row.spread is None else f" ± {row.spread:.2f}"
    cells = [
        f"{row.recalibration} {row.options}".rstrip(),
        f"{row.mean:.2f}{spread} (n={row.n})",
        _apart(row.claim),
        f"{row.params:,}",
        f"{row.macs:,}",
        "" if row.ms is None else f"{row.ms:.4g}",
        "" if row.low is None or row.high is None else f"{row.low:.4g}–{row.high:.4g}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
    ]
    return cells + [f"{row.peak / 2**20:,.0f}" if row.peak is not None else ""] * peaks
