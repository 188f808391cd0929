"""The coordinate sets of all scales together.  N batch, C channels, H W map, h w cells, L scales.

What a layer sees of a map are its pools, one a scale. Where every scale divides the finest they all
follow from the finest, and the scales' weights can be averaged on that small grid (``Nested``).
Otherwise each scale pools for itself and the average is taken on the map (``Separate``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mssar.coordinates import STRATEGIES, CoordinateSet, Regional, Sliding, size_of
from mssar.matrices import cells, held, laid_over, region_sums
from mssar.partition import Size, accumulation, as_type, is_open

if TYPE_CHECKING:
    from jaxtyping import Float

Strategy: TypeAlias = str | Callable[[int], CoordinateSet]


class Pools(NamedTuple):
    """What a layer needs to know of a map; extend it by channels instead of pooling them again."""

    maps: tuple[Tensor, ...]
    size: Size
    sets: Nested | Separate | Products

    def extend(self, other: Pools) -> Pools:
        """The pools of two maps concatenated along channels."""
        batch, others = self.maps[0].shape[0], other.maps[0].shape[0]
        if self.size != other.size or self.sets != other.sets or batch != others:
            raise ValueError(
                f"pools extend others of the same batch, size and sets: {batch}, {self.size}, "
                f"{self.sets}; got {others}, {other.size}, {other.sets}"
            )
        maps = tuple(torch.cat(pair, 1) for pair in zip(self.maps, other.maps, strict=True))
        return Pools(maps, self.size, self.sets)


@dataclass(frozen=True)
class Nested:
    """Regions whose scales all divide the finest: the map is read once, the weights are few."""

    sets: tuple[Regional, ...]
    finest: int  # which of them

    def pool(self, x: Float[Tensor, "N C H W"]) -> Pools:
        return Pools((self.sets[self.finest].pool(x),), size_of(x), self)

    def by_scale(self, pools: Pools) -> list[Tensor]:
        (fine,) = pools.maps
        areas = self.sets[self.finest].areas(pools.size, fine)
        return [
            fine if i == self.finest else regional.coarsen(fine, areas)
            for i, regional in enumerate(self.sets)
        ]

    def average(self, weights: Sequence[Tensor], size: Size) -> Float[Tensor, "N C h w"]:
        """The mean over the scales, on the finest grid."""
        total = weights[self.finest]
        assert tuple(total.shape[-2:]) == self.sets[self.finest].grid(size)
        for i, (regional, weight) in enumerate(zip(self.sets, weights, strict=True)):
            if i != self.finest:  # its regions, drawn on the finest grid
                total = regional.add(total, weight)
        return total / len(weights)

    def multiply(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N C H W"]:
        return self.sets[self.finest].multiply(x, z)

    def spread(self, z: Float[Tensor, "N C h w"], size: Size) -> Float[Tensor, "N C H W"]:
        return self.sets[self.finest].spread(z, size)

    def spread_each(self, weights: Sequence[Tensor], size: Size) -> list[Tensor]:
        """A map a scale, of which the spread average is the mean."""
        return [s.spread(z, size) for s, z in zip(self.sets, weights, strict=True)]

    def as_products(self) -> Products:
        return Products(self.sets, self.finest)


@dataclass(frozen=True)
class Separate:
    """Coordinate sets of any kind: a read of the map for each, weights averaged on the map."""

    sets: tuple[CoordinateSet, ...]

    def radii(self, size: Size) -> list[int] | None:
        """How far the windows reach, where every set is one of windows."""
        sliding = [s for s in self.sets if type(s) is Sliding]
        return [s.radius(size) for s in sliding] if len(sliding) == len(self.sets) else None

    def pool(self, x: Float[Tensor, "N C H W"]) -> Pools:
        return Pools(tuple(s.pool(x) for s in self.sets), size_of(x), self)

    def by_scale(self, pools: Pools) -> list[Tensor]:
        return list(pools.maps)

    def average(self, weights: Sequence[Tensor], size: Size) -> Float[Tensor, "N C H W"]:
        spread = [s.spread(weight, size) for s, weight in zip(self.sets, weights, strict=True)]
        return sum(spread[1:], spread[0]) / len(spread)

    def multiply(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C H W"]
    ) -> Float[Tensor, "N C H W"]:
        return x * z

    def spread(self, z: Float[Tensor, "N C H W"], size: Size) -> Float[Tensor, "N C H W"]:
        assert tuple(z.shape[-2:]) == tuple(size)
        return z

    def spread_each(self, weights: Sequence[Tensor], size: Size) -> list[Tensor]:
        """A map a scale, of which the average is the mean."""
        return [s.spread(z, size) for s, z in zip(self.sets, weights, strict=True)]

    def as_products(self) -> Products | Separate:
        regional = tuple(s for s in self.sets if type(s) is Regional)
        return Products(regional, None) if len(regional) == len(self.sets) else self


@dataclass(frozen=True)
class Products:
    """Regions as matrices, for programs that others run. There every operation costs, however
    little it does, and one that gathers costs most: so sums over a map's regions are one product
    with it, and weights are laid over it by another. A scale's regions are on one axis, N C k 1.

    One program does for all sizes: where an axis has fewer positions than regions some of these
    are empty, have a mean of 0, and are consulted by no position. What is infinite or no number
    at one position is so in its whole map.
    """

    sets: tuple[Regional, ...]
    finest: int | None  # that which all others follow from, as in ``Nested``

    def grids(self, size: Size) -> list[Size]:
        height, width = size
        return [(_parts(height, s.scale), _parts(width, s.scale)) for s in self.sets]

    def pool(self, x: Float[Tensor, "N C H W"]) -> Pools:
        """Means over the regions of all scales, one after another."""
        size, wide = size_of(x), as_type(x, accumulation(x))
        if self.whole:
            return Pools((as_type(wide.mean((2, 3), keepdim=True), x.dtype),), size, self)
        drawn = self._drawn(size)
        sums, areas = region_sums(wide, drawn), held(size, drawn, wide)
        if self.finest is None:
            means = sums / areas.clamp(min=1)
        else:
            members = cells(drawn[0], self.grids(size), wide).T  # the fine regions of each region
            means = sums @ (members / (areas @ members).clamp(min=1))
        return Pools((as_type(means, x.dtype),), size, self)

    def by_scale(self, pools: Pools) -> list[Tensor]:
        (means,) = pools.maps
        if self.whole:
            return [means]
        return list(means.unsqueeze(3).split([h * w for h, w in self.grids(pools.size)], 2))

    def average(self, weights: Sequence[Tensor], size: Size) -> Float[Tensor, "N C *k"]:
        """The mean over the scales, on the finest grid; or their parts of it, on each its own."""
        if self.whole:
            return weights[0]
        every = torch.cat(list(weights), 2).squeeze(3)
        if self.finest is None:
            return every / len(weights)
        (fine,) = self._drawn(size)
        return every @ (cells(fine, self.grids(size), every) / len(weights))

    def multiply(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C *k"]
    ) -> Float[Tensor, "N C H W"]:
        return x * (z if self.whole else self.spread(z, size_of(x)))

    def spread(self, z: Float[Tensor, "N C *k"], size: Size) -> Float[Tensor, "N C H W"]:
        return laid_over(z.flatten(2), size, self._drawn(size))

    def spread_each(self, weights: Sequence[Tensor], size: Size) -> list[Tensor]:
        """A map a scale, of which the spread average is the mean."""
        pairs = zip(weights, self.grids(size), strict=True)
        return [laid_over(z.flatten(2), size, [grid]) for z, grid in pairs]

    def require_filled(self, size: Size) -> None:
        """For BN in training mode, which would count regions that are empty."""
        for grid in self.grids(size):
            for length, parts in zip(size, grid, strict=True):
                torch._check(length >= parts)

    @property
    def whole(self) -> bool:
        return self.sets == (Regional(1),)

    def _drawn(self, size: Size) -> list[Size]:
        """The grids that are read from the map, and laid over it."""
        grids = self.grids(size)
        return grids if self.finest is None else [grids[self.finest]]


def _parts(length: int, scale: int) -> int:
    return scale if is_open(length) or scale < length else length


def coordinate_sets(strategy: Strategy, scales: Sequence[int]) -> Nested | Separate:
    """The coordinate sets of these scales, nested where they can be."""
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}; got {strategy!r}")
    make: Any = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    if not callable(make):
        names = ", ".join(STRATEGIES)
        raise ValueError(f"strategy is one of {names}, or makes a set of a scale; got {strategy!r}")
    if not isinstance(scales, Sequence):
        raise ValueError(f"scales are a sequence, such as (1, 2, 4); got {scales!r}")
    sets = tuple(make(scale) for scale in scales)
    if not sets or len(set(scales)) < len(sets):
        raise ValueError(f"scales are different whole numbers, such as (1, 2, 4); got {scales}")
    for made in sets:
        if not isinstance(made, CoordinateSet):
            raise ValueError(
                f"a coordinate set has scale, grid, pool and spread; {strategy!r} made "
                f"{type(made).__name__}"
            )
    # What is derived from it may pool or spread otherwise.
    regional = tuple(s for s in sets if type(s) is Regional)
    if len(regional) == len(sets) and all(max(scales) % scale == 0 for scale in scales):
        return Nested(regional, list(scales).index(max(scales)))
    return Separate(sets)
