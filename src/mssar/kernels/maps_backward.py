"""The passes over maps of a block's tail, backward.  N batch, C channels, H W map, FH FW cells.

gather      grad, out, x           → grad behind the relu, its sums a cell
open_gates  those, gates           → z, gradients of the gates; where they are too many for it
scatter     grad, x, pools' grads  → the gradient of x
"""

import triton
import triton.language as tl

from mssar.kernels.cells import (
    bounds_of,
    coarser,
    finer,
    gate_lines,
    inside,
    place_of,
    region_sums,
    weights_of,
)
from mssar.kernels.common import area_of, region_of


@triton.jit
def _read_gates(
    gates, gate_means, gate_variances, gate_gammas, gate_betas, first, last, N, C, c, in_c,
    gate_eps, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr,
    REGIONS: tl.constexpr,
):  # fmt: skip
    """A group's gates in front of their BN's slope and intercept, and behind their sigmoid."""
    normals = ()
    weights = ()
    for level in tl.static_range(len(DOWN)):
        KK = DOWN[level] * ACROSS[level]
        region = tl.arange(0, REGIONS[level])
        real = (region < (last - first) * KK)[:, None] & in_c[None, :]
        row = N * ROWS_AT[level] + first * KK + region
        gate = tl.load(gates + row[:, None] * C + c[None, :], real, 0.0).to(tl.float32)
        gate_mean = tl.load(gate_means[level] + c, in_c, 0.0)
        scale = tl.rsqrt(tl.load(gate_variances[level] + c, in_c, 1.0) + gate_eps)
        gate_gamma = tl.load(gate_gammas[level] + c, in_c, 0.0).to(tl.float32)
        gate_beta = tl.load(gate_betas[level] + c, in_c, 0.0).to(tl.float32)
        normal = (gate - gate_mean[None, :]) * scale[None, :]
        normals = normals + (normal,)
        weights = weights + (tl.sigmoid(normal * gate_gamma[None, :] + gate_beta[None, :]),)
    return normals, weights


@triton.jit
def _sum_regions(value, DOWN: tl.constexpr, ACROSS: tl.constexpr, NESTED: tl.constexpr):
    """The sum over regions; of one sample, across and down by themselves.

    What ``coarser`` leaves of a warp's lanes may lie apart, and Triton 3.6 adds up the wrong ones
    then. Along one axis they lie side by side.
    """
    if NESTED:
        value = tl.sum(tl.reshape(value, [DOWN, ACROSS, value.shape[1]]), 1)
    return tl.sum(value, 0)


