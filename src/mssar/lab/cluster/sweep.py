"""A sweep: runs dealt to tasks, written down in a folder that all machines see.

``sweep.json`` says what is to be done and how. It is written once, before anything begins. A task
leaves what became of it in a note of its own. What is trained lies in the runs' own folders, as
ever: a finished run has its record there, so no two tasks write the same file.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mssar.durable import make_folder, write_whole
from mssar.lab import lines, values
from mssar.lab.engine.execution import Execution
from mssar.lab.run import Initial, Run, run_from_dict

FOLDER = "sweeps"  # within that of the runs
NAME = "sweep.json"
SCHEMA = 2


@dataclass(frozen=True)
class Order:
    """What the tasks of a sweep are to do, but for the runs."""

    command: list[str]  # the user's words, for the records
    runs: str  # the folder
    record_in: dict[str, str]  # by the name of a run, the file that its record is collected in
    how: dict[str, Any]  # device, precision and so on, as ``execution_for`` takes them
    data_dir: str | None = None
    width: int | None = None
    stack: int = 1
    budget: float | None = None  # seconds, of each task
    tensorboard: bool = False


@dataclass(frozen=True)
class Note:
    """What became of a task, in its own words."""

    failures: list[str] = field(default_factory=list)
    left: int = 0  # runs
    signal: int | None = None  # that ended it


@dataclass(frozen=True)
class Sweep:
    """An order, and each task's share of the runs."""

    folder: Path
    order: Order
    shares: tuple[tuple[Run, ...], ...]

    @property
    def runs(self) -> list[Run]:
        return list(chain.from_iterable(self.shares))

    @property
    def name(self) -> str:
        return self.folder.name

    def log(self, task: int) -> Path:
        return self.folder / f"task-{task}.log"

    # --- who has it ---

    @property
    def job(self) -> dict[str, Any]:
        """Whom it was handed to; nothing where that did not come about."""
        path = self.folder / "job.json"
        found = _read(path) if path.exists() else {}
        number = found.get("slurm", "0")
        if not isinstance(number, str) or not number.isdecimal():  # scancel takes options, too
            raise ValueError(f"{path}: slurm: expected the number of a job; got {number!r:.60}")
        return found

    def handed_to(self, **job: Any) -> None:
        _write(self.folder / "job.json", job)

    @contextmanager
    def taken(self, task: int) -> Iterator[None]:
        """A task for this process alone.

        Whoever has it already is waited for: a scheduler may have lost sight of a machine on which
        it goes on, and started it once more on another.
        """
        holder = self._holder(task)
        with FileLock(self._lock(task)):
            holder.unlink(missing_ok=True)  # of one that ended by force
            _write(holder, {"host": platform.node(), "pid": os.getpid()})
            try:
                yield
            finally:
                holder.unlink(missing_ok=True)

    def is_taken(self, task: int) -> bool:
        try:
            with FileLock(self._lock(task), blocking=False):
                self._holder(task).unlink(missing_ok=True)  # of one that ended by force
                return False
        except Timeout:
            return True

    def held_by(self, task: int) -> tuple[str, int] | None:
        """Host and process of whoever has taken a task, if that can be said.

        It says so itself: of one that ended by force, another may have the number by now.
        """
        path = self._holder(task)
        if not self.is_taken(task) or not path.exists():
            return None
        said = _read(path)
        with _named(path):
            host = values.converted(said.get("host"), str, "host")
            return host, values.converted(said.get("pid"), values.Count, "pid")

    def _lock(self, task: int) -> Path:
        return self.folder / f".task-{task}.lock"

    def _holder(self, task: int) -> Path:
        return self.folder / f".task-{task}.holder"

    # --- what became of it ---

    def note(self, task: int, note: Note) -> None:
        _write(self.folder / f"task-{task}.json", asdict(note))

    def forget(self, task: int, *, cancelled: bool = True) -> None:
        """What became of it before; also that it was cancelled, unless that is of now."""
        (self.folder / f"task-{task}.json").unlink(missing_ok=True)
        if cancelled:
            self._cancelled(task).unlink(missing_ok=True)

    def mark_cancelled(self, task: int) -> None:
        """For where it has no time to leave a note."""
        self._cancelled(task).touch()

    def is_cancelled(self, task: int) -> bool:
        return self._cancelled(task).exists()

    def _cancelled(self, task: int) -> Path:
        return self.folder / f"task-{task}.cancelled"

    def notes(self) -> dict[int, Note]:
        """By task; of those that came to an end, whichever."""
        found = {}
        for task in range(len(self.shares)):
            path = self.folder / f"task-{task}.json"
            if path.exists():
                with _named(path):
                    found[task] = values.fitted(Note, _read(path))
        return found


