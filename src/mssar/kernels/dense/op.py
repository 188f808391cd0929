"""Dense steps as torch ops, and as a function of autograd's for eager calls.

region_means  a map's means over cells, of which those over all scales' regions follow
dense_step    z · x with weights from the main vector's means; and the means of both together

N batch, C new channels, CX channels of the main vector so far, H W map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.dense import step as launches
from mssar.kernels.dense.plan import Means, Step, means_plan, means_shape, step_plan
from mssar.kernels.launch import pointers
from mssar.kernels.register import register
from mssar.kernels.tail.backward import split
from mssar.kernels.tail.call import Settings, dense, is_last, like, read, shape_of
from mssar.kernels.tail.forward import Arguments, Tracked, arguments
from mssar.kernels.tail.op import NO_SECOND, moved, refuse, typed
from mssar.kernels.tail.plan import pieces, saved_bytes
from mssar.kernels.tail.synchronise import Group
from mssar.kernels.tiling import padded


def means(x: Tensor, scales: tuple[int, ...]) -> Tensor:
    """Those that a block's first step begins with."""
    made: Tensor = torch.ops.mssar.region_means(x, list(scales))
    return made


def eager(
    plan: Step,
    x: Tensor,
    cells: Tensor,
    trained: Sequence[Tensor],
    tensors: Arguments,
    tracked: Tracked | None,
    carry: bool,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """z · x, and the means of the main vector with it; without ``carry`` those that were given.

    ``trained`` are of each scale Ω₁, γ, β, Ω₂, γ, β; ``tensors`` are these and, where the branches'
    statistics are given, those.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return eager(plan, x, cells, trained, tensors, tracked, carry, group)
    needed = torch.is_grad_enabled() and (
        x.requires_grad or cells.requires_grad or any(t.requires_grad for t in trained)
    )
    plan.warm(forward=True, backward=needed)
    if needed:
        # Past a look at each argument for what a transform may have left: there is none here.
        apply: Any = super(torch.autograd.Function, _Step).apply
        out, nexts = apply(plan, tensors, tracked, carry, group, x, cells, *trained)
    else:
        _, out, nexts, _ = _forward(plan, x, cells, tensors, tracked, carry, group)
    return out, cells if nexts is None else nexts


def _forward(
    plan: Step,
    x: Tensor,
    cells: Tensor,
    tensors: Arguments,
    tracked: Tracked | None,
    carry: bool,
    group: Group | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x as it was taken, the output, the means carried on, and what the gradient needs."""
    x = dense(x, plan.shape.last)
    out, nexts, saved = launches.forward(plan, x, cells.contiguous(), tensors, carry, group)
    if tracked is not None:
        moved(plan, saved, tracked)
    return x, out, nexts, saved


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Step,
        tensors: Arguments,
        tracked: Tracked | None,
        carry: bool,
        group: Group | None,
        x: Tensor,
        cells: Tensor,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        x, out, nexts, saved = _forward(plan, x, cells, tensors, tracked, carry, group)
        ctx.save_for_backward(x, saved)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.group, ctx.types = plan, group, [t.dtype for t in trained]
        return out, nexts

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, next_grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        if grad is None and next_grads is None:
            return (None,) * (7 + len(ctx.types))
        x, saved = ctx.saved_tensors
        plan: Step = ctx.plan
        x = dense(x, plan.shape.last)  # hooks may have saved it in another layout
        with torch.cuda.device_of(x):
            made = launches.backward(plan, *_laid(grad, next_grads, x), x, saved, ctx.group)
        grads = split(made[2], plan.pieces, plan.c, plan.j, plan.levels, False, plan.cx)
        return None, None, None, None, None, made[0], made[1], *typed(grads, ctx.types)


def _laid(
    grad: Tensor | None, next_grads: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients as the kernels read them."""
    of_out = torch.zeros_like(x) if grad is None else dense(grad, is_last(x))
    return of_out, None if next_grads is None else next_grads.contiguous()


# As ops. Settings travel as a line of text.


def traced(
    x: Tensor,
    cells: Tensor,
    trained: list[Tensor],
    given: list[Tensor],
    settings: Settings,
    tracked: Tracked | None,
    carry: bool,
) -> tuple[Tensor, Tensor]:
    """The same as :func:`eager`, by an op that compilers and modes see."""
    s = settings
    out, nexts, saved = torch.ops.mssar.dense_step(x, cells, trained, given, carry, s.written())
    if tracked is not None:
        torch.ops.mssar.track(
            saved, list(tracked.means), list(tracked.variances), list(tracked.seen),
            list(tracked.momenta), x.shape[1], trained[0].shape[0], len(s.scales), False,
        )  # fmt: skip
    return out, nexts if carry else cells


def _widths(x: Tensor, trained: Sequence[Tensor]) -> tuple[int, int, int]:
    """C, J and CX: a network's own, which a tracer need not leave open."""
    return int(x.shape[1]), int(trained[0].shape[0]), int(trained[0].shape[1])


def _plan(
    x: Tensor, hidden: int, context: int, types: tuple[torch.dtype, ...], settings: Settings
) -> Step:
    return step_plan(shape_of(x, hidden, False, types, is_last(x), context), settings)


def plan_of(
    x: Tensor, cells: Tensor, trained: list[Tensor], given: list[Tensor], carry: bool, settings: str
) -> Step:
    """Of a call of the op."""
    del cells, carry
    _, hidden, context = _widths(x, trained)
    types = tuple([t.dtype for t in [*trained, *given]])
    return _plan(x, hidden, context, types, read(settings))


def _compute(
    x: Tensor, cells: Tensor, trained: list[Tensor], given: list[Tensor], carry: bool, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(x):
        found = plan_of(x, cells, trained, given, carry, settings)
        tensors = arguments(pointers([*trained, *given]), found.settings)
        found.warm(forward=True, backward=False)
        _, out, nexts, saved = _forward(found, x, cells, tensors, None, carry, None)
    return out, cells.new_empty(0) if nexts is None else nexts, saved


def _shapes(
    x: Tensor, cells: Tensor, trained: list[Tensor], given: list[Tensor], carry: bool, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    del given
    n, _, h, w = x.shape
    c, hidden, context = _widths(x, trained)
    size = saved_bytes(n, c, (h, w), hidden, read(settings).scales, x.dtype, context)
    nexts = cells.new_empty((cells.shape[0], padded(context + c)) if carry else 0)
    return like(x), nexts, x.new_empty(size, dtype=torch.uint8)


def _differentiable(
    x: Tensor, cells: Tensor, trained: list[Tensor], given: list[Tensor], carry: bool, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The op, as autograd sees it."""
    made: tuple[Tensor, Tensor, Tensor]
    if torch.is_grad_enabled():
        made = _Traced.apply(settings, given, carry, x, cells, *trained)  # type: ignore[no-untyped-call]
    else:
        made = torch.ops.mssar.dense_step_forward(x, cells, trained, given, carry, settings)
    return made


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: str,
        given: list[Tensor],
        carry: bool,
        x: Tensor,
        cells: Tensor,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, nexts, saved = torch.ops.mssar.dense_step_forward(
            x, cells, list(trained), given, carry, settings
        )
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, saved)
        ctx.settings, ctx.carry = settings, carry
        ctx.types, ctx.widths = [t.dtype for t in trained], _widths(x, trained)
        return out, nexts, saved

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, next_grads: Tensor | None, _: Any
    ) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        x, saved = ctx.saved_tensors
        next_grads = next_grads if ctx.carry else None
        if grad is None and next_grads is None:
            return (None,) * (5 + len(ctx.types))
        if grad is None:
            grad = torch.zeros_like(x)
        (c, j, context), levels = ctx.widths, len(read(ctx.settings).scales)
        grad_x, cell_grads, flat = torch.ops.mssar.dense_step_backward(
            grad, next_grads, x, saved, j, context, ctx.settings
        )
        grads = split(flat, pieces(levels, c, j, context), c, j, levels, False, context)
        return None, None, None, grad_x, cell_grads, *typed(grads, ctx.types)


def _compute_backward(
    grad: Tensor,
    next_grads: Tensor | None,
    x: Tensor,
    saved: Tensor,
    hidden: int,
    context: int,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    how = read(settings)
    with torch.cuda.device_of(x):
        types = (torch.float32,) * how.tensors  # that nothing depends on, backward
        found = _plan(x, hidden, context, types, how)
        found.warm(forward=False, backward=True)
        x = dense(x, found.shape.last)
        return launches.backward(found, *_laid(grad, next_grads, x), x, saved)


def _backward_shapes(
    grad: Tensor,
    next_grads: Tensor | None,
    x: Tensor,
    saved: Tensor,
    hidden: int,
    context: int,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, next_grads, saved
    n, c, h, w = x.shape
    scales = read(settings).scales
    shape = means_shape(n, context, (h, w), scales)
    size = sum(pieces(len(scales), int(c), hidden, context))
    flat = x.new_empty(size, dtype=torch.float32)
    return like(x), x.new_empty(shape, dtype=torch.float32), flat


def means_plan_of(x: Tensor, scales: Sequence[int]) -> Means:
    """Of a call of ``region_means``."""
    n, c, h, w = x.shape
    return means_plan((n, c, h, w), is_last(x), x.dtype, x.device, tuple(scales))


def _means(x: Tensor, scales: Sequence[int]) -> Tensor:
    with torch.cuda.device_of(x):
        found = means_plan_of(x, scales)
        found.warm(forward=True, backward=False)
        return launches.means(found, dense(x, found.shape.last))


def _means_shapes(x: Tensor, scales: Sequence[int]) -> Tensor:
    n, c, h, w = x.shape
    return x.new_empty(means_shape(n, int(c), (h, w), tuple(scales)), dtype=torch.float32)


def _means_backward(grad: Tensor, like: Tensor, scales: Sequence[int]) -> Tensor:
    with torch.cuda.device_of(like):
        found = means_plan_of(like, scales)
        found.warm(forward=False, backward=True)
        form = torch.channels_last if found.shape.last else torch.contiguous_format
        made = torch.empty_like(like, memory_format=form)
        launches.unpool(found, grad.contiguous(), made)
        return made


def _means_differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return torch.ops.mssar.region_means_backward(grad, x, ctx.scales), None


def _means_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])
    ctx.scales = inputs[1]


register(
    "region_means",
    "(Tensor x, int[] scales) -> Tensor",
    _means,
    _means_shapes,
    save=_means_save,
    backward=_means_differentiate,
)
register(
    "region_means_backward",
    "(Tensor grad, Tensor like, int[] scales) -> Tensor",
    _means_backward,
    lambda grad, x, scales: like(x),  # noqa: ARG005
    backward=refuse,
)
_STEP = (
    "(Tensor x, Tensor cells, Tensor[] trained, Tensor[] given, bool carry, str settings) "
    "-> (Tensor, Tensor, Tensor)"
)
register("dense_step", _STEP, _compute, _shapes, traced=_differentiable)
register("dense_step_forward", _STEP, _compute, _shapes)
register(
    "dense_step_backward",
    "(Tensor grad, Tensor? next_grads, Tensor x, Tensor saved, int hidden, int context, "
    "str settings) -> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _backward_shapes,
)
