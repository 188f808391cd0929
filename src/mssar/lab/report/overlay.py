"""A figure of what layers see: pictures, and the weights of their positions laid over them.

N pictures, H W pixels, h w a map's size. Lengths in the figure are in inches, from its upper left.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mssar.coordinates import CoordinateSet, Regional, Sliding
from mssar.explain import Importance
from mssar.extras import advice

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

COLOURS = "viridis"  # equal steps of weight look equal, in grey and to the colour-blind as well
OPACITY = 0.63
GREY = (20, 255)  # the darkest and the lightest of a picture below, of 255
INK, PALE, WRONG = "#1b1b1f", "#6b6b76", "#b3261e"

MARGIN, CAPTION = 0.3, 1.55  # around it all; a row's words, left of its picture
CELL, GAP, BETWEEN = 1.25, 0.07, 0.3  # a picture's side, between pictures, between blocks
TITLE, HEADER, BAR = 0.62, 0.98, 0.085
ABREAST, NARROWEST = 12, 6.7  # overlays in a row, about; the title's width
RESOLUTION, LARGEST = 160, 20_000  # pixels an inch, and pixels of a side


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as the network got it, and what the network said."""

    pixels: UInt8[Tensor, "H W 3"]
    name: str
    guess: str
    probability: float
    truth: str | None = None  # where it is known


@dataclass(frozen=True, eq=False)
class Overlay:
    """The weights of one scale, or of all together; where regions meet, if there are any."""

    title: str
    maps: Float[Tensor, "N h w"]
    borders: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # below rows, right of columns


@dataclass(frozen=True, eq=False)
class Layer:
    """One block's overlays."""

    name: str
    note: str
    overlays: tuple[Overlay, ...]

    @property
    def range(self) -> tuple[float, float]:
        """Least and greatest weight; a little apart where they are the same."""
        values = torch.cat([overlay.maps.flatten() for overlay in self.overlays])
        low, high = map(float, values.aminmax())
        room = max(0.0, 0.01 - (high - low)) / 2
        return low - room, high + room


def layer_of(block: Importance, channel: int | None = None) -> Layer:
    """What is drawn of a block: its scales and all together, of one channel or their mean."""

    def chosen(z: Float[Tensor, "N C h w"]) -> Float[Tensor, "N h w"]:
        return z.mean(1) if channel is None else z[:, channel]

    overlays = [
        Overlay(_titled(s, block.size), chosen(z), _borders(s, block.size))
        for s, z in zip(block.sets.sets, block.per_scale, strict=True)
    ]
    if len(overlays) > 1:
        overlays.append(Overlay("all scales: Z", chosen(block.z)))
    height, width = block.size
    of = f"{block.channels} channels" if channel is None else f"channel {channel}"
    name = block.name.removesuffix(".recalibrate")
    return Layer(name, f"{height}×{width}, {of}", tuple(overlays))


def _titled(within: CoordinateSet, size: tuple[int, int]) -> str:
    if isinstance(within, Sliding):
        side = 2 * within.radius(size) + 1
        return f"windows {side}×{side}" if side < 2 * max(size) - 1 else "whole map"
    rows, columns = within.grid(size)
    return f"{rows}×{columns} regions" if rows * columns > 1 else "whole map"


