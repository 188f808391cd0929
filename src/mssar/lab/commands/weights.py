"""``mssar weights``: a finished run's network as a file for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mssar.lab.commands import options as opt
from mssar.lab.commands.groups import grouped, options_of


@grouped
def weights(
    *,
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    half: Annotated[
        bool, typer.Option("--half", help="Parameters in half precision, statistics not.")
    ] = False,
    data_dir: opt.DataDir = None,
    how: Annotated[opt.How, options_of(opt.How, "device", "precision", "workers")],
) -> None:
    """Write the last epoch's weights of a run, for `mssar.create_model(…, weights=FILE)`.

    The file says what it is of. Its error is measured anew, after conversion.

    \b
    mssar weights runs/cifar10-resnet20-mssar-seed0-1a2b3c resnet20-mssar.safetensors --half
    """
    from mssar.durable import write_whole
    from mssar.lab import data
    from mssar.lab.engine import weights as engine

    if file.suffix != ".safetensors":
        raise ValueError(f"FILE ends in .safetensors; got {file}")
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"there is no folder {file.parent} to write {file.name} into")
    chosen, record = engine.last(run)
    found = data.load(chosen.run.dataset, data_dir)
    state = engine.convert(chosen, half=half)
    score = engine.measured(chosen, found, how.execution())
    content = engine.file(state, chosen, record, found, score)
    write_whole(file, content)
    kind = "half precision" if half else "full precision"
    print(f"{file}: {chosen.run.label}, {found.name}, {kind}, {len(content):,} bytes")
    print(f"error {score.error:.2f}% measured again, {record.error:.2f}% recorded")
