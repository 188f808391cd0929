"""How fast photographs become training batches: Pillow in workers, the GPU, and the usual way.

    python benchmarks/decode.py --root /data/imagenet --workers 16

Prints one row a way: images a second, and the ratio to the usual one, which is what everybody
writes: torchvision's ImageFolder, the same augmentation in its plainest form, and a DataLoader.
Without a tree, photographs of 500 × 375 are made up in a temporary folder. The clock starts after
half of the batches, so that neither starting workers nor what they read ahead is counted. Files
come from the disk in a first run and mostly from memory in a second: compare second runs.

The last row is what one core decodes and cuts, by its own clock: neighbours hardly change it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from mssar.lab.data import photographs, pictures
from mssar.lab.data.imagefolder import Folder, Tally, open_folder
from mssar.lab.data.transforms import Transform
from mssar.lab.recipes import Photographs

CHOSEN = Photographs()


def made_up(root: Path, count: int) -> None:
    """Photographs of a sort: soft shapes and some grain, which compress as real ones do."""
    random = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 2)):
        for index in range(number):
            rough = random.integers(0, 256, (16, 21, 3), dtype=np.uint8)
            soft = Image.fromarray(rough).resize((500, 375), Image.Resampling.BICUBIC)
            grain = random.normal(0, 12, (375, 500, 1))
            grained = np.clip(np.asarray(soft) + grain, 0, 255).astype(np.uint8)
            folder = root / split / ("even", "odd")[index % 2]  # a data set has two classes
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(grained).save(folder / f"{index:05}.jpg", quality=90)


def usual(folder: Folder, orders: list[Tensor], device: torch.device, workers: int) -> Any:
    """ImageFolder and a DataLoader."""
    datasets = pictures.torchvision_module("torchvision.datasets")
    v2 = pictures.torchvision_module("torchvision.transforms.v2")
    jitter = CHOSEN.jitter
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(CHOSEN.size, CHOSEN.area, CHOSEN.ratio),
            v2.RandomRotation(CHOSEN.rotation, v2.InterpolationMode.BILINEAR),
            v2.RandomHorizontalFlip(CHOSEN.mirror),
            v2.ColorJitter(jitter, jitter, jitter),
            v2.PILToTensor(),
        ]
    )
    data = datasets.ImageFolder(str(folder.root / "train"), transform)
    loader = DataLoader(
        Subset(data, torch.cat(orders).tolist()),
        batch_size=len(orders[0]),
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    return ((x.to(device, non_blocking=True), y.to(device)) for x, y in loader)


def ours(
    folder: Folder, orders: list[Tensor], device: torch.device, workers: int, decode: str
) -> Iterator[tuple[Tensor, Tensor]]:
    return photographs.batches(
        folder.train,
        folder.root,
        orders,
        CHOSEN,
        train=True,
        seed=0,
        epoch=0,
        device=device,
        workers=workers,
        decode=decode,
        tally=Tally(),
    )


def core(folder: Folder, order: Tensor, rounds: int = 5) -> float:
    """Images that one core reads, decodes and cuts in a second of its time; the best of rounds."""
    transform, fastest = Transform(CHOSEN, True, 0, 0), 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        begun = time.process_time()
        for index in order.tolist():
            image = pictures.decode(pictures.contents(folder.root / folder.train.paths[index]))
            transform.cut(image, transform.draw(image, index))
        fastest = max(fastest, len(order) / (time.process_time() - begun))
    torch.set_num_threads(threads)
    return fastest


def rate(batches: Iterable[tuple[Tensor, Tensor]], skip: int, device: torch.device) -> float:
    """Images a second, after the first few batches."""
    seen, begun = 0, 0.0
    for number, (images, _) in enumerate(batches, 1):
        if number > skip:
            seen += len(images)
        elif number == skip:
            begun = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return seen / (time.perf_counter() - begun)


def compare(folder: Folder, wanted: argparse.Namespace, device: torch.device) -> None:
    order = torch.randperm(len(folder.train), generator=torch.Generator().manual_seed(0))
    orders = [*order[: wanted.images].split(wanted.batch)]
    skip = len(orders) // 2
    if not skip:
        raise ValueError(f"needs two batches: {len(order)} images, batches of {wanted.batch}")
    refusal = pictures.gpu_refuses(device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    print(
        f"{sum(map(len, orders))} of {len(folder.train)} images, batch {wanted.batch}, "
        f"{wanted.workers} workers, {where}, torch {torch.__version__}"
    )
    print(f"{'':10}{'images/s':>10}{'/ usual':>10}")
    base = rate(usual(folder, orders, device, wanted.workers), skip, device)
    print(f"{'usual':10}{base:10.0f}{1:10.2f}")
    for name in ("workers", "gpu"):
        if name == "gpu" and refusal:
            print(f"{name:10}{refusal}")
            continue
        found = rate(ours(folder, orders, device, wanted.workers, name), skip, device)
        print(f"{name:10}{found:10.0f}{found / base:10.2f}")
    print(f"{'one core':10}{core(folder, order[:500]):10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="a tree with train/CLASS/ and val/CLASS/")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=4096, help="at most so many")
    wanted = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if wanted.root is not None:
        compare(open_folder(wanted.root), wanted, device)
        return
    with tempfile.TemporaryDirectory() as folder:
        made_up(Path(folder), wanted.images)
        compare(open_folder(Path(folder)), wanted, device)


if __name__ == "__main__":
    main()
