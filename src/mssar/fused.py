"""Modules' tensors bound and handed to the kernels.  N batch, C channels, H W map.

The only file that calls the kernels with what modules hold; where it may not, the modules do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mssar.fusible import Layer, Norm, group_of, mistaken, obstacle, transformed
from mssar.kernels import chosen, products_in
from mssar.kernels.dense import op as dense
from mssar.kernels.dense.plan import Step, step_plan
from mssar.kernels.grids import finest
from mssar.kernels.launch import pointers
from mssar.kernels.tail import op
from mssar.kernels.tail.call import ACTIVATIONS, Settings, is_last, shape_of
from mssar.kernels.tail.forward import Arguments, Tracked, arguments
from mssar.kernels.tail.plan import Plan, plan

LARGEST = 1 << 31  # numbers of a sample
POSITIONS = 1 << 20


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
    if not chosen(layer.backend, x) or mistaken(x, layer, norm, layer.channels):
        return None
    bound = _bound(layer, norm)
    if isinstance(bound, str):
        return _declined(layer, bound)
    if bound.context:
        return _declined(layer, "its weights come from another map")
    if op.watched(x):
        return _traced(x, layer, bound, shortcut, activation)
    if (reason := transformed()) is not None:
        return _declined(layer, reason)
    plan, given = bound.plan(x, shortcut, activation)
    if isinstance(plan, str):
        return _declined(layer, plan)
    group = None
    if bound.synchronised:
        group, reason = group_of(bound.moved)
        if reason is not None:
            return _declined(layer, reason)
    return op.eager(plan, x, shortcut, bound.trained, given, bound.tracked, group)


def _traced(
    x: Tensor, layer: Layer, bound: _Bound, shortcut: Tensor | None, activation: str | None
) -> Tensor | None:
    reason = transformed() or _misfit(x, bound, shortcut, activation) or _unseen(bound)
    if reason is not None:
        return _declined(layer, reason)
    settings = bound.settings(activation, products_in(x))
    return op.traced(x, shortcut, bound.trained, bound.given, settings, bound.tracked)


def carries(x: Tensor, layers: Sequence[Layer]) -> list[_Bound]:
    """Bound to be dense steps that carry the means of their main vector along; none, where the
    modules must do it. ``x`` is what they begin with.

    Where the kernels were asked for by name, that is an error which says why.
    """
    seen = begin = layers[0].context_channels
    if begin is None or not chosen(layers[0].backend, x):
        return []
    found = []
    for layer in layers:
        if layer.context_channels != seen or mistaken(x, layer, None, begin):
            return []
        bound = _bound(layer, None)
        if isinstance(bound, str):
            reason: str | None = bound
        else:
            reason = transformed() or _misfit(x, bound, None, None)
            if reason is None and bound.synchronised:
                reason = _unseen(bound) if op.watched(x) else group_of(bound.moved)[1]
            found.append(bound)
        if reason is not None:
            _declined(layer, reason)
            return []
        seen += layer.channels
    return found


def region_means(x: Tensor, layer: Layer) -> Tensor:
    """The means of a map over cells, which the first of such steps begins with."""
    return dense.means(x, layer.scales)


def dense_step(x: Tensor, cells: Tensor, bound: _Bound, carry: bool) -> tuple[Tensor, Tensor]:
    """``x`` recalibrated by what its main vector's means say, and these with ``x`` in them."""
    if x.shape[1] != bound.channels:
        raise ValueError(f"MSSAR was made for {bound.channels} channels; got {tuple(x.shape)}")
    if op.watched(x):
        settings = bound.settings(None, products_in(x))
        return dense.traced(x, cells, bound.trained, bound.given, settings, bound.tracked, carry)
    plan, given = bound.plan(x, None, None)
    if not isinstance(plan, Step):
        raise ValueError(f"a dense step cannot be taken: {plan}")
    group = group_of(bound.moved)[0] if bound.synchronised else None
    return dense.eager(plan, x, cells, bound.trained, given, bound.tracked, carry, group)


