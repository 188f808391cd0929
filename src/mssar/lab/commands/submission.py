"""``--submit``: runs for other processes, here or on a cluster, and what became of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mssar.lab.commands.options import How

if TYPE_CHECKING:
    from mssar.lab.cluster.sweep import Order, Sweep
    from mssar.lab.engine.fleet import Outcome
    from mssar.lab.run import Run

WAYS = ("slurm", "local")
FLEET = 4  # runs at once, where nobody said and the GPU is another machine's


def _there(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(
        *names, help=text, rich_help_panel="On other machines, or in other processes", **more
    )


@dataclass(frozen=True)
class Submission:
    """Whether and how runs are handed on, and what is to be said of those that were."""

    submit: Annotated[
        str | None, _there("slurm, or local for processes of this machine, one a GPU.")
    ] = None
    tasks: Annotated[
        int | None,
        _there("Tasks that share the runs; one a fleet with slurm, one a GPU with local.", min=1),
    ] = None
    sbatch: Annotated[
        list[str] | None, _there("An option of sbatch's, as partition=gpu; more than once.")
    ] = None
    dry_run: Annotated[bool, _there("Say what would be submitted.", "--dry-run")] = False
    status: Annotated[bool, _there("Say what became of all that was submitted.", "--status")] = (
        False
    )
    cancel: Annotated[bool, _there("Stop what was submitted; it is saved.", "--cancel")] = False

    def told(self, folder: Path) -> bool:
        """Whether it is only to be said, as is done now, what became of what was submitted."""
        if self.status or self.cancel:
            tell(folder, cancel=self.cancel)
        return self.status or self.cancel

    def check(self) -> None:
        from mssar.lab.engine.world import launched

        if self.submit is None:
            given = {"tasks": self.tasks, "sbatch": self.sbatch, "dry-run": self.dry_run}
            for name in (name for name, value in given.items() if value):
                raise ValueError(f"--{name} goes with --submit slurm or --submit local")
            return
        if self.submit not in WAYS:
            raise ValueError(f"--submit is slurm or local; got {self.submit!r}")
        if self.sbatch and self.submit != "slurm":
            raise ValueError(f"--sbatch goes with --submit slurm, not {self.submit}")
        if launched():
            raise ValueError("--submit starts processes of its own: without torchrun")

    def settled(self, how: How) -> How:
        """With the precision that it will be, and the kind of device: known here, also of another
        machine's GPU."""
        if self.submit is None:
            return replace(how, precision=how.execution().precision)
        device = how.device
        if self.submit == "local":
            from mssar.lab.engine.execution import choose_device

            if ":" in device:
                raise ValueError(
                    f"--submit local takes every GPU of CUDA_VISIBLE_DEVICES; got {device!r}"
                )
            device = choose_device(device).type
        elif device == "auto":
            device = "cuda"
        elif device not in ("cpu", "cuda"):
            raise ValueError(f"on a cluster --device is cuda or cpu; got {device!r}")
        precision = how.precision or ("fp32" if device == "cpu" else "bf16")
        return replace(how, device=device, precision=precision)


def carry_out(
    runs: Sequence[Run],
    how: How,
    folder: Path,
    submission: Submission,
    *,
    data_dir: Path | None,
    budget: float | None,
    record_in: Path,
    anew: bool = False,
) -> Outcome | None:
    """Train runs here, or have them trained; None where that was only arranged."""
    if submission.submit:
        assert not anew
        return hand_on(runs, how, folder, submission, data_dir, budget, record_in)
    from mssar.lab.display import watching
    from mssar.lab.engine import runner

    return runner.carry_out(
        runs,
        how.execution(),
        folder,
        watching=partial(watching, how.tensorboard),
        data_dir=data_dir,
        width=how.fleet,
        stack=how.stack,
        budget=budget,
        record_in=record_in,
        anew=anew,
    )


