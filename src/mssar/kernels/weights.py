"""The gradients of Ω₁ and Ω₂, of all scales.  N batch, C channels, J hidden channels.

weights    gradients of rows → parts: a program takes a tile of a weight, and some of the rows
add_parts  those             → their sums
"""

import triton
import triton.language as tl

from mssar.kernels.common import (
    affine,
    known,
    later_lines,
    pointer_of,
    product,
    relu,
    rounded,
    scale_of,
    sums_of,
)


@triton.jit
def _expand_weights(
    pid, gate_slopes, hidden, hidden_moments, hidden_gammas, hidden_betas, parts, N, C, J, JS,
    hidden_eps, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr,
    SPAN: tl.constexpr, WC: tl.constexpr, WJ: tl.constexpr, WR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Ω₂'s gradient, over a part of the rows."""
    L: tl.constexpr = len(DOWN)
    c_tiles = (C + WC - 1) // WC
    j_tiles = (J + WJ - 1) // WJ
    tile = pid // (c_tiles * j_tiles)
    block = pid % (c_tiles * j_tiles)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, SPAN)
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
        h = tl.load(hidden + at, in_r[:, None] & (j < JS)[None, :], 0.0).to(tl.float32)
        h = relu(h * a[None, :] + b[None, :])
        h = tl.where(in_r[:, None] & in_j[None, :], h, 0.0)
        acc = product(tl.trans(grad), h, acc, PRECISION)
    at = tile.to(tl.int64) * C * J + c[:, None] * J + j[None, :]
    tl.store(parts + at, acc, in_c[:, None] & in_j[None, :])