def _declined(layer: Layer, reason: str) -> Tensor | None:
    if layer.backend == "triton":
        raise ValueError(f"backend='triton' cannot run this MSSAR: {reason}; use 'auto'")
    return None


class _Kept(NamedTuple):
    """What holds while tensors stay where they are, of their types."""

    at: tuple[int, ...]
    types: tuple[torch.dtype, ...]
    plans: dict[Any, Plan | str]
    arguments: Arguments


class _Bound:
    """Modules' tensors, as the kernels take them; good until somebody changes the modules."""

    def __init__(self, layer: Layer, norm: Norm | None) -> None:
        branches = list(layer.branches)
        firsts, seconds = [b.norm1 for b in branches], [b.norm2 for b in branches]
        front = [] if norm is None else [norm]
        self.norm = norm
        self.scales: tuple[int, ...] = layer.scales
        self.channels: int = layer.channels
        self.context: int = layer.context_channels or 0
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
        self.synchronised = any(type(n) is nn.SyncBatchNorm for n in self.moved)
        self.tracked = None
        if self.moved:
            self.tracked = Tracked(
                [n.running_mean for n in self.moved],
                [n.running_var for n in self.moved],
                [n.num_batches_tracked for n in self.moved],
                [n.momentum for n in self.moved],
            )
        self._kept: _Kept | None = None

    @classmethod
    def make(cls, layer: Layer, norm: nn.Module | None) -> _Bound | str:
        """For these modules, or why not."""
        reason = obstacle(layer, norm)
        if reason is not None:
            return reason
        made = cls(layer, norm)
        plain = (Tensor, nn.Parameter)
        looked_at = torch.compiler.is_compiling() or _rehearsals
        if not looked_at and any(type(t) not in plain for t in made.tensors):
            return "a parameter is a tensor of another kind"
        return made

    def settings(self, activation: str | None, precision: str) -> Settings:
        return Settings(
            self.scales, self.eps, activation, self.norm is not None, self.fixed,
            self.branches_fixed, precision,
        )  # fmt: skip

    # To be asked at every call, what modules are is read from their dictionaries, at C's speed.

    def watch(self, layer: Layer) -> None:
        """Remember what the modules look like."""
        branches = list(layer.branches)
        parts = [m for b in branches for m in (b.reduce, b.norm1, b.expand, b.norm2)]
        norms = [m for b in branches for m in (b.norm1, b.norm2)]
        if self.norm is not None:
            parts, norms = [self.norm, *parts], [self.norm, *norms]
        self._modules = [*branches, *parts]
        self._kinds = list(map(type, self._modules))  # a parametrization changes a module's
        self._dicts = [m.__dict__ for m in self._modules]
        self._hooks = [d[name] for d in self._dicts for name in HOOKS]
        owners = [layer.branches._modules, *(b._modules for b in branches)]
        if self.norm is not None:
            owners.append(self.norm._modules)  # timm's has a few
        owners += [m._parameters for m in parts] + [m._buffers for m in norms]
        self._owners = owners
        self._owned = list(chain.from_iterable(map(_VALUES, owners)))
        self._norms = [m.__dict__ for m in norms]
        self._state = list(map(_STATE, self._norms))

    def current(self, norm: nn.Module | None) -> bool:
        """Whether the modules are as they were."""
        return (
            norm is self.norm
            and not any(self._hooks)
            and not any(map(contains, self._dicts, repeat("forward")))
            and sum(map(len, self._owners)) == len(self._owned)
            and all(map(is_, chain.from_iterable(map(_VALUES, self._owners)), self._owned))
            and list(map(type, self._modules)) == self._kinds
            and all(map(Tensor.is_contiguous, self.tensors))
            and list(map(_STATE, self._norms)) == self._state
        )

    def plan(
        self, x: Tensor, shortcut: Tensor | None, activation: str | None
    ) -> tuple[Plan | str, Arguments]:
        """For a call, or why it is not one for the kernels; and the tensors, as they are now."""
        at, types = tuple(map(Tensor.data_ptr, self.tensors)), tuple(map(_DTYPE, self.tensors))
        kept = self._kept  # all of it at once: other threads may be here, too
        if kept is None or at != kept.at or types != kept.types:  # elsewhere, or of another type
            given = arguments(pointers(self.tensors), self.settings(None, ""))
            kept = self._kept = _Kept(at, types, {}, given)
        last, precision, device = is_last(x), products_in(x), x.device
        added = shortcut if shortcut is None else (shortcut.shape, shortcut.dtype, shortcut.device)
        cast = torch.is_autocast_enabled(device.type)
        key = (x.shape, last, x.dtype, device, added, activation, precision, cast)
        found = kept.plans.get(key)
        if found is None:
            found = kept.plans[key] = self._plan(x, shortcut, activation, last, types)
        return found, kept.arguments

    def _plan(
        self,
        x: Tensor,
        shortcut: Tensor | None,
        activation: str | None,
        last: bool,
        kinds: tuple[torch.dtype, ...],
    ) -> Plan | str:
        reason = _misfit(x, self, shortcut, activation)
        if reason is not None:
            return reason
        hidden = self.trained[2 * (self.norm is not None)].shape[0]
        shape = shape_of(x, hidden, shortcut is not None, kinds, last, self.context)
        settings = self.settings(activation, products_in(x))
        return step_plan(shape, settings) if self.context else plan(shape, settings)


