"""The tail as a torch op, and as a function of autograd's for eager calls.

``torch.ops.mssar.tail`` is what compilers see; ``run`` takes the shorter way where nobody looks on.
Both lead to the same launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.register import register
from mssar.kernels.tail import backward as backwards
from mssar.kernels.tail import forward as forwards
from mssar.kernels.tail.forward import Tracked
from mssar.kernels.tail.plan import (
    Plan,
    Settings,
    dense,
    grads_layout,
    is_last,
    plan,
    saved_bytes,
    shape_of,
)
from mssar.kernels.tail.synchronise import Group

NO_SECOND = (
    "the kernels have no second derivatives: use backend='reference' for gradients of gradients"
)


def run(
    x: Tensor,
    shortcut: Tensor | None,
    trained: list[Tensor],
    given: list[Tensor],
    settings: Settings,
    tracked: Tracked | None,
    group: Group | None = None,
) -> Tensor:
    """act(MS-SAR(norm(x)) + shortcut).

    ``trained`` are γ and β of the front norm, if there is one, and of each scale Ω₁, γ, β, Ω₂, γ,
    β. ``given`` are the front norm's running mean and variance, and where the branches' statistics
    are given, of each scale the running mean and variance of the hidden layer and of the gates.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or watched():
        assert group is None
        return _by_op(x, shortcut, trained, given, settings, tracked)
    last = is_last(x)
    needed = torch.is_grad_enabled() and (
        x.requires_grad
        or (shortcut is not None and shortcut.requires_grad)
        or any(t.requires_grad for t in trained)
    )
    found = _plan(x, shortcut, trained, given, settings, last)
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(x):
            return _directly(found, x, shortcut, trained, given, tracked, group, last, needed)
    return _directly(found, x, shortcut, trained, given, tracked, group, last, needed)


def _directly(
    found: Plan,
    x: Tensor,
    shortcut: Tensor | None,
    trained: list[Tensor],
    given: list[Tensor],
    tracked: Tracked | None,
    group: Group | None,
    last: bool,
    needed: bool,
) -> Tensor:
    found.warm(needed)
    if needed:
        made: Tensor = _Tail.apply(  # type: ignore[no-untyped-call]
            found, given, tracked, group, last, x, shortcut, *trained
        )
        return made
    laid = None if shortcut is None else dense(shortcut, last)
    tensors = _in_order(trained, given, found.settings.norm)
    out, saved = forwards.forward(found, dense(x, last), laid, tensors, group)
    if tracked is not None:
        moved(found, saved, tracked)
    return out


def watched() -> bool:
    """Whether some mode wants to see every op."""
    return bool(torch._C._len_torch_dispatch_stack())


def _plan(
    x: Tensor,
    shortcut: Tensor | None,
    trained: list[Tensor],
    given: list[Tensor],
    settings: Settings,
    last: bool,
) -> Plan:
    hidden = trained[2 * settings.norm].shape[0]
    tensors = _in_order(trained, given, settings.norm)
    return plan(shape_of(x, hidden, shortcut is not None, tensors, last), settings)


def _in_order(trained: Sequence[Tensor], given: Sequence[Tensor], norm: bool) -> list[Tensor]:
    """γ, β, mean and variance in front; the branches' parameters; their given statistics."""
    if not norm:
        return [*trained, *given]
    return [*trained[:2], *given[:2], *trained[2:], *given[2:]]


def moved(found: Plan, saved: Tensor, tracked: Tracked) -> None:
    """Move running statistics, so that autograd sees it."""
    forwards.track(saved, tracked, found.c, found.j, found.levels, found.batch_norm)
    for tensors in (tracked.means, tracked.variances, tracked.seen):
        for t in tensors:
            torch.autograd.graph.increment_version(t)


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        found: Plan,
        given: list[Tensor],
        tracked: Tracked | None,
        group: Group | None,
        last: bool,
        x: Tensor,
        shortcut: Tensor | None,
        *trained: Tensor,
    ) -> Tensor:
        x = dense(x, last)
        if shortcut is not None:
            shortcut = dense(shortcut, last)
        tensors = _in_order(trained, given, found.settings.norm)
        out, saved = forwards.forward(found, x, shortcut, tensors, group)
        if tracked is not None:
            moved(found, saved, tracked)
        seen = {"relu": out, "silu": shortcut}.get(str(found.settings.activation))
        ctx.save_for_backward(x, seen, saved)
        ctx.found, ctx.group, ctx.types = found, group, [t.dtype for t in trained]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        x, seen, saved = ctx.saved_tensors
        found: Plan = ctx.found
        grad = dense(grad, found.shape.last)
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            with torch.cuda.device_of(x):
                made = backwards.backward(found, grad, x, seen, saved, ctx.group)
        else:
            made = backwards.backward(found, grad, x, seen, saved, ctx.group)
        norm = found.settings.norm
        grads = backwards.split(made[2], found.c, found.j, found.levels, norm)
        grads = typed(grads, ctx.types)
        of_shortcut = made[1] if found.shape.shortcut else None
        return None, None, None, None, None, made[0], of_shortcut, *grads


def typed(grads: list[Tensor], types: list[torch.dtype]) -> list[Tensor]:
    """Gradients in their parameters' types."""
    return [
        g if kind is torch.float32 else g.to(kind) for g, kind in zip(grads, types, strict=True)
    ]


