"""Cells of maps: where they lie and what they weigh.  N batch, C channels, H W map, fh fw cells.

The passes over maps go cell by cell. A tile is CELLS cells × BP of their positions × CT channels
(× CT × BP where channels lie apart), and goes on by BP positions, UP times at once so that enough
is asked for, until its cells are done: what belongs to a cell (its sum, its weight) stays in
registers.

Where cells begin is worked out by ``quotient`` and with run-time sides: of whole numbers that it
knows to be small LLVM adds two at a time, and ptxas up to 12.9 then loses constants
(triton-lang/triton#11581; LOG.md).
"""

import triton
import triton.language as tl

from mssar.kernels.triton.common import (
    INTERCEPT,
    SLOPE,
    ceil_of,
    gate_norm,
    quotient,
    region_of,
)


@triton.jit
def cells_of(tile, H, W, fh, fw, CELLS: tl.constexpr):
    """A tile's cells: their numbers in a sample, first positions, columns and areas."""
    cell = tile * CELLS + tl.arange(0, CELLS)
    i = quotient(cell, fw)
    j = cell - i * fw
    top = ceil_of(i, H, fh)
    left = ceil_of(j, W, fw)
    wide = ceil_of(j + 1, W, fw) - left
    area = (ceil_of(i + 1, H, fh) - top) * wide
    return cell, top * W + left, wide, tl.where(cell < fh * fw, area, 0)


@triton.jit
def spread(value, LAST: tl.constexpr):
    """Of cells × channels, for a tile."""
    if LAST:
        return value[:, None, :]
    else:
        return value[:, :, None]


@triton.jit
def over_positions(tile, LAST: tl.constexpr):
    """A tile's sum over positions: cells × channels."""
    if LAST:
        return tl.sum(tile, 1)
    else:
        return tl.sum(tile, 2)


@triton.jit
def empty_tile(CELLS: tl.constexpr, BP: tl.constexpr, CT: tl.constexpr, LAST: tl.constexpr):
    if LAST:
        return tl.zeros([CELLS, BP, CT], tl.float32)
    else:
        return tl.zeros([CELLS, CT, BP], tl.float32)


@triton.jit
def places_of(start, corner, wide, area, c, in_c, C, H, W, BP: tl.constexpr, LAST: tl.constexpr):
    """Offsets in a sample of the next positions of cells, and which of them there are."""
    q = start + tl.arange(0, BP)[None, :]
    place = corner[:, None] + q + quotient(q, wide[:, None]) * (W - wide)[:, None]
    held = q < area[:, None]
    if LAST:
        return place[:, :, None] * C + c[None, None, :], held[:, :, None] & in_c[None, None, :]
    else:
        held = held[:, None, :] & in_c[None, :, None]
        return place[:, None, :] + (c * (H * W))[None, :, None], held


@triton.jit
def weights_of(
    gates, norms, cell, n, N, c, CS, JS, real, fh, fw, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
):  # fmt: skip
    """z of cells: the mean of the scales' sigmoids."""
    z = tl.zeros([cell.shape[0], c.shape[0]], tl.float32)
    for level in tl.static_range(len(DOWN)):
        norm = gate_norm(norms, level, CS, JS, len(DOWN))
        slope = tl.load(norm + SLOPE * CS + c, c < CS, 0.0)
        intercept = tl.load(norm + INTERCEPT * CS + c, c < CS, 0.0)
        region = region_of(cell, fh, fw, DOWN[level], ACROSS[level])
        row = (N * ROWS_AT[level] + n * (DOWN[level] * ACROSS[level]) + region).to(tl.int64)
        gate = tl.load(gates + row[:, None] * CS + c[None, :], real, 0.0).to(tl.float32)
        z += tl.sigmoid(gate * slope[None, :] + intercept[None, :])
    return z / len(DOWN)
