"""Images whose class is an arrangement: the embedded default.  N images, in chunks of n.

Every image holds the same six shapes, evenly spaced on a circle: a disc, and a square, a triangle,
a cross, a ring and an hourglass in some order. The class is *which two of the five stand next to
the disc*, on either side: ten pairs, ten classes. The rest is chance, drawn alike for every class:
the order of the two and of the other three, how far the circle is turned and where its centre
lies, the size of each shape and its place to within a pixel, its fill, its shade of the colour it
has in every image, specks in the same colours, a mottled background, noise weak or strong.

Why this and not another:

- What is in an image never tells the class, as every image has the same shapes and colours.
- Nor does the place of any one shape. The circle is turned by any of its steps, so each shape is
  equally often anywhere on it, whatever the class. "The disc is above the cross" could not have
  that: the disc would tend to be high. Only what is where *relative to the disc* decides, so a
  shape matters in one part of an image and not in another, and the image itself says in which.
- Ten classes come of it by themselves, none left out.
- A shift of a few pixels moves everything together and changes no class. A mirror would not
  either, but nothing here needs one.
- Two shapes share a colour, so that colour helps but form decides. With a colour for each shape,
  and weak noise, a plain ResNet-8 made no error after six epochs; with colours dealt at random it
  learnt nothing in eight.
- The noise differs from image to image: some are plain to see, to learn the rule from, and some
  so poor that a few errors remain.

Plain networks alone were tried while it was made. Nothing in it was chosen by how a recalibrated
one does.

The arithmetic is on integers and the random words are those of PCG64, which numpy promises to
keep, so a seed gives the same bytes everywhere. Lengths are in sixteenths of a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from mssar.lab.data.dataset import Arrays, Split

if TYPE_CHECKING:
    from jaxtyping import Int16, Int64, UInt8, UInt64

Array: TypeAlias = np.ndarray[Any, Any]
Inside: TypeAlias = Callable[["Array", "Array", "Array"], "Array"]

SIZE = 32  # pixels
UNIT = 16  # of a pixel
STEPS = 36  # in which the circle turns
CHUNK = 500  # images at a time, so that they stay in the processor's cache
NOISE = (30, 230)  # the most that noise adds to an image, of 255: from, to
SPECKS = 8
SHADE = 50  # how much darker the stripes of a fill are
MARGIN = 8  # pixels around the canvas, so that what crosses its edge needs no care

# Where a shape of radius r is, by the distances u to the right and v down from its middle.
SHAPES: dict[str, Inside] = {
    "disc": lambda u, v, r: u * u + v * v <= r * r,
    "square": lambda u, v, r: np.maximum(abs(u), abs(v)) * 8 <= r * 7,
    "triangle": lambda u, v, r: (v * 8 <= r * 7) & (abs(u) * 2 <= v + r),
    "cross": lambda u, v, r: (np.minimum(abs(u), abs(v)) * 3 <= r) & (u * u + v * v <= r * r),
    "ring": lambda u, v, r: (u * u + v * v <= r * r) & ((u * u + v * v) * 4 > r * r),
    "hourglass": lambda u, v, r: (abs(u) <= abs(v)) & (abs(v) * 8 <= r * 7),
}
# Of the shapes, in their order: two are red, two green, two blue.
RED, GREEN, BLUE = (230, 60, 50), (60, 200, 70), (70, 90, 240)
COLOURS = (RED, GREEN, GREEN, BLUE, BLUE, RED)
# Whether every other two pixels are darker down and along the image: plain, stripes, chequers.
FILLS = ((0, 0), (0, 0), (1, 0), (0, 1), (1, 1), (1, 1))

OTHERS = tuple(SHAPES)[1:]
PAIRS = tuple(combinations(range(1, len(SHAPES)), 2))  # shapes next to the disc, by class
CLASSES = tuple(f"disc between {OTHERS[a - 1]} and {OTHERS[b - 1]}" for a, b in PAIRS)


@dataclass(frozen=True, eq=False)
class Scenes:
    """What images show. Shapes are in the order of ``SHAPES``."""

    labels: Int64[Array, " N"]
    slots: Int64[Array, "N 6"]  # of the circle, clockwise from the disc
    positions: Int64[Array, "N 6 2"]  # x and y of the middle
    radii: Int64[Array, "N 6"]
    fills: Int64[Array, "N 6"]  # in FILLS

    def __len__(self) -> int:
        return len(self.labels)


class Source:
    """Random integers from a seed, one stream of several."""

    def __init__(self, seed: int, stream: int) -> None:
        self._pcg = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream,)))

    def words(self, *shape: int) -> UInt64[Array, " ..."]:
        return self._pcg.random_raw(math.prod(shape)).reshape(shape)

    def within(self, low: int, high: int, *shape: int) -> Int64[Array, " ..."]:
        """From low to high, both included."""
        share = (self.words(*shape) >> np.uint64(32)) * np.uint64(high - low + 1)
        return low + (share >> np.uint64(32)).astype(np.int64)

    def orders(self, number: int, *shape: int) -> Int64[Array, " ..."]:
        """Permutations, along the last axis."""
        return np.argsort(self.words(*shape, number), axis=-1, kind="stable")

    def octets(self, *shape: int) -> UInt8[Array, " ..."]:
        count = math.prod(shape)
        words = self.words(-(-count // 8)).astype("<u8", copy=False)
        return words.view(np.uint8)[:count].reshape(shape)


def load(seed: int = 0, train: int = 10_000, test: int = 2_000) -> Arrays:
    """The data set of a seed. The test images do not depend on how many there are to train."""
    if seed < 0:
        raise ValueError(f"seed is 0 or more; got {seed}")
    if min(train, test) < 1:
        raise ValueError(f"train and test are numbers of images, 1 or more; got {train}, {test}")
    splits = []
    for stream, number in enumerate((train, test)):
        images, scenes = make(Source(seed, stream), number)
        splits.append(Split(torch.from_numpy(images), torch.from_numpy(scenes.labels)))
    mean, std = _moments(splits[0].images.numpy())
    return Arrays("arrangements", CLASSES, splits[0], splits[1], mean, std)


def make(source: Source, number: int) -> tuple[UInt8[Array, "N 32 32 3"], Scenes]:
    """Images, and what they show."""
    scenes = compose(source, number)
    images = np.empty((number, SIZE, SIZE, 3), np.uint8)
    for first in range(0, number, CHUNK):
        part = slice(first, first + CHUNK)
        images[part] = paint(source, Scenes(**{k: v[part] for k, v in vars(scenes).items()}))
    return images, scenes


def compose(source: Source, number: int) -> Scenes:
    """Which shape goes where: as many of each class as of any other, or one more."""
    labels = source.orders(number) % len(CLASSES)
    near = np.array(PAIRS)[labels]
    far = np.array([sorted({1, 2, 3, 4, 5} - {*pair}) for pair in PAIRS])[labels]
    near = np.take_along_axis(near, source.orders(2, number), 1)
    far = np.take_along_axis(far, source.orders(3, number), 1)
    clockwise = np.concatenate([np.zeros_like(near[:, :1]), near[:, :1], far, near[:, 1:]], 1)
    slots = np.argsort(clockwise, 1)

    turn = np.arange(STEPS) * (2 * math.pi / STEPS)
    circle = np.rint(np.stack([np.cos(turn), np.sin(turn)], 1) * 1024).astype(np.int64)
    at = circle[(source.within(0, STEPS - 1, number, 1) + slots * (STEPS // 6)) % STEPS]
    reach = source.within(152, 168, number, 1, 1)  # 9.5 to 10.5 pixels from the centre
    centre = SIZE * UNIT // 2 + source.within(-16, 16, number, 1, 2)
    return Scenes(
        labels,
        slots,
        positions=centre + (at * reach >> 10) + source.within(-12, 12, number, 6, 2),
        radii=source.within(52, 64, number, 6),
        fills=source.orders(6, number),
    )


def paint(source: Source, scenes: Scenes) -> UInt8[Array, "n 32 32 3"]:
    """Background, specks, shapes, noise."""
    n = len(scenes)
    canvas = np.zeros((n, SIZE + 2 * MARGIN, SIZE + 2 * MARGIN, 3), np.int16)
    image = canvas[:, MARGIN:-MARGIN, MARGIN:-MARGIN]
    image[:] = _mottled(source, n)
    colours, fills = np.array(COLOURS, np.int16), np.array(FILLS, np.int16)

    places = source.within(0, SIZE * UNIT - 1, SPECKS, n, 2)
    radii = source.within(12, 24, SPECKS, n)
    specks = colours[source.within(0, len(COLOURS) - 1, SPECKS, n)]
    for i in range(SPECKS):
        _stamp(canvas, SHAPES["disc"], 2, places[i], radii[i], specks[i], fills[np.zeros(n, int)])

    tints = colours + source.within(-24, 24, n, 6, 3).astype(np.int16)
    for i, inside in enumerate(SHAPES.values()):
        place, radius, fill = scenes.positions[:, i], scenes.radii[:, i], fills[scenes.fills[:, i]]
        _stamp(canvas, inside, 5, place, radius, tints[:, i], fill)

    # The sum of two even distributions: most of the noise is small.
    octets = source.octets(2, *image.shape)
    noise = octets[0].astype(np.int16) + octets[1] - 255
    strength = source.within(*NOISE, n, 1, 1, 1).astype(np.int32)
    noisy: Array = (image + (noise * strength >> 8)).clip(0, 255)
    return noisy.astype(np.uint8)


def _stamp(
    canvas: Int16[Array, "n S S 3"],
    inside: Inside,
    reach: int,  # pixels from the middle to the edge of the stamp
    place: Int64[Array, "n 2"],
    radius: Int64[Array, " n"],
    colour: Int16[Array, "n 3"],
    fill: Int16[Array, "n 2"],
) -> None:
    """Paint one shape on each image, in place."""
    first = (place // UNIT - reach)[:, :, None]  # n 2 1
    pixels = first + np.arange(2 * reach + 1)  # n 2 k
    # Four points a pixel, for soft edges.
    points = first * UNIT + (np.arange(4 * reach + 2) * UNIT // 2 + UNIT // 4) - place[:, :, None]
    points = points.astype(np.int32)
    u, v = points[:, 0, None, :], points[:, 1, :, None]
    mask = inside(u, v, radius.astype(np.int32)[:, None, None]).view(np.int8)  # n 2k 2k
    rows = mask[:, 0::2] + mask[:, 1::2]
    cover = (rows[:, :, 0::2] + rows[:, :, 1::2]).astype(np.int16)[..., None]  # of 4

    x, y = pixels[:, 0, None, :], pixels[:, 1, :, None]
    darker = (y // 2 * fill[:, 0, None, None] + x // 2 * fill[:, 1, None, None]) & 1
    wanted = colour[:, None, None, :] - (darker * SHADE).astype(np.int16)[..., None]
    at = np.arange(len(canvas))[:, None, None], y + MARGIN, x + MARGIN
    below = canvas[at]
    canvas[at] = below + ((wanted - below) * cover >> 2)


def _mottled(source: Source, n: int) -> Int16[Array, "n 32 32 3"]:
    """Colours at every eighth pixel, and between them what lies between them."""
    knots = source.within(40, 150, n, 5, 5, 3).astype(np.float32)
    after = np.arange(SIZE)[:, None] - np.arange(5) * 8
    weights = (8 - abs(after)).clip(0).astype(np.float32)  # 32 5, of 8
    # Small integers, so exact in float32 and in any order of summation.
    columns = np.einsum("yk,nkjc->nyjc", weights, knots, optimize=True)
    mixed: Array = np.einsum("xj,nyjc->nyxc", weights, columns, optimize=True)
    return (mixed / 64).astype(np.int16)


def _moments(
    images: UInt8[Array, "N 32 32 3"],
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation of each colour, from how often each value occurs."""
    values = np.arange(256)
    means, stds = [], []
    for colour in range(3):
        counts = np.bincount(images[..., colour].ravel(), minlength=256)
        mean = int(counts @ values) / int(counts.sum())
        square = int(counts @ values**2) / int(counts.sum())
        means.append(mean)
        stds.append(math.sqrt(square - mean**2))
    return (means[0], means[1], means[2]), (stds[0], stds[1], stds[2])
