"""ILSVRC2012: none, SE and MS-SAR."""

from __future__ import annotations

from mssar.lab.experiments.cell import Cell
from mssar.lab.experiments.paper import ILSVRC2012


def cells() -> tuple[Cell, ...]:
    """ResNet-18, ResNet-34 and ResNeXt-50; their published error is top-1."""
    return tuple(Cell(row, "ilsvrc2012") for row in ILSVRC2012)
