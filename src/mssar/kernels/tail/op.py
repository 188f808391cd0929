"""The tail as torch ops, and as a function of autograd's for eager calls.

``torch.ops.mssar.tail`` is what compilers see (``traced``), and what they make of it is
``tail_forward`` and ``tail_backward``; ``eager`` takes the shorter way where nobody looks on. Both
lead to the same launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.launch import pointers
from mssar.kernels.register import register
from mssar.kernels.tail import backward as backwards
from mssar.kernels.tail import forward as forwards
from mssar.kernels.tail.call import Settings, dense, is_last, like, read, shape_of
from mssar.kernels.tail.forward import Arguments, Tracked, arguments
from mssar.kernels.tail.plan import Plan, pieces, plan, saved_bytes
from mssar.kernels.tail.synchronise import Group

NO_SECOND = (
    "the kernels have no second derivatives: use backend='reference' for gradients of gradients"
)


def eager(
    plan: Plan,
    x: Tensor,
    shortcut: Tensor | None,
    trained: Sequence[Tensor],
    tensors: Arguments,
    tracked: Tracked | None,
    group: Group | None = None,
) -> Tensor:
    """act(MS-SAR(norm(x)) + shortcut), at once.

    ``trained`` are γ and β of the front norm, if there is one, and of each scale Ω₁, γ, β, Ω₂, γ,
    β; ``tensors`` are these and the given statistics.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return eager(plan, x, shortcut, trained, tensors, tracked, group)
    needed = torch.is_grad_enabled() and (
        x.requires_grad
        or (shortcut is not None and shortcut.requires_grad)
        or any(t.requires_grad for t in trained)
    )
    plan.warm(forward=True, backward=needed)
    if needed:
        # Past a look at each argument for what a transform may have left: there is none here.
        apply: Any = super(torch.autograd.Function, _Tail).apply
        made: Tensor = apply(plan, tensors, tracked, group, x, shortcut, *trained)
        return made
    return _forward(plan, x, shortcut, tensors, tracked, group)[2]


def _forward(
    plan: Plan,
    x: Tensor,
    shortcut: Tensor | None,
    tensors: Arguments,
    tracked: Tracked | None,
    group: Group | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x and the shortcut as they were taken, the output, and what the gradient needs."""
    last = plan.shape.last
    x = dense(x, last)
    shortcut = None if shortcut is None else dense(shortcut, last)
    out, saved = forwards.forward(plan, x, shortcut, tensors, group)
    if tracked is not None:
        moved(plan, saved, tracked)
    return x, shortcut, out, saved


def watched(x: Tensor) -> bool:
    """Whether a compiler, a mode or a kind of tensors wants to see every op."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    return bool(torch._C._len_torch_dispatch_stack())


def in_order(trained: Sequence[Tensor], given: Sequence[Tensor], norm: bool) -> list[Tensor]:
    """The front norm's γ, β, mean, variance; the branches' parameters, their given statistics."""
    if not norm:
        return [*trained, *given]
    return [*trained[:2], *given[:2], *trained[2:], *given[2:]]


def _plan(
    x: Tensor, shortcut: bool, trained: list[Tensor], given: list[Tensor], settings: Settings
) -> tuple[Plan, list[Tensor]]:
    tensors = in_order(trained, given, settings.norm)
    hidden = trained[2 * settings.norm].shape[0]
    types = tuple([t.dtype for t in tensors])
    return plan(shape_of(x, hidden, shortcut, types, is_last(x)), settings), tensors


def plan_of(
    x: Tensor, shortcut: Tensor | None, trained: list[Tensor], given: list[Tensor], settings: str
) -> Plan:
    """Of a call of the op."""
    return _plan(x, shortcut is not None, trained, given, read(settings))[0]


def moved(plan: Plan, saved: Tensor, tracked: Tracked) -> None:
    """Move running statistics. Autograd must know: somebody may have kept them for a gradient."""
    forwards.track(saved, tracked, plan.c, plan.j, plan.levels, plan.batch_norm)
    torch.autograd.graph.increment_version(tracked.means)
    torch.autograd.graph.increment_version(tracked.variances)


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        tensors: Arguments,
        tracked: Tracked | None,
        group: Group | None,
        x: Tensor,
        shortcut: Tensor | None,
        *trained: Tensor,
    ) -> Tensor:
        x, shortcut, out, saved = _forward(plan, x, shortcut, tensors, tracked, group)
        kind = plan.settings.activation
        seen = out if kind == "relu" else shortcut if kind == "silu" else None
        ctx.save_for_backward(x, seen, saved)
        ctx.plan, ctx.group, ctx.types = plan, group, [t.dtype for t in trained]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        x, seen, saved = ctx.saved_tensors
        plan: Plan = ctx.plan
        last = plan.shape.last
        grad, x = dense(grad, last), dense(x, last)  # hooks may have saved x in another layout
        seen = None if seen is None else dense(seen, last)
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            with torch.cuda.device_of(x):
                made = backwards.backward(plan, grad, x, seen, saved, ctx.group)
        else:
            made = backwards.backward(plan, grad, x, seen, saved, ctx.group)
        grads = backwards.split(
            made[2], plan.pieces, plan.c, plan.j, plan.levels, plan.settings.norm
        )
        of_shortcut = made[1] if plan.shape.shortcut else None
        return None, None, None, None, made[0], of_shortcut, *typed(grads, ctx.types)


def typed(grads: list[Tensor], types: list[torch.dtype]) -> list[Tensor]:
    """Gradients in their parameters' types."""
    return [
        g if kind is torch.float32 else g.to(kind) for g, kind in zip(grads, types, strict=True)
    ]


# As ops. Settings travel as a line of text.


