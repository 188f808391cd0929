"""Means over clipped square windows as an op.  N batch, C channels, H W map.

``torch.ops.mssar.window_means(x, radii)`` gives for every radius the map of its windows' means,
what :meth:`mssar.Sliding.pool` gives for the scale of that radius.
``torch.ops.mssar.window_means_backward(grads, like, radii)`` is the adjoint, summed over the
windows. Each is the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.device import interpreted
from mssar.kernels.grids import power, up_to
from mssar.kernels.register import register

LONGEST = 128  # columns that a tile holds
TILE = 2048  # elements of a tile, so that sums stay in registers
PRODUCT = 16  # the shortest side a product takes
PROGRAMS = 1024  # enough to fill a large GPU


def _means(x: Tensor, radii: Sequence[int]) -> list[Tensor]:
    outs = _means_shapes(x, radii)
    if not outs or not x.numel():
        return outs
    x, *targets = _upright([x, *outs])
    if x.shape[3] <= LONGEST:
        _launch([x], targets, radii, radii)
        return outs
    for target, radius in zip(targets, radii, strict=True):  # one axis after the other
        strips = torch.empty_like(x, dtype=torch.float32)
        _launch([x], [strips], [radius], [0])
        _launch([strips.mT], [target.mT], [radius], [0])
    return outs


def _adjoint(grads: Sequence[Tensor], like: Tensor, radii: Sequence[int]) -> Tensor:
    out = torch.empty_like(like)
    if not grads or not like.numel():
        return out.zero_()
    target, *sources = _upright([out, *(_laid_out(grad, out) for grad in grads)])
    if target.shape[3] <= LONGEST:
        _launch(sources, [target], radii, radii, adjoint=True)
        return out
    still, strips = [0] * len(radii), []
    for source, radius in zip(sources, radii, strict=True):
        strips.append(torch.empty_like(source, dtype=torch.float32))
        _launch([source], strips[-1:], [radius], [0], adjoint=True)
    _launch([strip.mT for strip in strips], [target.mT], radii, still, adjoint=True)
    return out


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    """``grad`` with the strides and type of ``like``: autograd may give any, also zeros."""
    if grad.stride() == like.stride() and grad.dtype == like.dtype:
        return grad
    return torch.empty_like(like).copy_(grad)


def _upright(maps: list[Tensor]) -> list[Tensor]:
    """The maps turned so that their rows fit into tiles, if one way does."""
    height, width = maps[0].shape[2:]
    return [x.mT for x in maps] if width > LONGEST >= height else maps


def _launch(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    down: Sequence[int],
    across: Sequence[int],
    *,
    adjoint: bool = False,
) -> None:
    """One source and a target a window; or, for the adjoint, a source a window and one target."""
    from mssar.kernels.triton import keys
    from mssar.kernels.triton import windows as kernels

    keys.settle()
    source, target = sources[0], targets[0]
    batch, channels, height, width = source.shape
    planes = batch * channels
    columns = max(PRODUCT, power(min(width, LONGEST)))
    depth = min(TILE // columns, max(PRODUCT, power(planes)))
    tiles = up_to(planes, depth) * up_to(width, columns)
    # Every run of rows begins by adding up a window: no more runs than it takes to fill the GPU.
    runs = max(1, PROGRAMS // (tiles * len(targets)))
    step = min(8, power(height))  # few different lengths, each of which is compiled
    rows = step * up_to(height, step * min(runs, up_to(height, step)))
    with torch.cuda.device_of(source):
        kernel = kernels.adjoint if adjoint else kernels.means
        kernel[tiles, up_to(height, rows), len(targets)](
            tuple(sources) if adjoint else source,
            target if adjoint else tuple(targets),
            tuple(min(reach, height) for reach in down),
            tuple(min(reach, width) for reach in across),
            source.stride(),
            target.stride(),
            planes,
            channels,
            height,
            width,
            PARTS=3 if source.dtype == torch.float32 else 2,
            INTERPRETED=interpreted(),
            ROWS=rows,
            BW=columns,
            BC=depth,
            num_warps=8 if adjoint else 4,  # the adjoint keeps the sums of all windows
            enable_fp_fusion=False,
        )


def _means_shapes(x: Tensor, radii: Sequence[int]) -> list[Tensor]:
    return [torch.empty_like(x) for _ in radii]


def _adjoint_shapes(grads: Sequence[Tensor], like: Tensor, radii: Sequence[int]) -> Tensor:  # noqa: ARG001
    return torch.empty_like(like)


def _save_means(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG001
    x, ctx.radii = inputs
    ctx.save_for_backward(x)


def _means_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, None]:
    (x,) = ctx.saved_tensors
    given = [(g, radius) for g, radius in zip(grads, ctx.radii, strict=True) if g is not None]
    if not given:
        return None, None
    needed, radii = zip(*given, strict=True)
    return torch.ops.mssar.window_means_backward(list(needed), x, list(radii)), None


def _save_adjoint(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, _, ctx.radii = inputs


def _adjoint_backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None]:
    return torch.ops.mssar.window_means(grad, ctx.radii), None, None


register(
    "window_means",
    "(Tensor x, int[] radii) -> Tensor[]",
    _means,
    _means_shapes,
    save=_save_means,
    backward=_means_backward,
)
register(
    "window_means_backward",
    "(Tensor[] grads, Tensor like, int[] radii) -> Tensor",
    _adjoint,
    _adjoint_shapes,
    save=_save_adjoint,
    backward=_adjoint_backward,
)
