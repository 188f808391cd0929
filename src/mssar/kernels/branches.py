"""The branches on rows, all scales in one launch.  N batch, C channels, J hidden channels.

    prepare   parts of sums → BN's statistics of x; weights as the products read them
    reduce    pools         → Ω₁ · pool, statistics
    expand    Ω₁ · pool     → Ω₂ · relu(BN(·)), statistics: the gates, but for BN and sigmoid
    evaluate  pools         → the gates in one go, where statistics are given

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
def _copy_padded(block, source, target, rows, width, stride, BLOCK: tl.constexpr):
    """Rows that begin ``stride`` numbers apart, zeros between, to be read in whole vectors."""
    i = block * BLOCK + tl.arange(0, BLOCK)
    row = i // stride
    column = i % stride
    value = tl.load(source + row * width + column, (row < rows) & (column < width), 0.0)
    tl.store(target + i, value, row < rows)


@triton.jit
def _pack(block, reduces, expands, packed, C, J, JS, CS, BLOCK: tl.constexpr):
    L: tl.constexpr = len(reduces)
    wide = (C * JS + BLOCK - 1) // BLOCK
    tall = (J * CS + BLOCK - 1) // BLOCK
    if block < L * wide:
        scale = block // wide
        source = pointer_of(expands, scale, L)
        _copy_padded(block % wide, source, packed + scale * C * JS, C, J, JS, BLOCK)
    else:
        block -= L * wide
        scale = block // tall
        target = packed + L * C * JS + scale * J * CS
        _copy_padded(block % tall, pointer_of(reduces, scale, L), target, J, C, CS, BLOCK)


@triton.jit
def prepare(
    parts,  # 2 × groups × C, from `sums`
    moments,  # out: 3 × C, BN's mean and variance, and its slope
    gamma,
    reduces,  # a scale: J × C
    expands,  # a scale: C × J
    packed,  # out: the same, expands first, rows JS and CS apart
    C,
    J,
    JS,
    CS,
    groups,
    count,  # values of a part
    total,
    eps,
    FOLDS: tl.constexpr,  # programs for the statistics
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    if FOLDS > 0:
        if pid < FOLDS:
            c = pid * BC + tl.arange(0, BC)
            in_c = c < C
            squares = parts + groups * C
            mean, variance = moments_of(parts, squares, C, c, in_c, groups, count, total, CHUNK)
            tl.store(moments + c, mean, in_c)
            tl.store(moments + C + c, variance, in_c)
            a = tl.load(gamma + c, in_c, 0.0).to(tl.float32) * tl.rsqrt(variance + eps)
            tl.store(moments + 2 * C + c, a, in_c)
    if len(reduces) > 0:
        if pid >= FOLDS:
            _pack(pid - FOLDS, reduces, expands, packed, C, J, JS, CS, BLOCK)


@triton.jit
def reduce(
    pools,
    moments,  # 3 × C
    beta,
    weights,  # a scale: J × C, rows CW apart
    gammas,
    betas,
    normal,  # out: rows × C, the means, about BN's mean
    hidden,  # out: rows × JS
    hidden_parts,  # 2 × tiles × JS
    hidden_moments,  # out: 2 × L × JS
    hidden_lines,  # out: 2 × L × JS, a and b
    counters,  # L × tiles of J
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
    NORM: tl.constexpr,
    STATISTICS: tl.constexpr,  # the batch's; else nobody asks for them
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    tile = tl.program_id(0)
    scale, first, tiles, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    down = one_of(DOWN, scale)
    across = one_of(ACROSS, scale)
    weight = pointer_of(weights, scale, L)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    share = 1.0 / area_of(r % (down * across), down, across, H, W)
    pooled = pools + (N * one_of(POOLS_AT, scale) + r)[:, None] * C
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    in_j = j < J
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        in_c = c < C
        mask = in_r[:, None] & in_c[None, :]
        pool = tl.load(pooled + c[None, :], mask, 0.0) * share[:, None]
        w = tl.load(weight + j[None, :] * CW + c[:, None], in_j[None, :] & in_c[:, None], 0.0)
        if NORM:
            pool -= tl.load(moments + c, in_c, 0.0)[None, :]
        if tl.program_id(1) == 0:
            tl.store(normal + (before + r)[:, None] * C + c[None, :], pool, mask)
        if NORM:
            a = tl.load(moments + 2 * C + c, in_c, 0.0)
            b = tl.load(beta + c, in_c, 0.0).to(tl.float32)
            pool = tl.where(mask, pool * a[None, :] + b[None, :], 0.0)
        acc = product(pool, w, acc, PRECISION)
    mask = in_r[:, None] & in_j[None, :]
    in_js = j < JS  # zeros in what pads a row
    tl.store(hidden + (before + r)[:, None] * JS + j[None, :], acc, in_r[:, None] & in_js[None, :])
    if STATISTICS:
        held = tl.minimum(BM, rows - (tile - first) * BM).to(tl.float32)
        _keep_parts(hidden_parts, tl.num_programs(0), tile, JS, j, in_j, acc, mask, held)
        if last_of(counters + scale * tl.num_programs(1) + tl.program_id(1), tiles):
            of = hidden_parts + first * JS
            between = tl.num_programs(0) * JS
            mean, variance = moments_of(of, of + between, JS, j, in_j, tiles, BM, rows, TILES)
            tl.store(hidden_moments + scale * JS + j, mean, in_js)
            tl.store(hidden_moments + (L + scale) * JS + j, variance, in_js)
            gamma = pointer_of(gammas, scale, L)
            hidden_a, hidden_b = affine(
                j, in_j, gamma, pointer_of(betas, scale, L), mean, variance, hidden_eps
            )
            tl.store(hidden_lines + scale * JS + j, hidden_a, in_js)
            tl.store(hidden_lines + (L + scale) * JS + j, hidden_b, in_js)


@triton.jit
def expand(
    hidden,
    hidden_lines,  # 2 × L × JS
    weights,  # a scale: C × J, rows JW apart
    gates,  # out: rows × C
    gate_parts,  # 2 × tiles × C
    gate_moments,  # out: 2 × L × C
    counters,  # L × tiles of C
    N,
    C,
    J,
    JS,
    JW,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    STATISTICS: tl.constexpr,
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
    acc = tl.zeros([BM, BC], tl.float32)
    for start in range(0, J, BK):
        j = start + tl.arange(0, BK)
        in_j = j < J
        mask = in_r[:, None] & (j < JS)[None, :]
        h = tl.load(hidden + (before + r)[:, None] * JS + j[None, :], mask, 0.0).to(tl.float32)
        w = tl.load(weight + c[None, :] * JW + j[:, None], in_c[None, :] & (j < JW)[:, None], 0.0)
        a = tl.load(hidden_lines + scale * JS + j, in_j, 0.0)
        b = tl.load(hidden_lines + (L + scale) * JS + j, in_j, 0.0)
        h = relu(h * a[None, :] + b[None, :])
        h = tl.where(in_r[:, None] & in_j[None, :], h, 0.0)
        acc = product(h, w, acc, PRECISION)
    mask = in_r[:, None] & in_c[None, :]
    tl.store(gates + (before + r)[:, None] * C + c[None, :], acc, mask)
    if STATISTICS:
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
    pools,
    mean_at,
    variance_at,
    gamma,
    beta,
    reduces,
    hidden_means,
    hidden_variances,
    hidden_gammas,
    hidden_betas,
    expands,  # a scale: C × J, rows JW apart
    gates,  # out: rows × C
    N,
    C,
    CX,  # channels of the pools
    J,
    JW,
    eps,
    hidden_eps,
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
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    tile = tl.program_id(0)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    down = one_of(DOWN, scale)
    across = one_of(ACROSS, scale)
    weight = pointer_of(reduces, scale, L)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < rows
    share = 1.0 / area_of(r % (down * across), down, across, H, W)
    pooled = pools + (N * one_of(POOLS_AT, scale) + r)[:, None] * CX
    j = tl.arange(0, BJ)
    in_j = j < J
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, CX, BK):
        c = start + tl.arange(0, BK)
        in_c = c < CX
        mask = in_r[:, None] & in_c[None, :]
        pool = tl.load(pooled + c[None, :], mask, 0.0) * share[:, None]
        w = tl.load(weight + j[None, :] * CX + c[:, None], in_j[None, :] & in_c[:, None], 0.0)
        if NORM:
            mean = tl.load(mean_at + c, in_c, 0.0).to(tl.float32)
            variance = tl.load(variance_at + c, in_c, 1.0).to(tl.float32)
            a, b = affine(c, in_c, gamma, beta, mean, variance, eps)
            pool = tl.where(mask, pool * a[None, :] + b[None, :], 0.0)
        acc = product(pool, w, acc, PRECISION)
    mean_j = tl.load(pointer_of(hidden_means, scale, L) + j, in_j, 0.0).to(tl.float32)
    variance_j = tl.load(pointer_of(hidden_variances, scale, L) + j, in_j, 1.0).to(tl.float32)
    gamma_j = pointer_of(hidden_gammas, scale, L)
    beta_j = pointer_of(hidden_betas, scale, L)
    slope, intercept = affine(j, in_j, gamma_j, beta_j, mean_j, variance_j, hidden_eps)
    h = relu(acc * slope[None, :] + intercept[None, :])
    h = tl.where(in_j[None, :], h, 0.0)
    expanded = pointer_of(expands, scale, L)
    for start in range(tl.program_id(1) * BC, C, BC * tl.num_programs(1)):
        to = start + tl.arange(0, BC)
        in_to = to < C
        mask = in_to[None, :] & (j < JW)[:, None]
        w_to = tl.load(expanded + to[None, :] * JW + j[:, None], mask, 0.0)
        gate = product(h, w_to, tl.zeros([BM, BC], tl.float32), PRECISION)
        mask = in_r[:, None] & in_to[None, :]
        tl.store(gates + (before + r)[:, None] * C + to[None, :], gate, mask)
