"""May the kernels stand in for these modules, and if not why.  N batch, C channels, H W map.

The only file that knows both modules and kernels. What stands in the way is said in words, so that
a printed network can say it too.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mssar.branch import Branch, is_product
from mssar.coordinates import Regional
from mssar.kernels import AVAILABLE, chosen, exporting, products_in
from mssar.kernels.grids import FINEST, finest
from mssar.kernels.tail import op
from mssar.kernels.tail.forward import Tracked
from mssar.kernels.tail.plan import ACTIVATIONS, Plan, Settings, Shape, is_last, plan
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
        return f"a {type(norm).__name__} is not affine, or keeps no running statistics by momentum"
    return None


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # replaced on this module alone
    )


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
    traced = torch.compiler.is_compiling()
    bound = _Bound.make(layer, norm) if traced else _bound(layer, norm)
    if isinstance(bound, str):
        return _declined(layer, bound)
    reason = _misfit(x, layer, norm, bound, shortcut, activation)
    if reason is not None:
        return _declined(layer, reason)
    group, reason = _group(bound.moved)
    if reason is not None:
        return _declined(layer, reason)
    if traced or type(x) is not Tensor or op.watched():
        if group is not None:
            return _declined(layer, "somebody looks on while norms are synchronised")
        settings = bound.settings(activation, products_in(x))
        return op.traced(x, shortcut, bound.trained, bound.given, settings, bound.tracked)
    plan = bound.plan(x, shortcut, activation)
    return op.eager(plan, x, shortcut, bound.trained, bound.tensors, bound.tracked, group)


class _Bound:
    """Modules' tensors, as the kernels take them; good until somebody changes the modules."""

    def __init__(self, layer: Layer, norm: Norm | None) -> None:
        branches = list(layer.branches)
        firsts, seconds = [b.norm1 for b in branches], [b.norm2 for b in branches]
        front = [] if norm is None else [norm]
        self.norm = norm
        self.scales: tuple[int, ...] = layer.scales
        self.fixed = norm is not None and not norm.training
        self.branches_fixed = not firsts[0].training
        self.eps = norm.eps if norm is not None else 0.0, firsts[0].eps, seconds[0].eps
        self.trained: list[Tensor] = [t for n in front for t in (n.weight, n.bias)]
        for b in branches:
            self.trained += [
                b.reduce.weight, b.norm1.weight, b.norm1.bias,
                b.expand.weight, b.norm2.weight, b.norm2.bias,
            ]  # fmt: skip
        given = [*front]
        if self.branches_fixed:
            given += [n for b in branches for n in (b.norm1, b.norm2)]
        self.given: list[Tensor] = [t for n in given for t in (n.running_mean, n.running_var)]
        self.tensors = op.in_order(self.trained, self.given, norm is not None)
        self.moved: list[Norm] = [n for n in front if n.training]
        if not self.branches_fixed:
            self.moved += [*firsts, *seconds]
        self.tracked = None
        if self.moved:
            self.tracked = Tracked(
                [n.running_mean for n in self.moved],
                [n.running_var for n in self.moved],
                [n.num_batches_tracked for n in self.moved],
                [n.momentum for n in self.moved],
            )

    @classmethod
    def make(cls, layer: Layer, norm: nn.Module | None) -> _Bound | str:
        """For these modules, or why not."""
        reason = obstacle(layer, norm)
        return cls(layer, norm) if reason is None else reason

    def settings(self, activation: str | None, precision: str) -> Settings:
        return Settings(
            self.scales, self.eps, activation, self.norm is not None, self.fixed,
            self.branches_fixed, precision,
        )  # fmt: skip

    # To be asked at every call, what modules are is read from their dictionaries.

    def watch(self, layer: Layer) -> None:
        """Remember what the modules look like."""
        branches = list(layer.branches)
        parts = [m for b in branches for m in (b.reduce, b.norm1, b.expand, b.norm2)]
        norms = [m for b in branches for m in (b.norm1, b.norm2)]
        if self.norm is not None:
            parts, norms = [self.norm, *parts], [self.norm, *norms]
        every = [*branches, *parts]
        self._dicts = [m.__dict__ for m in every]
        self._hooks = [d[name] for d in self._dicts for name in HOOKS]
        parents = [(layer.branches._modules, k) for k in layer.branches._modules]
        parents += [(b._modules, k) for b in branches for k in b._modules]
        self._children = parents, [d[k] for d, k in parents]
        slots = [(m._parameters, k) for m in parts for k in m._parameters]
        slots += [(m._buffers, k) for m in norms for k in m._buffers]
        self._slots = slots, [d[k] for d, k in slots]
        self._norms = [m.__dict__ for m in norms]
        self._state = self._look()
        self._plans: dict[Any, Plan] = {}

    def _look(self) -> list[Any]:
        return [(d["training"], d["eps"], d["momentum"]) for d in self._norms]

    def current(self, norm: nn.Module | None) -> bool:
        """Whether the modules are as they were."""
        if norm is not self.norm or any(self._hooks):
            return False
        for d in self._dicts:
            if "forward" in d:
                return False
        for places, found in (self._slots, self._children):
            for (d, k), thing in zip(places, found, strict=False):
                if d.get(k) is not thing:
                    return False
        return self._look() == self._state

    def plan(self, x: Tensor, shortcut: Tensor | None, activation: str | None) -> Plan:
        last = is_last(x)
        kinds = tuple([t.dtype for t in self.tensors])
        precision = products_in(x)
        key = (x.shape, last, x.dtype, x.device, shortcut is None, activation, precision, kinds)
        found = self._plans.get(key)
        if found is None:
            hidden = self.trained[2 * (self.norm is not None)].shape[0]
            n, c, h, w = x.shape
            shape = Shape(
                (n, c, h, w), last, x.dtype, x.device, hidden, shortcut is not None, kinds
            )
            found = self._plans[key] = plan(shape, self.settings(activation, precision))
        return found


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_cache: WeakKeyDictionary[Layer, _Bound] = WeakKeyDictionary()


