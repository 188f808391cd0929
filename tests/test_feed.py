"""What a step is given, against plain loops.  n images of a batch, 8×8 pixels each."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from lab import CPU, arrays, feed, split, tiny
from torch import Tensor

from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import feed as feeds
from mssar.lab.engine.feed import Normalise, Resident, batch_sizes, crop, generator, shard
from mssar.lab.engine.world import World


def plain_crop(image: Tensor, top: int, left: int, mirrored: bool, padding: int) -> Tensor:
    """A window of the image at (top − padding, left − padding); nothing is beyond its border."""
    height, width, _ = image.shape
    found = torch.zeros_like(image)
    for h in range(height):
        for w in range(width):
            source = (w if not mirrored else width - 1 - w) + left - padding
            row = h + top - padding
            if 0 <= row < height and 0 <= source < width:
                found[h, w] = image[row, source]
    return found


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crops_are_those_of_a_plain_loop(padding):
    images = torch.randint(1, 256, (5, 6, 9, 3), dtype=torch.uint8)
    padded = torch.zeros(5, 6 + 2 * padding, 9 + 2 * padding, 3, dtype=torch.uint8)
    padded[:, padding : padding + 6, padding : padding + 9] = images
    which = torch.randint(5, (40,))
    top, left = torch.randint(2 * padding + 1, (2, 40))
    mirrored = torch.rand(40) < 0.5
    mirrored[:2] = torch.tensor([True, False])
    found = crop(padded, which, top, left, mirrored, (6, 9))
    for number in range(40):
        expected = plain_crop(
            images[which[number]],
            int(top[number]),
            int(left[number]),
            bool(mirrored[number]),
            padding,
        )
        assert torch.equal(found[number], expected)


def test_training_images_lie_in_a_margin_of_zeros_and_test_images_as_they_are():
    data = arrays()
    resident = Resident(data, 2, CPU.device)
    inner = resident.train.images[:, 2:-2, 2:-2]
    assert torch.equal(inner, data.train.images)
    assert resident.train.images.long().sum() == inner.long().sum()
    assert torch.equal(resident.test.images, data.test.images)
    assert torch.equal(resident.test.labels, data.test.labels)


def numbered(count: int) -> Arrays:
    """Image number i is all i, so that a crop without padding says which it was."""
    data = arrays(train=count)
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 8, 8, 3)
    train = replace(data.train, images=images.contiguous(), labels=torch.arange(count))
    return replace(data, train=train, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def epoch_of(data: Arrays, epoch: int, seed: int = 0, world: World = World()) -> list[list[int]]:  # noqa: B008, frozen
    """The numbers of the images in every batch."""
    source = feed(data, tiny(seed, padding=0), world)
    source.begin(epoch, 0)
    batches = []
    for step, size in enumerate(source.sizes):
        x, y = source.take(torch.tensor(step), size)
        assert torch.equal(x[:, 0, 0, 0].long(), y)  # an image and its own label
        batches.append(y.tolist())
    return batches


def test_an_epoch_visits_every_image_once():
    batches = epoch_of(numbered(37), 0)
    assert [len(batch) for batch in batches] == [16, 16, 5]
    visited = [number for batch in batches for number in batch]
    assert visited != list(range(37))
    assert sorted(visited) == list(range(37))


def test_the_order_depends_on_seed_and_epoch_only():
    data = numbered(37)
    first = epoch_of(data, 3, seed=5)
    torch.manual_seed(77)
    torch.rand(10)
    assert epoch_of(data, 3, seed=5) == first
    assert epoch_of(data, 4, seed=5) != first
    assert epoch_of(data, 3, seed=6) != first
    assert epoch_of(data, 5, seed=3) != first
    source = feed(data, tiny(5, padding=0))
    for epoch, step in ((0, 0), (4, 1), (3, 2)):  # whatever was begun before, at whatever step
        source.begin(epoch, step)
    assert source.take(torch.tensor(2), 5)[1].tolist() == first[2]


def test_crops_depend_on_seed_and_epoch_only():
    data, run = arrays(), tiny(5, padding=2)

    def pixels(epoch: int, seed: int) -> Tensor:
        source = feed(data, replace(run, seed=seed))
        source.begin(epoch, 0)
        return source.images.clone()

    assert torch.equal(pixels(1, 5), pixels(1, 5))
    assert not torch.equal(pixels(1, 5), pixels(2, 5))
    assert not torch.equal(pixels(1, 5), pixels(1, 6))


def test_crops_are_drawn_evenly_and_half_are_mirrored():
    data = arrays(train=2000)
    image = torch.zeros(8, 8, 3, dtype=torch.uint8)
    image[4, 2] = 255  # where this pixel is found tells the crop
    data = replace(data, train=replace(data.train, images=image.expand(2000, -1, -1, -1)))
    source = feed(data, tiny(padding=1, batch=1000))
    source.begin(0, 0)
    found = Counter()
    for picture in source.images:
        row, column = picture[:, :, 0].nonzero()[0].tolist()
        mirrored = column > 3
        found[5 - row, column - 4 if mirrored else 3 - column] += 1
        found[mirrored] += 1
    assert 900 < found[True] < 1100
    for top in range(3):
        for left in range(3):
            assert 150 < found[top, left] < 300  # 2000/9 = 222 ± 14


def test_other_keys_give_unrelated_numbers():
    keys = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 23), (12, 3), (2**31 - 1, 299)]
    drawn = {torch.randint(2**62, (1,), generator=generator(*key)).item() for key in keys}
    assert len(drawn) == len(keys)
    again = torch.randint(2**62, (1,), generator=generator(1, 23))
    assert torch.equal(again, torch.randint(2**62, (1,), generator=generator(1, 23)))


@pytest.mark.parametrize(("size", "batch", "count"), [(2, 16, 37), (3, 12, 43)])
def test_processes_share_every_batch(size, batch, count):
    """Together they have exactly the batches that one process has, crops included."""
    data, run = numbered(count), tiny(padding=1, batch=batch)
    alone = feed(data, run)
    alone.begin(2, 0)
    parts = [feed(data, run, World(rank, size)) for rank in range(size)]
    for part in parts:
        part.begin(2, 0)
        assert part.totals == alone.sizes
    tail = count % batch
    assert [part.sizes[-1] for part in parts] == [len(range(r, tail, size)) for r in range(size)]
    for step, total in enumerate(alone.sizes):
        x, y = alone.take(torch.tensor(step), total)
        for rank, part in enumerate(parts):
            mine, labels = part.take(torch.tensor(step), part.sizes[step])
            assert torch.equal(mine, x[rank::size])
            assert torch.equal(labels, y[rank::size])


@pytest.mark.parametrize("size", [2, 3])
def test_shards_are_a_partition(size):
    order = torch.randperm(29)
    totals = [12, 12, 4]
    shards = [shard(order, totals, World(rank, size)) for rank in range(size)]
    for step, batch in enumerate(order[:28].split(totals)):
        mine = torch.cat([shards[rank][step] for rank in range(size)])
        assert sorted(mine.tolist()) == sorted(batch.tolist())


@pytest.mark.parametrize(
    ("images", "batch", "size", "totals"),
    [
        (37, 16, 1, [16, 16, 5]),
        (32, 16, 1, [16, 16]),
        (34, 16, 1, [16, 16, 2]),
        (33, 16, 1, [16, 16]),  # one image is too few for BN
        (5, 16, 1, [5]),
        (2, 16, 1, [2]),
        (37, 16, 2, [16, 16, 5]),
        (36, 16, 2, [16, 16, 4]),
        (35, 16, 2, [16, 16]),  # one of the two would have a single image
        (29, 12, 3, [12, 12]),
        (30, 12, 3, [12, 12, 6]),
    ],
)
def test_the_last_batch_is_what_is_left_unless_too_little_for_bn(images, batch, size, totals):
    shares = [batch_sizes(images, batch, World(rank, size)) for rank in range(size)]
    for mine, found in shares:
        assert found == totals
        assert min(mine) >= 2
    assert [sum(step) for step in zip(*(mine for mine, _ in shares), strict=True)] == totals


@pytest.mark.parametrize(
    ("images", "batch", "size", "message"),
    [
        (37, 15, 2, "a batch of 15 cannot be shared equally by 2 processes"),
        (37, 3, 3, "a batch of 3 over 3 processes: BN needs 2 images each"),
        (1, 16, 1, "1 training images are too few"),
        (0, 16, 1, "0 training images are too few"),
        (3, 16, 2, "3 training images are too few"),
    ],
)
def test_batches_that_cannot_be_are_refused(images, batch, size, message):
    with pytest.raises(ValueError, match=message):
        batch_sizes(images, batch, World(0, size))


def test_take_gives_what_begin_prepared_normalised():
    data, run = arrays(), tiny(3)
    source = feed(data, run)
    source.begin(1, 0)
    draw = generator(3, 1)
    order = torch.randperm(37, generator=draw)
    top, left = torch.randint(3, (2, 37), generator=draw)
    mirrored = torch.rand(37, generator=draw) < 0.5
    mean, std = torch.tensor(data.mean).double(), torch.tensor(data.std).double()
    for step, batch in enumerate(order.split(16)):
        x, y = source.take(torch.tensor(step), len(batch))
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert x.dtype == torch.float32
        for place, i in enumerate(batch.tolist()):
            image = data.train.images[i]
            pixels = plain_crop(image, int(top[i]), int(left[i]), bool(mirrored[i]), 1)
            expected = ((pixels.double() - mean) / std).permute(2, 0, 1).float()
            torch.testing.assert_close(x[place], expected, rtol=1e-5, atol=1e-6)
            assert y[place] == data.train.labels[i]


def test_normalised_training_images_have_mean_zero_and_variance_one():
    data = arrays(train=64)
    x = Normalise(data, CPU.device)(data.train.images.permute(0, 3, 1, 2)).double()
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3).double(), rtol=1e-5, atol=0)
    assert not torch.allclose(x.std((0, 2, 3)), x.new_tensor(data.std))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_test_is_every_test_image_once_as_it_is(monkeypatch, size):
    monkeypatch.setattr(feeds, "EVALUATION_BATCH", 5)
    data = arrays(test=23)
    normalise = Normalise(data, CPU.device)
    seen = []
    for rank in range(size):
        source = feed(data, tiny(batch=12), World(rank, size))
        source.begin_test()
        mine = []
        for step, count in enumerate(source.tests):
            source.load_test(step)
            x, y = source.take_test(step)
            assert len(x) == len(y) == count <= 5
            mine += zip(x, y, strict=True)
        seen += [(rank + size * place, x, y) for place, (x, y) in enumerate(mine)]
    assert sorted(number for number, _, _ in seen) == list(range(23))
    for number, x, y in seen:
        image = normalise(data.test.images[number].permute(2, 0, 1)[None])[0]
        assert torch.equal(x, image)
        assert y == data.test.labels[number]


def test_a_checksum_is_that_of_images_and_labels():
    data = arrays()
    assert arrays().checksum == data.checksum
    assert replace(data, name="x", mean=(0.0, 0.0, 0.0)).checksum == data.checksum
    assert replace(data, test=split(24, seed=2)).checksum != data.checksum
    labels = data.train.labels.roll(1)
    assert replace(data, train=replace(data.train, labels=labels)).checksum != data.checksum
