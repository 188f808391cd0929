"""``mssar explain`` as its user meets it."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lab import CPU, arrays, tiny, trained
from PIL import Image
from test_cli import fail
from test_explain import disturbed
from typer.testing import CliRunner, Result

import mssar
from mssar.lab import cli, data
from mssar.lab.commands.explain import explain
from mssar.lab.commands.pictures import fitted
from mssar.lab.engine import checkpoint
from mssar.lab.engine.evaluate import trained as load
from mssar.lab.engine.feed import Normalise
from mssar.lab.recipes import Photographs, Recipe
from mssar.lab.report import overlay
from mssar.lab.run import Run

DATA = arrays(20, 12, 4)
SMALL = Photographs(size=16, resize=20)
FOLDER = Run(
    "resnet8", "se", {}, "imagefolder", Recipe("p", 1, 4, 0.1, (), augmentation=SMALL), seed=1
)

if not any(command.callback is explain for command in cli.app.registered_commands):
    cli.app.command()(explain)


def saved(run: Run, folder: Path, classes: int = 4) -> Path:
    """A run that nobody trained, with weights that differ."""
    torch.manual_seed(0)
    progress = checkpoint.Progress(run.as_dict(), "", "fp32", "id", "now", epoch=1)
    state = disturbed(run.build(classes)).state_dict()
    brought = checkpoint.Brought({f"model.{k}": v for k, v in state.items()})
    checkpoint.write(folder, progress, brought)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By recalibration, and one of photographs."""
    place = tmp_path_factory.mktemp("runs")
    made = {
        "mssar": Run("resnet20", "mssar", {}, "tiny"),
        "sliding": Run("resnet8", "mssar", {"strategy": "sliding"}, "tiny"),
        "se": Run("resnet8", "se", {}, "tiny"),
        "none": Run("resnet8", "none", {}, "tiny"),
        "photographs": FOLDER,
    }
    return {name: str(saved(run, place / name)) for name, run in made.items()}


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = data.load

    def load(name: str, data_dir: Path | None = None) -> data.Data:
        return DATA if name == "tiny" else real(name, data_dir)

    monkeypatch.setattr(data, "load", load)
    monkeypatch.setattr(overlay, "RESOLUTION", 60)  # sooner painted
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Result:
    result = CliRunner().invoke(cli.app, ["explain", *words])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def found(*words: str) -> dict:
    return json.loads(invoke(*words, "--json").stdout)


def size(path: str = "explained.png") -> tuple[int, int]:
    with Image.open(path, formats=["PNG"]) as figure:
        return figure.size


def same(some: dict, other: dict) -> None:
    """Maps by title, but for the last digit: what is computed beside an image moves it."""
    assert list(some) == list(other)
    for title, rows in some.items():
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(other[title]))


def test_the_last_block_of_every_stage_is_drawn_and_guesses_are_said(runs):
    said = invoke(runs["mssar"], "test:3", "test:0").stdout.splitlines()
    chosen = load(Path(runs["mssar"]))
    images = Normalise(DATA, CPU.device)(DATA.test.images[[3, 0]].permute(0, 3, 1, 2))
    shares = mssar.explain(chosen.model, images).logits.softmax(1)
    for line, name, share, truth in zip(said, ("test:3", "test:0"), shares, (3, 0), strict=False):
        guess = int(share.argmax())
        told = "right" if guess == truth else f"really {truth}"
        assert line == f"{name}: {guess}, {share[guess]:.1%} ({told})"
    assert said[2] == "explained.png: layer1.2, layer2.2, layer3.2"
    assert min(size()) > 200
    assert not list(Path().glob(".*"))  # nothing half written


def test_json_has_the_weights_by_block_image_and_scale(runs):
    told = found(runs["mssar"], "test:5", "test:1", "--block", "layer2.1", "--channel", "7")
    chosen = load(Path(runs["mssar"]))
    images = Normalise(DATA, CPU.device)(DATA.test.images[[5, 1]].permute(0, 3, 1, 2))
    block = mssar.explain(chosen.model, images)["layer2.1.recalibrate"]
    (said,) = told["blocks"]
    assert (said["name"], said["stage"], said["scales"]) == (block.name, 2, [1, 2, 4])
    expected = dict(zip(("Z", "1", "2", "4"), (block.z, *block.per_scale), strict=True))
    for place, weights in enumerate(said["weights"]):
        assert list(weights) == list(expected)
        for title, z in expected.items():
            torch.testing.assert_close(torch.tensor(weights[title]), z[place, 7])
    whole = torch.stack([z[:, 7] for z in expected.values()])
    assert (said["low"], said["high"]) == pytest.approx((float(whole.min()), float(whole.max())))
    assert [image["label"] for image in told["images"]] == ["1", "1"]


