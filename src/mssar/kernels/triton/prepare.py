"""What the branches need before their products, in one launch.  C channels, J hidden channels.

prepare  parts of sums, parameters → the norms' tables, coarser regions' means, weights to read

Rows of means are sorted, and all rows are padded, as ``rows`` has them.
"""

import triton
import triton.language as tl

from mssar.kernels.triton.common import (
    BETA,
    GAMMA,
    area_of,
    gate_norm,
    hidden_norm,
    keep_norm,
    known,
    level_of,
    members_of,
    moments_of,
)


@triton.jit
def _front(
    block, parts, counts, norms, gamma, beta, mean, variance, C, CS, programs, eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """The table of the front norm, of some channels; without one, that of the identity."""
    c = block * BLOCK + tl.arange(0, BLOCK)
    in_c = c < C
    g = tl.where(in_c, 1.0, 0.0)
    b = tl.zeros([BLOCK], tl.float32)
    center = tl.zeros([BLOCK], tl.float32)
    spread = tl.zeros([BLOCK], tl.float32) + (1.0 - eps)
    if NORM:
        g = tl.load(gamma + c, in_c, 0.0).to(tl.float32)
        b = tl.load(beta + c, in_c, 0.0).to(tl.float32)
        if FIXED:
            center = tl.load(mean + c, in_c, 0.0).to(tl.float32)
            spread = tl.load(variance + c, in_c, 1.0).to(tl.float32)
        else:
            center, spread = moments_of(
                parts, parts + programs * CS, counts, CS, c, c < CS, programs
            )
    tl.store(norms + GAMMA * CS + c, g, c < CS)
    tl.store(norms + BETA * CS + c, b, c < CS)
    keep_norm(norms, CS, c, c < CS, center, spread, g, b, eps)


@triton.jit
def _copy_norm(norm, gamma, beta, mean, variance, width, stride, eps, FIXED: tl.constexpr):
    """A branch's norm: its parameters, and given statistics."""
    for start in range(0, stride, 256):
        c = start + tl.arange(0, 256)
        g = tl.load(gamma + c, c < width, 0.0).to(tl.float32)
        b = tl.load(beta + c, c < width, 0.0).to(tl.float32)
        tl.store(norm + GAMMA * stride + c, g, c < stride)
        tl.store(norm + BETA * stride + c, b, c < stride)
        if FIXED:
            center = tl.load(mean + c, c < width, 0.0).to(tl.float32)
            spread = tl.load(variance + c, c < width, 1.0).to(tl.float32)
            keep_norm(norm, stride, c, c < stride, center, spread, g, b, eps)


@triton.jit
def _copy_padded(block, source, target, rows, width, stride, BLOCK: tl.constexpr):
    """Rows that begin ``stride`` numbers apart, zeros between, to be read in whole vectors."""
    i = block * BLOCK + tl.arange(0, BLOCK)
    row = i // stride
    column = i % stride
    value = tl.load(source + row * width + column, (row < rows) & (column < width), 0.0)
    tl.store(target + i, value, row < rows)


@triton.jit
def _coarse_means(
    n, block, cells, rows, N, CS, H, W, fh, fw, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr, SAME: tl.constexpr, ROWS: tl.constexpr, RB: tl.constexpr,
    QS: tl.constexpr, QB: tl.constexpr, CT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A sample's means over regions, from those of their cells."""
    c = block * CT + tl.arange(0, CT)
    in_c = (c < CS)[None, :]
    for start in tl.static_range(0, ROWS, RB):
        row = start + tl.arange(0, RB)
        added = tl.zeros([RB, CT], tl.float32)
        for begin in tl.static_range(0, QS, QB):
            cell = begin + tl.arange(0, QB)
            real = (cell < fh * fw)[:, None] & in_c
            at = (n * (fh * fw) + cell).to(tl.int64)[:, None] * CS + c[None, :]
            area = tl.where(cell < fh * fw, area_of(cell, fh, fw, H, W), 0.0)
            mean = tl.load(cells + at, real, 0.0) * area[:, None]
            members = members_of(row, cell, fh, fw, DOWN, ACROSS, ROWS_AT)
            added = tl.dot(members, mean, added, input_precision=EXACT)
        level, region, each, before = level_of(row, DOWN, ACROSS, ROWS_AT, N)
        down = region * 0 + DOWN[0]
        across = region * 0 + ACROSS[0]
        for k in tl.static_range(1, len(DOWN)):
            down = tl.where(level == k, DOWN[k], down)
            across = tl.where(level == k, ACROSS[k], across)
        mean = added / tl.maximum(area_of(region, down, across, H, W), 1.0)[:, None]
        to = (before + n * each + region).to(tl.int64)
        # The cells' own rows are there already: others read them meanwhile.
        held = (row < ROWS)[:, None] & (level != SAME)[:, None] & in_c
        tl.store(rows + to[:, None] * CS + c[None, :], mean, held)


@triton.jit(
    do_not_specialize=["N", "C", "J", "CX", "CS", "CXS", "JS", "H", "W", "fh", "fw", "programs",
                       "fronts", "kept"],
    do_not_specialize_on_alignment=[
        "front", "reduces", "gammas", "betas", "expands", "gate_gammas", "gate_betas", "means",
        "variances", "gate_means", "gate_variances",
    ],
)  # fmt: skip
def prepare(
    parts,  # from `sums`
    counts,
    cells,  # rows of cells × CXS, float32: means
    rows,  # out: rows × CXS, float32: those of coarser regions
    norms,  # out: their tables
    shares,  # out: one by the values that a norm has a channel, the front one's and each scale's
    counters,  # out: `kept` zeros
    packed,  # out: all scales' Ω₁, rows CXS apart, and Ω₂, rows JS apart
    front,  # with NORM: γ, β, and running mean and variance
    reduces,  # a scale: J × CX
    gammas,
    betas,
    expands,  # a scale: C × J
    gate_gammas,
    gate_betas,
    means,  # with BRANCHES_FIXED, a scale: the running ones
    variances,
    gate_means,
    gate_variances,
    N,
    C,
    J,
    CX,  # channels that are pooled: C, but for a layer that looks at another map
    CS,
    CXS,
    JS,
    H,
    W,
    fh,
    fw,
    programs,  # of `sums`
    fronts,  # of this kernel, that work out the front norm
    kept,
    eps,
    hidden_eps,
    gate_eps,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    SAME: tl.constexpr,  # the scale whose regions are the cells, or −1
    ROWS: tl.constexpr,  # of a sample, and of these RB at once
    RB: tl.constexpr,
    QS: tl.constexpr,  # cells of a sample, and of these QB at once
    QB: tl.constexpr,
    COARSE: tl.constexpr,  # whether any means are to be made
    CT: tl.constexpr,
    EXACT: tl.constexpr,  # how products with ones are taken: all digits
    BC: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    FIXED: tl.constexpr,
    BRANCHES_FIXED: tl.constexpr,
):
    L: tl.constexpr = len(DOWN)
    CS = known(CS, 16)
    CXS = known(CXS, 16)
    JS = known(JS, 16)
    pid = tl.program_id(0)
    start = fronts
    if pid < start:
        gamma = shares
        beta = shares
        mean = shares
        variance = shares
        if NORM:
            gamma = front[0]
            beta = front[1]
            mean = front[2]
            variance = front[3]
        _front(
            pid, parts, counts, norms, gamma, beta, mean, variance, C, CS, programs, eps,
            BC, NORM, FIXED,
        )  # fmt: skip
        if pid == 0:
            total = N.to(tl.float32) * (H * W)
            tl.store(shares, (1.0 / total) if (NORM and not FIXED) else (total * 0))
            for begin in range(0, kept, 256):
                i = begin + tl.arange(0, 256)
                tl.store(counters + i, tl.zeros([256], tl.int32), i < kept)
    for level in tl.static_range(L):
        if pid == start + level:
            of_hidden = hidden_norm(norms, level, CS, JS)
            of_gates = gate_norm(norms, level, CS, JS, L)
            mean = shares
            variance = shares
            gate_mean = shares
            gate_variance = shares
            if BRANCHES_FIXED:
                mean = means[level]
                variance = variances[level]
                gate_mean = gate_means[level]
                gate_variance = gate_variances[level]
            _copy_norm(
                of_hidden, gammas[level], betas[level], mean, variance, J, JS, hidden_eps,
                BRANCHES_FIXED,
            )  # fmt: skip
            _copy_norm(
                of_gates, gate_gammas[level], gate_betas[level], gate_mean, gate_variance, C, CS,
                gate_eps, BRANCHES_FIXED,
            )  # fmt: skip
            total = (N * (DOWN[level] * ACROSS[level])).to(tl.float32)
            tl.store(shares + 1 + level, (total * 0) if BRANCHES_FIXED else (1.0 / total))
    start += L
    wide = (J * CXS + BLOCK - 1) // BLOCK
    tall = (C * JS + BLOCK - 1) // BLOCK
    for level in tl.static_range(L):
        if (pid >= start) & (pid < start + wide):
            target = packed + level * (J * CXS)
            _copy_padded(pid - start, reduces[level], target, J, CX, CXS, BLOCK)
        start += wide
        if (pid >= start) & (pid < start + tall):
            target = packed + L * (J * CXS) + level * (C * JS)
            _copy_padded(pid - start, expands[level], target, C, J, JS, BLOCK)
        start += tall
    if COARSE:
        if pid >= start:
            blocks = (CXS + CT - 1) // CT
            _coarse_means(
                (pid - start) // blocks, (pid - start) % blocks, cells, rows, N, CXS, H, W, fh, fw,
                DOWN, ACROSS, ROWS_AT, SAME, ROWS, RB, QS, QB, CT, EXACT,
            )  # fmt: skip
