"""Options that several verbs share, and what they mean.

Here and in every verb, what needs torch is imported where it is used: help and a mistake in the
words are answered without.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from mssar.lab.data import Data
    from mssar.lab.engine.execution import Execution
    from mssar.lab.engine.fleet import Outcome
    from mssar.lab.engine.observer import Observer
    from mssar.lab.engine.world import World
    from mssar.lab.run import Run

LEFT_OVER = 75  # exit status: stopped in time, run again to go on
RUNS = Path("runs")

HOW = "How it is computed"

DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Where data sets lie; else $MSSAR_DATA, else the user's cache folder."),
]
Runs: TypeAlias = Annotated[Path, typer.Option(help="Folder for runs, one folder each.")]
Budget: TypeAlias = Annotated[
    str | None, typer.Option("--time-budget", help="Stop in time, as in 9m or 1h30m, and save.")
]
Device: TypeAlias = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1.", rich_help_panel=HOW)
]
Precision: TypeAlias = Annotated[
    str | None,
    typer.Option(help="bf16 (by default on a GPU), tf32, fp32.", rich_help_panel=HOW),
]
Compile: TypeAlias = Annotated[
    bool, typer.Option("--compile", help="torch.compile the network.", rich_help_panel=HOW)
]
Graph: TypeAlias = Annotated[
    bool, typer.Option("--graph/--no-graph", help="CUDA graphs.", rich_help_panel=HOW)
]
Deterministic: TypeAlias = Annotated[
    bool, typer.Option("--deterministic", help="The same bits every time.", rich_help_panel=HOW)
]
Width: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--fleet",
        min=1,
        help="Runs at once on one device; 4 on a GPU, 1 on a CPU by default.",
        rich_help_panel=HOW,
    ),
]
Together: TypeAlias = Annotated[
    int,
    typer.Option(
        "--stack",
        min=1,
        help="Runs of one network that are trained as a single wide one, which a GPU does faster.",
        rich_help_panel=HOW,
    ),
]
SyncBN: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--sync-bn/--local-bn",
        help="With several processes: BN over the global batch, or over each process's own.",
        rich_help_panel=HOW,
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(min=0, help="Processes that read photographs; one a core.", rich_help_panel=HOW),
]
Decode: TypeAlias = Annotated[
    str,
    typer.Option(help="Where photographs are decoded: auto, workers, gpu.", rich_help_panel=HOW),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=512,
        help="Of a CPU, for each run; what is quickest at its beginning by default.",
        rich_help_panel=HOW,
    ),
]
Unreadable: TypeAlias = Annotated[
    float,
    typer.Option(help="Share of photographs that may be unreadable.", rich_help_panel=HOW),
]
Tensorboard: TypeAlias = Annotated[
    bool, typer.Option("--tensorboard", help="Write event files.", rich_help_panel=HOW)
]


def settings(
    device: str,
    precision: str | None,
    compiled: bool,
    graph: bool,
    deterministic: bool,
    sync_bn: bool,
    workers: int | None,
    decode: str,
    unreadable: float,
    threads: int | None,
) -> dict[str, Any]:
    """What was asked for, as :func:`execution` takes it, on this machine or another."""
    return dict(locals())


def execution(
    device: str = "auto",
    precision: str | None = None,
    compiled: bool = False,
    graph: bool = True,
    deterministic: bool = False,
    sync_bn: bool = True,
    workers: int | None = None,
    decode: str = "auto",
    unreadable: float = 0.01,
    threads: int | None = None,
) -> Execution:
    """How to compute, from what was asked for."""
    import torch

    from mssar.lab.engine.execution import Execution, choose_device
    from mssar.lab.engine.world import launched

    if launched() and torch.cuda.is_available():
        if device.startswith("cuda:"):
            raise ValueError(f"each process takes a GPU of its own: --device cuda, not {device}")
        if device in ("auto", "cuda"):
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    where = choose_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if decode not in ("auto", "workers", "gpu"):
        raise ValueError(f"--decode is auto, workers or gpu; got {decode!r}")
    return Execution(
        where,
        precision or ("bf16" if where.type == "cuda" else "fp32"),
        compiled,
        graph,
        deterministic,
        sync_bn,
        (os.cpu_count() or 1) if workers is None else workers,
        decode,
        unreadable,
        threads or 0,
    )


def seconds(text: str | None) -> float | None:
    """A time budget: ``90``, ``90s``, ``9m``, ``1h30m``."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip())
    if not found or not any(found.groups()):
        raise ValueError(f"--time-budget is a time such as 90s, 9m or 1h30m; got {text!r}")
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    if not (total := 3600 * hours + 60 * minutes + rest):
        raise ValueError(f"--time-budget must be more than nothing; got {text!r}")
    return float(total)


