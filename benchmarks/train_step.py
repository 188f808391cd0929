"""Steps a second of this package's training loop, and of the loop that everybody writes.

    python benchmarks/train_step.py --net resnet20 --batch 128

The other loop is the usual one: a DataLoader with worker processes, torchvision's transforms image
by image, autocast, zero_grad, backward, step; its networks are the same. Random data of CIFAR's
size. A row a recalibration and loop: steps a second of one run and of all runs together, these
over the other loop's, and peak memory on CUDA. Whole epochs are timed after one that is not: for
this package's loop with the making of the epoch's crops, for the other with its workers running.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mssar
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine.execution import Execution, choose_device, settings
from mssar.lab.engine.feed import ArraysFeed, Resident
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import CHUNK
from mssar.lab.engine.world import World
from mssar.lab.recipes import CIFAR_RESNET, Recipe, varied

MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def random_data(images: int) -> Arrays:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 32, 32, 3), dtype=torch.uint8, generator=draw)
    labels = torch.randint(10, (images,), generator=draw)
    split = Split(pixels, labels)
    return Arrays("random", tuple("0123456789"), split, Split(pixels[:10], labels[:10]), MEAN, STD)


class Pictures(Dataset[Any]):
    """Images as people keep them for torchvision: arrays that become PIL images one by one."""

    def __init__(self, data: Arrays, transform: Callable[[Any], Tensor]) -> None:
        self.images: Any = data.train.images.numpy()
        self.labels = data.train.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def usual(kind: str, net: str, data: Arrays, recipe: Recipe, how: Execution, workers: int) -> Any:
    """The loop everybody writes; a function that trains one epoch and waits for its end."""
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(np.array(MEAN) / 255, np.array(STD) / 255),
        ]
    )
    loader = DataLoader(
        Pictures(data, transform),
        recipe.batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=how.device.type == "cuda",
        persistent_workers=workers > 0,
    )
    model: nn.Module = mssar.create_model(net, kind).to(how.device)
    optimiser = torch.optim.SGD(
        model.parameters(), recipe.lr, recipe.momentum, weight_decay=1e-4, nesterov=True
    )

    def epoch() -> int:
        model.train()
        for x, y in loader:
            x, y = x.to(how.device, non_blocking=True), y.to(how.device, non_blocking=True)
            optimiser.zero_grad()
            with how.autocast():
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimiser.step()
        _wait(how)
        return len(loader)

    return epoch


def ours(kind: str, net: str, data: Arrays, recipe: Recipe, how: Execution, runs: int) -> Any:
    """This package's loop, for so many runs beside each other."""
    cuda = how.device.type == "cuda"
    resident = Resident(data, 4, how.device)
    streams = [torch.cuda.Stream() if cuda else None for _ in range(runs)]
    learners = []
    for seed, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.manual_seed(seed)
            feed = ArraysFeed(data, resident, recipe, seed, how.device, World())
            learners.append(Learner(mssar.create_model(net, kind), feed, recipe, how, World()))
    _wait(how)
    steps = len(learners[0].feed.sizes)
    epochs = iter(range(1_000_000))

    def epoch() -> int:
        number = next(epochs)
        for learner, stream in zip(learners, streams, strict=True):
            with torch.cuda.stream(stream):
                learner.begin(number, 0, 0.1)
        for first in range(0, steps, CHUNK):
            for learner, stream in zip(learners, streams, strict=True):
                with torch.cuda.stream(stream):
                    for step in range(first, min(first + CHUNK, steps)):
                        learner.step(step)
        _wait(how)
        return steps

    return epoch


def _wait(how: Execution) -> None:
    if how.device.type == "cuda":
        torch.cuda.synchronize()


def rate(epoch: Callable[[], int], rounds: int) -> float:
    """Steps a second: the median over epochs, after one that is not counted."""
    epoch()
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        steps = epoch()
        found.append(steps / (time.perf_counter() - begun))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--net", default="resnet20", choices=mssar.list_models())
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--fleet", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--compile", action="store_true", help="torch.compile this loop's networks")
    parser.add_argument("--kinds", default="none,mssar")
    wanted = parser.parse_args()
    device = choose_device()
    cuda = device.type == "cuda"
    how = Execution(device, "bf16" if cuda else "fp32", compile=wanted.compile)
    recipe, data = varied(CIFAR_RESNET, batch=wanted.batch), random_data(wanted.images)
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"{wanted.net}, batch {wanted.batch}, {wanted.workers} workers, {where}")
    print(f"{'':8}{'loop':12}{'steps/s':>10}{'of all':>10}{'ratio':>8}{'MiB':>8}")
    for kind in wanted.kinds.split(","):
        common = (kind, wanted.net, data, recipe, how)
        loops: list[tuple[str, int, Callable[[], Any]]] = [
            ("usual", 1, partial(usual, *common, wanted.workers)),
            ("ours", 1, partial(ours, *common, 1)),
            (f"ours × {wanted.fleet}", wanted.fleet, partial(ours, *common, wanted.fleet)),
        ]
        base = 0.0
        for name, runs, prepare in loops:
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with settings(how):
                speed = rate(prepare(), wanted.rounds)
            base = base or speed
            room = f"{torch.cuda.max_memory_allocated() / 2**20:8.0f}" if cuda else ""
            together = speed * runs
            row = f"{kind:8}{name:12}{speed:10.1f}{together:10.1f}{together / base:8.1f}{room}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
