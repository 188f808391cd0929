"""Blocks of torchvision's networks with our end.  N batch, B C channels, H W h w maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torchvision.models import densenet, regnet, resnet

from mssar.branch import hooked
from mssar.surgery.ends import Carrier, DenseEnd, End

if TYPE_CHECKING:
    from jaxtyping import Float


class BasicBlock(End, resnet.BasicBlock):
    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        y = self.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.end(self.conv2(y), self.bn2, shortcut, self.relu)


class Bottleneck(End, resnet.Bottleneck):
    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.end(self.conv3(y), self.bn3, shortcut, self.relu)


class ResBottleneckBlock(End, regnet.ResBottleneckBlock):
    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        shortcut = x if self.proj is None else self.proj(x)
        *body, last = self.f
        if hooked(self.f) or hooked(last):  # they must be called then
            return self.end(self.f(x), None, shortcut, self.activation)
        conv, norm = last
        y = x
        for module in body:
            y = module(y)
        return self.end(conv(y), norm, shortcut, self.activation)


class DenseLayer(DenseEnd, densenet._DenseLayer):
    pass


class DenseBlock(Carrier, densenet._DenseBlock):
    pass
