"""What follows from shapes, worked out once: kernels, grids and sections of memory.

N batch, C channels, J hidden channels, L scales. What regions' means are of has CX channels: C, but
for a layer that looks at another map.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from mssar.kernels.device import Device, device_of, interpreted
from mssar.kernels.grids import Count, Grids, grids, up_to
from mssar.kernels.launch import Kernel, Layout, Pointer, kernel, warm
from mssar.kernels.tail.call import ACTIVATIONS, TABLE, Settings, Shape
from mssar.kernels.tiling import (
    ROW_WARPS,
    Pass,
    Products,
    Samples,
    multiple,
    over_map,
    padded,
    products,
    samples,
    span,
)

NUMBER = torch.float32
FRONT = 8  # channels of a program that works out the front norm
PACKED = 1024  # numbers of a program that copies weights
ADDED = 128  # numbers of one that adds up parts of their gradients
TRACKED = 64  # channels of a program that moves running statistics


class Saved(NamedTuple):
    """What the gradient needs, in one allocation."""

    norms: Pointer  # a table each: the front one's, the hidden layers', the gates'
    shares: Pointer  # one by the values of a channel: of the front norm, and a scale
    counters: Pointer
    reduces: Pointer  # Ω₁ of all scales, rows CXS apart
    expands: Pointer  # Ω₂, rows JS apart
    normal: Pointer  # rows × CXS: means after the front norm, but for γ and β
    hidden: Pointer  # rows × JS: before their norm
    gates: Pointer  # rows × CS: before theirs


class Norms(NamedTuple):
    """The beginning of that."""

    norms: Pointer
    shares: Pointer
    counters: Pointer


class Forward(NamedTuple):
    """Of one forward pass."""

    rows: Pointer
    cells: Pointer
    parts: Pointer
    counts: Pointer


class Backward(NamedTuple):
    """Of one backward pass."""

    cell_sums: Pointer
    weights: Pointer
    grads: Pointer
    gate_grads: Pointer
    hidden_grads: Pointer
    pool_grads: Pointer
    sample_parts: Pointer
    parts: Pointer
    past: Pointer
    sums: Pointer
    lines: Pointer
    hidden_lines: Pointer
    weight_parts: Pointer


class Grads(NamedTuple):
    """Of parameters, in the order in which kernels write them."""

    vectors: Pointer  # front γ, β; gates' γ, β
    hidden_vectors: Pointer  # hidden layers' γ, β
    weights: Pointer  # Ω₁, Ω₂


def kept_type(dtype: torch.dtype) -> torch.dtype:
    """Of the rows that are kept: as exact as the map."""
    return torch.bfloat16 if dtype is torch.bfloat16 else NUMBER


@lru_cache(maxsize=1024)
def norms_layout(levels: int, channels: int, hidden: int) -> Layout:
    cs, js = padded(channels), padded(hidden)
    norms = TABLE * (cs + levels * (js + cs))
    counters = levels * up_to(max(channels, hidden), 16)
    return Layout(Norms, [(NUMBER, norms), (NUMBER, 1 + levels), (torch.int32, counters)])


def saved_bytes(
    batch: Count,
    channels: int,
    size: tuple[Count, Count],
    hidden: int,
    scales: tuple[int, ...],
    dtype: torch.dtype,
    context: int = 0,
) -> Count:
    """Of what the gradient needs."""
    rows = batch * sum(min(k, size[0]) * min(k, size[1]) for k in scales)
    cs, js, levels = padded(channels), padded(hidden), len(scales)
    cxs = padded(context or channels)
    numbers = levels * (hidden * cxs + channels * js) + rows * (cs + cxs + js)
    return norms_layout(levels, channels, hidden).bytes + numbers * kept_type(dtype).itemsize


def pieces(levels: int, c: int, j: int, context: int = 0) -> list[int]:
    """Sizes of the parts of parameters' gradients: those of ``Grads``, with what pads them."""
    vectors, hidden = [c] * (2 + 2 * levels), [j] * (2 * levels)
    weights = [j * (context or c)] * levels + [j * c] * levels
    sections = [[*some, -sum(some) % 8] for some in (vectors, hidden, weights)]
    return sections[0] + sections[1] + sections[2]


