"""The branches on rows, backward, all scales in one launch.  N batch, C channels, J hidden ones.

    settle           parts of sums   → BN's gradients: those of the gates, of x but for the pools'
    expand_backward  gates' gradient → that of the hidden layer, of the hidden layers' BN
    reduce_backward  that            → that of the pools
    slopes           a gradient      → that in front of a BN; both do it themselves if only once

Rows of hidden layers are JS numbers apart, as in ``branches``. In front of a BN the gradient is
s·grad + p·value + q with three numbers a channel (``lines_of``), made by whoever completes the sums
that they follow from.
"""

import triton
import triton.language as tl

from mssar.kernels.common import (
    area_of,
    both_sums_of,
    known,
    last_of,
    later_lines,
    lines_of,
    one_of,
    pointer_of,
    product,
    scale_of,
    sums_of,
)


@triton.jit
def settle(
    parts,  # 2 × (L + 1) × groups × C, from `gather`
    past_sums,  # out: 2 × C, of what comes past the pools
    gate_moments,  # 2 × L × C
    gate_gammas,
    gate_lines,  # out: 3 × L × C
    gamma_grads,  # out, a scale: those of the gates' BN
    beta_grads,
    N,
    C,
    groups,
    gate_eps,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    PAST: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < C
    of = parts + tl.program_id(1) * groups * C
    added, crossed = both_sums_of(of, of + groups * (L + 1) * C, C, c, in_c, groups, CHUNK)
    if PAST and tl.program_id(1) == L:
        tl.store(past_sums + c, added, in_c)
        tl.store(past_sums + C + c, crossed, in_c)
    for level in tl.static_range(L):
        if tl.program_id(1) == level:
            mean = tl.load(gate_moments + level * C + c, in_c, 0.0)
            variance = tl.load(gate_moments + (L + level) * C + c, in_c, 1.0)
            rows = N * (DOWN[level] * ACROSS[level])
            s, p, q = lines_of(
                c, in_c, gate_gammas[level], mean, variance, gate_eps, added, crossed, rows
            )
            tl.store(gate_lines + level * C + c, s, in_c)
            tl.store(gate_lines + (L + level) * C + c, p, in_c)
            tl.store(gate_lines + (2 * L + level) * C + c, q, in_c)
            tl.store(beta_grads[level] + c, added, in_c)
            tl.store(gamma_grads[level] + c, crossed, in_c)


@triton.jit
def _in_front(grads, values, at, mask, lines, scale, width, L, c, in_c):
    """The gradient in front of a BN."""
    s = tl.load(lines + scale * width + c, in_c, 0.0)
    p = tl.load(lines + (L + scale) * width + c, in_c, 0.0)
    q = tl.load(lines + (2 * L + scale) * width + c, in_c, 0.0)
    grad = tl.load(grads + at, mask, 0.0).to(tl.float32)
    value = tl.load(values + at, mask, 0.0).to(tl.float32)
    return grad * s[None, :] + (value * p[None, :] + q[None, :])


@triton.jit
def slopes(
    grads,  # rows × CS
    values,
    lines,  # 3 × L × CS
    made,  # out: rows × CS, the gradients in front of BN
    N,
    C,
    CS,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    tile = tl.program_id(0)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (r < rows)[:, None] & (c < CS)[None, :]
    at = (before + r)[:, None] * CS + c[None, :]
    grad = _in_front(grads, values, at, mask, lines, scale, CS, len(DOWN), c, c < C)
    tl.store(made + at, grad, mask)


@triton.jit
def expand_backward(
    gate_grads,
    gates,
    gate_lines,  # 3 × L × C
    hidden,
    hidden_moments,
    hidden_gammas,
    hidden_betas,
    weights,  # a scale: C × J, rows JW apart
    gate_slopes,  # rows × C, the gates' gradients in front of their BN; out, unless READY
    hidden_grads,  # out: rows × JS, in front of the relu
    hidden_parts,  # out: 2 × tiles × JS
    hidden_lines,  # out, unless LATER: 3 × L × JS
    gamma_grads,  # out, likewise, a scale: those of the hidden layers' BN
    beta_grads,
    counters,  # L × tiles of J
    N,
    C,
    J,
    JS,
    JW,
    hidden_eps,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    READY: tl.constexpr,
    LATER: tl.constexpr,  # whoever needs the sums adds up the parts
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    tile = tl.program_id(0)
    all_tiles = tl.num_programs(0)
    scale, first, tiles, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    in_j = j < J
    weight = pointer_of(weights, scale, L)
    # What is needed in the end is asked for now.
    mask_j = in_r[:, None] & (j < JS)[None, :]
    at_j = (before + r)[:, None] * JS + j[None, :]
    value = tl.load(hidden + at_j, mask_j, 0.0)
    gamma = pointer_of(hidden_gammas, scale, L)
    mean = tl.load(hidden_moments + scale * JS + j, in_j, 0.0)
    variance = tl.load(hidden_moments + (L + scale) * JS + j, in_j, 1.0)
    a = tl.load(gamma + j, in_j, 0.0).to(tl.float32)
    b = tl.load(pointer_of(hidden_betas, scale, L) + j, in_j, 0.0).to(tl.float32)
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        in_c = c < C
        mask = in_r[:, None] & in_c[None, :]
        at = (before + r)[:, None] * C + c[None, :]
        if READY:
            grad = tl.load(gate_slopes + at, mask, 0.0)
        else:
            grad = _in_front(gate_grads, gates, at, mask, gate_lines, scale, C, L, c, in_c)
            grad = tl.where(in_r[:, None], grad, 0.0)
            if tl.program_id(1) == 0:
                tl.store(gate_slopes + at, grad, mask)
        mask_w = in_c[:, None] & (j < JW)[None, :]
        w = tl.load(weight + c[:, None] * JW + j[None, :], mask_w, 0.0)
        acc = product(grad, w, acc, PRECISION)
    rstd = tl.rsqrt(variance + hidden_eps)
    normal = (value.to(tl.float32) - mean[None, :]) * rstd[None, :]
    valid = in_r[:, None] & in_j[None, :]
    normal = tl.where(valid, normal, 0.0)
    acc = tl.where(valid & ~(normal * a[None, :] + b[None, :] <= 0), acc, 0.0)
    tl.store(hidden_grads + at_j, acc, mask_j)
    in_js = j < JS  # zeros in what pads a row, so that parts are read in whole vectors
    tl.store(hidden_parts + tile * JS + j, tl.sum(acc, 0), in_js)
    tl.store(hidden_parts + (all_tiles + tile) * JS + j, tl.sum(acc * normal, 0), in_js)
    if LATER:
        return
    if last_of(counters + scale * tl.num_programs(1) + tl.program_id(1), tiles):
        ours = hidden_parts + first * JS
        added, crossed = both_sums_of(ours, ours + all_tiles * JS, JS, j, in_js, tiles, TILES)
        s, p, q = lines_of(j, in_j, gamma, mean, variance, hidden_eps, added, crossed, rows)
        tl.store(hidden_lines + scale * JS + j, s, in_j)
        tl.store(hidden_lines + (L + scale) * JS + j, p, in_j)
        tl.store(hidden_lines + (2 * L + scale) * JS + j, q, in_j)
        tl.store(pointer_of(beta_grads, scale, L) + j, added, in_j)
        tl.store(pointer_of(gamma_grads, scale, L) + j, crossed, in_j)


@triton.jit
def reduce_backward(
    hidden_grads,  # if READY, in front of BN
    hidden,
    hidden_lines,  # 3 × L × JS, from `expand_backward`; unless READY or LATER
    hidden_parts,  # with LATER: 2 × tiles × JS, likewise
    hidden_moments,
    hidden_gammas,
    gamma_grads,  # out, with LATER, a scale: those of the hidden layers' BN
    beta_grads,
    weights,  # a scale: J × C, rows CW apart
    normal,
    pool_grads,  # out: rows × C, gradients of each scale's means; with SUMS, of the pools' sums
    carried,  # with CARRY: rows × CS, gradients of the same sums from elsewhere, to be added
    moments,  # 5 × C, of the BN in front
    pool_parts,  # tiles × C, for it: sums of their products with the means
    past_sums,  # 2 × C, the same of what comes past the pools
    sums,  # out: 2 × C, both together
    counters,  # tiles of C
    N,
    C,
    CW,
    CS,
    J,
    JS,
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
    PARTS: tl.constexpr,
    READY: tl.constexpr,
    LATER: tl.constexpr,  # BK are all hidden channels
    BY: tl.constexpr,  # what C is a multiple of, and with SUMS CW and CS
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    C = known(C, BY)
    if SUMS:
        CW = C
        CS = known(CS, BY)
    tile = tl.program_id(0)
    all_tiles = tl.num_programs(0)
    scale, first, tiles, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    weight = pointer_of(weights, scale, L)
    mask_c = in_r[:, None] & in_c[None, :]
    at_c = (before + r)[:, None] * C + c[None, :]
    EARLY: tl.constexpr = READY or BC <= 32  # asked for now, needed in the end: takes registers
    if NORM:
        near = tl.load(moments + 3 * C + c, in_c, 0.0) - tl.load(moments + c, in_c, 0.0)
        if EARLY:
            mean = tl.load(normal + at_c, mask_c, 0.0)
    if SUMS:
        row = N * one_of(POOLS_AT, scale) + r
        if CARRY:
            others = tl.load(carried + row[:, None] * CS + c[None, :], mask_c, 0.0)
    acc = tl.zeros([BM, BC], tl.float32)
    if LATER:
        j = tl.arange(0, BK)
        in_j = j < J
        mask = in_r[:, None] & (j < JS)[None, :]
        at = (before + r)[:, None] * JS + j[None, :]
        grad = tl.load(hidden_grads + at, mask, 0.0).to(tl.float32)
        value = tl.load(hidden + at, mask, 0.0).to(tl.float32)
        w = tl.load(weight + j[:, None] * CW + c[None, :], in_j[:, None] & in_c[None, :], 0.0)
        added, crossed, s, p, q = later_lines(
            hidden_parts, all_tiles, hidden_moments, hidden_gammas, scale, first, tiles, rows, JS,
            j, in_j, hidden_eps, L, PARTS,
        )  # fmt: skip
        if (tile == first) & (tl.program_id(1) == 0):
            tl.store(pointer_of(beta_grads, scale, L) + j, added, in_j)
            tl.store(pointer_of(gamma_grads, scale, L) + j, crossed, in_j)
        grad = grad * s[None, :] + (value * p[None, :] + q[None, :])
        grad = tl.where(in_r[:, None] & in_j[None, :], grad, 0.0)
        acc = product(grad, w, acc, PRECISION)
    else:
        for start in range(0, J, BK):
            j = start + tl.arange(0, BK)
            in_j = j < J
            mask = in_r[:, None] & (j < JS)[None, :]
            at = (before + r)[:, None] * JS + j[None, :]
            if READY:
                grad = tl.load(hidden_grads + at, mask, 0.0)
            else:
                grad = _in_front(
                    hidden_grads, hidden, at, mask, hidden_lines, scale, JS, L, j, in_j
                )
                grad = tl.where(in_r[:, None] & in_j[None, :], grad, 0.0)
            w = tl.load(weight + j[:, None] * CW + c[None, :], in_j[:, None] & in_c[None, :], 0.0)
            acc = product(grad, w, acc, PRECISION)
    if SUMS:
        down = one_of(DOWN, scale)
        across = one_of(ACROSS, scale)
        acc = acc / area_of(r % (down * across), down, across, H, W)[:, None]
        if CARRY:
            acc += others
        tl.store(pool_grads + row[:, None] * C + c[None, :], acc, mask_c)
    else:
        tl.store(pool_grads + at_c, acc, mask_c)
    if NORM:
        if not EARLY:
            mean = tl.load(normal + at_c, mask_c, 0.0)
        away = mean.to(tl.float32) + near[None, :]
        # Their plain sums are zero: behind a BN in training, gradients have no mean.
        tl.store(pool_parts + tile * C + c, tl.sum(tl.where(mask_c, acc * away, 0.0), 0), in_c)
        if last_of(counters + tl.program_id(1), all_tiles):
            tl.store(sums + c, tl.load(past_sums + c, in_c, 0.0), in_c)
            past = tl.load(past_sums + C + c, in_c, 0.0)
            pooled = sums_of(pool_parts, C, c, in_c, all_tiles, TILES)
            tl.store(sums + C + c, pooled + past, in_c)
