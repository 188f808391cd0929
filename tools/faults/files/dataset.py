"""A small data set as the large one is published, for others to tear and change."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faults.files.sandbox import WrongError
from mssar.lab.data import cifar
from mssar.lab.data.dataset import Arrays

NAME = "cifar10"
COUNTS = {"train": 50, "test": 10}


class Made(NamedTuple):
    """A small data set, in the forms in which the large one is published."""

    images: dict[str, np.ndarray[Any, Any]]
    labels: dict[str, np.ndarray[Any, Any]]
    binary: dict[str, bytes]
    pickled: dict[str, bytes]


def prepare(place: Path) -> Made:
    """Our layout expects it from now on; this process reads no other."""
    layout = replace(cifar.LAYOUTS[NAME], train_count=COUNTS["train"], test_count=COUNTS["test"])
    cifar.LAYOUTS[NAME] = layout
    random = np.random.default_rng(0)
    images = {s: random.integers(0, 256, (n, 32, 32, 3), np.uint8) for s, n in COUNTS.items()}
    labels = {s: np.arange(n) % 10 for s, n in COUNTS.items()}
    binary, pickled = {}, {}
    for stem, (split, start, count) in layout.slots.items():
        part = slice(start, start + count)
        rows = images[split][part].transpose(0, 3, 1, 2).reshape(count, 3072)
        numbers = labels[split][part]
        binary[f"{stem}.bin"] = np.concatenate(
            [numbers[:, None].astype(np.uint8), rows], 1
        ).tobytes()
        batch = {"batch_label": stem, "data": np.ascontiguousarray(rows)}
        batch |= {"labels": numbers.tolist(), "filenames": [f"{i}.png" for i in range(count)]}
        pickled[stem] = pickle.dumps(batch, protocol=2)
    made = Made(images, labels, binary, pickled)
    for form, files in zip(layout.forms, (binary, pickled), strict=True):
        folder = place / ("binary" if form.binary else "pickled")  # unchanged they are read
        folder.mkdir(parents=True)
        (folder / form.archive).write_bytes(compressed(packed(files, form.folder)))
        require_fine(cifar.load(NAME, folder), made, same=True)
    return made


def packed(files: dict[str, bytes], folder: str, *strange: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member, content in strange:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def compressed(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def require_fine(found: Arrays, made: Made, *, same: bool) -> None:
    """Images and labels as a network can be trained on; those that were there, where they must."""
    for split, part in (("train", found.train), ("test", found.test)):
        if part.images.shape != made.images[split].shape or part.images.numpy().dtype != np.uint8:
            raise WrongError(f"{split} images are {tuple(part.images.shape)} {part.images.dtype}")
        if not ((part.labels >= 0) & (part.labels < 10)).all():
            raise WrongError(f"{split} has labels of no class")
        if same and not (
            np.array_equal(part.images.numpy(), made.images[split])
            and np.array_equal(part.labels.numpy(), made.labels[split])
        ):
            raise WrongError(f"{split} has other images than it had")


def empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
