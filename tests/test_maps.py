"""What a page is given of a network's layers, decoded and held against the layers."""

import base64
import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from lab import CPU, arrays, tiny, trained
from PIL import Image
from test_explain import disturbed

import mssar
from mssar.lab.data import arrangements
from mssar.lab.data.dataset import Arrays
from mssar.lab.data.imagefolder import open_folder
from mssar.lab.engine.checkpoint import Progress
from mssar.lab.engine.evaluate import Trained
from mssar.lab.engine.feed import Normalise
from mssar.lab.recipes import Photographs, Recipe
from mssar.lab.report import maps
from mssar.lab.report.content import Explained, Grid
from mssar.lab.run import Run

DATA = arrays(20, 12, 4)


def made(network: str = "resnet8", recalibration: str = "mssar", **options: object) -> Trained:
    """A run that nobody trained, with weights that differ."""
    run = Run(network, recalibration, options, "tiny")
    progress = Progress(run.as_dict(), "", "fp32", "", "")
    return Trained(run, progress, disturbed(run.build(4)).eval())


def decoded(grid: Grid, low: float, high: float) -> torch.Tensor:
    octets = np.frombuffer(base64.b64decode(grid.values), np.uint8).reshape(grid.height, grid.width)
    return torch.from_numpy(low + octets * ((high - low) / 255))


def picture(uri: str) -> torch.Tensor:
    head, _, text = uri.partition(",")
    assert head == "data:image/png;base64"
    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(text)))))


def numbers(found: Explained, data: Arrays) -> list[int]:
    """Which test images these are, by their pixels."""
    same = [(data.test.images == picture(seen.image)).all((1, 2, 3)) for seen in found.images]
    return [int(which.nonzero()) for which in same]


