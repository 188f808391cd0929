"""Training on a tree of photographs: learning, stopping and going on, files that cannot be read."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lab import CPU, Log, assert_same, learnt, plant

import mssar
from mssar.lab.data.imagefolder import open_folder
from mssar.lab.engine.evaluate import evaluate, trained
from mssar.lab.engine.fleet import train
from mssar.lab.engine.training import Training
from mssar.lab.recipes import Photographs, Recipe
from mssar.lab.run import Run

pytestmark = pytest.mark.usefixtures("torchvision")

SMALL = Photographs(size=16, resize=16, area=(0.5, 1.0), rotation=5, jitter=0.1)
RECIPE = Recipe("small", epochs=3, batch=8, lr=0.05, drops=(2,), augmentation=SMALL)
RUN = Run("resnet8", "mssar", {}, "imagefolder", RECIPE)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """Dark and bright pictures; 10 and 9 for training (8, 8 and 3 a step), 4 and 3 for testing."""
    return plant(tmp_path / "tree", (20, 24), train=(10, 9), val=(4, 3))


def test_bright_and_dark_are_told_apart_and_the_record_says_of_what(tree, tmp_path):
    data, log = open_folder(tree), Log()
    (record,) = train([RUN], lambda _: data, CPU, tmp_path / "runs", log).records
    assert record.error == 0
    counts = {"classes": 2, "train": 19, "test": 7, "unreadable": 0}
    assert record.data == {"checksum": data.checksum, **counts}
    assert record.run["recipe"]["augmentation"]["kind"] == "photographs"
    assert record.macs == mssar.cost(RUN.build(2), (3, 16, 16)).macs
    score = evaluate(trained(tmp_path / "runs" / RUN.name), data, CPU)
    assert (score.error, score.loss) == (record.error, record.epochs[-1].test_loss)


@pytest.mark.parametrize("pauses", [1, 2, 3, 4, 6])
def test_what_was_stopped_goes_on_with_the_same_pictures(tree, tmp_path, pauses):
    data = open_folder(tree)
    train([RUN], lambda _: data, CPU, tmp_path / "whole", Log())
    training = Training(RUN, data, CPU, tmp_path / "parts" / RUN.name, Log())
    work = training.work()
    for _ in range(pauses):
        next(work)
    training.save()
    work.close()
    training.close()
    many = replace(CPU, workers=2)  # however many read them
    train([RUN], lambda _: data, many, tmp_path / "parts", Log())
    assert_same(learnt(tmp_path / "parts" / RUN.name), learnt(tmp_path / "whole" / RUN.name))


def test_a_file_that_cannot_be_read_is_named_once_and_left_out(tree, tmp_path):
    (tree / "train/dark/0.png").write_bytes(b"no picture")
    data, log = open_folder(tree), Log()
    lenient = replace(CPU, unreadable=0.2)
    outcome = train([RUN], lambda _: data, lenient, tmp_path / "runs", log)
    (record,) = outcome.records
    assert record.data["unreadable"] == 1
    (named,) = [message for message in log.messages if "cannot be read" in message]
    assert "train/dark/0.png" in named
    losses = learnt(tmp_path / "runs" / RUN.name)["losses"]
    assert losses.isfinite().all()


def test_too_many_of_them_stop_the_run(tree, tmp_path):
    for number in range(5):
        (tree / f"train/dark/{number}.png").write_bytes(b"no picture")
    data = open_folder(tree)
    with pytest.raises(ValueError, match=r"dark/\d.png"):
        train([RUN], lambda _: data, CPU, tmp_path / "runs", Log())
    assert not list((tmp_path / "runs").rglob("*.part"))


def test_small_images_and_photographs_have_recipes_of_their_own(tree, tmp_path):
    run = Run("resnet8", dataset="imagefolder")
    data = open_folder(tree)
    with pytest.raises(ValueError, match="cifar_resnet is for small images, not photographs"):
        train([run], lambda _: data, CPU, tmp_path, Log())
