"""The real test images that come with the package, and what a page shows of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_experiments import record_of, run_of
from test_maps import decoded, picture

import mssar
from mssar.lab import data
from mssar.lab.data import sample
from mssar.lab.data.cifar import LAYOUTS
from mssar.lab.data.dataset import Split
from mssar.lab.engine.evaluate import trained
from mssar.lab.engine.feed import Normalise
from mssar.lab.recipes import varied
from mssar.lab.report import build
from mssar.lab.report.collect import Collection, collect
from mssar.lab.report.content import Explained
from mssar.lab.report.groups import named
from mssar.lab.report.maps import explained
from mssar.lab.report.phrases import wording
from mssar.networks.weights import PRETRAINED

NAME = "resnet56-mssar-{}"
RECORDS = Path(__file__).parents[1] / "records"
CLASSES = {
    "cifar10": [
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ],
    "cifar100": [
        *("apple", "bowl", "chair", "dolphin", "lamp"),
        *("mouse", "plain", "rose", "squirrel", "train"),
    ],
}
# What the networks take for something else. Two of ten each, where their errors are 6 and 28 %.
MISTAKES = {
    "cifar10": {"bird": "deer", "frog": "cat"},
    "cifar100": {"lamp": "willow_tree", "mouse": "rabbit"},
}


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has no data set."""

    def missing(*_: object) -> None:
        raise ValueError("get it first")

    monkeypatch.setattr(data, "load", missing)


def shown(found: Collection, make: Callable[..., build.Page]) -> list[Explained]:
    page = make(found, build.Maps(None, lambda _: None))
    assert not page.problems
    return list(page.explained)


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_has_an_image_of_ten_classes(name):
    found = sample.load(name)
    assert [LAYOUTS[name].classes[label] for label in found.labels] == CLASSES[name]
    assert found.images.shape == (10, 32, 32, 3)
    assert len({image.numpy().tobytes() for image in found.images}) == 10
    file = sample.FOLDER / f"{name}.png"
    assert file.stat().st_size < 100_000
    with Image.open(file) as strip:
        assert (strip.format, strip.mode, strip.size) == ("PNG", "RGB", (320, 32))
    assert [sample.there_is(one) for one in (name, "arrangements")] == [True, False]


def test_which_are_chosen_does_not_depend_on_their_order():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (500, 4, 4, 3), generator=draw, dtype=torch.uint8)
    labels = torch.arange(500) % 100
    first = sample.chosen("cifar100", Split(images, labels))
    assert labels[first].tolist() == list(range(0, 100, 10))
    order = torch.randperm(500, generator=draw)
    other = sample.chosen("cifar100", Split(images[order], labels[order]))
    assert order[other].tolist() == first
    assert first != list(range(0, 100, 10))  # nor are they simply the first


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_holds_what_the_rule_says(name):
    try:
        test = data.load(name, None).test
    except ValueError as error:
        pytest.skip(f"needs real images: {error}")
    assert torch.equal(test.images[sample.chosen(name, test)], sample.load(name).images)


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("name", CLASSES)
def test_the_page_shows_what_the_packages_network_makes_of_them(name):
    """Computed anew, without the page's code: from pixels, the note and the weights."""
    both = shown(collect([RECORDS]), build.reproduction)
    assert [one.dataset for one in both] == [*CLASSES] * 2  # the deeper networks first
    found = both[[*CLASSES].index(name)]
    assert found.label == "resnet56 mssar, seed 0"
    assert f"`{NAME.format(name)}`" in found.note
    assert "SHA-256" in found.note
    assert [(seen.label, seen.guess) for seen in found.images] == [
        (kind, MISTAKES[name].get(kind, kind)) for kind in CLASSES[name]
    ]
    net = mssar.create_model("resnet56", "mssar", weights=NAME.format(name)).eval()
    pixels = torch.stack([picture(seen.image) for seen in found.images])
    assert torch.equal(pixels, sample.load(name).images)
    mean, std = (torch.tensor(net.note[key]).reshape(3, 1, 1) for key in ("mean", "std"))
    truth = mssar.explain(net, (pixels.permute(0, 3, 1, 2) / 255 - mean) / std)
    assert {block.stage for block in found.blocks} == {1, 2, 3}
    for number, block in enumerate(found.blocks):
        own = truth[block.name]
        for view, channel in enumerate((None, *block.shown)):
            low, high = block.ranges[view]
            for place, seen in enumerate(found.images):
                for scale, z in enumerate((own.z, *own.per_scale)):
                    expected = z[place].mean(0) if channel is None else z[place, channel]
                    grid = decoded(seen.maps[number][view][scale], low, high)
                    up = expected.shape[0] // grid.shape[0]
                    whole = grid.repeat_interleave(up, 0).repeat_interleave(up, 1)
                    step = (high - low) / 255
                    torch.testing.assert_close(whole, expected.double(), atol=0.51 * step, rtol=0)


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_their_weights_are_as_the_page_says(name):
    """Nine in ten between 0.4 and 0.6; within a channel they differ by a few hundredths."""
    chosen = trained(PRETRAINED[f"resnet56-mssar-{name}"])
    images = chosen.noted(sample.load(name))
    given = Normalise(chosen.run.normalised(images), torch.device("cpu"))
    seen = mssar.explain(chosen.model, given(images.test.images.permute(0, 3, 1, 2)))
    weights = torch.cat([block.z.flatten() for block in seen.blocks])
    assert 0.9 <= ((weights > 0.4) & (weights < 0.6)).float().mean() < 0.99
    over = torch.cat([b.z.flatten(2).std(2, correction=0).flatten() for b in seen.blocks])
    assert 0.005 < over.mean() < 0.03
    for said in (wording()["reproduction"]["lead"], wording()["demo"]["maps"]["caution"]):
        assert "nine in ten lie between 0.4 and 0.6" in said
        assert "a few hundredths" in said


