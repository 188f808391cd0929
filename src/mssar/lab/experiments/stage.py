"""Multi-stage against single-stage recalibration of DenseNet-100."""

from __future__ import annotations

from mssar.lab.experiments.cell import CIFAR, Cell
from mssar.lab.experiments.paper import STAGE, Published


def cells() -> tuple[Cell, ...]:
    """Both on both data sets; multi-stage is table 3's."""
    return tuple(Cell(row, data, remark=_remark(row)) for row in STAGE for data in CIFAR)


def _remark(row: Published) -> str:
    single = row.options["stage"] == "single"
    return "the published number is also that of scales=1 in table 4" if single else ""
