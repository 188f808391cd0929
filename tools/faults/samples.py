"""A data set in miniature, in CIFAR-10's own files: 20 images to learn and 10 to test."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faults.exchange import exchanged
from mssar.lab.data import cifar, fetch
from mssar.lab.data.cifar import Layout
from mssar.lab.data.dataset import Split

TRAIN, TEST = 20, 10
MEAN = (127.5, 127.5, 127.5)


@cache
def files() -> dict[str, bytes]:
    """By name. Every image comes with its negative, so that the mean of each colour is known."""
    draw = np.random.default_rng(0)
    found = {}
    layout = cifar.LAYOUTS["cifar10"]
    next_labels = np.arange(TRAIN + TEST, dtype=np.uint8) % 10  # as many of each
    for stem in (*layout.train, layout.test):
        count = TRAIN // len(layout.train) if stem in layout.train else TEST
        half = draw.integers(0, 256, (count // 2, cifar.PIXELS), np.uint8)
        images = np.concatenate([half, 255 - half])
        labels = next_labels[:count, None]
        next_labels = next_labels[count:]
        found[f"{stem}.bin"] = np.concatenate([labels, images], 1).tobytes()
    return found


@cache
def layout() -> Layout:
    """What the program is told that CIFAR-10 looks like."""
    real = cifar.LAYOUTS["cifar10"]
    whole = (b"".join(files()[f"{stem}.bin"] for stem in real.train), files()[f"{real.test}.bin"])
    known = tuple(cifar.contents_of(_split(content)) for content in whole)
    return replace(real, train_count=TRAIN, test_count=TEST, mean=MEAN, contents=known)


def _split(content: bytes) -> Split:
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + cifar.PIXELS)
    images = rows[:, 1:].reshape(-1, 3, cifar.SIDE, cifar.SIDE).transpose(0, 2, 3, 1)
    labels = torch.from_numpy(rows[:, 0].astype(np.int64))
    return Split(torch.from_numpy(np.ascontiguousarray(images)), labels)


@cache
def archive() -> bytes:
    """As its authors would offer it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files().items():
            member = tarfile.TarInfo(f"{layout().forms[0].folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), 1, mtime=0)  # the same in every process


def put(root: Path) -> None:
    """The data set, unpacked, in a folder of data sets."""
    folder = root / layout().forms[0].folder
    folder.mkdir(parents=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)


def are_whole(root: Path) -> bool:
    """Whether the unpacked files are there, every byte of them."""
    folder = root / layout().forms[0].folder
    return folder.is_dir() and files() == {p.name: p.read_bytes() for p in folder.iterdir()}


@contextmanager
def installed(url: str = "https://127.0.0.1/nowhere.tar.gz") -> Iterator[None]:
    """Have the program take the miniature for CIFAR-10, and an address for its official site."""
    digest = hashlib.sha256(archive()).hexdigest()
    changes: list[tuple[Any, str, Any]] = [
        (cifar, "LAYOUTS", {**cifar.LAYOUTS, "cifar10": layout()}),
        (fetch, "SOURCES", {"cifar10": fetch.Source(url, digest)}),
        (fetch, "SCHEMES", ("http",)),  # the site of this machine has no certificate
        (fetch, "ELSEWHERE", {}),
        (fetch, "PIECE", 4096),
        (fetch, "PAUSES", (0.01, 0.01)),
    ]
    with exchanged(changes):
        yield
