"""A few real test images that come with the package, to look at without the data set.

``samples/NAME.png`` has ten images side by side, in the order of their classes. They are from
CIFAR-10 and CIFAR-100 (Krizhevsky 2009), pixel by pixel, and not under this package's licence. A
rule chose them: ten classes evenly from all, and of each the image that :func:`chosen` names.
`tools/write-sample` made the files.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

import torch

from mssar.lab.data import pictures, transforms
from mssar.lab.data.cifar import SIDE, layout_of
from mssar.lab.data.dataset import Split

COUNT = 10
FOLDER = Path(str(files("mssar.lab.data"))) / "samples"


def there_is(name: str) -> bool:
    """Whether there are images of a data set."""
    return (FOLDER / f"{name}.png").is_file()


def load(name: str) -> Split:
    """The images of a data set, and their classes."""
    strip = transforms.pixels(pictures.decode((FOLDER / f"{name}.png").read_bytes()))
    return Split(torch.stack(strip.split(SIDE, 1)), torch.tensor(classes(name)))


def chosen(name: str, test: Split) -> list[int]:
    """Numbers of test images: of each class the one whose pixels have the smallest SHA-256.

    So they are the same in whatever order a copy of the data set has its images.
    """

    def digest(number: int) -> bytes:
        return hashlib.sha256(test.images[number].numpy().tobytes()).digest()

    return [
        min((test.labels == label).nonzero().flatten().tolist(), key=digest)
        for label in classes(name)
    ]


def classes(name: str) -> list[int]:
    """Numbers of the classes that have an image: of ten all, of a hundred every tenth."""
    return [i * len(layout_of(name).classes) // COUNT for i in range(COUNT)]
