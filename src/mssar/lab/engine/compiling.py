"""What is compiled although nobody asked for it: where that takes less time than it saves."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mssar import kernels
from mssar.cost import cost
from mssar.kernels.device import able
from mssar.lab.data import Data
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import checkpoint
from mssar.lab.engine.blocks import repeated
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.world import launched
from mssar.lab.run import Run
from mssar.networks.recalibration import OURS
from mssar.surgery.foreign import is_foreign

# Multiply-adds of all runs of a network that pay for compiling it: two ResNet-56 on CIFAR for 160
# epochs. On an H200 that takes half a minute and saves a sixth of their eleven.
WORTH = 2e15
KINDS = ("none", *OURS)  # that were measured
SHORTEST = 300.0  # seconds of a budget: below it there is little to save


def worth(
    runs: Sequence[Run],
    load: Callable[[str], Data],
    execution: Execution,
    folder: Path,
    *,
    budget: float | None = None,
    anew: bool = False,
) -> frozenset[str]:
    """Names of the runs that are compiled: of repeated blocks, on a GPU, with far to go.

    Compiled code rounds otherwise, so what was begun goes on as it was begun, as far as that is
    known; and if not, it counts as a whole, as it did then.
    """
    if not execution.graphed or execution.deterministic or launched():
        return frozenset()
    if not _can_compile(execution.device):
        return frozenset()
    compiled, paid = set[str](), set[str]()
    undecided = defaultdict[str, list[Run]](list)
    for run in runs:
        epochs, before = (0, None) if anew else _begun(folder / run.name)
        if epochs >= run.recipe.epochs:
            continue
        if before:
            compiled.add(run.name)
            paid.add(run.label)  # for others of that network, too
        elif before is None:
            undecided[run.label].append(run)
    long = budget is None or budget >= SHORTEST
    for label, some in undecided.items():
        if long and _gains(some[0]) and (label in paid or _work(some, load) >= WORTH):
            compiled.update(run.name for run in some)
    return frozenset(compiled)


def _gains(run: Run) -> bool:
    return run.recalibration in KINDS and not is_foreign(run.network)


def _work(runs: Sequence[Run], load: Callable[[str], Data]) -> float:
    """Multiply-adds of runs of one network."""
    sets = [(run, data) for run in runs if isinstance(data := load(run.dataset), Arrays)]
    if not sets:
        return 0.0
    images = sum(run.recipe.epochs * len(data.train) for run, data in sets)
    return float(_macs(*sets[0]) * images)


def _begun(directory: Path) -> tuple[int, bool | None]:
    """Epochs that a run has behind it, and whether it was compiled last; None: it does not say."""
    found = checkpoint.checkpoints(directory)
    try:
        progress = checkpoint.progress(found[-1])
    except (IndexError, ValueError):  # what is wrong with it is said when the run goes on
        return checkpoint.epochs(directory), None
    compiled = progress.makers[-1].get("compile") if progress.makers else None
    return progress.epoch, None if compiled is None else bool(compiled)


def _macs(run: Run, data: Arrays) -> int:
    """For one image; 0 where the network would be compiled whole, which takes minutes."""
    with torch.device("meta"):
        model = run.build(len(data.classes))
    height, width, channels = data.train.images.shape[1:]
    return cost(model, (channels, height, width)).macs if repeated(model) else 0


def _can_compile(device: torch.device) -> bool:
    """Triton, a GPU that it is for, and the C compiler that it calls."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    found = any(shutil.which(name) for name in compilers)
    return kernels.AVAILABLE and able(device) and found
