"""Launches of a dense step's kernels.  N batch, K new channels, C channels so far, L scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels import branches, branches_backward, dense, maps
from mssar.kernels.geometry import Geometry
from mssar.kernels.launch_backward import settle, weight_gradients
from mssar.kernels.plan import WARPS, chunk, members, multiple, products, regions, side
from mssar.kernels.shapes import Epsilons, Step, grids, step_buffers, width
from mssar.kernels.task import NUMBER, Task, dense_map, laid_out

WIDTH = 64  # of a block of columns that are copied
FEW = 64  # channels, as whose products a step's are cut: its own are fewer


def sums(x: Tensor, scales: Sequence[int]) -> Tensor:
    """The rows of a map: its sums over the cells, then over each coarser grid's regions."""
    task = _task(x, [], scales, Epsilons(), "fp32")
    (n, c), cut, geo = task.shape, task.cut, task.geo
    rows = x.new_empty((n * geo.pool_rows, c), **NUMBER)
    nothing = x.new_empty(0, **NUMBER)
    maps.sums[(cut.groups, cut.blocks)](
        task.x, rows, None, nothing, nothing, None, None, None, None, None,
        n, c, *task.x.stride(), cut.group, 0, 0.0,
        **task.map(), FINE_AT=(), **_levels(geo, cut.group), **cut.summed.how(),
        READY=False, GIVEN=False, MOMENTS=False,
        NESTED=cut.nested, WHOLE=False, num_warps=cut.grouped_warps,
    )  # fmt: skip
    return rows


