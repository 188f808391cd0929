"""The launches of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mssar.kernels.launch import Pointer, Where, pointer, pointers, where
from mssar.kernels.tail.call import Settings
from mssar.kernels.tail.plan import FRONT, TRACKED, Forward, Plan, Saved, norms_layout, tracker
from mssar.kernels.tail.synchronise import Group
from mssar.kernels.tiling import padded

Arguments = tuple[Pointer, ...]  # the modules' tensors, as `prepare` takes them


def arguments(tensors: Sequence[Pointer], settings: Settings) -> Arguments:
    """In the kernels' order: tensor by tensor, of all scales.

    ``tensors`` are γ, β and the running mean and variance of the front norm, if there is one; of
    each scale Ω₁, γ, β, Ω₂, γ, β; and where their statistics are given, of each scale those of the
    hidden layer and those of the gates.
    """
    begin = 4 * settings.norm
    end = begin + 6 * len(settings.scales)
    found = list(tensors[:begin])
    for first in range(begin, begin + 6):
        found += tensors[first:end:6]
    for first in range(end, min(end + 4, len(tensors))):
        found += tensors[first::4]
    return tuple(found)


def forward(
    plan: Plan,
    x: Tensor,
    shortcut: Tensor | None,
    tensors: Arguments,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and what the gradient needs."""
    grids, cut = plan.grids, plan.cut["sums"]
    n, c, cs, js, h, w = plan.n, plan.c, plan.cs, plan.js, plan.height, plan.width
    out = torch.empty_like(x)
    memory = torch.empty(plan.saved.bytes, dtype=torch.uint8, device=x.device)
    scratch = torch.empty(plan.forward.bytes, dtype=torch.uint8, device=x.device)
    kept, own = plan.saved.place(memory), plan.forward.place(scratch)
    here, px = where(x), pointer(x)
    cells = own.cells
    if plan.same is not None:
        before = n * grids.rows_at[plan.same] * cs
        cells = own.rows[before:] if here.stream is None else own.rows + 4 * before
    plan.sums(
        here, (n * cut.groups, cut.blocks), px, cells, own.parts, own.counts,
        c, cs, h, w, *grids.fine, cut.tiles, cut.each, cut.groups,
    )  # fmt: skip
    to_gates(plan, here, cells, own, kept, memory, tensors, group)
    cut = plan.cut["apply"]
    plan.apply(
        here, (n * cut.tiles, cut.blocks), px, px if shortcut is None else pointer(shortcut),
        pointer(out), kept.gates, kept.norms, n, c, cs, js, h, w, *grids.fine, cut.tiles,
    )  # fmt: skip
    return out, memory


def to_gates(
    plan: Plan,
    here: Where,
    cells: Pointer,
    own: Forward,
    kept: Saved,
    memory: Tensor,
    tensors: Arguments,
    group: Group | None,
) -> None:
    """From the means over cells to gates."""
    s, fine, h, w = plan.settings, plan.grids.fine, plan.height, plan.width
    n, c, j, cx, cs, cxs, js = plan.n, plan.c, plan.j, plan.cx, plan.cs, plan.cxs, plan.js
    plan.prepare(
        here, (plan.preparing, 1), own.parts, own.counts, cells, own.rows, kept.norms,
        kept.shares, kept.counters, kept.reduces, *tensors,
        n, c, j, cx, cs, cxs, js, h, w, *fine, n * plan.cut["sums"].groups, -(-cs // FRONT),
        plan.counters, *s.eps,
    )  # fmt: skip
    if group is not None and plan.batch_norm:
        group.front(plan, memory)
    plan.reduce(
        here, (plan.row_tiles, plan.j_tiles), own.rows, kept.reduces, kept.norms, kept.normal,
        kept.hidden, own.parts, own.counts, kept.counters, n, j, cs, cxs, js, s.eps[1],
    )  # fmt: skip
    if group is not None and not s.branches_fixed:
        group.hidden(plan, memory)
    plan.expand(
        here, (plan.row_tiles, plan.c_tiles), kept.hidden, kept.expands, kept.norms, kept.gates,
        own.parts, own.counts, kept.counters, n, c, cs, js, s.eps[2],
    )  # fmt: skip
    if group is not None and not s.branches_fixed:
        group.gates(plan, memory)


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
    launch = tracker(front, levels, tuple([t.dtype for t in tracked.means]))
    launch(
        where(saved), (count, -(-max(channels, hidden) // TRACKED)), norms.norms, norms.shares,
        *pointers(tracked.means), *pointers(tracked.variances), *pointers(tracked.seen),
        *tracked.momenta, channels, padded(channels), hidden, padded(hidden),
    )  # fmt: skip
