"""Which positions a position consults.  N batch, C channels, H W map, h w cells.

A coordinate set names, for every position of a map, the region it looks at. Both strategies of the
paper are here; each can ``pool`` a map over its regions and ``spread`` one value a region back over
the positions that consult it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from mssar import partition
from mssar.partition import COLUMNS, ROWS, Size, accumulation

if TYPE_CHECKING:  # the tests set this, and so check every shape below
    from jaxtyping import Float, Int


def require_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is a whole number of at least 1; got {value!r}")


def require_tensor(what: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{what} is a map N C H W, a torch.Tensor; got {type(x).__name__}")


def require_map(what: str, x: Tensor) -> None:
    require_tensor(what, x)
    if x.ndim != 4 or x.shape[2] < 1 or x.shape[3] < 1 or not x.is_floating_point():
        raise ValueError(
            f"{what} is a map N C H W of floating point numbers, H and W at least 1; "
            f"got {x.dtype}, shape {tuple(x.shape)}"
        )


def size_of(x: Tensor) -> Size:
    return x.shape[-2], x.shape[-1]


def _require_size(size: object) -> None:
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise ValueError(f"size is that of a map, (H, W); got {size!r:.60}")


def _require_grid(z: Tensor, grid: Size, size: Size) -> None:
    if min(size) < 1:
        raise ValueError(f"a map has at least one row and one column; got size {size}")
    if z.ndim != 4 or z.shape[2] != grid[0] or z.shape[3] != grid[1]:
        raise ValueError(
            f"a map of {size[0]}×{size[1]} has {grid[0]}×{grid[1]} regions; "
            f"got values of shape {tuple(z.shape)}"
        )


@runtime_checkable
class CoordinateSet(Protocol):
    """What a layer asks of a coordinate set; a frozen dataclass with these is one of your own."""

    @property
    def scale(self) -> int: ...

    def grid(self, size: Size) -> Size:
        """How many regions a map of this size has, down and across."""
        ...

    def pool(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C h w"]:
        """One value a region."""
        ...

    def spread(self, z: Float[Tensor, "N C h w"], size: Size) -> Float[Tensor, "N C H W"]:
        """To every position the value of the region that it consults."""
        ...


@dataclass(frozen=True)
class Regional:
    """The map cut into ``scale`` × ``scale`` regions; a position consults the one it lies in.

    Position i of an axis of n lies in region ⌊i·K/n⌋: a partition on every size, with sides that
    differ by one at most. Where K > n every position of the axis is its own region, so a map has
    min(K, H) × min(K, W) of them.
    """

    scale: int

    def __post_init__(self) -> None:
        require_count("a scale", self.scale)

    def grid(self, size: Size) -> Size:
        """How many regions a map of this size has, down and across."""
        # Not min(): of an axis that a tracer leaves open it would be an expression, not a number.
        height, width = size
        h = height if height < self.scale else self.scale
        return h, width if width < self.scale else self.scale

    def runs(self, length: int) -> list[int]:
        """The sides of the regions along an axis: 2, 2, 2, 1 for an axis of 7 at scale 4."""
        return partition.runs(length, min(self.scale, length))

    def pool(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C h w"]:
        """The mean over each region; ``x`` itself where every region is one position."""
        require_map("x", x)
        return partition.mean(x, self.grid(size_of(x)))

    def coarsen(
        self, fine: Float[Tensor, "N C f g"], areas: Float[Tensor, "1 1 f g"] | None
    ) -> Float[Tensor, "N C h w"]:
        """What :meth:`pool` gives, from finer pools and their areas, and not from the map.

        Where K divides K' the borders ⌈j·n/K⌉ are among those of K', whatever n is, so a coarse
        region is a union of fine ones: the same regions, drawn on the grid of the fine ones. Its
        mean is theirs, weighted by their areas.
        """
        if areas is None:
            return self.pool(fine)
        return (self.pool(fine * areas) / self.pool(areas)).to(fine.dtype)

    def areas(self, size: Size, like: Tensor) -> Float[Tensor, "1 1 h w"] | None:
        """The areas of the regions of a map of this size; None where they are all alike."""
        return partition.areas(size, self.grid(size), like)

    def spread(self, z: Float[Tensor, "N C h w"], size: Size) -> Float[Tensor, "N C H W"]:
        """Give every position the value of the region it lies in."""
        _require_size(size)
        _require_grid(z, self.grid(size), size)
        return partition.repeat(z, size)

    def multiply(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N C H W"]:
        """``x * spread(z)``, without making the spread map where the regions are of one size."""
        size = size_of(x)
        _require_grid(z, self.grid(size), size)
        return partition.combine(torch.mul, x, z)

    def add(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N C H W"]:
        """``x + spread(z)``, likewise."""
        size = size_of(x)
        _require_grid(z, self.grid(size), size)
        return partition.combine(torch.add, x, z)


@dataclass(frozen=True)
class Sliding:
    """A square window around every position, reaching ⌊√(H·W) / scale⌋ to each side.

    Windows are clipped at the border and divided by the positions they still hold. The cost is
    O(H·W·C) whatever the scale: each axis takes two running sums.
    """

    scale: int

    def __post_init__(self) -> None:
        require_count("a scale", self.scale)

    def grid(self, size: Size) -> Size:
        """As many as the map has positions."""
        return size

    def radius(self, size: Size) -> int:
        """The largest whole T with T ≤ √(H·W) / K, in whole numbers so that no rounding enters."""
        # index() makes a traced size a plain number; isqrt cannot take any other.
        return math.isqrt(operator.index(size[0] * size[1]) // self.scale**2)

    def pool(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """The mean over each position's window."""
        require_map("x", x)
        size, wide = size_of(x), x.to(accumulation(x))
        if partition.symbolic(size) and x.device.type != "mps":  # which has no float64
            reach = self._reach(size, x.device)
            rows = partition.window_mean_by_index(wide, COLUMNS, reach)
            return partition.window_mean_by_index(rows, ROWS, reach).to(x.dtype)
        radius = self.radius(size)
        rows = partition.window_mean(wide, COLUMNS, radius)
        return partition.window_mean(rows, ROWS, radius).to(x.dtype)

    def _reach(self, size: Size, device: torch.device) -> Int[Tensor, ""]:
        # The radius of a size that a tracer leaves open. The root of a whole number below 2⁵² is
        # rounded so well in float64 that its floor is right.
        square = torch.full((), size[0] * size[1], dtype=torch.int64, device=device)
        return (square // self.scale**2).double().sqrt().floor().long()

    def spread(self, z: Float[Tensor, "N C H W"], size: Size) -> Float[Tensor, "N C H W"]:
        """Every position has a window of its own, so its value is there already."""
        _require_size(size)
        _require_grid(z, size, size)
        return z


STRATEGIES: dict[str, type[Regional | Sliding]] = {"regional": Regional, "sliding": Sliding}
