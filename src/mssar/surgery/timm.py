"""Blocks of timm's networks with our end.  N batch, B C channels, H W h w maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.models import densenet, regnet, resnet
from torch import Tensor

from mssar.branch import hooked
from mssar.surgery.ends import Carrier, DenseEnd, End

if TYPE_CHECKING:
    from jaxtyping import Float


class BasicBlock(End, resnet.BasicBlock):
    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        y = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.end(self.conv2(y), self.bn2, shortcut, self.act2, self.se, self.drop_path)


class Bottleneck(End, resnet.Bottleneck):
    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(y)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.end(self.conv3(y), self.bn3, shortcut, self.act3, self.se, self.drop_path)


class RegNetBottleneck(End, regnet.Bottleneck):
    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        y = self.se(self.conv2(self.conv1(x)))
        if hooked(self.conv3):  # it must be called then
            y, norm = self.conv3(y), None
        else:
            y, norm = self.conv3.conv(y), self.conv3.bn
        return self.end(y, norm, self.downsample(x), self.act3, self.drop_path)


class DenseLayer(DenseEnd, densenet.DenseLayer):
    pass


class DenseBlock(Carrier, densenet.DenseBlock):
    pass