def traced(
    x: Tensor,
    shortcut: Tensor | None,
    trained: list[Tensor],
    given: list[Tensor],
    settings: Settings,
    tracked: Tracked | None,
) -> Tensor:
    """The same as :func:`eager`, by an op that compilers and modes see."""
    s = settings
    out, saved = torch.ops.mssar.tail(x, shortcut, trained, given, s.written())
    if tracked is not None:
        torch.ops.mssar.track(
            saved, list(tracked.means), list(tracked.variances), list(tracked.seen),
            list(tracked.momenta), x.shape[1], trained[2 * s.norm].shape[0], len(s.scales),
            s.norm and not s.fixed,
        )  # fmt: skip
    return out  # type: ignore[no-any-return]


def _compute(
    x: Tensor, shortcut: Tensor | None, trained: list[Tensor], given: list[Tensor], settings: str
) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(x):
        found, tensors = _plan(x, shortcut is not None, trained, given, read(settings))
        found.warm(forward=True, backward=False)
        given_at = arguments(pointers(tensors), found.settings)
        return _forward(found, x, shortcut, given_at, None, None)[2:]


def _shapes(
    x: Tensor, shortcut: Tensor | None, trained: list[Tensor], given: list[Tensor], settings: str
) -> tuple[Tensor, Tensor]:
    del shortcut, given
    how = read(settings)
    n, _, h, w = x.shape
    c, hidden = int(x.shape[1]), int(trained[2 * how.norm].shape[0])
    size = saved_bytes(n, c, (h, w), hidden, how.scales, x.dtype)
    return like(x), x.new_empty(size, dtype=torch.uint8)


def _differentiable(
    x: Tensor, shortcut: Tensor | None, trained: list[Tensor], given: list[Tensor], settings: str
) -> tuple[Tensor, Tensor]:
    """The op, as autograd sees it."""
    made: tuple[Tensor, Tensor]
    if torch.is_grad_enabled():
        made = _Traced.apply(settings, given, x, shortcut, *trained)  # type: ignore[no-untyped-call]
    else:
        made = torch.ops.mssar.tail_forward(x, shortcut, trained, given, settings)
    return made


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: str,
        given: list[Tensor],
        x: Tensor,
        shortcut: Tensor | None,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, saved = torch.ops.mssar.tail_forward(x, shortcut, list(trained), given, settings)
        how = read(settings)
        seen = out if how.activation == "relu" else shortcut if how.activation == "silu" else None
        ctx.mark_non_differentiable(saved)
        ctx.save_for_backward(x, seen, saved)
        ctx.settings, ctx.shortcut = settings, shortcut is not None
        ctx.types, ctx.hidden = [t.dtype for t in trained], trained[2 * how.norm].shape[0]
        return out, saved

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        x, seen, saved = ctx.saved_tensors
        grad_x, behind, flat = torch.ops.mssar.tail_backward(
            grad, x, seen, saved, ctx.hidden, ctx.shortcut, ctx.settings
        )
        how = read(ctx.settings)
        c, j, levels = x.shape[1], ctx.hidden, len(how.scales)
        grads = backwards.split(flat, pieces(levels, c, j), c, j, levels, how.norm)
        of_shortcut = behind if ctx.shortcut else None
        return None, None, grad_x, of_shortcut, *typed(grads, ctx.types)


def _compute_backward(
    grad: Tensor,
    x: Tensor,
    seen: Tensor | None,
    saved: Tensor,
    hidden: int,
    shortcut: bool,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    how = read(settings)
    with torch.cuda.device_of(x):
        types = (torch.float32,) * how.tensors  # that nothing depends on, backward
        found = plan(shape_of(x, hidden, shortcut, types, is_last(x)), how)
        found.warm(forward=False, backward=True)
        x, grad = dense(x, found.shape.last), dense(grad, found.shape.last)
        seen = None if seen is None else dense(seen, found.shape.last)
        grad_x, behind, grads = backwards.backward(found, grad, x, seen, saved)
        if behind is grad:  # no op may give back what it was given
            behind = grad.clone() if shortcut else x.new_empty(0)
        return grad_x, behind, grads


def _backward_shapes(
    grad: Tensor,
    x: Tensor,
    seen: Tensor | None,
    saved: Tensor,
    hidden: int,
    shortcut: bool,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, seen, saved
    how = read(settings)
    behind = like(x) if shortcut or how.activation else x.new_empty(0)
    size = sum(pieces(len(how.scales), x.shape[1], hidden))
    return like(x), behind, x.new_empty(size, dtype=torch.float32)


def refuse(*_: Any) -> Any:
    raise RuntimeError(NO_SECOND)


def _compute_track(
    saved: Tensor,
    means: list[Tensor],
    variances: list[Tensor],
    seen: list[Tensor],
    momenta: list[float],
    channels: int,
    hidden: int,
    levels: int,
    front: bool,
) -> None:
    with torch.cuda.device_of(saved):
        tracked = Tracked(means, variances, seen, momenta)
        forwards.track(saved, tracked, channels, hidden, levels, front)


_TAIL = (
    "(Tensor x, Tensor? shortcut, Tensor[] trained, Tensor[] given, str settings) "
    "-> (Tensor, Tensor)"
)
register("tail", _TAIL, _compute, _shapes, traced=_differentiable)
register("tail_forward", _TAIL, _compute, _shapes)
register(
    "tail_backward",
    "(Tensor grad, Tensor x, Tensor? seen, Tensor saved, int hidden, bool shortcut, str settings) "
    "-> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _backward_shapes,
)
register(
    "track",
    "(Tensor saved, Tensor(a!)[] means, Tensor(b!)[] variances, Tensor(c!)[] seen, "
    "float[] momenta, int channels, int hidden, int levels, bool front) -> ()",
    _compute_track,
    lambda *_: None,
)
