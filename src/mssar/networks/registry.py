"""The paper's networks by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from mssar.networks.cifar_resnet import CifarResNet
from mssar.networks.classifier import Classifier
from mssar.networks.densenet import DenseNet
from mssar.networks.recalibration import OPTIONS, OURS, RECALIBRATIONS, Recalibration
from mssar.networks.resnet import BasicBlock, Bottleneck, ResNet


@dataclass(frozen=True)
class Architecture:
    """How to build a network, and what is particular to it."""

    build: Callable[..., Classifier]
    num_classes: int
    size: tuple[int, int, int]  # of the image it was made for
    defaults: dict[str, Any] = field(default_factory=dict)  # recalibration options
    staged: bool = False  # takes stage="multi" | "single"


CIFAR: dict[str, Any] = {"num_classes": 10, "size": (3, 32, 32)}
IMAGENET: dict[str, Any] = {"num_classes": 1000, "size": (3, 224, 224)}

NETWORKS: dict[str, Architecture] = {
    "resnet8": Architecture(partial(CifarResNet, 8), **CIFAR),  # not the paper's: for the demo
    "resnet20": Architecture(partial(CifarResNet, 20), **CIFAR),
    "resnet32": Architecture(partial(CifarResNet, 32), **CIFAR),
    "resnet56": Architecture(partial(CifarResNet, 56), **CIFAR),
    "densenet100": Architecture(partial(DenseNet, 100, 12), **CIFAR, staged=True),
    "densenet190": Architecture(partial(DenseNet, 190, 40), **CIFAR, staged=True),
    "resnet18": Architecture(partial(ResNet, BasicBlock, (2, 2, 2, 2)), **IMAGENET),
    "resnet34": Architecture(partial(ResNet, BasicBlock, (3, 4, 6, 3)), **IMAGENET),
    # On a bottleneck's full width the published counts fit SENet's reduction only.
    "resnext50": Architecture(
        partial(ResNet, Bottleneck, (3, 4, 6, 3)), **IMAGENET, defaults={"reduction": 16}
    ),
}


def list_models() -> list[str]:
    """The names :func:`create_model` takes."""
    return list(NETWORKS)


def architecture(name: str) -> Architecture:
    if name not in NETWORKS:
        raise ValueError(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    return NETWORKS[name]


def create_model(
    name: str,
    recalibration: str | Recalibration = "none",
    num_classes: int | None = None,
    **options: Any,
) -> Classifier:
    """One of the paper's networks.

    Args:
        name: one of :func:`list_models`.
        recalibration: "none", "se", "mssar", a callable from channels to a module, or for
            comparison "eca", "cbam", "coord", "ela", "ge" (timm's) or "simam".
        num_classes: 10 or 1000 by default, as the network's data set has; 0 for pooled features.
        options: for "se" ``reduction`` and ``backend``; for "mssar" ``scales``, ``strategy``,
            ``reduction`` and ``backend``, as :class:`mssar.MSSAR` takes them; for "cbam" and
            "coord" ``reduction``; for DenseNets with one of ours or a callable ``stage``, "multi"
            or "single". A callable takes its own options with it; it is multi-stage if it takes
            ``context_channels``.
    """
    chosen = architecture(name)
    taken = _options(recalibration)
    staging = (
        ("stage",) if chosen.staged and (callable(recalibration) or recalibration in OURS) else ()
    )
    for option in options:
        if option not in taken + staging:
            raise ValueError(
                f"{name} with {recalibration!r} has no option {option!r}; "
                f"its options: {', '.join(taken + staging) or 'it has none'}"
            )
    factory = recalibration if callable(recalibration) else RECALIBRATIONS[recalibration]
    building = {"stage": options.pop("stage")} if "stage" in options else {}
    settings = {k: v for k, v in chosen.defaults.items() if k in taken} | options
    made = chosen.build(
        num_classes=chosen.num_classes if num_classes is None else num_classes,
        recalibration=partial(factory, **settings) if settings else factory,
        **building,
    )
    if isinstance(recalibration, str):
        settled = _settled(recalibration, settings)
        if staging:
            settled["stage"] = building.get("stage", "multi")
        made.origin = {"network": name, "recalibration": recalibration, "options": settled}
    return made


def _settled(recalibration: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All that decides what is computed, so that it stays so whatever the defaults become."""
    usual = inspect.signature(RECALIBRATIONS[recalibration]).parameters
    found = {k: settings.get(k, usual[k].default) for k in OPTIONS[recalibration]}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _options(recalibration: str | Recalibration) -> tuple[str, ...]:
    if callable(recalibration) and not isinstance(recalibration, nn.Module):
        return ()
    if recalibration not in OPTIONS:
        raise ValueError(
            f"recalibration is one of {', '.join(OPTIONS)}, or a callable from channels to a "
            f"module; got {recalibration!r}"
        )
    taken = OPTIONS[recalibration]
    return (*taken, "backend") if recalibration in OURS else taken
