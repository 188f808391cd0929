"""The launches of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mssar.kernels.launch import pointer, pointers, where
from mssar.kernels.tail.plan import FRONT, TRACKED, Plan, norms_layout, tracker
from mssar.kernels.tail.synchronise import Group
from mssar.kernels.tiling import padded


def forward(
    plan: Plan,
    x: Tensor,
    shortcut: Tensor | None,
    tensors: Sequence[Tensor],
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and what the gradient needs.

    ``tensors`` are γ, β and the running mean and variance of the front norm, if there is one; of
    each scale Ω₁, γ, β, Ω₂, γ, β; and where their statistics are given, of each scale those of the
    hidden layer and those of the gates.
    """
    s, grids, cut = plan.settings, plan.grids, plan.cut["sums"]
    n, c, j, cs, js, h, w = plan.n, plan.c, plan.j, plan.cs, plan.js, plan.height, plan.width
    out = torch.empty_like(x)
    memory = torch.empty(plan.saved.bytes, dtype=torch.uint8, device=x.device)
    scratch = torch.empty(plan.forward.bytes, dtype=torch.uint8, device=x.device)
    kept, own = plan.saved.place(memory), plan.forward.place(scratch)
    here, px = where(x), pointer(x)
    cells = own.cells
    if plan.same is not None:
        before = n * grids.rows_at[plan.same] * cs
        cells = own.rows[before:] if here.stream is None else own.rows + 4 * before
    programs = n * cut.groups
    plan.sums(
        here, (programs, cut.blocks), px, cells, own.parts, own.counts, kept.counters,
        c, cs, h, w, *grids.fine, cut.tiles, cut.each, cut.groups, plan.counters,
    )  # fmt: skip
    at = pointers(tensors)
    front, at = at[: 4 * s.norm], at[4 * s.norm :]
    given: list[tuple[object, ...]] = [()] * 4
    if s.branches_fixed:
        at, given = at[: 6 * plan.levels], [at[6 * plan.levels + i :: 4] for i in range(4)]
    plan.prepare(
        here, (plan.preparing, 1), own.parts, own.counts, cells, own.rows, kept.norms,
        kept.shares, kept.reduces, front, *(at[i::6] for i in range(6)), *given,
        n, c, j, c, cs, cs, js, h, w, *grids.fine, programs, -(-cs // FRONT), *s.eps,
    )  # fmt: skip
    if group is not None and plan.batch_norm:
        group.front(plan, memory)
    plan.reduce(
        here, (plan.row_tiles, plan.j_tiles), own.rows, kept.reduces, kept.norms, kept.normal,
        kept.hidden, own.parts, own.counts, kept.counters, n, j, cs, cs, js, s.eps[1],
    )  # fmt: skip
    if group is not None and not s.branches_fixed:
        group.hidden(plan, memory)
    plan.expand(
        here, (plan.row_tiles, plan.c_tiles), kept.hidden, kept.expands, kept.norms, kept.gates,
        own.parts, own.counts, kept.counters, n, c, cs, js, s.eps[2],
    )  # fmt: skip
    if group is not None and not s.branches_fixed:
        group.gates(plan, memory)
    cut = plan.cut["apply"]
    plan.apply(
        here, (n * cut.tiles, cut.blocks), px, px if shortcut is None else pointer(shortcut),
        pointer(out), kept.gates, kept.norms, n, c, cs, js, h, w, *grids.fine, cut.tiles,
    )  # fmt: skip
    return out, memory


class Tracked(NamedTuple):
    """Running statistics that a batch moves: the front norm's, the hidden layers', the gates'."""

    means: Sequence[Tensor]
    variances: Sequence[Tensor]
    seen: Sequence[Tensor]
    momenta: Sequence[float]


def track(
    saved: Tensor, tracked: Tracked, channels: int, hidden: int, levels: int, front: bool
) -> None:
    """Move them towards what a forward pass has left."""
    norms = norms_layout(levels, channels, hidden).place(saved)
    count = len(tracked.means)
    launch = tracker(front, (count - front) // 2, levels)
    launch(
        where(saved), (count, -(-max(channels, hidden) // TRACKED)), norms.norms, norms.shares,
        pointers(tracked.means), pointers(tracked.variances),
        pointers(tracked.seen), tuple(tracked.momenta), channels, padded(channels), hidden,
        padded(hidden),
    )  # fmt: skip
