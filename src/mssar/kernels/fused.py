"""Modules and the ops: whether the kernels can stand in for them, and the call that does it.

What stands in the way is said in words (``obstacle``), so that a printed network can say it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

import mssar.kernels.dense_ops
import mssar.kernels.ops  # noqa: F401  (both register them)
from mssar.coordinates import Regional
from mssar.kernels.geometry import FINEST, finest, region_grids

# MSSAR stands above this module. It has channels, scales, sets, context_channels and branches;
# each of those has reduce, norm1, expand and norm2.
Layer: TypeAlias = Any
Branch: TypeAlias = Any


def obstacle(layer: Layer | None, norm: nn.Module | None = None) -> str | None:
    """Why the kernels cannot stand in for these modules, if they cannot."""
    if norm is not None and (reason := _norm_obstacle(norm)):
        return reason
    if layer is None:
        return None
    if not all(isinstance(s, Regional) for s in layer.sets.sets):
        return "windows slide"
    if finest(layer.scales) > FINEST:
        return f"the scales need a grid finer than {FINEST}×{FINEST}"
    branches = _branches(layer)
    for branch in branches:
        if type(branch) is not layer.branch_type:
            return f"a branch is a {_called(branch)}"
        for norm in (branch.norm1, branch.norm2):
            if reason := _norm_obstacle(norm):
                return f"in a branch, {reason}"
        c, j = layer.channels, branch.norm1.num_features
        seen = c if layer.context_channels is None else layer.context_channels
        for product, shape in ((branch.reduce, (j, seen, 1, 1)), (branch.expand, (c, j, 1, 1))):
            if not is_product(product, shape) or branch.norm2.num_features != c:
                return f"in a branch, {_called(product)} is no plain product"
        if hooked(branch):
            return "a branch has hooks"
    if len({branch.norm1.num_features for branch in branches}) > 1:
        return "the branches differ in width"
    epsilons = {(branch.norm1.eps, branch.norm2.eps) for branch in branches}
    return "the branches' norms differ in eps" if len(epsilons) > 1 else None


def _branches(layer: Layer | None) -> list[Branch]:
    return [] if layer is None else list(layer.branches)


def is_product(conv: nn.Module, shape: tuple[int, ...] | None = None) -> bool:
    """Whether it is nothing but a matrix that vectors are multiplied by, of this shape if given."""
    if type(conv) is not nn.Conv2d or conv.bias is not None or hooked(conv):
        return False
    if conv.stride != (1, 1) or conv.padding != (0, 0) or not conv.weight.is_contiguous():
        return False
    return conv.weight.shape == (shape or (conv.out_channels, conv.in_channels, 1, 1))


def _norm_obstacle(norm: nn.Module) -> str | None:
    if type(norm) is not nn.BatchNorm2d:
        return f"{_called(norm)} is no plain BatchNorm2d"
    if hooked(norm):
        return f"{_called(norm)} has hooks"
    if norm.bias is None or not norm.track_running_stats or norm.momentum is None:
        return "a BatchNorm2d is not affine, or keeps no running statistics by momentum"
    return None


def _called(module: nn.Module) -> str:
    return type(module).__name__


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # replaced on this module alone
    )


def fits(
    x: Tensor, layer: Layer | None, norm: nn.Module | None, shortcut: Tensor | None = None
) -> bool:
    """Whether a call is one for the kernels; where not, the modules say what is wrong with it."""
    if x.ndim != 4 or x.numel() == 0 or (layer is not None and x.shape[1] != layer.channels):
        return False
    if norm is not None and cast("nn.BatchNorm2d", norm).num_features != x.shape[1]:
        return False
    if shortcut is not None and (
        shortcut.shape != x.shape or shortcut.dtype is not x.dtype or shortcut.device != x.device
    ):
        return False
    norms = list(_norms(layer, norm))
    modes = {norm.training for norm in norms}
    if len(modes) > 1 or any(n.weight.device != x.device for n in norms):
        return False
    for weight in _products(layer):
        if weight.device != x.device:
            return False
        if weight.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return False
    if True in modes:
        return min(_values(x, layer, norm)) > 1
    # In evaluation mode the kernels have no gradient: who needs one gets the reference.
    needed = [x, *(p for n in norms for p in (n.weight, n.bias)), *_products(layer)]
    needed += [shortcut] if shortcut is not None else []
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in needed))


def _norms(layer: Layer | None, norm: nn.Module | None) -> Iterator[nn.BatchNorm2d]:
    """The norm in front, those of the hidden layers, those of the gates: the order of ``track``."""
    if norm is not None:
        yield cast("nn.BatchNorm2d", norm)
    yield from (branch.norm1 for branch in _branches(layer))
    yield from (branch.norm2 for branch in _branches(layer))


def _products(layer: Layer | None) -> Iterator[Tensor]:
    for branch in _branches(layer):
        yield branch.reduce.weight
        yield branch.expand.weight


def _values(x: Tensor, layer: Layer | None, norm: nn.Module | None) -> list[int]:
    """How many values a channel each of those norms sees."""
    n, _, height, width = x.shape
    found = [] if norm is None else [n * height * width]
    if layer is not None:
        grids = region_grids((int(height), int(width)), layer.scales)
        found += [n * down * across for down, across in grids] * 2
    return found


def run(
    x: Tensor,
    layer: Layer | None,
    norm: nn.Module | None = None,
    shortcut: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """``relu(layer(norm(x)) + shortcut)``, each of them where it is given."""
    front = cast("nn.BatchNorm2d | None", norm)
    branches = _branches(layer)
    params = [p for branch in branches for p in _parameters(branch)]
    # Without a layer a grid is needed all the same: the passes go cell by cell.
    scales = [4] if layer is None else list(layer.scales)
    eps = [1e-5 if front is None else front.eps, *_epsilons(branches)]
    settings = scales, eps, relu, _precision(x)
    norms = list(_norms(layer, norm))
    if not norms[0].training:
        ours = [] if front is None else [front.weight, front.bias, *_running(front)]
        hidden = [t for branch in branches for t in _running(branch.norm1)]
        gates = [t for branch in branches for t in _running(branch.norm2)]
        made: Tensor = torch.ops.mssar.tail_eval(
            x, shortcut, ours, params, hidden, gates, *settings
        )
        return made
    gamma, beta = (None, None) if front is None else (front.weight, front.bias)
    out, moments, _, _, hidden_moments, _, gate_moments, *_ = torch.ops.mssar.tail(
        x, shortcut, gamma, beta, params, *settings
    )
    lacking = [] if front is None else [branch.reduce.weight.detach() for branch in branches]
    _track([moments, hidden_moments, gate_moments], lacking, x, layer, norm)
    return cast("Tensor", out)


def _parameters(branch: Branch) -> Iterator[Tensor]:
    yield branch.reduce.weight
    yield branch.norm1.weight
    yield branch.norm1.bias
    yield branch.expand.weight
    yield branch.norm2.weight
    yield branch.norm2.bias


def _epsilons(branches: Sequence[Branch]) -> tuple[float, float]:
    return (branches[0].norm1.eps, branches[0].norm2.eps) if branches else (1e-5, 1e-5)


def _running(norm: nn.BatchNorm2d) -> tuple[Any, Any]:
    return norm.running_mean, norm.running_var


def _precision(x: Tensor) -> str:
    """What the branches' products are taken in, as 1×1 convolutions would be."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def carries(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Whether dense steps with these layers can carry the sums of their main vector along."""
    scales = layers[0].scales
    grids = region_grids((int(x.shape[2]), int(x.shape[3])), scales)
    # Every grid is one scale's, and the finest is among them: a row is a scale's region.
    if len(set(grids)) < len(grids) or finest(scales) != max(scales):
        return False
    for layer in layers:
        modes = {norm.training for norm in _norms(layer, None)}
        if layer.scales != scales or obstacle(layer) or len(modes) > 1:
            return False
        if True in modes and min(_values(x, layer, None)) < 2:
            return False
        if True not in modes and torch.is_grad_enabled():
            return False  # the kernels have no gradient in evaluation mode
    return True


