"""A finished run's weights as a file for others: small, and it says what it is of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mssar.lab.data import Data
from mssar.lab.engine import provenance
from mssar.lab.engine.checkpoint import Brought
from mssar.lab.engine.evaluate import Trained, evaluate, trained
from mssar.lab.engine.examine import Score
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.result import finished, image_shape
from mssar.lab.records import Record
from mssar.networks.weights import NOTE

SCHEMA = 1


def last(directory: Path) -> tuple[Trained, Record]:
    """A finished run as its last epoch left it, whatever epoch tested best; and its record."""
    record = finished(directory) if directory.is_dir() else None
    if record is None:
        raise ValueError(f"{directory} holds no finished run; weights are those of its last epoch")
    chosen = trained(directory)
    if (chosen.progress.epoch, chosen.progress.step) != (chosen.run.recipe.epochs, 0):
        raise ValueError(
            f"{directory} no longer holds the last epoch, only {chosen.progress.epoch}"
        )
    return chosen, record


def convert(chosen: Trained, *, half: bool) -> dict[str, Tensor]:
    """The state to be written. Half precision is for parameters: statistics of BN, counters and
    coordinates stay as they are. The network itself gets what a reader of the file will get."""
    parameters = dict(chosen.model.named_parameters())
    state = {}
    for name, tensor in chosen.model.state_dict().items():
        halved = half and name in parameters and tensor.is_floating_point()
        state[name] = tensor.half() if halved else tensor
        if not tensor.isfinite().all():
            raise ValueError(f"{name} has numbers that are not finite")
        if not state[name].isfinite().all():
            raise ValueError(f"{name} has numbers too large for half precision")
    chosen.model.load_state_dict(state)
    return state


def measured(chosen: Trained, data: Data, execution: Execution) -> Score:
    """The error of what was converted."""
    if chosen.progress.data != data.checksum:
        raise ValueError(f"{data.name} is not what {chosen.run.label} was trained on")
    return evaluate(chosen, data, execution)


def note(
    chosen: Trained, record: Record, data: Data, score: Score, execution: Execution
) -> dict[str, Any]:
    """What a file says of itself; see :mod:`mssar.networks.weights`."""
    run, data = chosen.run.as_dict(), chosen.run.normalised(data)
    return {
        "schema": SCHEMA,
        **{name: run[name] for name in ("network", "recalibration", "options", "dataset")},
        "classes": list(data.classes),
        "size": list(image_shape(chosen.run, data)),
        "mean": shares(data.mean),  # of pixels from 0 to 1
        "std": shares(data.std),
        "error": score.error,
        "error5": score.error5,
        "measured": {
            "hardware": provenance.hardware(execution.device),
            "precision": execution.precision,
        },
        "recorded_error": record.error,
        "epoch": chosen.progress.epoch,
        "data": data.checksum,
        "record": record.id,
        "run": run,
    }


def shares(colours: Iterable[float]) -> list[float]:
    """Of 255, and rounded: 0.224 is what was meant by 0.22399999999999998."""
    return [round(value / 255, 12) for value in colours]


def file(state: dict[str, Tensor], note: dict[str, Any]) -> bytes:
    """State and note as a safetensors file."""
    on_cpu = {name: tensor.detach().to(torch.device("cpu")) for name, tensor in state.items()}
    return Brought(on_cpu).file({"format": "pt", NOTE: json.dumps(note)}, signed=True)
