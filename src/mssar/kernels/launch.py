"""Launches of a tail's kernels: buffers and arguments.  N batch, C channels, H W map, L scales."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mssar.kernels import (
    branches,
    branches_backward,
    interpreted,
    maps,
    maps_backward,
    running,
)
from mssar.kernels.geometry import Geometry, power
from mssar.kernels.plan import (
    FEW,
    WARPS_OF_MAPS,
    Plan,
    Products,
    chunk,
    members,
    plan,
    products,
    regions,
    side,
    span,
)
from mssar.kernels.shapes import (
    PER_SCALE,
    Backward,
    Epsilons,
    Forward,
    buffers,
    gradients,
    grids,
    kept,
    width,
)

WIDEST = 256  # hidden channels that one program of `evaluate` can hold
NUMBER: Any = {"dtype": torch.float32}


@dataclass(frozen=True)
class Task:
    """A map and the settings of its tail, as the kernels want to be told of them."""

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    params: Sequence[Tensor]
    geo: Geometry
    eps: Epsilons
    precision: str

    def __post_init__(self) -> None:
        assert self.x.stride() == torch.empty_like(self.x, device="meta").stride()

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]

    @property
    def levels(self) -> int:
        return len(self.params) // PER_SCALE

    @property
    def norm(self) -> bool:
        return self.gamma is not None

    @property
    def cut(self) -> Plan:
        return plan(self.x, self.geo)

    @property
    def sizes(self) -> Products:
        return products(self.shape[0] * self.geo.branch_rows, self.shape[1])

    def split(self, params: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Ω₁ of every scale, γ₁ of every scale, …"""
        return [tuple(params[i::PER_SCALE]) for i in range(PER_SCALE)]

    def grid(self) -> dict[str, Any]:
        scales = self.geo.grids if self.levels else ()
        return {
            "DOWN": tuple(down for down, _ in scales),
            "ACROSS": tuple(across for _, across in scales),
            "ROWS_AT": self.geo.rows_at if self.levels else (),
        }

    def map(self) -> dict[str, Any]:
        cut = self.cut
        return {
            "H": self.x.shape[2],
            "W": self.x.shape[3],
            "FH": self.geo.fine[0],
            "FW": self.geo.fine[1],
            "BW": cut.columns,
            "CT": cut.channels,
            "EVEN": self.x.shape[1] % cut.channels == 0,
            "BIG": self.x.numel() >= 1 << 31,
        }

    def product(self) -> dict[str, Any]:
        """Products are taken in float32 as cuDNN's convolutions are told to take it."""
        precision = self.precision
        if precision == "fp32":
            precision = "tf32" if _allows_tf32() else "ieee"
        if interpreted():
            precision = "ieee"  # the interpreter takes bfloat16's bits for numbers
        return {"PRECISION": precision}


def _allows_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # it was set in the newer way, and PyTorch refuses to mix the two
        convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        return bool(convolution.fp32_precision == "tf32")


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A map that lies in memory as another does."""
    if x.stride() == like.stride():
        return x
    copy = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def dense_map(x: Tensor) -> Tensor:
    """A map without holes; the kernels' own maps then lie in memory as it does."""
    return laid_out(x, torch.empty_like(x, device="meta"))


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
    groups, group = cut.groups, cut.group
    if task.norm and (not task.levels or groups * c > FEW):
        parts, groups, group = _folded_moments(task, parts), 1, n
    if task.levels:
        _branches(task, pools, parts, groups, group, made)
    _apply(
        task, shortcut, made, parts, groups, group, relu,
        mean=made.moments[0], variance=made.moments[1],
        gate_means=made.gate_moments[0].unbind(), gate_variances=made.gate_moments[1].unbind(),
        finish=task.norm and not task.levels,
    )  # fmt: skip
    return made


def _sums(task: Task, pools: Tensor, parts: Tensor, counters: Tensor, *, moments: bool) -> None:
    (n, c), cut, geo = task.shape, task.cut, task.geo
    maps.sums[(cut.groups, cut.blocks)](
        task.x, pools, parts, counters, n, c, *task.x.stride(), cut.group, counters.numel(),
        **task.map(), LEVELS=geo.levels, MEMBERS=members(geo, geo.levels),
        REGIONS=regions(geo.levels, cut.group), CELLS=cut.grouped_cells,
        STAGES=cut.grouped_stages, MOMENTS=moments, num_warps=cut.grouped_warps,
    )  # fmt: skip


