"""What several kernels need: sums of parts, statistics, products, a scale's share of the rows.

A part is what one program has summed. Programs never add to the same number, so results do not
depend on which of them came first: the last program to come (``last_of``) adds the parts up in
their order.

Norms lie in one table, TABLE rows each: mean, variance, 1/deviation, slope, intercept, γ, β.
"""

import triton
import triton.language as tl

from mssar.kernels.tail import call

MEAN = tl.constexpr(call.MEAN)
VARIANCE = tl.constexpr(call.VARIANCE)
RSTD = tl.constexpr(call.RSTD)
SLOPE = tl.constexpr(call.SLOPE)
INTERCEPT = tl.constexpr(call.INTERCEPT)
GAMMA = tl.constexpr(call.GAMMA)
BETA = tl.constexpr(call.BETA)
TABLE = tl.constexpr(call.TABLE)
AT_ONCE = tl.constexpr(4096)  # numbers of parts that are read at once


@triton.jit
def quotient(a, b):
    """``a // b`` of numbers from 0 to 2²⁰: a tenth of the time of a division of integers.

    Half a step above a whole number, what is lost by rounding does not reach the next one. (Nor is
    there an addition of integers that a compiler could make narrow: LOG.md, 2026-11-16.)
    """
    return ((a + 0.5) * (1.0 / (b + 0.0))).to(tl.int32)


@triton.jit
def ceil_of(i, n, parts):
    """Where part ``i`` of ``parts`` begins on an axis of ``n``."""
    return quotient(i * n + (parts - 1), parts)


@triton.jit
def area_of(k, down, across, H, W):
    """Positions of region ``k`` of a grid."""
    i = quotient(k, across)
    j = k - i * across
    rows = ceil_of(i + 1, H, down) - ceil_of(i, H, down)
    return (rows * (ceil_of(j + 1, W, across) - ceil_of(j, W, across))).to(tl.float32)


@triton.jit
def region_of(cell, fh, fw, down, across):
    """The region of a coarser grid that a cell of the fine grid lies in."""
    i = quotient(cell, fw)
    return quotient(i * down, fh) * across + quotient((cell - i * fw) * across, fw)


@triton.jit
def members_of(row, cell, fh, fw, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr):
    """Ones where a cell lies in the region of a row; a sample's rows, all scales."""
    found = tl.zeros([row.shape[0], cell.shape[0]], tl.float32)
    for level in tl.static_range(len(DOWN)):
        region = region_of(cell, fh, fw, DOWN[level], ACROSS[level]) + ROWS_AT[level]
        here = (row >= ROWS_AT[level]) & (row < ROWS_AT[level] + DOWN[level] * ACROSS[level])
        here = here[:, None] & (row[:, None] == region[None, :])
        found = tl.where(here & (cell < fh * fw)[None, :], 1.0, found)
    return found


@triton.jit
def level_of(row, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, N):
    """The scale of a sample's rows, their number in it, rows of a sample, and rows before them."""
    level = row * 0
    first = row * 0
    each = row * 0 + DOWN[0] * ACROSS[0]
    for k in tl.static_range(1, len(DOWN)):
        here = row >= ROWS_AT[k]
        level = tl.where(here, k, level)
        first = tl.where(here, ROWS_AT[k], first)
        each = tl.where(here, DOWN[k] * ACROSS[k], each)
    return level, row - first, each, N * first


@triton.jit
def known(width, BY: tl.constexpr):
    """The same number, in a way that shows the compiler what it is a multiple of."""
    return width // BY * BY


