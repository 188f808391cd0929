"""From gradients of z, a cell, to those of the gates.  N batch, C channels, FH FW cells.

open_gates  sums over cells, gates → z, gradients of the gates; where `gather` has no room for it

The rest is what `gather` and a dense step's `carry_back` do for their own samples.
"""

import triton
import triton.language as tl

from mssar.kernels.cells import coarser, finer, gate_lines, region_sums, weights_of


@triton.jit
def read_gates(
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
def keep_parts(parts, added, crossed, g, groups, C, c, in_c, KINDS: tl.constexpr):
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
    normals, weights = read_gates(
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
    keep_parts(parts, added, crossed, g, groups, C, c, in_c, len(DOWN) + 1)


@triton.jit
def through_gates(
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
def through_kept_gates(
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
    normals, opened = read_gates(
        gates, gate_means, gate_variances, gate_gammas, gate_betas, first, last, N, C, c, in_c,
        gate_eps, DOWN, ACROSS, ROWS_AT, REGIONS,
    )  # fmt: skip
    return through_gates(
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
    added, crossed = through_kept_gates(
        cell_sums, weights, moments, beta, gates, gate_means, gate_variances, gate_gammas,
        gate_betas, gate_grads, g * group, tl.minimum(g * group + group, N), N, C, c, c < C,
        gate_eps, FH, FW, DOWN, ACROSS, ROWS_AT, MEMBERS, REGIONS, ALL, NORM, NESTED,
    )  # fmt: skip
    keep_parts(parts, added, crossed, g, tl.num_programs(0), C, c, c < C, len(DOWN) + 1)