CASES = {
    "nested": ("resnet8", "mssar", {}),
    "ragged": ("resnet8", "mssar", {"scales": (1, 3)}),
    "separate": ("resnet8", "mssar", {"scales": (2, 3)}),
    "sliding": ("resnet8", "mssar", {"strategy": "sliding"}),
    "se": ("resnet8", "se", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_grids_are_the_importance_at_every_position(case):
    chosen = made(*CASES[case][:2], **CASES[case][2])
    found = maps.explained(chosen, DATA, 3, over=12)
    which = numbers(found, DATA)
    images = Normalise(DATA, CPU.device)(DATA.test.images[which].permute(0, 3, 1, 2))
    truth = mssar.explain(chosen.model, images)
    extremes: dict[tuple[str, int], list[float]] = {}
    for place, seen in enumerate(found.images):
        assert seen.guess == DATA.classes[int(truth.logits[place].argmax())]
        assert seen.label == DATA.classes[int(DATA.test.labels[which[place]])]
        for block, views in zip(found.blocks, seen.maps, strict=True):
            own = truth[block.name]
            assert (block.channels, block.scales) == (own.channels, own.scales)
            wanted = [z[place] for z in (own.z, *own.per_scale)]
            by_view = [[z.mean(0) for z in wanted]]
            by_view += [[z[channel] for z in wanted] for channel in block.shown]
            for number, (view, expected) in enumerate(zip(views, by_view, strict=True)):
                low, high = block.ranges[number]
                for grid, z in zip(view, expected, strict=True):
                    down, across = z.shape[0] // grid.height, z.shape[1] // grid.width
                    values = decoded(grid, low, high)
                    spread = values.repeat_interleave(down, 0).repeat_interleave(across, 1)
                    assert (spread - z).abs().max() <= (high - low) / 255 / 2 + 1e-6
                    used = extremes.setdefault((block.name, number), [])
                    used += [float(z.min()), float(z.max())]
    for block in found.blocks:
        for number, (low, high) in enumerate(block.ranges):
            used = extremes[block.name, number]
            assert low == pytest.approx(min(used), abs=1.01e-4)  # and no wider
            assert high == pytest.approx(max(used), abs=1.01e-4)


def test_grids_are_as_small_as_they_can_be():
    def sides(case: str) -> list[list[tuple[int, int]]]:
        found = maps.explained(made(*CASES[case][:2], **CASES[case][2]), DATA, 1, over=1)
        return [[(g.height, g.width) for g in views[0]] for views in found.images[0].maps]

    # Maps of 8×8, 4×4 and 2×2: Z, then each scale.
    assert sides("nested") == [
        [(4, 4), (1, 1), (2, 2), (4, 4)],
        [(4, 4), (1, 1), (2, 2), (4, 4)],
        [(2, 2), (1, 1), (2, 2), (2, 2)],
    ]
    assert sides("ragged")[0] == [(8, 8), (1, 1), (8, 8)]  # 3, 3 and 2 rows
    assert sides("sliding")[1] == [(4, 4)] * 4
    assert sides("se") == [[(1, 1), (1, 1)]] * 3


def test_shown_channels_vary_most_over_positions_or_over_images():
    z = torch.zeros(2, 5, 2, 2)
    z[:, 3, 0] = 0.9
    z[:, 1, :, 1] = 0.5
    z[0, 4] = 1  # over images alone
    assert maps.liveliest(z, 2) == (3, 1)
    flat = torch.zeros(2, 3, 1, 1)
    flat[0, 2], flat[0, 0] = 0.2, 0.6
    assert maps.liveliest(flat, 3) == (0, 2, 1)
    assert len(maps.liveliest(flat, 9)) == 3


def test_histograms_count_every_weight_of_a_stage():
    chosen = made("resnet20")
    found = maps.explained(chosen, DATA, 1, over=12)
    images = Normalise(DATA, CPU.device)(DATA.test.images.permute(0, 3, 1, 2))
    blocks = mssar.explain(chosen.model, images).blocks
    assert [(h.stage, h.scale) for h in found.histograms] == [
        (stage, scale) for stage in (1, 2, 3) for scale in (0, 1, 2, 4)
    ]
    for histogram in found.histograms:
        assert len(histogram.shares) == 40
        assert sum(histogram.shares) == pytest.approx(1)
        place = (0, 1, 2, 4).index(histogram.scale)
        values = torch.cat(
            [
                (b.z, *b.per_scale)[place].flatten()
                for b in blocks
                if b.name.startswith(f"layer{histogram.stage}.")
            ]
        )
        shares = [float(((values * 40).long() == i).float().mean()) for i in range(40)]
        assert histogram.shares == pytest.approx(shares, abs=1e-3)


def test_histograms_do_not_depend_on_how_many_are_seen_at_once(monkeypatch):
    chosen = made()
    whole = maps.explained(chosen, DATA, 1, over=11).histograms
    monkeypatch.setattr(maps, "AT_ONCE", 3 * 64)
    for one, other in zip(whole, maps.explained(chosen, DATA, 1, over=11).histograms, strict=True):
        assert one.shares == pytest.approx(other.shares, abs=1e-3)


def test_images_are_of_different_classes_and_the_same_every_time():
    found = maps.explained(made(), DATA, 4, over=1)
    assert sorted(seen.label for seen in found.images) == sorted(DATA.classes)
    assert maps.explained(made(), DATA, 2, over=1).images[0].label == found.images[0].label
    many = maps.explained(made(), DATA, 99, over=1)
    assert len({seen.image for seen in many.images}) == len(many.images) == len(DATA.test)


def test_of_arrangements_those_with_little_noise_are_taken():
    data = arrangements.load(train=1, test=300)
    chosen = maps._worth_a_look(data, 5)[:5]
    assert len(set(data.test.labels[chosen].tolist())) == 5
    # The background is smooth, so far from shapes noise makes a pixel unlike the next, or a speck.
    corners = data.test.images[:, :3, :3].float()
    rough = corners.diff(dim=1).abs().mean((1, 2, 3))
    assert rough[chosen].median() < rough.median() / 2


@pytest.mark.parametrize(
    ("network", "options", "most"),
    [
        ("resnet20", {}, 300_000),
        ("resnet20", {"strategy": "sliding"}, 300_000),
        ("resnet56", {}, 700_000),
        ("densenet100", {}, 700_000),
    ],
)
def test_a_page_stays_small_and_stages_whole(network, options, most):
    draw = torch.Generator().manual_seed(0)
    test = replace(
        DATA.test, images=torch.randint(256, (12, 32, 32, 3), generator=draw, dtype=torch.uint8)
    )
    found = maps.explained(made(network, **options), replace(DATA, test=test), 5, over=1)
    assert len(json.dumps(asdict(found))) < most
    assert {block.stage for block in found.blocks} == {1, 2, 3}
    assert len(found.blocks) <= 16
    last = {block.stage: block.name for block in found.blocks}
    assert (
        list(last.values())
        == {
            "resnet20": [f"layer{i}.2.recalibrate" for i in (1, 2, 3)],
            "resnet56": [f"layer{i}.8.recalibrate" for i in (1, 2, 3)],
            "densenet100": [f"block{i}.steps.15.recalibrate" for i in (1, 2, 3)],
        }[network]
    )
    if not options:
        assert all(len(block.shown) == 3 for block in found.blocks)
    depth = {"resnet20": 9, "resnet56": 27, "densenet100": 48}[network]
    assert found.depth == depth == found.blocks[-1].number
    whole = mssar.explain(made(network, **options).model, torch.zeros(1, 3, 32, 32))
    names = [block.name for block in whole.blocks]
    assert [names[block.number - 1] for block in found.blocks] == [b.name for b in found.blocks]


def test_blocks_are_left_out_evenly():
    stages = [1] * 9 + [2] * 2
    assert maps.thinned(stages, 5) == [0, 2, 4, 6, 8, 9, 10]
    assert maps.thinned(stages, 2) == [0, 8, 9, 10]
    assert maps.thinned(stages, 1) == [8, 10]
    assert maps.thinned(stages, 20) == list(range(11))


def test_stages_of_a_network_without_names_are_its_sizes():
    layers = [mssar.MSSAR(3), mssar.MSSAR(3), torch.nn.AvgPool2d(2), mssar.MSSAR(3)]
    found = mssar.explain(torch.nn.Sequential(*layers), torch.randn(1, 3, 8, 8))
    assert maps.stages_of(found.blocks) == [1, 1, 2]


def test_a_folder_is_read(tmp_path):
    run = tiny(3, "mssar", epochs=1, drops=())
    trained(run, DATA, tmp_path)
    found = maps.explained(tmp_path, DATA, 2, over=4)
    assert (found.label, found.dataset) == ("resnet8 mssar recipe=tiny, seed 3", "tiny")


def test_weights_that_are_all_the_same_are_still_told():
    chosen = made()
    with torch.no_grad():
        for name, parameter in chosen.model.named_parameters():
            if name.endswith(("norm2.weight", "norm2.bias")):
                parameter.zero_()
    found = maps.explained(chosen, DATA, 1, over=1)
    low, high = found.blocks[0].ranges[0]
    assert low <= 0.5 <= high
    grid = found.images[0].maps[0][0][0]
    assert decoded(grid, low, high).sub(0.5).abs().max() <= 1e-4


def test_mistakes_are_said():
    with pytest.raises(ValueError, match="resnet8 none recalibrates nothing; take a run with se"):
        maps.explained(made(recalibration="none"), DATA)
    with pytest.raises(ValueError, match="trained for 4 classes; tiny has 6"):
        maps.explained(made(), arrays(20, 12, 6))
    with pytest.raises(ValueError, match="1 or more; got 0 and 256"):
        maps.explained(made(), DATA, 0)
    broken = made()
    with torch.no_grad():
        broken.model.layer1[0].recalibrate.branches[0].norm2.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        maps.explained(broken, DATA, 1, over=1)


@pytest.mark.usefixtures("torchvision")
def test_photographs_are_seen_as_in_testing(tmp_path):
    draw = np.random.default_rng(0)
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "tree" / folder).mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 256, (200, 240, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "tree" / folder / f"{number}.png")
    (tmp_path / "tree/val/a/0.png").write_bytes(b"no picture")
    augmentation = Photographs(size=192, resize=200)
    recipe = Recipe("small", epochs=1, batch=4, lr=0.05, drops=(), augmentation=augmentation)
    run, data = Run("resnet8", "mssar", {}, "imagefolder", recipe), open_folder(tmp_path / "tree")
    progress = Progress(run.as_dict(), "", "fp32", "", "")
    found = maps.explained(Trained(run, progress, run.build(2)), data, 2, over=4)
    assert {seen.label for seen in found.images} == {"a", "b"}  # val/a/0.png is passed over
    seen = next(seen for seen in found.images if seen.label == "b")
    assert (seen.height, seen.width) == (160, 160)
    whole = Image.open(tmp_path / "tree/val/b/0.png").crop((24, 4, 216, 196))
    whole.thumbnail((160, 160))
    assert torch.equal(picture(seen.image), torch.from_numpy(np.array(whole)))
    square = torch.from_numpy(np.array(Image.open(tmp_path / "tree/val/b/0.png")))
    square = square[4:196, 24:216]
    assert torch.equal(maps.tested(data, recipe, 4), square)
