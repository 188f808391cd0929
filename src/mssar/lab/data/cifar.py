"""CIFAR-10 and CIFAR-100 from their official files.  N images of 32×32 pixels.

In the files an image is 3072 bytes: all of its red, then green, then blue. Here the colour comes
last, as in a picture.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mssar.lab.data import pickled, places, unpack
from mssar.lab.data.dataset import Arrays, Split

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt8

SIDE = 32
PIXELS = 3 * SIDE * SIDE
CONTENTS = "SHA-256"


@dataclass(frozen=True)
class Form:
    """One of the ways in which the data set is published."""

    folder: str
    archive: str
    binary: bool  # else pickles

    def file(self, stem: str) -> str:
        return f"{stem}.bin" if self.binary else stem


@dataclass(frozen=True)
class Layout:
    """What the files are called and what they hold."""

    name: str
    title: str
    classes: tuple[str, ...]
    forms: tuple[Form, Form]  # the preferred one first
    train: tuple[str, ...]  # files of equally many images
    label_bytes: int  # before each image; the last is the class
    label_key: str  # in a pickle
    mean: tuple[float, float, float]  # as known; see check
    contents: tuple[str, str]  # of training and test images, as known; see contents_of
    test: str = "test"
    train_count: int = 50_000
    test_count: int = 10_000

    @property
    def again(self) -> str:
        """What helps where a file is bad."""
        return f"remove it and run `mssar data get {self.name}`"

    @property
    def slots(self) -> dict[str, tuple[str, int, int]]:
        """File → the split it belongs to, the place of its first image there, how many it has."""
        each = self.train_count // len(self.train)
        found = {stem: ("train", i * each, each) for i, stem in enumerate(self.train)}
        return found | {self.test: ("test", 0, self.test_count)}


LAYOUTS = {
    "cifar10": Layout(
        name="cifar10",
        title="CIFAR-10",
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        forms=(
            Form("cifar-10-batches-bin", "cifar-10-binary.tar.gz", binary=True),
            Form("cifar-10-batches-py", "cifar-10-python.tar.gz", binary=False),
        ),
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        label_bytes=1,
        label_key="labels",
        mean=(125.307, 122.950, 113.865),
        contents=(
            "6a3b2c04d0a79ce272dcdacaf0bc440275db5a8cbe3717521a28fada2ea0d2ed",
            "65a6ffe079453e514083f99356b35e02cbfd581b4951e3937fae188974b79f39",
        ),
    ),
    "cifar100": Layout(
        name="cifar100",
        title="CIFAR-100",
        classes=tuple(
            """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge
            bus butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
            couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
            house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
            motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
            pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket
            rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
            sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
            turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905, a hundred lines otherwise
        ),
        forms=(
            Form("cifar-100-binary", "cifar-100-binary.tar.gz", binary=True),
            Form("cifar-100-python", "cifar-100-python.tar.gz", binary=False),
        ),
        train=("train",),
        label_bytes=2,  # superclass and class
        label_key="fine_labels",
        mean=(129.304, 124.070, 112.434),
        contents=(
            "640c97a4012a8aebfcaf57fd82a33dd43b37d2e397a02cb9b0a3d89e6d6d936d",
            "a6a97df7b61bc7420bc44268696e8963d33129bc050978f2a63d8fe3420989fa",
        ),
    ),
}


@dataclass(frozen=True)
class Found:
    """A data set's folder or archive."""

    path: Path
    form: Form

    @property
    def size(self) -> int:
        """In bytes."""
        files = self.path.iterdir() if self.path.is_dir() else (self.path,)
        return sum(file.stat().st_size for file in files if file.is_file())


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    name: str
    expected: str
    found: str
    ok: bool


def layout_of(name: str) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"no data set {name!r} of this kind; there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def find(name: str, data_dir: Path | None = None) -> Found | None:
    """Where the data set lies: unpacked before packed, ``data_dir`` may be its folder itself."""
    layout, root = layout_of(name), places.folder(data_dir)

    def holds_some(folder: Path, form: Form) -> bool:
        return any((folder / form.file(stem)).is_file() for stem in layout.slots)

    folders = [Found(root / form.folder, form) for form in layout.forms]
    folders += [Found(root, form) for form in layout.forms]
    archives = [Found(root / form.archive, form) for form in layout.forms]
    for place in folders:
        if holds_some(place.path, place.form):
            return place
    return next((place for place in archives if place.path.is_file()), None)


def load(name: str, data_dir: Path | None = None) -> Arrays:
    """The data set, the same bit by bit whichever of its forms is found."""
    layout = layout_of(name)
    place = find(name, data_dir)
    if place is None:
        root = places.folder(data_dir)
        looked = ", ".join(thing for form in layout.forms for thing in (form.folder, form.archive))
        option = "" if data_dir is None else f" --data-dir {data_dir}"
        raise ValueError(
            f"no {layout.title} in {root}, looked for {looked}; fetch it with "
            f"`mssar data get {name}{option}`"
        )
    counts = {"train": layout.train_count, "test": layout.test_count}
    images = {s: np.empty((n, SIDE, SIDE, 3), np.uint8) for s, n in counts.items()}
    labels = {s: np.empty(n, np.int64) for s, n in counts.items()}
    # Sums of whole numbers, so that mean and deviation do not depend on the order of the files.
    total, squares = [0, 0, 0], [0, 0, 0]
    for stem, source, content in _contents(place, layout):
        split, start, count = layout.slots[stem]
        part = slice(start, start + count)
        parse = _from_binary if place.form.binary else _from_pickle
        pixels, labels[split][part] = parse(content, source, layout, count)
        for colour in range(3):
            plane = pixels[:, colour]
            images[split][part].reshape(count, SIDE * SIDE, 3)[:, :, colour] = plane
            if split == "train":
                total[colour] += int(plane.sum(dtype=np.uint64))
                squares[colour] += _sum_of_squares(plane)
    n = layout.train_count * SIDE * SIDE
    red, green, blue = (a / n for a in total)
    deviations = (math.sqrt(n * b - a * a) / n for a, b in zip(total, squares, strict=True))
    std_red, std_green, std_blue = deviations
    train, test = (
        Split(torch.from_numpy(images[s]), torch.from_numpy(labels[s])) for s in ("train", "test")
    )
    return Arrays(
        name, layout.classes, train, test, (red, green, blue), (std_red, std_green, std_blue)
    )


