"""What a step is given: batches from data that live on the device, or that are read on the way.

N images of the whole epoch that this process trains on, n of a batch; H W pixels, C colours.

All randomness of an epoch is drawn from a generator of its own, seeded by the run's seed and the
epoch: the order and the crops are the same on every device, beside any other run, and after a
resumption at any step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.data.imagefolder import Files, Folder, Tally
from mssar.lab.data.photographs import batches
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.world import World
from mssar.lab.recipes import Crops, Photographs, Recipe

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64, Shaped, UInt8

EVALUATION_BATCH = 1000


class Feed(Protocol):
    """Batches of an epoch, step by step."""

    sizes: list[int]  # of this process's batches in an epoch
    totals: list[int]  # of the batches over all processes
    tests: list[int]  # of this process's batches in testing
    loads: bool  # whether batches must be brought in

    def unreadable(self) -> int:
        """Files that could not be read so far, by any process. Every process must ask."""

    def begin(self, epoch: int, step: int) -> None:
        """Prepare an epoch, from a step on."""

    def load(self, step: int) -> None:
        """Bring a step's batch to where :meth:`take` finds it."""

    def take(self, counter: Int64[Tensor, ""], size: int) -> tuple[Tensor, Tensor]:
        """The batch and its labels. Device operations alone, so that a graph may hold them."""

    def begin_test(self) -> None: ...
    def load_test(self, step: int) -> None: ...
    def take_test(self, step: int) -> tuple[Tensor, Tensor]: ...
    def close(self) -> None:
        """Let go of processes and files."""


