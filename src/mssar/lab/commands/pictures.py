"""Pictures that a user names, as a run's network takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageOps
from torch import Tensor

from mssar.lab import data
from mssar.lab.data import Data, pictures, transforms
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.data.imagefolder import MEAN, STD
from mssar.lab.engine.evaluate import Trained
from mssar.lab.recipes import Photographs
from mssar.lab.report import maps

if TYPE_CHECKING:
    from jaxtyping import UInt8


def data_for(chosen: Trained, data_dir: Path | None, images: Sequence[str]) -> Data:
    """The run's data set, for its names, its colours' mean and its test images.

    A file of weights says as much of it as pictures of one's own need. Photographs are all
    normalised alike, so without theirs only the names are missing.
    """
    run, note = chosen.run, chosen.note
    try:
        return run.normalised(data.load(run.dataset, data_dir))
    except ValueError:
        photographs = isinstance(run.recipe.augmentation, Photographs)
        if not (photographs or note) or data_dir is not None or any(map(_numbered, images)):
            raise
    _, height, width = note["size"] if note else (3, 1, 1)
    labels = torch.zeros(0, dtype=torch.int64)
    none = Split(torch.zeros(0, height, width, 3, dtype=torch.uint8), labels)
    if note:
        return chosen.noted(none)
    classes = tuple(map(str, range(chosen.classes)))
    return Arrays(run.dataset, classes, none, none, *run.colours(MEAN, STD))


def _numbered(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"test:(\d+)", name)


def picture(name: str, found: Data, chosen: Trained) -> tuple[UInt8[Tensor, "H W 3"], str | None]:
    """An image as the network takes it, and its class where that is known."""
    if asked := _numbered(name):
        number, last = int(asked[1]), len(found.test) - 1
        if number > last:
            raise ValueError(f"test images of {found.name} are test:0 to test:{last}; got {name}")
        truth = found.classes[int(found.test.labels[number])]
        return maps.tested(found, chosen.run.recipe, number), truth
    try:
        image = pictures.decode(pictures.contents(Path(name)))
    except FileNotFoundError:
        raise ValueError(f"there is no picture {name}; test:0 is the first test image") from None
    except Exception as error:  # Pillow raises nearly anything on a broken file
        raise ValueError(f"{name} cannot be read: {pictures.reason_of(error)}") from None
    augmentation = chosen.run.recipe.augmentation
    if isinstance(augmentation, Photographs):
        return transforms.pixels(transforms.testing(image, augmentation)), None
    assert isinstance(found, Arrays)
    height, width = found.test.images.shape[1:3]
    return transforms.pixels(fitted(image, (width, height))), None


def fitted(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The shorter side resized and the centre cut out; an image of this size stays as it is."""
    return ImageOps.fit(image, size, Image.Resampling.BILINEAR)
