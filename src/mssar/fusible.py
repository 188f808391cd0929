"""May the kernels stand in for these modules, and if not why.  N batch, C channels, H W map.

The only file that knows both modules and kernels. What stands in the way is said in words, so that
a printed network can say it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mssar.branch import Branch, is_product
from mssar.coordinates import Regional
from mssar.kernels import AVAILABLE, chosen, exporting, products_in
from mssar.kernels.dense.op import means, step
from mssar.kernels.grids import FINEST, finest
from mssar.kernels.tail.forward import Tracked
from mssar.kernels.tail.op import run
from mssar.kernels.tail.plan import ACTIVATIONS, Settings
from mssar.kernels.tail.synchronise import Group

Layer: TypeAlias = Any  # MSSAR stands above this file
Norm: TypeAlias = Any  # a BatchNorm2d, or a SyncBatchNorm
LARGEST = 1 << 31  # numbers of a sample


def obstacle(layer: Layer, norm: nn.Module | None = None) -> str | None:
    """Why the kernels cannot stand in for these modules, whatever the map."""
    if norm is not None and (reason := _norm_obstacle(norm)):
        return reason
    if not all(isinstance(s, Regional) for s in layer.sets.sets):
        return "windows slide"
    if finest(layer.scales) > FINEST:
        return f"the scales need a grid finer than {FINEST}×{FINEST}"
    c, seen = layer.channels, layer.context_channels or layer.channels
    widths, epsilons, modes = set(), set(), set()
    for branch in layer.branches:
        if type(branch) is not Branch:
            return f"a branch is a {type(branch).__name__}"
        for its in (branch.norm1, branch.norm2):
            if reason := _norm_obstacle(its):
                return f"in a branch, {reason}"
        j = branch.norm1.num_features
        for product, shape in ((branch.reduce, (j, seen, 1, 1)), (branch.expand, (c, j, 1, 1))):
            if not is_product(product, shape) or branch.norm2.num_features != c:
                return f"in a branch, {type(product).__name__} is no plain product"
        if hooked(branch):
            return "a branch has hooks"
        widths.add(j)
        epsilons.add((branch.norm1.eps, branch.norm2.eps))
        modes |= {branch.norm1.training, branch.norm2.training}
    if len(widths) > 1:
        return "the branches differ in width"
    if len(epsilons) > 1:
        return "the branches' norms differ in eps"
    return "some of the branches' norms train and others do not" if len(modes) > 1 else None


def _norm_obstacle(norm: nn.Module) -> str | None:
    if type(norm) not in (nn.BatchNorm2d, nn.SyncBatchNorm):
        return f"{type(norm).__name__} is no plain BatchNorm2d"
    if hooked(norm):
        return f"{type(norm).__name__} has hooks"
    if norm.bias is None or not norm.track_running_stats or norm.momentum is None:
        return (
            f"a {type(norm).__name__} is not affine, or keeps no running statistics by momentum"
        )
    return None


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # replaced on this module alone
    )


class _Bound(NamedTuple):
    """The modules' tensors, as the kernels take them."""

    trained: list[Tensor]
    given: list[Tensor]
    norms: list[Norm]  # that the batch moves: in front, hidden layers', gates'
    settings: Settings


