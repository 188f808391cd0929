"""Where cells, regions and rows lie.  N batch, C channels, H W map.

All scales' regions are unions of the cells of one fine grid: region ⌊i·K/n⌋ of a position follows
from its cell ⌊i·F/n⌋ wherever K divides F, so F is a common multiple of the scales (or n, where
that is less: then every position is a cell of its own). The kernels pass over maps cell by cell.
What they keep of them are rows of C numbers: one a sample and cell, then one a sample and region of
each coarser scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

FINEST = 16  # cells along an axis, at most
COARSEST = 4  # cells along an axis, at least: work for many programs, also where a scale is 1


def finest(scales: tuple[int, ...]) -> int:
    """F: cells along an axis of a map that has as many positions."""
    common = math.lcm(*scales)
    return common * -(-COARSEST // common)


def region_grids(size: tuple[int, int], scales: tuple[int, ...]) -> list[tuple[int, int]]:
    """Regions down and across, a scale."""
    return [(min(k, size[0]), min(k, size[1])) for k in scales]


@dataclass(frozen=True)
class Geometry:
    """The grids of some scales on a map of a size, and where a sample's rows of each begin."""

    size: tuple[int, int]
    scales: tuple[int, ...]

    @cached_property
    def fine(self) -> tuple[int, int]:
        most = finest(self.scales)
        return min(most, self.size[0]), min(most, self.size[1])

    @cached_property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return tuple(region_grids(self.size, self.scales))

    @cached_property
    def levels(self) -> tuple[tuple[int, int, int], ...]:
        """The grids that differ from the fine one: down, across, rows of a sample before them."""
        rows, found = self.cells, []
        for grid in dict.fromkeys(self.grids):
            if grid != self.fine:
                found.append((*grid, rows))
                rows += grid[0] * grid[1]
        return tuple(found)

    @property
    def nested(self) -> bool:
        """Whether the cells' sides are powers of two, and so are those of all regions."""
        return all(power(side) == side for grid in (self.fine, *self.grids) for side in grid)

    @property
    def cells(self) -> int:
        return self.fine[0] * self.fine[1]

    @property
    def pool_rows(self) -> int:
        """Rows of a sample: the fine grid's and those of the levels."""
        return self.cells + sum(down * across for down, across, _ in self.levels)

    @cached_property
    def pools_at(self) -> tuple[int, ...]:
        """For each scale, a sample's pooled rows before its own."""
        where = {(down, across): at for down, across, at in self.levels}
        return tuple(where.get(grid, 0) for grid in self.grids)

    @cached_property
    def rows_at(self) -> tuple[int, ...]:
        """For each scale, a sample's branch rows before its own; every scale has its own rows."""
        counts = [down * across for down, across in self.grids]
        return tuple(sum(counts[:i]) for i in range(len(counts)))

    @property
    def branch_rows(self) -> int:
        return sum(down * across for down, across in self.grids)

    def tiles(self, samples: int, rows: int) -> int:
        """Tiles of so many rows that cover every scale's rows, none across two scales."""
        return sum(-(-samples * down * across // rows) for down, across in self.grids)

    def most_tiles(self, samples: int, rows: int) -> int:
        """Of one scale."""
        return max(-(-samples * down * across // rows) for down, across in self.grids)


@lru_cache(maxsize=256)
def geometry(size: tuple[int, int], scales: tuple[int, ...]) -> Geometry:
    return Geometry(size, scales)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
