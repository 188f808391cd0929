"""Launches of a tail's kernels, forward: buffers and arguments.  N batch, C channels, L scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mssar.kernels import branches, maps, running
from mssar.kernels.geometry import power
from mssar.kernels.plan import WARPS, WARPS_OF_MAPS, chunk, members, regions, side
from mssar.kernels.shapes import Epsilons, Forward, buffers, grids, padded, width
from mssar.kernels.task import NUMBER, Task, dense_map, laid_out

WIDEST = 256  # hidden channels that one program of `evaluate` can hold
FOLDED = 16  # channels of a program that adds up parts
PACKED = 1024  # numbers of a program that copies weights


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
    (n, c), cut = task.shape, task.cut
    pools = x.new_empty((n * task.geo.pool_rows, c), **NUMBER)
    parts = x.new_empty((2, cut.groups, c), **NUMBER)
    _sums(task, pools, parts, made.counters, moments=task.norm)
    _prepare(task, parts, made, statistics=task.norm)
    if task.levels:
        _branches(task, pools, made, torch.empty_like(made.hidden_moments))
    _apply(
        task, shortcut, made, relu, mean=made.moments[0], variance=made.moments[1],
        gate_means=made.gate_moments[0].unbind(), gate_variances=made.gate_moments[1].unbind(),
    )  # fmt: skip
    return made


def _sums(task: Task, pools: Tensor, parts: Tensor, counters: Tensor, *, moments: bool) -> None:
    (n, c), cut, geo = task.shape, task.cut, task.geo
    maps.sums[(cut.groups, cut.blocks)](
        task.x, pools, parts, counters, n, c, *task.x.stride(), cut.group, counters.numel(),
        **task.map(), LEVELS=geo.levels, MEMBERS=members(geo, geo.levels),
        REGIONS=regions(geo.levels, cut.group), CELLS=cut.grouped_cells,
        STAGES=cut.grouped_stages, MOMENTS=moments, NESTED=cut.nested,
        num_warps=cut.grouped_warps,
    )  # fmt: skip


def _prepare(task: Task, parts: Tensor, made: Forward, *, statistics: bool) -> None:
    (n, c), cut, x = task.shape, task.cut, task.x
    size, j = x.shape[2] * x.shape[3], width(task.params)
    folds = -(-c // FOLDED) if statistics else 0
    reduces, _, _, expands, _, _ = task.split(task.params if made.packed.numel() else [])
    copies = len(reduces) * sum(-(-m // PACKED) for m in (c * padded(j), j * padded(c)))
    if folds + copies == 0:
        return
    branches.prepare[(folds + copies,)](
        parts, made.moments, task.gamma, reduces, expands, made.packed,
        c, j, padded(j), padded(c), cut.groups, cut.group * size, n * size, task.eps.norm,
        FOLDS=folds, BC=FOLDED, CHUNK=chunk(cut.groups, FOLDED), BLOCK=PACKED,
        num_warps=4,
    )  # fmt: skip


def packed_weights(
    task: Task, packed: Tensor
) -> tuple[tuple[Tensor, ...], int, tuple[Tensor, ...], int]:
    """Ω₁ as the products read it, how far apart its rows are, and the same of Ω₂."""
    reduces, _, _, expands, _, _ = task.split(task.params)
    c, j = task.shape[1], width(task.params)
    if not packed.numel():
        return reduces, c, expands, j
    c_apart, j_apart = padded(c), padded(j)
    cut = task.levels * c * j_apart
    second = packed[:cut].view(task.levels, -1).unbind()
    return packed[cut:].view(task.levels, -1).unbind(), c_apart, second, j_apart


def _branches(
    task: Task, pools: Tensor, made: Forward, lines: Tensor, *, statistics: bool = True
) -> None:
    (n, c), geo, sizes = task.shape, task.geo, task.sizes
    j, js = width(task.params), made.hidden.shape[1]
    count, most = geo.tiles(n, sizes.rows), geo.most_tiles(n, sizes.rows)
    hidden_parts = pools.new_empty((2, count, js))
    gate_parts = pools.new_empty((2, count, c))
    _, gammas, betas, _, _, _ = task.split(task.params)
    reduces, c_apart, expands, j_apart = packed_weights(task, made.packed)
    common = dict(
        task.grid(), **task.product(), BM=sizes.rows, STATISTICS=statistics,
        num_warps=WARPS,
    )  # fmt: skip
    branches.reduce[(count, -(-j // sizes.hidden))](
        pools, made.moments, task.beta, reduces, gammas, betas, made.normal,
        made.hidden, hidden_parts, made.hidden_moments, lines, made.counters,
        n, c, c_apart, j, js, task.eps.hidden,
        H=task.x.shape[2], W=task.x.shape[3], POOLS_AT=geo.pools_at, BJ=sizes.hidden,
        BK=sizes.deep, TILES=chunk(most, sizes.hidden), NORM=task.norm,
        **common, num_stages=sizes.stages,
    )  # fmt: skip
    branches.expand[(count, -(-c // sizes.channels))](
        made.hidden, lines, expands, made.gates, gate_parts, made.gate_moments, made.counters,
        n, c, j, js, j_apart, BC=sizes.channels, BK=sizes.hidden,
        TILES=chunk(most, sizes.channels), **common, num_stages=1,
    )  # fmt: skip


def _apply(
    task: Task, shortcut: Tensor | None, made: Forward, relu: bool, *, mean: Tensor,
    variance: Tensor, gate_means: Sequence[Tensor], gate_variances: Sequence[Tensor],
) -> None:  # fmt: skip
    (n, c), cut, x = task.shape, task.cut, task.x
    _, _, _, _, gammas, betas = task.split(task.params)
    maps.apply[(cut.programs, cut.blocks)](
        x, x if shortcut is None else laid_out(shortcut, x), made.out, mean, variance,
        task.gamma, task.beta, made.gates, tuple(gate_means), tuple(gate_variances), gammas, betas,
        n, c, *x.stride(), task.eps.norm, task.eps.gate,
        **task.map(), **task.grid(), CELLS=cut.cells, STAGES=cut.stages,
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
    (n, c), geo = task.shape, task.geo
    made = Forward(torch.empty_like(task.x), *(nothing,) * 8)
    if task.levels:
        j = width(params)
        pools = x.new_empty((n * geo.pool_rows, c), **NUMBER)
        _sums(task, pools, nothing, nothing, moments=False)
        if j > WIDEST:
            made = _given(task, norm, scales)._replace(out=made.out)
            lines = _lines(task, hidden_running, torch.empty_like(made.hidden_moments))
            _prepare(task, nothing, made, statistics=False)
            _branches(task, pools, made, lines, statistics=False)
        else:
            made = made._replace(gates=x.new_empty((n * geo.branch_rows, c)))
            reduces, gammas, betas, expands, _, _ = task.split(params)
            rows = 32
            branches.evaluate[(geo.tiles(n, rows), min(4, -(-c // side(c))))](
                pools, mean, variance, gamma, beta, reduces, tuple(hidden_running[::2]),
                tuple(hidden_running[1::2]), gammas, betas, expands, made.gates,
                n, c, c, j, j, eps.norm, eps.hidden,
                H=x.shape[2], W=x.shape[3], **task.grid(), POOLS_AT=geo.pools_at,
                **task.product(), BM=rows, BJ=side(j, WIDEST), BK=side(c, 32),
                BC=side(c), NORM=task.norm, num_warps=4,
            )  # fmt: skip
    _apply(
        task, shortcut, made, relu, mean=mean, variance=variance,
        gate_means=gate_running[::2], gate_variances=gate_running[1::2],
    )  # fmt: skip
    return made.out


def _given(task: Task, norm: Sequence[Tensor], scales: Sequence[int]) -> Forward:
    """Buffers that hold running statistics where a batch's would be."""
    made = buffers(task.x, task.params, scales, task.norm)
    if norm:
        gamma, _, mean, variance = (t.float() for t in norm)
        made.moments[0], made.moments[1] = mean, variance
        made.moments[2] = gamma * (variance + task.eps.norm).rsqrt()
    return made


