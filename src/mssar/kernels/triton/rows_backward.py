"""The branches on rows, backward, all scales in one launch.  C channels, J hidden channels.

expand_backward  the gates' gradients → the hidden layers', what their norms need
reduce_backward  those                → the means', what the front norm needs; and beside it,
                                        parts of the gradients of Ω₁ and Ω₂
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
    hidden_norm,
    in_front,
    keep_lines,
    known,
    last_of,
    product,
    relu,
    scale_of,
    sums_of,
)


@triton.jit(do_not_specialize=["N", "C", "J", "CS", "JS"])
def expand_backward(
    grads,  # rows × CS: the gates', before their sigmoid
    values,  # rows × CS: the gates
    lines,  # L × 3 × CS
    hidden,
    packed,  # Ω₂ of all scales
    norms,
    shares,
    gate_grads,  # out: rows × CS, the gates' gradients before their norms
    hidden_grads,  # out: rows × JS, before the relu
    hidden_lines,  # out: L × 3 × JS, the hidden norms' gradients as lines
    vectors,  # out: 2 × L × J, gradients of their γ and β
    parts,
    counters,
    N,
    C,
    J,
    CS,
    JS,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    CS = known(CS, 16)
    JS = known(JS, 16)
    tile = tl.program_id(0)
    all_tiles = tl.num_programs(0)
    scale, first, tiles, count, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < count
    at = (before + r).to(tl.int64)[:, None]
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    in_j = j < JS
    weight = packed + scale * (C * JS)
    acc = tl.zeros([BM, BJ], tl.float32)
    for start in range(0, CS, BK):
        k = start + tl.arange(0, BK)
        in_k = k < CS
        mask = in_r[:, None] & in_k[None, :]
        here = at * CS + k[None, :]
        w = tl.load(weight + k[:, None] * JS + j[None, :], (k < C)[:, None] & in_j[None, :], 0.0)
        grad = in_front(grads, values, here, mask, lines + scale * 3 * CS, CS, k, in_k)
        if tl.program_id(1) == 0:
            tl.store(gate_grads + here, grad, mask)
        acc = product(grad, w, acc, PRECISION)
    norm = hidden_norm(norms, scale, CS, JS)
    mask = in_r[:, None] & in_j[None, :]
    value = tl.load(hidden + at * JS + j[None, :], mask, 0.0).to(tl.float32)
    mean = tl.load(norm + MEAN * JS + j, in_j, 0.0)
    rstd = tl.load(norm + RSTD * JS + j, in_j, 0.0)
    slope = tl.load(norm + SLOPE * JS + j, in_j, 0.0)
    intercept = tl.load(norm + INTERCEPT * JS + j, in_j, 0.0)
    open_ = mask & ~(value * slope[None, :] + intercept[None, :] <= 0)
    acc = tl.where(open_, acc, 0.0)
    normal = tl.where(mask, (value - mean[None, :]) * rstd[None, :], 0.0)
    tl.store(hidden_grads + at * JS + j[None, :], acc, mask)
    tl.store(parts + tile * JS + j, tl.sum(acc, 0), in_j)
    tl.store(parts + (all_tiles + tile) * JS + j, tl.sum(acc * normal, 0), in_j)
    if last_of(counters + scale * tl.num_programs(1) + tl.program_id(1), tiles):
        mine = parts + first * JS
        added, crossed = sums_of(mine, mine + all_tiles * JS, JS, j, in_j, tiles)
        share = tl.load(shares + 1 + scale)
        keep_lines(hidden_lines + scale * 3 * JS, norm, JS, j, in_j, added, crossed, share)
        tl.store(vectors + scale * J + j, crossed, j < J)
        tl.store(vectors + (L + scale) * J + j, added, j < J)


@triton.jit
def _means(
    tile, block, all_tiles, hidden_grads, hidden, hidden_lines, packed, normal, pool_grads,
    past, sums, vectors, parts, counters, N, C, J, CS, CXS, JS, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    BK: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of rows of means; with NORM, what the front norm needs of them."""
    scale, first, _, count, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, BM)
    r = (tile - first) * BM + tl.arange(0, BM)
    in_r = r < count
    at = (before + r).to(tl.int64)[:, None]
    c = block * BC + tl.arange(0, BC)
    in_c = c < CXS
    weight = packed + scale * (J * CXS)
    acc = tl.zeros([BM, BC], tl.float32)
    for start in range(0, JS, BK):
        k = start + tl.arange(0, BK)
        in_k = k < JS
        mask = in_r[:, None] & in_k[None, :]
        w = tl.load(weight + k[:, None] * CXS + c[None, :], (k < J)[:, None] & in_c[None, :], 0.0)
        lines = hidden_lines + scale * 3 * JS
        grad = in_front(hidden_grads, hidden, at * JS + k[None, :], mask, lines, JS, k, in_k)
        acc = product(grad, w, acc, PRECISION)
    mask = in_r[:, None] & in_c[None, :]
    tl.store(pool_grads + at * CXS + c[None, :], acc, mask)
    if NORM:
        value = tl.load(normal + at * CXS + c[None, :], mask, 0.0).to(tl.float32)
        acc = tl.where(mask, acc, 0.0)
        tl.store(parts + tile * CS + c, tl.sum(acc, 0), in_c)
        tl.store(parts + (all_tiles + tile) * CS + c, tl.sum(acc * value, 0), in_c)
        if last_of(counters + block, all_tiles):
            added, crossed = sums_of(parts, parts + all_tiles * CS, CS, c, in_c, all_tiles)
            added += tl.load(past + c, in_c, 0.0)
            crossed += tl.load(past + CS + c, in_c, 0.0)
            tl.store(sums + c, added, in_c)
            tl.store(sums + CS + c, crossed, in_c)
            tl.store(vectors + c, crossed, c < C)
            tl.store(vectors + C + c, added, c < C)


