"""When runs are compiled although nobody asked for it: where that takes less time than it saves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence

import torch

from mssar import kernels
from mssar.cost import cost
from mssar.kernels.device import able
from mssar.lab.data import Data
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine.blocks import repeated
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.world import launched
from mssar.lab.run import Run
from mssar.networks.recalibration import OURS
from mssar.surgery.foreign import is_foreign

# Multiply-adds of all runs of one network that pay for compiling it: two ResNet-56 on CIFAR for 160
# epochs. On an H200 that takes half a minute and saves a sixth of their eleven.
WORTH = 2e15
KINDS = ("none", *OURS)
SHORTEST = 300.0  # seconds of a budget: below it there is little to save


def pays(
    runs: Sequence[Run],
    load: Callable[[str], Data],
    execution: Execution,
    budget: float | None = None,
) -> bool:
    """Whether it is so: on a GPU, for networks of repeated blocks and long runs."""
    if not execution.graphed or execution.deterministic or launched():
        return False
    if (budget is not None and budget < SHORTEST) or not _can_compile(execution.device):
        return False
    macs, work = dict[str, int](), 0.0
    for run in runs:
        data = load(run.dataset)
        measured = run.recalibration in KINDS and not is_foreign(run.network)
        if not measured or not isinstance(data, Arrays):
            return False
        if run.label not in macs:
            with torch.device("meta"):
                model = run.build(len(data.classes))
            if not repeated(model):
                return False
            height, width, channels = data.train.images.shape[1:]
            macs[run.label] = cost(model, (channels, height, width)).macs
        work += macs[run.label] * len(data.train.images) * run.recipe.epochs
    return work >= WORTH * max(1, len(macs))


def _can_compile(device: torch.device) -> bool:
    """Triton, a GPU that it is for, and the C compiler that it calls."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    found = any(shutil.which(name) for name in compilers)
    return kernels.AVAILABLE and able(device) and found
