"""The branches on rows, backward, all scales in one launch.  N batch, C channels, J hidden ones.

    expand_backward  gates' gradient → that of the hidden layer, of the gates' BN
    reduce_backward  that            → that of the pools, of the hidden layers' BN
    weights          both            → the gradients of Ω₁ and Ω₂

Rows of hidden layers are JS numbers apart, as in ``branches``.
"""

import triton
import triton.language as tl

from mssar.kernels.common import (
    affine,
    area_of,
    last_of,
    one_of,
    pointer_of,
    product,
    relu,
    scale_of,
    sums_of,
)


@triton.jit
def _through_norm(
    grads, values, at, mask, valid, moments, scale, width, L, gamma, added, crossed, c, in_c, eps
):
    """The gradient in front of a BN, from the one behind it and that one's two means.

    ``mask`` is what may be read, in whole vectors of numbers; ``valid`` what is meant.
    """
    mean = tl.load(moments + scale * width + c, in_c, 0.0)
    rstd = tl.rsqrt(tl.load(moments + (L + scale) * width + c, in_c, 1.0) + eps)
    slope = tl.load(gamma + c, in_c, 0.0).to(tl.float32) * rstd
    value = tl.load(values + at, mask, 0.0).to(tl.float32)
    normal = (value - mean[None, :]) * rstd[None, :]
    grad = tl.load(grads + at, mask, 0.0).to(tl.float32)
    grad = (grad - added[None, :] - normal * crossed[None, :]) * slope[None, :]
    return tl.where(valid, grad, 0.0)


@triton.jit
def _hidden(
    hidden, moments, gammas, betas, scale, at, mask, valid, j, in_j, JS, L: tl.constexpr, eps
):
    """The hidden layer in front of BN's slope and intercept, and those two."""
    mean = tl.load(moments + scale * JS + j, in_j, 0.0)
    rstd = tl.rsqrt(tl.load(moments + (L + scale) * JS + j, in_j, 1.0) + eps)
    normal = (tl.load(hidden + at, mask, 0.0) - mean[None, :]) * rstd[None, :]
    a = tl.load(pointer_of(gammas, scale, L) + j, in_j, 0.0).to(tl.float32)
    b = tl.load(pointer_of(betas, scale, L) + j, in_j, 0.0).to(tl.float32)
    return tl.where(valid, normal, 0.0), a, b