def integers(name: str, text: str, example: str = "1,2,4") -> tuple[int, ...]:
    """Whole numbers with commas between them; an empty text has none."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"--{name} takes whole numbers, as in {example}; got {text!r}") from None


def pair(name: str, text: str) -> tuple[float, float]:
    """Two numbers with a comma between them."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} takes two numbers, as in 0.5,1; got {text!r}") from None
    return low, high


def loader(data_dir: Path | None) -> Callable[[str], Data]:
    """Data sets by name, each read once."""
    from mssar.lab import data

    found: dict[str, Data] = {}

    def load(name: str) -> Data:
        if name not in found:
            found[name] = data.load(name, data_dir)
        return found[name]

    return load


def carry_out(
    runs: Sequence[Run],
    how: Execution,
    folder: Path,
    *,
    data_dir: Path | None = None,
    width: int | None = None,
    stack: int = 1,
    budget: float | None = None,
    tensorboard: bool = False,
    record_in: Path | None,
    anew: bool = False,
) -> Outcome:
    """Train runs before the user's eyes, alone or with the processes that torchrun started.

    ``record_in``: the file for their records; None where those in their folders are enough.
    """
    from mssar.lab import records
    from mssar.lab.data import places
    from mssar.lab.engine.execution import keep_compiled
    from mssar.lab.engine.fleet import into, train
    from mssar.lab.engine.world import joined

    begun = time.monotonic()
    load = loader(data_dir)
    for run in runs:
        run.check()
    for name in dict.fromkeys(run.dataset for run in runs):
        load(name)  # what is missing is said before anything begins
    if how.device.type == "cuda" or how.compile:
        # A tree of photographs is the user's own.
        own = {run.dataset for run in runs} <= {"cifar10", "cifar100"}
        keep_compiled(places.folder(data_dir if own else None))
    if record_in:
        records.read(record_in)  # and so is a file that records cannot be added to
    with joined(how.device) as world, _observing(world, tensorboard) as observer:
        at_once = width or max(stack, 4 if how.device.type == "cuda" else 1)
        ready = time.monotonic() - begun
        outcome = train(
            runs,
            load,
            how,
            folder,
            observer,
            width=at_once if world.size == 1 else 1,
            stack=stack,
            budget=None if budget is None else budget - ready,
            world=world,
            record=into(record_in) if record_in else lambda _: None,
            anew=anew,
        )
    if outcome.short is not None:
        outcome.short += ready
    return outcome


@contextmanager
def _observing(world: World, tensorboard: bool) -> Iterator[Observer]:
    from mssar.lab.display import Both, Silence, watching

    if not world.leads:
        yield Silence()
        return
    events: Any = None
    if tensorboard:
        from mssar.lab.tensorboard import Events

        events = Events()
    try:
        with watching() as shown:
            yield Both(shown, events) if events else shown
    finally:
        if events:
            events.close()


def leave(outcome: Outcome, again: str) -> None:
    """Say what is not done, and exit with the status that fits."""
    from mssar.lab.engine.world import leads

    for reason in outcome.failures if leads() else ():
        typer.echo(f"mssar: {reason}", err=True)
    if outcome.short is not None:
        # Not status 75: who calls again would do so for ever.
        if not leads():
            raise typer.Exit(2)
        least = math.ceil(2 * outcome.short)
        raise ValueError(
            f"nothing was done: the time budget ended before the first step, and it took "
            f"{outcome.short:.1f} s to come so far; --time-budget {least}s or more gets somewhere"
        )
    if outcome.left and leads():
        runs = f"{len(outcome.left)} run{'s' * (len(outcome.left) > 1)}"
        why = "stopped by a signal" if outcome.signal else "the time budget is used up"
        typer.echo(f"mssar: {why}; {runs} saved or waiting; {again} goes on", err=True)
    if outcome.signal and not outcome.left and leads():
        typer.echo("mssar: stopped by a signal; all runs had ended by then", err=True)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)
    if outcome.failures:
        raise typer.Exit(1)
    if outcome.left:
        raise typer.Exit(LEFT_OVER)