def begin(order: Order, shares: Sequence[Sequence[Run]]) -> Sweep:
    """A sweep in a new folder."""
    when = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")  # for people: clocks may differ
    folder = Path(order.runs) / FOLDER / f"{when}-{secrets.token_hex(2)}"
    sweep = Sweep(folder, order, tuple(map(tuple, shares)))
    files = [run.weights for run in sweep.runs if run.weights and run.weights.path]
    said = {
        "schema": SCHEMA,
        **asdict(order),
        "shares": [[run.as_dict() for run in share] for share in sweep.shares],
        "weights": {file.sha256: str(file.path) for file in files},
    }
    make_folder(folder)
    _write(folder / NAME, said)
    return sweep


def alone(runs: Path) -> FileLock:
    """For who submits: until others can see what he has taken."""
    make_folder(runs / FOLDER)
    return FileLock(runs / FOLDER / ".lock")


def read(folder: Path) -> Sweep:
    """A sweep that was begun; a ValueError says what is wrong with it."""
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} is no sweep: it has no {NAME}")
    with _named(path):
        found = values.decode(lines.text(path), "sweep", SCHEMA)
        del found["schema"]
        weights = values.converted(found.pop("weights", None), dict[str, str], "weights")
        shares = values.converted(found.pop("shares", None), list[list[dict[str, Any]]], "shares")
        runs = tuple(tuple(_run(one, weights) for one in share) for share in shares)
        if "runs" in found:  # they lie around it, wherever it has come from
            found["runs"] = str(folder.absolute().parent.parent)
        sweep = Sweep(folder, values.fitted(Order, found), runs)
        for run in sweep.runs:
            if run.name not in sweep.order.record_in:
                raise ValueError(f"record_in: there is no file for {run.name}")
        known = {one.name for one in fields(Execution)}
        for name in sweep.order.how:
            if name not in known:
                raise ValueError(f"how.{name!r:.60}: unknown")
        return sweep


def sweeps(runs: Path) -> list[Sweep]:
    """All that were begun in a folder of runs, in the order of their names."""
    return [read(path.parent) for path in sorted((runs / FOLDER).glob(f"*/{NAME}"))]


def deal(runs: Sequence[Run], tasks: int, stack: int = 1) -> list[list[Run]]:
    """A share of the runs for each task, as even as may be and none empty.

    The first task has the first runs: a cluster that is busy starts with it. Runs that can be
    trained as one are kept together.
    """
    if tasks < 1:
        raise ValueError(f"--tasks is 1 or more; got {tasks}")
    ordered = _alike_together(runs) if stack > 1 else list(runs)
    tasks = min(tasks, len(ordered)) or 1
    ends = [len(ordered) * task // tasks for task in range(tasks + 1)]
    return [ordered[first:last] for first, last in pairwise(ends) if last > first]


def _alike_together(runs: Sequence[Run]) -> list[Run]:
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if run.differs_in_seed_or_data(group[0]):
                group.append(run)
                break
        else:
            groups.append([run])
    return list(chain.from_iterable(groups))


def _run(found: dict[str, Any], weights: dict[str, str]) -> Run:
    run = run_from_dict(found)
    if run.weights is None or run.weights.sha256 not in weights:
        return run
    file, sha256 = run.weights.file, run.weights.sha256
    return replace(run, weights=Initial(file, sha256, Path(weights[sha256])))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong in a file is said of that file."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith(str(path)) else f"{path}: {said}") from None


def _read(path: Path) -> dict[str, Any]:
    with _named(path):
        return values.converted(json.loads(lines.text(path)), dict[str, Any], "")


def _write(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1).encode() + b"\n")
