"""What becomes of a photograph before a network sees it: the paper's augmentation, and testing.

h w pixels, S side of the square that comes out, R with a margin around it, n images.

The same is drawn for an image wherever it is, Pillow's or a tensor on a GPU.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mssar.lab.data.imagefolder import MEAN
from mssar.lab.data.pictures import torchvision_module

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

FILL = [round(value) for value in MEAN]  # beyond an image's edges; near 0 once normalised

Picture: TypeAlias = Image.Image | Tensor  # as v2 takes them; a tensor is uint8, 3 h w


@runtime_checkable
class Augmentation(Protocol):
    """What of a recipe's augmentation is used here."""

    @property
    def size(self) -> int: ...
    @property
    def resize(self) -> int: ...
    @property
    def area(self) -> tuple[float, float]: ...
    @property
    def ratio(self) -> tuple[float, float]: ...
    @property
    def mirror(self) -> float: ...
    @property
    def rotation(self) -> float: ...
    @property
    def jitter(self) -> float: ...


class Draw(NamedTuple):
    """What is drawn for one image: the part that is cut out, then how that is changed."""

    top: int
    left: int
    height: int
    width: int
    angle: float  # degrees, counter-clockwise
    mirrored: bool
    order: tuple[int, int, int]  # in which ADJUSTMENTS come
    factors: tuple[float, float, float]  # of brightness, contrast and saturation; 1: as it is


ADJUSTMENTS = ("adjust_brightness", "adjust_contrast", "adjust_saturation")


def draw(image: Picture, chosen: Augmentation) -> Draw:
    """From torch's generator; of the image only the size matters."""
    v2 = torchvision_module("torchvision.transforms.v2")
    box = v2.RandomResizedCrop(chosen.size, chosen.area, chosen.ratio).make_params([image])
    turn, mirror, *factors = torch.rand(5, dtype=torch.float64).tolist()
    bright, contrast, colour = (1 + chosen.jitter * (2 * share - 1) for share in factors)
    first, second, third = torch.randperm(3).tolist()
    return Draw(
        **box,
        angle=chosen.rotation * (2 * turn - 1),
        mirrored=mirror < chosen.mirror,
        order=(first, second, third),
        factors=(bright, contrast, colour),
    )


def margin(chosen: Augmentation) -> int:
    """Pixels around a square that turning it brings into its corners."""
    turn = math.radians(min(chosen.rotation, 45))  # where corners reach farthest
    return math.ceil(chosen.size * (math.cos(turn) + math.sin(turn) - 1) / 2 - 1e-9)


def cut(image: Picture, drawn: Draw, chosen: Augmentation) -> Picture:
    """The part that was drawn as a square, with a margin on all sides.

    To turn the finished square would leave its corners empty. So as much more of the image is taken
    around the part as the corners may need. Only beyond the image's own edges is there nothing but
    the mean colour.
    """
    functional = torchvision_module("torchvision.transforms.v2.functional")
    more = margin(chosen)
    down, across = round(more * drawn.height / chosen.size), round(more * drawn.width / chosen.size)
    top, bottom = drawn.top - down, drawn.top + drawn.height + down
    left, right = drawn.left - across, drawn.left + drawn.width + across
    full_height, full_width = functional.get_size(image)
    beyond = [max(0, -left), max(0, -top), max(0, right - full_width), max(0, bottom - full_height)]
    top, left = max(0, top), max(0, left)
    bottom, right = min(full_height, bottom), min(full_width, right)
    image = functional.crop(image, top, left, bottom - top, right - left)
    if any(beyond):
        image = functional.pad(image, beyond, fill=FILL)
    return functional.resize(image, [chosen.size + 2 * more] * 2, antialias=True)  # type: ignore[no-any-return]


def finish(image: Picture, drawn: Draw, chosen: Augmentation) -> Picture:
    """What :func:`cut` made, turned, freed of its margin, mirrored and jittered."""
    functional = torchvision_module("torchvision.transforms.v2.functional")
    if drawn.angle:
        bilinear = functional.InterpolationMode.BILINEAR
        image = functional.rotate(image, drawn.angle, bilinear, fill=FILL)
    image = functional.center_crop(image, [chosen.size, chosen.size])
    if drawn.mirrored:
        image = functional.horizontal_flip(image)
    for number in drawn.order:
        if drawn.factors[number] != 1:
            image = getattr(functional, ADJUSTMENTS[number])(image, drawn.factors[number])
    return image


