"""Runs handed on to other processes, here or on a cluster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mssar.durable import make_folder
from mssar.lab.commands.console import complain, counted, say
from mssar.lab.commands.options import How
from mssar.lab.commands.sweeps import gather

if TYPE_CHECKING:
    from mssar.lab.cluster.sweep import Order, Sweep
    from mssar.lab.commands.submission import Submission
    from mssar.lab.engine.fleet import Outcome
    from mssar.lab.run import Run


def hand_on(
    runs: Sequence[Run],
    how: How,
    folder: Path,
    submission: Submission,
    data_dir: Path | None,
    budget: float | None,
    record_in: Mapping[Run, Path],
) -> Outcome | None:
    """Have runs trained elsewhere; None where that was only arranged.

    What is recorded is left out, and so is what another sweep is at.
    """
    from mssar.lab.cluster import collect, slurm
    from mssar.lab.cluster import sweep as sweeps

    how = submission.settled(how)
    options: dict[str, Any] | None = None
    if submission.submit == "slurm":
        if budget is None:
            raise ValueError("--submit slurm needs the time of each task: --time-budget 4h")
        minutes, budget = slurm.limit(budget)
        given = submission.sbatch or ()
        options = slurm.parameters("mssar", minutes, how.device == "cuda", given)
        if not submission.dry_run:
            slurm.require()
    for file in dict.fromkeys(() if submission.dry_run else record_in.values()):
        make_folder(file.resolve().parent)
        if problem := collect.obstacle(file):
            raise ValueError(f"{file}: {problem}; name another --records")
    order = sweeps.Order(
        command=sys.argv[1:],
        runs=str(folder.resolve()),
        record_in={run.name: str(file.resolve()) for run, file in record_in.items()},
        how=how.settings,
        data_dir=None if data_dir is None else str(data_dir.resolve()),
        width=how.fleet,
        stack=how.stack,
        budget=budget,
        tensorboard=how.tensorboard,
    )
    with ExitStack() as held:
        if not submission.dry_run:
            held.enter_context(sweeps.alone(folder))
        left = _left(runs, how.precision, folder, submission, data_dir, record_in.values())
        if options is None:
            return _locally(submission, order, left, held.close)
        _to_slurm(submission, order, left, options)
        return None


def _to_slurm(
    submission: Submission, order: Order, left: list[Run], options: dict[str, Any]
) -> None:
    from mssar.lab.cluster import slurm
    from mssar.lab.cluster import sweep as sweeps
    from mssar.lab.commands.task import Task
    from mssar.lab.engine.runner import FLEET, whole_stacks

    each = order.width or whole_stacks(FLEET, order.stack)  # the GPU is another machine's
    fleets = -(-len(left) // each)
    shares = sweeps.deal(left, submission.tasks or max(1, fleets), order.stack)
    if _only_said(submission, shares, options):
        return
    sweep = sweeps.begin(order, shares)
    tasks = [Task(str(sweep.folder), number) for number in range(len(shares))]
    job = slurm.submit(sweep, tasks, options)
    typer.echo(f"{sweep.name}: {_in_tasks(shares)}, job {job} of Slurm's")
    typer.echo("--status says what becomes of it; --cancel stops it")


def _locally(
    submission: Submission, order: Order, left: list[Run], taken: Callable[[], None]
) -> Outcome | None:
    from mssar.lab.cluster import collect, local
    from mssar.lab.cluster import sweep as sweeps
    from mssar.lab.engine.fleet import Outcome

    devices = local.gpus() if order.how["device"] == "cuda" else []
    shares = sweeps.deal(left, submission.tasks or max(1, len(devices)), order.stack)
    if _only_said(submission, shares, {}):
        return None if submission.dry_run else Outcome()
    sweep = sweeps.begin(order, shares)
    say(f"{sweep.name}: {_in_tasks(shares)}; logs in {sweep.folder}")
    outcome = Outcome(left=list(left))

    def look() -> None:
        found, _ = collect.of(sweep, outcome.left)
        _, problems = collect.into(sweep, found)
        complain(problems)
        for run, record in found.items():
            outcome.left.remove(run)
            outcome.records.append(record)
            what = f"{run.network} {run.recalibration}, {run.dataset}, seed {run.seed}"
            done = f"{len(outcome.records)} of {len(left)}"
            say(f"{what}: error {record.error:.2f} % ({done})")

    words = [sys.executable, "-m", "mssar", "task", str(sweep.folder)]
    commands = [[*words, str(number)] for number in range(len(shares))]
    statuses, outcome.signal = local.work(sweep, commands, devices, look, taken)
    look()
    notes = sweep.notes()
    for number, status in enumerate(statuses):
        if number in notes:
            outcome.failures += notes[number].failures
            outcome.signal = outcome.signal or notes[number].signal
        elif sweep.is_cancelled(number):
            outcome.signal = outcome.signal or signal.SIGTERM
        elif not outcome.signal:
            outcome.failures.append(_vanished(number, status, sweep))
    if outcome.failures and not outcome.signal:
        outcome.left = []  # they say it
    return outcome


def _vanished(number: int, status: int, sweep: Sweep) -> str:
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"task {number} ended with {how}; {sweep.log(number)} may say why, --resume goes on"


def _left(
    runs: Sequence[Run],
    precision: str | None,
    folder: Path,
    submission: Submission,
    data_dir: Path | None,
    files: Iterable[Path],
) -> list[Run]:
    """What is to be trained, once all is known to be there."""
    from mssar.lab import records
    from mssar.lab.cluster import status

    busy = status.under_way(folder)  # before: what has ended by now has left its records
    gather(folder)
    for run in runs:
        run.check()
    names = dict.fromkeys(run.dataset for run in runs)
    known = {name: submission.checksum(name, data_dir, say) for name in names}
    done = [
        record.run
        for file in dict.fromkeys(files)
        for record in records.read(file)
        if record.execution.get("precision") == precision
        and known.get(record.run["dataset"]) in (None, record.data["checksum"])
    ]
    waiting = [run for run in dict.fromkeys(runs) if run.as_dict() not in done]
    left = [run for run in waiting if run.name not in busy]
    if len(waiting) > len(left):
        gone = len(waiting) - len(left)
        say(f"{counted(gone, 'run')} under way already: --status says how far")
    return left


def _only_said(
    submission: Submission, shares: Sequence[Sequence[Run]], options: dict[str, Any]
) -> bool:
    """Whether that is all: nothing is to be submitted, or nothing is left."""
    if not shares:
        say("nothing is left to submit")
        return True
    if not submission.dry_run:
        return False
    typer.echo(f"would submit {_in_tasks(shares)} ({submission.submit})")
    for key, value in options.items():
        typer.echo(f"  --{key}" if value is True else f"  --{key}={value}")
    for number, share in enumerate(shares):
        typer.echo(f"task {number}:")
        for run in share:
            typer.echo(f"  {run.name}")
    return True


def _in_tasks(shares: Sequence[Sequence[Run]]) -> str:
    return f"{counted(sum(map(len, shares)), 'run')} in {counted(len(shares), 'task')}"
