"""ResNets for CIFAR, of 6n+2 layers: 20, 32, 56 and any other.  N batch, H W map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from mssar.coordinates import require_count
from mssar.networks.classifier import Classifier, initialise
from mssar.networks.recalibration import Recalibration, nothing
from mssar.networks.resnet import BasicBlock, stage

if TYPE_CHECKING:
    from jaxtyping import Float


class CifarResNet(Classifier):
    """Three stages of n basic blocks, 16, 32 and 64 wide; shortcuts that change shape project."""

    def __init__(
        self,
        depth: int,
        num_classes: int = 10,
        recalibration: Recalibration = nothing,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        require_count("in_chans", in_chans)
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"a CIFAR ResNet has 6n+2 layers, such as 20, 32 or 56; got {depth}")
        n = depth // 6
        self.conv1 = nn.Conv2d(in_chans, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, n, 16, 16, 1, recalibration)
        self.layer2 = stage(BasicBlock, n, 16, 32, 2, recalibration)
        self.layer3 = stage(BasicBlock, n, 32, 64, 2, recalibration)
        self.num_features = 64
        initialise(self)
        self.reset_classifier(num_classes)

    def forward_features(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        x = F.relu(self.bn1(self.conv1(x)))  # N 16 H W
        x = self.layer3(self.layer2(self.layer1(x)))  # N 64 H/4 W/4
        return x