def hand_on(
    runs: Sequence[Run],
    how: How,
    folder: Path,
    submission: Submission,
    data_dir: Path | None,
    budget: float | None,
    record_in: Path,
) -> Outcome | None:
    """Have runs trained elsewhere; None where that was only arranged.

    What is recorded is left out, and so is what another sweep is at.
    """
    from mssar.lab.cluster import slurm
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
    order = sweeps.Order(
        command=sys.argv[1:],
        runs=str(folder.resolve()),
        record_in=str(record_in.resolve()),
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
        left = _left(runs, how.precision, folder, data_dir, record_in)
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

    fleets = -(-len(left) // (order.width or max(order.stack, FLEET)))
    shares = sweeps.deal(left, submission.tasks or max(1, fleets), order.stack)
    if _only_said(submission, shares, options):
        return
    sweep = sweeps.begin(order, shares)
    tasks = [Task(str(sweep.folder), number) for number in range(len(shares))]
    job = slurm.submit(sweep, tasks, options)
    typer.echo(f"{sweep.name}: {_runs(len(left))} in {_tasks(len(shares))}, job {job} of Slurm's")
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
    _progress(f"{sweep.name}: {_runs(len(left))} in {_tasks(len(shares))}; logs in {sweep.folder}")
    outcome = Outcome(left=list(left))

    def look() -> None:
        found, _ = collect.of(sweep, outcome.left)
        collect.into(Path(order.record_in), found)
        for record in found:
            outcome.left = [run for run in outcome.left if run.as_dict() != record.run]
            outcome.records.append(record)
            what = " ".join(str(record.run[name]) for name in ("network", "recalibration"))
            done = f"{len(outcome.records)} of {len(left)}"
            _progress(
                f"{what}, {record.run['dataset']}, seed {record.run['seed']}: "
                f"error {record.error:.2f} % ({done})"
            )

    words = [sys.executable, "-m", "mssar", "task", str(sweep.folder)]
    commands = [[*words, str(number)] for number in range(len(shares))]
    statuses, outcome.signal = local.work(sweep, commands, devices, look, taken)
    look()
    notes = sweep.notes()
    for number, status in enumerate(statuses):
        if number in notes:
            outcome.failures += notes[number].failures
            outcome.signal = outcome.signal or notes[number].signal
        elif not outcome.signal:
            outcome.failures.append(_vanished(number, status, sweep))
    if outcome.failures and not outcome.signal:
        outcome.left = []  # they say it
    return outcome


def _vanished(number: int, status: int, sweep: Sweep) -> str:
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"task {number} ended with {how}; {sweep.log(number)} may say why, --resume goes on"


def _left(
    runs: Sequence[Run], precision: str | None, folder: Path, data_dir: Path | None, record_in: Path
) -> list[Run]:
    """What is to be trained, once all is known to be there."""
    from mssar.lab import records
    from mssar.lab.cluster import status
    from mssar.lab.engine.runner import loader

    busy = status.under_way(folder)  # before: what has ended by now has left its records
    gather(folder)
    load = loader(data_dir)
    for run in runs:
        run.check()
    data = {name: load(name).checksum for name in dict.fromkeys(run.dataset for run in runs)}
    done = [
        record.run
        for record in records.read(record_in)
        if record.execution.get("precision") == precision
        and record.data["checksum"] == data.get(record.run["dataset"])
    ]
    waiting = [run for run in dict.fromkeys(runs) if run.as_dict() not in done]
    left = [run for run in waiting if run.name not in busy]
    if len(waiting) > len(left):
        gone = len(waiting) - len(left)
        typer.echo(f"{_runs(gone)} under way already: --status says how far", err=True)
    return left


def _only_said(
    submission: Submission, shares: Sequence[Sequence[Run]], options: dict[str, Any]
) -> bool:
    """Whether that is all: nothing is to be submitted, or nothing is left."""
    if not shares:
        typer.echo("nothing is left to submit", err=True)
        return True
    if not submission.dry_run:
        return False
    runs = sum(map(len, shares))
    typer.echo(f"would submit {_runs(runs)} in {_tasks(len(shares))} ({submission.submit})")
    for key, value in options.items():
        typer.echo(f"  --{key}" if value is True else f"  --{key}={value}")
    for number, share in enumerate(shares):
        typer.echo(f"task {number}:")
        for run in share:
            typer.echo(f"  {run.name}")
    return True


def gather(folder: Path) -> None:
    """Bring together what sweeps have finished, if there are any; others may have done so."""
    from mssar.lab.cluster import collect
    from mssar.lab.cluster import sweep as sweeps

    for sweep in sweeps.sweeps(folder):
        added, problems = collect.collect(sweep)
        _complain(problems)
        if added:
            typer.echo(
                f"{sweep.name}: {_runs(len(added))} recorded in {sweep.order.record_in}", err=True
            )


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
    typer.echo(f"{sweep.name}, {whose}: {done} of {_runs(runs)} recorded")
    if done == runs:
        return
    for task in tasks:
        begun = f", {task.begun} begun" if task.begun else ""
        typer.echo(f"  task {task.number}, {task.state}: {task.recorded} of {task.runs}{begun}")
    _complain(line for task in tasks for line in task.failures)
    if not any(task.going for task in tasks):
        typer.echo("  the same command goes on with what is left (train: with --resume)")


def _progress(line: str) -> None:
    """Apart from what the verb prints, which may be JSON."""
    typer.echo(line, err=True)


def _complain(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(f"mssar: {line}", err=True)


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def _tasks(count: int) -> str:
    return f"{count} task{'s' * (count != 1)}"
