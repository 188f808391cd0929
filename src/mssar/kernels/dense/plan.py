"""What dense steps launch: the branches of a tail, and passes of their own around them.

N batch, C new channels, CX channels of the main vector so far, fh fw cells. Its means over cells
are N·fh·fw rows of float32, each as long as its channels padded.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from mssar.kernels.grids import Count, finest, up_to
from mssar.kernels.launch import Kernel, kernel
from mssar.kernels.tail.call import Settings, Shape
from mssar.kernels.tail.plan import ADDED, NUMBER, Plan
from mssar.kernels.tiling import padded

ROWS, COLUMNS = 16, 64  # of means over cells, a tile
WARPS = 4  # of a program that adds such tiles up


def means_shape(
    batch: Count, channels: int, size: tuple[Count, Count], scales: tuple[int, ...]
) -> tuple[Count, int]:
    """Rows and their length."""
    most = finest(scales)
    return batch * min(most, size[0]) * min(most, size[1]), padded(channels)


class Means(Plan):
    """Of the means that a block begins with: a tail's first pass, and the way back."""

    def kernels(self, *, forward: bool, backward: bool) -> list[Kernel]:
        return [self.sums] * forward + [self.unpool] * backward

    def _kernels(self) -> None:
        super()._kernels()
        from mssar.kernels.triton import dense

        self.unpool: Kernel = kernel(
            dense.unpool, [NUMBER, self.shape.dtype, *[int] * 7],
            {**self.tile("scatter"), "LAST": self.shape.last}, self.cut["scatter"].warps,
        )  # fmt: skip


class Step(Plan):
    """Of a step; its shape's map are the new channels, its context the main vector."""

    def kernels(self, *, forward: bool, backward: bool) -> list[Kernel]:
        own = [self.carry] * forward + [*self.carry_back, *self.collect] * backward
        others = self.sums, self.gather, self.scatter
        theirs = super().kernels(forward=forward, backward=backward)
        return [kernel for kernel in theirs if kernel not in others] + own

    def _kernels(self) -> None:
        super()._kernels()
        from mssar.kernels.triton import dense

        dtype, kept, last = self.shape.dtype, self.kept_type, {"LAST": self.shape.last}
        some = {"ROWS": ROWS, "COLUMNS": COLUMNS}
        self.carry: Kernel = kernel(
            dense.carry, [dtype, dtype, NUMBER, NUMBER, kept, NUMBER, *[int] * 12],
            {**self.scales, **self.tile("apply"), **some, **last},
            self.cut["apply"].warps,
        )  # fmt: skip
        # Both for a last step, whose means nobody carries on, and for others.
        self.carry_back: list[Kernel] = [
            kernel(
                dense.carry_back,
                [dtype, dtype, dtype, NUMBER, NUMBER, kept, NUMBER, *[int] * 11],
                {**self.scales, **self.tile("gather"), **last, "CARRIED": carried},
                self.cut["gather"].warps,
            )
            for carried in (False, True)
        ]  # fmt: skip
        self.collect: list[Kernel] = [
            kernel(
                dense.collect, [kept, NUMBER, NUMBER, NUMBER, NUMBER, *[int] * 12],
                {**self.scales, **some, "BLOCK": ADDED, "CARRIED": carried}, WARPS,
            )
            for carried in (False, True)
        ]  # fmt: skip

    @property
    def beside(self) -> int:
        return up_to(self.cxs, COLUMNS)

    @property
    def cell_rows(self) -> int:
        return self.n * self.grids.cells

    @property
    def ns(self) -> int:
        """Numbers of a row after the step."""
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
