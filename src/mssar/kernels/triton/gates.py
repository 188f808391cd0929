"""From sums over cells to gradients of the gates.  N batch, C channels, fh fw cells, L scales.

gates   sums over cells, gates → z, gradients before each scale's sigmoid, parts of sums
settle  those                  → what the gates' norms need for their gradients, and the front one
"""

import triton
import triton.language as tl

from mssar.kernels.triton.common import (
    BETA,
    INTERCEPT,
    MEAN,
    RSTD,
    SLOPE,
    gate_norm,
    keep_lines,
    known,
    level_of,
    members_of,
    sums_of,
)


@triton.jit(do_not_specialize=["N", "CS", "JS", "fh", "fw"])
def gates(
    cell_sums,  # 2 × rows of cells × CS, from `gather`
    values,  # rows × CS: the gates before their norms
    norms,
    weights,  # out: rows of cells × CS, z
    grads,  # out: rows × CS, gradients before each scale's sigmoid
    parts,  # out: 2 × (L + 1) × N × CS, their sums, and those of their products with their norm's
    # output; and the same of z · grad, of which x̂ is the front norm's
    N,
    CS,
    JS,
    fh,
    fw,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    ROWS: tl.constexpr,  # of a sample, and of these RB at once
    RB: tl.constexpr,
    QS: tl.constexpr,  # cells of a sample, and of these QB at once
    QB: tl.constexpr,
    CT: tl.constexpr,
    EXACT: tl.constexpr,  # how products with ones are taken: all digits
):
    """A sample's rows of all scales at once: what regions have in cells is a product with ones."""
    L: tl.constexpr = len(DOWN)
    CS = known(CS, 16)
    JS = known(JS, 16)
    n = tl.program_id(0)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < CS
    cells = fh * fw
    plain_sums = cell_sums + (n * cells).to(tl.int64) * CS
    crossed_sums = plain_sums + N.to(tl.int64) * cells * CS
    a = tl.load(norms + SLOPE * CS + c, in_c, 0.0)[None, :]
    b = tl.load(norms + BETA * CS + c, in_c, 0.0)[None, :]
    zs = ()
    for _begin in tl.static_range(0, QS, QB):
        zs = zs + (tl.zeros([QB, CT], tl.float32),)
    added = ()
    crossed = ()
    for _k in tl.static_range(L):
        added = added + (tl.zeros([CT], tl.float32),)
        crossed = crossed + (tl.zeros([CT], tl.float32),)
    for start in tl.static_range(0, ROWS, RB):
        row = start + tl.arange(0, RB)
        level, region, each, before = level_of(row, DOWN, ACROSS, ROWS_AT, N)
        held = (row < ROWS)[:, None] & in_c[None, :]
        to = (before + n * each + region).to(tl.int64)[:, None] * CS + c[None, :]
        norm = gate_norm(norms, level, CS, JS, L)[:, None] + c[None, :]
        value = tl.load(values + to, held, 0.0).to(tl.float32)
        mean = tl.load(norm + MEAN * CS, held, 0.0)
        rstd = tl.load(norm + RSTD * CS, held, 0.0)
        slope = tl.load(norm + SLOPE * CS, held, 0.0)
        intercept = tl.load(norm + INTERCEPT * CS, held, 0.0)
        weight = tl.where(held, tl.sigmoid(value * slope + intercept), 0.0)
        # u = a·(x − mean) + β, so that the gradient of z is a·Σ g·(x − mean) + β·Σ g.
        dz = tl.zeros([RB, CT], tl.float32)
        moved = ()
        for k in tl.static_range(len(zs)):
            cell = k * QB + tl.arange(0, QB)
            real = (cell < cells)[:, None] & in_c[None, :]
            at = cell[:, None] * CS + c[None, :]
            members = members_of(row, cell, fh, fw, DOWN, ACROSS, ROWS_AT)
            of_cells = tl.load(crossed_sums + at, real, 0.0) * a
            of_cells += tl.load(plain_sums + at, real, 0.0) * b
            dz = tl.dot(members, of_cells, dz, input_precision=EXACT)
            moved = moved + (tl.dot(tl.trans(members), weight, zs[k], input_precision=EXACT),)
        zs = moved
        grad = tl.where(held, dz * weight * ((1 - weight) / L), 0.0)
        tl.store(grads + to, grad, held)
        normal = grad * (value - mean) * rstd
        moved = ()
        others = ()
        for k in tl.static_range(L):
            here = (level == k)[:, None] & held
            moved = moved + (added[k] + tl.sum(tl.where(here, grad, 0.0), 0),)
            others = others + (crossed[k] + tl.sum(tl.where(here, normal, 0.0), 0),)
        added = moved
        crossed = others
    past = tl.zeros([CT], tl.float32)
    past_crossed = tl.zeros([CT], tl.float32)
    for k in tl.static_range(len(zs)):
        cell = k * QB + tl.arange(0, QB)
        real = (cell < cells)[:, None] & in_c[None, :]
        at = cell[:, None] * CS + c[None, :]
        z = zs[k] / L
        tl.store(weights + (n * cells).to(tl.int64) * CS + at, z, real)
        past += tl.sum(tl.load(plain_sums + at, real, 0.0) * z, 0)
        past_crossed += tl.sum(tl.load(crossed_sums + at, real, 0.0) * z, 0)
    past_crossed *= tl.load(norms + RSTD * CS + c, in_c, 0.0)
    added = added + (past,)
    crossed = crossed + (past_crossed,)
    for k in tl.static_range(L + 1):
        here = parts + (k * N + n).to(tl.int64) * CS + c
        tl.store(here, added[k], in_c)
        tl.store(here + ((L + 1) * N).to(tl.int64) * CS, crossed[k], in_c)


@triton.jit(do_not_specialize=["N", "C", "CS", "JS"])
def settle(
    parts,
    norms,
    shares,
    past,  # out: 2 × CS, sums for the front norm of what comes past the pools
    lines,  # out: L × 3 × CS, the gates' norms' gradients as lines
    vectors,  # out: gradients of γ and β of the front norm, then 2 × L × C of the gates'
    N,
    C,
    CS,
    JS,
    L: tl.constexpr,
    BC: tl.constexpr,
):
    CS = known(CS, 16)
    JS = known(JS, 16)
    level = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < CS
    mine = parts + (level * N).to(tl.int64) * CS
    added, crossed = sums_of(mine, mine + ((L + 1) * N).to(tl.int64) * CS, CS, c, in_c, N)
    if level == L:
        tl.store(past + c, added, in_c)
        tl.store(past + CS + c, crossed, in_c)
    else:
        norm = gate_norm(norms, level, CS, JS, L)
        share = tl.load(shares + 1 + level)
        keep_lines(lines + level * 3 * CS, norm, CS, c, in_c, added, crossed, share)
        tl.store(vectors + (2 + level) * C + c, crossed, c < C)
        tl.store(vectors + (2 + L + level) * C + c, added, c < C)
