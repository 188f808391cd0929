"""How work is cut into programs: tiles, from a device's memory and processors."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from mssar.kernels.device import Device
from mssar.kernels.grids import Grids, power, up_to

# The numbers below were found on an H200, by trying (LOG.md).
CHANNELS = 64  # of a tile of a map, at most
APART = 16  # the same where channels lie apart
FEW = 16  # positions of a cell up to which they are taken one by one, and no threads share them
SOME = 64  # the same where a tile has CHANNELS
CELLS = 8  # of a tile then
AT_ONCE = 16  # positions of a tile otherwise
APART_AT_ONCE = 64  # the same where channels lie apart
LARGE = 1024  # elements of a tile then
# Tiles that are on their way together: of cells with FEW positions, with SOME, with more.
UP = {"sums": (8, 8, 8), "apply": (4, 4, 4), "gather": (2, 4, 2), "scatter": (4, 4, 4)}
RESIDENT = 12  # programs a processor that a pass which leaves parts is cut into
ROW_WARPS = 4
STAGES = 3  # steps of a product that are on their way together, at most
SPAN = 512  # rows of a part of a weight's gradient, at most


class Pass(NamedTuple):
    """Over a map: cells × positions × channels a tile."""

    cells: int
    positions: int
    channels: int
    up: int  # tiles that are on their way together
    warps: int
    tiles: int  # of a sample
    blocks: int  # of channels
    each: int  # tiles of a program, where it leaves parts
    groups: int  # such programs of a sample


def over_map(name: str, shape: tuple[int, ...], last: bool, grids: Grids, device: Device) -> Pass:
    """Few tiles, since each is compiled: images of other sizes find their kernels there."""
    n, c, height, width = shape
    area = up_to(height, grids.fine[0]) * up_to(width, grids.fine[1])
    channels = min(power(max(c, 16)), CHANNELS if last else APART)
    some = last and channels == CHANNELS
    if last and (area <= FEW or (some and (area <= SOME or name == "sums"))):
        cells, positions, warps = CELLS, 1, 1
    else:
        positions = AT_ONCE if last else min(APART_AT_ONCE, max(4, power(area)))
        cells, warps = LARGE // (positions * channels), 2
    cells = max(1, min(power(grids.cells), cells))
    up = UP[name][(area > FEW) + (area > SOME)]
    up = min(up, max(1, power(area) // positions))
    tiles, blocks = up_to(grids.cells, cells), up_to(c, channels)
    each = max(1, min(tiles, n * tiles * blocks // (RESIDENT * device.processors)))
    return Pass(cells, positions, channels, up, warps, tiles, blocks, each, up_to(tiles, each))


class Samples(NamedTuple):
    """Of a sample's rows and cells together, where regions are told from cells."""

    rows: int  # at once
    cells: int
    channels: int
    wide: int  # channels, where there is less to do


def samples(grids: Grids) -> Samples:
    cells = max(16, power(grids.cells))
    rows, wide = (
        max(16, min(32, power(grids.rows))),
        64 if cells <= 16 else 32 if cells <= 64 else 16,
    )
    return Samples(rows, min(64, cells), min(32, wide), wide)


class Products(NamedTuple):
    """Of rows: sides of tiles."""

    rows: int
    hidden: int
    channels: int
    depth: int  # channels that are summed over at a time
    span_rows: int  # that are, for a weight's gradient
    stages: int


@lru_cache(maxsize=1024)
def products(channels: int, hidden: int, kept: torch.dtype, device: Device) -> Products:
    j, c = (max(16, min(power(n), 64)) for n in (hidden, channels))
    few = channels <= 64  # with 64 rows a tile, few rows would leave processors idle
    rows = 32 if few else 64
    bytes_of_step = 64 * (4 * rows + kept.itemsize * 64) + 8 * 64 * 4
    stages = max(1, min(STAGES, device.shared // (2 * bytes_of_step)))
    return Products(rows, j, min(c, 32) if few else c, c, 64, stages)


def span(rows: int, blocks: int) -> int:
    """Rows of a part of a weight's gradient: parts enough for all processors, none too small."""
    return max(128, min(SPAN, power(rows * blocks // 400)))


def multiple(width: int) -> int:
    """The largest power of two, up to 16, that a width is a multiple of."""
    return math.gcd(16, width)


def padded(numbers: int) -> int:
    """Numbers of a row that begins where whole vectors can be read."""
    return up_to(numbers, 16) * 16
