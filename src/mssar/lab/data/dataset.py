"""What a data set is to the rest of the lab.  N images, H W pixels, colour last as in a picture."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt8


@dataclass(frozen=True, eq=False)
class Split:
    """Images and the number of the class of each."""

    images: UInt8[Tensor, "N H W 3"]
    labels: Int64[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set small enough to live on the training device."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, float, float]  # of the training images, in 0 … 255
    std: tuple[float, float, float]

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all images and labels in their order: what was trained on, whatever file it
        came from."""
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            for part in (split.images, split.labels):
                digest.update(part.contiguous().numpy().data)
        return f"sha256:{digest.hexdigest()}"
