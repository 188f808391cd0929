"""The passes over maps of a block's end.  N batch, C channels, H W map, fh fw cells.

sums     x                   → every cell's mean, statistics of x
apply    x, gates, shortcut  → act(z · (a·x + b) + shortcut)
gather   grad, out, x        → grad before the activation, its sums a cell, those of grad · x
scatter  grad, x, pools' grads → the gradient of x; sums of the parts of the weights' gradients

A program has one sample, some of its cells, and CT channels. Rows of what is kept of cells and
regions are CS numbers long, a multiple of 16, with zeros after the last channel.
"""

import triton
import triton.language as tl

from mssar.kernels.triton.cells import (
    cells_of,
    empty_tile,
    over_positions,
    places_of,
    spread,
    weights_of,
)
from mssar.kernels.triton.common import (
    INTERCEPT,
    MEAN,
    RSTD,
    SLOPE,
    area_of,
    known,
    region_of,
    relu,
)


@triton.jit(do_not_specialize=["C", "CS", "H", "W", "fh", "fw", "tiles", "each", "groups"])
def sums(
    x,
    rows,  # out: a sample's cells × CS, float32: their means
    parts,  # out, with MOMENTS: 2 × programs × CS: sums of x, squares about their mean
    counts,  # out, likewise: programs, how many values
    C,
    CS,
    H,
    W,
    fh,
    fw,
    tiles,  # of a sample
    each,  # tiles of a program
    groups,  # programs of a sample
    CELLS: tl.constexpr,
    BP: tl.constexpr,
    UP: tl.constexpr,
    CT: tl.constexpr,
    BY: tl.constexpr,  # what C is a multiple of
    LAST: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    C = known(C, BY)
    CS = known(CS, 16)
    pid = tl.program_id(0)
    n = pid // groups
    first = pid % groups * each
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    x += n.to(tl.int64) * (H * W * C)
    total = tl.zeros([CT], tl.float32)
    within = tl.zeros([CT], tl.float32)
    shift = tl.zeros([1, CT], tl.float32)
    count = 0
    for tile in range(first, tl.minimum(first + each, tiles)):
        cell, corner, wide, area = cells_of(tile, H, W, fh, fw, CELLS)
        added = empty_tile(CELLS, BP, CT, LAST)
        squares = empty_tile(CELLS, BP, CT, LAST)
        for start in range(0, tl.max(area, 0), BP * UP):
            values = ()
            masks = ()
            for k in tl.static_range(UP):
                at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
                values = values + (tl.load(x + at, mask, 0.0),)
                masks = masks + (mask,)
            if MOMENTS:
                if (tile == first) & (start == 0):
                    # Squares are taken about a value near the mean, or they would lose digits.
                    some = tl.sum(tl.minimum(area, BP), 0).to(tl.float32)
                    of_first = over_positions(values[0].to(tl.float32), LAST)
                    shift = (tl.sum(of_first, 0) / some)[None, :]
            for k in tl.static_range(UP):
                value = values[k].to(tl.float32)
                added += value
                if MOMENTS:
                    away = tl.where(masks[k], value - spread(shift, LAST), 0.0)
                    squares += away * away
        of_cells = over_positions(added, LAST)
        total += tl.sum(of_cells, 0)
        count += tl.sum(area, 0)
        if MOMENTS:
            within += tl.sum(over_positions(squares, LAST), 0)
        mean = of_cells / tl.maximum(area, 1).to(tl.float32)[:, None]
        row = (n * (fh * fw) + cell).to(tl.int64)
        real = (cell < fh * fw)[:, None] & (c < CS)[None, :]
        tl.store(rows + row[:, None] * CS + c[None, :], mean, real)
    if MOMENTS:
        values = count.to(tl.float32)
        off = total / values - tl.sum(shift, 0)
        within = tl.maximum(within - values * off * off, 0.0)
        here = parts + pid * CS + c
        tl.store(here, total, c < CS)
        tl.store(here + tl.num_programs(0) * CS, within, c < CS)
        if tl.program_id(1) == 0:
            tl.store(counts + pid, values)


@triton.jit(do_not_specialize=["N", "C", "CS", "JS", "H", "W", "fh", "fw", "tiles"])
def apply(
    x,
    shortcut,
    out,
    gates,
    norms,
    N,
    C,
    CS,
    JS,
    H,
    W,
    fh,
    fw,
    tiles,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    CELLS: tl.constexpr,
    BP: tl.constexpr,
    UP: tl.constexpr,
    CT: tl.constexpr,
    BY: tl.constexpr,
    LAST: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ACT: tl.constexpr,
):
    C = known(C, BY)
    CS = known(CS, 16)
    JS = known(JS, 16)
    n = tl.program_id(0) // tiles
    cell, corner, wide, area = cells_of(tl.program_id(0) % tiles, H, W, fh, fw, CELLS)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    a = tl.load(norms + SLOPE * CS + c, c < CS, 0.0)[None, :]
    b = tl.load(norms + INTERCEPT * CS + c, c < CS, 0.0)[None, :]
    real = (cell < fh * fw)[:, None] & (c < CS)[None, :]
    z = weights_of(gates, norms, cell, n, N, c, CS, JS, real, fh, fw, DOWN, ACROSS, ROWS_AT)
    steep = spread(z * a, LAST)
    level = spread(z * b, LAST)
    begin = n.to(tl.int64) * (H * W * C)
    x += begin
    shortcut += begin
    out += begin
    for start in range(0, tl.max(area, 0), BP * UP):
        values = ()
        added = ()
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            values = values + (tl.load(x + at, mask, 0.0),)
            if SHORTCUT:
                added = added + (tl.load(shortcut + at, mask, 0.0),)
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            value = values[k].to(tl.float32) * steep + level
            if SHORTCUT:
                value += added[k].to(tl.float32)
            if ACT == 1:
                value = relu(value)
            elif ACT == 2:
                value = value * tl.sigmoid(value)
            tl.store(out + at, value, mask)


@triton.jit(do_not_specialize=["N", "C", "CS", "JS", "H", "W", "fh", "fw", "tiles"])
def gather(
    grad,
    seen,  # with relu, the output; with SiLU, the shortcut
    x,
    behind,  # out, with an activation: the gradient before it, which is the shortcut's
    cell_sums,  # out: 2 × rows of cells × CS, of that gradient, and its products with x − mean
    gates,
    norms,
    N,
    C,
    CS,
    JS,
    H,
    W,
    fh,
    fw,
    tiles,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    CELLS: tl.constexpr,
    BP: tl.constexpr,
    UP: tl.constexpr,
    CT: tl.constexpr,
    BY: tl.constexpr,
    LAST: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ACT: tl.constexpr,
):
    C = known(C, BY)
    CS = known(CS, 16)
    JS = known(JS, 16)
    # Backward from where forward has ended: what it read last may still be in the cache.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    n = pid // tiles
    cell, corner, wide, area = cells_of(pid % tiles, H, W, fh, fw, CELLS)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    real = (cell < fh * fw)[:, None] & (c < CS)[None, :]
    mean = spread(tl.load(norms + MEAN * CS + c, c < CS, 0.0)[None, :], LAST)
    if ACT == 2:
        a = tl.load(norms + SLOPE * CS + c, c < CS, 0.0)[None, :]
        b = tl.load(norms + INTERCEPT * CS + c, c < CS, 0.0)[None, :]
        z = weights_of(gates, norms, cell, n, N, c, CS, JS, real, fh, fw, DOWN, ACROSS, ROWS_AT)
        steep = spread(z * a, LAST)
        level = spread(z * b, LAST)
    begin = n.to(tl.int64) * (H * W * C)
    plain = empty_tile(CELLS, BP, CT, LAST)
    crossed = empty_tile(CELLS, BP, CT, LAST)
    grad += begin
    seen += begin
    x += begin
    behind += begin
    for start in range(0, tl.max(area, 0), BP * UP):
        slopes = ()
        values = ()
        others = ()
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            slopes = slopes + (tl.load(grad + at, mask, 0.0),)
            values = values + (tl.load(x + at, mask, 0.0),)
            if ACT == 1 or (ACT == 2 and SHORTCUT):
                others = others + (tl.load(seen + at, mask, 0.0),)
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            slope = slopes[k]
            value = values[k].to(tl.float32)
            if ACT == 1:
                slope = tl.where(others[k] <= 0, 0.0, slope)
            elif ACT == 2:
                before = value * steep + level
                if SHORTCUT:
                    before += others[k].to(tl.float32)
                s = tl.sigmoid(before)
                steepness = slope.to(tl.float32) * (s * (1 + before * (1 - s)))
                slope = steepness.to(grad.dtype.element_ty)
            if ACT > 0:
                tl.store(behind + at, slope, mask)
            plain += slope.to(tl.float32)
            crossed += tl.where(mask, slope.to(tl.float32) * (value - mean), 0.0)
    row = (n * (fh * fw) + cell).to(tl.int64)
    here = cell_sums + row[:, None] * CS + c[None, :]
    tl.store(here, over_positions(plain, LAST), real)
    here += N.to(tl.int64) * (fh * fw) * CS
    tl.store(here, over_positions(crossed, LAST), real)


@triton.jit
def add_weights(
    pid, parts, grads, N, C, CX, J, span, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one scale's Ω₁ or Ω₂: the sum of its gradient's parts."""
    L: tl.constexpr = len(DOWN)
    blocks = (CX * J + BLOCK - 1) // BLOCK
    second = pid >= L * blocks  # first all scales' Ω₁, then their Ω₂
    size = tl.where(second, C * J, CX * J)
    block = pid - tl.where(second, L * blocks, 0)
    blocks = (size + BLOCK - 1) // BLOCK
    level = block // blocks
    first = pid * 0
    spans = pid * 0
    every = pid * 0
    for k in tl.static_range(L):
        t = (N * (DOWN[k] * ACROSS[k]) + span - 1) // span
        first += tl.where(k < level, t, 0)
        spans += tl.where(k == level, t, 0)
        every += t
    i = block % blocks * BLOCK + tl.arange(0, BLOCK)
    before = tl.where(second, CX * J, 0).to(tl.int64)
    here = parts + every * before + first.to(tl.int64) * size + i
    added = tl.zeros([BLOCK], tl.float32)
    for _ in range(spans):
        added += tl.load(here, i < size, 0.0)
        here += size
    tl.store(grads + L * before + level.to(tl.int64) * size + i, added, i < size)


@triton.jit
def _scatter_cells(
    pid, behind, x, grad_x, weights, pool_grads, norms, shares, sums, N, C, CS, H, W, fh, fw,
    tiles, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr, CELLS: tl.constexpr, BP: tl.constexpr, UP: tl.constexpr,
    CT: tl.constexpr, LAST: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """The gradient of x, of a tile."""
    n = pid // tiles
    cell, corner, wide, area = cells_of(pid % tiles, H, W, fh, fw, CELLS)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    a = tl.load(norms + SLOPE * CS + c, c < CS, 0.0)[None, :]
    real = (cell < fh * fw)[:, None] & (c < CS)[None, :]
    row = (n * (fh * fw) + cell).to(tl.int64)
    z = tl.load(weights + row[:, None] * CS + c[None, :], real, 0.0).to(tl.float32)
    level_at = tl.zeros([CELLS, CT], tl.float32)
    for level in tl.static_range(len(DOWN)):
        region = region_of(cell, fh, fw, DOWN[level], ACROSS[level])
        row = (N * ROWS_AT[level] + n * (DOWN[level] * ACROSS[level]) + region).to(tl.int64)
        share = 1.0 / tl.maximum(area_of(region, DOWN[level], ACROSS[level], H, W), 1.0)
        pool_grad = tl.load(pool_grads + row[:, None] * CS + c[None, :], real, 0.0)
        level_at += pool_grad.to(tl.float32) * share[:, None]
    # du = z·g + e;  dx = a·(du − mean(du) − x̂·mean(du·x̂)), with x̂ = (x − mean)·rstd
    if not FIXED:
        part = tl.load(shares)
        mean = tl.load(norms + MEAN * CS + c, c < CS, 0.0)[None, :]
        rstd = tl.load(norms + RSTD * CS + c, c < CS, 0.0)[None, :]
        level_at -= tl.load(sums + c, c < CS, 0.0)[None, :] * part
        pull = a * rstd * tl.load(sums + CS + c, c < CS, 0.0)[None, :] * part
        mean = spread(mean, LAST)
        pull = spread(pull, LAST)
    steep = spread(z * a, LAST)
    level_at = spread(level_at * a, LAST)
    begin = n.to(tl.int64) * (H * W * C)
    behind += begin
    x += begin
    grad_x += begin
    for start in range(0, tl.max(area, 0), BP * UP):
        slopes = ()
        values = ()
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            slopes = slopes + (tl.load(behind + at, mask, 0.0),)
            if not FIXED:
                values = values + (tl.load(x + at, mask, 0.0),)
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            value = slopes[k].to(tl.float32) * steep + level_at
            if not FIXED:
                value -= (values[k].to(tl.float32) - mean) * pull
            tl.store(grad_x + at, value, mask)


@triton.jit(
    do_not_specialize=["N", "C", "J", "CS", "H", "W", "fh", "fw", "tiles", "span", "adding"]
)
def scatter(
    behind,
    x,
    grad_x,  # out
    weights,  # rows of cells × CS: z
    pool_grads,  # rows × CS: gradients of each scale's means
    norms,
    shares,  # one by the values that the front norm has a channel, or 0
    sums,  # 2 × CS: of the gradient before that norm, and of its products with its output
    weight_parts,
    weight_grads,  # out: all scales' Ω₁, then their Ω₂
    N,
    C,
    J,
    CS,
    H,
    W,
    fh,
    fw,
    tiles,
    span,  # rows of a part of a weight's gradient
    adding,  # rows of programs that add these parts up
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    CELLS: tl.constexpr,
    BP: tl.constexpr,
    UP: tl.constexpr,
    CT: tl.constexpr,
    BY: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    FIXED: tl.constexpr,  # the front norm's statistics were given: x is not needed
):
    if tl.program_id(0) < adding:
        pid = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if pid < 2 * len(DOWN) * ((C * J + BLOCK - 1) // BLOCK):
            add_weights(pid, weight_parts, weight_grads, N, C, C, J, span, DOWN, ACROSS, BLOCK)
    else:
        _scatter_cells(
            tl.program_id(0) - adding, behind, x, grad_x, weights, pool_grads, norms, shares, sums,
            N, known(C, BY), known(CS, 16), H, W, fh, fw, tiles, DOWN, ACROSS, ROWS_AT, CELLS, BP,
            UP, CT, LAST, FIXED,
        )  # fmt: skip
