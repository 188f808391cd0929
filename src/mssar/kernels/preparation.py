"""Between the first pass over a map and the branches.  C channels, J hidden channels.

prepare  parts of sums → BN's statistics of x; weights as the products read them
"""

import triton
import triton.language as tl

from mssar.kernels.common import moments_of, pointer_of


@triton.jit
def _copy_padded(block, source, target, rows, width, stride, BLOCK: tl.constexpr):
    """Rows that begin ``stride`` numbers apart, zeros between, to be read in whole vectors."""
    i = block * BLOCK + tl.arange(0, BLOCK)
    row = i // stride
    column = i % stride
    value = tl.load(source + row * width + column, (row < rows) & (column < width), 0.0)
    tl.store(target + i, value, row < rows)


@triton.jit
def prepare(
    parts,  # with NORM: 2 × groups × C, from `sums`
    moments,  # with NORM: 5 × C; out: BN's mean, variance and slope; in: what `sums` has taken off
    # the rows; out: what BN's output has more than rows · slope
    gamma,
    beta,
    reduces,  # a scale: J × C
    expands,  # a scale: C × J
    packed,  # out: expands, rows JS apart; reduces with that slope, rows CS apart; and without
    C,
    J,
    JS,
    CS,
    groups,
    count,  # values of a part
    total,
    eps,
    FOLDS: tl.constexpr,  # programs for the statistics, and as many for each scale's Ω₁
    BC: tl.constexpr,
    BJ: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    L: tl.constexpr = len(reduces)
    pid = tl.program_id(0)
    if pid < FOLDS * (L if L > 0 else 1):
        scale = pid // FOLDS
        c = pid % FOLDS * BC + tl.arange(0, BC)
        in_c = c < C
        if L > 0:
            source = pointer_of(reduces, scale, L)
            j = tl.arange(0, BJ)
            mask = (j < J)[:, None] & in_c[None, :]
            w = tl.load(source + j[:, None] * C + c[None, :], mask, 0.0).to(tl.float32)
        a = tl.full([BC], 1.0, tl.float32)
        if NORM:
            # Asked for now, needed when the statistics are there.
            slope = tl.load(gamma + c, in_c, 0.0).to(tl.float32)
            b = tl.load(beta + c, in_c, 0.0).to(tl.float32)
            near = tl.load(moments + 3 * C + c, in_c, 0.0)
            squares = parts + groups * C
            mean, variance = moments_of(parts, squares, C, c, in_c, groups, count, total, CHUNK)
            a = slope * tl.rsqrt(variance + eps)
            if scale == 0:
                tl.store(moments + c, mean, in_c)
                tl.store(moments + C + c, variance, in_c)
                tl.store(moments + 2 * C + c, a, in_c)
                tl.store(moments + 4 * C + c, (near - mean) * a + b, in_c)
        if L > 0:
            steep = packed + L * C * JS + scale * J * CS
            plain = steep + L * J * CS
            for start in range(0, J, BJ):
                if start > 0:  # the first were read above: they need not wait for the statistics
                    j = start + tl.arange(0, BJ)
                    mask = (j < J)[:, None] & in_c[None, :]
                    w = tl.load(source + j[:, None] * C + c[None, :], mask, 0.0).to(tl.float32)
                mask = (j < J)[:, None] & (c < CS)[None, :]  # zeros in what pads a row
                tl.store(steep + j[:, None] * CS + c[None, :], w * a[None, :], mask)
                tl.store(plain + j[:, None] * CS + c[None, :], w, mask)
    elif L > 0:
        wide = (C * JS + BLOCK - 1) // BLOCK
        block = pid - FOLDS * L
        scale = block // wide
        source = pointer_of(expands, scale, L)
        _copy_padded(block % wide, source, packed + scale * C * JS, C, J, JS, BLOCK)