_VALUES = dict.values
_DTYPE = attrgetter("dtype")
_STATE = itemgetter("training", "eps", "momentum", "track_running_stats")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_cache: WeakKeyDictionary[Layer, _Bound] = WeakKeyDictionary()


_rehearsals: list[None] = []


@contextmanager
def rehearsed() -> Iterator[None]:
    """Networks run on tensors without storage meanwhile: which ops would they call?"""
    _rehearsals.append(None)
    try:
        yield
    finally:
        _rehearsals.pop()


def _bound(layer: Layer, norm: nn.Module | None) -> _Bound | str:
    """That of the last call, if the modules are as they were. Compilers see to that themselves."""
    if torch.compiler.is_compiling() or _rehearsals:
        return _Bound.make(layer, norm)
    found = _cache.get(layer)
    if found is not None and found.current(norm):
        return found
    made = _Bound.make(layer, norm)
    if isinstance(made, _Bound):
        made.watch(layer)
        _cache[layer] = made
    return made


def _misfit(
    x: Tensor, bound: _Bound, shortcut: Tensor | None, activation: str | None
) -> str | None:
    """Why a call is not one for the kernels."""
    norm = bound.norm
    if activation not in ACTIVATIONS:
        return f"the activation is {activation!r}"
    _, c, height, width = x.shape
    longest = (max(height, width) + 1) * finest(bound.scales)
    if c * height * width >= LARGEST or max(height * width, longest) >= POSITIONS:
        return "a sample has 2³¹ numbers or more, or 2²⁰ positions"
    if norm is not None and norm.num_features != c:
        return f"the norm is for {norm.num_features} channels"
    if shortcut is not None and (
        shortcut.shape != x.shape or shortcut.dtype is not x.dtype or shortcut.device != x.device
    ):
        return "the shortcut differs in shape, type or device"
    device, dtype = x.device, bound.trained[-3].dtype  # an Ω₂'s
    moved = bound.tracked
    statistics = [] if moved is None else [*moved.means, *moved.variances, *moved.seen]
    if any(t.device != device for t in [*bound.tensors, *statistics]):
        return "x and the modules are on different devices"
    if dtype is not x.dtype and not torch.is_autocast_enabled(device.type):
        return f"x is {x.dtype}, the layer {dtype}"
    return None


def _unseen(bound: _Bound) -> str | None:
    if not bound.synchronised or _rehearsals or group_of(bound.moved) == (None, None):
        return None
    return "a compiler, or a mode that looks on, does not see how norms are synchronised"
