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
    from collections.abc import Callable

    from jaxtyping import Float, Int

Size: TypeAlias = tuple[int, int]

ROWS, COLUMNS = 2, 3  # the spatial axes of N C H W


def require_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is a whole number of at least 1; got {value!r}")


def require_map(what: str, x: Tensor) -> None:
    if x.ndim != 4 or x.shape[2] < 1 or x.shape[3] < 1 or not x.is_floating_point():
        raise ValueError(
            f"{what} is a map N C H W of floating point numbers, H and W at least 1; "
            f"got {x.dtype}, shape {tuple(x.shape)}"
        )


def size_of(x: Tensor) -> Size:
    return x.shape[-2], x.shape[-1]


def _require_grid(z: Tensor, grid: Size, size: Size) -> None:
    if min(size) < 1:
        raise ValueError(f"a map has at least one row and one column; got size {size}")
    if z.ndim != 4 or z.shape[2] != grid[0] or z.shape[3] != grid[1]:
        raise ValueError(
            f"a map of {size[0]}×{size[1]} has {grid[0]}×{grid[1]} regions; "
            f"got values of shape {tuple(z.shape)}"
        )


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
        return min(self.scale, size[0]), min(self.scale, size[1])

    def runs(self, length: int) -> list[int]:
        """The sides of the regions along an axis: 2, 2, 2, 1 for an axis of 7 at scale 4."""
        parts = min(self.scale, length)
        if length % parts == 0:
            return [length // parts] * parts
        cuts = [-(-j * length // parts) for j in range(parts + 1)]
        return [end - start for start, end in pairwise(cuts)]

    def pool(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C h w"]:
        """The mean over each region; ``x`` itself where every region is one position."""
        require_map("x", x)
        height, width = x.shape[-2:]
        h, w = self.grid((height, width))
        compiling = torch.compiler.is_compiling()
        if height % h or width % w or not (x.is_cuda or compiling):
            strips = _mean_runs(x, ROWS, self.runs(height))
            return _mean_runs(strips, COLUMNS, self.runs(width)).to(x.dtype)
        a, b = height // h, width // w
        if not compiling and not x.requires_grad and a * b <= 1024:
            # A fifth of the time of what follows; but slow in going back, not fused by Inductor,
            # and one running sum a cell, which loses digits where cells are large.
            return F.avg_pool2d(x, (a, b))
        if _is_channels_last(x) and not x.is_cuda:
            # Unflattened as it is, Inductor would have the map copied out of this layout.
            y = x.permute(0, 2, 3, 1)
            cells = torch.unflatten(torch.unflatten(y, 2, (w, b)), 1, (h, a))  # N h a w b C
            return cells.mean((2, 4)).permute(0, 3, 1, 2)
        return torch.unflatten(torch.unflatten(x, COLUMNS, (w, b)), ROWS, (h, a)).mean((3, 5))

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
        h, w = self.grid(size)
        if size[0] % h == 0 and size[1] % w == 0:
            return None
        rows, columns = (self._sides(length, like.device) for length in size)
        return (rows[:, None] * columns)[None, None].to(accumulation(like))

    def spread(self, z: Float[Tensor, "N C h w"], size: Size) -> Float[Tensor, "N C H W"]:
        """Give every position the value of the region it lies in."""
        _require_grid(z, self.grid(size), size)
        height, width = size
        h, w = self.grid(size)
        compiled = torch.compiler.is_compiling() and z.device.type == "cpu"
        if compiled and (height % h or width % w) and not z.requires_grad:
            # Inductor writes concatenated maps out, and reads z through an index; but going back
            # it would scatter. What is expanded it computes first, so z is not made per position.
            rows = torch.arange(height, device=z.device) * h // height
            columns = torch.arange(width, device=z.device) * w // width
            return z.unsqueeze(4).expand(*z.shape, 2)[:, :, rows[:, None], columns, 0]
        return _repeat_runs(_repeat_runs(z, COLUMNS, self.runs(width)), ROWS, self.runs(height))

    def multiply(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N C H W"]:
        """``x * spread(z)``, without making the spread map where the regions are of one size."""
        return self._combine(torch.mul, x, z)

    def add(
        self, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
    ) -> Float[Tensor, "N C H W"]:
        """``x + spread(z)``, likewise."""
        return self._combine(torch.add, x, z)

    def _combine(self, op: Callable[[Tensor, Tensor], Tensor], x: Tensor, z: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        h, w = z.shape[-2:]
        channels_last = _is_channels_last(x)
        if channels_last:
            z = z.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        if height % h or width % w:
            return op(x, self.spread(z, (height, width)))
        rows = torch.unflatten(x, ROWS, (h, height // h))  # N C h a W
        if x.device.type == "cpu" and not channels_last:
            # The innermost loop runs along a row: spread that axis (h/H of a map), broadcast rows.
            return op(rows, _repeat_runs(z, COLUMNS, self.runs(width))[:, :, :, None]).flatten(2, 3)
        cells = torch.unflatten(rows, 4, (w, width // w))  # N C h a w b
        return op(cells, z[:, :, :, None, :, None]).flatten(4, 5).flatten(2, 3)

    def _sides(self, length: int, device: torch.device) -> Int[Tensor, " h"]:
        # :meth:`runs` as a tensor, made on the device: a copy from the host would wait for it.
        parts = min(self.scale, length)
        ends = torch.arange(parts - 1, parts * (length + 1), length, device=device)
        return (ends // parts).diff()


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
        radius = self.radius((x.shape[-2], x.shape[-1]))
        wide = x.to(accumulation(x))
        return _window_mean(_window_mean(wide, COLUMNS, radius), ROWS, radius).to(x.dtype)

    def spread(self, z: Float[Tensor, "N C H W"], size: Size) -> Float[Tensor, "N C H W"]:
        """Every position has a window of its own, so its value is there already."""
        _require_grid(z, size, size)
        return z


CoordinateSet: TypeAlias = Regional | Sliding

STRATEGIES: dict[str, type[CoordinateSet]] = {"regional": Regional, "sliding": Sliding}


def accumulation(x: Tensor) -> torch.dtype:
    """The type sums are kept in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _mean_runs(x: Tensor, axis: int, runs: list[int]) -> Tensor:
    """Means over consecutive runs of an axis, in float32 at least; the layout in memory stays."""
    if len(runs) == x.shape[axis]:
        return x
    if _is_channels_last(x):
        return _mean_entries(x.permute(0, 2, 3, 1), axis - 1, runs).permute(0, 3, 1, 2)
    return _mean_entries(x, axis, runs)


def _mean_entries(x: Tensor, axis: int, runs: list[int]) -> Tensor:
    kind = accumulation(x)
    if _alike(runs):
        return torch.unflatten(x, axis, (len(runs), runs[0])).mean(axis + 1, dtype=kind)
    return torch.stack([run.mean(axis, dtype=kind) for run in x.split(runs, axis)], axis)


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
    return all(run == runs[0] for run in runs)


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
