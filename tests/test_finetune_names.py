"""Names of other libraries' networks, and mistakes in them."""

import sys
from pathlib import Path

import pytest
import torch
from finetuning import NET, ON, SMALL, _tree, pytestmark
from lab import assert_same
from test_cli import fail

import mssar
from mssar.lab.run import Run
from mssar.surgery import foreign
from mssar.surgery.heads import classes, head

__all__ = ["_tree", "pytestmark"]  # a fixture, and what is needed


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
        ((NET, "--mean", "124,116,104", "--std", "1,1,1"), "of colours from 0 to 1, those for 0"),
        ((NET, "--mean", "0.5,0.5,0.5", "--std", "58,57,57"), "'0.5,0.5,0.5' and '58,57,57'"),
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