def _folded_moments(task: Task, parts: Tensor) -> Tensor:
    (n, c), cut = task.shape, task.cut
    folded = parts.new_empty((2, 1, c))
    size = task.x.shape[2] * task.x.shape[3]
    maps.fold_moments[(-(-c // 16),)](
        parts, folded, c, cut.groups, cut.group * size, n * size, BC=16,
        CHUNK=chunk(cut.groups, 16), num_warps=4,
    )  # fmt: skip
    return folded


def _folded_sums(parts: Tensor) -> Tensor:
    """2 × groups × … made 2 × 1 × …"""
    kinds, groups, *shape = parts.shape
    folded = parts.new_empty((kinds, 1, *shape))
    size = folded[0].numel()
    maps.fold_sums[(-(-size // 16), kinds)](
        parts, folded, size, groups, BC=16, CHUNK=chunk(groups, 16), num_warps=4
    )
    return folded


def _branches(
    task: Task,
    pools: Tensor,
    parts: Tensor,
    groups: int,
    group: int,
    made: Forward,
    *,
    statistics: bool = True,
) -> None:
    (n, c), geo, sizes = task.shape, task.geo, task.sizes
    j, js = width(task.params), made.hidden.shape[1]
    count, most = geo.tiles(n, sizes.rows), geo.most_tiles(n, sizes.rows)
    hidden_parts = pools.new_empty((2, count, js))
    gate_parts = pools.new_empty((2, count, c))
    reduces, gammas, betas, expands, _, _ = task.split(task.params)
    common = dict(
        task.grid(), **task.product(), BM=sizes.rows, STATISTICS=statistics, num_warps=sizes.warps
    )
    branches.reduce[(count, -(-j // side(j)))](
        pools, parts, made.moments, task.gamma, task.beta, reduces, made.normal, made.hidden,
        hidden_parts, made.hidden_moments, made.counters, n, c, j, js, groups, group,
        task.eps.norm, H=task.x.shape[2], W=task.x.shape[3], POOLS_AT=geo.pools_at, BJ=side(j),
        BK=side(c), CHUNK=chunk(groups, side(c)), TILES=chunk(most, side(j)), NORM=task.norm,
        **common, num_stages=2,
    )  # fmt: skip
    expands, apart = _packed(expands, made.packed, fill=True)
    branches.expand[(count, -(-c // side(c)))](
        made.hidden, made.hidden_moments, gammas, betas, expands, made.gates, gate_parts,
        made.gate_moments, made.counters, n, c, j, js, apart, task.eps.hidden,
        BC=side(c), BK=side(j), TILES=chunk(most, side(c)), **common, num_stages=1,
    )  # fmt: skip


def _packed(
    expands: tuple[Tensor, ...], packed: Tensor, *, fill: bool
) -> tuple[tuple[Tensor, ...], int]:
    """Ω₂ as the kernels read it, and how far apart its rows are."""
    c, j = expands[0].shape[:2]
    if not packed.numel():
        return expands, j
    levels, _, apart = packed.shape
    if fill:
        branches.pack[(-(-c * apart // 1024), levels)](
            expands, packed, c, j, apart, L=levels, BLOCK=1024, num_warps=4
        )
    return packed.unbind(), apart


def _apply(
    task: Task, shortcut: Tensor | None, made: Forward, parts: Tensor, groups: int, group: int,
    relu: bool, *, mean: Tensor, variance: Tensor, gate_means: Sequence[Tensor],
    gate_variances: Sequence[Tensor], finish: bool,
) -> None:  # fmt: skip
    (n, c), cut, x = task.shape, task.cut, task.x
    _, _, _, _, gammas, betas = task.split(task.params)
    maps.apply[(cut.programs, cut.blocks)](
        x, x if shortcut is None else laid_out(shortcut, x), made.out, mean, variance, parts,
        task.gamma, task.beta, made.gates, tuple(gate_means), tuple(gate_variances), gammas, betas,
        n, c, *x.stride(), groups, group, task.eps.norm, task.eps.gate,
        **task.map(), **task.grid(), CELLS=cut.cells, STAGES=cut.stages,
        CHUNK=chunk(groups, cut.channels), NORM=task.norm, FINISH=finish,
        SHORTCUT=shortcut is not None, RELU=relu, num_warps=WARPS_OF_MAPS,
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
            made = _given(task, hidden_running, scales)._replace(out=made.out)
            parts = torch.stack((mean, variance))[:, None].float() * x[:, 0].numel()
            _branches(task, pools, parts, 1, n, made, statistics=False)
        else:
            made = made._replace(gates=x.new_empty((n * geo.branch_rows, c)))
            reduces, gammas, betas, expands, _, _ = task.split(params)
            rows = 32
            branches.evaluate[(geo.tiles(n, rows), min(4, -(-c // side(c))))](
                pools, mean, variance, gamma, beta, reduces, tuple(hidden_running[::2]),
                tuple(hidden_running[1::2]), gammas, betas, expands, made.gates,
                n, c, c, j, j, eps.norm, eps.hidden,
                H=x.shape[2], W=x.shape[3], **task.grid(), POOLS_AT=geo.pools_at,
                **task.product(), BM=rows, BJ=side(j, WIDEST), BK=side(c, 32), BC=side(c),
                NORM=task.norm, num_warps=4,
            )  # fmt: skip
    _apply(
        task, shortcut, made, nothing, 1, n, relu, mean=mean, variance=variance,
        gate_means=gate_running[::2], gate_variances=gate_running[1::2], finish=False,
    )  # fmt: skip
    return made.out


def _given(task: Task, hidden: Sequence[Tensor], scales: Sequence[int]) -> Forward:
    """Buffers that hold running statistics where a batch's would be."""
    made = buffers(task.x, task.params, scales, task.norm)
    for i, (hidden_mean, hidden_variance) in enumerate(zip(hidden[::2], hidden[1::2], strict=True)):
        made.hidden_moments[0, i, : hidden_mean.numel()] = hidden_mean
        made.hidden_moments[1, i, : hidden_mean.numel()] = hidden_variance
    return made


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
    """All gradients of :func:`forward`; the shortcut's where ``write`` says so."""
    grads = gradients(x, gamma, params, write)
    task = Task(dense_map(x), gamma, beta, params, grids(x, scales), eps, precision)
    (n, c), x = task.shape, task.x
    grad = laid_out(grad, x)
    out = laid_out(made.out, x) if relu else x
    rows = (n * task.geo.cells if task.levels else 0, c)
    weights = x.new_empty(rows, dtype=kept(x))
    gate_grads = torch.empty_like(made.gates)
    parts = x.new_empty((2, task.cut.groups, task.levels + 1, c), **NUMBER)
    _gather(task, grad, out, grads.shortcut, rows, weights, made, gate_grads, parts, relu, write)
    if not task.levels or task.cut.groups * c > FEW:
        parts = _folded_sums(parts)
    pool_grads, stream = parts, None
    held: tuple[Tensor, ...] = ()
    if task.levels:
        # What the second stream reads must live until it is waited for.
        parts, pool_grads, stream, held = _branches_backward(task, made, gate_grads, parts, grads)
    cut, groups = task.cut, parts.shape[1]
    behind = grads.shortcut if write else grad
    maps_backward.scatter[(cut.programs, cut.blocks)](
        behind, out, x, grads.x, weights, pool_grads, made.moments, gamma, parts, grads.gamma,
        grads.beta, n, c, *x.stride(), groups, eps.norm,
        **task.map(), **task.grid(), CELLS=cut.cells, STAGES=cut.stages,
        CHUNK=chunk(groups, cut.channels), NORM=task.norm, RELU=relu and not write,
        num_warps=WARPS_OF_MAPS,
    )  # fmt: skip
    if stream is not None:
        torch.cuda.current_stream(x.device).wait_stream(stream)
    del held
    return grads


def _gather(
    task: Task, grad: Tensor, out: Tensor, behind: Tensor, rows: tuple[int, int], weights: Tensor,
    made: Forward, gate_grads: Tensor, parts: Tensor, relu: bool, write: bool,
) -> None:  # fmt: skip
    (n, c), cut, geo, x = task.shape, task.cut, task.geo, task.x
    crossed = x.new_empty(rows, **NUMBER)
    plain = x.new_empty(rows if task.norm else 0, **NUMBER)
    _, _, _, _, gammas, betas = task.split(task.params)
    maps_backward.gather[(cut.groups, cut.blocks)](
        grad, out, x, behind, plain, crossed, weights, made.moments, task.gamma, task.beta,
        made.gates, made.gate_moments, gammas, betas, gate_grads, parts,
        n, c, *x.stride(), cut.group, task.eps.norm, task.eps.gate,
        **task.map(), **task.grid(), MEMBERS=members(geo, geo.grids),
        REGIONS=regions(geo.grids, cut.group), CELLS=cut.grouped_cells,
        STAGES=cut.grouped_stages, NORM=task.norm, RELU=relu, WRITE=write,
        num_warps=cut.grouped_warps,
    )  # fmt: skip


def _branches_backward(
    task: Task, made: Forward, gate_grads: Tensor, parts: Tensor, grads: Backward
) -> tuple[Tensor, Tensor, torch.cuda.Stream | None, tuple[Tensor, ...]]:
    """BN's sums for x, the pools' gradients; the stream on which weights' are, what they read."""
    (n, c), geo, sizes, eps = task.shape, task.geo, task.sizes, task.eps
    j, js, groups = width(task.params), made.hidden.shape[1], parts.shape[1]
    count, most = geo.tiles(n, sizes.rows), geo.most_tiles(n, sizes.rows)
    reduces, gammas1, betas1, expands, gammas2, _ = task.split(task.params)
    d_reduces, d_gammas1, d_betas1, d_expands, d_gammas2, d_betas2 = task.split(grads.params)
    hidden_parts = parts.new_empty((2, count, js))
    hidden_sums = torch.empty_like(made.hidden_moments)
    hidden_grads = torch.empty_like(made.hidden)
    gate_slopes = torch.empty_like(made.gates)
    hidden_slopes = made.hidden.new_empty(made.hidden.shape, dtype=gate_slopes.dtype)
    pool_grads = torch.empty_like(made.gates)
    pool_parts = parts.new_empty((count, c))
    past_sums = parts.new_empty((2, c))
    sums = parts.new_empty((2, 1, c))
    packed, apart = _packed(expands, made.packed, fill=False)
    common = dict(task.grid(), **task.product())
    cut = dict(common, BM=sizes.rows, num_warps=sizes.warps)
    branches_backward.expand_backward[(count + -(-c // side(c)), -(-j // side(j)))](
        gate_grads, made.gates, made.gate_moments, parts, made.hidden, made.hidden_moments,
        gammas1, betas1, gammas2, packed, gate_slopes, hidden_grads, hidden_parts, hidden_sums,
        past_sums, d_gammas2, d_betas2, made.counters, n, c, j, js, apart, count, groups,
        eps.hidden, eps.gate, BJ=side(j), BK=side(c), CHUNK=chunk(groups, side(c)),
        TILES=chunk(most, side(j)), **cut, num_stages=3,
    )  # fmt: skip
    branches_backward.reduce_backward[(count, -(-c // side(c)))](
        hidden_grads, made.hidden, made.hidden_moments, hidden_sums, gammas1, reduces,
        made.normal, made.moments, hidden_slopes, pool_grads, parts, pool_parts, past_sums, sums,
        d_gammas1, d_betas1, made.counters, n, c, j, js, c, eps.norm, eps.hidden,
        H=task.x.shape[2], W=task.x.shape[3], POOLS_AT=geo.pools_at, BC=side(c), BK=side(j),
        TILES=chunk(count, side(c)), NORM=task.norm, SUMS=False, CARRY=False, **cut, num_stages=1,
    )  # fmt: skip
    tiles = -(-c // side(c)) * -(-j // side(j))
    length = span(n * geo.branch_rows, tiles)
    splits = geo.tiles(n, length)
    work = parts.new_empty((2, splits, c * js))
    # Nothing waits for these gradients, and the last pass leaves the arithmetic units idle.
    stream = beside(task.x.device)
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        branches_backward.weights[(2 * splits * tiles,)](
            gate_slopes, made.hidden, made.hidden_moments, gammas1, betas1, hidden_slopes,
            made.normal, task.gamma, d_expands, d_reduces, *work, made.counters,
            n, c, c, j, js, eps.hidden, splits * tiles, tiles * task.levels, SPAN=length,
            WC=side(c), WX=side(c), WJ=side(j), WR=64, NORM=task.norm, **common,
            num_warps=sizes.weight_warps, num_stages=2,
        )  # fmt: skip
    return sums, pool_grads, stream, (work, gate_slopes, hidden_slopes)


_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def beside(device: torch.device) -> torch.cuda.Stream | None:
    """A second stream that has waited for the current one; every stream has its own."""
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    key = device, current.cuda_stream
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    _streams[key].wait_stream(current)
    return _streams[key]


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
        BLOCK=min(1024, power(max(mean.numel() for mean in means))), num_warps=4,
    )  # fmt: skip


def _pairs(both: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance of each norm of 2 × L × C, or of the one of 2 × C."""
    mean, variance = both if both.ndim == 3 else both[:, None]
    return list(zip(mean.unbind(), variance.unbind(), strict=True))