def _bound(layer: Layer, norm: nn.Module | None) -> _Bound | str:
    """That of the last call, if the modules are as they were."""
    found = _cache.get(layer)
    if found is not None and found.current(norm):
        return found
    made = _Bound.make(layer, norm)
    if isinstance(made, _Bound):
        made.watch(layer)
        _cache[layer] = made
    return made


def _declined(layer: Layer, reason: str) -> Tensor | None:
    if layer.backend == "triton":
        raise ValueError(f"backend='triton' cannot run this MSSAR: {reason}; use 'auto'")
    return None


def _misfit(
    x: Tensor,
    layer: Layer,
    norm: Norm | None,
    bound: _Bound,
    shortcut: Tensor | None,
    activation: str | None,
) -> str | None:
    """Why a call is not one for the kernels."""
    if layer.context_channels is not None:
        return "its weights come from another map"
    if activation not in ACTIVATIONS:
        return f"the activation is {activation!r}"
    if x.ndim != 4 or x.numel() == 0 or x.shape[1] != layer.channels:
        return f"x has the shape {tuple(x.shape)}"
    n, c, height, width = x.shape
    if c * height * width >= LARGEST:
        return "a sample has more than 2³¹ numbers"
    if norm is not None and norm.num_features != c:
        return f"the norm is for {norm.num_features} channels"
    if shortcut is not None and (
        shortcut.shape != x.shape or shortcut.dtype is not x.dtype or shortcut.device != x.device
    ):
        return "the shortcut differs in shape, type or device"
    least = n * min(min(k, height) * min(k, width) for k in bound.scales)
    if not bound.branches_fixed and least < 2:
        return "BN cannot train on a single value"
    if norm is not None and not bound.fixed and n * height * width < 2:
        return "BN cannot train on a single value"
    device, dtype = x.device, bound.trained[-3].dtype  # an Ω₂'s
    if not all([t.device == device for t in bound.tensors]):
        return "x and the modules are on different devices"
    if dtype is not x.dtype and not torch.is_autocast_enabled(device.type):
        return f"x is {x.dtype}, the layer {dtype}"
    return None


def _group(norms: list[Norm]) -> tuple[Group | None, str | None]:
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
    return "exported" if exporting() else None