@triton.jit
def last_of(counter, count):
    """Whether this program is the last of so many; it sees then what the others have stored.

    The counter is 0 before the first and after the last.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def sums_of(some, others, stride, c, in_c, parts):
    """The sums of two kinds of parts, which are waited for together."""
    CHUNK: tl.constexpr = AT_ONCE // c.shape[0]
    added = tl.zeros([c.shape[0]], tl.float32)
    others_added = tl.zeros([c.shape[0]], tl.float32)
    for start in range(0, parts, CHUNK):
        i = start + tl.arange(0, CHUNK)
        held = (i < parts)[:, None] & in_c[None, :]
        here = i[:, None] * stride + c[None, :]
        part = tl.load(some + here, held, 0.0, cache_modifier=".cg")
        other = tl.load(others + here, held, 0.0, cache_modifier=".cg")
        added += tl.sum(part, 0)
        others_added += tl.sum(other, 0)
    return added, others_added


@triton.jit
def moments_of(sums, squares, counts, stride, c, in_c, parts):
    """Mean and biased variance from parts' sums, squares about their own means, and counts."""
    CHUNK: tl.constexpr = AT_ONCE // c.shape[0]
    # Means of parts are taken about the first one's: their squares would lose digits otherwise.
    near = tl.load(sums + c, in_c, 0.0, cache_modifier=".cg")
    near = near / tl.load(counts, cache_modifier=".cg")
    total = 0.0
    added = tl.zeros([c.shape[0]], tl.float32)
    spread = tl.zeros([c.shape[0]], tl.float32)
    for start in range(0, parts, CHUNK):
        i = start + tl.arange(0, CHUNK)
        held = (i < parts)[:, None] & in_c[None, :]
        here = i[:, None] * stride + c[None, :]
        n = tl.load(counts + i, i < parts, 0.0, cache_modifier=".cg")
        part = tl.load(sums + here, held, 0.0, cache_modifier=".cg")
        within = tl.load(squares + here, held, 0.0, cache_modifier=".cg")
        away = part - n[:, None] * near[None, :]
        total += tl.sum(n, 0)
        added += tl.sum(away, 0)
        spread += tl.sum(within + away * away * (1.0 / tl.maximum(n, 1.0))[:, None], 0)
    off = added / total
    return near + off, tl.maximum(spread / total - off * off, 0.0)


@triton.jit
def keep_norm(norm, stride, c, in_c, mean, variance, gamma, beta, eps):
    """What a norm's table says, from its statistics."""
    rstd = tl.rsqrt(variance + eps)
    slope = gamma * rstd
    tl.store(norm + MEAN * stride + c, mean, in_c)
    tl.store(norm + VARIANCE * stride + c, variance, in_c)
    tl.store(norm + RSTD * stride + c, rstd, in_c)
    tl.store(norm + SLOPE * stride + c, slope, in_c)
    tl.store(norm + INTERCEPT * stride + c, beta - mean * slope, in_c)


@triton.jit
def keep_lines(lines, norm, stride, c, in_c, added, crossed, share):
    """BN's gradient, s·grad + p·value + q, from the sums of grad and of grad · normal value.

    ``share`` is one by the values a channel has; 0 where statistics were given.
    """
    mean = tl.load(norm + MEAN * stride + c, in_c, 0.0)
    rstd = tl.load(norm + RSTD * stride + c, in_c, 0.0)
    s = tl.load(norm + SLOPE * stride + c, in_c, 0.0)
    p = -s * rstd * crossed * share
    tl.store(lines + c, s, in_c)
    tl.store(lines + stride + c, p, in_c)
    tl.store(lines + 2 * stride + c, -s * added * share - p * mean, in_c)


@triton.jit
def in_front(grads, values, at, mask, lines, stride, c, in_c):
    """The gradient before a BN, by these lines."""
    s = tl.load(lines + c, in_c, 0.0)
    p = tl.load(lines + stride + c, in_c, 0.0)
    q = tl.load(lines + 2 * stride + c, in_c, 0.0)
    grad = tl.load(grads + at, mask, 0.0).to(tl.float32)
    value = tl.load(values + at, mask, 0.0).to(tl.float32)
    return tl.where(mask, grad * s[None, :] + (value * p[None, :] + q[None, :]), 0.0)


@triton.jit
def relu(x):
    """As PyTorch has it: what is not a number stays that."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``, summed in float32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def scale_of(tile, N, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS_AT: tl.constexpr, size):
    """Which scale a tile of ``size`` rows is of; its first tile, tiles, rows, rows before them."""
    scale = tile * 0
    first = tile * 0
    tiles = tile * 0
    rows = tile * 0
    before = tile * 0
    start = tile * 0
    for level in tl.static_range(len(DOWN)):
        n = N * (DOWN[level] * ACROSS[level])
        t = (n + size - 1) // size
        here = (tile >= start) & (tile < start + t)
        scale = tl.where(here, level, scale)
        first = tl.where(here, start, first)
        tiles = tl.where(here, t, tiles)
        rows = tl.where(here, n, rows)
        before = tl.where(here, N * ROWS_AT[level], before)
        start += t
    return scale, first, tiles, rows, before


@triton.jit
def hidden_norm(norms, scale, CS, JS):
    """Where the table of a hidden layer's norm begins; the front norm's comes first."""
    return norms + TABLE * (CS + scale * JS)


@triton.jit
def gate_norm(norms, scale, CS, JS, L: tl.constexpr):
    return norms + TABLE * (CS + L * JS + scale * CS)
