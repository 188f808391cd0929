"""How work is cut into programs: sizes of tiles, and how many.  N batch, C channels, H W map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.geometry import Geometry, power

# The numbers below were found on an H200, by trying (LOG.md).
CHANNELS = 64  # of a tile of a map, at most
ELEMENTS = 2048  # of a tile of a map, at most
SCATTERED = 1024  # the same where channels lie apart or regions are many, for want of registers
WARPS_OF_MAPS = 2
WARPS = 4  # of products; 8, with tiles of 128 × 256, gave wrong numbers in half types (LOG.md)
STAGES = 3  # rows of a tile that are on their way together
GROUPED_STAGES = 5  # the same, for passes with fewer programs
SUMMED_STAGES = 8  # the same, where these are very few and read only one map
RESIDENT = 8  # programs a processor, for passes that need not keep a sample together
KEPT = 1024  # sums that a program of the others keeps, at most, unless one sample has more
SPAN = 512  # rows of a part of a weight's gradient, at most
SHARED = 512  # channels from which so many products begin with the same that it is made once
THROUGH = 2  # steps over hidden channels that are on their way together, where there are many
LATER = 4096  # rows up to which statistics have so few parts that each reader adds them up
REGISTERS = 8192  # numbers read at once
TOGETHER = 4096  # cells × channels of a sample's regions, likewise


@dataclass(frozen=True)
class Pass:
    """How a pass over a map is cut. A tile is cells × columns × channels."""

    cells: int
    stages: int  # rows of a tile that are on their way together
    unroll: bool = False  # not rows but tiles, with all their rows

    def how(self) -> dict[str, Any]:
        return {"CELLS": self.cells, "STAGES": self.stages, "UNROLL": self.unroll}


@dataclass(frozen=True)
class Plan:
    channels: int
    columns: int
    blocks: int  # of channels
    programs: int  # of passes whose programs take tile after tile:
    applied: Pass  # where sigmoids are to be worked out
    scattered: Pass
    group: int  # samples of a program of the others:
    groups: int
    summed: Pass
    gathered: Pass
    grouped_warps: int
    nested: bool  # a group is one sample, and its regions hold equally many cells


def plan(x: Tensor, geo: Geometry, *, weighed: bool) -> Plan:
    """For a map whose cells get weights, or do not."""
    n, c, height, width = x.shape
    processors = _processors(x.device)
    # What is read of a sample at once must fit in registers too.
    most = max(map(mul, regions(geo.grids, 1), members(geo, geo.grids)))
    channels = max(1, min(power(c), CHANNELS, TOGETHER // most))
    # Channels last: several of them are read at once.
    easy = (x.stride(1) == 1 or c == 1) and most * channels <= SCATTERED
    room = ELEMENTS if easy else SCATTERED
    tall, wide = -(-height // geo.fine[0]), -(-width // geo.fine[1])
    columns = min(power(wide), 64, max(1, room // channels))
    fit = max(1, room // (columns * channels))
    blocks = -(-c // channels)
    cells = min(fit, power(n * geo.cells))
    while (
        cells > 1
        and cells * columns * channels > 1024
        and -(-n * geo.cells // cells) * blocks < RESIDENT * processors // 2
    ):
        cells //= 2
    tiles = -(-n * geo.cells // cells)
    applied = scattered = Pass(cells, min(STAGES, tall))
    if easy and weighed and tiles * blocks > RESIDENT * processors:
        # A tile of few rows waits for its weights first, unless they come with the one before.
        if tall <= 4:
            applied = Pass(max(1, cells // 2), 2, unroll=True)
        if tall <= 2:
            scattered = applied
    group = max(1, min(n * blocks // (4 * processors), n, KEPT // (power(geo.cells) * channels)))
    groups = -(-n // group)
    # Small maps with many programs: they hide each other's waiting, and barriers cost less.
    alone = easy and tall <= 4 and groups * blocks > 4 * processors
    grouped = min(fit // 2 if alone else fit, power(group * geo.cells))
    summed = gathered = Pass(max(1, grouped), min(GROUPED_STAGES, tall))
    if alone and weighed and tall <= 2:
        summed = Pass(max(1, grouped // 2), 2, unroll=True)
    elif easy and groups * blocks <= 2 * processors:
        summed = Pass(max(1, grouped), min(SUMMED_STAGES, tall))
    return Plan(
        channels, columns, blocks, min(tiles, -(-RESIDENT * processors // blocks)), applied,
        scattered, group, groups, summed, gathered, 1 if alone else WARPS_OF_MAPS,
        group == 1 and geo.nested,
    )  # fmt: skip


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4  # the interpreter's programs come one after the other


def members(geo: Geometry, grids: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Fine cells of a region, at most, a grid; the next power of two."""
    return tuple(power(-(-geo.fine[0] // grid[0]) * -(-geo.fine[1] // grid[1])) for grid in grids)


def regions(grids: Sequence[tuple[int, ...]], group: int) -> tuple[int, ...]:
    """Regions of a group of samples, a grid; the next power of two."""
    return tuple(power(group * grid[0] * grid[1]) for grid in grids)


def side(width: int, most: int = 64) -> int:
    """A side of a tile of a product."""
    return max(16, min(power(width), most))


def multiple(*widths: int) -> int:
    """The largest power of two, up to 16, that all widths are multiples of."""
    return math.gcd(16, *widths)


def chunk(parts: int, width: int) -> int:
    """How many parts of so many numbers are read at once."""
    return max(1, min(power(parts), REGISTERS // width))


def span(rows: int, tiles: int) -> int:
    """Rows of a part of a weight's gradient: parts enough for all processors, none too small."""
    return max(128, min(SPAN, power(rows * tiles // 400)))


@dataclass(frozen=True)
class Products:
    """How the branches' products are cut: sides of tiles."""

    rows: int
    channels: int
    hidden: int
    deep: int  # channels that are summed over at a time
    stages: int
    through: int  # the same where hidden channels are summed over
    expanded: tuple[int, int]  # rows and channels of a tile of the gates, in training
    evaluated: tuple[int, int]  # the same in evaluation, where the sigmoid follows
    shared: bool  # what products begin with is made once, by a launch of its own
    later: bool  # statistics of hidden layers are added up by their readers


def products(rows: int, channels: int, hidden: int, *, small: bool) -> Products:
    """For numbers of a small type, or of float32's size."""
    c, j, few = side(channels), side(hidden), side(channels, 32)
    shared = channels >= SHARED
    later = hidden <= j and rows <= LATER and not shared  # one tile has all hidden channels
    if channels > 128:
        gates = evaluated = 64, c
        if shared and small:
            gates, evaluated = (128, 128 if channels > 1024 else 64), (128, 128)
        through = THROUGH if shared and hidden > j else 1
        return Products(64, c, j, c, 3, through, gates, evaluated, shared, later)
    if channels > 64:
        gates = 64, few
        return Products(64, few, j, few, 3, 1, gates, gates, shared, later)
    # With 64 rows a tile, few rows would leave processors idle.
    gates = (64 if rows > 4096 else 32), few
    return Products(gates[0], few, j, c, 2, 1, gates, gates, shared, later)
