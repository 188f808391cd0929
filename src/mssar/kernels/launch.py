"""Launches of a tail's kernels, forward: buffers and arguments.  N batch, C channels, L scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mssar.kernels import branches, maps, preparation, running
from mssar.kernels.geometry import power
from mssar.kernels.plan import WARPS, WARPS_OF_MAPS, chunk, members, multiple, regions, side
from mssar.kernels.shapes import (
    Epsilons,
    Forward,
    buffers,
    grids,
    kept,
    packed_size,
    padded,
    width,
)
from mssar.kernels.task import NUMBER, Task, dense_map, laid_out

AT_ONCE = 128, 64  # channels and hidden channels up to which branches are evaluated in one launch
FOLDED = 16  # channels of a program that adds up parts
ROWS = 256  # of Ω₁ that such a program copies at a time
PACKED = 1024  # numbers of a program that copies weights
TRACKED = 16  # channels of a program that moves running statistics


def forward(
    x: Tensor,
    shortcut: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    params: Sequence[Tensor],
    scales: Sequence[int],
    eps: Epsilons,
    relu: bool,
    precision: str,
) -> Forward:
    """conv output → BN → recalibrate → add → relu, with the batch's statistics."""
    task = Task(dense_map(x), gamma, beta, params, grids(x, scales), eps, precision)
    made = buffers(task.x, params, scales, task.norm)
    parts = x.new_empty((2, task.cut.groups, task.shape[1]), **NUMBER)
    _sums(task, made.normal, parts, made.counters, near=made.moments[3] if task.norm else None)
    _prepare(task, parts, made, norm=task.norm)
    if task.levels:
        _branches(task, made)
    _apply(
        task, shortcut, made, relu, mean=made.moments[0], variance=made.moments[1],
        gate_means=made.gate_moments[0].unbind(), gate_variances=made.gate_moments[1].unbind(),
    )  # fmt: skip
    return made


def _sums(
    task: Task,
    rows: Tensor,
    parts: Tensor,
    counters: Tensor,
    *,
    near: Tensor | None = None,
    given: Sequence[Tensor | None] = (None, None),
) -> None:
    """The scales' means; with statistics given behind BN, else if BN is there those of x too."""
    (n, c), cut, geo = task.shape, task.cut, task.geo
    scales = list(zip(geo.grids, geo.rows_at, strict=True)) if task.levels else []
    whole = task.whole(cut.summed.cells)
    # With statistics given, means of cells are written in passing; else in the end with the others.
    last = whole or (cut.nested and given[1] is None)
    levels = tuple((*grid, at) for grid, at in scales if grid != geo.fine or last)
    fine_at = tuple(at for grid, at in scales if grid == geo.fine and not last)
    pools = parts.new_empty((n * geo.cells if levels and not whole else 0, c))
    maps.sums[(cut.groups, cut.blocks)](
        task.x, pools, rows, parts, counters, near, *given, task.gamma, task.beta,
        n, c, *task.x.stride(), cut.group, counters.numel(), task.eps.norm,
        **task.map(), FINE_AT=fine_at, LEVELS=levels,
        MEMBERS=members(geo, levels), REGIONS=regions(levels, cut.group), **cut.summed.how(),
        READY=True, GIVEN=given[1] is not None,
        MOMENTS=near is not None, NESTED=cut.nested, WHOLE=whole, num_warps=cut.grouped_warps,
    )  # fmt: skip


