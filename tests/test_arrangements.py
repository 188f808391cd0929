"""Arrangements: only what stands next to what tells the class, and a seed tells everything."""

import numpy as np
import pytest
import torch

from mssar.lab.data import arrangements
from mssar.lab.data.arrangements import CLASSES, COLOURS, SHAPES, UNIT, Scenes, Source, load, make

NAMES = tuple(SHAPES)
LEARNT, UNSEEN = slice(0, 2000), slice(2000, 3000)


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, Scenes]:
    return make(Source(7, 0), 3000)


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Share of unseen images that linear regression on the features puts into their class."""
    x = features.reshape(len(labels), -1).astype(np.float64)
    x = (x - x[LEARNT].mean(0)) / (x[LEARNT].std(0) + 1e-9)
    kernel = x @ x[LEARNT].T / x.shape[1] + 1  # as many unknowns as images, however many features
    targets = np.eye(len(CLASSES))[labels[LEARNT]]
    solution = np.linalg.solve(kernel[LEARNT] + 0.1 * np.eye(len(targets)), targets)
    return float(((kernel[UNSEEN] @ solution).argmax(1) == labels[UNSEEN]).mean())


def histograms(values: np.ndarray, bins: int = 32) -> np.ndarray:
    """Of each image and colour: how many values fall into each bin."""
    bin_of = (values.astype(np.int64) * bins // 256).reshape(len(values), -1, 3)
    row = np.arange(len(values) * 3).reshape(-1, 1, 3) * bins
    return np.bincount((row + bin_of).ravel(), minlength=row.size * bins).reshape(-1, 3, bins)


def patches(images: np.ndarray) -> np.ndarray:
    """Of three by three pixels, side by side."""
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (1, 2))[:, ::3, ::3]
    return windows.reshape(*windows.shape[:4], 9)


def distances(scenes: Scenes) -> np.ndarray:
    """Of the five other shapes from the disc."""
    apart = scenes.positions[:, 1:] - scenes.positions[:, :1]
    return np.hypot(apart[..., 0], apart[..., 1])


def test_a_seed_is_one_data_set() -> None:
    assert load(3, 20, 10).checksum == load(3, 20, 10).checksum
    assert load(3, 20, 10).checksum != load(4, 20, 10).checksum


def test_the_generator_has_not_changed() -> None:
    expected = "sha256:96bf6a0d8f5ec680efa455c266cb8464b74a80d909c1bfcd3c5c3cb2b8345a93"
    assert load(0, train=40, test=20).checksum == expected


def test_test_images_do_not_depend_on_the_number_to_train() -> None:
    few, many = load(0, train=10, test=30).test, load(0, train=600, test=30).test
    assert torch.equal(few.images, many.images)
    assert torch.equal(few.labels, many.labels)


@pytest.mark.parametrize("number", [1000, 1003])
def test_classes_are_balanced(number: int) -> None:
    labels = arrangements.compose(Source(0, 0), number).labels
    found = np.bincount(labels, minlength=len(CLASSES))
    assert found.max() - found.min() <= 1
    assert found.sum() == number


def test_no_image_is_in_both_splits() -> None:
    data = load(0, 1000, 1000)
    train, test = ({image.tobytes() for image in s.images.numpy()} for s in (data.train, data.test))
    assert len(train) == len(test) == 1000
    assert not train & test


def test_moments_are_those_of_the_training_images() -> None:
    data = load(1, 50, 10)
    pixels = data.train.images.double().flatten(0, 2)
    torch.testing.assert_close(torch.tensor(data.mean).double(), pixels.mean(0), rtol=1e-6, atol=0)
    spread = pixels.std(0, correction=0)
    torch.testing.assert_close(torch.tensor(data.std).double(), spread, rtol=1e-6, atol=0)


def test_the_two_shapes_nearest_to_the_disc_name_the_class(
    sample: tuple[np.ndarray, Scenes],
) -> None:
    _, scenes = sample
    nearest = np.sort(np.argsort(distances(scenes), 1)[:, :2], 1) + 1
    assert set(scenes.labels) == set(range(len(CLASSES)))
    for label, (first, second) in zip(scenes.labels, nearest, strict=True):
        assert CLASSES[label] == f"disc between {NAMES[first]} and {NAMES[second]}"


def test_neighbours_are_clearly_nearer_than_the_rest(sample: tuple[np.ndarray, Scenes]) -> None:
    near = np.sort(distances(sample[1]), 1)
    assert (near[:, 2] - near[:, 1]).min() > 2 * UNIT


def test_shapes_stay_in_the_image_when_it_is_shifted(sample: tuple[np.ndarray, Scenes]) -> None:
    _, scenes = sample
    to_edge = np.minimum(scenes.positions, 32 * UNIT - scenes.positions).min(2)
    assert (to_edge - scenes.radii).min() >= -UNIT / 4  # whole, to a quarter of a pixel
    assert to_edge.min() > 3 * UNIT  # the middle, with a pixel to spare, after a shift by two


@pytest.mark.parametrize("shape", range(len(NAMES)), ids=NAMES)
def test_a_shape_is_anywhere_as_often_in_every_class(shape: int) -> None:
    scenes = arrangements.compose(Source(1, 0), 60_000)
    x, y = (scenes.positions[:, shape] - 16 * UNIT).T
    sector = (np.arctan2(y, x) / np.pi * 6 + 6).astype(int) % 12
    counts = np.bincount(scenes.labels * 12 + sector, minlength=120).reshape(10, 12)
    expected = counts.mean(0)
    surplus = ((counts - expected) ** 2 / expected).sum()
    assert surplus < 99 + 4 * np.sqrt(2 * 99)  # chi squared, of 9 × 11 degrees of freedom


def test_sizes_and_fills_are_alike_in_every_class() -> None:
    scenes = arrangements.compose(Source(2, 0), 60_000)
    for values in (scenes.radii, *(scenes.fills == fill for fill in range(6))):
        means = np.stack([values[scenes.labels == label].mean(0) for label in range(10)])
        error = values.std(0) / np.sqrt(len(scenes) / 10)
        assert (abs(means - values.mean(0)) < 4.5 * error).all()


def test_colours_are_alike_in_every_class(sample: tuple[np.ndarray, Scenes]) -> None:
    images, scenes = sample
    counts = histograms(images, 16)
    means = np.stack([counts[scenes.labels == label].mean(0) for label in range(10)])
    error = counts.std(0) / np.sqrt(len(scenes) / 10)
    assert (abs(means - counts.mean(0)) < 4.5 * error).all()


CHANCE = 0.1 + 3.5 * np.sqrt(0.1 * 0.9 / 1000)  # what guessing stays below, 1000 times
FEATURES = {
    "histograms": histograms,
    "sorted pixels": lambda images: np.sort(images.reshape(len(images), -1, 3), 1)[:, ::8],
    "means of patches": lambda images: histograms(patches(images).mean(-1)),
    "ranges of patches": lambda images: histograms(np.ptp(patches(images), axis=-1)),
    "pixels where they are": lambda images: images,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_there_or_where_one_thing_is_does_not_tell_the_class(
    feature: str, sample: tuple[np.ndarray, Scenes]
) -> None:
    images, scenes = sample
    assert accuracy(FEATURES[feature](images), scenes.labels) < CHANCE


def test_a_linear_rule_on_distances_tells_the_class(sample: tuple[np.ndarray, Scenes]) -> None:
    """What the features above are compared with: the same regression can learn the rule."""
    _, scenes = sample
    assert accuracy(distances(scenes), scenes.labels) > 0.95


def test_the_picture_shows_the_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangements, "NOISE", (0, 0))
    images, scenes = make(Source(0, 0), 200)
    within = {"ring": (0.75, 0), "hourglass": (0, 0.6)}  # others are solid in the middle
    for shape, name in enumerate(NAMES):
        offset = np.array(within.get(name, (0, 0))) * scenes.radii[:, shape, None]
        x, y = ((scenes.positions[:, shape] + offset) // UNIT).astype(int).T
        seen = images[np.arange(len(images)), y, x]
        assert (seen.argmax(1) == np.argmax(COLOURS[shape])).mean() > 0.99, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is 0 or more; got -1"),
        ({"train": 0}, "1 or more; got 0, 2000"),
        ({"test": -5}, "1 or more; got 10000, -5"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**arguments)
