"""The passes over maps of a block's tail, forward.  N batch, C channels, H W map, FH FW cells.

sums   x                   → every region's sum, statistics of x
apply  x, gates, shortcut  → relu(z · (a·x + b) + shortcut)
"""

import triton
import triton.language as tl

from mssar.kernels.cells import bounds_of, cells_in, inside, place_of, weights_of
from mssar.kernels.common import affine, moments_of, relu, sums_of


@triton.jit
def sums(
    x,
    pools,  # out: rows × C, sums over every region
    parts,  # out: 2 × groups × C, sums and squares about the mean of a group of samples
    counters,  # out: zeros, for the kernels that follow
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    group,
    counts,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    LEVELS: tl.constexpr,
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BIG: tl.constexpr,
    MOMENTS: tl.constexpr,
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
    # Squares about a value of the map, not about 0: a mean far from 0 would drown the variance.
    sample = first.to(tl.int64) * XN
    shift = tl.load(x + sample + c * XC, in_c, 0.0).to(tl.float32)[None, None, :]
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
        tl.store(pools + cell[:, None] * C + c[None, :], fine, real)
        total += tl.sum(fine, 0)
    if MOMENTS:
        count = ((last - first) * (H * W)).to(tl.float32)
        away_all = total - count * tl.reshape(shift, [CT])
        squared = tl.sum(tl.sum(squares, 1), 0) - away_all * away_all / count
        tl.store(parts + g * C + c, total, in_c)
        tl.store(parts + (groups + g) * C + c, relu(squared), in_c)
    if len(LEVELS) > 0:
        tl.debug_barrier()  # the rows just written are read back, by other threads
        coarse = ()
        for level in tl.static_range(len(LEVELS)):
            KK = LEVELS[level][0] * LEVELS[level][1]
            region = tl.arange(0, REGIONS[level])
            rows, real = cells_in(
                region, first, FH, FW, LEVELS[level][0], LEVELS[level][1], MEMBERS[level]
            )
            real = real & (region < (last - first) * KK)[:, None]
            mask = real[:, :, None] & in_c[None, None, :]
            value = tl.load(pools + rows[:, :, None] * C + c[None, None, :], mask, 0.0)
            coarse = coarse + (tl.sum(value, 1),)
        for level in tl.static_range(len(LEVELS)):
            KK = LEVELS[level][0] * LEVELS[level][1]
            region = tl.arange(0, REGIONS[level])
            row = N * LEVELS[level][2] + first * KK + region
            mask = (region < (last - first) * KK)[:, None] & in_c[None, :]
            tl.store(pools + row[:, None] * C + c[None, :], coarse[level], mask)


@triton.jit
def apply(
    x,
    shortcut,
    out,
    mean_at,  # C: BN's mean of x, and its variance
    variance_at,
    parts,  # 2 × groups × C, from `sums`; for FINISH, where no other kernel has made the two
    gamma,
    beta,
    gates,  # rows × C
    gate_means,  # a scale: C
    gate_variances,
    gate_gammas,
    gate_betas,
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    groups,
    group_size,
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
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    BIG: tl.constexpr,
    NORM: tl.constexpr,  # is there a BN before the recalibration
    FINISH: tl.constexpr,
    SHORTCUT: tl.constexpr,
    RELU: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    Q: tl.constexpr = FH * FW
    slopes = ()
    intercepts = ()
    for level in tl.static_range(L):
        gate_mean = tl.load(gate_means[level] + c, in_c, 0.0).to(tl.float32)
        gate_variance = tl.load(gate_variances[level] + c, in_c, 1.0).to(tl.float32)
        slope, intercept = affine(
            c, in_c, gate_gammas[level], gate_betas[level], gate_mean, gate_variance, gate_eps
        )
        slopes = slopes + (slope,)
        intercepts = intercepts + (intercept,)
    if NORM:
        if FINISH:
            mean, variance = moments_of(
                parts,
                parts + groups * C,
                C,
                c,
                in_c,
                groups,
                group_size * (H * W),
                N * (H * W),
                CHUNK,
            )
            if tl.program_id(0) == 0:
                tl.store(mean_at + c, mean, in_c)
                tl.store(variance_at + c, variance, in_c)
        else:
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


@triton.jit
def fold_moments(
    parts, folded, C, parts_count, count, total, BC: tl.constexpr, CHUNK: tl.constexpr
):
    """Many parts of `sums` made one, where there are too many to be added up by every reader."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < C
    squares = parts + parts_count * C
    mean, variance = moments_of(parts, squares, C, c, in_c, parts_count, count, total, CHUNK)
    tl.store(folded + c, mean * total, in_c)
    tl.store(folded + C + c, variance * total, in_c)


@triton.jit
def fold_sums(parts, folded, width, parts_count, BC: tl.constexpr, CHUNK: tl.constexpr):
    """The same for sums, of which there are several kinds."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    kind = tl.program_id(1)
    added = sums_of(parts + kind * parts_count * width, width, c, c < width, parts_count, CHUNK)
    tl.store(folded + kind * width + c, added, c < width)