@triton.jit
def _through_sigmoids(
    zs, normals, weights, gate_grads, first, last, N, C, c, in_c, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, REGIONS: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """From the gradients of z, a region, to those in front of each scale's sigmoid.

    Returns what their BN needs: a scale's sum, and that of their products with its output.
    """
    L: tl.constexpr = len(DOWN)
    added = ()
    crossed = ()
    for level in tl.static_range(L):
        KK = DOWN[level] * ACROSS[level]
        region = tl.arange(0, REGIONS[level])
        real = (region < (last - first) * KK)[:, None] & in_c[None, :]
        slope = zs[level] * weights[level] * ((1 - weights[level]) / L)
        slope = tl.where(real, slope, 0.0)
        row = N * ROWS_AT[level] + first * KK + region
        tl.store(gate_grads + row[:, None] * C + c[None, :], slope, real)
        products = slope * normals[level]
        added = added + (_sum_regions(slope, DOWN[level], ACROSS[level], NESTED),)
        crossed = crossed + (_sum_regions(products, DOWN[level], ACROSS[level], NESTED),)
    return added, crossed


@triton.jit
def _keep_parts(parts, added, crossed, g, groups, C, c, in_c, KINDS: tl.constexpr):
    for k in tl.static_range(len(added)):
        tl.store(parts + (k * groups + g) * C + c, added[k], in_c)
        tl.store(parts + ((KINDS + k) * groups + g) * C + c, crossed[k], in_c)


@triton.jit
def gate_gradients(
    dz, gates, gate_means, gate_variances, gate_gammas, gate_betas, gate_grads, parts, first, last,
    g, groups, N, C, c, in_c, gate_eps, FH: tl.constexpr, FW: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, MEMBERS: tl.constexpr, REGIONS: tl.constexpr,
    NESTED: tl.constexpr,
):  # fmt: skip
    """From the gradient of z, a cell, to that in front of each scale's sigmoid, for a group.

    ``dz`` is that of all cells of a sample if NESTED, else where it lies in memory.
    """
    normals, weights = _read_gates(
        gates, gate_means, gate_variances, gate_gammas, gate_betas, first, last, N, C, c, in_c,
        gate_eps, DOWN, ACROSS, ROWS_AT, REGIONS,
    )  # fmt: skip
    zs = ()
    for level in tl.static_range(len(DOWN)):
        if NESTED:
            zs = zs + (coarser(dz, FH, FW, DOWN[level], ACROSS[level]),)
        else:
            region = tl.arange(0, REGIONS[level])
            of = region_sums(
                dz, region, first, last, C, c, in_c, FH, FW, DOWN[level], ACROSS[level],
                MEMBERS[level],
            )  # fmt: skip
            zs = zs + (of,)
    added, crossed = _through_sigmoids(
        zs, normals, weights, gate_grads, first, last, N, C, c, in_c, DOWN, ACROSS, ROWS_AT,
        REGIONS, NESTED,
    )  # fmt: skip
    _keep_parts(parts, added, crossed, g, groups, C, c, in_c, len(DOWN) + 1)


@triton.jit
def _open_gates(
    crossed, plain, normals, opened, cell_sums, weights, moments, beta, gates, gate_means,
    gate_variances, gate_gammas, gate_betas, gate_grads, first, last, N, C, c, in_c, gate_eps,
    FH: tl.constexpr, FW: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr, MEMBERS: tl.constexpr, REGIONS: tl.constexpr, ALL: tl.constexpr,
    NORM: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """From samples' sums a cell to z and to the gates' gradients.

    Returns the sums that the gates' BN needs, and those that the BN in front does.
    """
    L: tl.constexpr = len(DOWN)
    Q: tl.constexpr = FH * FW
    cell = first * Q + tl.arange(0, ALL)
    real = (cell < last * Q)[:, None] & in_c[None, :]
    plain_sums = cell_sums + N * (Q * C)
    if NORM:
        a = tl.load(moments + 2 * C + c, in_c, 0.0)[None, :]
        b = tl.load(beta + c, in_c, 0.0).to(tl.float32)[None, :]
    if NESTED:
        z = tl.zeros([ALL, c.shape[0]], tl.float32)
        for level in tl.static_range(L):
            z += finer(opened[level], FH, FW, DOWN[level], ACROSS[level])
        z = z / L
    else:
        slopes, intercepts = gate_lines(
            c, in_c, gate_means, gate_variances, gate_gammas, gate_betas, gate_eps
        )
        z = weights_of(
            gates, slopes, intercepts, cell, cell // Q, N, c, C, real, FH, FW, DOWN, ACROSS,
            ROWS_AT,
        )  # fmt: skip
    tl.store(weights + cell[:, None] * C + c[None, :], z, real)
    dz = crossed
    if NORM:
        past = tl.sum(plain * z, 0)
        past_crossed = tl.sum(crossed * z, 0)
        dz = crossed * a + plain * b
    zs = ()
    for level in tl.static_range(L):
        if NESTED:
            zs = zs + (coarser(dz, FH, FW, DOWN[level], ACROSS[level]),)
        else:
            region = tl.arange(0, REGIONS[level])
            of = region_sums(
                cell_sums, region, first, last, C, c, in_c, FH, FW, DOWN[level], ACROSS[level],
                MEMBERS[level],
            )  # fmt: skip
            if NORM:
                of_plain = region_sums(
                    plain_sums, region, first, last, C, c, in_c, FH, FW, DOWN[level],
                    ACROSS[level], MEMBERS[level],
                )  # fmt: skip
                of = of * a + of_plain * b
            zs = zs + (of,)
    added, products = _through_sigmoids(
        zs, normals, opened, gate_grads, first, last, N, C, c, in_c, DOWN, ACROSS, ROWS_AT,
        REGIONS, NESTED,
    )  # fmt: skip
    if NORM:
        added = added + (past,)
        products = products + (past_crossed,)
    return added, products


@triton.jit
def _open_kept_gates(
    cell_sums, weights, moments, beta, gates, gate_means, gate_variances, gate_gammas, gate_betas,
    gate_grads, first, last, N, C, c, in_c, gate_eps, FH: tl.constexpr, FW: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr, ALL: tl.constexpr, NORM: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """The same, with sums that lie in memory."""
    Q: tl.constexpr = FH * FW
    cell = first * Q + tl.arange(0, ALL)
    real = (cell < last * Q)[:, None] & in_c[None, :]
    rows = cell[:, None] * C + c[None, :]
    crossed = tl.load(cell_sums + rows, real, 0.0)
    plain = crossed
    if NORM:
        plain = tl.load(cell_sums + N * (Q * C) + rows, real, 0.0)
    normals, opened = _read_gates(
        gates, gate_means, gate_variances, gate_gammas, gate_betas, first, last, N, C, c, in_c,
        gate_eps, DOWN, ACROSS, ROWS_AT, REGIONS,
    )  # fmt: skip
    return _open_gates(
        crossed, plain, normals, opened, cell_sums, weights, moments, beta, gates, gate_means,
        gate_variances, gate_gammas, gate_betas, gate_grads, first, last, N, C, c, in_c, gate_eps,
        FH, FW, DOWN, ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
    )  # fmt: skip


@triton.jit
def open_gates(
    cell_sums,  # 2 × rows of cells × C, from `gather`
    weights,  # out: rows of cells × C, z
    moments,  # 5 × C: BN's mean, variance and slope
    beta,
    gates,
    gate_means,  # a scale: C
    gate_variances,
    gate_gammas,
    gate_betas,
    gate_grads,  # out: rows × C, gradients in front of each scale's sigmoid
    parts,  # out: 2 × (L + 1) × groups × C, their sums, and those of their products with BN's
    # output; and of z · grad, with x
    N,
    C,
    group,
    gate_eps,
    FH: tl.constexpr,
    FW: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    MEMBERS: tl.constexpr,
    REGIONS: tl.constexpr,
    ALL: tl.constexpr,
    CT: tl.constexpr,
    NORM: tl.constexpr,
    NESTED: tl.constexpr,  # a program has one sample, and its regions hold equally many cells
):
    g = tl.program_id(0)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    added, crossed = _open_kept_gates(
        cell_sums, weights, moments, beta, gates, gate_means, gate_variances, gate_gammas,
        gate_betas, gate_grads, g * group, tl.minimum(g * group + group, N), N, C, c, c < C,
        gate_eps, FH, FW, DOWN, ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
    )  # fmt: skip
    _keep_parts(parts, added, crossed, g, tl.num_programs(0), C, c, c < C, len(DOWN) + 1)


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
        normals, opened = _read_gates(
            gates, gate_means, gate_variances, gate_gammas, gate_betas, first, last, N, C, c, in_c,
            gate_eps, DOWN, ACROSS, ROWS_AT, REGIONS,
        )  # fmt: skip
        plain, crossed = _gather_cells(
            grad, out, x, behind, first * Q + tl.arange(0, Q), last * Q, c, in_c, centre, XN, XC,
            XH, XW, H, W, FH, FW, BW, STAGES, EVEN, RAGGED, BIG, NORM, RELU, WRITE,
        )  # fmt: skip
        added, products = _open_gates(
            crossed, plain, normals, opened, cell_sums, weights, moments, beta, gates, gate_means,
            gate_variances, gate_gammas, gate_betas, gate_grads, first, last, N, C, c, in_c,
            gate_eps, FH, FW, DOWN, ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
        )  # fmt: skip
        _keep_parts(parts, added, products, g, groups, C, c, in_c, L + 1)
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
                _keep_parts(parts, (all_plain,), (all_crossed,), g, groups, C, c, in_c, 1)
        elif not APART:
            tl.debug_barrier()  # the rows just written are read back, by other threads
            added, products = _open_kept_gates(
                cell_sums, weights, moments, beta, gates, gate_means, gate_variances, gate_gammas,
                gate_betas, gate_grads, first, last, N, C, c, in_c, gate_eps, FH, FW, DOWN,
                ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
            )  # fmt: skip
            _keep_parts(parts, added, products, g, groups, C, c, in_c, L + 1)


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
