"""``mssar export`` as its user meets it; what the files hold is tested in test_export.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab import arrays
from test_cli import fail
from test_command_explain import FOLDER, saved
from torch import nn
from typer.testing import CliRunner, Result

import mssar
from mssar.export import Exported
from mssar.lab import cli, data
from mssar.lab.data import cifar, places
from mssar.lab.run import Run
from mssar.networks.weights import read

DATA = arrays(20, 12, 4)  # 8×8
RUN = Run("resnet8", "mssar", {"scales": (1, 2)}, "tiny")
Asked = list[tuple[nn.Module, Path, tuple[int, int, int], str | None, dict]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What would be exported."""
    seen: Asked = []

    def export(model, path, size, format, *, metadata, say):  # noqa: A002
        seen.append((model, path, size, format, metadata))
        say("tracing")
        open_ = {"batch": (1, None), "height": (13, 40)}
        return Exported(path, "onnx", 3 * 2**20, 20, 27, open_, "width", 2e-7, ((1, 3, 8, 8),))

    monkeypatch.setattr(mssar, "export", export)
    return seen


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = data.load
    monkeypatch.setattr(
        data, "load", lambda name, place=None: DATA if name == "tiny" else real(name, place)
    )
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Result:
    result = CliRunner().invoke(cli.app, ["export", *words])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_the_runs_network_goes_with_its_names_and_colours(asked, tmp_path):
    folder = saved(RUN, tmp_path / "run")
    result = invoke(str(folder))
    ((model, path, size, kind, metadata),) = asked
    assert (path, size, kind) == (Path(f"{RUN.name}.onnx"), (3, 8, 8), None)
    state = mssar.lab.engine.evaluate.trained(folder).model.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert metadata["classes"] == ["0", "1", "2", "3"]
    assert metadata["mean"] == [round(value / 255, 12) for value in DATA.mean]
    assert metadata["std"] == [round(value / 255, 12) for value in DATA.std]
    assert (metadata["network"], metadata["recalibration"]) == ("resnet8", "mssar")
    assert metadata["options"]["scales"] == [1, 2]
    assert result.stdout.splitlines() == [
        "resnet8 mssar scales=1,2, tiny, epoch 1",
        f"{path}: ONNX, opset 20, 3.0 MiB, 27 norms folded",
        "open: batch from 1, height from 13 to 40",
        "fixed: width",
        "agrees with PyTorch to 2.0e-07 of the largest output, at 1×3×8×8",
    ]
    assert "tracing" in result.stderr


def test_format_size_and_json(asked, tmp_path):
    folder = str(saved(RUN, tmp_path / "run"))
    invoke(folder, "--format", "torch", "--size", "24")
    found = json.loads(invoke(folder, "here.onnx", "--json").stdout)
    assert [(str(path), size, kind) for _, path, size, kind, _ in asked] == [
        (f"{RUN.name}.pt2", (3, 24, 24), "torch"),
        ("here.onnx", (3, 8, 8), None),
    ]
    assert (found["path"], found["opset"], found["open"]["height"]) == ("here.onnx", 20, [13, 40])
    assert found["metadata"]["classes"] == ["0", "1", "2", "3"]


def test_without_its_data_set_names_are_left_out_and_that_is_said(asked, tmp_path):
    result = invoke(str(saved(FOLDER, tmp_path / "run")))
    ((_, _, size, _, metadata),) = asked
    assert size == (3, 16, 16)  # the recipe's
    assert "classes" not in metadata
    assert metadata["mean"] == [0.485, 0.456, 0.406]
    assert metadata["std"] == [0.229, 0.224, 0.225]
    assert "names of classes are left out: imagefolder is a tree" in result.stderr


def test_weights_say_what_they_are_of_without_a_data_set(asked, monkeypatch, tmp_path):
    monkeypatch.setenv(places.VARIABLE, str(tmp_path))
    for words in ((), ("--data-dir", str(tmp_path))):
        assert "left out" not in invoke("resnet56-mssar-cifar100", *words).stderr
    note = read("resnet56-mssar-cifar100").note
    for _, _, size, _, metadata in asked:
        assert size == (3, 32, 32)
        assert metadata["classes"] == list(cifar.LAYOUTS["cifar100"].classes)
        for name in ("mean", "std"):
            assert metadata[name] == note[name]


@pytest.mark.parametrize(("name", "count"), [("cifar10", 10), ("cifar100", 100)])
def test_a_run_without_its_data_set_has_the_names_of_cifars_classes(
    asked, monkeypatch, tmp_path, name, count
):
    monkeypatch.setenv(places.VARIABLE, str(tmp_path))
    run = replace(RUN, dataset=name)
    result = invoke(str(saved(run, tmp_path / "run", count)))
    ((*_, metadata),) = asked
    assert metadata["classes"] == list(cifar.LAYOUTS[name].classes)
    assert not metadata.keys() & {"mean", "std"}
    assert "mean and deviation of colours are left out: no CIFAR" in result.stderr
    invoke(str(saved(run, tmp_path / "other", 7)))  # of other classes
    assert "classes" not in asked[-1][-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "there is no nowhere; a run's folder is what `mssar train` names"),
        (("empty",), "empty holds no checkpoint; name a run's folder"),
        (("run", "--format", "tflite"), "--format is onnx or torch; got 'tflite'"),
        (("run", "net.bin"), "format is onnx (.onnx) or torch (.pt2); got a file 'net.bin'"),
        (
            ("run", "net.pt2", "--format", "onnx"),
            "format onnx ends in .onnx; got net.pt2",
        ),
        (("run", "away/net.pt2"), "there is no folder away to write net.pt2 into"),
        (("run", "--size", "0"), "--size is 1 or more; got 0"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, tmp_path, words, message):
    saved(RUN, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert message in fail(capsys, monkeypatch, "export", *words)
    assert not list(tmp_path.glob("*.onnx"))


def test_what_a_checkpoint_says_of_its_data_leads_to_no_other_folder(
    capsys, monkeypatch, tmp_path, asked
):
    """The file that is written has a run's name, unless another is given."""
    said = RUN.as_dict() | {"dataset": "../evil"}
    with monkeypatch.context() as written:
        written.setattr(Run, "as_dict", lambda _: said)
        saved(RUN, tmp_path / "run")
    assert "a data set's name begins with" in fail(capsys, monkeypatch, "export", "run")
    assert not asked


def test_help_has_examples():
    said = invoke("--help").stdout
    assert "mssar export runs/cifar10-resnet20-mssar-seed0-0f3a51 net.pt2 --format torch" in said
    for option in ("--format", "--size", "--json", "--data-dir"):
        assert option in said
