"""From means to gates: the branches on rows, all scales in one launch.  J hidden channels.

reduce  rows of means → those after BN, hidden layers, their BN's statistics
expand  hidden layers → gates, their BN's statistics

Rows are sorted by scale, sample and region. Those of channels are CS numbers long, those of hidden
channels JS, both multiples of 16 with zeros after the last one, so that whole vectors are read.
"""

import triton
import triton.language as tl

from mssar.kernels.triton.common import (
    BETA,
    GAMMA,
    INTERCEPT,
    MEAN,
    RSTD,
    SLOPE,
    gate_norm,
    hidden_norm,
    keep_norm,
    known,
    last_of,
    moments_of,
    product,
    relu,
    scale_of,
)


@triton.jit
def _keep_statistics(
    acc, in_r, rows, norm, parts, counts, counter, tile, first, tiles, stride, c, eps,
    BM: tl.constexpr,
):  # fmt: skip
    """A tile's share of a norm's statistics; the last tile to come completes them."""
    all_tiles = tl.num_programs(0)
    held = tl.minimum(rows - (tile - first) * BM, BM).to(tl.float32)
    value = tl.where(in_r[:, None], acc, 0.0)
    added = tl.sum(value, 0)
    away = tl.where(in_r[:, None], acc - (added / held)[None, :], 0.0)
    tl.store(parts + tile * stride + c, added, c < stride)
    tl.store(parts + (all_tiles + tile) * stride + c, tl.sum(away * away, 0), c < stride)
    counts += tl.program_id(1) * all_tiles
    tl.store(counts + tile, held)
    if last_of(counter, tiles):
        mine = parts + first * stride
        mean, variance = moments_of(
            mine, mine + all_tiles * stride, counts + first, stride, c, c < stride, tiles
        )
        gamma = tl.load(norm + GAMMA * stride + c, c < stride, 0.0)
        beta = tl.load(norm + BETA * stride + c, c < stride, 0.0)
        keep_norm(norm, stride, c, c < stride, mean, variance, gamma, beta, eps)


@triton.jit(do_not_specialize=["N", "J", "CS", "CXS", "JS"])
def reduce(
    rows,  # rows × CXS, float32: means
    packed,
    norms,
    normal,  # out: rows × CXS, the means after the front norm, but for its γ and β
    hidden,  # out: rows × JS, before their BN
    parts,
    counts,
    counters,
    N,
    J,
    CS,
    CXS,
    JS,
    eps,  # of the hidden layers' norms
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    BRANCHES_FIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    CS = known(CS, 16)
    CXS = known(CXS, 16)
    JS = known(JS, 16)
    tile = tl.program_id(0)
    scale, first, tiles, count, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < count
    at = (before + r).to(tl.int64)[:, None]
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    weight = packed + scale * (J * CXS)
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, CXS, BK):
        k = start + tl.arange(0, BK)
        in_k = k < CXS
        mask = in_r[:, None] & in_k[None, :]
        y = tl.load(rows + at * CXS + k[None, :], mask, 0.0)
        w = tl.load(weight + j[None, :] * CXS + k[:, None], (j < J)[None, :] & in_k[:, None], 0.0)
        if NORM:
            mean = tl.load(norms + MEAN * CS + k, in_k, 0.0)
            rstd = tl.load(norms + RSTD * CS + k, in_k, 0.0)
            y = tl.where(mask, (y - mean[None, :]) * rstd[None, :], 0.0)
        if tl.program_id(1) == 0:
            tl.store(normal + at * CXS + k[None, :], y, mask)
        if NORM:
            gamma = tl.load(norms + GAMMA * CS + k, in_k, 0.0)
            beta = tl.load(norms + BETA * CS + k, in_k, 0.0)
            y = y * gamma[None, :] + beta[None, :]
        acc = product(y, w, acc, PRECISION)
    acc = acc.to(hidden.dtype.element_ty).to(tl.float32)  # statistics are of what is kept
    mask = in_r[:, None] & (j < JS)[None, :]
    tl.store(hidden + at * JS + j[None, :], acc, mask)
    if not BRANCHES_FIXED:
        counter = counters + scale * tl.num_programs(1) + tl.program_id(1)
        norm = hidden_norm(norms, scale, CS, JS)
        _keep_statistics(
            acc, in_r, count, norm, parts, counts, counter, tile, first, tiles, JS, j, eps, BM
        )


@triton.jit(do_not_specialize=["N", "C", "CS", "JS"])
def expand(
    hidden,
    packed,  # Ω₂ of all scales
    norms,
    gates,  # out: rows × CS, before their BN
    parts,
    counts,
    counters,
    N,
    C,
    CS,
    JS,
    eps,  # of the gates' norms
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BRANCHES_FIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    CS = known(CS, 16)
    JS = known(JS, 16)
    tile = tl.program_id(0)
    scale, first, tiles, count, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < count
    at = (before + r).to(tl.int64)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    weight = packed + scale * (C * JS)
    norm = hidden_norm(norms, scale, CS, JS)
    acc = tl.zeros([BM, BC], tl.float32)
    for start in range(0, JS, BK):
        k = start + tl.arange(0, BK)
        in_k = k < JS
        h = tl.load(hidden + at * JS + k[None, :], in_r[:, None] & in_k[None, :], 0.0)
        w = tl.load(weight + c[None, :] * JS + k[:, None], (c < C)[None, :] & in_k[:, None], 0.0)
        slope = tl.load(norm + SLOPE * JS + k, in_k, 0.0)
        intercept = tl.load(norm + INTERCEPT * JS + k, in_k, 0.0)
        h = relu(h.to(tl.float32) * slope[None, :] + intercept[None, :])
        acc = product(h, w, acc, PRECISION)
    acc = acc.to(gates.dtype.element_ty).to(tl.float32)
    mask = in_r[:, None] & (c < CS)[None, :]
    tl.store(gates + at * CS + c[None, :], acc, mask)
    if not BRANCHES_FIXED:
        counter = counters + scale * tl.num_programs(1) + tl.program_id(1)
        _keep_statistics(
            acc, in_r, count, gate_norm(norms, scale, CS, JS, L), parts, counts, counter, tile,
            first, tiles, CS, c, eps, BM,
        )  # fmt: skip
