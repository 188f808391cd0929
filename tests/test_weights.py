"""Files of weights: what goes in comes out, and a file of something else is refused in a line."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from lab import arrays, learnt
from PIL import Image
from test_cli import fail
from test_command_train import invoke, made, run
from torch import Tensor

import mssar
from mssar.lab import data, records
from mssar.lab.engine import checkpoint, weights
from mssar.lab.engine.evaluate import Trained, trained
from mssar.networks.weights import NOTE

DATA = arrays(37, 24, 10)
WORDS = (
    "train", "resnet8", "--dataset", "cifar10", "--recalibration", "mssar", "--scales", "1,2",
    "--epochs", "2", "--batch", "16", "--lr", "0.02", "--padding", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, records.Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda *_: DATA)
        patch.chdir(tmp_path_factory.mktemp("runs"))
        run(*WORDS)
        (folder,) = Path("runs").glob("cifar10-*")
        return folder.absolute(), made()[0]


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "load", lambda *_: DATA)
    monkeypatch.chdir(tmp_path)


def state_of(folder: Path) -> dict[str, Tensor]:
    found = learnt(folder)
    return {k.removeprefix("model."): t for k, t in found.items() if k.startswith("model.")}


def note_of(path: str) -> dict:
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[NOTE])


@pytest.mark.parametrize("half", [False, True])
def test_a_finished_run_becomes_a_network_again(finished, half):
    folder, record = finished
    said = run("weights", str(folder), "x.safetensors", *(["--half"] if half else [])).stdout
    stored, state = safetensors.torch.load_file("x.safetensors"), state_of(folder)
    network = mssar.create_model("resnet8", "mssar", weights="x.safetensors")
    parameters = dict(network.named_parameters())
    for name, tensor in network.state_dict().items():
        short = half and name in parameters
        assert stored[name].dtype == (torch.float16 if short else state[name].dtype), name
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name].half().float() if short else state[name]), name
    assert stored.keys() == state.keys()
    layer = network.layer1[0].recalibrate
    assert layer.scales == (1, 2)  # as the file says
    assert network.num_classes == 10
    note = network.note
    assert note == note_of("x.safetensors")
    assert (note["network"], note["recalibration"], note["dataset"]) == (
        "resnet8", "mssar", "cifar10",
    )  # fmt: skip
    assert note["classes"] == list(DATA.classes)
    assert note["recorded_error"] == record.error
    x = DATA.test.images.permute(0, 3, 1, 2) / 255.0
    mean, std = (torch.tensor(note[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        wrong = network.eval()((x - mean) / std).argmax(1) != DATA.test.labels
    assert note["error"] == pytest.approx(100 * float(wrong.float().mean()))
    if not half:
        assert note["error"] == record.error
    hardware, precision = record.environment["hardware"], record.execution["precision"]
    assert note["measured"] == {"hardware": hardware, "precision": precision}
    again = f"error {note['error']:.2f}% measured again on {hardware} in {precision}"
    assert f"{again}, {record.error:.2f}% recorded" in said
    tested = json.loads(run("eval", "x.safetensors", "--json").stdout)
    assert (tested["error"], tested["run"], tested["epoch"]) == (note["error"], record.run, 2)


def test_whole_numbers_and_statistics_travel_unchanged(finished):
    """Whatever buffers a layer may come to have."""
    chosen = trained(finished[0])
    coordinates = torch.tensor([2**40 + 1, -3])
    chosen.model.layer1.register_buffer("coordinates", coordinates)
    state = weights.convert(chosen, half=True)
    assert torch.equal(state["layer1.coordinates"], coordinates)
    assert state["bn1.running_var"].dtype == torch.float32
    assert state["bn1.weight"].dtype == torch.float16
    with torch.no_grad():
        chosen.model.fc.bias[0] = 1e5
    with pytest.raises(ValueError, match=r"fc.bias has numbers too large for half precision"):
        weights.convert(chosen, half=True)


def test_any_state_dict_and_a_checkpoint_can_be_loaded(finished):
    network = mssar.create_model("resnet8", "se", 7)
    safetensors.torch.save_file(network.state_dict(), "plain.safetensors")
    again = mssar.create_model("resnet8", "se", weights="plain.safetensors")
    assert again.num_classes == 7
    assert again.note is None
    with pytest.raises(ValueError, match="does not fit this network"):
        mssar.create_model("resnet8", weights="plain.safetensors")  # nothing says what it has
    assert torch.equal(again.fc.weight, network.fc.weight)
    last = checkpoint.checkpoints(finished[0])[-1]
    again = mssar.create_model("resnet8", weights=last)
    assert again.layer1[0].recalibrate.scales == (1, 2)
    assert torch.equal(again.fc.weight, state_of(finished[0])["fc.weight"])
    features = mssar.create_model("resnet8", "mssar", 0, weights=last)
    x = torch.randn(2, 3, 8, 8)
    expected = again.eval().forward_head(again.forward_features(x), pre_logits=True)
    assert torch.equal(features.eval()(x), expected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "resnet20"}, "holds resnet8 with 'mssar', not resnet20 with 'mssar'"),
        ({"recalibration": "none"}, "holds resnet8 with 'mssar', not resnet8 with 'none'"),
        ({"num_classes": 100}, r"for 10 classes, not 100: .*reset_classifier\(100\)"),
        ({"scales": (1,)}, r"holds resnet8 with 'mssar' and scales=\(1, 2\), not scales=\(1,\)"),
        ({"grid": 1}, "has no option 'grid'"),
    ],
)
def test_a_file_of_another_network_is_refused_in_a_line(finished, asked, message):
    run("weights", str(finished[0]), "x.safetensors")
    words = {"name": "resnet8", "recalibration": "mssar", "weights": "x.safetensors", **asked}
    with pytest.raises(ValueError, match=message) as found:
        mssar.create_model(**words)
    assert "\n" not in str(found.value)


def test_a_flipped_bit_is_noticed(finished):
    run("weights", str(finished[0]), "x.safetensors")
    for file in (Path("x.safetensors"), checkpoint.checkpoints(finished[0])[-1]):
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        Path("y.safetensors").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^y\.safetensors is damaged: its numbers have another"
        ):
            mssar.create_model("resnet8", "mssar", weights="y.safetensors")


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.safetensors"])
def test_a_pickle_is_never_opened(monkeypatch, name):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    Path(name).write_bytes(pickle.dumps({"fc.weight": 1}))
    for place, word in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(place, word, never)
    message = f"{name} is (a pickle, which may run anything|no safetensors file)"
    with pytest.raises(ValueError, match=message):
        mssar.create_model("resnet8", weights=name)


def test_what_else_is_no_file_of_weights(tmp_path, unchecked):
    with pytest.raises(ValueError, match=r"there is no file nowhere.safetensors"):
        mssar.create_model("resnet8", weights="nowhere.safetensors")
    with pytest.raises(ValueError, match=r"weights is a safetensors file, or one of .*; got True"):
        unchecked.create_model("resnet8", weights=True)
    nameless = '{"network": "resnet8", "recalibration": ["mssar"], "options": {}}'
    for note in ("{", "[1]", '{"network": "resnet8"}', nameless):
        safetensors.torch.save_file({"x": torch.zeros(1)}, "x.safetensors", {NOTE: note})
        with pytest.raises(ValueError, match=r"x.safetensors: its note cannot be read"):
            mssar.create_model("resnet8", weights="x.safetensors")
    safetensors.torch.save_file({"x": torch.zeros(1)}, "x.safetensors")
    with pytest.raises(ValueError, match=r"x.safetensors does not fit this network: .*conv1"):
        mssar.create_model("resnet8", weights=tmp_path / "x.safetensors")


def test_only_the_last_epoch_of_a_finished_run_is_written(capsys, monkeypatch, finished):
    assert "holds no finished run" in fail(capsys, monkeypatch, "weights", "runs", "x.safetensors")
    folder = str(finished[0])
    assert "ends in .safetensors" in fail(capsys, monkeypatch, "weights", folder, "x.pt")
    line = fail(capsys, monkeypatch, "weights", folder, "nowhere/x.safetensors")
    assert "there is no folder nowhere" in line
    other = arrays(38, 24, 10)
    monkeypatch.setattr(data, "load", lambda *_: other)
    line = fail(capsys, monkeypatch, "weights", folder, "x.safetensors")
    assert "tiny is not what resnet8 mssar scales=1,2 was trained on" in line
    assert not Path("x.safetensors").exists()


def test_own_pictures_are_explained_without_the_data_set(monkeypatch, finished):
    run("weights", str(finished[0]), "x.safetensors")
    Image.fromarray(DATA.test.images[3].numpy()).resize((20, 16)).save("cat.png")
    with_data = json.loads(run("explain", "x.safetensors", "cat.png", "--json").stdout)

    def missing(*_: object) -> None:
        raise ValueError("get it first")

    monkeypatch.setattr(data, "load", missing)
    without = json.loads(run("explain", "x.safetensors", "cat.png", "--json").stdout)
    found = without["images"][0]["probability"]
    assert found == pytest.approx(with_data["images"][0]["probability"], rel=1e-5)
    assert without["blocks"][0]["scales"] == [1, 2]
    asked = invoke("explain", "x.safetensors", "test:3")
    assert isinstance(asked.exception, ValueError)


def test_a_folder_to_share_has_the_file_a_configuration_and_a_card(finished, capsys, monkeypatch):
    folder, record = finished
    said = run("weights", str(folder), "net", "--half").stdout
    files = ["model.safetensors", "config.json", "README.md"]
    assert sorted(path.name for path in Path("net").iterdir()) == sorted(files)
    line = f"with {files[0]}, {files[1]} and {files[2]}; net.safetensors would be a single file"
    assert said.splitlines()[1] == f"a folder to share, {line}"
    assert "folder" not in run("weights", str(folder), "x.safetensors", "--half").stdout
    assert Path("net/model.safetensors").read_bytes() == Path("x.safetensors").read_bytes()
    assert run("eval", "net", "--json").stdout == run("eval", "x.safetensors", "--json").stdout
    network = mssar.from_pretrained("net")
    assert network.note == note_of("x.safetensors")
    assert network.layer1[0].recalibrate.scales == (1, 2)
    card = Path("net/README.md").read_text("utf-8")
    assert "parameters in half precision" in card
    assert f"| error, last epoch | {record.error:.2f} % |" in card
    how = f" on {record.environment['hardware']} in {record.execution['precision']}"
    assert f"measured again with these weights{how} |" in card
    for name, line in (
        ("net.pt", "FILE ends in .safetensors, or is a folder without an ending or with a / at"),
        ("a/b", "there is no folder a to write b into"),
        ("plain", "plain is there and is no folder"),
    ):
        Path("plain").touch()
        assert line in fail(capsys, monkeypatch, "weights", str(folder), name)


def test_folders_of_any_name_are_taken_and_what_is_in_them_is_kept(finished, capsys, monkeypatch):
    folder = str(finished[0])
    Path("net-v1.0").mkdir()
    Path("net-v1.0/.gitattributes").touch()
    for name in ("net-v1.0", "net-v1.0", "net-v1.1/"):  # once more is no harm
        assert f"{name.rstrip('/')}: resnet8 mssar" in run("weights", folder, name).stdout
        assert mssar.from_pretrained(name).num_classes == 10
    for config in (None, "[]", "{", '{"architecture": "resnet50"}'):
        Path("README.md").write_text("mine")
        if config is not None:
            Path("config.json").write_text(config)
        line = fail(capsys, monkeypatch, "weights", folder, ".")
        assert ". holds other things, and no network of mssar: name a new folder" in line
        assert Path("README.md").read_text() == "mine"
    assert not Path("model.safetensors").exists()
    Path("net-v1.1/mine.txt").touch()
    run("weights", folder, "net-v1.1")
    assert Path("net-v1.1/mine.txt").exists()


def test_colours_are_rounded(finished, monkeypatch):
    odd = replace(DATA, mean=(0.485 * 255, 0.456 * 255, 0.406 * 255), std=(57.12,) * 3)
    assert odd.std[0] / 255 != 0.224
    monkeypatch.setattr(data, "load", lambda *_: odd)
    run("weights", str(finished[0]), "x.safetensors")
    note = note_of("x.safetensors")
    assert (note["mean"], note["std"]) == ([0.485, 0.456, 0.406], [0.224] * 3)


def test_a_checkpoint_is_no_file_of_weights(finished):
    chosen = trained(checkpoint.checkpoints(finished[0])[0])
    assert isinstance(chosen, Trained)
    assert chosen.note is None
    assert chosen.progress.epoch == 1