@triton.jit
def _reduce_weights(
    pid, hidden_grads, hidden, hidden_lines, hidden_parts, hidden_moments, hidden_gammas, normal,
    moments, parts, N, C, J, JS, hidden_eps,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, SPAN: tl.constexpr,
    WC: tl.constexpr, WJ: tl.constexpr, WR: tl.constexpr, NORM: tl.constexpr,
    BM: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr, LATER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Ω₁'s gradient, over a part of the rows.

    The intercept of the BN in front has no part in it: the gradients' mean is zero. In small types
    it is nearly so; the means are therefore taken about BN's, whatever they were written about.
    """
    L: tl.constexpr = len(DOWN)
    c_tiles = (C + WC - 1) // WC
    j_tiles = (J + WJ - 1) // WJ
    tile = pid // (c_tiles * j_tiles)
    block = pid % (c_tiles * j_tiles)
    scale, first, _, rows, before = scale_of(tile, N, DOWN, ACROSS, ROWS_AT, SPAN)
    c = block // j_tiles * WC + tl.arange(0, WC)
    in_c = c < C
    j = block % j_tiles * WJ + tl.arange(0, WJ)
    in_j = j < J
    if LATER:
        # The parts are of BM rows; a scale's first of them comes after those of the scales before.
        begins = tile * 0
        all_parts = tile * 0
        for level in tl.static_range(L):
            held = (N * (DOWN[level] * ACROSS[level]) + BM - 1) // BM
            begins += tl.where(level < scale, held, 0)
            all_parts += held
        _, _, s, p, q = later_lines(
            hidden_parts, all_parts, hidden_moments, hidden_gammas, scale, begins,
            (rows + BM - 1) // BM, rows, JS, j, in_j, hidden_eps, L, PARTS,
        )  # fmt: skip
    elif not READY:
        s = tl.load(hidden_lines + scale * JS + j, in_j, 0.0)
        p = tl.load(hidden_lines + (L + scale) * JS + j, in_j, 0.0)
        q = tl.load(hidden_lines + (2 * L + scale) * JS + j, in_j, 0.0)
    acc = tl.zeros([WJ, WC], tl.float32)
    added = tl.zeros([WR, WJ], tl.float32)
    begin = (tile - first) * SPAN
    for start in range(begin, tl.minimum(begin + SPAN, rows), WR):
        r = start + tl.arange(0, WR)
        in_r = (r < rows)[:, None]
        at = (before + r)[:, None]
        mask = in_r & (j < JS)[None, :]
        grad = tl.load(hidden_grads + at * JS + j[None, :], mask, 0.0)
        if not READY:
            value = tl.load(hidden + at * JS + j[None, :], mask, 0.0).to(tl.float32)
            grad = grad.to(tl.float32) * s[None, :] + (value * p[None, :] + q[None, :])
            grad = tl.where(in_r & in_j[None, :], grad, 0.0)
        pool = tl.load(normal + at * C + c[None, :], in_r & in_c[None, :], 0.0)
        acc = product(tl.trans(grad), pool, acc, PRECISION)
        if NORM:
            added += rounded(grad, PRECISION)
    if NORM:
        near = tl.load(moments + 3 * C + c, in_c, 0.0) - tl.load(moments + c, in_c, 0.0)
        acc += tl.sum(added, 0)[:, None] * near[None, :]
        acc = acc * tl.load(moments + 2 * C + c, in_c, 0.0)[None, :]
    at = tile.to(tl.int64) * J * C + j[:, None] * C + c[None, :]
    tl.store(parts + at, acc, in_j[:, None] & in_c[None, :])


@triton.jit
def weights(
    gate_slopes,
    hidden,
    hidden_moments,
    hidden_gammas,
    hidden_betas,
    hidden_grads,  # if READY, in front of BN
    hidden_lines,  # 3 × L × JS, unless READY or LATER
    hidden_parts,  # with LATER: 2 × tiles of BM rows × JS, from `expand_backward`
    normal,
    moments,  # 5 × CX, of the BN in front
    expand_parts,  # out: parts of rows × C·J
    reduce_parts,  # out: parts of rows × J·CX
    N,
    C,
    CX,  # channels of the pools
    J,
    JS,
    hidden_eps,
    programs,  # for Ω₂
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    SPAN: tl.constexpr,
    WC: tl.constexpr,
    WJ: tl.constexpr,
    WR: tl.constexpr,
    NORM: tl.constexpr,
    BM: tl.constexpr,
    PARTS: tl.constexpr,
    READY: tl.constexpr,
    LATER: tl.constexpr,
    BY: tl.constexpr,  # what CX is a multiple of
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    CX = known(CX, BY)
    if pid < programs:
        _expand_weights(
            pid, gate_slopes, hidden, hidden_moments, hidden_gammas, hidden_betas, expand_parts,
            N, C, J, JS, hidden_eps, DOWN, ACROSS, ROWS_AT, SPAN, WC, WJ, WR, PRECISION,
        )  # fmt: skip
    else:
        _reduce_weights(
            pid - programs, hidden_grads, hidden, hidden_lines, hidden_parts, hidden_moments,
            hidden_gammas, normal, moments, reduce_parts, N, CX, J, JS, hidden_eps, DOWN, ACROSS,
            ROWS_AT, SPAN, WC, WJ, WR, NORM, BM, PARTS, READY, LATER, PRECISION,
        )  # fmt: skip


@triton.jit
def _add(parts, grads, i, size, splits, CHUNK: tl.constexpr):
    tl.store(grads + i, sums_of(parts, size, i, i < size, splits, CHUNK), i < size)


@triton.jit
def add_parts(
    expand_parts,
    reduce_parts,
    expand_grads,  # out, a scale: C × J
    reduce_grads,  # out, a scale: J × CX
    N,
    C,
    CX,
    J,
    programs,  # for a scale's Ω₂
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    first = 0
    for level in tl.static_range(L):
        splits = (N * (DOWN[level] * ACROSS[level]) + SPAN - 1) // SPAN
        if tl.program_id(1) == level:
            if tl.program_id(0) < programs:
                i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                size = C * J
                of = expand_parts + tl.cast(first, tl.int64) * size
                _add(of, expand_grads[level], i, size, splits, CHUNK)
            else:
                i = (tl.program_id(0) - programs) * BLOCK + tl.arange(0, BLOCK)
                size = J * CX
                of = reduce_parts + tl.cast(first, tl.int64) * size
                _add(of, reduce_grads[level], i, size, splits, CHUNK)
        first += splits
