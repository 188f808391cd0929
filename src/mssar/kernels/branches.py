"""The branches on rows, all scales in one launch.  N batch, C channels, J hidden channels.

    reduce    means         → Ω₁ · mean, statistics
    activate  Ω₁ · mean     → relu(BN(·)); `expand` does that itself where it is done only once
    expand    that          → Ω₂ · that, statistics: the gates, but for BN and sigmoid
    evaluate  means         → both in one go, where statistics are given

The BN in front is a slope and an intercept a channel. The slope goes into Ω₁. The intercept would
add the same to all rows, which the hidden layer's BN takes off again, so it is left out, and rows
may lack any other number a channel: there is nothing left to do but multiply.

BN needs the statistics of all rows: hence the cut into launches. Rows of hidden layers are JS
numbers apart, so that they begin at addresses that can be read several numbers at a time. Whoever
completes a BN's statistics also makes its slope and intercept, a and b, of them: the products'
inner loops read a number for each of a thread's columns, and every vector of those costs time.
"""

import triton
import triton.language as tl

from mssar.kernels.common import (
    affine,
    area_of,
    known,
    last_of,
    moments_of,
    one_of,
    pointer_of,
    product,
    relu,
    scale_of,
)


@triton.jit
def _keep_parts(parts, all_tiles, tile, width, j, in_j, acc, valid, rows):
    """A tile's sums and its squares about its own mean."""
    added = tl.sum(tl.where(valid, acc, 0.0), 0)
    away = tl.where(valid, acc - (added / rows)[None, :], 0.0)
    tl.store(parts + tile * width + j, added, in_j)
    tl.store(parts + (all_tiles + tile) * width + j, tl.sum(away * away, 0), in_j)


@triton.jit
def _given_line(scale, j, in_j, means, variances, gammas, betas, eps):
    """BN as slope and intercept, from given statistics."""
    L: tl.constexpr = len(means)
    mean = tl.load(pointer_of(means, scale, L) + j, in_j, 0.0).to(tl.float32)
    variance = tl.load(pointer_of(variances, scale, L) + j, in_j, 1.0).to(tl.float32)
    gamma = pointer_of(gammas, scale, L)
    return affine(j, in_j, gamma, pointer_of(betas, scale, L), mean, variance, eps)