# As an op. Settings travel as numbers.


def _by_op(
    x: Tensor,
    shortcut: Tensor | None,
    trained: list[Tensor],
    given: list[Tensor],
    settings: Settings,
    tracked: Tracked | None,
) -> Tensor:
    s = settings
    flags = [s.norm, s.fixed, s.branches_fixed]
    out, saved = torch.ops.mssar.tail(
        x, shortcut, trained, given, list(s.scales), list(s.eps), s.activation or "", flags,
        s.precision,
    )  # fmt: skip
    if tracked is not None:
        torch.ops.mssar.track(
            saved, list(tracked.means), list(tracked.variances), list(tracked.seen),
            list(tracked.momenta), x.shape[1], trained[2 * s.norm].shape[0], len(s.scales),
            s.norm and not s.fixed,
        )  # fmt: skip
    return out  # type: ignore[no-any-return]


_SETTINGS = "int[] scales, float[] eps, str activation, bool[] flags, str precision"


def _settings(
    scales: Sequence[int], eps: Sequence[float], activation: str, flags: Sequence[bool], how: str
) -> Settings:
    front, hidden, gates = eps
    return Settings(tuple(scales), (front, hidden, gates), activation or None, *flags, how)


def _compute(
    x: Tensor, shortcut: Tensor | None, trained: list[Tensor], given: list[Tensor], *how: Any
) -> tuple[Tensor, Tensor]:
    settings = _settings(*how)
    last = is_last(x)
    with torch.cuda.device_of(x):
        found = _plan(x, shortcut, trained, given, settings, last)
        found.warm(False)
        laid = None if shortcut is None else dense(shortcut, last)
        tensors = _in_order(trained, given, settings.norm)
        return forwards.forward(found, dense(x, last), laid, tensors)


def _shapes(
    x: Tensor, shortcut: Tensor | None, trained: list[Tensor], given: list[Tensor], *how: Any
) -> tuple[Tensor, Tensor]:
    del shortcut, given
    settings = _settings(*how)
    n, c, h, w = x.shape
    hidden = trained[2 * settings.norm].shape[0]
    size = saved_bytes(n, c, (h, w), hidden, settings.scales, x.dtype)
    return torch.empty_like(x), x.new_empty(size, dtype=torch.uint8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, shortcut, trained, given, *how = inputs
    out, saved = output
    seen = {"relu": out, "silu": shortcut}.get(how[2])
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(x, seen, saved, *trained, *given)
    ctx.how, ctx.count, ctx.shortcut = how, len(trained), shortcut is not None


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    x, seen, saved, *tensors = ctx.saved_tensors
    trained, given = tensors[: ctx.count], tensors[ctx.count :]
    grad_x, behind, flat = torch.ops.mssar.tail_backward(
        grad, x, seen, saved, trained, given, ctx.shortcut, *ctx.how
    )
    norm = ctx.how[3][0]
    hidden = trained[2 * norm].shape[0]
    grads = backwards.split(flat, x.shape[1], hidden, len(ctx.how[0]), norm)
    grads = typed(grads, [t.dtype for t in trained])
    nones = [None] * len(ctx.how)
    return grad_x, (behind if ctx.shortcut else None), grads, [None] * len(given), *nones


def _compute_backward(
    grad: Tensor,
    x: Tensor,
    seen: Tensor | None,
    saved: Tensor,
    trained: list[Tensor],
    given: list[Tensor],
    shortcut: bool,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = _settings(*how)
    last = is_last(x)
    with torch.cuda.device_of(x):
        found = _plan(x, x if shortcut else None, trained, given, settings, last)
        found.warm(True)
        x, grad = dense(x, last), dense(grad, last)
        seen = None if seen is None else dense(seen, last)
        grad_x, behind, grads = backwards.backward(found, grad, x, seen, saved)
        if behind is grad:  # no op may give back what it was given
            behind = grad.clone() if shortcut else x.new_empty(0)
        return grad_x, behind, grads


def _backward_shapes(
    grad: Tensor,
    x: Tensor,
    seen: Tensor | None,
    saved: Tensor,
    trained: list[Tensor],
    given: list[Tensor],
    shortcut: bool,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, seen, saved, given
    settings = _settings(*how)
    behind = torch.empty_like(x) if shortcut or settings.activation else x.new_empty(0)
    hidden = trained[2 * settings.norm].shape[0]
    layout = grads_layout(len(settings.scales), x.shape[1], hidden)
    return torch.empty_like(x), behind, x.new_empty(layout.bytes // 4, dtype=torch.float32)


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


register(
    "tail",
    f"(Tensor x, Tensor? shortcut, Tensor[] trained, Tensor[] given, {_SETTINGS}) "
    "-> (Tensor, Tensor)",
    _compute,
    _shapes,
    save=_save,
    backward=_differentiate,
)
register(
    "tail_backward",
    "(Tensor grad, Tensor x, Tensor? seen, Tensor saved, Tensor[] trained, "
    f"Tensor[] given, bool shortcut, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _backward_shapes,
    backward=refuse,
)
register(
    "track",
    "(Tensor saved, Tensor(a!)[] means, Tensor(b!)[] variances, Tensor(c!)[] seen, "
    "float[] momenta, int channels, int hidden, int levels, bool front) -> ()",
    _compute_track,
    lambda *_: None,
)
