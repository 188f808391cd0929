"""What dense steps launch: the branches of a tail, and passes of their own around them.

N batch, C new channels, CX channels of the main vector so far, fh fw cells. Its means over cells
are N·fh·fw rows of float32, each as long as its channels padded.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from mssar.kernels.grids import Count, finest, up_to
from mssar.kernels.launch import Kernel, kernel
from mssar.kernels.tail.plan import NUMBER, PACKED, Plan, Settings, Shape
from mssar.kernels.tiling import MAP_WARPS, padded

ROWS, COLUMNS = 16, 64  # of means over cells, a tile


def means_shape(
    batch: Count, channels: int, size: tuple[Count, Count], scales: tuple[int, ...]
) -> tuple[Count, int]:
    """Rows and their length."""
    most = finest(scales)
    return batch * min(most, size[0]) * min(most, size[1]), padded(channels)


class Means(Plan):
    """Of the means that a block begins with: a tail's first pass, and the way back."""

    def kernels(self, backward: bool) -> list[Kernel]:
        return [self.unpool] if backward else [self.sums]

    def _kernels(self) -> None:
        super()._kernels()
        from mssar.kernels.triton import dense

        self.unpool: Kernel = kernel(
            dense.unpool, [NUMBER, self.shape.dtype, *[int] * 7],
            {**self.tile("scatter"), "LAST": self.shape.last}, MAP_WARPS,
        )  # fmt: skip


class Step(Plan):
    """Of a step; its shape's map are the new channels, its context the main vector."""

    def kernels(self, backward: bool) -> list[Kernel]:
        needed = [self.prepare, self.reduce, self.expand, self.apply, self.carry]
        if self.tracker is not None:
            needed.append(self.tracker)
        if backward:
            needed += [self.gates, self.settle, self.expand_backward, self.reduce_backward]
            needed += [*self.carry_back, *self.collect]
        return needed

    def _kernels(self) -> None:
        super()._kernels()
        from mssar.kernels.triton import dense

        dtype, kept, last = self.shape.dtype, self.kept_type, {"LAST": self.shape.last}
        some = {"ROWS": ROWS, "COLUMNS": COLUMNS}
        self.carry: Kernel = kernel(
            dense.carry, [dtype, dtype, NUMBER, NUMBER, kept, NUMBER, *[int] * 12],
            {**self.scales, **self.tile("apply"), **some, **last}, MAP_WARPS,
        )  # fmt: skip
        # Both for a last step, whose means nobody carries on, and for others.
        self.carry_back: list[Kernel] = [
            kernel(
                dense.carry_back,
                [dtype, dtype, dtype, NUMBER, NUMBER, kept, NUMBER, *[int] * 11],
                {**self.scales, **self.tile("gather"), **last, "CARRIED": carried}, MAP_WARPS,
            )
            for carried in (False, True)
        ]  # fmt: skip
        self.collect: list[Kernel] = [
            kernel(
                dense.collect, [kept, NUMBER, NUMBER, NUMBER, NUMBER, *[int] * 12],
                {**self.scales, **some, "BLOCK": PACKED, "CARRIED": carried}, MAP_WARPS,
            )
            for carried in (False, True)
        ]  # fmt: skip

    @property
    def cell_rows(self) -> int:
        return self.n * self.grids.cells

    @property
    def ns(self) -> int:
        """Numbers of a row behind the step."""
        return padded(self.cx + self.c)

    @property
    def copying(self) -> int:
        """Tiles of the rows of cells."""
        return up_to(self.cell_rows, ROWS)


@lru_cache(maxsize=4096)
def step_plan(shape: Shape, settings: Settings) -> Step:
    return Step(shape, settings)


@lru_cache(maxsize=1024)
def means_plan(
    shape: tuple[int, int, int, int],
    last: bool,
    dtype: torch.dtype,
    device: torch.device,
    scales: tuple[int, ...],
) -> Means:
    settings = Settings(scales, (0.0, 0.0, 0.0), None, False, False, False, "ieee")
    types = (NUMBER,) * (6 * len(scales))
    return Means(Shape(shape, last, dtype, device, 1, False, types), settings)
