"""The networks by name: the paper's, and two more."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mssar.networks.cifar_resnet import CifarResNet
from mssar.networks.classifier import Classifier
from mssar.networks.densenet import DenseNet
from mssar.networks.recalibration import OURS, RECALIBRATIONS, Recalibration
from mssar.networks.resnet import BasicBlock, Bottleneck, GroupedBottleneck, ResNet
from mssar.networks.weights import Weights, read
from mssar.options import defaults


@dataclass(frozen=True)
class Architecture:
    """How to build a network, and what is particular to it."""

    network: type[Classifier]
    shape: tuple[Any, ...]  # what distinguishes it from others of its class
    num_classes: int
    size: tuple[int, int, int]  # of the image it was made for
    defaults: dict[str, Any] = field(default_factory=dict)  # recalibration options
    staged: bool = False  # takes stage="multi" | "single"


CIFAR: dict[str, Any] = {"num_classes": 10, "size": (3, 32, 32)}
IMAGENET: dict[str, Any] = {"num_classes": 1000, "size": (3, 224, 224)}

# On a bottleneck's full width the published counts fit SENet's reduction only.
WIDE: dict[str, Any] = {"defaults": {"reduction": 16}}

NETWORKS: dict[str, Architecture] = {
    "resnet8": Architecture(CifarResNet, (8,), **CIFAR),  # not the paper's: for the demo
    "resnet20": Architecture(CifarResNet, (20,), **CIFAR),
    "resnet32": Architecture(CifarResNet, (32,), **CIFAR),
    "resnet56": Architecture(CifarResNet, (56,), **CIFAR),
    "densenet100": Architecture(DenseNet, (100, 12), **CIFAR, staged=True),
    "densenet190": Architecture(DenseNet, (190, 40), **CIFAR, staged=True),
    "resnet18": Architecture(ResNet, (BasicBlock, (2, 2, 2, 2)), **IMAGENET),
    "resnet34": Architecture(ResNet, (BasicBlock, (3, 4, 6, 3)), **IMAGENET),
    "resnet50": Architecture(ResNet, (Bottleneck, (3, 4, 6, 3)), **IMAGENET, **WIDE),  # nor this
    "resnext50": Architecture(ResNet, (GroupedBottleneck, (3, 4, 6, 3)), **IMAGENET, **WIDE),
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
    recalibration: str | Recalibration | None = None,
    num_classes: int | None = None,
    in_chans: int = 3,
    *,
    weights: str | Path | None = None,
    **options: Any,
) -> Classifier:
    """One of the networks.

    Args:
        name: one of :func:`list_models`.
        recalibration: "none" (by default), "se", "mssar", a callable from channels to a module,
            or for comparison "eca", "cbam", "coord", "ela", "ge" (timm's) or "simam".
        num_classes: 10 or 1000 by default, as the network's data set has; 0 for pooled features.
        in_chans: channels of the images.
        weights: a safetensors file to load, of this network, or the name of one that comes with
            the package, such as "resnet56-mssar-cifar100". What ``mssar weights`` wrote says what
            it is: recalibration, options and classes left out here are the file's, and ``note`` of
            the network is what else it says, such as the classes' names and the pixels' mean.
        options: for "se" ``reduction`` and ``backend``; for "mssar" ``scales``, ``strategy``,
            ``reduction`` and ``backend``, as :class:`mssar.MSSAR` takes them; for "cbam" and
            "coord" ``reduction``; for DenseNets with one of ours or a callable ``stage``, "multi"
            or "single". A callable takes its own options with it; it is multi-stage if it takes
            ``context_channels``.
    """
    chosen = architecture(name)
    if weights is not None:
        found = read(weights)
        kind = (found.recalibration or "none") if recalibration is None else recalibration
        return _trained(found, name, kind, num_classes, in_chans, options)
    recalibration = "none" if recalibration is None else recalibration
    classes = chosen.num_classes if num_classes is None else num_classes
    built = recalibrating(name, recalibration, **options)
    made = chosen.network(*chosen.shape, num_classes=classes, in_chans=in_chans, **built)
    made.origin = origin(name, recalibration, in_chans, options)
    return made


def origin(
    name: str, recalibration: str | Recalibration, in_chans: int, options: dict[str, Any]
) -> dict[str, Any] | None:
    """What a network can be made from again; None where that is more than names and numbers."""
    if not isinstance(recalibration, str) or callable(options.get("strategy")):
        return None
    settled = _settled(architecture(name), recalibration, options)
    found: dict[str, Any] = {"network": name, "recalibration": recalibration, "options": settled}
    return found | {"in_chans": in_chans}


def recalibrating(
    name: str, recalibration: str | Recalibration = "none", **options: Any
) -> dict[str, Any]:
    """What a network's class is told of its recalibration; options that it has not are refused."""
    chosen = architecture(name)
    taken = _options(recalibration)
    stages = chosen.staged and (callable(recalibration) or recalibration in OURS)
    staging = ("stage",) if stages else ()
    for option in options:
        if option not in taken + staging:
            raise ValueError(
                f"{name} with {recalibration!r} has no option {option!r}; "
                f"its options: {', '.join(taken + staging) or 'it has none'}"
            )
    factory = recalibration if callable(recalibration) else RECALIBRATIONS[recalibration]
    building = {"stage": options.pop("stage")} if "stage" in options else {}
    settings = {k: v for k, v in chosen.defaults.items() if k in taken} | options
    return {"recalibration": partial(factory, **settings) if settings else factory, **building}


def _settled(chosen: Architecture, recalibration: str, options: dict[str, Any]) -> dict[str, Any]:
    """All that decides what is computed, so that it stays so whatever the defaults become."""
    found = defaults(recalibration, staged=chosen.staged)
    found |= {k: v for k, v in (chosen.defaults | options).items() if k in found}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _trained(
    found: Weights,
    name: str,
    recalibration: str | Recalibration,
    num_classes: int | None,
    in_chans: int,
    options: dict[str, Any],
) -> Classifier:
    if num_classes and found.classes and num_classes != found.classes:
        raise ValueError(
            f"{found.path} is for {found.classes} classes, not {num_classes}: load it as it is, "
            f"then reset_classifier({num_classes})"
        )
    classes = found.classes if num_classes is None else num_classes
    settled = found.settled(name, recalibration, options)
    if strange := settled.keys() - {*_options(recalibration), "stage"} - options.keys():
        raise ValueError(
            f"{found.path}: its note has an option {min(strange)!r:.60}, of no network"
        )
    try:
        model = create_model(name, recalibration, classes, in_chans, **settled)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{found.path} describes no such network: {reason:.200}") from None
    found.put(model)
    model.note = found.note
    return model


def _options(recalibration: str | Recalibration) -> tuple[str, ...]:
    if callable(recalibration) and not isinstance(recalibration, nn.Module):
        return ()
    if recalibration not in RECALIBRATIONS:
        raise ValueError(
            f"recalibration is one of {', '.join(RECALIBRATIONS)}, or a callable from channels to "
            f"a module; got {recalibration!r}"
        )
    taken = tuple(defaults(recalibration, staged=False))
    return (*taken, "backend") if recalibration in OURS else taken
