"""The passes over maps of a block's tail, backward.  N batch, C channels, H W map, FH FW cells.

gather   grad, out, x, gates    → grad behind the relu, z, gradients of the gates
scatter  grad, x, pools' grads  → the gradient of x
"""

import triton
import triton.language as tl

from mssar.kernels.cells import bounds_of, inside, place_of
from mssar.kernels.common import area_of, region_of
from mssar.kernels.gates_backward import (
    keep_parts,
    read_gates,
    through_gates,
    through_kept_gates,
)


@triton.jit
def _gather_cells(
    grad, out, x, behind, cell, end, c, in_c, centre, XN, XC, XH, XW, H: tl.constexpr,
    W: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, BIG: tl.constexpr, NORM: tl.constexpr,
    RELU: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Sums over cells of the gradient behind the relu, which is written, and its products."""
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    n, top, left, tall, wide = bounds_of(cell, end, H, W, FH, FW)
    at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
    added = tl.zeros([cell.shape[0], BW, c.shape[0]], tl.float32)
    products = tl.zeros([cell.shape[0], BW, c.shape[0]], tl.float32)
    for down in tl.range(TALL, num_stages=STAGES):
        for across in tl.static_range(0, WIDE, BW):
            mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
            here = at + (down * XH + across * XW)
            slope = tl.load(grad + here, mask, 0.0)
            value = tl.load(x + here, mask, 0.0).to(tl.float32)
            if RELU:
                slope = tl.where(tl.load(out + here, mask, 0.0) <= 0, 0.0, slope)
            if WRITE:
                tl.store(behind + here, slope, mask)
            if NORM:
                value -= centre
                added += slope.to(tl.float32)
            products += slope.to(tl.float32) * value
    return tl.sum(added, 1), tl.sum(products, 1)


@triton.jit
def gather(
    grad,
    out,
    x,
    behind,  # out: the gradient behind the relu, which is the shortcut's
    cell_sums,  # out: 2 × rows of cells × C, of that gradient's products with x, and its own
    weights,  # out, unless APART: as in `open_gates`; and so are those not described
    moments,
    beta,
    gates,
    gate_means,
    gate_variances,
    gate_gammas,
    gate_betas,
    gate_grads,
    parts,
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    group,
    gate_eps,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    ALL: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
    BIG: tl.constexpr,
    NORM: tl.constexpr,
    RELU: tl.constexpr,
    WRITE: tl.constexpr,
    NESTED: tl.constexpr,
    WHOLE: tl.constexpr,  # a program has one sample, and takes all its cells at once
    APART: tl.constexpr,  # `open_gates` has a launch of its own
):
    L: tl.constexpr = len(DOWN)
    groups = tl.num_programs(0)
    g = groups - 1 - tl.program_id(0)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    first = g * group
    last = tl.minimum(first + group, N)
    Q: tl.constexpr = FH * FW
    centre = tl.zeros([1, 1, CT], tl.float32)
    if NORM:
        centre = tl.load(moments + c, in_c, 0.0)[None, None, :]
    if WHOLE:
        normals, opened = read_gates(
            gates, gate_means, gate_variances, gate_gammas, gate_betas, first, last, N, C, c, in_c,
            gate_eps, DOWN, ACROSS, ROWS_AT, REGIONS,
        )  # fmt: skip
        plain, crossed = _gather_cells(
            grad, out, x, behind, first * Q + tl.arange(0, Q), last * Q, c, in_c, centre, XN, XC,
            XH, XW, H, W, FH, FW, BW, STAGES, EVEN, RAGGED, BIG, NORM, RELU, WRITE,
        )  # fmt: skip
        added, products = through_gates(
            crossed, plain, normals, opened, cell_sums, weights, moments, beta, gates, gate_means,
            gate_variances, gate_gammas, gate_betas, gate_grads, first, last, N, C, c, in_c,
            gate_eps, FH, FW, DOWN, ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
        )  # fmt: skip
        keep_parts(parts, added, products, g, groups, C, c, in_c, L + 1)
    else:
        all_plain = tl.zeros([CT], tl.float32)
        all_crossed = tl.zeros([CT], tl.float32)
        for start in range(first * Q, last * Q, CELLS):
            cell = start + tl.arange(0, CELLS)
            plain, crossed = _gather_cells(
                grad, out, x, behind, cell, last * Q, c, in_c, centre, XN, XC, XH, XW, H, W, FH,
                FW, BW, STAGES, EVEN, RAGGED, BIG, NORM, RELU, WRITE,
            )  # fmt: skip
            if L > 0:
                real = (cell < last * Q)[:, None] & in_c[None, :]
                rows = cell[:, None] * C + c[None, :]
                tl.store(cell_sums + rows, crossed, real)
                if NORM:
                    tl.store(cell_sums + N * (Q * C) + rows, plain, real)
            else:
                all_plain += tl.sum(plain, 0)
                all_crossed += tl.sum(crossed, 0)
        if L == 0:
            if NORM:
                keep_parts(parts, (all_plain,), (all_crossed,), g, groups, C, c, in_c, 1)
        elif not APART:
            tl.debug_barrier()  # the rows just written are read back, by other threads
            added, products = through_kept_gates(
                cell_sums, weights, moments, beta, gates, gate_means, gate_variances, gate_gammas,
                gate_betas, gate_grads, first, last, N, C, c, in_c, gate_eps, FH, FW, DOWN,
                ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
            )  # fmt: skip
            keep_parts(parts, added, products, g, groups, C, c, in_c, L + 1)


@triton.jit
def _scatter_row(
    behind, out, x, grad_x, at, down, tall, wide, in_c, slope, level_at, centre, pull, XH, XW,
    WIDE: tl.constexpr, BW: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr,
    NORM: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    for across in tl.static_range(0, WIDE, BW):
        mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
        here = at + (down * XH + across * XW)
        value = tl.load(behind + here, mask, 0.0).to(tl.float32)
        if RELU:
            value = tl.where(tl.load(out + here, mask, 0.0) <= 0, 0.0, value)
        value = value * slope[:, None, :] + level_at[:, None, :]
        if NORM:
            value += (tl.load(x + here, mask, 0.0).to(tl.float32) - centre) * pull
        tl.store(grad_x + here, value, mask)


@triton.jit
def scatter(
    behind,
    out,
    x,
    grad_x,  # out
    weights,
    pool_grads,  # rows × C: gradients of each scale's means
    moments,  # 5 × C
    sums,  # 2 × C: of the gradient in front of BN, and of its products with x
    grad_gamma,  # out
    grad_beta,  # out
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    eps,
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
    NORM: tl.constexpr,
    RELU: tl.constexpr,  # `behind` is still in front of the relu
):
    L: tl.constexpr = len(DOWN)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    Q: tl.constexpr = FH * FW
    centre = tl.zeros([1, 1, CT], tl.float32)
    pull = centre
    if NORM:
        # du = z·g + e;  dx = a·(du − mean(du) − x̂·mean(du·x̂)), with x̂ = (x − mean)·rstd
        mean = tl.load(moments + c, in_c, 0.0)
        rstd = tl.rsqrt(tl.load(moments + C + c, in_c, 1.0) + eps)
        a = tl.load(moments + 2 * C + c, in_c, 0.0)
        added = tl.load(sums + c, in_c, 0.0)
        crossed = tl.load(sums + C + c, in_c, 0.0) * rstd
        if tl.program_id(0) == 0:
            tl.store(grad_beta + c, added, in_c)
            tl.store(grad_gamma + c, crossed, in_c)
        total = N * (H * W)
        pull = (-a * rstd * crossed / total)[None, None, :]
        push = a * added / total
        centre = mean[None, None, :]
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
            slope = tl.load(weights + cell[:, None] * C + c[None, :], real, 0.0).to(tl.float32)
            level_at = tl.zeros([CELLS, CT], tl.float32)
            for level in tl.static_range(L):
                region = region_of(cell % Q, FH, FW, DOWN[level], ACROSS[level])
                row = N * ROWS_AT[level] + n * (DOWN[level] * ACROSS[level]) + region
                share = 1.0 / area_of(region, DOWN[level], ACROSS[level], H, W)
                pool_grad = tl.load(pool_grads + row[:, None] * C + c[None, :], real, 0.0)
                level_at += pool_grad.to(tl.float32) * share[:, None]
        else:
            slope = tl.full([CELLS, CT], 1.0, tl.float32)
            level_at = tl.zeros([CELLS, CT], tl.float32)
        if NORM:
            slope = slope * a[None, :]
            level_at = level_at * a[None, :] - push[None, :]
        at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
        if UNROLL:
            for down in tl.static_range(TALL):
                _scatter_row(
                    behind, out, x, grad_x, at, down, tall, wide, in_c, slope, level_at, centre,
                    pull, XH, XW, WIDE, BW, EVEN, RAGGED, NORM, RELU,
                )  # fmt: skip
        else:
            for down in tl.range(TALL, num_stages=STAGES):
                _scatter_row(
                    behind, out, x, grad_x, at, down, tall, wide, in_c, slope, level_at, centre,
                    pull, XH, XW, WIDE, BW, EVEN, RAGGED, NORM, RELU,
                )  # fmt: skip
