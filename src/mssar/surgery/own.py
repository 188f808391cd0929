"""Blocks of this package's networks that were made without recalibration, and gain it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mssar.networks import densenet, resnet
from mssar.scales import Pools
from mssar.surgery.ends import Holder

if TYPE_CHECKING:
    from jaxtyping import Float


class BasicBlock(Holder, resnet.BasicBlock):  # type: ignore[misc]
    pass  # it calls its recalibration by itself


class Bottleneck(Holder, resnet.Bottleneck):  # type: ignore[misc]
    pass


class GroupedBottleneck(Holder, resnet.GroupedBottleneck):  # type: ignore[misc]
    pass


class DenseStep(Holder, densenet.DenseStep):  # type: ignore[misc]
    """Made single-stage, since nothing took a context; now the weights come from it."""

    def forward(
        self, x: Float[Tensor, "N C H W"], pools: Pools | None = None
    ) -> Float[Tensor, "N k H W"]:
        recalibrated: Tensor = self.recalibrate(self.convolve(x), x if pools is None else pools)
        return recalibrated
