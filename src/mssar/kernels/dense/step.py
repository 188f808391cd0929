"""The launches of dense steps, and of the means that the first of them begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from mssar.kernels.dense.plan import Means, Step
from mssar.kernels.launch import pointer, where
from mssar.kernels.tail.backward import from_gates
from mssar.kernels.tail.forward import Arguments, to_gates
from mssar.kernels.tail.synchronise import Group


def means(plan: Means, x: Tensor) -> Tensor:
    """A map's means over cells."""
    n, cut, fine = plan.n, plan.cut["sums"], plan.grids.fine
    cells = x.new_empty((n * plan.grids.cells, plan.cs), dtype=torch.float32)
    at = pointer(cells)
    plan.sums(
        where(x), (n * cut.groups, cut.blocks), pointer(x), at, at, at,
        plan.c, plan.cs, plan.height, plan.width, *fine, cut.tiles, cut.each, cut.groups,
    )  # fmt: skip
    return cells


def unpool(plan: Means, grad: Tensor, out: Tensor) -> None:
    """The gradient of the map, from that of its means."""
    cut = plan.cut["scatter"]
    plan.unpool(
        where(out), (plan.n * cut.tiles, cut.blocks), pointer(grad), pointer(out),
        plan.c, plan.cs, plan.height, plan.width, *plan.grids.fine, cut.tiles,
    )  # fmt: skip


def forward(
    plan: Step,
    x: Tensor,
    cells: Tensor,
    tensors: Arguments,
    carry: bool,
    group: Group | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """z · x, the means of the main vector with it if they are carried on, and what is kept."""
    n, cut, h, w = plan.n, plan.cut["apply"], plan.height, plan.width
    assert cells.shape == (plan.cell_rows, plan.cxs)
    out = torch.empty_like(x)
    memory = torch.empty(plan.saved.bytes, dtype=torch.uint8, device=x.device)
    scratch = torch.empty(plan.forward.bytes, dtype=torch.uint8, device=x.device)
    kept, own = plan.saved.place(memory), plan.forward.place(scratch)
    here, px, at = where(x), pointer(x), pointer(cells)
    to_gates(plan, here, at, own, kept, memory, tensors, group)
    sizes = h, w, *plan.grids.fine, cut.tiles
    if not carry:
        plan.apply(
            here, (n * cut.tiles, cut.blocks), px, px, pointer(out), kept.gates, kept.norms,
            n, plan.c, plan.cs, plan.js, *sizes,
        )  # fmt: skip
        return out, None, memory
    nexts = cells.new_empty((plan.cell_rows, plan.ns))
    plan.carry(
        here, (n * cut.tiles + plan.copying, cut.blocks), px, pointer(out), at, pointer(nexts),
        kept.gates, kept.norms, n, plan.c, plan.cx, plan.cs, plan.cxs, plan.ns, plan.js, *sizes,
    )  # fmt: skip
    return out, nexts, memory


def backward(
    plan: Step,
    grad: Tensor,
    next_grads: Tensor | None,
    x: Tensor,
    saved: Tensor,
    group: Group | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the means over cells, and of all parameters in one tensor (``split``)."""
    n, c, cx, h, w, cut = plan.n, plan.c, plan.cx, plan.height, plan.width, plan.cut["gather"]
    fine, carried = plan.grids.fine, next_grads is not None
    grad_x = torch.empty_like(x)
    cell_grads = x.new_empty((plan.cell_rows, plan.cxs), dtype=torch.float32)
    flat = torch.empty(plan.grads.bytes // 4, dtype=torch.float32, device=x.device)
    scratch = torch.empty(plan.backward.bytes, dtype=torch.uint8, device=x.device)
    kept, own = plan.saved.place(saved), plan.backward.place(scratch)
    grads = plan.grads.place(flat)
    here, of_next = where(x), pointer(cell_grads if next_grads is None else next_grads)
    plan.carry_back[carried](
        here, (n * cut.tiles, cut.blocks), pointer(grad), pointer(x), pointer(grad_x), of_next,
        own.cell_sums, kept.gates, kept.norms, n, c, cx, plan.cs, plan.ns, plan.js, h, w, *fine,
        cut.tiles,
    )  # fmt: skip
    from_gates(plan, here, own, kept, grads, saved, flat, scratch, group)
    plan.collect[carried](
        here, (plan.adding + plan.copying, plan.beside), own.pool_grads, of_next,
        pointer(cell_grads), own.weight_parts, grads.weights, n, c, plan.j, cx, plan.cxs, plan.ns,
        h, w, *fine, plan.span, plan.adding,
    )  # fmt: skip
    return grad_x, cell_grads, flat
