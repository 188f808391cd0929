"""What becomes of photographs: how they are cut, turned, mirrored and jittered."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from test_pictures import picture, pixels

from mssar.lab.data import transforms
from mssar.lab.data.transforms import Draw
from mssar.lab.recipes import Photographs

pytestmark = pytest.mark.usefixtures("torchvision")

PLAIN = Photographs(8, 8, area=(1, 1), ratio=(1, 1), mirror=0, rotation=0, jitter=0)
STRONG = Photographs(16, 20, rotation=30)
STILL = Draw(24, 24, 16, 16, 0.0, False, (0, 1, 2), (1, 1, 1))


def whole(image, chosen, train=True, index=0):
    transform = transforms.Transform(chosen, train, seed=3, epoch=1)
    return transform.whole(image, transform.draw(image, index))


def test_the_whole_of_a_square_is_a_plain_resize():
    image = picture(24, 24)
    expected = pixels(image.resize((8, 8), Image.Resampling.BILINEAR))
    assert torch.equal(whole(image, PLAIN), expected)


def test_a_square_of_the_right_size_is_tested_as_it_is():
    image = picture(8, 8)
    assert torch.equal(whole(image, PLAIN, train=False), pixels(image))


def test_testing_cuts_the_centre_of_the_resized_image():
    image, chosen = picture(40, 20), Photographs(6, 10)
    expected = image.resize((20, 10), Image.Resampling.BILINEAR).crop((7, 2, 13, 8))
    assert torch.equal(whole(image, chosen, train=False), pixels(expected))
    assert whole(picture(5000, 1), chosen, train=False).shape == (6, 6, 3)


def test_mirror_flips_exactly():
    image = picture(24, 24)
    mirrored = whole(image, replace(PLAIN, mirror=1))
    assert torch.equal(mirrored, whole(image, PLAIN).flip(1))


@pytest.mark.parametrize("rotation", [20, 45, 90, 180])
def test_a_part_turned_within_the_image_has_no_empty_corners(rotation):
    image, grey = picture(64, 64), Image.new("RGB", (64, 64), (255, 255, 255))
    chosen = Photographs(16, 16, rotation=rotation)

    def made(image, drawn):
        return pixels(transforms.finish(transforms.cut(image, drawn, chosen), drawn, chosen))

    for angle in (-rotation, -7.0, 0.0, rotation / 2, rotation):
        drawn = STILL._replace(angle=float(angle))
        assert (made(grey, drawn) == 255).all()
        theirs = image.rotate(angle, Image.Resampling.BILINEAR).crop((24, 24, 40, 40))
        assert (made(image, drawn).int() - pixels(theirs).int()).abs().max() <= 3
    corner = made(grey, STILL._replace(top=0, left=0, angle=20.0))
    assert corner[0, 0].tolist() == transforms.FILL  # beyond the edges: the mean colour
    assert (corner[4:12, 4:12] == 255).all()


def test_draws_fill_their_ranges_evenly():
    torch.manual_seed(0)
    chosen = Photographs(16, 20, rotation=30, jitter=0.4, mirror=0.25)
    draws = [transforms.draw(picture(40, 30), chosen) for _ in range(2000)]
    values = torch.tensor([(d.angle, *d.factors) for d in draws])
    lows, highs = torch.tensor([[-30, 0.6, 0.6, 0.6], [30, 1.4, 1.4, 1.4]])
    uniform = (values - lows) / (highs - lows)
    assert uniform.min() >= 0
    assert uniform.max() <= 1
    for share in (0.1, 0.5, 0.9):
        assert ((uniform < share).float().mean(0) - share).abs().max() < 0.04
    correlation = torch.corrcoef(uniform.T) - torch.eye(4)
    assert correlation.abs().max() < 0.08
    assert abs(np.mean([d.mirrored for d in draws]) - 0.25) < 0.04
    orders, counts = np.unique([d.order for d in draws], axis=0, return_counts=True)
    assert len(orders) == 6
    assert counts.min() > 250
    boxes = {(d.top, d.left, d.height, d.width) for d in draws}
    assert len(boxes) > 500


def test_tensors_are_cut_as_images_are():
    image = picture(90, 60)
    tensor = pixels(image).permute(2, 0, 1)
    for chosen, train in ((STRONG, True), (Photographs(32, 40), False)):
        transform = transforms.Transform(chosen, train, seed=3, epoch=1)
        for index in range(6):
            drawn = transform.draw(image, index)
            assert drawn == transform.draw(tensor, index)
            ours, theirs = (transform.cut(form, drawn).int() for form in (image, tensor))
            assert len(ours) == transform.side
            assert (ours - theirs).abs().max() <= 2


def test_many_at_once_are_finished_as_each_alone():
    """Against torchvision, image by image, in floating point, where nothing is rounded between."""
    torch.manual_seed(0)
    chosen, image = Photographs(48, 56, rotation=30, jitter=0.9), picture(90, 70)
    draws = [transforms.draw(image, chosen) for _ in range(40)]
    assert {d.mirrored for d in draws} == {False, True}
    draws[0] = STILL._replace(height=48, width=48)  # nothing but the margin comes off
    cuts = [transforms.cut(image, drawn, chosen) for drawn in draws]
    rows = torch.tensor([transforms.packed(drawn) for drawn in draws])
    found = transforms.finish_all(torch.stack([pixels(c) for c in cuts]), rows, 48)
    for made, drawn, square in zip(found, draws, cuts, strict=True):
        exact = pixels(square).permute(2, 0, 1) / 255
        expected = 255 * transforms.finish(exact, drawn, chosen)
        assert (made.permute(2, 0, 1) - expected).abs().max() < 0.6, drawn
    more = transforms.margin(chosen)
    assert torch.equal(found[0], pixels(cuts[0])[more:-more, more:-more])


def test_finishing_nothing_drawn_changes_nothing():
    squares = torch.randint(256, (3, 10, 10, 3), dtype=torch.uint8)
    rows = torch.tensor([transforms.packed(None)] * 3)
    assert torch.equal(transforms.finish_all(squares, rows, 10), squares)
