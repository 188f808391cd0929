"""The launches of a backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from mssar.kernels.launch import pointer, where
from mssar.kernels.tail.plan import FRONT, Plan
from mssar.kernels.tail.synchronise import Group


def backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    seen: Tensor | None,
    saved: Tensor,
    group: Group | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the shortcut, and of all parameters in one tensor (``split``)."""
    s, cut, fine = plan.settings, plan.cut["gather"], plan.grids.fine
    n, c, j, cs, js, h, w = plan.n, plan.c, plan.j, plan.cs, plan.js, plan.height, plan.width
    grad_x = torch.empty_like(x)
    behind = grad if s.activation is None else torch.empty_like(x)
    flat = torch.empty(plan.grads.bytes // 4, dtype=torch.float32, device=x.device)
    scratch = torch.empty(plan.backward.bytes, dtype=torch.uint8, device=x.device)
    kept, own = plan.saved.place(saved), plan.backward.place(scratch)
    grads = plan.grads.place(flat)
    here, px, pbehind = where(x), pointer(x), pointer(behind)
    plan.gather(
        here, (n * cut.tiles, cut.blocks), pointer(grad), px if seen is None else pointer(seen), px,
        pbehind, own.cell_sums, kept.gates, kept.norms, n, c, cs, js, h, w, *fine, cut.tiles,
    )  # fmt: skip
    plan.gates(
        here, (n, -(-cs // plan.together.channels)), own.cell_sums, kept.gates, kept.norms,
        own.weights, own.grads, own.sample_parts, n, cs, js, *fine,
    )  # fmt: skip
    plan.settle(
        here, (-(-cs // FRONT), plan.levels + 1), own.sample_parts, kept.norms, kept.shares,
        own.past, own.lines, grads.vectors, n, c, cs, js,
    )  # fmt: skip
    if group is not None and not s.branches_fixed:
        group.gates_backward(plan, saved, flat, scratch)
    plan.expand_backward(
        here, (plan.row_tiles, plan.j_tiles), own.grads, kept.gates, own.lines, kept.hidden,
        kept.expands, kept.norms, kept.shares, own.gate_grads, own.hidden_grads,
        own.hidden_lines, grads.hidden_vectors, own.parts, kept.counters, n, c, j, cs, js,
    )  # fmt: skip
    if group is not None and not s.branches_fixed:
        group.hidden_backward(plan, saved, flat, scratch)
    plan.reduce_backward(
        here, (plan.multiplying, 1), own.hidden_grads, kept.hidden, own.hidden_lines,
        own.gate_grads, kept.reduces, kept.norms, kept.normal, own.pool_grads, own.past, own.sums,
        grads.vectors, own.weight_parts, own.parts, kept.counters,
        n, c, j, c, cs, cs, js, plan.span, plan.row_tiles, plan.spans,
    )  # fmt: skip
    if group is not None and plan.batch_norm:
        group.front_backward(plan, scratch)
    cut = plan.cut["scatter"]
    plan.scatter(
        here, (plan.adding + n * cut.tiles, cut.blocks), pbehind, px, pointer(grad_x), own.weights,
        own.pool_grads, kept.norms, kept.shares, own.sums, own.weight_parts, grads.weights,
        n, c, j, cs, h, w, *fine, cut.tiles, plan.span, plan.adding,
    )  # fmt: skip
    return grad_x, behind, flat


def split(
    flat: Tensor, pieces: list[int], channels: int, hidden: int, levels: int, norm: bool
) -> list[Tensor]:
    """γ and β of the front norm if there is one; then of each scale Ω₁, γ, β, Ω₂, γ, β."""
    c, j = channels, hidden
    parts = torch.split_with_sizes(flat, pieces)
    firsts = parts[2 + 2 * levels + 1 :]  # a piece between sections, of what pads them
    found = list(parts[:2]) if norm else []
    for k in range(levels):
        found += [
            firsts[2 * levels + 1 + k].view(j, c, 1, 1), firsts[k], firsts[levels + k],
            firsts[3 * levels + 1 + k].view(c, j, 1, 1), parts[2 + k], parts[2 + levels + k],
        ]  # fmt: skip
    return found
