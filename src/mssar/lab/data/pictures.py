"""One image: from a file's bytes to the square that a network takes.

h w pixels, S side of the square that comes out.

Orientation in EXIF is ignored, as it is wherever ImageNet is trained on: published numbers come
from images as they are stored. Alpha is dropped and deeper colours are cut to 8 bits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mssar.lab.data.imagefolder import MEAN

if TYPE_CHECKING:
    from jaxtyping import UInt8

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # of the contents, whatever the name; no others are tried
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


def decode(data: bytes) -> Image.Image:
    """An RGB image of a file's contents; whatever is wrong with them is an exception."""
    with _strictly():
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.mode.startswith("I"):  # 16 bits, which Pillow would clip rather than scale
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def is_plain_jpeg(data: bytes) -> bool:
    """Whether the GPU's decoder may have it: a JPEG in grey or colour that is not cut short.

    The decoder would make something of CMYK and of half a file; Pillow is right about both.
    """
    with _strictly():
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    ended = data.rfind(b"\xff\xd9", max(0, len(data) - 1024)) >= 0
    return image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L") and ended


@contextmanager
def _strictly() -> Iterator[None]:
    """Pillow's warnings: one of a decompression bomb is an error, others change no pixel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def reason_of(error: Exception) -> str:
    """One short line, without a path."""
    if isinstance(error, UnidentifiedImageError):
        return f"no image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


@functools.cache
def gpu_refuses(device: torch.device) -> str:
    """Why JPEG cannot be decoded on a device; nothing if it can. Tried once, on a small image."""
    if device.type != "cuda":
        return f"the device is {device}, not CUDA"
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 100, 50)).save(file, "JPEG")
    try:
        (image,) = decode_jpegs(
            [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device
        )
        close = abs(image.float().mean((1, 2)).cpu() - torch.tensor([200.0, 100, 50])).max() < 8
        return "" if close else "torchvision's decoder gives other colours"
    except (RuntimeError, ValueError, AttributeError) as error:
        return reason_of(error)


def decode_jpegs(
    files: list[UInt8[Tensor, "_"]],  # noqa: F821, UP037
    device: torch.device,
) -> list[UInt8[Tensor, "3 _ _"]]:
    """All the files or, if the decoder refuses any of them, a ``RuntimeError``."""
    codec = torchvision_module("torchvision.io")
    # In deterministic mode torch fills new memory on our stream, where the decoder, on its own and
    # not waiting for ours, may have written already. It writes every pixel anyway.
    deterministic: Any = torch.utils.deterministic
    filling = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        found = codec.decode_jpeg(files, codec.ImageReadMode.RGB, device) if files else []
    finally:
        deterministic.fill_uninitialized_memory = filling
    return list(found)


def torchvision_module(module: str) -> Any:
    """Imported where it is needed: the rest of the lab does without."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchvision":
            raise
        raise ValueError(
            "training on image folders needs torchvision: pip install 'mssar[images]'"
        ) from None
    except RuntimeError as error:  # built for another torch
        reason = str(error).splitlines()[0]
        raise ValueError(f"torchvision does not fit the torch that is here: {reason}") from None


# Transforms, the same on Pillow's images and on tensors of any device. torchvision draws from the
# host's generator wherever the image is, so the draws agree as well.


def testing(chosen: Augmentation) -> Callable[[Picture], Picture]:
    """The shorter side resized and the centre cut out."""
    v2 = torchvision_module("torchvision.transforms.v2")
    steps = v2.Compose([v2.Resize(chosen.resize, antialias=True), v2.CenterCrop(chosen.size)])

    def transform(image: Picture) -> Picture:
        height, width = v2.functional.get_size(image)
        if max(height, width) > 16 * min(height, width):  # resized whole, it might fill the memory
            side = 16 * min(height, width)
            image = v2.functional.center_crop(image, [min(height, side), min(width, side)])
        return steps(image)  # type: ignore[no-any-return]

    return transform


def training(chosen: Augmentation) -> Callable[[Picture], Picture]:
    """A random part of random shape, turned, mirrored and jittered."""
    v2 = torchvision_module("torchvision.transforms.v2")
    part = v2.RandomResizedCrop(chosen.size, chosen.area, chosen.ratio)
    turn = v2.RandomRotation(chosen.rotation)
    rest = v2.Compose(
        [
            v2.RandomHorizontalFlip(chosen.mirror),
            v2.ColorJitter(chosen.jitter, chosen.jitter, chosen.jitter),
        ]
    )

    def transform(image: Picture) -> Picture:
        box, turned = part.make_params([image]), turn.make_params([image])
        return rest(turned_crop(image, **box, **turned, size=chosen.size))  # type: ignore[no-any-return]

    return transform


def turned_crop(
    image: Picture, *, top: int, left: int, height: int, width: int, angle: float, size: int
) -> Picture:
    """A part of an image as a square, turned by some degrees about its centre.

    To turn the finished square would leave its corners empty. So as much more of the image is taken
    around the part as the corners will need, and the excess cut off once it is turned. Only beyond
    the image's own edges is there nothing but the mean colour. It is turned after it is resized:
    there are fewer pixels then.
    """
    functional = torchvision_module("torchvision.transforms.v2.functional")
    turn = math.radians(angle)
    margin = math.ceil(size * (abs(math.cos(turn)) + abs(math.sin(turn)) - 1) / 2 - 1e-9)
    down, across = round(margin * height / size), round(margin * width / size)
    top, bottom = top - down, top + height + down
    left, right = left - across, left + width + across
    full_height, full_width = functional.get_size(image)
    beyond = [max(0, -left), max(0, -top), max(0, right - full_width), max(0, bottom - full_height)]
    top, left = max(0, top), max(0, left)
    bottom, right = min(full_height, bottom), min(full_width, right)
    image = functional.crop(image, top, left, bottom - top, right - left)
    if any(beyond):
        image = functional.pad(image, beyond, fill=FILL)
    image = functional.resize(image, [size + 2 * margin] * 2, antialias=True)
    if angle:
        bilinear = functional.InterpolationMode.BILINEAR
        image = functional.rotate(image, angle, bilinear, fill=FILL)
    return functional.center_crop(image, [size, size]) if margin else image


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

    def ready(self) -> Callable[[Picture, int], Tensor]:
        """A function from an image and its number in the data set to its square, uint8 S S 3."""
        apply = (training if self.train else testing)(self.augmentation)

        def square(image: Picture, index: int) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                # Not torch.manual_seed, which seeds CUDA's generators too.
                torch.default_generator.manual_seed(seed_of(self.seed, self.epoch, index))
                made = apply(image)
            if isinstance(made, Tensor):
                return made.permute(1, 2, 0)
            return torch.from_numpy(np.array(made))

        return square