@triton.jit
def _expand_backward_tile(
    tile, gate_grads, gates, gate_moments, parts, hidden, hidden_moments, hidden_gammas,
    hidden_betas, gate_gammas, weights, gate_slopes, hidden_grads, hidden_parts, hidden_sums,
    gamma_grads, beta_grads, counters, N, C, J, JS, JW, all_tiles, groups, hidden_eps, gate_eps,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, BM: tl.constexpr,
    BJ: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    L: tl.constexpr = len(DOWN)
    scale, first, tiles, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    in_j = j < J
    weight = pointer_of(weights, scale, L)
    gamma = pointer_of(gate_gammas, scale, L)
    gamma_grad = pointer_of(gamma_grads, scale, L)
    beta_grad = pointer_of(beta_grads, scale, L)
    of = parts + scale * C
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        in_c = c < C
        added = sums_of(of, (L + 1) * C, c, in_c, groups, CHUNK)
        crossed = sums_of(of + groups * (L + 1) * C, (L + 1) * C, c, in_c, groups, CHUNK)
        mask = in_r[:, None] & in_c[None, :]
        at = (before + r)[:, None] * C + c[None, :]
        grad = _through_norm(
            gate_grads, gates, at, mask, mask, gate_moments, scale, C, L, gamma, added / rows,
            crossed / rows, c, in_c, gate_eps,
        )  # fmt: skip
        mask_w = in_c[:, None] & (j < JW)[None, :]
        w = tl.load(weight + c[:, None] * JW + j[None, :], mask_w, 0.0)
        w = tl.where(in_j[None, :], w, 0.0)
        acc = product(grad, w, acc, PRECISION)
        if tl.program_id(1) == 0:
            tl.store(gate_slopes + at, grad, mask)
            if tile == first:
                tl.store(beta_grad + c, added, in_c)
                tl.store(gamma_grad + c, crossed, in_c)
    mask_j = in_r[:, None] & (j < JS)[None, :]
    valid = in_r[:, None] & in_j[None, :]
    at_j = (before + r)[:, None] * JS + j[None, :]
    normal, a, b = _hidden(
        hidden, hidden_moments, hidden_gammas, hidden_betas, scale, at_j, mask_j, valid, j, in_j,
        JS, L, hidden_eps,
    )  # fmt: skip
    acc = tl.where(valid & ~(normal * a[None, :] + b[None, :] <= 0), acc, 0.0)
    tl.store(hidden_grads + at_j, acc, mask_j)
    tl.store(hidden_parts + tile * JS + j, tl.sum(acc, 0), in_j)
    tl.store(hidden_parts + (all_tiles + tile) * JS + j, tl.sum(acc * normal, 0), in_j)
    if last_of(counters + scale * tl.num_programs(1) + tl.program_id(1), tiles):
        ours = hidden_parts + first * JS
        all_j = sums_of(ours, JS, j, in_j, tiles, TILES)
        all_crossed = sums_of(ours + all_tiles * JS, JS, j, in_j, tiles, TILES)
        tl.store(hidden_sums + scale * JS + j, all_j, in_j)
        tl.store(hidden_sums + (L + scale) * JS + j, all_crossed, in_j)


@triton.jit
def expand_backward(
    gate_grads,
    gates,
    gate_moments,
    parts,  # 2 × groups × (L + 1) × C, from `gather`
    hidden,
    hidden_moments,
    hidden_gammas,
    hidden_betas,
    gate_gammas,
    weights,  # a scale: C × J, rows JW apart
    gate_slopes,  # out: rows × C, the gates' gradients in front of their BN
    hidden_grads,  # out: rows × JS, in front of the relu
    hidden_parts,  # 2 × tiles × JS
    hidden_sums,  # out: 2 × L × JS
    past_sums,  # out: 2 × C, of what comes past the pools
    gamma_grads,  # out, a scale
    beta_grads,  # out, a scale
    counters,  # L × tiles of J
    N,
    C,
    J,
    JS,
    JW,
    all_tiles,
    groups,
    hidden_eps,
    gate_eps,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    L: tl.constexpr = len(DOWN)
    if tile < all_tiles:
        _expand_backward_tile(
            tile, gate_grads, gates, gate_moments, parts, hidden, hidden_moments, hidden_gammas,
            hidden_betas, gate_gammas, weights, gate_slopes, hidden_grads, hidden_parts,
            hidden_sums, gamma_grads, beta_grads, counters, N, C, J, JS, JW, all_tiles, groups,
            hidden_eps, gate_eps, DOWN, ACROSS, ROWS_AT, BM, BJ, BK, CHUNK, TILES, PRECISION,
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        c = (tile - all_tiles) * BK + tl.arange(0, BK)
        of = parts + L * C
        tl.store(past_sums + c, sums_of(of, (L + 1) * C, c, c < C, groups, CHUNK), c < C)
        of += groups * (L + 1) * C
        tl.store(past_sums + C + c, sums_of(of, (L + 1) * C, c, c < C, groups, CHUNK), c < C)


@triton.jit
def reduce_backward(
    hidden_grads,
    hidden,
    hidden_moments,
    hidden_sums,  # 2 × L × JS, from `expand_backward`
    hidden_gammas,
    weights,  # a scale: J × C
    normal,
    moments,
    hidden_slopes,  # out: rows × JS, the hidden layer's gradients in front of its BN
    pool_grads,  # out: rows × C, gradients of each scale's means; with SUMS, of the pools' sums
    carried,  # with CARRY: rows × CW, gradients of the same sums from elsewhere, to be added
    pool_parts,  # tiles × C, for the BN in front: sums of their products with the means
    past_sums,  # 2 × C, the same of what comes past the pools
    sums,  # out: 2 × C, both together
    gamma_grads,  # out, a scale
    beta_grads,  # out, a scale
    counters,  # tiles of C
    N,
    C,
    J,
    JS,
    CW,
    eps,
    hidden_eps,
    H: tl.constexpr,
    W: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    POOLS_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    NORM: tl.constexpr,
    SUMS: tl.constexpr,
    CARRY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    tile = tl.program_id(0)
    all_tiles = tl.num_programs(0)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    weight = pointer_of(weights, scale, L)
    gamma = pointer_of(hidden_gammas, scale, L)
    gamma_grad = pointer_of(gamma_grads, scale, L)
    beta_grad = pointer_of(beta_grads, scale, L)
    acc = tl.zeros([BM, BC], tl.float32)
    for start in range(0, J, BK):
        j = start + tl.arange(0, BK)
        in_j = j < J
        added = tl.load(hidden_sums + scale * JS + j, in_j, 0.0)
        crossed = tl.load(hidden_sums + (L + scale) * JS + j, in_j, 0.0)
        mask = in_r[:, None] & (j < JS)[None, :]
        valid = in_r[:, None] & in_j[None, :]
        at = (before + r)[:, None] * JS + j[None, :]
        grad = _through_norm(
            hidden_grads, hidden, at, mask, valid, hidden_moments, scale, JS, L, gamma,
            added / rows, crossed / rows, j, in_j, hidden_eps,
        )  # fmt: skip
        w = tl.load(weight + j[:, None] * C + c[None, :], in_j[:, None] & in_c[None, :], 0.0)
        acc = product(grad, w, acc, PRECISION)
        if tl.program_id(1) == 0:
            tl.store(hidden_slopes + at, grad, mask)  # zeros in what pads a row
            if tile == first:
                tl.store(beta_grad + j, added, in_j)
                tl.store(gamma_grad + j, crossed, in_j)
    mask_c = in_r[:, None] & in_c[None, :]
    if SUMS:
        down = one_of(DOWN, scale)
        across = one_of(ACROSS, scale)
        row = N * one_of(POOLS_AT, scale) + r
        acc = acc / area_of(r % (down * across), down, across, H, W)[:, None]
        if CARRY:
            acc += tl.load(carried + row[:, None] * CW + c[None, :], mask_c, 0.0)
        tl.store(pool_grads + row[:, None] * C + c[None, :], acc, mask_c)
    else:
        tl.store(pool_grads + (before + r)[:, None] * C + c[None, :], acc, mask_c)
    if NORM:
        at_c = (before + r)[:, None] * C + c[None, :]
        spread = tl.sqrt(tl.load(moments + C + c, in_c, 1.0) + eps)
        away = tl.load(normal + at_c, mask_c, 0.0).to(tl.float32) * spread[None, :]
        # Their plain sums are zero: behind a BN in training, gradients have no mean.
        products = tl.sum(tl.where(mask_c, acc * away, 0.0), 0)
        tl.store(pool_parts + tile * C + c, products, in_c)
        if last_of(counters + tl.program_id(1), all_tiles):
            crossed_c = sums_of(pool_parts, C, c, in_c, all_tiles, TILES)
            crossed_c += tl.load(past_sums + C + c, in_c, 0.0)
            tl.store(sums + c, tl.load(past_sums + c, in_c, 0.0), in_c)
            tl.store(sums + C + c, crossed_c, in_c)


@triton.jit
def _add_up(work, counter, split, splits, acc, at, mask, target, target_at, size):
    """Add the parts of a weight's gradient: the last program of them to come here does it."""
    tl.store(work + split.to(tl.int64) * size + at, acc, mask)
    if last_of(counter, splits):
        total = tl.zeros(acc.shape, tl.float32)
        for start in range(0, splits, 8):
            read = ()
            for ahead in tl.static_range(8):
                here = work + tl.minimum(start + ahead, splits - 1).to(tl.int64) * size + at
                read = read + (tl.load(here, mask, 0.0, cache_modifier=".cg"),)
            for ahead in tl.static_range(8):
                total += tl.where(start + ahead < splits, read[ahead], 0.0)
        tl.store(target + target_at, total, mask)


@triton.jit
def _expand_weights(
    pid, gate_slopes, hidden, hidden_moments, hidden_gammas, hidden_betas, grads, work, counters,
    N, C, J, JS, hidden_eps, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr,
    SPAN: tl.constexpr, WC: tl.constexpr, WJ: tl.constexpr, WR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Ω₂'s gradient, over a part of the rows."""
    L: tl.constexpr = len(DOWN)
    c_tiles = (C + WC - 1) // WC
    j_tiles = (J + WJ - 1) // WJ
    tile = pid // (c_tiles * j_tiles)
    block = pid % (c_tiles * j_tiles)
    scale, first, splits, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, SPAN)
    c = block // j_tiles * WC + tl.arange(0, WC)
    in_c = c < C
    j = block % j_tiles * WJ + tl.arange(0, WJ)
    in_j = j < J
    mean = tl.load(hidden_moments + scale * JS + j, in_j, 0.0)
    variance = tl.load(hidden_moments + (L + scale) * JS + j, in_j, 1.0)
    gamma = pointer_of(hidden_gammas, scale, L)
    a, b = affine(j, in_j, gamma, pointer_of(hidden_betas, scale, L), mean, variance, hidden_eps)
    acc = tl.zeros([WC, WJ], tl.float32)
    begin = (tile - first) * SPAN
    for start in range(begin, tl.minimum(begin + SPAN, rows), WR):
        r = start + tl.arange(0, WR)
        in_r = r < rows
        mask = in_r[:, None] & in_c[None, :]
        grad = tl.load(gate_slopes + (before + r)[:, None] * C + c[None, :], mask, 0.0)
        at = (before + r)[:, None] * JS + j[None, :]
        h = tl.load(hidden + at, in_r[:, None] & (j < JS)[None, :], 0.0)
        h = relu(h * a[None, :] + b[None, :])
        h = tl.where(in_r[:, None] & in_j[None, :], h, 0.0)
        acc = product(tl.trans(grad), h, acc, PRECISION)
    at = c[:, None] * JS + j[None, :]
    mask = in_c[:, None] & in_j[None, :]
    counter = counters + scale * (c_tiles * j_tiles) + block
    _add_up(
        work + first.to(tl.int64) * C * JS, counter, tile - first, splits, acc, at, mask,
        pointer_of(grads, scale, L), c[:, None] * J + j[None, :], C * JS,
    )  # fmt: skip


@triton.jit
def _reduce_weights(
    pid, hidden_slopes, normal, gamma, grads, work, counters, N, C, J, JS, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, SPAN: tl.constexpr, WC: tl.constexpr,
    WJ: tl.constexpr, WR: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Ω₁'s gradient, over a part of the rows.

    The intercept of the BN in front has no part in it: the gradients' mean is zero.
    """
    L: tl.constexpr = len(DOWN)
    c_tiles = (C + WC - 1) // WC
    j_tiles = (J + WJ - 1) // WJ
    tile = pid // (c_tiles * j_tiles)
    block = pid % (c_tiles * j_tiles)
    scale, first, splits, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, SPAN)
    c = block // j_tiles * WC + tl.arange(0, WC)
    in_c = c < C
    j = block % j_tiles * WJ + tl.arange(0, WJ)
    in_j = j < J
    acc = tl.zeros([WJ, WC], tl.float32)
    begin = (tile - first) * SPAN
    for start in range(begin, tl.minimum(begin + SPAN, rows), WR):
        r = start + tl.arange(0, WR)
        in_r = (r < rows)[:, None]
        at = (before + r)[:, None]
        grad = tl.load(hidden_slopes + at * JS + j[None, :], in_r & (j < JS)[None, :], 0.0)
        pool = tl.load(normal + at * C + c[None, :], in_r & in_c[None, :], 0.0)
        acc = product(tl.trans(grad), pool, acc, PRECISION)
    if NORM:
        acc = acc * tl.load(gamma + c, in_c, 0.0).to(tl.float32)[None, :]
    at = j[:, None] * C + c[None, :]
    mask = in_j[:, None] & in_c[None, :]
    counter = counters + scale * (c_tiles * j_tiles) + block
    _add_up(
        work + first.to(tl.int64) * J * C, counter, tile - first, splits, acc, at, mask,
        pointer_of(grads, scale, L), at, J * C,
    )  # fmt: skip


@triton.jit
def weights(
    gate_slopes,
    hidden,
    hidden_moments,
    hidden_gammas,
    hidden_betas,
    hidden_slopes,
    normal,
    gamma,
    expand_grads,  # out, a scale: C × J
    reduce_grads,  # out, a scale: J × C
    expand_work,  # splits × C·JS
    reduce_work,  # splits × CX·JS
    counters,  # a tile of all scales' weights: zeros
    N,
    C,
    CX,  # channels of the pools
    J,
    JS,
    hidden_eps,
    programs,  # for Ω₂
    tiles,  # of Ω₂, of all scales
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    SPAN: tl.constexpr,
    WC: tl.constexpr,
    WX: tl.constexpr,
    WJ: tl.constexpr,
    WR: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < programs:
        _expand_weights(
            pid, gate_slopes, hidden, hidden_moments, hidden_gammas, hidden_betas, expand_grads,
            expand_work, counters, N, C, J, JS, hidden_eps, DOWN, ACROSS, ROWS_AT, SPAN, WC, WJ,
            WR, PRECISION,
        )  # fmt: skip
    else:
        _reduce_weights(
            pid - programs, hidden_slopes, normal, gamma, reduce_grads,
            reduce_work, counters + tiles, N, CX, J, JS, DOWN, ACROSS,
            ROWS_AT, SPAN, WX, WJ, WR, NORM, PRECISION,
        )  # fmt: skip
