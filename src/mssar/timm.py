"""Our networks in timm, by ``import mssar.timm``.  N batch, B channels in, C channels, H W map.

Each is there with SE and with MS-SAR: ``resnet18_se``, ``resnet18_mssar``. The modules, and so the
weights, are those of :func:`mssar.create_model`. No other file imports timm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from timm.models import (
    build_model_with_cfg,
    checkpoint_seq,
    generate_default_cfgs,
    register_model,
)
from torch import Tensor, nn

from mssar import networks
from mssar.networks.classifier import Classifier
from mssar.networks.registry import (
    IMAGENET,
    NETWORKS,
    Architecture,
    architecture,
    origin,
    recalibrating,
)
from mssar.networks.weights import of_checkpoint

Step: TypeAlias = Callable[[Tensor], Tensor]  # a module, or a function
Patterns: TypeAlias = str | list[tuple[str, tuple[int, ...] | None]]
AFTER = (99999,)  # timm's word for the group of the parameters before
MAX_POOL = partial(F.max_pool2d, kernel_size=3, stride=2, padding=1)


class Adapted(Classifier):
    """What timm asks of a network besides: poolings, maps on the way, groups of parameters."""

    made_from: dict[str, Any] | None = None  # what the names and options say

    def __init__(
        self, *shape: Any, global_pool: str = "avg", drop_rate: float = 0.0, **options: Any
    ) -> None:
        super().__init__(*shape, **options)
        self.drop_rate = drop_rate  # before the linear layer
        self.grad_checkpointing = False
        self.head_hidden_size = self.num_features
        self.feature_info = [
            {"module": name, "num_chs": channels, "reduction": reduction}
            for name, channels, reduction in self.maps()
        ]
        if global_pool != "avg":
            self.reset_classifier(self.num_classes, global_pool)

    @abstractmethod
    def stages(self) -> list[list[Step]]:
        """The steps to each map that is a feature, from the image or from the map before."""

    @abstractmethod
    def maps(self) -> list[tuple[str, int, int]]:
        """Of each its node in torch.fx, its channels, and what the image's sides are divided by."""

    # --- forward ---

    def forward_features(self, x: Tensor) -> Tensor:
        for steps in self.stages():
            x = self._taken(steps, x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.global_pool(x)
        x = F.dropout(x, self.drop_rate, self.training) if self.drop_rate else x
        logits: Tensor = x if pre_logits else self.fc(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,  # noqa: ARG002, every map ends in one where the network has one
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps on the way, by their numbers in ``feature_info``."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is 'NCHW' here; got {output_fmt!r}")
        wanted, last = self._wanted(indices)
        found = []
        for number, steps in enumerate(self.stages()):
            if number > last and (stop_early or intermediates_only):
                break
            x = self._taken(steps, x)
            if number in wanted:
                found.append(x)
        return found if intermediates_only else (x, found)

    def _taken(self, steps: list[Step], x: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training:
            parts = [list(s) if isinstance(s, nn.Sequential) else [s] for s in steps]
            return cast("Tensor", checkpoint_seq(parts, x, flatten=True, use_reentrant=False))
        for step in steps:
            x = step(x)
        return x

    # --- changes ---

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """A fresh head. Without a pooling, ``""``, there is no classifier: the map is left."""
        if num_classes and not global_pool:
            raise ValueError("a classifier needs a global_pool, such as 'avg'; or num_classes=0")
        self.global_pool = SelectAdaptivePool2d(pool_type=global_pool, flatten=bool(global_pool))
        self.origin = self.made_from if global_pool == "avg" else None  # others cannot be described
        self._set_classifier(
            num_classes, self.num_features * (2 if global_pool.endswith("catavgmax") else 1)
        )

    def get_classifier(self, name_only: bool = False) -> Any:
        return "fc" if name_only else self.fc

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute maps twice instead of keeping them."""
        self.grad_checkpointing = enable

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,  # noqa: ARG002
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what is not needed for these maps; their numbers, counted from the first."""
        wanted, last = self._wanted(indices)
        idle = [step for steps in self.stages()[last + 1 :] for step in steps]
        for name, child in list(self.named_children()):
            if any(child is step for step in idle):
                setattr(self, name, nn.Identity())
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def _wanted(self, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
        """All of the maps, the last so many, or those with these numbers; and the last of them."""
        count = len(self.feature_info)
        if indices is None or isinstance(indices, int):
            indices = range(0 if indices is None else count - indices, count)
        found = [i + count if i < 0 else i for i in indices]
        if not found or not all(0 <= i < count for i in found):
            raise ValueError(f"there are maps 0 to {count - 1}; got {list(indices)}")
        return found, max(found)

    def group_matcher(self, coarse: bool = False) -> dict[str, Patterns]:
        """Groups of parameters from the stem to the end: stages, or with all their blocks."""
        return {
            "stem": r"^(?:conv1|bn1)\.",
            "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)",
        }


class CifarResNet(Adapted, networks.CifarResNet):
    """:class:`mssar.networks.CifarResNet` for timm."""

    def stages(self) -> list[list[Step]]:
        return [[self.conv1, self.bn1, F.relu], [self.layer1], [self.layer2], [self.layer3]]

    def maps(self) -> list[tuple[str, int, int]]:
        return [("relu", 16, 1), ("layer1", 16, 1), ("layer2", 32, 2), ("layer3", 64, 4)]


class ResNet(Adapted, networks.ResNet):
    """:class:`mssar.networks.ResNet` for timm."""

    def stages(self) -> list[list[Step]]:
        stem: list[Step] = [self.conv1, self.bn1, F.relu]
        return [stem, [MAX_POOL, self.layer1], [self.layer2], [self.layer3], [self.layer4]]

    def maps(self) -> list[tuple[str, int, int]]:
        narrowest = self.num_features // 8
        blocks = [(f"layer{i + 1}", narrowest << i, 4 << i) for i in range(4)]
        return [("relu", self.conv1.out_channels, 2), *blocks]


class DenseNet(Adapted, networks.DenseNet):
    """:class:`mssar.networks.DenseNet` for timm."""

    def stages(self) -> list[list[Step]]:
        end: list[Step] = [self.transition2, self.block3, self.norm, F.relu]
        return [[self.conv1], [self.block1], [self.transition1, self.block2], end]

    def maps(self) -> list[tuple[str, int, int]]:
        first, second = self.transition1.norm.num_features, self.transition2.norm.num_features
        blocks = [("block1", first, 1), ("block2", second, 2), ("relu", self.num_features, 4)]
        return [("conv1", self.conv1.out_channels, 1), *blocks]

    def group_matcher(self, coarse: bool = False) -> dict[str, Patterns]:
        fine: Patterns = [(r"^block(\d+)\.steps\.(\d+)", None), (r"^transition(\d+)", AFTER)]
        return {"stem": r"^conv1\.", "blocks": r"^(?:block|transition)(\d+)" if coarse else fine}


ADAPTED: dict[type[Classifier], type[Adapted]] = {
    networks.CifarResNet: CifarResNet,
    networks.ResNet: ResNet,
    networks.DenseNet: DenseNet,
}
KINDS: tuple[Literal["se", "mssar"], ...] = ("se", "mssar")
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def _cfg(chosen: Architecture) -> dict[str, Any]:
    """What the network is made for. There are no weights yet to be downloaded."""
    _, height, width = chosen.size
    photographs = chosen.size == IMAGENET["size"]
    shrink = 32 if photographs else 4
    return {
        "input_size": chosen.size,
        "pool_size": (height // shrink, width // shrink),
        "num_classes": chosen.num_classes,
        "interpolation": "bilinear",
        "crop_pct": 0.875 if photographs else 1.0,
        "mean": IMAGENET_DEFAULT_MEAN if photographs else CIFAR10_MEAN,
        "std": IMAGENET_DEFAULT_STD if photographs else CIFAR10_STD,
        "first_conv": "conv1",
        "classifier": "fc",
        "license": "apache-2.0",
        "paper_ids": "arXiv:1804.00787",
        "paper_name": "Multi-Scale Spatially-Asymmetric Recalibration for Image Classification",
    }


default_cfgs = generate_default_cfgs(
    {f"{name}_{kind}": _cfg(chosen) for name, chosen in NETWORKS.items() for kind in KINDS}
)


def _build(name: str, kind: str, **given: Any) -> Adapted:
    own = ("num_classes", "in_chans", "global_pool", "drop_rate")
    options = {k: v for k, v in given.items() if k not in own}
    built = recalibrating(name, kind, **options)
    chosen = architecture(name)
    made = ADAPTED[chosen.network](
        *chosen.shape, **{k: v for k, v in given.items() if k in own}, **built
    )
    made.made_from = origin(name, kind, given.get("in_chans", 3), options)
    made.origin = made.made_from if made.global_pool.pool_type == "avg" else None
    return made


def _weights(state: dict[str, Tensor], _model: nn.Module) -> dict[str, Tensor]:
    """Of a checkpoint of the lab the network alone; it has the momentum, too."""
    return of_checkpoint(state) or state


def _entrypoint(name: str, kind: str) -> Callable[..., nn.Module]:
    variant, count = f"{name}_{kind}", 5 if NETWORKS[name].size == IMAGENET["size"] else 4

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        made: nn.Module = build_model_with_cfg(
            partial(_build, name, kind),
            variant,
            pretrained,
            pretrained_filter_fn=_weights,
            feature_cfg={"out_indices": tuple(range(count)), "feature_cls": "getter"},
            **options,
        )
        return made

    create.__name__ = create.__qualname__ = variant
    create.__doc__ = f"{name} with {'SE' if kind == 'se' else 'MS-SAR'}."
    return register_model(create)


__all__ = ["CifarResNet", "DenseNet", "ResNet"]  # timm adds the names of the networks
globals().update({f"{name}_{kind}": _entrypoint(name, kind) for name in NETWORKS for kind in KINDS})
