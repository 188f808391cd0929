"""``mssar data``: fetch and verify data sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from mssar.lab.commands.console import console

EVERY = 5.0  # seconds between two lines where there is no terminal

app = typer.Typer(
    name="data",
    help="Fetch and verify data sets.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What the program cannot or need not fetch, and why.
OTHERS = {
    "arrangements": "made by the program, nothing to fetch",
    "imagefolder": "your own pictures: a tree train/CLASS/*, val/CLASS/* given with --data-dir",
    "ilsvrc2012": "ImageNet, from image-net.org: a tree train/CLASS/*, val/CLASS/* given with "
    "--data-dir",
}

Name = Annotated[str, typer.Argument(help="cifar10 or cifar100.", show_default=False)]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="The folder of the data sets; by default $MSSAR_DATA, else the user's cache.",
        show_default=False,
    ),
]


@app.command()
def get(name: Name, data_dir: DataDir = None) -> None:
    """Fetch a data set, check it and unpack it. A broken download is resumed.

    \b
    mssar data get cifar10
    mssar data get cifar100 --data-dir /data
    """
    from mssar.lab.data import fetch

    if name == "arrangements":
        print(f"{name}: {OTHERS[name]}")
        return
    _check_name(name)
    with Meter(Console(stderr=True)) as meter:
        place = fetch.get(name, data_dir, meter, meter.say)
    print(place)


@app.command()
def check(name: Name, data_dir: DataDir = None) -> None:
    """Compare a data set with what is known of it; status 1 where it differs.

    \b
    mssar data check cifar10
    """
    from mssar.lab.data import cifar

    _check_name(name)
    arrays = cifar.load(name, data_dir)
    findings = cifar.check(arrays)
    table = Table("", box=box.SIMPLE_HEAD)
    for column in ("expected", "found"):
        table.add_column(column, justify="right")
    table.add_column("")
    for finding in findings:
        verdict = "ok" if finding.ok else "differs"
        table.add_row(finding.name, finding.expected, finding.found, verdict)
    console().print(table)
    place = cifar.find(name, data_dir)
    if not all(finding.ok for finding in findings):
        print(f"not as known: {place.path if place else name}")
        raise typer.Exit(1)
    print(f"as known: {place.path if place else name}")


@app.command("list")
def list_(data_dir: DataDir = None) -> None:
    """Which data sets there are, and where they are found.

    \b
    mssar data list
    """
    from mssar.lab.data import cifar, places

    root = places.folder(data_dir)
    table = Table("data set", "found", box=box.SIMPLE_HEAD)
    table.add_column("size", justify="right")
    table.add_column("", overflow="fold")
    for name in cifar.LAYOUTS:
        place = cifar.find(name, data_dir)
        if place is None:
            table.add_row(name, "no", "", f"mssar data get {name}")
        else:
            table.add_row(name, "yes", f"{place.size / 1e6:,.0f} MB", str(place.path))
    made, *trees = OTHERS
    table.add_row(made, "yes", "", OTHERS[made])
    for name in trees:
        candidates = (root, root / name) if name == "ilsvrc2012" else (root,)
        found = [place for place in candidates if _is_tree(place)]
        remark = str(found[0]) if found else OTHERS[name]
        table.add_row(name, "yes" if found else "no", "", remark)
    console().print(table)
    print(f"looked in {root}")


class Meter:
    """Progress on standard error: a bar, or now and then a line where there is no terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.what, self.said = "", -EVERY

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """``done`` of ``total``: bytes, or a few files."""
        if not self.console.is_terminal:
            self._line(what, _amount(done, total))
            return
        if what != self.what or self.task is None:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.task, self.what = self.bar.add_task(what, amount=""), what
        self.bar.update(self.task, completed=done, total=total, amount=_amount(done, total))

    def _line(self, what: str, amount: str) -> None:
        now = self.clock()
        if what != self.what or now - self.said >= EVERY:
            self.what, self.said = what, now
            self.say(f"{what} {amount}".rstrip())

    def say(self, line: str) -> None:
        # As it is: no wrapping where there is no terminal, no markup in a path.
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


def _amount(done: int, total: int | None) -> str:
    if max(done, total or 0) < 1000:  # files
        return "" if total is None else f"{done} of {total}"
    rest = "" if total is None else f" of {total / 1e6:.0f}"
    return f"{done / 1e6:.0f}{rest} MB"


def _is_tree(place: Path) -> bool:
    return all((place / split).is_dir() for split in ("train", "val"))


def _check_name(name: str) -> None:
    if name in OTHERS:
        raise ValueError(f"{name}: {OTHERS[name]}")
    from mssar.lab.data import cifar

    cifar.layout_of(name)