def sums_backward(grad: Tensor, like: Tensor, scales: Sequence[int]) -> Tensor:
    made = torch.empty_like(like)
    task = _task(made, [], scales, Epsilons(), "fp32")
    (n, c), cut = task.shape, task.cut
    tiles = -(-n * task.geo.cells // cut.scattered.cells)
    dense.spread[(tiles, cut.blocks)](
        grad.contiguous(), made, n, c, *made.stride(), **task.map(), LEVELS=task.geo.levels,
        CELLS=cut.scattered.cells, num_warps=4,
    )  # fmt: skip
    return made


def _task(
    x: Tensor, params: Sequence[Tensor], scales: Sequence[int], eps: Epsilons, precision: str
) -> Task:
    return Task(dense_map(x), None, None, params, grids(x, scales), eps, precision)


def _levels(geo: Geometry, group: int) -> dict[str, Any]:
    return {
        "LEVELS": geo.levels,
        "MEMBERS": members(geo, geo.levels),
        "REGIONS": regions(geo.levels, group),
    }


def forward(
    x: Tensor,
    rows: Tensor,
    params: Sequence[Tensor],
    scales: Sequence[int],
    eps: Epsilons,
    carry: bool,
    precision: str,
) -> Step:
    """z · x with weights from the rows, and the rows with those of z · x."""
    task = _task(x, params, scales, eps, precision)
    made = step_buffers(task.x, rows, params, scales, carry)
    (n, k), c, geo = task.shape, rows.shape[1], task.geo
    j, js = width(params), made.hidden.shape[1]
    cut = products(n * geo.branch_rows, FEW, j, small=False)
    count, most = geo.tiles(n, cut.rows), geo.most_tiles(n, cut.rows)
    hidden_parts = rows.new_empty((2, count, js))
    gate_parts = rows.new_empty((2, count, k))
    lines = torch.empty_like(made.hidden_moments)
    if not cut.later:
        made.counters.zero_()
    reduces, gammas, betas, expands, _, _ = task.split(params)
    common = dict(task.grid(), **task.product(), BM=cut.rows, num_warps=WARPS)
    branches.reduce[(count, -(-j // cut.hidden))](
        rows, reduces, (), (), gammas, betas, made.normal, made.hidden,
        hidden_parts, made.hidden_moments, lines, made.counters, n, c, c, j, js, eps.hidden,
        H=x.shape[2], W=x.shape[3], POOLS_AT=geo.pools_at, BJ=cut.hidden, BK=side(c),
        TILES=chunk(most, cut.hidden), READY=False, LATER=cut.later,
        CLEARED=made.counters.numel(), BY=multiple(c),
        **common, num_stages=4,
    )  # fmt: skip
    branches.expand[(count, -(-k // side(k)))](
        made.hidden, lines, hidden_parts, made.hidden_moments, gammas, betas, expands, (), (), (),
        (), made.gates, gate_parts, made.gate_moments, made.counters, n, k, j, js, j, eps.hidden,
        eps.gate, BC=side(k), BK=cut.hidden, TILES=chunk(most, side(k)),
        PARTS=chunk(most, cut.hidden), READY=False, LATER=cut.later, **common, num_stages=1,
    )  # fmt: skip
    means, variances = made.gate_moments
    _carry(task, rows, made, means.unbind(), variances.unbind(), carry)
    return made


def _carry(
    task: Task,
    rows: Tensor,
    made: Step,
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    carry: bool,
) -> None:
    (n, k), c, cut, geo = task.shape, rows.shape[1], task.cut, task.geo
    _, _, _, _, gammas, betas = task.split(task.params)
    copies = -(-c // WIDTH) if carry else 0
    dense.carry[(cut.groups, cut.blocks + copies)](
        task.x, made.out, made.gates, tuple(means), tuple(variances), gammas, betas, made.fine,
        rows, made.rows, n, k, c, *task.x.stride(), cut.group, task.eps.gate,
        **task.map(), **task.grid(), **_levels(geo, cut.group),
        CELLS=cut.gathered.cells, STAGES=cut.gathered.stages, BLOCKS=cut.blocks, WIDTH=WIDTH,
        CARRY=carry, WHOLE=task.whole(cut.gathered.cells), num_warps=cut.grouped_warps,
    )  # fmt: skip


def evaluate(
    x: Tensor,
    rows: Tensor,
    params: Sequence[Tensor],
    hidden_running: Sequence[Tensor],
    gate_running: Sequence[Tensor],
    scales: Sequence[int],
    eps: Epsilons,
    carry: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """The same with running statistics."""
    task = _task(x, params, scales, eps, precision)
    made = step_buffers(task.x, rows, params, scales, carry)
    (n, k), c, geo = task.shape, rows.shape[1], task.geo
    j = width(params)
    reduces, gammas, betas, expands, _, _ = task.split(params)
    tile = 32
    branches.evaluate[(geo.tiles(n, tile), -(-k // side(k)))](
        rows, reduces, tuple(hidden_running[::2]), tuple(hidden_running[1::2]), gammas, betas,
        expands, (), (), (), (), made.gates, n, k, c, j, eps.hidden, eps.gate,
        H=x.shape[2], W=x.shape[3], **task.grid(), POOLS_AT=geo.pools_at, **task.product(),
        BM=tile, BJ=side(j, 1 << 20), BK=side(c, 32), BC=side(k), READY=False, num_warps=4,
    )  # fmt: skip
    _carry(task, rows, made, gate_running[::2], gate_running[1::2], carry)
    return made.out, made.rows


def backward(
    grad: Tensor,
    rows_grad: Tensor | None,
    x: Tensor,
    params: Sequence[Tensor],
    made: Step,
    scales: Sequence[int],
    eps: Epsilons,
    precision: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of the new channels, of the rows, and of the parameters."""
    task = _task(x, params, scales, eps, precision)
    (n, k), geo, cut, x = task.shape, task.geo, task.cut, task.x
    c = made.normal.shape[1]
    grad = laid_out(grad, x)
    grads = [torch.empty_like(p) for p in params]
    grad_x = torch.empty_like(x)
    reduces, gammas1, betas1, expands, gammas2, betas2 = task.split(params)
    _, d_gammas1, d_betas1, _, _, _ = task.split(grads)
    gate_grads = torch.empty_like(made.gates)
    parts = x.new_empty((2, task.levels + 1, cut.groups, k), **NUMBER)
    rows_grad = None if rows_grad is None else rows_grad.contiguous()
    some = parts if rows_grad is None else rows_grad
    whole = task.whole(cut.gathered.cells)
    dense.carry_back[(cut.groups, cut.blocks)](
        grad, x, grad_x, some, made.fine, made.gates, made.gate_moments[0].unbind(),
        made.gate_moments[1].unbind(), gammas2,
        betas2, gate_grads, None if whole else torch.empty_like(made.fine), parts,
        n, k, c, *x.stride(), cut.group, eps.gate,
        **task.map(), **task.grid(), LEVELS=geo.levels,
        MEMBERS=members(geo, geo.grids), REGIONS=regions(geo.grids, cut.group),
        CELLS=cut.gathered.cells, STAGES=cut.gathered.stages, ROWS=rows_grad is not None,
        NESTED=cut.nested, WHOLE=whole, num_warps=cut.grouped_warps,
    )  # fmt: skip
    j, js = width(params), made.hidden.shape[1]
    sizes = products(n * geo.branch_rows, FEW, j, small=False)
    count, most = geo.tiles(n, sizes.rows), geo.most_tiles(n, sizes.rows)
    unused = parts  # by a step, which has no BN in front
    lines = settle(task, parts, unused, made.gate_moments, grads)
    hidden_parts = parts.new_empty((2, count, js))
    hidden_lines = parts.new_empty((3, task.levels, js))
    hidden_grads = torch.empty_like(made.hidden)
    gate_slopes = torch.empty_like(made.gates)
    grad_rows = parts.new_empty((n * geo.pool_rows, c))
    how = dict(task.grid(), **task.product(), BM=sizes.rows, num_warps=WARPS)
    branches_backward.expand_backward[(count, -(-j // sizes.hidden))](
        gate_grads, made.gates, lines, made.hidden, made.hidden_moments, gammas1, betas1, expands,
        gate_slopes, hidden_grads, hidden_parts, hidden_lines, d_gammas1, d_betas1, made.counters,
        n, k, j, js, j, eps.hidden, BJ=sizes.hidden, BK=side(k), TILES=chunk(most, sizes.hidden),
        READY=False, LATER=sizes.later, **how, num_stages=3,
    )  # fmt: skip
    stream, held = weight_gradients(
        task, sizes, (gate_slopes, made.hidden, made.hidden_moments, hidden_grads, hidden_lines),
        hidden_parts, made.normal, None, grads,
    )  # fmt: skip
    branches_backward.reduce_backward[(count, -(-c // side(c)))](
        hidden_grads, made.hidden, hidden_lines, hidden_parts, made.hidden_moments, gammas1,
        d_gammas1, d_betas1, reduces, made.normal, grad_rows, some,
        None, unused, unused, unused, made.counters, n, c, c, c + k, j, js, eps.hidden,
        H=x.shape[2], W=x.shape[3], POOLS_AT=geo.pools_at, BC=side(c), BK=sizes.hidden,
        TILES=1, NORM=False, SUMS=True, CARRY=rows_grad is not None,
        PARTS=chunk(most, sizes.hidden), READY=False, LATER=sizes.later, BY=multiple(c, k), **how,
        num_stages=1,
    )  # fmt: skip
    if stream is not None:
        torch.cuda.current_stream(x.device).wait_stream(stream)
    del held
    return grad_x, grad_rows, grads