def check(arrays: Arrays) -> list[Finding]:
    """Counts, balance of the classes, mean colour and all images with their labels, against what
    is known of the data set."""
    layout = layout_of(arrays.name)
    findings = []
    for split, part, count in (
        ("training", arrays.train, layout.train_count),
        ("test", arrays.test, layout.test_count),
    ):
        each = torch.bincount(part.labels, minlength=len(layout.classes))
        low, high, even = int(each.min()), int(each.max()), count // len(layout.classes)
        spread = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        findings += [
            Finding(f"{split} images", f"{count:,}", f"{len(part):,}", len(part) == count),
            Finding(f"{split} images a class", f"{even:,}", spread, low == high == even),
        ]
    for colour, known, mean in zip(("red", "green", "blue"), layout.mean, arrays.mean, strict=True):
        ok = math.isclose(known, mean, rel_tol=0, abs_tol=0.01)
        findings.append(Finding(f"mean {colour}", f"{known:.3f}", f"{mean:.3f}", ok))
    for split, part, digest in zip(
        ("training", "test"), (arrays.train, arrays.test), layout.contents, strict=True
    ):
        found = contents_of(part)
        findings.append(Finding(f"{split} {CONTENTS}", digest[:12], found[:12], digest == found))
    return findings


def contents_of(part: Split) -> str:
    """SHA-256 over the sorted SHA-256 of each image with its label: in whatever order they are."""
    each = (
        hashlib.sha256(image.tobytes() + bytes([label])).digest()
        for image, label in zip(part.images.numpy(), part.labels.tolist(), strict=True)
    )
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()


def _contents(place: Found, layout: Layout) -> Iterator[tuple[str, str, bytes]]:
    """Each file's stem, its name for messages, and its bytes."""
    stems = {place.form.file(stem): stem for stem in layout.slots}
    # A pickle also has the labels as text and the files' names: never as much as the images.
    limit = 2 * max(count for *_, count in layout.slots.values()) * (PIXELS + layout.label_bytes)
    if place.path.is_dir():
        for file, stem in stems.items():
            path = place.path / file
            if not path.is_file():
                raise ValueError(f"{place.path} has no {file}; {layout.again}")
            if path.stat().st_size > limit:
                raise ValueError(
                    f"{path} has {path.stat().st_size:,} bytes, too many; {layout.again}"
                )
            yield stem, str(path), path.read_bytes()
        return
    wanted = {f"{place.form.folder}/{file}": stem for file, stem in stems.items()}
    for member, content in unpack.members(place.path, wanted, limit):
        yield wanted[member], f"{member} in {place.path}", content


def _from_binary(
    content: bytes, source: str, layout: Layout, count: int
) -> tuple[UInt8[np.ndarray, "N 3 HW"], Int64[np.ndarray, "N"]]:  # noqa: F821, UP037
    length = layout.label_bytes + PIXELS
    if len(content) != count * length:
        raise ValueError(
            f"{source} has {len(content):,} bytes, expected {count * length:,}; {layout.again}"
        )
    records = np.frombuffer(content, np.uint8).reshape(count, length)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    _check_labels(int(labels.min()), int(labels.max()), source, layout)
    return records[:, layout.label_bytes :].reshape(count, 3, SIDE * SIDE), labels


def _from_pickle(
    content: bytes, source: str, layout: Layout, count: int
) -> tuple[UInt8[np.ndarray, "N 3 HW"], Int64[np.ndarray, "N"]]:  # noqa: F821, UP037
    found = pickled.batch(content, source)
    pixels, labels = found.get("data"), found.get(layout.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.shape != (count, PIXELS):
        shape = getattr(pixels, "shape", type(pixels).__name__)
        raise ValueError(
            f"{source} has data of {shape}, expected {(count, PIXELS)}; {layout.again}"
        )
    if not isinstance(labels, list) or len(labels) != count or set(map(type, labels)) != {int}:
        raise ValueError(
            f"{source} needs {count:,} whole numbers as {layout.label_key}; {layout.again}"
        )
    _check_labels(min(labels), max(labels), source, layout)
    return pixels.reshape(count, 3, SIDE * SIDE), np.array(labels, np.int64)


def _check_labels(low: int, high: int, source: str, layout: Layout) -> None:
    last = len(layout.classes) - 1
    if low < 0 or high > last:
        wrong = low if low < 0 else high
        raise ValueError(f"{source} has a label {wrong}, expected 0 to {last}; {layout.again}")


def _sum_of_squares(plane: UInt8[np.ndarray, "N HW"]) -> int:
    wide = plane.astype(np.uint16)
    wide *= wide  # 255² fits
    return int(wide.sum(dtype=np.uint64))
