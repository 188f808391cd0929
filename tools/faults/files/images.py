"""Photographs: torn, lying about their size, and of every odd kind that a camera or a tool writes.

Odd ones that are valid are compared with what NumPy makes of the numbers that were put into them.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from faults.files.mutation import changed
from faults.files.sandbox import Case, Family, WrongError
from faults.vision import has_torchvision
from mssar.lab.commands.pictures import fitted
from mssar.lab.data import pictures
from mssar.lab.data.imagefolder import Files, Paths
from mssar.lab.data.photographs import _Reader
from mssar.lab.data.transforms import Transform
from mssar.lab.recipes import Photographs

TORN, HARM, ODD = "photograph, torn or changed", "photograph made to harm", "odd valid photograph"
NAMED = "named as unreadable in one line, or an image"
PROMISES = {TORN: NAMED, HARM: f"{NAMED}; at most Pillow's 89 million pixels"}
RIGHT = "the pixels that an independent conversion has"
Array = np.ndarray[Any, Any]


def pattern(height: int = 24, width: int = 32) -> Array:
    """An image that shows every mistake: no two sides or colours are alike."""
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([across * 7, down * 9, 255 - across * 3 - down], -1).astype(np.uint8)


def written(image: Image.Image, kind: str, **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


def prepare(_: Path) -> dict[str, bytes]:
    """Good files, in all the formats that are read."""
    has_torchvision()  # whose import is no part of a case
    rgb = Image.fromarray(pattern())
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "rgb.jpg": written(rgb, "JPEG"),
        "progressive.jpg": written(rgb, "JPEG", progressive=True),
        "exif.jpg": written(rgb, "JPEG", exif=exif),
        "cmyk.jpg": written(rgb.convert("CMYK"), "JPEG"),
        "grey.jpg": written(rgb.convert("L"), "JPEG"),
        "rgb.png": written(rgb, "PNG"),
        "palette.png": written(rgb.quantize(17), "PNG", transparency=3),
        "alpha.png": written(rgb.convert("RGBA"), "PNG"),
        "deep.png": written(Image.fromarray(pattern()[..., 0].astype(np.uint16) * 257), "PNG"),
        "bits.png": written(rgb.convert("1"), "PNG"),
        "animated.png": written(rgb, "PNG", save_all=True, append_images=[rgb.rotate(90)]),
        "rgb.bmp": written(rgb, "BMP"),
        "palette.bmp": written(rgb.quantize(200), "BMP"),
        "rgb.webp": written(rgb, "WEBP"),
        "lossless.webp": written(rgb.convert("RGBA"), "WEBP", lossless=True),
        "animated.webp": written(rgb, "WEBP", save_all=True, append_images=[rgb.rotate(90)]),
    }


def read(case: Case, name: str, data: bytes, *, train: bool) -> str | None:
    """As a worker reads it; why it could not, or None and it was fine."""
    (case.folder / name).write_bytes(data)
    if not has_torchvision():  # as `mssar explain` takes a picture, which does without
        try:
            image = pictures.decode(pictures.contents(case.folder / name))
        except Exception as error:  # as it does
            return pictures.reason_of(error)
        if fitted(image, (224, 224)).size != (224, 224):
            raise WrongError("of another size")
        return None
    files = Files(Paths.of([name.encode()]), torch.zeros(1, dtype=torch.int64))
    transform = Transform(Photographs(), train, seed=case.number, epoch=0)
    part = _Reader(files, case.folder, transform, finished=True, encoded=False)[[0]]
    if part.squares.shape != (1, 224, 224, 3) or part.squares.dtype != torch.uint8:
        raise WrongError(f"{tuple(part.squares.shape)} {part.squares.dtype}")
    return part.unreadable.get(0)


def torn(made: dict[str, bytes], case: Case) -> None:
    name = case.random.choice(list(made))
    what, data = changed(case.random, made[name])
    if name.endswith(".png") and case.random.random() < 0.5:
        data = with_checksums(data)  # or hardly any change would be looked at
    case.begin(TORN, f"{name}, {what}")
    judge(read(case, name, data, train=case.random.random() < 0.5))


def judge(why: str | None) -> None:
    if why is not None:
        raise ValueError(why)


def with_checksums(png: bytes) -> bytes:
    """A PNG whose chunks' checksums are right, as far as it goes."""
    found, place = png[:8], 8
    while place + 12 <= len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        body = png[place + 4 : place + 8 + length]
        found += png[place : place + 4] + body + struct.pack(">I", zlib.crc32(body))
        place += 12 + length
    return found + png[place:]


