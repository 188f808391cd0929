"""What the layers of a network see in images.  N batch, C channels, H W map, h w regions, D logits.

A network is run once, in ``eval`` mode and without gradients, and every MSSAR in it is asked for
its weights when its input passes by. They are kept as they are made, one a region, and spread over
the map when they are asked for: at scale 4 that is 16 numbers a channel, whatever the map.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mssar.coordinates import size_of
from mssar.layer import MSSAR, weights
from mssar.mode import mode
from mssar.mosaic import drawn
from mssar.partition import Size
from mssar.scales import Nested, Pools, Separate

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Importance:
    """The weights of one layer for some images, in float32 on the CPU."""

    name: str  # of the layer in the network; a layer that runs twice is there twice
    size: Size  # H, W
    sets: Nested | Separate  # the layer's coordinate sets, one a scale
    regions: tuple[Float[Tensor, "N C _ _"], ...]  # a weight a region, for each scale

    @property
    def channels(self) -> int:
        return self.regions[0].shape[1]

    @property
    def scales(self) -> tuple[int, ...]:
        return tuple(s.scale for s in self.sets.sets)

    @property
    def z(self) -> Float[Tensor, "N C H W"]:
        """The importance Z, which the layer multiplies its input by."""
        return self.sets.spread(self.sets.average(self.regions, self.size), self.size)

    @property
    def per_scale(self) -> list[Float[Tensor, "N C H W"]]:
        """One map for each scale; Z is their mean."""
        return self.sets.spread_each(self.regions, self.size)

    @property
    def mean(self) -> Float[Tensor, "N H W"]:
        """Z, averaged over channels: one map an image."""
        return self.z.mean(1)

    @property
    def mean_per_scale(self) -> list[Float[Tensor, "N H W"]]:
        """The same for each scale."""
        return [z.mean(1) for z in self.per_scale]

    def __repr__(self) -> str:
        height, width = self.size
        kind = type(self.sets.sets[0]).__name__.lower()
        return (
            f"Importance({self.name!r}: {self.channels} channels of {height}×{width}, "
            f"{kind} scales {', '.join(map(str, self.scales))}, batch of {len(self.regions[0])})"
        )


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a network says of some images, and the weights of its layers, in the order they ran."""

    logits: Float[Tensor, " ..."]  # what the network returned
    blocks: tuple[Importance, ...]

    def __getitem__(self, name: str) -> Importance:
        for block in self.blocks:
            if block.name == name:
                return block
        raise KeyError(f"no layer {name!r}; there are {', '.join(b.name for b in self.blocks)}")

    def __repr__(self) -> str:
        images, layers = len(self.blocks[0].regions[0]), len(self.blocks)
        ends = f"{self.blocks[0].name!r} … {self.blocks[-1].name!r}"
        return f"Explanation(batch of {images}, {layers} layers: {ends})"

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: the mean maps by layer and scale, where matplotlib is there."""
        return drawn(self.blocks)


def explain(model: nn.Module, images: Float[Tensor, "N B H W"]) -> Explanation:
    """The importance Z that every MSSAR of a network gives to images; the model is left as it is.

    Args:
        model: any network with :class:`~mssar.MSSAR` in it, SE being that of one scale. It is run
            once, where it is and in its own dtype.
        images: normalised as in training.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"explain looks into a network, a module; got {type(model).__name__}")
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MSSAR)]
    if not layers:
        raise ValueError(f"nothing to explain: {type(model).__name__} has no MSSAR in it")
    if not isinstance(images, Tensor):
        raise ValueError(f"images are N C H W, a torch.Tensor; got {type(images).__name__}")
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            "images are N C H W of floating point numbers, normalised as in training; "
            f"got {images.dtype}, shape {tuple(images.shape)}"
        )
    like = next(p for p in model.parameters() if p.is_floating_point())
    seen: list[Importance] = []
    with mode(model, training=False), torch.no_grad(), ExitStack() as hooks:
        for name, layer in layers:
            handle = layer.register_forward_pre_hook(_look(name, seen), with_kwargs=True)
            hooks.callback(handle.remove)
        logits = model(images.to(like))
    if not isinstance(logits, Tensor):
        raise ValueError(f"a network returns one tensor here; got {type(logits).__name__}")
    if not seen:  # torch.compile, for one, runs a graph and not the modules
        raise ValueError(f"nothing to explain: no MSSAR of this {type(model).__name__} was called")
    return Explanation(_plain(logits), tuple(seen))


def _look(name: str, seen: list[Importance]) -> Any:
    """A hook that writes down a layer's weights before it is run."""

    def look(layer: MSSAR, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        x, context = _given(*inputs, **options)
        regions = tuple(map(_plain, weights(layer._gates(x, context))))
        seen.append(Importance(name, size_of(x), layer.sets, regions))

    return look


def _given(x: Tensor, context: Tensor | Pools | None = None) -> tuple[Tensor, Any]:
    """What a layer was called with, however it was written."""
    return x, context


def _plain(x: Tensor) -> Tensor:
    """A copy that owes nothing to the network: float32, on the CPU."""
    return x.detach().to("cpu", torch.float32, copy=True)
