"""Cells of maps: where they lie and what they weigh.  N batch, C channels, H W map, FH FW cells.

The passes over maps go cell by cell: a tile is CELLS cells × BW columns × CT channels, and walks
down the rows of its cells, so that what belongs to a cell (its sum, its weight) stays in registers;
STAGES rows are on their way at a time. All maps of a launch lie in memory in the same way.
"""

import triton
import triton.language as tl

from mssar.kernels.common import affine, ceil_of, region_of


@triton.jit
def bounds_of(cell, cells, H: tl.constexpr, W: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr):
    """A cell's sample, its first row and column, its rows and columns; none beyond ``cells``."""
    n = cell // (FH * FW)
    i = cell % (FH * FW) // FW
    j = cell % FW
    top = ceil_of(i, H, FH)
    left = ceil_of(j, W, FW)
    tall = tl.where(cell < cells, ceil_of(i + 1, H, FH) - top, 0)
    return n, top, left, tall, ceil_of(j + 1, W, FW) - left


@triton.jit
def place_of(n, top, left, c, XN, XC, XH, XW, BW: tl.constexpr, BIG: tl.constexpr):
    """Offsets of the first rows of cells."""
    if BIG:  # more than 2³¹ numbers
        n = n.to(tl.int64)
        c = c.to(tl.int64)
    column = left[:, None] + tl.arange(0, BW)[None, :]
    corner = (n * XN + top * XH)[:, None] + column * XW
    return corner[:, :, None] + (c * XC)[None, None, :]


@triton.jit
def inside(
    tall, wide, down, across, in_c, BW: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr
):
    """Which entries of a row of tiles are positions of their cells.

    Unless they are RAGGED, all cells have as many rows: the answer is the same for each of these.
    """
    held = ((down < tall) if RAGGED else (tall > 0))[:, None]
    held = held & (across + tl.arange(0, BW)[None, :] < wide[:, None])
    mask = held[:, :, None]
    if not EVEN:
        mask = mask & in_c[None, None, :]
    return mask


@triton.jit
def cells_in(
    region,
    first,
    FH: tl.constexpr,
    FW: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The fine cells of regions, counted from a sample's first region: rows, and which are real."""
    n = first + region // (DOWN * ACROSS)
    i = region % (DOWN * ACROSS) // ACROSS
    j = region % ACROSS
    WIDE: tl.constexpr = (FW + ACROSS - 1) // ACROSS
    member = tl.arange(0, MEMBERS)
    row = ceil_of(i, FH, DOWN)[:, None] + (member // WIDE)[None, :]
    column = ceil_of(j, FW, ACROSS)[:, None] + (member % WIDE)[None, :]
    real = row < ceil_of(i + 1, FH, DOWN)[:, None]
    real = real & (column < ceil_of(j + 1, FW, ACROSS)[:, None])
    return n[:, None] * (FH * FW) + row * FW + column, real


@triton.jit
def region_sums(
    rows, region, first, last, C, c, in_c, FH: tl.constexpr, FW: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Sums over regions of samples, from rows of cells in memory."""
    cells, real = cells_in(region, first, FH, FW, DOWN, ACROSS, MEMBERS)
    real = real & (region < (last - first) * (DOWN * ACROSS))[:, None]
    mask = real[:, :, None] & in_c[None, None, :]
    value = tl.load(rows + cells[:, :, None] * C + c[None, None, :], mask, 0.0)
    return tl.sum(value.to(tl.float32), 1)


@triton.jit
def coarser(fine, FH: tl.constexpr, FW: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Sums over regions from those over all cells of a sample, where regions hold equally many."""
    split = tl.reshape(fine, [DOWN, FH // DOWN, ACROSS, FW // ACROSS, fine.shape[1]])
    return tl.reshape(tl.sum(tl.sum(split, 3), 1), [DOWN * ACROSS, fine.shape[1]])


@triton.jit
def finer(coarse, FH: tl.constexpr, FW: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """What a region has, for each of its cells: ``coarser`` the other way round."""
    C: tl.constexpr = coarse.shape[1]
    apart = tl.reshape(coarse, [DOWN, 1, ACROSS, 1, C])
    apart = tl.broadcast_to(apart, [DOWN, FH // DOWN, ACROSS, FW // ACROSS, C])
    return tl.reshape(apart, [FH * FW, C])


@triton.jit
def gate_lines(c, in_c, means, variances, gammas, betas, eps):
    """The gates' BN as slope and intercept, a scale."""
    slopes = ()
    intercepts = ()
    for level in tl.static_range(len(means)):
        mean = tl.load(means[level] + c, in_c, 0.0).to(tl.float32)
        variance = tl.load(variances[level] + c, in_c, 1.0).to(tl.float32)
        slope, intercept = affine(c, in_c, gammas[level], betas[level], mean, variance, eps)
        slopes = slopes + (slope,)
        intercepts = intercepts + (intercept,)
    return slopes, intercepts


@triton.jit
def weights_of(
    gates, slopes, intercepts, cell, n, N, c, C, real, FH: tl.constexpr, FW: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr,
):  # fmt: skip
    """z of cells: the mean of the scales' sigmoids; without slopes, the gates are those already."""
    z = tl.zeros([cell.shape[0], c.shape[0]], tl.float32)
    for level in tl.static_range(len(DOWN)):
        region = region_of(cell % (FH * FW), FH, FW, DOWN[level], ACROSS[level])
        row = N * ROWS_AT[level] + n * (DOWN[level] * ACROSS[level]) + region
        gate = tl.load(gates + row[:, None] * C + c[None, :], real, 0.0).to(tl.float32)
        if len(slopes) > 0:
            gate = tl.sigmoid(gate * slopes[level][None, :] + intercepts[level][None, :])
        z += gate
    return z / len(DOWN)
