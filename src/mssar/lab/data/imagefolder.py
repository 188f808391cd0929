"""Photographs in folders, one a class, as ImageNet keeps them.  n files, b bytes of their paths."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt8

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")  # the contents may be another of these
ILSVRC2012 = (1000, 1_281_167, 50_000)  # classes, training images, validation images
MEAN = (123.675, 116.28, 103.53)  # ImageNet's usual, in 0 … 255
STD = (58.395, 57.12, 57.375)


@dataclass(frozen=True, eq=False)
class Paths:
    """A list of paths in two tensors: a tenth of the memory of a million strings, and worker
    processes share it rather than copy it."""

    text: UInt8[Tensor, "b"]  # noqa: F821, UP037, the name of an axis
    ends: Int64[Tensor, "n"]  # noqa: F821, UP037

    @classmethod
    def of(cls, paths: Iterable[bytes]) -> Paths:
        found = list(paths)
        text = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8)
        return cls(text, torch.tensor([len(path) for path in found]).cumsum(0))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.text[start : int(self.ends[index])].numpy().tobytes())


@dataclass(frozen=True, eq=False)
class Files:
    """Images of one split: where they are below the root, and the number of the class of each."""

    paths: Paths
    labels: Int64[Tensor, "n"]  # noqa: F821, UP037

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Folder:
    """A data set of image files, too large to be held in memory."""

    name: str
    root: Path
    classes: tuple[str, ...]
    train: Files
    test: Files  # the folder val
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    checksum: str  # of the listing, paths and sizes; the contents are not read


@dataclass
class Tally:
    """Counts images read and those unreadable, and stops the run when these are too many.

    ``report`` is called once a file. More than ``share`` of what was read is a ``ValueError``, once
    ``patience`` images were read or at the end of an epoch.
    """

    report: Callable[[Path, str], object] = lambda path, reason: None  # noqa: ARG005
    share: float = 0.01
    patience: int = 100
    read: int = 0
    unreadable: int = 0
    files: dict[Path, str] = field(default_factory=dict)  # the unreadable ones, and why

    def add(self, read: int, unreadable: Iterable[tuple[Path, str]]) -> None:
        self.read += read
        for path, reason in unreadable:
            self.unreadable += 1
            if path not in self.files:
                self.files[path] = reason
                self.report(path, reason)
        if self.read >= self.patience:
            self.judge()

    def judge(self) -> None:
        if self.unreadable > self.share * self.read:
            few = "; ".join(f"{path} ({why})" for path, why in [*self.files.items()][:3])
            raise ValueError(
                f"{self.unreadable} of {self.read} images cannot be read, "
                f"{self.unreadable / self.read:.2%}; {self.share:.2%} would pass: {few}"
            )


def open_folder(
    root: Path, name: str = "imagefolder", expected: tuple[int, int, int] | None = None
) -> Folder:
    """The images in ``root/train/CLASS`` and ``root/val/CLASS``.

    ``expected`` is how many classes, training and validation images there must be. Folders within
    a class, hidden files and files of other kinds are passed over. Nothing is opened: the checksum
    is that of the listing, so it tells a file that is missing, renamed or of another size, but not
    one that was changed within.
    """
    classes = _folders(root / "train")
    others = _folders(root / "val")
    if classes != others:
        only = {"train": set(classes) - set(others), "val": set(others) - set(classes)}
        missing = "; ".join(
            f"{len(names)} only in {split} ({_few(sorted(names))})"
            for split, names in only.items()
            if names
        )
        raise ValueError(f"train and val of {root} must have the same classes: {missing}")
    if len(classes) < 2:
        raise ValueError(f"at least two classes are needed; {root} has one, {classes[0]}")
    digest = hashlib.sha256()
    train, test = (_files(root, split, classes, digest) for split in ("train", "val"))
    found = (len(classes), len(train), len(test))
    if expected is not None and found != expected:
        wanted, got = (
            f"{a:,} classes, {b:,} training and {c:,} validation images"
            for a, b, c in (expected, found)
        )
        raise ValueError(f"{name} has {wanted}; {root} has {got}")
    checksum = f"listing-sha256:{digest.hexdigest()}"
    return Folder(name, root, tuple(classes), train, test, MEAN, STD, checksum)


def _folders(split: Path) -> list[str]:
    """The classes: names of the folders, in the order of their numbers."""
    needed = f"{split.parent} must hold train/CLASS/ and val/CLASS/ with images"
    try:
        with os.scandir(split) as entries:
            found = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{needed}; there is no folder {split.name}") from None
    if not found:
        raise ValueError(f"{needed}; {split.name} has no folders, one a class")
    return sorted(found)


def _files(root: Path, split: str, classes: list[str], digest: hashlib._Hash) -> Files:
    # Threads, since on a network's file system nearly all of the time is waiting.
    with ThreadPoolExecutor(16) as pool:
        listings = list(pool.map(lambda name: _listing(root / split / name), classes))
    empty = [f"{split}/{n}" for n, listing in zip(classes, listings, strict=True) if not listing]
    if empty:
        kinds = ", ".join(extension[1:] for extension in EXTENSIONS)
        raise ValueError(f"{root} has classes without images ({kinds}): {_few(empty)}")
    paths = []
    for name, listing in zip(classes, listings, strict=True):
        below = os.fsencode(f"{split}/{name}/")
        for file, size in listing:
            paths.append(below + file)
            digest.update(b"%b\0%d\n" % (paths[-1], size))
    counts = torch.tensor([len(listing) for listing in listings])
    return Files(Paths.of(paths), torch.arange(len(classes)).repeat_interleave(counts))


def _listing(folder: Path) -> list[tuple[bytes, int]]:
    """Names and sizes of the images in a folder, by name."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith("."):
                # A folder or a dangling link of such a name will be unreadable, and reported so.
                size = entry.stat().st_size if entry.is_file() else 0
                if not (size or entry.is_file() or entry.is_dir()) and os.path.exists(entry):
                    raise ValueError(f"{entry.path}: not a regular file")  # a pipe never ends
                found.append((os.fsencode(entry.name), size))
    return sorted(found)


def _few(names: list[str], few: int = 3) -> str:
    return ", ".join(names[:few]) + (f", … {len(names) - few} more" if len(names) > few else "")
