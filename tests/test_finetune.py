"""Other libraries' networks, weights to begin with, and fine-tuning from the command line."""

import json
import pickle
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from lab import CPU, Log, assert_same, learnt
from PIL import Image
from test_cli import fail
from torch import nn
from typer.testing import CliRunner

import mssar
from mssar.lab import cli, records
from mssar.lab.data.imagefolder import open_folder
from mssar.lab.engine.evaluate import trained
from mssar.lab.engine.training import Training
from mssar.lab.recipes import FINETUNE, varied
from mssar.lab.run import Initial, Normalisation, Run, run_from_dict, usual_normalisation
from mssar.surgery import foreign, initial
from mssar.surgery.heads import classes, head

pytestmark = [
    pytest.mark.usefixtures("torchvision"),
    pytest.mark.skipif(not find_spec("timm"), reason="needs the extra timm"),
]

SMALL = ("--size", "32", "--resize", "32", "--batch", "8", "--epochs", "2", "--workers", "0")
ON = ("--dataset", "imagefolder", "--data-dir", "tree", "--device", "cpu")
NET = "timm:test_resnet"


@pytest.fixture(autouse=True)
def _tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dark and bright pictures; 6 and 5 for training (8 and 3 a step), 3 and 2 for testing."""
    draw = np.random.default_rng(0)
    for split, counts in (("train", (6, 5)), ("val", (3, 2))):
        for name, base, count in zip(("bright", "dark"), (200, 10), counts, strict=True):
            folder = tmp_path / "tree" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(base, base + 45, (36, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> str:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def folder_of(record: records.Record) -> Path:
    return Path("runs") / run_from_dict(record.run).name


def last_record() -> records.Record:
    return records.read(Path("runs/records.jsonl"))[-1]


@pytest.fixture
def weights() -> Path:
    """Of a network for 5 classes, as after some training."""
    torch.manual_seed(1)
    model = foreign.build(NET, num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_var, 0.5, 2)
    path = Path("five.safetensors")
    safetensors.torch.save_file(model.state_dict(), path)
    return path


# Names


@pytest.mark.parametrize(
    ("name", "size", "last"),
    [
        ("timm:test_resnet", 160, "fc"),
        ("timm:mobilenetv3_small_050", 224, "classifier"),
        ("timm:convnext_atto", 224, "head.fc"),
        ("torchvision:mobilenet_v2", 224, "classifier.1"),
        ("torchvision:regnet_y_400mf", 224, "fc"),
    ],
)
def test_a_name_says_library_and_network(name, size, last):
    assert foreign.architecture(name).size == (3, size, size)
    model = Run(name, "mssar", dataset="imagefolder").build(3)
    assert (head(model), classes(model)) == (last, 3)
    assert any(isinstance(module, mssar.MSSAR) for module in model.modules())
    assert not any(isinstance(m, mssar.MSSAR) for m in foreign.build(name).modules())


def test_the_seed_alone_decides_and_se_is_one_scale():
    se, again = (Run(NET, "se", seed=3).build(2) for _ in range(2))
    assert_same(se.state_dict(), again.state_dict())
    scales = {m.scales for m in se.modules() if isinstance(m, mssar.MSSAR)}
    assert scales == {(1,)}
    assert dict(Run(NET, "mssar", {"scales": [1, 2]}).options) == {
        "scales": (1, 2),
        "strategy": "regional",
        "reduction": "auto",
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("jax:resnet50",), "no network 'jax:resnet50': those of other libraries are timm:NAME or"),
        (("timm:resnet5O",), "timm has no network 'resnet5O'; close to it: resnet50"),
        (("timm:resnet50.nobody",), "timm: Invalid pretrained tag (nobody) for resnet50."),
        (("torchvision:mobilenet_v4",), "no network 'mobilenet_v4'; close to it: mobilenet_v2"),
        (("torchvision:fasterrcnn_resnet50_fpn",), "torchvision has no network 'fasterrcnn"),
        ((NET, "--recalibration", "eca"), f"into {NET} goes one of none, se, mssar; 'eca' is for"),
        ((NET, "--insert", "--stage", "multi"), "nothing that is trained here takes --stage"),
        ((NET, "--insert", "--recalibration", "se"), "--insert is --recalibration mssar; not se"),
        ((NET, "--insert", "--recalibration", "none"), "recalibration mssar; not none as well"),
        ((NET, "--where", "layer4.*"), "takes --where: it says where mssar or se goes in networks"),
        (("resnet8", "--insert", "--where", "se"), "nothing that is trained here takes --where"),
        ((NET, "--insert", "--where", "layer4.*,"), "--where takes names of modules, as in layer4"),
        (
            (NET, "--insert", "--where", "layer9.*"),
            "no module is named 'layer9.*'; close to it: la",
        ),
        ((NET, "--insert", "--where", "se"), "nothing to replace in this ResNet: it has no SEMod"),
        (("torchvision:alexnet", "--insert"), "nothing to recalibrate in this AlexNet"),
        (("torchvision:googlenet",), "googlenet of torchvision has several outputs in training"),
        (("timm:vit_tiny_patch16_224",), "patch16_224 cannot take 3×32×32: Input height (32)"),
        (
            (NET, "--mean", "0.5,0.5", "--std", "1,1,1"),
            "--mean takes three numbers, as in 0.485,0.456,0.406; got",
        ),
        ((NET, "--mean", "0.5,0.5,0.5"), "--mean and --std belong together"),
        ((NET, "--mean", "0,0,0", "--std", "1,0,1"), "--std is above 0; got '1,0,1'"),
        ((), "name a network, as in resnet20 or timm:resnet50"),
        ((NET, "--weights", "none.pth"), "there is no file none.pth; --weights is a file, one"),
        (("resnet18", "--weights", "pretrained"), "weights are those of another library; resnet18"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, words, line):
    assert line in fail(capsys, monkeypatch, "train", *words, *ON, *SMALL)
    assert not list(Path().glob("runs/*/*.safetensors"))


def test_a_library_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ValueError, match=r"timm cannot be imported .*: pip install '\.\[timm\]' in a clone"
    ):
        foreign.build(NET)
    Run(NET, "mssar")  # a record is read without it


# Weights


def test_weights_are_in_before_the_layers_and_a_head_of_other_classes_is_fresh(weights):
    there = safetensors.torch.load_file(weights)
    begun = Run(NET, "mssar", weights=Initial.of(weights))
    model, same = begun.begun(2), begun.begun(5).eval()
    plain = foreign.build(NET, num_classes=5).eval()
    plain.load_state_dict(there)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(same(x), plain(x))  # nothing changed by the insertion
    assert_same(
        model.get_submodule("fc").state_dict(), begun.build(2).get_submodule("fc").state_dict()
    )
    assert torch.equal(model.get_submodule("conv1.0").weight, there["conv1.0.weight"])


def test_weights_of_ours_gain_the_layers_on_the_way():
    net = mssar.create_model("resnet8", num_classes=10).eval()
    safetensors.torch.save_file(net.state_dict(), "ours.safetensors")
    path = Path("ours.safetensors")
    begun = Run("resnet8", "mssar", weights=Initial.of(path))
    x = torch.randn(2, 3, 32, 32)
    made = begun.begun(10)
    assert torch.equal(made.eval()(x), net(x))
    assert_same(begun.begun(4).fc.state_dict(), begun.build(4).fc.state_dict())
    safetensors.torch.save_file(made.state_dict(), path)  # and those with layers are taken whole
    again = Run("resnet8", "mssar", weights=Initial.of(path)).begun(10)
    assert_same(again.state_dict(), made.state_dict())
    with pytest.raises(ValueError, match=r"ours.safetensors is not what it was"):
        begun.begun(10)


@pytest.mark.parametrize("wrap", ["", "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_state_dicts_of_torch_save_are_read_in_their_wrappings(wrap, prefix):
    state = {f"{prefix}fc.weight": torch.ones(2, 3)}
    torch.save({"epoch": 3, wrap: state} if wrap else state, "net.pth")
    found = initial.read(Path("net.pth"))
    assert_same(found, {"fc.weight": torch.ones(2, 3)})


class Trap:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("sprung"),))


def test_a_file_is_never_executed():
    for content in ({"fc.weight": Trap()}, Trap(), nn.Linear(2, 2)):
        torch.save(content, "trap.pth")
        with pytest.raises(ValueError, match=r"trap.pth holds more than tensors, and to unpickle"):
            initial.read(Path("trap.pth"))
    assert not Path("sprung").exists()
    torch.save({"epoch": 3}, "other.pt")
    with pytest.raises(ValueError, match=r"other.pt holds no state dict: 'epoch' is int"):
        initial.read(Path("other.pt"))


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_are_read_by_pieces(zipped, monkeypatch):
    torch.save({"w": torch.ones(2, 3)}, "net.pth", _use_new_zipfile_serialization=zipped)
    for piece in range(1, len(initial.BYTES) + 2):
        monkeypatch.setattr(initial, "PIECE", piece)
        assert_same(initial.read(Path("net.pth")), {"w": torch.ones(2, 3)})
    torch.save({"w": torch.ones(2, 3), "b": b"1"}, "b.pth", _use_new_zipfile_serialization=zipped)
    for piece in range(len(initial.BYTES), 3 * len(initial.BYTES)):  # wherever it is cut
        monkeypatch.setattr(initial, "PIECE", piece)
        with pytest.raises(ValueError, match=r"b.pth holds more than tensors"):
            initial.read(Path("b.pth"))


def test_what_is_no_file_of_torch_save_is_not_loaded(monkeypatch):
    """By its first bytes: 2 GiB of nothing took 2 GiB of memory."""
    with Path("nothing.pth").open("wb") as file:
        file.truncate(2 << 30)
    Path("empty.pth").touch()
    Path("pickle.pth").write_bytes(pickle.dumps(3))
    with tarfile.open("old.pth", "w") as tar:
        tar.add("pickle.pth")
    torch.save({"w": torch.ones(2, 3)}, "net.pth")
    Path("torn.pth").write_bytes(Path("net.pth").read_bytes()[:-30])
    Path("before.pth").write_bytes(b"#!/bin/sh\n" + Path("net.pth").read_bytes())
    monkeypatch.setattr(torch, "load", None)
    for name, reason in {
        **dict.fromkeys(
            ("nothing", "empty", "pickle", "old", "before"), "it does not begin as one"
        ),
        "torn": "File is not a zip file",
    }.items():
        said = rf"^{name}\.pth is no file of torch\.save \({reason}\)$"
        with pytest.raises(ValueError, match=said):
            initial.read(Path(f"{name}.pth"))


def test_what_does_not_fit_is_refused_with_the_first_names(weights):
    there = safetensors.torch.load_file(weights)
    model = foreign.build(NET, num_classes=2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    name = "layer1.0.conv1.weight"
    cases = {
        rf"f does not fit ResNet: it lacks {name}$": {k: t for k, t in there.items() if k != name},
        "it has besides a, b, c and 2 more$": there | {k: torch.ones(1) for k in "abcde"},
        rf"it differs in {name} \(1,\), here \(": there | {name: torch.ones(1)},
        r"it lacks fc.weight, fc.bias$": {k: t for k, t in there.items() if "fc." not in k},
    }
    for line, tensors in cases.items():
        with pytest.raises(ValueError, match=line):
            initial.fit(model, tensors, "f")
    assert_same(model.state_dict(), before)
    older = {k: t for k, t in there.items() if "num_batches_tracked" not in k}
    initial.fit(model, older, "f")


def test_layers_of_other_scales_are_refused():
    made = foreign.build(NET, "mssar", 2, scales=(1, 2, 4))
    with pytest.raises(ValueError, match=r"^f does not fit ResNet: "):
        foreign.build(NET, "mssar", 2, tensors=made.state_dict(), source="f", scales=(4, 2, 1))


# Runs


def test_weights_and_colours_are_part_of_a_run_where_there_are_any():
    run, other = Run("resnet8"), Run("resnet8", weights=Initial("a.pth", "0" * 64, Path("x/a.pth")))
    assert run.as_dict().keys() == {
        *("network", "recalibration", "options", "dataset", "recipe", "seed")
    }
    assert other.as_dict()["weights"] == {"file": "a.pth", "sha256": "0" * 64}
    assert other.name != run.name
    colours = Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    third = Run("resnet8", weights=other.weights, normalisation=colours)
    for one in (run, other, third):
        again = run_from_dict(json.loads(json.dumps(one.as_dict())))
        assert (again, again.name) == (one, one.name)
    assert len({run.name, other.name, third.name}) == 3
    assert Run(NET, "mssar").name.startswith("arrangements-timm-test_resnet-mssar-seed0-")
    for spoilt, said in (
        ({"weights": {"file": 3, "sha256": ""}}, r"weights\.file: expected str; got 3"),
        ({"weights": {"file": "a", "sha256": "", "path": "/a"}}, r"weights\.path: expected Path"),
        ({"normalisation": {"mean": [1.0]}}, r"normalisation\.std: missing"),
        ({"normalisation": {"mean": [1.0], "std": []}}, r"normalisation\.mean: .* of length 3"),
    ):
        with pytest.raises(ValueError, match=said):
            run_from_dict(run.as_dict() | spoilt)


def test_a_network_brings_its_own_colours_if_they_are_unusual():
    assert usual_normalisation("timm:resnet50", "imagefolder") is None
    keras = usual_normalisation("torchvision:resnet50_keras", "imagefolder")
    assert keras == Normalisation((123.68 / 255, 116.779 / 255, 103.939 / 255), (1.0,) * 3)
    half = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert usual_normalisation("timm:test_resnet", "imagefolder") == half
    assert usual_normalisation("timm:test_resnet", "cifar10") is None
    assert usual_normalisation("resnet18", "imagefolder") is None


def test_colours_can_be_said():
    run("train", NET, "--mean", "0.4,0.5,0.6", "--std", "1,1,1", *ON, *SMALL[:-4], "--epochs", "1")
    expected = {"mean": [0.4, 0.5, 0.6], "std": [1.0, 1.0, 1.0]}
    record = last_record()
    assert record.run["normalisation"] == expected
    data = run_from_dict(record.run).normalised(open_folder(Path("tree")))
    assert data.mean == pytest.approx((102, 127.5, 153))
    usual = ("--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225")
    run("train", NET, *usual, *ON, *SMALL[:-4], "--epochs", "1")
    assert "normalisation" not in last_record().run  # as if there were no such option


def test_from_the_command_line_to_a_file_for_others(weights):
    words = ("--weights", str(weights), "--insert", "--ema", "0.5", *ON, *SMALL)
    table = run("train", "--from", NET, *words)
    record = last_record()
    assert f" {record.error:.2f}% " in table
    assert table.count("%") == 1  # nothing is not among the first five of two
    folder = folder_of(record)
    assert record.run["weights"] == {"file": weights.name, "sha256": initial.digest(weights)}
    assert record.run["recipe"]["name"] == "finetune"
    assert record.run["recipe"]["warmup"] == 0.1  # of 2 epochs, what 1 is of 20
    assert record.run["normalisation"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert f"error {record.error:.2f}%, loss" in run("eval", str(folder), *ON[2:])
    run("weights", str(folder), "out.safetensors", *ON[2:])
    assert f"error {record.error:.2f}%" in run("eval", "out.safetensors", *ON[2:])
    with safetensors.safe_open("out.safetensors", framework="pt") as file:
        note = json.loads(file.metadata()["mssar.weights"])
    assert (note["mean"], note["classes"]) == ([0.5] * 3, ["bright", "dark"])
    run("explain", str(folder), "test:0", "--data-dir", "tree")
    again = trained(Path("out.safetensors")).model
    average = {k: t for k, t in learnt(folder).items() if k.startswith("average.")}
    assert_same({f"average.{k}": t for k, t in again.state_dict().items()}, average)
    run("weights", str(folder), "shared", *ON[2:])  # a folder, as on the Hub
    shared = mssar.from_pretrained("shared")
    assert_same(shared.state_dict(), again.state_dict())
    assert shared.note == note
    card = Path("shared/README.md").read_text("utf-8")
    assert f"| error, last epoch | {record.error:.2f} % |" in card
    assert "| mean, to subtract | 0.5000, 0.5000, 0.5000 |" in card
    said = json.loads(run("export", str(folder), "net.pt2", "--json", "--data-dir", "tree"))
    assert said["metadata"]["mean"] == [0.5] * 3


def test_where_it_is_inserted_can_be_said(monkeypatch):
    """It is part of the run: of its name and record, and of what is rebuilt from its checkpoint."""
    words = ("train", NET, "--recalibration", "mssar,none", *ON, *SMALL)
    with monkeypatch.context() as stopping:
        stopping.setattr(Training, "_close_epoch", _and_stop(Training._close_epoch))
        CliRunner().invoke(cli.app, [*words, "--where", "layer[34].*, layer1.[a-z0].bn1"])
    run(*words, "--where", "layer[34].*,layer1.[a-z0].bn1", "--resume")
    by_kind = {r.run["recalibration"]: r for r in records.read(Path("runs/records.jsonl"))}
    plain, record = by_kind["none"], by_kind["mssar"]
    assert "where" not in plain.run["options"]
    assert record.run["options"]["where"] == ["layer[34].*", "layer1.[a-z0].bn1"]
    assert record.interruptions == 1
    folder = folder_of(record)
    assert folder.name.startswith(
        "imagefolder-timm-test_resnet-mssar-wherelayer34..layer1.a-z0.bn1-seed0-"
    )
    said = run("eval", str(folder), *ON[2:])
    assert "test_resnet mssar where=layer[34].*,layer1.[a-z0].bn1, imagefolder" in said
    assert f"error {record.error:.2f}%" in said
    run("weights", str(folder), "out.safetensors", *ON[2:])
    made = trained(Path("out.safetensors")).model
    inserted = [n for n, m in made.named_modules() if isinstance(m, mssar.MSSAR)]
    assert inserted == [f"{n}.recalibrate" for n in ("layer1.0.bn1", "layer3.0", "layer4.0")]
    assert_same(made.state_dict(), trained(folder).model.state_dict())
    run("export", str(folder), "net.pt2", "--data-dir", "tree")


def test_squeeze_and_excitations_can_be_replaced():
    chosen = Run("timm:test_efficientnet", "mssar", {"where": "se"})
    assert "-mssar-wherese-seed0-" in chosen.name
    replaced = [n for n, m in chosen.build(2).named_modules() if isinstance(m, mssar.MSSAR)]
    assert replaced
    assert all(".se." in name for name in replaced)
    assert run_from_dict(json.loads(json.dumps(chosen.as_dict()))) == chosen


def test_where_of_a_run_is_what_a_record_can_say():
    plain = Run(NET, "mssar")
    assert Run(NET, "mssar", {"where": "blocks"}).name == plain.name
    assert Run(NET, "mssar", {"where": "*.bn2"}) == Run(NET, "mssar", {"where": ["*.bn2"]})
    assert len(Run(NET, "mssar", {"where": [f"../{n}/*" for n in range(99)]}).name) < 200
    assert len(Run(NET, "mssar", {"where": "层" * 200}).name.encode()) < 200
    for wrong in (3, [], ["a", 3], lambda n, m: True):  # noqa: ARG005
        with pytest.raises(ValueError, match="where of a run is 'blocks', 'se' or names"):
            Run(NET, "mssar", {"where": wrong})


def _and_stop(close: Callable[..., None]) -> Callable[..., None]:
    def stop(*rest: Any) -> None:
        close(*rest)
        raise KeyboardInterrupt

    return stop


def test_resuming_needs_no_file(weights, monkeypatch):
    words = ("train", NET, "--insert", "--weights", str(weights), *ON, *SMALL)
    run(*words, "--runs", "whole")
    whole = records.read(Path("whole/records.jsonl"))[0]
    with monkeypatch.context() as stopping:
        stopping.setattr(Training, "_close_epoch", _and_stop(Training._close_epoch))
        CliRunner().invoke(cli.app, list(words))
    folder = folder_of(whole)
    assert learnt(folder)
    weights.unlink()
    run(*words, "--resume")
    assert last_record().interruptions == 1
    assert_same(learnt(folder), learnt(Path("whole") / folder.name))


def test_a_library_s_own_weights_and_what_hinders_them(monkeypatch, capsys):
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    downloaded = timm.create_model("test_resnet").state_dict()
    create = timm.create_model

    def bring(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        model = create(name, **options)
        if pretrained:
            model.load_state_dict(downloaded)
        return model

    monkeypatch.setattr(timm, "create_model", bring)
    run("train", NET, "--weights", "pretrained", "--lr", "1e-12", *ON, *SMALL)
    record = last_record()
    expected = {"file": NET, "sha256": initial.digest_of(downloaded)}
    assert record.run["weights"] == expected
    found = learnt(folder_of(record))["model.conv1.0.weight"]
    torch.testing.assert_close(found, downloaded["conv1.0.weight"])

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(timm, "create_model", offline)
    line = fail(capsys, monkeypatch, "train", NET, "--weights", "pretrained", *ON, *SMALL)
    assert "timm cannot bring weights of test_resnet: no route to the hub" in line


def test_a_torchvision_network_that_drops_is_trained_alike_in_parts():
    data = open_folder(Path("tree"))
    recipe = varied(FINETUNE, epochs=1, warmup=0.5, size=32, resize=32, batch=4)
    chosen = Run("torchvision:mobilenet_v2", "none", {}, "imagefolder", recipe)
    how = replace(CPU, workers=0)
    for name, parts in (("whole", [9]), ("parts", [1, 1, 9])):
        for pauses in parts:
            with closing(Training(chosen, data, how, Path(name), Log())) as training:
                for number, _ in enumerate(training.work(), 1):
                    if number == pauses:
                        training.save()
                        break
    assert_same(learnt(Path("parts")), learnt(Path("whole")))


@pytest.mark.parametrize("recalibration", ["none", "mssar"])
def test_resnet50_as_keras_has_it(recalibration):
    """Strides before the 3×3 convolutions, and BN's eps; the names and shapes are torchvision's."""
    made = foreign.build("torchvision:resnet50_keras", recalibration, 3)
    usual = foreign.build("torchvision:resnet50", recalibration, 3)
    assert made.layer3[0].conv1.stride == usual.layer3[0].conv2.stride == (2, 2)
    assert made.layer3[0].conv2.stride == usual.layer3[0].conv1.stride == (1, 1)
    assert made.layer1[0].bn3.eps == 1e-3 != usual.layer1[0].bn3.eps
    shapes, expected = ({n: t.shape for n, t in m.state_dict().items()} for m in (made, usual))
    assert shapes == expected
    x = torch.randn(1, 3, 64, 64)
    made.load_state_dict(usual.state_dict())
    with torch.no_grad():
        assert not torch.equal(made.eval()(x), usual.eval()(x))
    with pytest.raises(ValueError, match="torchvision cannot bring weights of resnet50_keras"):
        foreign.pretrained("torchvision:resnet50_keras")