def generator(*key: int) -> torch.Generator:
    """A generator for one purpose: other keys, unrelated numbers."""
    digest = hashlib.sha256(",".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def batch_sizes(images: int, batch: int, world: World) -> tuple[list[int], list[int]]:
    """Sizes of an epoch's batches here and over all processes.

    The last batch is what is left over, unless that is too little for BN: two images a process.
    """
    if batch % world.size:
        raise ValueError(f"a batch of {batch} cannot be shared equally by {world.size} processes")
    if batch // world.size < 2:
        raise ValueError(f"a batch of {batch} over {world.size} processes: BN needs 2 images each")
    totals = [batch] * (images // batch)
    if (rest := images % batch) >= 2 * world.size:
        totals.append(rest)
    if not totals:
        raise ValueError(f"{images} training images are too few to train on")
    return [len(range(world.rank, total, world.size)) for total in totals], totals


def shard(order: Int64[Tensor, " M"], totals: list[int], world: World) -> list[Tensor]:
    """This process's part of every batch of the common order."""
    return [part[world.rank :: world.size] for part in order[: sum(totals)].split(totals)]


def test_parts(images: int, batch: int, world: World) -> list[Tensor]:
    """This process's test images in batches. All processes have as many, though some be empty:
    between batches they talk to each other."""
    mine = torch.arange(world.rank, images, world.size)
    most = math.ceil(images / world.size)
    return [mine[first : first + batch] for first in range(0, most, batch)]


def crop(
    images: Shaped[Tensor, "M h w C"],
    which: Int64[Tensor, " N"],
    top: Int64[Tensor, " N"],
    left: Int64[Tensor, " N"],
    mirrored: Bool[Tensor, " N"],
    size: tuple[int, int],
) -> Shaped[Tensor, "N H W C"]:
    """Crops of chosen images, some mirrored, all in one gather."""
    height, width = size
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    y = top[:, None] + rows
    x = left[:, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
    return images[which[:, None, None], y[:, :, None], x[:, None, :]]


class Normalise:
    """Pixels of 0 … 255 to the training set's zero mean and unit variance."""

    def __init__(self, data: Arrays | Folder, device: torch.device) -> None:
        mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (data.mean, data.std))
        self.scale, self.shift = 1 / std, -mean / std

    def __call__(self, x: UInt8[Tensor, "n 3 H W"]) -> Float[Tensor, "n 3 H W"]:
        return torch.addcmul(self.shift, x, self.scale)  # bytes become floats on the way


class Resident:
    """A data set on a device, for all runs there; training images with their margin."""

    def __init__(self, data: Arrays, padding: int, device: torch.device) -> None:
        padded = F.pad(data.train.images.to(device), _around(padding))
        self.train = Split(padded, data.train.labels.to(device))
        self.test = Split(data.test.images.to(device), data.test.labels.to(device))


def _around(padding: int) -> tuple[int, ...]:
    """As F.pad has it for images with their colours last."""
    return (0, 0, padding, padding, padding, padding)


class ArraysFeed:
    """Data that live on the device; an epoch's crops are made there in one go."""

    loads = False

    def __init__(
        self,
        data: Arrays,
        resident: Resident,
        recipe: Recipe,
        seed: int,
        device: torch.device,
        world: World,
    ) -> None:
        assert isinstance(recipe.augmentation, Crops)
        self.augmentation = recipe.augmentation
        self.resident, self.seed, self.device, self.world = resident, seed, device, world
        self.normalise = Normalise(data, device)
        self.size = (data.train.images.shape[1], data.train.images.shape[2])
        self.count = len(data.train)
        self.sizes, self.totals = batch_sizes(self.count, recipe.batch, world)
        self.images = torch.empty((sum(self.sizes), *self.size, 3), dtype=torch.uint8).to(device)
        self.labels = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        # A mean colour is no byte: where pixels are around an image is remembered until they are
        # normalised, if they are to be that.
        self.beyond: Tensor | None = None
        if self.augmentation.fill == "mean":
            image = torch.zeros((1, *self.size, 1), dtype=torch.bool, device=device)
            self.margin = F.pad(image, _around(self.augmentation.padding), value=True)
            self.beyond = image.repeat(sum(self.sizes), 1, 1, 1)
        self.within = torch.arange(self.sizes[0], device=device)
        self.parts = [
            part.to(device) for part in test_parts(len(data.test), EVALUATION_BATCH, world)
        ]
        self.tests = [len(part) for part in self.parts]

    def begin(self, epoch: int, step: int) -> None:  # noqa: ARG002, the whole epoch at once
        draw = generator(self.seed, epoch)
        order = torch.randperm(self.count, generator=draw)
        margin = 2 * self.augmentation.padding + 1
        top, left = torch.randint(margin, (2, self.count), generator=draw)
        mirrored = torch.rand(self.count, generator=draw) < self.augmentation.mirror
        which = torch.cat(shard(order, self.totals, self.world))
        chosen = (which, top[which], left[which], mirrored[which])
        which, top, left, mirrored = (t.to(self.device) for t in chosen)
        source = self.resident.train
        self.images.copy_(crop(source.images, which, top, left, mirrored, self.size))
        self.labels.copy_(source.labels[which])
        if self.beyond is not None:
            one = torch.zeros_like(which)
            self.beyond.copy_(crop(self.margin, one, top, left, mirrored, self.size))

    def load(self, step: int) -> None:
        """It is there."""

    def take(self, counter: Int64[Tensor, ""], size: int) -> tuple[Tensor, Tensor]:
        index = counter * self.sizes[0] + self.within[:size]
        x = self.images.index_select(0, index).permute(0, 3, 1, 2)  # channels_last by birth
        normalised = self.normalise(x)
        if self.beyond is not None:
            beyond = self.beyond.index_select(0, index).permute(0, 3, 1, 2)
            normalised.masked_fill_(beyond, 0.0)
        return normalised, self.labels.index_select(0, index)

    def begin_test(self) -> None:
        """It is there."""

    load_test = load

    def take_test(self, step: int) -> tuple[Tensor, Tensor]:
        part, source = self.parts[step], self.resident.test
        x = source.images.index_select(0, part).permute(0, 3, 1, 2)
        return self.normalise(x), source.labels.index_select(0, part)

    def unreadable(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


def arrays_feed(
    data: Arrays,
    resident: dict[object, Resident],
    recipe: Recipe,
    seed: int,
    device: torch.device,
    world: World,
) -> ArraysFeed:
    """Of a data set that is brought to the device once for all runs: ``resident``."""
    if not isinstance(recipe.augmentation, Crops):
        raise ValueError(f"the recipe {recipe.name} is for photographs; not {data.name}")
    key = (data.name, recipe.augmentation.padding)
    if key not in resident:
        resident[key] = Resident(data, recipe.augmentation.padding, device)
    return ArraysFeed(data, resident[key], recipe, seed, device, world)


class FolderFeed:
    """Photographs that are read, decoded and transformed on the way."""

    loads = True

    def __init__(
        self,
        data: Folder,
        recipe: Recipe,
        seed: int,
        execution: Execution,
        world: World,
        report: Callable[[Path, str], None],
    ) -> None:
        assert isinstance(recipe.augmentation, Photographs)
        self.data, self.augmentation = data, recipe.augmentation
        self.seed, self.execution, self.world = seed, execution, world
        device, side = execution.device, recipe.augmentation.size
        self.normalise = Normalise(data, device)
        self.sizes, self.totals = batch_sizes(len(data.train), recipe.batch, world)
        most = max(self.sizes[0], 1)
        self.images = torch.zeros((most, side, side, 3), dtype=torch.uint8).to(device)
        self.labels = torch.zeros(most, dtype=torch.int64, device=device)
        self.parts = test_parts(len(data.test), most, world)
        self.tests = [len(part) for part in self.parts]
        self.source: Iterator[tuple[Tensor, Tensor]] | None = None
        self.left = 0
        # For all epochs: a file is named once.
        self.tallies = [Tally(report, execution.unreadable) for _ in ("train", "test")]

    def begin(self, epoch: int, step: int) -> None:
        order = torch.randperm(len(self.data.train), generator=generator(self.seed, epoch))
        parts = shard(order, self.totals, self.world)
        self._open(self.data.train, parts[step:], epoch, train=True)

    def load(self, step: int) -> None:  # noqa: ARG002, they come in order
        assert self.source is not None
        images, labels = next(self.source)
        self.left -= 1
        if not self.left:  # the end is where too many unreadable files are too many
            next(self.source, None)
        size = len(labels)
        self.images[:size].copy_(images.permute(0, 2, 3, 1), non_blocking=True)
        self.labels[:size].copy_(labels, non_blocking=True)

    def take(self, counter: Int64[Tensor, ""], size: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.normalise(self.images[:size].permute(0, 3, 1, 2)), self.labels[:size].clone()

    def begin_test(self) -> None:
        self._open(self.data.test, self.parts, 0, train=False)

    load_test = load

    def take_test(self, step: int) -> tuple[Tensor, Tensor]:
        size = self.tests[step]
        return self.normalise(self.images[:size].permute(0, 3, 1, 2)), self.labels[:size].clone()

    def unreadable(self) -> int:
        # By name: to train on, a file is now one process's and now another's.
        files = [path for tally in self.tallies for path in tally.files]
        return len(self.world.union(map(str, files)))

    def close(self) -> None:
        closing, self.source = getattr(self.source, "close", None), None
        if closing:
            closing()

    def _open(self, files: Files, parts: Sequence[Tensor], epoch: int, *, train: bool) -> None:
        self.close()
        self.left = len(parts)
        self.source = batches(
            files,
            self.data.root,
            parts,
            self.augmentation,
            train=train,
            seed=self.seed,
            epoch=epoch,
            device=self.execution.device,
            workers=self.execution.workers,
            decode=self.execution.decode,
            tally=self.tallies[not train],
        )
