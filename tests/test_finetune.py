"""Fine-tuning other libraries' networks from the command line."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from finetuning import NET, ON, SMALL, _tree, folder_of, last_record, pytestmark, weights
from lab import CPU, Log, assert_same, learnt
from test_cli import fail, run
from torch import nn
from typer.testing import CliRunner

import mssar
from mssar.lab import cli, records
from mssar.lab.data.imagefolder import open_folder
from mssar.lab.engine.evaluate import trained
from mssar.lab.engine.training import Training
from mssar.lab.recipes import FINETUNE, varied
from mssar.lab.run import Initial, Normalisation, Run, run_from_dict, usual_normalisation
from mssar.surgery import initial

__all__ = ["_tree", "pytestmark", "weights"]  # fixtures, and what is needed


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
    run("train", "--from", NET, "--weights", "shared", *words[2:], "--seed", "1")
    inside = {
        "file": "model.safetensors",
        "sha256": initial.digest(Path("shared/model.safetensors")),
    }
    assert last_record().run["weights"] == inside
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
