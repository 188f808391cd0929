"""What an inserted layer lives in.  N batch, C channels, H W map.

Two ways: a module is put into a :class:`Recalibrated` that takes its place, or a block keeps its
place and its names and is given a class of ours (:class:`End`) whose forward ends in the fused
tail. Both know which of their tensors were doubled at birth, against weights that begin at ½.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from mssar.branch import hooked
from mssar.layer import MSSAR
from mssar.scales import Pools
from mssar.tail import path, tail

if TYPE_CHECKING:
    from jaxtyping import Float

LAYER = "recalibrate"  # what the inserted layer is called, whatever it lives in
ACTIVATIONS: dict[type[nn.Module], str | None] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Identity: None,
}


class Holder(nn.Module):
    """Holds an inserted layer."""

    recalibrate: MSSAR
    doubled: tuple[str, ...]  # names of tensors, from here
    others: tuple[str, ...] = ()  # of the parameters that the block had before

    def folded(self) -> Iterator[Tensor]:
        for name in self.doubled:
            owner, _, tensor = name.rpartition(".")
            yield getattr(self.get_submodule(owner), tensor)

    @torch.no_grad()
    def fold(self, factor: float) -> None:
        """Scale what precedes the layer; by powers of two, so that nothing is rounded."""
        for tensor in self.folded():
            tensor.mul_(factor)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any
    ) -> None:
        # Weights from before the insertion, loaded with strict=False, are doubled as it did.
        for name in self._earlier(state_dict, prefix):
            state_dict[prefix + name] = state_dict[prefix + name] * 2
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)

    def _earlier(self, state_dict: dict[str, Any], prefix: str) -> Iterable[str]:
        """Of the tensors that insert doubled those that are here from before it: where all of the
        block is here, and nothing of the layer. Less may be a part of this network's own weights,
        as a shard of them is, or its norms."""
        whole = all(prefix + name in state_dict for name in {*self.others, *self.doubled})
        layer = any(key.startswith(f"{prefix}{LAYER}.") for key in state_dict)
        return self.doubled if whole and not layer else ()

    def join(self, layer: MSSAR) -> None:
        """Take in a layer, behind the first of the block's modules where it has none yet: so shards
        of its weights end within the block or within the layer, and are not taken for others."""
        there = LAYER in self._modules
        setattr(self, LAYER, layer)
        if not there:
            for name in list(self._modules)[1:]:
                if name != LAYER:
                    self._modules[name] = self._modules.pop(name)


class Recalibrated(Holder):
    """A module, and the layer that recalibrates the map it makes.

    Args:
        inner: what was here before; a norm is computed by the kernels together with the layer.
        layer: for so many channels as ``inner`` makes.
        last: ``inner`` makes N H W C.
        gain: what the map is multiplied by besides, where nothing in ``inner`` could be doubled.
    """

    gain: Tensor | None

    def __init__(
        self, inner: nn.Module, layer: MSSAR, last: bool = False, gain: float | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.recalibrate = layer
        self.last = last
        self.doubled: tuple[str, ...] = ()
        self.register_buffer("gain", None if gain is None else _like(layer, gain))
        self.train(inner.training)

    def forward(self, x: Tensor) -> Tensor:
        norm = _norm(self.inner)
        y = self.inner(x) if norm is None else x
        if self.last:
            y = self.recalibrate(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        else:
            y = tail(y, norm, self.recalibrate, None, None)
        return y if self.gain is None else y * self.gain.to(y.dtype)

    def extra_repr(self) -> str:
        return path(_norm(self.inner), self.recalibrate)

    def _earlier(self, state_dict: dict[str, Any], prefix: str) -> Iterable[str]:
        """They have other names, which they get: where more are called as in what is wrapped than
        as here, which may have names like ours, too: an ``inner``, or a ``gain``."""
        here = [k.removeprefix(prefix) for k in state_dict if k.startswith(prefix)]
        own = {n for n, _ in (*self.named_parameters(), *self.named_buffers())}
        known = {n.removeprefix("inner.") for n in own if n.startswith("inner.")}
        other = {n for n in here if n not in own and not n.startswith(("inner.", f"{LAYER}."))}
        older = [name for name in here if name in known or name in other]
        if len(older) <= sum(name in own and not name.startswith(f"{LAYER}.") for name in here):
            return ()
        moved = {name: state_dict.pop(prefix + name) for name in older}
        state_dict.update({f"{prefix}inner.{name}": t for name, t in moved.items()})
        return [name for name in self.doubled if name.removeprefix("inner.") in moved]


class InPlace(Holder):
    """The layer where another recalibration stood, which is kept aside, to be put back."""

    gain: Tensor
    replaced: nn.Module | None  # None where it was not in the files that the network is from

    def __init__(self, replaced: nn.Module, layer: MSSAR, gain: float) -> None:
        super().__init__()
        self.recalibrate = layer
        self.doubled = ()
        self.register_buffer("gain", _like(layer, gain))
        self.__dict__["replaced"] = replaced  # no child: it is not trained, saved or moved
        self.train(replaced.training)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        recalibrated: Tensor = self.recalibrate(x)
        return recalibrated * self.gain.to(x.dtype)


class End(Holder):
    """A residual block of somebody else's, with our end: norm, layer, shortcut, activation.

    Subclasses come before the block's own class, and say how its forward goes up to the end.
    """

    def end(
        self,
        y: Float[Tensor, "N C H W"],
        norm: nn.Module | None,
        shortcut: Float[Tensor, "N C H W"],
        activation: nn.Module,
        *between: nn.Module | None,
    ) -> Float[Tensor, "N C H W"]:
        """``activation(between(recalibrate(norm(y))) + shortcut)``.

        Where nothing is between (an SE, a drop path that drops), it is one tail.
        """
        steps = [m for m in between if m is not None and not idle(m)]
        if not steps and type(activation) in ACTIVATIONS and not hooked(activation):
            return tail(y, norm, self.recalibrate, shortcut, ACTIVATIONS[type(activation)])
        y = tail(y, norm, self.recalibrate, None, None)
        for step in steps:
            y = step(y)
        made: Tensor = activation(y + shortcut)
        return made


class DenseEnd(Holder):
    """A step of a DenseNet: new channels, weighted by all that was before them (multi-stage)."""

    def forward(
        self, x: Tensor | list[Tensor], pools: Pools | None = None
    ) -> Float[Tensor, "N C H W"]:
        new = super().forward(x)
        context: Any = pools
        if pools is None:
            context = torch.cat(x, 1) if isinstance(x, (list, tuple)) else x
        recalibrated: Tensor = self.recalibrate(new, context)
        return recalibrated


class Carrier(nn.ModuleDict):
    """A block of such steps. Pools of a concatenation are the concatenated pools: carried along."""

    def forward(self, x: Tensor | Proxy) -> Float[Tensor, "N C H W"]:
        features: list[Any] = [x]
        pools, pooled = None, 0
        for step in self.values():
            if isinstance(x, Proxy) or not isinstance(step, DenseEnd):
                features.append(step(features))
                continue
            for new in features[pooled:]:
                seen = step.recalibrate.pool(new)
                pools = seen if pools is None else pools.extend(seen)
            pooled = len(features)
            features.append(step(features, pools))
        return torch.cat(features, 1)


def idle(module: nn.Module) -> bool:
    """Whether it gives back what it gets: an identity, or a drop path that drops nothing now."""
    if hooked(module):
        return False
    if isinstance(module, nn.Identity):
        return True
    dropping = getattr(module, "drop_prob", None)  # timm's DropPath
    return dropping is not None and (not module.training or not dropping)


def _norm(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)) else None


def _like(layer: nn.Module, number: float) -> Tensor:
    like = next(layer.parameters())
    return torch.tensor(number, device=like.device, dtype=like.dtype)
