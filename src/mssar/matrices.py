"""A map's partition into cells as matrices.  N batch, C channels, H W map, n positions, k cells.

For programs that others run: a product is one operation, where the ways of :mod:`mssar.partition`
are many, or gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mssar.partition import COLUMNS, ROWS, Size

if TYPE_CHECKING:
    from jaxtyping import Float

MANY = 40  # cells from which on a product for each axis is quicker than one for both


def region_sums(x: Float[Tensor, "N C H W"], grids: Sequence[Size]) -> Float[Tensor, "N C k"]:
    """The sums over all grids' cells."""
    size = x.shape[ROWS], x.shape[COLUMNS]
    if sum(h * w for h, w in grids) < MANY:
        return x.flatten(2) @ cells(size, grids, x).T
    sides = [_held(size, grid, x) for grid in grids]
    return torch.cat([(rows @ (x @ columns.T)).flatten(2) for rows, columns in sides], 2)


def laid_over(
    z: Float[Tensor, "N C k"], size: Size, grids: Sequence[Size]
) -> Float[Tensor, "N C H W"]:
    """To every position the sum of its cells' values, one of each grid."""
    counts = [h * w for h, w in grids]
    if sum(counts) < MANY:
        whole: Tensor = (z @ cells(size, grids, z)).unflatten(2, size)
        return whole
    laid: list[Tensor] = []
    for values, grid in zip(z.split(counts, 2), grids, strict=True):
        rows, columns = _held(size, grid, z)
        laid.append(rows.T @ (values.unflatten(2, grid) @ columns))
    return torch.stack(laid).sum(0) if len(laid) > 1 else laid[0]


def cells(size: Size, grids: Sequence[Size], like: Tensor) -> Float[Tensor, "k n"]:
    """1 where a cell holds a position of a map, row by row; all grids' cells, one after another.

    A grid may have more cells along an axis than there are positions; then some are empty.
    """
    return torch.cat([_cells(size, grid, like) for grid in grids])


def _cells(size: Size, grid: Size, like: Tensor) -> Float[Tensor, "k n"]:
    rows, columns = _held(size, grid, like)
    return (rows[:, None, :, None] * columns[:, None]).flatten(2).flatten(0, 1)  # of h w H W


def held(size: Size, grids: Sequence[Size], like: Tensor) -> Float[Tensor, " k"]:
    """How many positions these cells hold."""
    sides = [[axis.sum(1) for axis in _held(size, grid, like)] for grid in grids]
    return torch.cat([(heights[:, None] * widths).flatten() for heights, widths in sides])


def _held(size: Size, grid: Size, like: Tensor) -> list[Float[Tensor, "_ _"]]:
    """1 where run j of K holds position i: j·n ≤ i·K < (j + 1)·n. Exported, a division of whole
    numbers would be many operations, and one by way of floats."""
    found = []
    for length, parts in zip(size, grid, strict=True):
        at = torch.arange(length, device=like.device) * parts
        begins = torch.arange(parts, device=like.device)[:, None] * length
        found.append(((at >= begins) & (at < begins + length)).to(like.dtype))
    return found
