"""Launches of a tail's kernels, backward: buffers and arguments.  N batch, C channels, L scales."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from mssar.kernels import branches_backward, gates_backward, maps_backward, weights
from mssar.kernels.geometry import power
from mssar.kernels.launch import FOLDED, packed_weights
from mssar.kernels.plan import (
    SCATTERED,
    WARPS,
    WARPS_OF_MAPS,
    Products,
    chunk,
    members,
    multiple,
    regions,
    span,
)
from mssar.kernels.shapes import Backward, Epsilons, Forward, gradients, grids, kept, padded, width
from mssar.kernels.task import NUMBER, Task, beside, dense_map, laid_out

SLOPES = 16, 256  # rows and channels of a program that takes gradients through a BN
ADDED = 512  # numbers of a program that adds up parts of weights' gradients


def backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    params: Sequence[Tensor],
    made: Forward,
    scales: Sequence[int],
    eps: Epsilons,
    relu: bool,
    write: bool,
    precision: str,
) -> Backward:
    """All gradients of ``launch.forward``; the shortcut's where ``write`` says so."""
    grads = gradients(x, gamma, params, write)
    task = Task(dense_map(x), gamma, beta, params, grids(x, scales), eps, precision)
    (n, c), x = task.shape, task.x
    grad = laid_out(grad, x)
    out = laid_out(made.out, x) if relu else x
    rows = (n * task.geo.cells if task.levels else 0, c)
    z = x.new_empty(rows, dtype=kept(x))
    gate_grads = torch.empty_like(made.gates)
    parts = x.new_empty((2, task.levels + 1, task.cut.groups, c), **NUMBER)
    _gather(task, grad, out, grads.shortcut, z, made, gate_grads, parts, relu, write)
    past = x.new_empty((2, c), **NUMBER)
    lines = settle(task, parts, past, made.gate_moments, grads.params)
    sums, pool_grads, stream = past, parts, None  # without pools nothing reads their gradients
    held: tuple[Tensor, ...] = ()
    if task.levels:
        # What the second stream reads must live until it is waited for.
        sums, pool_grads, stream, held = _branches(task, made, gate_grads, lines, past, grads)
    cut = task.cut
    behind = grads.shortcut if write else grad
    maps_backward.scatter[(cut.programs, cut.blocks)](
        behind, out, x, grads.x, z, pool_grads, made.moments, sums, grads.gamma, grads.beta,
        n, c, *x.stride(), eps.norm,
        **task.map(), **task.grid(), **cut.scattered.how(),
        NORM=task.norm, RELU=relu and not write, num_warps=WARPS_OF_MAPS,
    )  # fmt: skip
    if stream is not None:
        torch.cuda.current_stream(x.device).wait_stream(stream)
    del held
    return grads


