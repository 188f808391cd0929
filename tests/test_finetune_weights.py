"""Weights to begin with: which files are read, and where they fit."""

import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from finetuning import NET, _tree, pytestmark, weights
from lab import assert_same
from torch import nn

import mssar
from mssar.lab.run import Initial, Run
from mssar.networks.weights import PRETRAINED
from mssar.surgery import foreign, initial

__all__ = ["_tree", "pytestmark", "weights"]  # fixtures, and what is needed


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
    found = initial.read(Path("net.pth")).tensors
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
        assert_same(initial.read(Path("net.pth")).tensors, {"w": torch.ones(2, 3)})
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


def test_weights_of_another_network_are_called_that():
    """Where their file says what they are of."""
    begun = Initial.of(PRETRAINED["resnet20-none-cifar100"])
    said = r"cifar100.safetensors \(resnet20 with 'none'\) does not fit CifarResNet: it lacks"
    with pytest.raises(ValueError, match=said):
        Run("resnet56", dataset="cifar100", weights=begun).begun(100)
    begun = Initial.of(PRETRAINED["resnet20-mssar-cifar100"])
    with pytest.raises(ValueError, match=r"\(resnet20 with 'mssar'\) does not fit CifarResNet"):
        Run("resnet20", dataset="cifar100", weights=begun).begun(100)


def test_layers_of_other_scales_are_refused():
    made = foreign.build(NET, "mssar", 2, scales=(1, 2, 4))
    with pytest.raises(ValueError, match=r"^f does not fit ResNet: "):
        foreign.build(NET, "mssar", 2, tensors=made.state_dict(), source="f", scales=(4, 2, 1))
