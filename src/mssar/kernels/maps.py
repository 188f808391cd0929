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
def _some_values(
    x, N, c, in_c, XN, XC, XH, XW, H: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr
):
    """So many of a channel's values, from all over the batch and the map."""
    i = tl.arange(0, COUNT)
    n = (N * i // COUNT).to(tl.int64)
    j = (COUNT // 3 | 1) * i % COUNT  # every one once
    at = n * XN + (H * (2 * i + 1) // (2 * COUNT)) * XH + (W * (2 * j + 1) // (2 * COUNT)) * XW
    return tl.load(x + at[:, None] + (c.to(tl.int64) * XC)[None, :], in_c[None, :], 0.0)


@triton.jit
def _middle(values):
    """Their mean, but for the largest and the least: one of them may be far off."""
    values = values.to(tl.float32)
    return (tl.sum(values, 0) - tl.max(values, 0) - tl.min(values, 0)) / (values.shape[0] - 2)


@triton.jit
def _add_row(
    x, at, down, tall, wide, in_c, shift, added, squares, XH, XW, WIDE: tl.constexpr,
    BW: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    for across in tl.static_range(0, WIDE, BW):
        mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
        value = tl.load(x + at + (down * XH + across * XW), mask, 0.0).to(tl.float32)
        added += value
        if MOMENTS:
            away = tl.where(mask, value - shift, 0.0)
            squares += away * away
    return added, squares


@triton.jit
def _sum_cells(
    x, cell, end, c, in_c, shift, squares, XN, XC, XH, XW, H: tl.constexpr, W: tl.constexpr,
    FH: tl.constexpr, FW: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, BIG: tl.constexpr,
    MOMENTS: tl.constexpr,
):  # fmt: skip
    """Sums over cells; squares about ``shift`` are added to those of other cells."""
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    n, top, left, tall, wide = bounds_of(cell, end, H, W, FH, FW)
    at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
    added = tl.zeros([cell.shape[0], BW, c.shape[0]], tl.float32)
    if UNROLL:
        for down in tl.static_range(TALL):
            added, squares = _add_row(
                x, at, down, tall, wide, in_c, shift, added, squares, XH, XW, WIDE, BW, EVEN,
                RAGGED, MOMENTS,
            )  # fmt: skip
    else:
        for down in tl.range(TALL, num_stages=STAGES):
            added, squares = _add_row(
                x, at, down, tall, wide, in_c, shift, added, squares, XH, XW, WIDE, BW, EVEN,
                RAGGED, MOMENTS,
            )  # fmt: skip
    return tl.sum(added, 1), squares


@triton.jit
def _keep_level(
    value, pools, rows, first, last, N, C, c, in_c, steep, offset, H: tl.constexpr,
    W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, AT: tl.constexpr,
    READY: tl.constexpr,
):  # fmt: skip
    """Write sums over samples' regions, or what is made of their means."""
    region = tl.arange(0, value.shape[0])
    at = (N * AT + first * (DOWN * ACROSS) + region)[:, None] * C + c[None, :]
    mask = (region < (last - first) * (DOWN * ACROSS))[:, None] & in_c[None, :]
    if READY:
        area = area_of(region % (DOWN * ACROSS), DOWN, ACROSS, H, W)
        tl.store(rows + at, value / area[:, None] * steep[None, :] + offset[None, :], mask)
    else:
        tl.store(pools + at, value, mask)


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
    LEVELS: tl.constexpr,  # the others; or all of them
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,  # STAGES are not rows of a tile but tiles
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
    BIG: tl.constexpr,
    READY: tl.constexpr,
    GIVEN: tl.constexpr,
    MOMENTS: tl.constexpr,
    NESTED: tl.constexpr,  # a program has one sample, and its regions hold equally many cells
    WHOLE: tl.constexpr,  # and it takes all of them at once
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
    Q: tl.constexpr = FH * FW
    steep = tl.full([CT], 1.0, tl.float32)
    offset = tl.zeros([CT], tl.float32)
    if GIVEN:
        mean = tl.load(mean_at + c, in_c, 0.0).to(tl.float32)
        variance = tl.load(variance_at + c, in_c, 1.0).to(tl.float32)
        steep, offset = affine(c, in_c, gamma, beta, mean, variance, eps)
    shift = tl.zeros([1, 1, CT], tl.float32)
    SCALED: tl.constexpr = len(LEVELS) + len(FINE_AT) > 0
    if MOMENTS:
        # About 0, a mean far from it would drown squares, and differences in small types. The
        # squares do with fewer values.
        if WHOLE or not SCALED:
            near = _middle(_some_values(x, N, c, in_c, XN, XC, XH, XW, H, W, 8))
        if SCALED:
            some = _some_values(x, N, c, in_c, XN, XC, XH, XW, H, W, 32)
            if not WHOLE:  # else there is time to wait for them
                near = _middle(some)
        shift = near[None, None, :]
        offset = -near
    squares = tl.zeros([CELLS, BW, CT], tl.float32)
    total = tl.zeros([CT], tl.float32)
    if WHOLE:
        whole, squares = _sum_cells(
            x, first * Q + tl.arange(0, Q), last * Q, c, in_c, shift, squares, XN, XC, XH, XW, H,
            W, FH, FW, BW, STAGES, UNROLL, EVEN, RAGGED, BIG, MOMENTS,
        )  # fmt: skip
        total = tl.sum(whole, 0)
        if MOMENTS:
            near = _middle(some)
            offset = -near
    else:
        for start in tl.range(first * Q, last * Q, CELLS, num_stages=STAGES if UNROLL else 1):
            cell = start + tl.arange(0, CELLS)
            fine, squares = _sum_cells(
                x, cell, last * Q, c, in_c, shift, squares, XN, XC, XH, XW, H, W, FH, FW, BW,
                STAGES, UNROLL, EVEN, RAGGED, BIG, MOMENTS,
            )  # fmt: skip
            real = (cell < last * Q)[:, None] & in_c[None, :]
            if len(LEVELS) > 0 or not READY:
                tl.store(pools + cell[:, None] * C + c[None, :], fine, real)
            for level in tl.static_range(len(FINE_AT)):
                share = 1.0 / area_of(cell % Q, FH, FW, H, W)
                ready = fine * (share[:, None] * steep[None, :]) + offset[None, :]
                row = N * FINE_AT[level] + cell
                tl.store(rows + row[:, None] * C + c[None, :], ready, real)
            total += tl.sum(fine, 0)
    if MOMENTS:
        count = ((last - first) * (H * W)).to(tl.float32)
        away_all = total - count * tl.reshape(shift, [CT])
        squared = tl.sum(tl.sum(squares, 1), 0) - away_all * away_all / count
        tl.store(parts + g * C + c, total, in_c)
        tl.store(parts + (groups + g) * C + c, relu(squared), in_c)
        if tl.program_id(0) == 0:
            tl.store(near_at + c, -offset, in_c)
    if len(LEVELS) > 0:
        if not WHOLE:
            tl.debug_barrier()  # the rows just written are read back, by other threads
            if NESTED:
                cells = first * Q + tl.arange(0, Q)
                whole = tl.load(pools + cells[:, None] * C + c[None, :], in_c[None, :], 0.0)
        for level in tl.static_range(len(LEVELS)):
            if NESTED:
                value = coarser(whole, FH, FW, LEVELS[level][0], LEVELS[level][1])
            else:
                value = region_sums(
                    pools, tl.arange(0, REGIONS[level]), first, last, C, c, in_c, FH, FW,
                    LEVELS[level][0], LEVELS[level][1], MEMBERS[level],
                )  # fmt: skip
            _keep_level(
                value, pools, rows, first, last, N, C, c, in_c, steep, offset, H, W,
                LEVELS[level][0], LEVELS[level][1], LEVELS[level][2], READY,
            )  # fmt: skip


@triton.jit
def _apply_row(
    x, shortcut, out, at, down, tall, wide, in_c, steep, level_at, XH, XW, WIDE: tl.constexpr,
    BW: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, NORM: tl.constexpr,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    for across in tl.static_range(0, WIDE, BW):
        mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
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
    UNROLL: tl.constexpr,  # STAGES are not rows of a tile but tiles
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
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
    step = tl.num_programs(0)
    AHEAD: tl.constexpr = STAGES if UNROLL else 1
    for cell_tile in tl.range(tl.program_id(0), cell_tiles, step, num_stages=AHEAD):
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
            level_at = steep  # not read
        at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
        if UNROLL:
            for down in tl.static_range(TALL):
                _apply_row(
                    x, shortcut, out, at, down, tall, wide, in_c, steep, level_at, XH, XW, WIDE,
                    BW, EVEN, RAGGED, NORM, SHORTCUT, RELU,
                )  # fmt: skip
        else:
            for down in tl.range(TALL, num_stages=STAGES):
                _apply_row(
                    x, shortcut, out, at, down, tall, wide, in_c, steep, level_at, XH, XW, WIDE,
                    BW, EVEN, RAGGED, NORM, SHORTCUT, RELU,
                )  # fmt: skip
