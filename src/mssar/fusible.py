"""May the kernels stand in for these modules, and if not why.  N batch, C channels, H W map.

What stands in the way is said in words, so that a printed network can say it too.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

from mssar.branch import Branch, hooked, is_product
from mssar.coordinates import Regional, Sliding
from mssar.kernels import AVAILABLE, leaving
from mssar.kernels.grids import FINEST, finest
from mssar.kernels.tail.synchronise import Group

Layer: TypeAlias = Any  # MSSAR stands above this file
Norm: TypeAlias = Any  # a BatchNorm2d, or a SyncBatchNorm


def obstacle(layer: Layer, norm: nn.Module | None = None) -> str | None:
    """Why the kernels cannot stand in for these modules, whatever the map."""
    if norm is not None and (reason := _norm_obstacle(norm)):
        return reason
    for made in layer.sets.sets:
        if type(made) is not Regional:  # a class derived from it may pool otherwise
            slides = type(made) is Sliding
            return "windows slide" if slides else f"{type(made).__name__} is a set of your own"
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
    if type(norm) not in (nn.BatchNorm2d, nn.SyncBatchNorm) and not _bare(norm):
        return f"{type(norm).__name__} is no plain BatchNorm2d"
    if hooked(norm):
        return f"{type(norm).__name__} has hooks"
    if norm.bias is None or not norm.track_running_stats or norm.momentum is None:
        return f"a {type(norm).__name__} is not affine, or keeps no running statistics by momentum"
    if not all(map(Tensor.is_contiguous, _vectors(norm))):
        return f"a {type(norm).__name__} has parameters with gaps between them"
    return None


def _bare(norm: nn.Module) -> bool:
    """Whether it is timm's norm with an activation, without one."""
    if type(norm).__name__ != "BatchNormAct2d" or not type(norm).__module__.startswith("timm."):
        return False
    return all(type(m) is nn.Identity and not hooked(m) for m in norm.children())


def _vectors(norm: Norm) -> tuple[Tensor, ...]:
    return norm.weight, norm.bias, norm.running_mean, norm.running_var


def mistaken(x: Tensor, layer: Layer, norm: Norm | None, channels: int) -> bool:
    """Whether the modules refuse it as well: they say best why."""
    if x.ndim != 4 or x.numel() == 0 or x.shape[1] != channels:
        return True
    n, _, h, w = x.shape
    if norm is not None and n * h * w < 2 and getattr(norm, "training", True) and _alone(norm):
        return True
    fewest = min(layer.scales)
    if n * min(fewest, h) * min(fewest, w) > 1:
        return False
    return any(b.norm1.training and _alone(b.norm1) for b in layer.branches if type(b) is Branch)


def _alone(norm: Norm) -> bool:
    """Whether its statistics are those of this batch, and of no other process's."""
    if type(norm) is not nn.SyncBatchNorm or not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_world_size(norm.process_group) == 1


def transformed() -> str | None:
    """What is asked for that only PyTorch's own ops know; they would drop it without a word."""
    # Dynamo stands something for a None from here, which is None by its type alone.
    if not isinstance(torch._C._functorch.peek_interpreter_stack(), NoneType):
        return "torch.func transforms it"
    return "forward derivatives are asked for" if forward_ad._current_level >= 0 else None


def group_of(norms: list[Norm]) -> tuple[Group | None, str | None]:
    """Who shares statistics, where norms are synchronised and there is somebody else."""
    synchronised = [n for n in norms if type(n) is nn.SyncBatchNorm]
    if not synchronised or not dist.is_available() or not dist.is_initialized():
        return None, None
    groups = {n.process_group for n in synchronised}
    if len(groups) > 1 or len(synchronised) < len(norms):
        return None, "some norms are synchronised with others than the rest"
    if dist.get_world_size(next(iter(groups))) == 1:
        return None, None
    return Group(next(iter(groups))), None


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
    return "exported" if leaving() else None
