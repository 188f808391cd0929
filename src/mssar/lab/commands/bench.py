"""``mssar bench``: how long training and inference take, with and without recalibration."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from mssar.lab import timings
from mssar.lab.commands import options as opt
from mssar.lab.commands.console import console, print_json, say
from mssar.lab.commands.groups import grouped, options_of
from mssar.lab.recipes import varied
from mssar.lab.timings import WHAT, Timing, ratio

if TYPE_CHECKING:
    from mssar.lab.engine.execution import Execution
    from mssar.lab.run import Run

PHOTOGRAPHS = {"cuda": 128, "cpu": 32}  # a batch: on a GPU one of eight's share of the recipe's


@grouped
def bench(
    *,
    nets: Annotated[list[str], typer.Argument(help="One network or several.", metavar="NET…")],
    recalibration: Annotated[
        str, typer.Option(help="What is compared, as none,mssar.")
    ] = "none,se,mssar",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Images; 128 or 64 for CIFAR as in the recipes, else 128, on a CPU 32.",
            show_default=False,
        ),
    ] = None,
    what: Annotated[str, typer.Option(help="training, inference.")] = ",".join(WHAT),
    seconds: Annotated[float, typer.Option(help="For each measurement.")] = 3.0,
    records: Annotated[
        str, typer.Option(help="A file of timings to add to, as records/timings/gpu.jsonl.")
    ] = "none",
    as_json: opt.AsJson = False,
    how: Annotated[opt.How, options_of(opt.How, "device", "precision", "compile", "graph")],
) -> None:
    """Time a step of training and a pass through the network, on random images of the right size.

    What is compared takes turns. Median, 20th and 80th percentile, the median over that of the
    network without recalibration, and the memory that a step takes on a GPU.

    \b
    mssar bench resnet20
    mssar bench resnet56 densenet100 --recalibration none,mssar --what training --seconds 10
    """
    from mssar.lab.engine import timing as engine

    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds is above 0; got {seconds:g}")
    wanted = list(dict.fromkeys(what.split(",")))
    for kind in wanted:
        if kind not in WHAT:
            raise ValueError(f"--what is {' or '.join(WHAT)}, or {','.join(WHAT)}; got {what!r}")
    execution = how.execution()
    kinds = list(dict.fromkeys(recalibration.split(",")))
    groups = [[_run(net, kind, batch, execution) for kind in kinds] for net in dict.fromkeys(nets)]
    for run in (run for group in groups for run in group):
        run.check()
    path = None if records == "none" else Path(records)
    if path:
        _require_file(path)
    found: list[Timing] = []
    for group in groups:
        for kind in wanted:
            made = engine.measure(group, kind, execution, seconds, say)
            found += made
            if path:
                timings.append(path, *made)
    _print_json(found) if as_json else _print_table(found, path)


def _run(net: str, kind: str, batch: int | None, how: Execution) -> Run:
    from mssar.lab.run import Run, usual_recipe
    from mssar.surgery.foreign import architecture

    large = architecture(net).size[1] > 32
    dataset = "ilsvrc2012" if large else "cifar10"
    recipe = usual_recipe(net, dataset)
    if batch is None and large:
        batch = PHOTOGRAPHS[how.device.type]
    return Run(net, kind, {}, dataset, varied(recipe, batch=batch) if batch is not None else recipe)


def _require_file(path: Path) -> None:
    """What timings cannot be added to is said before anything is measured."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; --records takes a file, as {path}/gpu.jsonl")
    timings.read(path)


def _print_json(found: list[Timing]) -> None:
    print_json([{**asdict(t), "ratio": ratio(t, found)} for t in found])


def _print_table(found: list[Timing], path: Path | None) -> None:
    first, out = found[0], console()
    words = [first.environment["hardware"], f"torch {first.environment['torch']}", first.precision]
    words += ["CUDA graphs"] * first.graph + ["compiled"] * first.compile
    table = Table("network", "", "recalibration", box=box.SIMPLE_HEAD)
    for column in ("batch", "ms", "20–80%", "over none", *["MiB"] * bool(first.peak_bytes)):
        table.add_column(column, justify="right")
    for before, timing in zip([None, *found], found, strict=False):
        if before and (before.network, before.what) != (timing.network, timing.what):
            table.add_section()
        over, peak = ratio(timing, found), timing.peak_bytes
        table.add_row(
            timing.network,
            timing.what,
            timing.recalibration,
            str(timing.batch),
            _digits(timing.median_ms),
            f"{_digits(timing.p20_ms)}–{_digits(timing.p80_ms)}",
            "" if over is None else f"{over:.2f}",
            *([] if peak is None else [f"{peak / 2**20:,.0f}"]),
        )
    out.print(", ".join(words), highlight=False)
    out.print(table)
    if path:
        out.print(f"timings: {path}", highlight=False)


def _digits(ms: float) -> str:
    """Three or four that count."""
    return f"{ms:.{3 if ms < 10 else 2 if ms < 100 else 1}f}"
