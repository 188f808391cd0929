"""Means over clipped windows, and their adjoint.  N batch, C channels, H W map.

A tile is BW columns × BC of the N·C planes, and walks down ROWS rows. The sum over a window's rows
goes along with it: one row enters, one leaves. The sum over its columns is a product with a band of
ones. So a map is read about twice a window, mostly from the cache, and nothing is kept in between.
A tile must hold all columns of the map, unless windows are one column wide.

Rows leave by subtraction. So that large values leave nothing behind, sums carry what their rounding
lost (Knuth's exact sum of two); that is void where a product is fused into a sum, so launch with
``enable_fp_fusion=False``. The band takes sums apart into PARTS bfloat16 numbers: two are 16 bits,
enough for half types, three all 24 of a float32. Times one they are exact, and the tensor cores add
them up in float32.

Each window has a reach down and one across: how far it goes to either side.
"""

import triton
import triton.language as tl


@triton.jit
def _held(i, reach, length):
    """Positions of an axis in the window around ``i``; 1 where ``i`` is far beyond the axis."""
    held = tl.minimum(i + reach, length - 1) - tl.maximum(i - reach, 0) + 1
    return tl.maximum(held, 1).to(tl.float32)


@triton.jit
def _tile(C, planes, BW: tl.constexpr, BC: tl.constexpr):
    """Columns, samples and channels of this program's tile, and which planes there are."""
    tiles = (planes + BC - 1) // BC
    w = tl.program_id(0) // tiles * BW + tl.arange(0, BW)
    q = (tl.program_id(0) % tiles).to(tl.int64) * BC + tl.arange(0, BC)
    return w, q // C, q % C, q < planes


@triton.jit
def _inside(w, here, W, wanted):
    """Which of the tile there is on a row, none of it unless that is wanted."""
    # Not here & wanted: to the interpreter a tile of bits and a single bit make no mask.
    return (w < tl.where(wanted, W, 0))[:, None] & here[None, :]


@triton.jit
def _places(w, n, c, stride):
    """Where the tile lies in a map with these strides, N C H W, when it is on the first row."""
    return (w.to(tl.int64) * stride[3])[:, None] + (n * stride[0] + c * stride[1])[None, :]


@triton.jit
def _row(at, r, stride, inside, share, reach, H, ADJOINT: tl.constexpr):
    """The tile on row ``r``; the adjoint divides by what windows hold."""
    x = tl.load(at + r.to(tl.int64) * stride, inside, 0.0).to(tl.float32)
    if ADJOINT:
        x = x * (share / _held(r, reach, H))[:, None]
    return x


@triton.jit
def _add(total, lost, x):
    added = total + x
    of_x = added - total
    return added, lost + ((total - (added - of_x)) + (x - of_x))


@triton.jit
def _around(i, at, stride, w, here, share, reach, H, W, ADJOINT: tl.constexpr):
    """The sum of the rows in the window around ``i``, and what it lost."""
    total = tl.full(at.shape, 0.0, tl.float32)
    lost = tl.full(at.shape, 0.0, tl.float32)
    r = tl.maximum(i - reach, 0)
    end = tl.minimum(i + reach + 1, H)
    while r < end:  # the interpreter's range takes no bounds that are known at run time only
        for k in tl.static_range(4):  # loads that do not wait for each other
            inside = _inside(w, here, W, r + k < end)
            x = _row(at, r + k, stride, inside, share, reach, H, ADJOINT)
            total, lost = _add(total, lost, x)
        r += 4
    return total, lost


@triton.jit
def _change(i, at, stride, w, here, share, reach, H, W, ADJOINT: tl.constexpr):
    """The rows that enter and leave between the windows around ``i`` and the next."""
    r = i + reach + 1
    inside = _inside(w, here, W, r < H)
    enters = _row(at, r, stride, inside, share, reach, H, ADJOINT)
    r = i - reach
    inside = _inside(w, here, W, (r >= 0) & (r < H))  # the last program goes beyond the map
    leaves = _row(at, r, stride, inside, share, reach, H, ADJOINT)
    return enters, leaves


@triton.jit
def _band(w, reach, INTERPRETED: tl.constexpr):
    """Ones where a column lies in another's window."""
    band = tl.abs(w[:, None] - w[None, :]) <= reach
    # The interpreter has no products in bfloat16.
    return band.to(tl.float32 if INTERPRETED else tl.bfloat16)


@triton.jit
def _across(sums, band, total, lost, PARTS: tl.constexpr):
    """``sums`` and those over windows of columns."""
    rest = total + lost
    for _ in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        sums = tl.dot(band, part.to(band.dtype), sums)
        rest -= part.to(tl.float32)
    return sums


@triton.jit
def means(
    x,
    outs,
    down,
    across,
    x_stride,
    out_stride,
    planes,
    C,
    H,
    W,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """Program (tile, rows, window)."""
    window = tl.program_id(2)
    out = outs[0]
    high = window * 0
    wide = window * 0
    for k in tl.static_range(len(outs)):
        if window == k:
            out = outs[k]
        high = tl.where(window == k, down[k], high)
        wide = tl.where(window == k, across[k], wide)
    w, n, c, here = _tile(C, planes, BW, BC)
    at = x + _places(w, n, c, x_stride)
    to = out + _places(w, n, c, out_stride)
    band = _band(w, wide, INTERPRETED)
    share = 1 / _held(w, wide, W)
    first = tl.program_id(1) * ROWS
    total, lost = _around(first, at, x_stride[2], w, here, share, high, H, W, False)
    for step in range(ROWS):
        i = first + step
        # Asked for before the product, needed after it.
        enters, leaves = _change(i, at, x_stride[2], w, here, share, high, H, W, False)
        sums = _across(tl.full([BW, BC], 0.0, tl.float32), band, total, lost, PARTS)
        mean = sums * (share / _held(i, high, H))[:, None]
        tl.store(to + i.to(tl.int64) * out_stride[2], mean, _inside(w, here, W, i < H))
        total, lost = _add(total, lost, enters)
        total, lost = _add(total, lost, -leaves)


@triton.jit
def adjoint(
    grads,
    out,
    down,
    across,
    grad_stride,
    out_stride,
    planes,
    C,
    H,
    W,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """Program (tile, rows): the sum over all windows, each with a gradient of its own."""
    w, n, c, here = _tile(C, planes, BW, BC)
    places = _places(w, n, c, grad_stride)
    to = out + _places(w, n, c, out_stride)
    first = tl.program_id(1) * ROWS
    rows = ()
    for k in tl.static_range(len(grads)):
        share = 1 / _held(w, across[k], W)
        at = grads[k] + places
        rows += (_around(first, at, grad_stride[2], w, here, share, down[k], H, W, True),)
    for step in range(ROWS):
        i = first + step
        sums = tl.full([BW, BC], 0.0, tl.float32)
        moved = ()
        for k in tl.static_range(len(grads)):
            share = 1 / _held(w, across[k], W)
            at = grads[k] + places
            enters, leaves = _change(i, at, grad_stride[2], w, here, share, down[k], H, W, True)
            total, lost = rows[k]
            sums = _across(sums, _band(w, across[k], INTERPRETED), total, lost, PARTS)
            total, lost = _add(total, lost, enters)
            moved += (_add(total, lost, -leaves),)
        rows = moved
        tl.store(to + i.to(tl.int64) * out_stride[2], sums, _inside(w, here, W, i < H))
