"""``mssar eval``: the error of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from mssar.lab.commands import options as opt
from mssar.lab.commands.console import console, print_json, say
from mssar.lab.commands.groups import grouped, options_of


@grouped
def evaluate(
    *,
    run: opt.Trained,
    data_dir: opt.DataDir = None,
    by_class: Annotated[bool, typer.Option("--classes", help="The error of each class.")] = False,
    as_json: opt.AsJson = False,
    how: Annotated[
        opt.How, options_of(opt.How, "device", "precision", "workers", "decode", "unreadable")
    ],
) -> None:
    """Test a run's network again: top-1 and top-5 error of its last checkpoint.

    \b
    mssar eval runs/cifar10-resnet20-mssar-seed0-1a2b3c --classes
    mssar eval resnet20-mssar.safetensors
    mssar eval resnet56-mssar-cifar100
    """
    from mssar.lab import data
    from mssar.lab.engine import evaluate as engine

    chosen = engine.trained(run, say)
    found = data.load(chosen.run.dataset, data_dir)
    score = engine.evaluate(chosen, found, how.execution(), say)
    if chosen.progress.data != found.checksum:
        say(f"mssar: {found.name} is not what this run was trained on, or in another order")
    at = f"epoch {chosen.progress.epoch} of {chosen.run.recipe.epochs}"
    if chosen.progress.step:
        at += f" and {chosen.progress.step} steps"
    if as_json:
        said = {"run": chosen.progress.run, "epoch": chosen.progress.epoch, **asdict(score)}
        print_json(said)
        return
    out = console()
    out.print(f"{chosen.run.label}, {found.name}, {at}", markup=False, highlight=False)
    five = f"top-5 {score.error5:.2f}%, " if chosen.classes > 5 else ""  # else none could be wrong
    out.print(f"error {score.error:.2f}%, {five}loss {score.loss:.4f}", highlight=False)
    if by_class:
        table = Table("class", box=box.SIMPLE_HEAD)
        table.add_column("error", justify="right")
        for name, error in zip(found.classes, score.class_errors, strict=True):
            table.add_row(name, f"{error:.2f}%")
        out.print(table)
