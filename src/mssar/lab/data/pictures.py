"""One image, from a file's bytes to its pixels: by Pillow, or by torchvision on a GPU.

Orientation in EXIF is ignored, as it is wherever ImageNet is trained on: published numbers come
from images as they are stored. Alpha is dropped and deeper colours are cut to 8 bits.
"""

from __future__ import annotations

import functools
import importlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mssar.extras import advice

if TYPE_CHECKING:
    from jaxtyping import UInt8

LONGEST = 1 << 30  # bytes: what Pillow decodes at all is shorter even uncompressed
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # of the contents, whatever the name; no others are tried


def contents(path: Path) -> bytes:
    """A file's bytes, if they may be an image's: a pipe never ends, and memory does."""
    if path.exists() and not path.is_file() and not path.is_dir():  # which has its own error
        raise ValueError("not a regular file")
    if (size := path.stat().st_size) > LONGEST:
        raise ValueError(f"{size:,} bytes, more than any image that is read here has")
    return path.read_bytes()


def decode(data: bytes) -> Image.Image:
    """An RGB image of a file's contents; whatever is wrong with them is an exception."""
    with _strictly():
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.mode.startswith("I"):  # 16 bits, which Pillow would clip rather than scale
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def plain_jpeg(data: bytes) -> Image.Image | None:
    """Its header, if the GPU's decoder may have it: a JPEG in grey or colour, not cut short.

    The decoder would make something of CMYK and of half a file; Pillow is right about both.
    """
    with _strictly():
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    ended = data.rfind(b"\xff\xd9", max(0, len(data) - 1024)) >= 0
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L") and ended
    return image if plain else None


@contextmanager
def _strictly() -> Iterator[None]:
    """Pillow's warnings: one of a decompression bomb is an error, others change no pixel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def reason_of(error: Exception) -> str:
    """One short line, without a path."""
    if isinstance(error, UnidentifiedImageError):
        return f"no image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


@functools.cache
def gpu_refuses(device: torch.device) -> str:
    """Why JPEG cannot be decoded on a device; nothing if it can. Tried once, on a small image."""
    if device.type != "cuda":
        return f"the device is {device}, not CUDA"
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 100, 50)).save(file, "JPEG")
    try:
        (image,) = decode_jpegs(
            [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device
        )
        close = abs(image.float().mean((1, 2)).cpu() - torch.tensor([200.0, 100, 50])).max() < 8
        return "" if close else "torchvision's decoder gives other colours"
    except (RuntimeError, ValueError, AttributeError) as error:
        return reason_of(error)


def decode_jpegs(
    files: list[UInt8[Tensor, "_"]],  # noqa: F821, UP037
    device: torch.device,
) -> list[UInt8[Tensor, "3 _ _"]]:
    """All the files or, if the decoder refuses any of them, a ``RuntimeError``."""
    codec = torchvision_module("torchvision.io")
    # In deterministic mode torch fills new memory on our stream, where the decoder, on its own and
    # not waiting for ours, may have written already. It writes every pixel anyway.
    deterministic: Any = torch.utils.deterministic
    filling = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        found = codec.decode_jpeg(files, codec.ImageReadMode.RGB, device) if files else []
    finally:
        deterministic.fill_uninitialized_memory = filling
    return list(found)


def torchvision_module(module: str) -> Any:
    """Imported where it is needed: the rest of the lab does without."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchvision":
            raise
        raise ValueError(
            f"training on image folders needs torchvision: {advice('images')}"
        ) from None
    except RuntimeError as error:  # built for another torch
        reason = str(error).splitlines()[0]
        raise ValueError(f"torchvision does not fit the torch that is here: {reason}") from None