@triton.jit
def _expand_weights(
    tile, block, j_tiles, gate_grads, hidden, norms, parts, N, C, J, CS, JS, span,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, BJ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Ω₂'s gradient, over some of the rows."""
    scale, first, _, count, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, span)
    c = block // j_tiles * BC + tl.arange(0, BC)
    j = block % j_tiles * BJ + tl.arange(0, BJ)
    norm = hidden_norm(norms, scale, CS, JS)
    slope = tl.load(norm + SLOPE * JS + j, j < JS, 0.0)
    intercept = tl.load(norm + INTERCEPT * JS + j, j < JS, 0.0)
    acc = tl.zeros([BC, BJ], tl.float32)
    begin = (tile - first) * span
    end = tl.minimum(begin + span, count)
    for start in range(begin, end, BR):
        r = start + tl.arange(0, BR)
        in_r = (r < end)[:, None]
        at = (before + r).to(tl.int64)[:, None]
        grad = tl.load(gate_grads + at * CS + c[None, :], in_r & (c < CS)[None, :], 0.0)
        mask = in_r & (j < JS)[None, :]
        h = tl.load(hidden + at * JS + j[None, :], mask, 0.0).to(tl.float32)
        h = tl.where(mask, relu(h * slope[None, :] + intercept[None, :]), 0.0)
        acc = product(tl.trans(grad), h, acc, PRECISION)
    here = parts + tile.to(tl.int64) * C * J + c[:, None] * J + j[None, :]
    tl.store(here, acc, (c < C)[:, None] & (j < J)[None, :])


