"""The record of a run that came to its end."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mssar.cost import cost
from mssar.lab import lines, records
from mssar.lab.data import Data
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import provenance
from mssar.lab.engine.checkpoint import Maker, Progress
from mssar.lab.engine.execution import Execution
from mssar.lab.recipes import Photographs
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run
from mssar.surgery.foreign import architecture

NAME = "record.json"  # in the run's folder


def record(
    run: Run,
    data: Data,
    progress: Progress,
    execution: Execution,
    *,
    processes: int,
    together: float,
    stacked: int = 1,
    unreadable: int | None = None,
) -> Record:
    """What is kept of a finished run; ``together``: so many runs shared the device, in the mean,
    and of these ``stacked`` were one network."""
    with torch.device("meta"):
        counted = cost(run.build(len(data.classes)), image_shape(run, data))
    epochs = tuple(Epoch(**found) for found in progress.history)
    return Record(
        id=progress.id,
        run=run.as_dict(),
        data={
            "checksum": data.checksum,
            "classes": len(data.classes),
            "train": len(data.train),
            "test": len(data.test),
            **({} if unreadable is None else {"unreadable": unreadable}),
        },
        execution={
            **execution.as_dict(),
            "processes": processes,
            "together": together,
            **({"stacked": stacked} if stacked > 1 else {}),
            **({"bn_over": progress.bn_over} if len(progress.bn_over) > 1 else {}),
        },
        environment={**_environment(progress, execution), **_earlier(progress)},
        code=provenance.code(),
        command=provenance.command(),
        params=counted.params,
        macs=counted.macs,
        epochs=epochs,
        error=epochs[-1].test_error,
        error5=epochs[-1].test_error5,
        class_errors=tuple(progress.class_errors),
        seconds=sum(epoch.seconds for epoch in epochs),
        started=progress.started,
        finished=now(),
        interruptions=progress.interruptions,
    )


def _environment(progress: Progress, execution: Execution) -> dict[str, Any]:
    found = provenance.environment(execution.device)
    return {**found, "threads": progress.threads or found["threads"]}


def _earlier(progress: Progress) -> dict[str, list[Maker]]:
    """What made the parts before the last, in turn, where that was not the same; usually none."""
    return {"earlier": progress.makers[:-1]} if len(progress.makers) > 1 else {}


def image_shape(run: Run, data: Data | None = None) -> tuple[int, int, int]:
    """Of one image, as the network gets it; without the data set, as far as that is known."""
    if isinstance(data, Arrays):
        return 3, data.train.images.shape[1], data.train.images.shape[2]
    if isinstance(run.recipe.augmentation, Photographs):
        return 3, run.recipe.augmentation.size, run.recipe.augmentation.size
    return architecture(run.network).size


def finished(directory: Path) -> Record | None:
    """The record in a run's folder, if it came to its end."""
    path = directory / NAME
    try:
        return records.parse(lines.text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def now() -> str:
    """The time, in UTC and to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
