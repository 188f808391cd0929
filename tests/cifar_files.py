"""Small data sets in the official files' formats, written byte by byte as they are documented."""

import hashlib
import io
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mssar.lab.data import cifar
from mssar.lab.data.cifar import Layout

# Five and one image a class, or two and one.
COUNTS = {"cifar10": (50, 10), "cifar100": (200, 100)}


class Sample:
    """Images, labels, and a layout that expects them."""

    def __init__(self, name: str) -> None:
        random = np.random.default_rng(0)
        layout = cifar.LAYOUTS[name]
        train, test = COUNTS[name]
        classes = len(layout.classes)
        self.images = {
            split: random.integers(0, 256, (count, 32, 32, 3), np.uint8)
            for split, count in (("train", train), ("test", test))
        }
        self.labels = {
            split: random.permutation(np.arange(len(images)) % classes)
            for split, images in self.images.items()
        }
        flat = self.images["train"].reshape(-1, 3).astype(float)
        red, green, blue = (float(mean) for mean in flat.mean(0))
        self.std = flat.std(0)
        self.layout = replace(
            layout,
            train_count=train,
            test_count=test,
            mean=(red, green, blue),
            contents=(self.contents("train"), self.contents("test")),
        )

    def contents(self, split: str) -> str:
        """SHA-256 of images with their labels, however they are ordered."""
        each = [
            hashlib.sha256(image.tobytes() + bytes([label])).digest()
            for image, label in zip(self.images[split], self.labels[split], strict=True)
        ]
        return hashlib.sha256(b"".join(sorted(each))).hexdigest()

    def batches(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """File → its images and labels."""
        layout = self.layout
        each = layout.train_count // len(layout.train)
        found = {
            stem: (
                self.images["train"][i * each : (i + 1) * each],
                self.labels["train"][i * each : (i + 1) * each],
            )
            for i, stem in enumerate(layout.train)
        }
        return found | {layout.test: (self.images["test"], self.labels["test"])}

    def binary(self) -> dict[str, bytes]:
        coarse = [7] if self.layout.label_bytes == 2 else []
        return {
            f"{stem}.bin": b"".join(
                bytes([*coarse, label]) + _planes(image)
                for image, label in zip(images, labels, strict=True)
            )
            for stem, (images, labels) in self.batches().items()
        }

    def python(self, protocol: int = 2) -> dict[str, bytes]:
        """As Python 3 pickles them; protocol 0 stands for Python 2, which made the official."""
        found = {}
        for stem, (images, labels) in self.batches().items():
            rows = b"".join(map(_planes, images))
            numbers = [int(label) for label in labels]
            if protocol:
                data = np.frombuffer(rows, np.uint8).reshape(len(images), 3072)
                names = [f"image_{i}.png" for i in range(len(images))]
                values = {"batch_label": stem, "data": data, "filenames": names}
                values[self.layout.label_key] = numbers
                found[stem] = pickle.dumps(values, protocol)
            else:
                found[stem] = python2(self.layout, rows, numbers)
        return found

    def write(self, root: Path, form: str) -> Path:
        """The data set in the folder ``root`` in one of ``FORMS``."""
        kind, *packed = form.split(" ")
        place = self.layout.forms[0 if kind == "binary" else 1]
        files = {"binary": self.binary, "python": self.python, "python2": lambda: self.python(0)}
        contents = files[kind]()
        if packed:
            archive = root / place.archive
            archive.write_bytes(tar({f"{place.folder}/{file}": c for file, c in contents.items()}))
            return archive
        folder = root / place.folder
        folder.mkdir()
        for file, content in contents.items():
            (folder / file).write_bytes(content)
        return folder


FORMS = [
    f"{kind}{packed}" for kind in ("binary", "python", "python2") for packed in ("", " packed")
]


def _planes(image: np.ndarray) -> bytes:
    return b"".join(image[:, :, colour].tobytes() for colour in range(3))


def python2(layout: Layout, rows: bytes, labels: list[int]) -> bytes:
    """A pickle with the opcodes that Python 2 and an old NumPy used."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        + b"(K\x01(" + b"J" + struct.pack("<i", len(labels)) + b"M\x00\x0ct"
        + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<i", len(rows)) + rows + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    key = layout.label_key.encode()
    entries = b"U\x04data" + array + b"U" + bytes([len(key)]) + key + numbers
    return b"\x80\x02}(" + entries + b"U\x0bbatch_labelU\x04textu."


def tar(contents: dict[str, bytes], *strange: tarfile.TarInfo) -> bytes:
    """A compressed archive of files, with members of other kinds after them."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in strange:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return stream.getvalue()


def standing_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """A sample that is taken for the data set."""
    made = Sample(name)
    monkeypatch.setitem(cifar.LAYOUTS, name, made.layout)
    return made


@pytest.fixture
def small(monkeypatch):
    return standing_in("cifar10", monkeypatch)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


HOSTILE = [
    (member("../evil"), "lies outside a folder"),
    (member("cifar-10-batches-bin/../../evil"), "lies outside a folder"),
    (member("/evil"), "lies outside a folder"),
    (member("c:\\evil"), "lies outside a folder"),
    (member("evil", tarfile.SYMTYPE, "/etc"), "is a symbolic link"),
    (member("evil", tarfile.LNKTYPE, "cifar-10-batches-bin/test_batch.bin"), "is a hard link"),
    (member("evil", tarfile.CHRTYPE), "is neither a file nor a folder"),
    (member("evil", tarfile.BLKTYPE), "is neither a file nor a folder"),
    (member("evil", tarfile.FIFOTYPE), "is neither a file nor a folder"),
]


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    (line,) = str(error.value).splitlines()
    return line