def tail(
    x: Tensor,
    layer: Layer,
    norm: nn.Module | None = None,
    shortcut: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """``act(layer(norm(x)) + shortcut)`` by the kernels; None where the modules must do it.

    Where the kernels were asked for by name, that is an error which says why.
    """
    if not chosen(layer.backend, x):
        return None
    reason = obstacle(layer, norm) or _misfit(x, layer, norm, shortcut, activation)
    if reason is not None:
        _declined(layer, reason)
        return None
    bound = _bind(x, layer, norm, activation)
    group, reason = _group(x, bound.norms)
    if reason is not None:
        _declined(layer, reason)
        return None
    tracked = _tracked(bound.norms)
    return run(x, shortcut, bound.trained, bound.given, bound.settings, tracked, group)


def carries(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Whether dense steps with these layers can carry the means of their main vector along.

    ``x`` is what they begin with. Where the kernels were asked for by name and cannot, that is an
    error which says why.
    """
    if not chosen(layers[0].backend, x):
        return False
    for layer in layers:
        reason = obstacle(layer) or _unfit(x, layer) or _unshared(x, layer)
        if layer.context_channels is None:
            reason = "its weights do not come from the main vector"
        if reason is not None:
            _declined(layer, reason)
            return False
    return True


def region_means(x: Tensor, layer: Layer) -> Tensor:
    """The means of a map over cells, which the first of such steps begins with."""
    return means(x, layer.scales)


def dense_step(x: Tensor, cells: Tensor, layer: Layer, carry: bool) -> tuple[Tensor, Tensor]:
    """``x`` recalibrated by what its main vector's means say, and these with ``x`` in them."""
    bound = _bind(x, layer, None, None)
    group, _ = _group(x, bound.norms)
    tracked = _tracked(bound.norms)
    return step(x, cells, bound.trained, bound.given, bound.settings, tracked, carry, group)


def _tracked(norms: list[Norm]) -> Tracked | None:
    if not norms:
        return None
    return Tracked(
        [n.running_mean for n in norms],
        [n.running_var for n in norms],
        [n.num_batches_tracked for n in norms],
        [n.momentum for n in norms],
    )


def _declined(layer: Layer, reason: str) -> None:
    if layer.backend == "triton":
        raise ValueError(f"backend='triton' cannot run this MSSAR: {reason}; use 'auto'")


def _misfit(
    x: Tensor, layer: Layer, norm: Norm | None, shortcut: Tensor | None, activation: str | None
) -> str | None:
    """Why a call is not one for the kernels."""
    if layer.context_channels is not None:
        return "its weights come from another map"
    if activation not in ACTIVATIONS:
        return f"the activation is {activation!r}"
    if x.ndim != 4 or x.shape[1] != layer.channels:
        return f"x has the shape {tuple(x.shape)}"
    n, c, height, width = x.shape
    if norm is not None and norm.num_features != c:
        return f"the norm is for {norm.num_features} channels"
    if shortcut is not None and (
        shortcut.shape != x.shape or shortcut.dtype is not x.dtype or shortcut.device != x.device
    ):
        return "the shortcut differs in shape, type or device"
    if norm is not None and norm.weight.device != x.device:
        return "x and the norm are on different devices"
    if norm is not None and norm.training and n * height * width < 2:
        return "BN cannot train on a single value"
    return _unfit(x, layer)


def _unfit(x: Tensor, layer: Layer) -> str | None:
    """Why a map is not one for the kernels with this layer."""
    if x.ndim != 4 or x.numel() == 0:
        return f"x has the shape {tuple(x.shape)}"
    n, c, height, width = x.shape
    if c * height * width >= LARGEST:
        return "a sample has more than 2³¹ numbers"
    first = next(iter(layer.branches))
    values = n * min(min(k, height) * min(k, width) for k in layer.scales)
    if first.norm1.training and values < 2:
        return "BN cannot train on a single value"
    for branch in layer.branches:
        for weight in (branch.reduce.weight, branch.expand.weight):
            if weight.device != x.device:
                return "x and the layer are on different devices"
            if weight.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
                return f"x is {x.dtype}, the layer {weight.dtype}"
    return None


def _bind(x: Tensor, layer: Layer, norm: Norm | None, activation: str | None) -> _Bound:
    branches = list(layer.branches)
    trained: list[Tensor] = []
    given: list[Tensor] = []
    front: list[Norm] = []
    eps = 0.0
    if norm is not None:
        trained += [norm.weight, norm.bias]
        given += [norm.running_mean, norm.running_var]
        eps = norm.eps
        if norm.training:
            front = [norm]
    firsts, seconds = [b.norm1 for b in branches], [b.norm2 for b in branches]
    for branch, one, two in zip(branches, firsts, seconds, strict=True):
        trained += [
            branch.reduce.weight, one.weight, one.bias, branch.expand.weight, two.weight, two.bias,
        ]  # fmt: skip
    moved = front
    fixed = not firsts[0].training
    if fixed:
        for one, two in zip(firsts, seconds, strict=True):
            given += [one.running_mean, one.running_var, two.running_mean, two.running_var]
    else:
        moved = [*front, *firsts, *seconds]
    settings = Settings(
        layer.scales, (eps, firsts[0].eps, seconds[0].eps), activation, norm is not None,
        norm is not None and not front, fixed, products_in(x),
    )  # fmt: skip
    return _Bound(trained, given, moved, settings)


def _group(x: Tensor, norms: list[Norm]) -> tuple[Group | None, str | None]:
    """Who shares statistics, where norms are synchronised and there is somebody else."""
    synchronised = [n for n in norms if type(n) is nn.SyncBatchNorm]
    if not synchronised or not dist.is_available() or not dist.is_initialized():
        return None, None
    groups = {n.process_group for n in synchronised}
    if len(groups) > 1 or len(synchronised) < len(norms):
        return None, "some norms are synchronised with others than the rest"
    if dist.get_world_size(next(iter(groups))) == 1:
        return None, None
    if torch.compiler.is_compiling():
        return None, "a compiler does not see how norms are synchronised"
    del x
    return Group(next(iter(groups))), None


def _unshared(x: Tensor, layer: Layer) -> str | None:
    return _group(x, [n for n in _norms(layer) if n.training])[1]


def running(layer: Layer, norm: nn.Module | None = None) -> str:
    """Which way a block's end goes on this machine, for its ``extra_repr``."""
    reason = _unavailable(layer) or obstacle(layer, norm)
    return "fused on CUDA" if reason is None else f"unfused ({reason})"


def _unavailable(layer: Layer) -> str | None:
    if layer.backend == "reference":
        return "backend 'reference'"
    if not AVAILABLE:
        return "Triton is not installed"
    if layer.context_channels is not None:
        return "its weights come from another map"
    if hooked(layer):
        return f"{type(layer).__name__} has hooks"
    return "exported" if exporting() else None


def _norms(layer: Layer) -> Iterator[Norm]:
    for branch in layer.branches:
        yield branch.norm1
        yield branch.norm2
