"""Insertion into networks with real ImageNet weights, where the weights and photographs are there.

MSSAR_WEIGHTS is a folder with mobilenet_v2.safetensors (torchvision's) and resnet50.safetensors
(Keras's, under torchvision's names); MSSAR_PHOTOGRAPHS one with folders of photographs, named by
the ten classes of Imagenette.
"""

import copy
import os
from pathlib import Path

import pytest
import torch

import mssar

CLASSES = {
    "n01440764": 0, "n02102040": 217, "n02979186": 482, "n03000684": 491, "n03028079": 497,
    "n03394916": 566, "n03417042": 569, "n03425413": 571, "n03445777": 574, "n03888257": 701,
}  # fmt: skip
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
KERAS = [123.68 / 255, 116.779 / 255, 103.939 / 255], [1.0, 1.0, 1.0]

pytestmark = pytest.mark.skipif(
    not os.environ.get("MSSAR_WEIGHTS") or not os.environ.get("MSSAR_PHOTOGRAPHS"),
    reason="MSSAR_WEIGHTS and MSSAR_PHOTOGRAPHS name no folders",
)


def photographs(
    transforms, mean: list[float], std: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    from PIL import Image

    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    prepare = transforms.Compose([*steps, transforms.Normalize(mean, std)])
    images, labels = [], []
    for name, label in CLASSES.items():
        for file in sorted((Path(os.environ["MSSAR_PHOTOGRAPHS"]) / name).iterdir()):
            images.append(prepare(Image.open(file).convert("RGB")))
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def resnet50(make) -> torch.nn.Module:
    """As Keras has it: the stride in the first convolution, and another eps."""
    model = make()
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = 1e-3
    return model


@torch.no_grad()
def logits(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part) for part in images.split(20)])


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet50", "resnet50 timm"])
def test_predictions_are_the_same_bit_by_bit(torchvision, name):
    from safetensors.torch import load_file

    if name == "mobilenet_v2":
        model, normalised = torchvision.models.mobilenet_v2(), IMAGENET
    elif name == "resnet50":
        model, normalised = resnet50(torchvision.models.resnet50), KERAS
    else:
        timm = pytest.importorskip("timm")
        model, normalised = resnet50(lambda: timm.create_model("resnet50")), KERAS
    file = Path(os.environ["MSSAR_WEIGHTS"]) / f"{name.split()[0]}.safetensors"
    model.load_state_dict(load_file(file))
    before = copy.deepcopy(model.eval())
    images, labels = photographs(torchvision.transforms, *normalised)
    mssar.insert(model)
    found, expected = logits(model, images), logits(before, images)
    assert torch.equal(found, expected)
    right = (found.argmax(1) == labels).sum()
    assert right >= 60  # of 100; the weights are real
    mssar.remove(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )
