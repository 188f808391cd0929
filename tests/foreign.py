"""Networks of timm and torchvision, small, with numbers as after some training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet, basic": ("resnet10t", {}),
    "resnet, bottleneck": ("resnet14t", {}),
    "resnet, drop path": ("resnet10t", {"drop_path_rate": 0.5}),
    "resnet, se": ("resnet10t", {"block_args": {"attn_layer": "se"}}),
    "regnet": ("regnetx_002", {}),
    "regnet, se": ("regnety_002", {}),
    "regnet, norms first": ("regnety_002", {"preact": True}),
    "regnetz": ("test_byobnet", {}),
    "resnet v2": ("resnetv2_50", {"layers": (1, 1, 1, 1)}),
    "resnet v2, basic": ("resnetv2_18", {"layers": (1, 1, 1, 1)}),
    "resnet v2, norms last": ("resnetv2_50", {"layers": (1, 1, 1, 1), "preact": False}),
    "res2net": ("res2net50_26w_4s", {"layers": (1, 1, 1, 1)}),
    "resnest": ("resnest14d", {"drop_path_rate": 0.5}),
    "sknet": ("skresnet18", {"layers": (1, 1, 1, 1), "drop_path_rate": 0.5}),
    "sknet, bottleneck": ("skresnext50_32x4d", {"layers": (1, 1, 1, 1)}),
    "senet": ("legacy_seresnet18", {"layers": (1, 1, 1, 1)}),
    "senet, bottleneck": ("legacy_seresnext26_32x4d", {"layers": (1, 1, 1, 1)}),
    "densenet": ("densenet121", {"growth_rate": 8, "block_config": (2, 2)}),
    "mobilenet v2": ("mobilenetv2_035", {}),
    "mobilenet v3": ("mobilenetv3_small_050", {}),
    "efficientnet": ("tinynet_e", {"drop_path_rate": 0.5}),
    "convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "drop_path_rate": 0.5}),
    "convnext, convolutions": ("convnext_atto", {"depths": (1, 1, 1, 1), "conv_mlp": True}),
    "convnext v2": ("convnextv2_atto", {"depths": (1, 1, 1, 1)}),
}


def _torchvision() -> dict[str, Callable[[Any], nn.Module]]:
    few = {"num_classes": 10}
    config = "CNBlockConfig"
    return {
        "resnet, basic": lambda m: m.resnet.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], **few),
        "resnext": lambda m: m.resnet.ResNet(
            m.resnet.Bottleneck, [1, 1, 1, 1], groups=32, width_per_group=4, **few
        ),
        "regnet": lambda m: m.regnet_y_400mf(**few),
        "densenet": lambda m: m.DenseNet(8, (2, 2), 16, **few),
        "mobilenet v2": lambda m: m.mobilenet_v2(width_mult=0.25, **few),
        "mobilenet v3": lambda m: m.mobilenet_v3_small(width_mult=0.5, **few),
        "efficientnet": lambda m: m.efficientnet_b0(**few),
        "convnext": lambda m: m.ConvNeXt(
            [getattr(m.convnext, config)(16, 32, 1), getattr(m.convnext, config)(32, None, 1)],
            stochastic_depth_prob=0.5,
            **few,
        ),
    }


TORCHVISION = _torchvision()
NAMES = [f"timm {name}" for name in TIMM] + [f"torchvision {name}" for name in TORCHVISION]


def build(name: str, torchvision: Any) -> nn.Module:
    library, _, which = name.partition(" ")
    if library == "timm":
        timm = pytest.importorskip("timm")
        known, options = TIMM[which]
        model = timm.create_model(known, num_classes=10, **options)
    else:
        model = TORCHVISION[which](torchvision.models)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def seeded(model: nn.Module, x: torch.Tensor, training: bool) -> torch.Tensor:
    """What it makes of x; what is dropped is the same every time."""
    torch.manual_seed(1)
    model.train(training)
    made: torch.Tensor = model(x)
    return made