def region_sums(x: Tensor, layer: Layer) -> Tensor:
    """The rows that the first of such steps starts from."""
    rows: Tensor = torch.ops.mssar.region_sums(x, list(layer.scales))
    return rows


def step(x: Tensor, rows: Tensor, layer: Layer, carry: bool) -> tuple[Tensor, Tensor]:
    """``x`` recalibrated by what its main vector's rows say, and the rows with ``x`` in them."""
    branches = _branches(layer)
    params = [p for branch in branches for p in _parameters(branch)]
    settings = list(layer.scales), [0.0, *_epsilons(branches)], carry, _precision(x)
    if not branches[0].norm1.training:
        hidden = [t for branch in branches for t in _running(branch.norm1)]
        gates = [t for branch in branches for t in _running(branch.norm2)]
        out, rows = torch.ops.mssar.dense_eval(x, rows, params, hidden, gates, *settings)
        return out, rows
    out, rows, _, _, hidden_moments, _, gate_moments, *_ = torch.ops.mssar.dense_step(
        x, rows, params, *settings
    )
    _track([hidden_moments, gate_moments], [], x, layer, None)
    return out, rows


def _track(
    moments: list[Tensor],
    lacking: list[Tensor],
    x: Tensor,
    layer: Layer | None,
    norm: nn.Module | None,
) -> None:
    norms = list(_norms(layer, norm))
    torch.ops.mssar.track(
        moments,
        lacking,
        [n.running_mean for n in norms],
        [n.running_var for n in norms],
        [n.num_batches_tracked for n in norms],
        [n.momentum for n in norms],
        _values(x, layer, norm),
    )