@lru_cache(maxsize=256)
def tracker(front: bool, levels: int, types: tuple[torch.dtype, ...]) -> Kernel:
    """What moves running statistics of these types: the front norm's, and all branches' or none."""
    from mssar.kernels.triton import track

    count = len(types)
    return kernel(
        track.track,
        [NUMBER, NUMBER, types, types, (torch.int64,) * count, (float,) * count, *[int] * 4],
        {"FRONT": int(front), "BRANCHES": (count - front) // 2, "L": levels, "BLOCK": TRACKED}, 2,
    )  # fmt: skip


class Plan:
    """Of one shape and settings."""

    def __init__(self, shape: Shape, settings: Settings, device: Device | None = None) -> None:
        self.shape, self.settings = shape, settings
        self.n, self.c, self.height, self.width = shape.map
        self.j = shape.hidden
        self.levels = len(settings.scales)
        self.cx = shape.context or self.c
        self.cs, self.cxs, self.js = padded(self.c), padded(self.cx), padded(self.j)
        self.grids: Grids = grids((self.height, self.width), settings.scales)
        self.rows = self.n * self.grids.rows
        self.same = None if shape.context else self.grids.same
        self.kept_type = kept_type(shape.dtype)
        self.device = device or device_of(shape.device)
        self.cut: dict[str, Pass] = {
            name: over_map(name, shape.map, shape.last, self.grids, self.device)
            for name in ("sums", "apply", "gather", "scatter")
        }
        self.together: Samples = samples(self.grids)
        self.tiles: Products = products(self.c, self.j, self.kept_type, self.device)
        wide = products(self.cx, self.j, self.kept_type, self.device)
        self.wide: Products = wide._replace(rows=self.tiles.rows)
        self.row_tiles = self.grids.tiles(self.n, self.tiles.rows)
        self.j_tiles = up_to(self.j, self.tiles.hidden)
        self.c_tiles = up_to(self.c, self.tiles.channels)
        self.x_tiles = up_to(self.cx, self.wide.channels)
        self.batch_norm = settings.norm and not settings.fixed
        self._warm = False, False  # forward, backward
        self._kernels()
        self._memory()

    def kernels(self, *, forward: bool, backward: bool) -> list[Kernel]:
        """All that a call launches."""
        needed = []
        if forward:
            needed += [self.sums, self.prepare, self.reduce, self.expand, self.apply]
            needed += [] if self.tracker is None else [self.tracker]
        if backward:
            needed += [
                self.gather, self.gates, self.settle, self.expand_backward, self.reduce_backward,
                self.scatter,
            ]  # fmt: skip
        return needed

    def warm(self, *, forward: bool, backward: bool) -> None:
        """Compile these, side by side."""
        if (forward and not self._warm[0]) or (backward and not self._warm[1]):
            warm(self.kernels(forward=forward, backward=backward), self.shape.device)
            self._warm = self._warm[0] or forward, self._warm[1] or backward

    # Kernels

    @property
    def scales(self) -> dict[str, tuple[int, ...]]:
        """As kernels take them."""
        grid = self.grids
        return {"DOWN": grid.down, "ACROSS": grid.across, "ROWS_AT": grid.rows_at}

    def tile(self, name: str) -> dict[str, int]:
        """Of a pass over maps."""
        cut = self.cut[name]
        return {
            "CELLS": cut.cells, "BP": cut.positions, "UP": cut.up, "CT": cut.channels,
            "BY": multiple(self.c),
        }  # fmt: skip

    def _kernels(self) -> None:
        from mssar.kernels.triton import gates, maps, prepare, rows, rows_backward

        s, grid, dtype, kept = self.settings, self.grids, self.shape.dtype, self.kept_type
        precision = "ieee" if interpreted() else s.precision
        # Three products of TF32 are as good as bfloat16 needs, and not quite as float32 does.
        exact = "ieee" if interpreted() or kept is NUMBER else "tf32x3"
        scales, tile, together = self.scales, self.tile, self.together
        inside = {
            "ROWS": grid.rows, "RB": together.rows, "QS": grid.cells, "QB": together.cells
        }  # fmt: skip
        last = {"LAST": self.shape.last}
        ends = {"SHORTCUT": self.shape.shortcut, "ACT": ACTIVATIONS[s.activation]}
        t, wide = self.tiles, self.wide
        row = {"warps": ROW_WARPS, "stages": t.stages}
        self.sums: Kernel = kernel(
            maps.sums, [dtype, NUMBER, NUMBER, NUMBER, *[int] * 9],
            {**tile("sums"), **last, "MOMENTS": self.batch_norm}, self.cut["sums"].warps,
        )  # fmt: skip
        same = -1 if self.same is None else self.same
        self.coarse = self.levels > (same >= 0)  # means of regions that are not cells
        front, types = self.shape.types[: 4 * s.norm], self.shape.types[4 * s.norm :]
        own, given = types[: 6 * self.levels], types[6 * self.levels :]
        per = [tuple(own[i::6]) for i in range(6)]
        running = [tuple(given[i::4]) for i in range(4)]  # empty where the batch's are taken
        self.prepare: Kernel = kernel(
            prepare.prepare,
            [NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, torch.int32, kept, tuple(front), *per,
             *running, *[int] * 14, float, float, float],
            {**scales, "SAME": same, **inside, "COARSE": self.coarse,
             "CT": together.wide, "EXACT": exact, "BC": FRONT, "BLOCK": PACKED,
             "NORM": s.norm, "FIXED": s.fixed, "BRANCHES_FIXED": s.branches_fixed}, ROW_WARPS,
        )  # fmt: skip
        how = {"BRANCHES_FIXED": s.branches_fixed, "PRECISION": precision}
        self.reduce: Kernel = kernel(
            rows.reduce,
            [NUMBER, kept, NUMBER, kept, kept, NUMBER, NUMBER, torch.int32, *[int] * 5, float],
            {**scales, "BM": t.rows, "BJ": t.hidden, "BK": wide.depth, "NORM": s.norm, **how},
            ROW_WARPS, wide.stages,
        )  # fmt: skip
        self.expand: Kernel = kernel(
            rows.expand,
            [kept, kept, NUMBER, kept, NUMBER, NUMBER, torch.int32, *[int] * 4, float],
            {**scales, "BM": t.rows, "BC": t.channels, "BK": t.hidden, **how}, **row,
        )  # fmt: skip
        self.apply: Kernel = kernel(
            maps.apply, [dtype, dtype, dtype, kept, NUMBER, *[int] * 9],
            {**scales, **tile("apply"), **last, **ends}, self.cut["apply"].warps,
        )  # fmt: skip
        # Running statistics are of their norm's type, as a rule; `track` looks again.
        moved = list(front[:1]) if self.batch_norm else []
        moved += [] if s.branches_fixed else [*per[1], *per[4]]
        self.tracker: Kernel | None = None
        if moved:
            self.tracker = tracker(self.batch_norm, self.levels, tuple(moved))
        self.gather: Kernel = kernel(
            maps.gather, [dtype, dtype, dtype, dtype, NUMBER, kept, NUMBER, *[int] * 9],
            {**scales, **tile("gather"), **last, **ends}, self.cut["gather"].warps,
        )  # fmt: skip
        self.gates: Kernel = kernel(
            gates.gates, [NUMBER, kept, NUMBER, kept, kept, NUMBER, *[int] * 5],
            {**scales, **inside, "CT": together.channels, "EXACT": exact}, ROW_WARPS,
        )  # fmt: skip
        self.settle: Kernel = kernel(
            gates.settle, [NUMBER] * 6 + [int] * 4, {"L": self.levels, "BC": FRONT}, ROW_WARPS
        )
        self.expand_backward: Kernel = kernel(
            rows_backward.expand_backward,
            [kept, kept, NUMBER, kept, kept, NUMBER, NUMBER, kept, kept, NUMBER, NUMBER, NUMBER,
             torch.int32, *[int] * 5],
            {**scales, "BM": t.rows, "BJ": t.hidden, "BK": t.depth, "PRECISION": precision},
            **row,
        )  # fmt: skip
        self.reduce_backward: Kernel = kernel(
            rows_backward.reduce_backward,
            [kept, kept, NUMBER, kept, kept, NUMBER, kept, kept, NUMBER, NUMBER, NUMBER, NUMBER,
             NUMBER, torch.int32, *[int] * 10],
            {**scales, "BM": t.rows, "BR": t.span_rows, "BC": wide.channels, "BJ": t.hidden,
             "NORM": s.norm, "PRECISION": precision}, ROW_WARPS, min(2, wide.stages),
        )  # fmt: skip
        self.scatter: Kernel = kernel(
            maps.scatter,
            [dtype, dtype, dtype, kept, kept, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, *[int] * 11],
            {**scales, **tile("scatter"), "BLOCK": ADDED, **last, "FIXED": not self.batch_norm},
            self.cut["scatter"].warps,
        )  # fmt: skip

    # Memory

    def _memory(self) -> None:
        n, c, j, cs, js, levels = self.n, self.c, self.j, self.cs, self.js, self.levels
        cx, cxs, context = self.cx, self.cxs, self.shape.context
        kept, q = self.kept_type, self.n * self.grids.cells
        norms = norms_layout(levels, c, j)
        self.counters = norms.sections[2][1]
        packed = [(kept, levels * j * cxs), (kept, levels * c * js)]
        rows = [(kept, self.rows * cxs), (kept, self.rows * js), (kept, self.rows * cs)]
        self.saved = Layout(Saved, [*norms.sections, *packed, *rows])
        size, scales = (self.height, self.width), self.settings.scales
        assert self.saved.bytes == saved_bytes(n, c, size, j, scales, self.shape.dtype, context)
        programs = self.n * self.cut["sums"].groups
        tiles = self.row_tiles
        parts = 2 * max(programs * cs, tiles * max(js, cs))
        counts = max(programs, tiles * max(self.j_tiles, self.c_tiles))
        cells = 0 if context or self.same is not None else q * cs
        self.forward = Layout(
            Forward, [(NUMBER, self.rows * cxs), (NUMBER, cells), (NUMBER, parts), (NUMBER, counts)]
        )
        self.span = span(self.rows, self.x_tiles * self.j_tiles)
        self.spans = self.grids.tiles(n, self.span)
        self.backward = Layout(
            Backward,
            [
                (NUMBER, 2 * q * cs), (kept, q * cs), (kept, self.rows * cs),
                (kept, self.rows * cs), (kept, self.rows * js), (kept, self.rows * cxs),
                (NUMBER, 2 * (levels + 1) * n * cs), (NUMBER, 2 * tiles * max(js, cs)),
                (NUMBER, 2 * cs), (NUMBER, 2 * cs), (NUMBER, 3 * levels * cs),
                (NUMBER, 3 * levels * js), (NUMBER, self.spans * (c + cx) * j),
            ],
        )  # fmt: skip
        self.pieces = pieces(levels, c, j, context)
        sizes = (2 + 2 * levels) * c, 2 * levels * j, levels * j * (c + cx)
        self.grads = Layout(Grads, [(NUMBER, size) for size in sizes])
        assert self.grads.bytes == sum(self.pieces) * NUMBER.itemsize

    @cached_property
    def preparing(self) -> int:
        """Programs of `prepare`."""
        copied = up_to(self.j * self.cxs, PACKED) + up_to(self.c * self.js, PACKED)
        coarse = self.n * up_to(self.cxs, self.together.wide) if self.coarse else 0
        return up_to(self.cs, FRONT) + self.levels * (1 + copied) + coarse

    @cached_property
    def adding(self) -> int:
        """Rows of programs of the last launch that add up parts of weights' gradients."""
        blocks = up_to(self.cx * self.j, ADDED) + up_to(self.c * self.j, ADDED)
        return up_to(self.levels * blocks, self.beside)

    @property
    def beside(self) -> int:
        """Programs of such a row."""
        return self.cut["scatter"].blocks

    @cached_property
    def multiplying(self) -> int:
        """Programs of `reduce_backward`."""
        c_tiles = up_to(self.c, self.wide.channels)
        weights = self.spans * self.j_tiles * (self.x_tiles + c_tiles)
        return self.x_tiles * self.row_tiles + weights


@lru_cache(maxsize=4096)
def plan(shape: Shape, settings: Settings) -> Plan:
    return Plan(shape, settings)
