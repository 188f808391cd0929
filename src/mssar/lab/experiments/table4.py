"""Table 4: every combination of scales."""

from __future__ import annotations

from mssar.lab.experiments.cell import CIFAR, Cell
from mssar.lab.experiments.paper import TABLE4, Published
from mssar.lab.experiments.table3 import NARROW


def cells() -> tuple[Cell, ...]:
    """ResNet-56 and DenseNet-100; one global region is SE, so SE has its place here. Then the
    narrower layers of ResNet-56, as in table 3: they alone fit its published costs in all rows."""
    main = [Cell(row, data, remark=_remark(row)) for row in TABLE4 for data in CIFAR]
    narrow = [
        Cell(row, data, {"reduction": 3}, additional=True, remark=NARROW)
        for row in TABLE4
        if row.network == "resnet56" and row.recalibration == "mssar"
        for data in CIFAR
    ]
    return (*main, *narrow)


def _remark(row: Published) -> str:
    return "SE, with BN" if row.options.get("scales") == (1,) else ""
