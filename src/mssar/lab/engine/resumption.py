"""How a run goes on: from what its folder has, if that is the same run still."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mssar.lab.engine import checkpoint
from mssar.lab.engine.checkpoint import Progress
from mssar.lab.records import Record
from mssar.lab.run import Run, run_from_dict

if TYPE_CHECKING:
    from mssar.lab.engine.training import Training


def progress(training: Training) -> Progress | None:
    """Where the folder's last checkpoint is, put into the learner; None if there is none.

    The leader reads, the others are told.
    """
    learner, world = training.learner, training.world
    state = learner.state()
    found = None
    if world.leads:
        found = checkpoint.newest(training.directory, training.observer.said)
        if found:
            _require_same(training, found[0])
            # Of the unfinished epoch the leader has everybody's losses, so that their sum is right.
            sums = {"losses": learner.losses, "wrong": learner.wrong}
            checkpoint.put(found[1], state | sums, training.directory)
    if world.size == 1:
        return found[0] if found else None
    at = [found[0].epoch, found[0].step, found[0].interruptions] if found else [-1, 0, 0]
    told = torch.tensor(at, device=training.execution.device)
    world.share([told, *state.values()])
    epoch, step, interruptions = told.tolist()
    if epoch < 0:
        return None
    if found:
        return found[0]
    run = training.run.as_dict()
    return Progress(run, "", "", "", "", epoch, step, interruptions=interruptions)


def _require_same(training: Training, found: Progress) -> None:
    """That the run, its data and how it rounds are what they were."""
    directory, execution = training.directory, training.execution
    checkpoint.require_same(found.run, training.run.as_dict(), directory)
    if found.data != training.data.checksum:
        raise ValueError(
            f"{directory} was trained on other data called {training.run.dataset}; "
            "bring those back, or remove it to begin anew"
        )
    if found.precision != execution.precision:
        raise ValueError(
            f"{directory} is trained in {found.precision}, not in "
            f"{execution.precision}: --precision {found.precision} goes on"
        )
    if found.threads and execution.threads not in (0, found.threads):
        raise ValueError(
            f"{directory} is trained with --threads {found.threads}, "
            f"not {execution.threads}: that changes what sums are rounded to"
        )


def require_done(done: Record, run: Run, data: str, precision: str, directory: Path) -> None:
    """That a folder's finished run is the one asked for, on these data and in this precision."""
    there = done.run
    with suppress(ValueError):  # an older line may leave out what is usual now
        there = run_from_dict(there).as_dict()
    checkpoint.require_same(there, run.as_dict(), directory)
    if done.data["checksum"] != data:
        raise ValueError(
            f"{directory} holds this run, trained on other data called {run.dataset}: "
            "those take it, another --runs keeps both"
        )
    if (said := done.execution.get("precision")) != precision:
        raise ValueError(
            f"{directory} holds this run, trained in {said} and not in {precision}: "
            f"--precision {said} takes it, another --runs keeps both"
        )


def note_norms(training: Training) -> None:
    """How many images BN is over, and that it changes: the run becomes another one."""
    shared = 1 if training.execution.sync_bn else training.world.size
    now, before = training.run.recipe.batch // shared, training.progress.bn_over
    if before[-1:] == [now]:
        return
    if before and training.world.leads:
        training.observer.said(
            f"{training.directory}: BN was over {before[-1]} images of a step so far, and is over "
            f"{now} from here (--sync-bn, --local-bn, processes); its record will say so"
        )
    before.append(now)
