"""What became of a sweep: what is still going is asked of whoever has it, and the rest of files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from mssar.lab.cluster import local, slurm
from mssar.lab.cluster.sweep import Note, Sweep, sweeps
from mssar.lab.engine import checkpoint, result


@dataclass(frozen=True)
class Standing:
    """Where one task of a sweep stands."""

    number: int
    state: str  # in words
    going: bool  # waits for a machine or works on one
    runs: int
    recorded: int
    begun: int  # of the others: those that have a checkpoint
    failures: tuple[str, ...] = ()


def _whose(sweep: Sweep) -> ModuleType:
    return slurm if "slurm" in sweep.job else local


def states(sweep: Sweep) -> dict[int, str]:
    """Of tasks that have not ended, in words. Nobody is asked about a sweep that is done."""
    folder = Path(sweep.order.runs)
    if all((folder / run.name / result.NAME).exists() for run in sweep.runs):
        return {}
    return dict(_whose(sweep).states(sweep))


def cancel(sweep: Sweep) -> None:
    """Ask all tasks to stop, which they do once they are saved."""
    _whose(sweep).cancel(sweep)


def tasks(sweep: Sweep) -> list[Standing]:
    """Each of them."""
    going, notes, found = states(sweep), sweep.notes(), list[Standing]()
    for number, share in enumerate(sweep.shares):
        places = [Path(sweep.order.runs) / run.name for run in share]
        others = [place for place in places if not (place / result.NAME).exists()]
        recorded = len(places) - len(others)
        begun = sum(bool(checkpoint.checkpoints(place)) for place in others)
        note = notes.get(number)
        if others and number not in going and sweep.is_taken(number):
            going[number] = "running"  # by hand, or on a machine that Slurm has lost sight of
        state = going.get(number) or _end(sweep, number, note, not others)
        failures = tuple(note.failures if note else ())
        found.append(
            Standing(number, state, number in going, len(share), recorded, begun, failures)
        )
    lost = {task.number for task in found if task.state == "lost"}
    if lost and "slurm" in sweep.job:
        for number in lost & slurm.cancelled(sweep):
            sweep.mark_cancelled(number)  # Slurm forgets it
            found[number] = replace(found[number], state="cancelled")
    return found


def _end(sweep: Sweep, number: int, note: Note | None, done: bool) -> str:
    """How a task ended that is nowhere to be seen."""
    if done:
        return "done"
    if note is not None:
        return "failed" if note.failures else "stopped"
    if sweep.is_cancelled(number):
        return "cancelled"
    return "lost" if sweep.job else "never submitted"


def under_way(runs: Path) -> set[str]:
    """Names of the runs that sweeps in a folder of runs are at."""
    found = set[str]()
    for sweep in sweeps(runs):
        for number in states(sweep):
            found |= {run.name for run in sweep.shares[number]}
    return found
