"""Table 4: every combination of scales."""

from __future__ import annotations

from mssar.lab.experiments.cell import CIFAR, Cell
from mssar.lab.experiments.paper import TABLE4, Published


def cells() -> tuple[Cell, ...]:
    """ResNet-56 and DenseNet-100; one global region is SE, so SE has its place here."""
    return tuple(Cell(row, data, remark=_remark(row)) for row in TABLE4 for data in CIFAR)


def _remark(row: Published) -> str:
    return "SE, with BN" if row.options.get("scales") == (1,) else ""