def test_only_a_page_with_their_record_shows_them_but_the_demo_always_does():
    found = collect([RECORDS])
    own = trained(Path(NAME.format("cifar100"))).progress.id
    others = replace(found, records=[r for r in found.records if r.id != own])
    assert len(others.records) == len(found.records) - 1
    left = [(one.label, one.dataset) for one in shown(others, build.reproduction)]
    assert left == [
        ("resnet56 mssar, seed 0", "cifar10"),
        ("resnet20 mssar, seed 0", "cifar10"),
        ("resnet20 mssar, seed 0", "cifar100"),
    ]
    assert [one.dataset for one in shown(Collection(), build.demo)] == ["cifar10", "cifar100"]
    assert not build.demo(Collection(), None).explained


def test_a_run_by_another_recipe_does_not_stand_for_them():
    found = collect([RECORDS])
    mine = ("resnet20", "mssar", "cifar100", 0)
    (other,) = (
        r
        for r in found.records
        if (*(r.run[x] for x in ("network", "recalibration", "dataset")), r.run["seed"]) == mine
        and r.run["recipe"]["weight_decay"] == 5e-4
    )
    here = replace(found, folders={other.id: Path("runs/decay")})
    seen = [path.stem for path, _ in build._worth_seeing(here, "reproduction")]
    assert "decay" in seen
    assert "resnet20-mssar-cifar100" in seen


@pytest.mark.parametrize("turn", [1, -1])
def test_runs_by_the_usual_recipe_come_before_others(turn):
    """In whatever order records are. Others have what room is left, another network's first."""

    def run(network, seed=0, **changes):
        made = run_of(network, "mssar", "cifar100", seed)
        return replace(made, recipe=varied(made.recipe, **changes))

    def seen(*runs):
        made = [record_of(one) for one in runs[::turn]]
        said = {r.id: f"{named(r.run).label} {r.run['seed']}" for r in made}
        here = Collection(made, folders={name: Path(label) for name, label in said.items()})
        return [said[name] for _, name in build._worth_seeing(here, "reproduction")]

    usual, decayed = "resnet20 mssar", "resnet20 mssar weight_decay=0.0005"
    other = run("resnet20", weight_decay=5e-4)
    assert seen(other, run("resnet20", 1)) == [f"{usual} 1", f"{decayed} 0"]
    assert seen(other, run("resnet56", 1)) == ["resnet56 mssar 1", f"{decayed} 0"]
    large = run("resnet56", weight_decay=5e-4)
    assert seen(other, run("resnet20"), large) == [
        f"{usual} 0",
        "resnet56 mssar weight_decay=0.0005 0",
    ]
    assert set(seen(other, run("resnet20"), run("resnet56"))) == {f"{usual} 0", "resnet56 mssar 0"}
    assert seen(other, run("resnet20", 1, weight_decay=5e-4)) == [f"{decayed} 0"]  # each once
    narrow = replace(run("resnet20"), options={"reduction": 3})
    assert seen(other, narrow) == [f"{usual} reduction=3 0", f"{decayed} 0"]


def test_a_recipe_that_is_not_the_usual_one_is_in_the_name():
    chosen = trained(Path("resnet20-mssar-cifar100"))
    run = replace(chosen.run, recipe=varied(chosen.run.recipe, weight_decay=5e-4))
    images = chosen.noted(sample.load("cifar100"))
    made = explained(replace(chosen, run=run), images, 1, over=1)
    assert made.label == "resnet20 mssar weight_decay=0.0005, seed 0"


def test_a_run_that_is_here_is_not_shown_twice():
    found = collect([RECORDS])
    name = NAME.format("cifar100")
    packed = trained(Path(name)).progress
    own = packed.id
    same = {"dataset": "cifar100", "network": "resnet56"}
    found.records = [r for r in found.records if same.items() <= r.run.items()]
    here = replace(found, folders={own: Path("runs/own")})
    assert build._worth_seeing(here, "reproduction") == [(Path("runs/own"), own)]
    (record,) = [r for r in found.records if r.id == own]
    again = replace(record, id="trained-by-the-reader")
    both = replace(found, records=[*found.records, again], folders={again.id: Path("runs/own")})
    assert build._worth_seeing(both, "reproduction") == [(Path("runs/own"), again.id)]
    (other,) = [r for r in found.records if r.run == {**packed.run, "seed": 1}]
    here = replace(found, folders={other.id: Path("runs/other")})
    seen = build._worth_seeing(here, "reproduction")
    assert [(path.name, name) for path, name in seen] == [
        ("other", other.id),
        (f"{name}.safetensors", own),
    ]
