"""One image: how it is decoded, cut, turned and mirrored."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mssar.lab.data import pictures
from mssar.lab.recipes import Photographs

pytestmark = pytest.mark.usefixtures("torchvision")

PLAIN = Photographs(8, 8, area=(1, 1), ratio=(1, 1), mirror=0, rotation=0, jitter=0)
STRONG = Photographs(16, 20, rotation=30)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours, so that what is resized or compressed can be compared."""
    rough = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def test_the_whole_of_a_square_is_a_plain_resize():
    image = picture(24, 24)
    expected = pixels(image.resize((8, 8), Image.Resampling.BILINEAR))
    assert torch.equal(pixels(pictures.training(PLAIN)(image)), expected)


def test_a_square_of_the_right_size_is_tested_as_it_is():
    image = picture(8, 8)
    assert torch.equal(pixels(pictures.testing(PLAIN)(image)), pixels(image))


def test_testing_cuts_the_centre_of_the_resized_image():
    image, chosen = picture(40, 20), Photographs(6, 10)
    expected = image.resize((20, 10), Image.Resampling.BILINEAR).crop((7, 2, 13, 8))
    assert torch.equal(pixels(pictures.testing(chosen)(image)), pixels(expected))
    assert pictures.testing(chosen)(picture(5000, 1)).size == (6, 6)


def test_mirror_flips_exactly():
    image = picture(24, 24)
    mirrored = pictures.training(replace(PLAIN, mirror=1))(image)
    assert torch.equal(pixels(mirrored), pixels(pictures.training(PLAIN)(image)).flip(1))


def test_a_part_turned_within_the_image_has_no_empty_corners():
    image = picture(64, 64)
    box = {"top": 24, "left": 24, "height": 16, "width": 16}
    grey = Image.new("RGB", (64, 64), (255, 255, 255))
    for angle in (-20.0, 7.0, 45.0, 90.0):
        assert (pixels(pictures.turned_crop(grey, **box, angle=angle, size=16)) == 255).all()
        ours = pixels(pictures.turned_crop(image, **box, angle=angle, size=16))
        theirs = image.rotate(angle, Image.Resampling.BILINEAR).crop((24, 24, 40, 40))
        assert (ours.int() - pixels(theirs).int()).abs().max() <= 3
    corner = {**box, "top": 0, "left": 0}
    turned = pixels(pictures.turned_crop(grey, **corner, angle=20.0, size=16))
    assert turned[0, 0].tolist() == pictures.FILL  # beyond the edges: the mean colour
    assert (turned[4:12, 4:12] == 255).all()


def test_tensors_are_transformed_as_images_are():
    image = picture(90, 60)
    for chosen, train in ((STRONG, True), (Photographs(32, 40), False)):
        square_of = pictures.Transform(chosen, train, seed=3, epoch=1).ready()
        tensor = pixels(image).permute(2, 0, 1)
        ours, theirs = (
            torch.stack([square_of(form, index) for index in range(6)]).int()
            for form in (image, tensor)
        )
        assert (ours - theirs).abs().float().mean() < 2
        assert train == (not torch.equal(ours[0], ours[1]))


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
    assert pictures.is_plain_jpeg(jpeg)
    assert pictures.is_plain_jpeg(encoded(image.convert("L"), "JPEG"))
    assert not pictures.is_plain_jpeg(encoded(image.convert("CMYK"), "JPEG"))
    assert not pictures.is_plain_jpeg(encoded(image, "PNG"))
    assert not pictures.is_plain_jpeg(jpeg[:-40])
