"""An explanation as one picture: a column a layer, for each image a row a scale.  H W map.

One image of all maps, for a hundred small axes would take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

Importance: TypeAlias = Any  # it stands above this file
LAYERS, IMAGES = 16, 4  # at most
SIDE, GAP = 48, 6  # of a map, between maps; in points
NAMES, TITLES, NUMBERS, END = 64, 96, 24, 56  # left of the maps, above, below and right of them
COLOURS = "viridis"  # equal steps of weight look equal, in grey and to the colour-blind as well
NO_MAP = float("nan")


def drawn(blocks: Sequence[Importance]) -> bytes | None:
    """A PNG; None where matplotlib is not installed. A column has its own range of colours."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    layers, total = len(blocks), len(blocks[0].regions[0])
    blocks, images = _spaced(blocks, LAYERS), min(IMAGES, total)
    rows = _rows(blocks)
    ranges = [block.mean.new_tensor(_range(block, images)) for block in blocks]
    canvas = mosaic(blocks, images, ranges)
    height, width = canvas.shape
    across, down = NAMES + width + END, TITLES + height + NUMBERS
    figure = Figure(figsize=(across / 72, down / 72), facecolor="white")
    place = (NAMES / across, NUMBERS / down, width / across, height / down)
    axes = figure.add_axes(place)
    axes.imshow(canvas.numpy(), cmap=COLOURS, vmin=0, vmax=1, interpolation="nearest")
    axes.axis("off")
    style: dict[str, Any] = {"size": 7, "color": "#1b1b1f", "parse_math": False}
    shown = "Mean weight over channels, low to high as dark to light in each layer's range"
    if len(blocks) < layers or images < total:
        shown = f"{shown}; {len(blocks)} of {layers} layers, {images} of {total} images"
    figure.text(6 / across, 1 - 6 / down, shown, va="top", wrap=True, **style)
    for number, (block, (low, high)) in enumerate(zip(blocks, ranges, strict=True)):
        x = number * (SIDE + GAP) + SIDE / 2
        name = block.name.removesuffix(".recalibrate") or "layer"
        axes.text(x - 8, -GAP, name[-22:], rotation=45, ha="left", va="bottom", **style)
        digits = 2 if high - low > 0.02 else 3
        reach = f"{low:.{digits}f}–{high:.{digits}f}"
        axes.text(x, height + GAP, reach, ha="center", va="top", **style)
    for number in range(images * len(rows)):
        image, row = divmod(number, len(rows))
        y = _top(number, len(rows)) + SIDE / 2
        axes.text(-GAP, y, rows[row], ha="right", va="center", **style)
        if row == 0:
            above = y - SIDE / 2
            axes.text(-GAP, above, f"image {image}", weight="bold", ha="right", va="top", **style)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def mosaic(
    blocks: Sequence[Importance], images: int, ranges: Sequence[Tensor]
) -> Float[Tensor, "H W"]:
    """The mean maps in their places, each layer's range stretched to 0 … 1."""
    rows = _rows(blocks)
    height = _top(images * len(rows) - 1, len(rows)) + SIDE
    canvas = torch.full((height, len(blocks) * (SIDE + GAP) - GAP), NO_MAP)
    for column, (block, (low, high)) in enumerate(zip(blocks, ranges, strict=True)):
        maps = dict(zip((f"scale {s}" for s in block.scales), block.mean_per_scale, strict=True))
        maps["Z"] = block.mean
        for row, name in enumerate(rows):
            if name not in maps:
                continue
            shares = (maps[name][:images] - low) / (high - low).clamp(min=1e-3)
            cells = F.interpolate(shares[:, None], (SIDE, SIDE))[:, 0]
            left = column * (SIDE + GAP)
            for image, cell in enumerate(cells):
                top = _top(image * len(rows) + row, len(rows))
                canvas[top : top + SIDE, left : left + SIDE] = cell
    return canvas


def _rows(blocks: Sequence[Importance]) -> list[str]:
    """Every scale of any layer, and Z where that is something else."""
    scales = dict.fromkeys(scale for block in blocks for scale in block.scales)
    several = any(len(block.scales) > 1 for block in blocks)
    return [f"scale {scale}" for scale in scales] + ["Z"] * several


def _range(block: Importance, images: int) -> tuple[float, float]:
    values = torch.cat([z[:images].flatten() for z in block.mean_per_scale])
    return float(values.min()), float(values.max())


def _top(row: int, rows: int) -> int:
    return row * (SIDE + GAP) + row // rows * 2 * GAP  # images stand a little apart


def _spaced(blocks: Sequence[Importance], most: int) -> list[Importance]:
    """The first, the last, and others evenly between."""
    if len(blocks) <= most:
        return list(blocks)
    return [blocks[round(i * (len(blocks) - 1) / (most - 1))] for i in range(most)]
