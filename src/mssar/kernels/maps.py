"""The passes over maps of a block's tail, forward.  N batch, C channels, H W map, FH FW cells.

sums   x                   → every region's mean or sum, statistics of x
apply  x, gates, shortcut  → relu(z · (a·x + b) + shortcut)
"""

import triton
import triton.language as tl

from mssar.kernels.cells import (
    bounds_of,
    coarser,
    gate_lines,
    inside,
    place_of,
    region_sums,
    weights_of,
)
from mssar.kernels.common import affine, area_of, relu


@triton.jit
def _near_mean(x, N, c, in_c, XN, XC, XH, XW, H: tl.constexpr, W: tl.constexpr):
    """The mean of thirty of a channel's values, from all over the batch and the map.

    There are two more; the largest and the least are left out, since one of them may be far off.
    """
    i = tl.arange(0, 32)
    n = (N * i // 32).to(tl.int64)
    at = n * XN + (H * (2 * i + 1) // 64) * XH + (W * (2 * (11 * i % 32) + 1) // 64) * XW
    here = at[:, None] + (c.to(tl.int64) * XC)[None, :]
    value = tl.load(x + here, in_c[None, :], 0.0).to(tl.float32)
    return (tl.sum(value, 0) - tl.max(value, 0) - tl.min(value, 0)) / 30


@triton.jit
def sums(
    x,
    pools,  # out: rows × C, sums over every cell; unless READY, over the other regions too
    rows,  # out, if READY: rows × C, the scales' means; with GIVEN behind BN, with MOMENTS less
    # a number near x's mean
    parts,  # out: 2 × groups × C, sums and squares about the mean of a group of samples
    counters,  # out: zeros, for the kernels that follow
    near_at,  # out, with MOMENTS: C, that number
    mean_at,  # with GIVEN: BN's statistics
    variance_at,
    gamma,
    beta,
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    group,
    counts,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    FINE_AT: tl.constexpr,  # rows of a sample before those of scales whose regions are cells
    LEVELS: tl.constexpr,  # the others
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BIG: tl.constexpr,
    READY: tl.constexpr,
    GIVEN: tl.constexpr,
    MOMENTS: tl.constexpr,
    NESTED: tl.constexpr,  # a program has one sample, and its regions hold equally many cells
):
    groups = tl.num_programs(0)
    g = groups - 1 - tl.program_id(0)  # backwards: what was written last may still be in the cache
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for start in range(0, counts, 128):
            i = start + tl.arange(0, 128)
            tl.store(counters + i, tl.zeros([128], tl.int32), i < counts)
    first = g * group
    last = tl.minimum(first + group, N)
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    Q: tl.constexpr = FH * FW
    steep = tl.full([CT], 1.0, tl.float32)
    offset = tl.zeros([CT], tl.float32)
    if GIVEN:
        mean = tl.load(mean_at + c, in_c, 0.0).to(tl.float32)
        variance = tl.load(variance_at + c, in_c, 1.0).to(tl.float32)
        steep, offset = affine(c, in_c, gamma, beta, mean, variance, eps)
    if MOMENTS:
        # About 0, a mean far from it would drown squares, and differences in small types.
        near = _near_mean(x, N, c, in_c, XN, XC, XH, XW, H, W)
        shift = near[None, None, :]
        offset = -near
        if tl.program_id(0) == 0:
            tl.store(near_at + c, near, in_c)
    squares = tl.zeros([CELLS, BW, CT], tl.float32)
    total = tl.zeros([CT], tl.float32)
    for start in range(first * Q, last * Q, CELLS):
        cell = start + tl.arange(0, CELLS)
        n, top, left, tall, wide = bounds_of(cell, last * Q, H, W, FH, FW)
        at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
        added = tl.zeros([CELLS, BW, CT], tl.float32)
        for down in tl.range(TALL, num_stages=STAGES):
            for across in tl.static_range(0, WIDE, BW):
                mask = inside(tall, wide, down, across, in_c, BW, EVEN)
                value = tl.load(x + at + (down * XH + across * XW), mask, 0.0).to(tl.float32)
                added += value
                if MOMENTS:
                    away = tl.where(mask, value - shift, 0.0)
                    squares += away * away
        fine = tl.sum(added, 1)
        real = (cell < last * Q)[:, None] & in_c[None, :]
        if len(LEVELS) > 0 or not READY:
            tl.store(pools + cell[:, None] * C + c[None, :], fine, real)
        for level in tl.static_range(len(FINE_AT)):
            row = N * FINE_AT[level] + cell
            share = 1.0 / tl.maximum(tall * wide, 1).to(tl.float32)
            ready = fine * (share[:, None] * steep[None, :]) + offset[None, :]
            tl.store(rows + row[:, None] * C + c[None, :], ready, real)
        total += tl.sum(fine, 0)
    if MOMENTS:
        count = ((last - first) * (H * W)).to(tl.float32)
        away_all = total - count * tl.reshape(shift, [CT])
        squared = tl.sum(tl.sum(squares, 1), 0) - away_all * away_all / count
        tl.store(parts + g * C + c, total, in_c)
        tl.store(parts + (groups + g) * C + c, relu(squared), in_c)
    if len(LEVELS) > 0:
        tl.debug_barrier()  # the rows just written are read back, by other threads
        if NESTED:
            cells = first * Q + tl.arange(0, Q)
            whole = tl.load(pools + cells[:, None] * C + c[None, :], in_c[None, :], 0.0)
        coarse = ()
        for level in tl.static_range(len(LEVELS)):
            if NESTED:
                coarse = coarse + (coarser(whole, FH, FW, LEVELS[level][0], LEVELS[level][1]),)
            else:
                value = region_sums(
                    pools, tl.arange(0, REGIONS[level]), first, last, C, c, in_c, FH, FW,
                    LEVELS[level][0], LEVELS[level][1], MEMBERS[level],
                )  # fmt: skip
                coarse = coarse + (value,)
        for level in tl.static_range(len(LEVELS)):
            KK = LEVELS[level][0] * LEVELS[level][1]
            region = tl.arange(0, REGIONS[level])
            row = N * LEVELS[level][2] + first * KK + region
            mask = (region < (last - first) * KK)[:, None] & in_c[None, :]
            at_row = row[:, None] * C + c[None, :]
            if READY:
                area = area_of(region % KK, LEVELS[level][0], LEVELS[level][1], H, W)
                ready = coarse[level] / area[:, None] * steep[None, :] + offset[None, :]
                tl.store(rows + at_row, ready, mask)
            else:
                tl.store(pools + at_row, coarse[level], mask)


@triton.jit
def apply(
    x,
    shortcut,
    out,
    mean_at,  # C: BN's mean of x, and its variance
    variance_at,
    gamma,
    beta,
    gates,  # rows × C
    gate_means,  # a scale: C; none where gates are behind their BN and sigmoid
    gate_variances,
    gate_gammas,
    gate_betas,
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    eps,
    gate_eps,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BIG: tl.constexpr,
    NORM: tl.constexpr,  # is there a BN before the recalibration
    SHORTCUT: tl.constexpr,
    RELU: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    Q: tl.constexpr = FH * FW
    slopes, intercepts = gate_lines(
        c, in_c, gate_means, gate_variances, gate_gammas, gate_betas, gate_eps
    )
    if NORM:
        mean = tl.load(mean_at + c, in_c, 0.0).to(tl.float32)
        variance = tl.load(variance_at + c, in_c, 1.0).to(tl.float32)
        a, b = affine(c, in_c, gamma, beta, mean, variance, eps)
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    cell_tiles = (N * Q + CELLS - 1) // CELLS
    for cell_tile in range(tl.program_id(0), cell_tiles, tl.num_programs(0)):
        cell = cell_tile * CELLS + tl.arange(0, CELLS)
        n, top, left, tall, wide = bounds_of(cell, N * Q, H, W, FH, FW)
        if L > 0:
            real = (cell < N * Q)[:, None] & in_c[None, :]
            z = weights_of(
                gates, slopes, intercepts, cell, n, N, c, C, real, FH, FW, DOWN, ACROSS, ROWS_AT
            )
        else:
            z = tl.full([CELLS, CT], 1.0, tl.float32)
        if NORM:
            steep = (z * a[None, :])[:, None, :]
            level_at = (z * b[None, :])[:, None, :]
        else:
            steep = z[:, None, :]
        at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
        for down in tl.range(TALL, num_stages=STAGES):
            for across in tl.static_range(0, WIDE, BW):
                mask = inside(tall, wide, down, across, in_c, BW, EVEN)
                here = at + (down * XH + across * XW)
                value = tl.load(x + here, mask, 0.0).to(tl.float32) * steep
                if NORM:
                    value += level_at
                if SHORTCUT:
                    value += tl.load(shortcut + here, mask, 0.0).to(tl.float32)
                if RELU:
                    value = relu(value)
                tl.store(out + here, value, mask)
