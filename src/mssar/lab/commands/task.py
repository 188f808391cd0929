"""``mssar task``: one task's share of a sweep, as Slurm or ``--submit local`` starts it."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mssar.lab.commands.leave import leave

if TYPE_CHECKING:
    from mssar.lab.engine.fleet import Outcome


def task(
    folder: Annotated[Path, typer.Argument(help="The sweep's: RUNS/sweeps/NAME.")],
    number: Annotated[int, typer.Argument(min=0, help="Which of its tasks.")],
) -> None:
    """Train one task's share of a sweep that `--submit` began.

    \b
    mssar task runs/sweeps/20260131-120000-0af3 0
    """
    leave(carry_out(folder, number), "the same command")


def carry_out(folder: Path, number: int) -> Outcome:
    """Train a share, from where it was stopped, and leave a note of what became of it."""
    from mssar.lab.cluster import slurm
    from mssar.lab.cluster import sweep as sweeps
    from mssar.lab.display import watching
    from mssar.lab.engine import runner
    from mssar.lab.engine.execution import execution_for

    sweep = sweeps.read(folder)
    if number >= len(sweep.shares):
        raise ValueError(f"{folder} has tasks 0 to {len(sweep.shares) - 1}; got {number}")
    order = sweep.order
    with sweep.taken(number):
        # Of when it was stopped before. What Slurm starts for the first time can only have been
        # cancelled meanwhile: submitit passes over the signal, and it will be killed.
        sweep.forget(number, cancelled=not slurm.begins(sweep))
        sys.argv[:] = ["mssar", *order.command]  # what a record says that it was made by
        try:
            outcome = runner.carry_out(
                sweep.shares[number],
                execution_for(**order.how),
                Path(order.runs),
                data_dir=None if order.data_dir is None else Path(order.data_dir),
                width=order.width,
                stack=order.stack,
                budget=order.budget,
                watching=partial(watching, order.tensorboard),
                record_in={},  # each has its record in its folder: they are collected from there
                may_compile=order.how.get("compile") is None,
            )
        except Exception as error:
            why = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            sweep.note(number, sweeps.Note([why], len(sweep.shares[number])))
            raise
        failures = [*outcome.failures]
        if outcome.short is not None:
            failures.append("the time budget ended before the first step")
        sweep.note(number, sweeps.Note(failures, len(outcome.left), outcome.signal))
    return outcome


@dataclass(frozen=True)
class Task:
    """What submitit carries to a machine of the cluster: no more than where the sweep is."""

    folder: str
    number: int

    def __call__(self) -> None:
        outcome = carry_out(Path(self.folder), self.number)
        if goes_on(outcome):
            from mssar.lab.cluster import slurm

            slurm.requeue()
        try:
            leave(outcome, "the same command")
        except typer.Exit as left:
            sys.exit(left.exit_code)  # for Slurm to know

    def checkpoint(self, *_: Any) -> Any:
        """Where submitit is told to leave before the training listens: again from the start."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def goes_on(outcome: Outcome) -> bool:
    """Whether a task is to be queued again: not if it came no further, or it would be for ever.

    Yes at the end of its time, of which signals of the user's own warn. SIGTERM comes where a job
    is cancelled, and must stay so, and where it is preempted, after which Slurm queues it itself.
    """
    warned = outcome.signal in (None, signal.SIGUSR1, signal.SIGUSR2)
    return bool(outcome.left) and outcome.moved and warned
