"""``mssar export``: a run's network as a file for elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mssar
from mssar.lab.commands import options as opt
from mssar.lab.commands.console import print_json, say
from mssar.lab.recipes import Photographs

if TYPE_CHECKING:
    from mssar.lab.data import Data
    from mssar.lab.engine import evaluate as engine


def export(
    run: opt.Trained,
    file: Annotated[
        Path | None,
        typer.Argument(help="What to write; the run's name here by default.", show_default=False),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="onnx (by default) or torch; else as FILE ends."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Side of the images; the data set's by default.", show_default=False),
    ] = None,
    as_json: opt.AsJson = False,
    data_dir: opt.DataDir = None,
) -> None:
    """Write a run's network as ONNX, or as a program of torch.export, and check what was written.

    Batch, height and width stay open where the network allows it. Norms are folded into
    convolutions. Names of classes and the mean and deviation of colours travel along. The file is
    run beside PyTorch at several sizes, and appears when both agree.

    \b
    mssar export runs/cifar10-resnet20-mssar-seed0-0f3a51
    mssar export runs/cifar10-resnet20-mssar-seed0-0f3a51 net.pt2 --format torch
    """
    from mssar.export import SUFFIXES
    from mssar.lab.engine import evaluate as engine
    from mssar.lab.engine.result import image_shape

    if format_ is not None and format_ not in SUFFIXES:
        raise ValueError(f"--format is {' or '.join(SUFFIXES)}; got {format_!r}")
    if size is not None and size < 1:
        raise ValueError(f"--size is 1 or more; got {size}")
    chosen = engine.trained(run, say)
    found = None if chosen.note else _data(chosen, data_dir)  # a file of weights says it all
    channels, height, width = chosen.note["size"] if chosen.note else image_shape(chosen.run, found)
    path = file or Path(f"{chosen.run.name}{SUFFIXES[format_ or 'onnx']}")
    shape = (channels, size or height, size or width)
    metadata = _metadata(chosen, found)
    made = mssar.export(chosen.model, path, shape, format_, metadata=metadata, say=say)
    if as_json:
        print_json({**asdict(made), "path": str(path), "metadata": metadata})
        return
    print(f"{chosen.run.label}, {chosen.run.dataset}, epoch {chosen.progress.epoch}")
    print(made)


def _data(chosen: engine.Trained, data_dir: Path | None) -> Data | None:
    """For its names and colours; a network can go without."""
    from mssar.lab import data

    try:
        found = data.load(chosen.run.dataset, data_dir)
    except ValueError as error:
        what = "mean and deviation of colours" if _names(chosen) else "names of classes"
        say(f"{what} are left out: {error}")
        return None
    if len(found.classes) != chosen.classes:
        say(f"names of classes are left out: {found.name} has {len(found.classes)}, not as trained")
        return None
    return chosen.run.normalised(found)


def _names(chosen: engine.Trained) -> list[str]:
    """Those of classes that are known without the data set."""
    from mssar.lab.data import cifar

    layout = cifar.LAYOUTS.get(chosen.run.dataset)
    return list(layout.classes) if layout and len(layout.classes) == chosen.classes else []


def _metadata(chosen: engine.Trained, found: Data | None) -> dict[str, Any]:
    """Mean and deviation are of pixels from 0 to 1, and a network sees (x − mean) / std."""
    from mssar.lab.data.imagefolder import MEAN, STD

    run = chosen.run
    said: dict[str, Any] = {
        "version": mssar.__version__,
        "network": run.network,
        "recalibration": run.recalibration,
        "options": run.as_dict()["options"],
        "dataset": run.dataset,
    }
    if chosen.note:
        return said | {name: chosen.note[name] for name in ("classes", "mean", "std")}
    if found is not None:
        mean, std = run.colours(found.mean, found.std)
        return said | {"classes": list(found.classes), **_colours(mean, std)}
    if names := _names(chosen):
        said["classes"] = names
    if isinstance(run.recipe.augmentation, Photographs):  # what they are normalised by is known
        said |= _colours(*run.colours(MEAN, STD))
    return said


def _colours(mean: Sequence[float], std: Sequence[float]) -> dict[str, list[float]]:
    from mssar.lab.engine.weights import shares

    return {"mean": shares(mean), "std": shares(std)}
