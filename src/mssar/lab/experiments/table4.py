"""Table 4: every combination of scales."""

from __future__ import annotations

from mssar.lab.experiments.cell import Cell
from mssar.lab.experiments.paper import TABLE4, Published

DATASETS = ("cifar10", "cifar100")


def cells() -> tuple[Cell, ...]:
    """ResNet-56 and DenseNet-100; one global region is SE, so SE has its place here."""
    return tuple(Cell(row, data, remark=_remark(row)) for row in TABLE4 for data in DATASETS)


def _remark(row: Published) -> str:
    return "SE, with BN" if row.options.get("scales") == (1,) else ""
