"""Batch norms folded into the convolutions before them, in whatever network they are.

A norm is folded where its convolution's output went to it and to nothing else, in a pass that was
watched operation by operation, and where both are plain modules that were called once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mssar.branch import hooked

Norm: TypeAlias = nn.BatchNorm2d | nn.SyncBatchNorm
ACTING = "timm.layers.norm_act.BatchNormAct2d"  # a norm, and its dropout and activation


class _Watch(TorchDispatchMode):
    """Every operation's tensors, by identity; what is seen is kept, so that none is reused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: Counter[int] = Counter()  # operations that take a tensor
        self.made: dict[int, list[int]] = {}  # what a convolution made, by its weight
        self.takers: dict[int, list[int]] = {}  # what an operation takes first, by all it takes
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._kept += [taken, out]
        for tensor in {id(t): t for t in taken}.values():
            self.read[id(tensor)] += 1
            self.takers.setdefault(id(tensor), []).append(id(taken[0]))
        if func is torch.ops.aten.convolution.default:
            self.made.setdefault(id(args[1]), []).append(id(out))
        return out


def fold(model: nn.Module, *inputs: Tensor) -> int:
    """Fold what can be folded of a network in ``eval`` mode, in place; how many norms that were."""
    watch = _Watch()
    with torch.no_grad(), watch:
        made = model(*inputs)
    watch.read.update(id(t) for t in tree_leaves(made))  # who called reads it
    pairs = list(_pairs(model, watch))
    for conv, norm in pairs:
        _absorb(conv, norm)
    gone = {id(norm) for _, norm in pairs}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in gone:
                setattr(parent, name, _left(child))
    return len(pairs)


def _left(norm: Any) -> nn.Module:
    """What a norm does besides."""
    return nn.Sequential(norm.drop, norm.act) if _name(norm) == ACTING else nn.Identity()


def _pairs(model: nn.Module, watch: _Watch) -> Iterator[tuple[nn.Conv2d, Norm]]:
    convs = {}
    for conv in filter(_is_conv, model.modules()):
        made = watch.made.get(id(conv.weight), [])
        once = len(made) == 1 and watch.read[id(conv.weight)] == 1
        if once and watch.read[made[0]] == 1:
            convs[made[0]] = conv
    for norm in filter(_is_norm, model.modules()):
        takers = watch.takers.get(id(norm.running_mean), [])
        if len(takers) == 1 and takers[0] in convs:
            yield convs[takers[0]], norm


def _is_conv(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    return type(module) is nn.Conv2d and not hooked(module)


def _is_norm(module: nn.Module) -> TypeGuard[Norm]:
    known = type(module) in (nn.BatchNorm2d, nn.SyncBatchNorm) or _name(module) == ACTING
    plain = known and not hooked(module)
    return plain and not module.training and module.running_mean is not None


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@torch.no_grad()
def _absorb(conv: nn.Conv2d, norm: Norm) -> None:
    """``norm(conv(x))`` by the convolution alone; in double, so that it is rounded once."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double()
    if conv.bias is not None:
        shift = shift + conv.bias.double()
    shift = shift * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    kind = conv.weight.dtype
    conv.weight = nn.Parameter((conv.weight.double() * scale[:, None, None, None]).to(kind))
    conv.bias = nn.Parameter(shift.to(kind))
