"""A dense step's passes.  N batch, C new channels, CX channels so far, H W map, fh fw cells.

carry       x, gates, cells → z · x; the cells' means of all CX + C channels
carry_back  grad, x         → the gradient of x, sums over cells for that of z
collect     pools' grads    → the gradient of cells' means; sums of parts of the weights' gradients
unpool      that            → the gradient of the map whose means they are

The main vector's means over cells are carried along, so that a step passes over its new channels
only: z is one number on a cell, so that the mean of z · x is z times that of x. Rows of means are
CXS numbers long, or after a step NS, multiples of 16 with zeros after the last channel.
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
from mssar.kernels.triton.common import area_of, known, quotient, region_of
from mssar.kernels.triton.maps import add_weights


@triton.jit
def _weigh(
    pid, x, out, nexts, gates, norms, N, C, CX, CS, NS, JS, H, W, fh, fw, tiles,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, CELLS: tl.constexpr,
    BP: tl.constexpr, UP: tl.constexpr, CT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """z · x of a tile, and its cells' means of that."""
    n = pid // tiles
    cell, corner, wide, area = cells_of(pid % tiles, H, W, fh, fw, CELLS)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    real = (cell < fh * fw)[:, None] & (c < CS)[None, :]
    z = weights_of(gates, norms, cell, n, N, c, CS, JS, real, fh, fw, DOWN, ACROSS, ROWS_AT)
    steep = spread(z, LAST)
    added = empty_tile(CELLS, BP, CT, LAST)
    begin = n.to(tl.int64) * (H * W * C)
    x += begin
    out += begin
    for start in range(0, tl.max(area, 0), BP * UP):
        values = ()
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            values = values + (tl.load(x + at, mask, 0.0),)
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            value = values[k].to(tl.float32)
            added += value
            tl.store(out + at, value * steep, mask)
    mean = over_positions(added, LAST) / tl.maximum(area, 1).to(tl.float32)[:, None]
    row = (n * (fh * fw) + cell).to(tl.int64)
    here = nexts + row[:, None] * NS + (CX + c)[None, :]
    tl.store(here, mean * z, (cell < fh * fw)[:, None] & in_c[None, :])


