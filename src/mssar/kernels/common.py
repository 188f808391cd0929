"""What several kernels need: where cells lie, sums of parts, products, a scale's share.

A part is what one program has summed. Programs never add to the same number, so results do not
depend on which of them came first. The parts are added up in their order by the last program to
come (``last_of``), or by whoever needs the sum; all at once where they fit in registers (CHUNK of
them), since a loop would wait for memory again and again.
"""

import triton
import triton.language as tl


@triton.jit
def ceil_of(i, n, parts):
    """Where part ``i`` of ``parts`` begins on an axis of ``n``."""
    return (i * n + parts - 1) // parts


@triton.jit
def area_of(k, down, across, H, W):
    """Positions of region ``k`` of a grid."""
    i = k // across
    j = k % across
    rows = ceil_of(i + 1, H, down) - ceil_of(i, H, down)
    return (rows * (ceil_of(j + 1, W, across) - ceil_of(j, W, across))).to(tl.float32)


@triton.jit
def region_of(q, FH, FW, down, across):
    """The region of a coarser grid that cell ``q`` of the fine grid lies in."""
    return ((q // FW) * down // FH) * across + (q % FW) * across // FW


@triton.jit
def moments_of(sums, squares, stride, c, in_c, parts, count, total, CHUNK: tl.constexpr):
    """Mean and biased variance from parts' sums and squares about their own means.

    Every part holds ``count`` values but the last, which has the rest of ``total``.
    """
    i = tl.arange(0, CHUNK)
    if parts <= CHUNK:
        at = i[:, None] * stride + c[None, :]
        held = (i < parts)[:, None] & in_c[None, :]
        added = tl.load(sums + at, held, 0.0, cache_modifier=".cg")
        within = tl.load(squares + at, held, 0.0, cache_modifier=".cg")
        mean = tl.sum(added, 0) / total
        variance = tl.sum(_about(added, within, mean, i, count, total), 0) / total
    else:
        mean = sums_of(sums, stride, c, in_c, parts, CHUNK) / total
        variance = tl.zeros([c.shape[0]], tl.float32)
        for start in range(0, parts, CHUNK):
            at = (start + i)[:, None] * stride + c[None, :]
            held = (start + i < parts)[:, None] & in_c[None, :]
            added = tl.load(sums + at, held, 0.0, cache_modifier=".cg")
            within = tl.load(squares + at, held, 0.0, cache_modifier=".cg")
            variance += tl.sum(_about(added, within, mean, start + i, count, total), 0)
        variance = variance / total
    return mean, variance


@triton.jit
def _about(added, within, mean, part, count, total):
    """Parts' squares about the mean of all; none of those beyond the last."""
    n = tl.maximum(tl.minimum(count, total - part * count), 0).to(tl.float32)
    away = added * (1.0 / tl.maximum(n, 1.0))[:, None] - mean[None, :]
    return within + n[:, None] * (away * away)


@triton.jit
def known(width, BY: tl.constexpr):
    """The same number, in a way that shows the compiler what it is a multiple of."""
    return width // BY * BY


@triton.jit
def sums_of(parts_of, stride, c, in_c, parts, CHUNK: tl.constexpr):
    """The sum of parts."""
    added = tl.zeros([c.shape[0]], tl.float32)
    for start in range(0, parts, CHUNK):
        i = start + tl.arange(0, CHUNK)
        held = (i < parts)[:, None] & in_c[None, :]
        here = parts_of + i[:, None] * stride + c[None, :]
        added += tl.sum(tl.load(here, held, 0.0, cache_modifier=".cg"), 0)
    return added


@triton.jit
def both_sums_of(some, others, stride, c, in_c, parts, CHUNK: tl.constexpr):
    """The sums of two kinds of parts, which are waited for together."""
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
def affine(c, in_c, gamma, beta, mean, variance, eps):
    """BN as slope and intercept."""
    a = tl.load(gamma + c, in_c, 0.0).to(tl.float32) * tl.rsqrt(variance + eps)
    return a, tl.load(beta + c, in_c, 0.0).to(tl.float32) - mean * a


@triton.jit
def lines_of(c, in_c, gamma, mean, variance, eps, added, crossed, rows):
    """BN's gradient as s·grad + p·value + q, from the sums of grad and grad · normal value."""
    rstd = tl.rsqrt(variance + eps)
    s = tl.load(gamma + c, in_c, 0.0).to(tl.float32) * rstd
    p = -s * rstd * crossed / rows
    return s, p, -s * added / rows - p * mean


@triton.jit
def later_lines(
    parts, all_tiles, moments, gammas, scale, first, tiles, rows, JS, j, in_j, eps,
    L: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sums that parts are of, for a hidden layer's BN, and its gradient's lines."""
    of = parts + first * JS
    mean = tl.load(moments + scale * JS + j, in_j, 0.0)
    variance = tl.load(moments + (L + scale) * JS + j, in_j, 1.0)
    added, crossed = both_sums_of(of, of + all_tiles * JS, JS, j, j < JS, tiles, PARTS)
    gamma = pointer_of(gammas, scale, L)
    s, p, q = lines_of(j, in_j, gamma, mean, variance, eps, added, crossed, rows)
    return added, crossed, s, p, q


@triton.jit
def relu(x):
    """As PyTorch has it: what is not a number stays that."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def rounded(a, PRECISION: tl.constexpr):
    """What a product takes for ``a``; but for TF32, where it is nearly that."""
    if PRECISION == "bf16":
        a = a.to(tl.bfloat16)
    return a.to(tl.float32)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``, summed in float32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)


@triton.jit
def scale_of(
    tile,
    N,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BM: tl.constexpr,
):
    """Which scale a tile of rows is of; its first tile, tiles, rows, and rows before them."""
    scale = tile * 0
    first = tile * 0
    tiles = tile * 0
    rows = tile * 0
    before = tile * 0
    start = tile * 0
    for level in tl.static_range(len(DOWN)):
        n = N * DOWN[level] * ACROSS[level]
        t = (n + BM - 1) // BM
        here = (tile >= start) & (tile < start + t)
        scale = tl.where(here, level, scale)
        first = tl.where(here, start, first)
        tiles = tl.where(here, t, tiles)
        rows = tl.where(here, n, rows)
        before = tl.where(here, N * ROWS_AT[level], before)
        start += t
    return scale, first, tiles, rows, before


@triton.jit
def one_of(numbers: tl.constexpr, scale):
    """``numbers[scale]``, where the scale is known at run time only."""
    found = scale * 0
    for level in tl.static_range(len(numbers)):
        found = tl.where(scale == level, numbers[level], found)
    return found


@triton.jit
def pointer_of(pointers, scale, L: tl.constexpr):
    """``pointers[scale]``, likewise."""
    found = pointers[0]
    for level in tl.static_range(1, L):
        if scale == level:
            found = pointers[level]
    return found