def _prepare(task: Task, parts: Tensor, made: Forward, *, norm: bool) -> None:
    (n, c), cut, x = task.shape, task.cut, task.x
    size, j = x.shape[2] * x.shape[3], width(task.params)
    reduces, _, _, expands, _, _ = task.split(task.params)
    folds = -(-c // FOLDED)
    programs = folds * max(task.levels, int(norm)) + task.levels * -(-c * padded(j) // PACKED)
    if programs == 0:
        return
    preparation.prepare[(programs,)](
        parts, made.moments, task.gamma, task.beta, reduces, expands, made.packed,
        c, j, padded(j), padded(c), cut.groups, cut.group * size, n * size,
        task.eps.norm, FOLDS=folds, BC=FOLDED, BJ=min(power(j), ROWS),
        CHUNK=chunk(cut.groups, FOLDED), BLOCK=PACKED, NORM=norm, num_warps=4,
    )  # fmt: skip


def packed_weights(task: Task, packed: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Ω₂ as the products read it, Ω₁ behind BN's slope, and Ω₁."""
    c, j = task.shape[1], width(task.params)
    sizes = [task.levels * n for n in (c * padded(j), j * padded(c), j * padded(c))]
    return tuple(some.view(task.levels, -1).unbind() for some in packed.split(sizes))


def _branches(
    task: Task,
    made: Forward,
    hidden_running: Sequence[Tensor] = (),
    gate_running: Sequence[Tensor] = (),
) -> None:
    """With running statistics, hidden layers and gates come out behind BN, relu and sigmoid."""
    (n, c), geo, sizes = task.shape, task.geo, task.sizes
    j, js = width(task.params), made.hidden.shape[1]
    count, most = geo.tiles(n, sizes.rows), geo.most_tiles(n, sizes.rows)
    hidden_parts = made.moments.new_empty((2, count, js))
    gate_rows, wide = sizes.evaluated if gate_running else sizes.expanded
    gate_tiles = geo.tiles(n, gate_rows)
    gate_parts = made.moments.new_empty((2, gate_tiles, c))
    lines = torch.empty_like(made.hidden_moments)
    _, gammas, betas, _, gate_gammas, gate_betas = task.split(task.params)
    expands, reduces, _ = packed_weights(task, made.packed)
    common = dict(task.grid(), **task.product(), num_warps=WARPS)
    ready, later = len(hidden_running) > 0, sizes.later and not hidden_running
    assert not later or gate_rows == sizes.rows  # `expand` finds the parts that `reduce` made
    branches.reduce[(count, -(-j // sizes.hidden))](
        made.normal, reduces, tuple(hidden_running[::2]), tuple(hidden_running[1::2]), gammas,
        betas, None, made.hidden, hidden_parts, made.hidden_moments, lines, made.counters,
        n, c, padded(c), j, js, task.eps.hidden,
        H=task.x.shape[2], W=task.x.shape[3], POOLS_AT=geo.pools_at, BJ=sizes.hidden,
        BM=sizes.rows, BK=sizes.deep, TILES=chunk(most, sizes.hidden), READY=True, LATER=later,
        CLEARED=0, BY=multiple(c), **common, num_stages=sizes.stages,
    )  # fmt: skip
    hidden = made.hidden
    if sizes.shared and not ready:
        hidden, ready = torch.empty_like(hidden), True
        branches.activate[(geo.tiles(n, 16), -(-js // 256))](
            made.hidden, lines, hidden, n, js, **task.grid(), BM=16, BJ=min(256, power(js)),
            num_warps=WARPS,
        )  # fmt: skip
    branches.expand[(gate_tiles, -(-c // wide))](
        hidden, lines, hidden_parts, made.hidden_moments, gammas, betas, expands,
        tuple(gate_running[::2]), tuple(gate_running[1::2]),
        gate_gammas, gate_betas, made.gates, gate_parts, made.gate_moments, made.counters,
        n, c, j, js, padded(j), task.eps.hidden, task.eps.gate, BM=gate_rows, BC=wide,
        BK=sizes.hidden, TILES=chunk(geo.most_tiles(n, gate_rows), wide),
        PARTS=chunk(most, sizes.hidden), READY=ready, LATER=later, **common,
        num_stages=sizes.through,
    )  # fmt: skip


def _apply(
    task: Task, shortcut: Tensor | None, made: Forward, relu: bool, *, mean: Tensor,
    variance: Tensor, gate_means: Sequence[Tensor] = (), gate_variances: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    (n, c), cut, x = task.shape, task.cut, task.x
    _, _, _, _, gammas, betas = task.split(task.params)
    maps.apply[(cut.programs, cut.blocks)](
        x, x if shortcut is None else laid_out(shortcut, x), made.out, mean, variance,
        task.gamma, task.beta, made.gates, tuple(gate_means), tuple(gate_variances), gammas, betas,
        n, c, *x.stride(), task.eps.norm, task.eps.gate,
        **task.map(), **task.grid(), **(cut.applied if gate_means else cut.scattered).how(),
        NORM=task.norm, SHORTCUT=shortcut is not None, RELU=relu, num_warps=WARPS_OF_MAPS,
    )  # fmt: skip


def evaluate(
    x: Tensor,
    shortcut: Tensor | None,
    norm: Sequence[Tensor],  # γ, β, running mean, running variance; or nothing
    params: Sequence[Tensor],
    hidden_running: Sequence[Tensor],  # a scale: mean, variance
    gate_running: Sequence[Tensor],
    scales: Sequence[int],
    eps: Epsilons,
    relu: bool,
    precision: str,
) -> Tensor:
    """The same with running statistics."""
    nothing = x.new_empty(0, **NUMBER)
    gamma, beta = norm[:2] if norm else (None, None)
    mean, variance = norm[2:] if norm else (nothing, nothing)
    task = Task(dense_map(x), gamma, beta, params, grids(x, scales), eps, precision)
    made = Forward(torch.empty_like(task.x), *(nothing,) * 8)
    if task.levels:
        (n, c), geo, j = task.shape, task.geo, width(params)
        rows = n * geo.branch_rows
        normal, gates = (x.new_empty((rows, c), dtype=kept(x)) for _ in range(2))
        made = made._replace(normal=normal, gates=gates)
        if c > AT_ONCE[0] or j > AT_ONCE[1]:
            packed = x.new_empty(packed_size(params), dtype=kept(x))
            hidden = x.new_empty((rows, padded(j)), dtype=kept(x))
            made = made._replace(hidden=hidden, packed=packed)
            _prepare(task, nothing, made, norm=False)
            _sums(task, normal, nothing, nothing, given=norm[2:] or (None, None))
            _branches(task, made, hidden_running, gate_running)
        else:
            _sums(task, normal, nothing, nothing, given=norm[2:] or (None, None))
            reduces, gammas, betas, expands, gate_gammas, gate_betas = task.split(params)
            tile = 32
            branches.evaluate[(geo.tiles(n, tile), -(-c // side(c)))](
                normal, reduces, tuple(hidden_running[::2]), tuple(hidden_running[1::2]),
                gammas, betas, expands, tuple(gate_running[::2]), tuple(gate_running[1::2]),
                gate_gammas, gate_betas, gates, n, c, c, j, eps.hidden, eps.gate,
                H=x.shape[2], W=x.shape[3], **task.grid(), POOLS_AT=geo.pools_at,
                **task.product(), BM=tile, BJ=side(j), BK=side(c), BC=side(c), READY=True,
                num_warps=4,
            )  # fmt: skip
    _apply(task, shortcut, made, relu, mean=mean, variance=variance)
    return made.out


def track(
    moments: Sequence[Tensor],
    lacking: Sequence[Tensor],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    counts: Sequence[Tensor],
    momenta: Sequence[float],
    values: Sequence[int],
) -> None:
    """Move running statistics towards a batch's, as BatchNorm2d does.

    ``moments`` holds means and biased variances of all norms, as :class:`Forward` has them.
    ``lacking`` is every scale's Ω₁, where the hidden layers' means are without what that makes of
    the last of the first norm's moments.
    """
    found = [pair for both in moments if both.numel() for pair in _pairs(both)]
    offsets = moments[0][4] if lacking else None
    seen = 1 if offsets is None else offsets.numel()
    widest = max(mean.numel() for mean in means)
    running.track[(len(means), -(-widest // TRACKED))](
        tuple(mean for mean, _ in found), tuple(variance for _, variance in found), tuple(means),
        tuple(variances), tuple(counts), tuple(momenta), tuple(values),
        tuple(mean.numel() for mean in means), tuple(lacking), offsets, seen,
        FIRST=1, BLOCK=TRACKED, BK=min(256, power(seen)), num_warps=4,
    )  # fmt: skip


def _pairs(both: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance of each norm of 2 × L × C, or of the one of 5 × C."""
    mean, variance = both if both.ndim == 3 else both[:2, None]
    return list(zip(mean.unbind(), variance.unbind(), strict=True))