def test_figures_differ_by_block_channel_and_image(runs):
    made = []
    for words in (
        ("test:0", "--block", "layer1.0"),
        ("test:0", "--block", "layer1.1.recalibrate"),
        ("test:1", "--block", "layer1.0"),
        ("test:0", "--block", "layer1.0", "--channel", "0"),
    ):
        invoke(runs["mssar"], *words, "-o", "one.png")
        made.append(Path("one.png").read_bytes())
    assert len(set(made)) == 4
    invoke(runs["mssar"], "test:0", "--block", "layer1.0", "-o", "one.png")
    assert Path("one.png").read_bytes() == made[0]


def test_a_figure_grows_down_with_many_blocks_and_not_across(runs):
    sizes = []
    for words in ((), ("--block", "all")):
        invoke(runs["mssar"], "test:0", *words)
        sizes.append(size())
    (width, height), (as_wide, more) = sizes
    assert as_wide == width  # three blocks, then three rows of three
    assert 2 * height < more < 3 * height


def test_overlays_say_what_a_position_looks_at():
    def titles(size: tuple[int, int], **options: object) -> list[str]:
        block = mssar.explain(mssar.MSSAR(3, **options), torch.randn(1, 3, *size)).blocks[0]
        return [drawn.title for drawn in overlay.layer_of(block).overlays]

    assert titles((8, 8)) == ["whole map", "2×2 regions", "4×4 regions", "all scales: Z"]
    assert titles((3, 8), scales=(4,)) == ["3×4 regions"]
    assert titles((8, 8), scales=(1,)) == ["whole map"]
    slid = titles((8, 8), strategy="sliding")  # ⌊8 / K⌋ to each side
    assert slid == ["whole map", "windows 9×9", "windows 5×5", "all scales: Z"]


def test_borders_are_where_regions_meet():
    (block,) = mssar.explain(disturbed(mssar.MSSAR(3, (4,))), torch.randn(1, 3, 7, 5)).blocks
    (drawn,) = overlay.layer_of(block, 1).overlays
    z = block.z[:, 1]
    assert torch.equal(drawn.maps, z)
    changes = [(z.diff(dim=axis) != 0).any(axis=3 - axis).flatten() for axis in (1, 2)]
    assert drawn.borders == tuple(tuple((c.nonzero().flatten() + 1).tolist()) for c in changes)


@pytest.mark.parametrize("kind", ["se", "sliding"])
def test_other_recalibrations_are_drawn(runs, kind):
    told = found(runs[kind], "test:0", "test:1")
    scales = ["1"] if kind == "se" else ["1", "2", "4"]
    for block in told["blocks"]:
        for weights in block["weights"]:
            assert list(weights) == ["Z", *scales]
            if kind == "se":
                assert len({w for row in weights["Z"] for w in row}) == 1


def drawn(layer: overlay.Layer, square: torch.Tensor) -> np.ndarray:
    """The pixels of the only overlay of a figure of one picture."""
    picture = overlay.Picture(square, "a", "b", 0.5)
    figure = np.array(Image.open(io.BytesIO(overlay.draw([picture], [layer], "c", "d"))))
    dots = overlay.RESOLUTION
    x = overlay.MARGIN + overlay.CAPTION + overlay.CELL + overlay.BETWEEN
    y = overlay.MARGIN + overlay.TITLE + overlay.HEADER
    cut = [slice(round(dots * (v + 0.05)), round(dots * (v + overlay.CELL - 0.05))) for v in (y, x)]
    return figure[cut[0], cut[1], :3].astype(int)