# Made to harm


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, *more: bytes, rows: int = -1) -> bytes:
    """With as many rows of zeros as are asked for, or all."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    row = bytes(1 + (width * channels * depth + 7) // 8) if rows else b""
    packer = zlib.compressobj(1)
    parts = [packer.compress(row) for _ in range(height if rows < 0 else rows)]
    body = b"".join((*parts, packer.flush()))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    start = b"\x89PNG\r\n\x1a\n" + head + b"".join(more)
    return start + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def resized_jpeg(data: bytes, height: int, width: int) -> bytes:
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def resized_bmp(data: bytes, height: int, width: int) -> bytes:
    return data[:18] + struct.pack("<ii", width, height) + data[26:]


def resized_webp(data: bytes, height: int, width: int) -> bytes:
    place = data.index(b"\x9d\x01\x2a") + 3
    return data[:place] + struct.pack("<HH", width & 0x3FFF, height & 0x3FFF) + data[place + 4 :]


@cache
def bomb() -> bytes:
    return zlib.compress(bytes(200 << 20), 1)


def harmful(made: dict[str, bytes]) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """What each is, under what name, and how to make it."""
    found: dict[str, tuple[str, Callable[[], bytes]]] = {}
    sides = ((0, 0), (0, 5), (5, 0), (1, 1), (1, 60_000), (60_000, 1), (65_535, 65_535))
    for height, width in (*sides, (9_000, 9_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)):
        what = f"{height} by {width}"
        found[f"PNG that says {what}"] = "a.png", lambda h=height, w=width: png(w, h, 8, 2, rows=0)
        if max(height, width) < 2**16:
            found[f"JPEG that says {what}"] = (
                "a.jpg",
                lambda h=height, w=width: resized_jpeg(made["rgb.jpg"], h, w),
            )
            found[f"WebP that says {what}"] = (
                "a.webp",
                lambda h=height, w=width: resized_webp(made["rgb.webp"], h, w),
            )
        for sign in (1, -1):
            found[f"BMP that says {sign * height} by {width}"] = (
                "a.bmp",
                lambda h=sign * height, w=width: resized_bmp(made["rgb.bmp"], h, w),
            )
    flat = ((9_400, 9_400, 16, 0), (9_400, 9_400, 8, 6))
    thin = ((40_000_000, 1, 8, 0), (1, 1_000_000, 8, 0), (80_000_000, 1, 1, 0))
    for width, height, depth, colour in (*flat, *thin, (30_000, 30_000, 1, 0)):
        found[f"PNG of {width:,} by {height:,}, {depth} bits, colour {colour}"] = (
            "a.png",
            lambda w=width, h=height, d=depth, c=colour: png(w, h, d, c),
        )
    packed = bomb()
    for kind in (b"zTXt", b"iCCP", b"iTXt"):
        fields = {b"iTXt": b"a\0\1\0\0\0"}.get(kind, b"a\0\0")
        found[f"{kind.decode()} of 200 MiB"] = (
            "a.png",
            lambda kind=kind, fields=fields: png(4, 4, 8, 2, chunk(kind, fields + packed)),
        )
    found["IDAT of 200 MiB"] = (
        "a.png",
        lambda: png(4, 4, 8, 2).replace(b"IEND", b"IDAT" + packed, 1),
    )
    frames = chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))
    found["2^31 frames"] = "a.png", lambda: png(4, 4, 8, 2, frames)
    rgb = Image.fromarray(pattern())
    for kind in ("GIF", "TIFF", "PPM", "ICO", "PDF", "EPS", "TGA"):
        found[f"{kind} named .jpg"] = "a.jpg", lambda kind=kind: written(rgb, kind)
    found["a pickle named .png"] = "a.png", lambda: b"cos\nsystem\n(S'touch x'\ntR."
    found["JSON named .webp"] = "a.webp", lambda: json.dumps([1]).encode()
    found["nothing"] = "a.jpg", lambda: b""
    return found


def harm(made: dict[str, bytes], case: Case) -> None:
    kinds = harmful(made)
    what = list(kinds)[case.number % len(kinds)]
    name, make = kinds[what]
    case.begin(HARM, what)
    judge(read(case, name, make(), train=bool(case.number // len(kinds) % 2)))


def images(made: dict[str, bytes], case: Case) -> None:
    if case.number % 20:
        torn(made, case)
    else:
        case.number //= 20
        harm(made, case)


# Odd and valid


class Valid(NamedTuple):
    name: str
    data: bytes
    pixels: Array  # height, width, 3
    off: int = 0  # by so much at most


def draw_odd(random: Random) -> Valid:
    """A valid file, and what its pixels are by arithmetic on what was put into it."""
    rng = np.random.default_rng(random.getrandbits(32))
    height, width = random.randint(1, 40), random.randint(1, 40)
    grey = rng.integers(0, 256, (height, width), np.uint8)
    colour = rng.integers(0, 256, (height, width, 3), np.uint8)
    alpha = rng.integers(0, 256, (height, width, 1), np.uint8)
    deep = rng.integers(0, 65_536, (height, width), np.uint16)
    palette = rng.integers(0, 256, (256, 3), np.uint8)
    bits = grey > 127
    image, as_grey = Image.fromarray, lambda one: np.repeat(one[..., None], 3, -1)
    indexed = image(grey).copy()
    indexed.putpalette(palette.tobytes())
    other = image(255 - colour)
    exif = Image.Exif()
    exif[0x0112] = random.randint(2, 8)
    smooth = pattern(24, 32)

    def raw(depth: int, kind: int, rows: Array) -> bytes:
        lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows.reshape(height, -1))
        head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
        body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + body

    wide = rng.integers(0, 65_536, (height, width, 3), np.uint16)
    four = rng.integers(0, 65_536, (height, width, 4), np.uint16)
    two = rng.integers(0, 65_536, (height, width, 2), np.uint16)
    rgba = image(np.concatenate([colour, alpha], -1))
    moving = {"save_all": True, "append_images": [other]}
    fine = {"quality": 100, "subsampling": 0}
    first = smooth[..., 0]
    choices: list[Callable[[], Valid]] = [
        lambda: Valid("16-bit grey PNG", raw(16, 0, deep), as_grey(deep >> 8)),
        lambda: Valid("16-bit RGB PNG", raw(16, 2, wide), wide >> 8),
        lambda: Valid("16-bit RGBA PNG", raw(16, 6, four), four[..., :3] >> 8),
        lambda: Valid("16-bit grey and alpha PNG", raw(16, 4, two), as_grey(two[..., 0] >> 8)),
        lambda: Valid("grey PNG", written(image(grey), "PNG"), as_grey(grey)),
        lambda: Valid("black and white PNG", written(image(bits), "PNG"), as_grey(bits * 255)),
        lambda: Valid("palette PNG", written(indexed, "PNG"), palette[grey]),
        lambda: Valid("transparent", written(indexed, "PNG", transparency=7), palette[grey]),
        lambda: Valid("palette BMP", written(indexed, "BMP"), palette[grey]),
        lambda: Valid("RGBA PNG", written(rgba, "PNG"), colour),
        lambda: Valid("RGB BMP", written(image(colour), "BMP"), colour),
        lambda: Valid("lossless WebP", written(image(colour), "WEBP", lossless=True), colour),
        lambda: Valid("animated PNG", written(image(colour), "PNG", **moving), colour),
        lambda: Valid(
            "animated WebP", written(image(colour), "WEBP", lossless=True, **moving), colour
        ),
        lambda: Valid("turned by EXIF, PNG", written(image(colour), "PNG", exif=exif), colour),
        lambda: Valid(
            "turned by EXIF, JPEG", written(image(smooth), "JPEG", exif=exif, **fine), smooth, 4
        ),
        lambda: Valid("grey JPEG", written(image(first), "JPEG", quality=100), as_grey(first), 4),
        lambda: _cmyk(smooth, alpha),
        lambda: Valid("PNG named .jpg", written(image(colour), "PNG"), colour),
    ]
    return random.choice(choices)()


def _cmyk(inks: Array, alpha: Array) -> Valid:
    """Of ink c and black k, (255 - c)(255 - k) / 255 is left of the white."""
    black = np.full((*inks.shape[:2], 1), int(alpha[0, 0, 0]) % 200, np.uint8)
    image = Image.frombytes("CMYK", inks.shape[1::-1], np.concatenate([inks, black], -1).tobytes())
    white = (255.0 - inks) * (255.0 - black) / 255
    return Valid("CMYK JPEG", written(image, "JPEG", quality=100, subsampling=0), white, 6)


def odd(_: object, case: Case) -> None:
    """Its pixels, and that a worker cuts a square out of it."""
    valid = draw_odd(case.random)
    case.begin(ODD, f"{valid.name}, {valid.pixels.shape[:2]}")
    try:
        found = np.asarray(pictures.decode(valid.data))
    except Exception as error:
        raise WrongError(f"not read: {error!r}") from error
    if found.shape != valid.pixels.shape:
        raise WrongError(f"{found.shape}, expected {valid.pixels.shape}")
    if valid.off:
        far = np.abs(found.astype(float) - valid.pixels)
        if far.mean() > valid.off or far.max() > 8 * valid.off:
            raise WrongError(f"off by {far.mean():.1f}, {far.max():.0f} at most")
    elif not np.array_equal(found, valid.pixels.astype(np.uint8)):
        raise WrongError("other pixels")
    if why := read(case, "a.jpg", valid.data, train=case.random.random() < 0.5):
        raise WrongError(why)


FAMILIES = (
    Family("images", PROMISES, 1800, 1100, prepare, images),
    Family("odd", {ODD: RIGHT}, 400, 64, prepare, odd),
)
