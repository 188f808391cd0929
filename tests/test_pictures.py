"""One image: how it is decoded."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from mssar.lab.data import pictures

pytestmark = pytest.mark.usefixtures("torchvision")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours, so that what is resized or compressed can be compared."""
    rough = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1", "CMYK", "I;16", "exif"])
def test_every_mode_becomes_rgb(mode):
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16).repeat(4, 0).repeat(4, 1)
    grey = Image.fromarray(ramp)
    if mode == "I;16":
        data = encoded(Image.fromarray(ramp.astype(np.uint16) << 8), "PNG")
    elif mode == "exif":  # says: turned by 90°; ignored
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encoded(grey.convert("RGB"), "PNG", exif=exif)
    else:
        kind = "JPEG" if mode == "CMYK" else "PNG"
        extra = {"transparency": b"\x80" * 10} if mode == "P" else {}
        source = grey if mode == "P" else grey.convert("RGB")  # its palette is then of greys
        data = encoded(source.convert(mode), kind, **extra)
    image = pictures.decode(data)
    assert (image.mode, image.size) == ("RGB", (64, 64))
    expected = pixels((grey.convert("1") if mode == "1" else grey).convert("RGB"))
    assert (pixels(image).int() - expected.int()).abs().max() <= (4 if mode == "CMYK" else 0)


def test_only_plain_jpegs_are_for_the_gpu():
    image = picture(64, 48)
    jpeg = encoded(image, "JPEG")
    assert pictures.plain_jpeg(jpeg)
    assert pictures.plain_jpeg(encoded(image.convert("L"), "JPEG"))
    assert not pictures.plain_jpeg(encoded(image.convert("CMYK"), "JPEG"))
    assert not pictures.plain_jpeg(encoded(image, "PNG"))
    assert not pictures.plain_jpeg(jpeg[:-40])
