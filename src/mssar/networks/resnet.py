"""ResNet-18, -34, -50 and ResNeXt-50 for ImageNet.  N batch, C channels, H W map.

Modules are named as torchvision names them: without recalibration its weights load as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mssar.coordinates import require_count
from mssar.networks.classifier import Classifier, initialise
from mssar.networks.recalibration import Recalibration, nothing, recalibrator
from mssar.tail import path, tail

if TYPE_CHECKING:
    from jaxtyping import Float


class Block(nn.Module, ABC):
    """conv–BN–relu–…–conv–BN–recalibrate–add–relu; subclasses define the residual."""

    expansion: ClassVar[int]
    recalibrate: nn.Module
    downsample: nn.Module | None

    @property
    @abstractmethod
    def last_norm(self) -> nn.Module:
        """The BN after the last convolution."""

    @abstractmethod
    def residual(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        """What the block adds to its shortcut, up to and without the last BN."""

    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        shortcut = x if self.downsample is None else self.downsample(x)
        return tail(self.residual(x), self.last_norm, self.recalibrate, shortcut)

    def extra_repr(self) -> str:
        return path(self.last_norm, self.recalibrate)


class BasicBlock(Block):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(
        self, inputs: int, width: int, stride: int = 1, recalibration: Recalibration = nothing
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.recalibrate = recalibrator(recalibration, width)
        self.downsample = projection(inputs, width, stride)

    def residual(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.conv2(x)
        return x

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2


class Bottleneck(Block):
    """1×1, 3×3, 1×1; recalibrated at the block's full width. The 3×3 has the stride."""

    expansion = 4
    groups: ClassVar[int] = 1
    width_per_group: ClassVar[int] = 64  # in the first stage, doubled with every stage

    def __init__(
        self, inputs: int, width: int, stride: int = 1, recalibration: Recalibration = nothing
    ) -> None:
        super().__init__()
        inner, outputs = width * self.groups * self.width_per_group // 64, width * self.expansion
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=self.groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.recalibrate = recalibrator(recalibration, outputs)
        self.downsample = projection(inputs, outputs, stride)

    def residual(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.conv3(x)
        return x

    @property
    def last_norm(self) -> nn.Module:
        return self.bn3


class GroupedBottleneck(Bottleneck):
    """ResNeXt's, 32×4d: its 3×3 is in 32 groups."""

    groups = 32
    width_per_group = 4


def projection(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """The shortcut of a block that changes its input's shape; None where it does not."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def stage(
    block: type[Block],
    depth: int,
    inputs: int,
    width: int,
    stride: int,
    recalibration: Recalibration,
) -> nn.Sequential:
    """Blocks in a row; the first may shrink the map and widen it."""
    outputs = width * block.expansion
    blocks = [block(inputs, width, stride, recalibration)]
    blocks += [block(outputs, width, 1, recalibration) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


class ResNet(Classifier):
    """Four stages of blocks after a 7×7 stem."""

    def __init__(
        self,
        block: type[Block],
        depths: tuple[int, int, int, int],
        num_classes: int = 1000,
        recalibration: Recalibration = nothing,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        require_count("in_chans", in_chans)
        self.conv1 = nn.Conv2d(in_chans, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        wide = block.expansion
        self.layer1 = stage(block, depths[0], 64, 64, 1, recalibration)
        self.layer2 = stage(block, depths[1], 64 * wide, 128, 2, recalibration)
        self.layer3 = stage(block, depths[2], 128 * wide, 256, 2, recalibration)
        self.layer4 = stage(block, depths[3], 256 * wide, 512, 2, recalibration)
        self.num_features = 512 * wide
        initialise(self)
        self.reset_classifier(num_classes)

    def forward_features(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        x = F.relu(self.bn1(self.conv1(x)))  # N 64 H/2 W/2
        x = F.max_pool2d(x, 3, 2, 1)  # N 64 H/4 W/4
        x = self.layer2(self.layer1(x))
        x = self.layer4(self.layer3(x))  # N C H/32 W/32
        return x
