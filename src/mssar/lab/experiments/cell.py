"""One published number and the runs that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mssar.lab.experiments.paper import Published
from mssar.lab.recipes import varied
from mssar.lab.run import Run, text_of, usual_recipe

CIFAR = ("cifar10", "cifar100")


@dataclass(frozen=True)
class Cell:
    """A row of the paper on one data set, trained by the paper's recipe or a variant of it."""

    row: Published
    dataset: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # options beside the row's own
    additional: bool = False  # another reading of the row; the others come first
    remark: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)  # its fields that are other ones

    def run(self, seed: int) -> Run:
        """One scale alone is SE, and trained once, by that name."""
        row, kind, options = self.row, self.row.recalibration, self.options
        if options.get("scales") == (1,):
            kind, options = "se", {k: v for k, v in options.items() if k != "scales"}
        recipe = varied(usual_recipe(row.network, self.dataset), **self.recipe)
        return Run(row.network, kind, options, self.dataset, recipe, seed)

    @property
    def options(self) -> dict[str, Any]:
        """Those that the experiment is about; a run has all others at their defaults."""
        return {**self.row.options, **self.changes}

    @property
    def particulars(self) -> list[str]:
        """The options for people, defaults included: ``strategy=regional``; then the recipe's."""
        every = {**self.options, **self.recipe}
        return [f"{name}={text_of(value)}" for name, value in every.items()]

    @property
    def label(self) -> str:
        """As in ``resnet56 mssar scales=1,4 on cifar10``."""
        what = " ".join((self.row.network, self.row.recalibration, *self.particulars))
        return f"{what} on {self.dataset}"

    @property
    def published(self) -> float | None:
        """The paper's error in per cent; None where it prints none."""
        return self.row.errors.get("top1" if self.dataset == "ilsvrc2012" else self.dataset)

    @property
    def published5(self) -> float | None:
        """The paper's top-5 error; CIFAR has none."""
        return self.row.errors.get("top5")

    @property
    def spread(self) -> float | None:
        """The paper's standard deviation over its runs."""
        return self.row.spread.get(self.dataset)
