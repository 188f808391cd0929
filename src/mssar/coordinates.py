"""Which positions a position consults.  N batch, C channels, H W map, h w cells.

A coordinate set names, for every position of a map, the region it looks at. Both strategies of the
paper are here; each can ``pool`` a map over its regions and ``spread`` one value a region back over
the positions that consult it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # the tests set this, and so check every shape below
    from jaxtyping import Float

Size: TypeAlias = tuple[int, int]

ROWS, COLUMNS = 2, 3  # the spatial axes of N C H W


def _require_scale(scale: int) -> None:
    if isinstance(scale, bool) or not isinstance(scale, int) or scale < 1:
        raise ValueError(f"a scale is a whole number of at least 1, such as 4; got {scale!r}")


@dataclass(frozen=True)
class Regional:
    """The map cut into ``scale`` × ``scale`` regions; a position consults the one it lies in.

    Position i of an axis of n lies in region ⌊i·K/n⌋: a partition on every size, with sides that
    differ by one at most. Where K > n every position of the axis is its own region, so a map has
    min(K, H) × min(K, W) of them.
    """

    scale: int

    def __post_init__(self) -> None:
        _require_scale(self.scale)

    def grid(self, size: Size) -> Size:
        """How many regions a map of this size has, down and across."""
        return min(self.scale, size[0]), min(self.scale, size[1])

    def runs(self, length: int) -> list[int]:
        """The sides of the regions along an axis: 2, 2, 2, 1 for an axis of 7 at scale 4."""
        parts = min(self.scale, length)
        if length % parts == 0:
            return [length // parts] * parts
        cuts = [-(-j * length // parts) for j in range(parts + 1)]
        return [end - start for start, end in pairwise(cuts)]

    def pool(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C h w"]:
        """The mean over each region."""
        height, width = x.shape[-2:]
        h, w = self.grid((height, width))
        if height % h or width % w:
            strips = _sum_runs(x, ROWS, self.runs(height)) / self._sides(height, ROWS, x)
            sums = _sum_runs(strips, COLUMNS, self.runs(width))
            return (sums / self._sides(width, COLUMNS, x)).to(x.dtype)
        cell = height // h, width // w
        if cell == (1, 1):
            return x
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return F.avg_pool2d(x, cell)  # vectorised over channels; a sum over two axes is not
        # Sums, then one division on the small grid: their gradient is an expanded view, no new map.
        cells = torch.unflatten(torch.unflatten(x, COLUMNS, (w, cell[1])), ROWS, (h, cell[0]))
        return (cells.sum((3, 5), dtype=accumulation(x)) / math.prod(cell)).to(x.dtype)

    def coarsen(
        self, fine: Float[Tensor, "N C f g"], finer: Regional, size: Size
    ) -> Float[Tensor, "N C h w"]:
        """What :meth:`pool` gives, from the pools of ``finer`` and without reading the map again.

        Where K divides K' the borders ⌈j·n/K⌉ are among those of K', whatever n is, so a coarse
        region is a union of fine ones: its mean is theirs, weighted by their areas.
        """
        coarse = fine
        for axis, length in zip((ROWS, COLUMNS), size, strict=True):
            inner, outer = (s._sides(length, axis, fine) for s in (finer, self))
            weighted = coarse * inner if isinstance(inner, Tensor) else coarse
            sums = _sum_runs(weighted, axis, self.members(finer, length))
            coarse = sums / outer if isinstance(inner, Tensor) else sums / (outer / inner)
        return coarse.to(fine.dtype)

    def refine(
        self, z: Float[Tensor, "N C h w"], finer: Regional, size: Size
    ) -> Float[Tensor, "N C f g"]:
        """Give every region of ``finer`` the value of the region of this set that holds it."""
        for axis, length in zip((COLUMNS, ROWS), reversed(size), strict=True):
            z = _repeat_runs(z, axis, self.members(finer, length))
        return z

    def members(self, finer: Regional, length: int) -> list[int]:
        """How many regions of ``finer`` make up each region of this set along an axis."""
        assert finer.scale % self.scale == 0, f"{self} and {finer} do not nest"
        if finer.scale > length:  # the fine regions are single positions
            return self.runs(length)
        return [finer.scale // self.scale] * self.scale

    def spread(self, z: Float[Tensor, "N C h w"], size: Size) -> Float[Tensor, "N C H W"]:
        """Give every position the value of the region it lies in."""
        return _repeat_runs(_repeat_runs(z, COLUMNS, self.runs(size[1])), ROWS, self.runs(size[0]))

    def multiply(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N C H W"]:
        """``x * spread(z)``, without making the spread map where the regions are of one size."""
        height, width = x.shape[-2:]
        h, w = self.grid((height, width))
        channels_last = _is_channels_last(x)
        if channels_last:
            z = z.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        if height % h or width % w:
            return x * self.spread(z, (height, width))
        rows = torch.unflatten(x, ROWS, (h, height // h))  # N C h a W
        if channels_last:  # the innermost loop runs over channels: broadcast both axes
            cells = torch.unflatten(rows, 4, (w, width // w))  # N C h a w b
            return (cells * z[:, :, :, None, :, None]).flatten(4, 5).flatten(2, 3)
        # The innermost loop runs along a row: spread that axis (h/H of a map), broadcast the other.
        return (rows * _repeat_runs(z, COLUMNS, self.runs(width))[:, :, :, None]).flatten(2, 3)

    def _sides(self, length: int, axis: int, like: Tensor) -> Tensor | int:
        """:meth:`runs` as one number, or where they differ as a tensor along the axis."""
        parts = min(self.scale, length)
        if length % parts == 0:
            return length // parts
        # Made on the device: a copy from the host would wait for it, and break CUDA graphs.
        cuts = (torch.arange(parts + 1, device=like.device) * length + parts - 1) // parts
        sides = cuts.diff()
        return sides[:, None] if axis == ROWS else sides


@dataclass(frozen=True)
class Sliding:
    """A square window around every position, reaching ⌊√(H·W) / scale⌋ to each side.

    Windows are clipped at the border and divided by the positions they still hold. The cost is
    O(H·W·C) whatever the scale: each axis takes two running sums.
    """

    scale: int

    def __post_init__(self) -> None:
        _require_scale(self.scale)

    def grid(self, size: Size) -> Size:
        """As many as the map has positions."""
        return size

    def radius(self, size: Size) -> int:
        """The largest whole T with T ≤ √(H·W) / K, in whole numbers so that no rounding enters."""
        # index() makes a traced size a plain number; isqrt cannot take any other.
        return math.isqrt(operator.index(size[0] * size[1]) // self.scale**2)

    def pool(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """The mean over each position's window."""
        radius = self.radius((x.shape[-2], x.shape[-1]))
        wide = x.to(accumulation(x))
        return _window_mean(_window_mean(wide, COLUMNS, radius), ROWS, radius).to(x.dtype)

    def spread(self, z: Float[Tensor, "N C H W"], size: Size) -> Float[Tensor, "N C H W"]:
        """Every position has a window of its own, so its value is there already."""
        assert tuple(z.shape[-2:]) == tuple(size)
        return z


