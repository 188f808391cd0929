"""What an insertion costs: the maps it meets, and time.  N batch, C channels, H W map."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mssar.cost import run_hollow

REPEATS, WARM_UP = 10, 3
BATCH = {"cuda": 64, "cpu": 4}


class Times(NamedTuple):
    """Medians in milliseconds."""

    forward: float
    step: float  # forward and backward, in training mode
    batch: int


def map_sizes(
    model: nn.Module, targets: Mapping[str, tuple[str, bool]], size: tuple[int, int, int]
) -> dict[str, tuple[int, int]]:
    """H and W of the maps that modules make, by the key they are given under.

    ``targets`` has the module's name and whether it makes N H W C. Empty where the network cannot
    be run without numbers.
    """
    found: dict[str, tuple[int, int]] = {}
    handles = []
    for key, (name, last) in targets.items():

        def look(_m: nn.Module, _i: Any, y: Any, key: str = key, last: bool = last) -> None:
            if isinstance(y, Tensor) and y.ndim == 4:
                h, w = y.shape[1:3] if last else y.shape[2:]
                found[key] = h, w

        handles.append(model.get_submodule(name).register_forward_hook(look))
    try:
        run_hollow(model, size)
    except Exception:  # whatever it is, the network is not ours; only counts are lost
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return found


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
        _first(copy(images)).float().square().mean().backward()

    copy.eval()
    inferred = _median(forward, like.device)
    copy.train()
    return Times(inferred, _median(step, like.device), batch)


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