def _gather(
    task: Task, grad: Tensor, out: Tensor, behind: Tensor, z: Tensor, made: Forward,
    gate_grads: Tensor, parts: Tensor, relu: bool, write: bool,
) -> None:  # fmt: skip
    (n, c), cut, geo, x = task.shape, task.cut, task.geo, task.x
    _, _, _, _, gammas, betas = task.split(task.params)
    means, variances = (some.unbind() for some in made.gate_moments)
    together = power(cut.group * geo.cells)
    size = together * cut.channels
    apart = task.levels > 0 and size > SCATTERED
    whole = task.whole(cut.gathered.cells) and not apart
    sums = z.new_empty((2, *(z.shape if not whole else (0, 0))), **NUMBER)
    gates = made.gates, means, variances, gammas, betas, gate_grads, parts
    how = dict(
        task.grid(), FH=geo.fine[0], FW=geo.fine[1], MEMBERS=members(geo, geo.grids),
        REGIONS=regions(geo.grids, cut.group), ALL=together, CT=cut.channels,
        NORM=task.norm, NESTED=cut.nested,
    )  # fmt: skip
    maps_backward.gather[(cut.groups, cut.blocks)](
        grad, out, x, behind, sums, z, made.moments, task.beta, *gates,
        n, c, *x.stride(), cut.group, task.eps.gate,
        **{**task.map(), **how}, CELLS=cut.gathered.cells, STAGES=cut.gathered.stages,
        RELU=relu, WRITE=write, WHOLE=whole, APART=apart, num_warps=cut.grouped_warps,
    )  # fmt: skip
    if apart:
        gates_backward.open_gates[(cut.groups, cut.blocks)](
            sums, z, made.moments, task.beta, *gates, n, c, cut.group, task.eps.gate, **how,
            num_warps=max(WARPS_OF_MAPS, min(8, size // 512)),
        )  # fmt: skip


def settle(
    task: Task, parts: Tensor, past: Tensor, moments: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    """Add up what the gates' BN and the one in front need; the lines of the gates' gradients."""
    n, c = task.shape
    lines = parts.new_empty((3, task.levels, c))
    _, _, _, _, gammas, _ = task.split(task.params)
    _, _, _, _, d_gammas, d_betas = task.split(grads)
    groups, grid = parts.shape[2], task.grid()
    programs = task.levels + task.norm
    if programs:
        branches_backward.settle[(-(-c // FOLDED), programs)](
            parts, past, moments, gammas, lines, d_gammas, d_betas, n, c, groups, task.eps.gate,
            DOWN=grid["DOWN"], ACROSS=grid["ACROSS"], BC=FOLDED, CHUNK=chunk(groups, FOLDED),
            PAST=task.norm, num_warps=4,
        )  # fmt: skip
    return lines


def _branches(
    task: Task, made: Forward, gate_grads: Tensor, lines: Tensor, past: Tensor, grads: Backward
) -> tuple[Tensor, Tensor, torch.cuda.Stream | None, tuple[Tensor, ...]]:
    """BN's sums for x, the pools' gradients; the stream on which weights' are, what they read."""
    (n, c), geo, sizes, eps = task.shape, task.geo, task.sizes, task.eps
    j, js = width(task.params), made.hidden.shape[1]
    count, most = geo.tiles(n, sizes.rows), geo.most_tiles(n, sizes.rows)
    _, gammas, betas, _, _, _ = task.split(task.params)
    _, d_gammas, d_betas, _, _, _ = task.split(grads.params)
    hidden_parts = lines.new_empty((2, count, js))
    hidden_lines = lines.new_empty((3, task.levels, js))
    hidden_grads = torch.empty_like(made.hidden)
    gate_slopes = torch.empty_like(made.gates)
    pool_grads = torch.empty_like(made.gates)
    pool_parts = lines.new_empty((count, c))
    sums = torch.empty_like(past)
    expands, _, reduces = packed_weights(task, made.packed)
    cut = dict(task.grid(), **task.product(), BM=sizes.rows, num_warps=WARPS)
    across = -(-j // sizes.hidden)
    if across > 1:
        _slopes(task, gate_grads, made.gates, lines, gate_slopes, c)
    branches_backward.expand_backward[(count, across)](
        gate_grads, made.gates, lines, made.hidden, made.hidden_moments, gammas, betas, expands,
        gate_slopes, hidden_grads, hidden_parts, hidden_lines, d_gammas, d_betas, made.counters,
        n, c, j, js, padded(j), eps.hidden, BJ=sizes.hidden, BK=sizes.deep,
        TILES=chunk(most, sizes.hidden), READY=across > 1, LATER=sizes.later,
        **cut, num_stages=sizes.stages,
    )  # fmt: skip
    if sizes.shared:
        slopes = torch.empty_like(hidden_grads)
        _slopes(task, hidden_grads, made.hidden, hidden_lines, slopes, j)
        hidden_grads = slopes
    # Nothing waits for these gradients, and what follows leaves arithmetic units idle.
    stream, held = weight_gradients(
        task, sizes, (gate_slopes, made.hidden, made.hidden_moments, hidden_grads, hidden_lines),
        hidden_parts, made.normal, made.moments, grads.params,
    )  # fmt: skip
    branches_backward.reduce_backward[(count, -(-c // sizes.channels))](
        hidden_grads, made.hidden, hidden_lines, hidden_parts, made.hidden_moments, gammas,
        d_gammas, d_betas, reduces, made.normal, pool_grads, lines,
        made.moments, pool_parts, past, sums, made.counters, n, c, padded(c), c, j, js, eps.hidden,
        H=task.x.shape[2], W=task.x.shape[3], POOLS_AT=geo.pools_at, BC=sizes.channels,
        BK=sizes.hidden, TILES=chunk(count, sizes.channels), NORM=task.norm, SUMS=False,
        CARRY=False, PARTS=chunk(most, sizes.hidden), READY=sizes.shared, LATER=sizes.later,
        BY=multiple(c), **cut, num_stages=sizes.through,
    )  # fmt: skip
    return sums, pool_grads, stream, held


def _slopes(
    task: Task, grads: Tensor, values: Tensor, lines: Tensor, made: Tensor, width: int
) -> None:
    """Gradients in front of a BN, once for all products that need them."""
    n, wide = task.shape[0], min(power(grads.shape[1]), SLOPES[1])
    branches_backward.slopes[(task.geo.tiles(n, SLOPES[0]), -(-grads.shape[1] // wide))](
        grads, values, lines, made, n, width, grads.shape[1], **task.grid(), BM=SLOPES[0], BC=wide,
        num_warps=WARPS,
    )  # fmt: skip


def weight_gradients(
    task: Task,
    sizes: Products,
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    hidden_parts: Tensor,
    normal: Tensor,
    moments: Tensor | None,
    grads: Sequence[Tensor],
) -> tuple[torch.cuda.Stream | None, tuple[Tensor, ...]]:
    """Those of Ω₁ and Ω₂, on a stream of their own; and what must live until it is waited for.

    ``rows`` are the gates' gradients in front of their BN; the hidden layers, their statistics,
    their gradients, and the lines that take those through BN, where that is not done; or is to be
    done later, with lines made of ``hidden_parts``.
    """
    (n, c), geo, eps = task.shape, task.geo, task.eps
    gate_slopes, hidden, hidden_moments, hidden_grads, lines = rows
    seen, j, js = normal.shape[1], width(task.params), hidden.shape[1]
    _, gammas, betas, _, _, _ = task.split(task.params)
    d_reduces, _, _, d_expands, _, _ = task.split(grads)
    wide, deep = sizes.channels, sizes.hidden
    across = -(-j // deep)
    tiles, seen_tiles = -(-c // wide) * across, -(-seen // wide) * across
    length = span(n * geo.branch_rows, max(tiles, seen_tiles))
    splits = geo.tiles(n, length)
    parts = lines.new_empty((splits, c * j)), lines.new_empty((splits, seen * j))
    grid = task.grid()
    stream = beside(task.x.device)
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        weights.weights[(splits * (tiles + seen_tiles),)](
            gate_slopes, hidden, hidden_moments, gammas, betas, hidden_grads, lines, hidden_parts,
            normal, moments,
            *parts, n, c, seen, j, js, eps.hidden, splits * tiles, **grid, **task.product(),
            SPAN=length, WC=wide, WJ=deep, WR=64, NORM=task.norm, BM=sizes.rows,
            PARTS=chunk(geo.most_tiles(n, sizes.rows), deep), READY=sizes.shared,
            LATER=sizes.later, BY=multiple(seen),
            num_warps=WARPS, num_stages=2,
        )  # fmt: skip
        blocks = [-(-wide * j // ADDED) for wide in (c, seen)]
        weights.add_parts[(sum(blocks), task.levels)](
            *parts, d_expands, d_reduces, n, c, seen, j, blocks[0], DOWN=grid["DOWN"],
            ACROSS=grid["ACROSS"], SPAN=length, BLOCK=ADDED,
            CHUNK=min(8, chunk(geo.most_tiles(n, length), ADDED)), num_warps=4,
        )  # fmt: skip
    return stream, (*parts, gate_slopes, hidden_grads, lines, hidden_parts)
