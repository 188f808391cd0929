"""docs/assets/courses.svg: test errors over training. tools/write-results draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mssar.lab.records import Record

WIDTH, SIZE = 6.4, 12  # inches and points: so letters have ten pixels where all has four hundred


@dataclass(frozen=True)
class Line:
    """Runs that differ in their seed."""

    name: str
    colour: str
    runs: Sequence[Record]


@dataclass(frozen=True)
class Panel:
    title: str
    errors: tuple[float, float]  # from, to
    lines: Sequence[Line]


def draw(file: Path, panels: Sequence[Panel]) -> None:
    """Means, and from the lowest to the highest seed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "mssar", "svg.fonttype": "none", "font.size": SIZE})
    import matplotlib.pyplot as plt

    columns = 3 if len(panels) % 2 else 2
    down = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        down, columns, figsize=(WIDTH, 2.35 * down), layout="constrained", squeeze=False
    )
    axes = [axis for row in grid for axis in row]
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, panels, strict=False):
        for line in panel.lines:
            by_run = [[epoch.test_error for epoch in run.epochs] for run in line.runs]
            by_epoch = list(zip(*by_run, strict=True))
            mean = [fmean(errors) for errors in by_epoch]
            number = range(1, len(mean) + 1)
            low, high = ([f(errors) for errors in by_epoch] for f in (min, max))
            axis.fill_between(number, low, high, color=line.colour, alpha=0.2, linewidth=0)
            label = f"{line.name} {mean[-1]:.2f} (n={len(line.runs)})"
            axis.plot(number, mean, color=line.colour, linewidth=1.2, label=label)
        axis.set_title(panel.title, fontsize=SIZE)
        axis.set_xlim(1, 160)
        axis.set_xticks(range(40, 161, 40))
        axis.set_ylim(panel.errors)
        axis.legend(
            loc="upper right", frameon=False, handlelength=1.2,
            borderaxespad=0, labelspacing=0.3, fontsize=SIZE,
        )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    for row in grid:
        row[0].set_ylabel("test error, %")
    for axis in axes[: len(panels)][-columns:]:  # with none below
        axis.set_xlabel("epoch")
    figure.suptitle("Test errors over training, and their means at the end", fontsize=SIZE)
    figure.patch.set_facecolor("white")
    figure.savefig(file, metadata={"Date": None})
