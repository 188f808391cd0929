"""What an insertion costs: the maps it meets, and time.  N batch, C channels, H W map."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mssar.cost import run_hollow
from mssar.surgery.families import Place

REPEATS, WARM_UP = 10, 3
BATCH = {"cuda": 64, "cpu": 4}


class Times(NamedTuple):
    """Medians in milliseconds."""

    forward: float
    step: float  # forward and backward, in training mode
    batch: int


def map_sizes(
    model: nn.Module, places: Mapping[str, Place], size: tuple[int, int, int]
) -> tuple[dict[str, list[tuple[int, int]]], str]:
    """H and W of every map that is met at places, by their names; and why none are, if so.

    A network that cannot be run without numbers is not ours to mend: only counts are lost.
    """
    shapes: dict[str, list[torch.Size | None]] = {}
    handles = []
    for key, place in places.items():

        def look(_m: nn.Module, _i: Any, y: Any, key: str = key) -> None:
            shapes.setdefault(key, []).append(y.shape if isinstance(y, Tensor) else None)

        handles.append(model.get_submodule(place.target(key)).register_forward_hook(look))
    try:
        run_hollow(model, size)
    except Exception as error:  # whatever a stranger's network raises
        return {}, _line(error)
    finally:
        for handle in handles:
            handle.remove()
    return {key: [_map(key, places[key], s) for s in met] for key, met in shapes.items()}, ""


def _map(name: str, place: Place, shape: torch.Size | None) -> tuple[int, int]:
    if shape is None or len(shape) != 4 or shape[3 if place.last else 1] != place.channels:
        made = "no tensor" if shape is None else "×".join(map(str, shape))
        raise ValueError(f"{name!r} makes {made}, and no map of {place.channels} channels")
    h, w = shape[1:3] if place.last else shape[2:]
    return h, w


def _line(error: Exception) -> str:
    said = str(error).strip()
    return shorten(said.splitlines()[0], 200, placeholder=" …") if said else type(error).__name__


def timed(model: nn.Module, size: tuple[int, int, int]) -> Times:
    """The time of a copy, where the model is and in its type; the model is left as it is."""
    copy = deepcopy(model)
    like = next(p for p in copy.parameters() if p.is_floating_point())
    batch = BATCH.get(like.device.type, 4)
    images = torch.randn(batch, *size, device=like.device, dtype=like.dtype)

    def forward() -> None:
        with torch.no_grad():
            copy(images)

    def step() -> None:
        copy.zero_grad(set_to_none=True)
        loss = _first(copy(images)).float().square().mean()
        if loss.requires_grad:  # else all is frozen, before layers are there to be trained
            loss.backward()

    try:
        copy.eval()
        inferred = _median(forward, like.device)
        copy.train()
        return Times(inferred, _median(step, like.device), batch)
    except Exception as error:  # as above
        shape = "×".join(map(str, images.shape))
        raise ValueError(f"the network cannot be timed with {shape}: {_line(error)}") from error


def _median(run: Callable[[], None], device: torch.device) -> float:
    taken = []
    for _ in range(WARM_UP + REPEATS):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(1e3 * (time.perf_counter() - begun))
    return median(taken[WARM_UP:])


def _first(made: Any) -> Tensor:
    """A tensor of what a network returns."""
    while not isinstance(made, Tensor):
        made = next(iter(made.values() if isinstance(made, Mapping) else made))
    return made
