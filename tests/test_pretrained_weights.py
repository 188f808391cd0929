"""The weights that come with the package: what they say of themselves is what their records say."""

import json
from pathlib import Path

import pytest
import torch
from test_cli import fail
from test_command_train import run
from torch import Tensor

import mssar
from mssar.lab import data, records
from mssar.lab.commands.beginning import initial
from mssar.lab.engine.evaluate import evaluate, trained
from mssar.lab.engine.execution import Execution
from mssar.lab.run import Run
from mssar.networks.weights import PRETRAINED, read

pytest.importorskip("safetensors", reason="needs the extra hub")
RECORDS = {r.id: r for r in records.read(Path(__file__).parents[1] / "records")}
LARGEST = 4_000_000  # bytes of a file

# Of the three pictures below: the class, and the largest and the smallest logit.
EXPECTED = {
    "resnet20-mssar-cifar10": [(0, 2.051, -1.59), (1, 12.213, -12.848), (0, 6.132, -3.886)],
    "resnet20-mssar-cifar100": [(60, 10.499, -6.906), (16, 12.607, -13.259), (18, 11.892, -8.793)],
    "resnet20-none-cifar10": [(3, 4.072, -3.473), (2, 10.294, -9.564), (0, 7.188, -5.519)],
    "resnet20-none-cifar100": [(71, 8.248, -6.074), (61, 19.207, -14.668), (18, 9.794, -9.038)],
    "resnet56-mssar-cifar10": [(0, 4.868, -4.664), (1, 7.898, -8.947), (3, 6.162, -4.423)],
    "resnet56-mssar-cifar100": [(71, 15.064, -6.944), (16, 18.595, -12.086), (92, 16.577, -17.49)],
    "resnet56-none-cifar10": [(0, 5.140, -4.830), (3, 7.471, -7.727), (0, 10.292, -8.975)],
    "resnet56-none-cifar100": [(71, 14.104, -7.742), (61, 23.731, -14.213), (18, 12.584, -10.354)],
}


def pictures() -> Tensor:
    """A slope, rings and stripes; made without random numbers, whose order may change."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    slope = torch.stack((x, y, -x))
    rings = torch.cos(12 * (x**2 + y**2)).expand(3, 32, 32)
    stripes = torch.stack((torch.sin(9 * x + 4 * y), torch.sin(5 * y), torch.cos(7 * x)))
    return torch.stack((slope, rings, stripes))


def noted(name: str) -> tuple[dict, records.Record]:
    note = read(name).note
    return note, RECORDS[note["record"]]


def test_every_file_is_tested_here():
    assert {*PRETRAINED} == {*EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_agrees_with_its_record(name):
    note, record = noted(name)
    for key in ("network", "recalibration", "options", "dataset"):
        assert note[key] == note["run"][key] == record.run[key]
    assert note["run"] == record.run
    assert name == "-".join(note[key] for key in ("network", "recalibration", "dataset"))
    assert (note["run"]["seed"], note["epoch"]) == (0, len(record.epochs))  # never a picked one
    assert note["recorded_error"] == record.error == record.epochs[-1].test_error
    assert note["error"] == pytest.approx(record.error, abs=0.15)
    assert note["error5"] == pytest.approx(record.error5, abs=0.15)
    assert note["data"] == record.data["checksum"]
    assert PRETRAINED[name].stat().st_size < LARGEST


@pytest.mark.parametrize("name", EXPECTED)
def test_by_its_name_it_is_the_network_that_was_trained(name):
    note, record = noted(name)
    classes = len(note["classes"])
    net = mssar.create_model(
        note["network"], note["recalibration"], num_classes=classes, weights=name
    )
    assert sum(p.numel() for p in net.parameters()) == record.params
    assert net.note == note
    options = {k: v for k, v in net.origin["options"].items() if k in note["options"]}
    assert options == note["options"]
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    with torch.no_grad():
        logits = net.eval()(pictures())
    assert logits.isfinite().all()
    found = torch.stack((logits.argmax(1), logits.amax(1), logits.amin(1)), 1)
    torch.testing.assert_close(found, torch.tensor(EXPECTED[name]), atol=0.01, rtol=0.001)
    by_file = mssar.create_model(note["network"], note["recalibration"], weights=PRETRAINED[name])
    assert torch.equal(by_file.fc.weight, net.fc.weight)


def test_a_name_is_no_file_and_a_wrong_one_says_which_there_are(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for wrong in ("resnet56-mssar", "resnet56-mssar-cifar100.safetensors"):
        with pytest.raises(ValueError, match=f"there is no file {wrong}; .*{', '.join(EXPECTED)}"):
            mssar.create_model("resnet56", "mssar", weights=wrong)
        for command in (("eval", wrong), ("explain", wrong, "test:0"), ("export", wrong)):
            line = fail(capsys, monkeypatch, *command)
            assert f"there is no {wrong}; " in line
            assert ", ".join(EXPECTED) in line
    with pytest.raises(ValueError, match="holds resnet56 with 'mssar', not resnet56 with 'none'"):
        mssar.create_model("resnet56", "none", weights="resnet56-mssar-cifar100")


def test_commands_take_a_name(monkeypatch, tmp_path):
    """Pictures of one's own need no data set: the file says how they are normalised."""
    from PIL import Image

    def missing(*_: object) -> None:
        raise ValueError("get it first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", missing)
    pixels = ((pictures()[1] + 1) * 127.5).byte().permute(1, 2, 0)
    Image.fromarray(pixels.numpy()).save("rings.png")
    said = run("explain", "resnet56-mssar-cifar100", "rings.png", "--json").stdout
    found = json.loads(said)
    assert found["images"][0]["guess"] in noted("resnet56-mssar-cifar100")[0]["classes"]
    assert [block["scales"] for block in found["blocks"]] == [[1, 2, 4]] * 3
    assert Path("explained.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_the_error_on_real_images_is_the_recorded_one(name):
    """In bfloat16, as in training: in float32 another ten or so of 10,000 images change sides."""
    note, record = noted(name)
    try:
        found = data.load(note["dataset"], None)
    except ValueError as error:
        pytest.skip(f"needs real images: {error}")
    execution = Execution(torch.device("cpu"), "bf16")
    score = evaluate(trained(Path(name)), found, execution)
    assert score.error == pytest.approx(record.error, abs=0.15)
    assert score.error5 == pytest.approx(record.error5, abs=0.15)


@pytest.mark.parametrize("classes", [100, 3])
def test_a_run_begins_with_them_by_name(classes):
    """All of them, or with other classes all but the head."""
    name = "resnet56-mssar-cifar100"
    begun = initial(name, "resnet56", None)
    net = Run("resnet56", "mssar", weights=begun).begun(classes)
    expected, found = read(name).tensors, net.state_dict()
    for key, value in expected.items():
        if classes == 100 or not key.startswith("fc."):
            assert torch.equal(found[key], value.to(found[key].dtype)), key
