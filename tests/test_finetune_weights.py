"""Weights to begin with: which files are read, and where they fit."""

import pickle
import re
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


@pytest.mark.parametrize(
    ("file", "network", "recalibration", "options", "said"),
    [
        ("none", "resnet56", "none", {}, "resnet56 with 'none': ask for network resnet20"),
        ("none", "resnet56", "mssar", {}, "resnet56 with 'mssar': ask for network resnet20"),
        ("none", NET, "mssar", {}, f"{NET} with 'mssar': ask for network resnet20"),
        (
            *("mssar", "resnet56", "none", {}),
            "resnet56 with 'none': ask for network resnet20, recalibration mssar",
        ),
        ("mssar", "resnet20", "none", {}, "resnet20 with 'none': ask for recalibration mssar"),
        ("mssar", "resnet20", "se", {}, "resnet20 with 'se': ask for recalibration mssar"),
        (
            *("mssar", "resnet20", "mssar", {"scales": (1, 2)}),
            "resnet20 with 'mssar' and scales=1,2: ask for scales=1,2,4",
        ),
        (
            *("mssar", "resnet20", "mssar", {"strategy": "sliding", "reduction": 3}),
            "resnet20 with 'mssar' and strategy=sliding reduction=3: "
            "ask for strategy=regional, reduction=1",
        ),
        (
            *("mssar", "resnet56", "mssar", {"reduction": 3}),
            "resnet56 with 'mssar' and reduction=3: ask for network resnet20, reduction=1",
        ),
        (
            *("mssar", NET, "mssar", {"where": ("layer1",)}),
            f"{NET} with 'mssar' and where=layer1: ask for network resnet20, where=blocks",
        ),
    ],
)
def test_weights_of_something_else_are_called_that(file, network, recalibration, options, said):
    """Where their file says what they are of; and what would do is said, which no tensor tells."""
    name = f"resnet20-{file}-cifar100"
    begun = Initial.of(PRETRAINED[name])
    line = rf"{name}\.safetensors \(resnet20 with '{file}'\) does not fit {re.escape(said)}$"
    with pytest.raises(ValueError, match=line):
        Run(network, recalibration, options, "cifar100", weights=begun).begun(100)


def test_what_would_do_has_all_that_is_not_usual():
    """And a network of another version, a place and a stranger's text are no trouble."""
    there = {"x": torch.ones(1), "recalibrate.x": torch.ones(1)}  # with layers, so it seems

    def said(network, recalibration, **options):
        note = {"network": network, "recalibration": recalibration, "options": options}
        with pytest.raises(ValueError, match=r"^f does not fit") as found:
            foreign.build(NET, "none", tensors=there, source="f", note=note)
        return str(found.value).removeprefix(f"f does not fit {NET} with 'none': ask for ")

    own = {"scales": [1, 2, 4], "strategy": "regional"}
    assert said(NET, "mssar", **own, reduction="auto") == "recalibration mssar"
    assert said(NET, "mssar", **own, where=["layer1", "layer2"], reduction=2) == (
        "recalibration mssar, where=layer1,layer2, reduction=2"
    )
    assert said("resnext50", "mssar", **own, reduction=16) == (
        "network resnext50, recalibration mssar"
    )
    assert said("resnet21", "mssar", **{**own, "scales": [1, 2]}, stage="multi") == (
        "network resnet21, recalibration mssar, scales=1,2"
    )
    assert said("\x1b[2J", "none") == "'network \\x1b[2J'"
    assert said(NET, "none").startswith("f does not fit ResNet: it lacks ")  # nothing differs


def test_layers_of_other_scales_are_refused():
    made = foreign.build(NET, "mssar", 2, scales=(1, 2, 4))
    with pytest.raises(ValueError, match=r"^f does not fit ResNet: "):
        foreign.build(NET, "mssar", 2, tensors=made.state_dict(), source="f", scales=(4, 2, 1))
