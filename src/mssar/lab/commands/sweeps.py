"""What became of runs that were submitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mssar.lab.commands.console import complain, counted, say

if TYPE_CHECKING:
    from mssar.lab.cluster.sweep import Sweep


def gather(folder: Path) -> None:
    """Bring together what sweeps have finished, if there are any; others may have done so."""
    from mssar.lab.cluster import collect
    from mssar.lab.cluster import sweep as sweeps

    for sweep in sweeps.sweeps(folder):
        added, problems = collect.collect(sweep)
        complain(problems)
        if added:
            runs = counted(len(added), "run")
            files = dict.fromkeys(sweep.order.record_in.values())
            say(f"{sweep.name}: {runs} recorded in {', '.join(files)}")


def tell(folder: Path, *, cancel: bool = False) -> None:
    """Say how far all sweeps are; stop them before, if that is asked."""
    from mssar.lab.cluster import status
    from mssar.lab.cluster import sweep as sweeps

    found = sweeps.sweeps(folder)
    if not found:
        typer.echo(f"nothing was submitted from {folder}")
    gather(folder)
    for sweep in found:
        if cancel and status.states(sweep):
            status.cancel(sweep)
            typer.echo(f"{sweep.name}: cancelled; what was begun is saved")
        else:
            _tell(sweep)


def _tell(sweep: Sweep) -> None:
    from mssar.lab.cluster import status

    tasks = status.tasks(sweep)
    done, runs = sum(task.recorded for task in tasks), len(sweep.runs)
    whose = f"job {sweep.job['slurm']} of Slurm's" if "slurm" in sweep.job else "local"
    typer.echo(f"{sweep.name}, {whose}: {done} of {counted(runs, 'run')} recorded")
    if done == runs:
        return
    for task in tasks:
        begun = f", {task.begun} begun" if task.begun else ""
        typer.echo(f"  task {task.number}, {task.state}: {task.recorded} of {task.runs}{begun}")
    complain(line for task in tasks for line in task.failures)
    if not any(task.going for task in tasks):
        typer.echo("  the same command goes on with what is left (train: with --resume)")