def finish_all(
    squares: UInt8[Tensor, "n R R 3"], draws: Float[Tensor, "n 8"], size: int
) -> UInt8[Tensor, "n S S 3"]:
    """:func:`finish` for many at once, each with what was drawn for it: a row of :func:`packed`.

    One image at a time keeps a GPU waiting for the host. Rounded once, at the end.
    """
    angle, mirrored = draws[:, 0].deg2rad(), draws[:, 1]
    order, factors = draws[:, 2:5], draws[:, 5:8]
    # Not affine_grid, which is a product of matrices, and so in TF32 where that is allowed.
    share = size / squares.shape[1]
    sin, cos = (share * f(angle).view(-1, 1, 1) for f in (torch.sin, torch.cos))
    at = (torch.arange(size, device=squares.device) * 2 + 1) / size - 1
    across, down = (1 - 2 * mirrored).view(-1, 1, 1) * at, at.view(-1, 1)
    grid = torch.stack([cos * across - sin * down, sin * across + cos * down], -1)
    x = squares.permute(0, 3, 1, 2).float()
    x = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    for place in range(3):
        for number in range(3):
            chosen = order[:, place] == number
            factor = torch.where(chosen, factors[:, number], 1.0).view(-1, 1, 1, 1)
            x = (factor * x + (1 - factor) * _opposite(x, number)).clamp(0, 255)
    return x.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _opposite(x: Float[Tensor, "n 3 S S"], number: int) -> Tensor | float:
    """What an adjustment with factor 0 makes of images: black, their mean grey, greys."""
    if number == 0:
        return 0.0
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    grey = 0.2989 * red + 0.587 * green + 0.114 * blue  # torchvision's
    return grey if number == 2 else grey.mean((2, 3), keepdim=True)


def packed(drawn: Draw | None) -> list[float]:
    """For :func:`finish_all`; nothing drawn changes nothing."""
    if drawn is None:
        return [0, 0, 0, 1, 2, 1, 1, 1]
    return [drawn.angle, float(drawn.mirrored), *drawn.order, *drawn.factors]


def testing(image: Picture, chosen: Augmentation) -> Picture:
    """The shorter side resized and the centre cut out."""
    functional = torchvision_module("torchvision.transforms.v2.functional")
    height, width = functional.get_size(image)
    if max(height, width) > 16 * min(height, width):  # resized whole, it might fill the memory
        side = 16 * min(height, width)
        image = functional.center_crop(image, [min(height, side), min(width, side)])
    image = functional.resize(image, [chosen.resize], antialias=True)
    return functional.center_crop(image, [chosen.size] * 2)  # type: ignore[no-any-return]


def seed_of(seed: int, epoch: int, index: int) -> int:
    """A generator's seed for one image in one epoch, whoever reads it and whenever."""
    digest = hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Transform:
    """What happens to each image of a split in an epoch; it can be sent to other processes."""

    augmentation: Augmentation
    train: bool
    seed: int
    epoch: int

    @property
    def side(self) -> int:
        """Of what is cut out."""
        chosen = self.augmentation
        return chosen.size + 2 * margin(chosen) if self.train else chosen.size

    def draw(self, image: Picture, index: int) -> Draw | None:
        """What is drawn for an image by its number in the data set; nothing in testing."""
        if not self.train:
            return None
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds CUDA's generators too.
            torch.default_generator.manual_seed(seed_of(self.seed, self.epoch, index))
            return draw(image, self.augmentation)

    def cut(self, image: Picture, drawn: Draw | None) -> UInt8[Tensor, "R R 3"]:
        """What is left to do, :func:`finish_all` does."""
        chosen = self.augmentation
        return pixels(cut(image, drawn, chosen) if drawn else testing(image, chosen))

    def whole(self, image: Picture, drawn: Draw | None) -> UInt8[Tensor, "S S 3"]:
        """Everything, one image at a time."""
        chosen = self.augmentation
        if drawn is None:
            return self.cut(image, drawn)
        return pixels(finish(cut(image, drawn, chosen), drawn, chosen))


def pixels(image: Picture) -> UInt8[Tensor, "h w 3"]:
    if isinstance(image, Tensor):
        return image.permute(1, 2, 0)
    return torch.from_numpy(np.array(image))
