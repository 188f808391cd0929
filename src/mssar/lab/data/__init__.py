"""Data sets by name: made by the program, read from archives, or a tree of photographs."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from mssar.lab.data import arrangements, cifar, places
from mssar.lab.data.dataset import Arrays
from mssar.lab.data.imagefolder import ILSVRC2012, Folder, open_folder

Data: TypeAlias = Arrays | Folder

DATASETS = ("arrangements", "cifar10", "cifar100", "imagefolder", "ilsvrc2012")


def load(name: str, data_dir: Path | None = None) -> Data:
    """A data set; a ValueError names the command to run where it is missing."""
    if name == "arrangements":
        return arrangements.load()
    if name in ("cifar10", "cifar100"):
        return cifar.load(name, data_dir)
    if name == "imagefolder":
        if data_dir is None:
            raise ValueError(
                "imagefolder is a tree of train/CLASS/* and val/CLASS/*; say where: --data-dir DIR"
            )
        return open_folder(data_dir)
    if name == "ilsvrc2012":
        place = places.folder(data_dir)
        return open_folder(place if (place / "train").is_dir() else place / name, name, ILSVRC2012)
    raise ValueError(f"no data set {name!r}; there are {', '.join(DATASETS)}")
