"""What people see while runs are trained: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mssar.lab.engine.observer import Moment, Observer
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run, run_from_dict
from mssar.lab.tensorboard import Events

HEARTBEAT = 30.0  # seconds between plain lines within an epoch
WIDE = 110  # columns, from which on there is room for everything


def duration(seconds: float) -> str:
    """``7s``, ``3m 20s``, ``2h 05m``, ``4d 03h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


@contextmanager
def watching(tensorboard: bool = False) -> Iterator[Observer]:
    """The observer that fits standard error, and one that writes event files if that is asked."""
    with ExitStack() as watched:
        events = watched.enter_context(closing(Events())) if tensorboard else None
        shown = watched.enter_context(_showing())
        yield Both(shown, events) if events else shown


@contextmanager
def _showing() -> Iterator[Observer]:
    """A table that moves, or lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(Console(stderr=True, width=200, highlight=False))
        return
    board = Board(console)
    with Live(get_renderable=board.table, console=console, refresh_per_second=4):
        yield board


class Lines(Observer):
    """A line an epoch, and one now and then within a long one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._spoke: dict[Run, float] = {}
        self._speed: dict[Run, float] = {}

    def _say(self, run: Run, *parts: str) -> None:
        self._spoke[run] = time.monotonic()
        self._print("  ".join((str(run), *parts)))

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def began(self, run: Run, epoch: int, directory: Path) -> None:
        how = f"goes on after epoch {epoch}" if epoch else "begins"
        self._say(run, how, f"in {directory}")

    def moved(self, run: Run, moment: Moment) -> None:
        self._speed[run] = moment.images / max(moment.seconds, 1e-9)
        if time.monotonic() - self._spoke.get(run, 0.0) > HEARTBEAT:
            self._say(
                run,
                f"epoch {moment.epoch}/{run.recipe.epochs}",
                f"step {moment.step}/{moment.steps}",
                f"loss {moment.loss:.4f}",
                f"{self._speed[run]:,.0f} images/s",
                f"{duration(moment.left)} left",
            )

    def passed(self, run: Run, epoch: Epoch, left: float) -> None:
        self._say(
            run,
            f"epoch {epoch.epoch}/{run.recipe.epochs}",
            f"loss {epoch.train_loss:.4f}",
            f"training error {epoch.train_error:.2f}%",
            f"test error {epoch.test_error:.2f}%",
            f"{self._speed.get(run, 0.0):,.0f} images/s",
            f"{duration(left)} left",
        )

    def ended(self, run: Run, record: Record) -> None:
        self._say(run, f"finished: {record.error:.2f}% error in {duration(record.seconds)}")

    def failed(self, run: Run, reason: str) -> None:  # noqa: ARG002, said at the end
        self._say(run, "stopped: it cannot go on")

    def said(self, message: str) -> None:
        self._print(message)


@dataclass
class _Row:
    run: Run
    epoch: int = 0
    share: float = 0.0  # of all epochs
    loss: float | None = None
    error: float | None = None
    speed: float | None = None
    left: float | None = None
    state: str = ""


@dataclass
class Board(Observer):
    """One row a run, kept up to date; what is said stands above it."""

    console: Console
    rows: dict[Run, _Row] = field(default_factory=dict)

    def table(self) -> Table:
        wide = self.console.width >= WIDE
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        table.add_column("run")  # names are wrapped where there is too little room, not numbers
        for heading in ("epoch", *([""] if wide else [])):
            table.add_column(heading, no_wrap=True)
        for heading in ("loss", "error", "images/s", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in list(self.rows.values()):  # while another thread adds one
            table.add_row(
                Text(str(row.run)),
                f"{row.epoch}/{row.run.recipe.epochs}",
                *([ProgressBar(total=1.0, completed=row.share, width=20)] if wide else []),
                "" if row.loss is None else f"{row.loss:.4f}",
                "" if row.error is None else f"{row.error:.2f}%",
                "" if row.speed is None else f"{row.speed:,.0f}",
                row.state or ("" if row.left is None else duration(row.left)),
            )
        return table

    def began(self, run: Run, epoch: int, directory: Path) -> None:  # noqa: ARG002
        self.rows[run] = _Row(run, epoch, epoch / run.recipe.epochs)

    def moved(self, run: Run, moment: Moment) -> None:
        row = self.rows[run]
        row.epoch, row.loss, row.left = moment.epoch, moment.loss, moment.left
        row.speed = moment.images / max(moment.seconds, 1e-9)
        row.share = (moment.epoch - 1 + moment.step / moment.steps) / run.recipe.epochs

    def passed(self, run: Run, epoch: Epoch, left: float) -> None:
        row = self.rows[run]
        row.epoch, row.error, row.left = epoch.epoch, epoch.test_error, left
        row.share = epoch.epoch / run.recipe.epochs

    def ended(self, run: Run, record: Record) -> None:
        self.rows[run].state = f"done in {duration(record.seconds)}"

    def failed(self, run: Run, reason: str) -> None:  # noqa: ARG002, said at the end
        self.rows[run].state = "stopped"

    def said(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False)


@dataclass(frozen=True)
class Both(Observer):
    """Two observers as one."""

    first: Observer
    second: Observer

    def began(self, run: Run, epoch: int, directory: Path) -> None:
        self.first.began(run, epoch, directory)
        self.second.began(run, epoch, directory)

    def moved(self, run: Run, moment: Moment) -> None:
        self.first.moved(run, moment)
        self.second.moved(run, moment)

    def passed(self, run: Run, epoch: Epoch, left: float) -> None:
        self.first.passed(run, epoch, left)
        self.second.passed(run, epoch, left)

    def ended(self, run: Run, record: Record) -> None:
        self.first.ended(run, record)
        self.second.ended(run, record)

    def failed(self, run: Run, reason: str) -> None:
        self.first.failed(run, reason)
        self.second.failed(run, reason)

    def said(self, message: str) -> None:
        self.first.said(message)
        self.second.said(message)


def results(records: Sequence[Record], width: int = WIDE) -> Table:
    """Finished runs, beside the network without recalibration where that was trained too."""
    counts = ("parameters", "multiply-adds") if width >= WIDE else ()
    # Among five classes or fewer, none could be wrong.
    five = ("top-5",) if any(r.data["classes"] > 5 for r in records) else ()
    table = Table("network", "", "data", box=box.SIMPLE_HEAD)
    for heading in ("seed", "error", "to none", *five, *counts, "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = {_beside(r): r.error for r in records if r.run["recalibration"] == "none"}
    for record in records:
        run = record.run
        base = plain.get(_beside(record)) if run["recalibration"] != "none" else None
        table.add_row(
            run["network"],
            Text(" ".join((run["recalibration"], *run_from_dict(run).particulars))),
            run["dataset"],
            str(run["seed"]),
            f"{record.error:.2f}%",
            "" if base is None else f"{record.error - base:+.2f}",
            *([f"{record.error5:.2f}%" if record.data["classes"] > 5 else ""] if five else []),
            *([f"{record.params:,}", f"{record.macs:,}"] if counts else []),
            duration(record.seconds),
        )
    return table


def _beside(record: Record) -> tuple[str, str, int, str]:
    run = record.run
    how = (run["recipe"], run.get("weights"), run.get("normalisation"))
    return run["network"], run["dataset"], run["seed"], str(how)
