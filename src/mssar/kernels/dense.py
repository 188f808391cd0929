"""A dense step and its passes over new channels.  N batch, K new channels, C so far, H W map.

    carry         new, gates        → z · new, and the rows of C + K channels: sums over regions
    carry_back    grad, new, rows'  → the gradient of new, gradients of the gates
    spread        gradients of rows → that of the map whose sums they are

The main vector's sums are carried along as rows, so that a step passes over its new channels only:
the sums of z · new are z times those of new, cell by cell. K and strides are known at compile time:
with 12 channels only so can several numbers be read at a time.
"""

import triton
import triton.language as tl

from mssar.kernels.cells import (
    bounds_of,
    cells_in,
    coarser,
    gate_lines,
    inside,
    place_of,
    weights_of,
)
from mssar.kernels.common import region_of
from mssar.kernels.gates_backward import gate_gradients


@triton.jit
def _carry_cells(
    x, out, gates, slopes, intercepts, fine, new, cell, end, N, K, C, c, in_c, XN, XC, XH, XW,
    H: tl.constexpr, W: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, BIG: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """Weigh cells, and keep their sums of x; returns those of what comes out."""
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    n, top, left, tall, wide = bounds_of(cell, end, H, W, FH, FW)
    real = (cell < end)[:, None] & in_c[None, :]
    z = weights_of(gates, slopes, intercepts, cell, n, N, c, K, real, FH, FW, DOWN, ACROSS, ROWS_AT)
    at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
    added = tl.zeros([cell.shape[0], BW, c.shape[0]], tl.float32)
    for down in tl.range(TALL, num_stages=STAGES):
        for across in tl.static_range(0, WIDE, BW):
            mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
            here = at + (down * XH + across * XW)
            value = tl.load(x + here, mask, 0.0).to(tl.float32)
            added += value
            tl.store(out + here, value * z[:, None, :], mask)
    sums = tl.sum(added, 1)
    tl.store(fine + cell[:, None] * K + c[None, :], sums, real)
    carried = sums * z
    if CARRY:
        tl.store(new + cell[:, None] * (C + K), carried, real)
    return carried


@triton.jit
def carry(
    x,
    out,
    gates,  # rows × K
    gate_means,  # a scale: K
    gate_variances,
    gate_gammas,
    gate_betas,
    fine,  # out: rows of cells × K, sums of x
    rows_in,  # rows × C
    rows_out,  # out: rows × (C + K)
    N,
    K: tl.constexpr,
    C,
    XN: tl.constexpr,
    XC: tl.constexpr,
    XH: tl.constexpr,
    XW: tl.constexpr,
    group,
    gate_eps,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    LEVELS: tl.constexpr,
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,  # of new channels
    WIDTH: tl.constexpr,  # of a block of those that are copied
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
    BIG: tl.constexpr,
    CARRY: tl.constexpr,
    WHOLE: tl.constexpr,  # a program has one sample, and takes all its cells at once
):
    Q: tl.constexpr = FH * FW
    first = tl.program_id(0) * group
    last = tl.minimum(first + group, N)
    if tl.program_id(1) < BLOCKS:
        c = tl.program_id(1) * CT + tl.arange(0, CT)
        in_c = c < K
        slopes, intercepts = gate_lines(
            c, in_c, gate_means, gate_variances, gate_gammas, gate_betas, gate_eps
        )
        new = rows_out + (C + c)[None, :]
        if WHOLE:
            carried = _carry_cells(
                x, out, gates, slopes, intercepts, fine, new, first * Q + tl.arange(0, Q),
                last * Q, N, K, C, c, in_c, XN, XC, XH, XW, H, W, FH, FW, DOWN, ACROSS, ROWS_AT,
                BW, STAGES, EVEN, RAGGED, BIG, CARRY,
            )  # fmt: skip
        else:
            for start in range(first * Q, last * Q, CELLS):
                _carry_cells(
                    x, out, gates, slopes, intercepts, fine, new, start + tl.arange(0, CELLS),
                    last * Q, N, K, C, c, in_c, XN, XC, XH, XW, H, W, FH, FW, DOWN, ACROSS,
                    ROWS_AT, BW, STAGES, EVEN, RAGGED, BIG, CARRY,
                )  # fmt: skip
        if CARRY and len(LEVELS) > 0:
            if not WHOLE:
                tl.debug_barrier()  # the rows just written are read back, by other threads
            for level in tl.static_range(len(LEVELS)):
                KK = LEVELS[level][0] * LEVELS[level][1]
                region = tl.arange(0, REGIONS[level])
                held = region < (last - first) * KK
                if WHOLE:
                    value = coarser(carried, FH, FW, LEVELS[level][0], LEVELS[level][1])
                else:
                    cells, real_cells = cells_in(
                        region, first, FH, FW, LEVELS[level][0], LEVELS[level][1], MEMBERS[level]
                    )
                    mask = (real_cells & held[:, None])[:, :, None] & in_c[None, None, :]
                    here = rows_out + cells[:, :, None] * (C + K) + (C + c)[None, None, :]
                    value = tl.sum(tl.load(here, mask, 0.0), 1)
                row = N * LEVELS[level][2] + first * KK + region
                tl.store(new + row[:, None] * (C + K), value, held[:, None] & in_c[None, :])
    elif CARRY:
        to = (tl.program_id(1) - BLOCKS) * WIDTH + tl.arange(0, WIDTH)
        in_to = (to < C)[None, :]
        _copy_rows(rows_in, rows_out, first * Q, last * Q, to, in_to, C, C + K)
        for level in tl.static_range(len(LEVELS)):
            KK = LEVELS[level][0] * LEVELS[level][1]
            begin = N * LEVELS[level][2]
            _copy_rows(
                rows_in, rows_out, begin + first * KK, begin + last * KK, to, in_to, C, C + K
            )


@triton.jit
def _copy_rows(rows_in, rows_out, begin, end, to, in_to, C, CK):
    for start in range(begin, end, 16):
        row = (start + tl.arange(0, 16))[:, None]
        mask = (row < end) & in_to
        value = tl.load(rows_in + row * C + to[None, :], mask, 0.0)
        tl.store(rows_out + row * CK + to[None, :], value, mask)


@triton.jit
def _from_rows(
    grads, cell, n, N, c, C, CK, real, FH: tl.constexpr, FW: tl.constexpr, LEVELS: tl.constexpr
):
    """What every position of a cell gets from the gradients of the sums it is part of."""
    e = tl.load(grads + cell[:, None] * CK + (C + c)[None, :], real, 0.0)
    for level in tl.static_range(len(LEVELS)):
        region = region_of(cell % (FH * FW), FH, FW, LEVELS[level][0], LEVELS[level][1])
        row = N * LEVELS[level][2] + n * (LEVELS[level][0] * LEVELS[level][1]) + region
        e += tl.load(grads + row[:, None] * CK + (C + c)[None, :], real, 0.0)
    return e


@triton.jit
def _carry_back_cells(
    grad, x, grad_x, rows_grad, fine, gates, slopes, intercepts, cell, end, N, K, C, c, in_c, XN,
    XC, XH, XW, H: tl.constexpr, W: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, LEVELS: tl.constexpr,
    BW: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr,
    BIG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of cells of x; returns that of their weights."""
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    n, top, left, tall, wide = bounds_of(cell, end, H, W, FH, FW)
    real = (cell < end)[:, None] & in_c[None, :]
    sums = tl.load(fine + cell[:, None] * K + c[None, :], real, 0.0)
    z = weights_of(gates, slopes, intercepts, cell, n, N, c, K, real, FH, FW, DOWN, ACROSS, ROWS_AT)
    if ROWS:
        e = _from_rows(rows_grad, cell, n, N, c, C, C + K, real, FH, FW, LEVELS)
    else:
        e = tl.zeros([cell.shape[0], c.shape[0]], tl.float32)
    at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
    products = tl.zeros([cell.shape[0], BW, c.shape[0]], tl.float32)
    for down in tl.range(TALL, num_stages=STAGES):
        for across in tl.static_range(0, WIDE, BW):
            mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
            here = at + (down * XH + across * XW)
            steep = tl.load(grad + here, mask, 0.0).to(tl.float32)
            products += steep * tl.load(x + here, mask, 0.0).to(tl.float32)
            tl.store(grad_x + here, (steep + e[:, None, :]) * z[:, None, :], mask)
    return tl.sum(products, 1) + e * sums


@triton.jit
def carry_back(
    grad,
    x,
    grad_x,  # out
    rows_grad,  # with ROWS: rows × (C + K)
    fine,
    gates,
    gate_means,  # a scale: K
    gate_variances,
    gate_gammas,
    gate_betas,
    gate_grads,  # out: rows × K
    dz,  # out, unless WHOLE: rows of cells × K, the gradient of z
    parts,  # out: 2 × (L + 1) × groups × K
    N,
    K: tl.constexpr,
    C,
    XN: tl.constexpr,
    XC: tl.constexpr,
    XH: tl.constexpr,
    XW: tl.constexpr,
    group,
    gate_eps,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    LEVELS: tl.constexpr,
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
    BIG: tl.constexpr,
    ROWS: tl.constexpr,
    NESTED: tl.constexpr,  # a program has one sample, and its regions hold equally many cells
    WHOLE: tl.constexpr,  # and it takes all of them at once
):
    Q: tl.constexpr = FH * FW
    groups = tl.num_programs(0)
    g = groups - 1 - tl.program_id(0)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < K
    first = g * group
    last = tl.minimum(first + group, N)
    slopes, intercepts = gate_lines(
        c, in_c, gate_means, gate_variances, gate_gammas, gate_betas, gate_eps
    )
    if WHOLE:
        found = _carry_back_cells(
            grad, x, grad_x, rows_grad, fine, gates, slopes, intercepts,
            first * Q + tl.arange(0, Q), last * Q, N, K, C, c, in_c, XN, XC, XH, XW, H, W, FH, FW,
            DOWN, ACROSS, ROWS_AT, LEVELS, BW, STAGES, EVEN, RAGGED, BIG, ROWS,
        )  # fmt: skip
    else:
        for start in range(first * Q, last * Q, CELLS):
            cell = start + tl.arange(0, CELLS)
            some_dz = _carry_back_cells(
                grad, x, grad_x, rows_grad, fine, gates, slopes, intercepts, cell, last * Q, N, K,
                C, c, in_c, XN, XC, XH, XW, H, W, FH, FW, DOWN, ACROSS, ROWS_AT, LEVELS, BW,
                STAGES, EVEN, RAGGED, BIG, ROWS,
            )  # fmt: skip
            real = (cell < last * Q)[:, None] & in_c[None, :]
            tl.store(dz + cell[:, None] * K + c[None, :], some_dz, real)
        tl.debug_barrier()  # the rows just written are read back, by other threads
        if NESTED:
            rows = first * Q + tl.arange(0, Q)
            found = tl.load(dz + rows[:, None] * K + c[None, :], in_c[None, :], 0.0)
        else:
            found = dz
    gate_gradients(
        found, gates, gate_means, gate_variances, gate_gammas, gate_betas, gate_grads, parts,
        first, last, g, groups, N, K, c, in_c, gate_eps, FH, FW, DOWN, ACROSS, ROWS_AT, MEMBERS,
        REGIONS, NESTED,
    )  # fmt: skip


@triton.jit
def spread(
    grads,  # rows × C
    grad_x,  # out
    N,
    C,
    XN,
    XC,
    XH,
    XW,
    H: tl.constexpr,
    W: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    LEVELS: tl.constexpr,
    CELLS: tl.constexpr,
    BW: tl.constexpr,
    CT: tl.constexpr,
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
    BIG: tl.constexpr,
):
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    Q: tl.constexpr = FH * FW
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    n, top, left, tall, wide = bounds_of(cell, N * Q, H, W, FH, FW)
    real = (cell < N * Q)[:, None] & in_c[None, :]
    e = _from_rows(grads, cell, n, N, c, 0, C, real, FH, FW, LEVELS)[:, None, :]
    at = place_of(n, top, left, c, XN, XC, XH, XW, BW, BIG)
    TALL: tl.constexpr = (H + FH - 1) // FH
    WIDE: tl.constexpr = (W + FW - 1) // FW
    for down in range(TALL):
        for across in tl.static_range(0, WIDE, BW):
            mask = inside(tall, wide, down, across, in_c, BW, EVEN, RAGGED)
            value = e + tl.zeros([CELLS, BW, CT], tl.float32)
            tl.store(grad_x + at + (down * XH + across * XW), value, mask)