def _lines(task: Task, hidden: Sequence[Tensor], lines: Tensor) -> Tensor:
    """The hidden layers' BN as slope and intercept."""
    _, gammas, betas, _, _, _ = task.split(task.params)
    given = zip(gammas, betas, hidden[::2], hidden[1::2], strict=True)
    for i, (gamma, beta, mean, variance) in enumerate(given):
        slope = gamma.float() * (variance.float() + task.eps.hidden).rsqrt()
        lines[0, i, : slope.numel()] = slope
        lines[1, i, : slope.numel()] = beta.float() - mean.float() * slope
    return lines


def track(
    moments: Sequence[Tensor],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    counts: Sequence[Tensor],
    momenta: Sequence[float],
    values: Sequence[int],
) -> None:
    """Move running statistics towards a batch's, as BatchNorm2d does: one program a norm.

    ``moments`` holds means and biased variances of all norms, as :class:`Forward` has them.
    """
    found = [pair for both in moments if both.numel() for pair in _pairs(both)]
    running.track[(len(means),)](
        tuple(mean for mean, _ in found), tuple(variance for _, variance in found), tuple(means),
        tuple(variances), tuple(counts), tuple(momenta), tuple(values),
        tuple(mean.numel() for mean in means),
        BLOCK=min(1024, power(max(mean.numel() for mean in means))),
        num_warps=4,
    )  # fmt: skip


def _pairs(both: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance of each norm of 2 × L × C, or of the one of 3 × C."""
    mean, variance = both if both.ndim == 3 else both[:2, None]
    return list(zip(mean.unbind(), variance.unbind(), strict=True))