@triton.jit
def _reduce_weights(
    tile, block, j_tiles, hidden_grads, hidden, hidden_lines, normal, norms, parts, N, CX, J, CS,
    CXS, JS, span, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Ω₁'s gradient, over some of the rows."""
    scale, first, _, count, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, span)
    c = block // j_tiles * BC + tl.arange(0, BC)
    in_c = c < CXS
    j = block % j_tiles * BJ + tl.arange(0, BJ)
    in_j = j < JS
    lines = hidden_lines + scale * 3 * JS
    if NORM:
        gamma = tl.load(norms + GAMMA * CS + c, in_c, 0.0)
        beta = tl.load(norms + BETA * CS + c, in_c, 0.0)
    acc = tl.zeros([BJ, BC], tl.float32)
    begin = (tile - first) * span
    end = tl.minimum(begin + span, count)
    for start in range(begin, end, BR):
        r = start + tl.arange(0, BR)
        in_r = (r < end)[:, None]
        at = (before + r).to(tl.int64)[:, None]
        mask = in_r & in_j[None, :]
        grad = in_front(hidden_grads, hidden, at * JS + j[None, :], mask, lines, JS, j, in_j)
        y = tl.load(normal + at * CXS + c[None, :], in_r & in_c[None, :], 0.0).to(tl.float32)
        if NORM:
            y = tl.where(in_r, y * gamma[None, :] + beta[None, :], 0.0)
        acc = product(tl.trans(grad), y, acc, PRECISION)
    here = parts + tile.to(tl.int64) * CX * J + j[:, None] * CX + c[None, :]
    tl.store(here, acc, (j < J)[:, None] & (c < CX)[None, :])


@triton.jit(do_not_specialize=["N", "C", "J", "CX", "CS", "CXS", "JS", "span", "tiles", "spans"])
def reduce_backward(
    hidden_grads,
    hidden,
    hidden_lines,
    gate_grads,
    packed,  # Ω₁ of all scales
    norms,
    normal,
    pool_grads,  # out: rows × CXS, gradients of each scale's means
    past,
    sums,  # out, with NORM: 2 × CS, for the front norm
    vectors,  # out, with NORM: gradients of its γ and β
    weight_parts,  # out: spans × J × CX, of Ω₁; then spans × C × J, of Ω₂
    parts,
    counters,
    N,
    C,
    J,
    CX,
    CS,
    CXS,
    JS,
    span,  # rows of a part of a weight's gradient
    tiles,  # of rows
    spans,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BJ: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    CS = known(CS, 16)
    CXS = known(CXS, 16)
    JS = known(JS, 16)
    pid = tl.program_id(0)
    blocks = (CX + BC - 1) // BC  # of the channels that are pooled
    c_tiles = (C + BC - 1) // BC
    j_tiles = (J + BJ - 1) // BJ
    # Weights' gradients first: their programs take longest.
    firsts = spans * blocks * j_tiles
    seconds = firsts + spans * c_tiles * j_tiles
    if pid < firsts:
        _reduce_weights(
            pid // (blocks * j_tiles), pid % (blocks * j_tiles), j_tiles, hidden_grads, hidden,
            hidden_lines, normal, norms, weight_parts, N, CX, J, CS, CXS, JS, span, DOWN, ACROSS,
            ROWS_AT, BR, BC, BJ, NORM, PRECISION,
        )  # fmt: skip
    elif pid < seconds:
        which = pid - firsts
        of_expand = weight_parts + spans.to(tl.int64) * CX * J
        _expand_weights(
            which // (c_tiles * j_tiles), which % (c_tiles * j_tiles), j_tiles, gate_grads, hidden,
            norms, of_expand, N, C, J, CS, JS, span, DOWN, ACROSS, ROWS_AT, BR, BC, BJ, PRECISION,
        )  # fmt: skip
    else:
        which = pid - seconds
        _means(
            which // blocks, which % blocks, tiles, hidden_grads, hidden, hidden_lines,
            packed, normal, pool_grads, past, sums, vectors, parts, counters, N, C, J, CS, CXS, JS,
            DOWN, ACROSS, ROWS_AT, BM, BC, BJ, NORM, PRECISION,
        )  # fmt: skip