@triton.jit
def reduce(
    pools,  # if READY: rows × C, the scales' means; else sums, rows as POOLS_AT says
    weights,  # a scale: J × C; if READY, rows CW apart
    means,  # a scale: J; nothing where the batch's statistics are taken
    variances,
    gammas,
    betas,
    normal,  # out, unless READY: rows × C, the means
    hidden,  # out: rows × JS; with given statistics, behind BN and relu
    hidden_parts,  # out: 2 × tiles × JS
    hidden_moments,  # out, unless LATER: 2 × L × JS
    hidden_lines,  # out, likewise: 2 × L × JS, a and b
    counters,  # L × tiles of J; with LATER, out: as many zeros as CLEARED says, for `expand`
    N,
    C,
    CW,
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
    BJ: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    READY: tl.constexpr,
    LATER: tl.constexpr,  # `expand` adds up the parts
    CLEARED: tl.constexpr,
    BY: tl.constexpr,  # what C is a multiple of
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    C = known(C, BY)
    if not READY:
        CW = C
    tile = tl.program_id(0)
    scale, first, tiles, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    weight = pointer_of(weights, scale, L)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    if READY:
        pooled = pools + (before + r)[:, None] * C
    else:
        down = one_of(DOWN, scale)
        across = one_of(ACROSS, scale)
        share = 1.0 / area_of(r % (down * across), down, across, H, W)
        pooled = pools + (N * one_of(POOLS_AT, scale) + r)[:, None] * C
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    in_j = j < J
    gamma = pointer_of(gammas, scale, L)
    beta = pointer_of(betas, scale, L)
    if len(means) > 0:
        slope, intercept = _given_line(scale, j, in_j, means, variances, gammas, betas, hidden_eps)
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        in_c = c < C
        mask = in_r[:, None] & in_c[None, :]
        pool = tl.load(pooled + c[None, :], mask, 0.0)
        in_w = c < CW if READY else in_c
        w = tl.load(weight + j[None, :] * CW + c[:, None], in_j[None, :] & in_w[:, None], 0.0)
        if not READY:
            pool *= share[:, None]
            if tl.program_id(1) == 0:
                tl.store(normal + (before + r)[:, None] * C + c[None, :], pool, mask)
        acc = product(pool, w, acc, PRECISION)
    mask = in_r[:, None] & in_j[None, :]
    in_js = j < JS  # zeros in what pads a row
    if len(means) > 0:
        acc = relu(acc * slope[None, :] + intercept[None, :])
    acc = tl.where(in_j[None, :], acc, 0.0)  # also where a row has an infinity
    tl.store(hidden + (before + r)[:, None] * JS + j[None, :], acc, in_r[:, None] & in_js[None, :])
    if len(means) == 0:
        held = tl.minimum(BM, rows - (tile - first) * BM).to(tl.float32)
        # Zeros in what pads a row, so that parts are read in whole vectors.
        _keep_parts(hidden_parts, tl.num_programs(0), tile, JS, j, in_js, acc, mask, held)
        if LATER:
            if (CLEARED > 0) & (tile == 0) & (tl.program_id(1) == 0):
                for start in range(0, CLEARED, 128):
                    i = start + tl.arange(0, 128)
                    tl.store(counters + i, tl.zeros([128], tl.int32), i < CLEARED)
            return
        if last_of(counters + scale * tl.num_programs(1) + tl.program_id(1), tiles):
            of = hidden_parts + first * JS
            between = tl.num_programs(0) * JS
            mean, variance = moments_of(of, of + between, JS, j, in_js, tiles, BM, rows, TILES)
            tl.store(hidden_moments + scale * JS + j, mean, in_js)
            tl.store(hidden_moments + (L + scale) * JS + j, variance, in_js)
            a, b = affine(j, in_j, gamma, beta, mean, variance, hidden_eps)
            tl.store(hidden_lines + scale * JS + j, a, in_js)
            tl.store(hidden_lines + (L + scale) * JS + j, b, in_js)


@triton.jit
def activate(
    hidden,  # rows × JS
    hidden_lines,  # 2 × L × JS
    active,  # out: rows × JS, behind BN and relu
    N,
    JS,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
):
    tile = tl.program_id(0)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    in_js = j < JS
    a = tl.load(hidden_lines + scale * JS + j, in_js, 0.0)
    b = tl.load(hidden_lines + (len(DOWN) + scale) * JS + j, in_js, 0.0)
    at = (before + r)[:, None] * JS + j[None, :]
    mask = (r < rows)[:, None] & in_js[None, :]
    h = tl.load(hidden + at, mask, 0.0).to(tl.float32)
    tl.store(active + at, relu(h * a[None, :] + b[None, :]), mask)


@triton.jit
def expand(
    hidden,
    hidden_lines,  # 2 × L × JS, unless READY or LATER
    hidden_parts,  # with LATER: 2 × tiles × JS
    hidden_moments,  # out, with LATER: 2 × L × JS
    hidden_gammas,
    hidden_betas,
    weights,  # a scale: C × J, rows JW apart
    means,  # a scale: C; nothing where the batch's statistics are taken
    variances,
    gammas,
    betas,
    gates,  # out: rows × C; with given statistics, behind BN and sigmoid
    gate_parts,  # 2 × tiles × C
    gate_moments,  # out: 2 × L × C
    counters,  # L × tiles of C
    N,
    C,
    J,
    JS,
    JW,
    hidden_eps,
    gate_eps,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    READY: tl.constexpr,  # hidden layers are behind BN and relu
    LATER: tl.constexpr,  # their statistics are left to be added up; BK are all their channels
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    tile = tl.program_id(0)
    all_tiles = tl.num_programs(0)
    scale, first, tiles, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    weight = pointer_of(weights, scale, L)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    if len(means) > 0:
        slope, intercept = _given_line(scale, c, in_c, means, variances, gammas, betas, gate_eps)
    acc = tl.zeros([BM, BC], tl.float32)
    if LATER:
        j = tl.arange(0, BK)
        in_j = j < J
        # Asked for now, needed when the statistics are there.
        mask = in_r[:, None] & (j < JS)[None, :]
        h = tl.load(hidden + (before + r)[:, None] * JS + j[None, :], mask, 0.0)
        w = tl.load(weight + c[None, :] * JW + j[:, None], in_c[None, :] & (j < JW)[:, None], 0.0)
        gamma = pointer_of(hidden_gammas, scale, L)
        beta = pointer_of(hidden_betas, scale, L)
        of = hidden_parts + first * JS
        mean, variance = moments_of(of, of + all_tiles * JS, JS, j, j < JS, tiles, BM, rows, PARTS)
        a, b = affine(j, in_j, gamma, beta, mean, variance, hidden_eps)
        if (tile == first) & (tl.program_id(1) == 0):
            tl.store(hidden_moments + scale * JS + j, mean, j < JS)
            tl.store(hidden_moments + (L + scale) * JS + j, variance, j < JS)
        h = relu(h.to(tl.float32) * a[None, :] + b[None, :])
        h = tl.where(in_r[:, None] & in_j[None, :], h, 0.0)
        acc = product(h, w, acc, PRECISION)
    else:
        for start in range(0, J, BK):
            j = start + tl.arange(0, BK)
            in_j = j < J
            mask = in_r[:, None] & (j < JS)[None, :]
            h = tl.load(hidden + (before + r)[:, None] * JS + j[None, :], mask, 0.0)
            in_w = in_c[None, :] & (j < JW)[:, None]
            w = tl.load(weight + c[None, :] * JW + j[:, None], in_w, 0.0)
            if not READY:
                a = tl.load(hidden_lines + scale * JS + j, in_j, 0.0)
                b = tl.load(hidden_lines + (L + scale) * JS + j, in_j, 0.0)
                h = relu(h.to(tl.float32) * a[None, :] + b[None, :])
                h = tl.where(in_r[:, None] & in_j[None, :], h, 0.0)
            acc = product(h, w, acc, PRECISION)
    mask = in_r[:, None] & in_c[None, :]
    if len(means) > 0:
        acc = tl.sigmoid(acc * slope[None, :] + intercept[None, :])
    tl.store(gates + (before + r)[:, None] * C + c[None, :], acc, mask)
    if len(means) == 0:
        held = tl.minimum(BM, rows - (tile - first) * BM).to(tl.float32)
        _keep_parts(gate_parts, all_tiles, tile, C, c, in_c, acc, mask, held)
        if last_of(counters + scale * tl.num_programs(1) + tl.program_id(1), tiles):
            of = gate_parts + first * C
            mean_c, variance_c = moments_of(
                of, of + all_tiles * C, C, c, in_c, tiles, BM, rows, TILES
            )
            tl.store(gate_moments + scale * C + c, mean_c, in_c)
            tl.store(gate_moments + (L + scale) * C + c, variance_c, in_c)


@triton.jit
def evaluate(
    pools,  # if READY: rows × CX, the scales' means; else sums, rows as POOLS_AT says
    reduces,
    hidden_means,
    hidden_variances,
    hidden_gammas,
    hidden_betas,
    expands,  # a scale: C × J
    gate_means,  # a scale: C; nothing where gates are to be left in front of their BN
    gate_variances,
    gate_gammas,
    gate_betas,
    gates,  # out: rows × C
    N,
    C,
    CX,  # channels of the pools
    J,
    hidden_eps,
    gate_eps,
    H: tl.constexpr,
    W: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    POOLS_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,  # all hidden channels
    BK: tl.constexpr,
    BC: tl.constexpr,
    READY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    tile = tl.program_id(0)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    weight = pointer_of(reduces, scale, L)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    if READY:
        pooled = pools + (before + r)[:, None] * CX
    else:
        down = one_of(DOWN, scale)
        across = one_of(ACROSS, scale)
        share = 1.0 / area_of(r % (down * across), down, across, H, W)
        pooled = pools + (N * one_of(POOLS_AT, scale) + r)[:, None] * CX
    j = tl.arange(0, BJ)
    in_j = j < J
    # What is needed later is asked for now. All programs of the same rows work out their hidden
    # layer: it is small.
    slope, intercept = _given_line(
        scale, j, in_j, hidden_means, hidden_variances, hidden_gammas, hidden_betas, hidden_eps
    )
    to = tl.program_id(1) * BC + tl.arange(0, BC)
    in_to = to < C
    if len(gate_means) > 0:
        a, b = _given_line(
            scale, to, in_to, gate_means, gate_variances, gate_gammas, gate_betas, gate_eps
        )
    expanded = pointer_of(expands, scale, L)
    w_to = tl.load(expanded + to[None, :] * J + j[:, None], in_to[None, :] & in_j[:, None], 0.0)
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, CX, BK):
        c = start + tl.arange(0, BK)
        in_c = c < CX
        pool = tl.load(pooled + c[None, :], in_r[:, None] & in_c[None, :], 0.0)
        w = tl.load(weight + j[None, :] * CX + c[:, None], in_j[None, :] & in_c[:, None], 0.0)
        if not READY:
            pool *= share[:, None]
        acc = product(pool, w, acc, PRECISION)
    h = relu(acc * slope[None, :] + intercept[None, :])
    h = tl.where(in_j[None, :], h, 0.0)
    gate = product(h, w_to, tl.zeros([BM, BC], tl.float32), PRECISION)
    if len(gate_means) > 0:
        gate = tl.sigmoid(gate * a[None, :] + b[None, :])
    mask = in_r[:, None] & in_to[None, :]
    tl.store(gates + (before + r)[:, None] * C + to[None, :], gate, mask)