def _borders(
    within: CoordinateSet, size: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(within, Regional):
        return (), ()
    rows, columns = (tuple(accumulate(within.runs(length)[:-1])) for length in size)
    return rows, columns


def draw(pictures: Sequence[Picture], layers: Sequence[Layer], title: str, note: str) -> bytes:
    """A PNG: a row a picture, in it the overlays of each block.

    Blocks that do not fit beside each other go below, with the pictures once more. A block has one
    scale of colours for all pictures and overlays, above them.
    """
    figure_class, canvas_class, colours = _matplotlib()
    widest = max(len(layer.overlays) for layer in layers)
    abreast = max(1, ABREAST // widest)
    lines = [layers[i : i + abreast] for i in range(0, len(layers), abreast)]
    block = widest * (CELL + GAP) - GAP + BETWEEN
    left = MARGIN + CAPTION + CELL + BETWEEN  # where the blocks begin
    width = max(NARROWEST, left + min(abreast, len(layers)) * block - BETWEEN + MARGIN)
    line = HEADER + len(pictures) * (CELL + GAP)
    height = TITLE + len(lines) * (line + BETWEEN) - BETWEEN + 2 * MARGIN

    figure = figure_class(figsize=(width, height), dpi=_fitting(width, height), facecolor="white")
    canvas_class(figure)
    sheet = Sheet(figure, width, height, colours)
    sheet.write(MARGIN, MARGIN, title, size=13, weight="bold")
    sheet.write(MARGIN, MARGIN + 0.27, note, size=9, color=PALE)
    for number, beside in enumerate(lines):
        top = MARGIN + TITLE + number * (line + BETWEEN)
        rows = [top + HEADER + i * (CELL + GAP) for i in range(len(pictures))]
        for picture, y in zip(pictures, rows, strict=True):
            sheet.caption(MARGIN, y, picture)
            sheet.paint(MARGIN + CAPTION, y, picture.pixels.numpy())
        for place, layer in enumerate(beside):
            sheet.layer(left + place * block, top, rows, layer, pictures)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _fitting(width: float, height: float) -> float:
    return min(RESOLUTION, LARGEST / max(width, height))


def _matplotlib() -> tuple[Any, Any, Any]:
    """Imported where it is needed; its parts alone, so that no window is ever thought of."""
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError(f"figures need matplotlib: {advice('lab')}") from None
    return Figure, FigureCanvasAgg, colormaps[COLOURS]


class Sheet:
    """One pair of axes as large as the figure: a hundred small ones would take a minute."""

    def __init__(self, figure: Any, width: float, height: float, colours: Any) -> None:
        self.axes = figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
        self.axes.axis("off")
        self.colours = colours

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        usual = {"size": 8, "color": INK, "va": "top", "ha": "left", "parse_math": False}
        self.axes.text(x, y, text, **usual | style)

    def paint(self, x: float, y: float, pixels: Any, **options: Any) -> None:
        """A picture of any size, in a cell."""
        width, height = options.pop("width", CELL), options.pop("height", CELL)
        extent = (x, x + width, y + height, y)
        self.axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", **options)

    def caption(self, x: float, y: float, picture: Picture) -> None:
        """What it is called, and what the network takes it for."""
        guess = textwrap.wrap(picture.guess, 21, max_lines=3, placeholder=" …")
        lines: list[tuple[str, dict[str, Any]]] = [(_shortened(picture.name), {"color": PALE})]
        lines += [(text, {"weight": "bold", "size": 8.5}) for text in guess]
        lines += [(f"{picture.probability:.1%} sure", {})]
        if picture.truth is not None:
            right = picture.truth == picture.guess
            told = "which is right" if right else f"really {picture.truth}"
            style = {"color": PALE if right else WRONG}
            lines += [(text, style) for text in textwrap.wrap(told, 23, max_lines=2)]
        y += (CELL - 0.155 * len(lines)) / 2
        for number, (text, style) in enumerate(lines):
            self.write(x, y + 0.155 * number, text, **style)

    def layer(
        self, x: float, top: float, rows: list[float], layer: Layer, pictures: Sequence[Picture]
    ) -> None:
        """A block: its name, its colours, and its overlays row by row."""
        low, high = layer.range
        width = len(layer.overlays) * (CELL + GAP) - GAP
        self.write(x, top, layer.name, size=10.5, weight="bold")
        self.write(x, top + 0.2, layer.note, color=PALE)
        self.bar(x, top + 0.43, width, low, high)
        for number, overlay in enumerate(layer.overlays):
            across = x + number * (CELL + GAP)
            self.write(
                across + CELL / 2, top + HEADER - 0.05, overlay.title, ha="center", va="bottom"
            )
            for y, picture, z in zip(rows, pictures, overlay.maps, strict=True):
                self.paint(across, y, _grey(picture.pixels), cmap="gray", vmin=0, vmax=255)
                self.paint(across, y, z.numpy(), **self.shading(low, high))
                self.borders(across, y, overlay)

    def shading(self, low: float, high: float) -> dict[str, Any]:
        return {"cmap": self.colours, "vmin": low, "vmax": high, "alpha": OPACITY}

    def borders(self, x: float, y: float, overlay: Overlay) -> None:
        height, width = overlay.maps.shape[1:]
        rows, columns = overlay.borders
        style = {"colors": "white", "linewidth": 0.6, "alpha": 0.7}
        self.axes.hlines([y + CELL * row / height for row in rows], x, x + CELL, **style)
        self.axes.vlines([x + CELL * col / width for col in columns], y, y + CELL, **style)

    def bar(self, x: float, y: float, width: float, low: float, high: float) -> None:
        """The scale of colours, with weights at its ends and between."""
        ramp, place = torch.linspace(low, high, 256)[None], {"width": width, "height": BAR}
        ground = torch.full((1, 1), sum(GREY) / 2)  # as the overlays have it
        self.paint(x, y, ground.numpy(), cmap="gray", vmin=0, vmax=255, **place)
        self.paint(x, y, ramp.numpy(), **self.shading(low, high), **place)
        digits = 2 if high - low > 0.05 else 3
        ticks = (0, 0.25, 0.5, 0.75, 1) if width > 3 * CELL else (0, 0.5, 1)
        for share in ticks if width > CELL / 2 else ():
            ha = "left" if share == 0 else "right" if share == 1 else "center"
            value = low + share * (high - low)
            self.write(x + share * width, y + BAR + 0.03, f"{value:.{digits}f}", size=7, ha=ha)


def _grey(pixels: UInt8[Tensor, "H W 3"]) -> Any:
    """Brightness alone, stretched to the range in which colours laid over it can be told."""
    shades = pixels.float() @ torch.tensor([0.299, 0.587, 0.114])
    least, most = shades.aminmax()
    share = (shades - least) / (most - least).clamp(min=1)
    return (GREY[0] + share * (GREY[1] - GREY[0])).numpy()


def _shortened(name: str, most: int = 22) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"