@triton.jit
def _copy_rows(
    tile, cells, nexts, count, CX, CXS, begin, NS, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What some rows have already; zeros from column ``begin`` on."""
    row = tile * ROWS + tl.arange(0, ROWS)
    in_r = (row < count)[:, None]
    at = row.to(tl.int64)[:, None]
    for start in range(0, NS, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        value = tl.load(cells + at * CXS + k[None, :], in_r & (k < CX)[None, :], 0.0)
        mine = (k < CX) | ((k >= begin) & (k < NS))
        tl.store(nexts + at * NS + k[None, :], value, in_r & mine[None, :])


@triton.jit(
    do_not_specialize=["N", "C", "CX", "CS", "CXS", "NS", "JS", "H", "W", "fh", "fw", "tiles"]
)
def carry(
    x,
    out,  # out: z · x
    cells,  # rows of cells × CXS, float32: the main vector's means
    nexts,  # out: rows of cells × NS, float32: these, and after them those of the output
    gates,
    norms,
    N,
    C,
    CX,
    CS,
    CXS,
    NS,
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
    BY: tl.constexpr,  # what C is a multiple of
    ROWS: tl.constexpr,  # that are copied at once, and COLUMNS of them
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
):
    CS = known(CS, 16)
    CXS = known(CXS, 16)
    NS = known(NS, 16)
    JS = known(JS, 16)
    pid = tl.program_id(0)
    if pid < N * tiles:
        _weigh(
            pid, x, out, nexts, gates, norms, N, known(C, BY), CX, CS, NS, JS, H, W, fh, fw, tiles,
            DOWN, ACROSS, ROWS_AT, CELLS, BP, UP, CT, LAST,
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        _copy_rows(pid - N * tiles, cells, nexts, N * (fh * fw), CX, CXS, CX + C, NS, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["N", "C", "CX", "CS", "NS", "JS", "H", "W", "fh", "fw", "tiles"])
def carry_back(
    grad,
    x,
    grad_x,  # out
    next_grads,  # with CARRIED: rows of cells × NS, of the means that were carried on
    cell_sums,  # out: 2 × rows of cells × CS, as `gather` has them: zeros, and z's gradient
    gates,
    norms,
    N,
    C,
    CX,
    CS,
    NS,
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
    CARRIED: tl.constexpr,
):
    """A mean's gradient is every position's, by its share: out has both, and so x and z."""
    C = known(C, BY)
    CS = known(CS, 16)
    NS = known(NS, 16)
    JS = known(JS, 16)
    # Backward from where forward has ended: what it read last may still be in the cache.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    n = pid // tiles
    cell, corner, wide, area = cells_of(pid % tiles, H, W, fh, fw, CELLS)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    in_cells = (cell < fh * fw)[:, None]
    real = in_cells & (c < CS)[None, :]
    row = (n * (fh * fw) + cell).to(tl.int64)[:, None]
    z = weights_of(gates, norms, cell, n, N, c, CS, JS, real, fh, fw, DOWN, ACROSS, ROWS_AT)
    steep = spread(z, LAST)
    if CARRIED:
        of_mean = tl.load(next_grads + row * NS + (CX + c)[None, :], in_cells & in_c[None, :], 0.0)
        level = spread(of_mean / tl.maximum(area, 1).to(tl.float32)[:, None], LAST)
    crossed = empty_tile(CELLS, BP, CT, LAST)
    begin = n.to(tl.int64) * (H * W * C)
    grad += begin
    x += begin
    grad_x += begin
    for start in range(0, tl.max(area, 0), BP * UP):
        slopes = ()
        values = ()
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            slopes = slopes + (tl.load(grad + at, mask, 0.0),)
            values = values + (tl.load(x + at, mask, 0.0),)
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            slope = slopes[k].to(tl.float32)
            if CARRIED:
                slope += level
            crossed += slope * values[k].to(tl.float32)
            tl.store(grad_x + at, slope * steep, mask)
    here = cell_sums + row * CS + c[None, :]
    tl.store(here, tl.zeros([CELLS, CT], tl.float32), real)
    here += N.to(tl.int64) * (fh * fw) * CS
    tl.store(here, over_positions(crossed, LAST), real)


@triton.jit
def _collect_rows(
    tile, pool_grads, next_grads, cell_grads, N, CX, CXS, NS, H, W, fh, fw, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CARRIED: tl.constexpr,
):  # fmt: skip
    """Of some cells: their share in what their regions have, and what later steps have left."""
    first = tile * ROWS // (fh * fw)
    cell = tile * ROWS - first * (fh * fw) + tl.arange(0, ROWS)
    over = quotient(cell, fh * fw)
    n = first + over
    cell -= over * (fh * fw)
    row = tile * ROWS + tl.arange(0, ROWS)
    in_r = (row < N * (fh * fw))[:, None]
    at = row.to(tl.int64)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = in_r & (c < CXS)[None, :]
    grad = tl.zeros([ROWS, COLUMNS], tl.float32)
    if CARRIED:
        grad = tl.load(next_grads + at * NS + c[None, :], in_r & (c < CX)[None, :], 0.0)
    area = area_of(cell, fh, fw, H, W)
    for level in tl.static_range(len(DOWN)):
        region = region_of(cell, fh, fw, DOWN[level], ACROSS[level])
        its = (N * ROWS_AT[level] + n * (DOWN[level] * ACROSS[level]) + region).to(tl.int64)
        share = area / tl.maximum(area_of(region, DOWN[level], ACROSS[level], H, W), 1.0)
        of_region = tl.load(pool_grads + its[:, None] * CXS + c[None, :], mask, 0.0)
        grad += of_region.to(tl.float32) * share[:, None]
    tl.store(cell_grads + at * CXS + c[None, :], grad, mask)


@triton.jit(
    do_not_specialize=["N", "C", "J", "CX", "CXS", "NS", "H", "W", "fh", "fw", "span", "adding"]
)
def collect(
    pool_grads,  # rows × CXS: gradients of each scale's means
    next_grads,  # with CARRIED: rows of cells × NS
    cell_grads,  # out: rows of cells × CXS, float32
    weight_parts,
    weight_grads,  # out: all scales' Ω₁, then their Ω₂
    N,
    C,
    J,
    CX,
    CXS,
    NS,
    H,
    W,
    fh,
    fw,
    span,  # rows of a part of a weight's gradient
    adding,  # rows of programs that add these parts up
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CARRIED: tl.constexpr,
):
    if tl.program_id(0) < adding:
        pid = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        blocks = (CX * J + BLOCK - 1) // BLOCK + (C * J + BLOCK - 1) // BLOCK
        if pid < len(DOWN) * blocks:
            add_weights(pid, weight_parts, weight_grads, N, C, CX, J, span, DOWN, ACROSS, BLOCK)
    else:
        _collect_rows(
            tl.program_id(0) - adding, pool_grads, next_grads, cell_grads, N, CX, known(CXS, 16),
            known(NS, 16), H, W, fh, fw, DOWN, ACROSS, ROWS_AT, ROWS, COLUMNS, CARRIED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["C", "CS", "H", "W", "fh", "fw", "tiles"])
def unpool(
    cell_grads,  # rows of cells × CS
    grad_x,  # out
    C,
    CS,
    H,
    W,
    fh,
    fw,
    tiles,
    CELLS: tl.constexpr,
    BP: tl.constexpr,
    UP: tl.constexpr,
    CT: tl.constexpr,
    BY: tl.constexpr,
    LAST: tl.constexpr,
):
    """A mean's gradient, by every position's share."""
    C = known(C, BY)
    CS = known(CS, 16)
    n = tl.program_id(0) // tiles
    cell, corner, wide, area = cells_of(tl.program_id(0) % tiles, H, W, fh, fw, CELLS)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < C
    row = (n * (fh * fw) + cell).to(tl.int64)
    real = (cell < fh * fw)[:, None] & in_c[None, :]
    grad = tl.load(cell_grads + row[:, None] * CS + c[None, :], real, 0.0)
    grad = spread(grad / tl.maximum(area, 1).to(tl.float32)[:, None], LAST)
    value = grad + empty_tile(CELLS, BP, CT, LAST)
    grad_x += n.to(tl.int64) * (H * W * C)
    for start in range(0, tl.max(area, 0), BP * UP):
        for k in tl.static_range(UP):
            at, mask = places_of(start + k * BP, corner, wide, area, c, in_c, C, H, W, BP, LAST)
            tl.store(grad_x + at, value, mask)
