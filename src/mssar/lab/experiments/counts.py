"""The paper's parameters and multiply-adds beside those of the networks here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from mssar.cost import Cost, cost
from mssar.lab.experiments.paper import ILSVRC2012, TABLE3, TABLE4, Published
from mssar.networks.registry import architecture, create_model

_Asked: TypeAlias = tuple[str, Published, int | None]


@dataclass(frozen=True)
class Count:
    """A published number of one kind, and ours."""

    published: float | None
    ours: float

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.ours - self.published


@dataclass(frozen=True)
class Row:
    table: str
    network: str
    recalibration: str
    scales: tuple[int, ...] | None  # None: the network has none
    reduction: int | None
    params: Count
    macs: Count
    remark: str

    def as_dict(self) -> dict[str, Any]:
        """All of it with the differences, for JSON."""
        found = asdict(self)
        for name in ("params", "macs"):
            found[name]["difference"] = getattr(self, name).difference
        return found


def compare(
    progress: Callable[[list[_Asked]], Iterable[_Asked]] = iter, network: str | None = None
) -> list[Row]:
    """Every network of the paper's tables, or one; CIFAR ResNets with MS-SAR at reduction 1 and 3.

    It takes some seconds; ``progress`` may wrap the list that is worked through.
    """
    asked = [
        (table, row, reduction)
        for table, published in (("3", TABLE3), ("4", TABLE4), ("ILSVRC", ILSVRC2012))
        for row in published
        for reduction in _reductions(row)
    ]
    if network is not None:
        known = dict.fromkeys(row.network for _, row, _ in asked)
        asked = [one for one in asked if one[1].network == network]
        if not asked:
            raise ValueError(f"the paper's tables have no {network}; they have {', '.join(known)}")
    return [_row(*one) for one in progress(asked)]


def _reductions(row: Published) -> tuple[int | None, ...]:
    if row.recalibration == "none":
        return (None,)
    if row.network == "resnext50":
        return (16,)
    if row.recalibration == "mssar" and row.network in ("resnet20", "resnet32", "resnet56"):
        return (1, 3)
    return (1,)


def _row(table: str, row: Published, reduction: int | None) -> Row:
    own = _cost(row, reduction)
    macs = own.macs
    if row.network.startswith("densenet"):
        macs -= own["transition1"].macs + own["transition2"].macs
    scales = None
    if row.recalibration != "none":
        scales = row.options.get("scales", (1,) if row.recalibration == "se" else (1, 2, 4))
    return Row(
        table=table,
        network=row.network,
        recalibration=row.recalibration,
        scales=scales,
        reduction=reduction,
        params=Count(row.params, own.params),
        macs=Count(row.macs, macs),
        remark=_remark(row, reduction),
    )


def _cost(row: Published, reduction: int | None) -> Cost:
    options = dict(row.options) if reduction is None else {**row.options, "reduction": reduction}
    if options.get("scales") == (1, 2, 4):
        del options["scales"]  # the default, so that tables 3 and 4 share the count
    return _count(row.network, row.recalibration, tuple(options.items()))


@cache
def _count(network: str, recalibration: str, options: tuple[tuple[str, Any], ...]) -> Cost:
    # The DenseNets' published parameters are those with 100 classes.
    classes = 100 if network.startswith("densenet") else None
    with torch.device("meta"):
        model = create_model(network, recalibration, classes, **dict(options))
    return cost(model, architecture(network).size)


def _remark(row: Published, reduction: int | None) -> str:
    match row.network, row.recalibration, reduction:
        case "resnet32" | "resnet34", "none", _:
            return "published parameters are cut off, not rounded, here and elsewhere"
        case "resnet56", "none", _:
            return "the paper's table of architectures has 135.7 M, a misprint"
        case "resnet20" | "resnet32" | "resnet56", "mssar", 1:
            return "D′ = D/L, as the paper's text says"
        case "resnet20" | "resnet32" | "resnet56", "mssar", 3:
            return "D′ = D/3L, which is what the published counts fit"
        case "densenet100" | "densenet190", "none", _:
            return (
                "transition convolutions left out of the multiply-adds, 100 classes: so published"
            )
        case "densenet100" | "densenet190", "mssar", _:
            return "likewise; the published parameters fit no reading found"
        case "resnet18", "none", _:
            return (
                "the network has 11.69 M parameters everywhere else; 10.9 M fits no reading found"
            )
        case "resnet18" | "resnet34", "se" | "mssar", _:
            return "the published parameters fit no reading found"
        case "resnext50", "none", _:
            return "3.86 G is ResNet-50 with its stride in the first 1×1, not ResNeXt-50"
        case "resnext50", _, _:
            return "reduction 16 as in SENet; the published multiply-adds start from 3.86 G"
    return ""
