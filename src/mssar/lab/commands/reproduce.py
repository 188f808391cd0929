"""``mssar reproduce``: the paper's experiments, what is missing of them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from mssar.lab.commands import options as opt
from mssar.lab.commands import parse, sweeps
from mssar.lab.commands import submission as sub
from mssar.lab.commands.console import console, counted, print_json, say
from mssar.lab.commands.groups import grouped, options_of
from mssar.lab.commands.leave import leave
from mssar.lab.report.phrases import plus_minus

if TYPE_CHECKING:
    from mssar.lab import records as recorded
    from mssar.lab.experiments.plan import Plan
    from mssar.lab.run import Run

RECORDS = Path("records")
# As mssar.lab.experiments has them.
EXPERIMENTS = ("table3", "table4", "strategy", "stage", "recipe", "ilsvrc")


@grouped
def reproduce(
    *,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(EXPERIMENTS)}.", metavar="EXPERIMENT…"),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show what is done and left, and train nothing.")
    ] = False,
    nets: Annotated[str | None, typer.Option(help="Only these: resnet20,resnet32.")] = None,
    datasets: Annotated[str | None, typer.Option(help="Only these: cifar10.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of everything.")] = 3,
    additional: Annotated[
        bool,
        typer.Option(
            "--additional/--no-additional",
            help="Also other readings of the paper's rows: reduction=3, other recipes.",
        ),
    ] = True,
    records: Annotated[Path, typer.Option(help="Folder of records: EXPERIMENT.jsonl.")] = RECORDS,
    as_json: opt.AsJson = False,
    data_dir: opt.DataDir = None,
    runs: opt.Runs = opt.RUNS,
    time_budget: opt.Budget = None,
    how: Annotated[opt.How, options_of(opt.How)],
    submission: Annotated[sub.Submission, options_of(sub.Submission)],
) -> None:
    """Train what is missing of the paper's experiments, and show it beside the published numbers.

    Every finished run is a line in RECORDS/EXPERIMENT.jsonl and is not trained again; what was
    interrupted goes on. Seed by seed and small networks first, so that an unfinished reproduction
    already compares something.

    \b
    mssar reproduce --list
    mssar reproduce table3 --nets resnet20,resnet56 --seeds 3 --time-budget 9m
    mssar reproduce table3 --submit slurm --time-budget 4h --sbatch partition=gpu
    """
    from mssar.lab import records as recorded
    from mssar.lab import timings
    from mssar.lab.engine.execution import choose_device
    from mssar.lab.engine.provenance import hardware
    from mssar.lab.engine.world import leads
    from mssar.lab.experiments.plan import plan_for

    if submission.told(runs):
        return
    names = list(experiments or EXPERIMENTS)
    if not experiments and not listing:
        raise ValueError(f"name an experiment ({', '.join(EXPERIMENTS)}), or pass --list")
    submission.check()
    given, how = how.precision, submission.settled(how)
    machine = hardware(choose_device("auto" if submission.submit else how.device))
    sweeps.gather(runs)
    timed = timings.read(records / "timings")

    def plan(precision: str | None) -> tuple[Plan, str]:
        """As it stands, and the machine that its times are for: this one, if it has any."""
        known = recorded.read(records)
        others = dict.fromkeys(record.environment["hardware"] for record in known)
        for where in (machine, *others):
            made = _plan(known, where, precision)
            if made.seconds_left is not None:
                return made, where
        return _plan(known, machine, precision), machine

    def _plan(known: list[recorded.Record], where: str, precision: str | None) -> Plan:
        return plan_for(
            names,
            known,
            hardware=where,
            nets=None if nets is None else nets.split(","),
            datasets=None if datasets is None else datasets.split(","),
            seeds=seeds,
            precision=precision,
            additional=additional,
            timings=timed,
        )

    counts = given if listing else how.precision
    found, where = plan(counts)
    if listing or not found.missing:
        _show(found, where, as_json)
        return
    others = [r.run for r in recorded.read(records) if r.conditions[1] != counts]
    if given is None and (again := sum(run.as_dict() in others for run in found.missing)):
        say(
            f"{again} of {counted(len(found.missing), 'run')} to train: recorded, but not in "
            f"{counts}, as is usual here; --precision NAME has records of NAME count"
        )
    outcome = sub.carry_out(
        found.missing,
        how,
        runs,
        submission,
        data_dir=data_dir,
        budget=parse.seconds(time_budget),
        record_in=_files(found, records),
    )
    if outcome is None:
        return
    if leads():
        _show(*plan(counts), as_json)
    leave(outcome, "the same command")


def _files(plan: Plan, folder: Path) -> dict[Run, Path]:
    """For each run that is missing, that of its experiment; of several the first that was named."""
    return {
        run: folder / f"{state.experiment}.jsonl"
        for state in reversed(plan.cells)
        for run in state.missing
    }


def _show(plan: Plan, where: str, as_json: bool) -> None:
    from mssar.lab.display import duration
    from mssar.lab.report.tables import paper_rows

    rows = paper_rows(plan.cells)
    if as_json:
        left = plan.seconds_left
        cells = [asdict(row) | {"outcome": row.outcome} for row in rows]
        said = {"cells": cells, "seconds_left": left, "hardware": where}
        print_json(said)
        return
    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("data", no_wrap=True)
    for heading in ("paper", "ours", "n", "differ", "left", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for experiment, some in groupby(rows, lambda row: row.experiment):
        table.add_section()
        table.add_row(f"[bold]{experiment}")
        for row in some:
            table.add_row(
                " ".join((row.network, row.recalibration, row.options)),
                row.dataset,
                plus_minus(row.published, row.published_spread),
                plus_minus(row.mean, row.spread),
                str(row.n or ""),
                "" if row.difference is None else f"{row.difference:+.2f}",
                str(row.left) if row.left else "done",
                _time(row.seconds_left) if row.left else "",
            )
    out = console()
    out.print(table)
    left = len(plan.missing)
    if not left:
        out.print("nothing is left to run", highlight=False)
        return
    when = f"about {duration(plan.seconds_left)} on {where}" if plan.seconds_left else ""
    unknown = "how long is unknown until the first is recorded"
    runs = f"{counted(left, 'run')} left, each counted once"
    out.print(f"{runs}: {when or unknown}", highlight=False)


def _time(seconds: float | None) -> str:
    from mssar.lab.display import duration

    return "?" if seconds is None else duration(seconds)
