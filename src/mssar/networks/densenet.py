"""DenseNet-BC for CIFAR: DenseNet-100 (k=12) and DenseNet-190 (k=40).  N batch, H W map, k growth.

The main vector is everything concatenated so far. A step computes k new channels from it and
recalibrates them before they join it: with weights from the main vector (multi-stage), or from the
new channels themselves (single-stage).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mssar import fused
from mssar.branch import hooked
from mssar.coordinates import require_count
from mssar.layer import MSSAR
from mssar.networks.classifier import Classifier, initialise
from mssar.networks.recalibration import Recalibration, nothing, recalibrator
from mssar.scales import Pools
from mssar.tracing import traced

if TYPE_CHECKING:
    from jaxtyping import Float

Stage: TypeAlias = Literal["multi", "single"]


class DenseStep(nn.Module):
    """BN–relu–1×1–BN–relu–3×3–recalibrate: k new channels."""

    def __init__(
        self, inputs: int, growth: int, recalibration: Recalibration, stage: Stage
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)
        self.stage = stage
        context = {"context_channels": inputs} if stage == "multi" else {}
        self.recalibrate = recalibrator(recalibration, growth, **context)

    def forward(
        self, x: Float[Tensor, "N C H W"], pools: Pools | None = None
    ) -> Float[Tensor, "N k H W"]:
        """The new channels; ``pools``, where given, are those of ``x`` and spare pooling it."""
        context = () if self.stage == "single" else (x if pools is None else pools,)
        recalibrated: Tensor = self.recalibrate(self.convolve(x), *context)
        return recalibrated

    def convolve(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N k H W"]:
        """The new channels before they are recalibrated."""
        new: Tensor = self.conv1(F.relu(self.norm1(x)))  # N 4k H W
        new = self.conv2(F.relu(self.norm2(new)))  # N k H W
        return new


class DenseBlock(nn.Module):
    """Steps that each add k channels to the main vector."""

    def __init__(
        self, steps: int, inputs: int, growth: int, recalibration: Recalibration, stage: Stage
    ) -> None:
        super().__init__()
        self.stage = stage
        self.steps = nn.ModuleList(
            DenseStep(inputs + i * growth, growth, recalibration, stage) for i in range(steps)
        )

    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C H W"]:
        # Pools of a concatenation are the concatenated pools: carry them along, and pool only the
        # k new channels of a step, not all of the main vector again. What torch.fx records has no
        # shape to pool by: there each layer pools the main vector for itself.
        layer = None if traced(x) else self._consulting()
        if layer is not None and (bound := self._fused(x)):
            return self._carry(x, bound)
        pools = None if layer is None else layer.pool(x)
        for left, step in zip(reversed(range(len(self.steps))), self.steps, strict=True):
            new = step(x, pools)
            x = torch.cat((x, new), 1)
            if layer is not None and pools is not None and left:
                pools = pools.extend(layer.pool(new))
        return x

    def _fused(self, x: Tensor) -> list[Any]:
        """The steps' layers, bound to carry the pools if the kernels can; all are MSSAR."""
        layers = [cast("MSSAR", step.recalibrate) for step in self.steps]
        if len({layer.backend for layer in layers}) > 1 or layers[0].strategy != "regional":
            return []
        plain = all(type(step) is DenseStep for step in self.steps)  # no wrapper around it
        plain = plain and all(type(layer) is MSSAR for layer in layers)
        if not plain or any(hooked(m) for m in (*self.steps, *layers)):
            return []  # they are called, as they are
        return fused.carries(x, layers)

    def _carry(self, x: Float[Tensor, "N B H W"], bound: list[Any]) -> Float[Tensor, "N C H W"]:
        steps = [cast("DenseStep", step) for step in self.steps]
        cells = fused.region_means(x, steps[0].recalibrate)
        for step, its in zip(steps, bound, strict=True):
            new, cells = fused.dense_step(step.convolve(x), cells, its, its is not bound[-1])
            x = torch.cat((x, new), 1)
        return x

    def _consulting(self) -> MSSAR | None:
        """One of the layers that consult the main vector, if all do and with the same sets."""
        layers = [step.recalibrate for step in self.steps]
        first = layers[0]
        if self.stage == "single" or not isinstance(first, MSSAR):
            return None
        agree = all(isinstance(layer, MSSAR) and layer.sets == first.sets for layer in layers)
        return first if agree else None


class Transition(nn.Module):
    """BN–relu–1×1 to half the channels, then half the map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(Classifier):
    """Three dense blocks with bottlenecks and compression by one half (BC)."""

    def __init__(
        self,
        depth: int = 100,
        growth: int = 12,
        num_classes: int = 10,
        recalibration: Recalibration = nothing,
        stage: Stage | None = None,  # multi where the recalibration can, by default
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        require_count("in_chans", in_chans)
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"a DenseNet-BC has 6n+4 layers, such as 100 or 190; got {depth}")
        takes_context = "context_channels" in inspect.signature(recalibration).parameters
        if stage is None:
            stage = "multi" if takes_context else "single"
        if stage not in ("multi", "single"):
            raise ValueError(f"stage is 'multi' or 'single'; got {stage!r}")
        if stage == "multi" and not takes_context:
            raise ValueError(
                "stage='multi' makes recalibration(channels, context_channels=…); "
                f"{recalibration!r} does not take context_channels, use stage='single'"
            )
        steps, width = (depth - 4) // 6, 2 * growth
        self.conv1 = nn.Conv2d(in_chans, width, 3, 1, 1, bias=False)
        self.block1 = DenseBlock(steps, width, growth, recalibration, stage)
        width += steps * growth
        self.transition1 = Transition(width, width // 2)
        width //= 2
        self.block2 = DenseBlock(steps, width, growth, recalibration, stage)
        width += steps * growth
        self.transition2 = Transition(width, width // 2)
        width //= 2
        self.block3 = DenseBlock(steps, width, growth, recalibration, stage)
        width += steps * growth
        self.norm = nn.BatchNorm2d(width)
        self.num_features = width
        initialise(self)
        self.reset_classifier(num_classes)

    def forward_features(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        x = self.conv1(x)  # N 2k H W
        x = self.transition1(self.block1(x))  # N C H/2 W/2
        x = self.transition2(self.block2(x))  # N C H/4 W/4
        x = self.block3(x)
        return F.relu(self.norm(x))