def test_constant_weights_are_one_colour_and_others_are_not():
    plain = torch.full((8, 8, 3), 120, dtype=torch.uint8)
    z = torch.full((1, 4, 4), 0.5)
    flat = drawn(overlay.Layer("layer", "", (overlay.Overlay("", z),)), plain)
    assert (flat == flat[0, 0]).all()
    half = z.clone()
    half[:, :, 2:] = 0.7
    split = drawn(overlay.Layer("layer", "", (overlay.Overlay("", half),)), plain)
    left, right = split[:, : split.shape[1] // 2 - 4], split[:, split.shape[1] // 2 + 4 :]
    assert (left == left[0, 0]).all()
    assert (right == right[0, 0]).all()
    assert (left[0, 0] != right[0, 0]).any()
    lit = plain.clone()
    lit[:4] = 250  # the picture shows through
    shown = drawn(overlay.Layer("layer", "", (overlay.Overlay("", z),)), lit)
    assert shown[0, 0].sum() > shown[-1, -1].sum() + 100


def test_a_file_is_resized_and_its_centre_cut_out(runs):
    square = DATA.test.images[2].numpy()
    Image.fromarray(square).save("same.png")
    wide = np.concatenate([0 * square[:, :3], square, 0 * square[:, :3]], 1)
    Image.fromarray(wide).save("wide.png")
    told = found(runs["mssar"], "test:2", "same.png", "wide.png")
    for block in told["blocks"]:
        same(block["weights"][0], block["weights"][1])
        same(block["weights"][0], block["weights"][2])
    assert [image["label"] for image in told["images"]] == ["2", None, None]
    for name in ("same.png", "wide.png"):
        with Image.open(name) as image:
            assert np.array_equal(np.array(fitted(image, (8, 8))), square)


@pytest.mark.usefixtures("torchvision")
def test_photographs_need_no_data_set_and_classes_are_numbers_then(
    runs, tmp_path, monkeypatch, capsys
):
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save("photo.png")
    alone = found(runs["photographs"], "photo.png")
    assert alone["images"][0]["guess"] in ("0", "1", "2", "3")
    for folder in ("train", "val"):
        for name in "abcd":
            (tmp_path / "tree" / folder / name).mkdir(parents=True)
            Image.open("photo.png").save(tmp_path / "tree" / folder / name / "0.png")
    named = found(runs["photographs"], "photo.png", "test:3", "--data-dir", "tree")
    assert named["images"][0]["guess"] == "abcd"[int(alone["images"][0]["guess"])]
    assert named["images"][1]["label"] == "d"
    for block, other in zip(named["blocks"], alone["blocks"], strict=True):
        same(block["weights"][0], other["weights"][0])
        same(block["weights"][1], other["weights"][0])
    words = ("explain", runs["photographs"], "test:3")
    assert "say where: --data-dir DIR" in fail(capsys, monkeypatch, *words)


def test_a_run_as_the_lab_leaves_it_is_drawn(tmp_path):
    trained(tiny(0, "mssar", epochs=1, drops=()), DATA, tmp_path / "run")
    assert "layer3.0" in invoke("run", "test:0").stdout


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("mssar", ("no.jpg",), "there is no picture no.jpg; test:0 is the first test image"),
        ("mssar", ("text.png",), "text.png cannot be read: no image in JPEG, PNG, BMP or WEBP"),
        ("mssar", (".",), ". cannot be read: Is a directory"),
        ("mssar", ("test:12",), "test images of tiny are test:0 to test:11; got test:12"),
        ("none", ("test:0",), "resnet8 none recalibrates nothing; take a run with se or mssar"),
        ("mssar", ("test:0", "--block", "layer9"), "no block 'layer9'; there are all, layer1.0, "),
        ("mssar", ("test:0", "--channel", "16"), "layer1.2 has channels 0 to 15; got 16"),
        ("mssar", ("test:0", "--channel", "-1"), "--channel is mean or a number; got '-1'"),
        ("mssar", ("test:0", "-o", "a/b.png"), "there is no folder a to write b.png into"),
        ("mssar", ("test:0", "-o", "b.jpg"), "--output is a PNG, as in explained.png; got b.jpg"),
        ("mssar", ("test:0", "-o", "folder.png"), "folder.png is a folder"),
        ("mssar", (), "Missing argument 'IMAGE...'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    runs, run, words, message, capsys, monkeypatch
):
    Path("text.png").write_text("no picture")
    Path("folder.png").mkdir()
    assert message in fail(capsys, monkeypatch, "explain", runs[run], *words)
    assert not Path("explained.png").exists()


def test_a_run_that_is_not_there_is_said(capsys, monkeypatch):
    assert "there is no runs/x; a run's" in fail(capsys, monkeypatch, "explain", "runs/x", "test:0")
    Path("empty").mkdir()
    assert "holds no checkpoint" in fail(capsys, monkeypatch, "explain", "empty", "test:0")


def test_without_matplotlib_one_line_says_what_to_install(runs, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = fail(capsys, monkeypatch, "explain", runs["se"], "test:0")
    assert said == "mssar: figures need matplotlib: pip install '.[lab]' in a clone of mssar"


def test_help_has_examples():
    said = CliRunner().invoke(cli.app, ["explain", "--help"]).output
    assert "test:17 test:4" in said
    for option in ("--output", "--block", "--channel", "--json", "--data-dir"):
        assert option in said
    assert "--out " not in said


def test_the_output_is_named_as_elsewhere_and_as_before(runs):
    for word in ("--output", "-o", "--out"):
        invoke(runs["mssar"], "test:0", word, f"{word[1:]}.png")
        assert Path(f"{word[1:]}.png").exists()
