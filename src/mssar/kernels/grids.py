"""Where cells, regions and rows lie.  N batch, C channels, H W map.

All scales' regions are unions of the cells of one fine grid: region ⌊i·K/n⌋ of a position follows
from its cell ⌊i·F/n⌋ wherever K divides F, so F is a common multiple of the scales (or n, where
that is less: then every position is a cell of its own). The kernels pass over maps cell by cell.
What they keep of them are rows of channels: one a sample and region, scale by scale.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

FINEST = 16  # cells along an axis, at most
Count: TypeAlias = Any  # an int, or to a tracer a torch.SymInt
COARSEST = 4  # cells along an axis, at least: work for many programs, also where a scale is 1


def finest(scales: tuple[int, ...]) -> int:
    """F: cells along an axis of a map that has as many positions."""
    common = math.lcm(*scales)
    return common * -(-COARSEST // common)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def up_to(n: int, of: int) -> int:
    """How many of a size cover ``n``."""
    return -(-n // of)


class Grids(NamedTuple):
    """The grids of some scales on maps of a size."""

    fine: tuple[int, int]  # cells down and across
    down: tuple[int, ...]  # regions, a scale
    across: tuple[int, ...]
    rows_at: tuple[int, ...]  # a sample's rows before a scale's own

    @property
    def cells(self) -> int:
        return self.fine[0] * self.fine[1]

    @property
    def rows(self) -> int:
        """Of a sample, all scales together."""
        return self.rows_at[-1] + self.down[-1] * self.across[-1]

    def regions(self, level: int) -> int:
        return self.down[level] * self.across[level]

    @property
    def same(self) -> int | None:
        """The first scale whose regions are the cells."""
        grids = list(zip(self.down, self.across, strict=True))
        return grids.index(self.fine) if self.fine in grids else None

    def tiles(self, samples: int, rows: int) -> int:
        """Tiles of so many rows that cover every scale's rows, none across two scales."""
        return sum(up_to(samples * self.regions(k), rows) for k in range(len(self.down)))


@lru_cache(maxsize=1024)
def grids(size: tuple[int, int], scales: tuple[int, ...]) -> Grids:
    most = finest(scales)
    down, across = (tuple(min(k, length) for k in scales) for length in size)
    counts = [d * a for d, a in zip(down, across, strict=True)]
    rows_at = tuple(sum(counts[:i]) for i in range(len(counts)))
    return Grids((min(most, size[0]), min(most, size[1])), down, across, rows_at)