CoordinateSet: TypeAlias = Regional | Sliding

STRATEGIES: dict[str, type[CoordinateSet]] = {"regional": Regional, "sliding": Sliding}


def accumulation(x: Tensor) -> torch.dtype:
    """The type sums are kept in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _sum_runs(x: Tensor, axis: int, runs: list[int]) -> Tensor:
    """Sums over consecutive runs of an axis."""
    kind = accumulation(x)
    if len(runs) == x.shape[axis]:
        return x.to(kind)
    if _alike(runs):
        return torch.unflatten(x, axis, (len(runs), runs[0])).sum(axis + 1, dtype=kind)
    return torch.stack([run.sum(axis, dtype=kind) for run in x.split(runs, axis)], axis)


def _repeat_runs(z: Tensor, axis: int, runs: list[int]) -> Tensor:
    """Repeat each entry of an axis over its run; the layout in memory stays."""
    if len(runs) == sum(runs):
        return z
    if _is_channels_last(z):  # copy along channels, the axis that is contiguous
        return _repeat_entries(z.permute(0, 2, 3, 1), axis - 1, runs).permute(0, 3, 1, 2)
    return _repeat_entries(z, axis, runs)


def _repeat_entries(z: Tensor, axis: int, runs: list[int]) -> Tensor:
    if _alike(runs):
        shape = [*z.shape[: axis + 1], runs[0], *z.shape[axis + 1 :]]
        return z.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)
    shape = list(z.shape)
    pieces = []
    for entry, run in zip(z.split(1, axis), runs, strict=True):
        shape[axis] = run
        pieces.append(entry.expand(shape))
    return torch.cat(pieces, axis)


def _alike(runs: list[int]) -> bool:
    return runs.count(runs[0]) == len(runs)


def _is_channels_last(x: Tensor) -> bool:
    # By strides, since vmap cannot answer is_contiguous for a memory format.
    return x.shape[1] > 1 and x.stride(1) == 1


def _window_mean(x: Tensor, axis: int, radius: int) -> Tensor:
    """Means over windows that reach ``radius`` to each side along an axis, clipped at its ends."""
    length = x.shape[axis]
    if radius >= length - 1:
        return x.mean(axis, keepdim=True).expand_as(x)
    if radius == 0:
        return x
    positions = torch.arange(length, device=x.device)
    held = (positions + radius).clamp(max=length - 1) - (positions - radius).clamp(min=0) + 1
    return (_window_sum(x.movedim(axis, -1), radius) / held).movedim(-1, axis)


def _window_sum(x: Tensor, radius: int) -> Tensor:
    """Sums over windows of the last axis, without the cancellation of an integral image.

    The axis is cut into blocks as long as a window. Then a window is the end of one block and the
    beginning of the next: a running sum from the right plus one from the left, nothing subtracted.
    """
    length, window = x.shape[-1], 2 * radius + 1
    blocks = (length - 1) // window + 2
    padded = F.pad(x, (radius, blocks * window - length - radius))
    parts = torch.unflatten(padded, -1, (blocks, window))
    ends = _running_sum(parts.flip(-1)).flip(-1)  # from an entry to its block's end
    beginnings = F.pad(_running_sum(parts)[..., :-1], (1, 0))  # from its start to just before
    return (ends[..., :-1, :] + beginnings[..., 1:, :]).flatten(-2)[..., :length]


def _running_sum(x: Tensor) -> Tensor:
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        # CUDA's cumsum refuses in this mode. Doubling steps take log₂ of the window, no atomics.
        step = 1
        while step < x.shape[-1]:
            x = x + F.pad(x[..., :-step], (step, 0))
            step *= 2
        return x
    return x.cumsum(-1)
