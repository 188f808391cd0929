"""The paper's tables and figures, one file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mssar.lab.experiments import ilsvrc, recipe, stage, strategy, table3, table4
from mssar.lab.experiments.cell import Cell


@dataclass(frozen=True)
class Experiment:
    """What is compared in one place of the paper."""

    name: str
    title: str
    cells: Callable[[], tuple[Cell, ...]]


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("table3", "CIFAR with and without MS-SAR", table3.cells),
        Experiment("table4", "combinations of scales", table4.cells),
        Experiment("strategy", "regional and sliding coordinate sets", strategy.cells),
        Experiment("stage", "multi-stage and single-stage DenseNets", stage.cells),
        Experiment(
            "recipe", "what the paper leaves open of its recipe, and weight decay", recipe.cells
        ),
        Experiment("ilsvrc", "ILSVRC2012 with SE and MS-SAR", ilsvrc.cells),
    )
}
