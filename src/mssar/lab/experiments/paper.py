"""The numbers the paper publishes, as printed: errors in %, multiply-adds, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Published:
    """One row of a table; what it leaves blank is None, or absent from ``errors``."""

    network: str
    recalibration: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    errors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    spread: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # ± std
    macs: float | None = None
    params: float | None = None
    runs: int = 1


def _cifar(
    network: str,
    recalibration: str,
    cifar10: float,
    cifar100: float,
    macs: float,
    params: float | None = None,
    *,
    spread: tuple[float, float] | None = None,
    **options: Any,
) -> Published:
    names = ("cifar10", "cifar100")
    return Published(
        network,
        recalibration,
        options,
        dict(zip(names, (cifar10, cifar100), strict=True)),
        dict(zip(names, spread, strict=True)) if spread else {},
        macs,
        params,
        runs=1 if network.startswith("densenet") else 3,
    )


def _ilsvrc(
    network: str, recalibration: str, top1: float, top5: float, macs: float, params: float
) -> Published:
    errors = {"top1": top1, "top5": top5}
    return Published(network, recalibration, {}, errors, {}, macs, params)


# Table 3: CIFAR, with and without MS-SAR. ResNets are means of three runs, DenseNets one run.
TABLE3 = (
    _cifar("resnet20", "none", 8.61, 31.87, 40.8e6, 0.27e6),
    _cifar("resnet20", "mssar", 7.61, 31.09, 40.9e6, 0.28e6),
    _cifar("resnet32", "none", 7.51, 30.63, 69.1e6, 0.46e6),
    _cifar("resnet32", "mssar", 6.68, 29.41, 69.3e6, 0.48e6),
    _cifar("resnet56", "none", 6.97, 29.07, 125.7e6, 0.85e6),
    _cifar("resnet56", "mssar", 6.04, 27.71, 126.0e6, 0.89e6),
    _cifar("densenet100", "none", 4.67, 22.45, 252.5e6, 0.80e6),
    _cifar("densenet100", "mssar", 4.16, 21.13, 253.3e6, 0.99e6),
    _cifar("densenet190", "none", 3.46, 17.34, 7.95e9, 25.8e6),
    _cifar("densenet190", "mssar", 3.32, 16.92, 7.98e9, 32.7e6),
)

# Table 4: every combination of scales.
TABLE4 = (
    _cifar("resnet56", "none", 6.97, 29.41, 125.7e6, spread=(0.05, 0.14)),
    _cifar("resnet56", "mssar", 6.80, 28.99, 125.7e6, spread=(0.06, 0.15), scales=(1,)),
    _cifar("resnet56", "mssar", 6.55, 28.31, 125.8e6, spread=(0.05, 0.17), scales=(2,)),
    _cifar("resnet56", "mssar", 6.48, 28.74, 126.3e6, spread=(0.06, 0.18), scales=(4,)),
    _cifar("resnet56", "mssar", 6.38, 28.28, 125.8e6, spread=(0.07, 0.19), scales=(1, 2)),
    _cifar("resnet56", "mssar", 6.11, 28.05, 126.0e6, spread=(0.14, 0.22), scales=(1, 4)),
    _cifar("resnet56", "mssar", 6.35, 28.87, 126.1e6, spread=(0.09, 0.27), scales=(2, 4)),
    _cifar("resnet56", "mssar", 6.04, 27.71, 126.0e6, spread=(0.11, 0.21), scales=(1, 2, 4)),
    _cifar("densenet100", "none", 4.67, 22.45, 252.5e6, 0.80e6),
    _cifar("densenet100", "mssar", 4.45, 21.83, 252.6e6, 0.99e6, scales=(1,)),
    _cifar("densenet100", "mssar", 4.35, 21.33, 253.0e6, 0.99e6, scales=(2,)),
    _cifar("densenet100", "mssar", 4.39, 21.79, 254.3e6, 0.99e6, scales=(4,)),
    _cifar("densenet100", "mssar", 4.29, 21.42, 252.8e6, 0.99e6, scales=(1, 2)),
    _cifar("densenet100", "mssar", 4.32, 21.27, 253.5e6, 0.99e6, scales=(1, 4)),
    _cifar("densenet100", "mssar", 4.33, 21.23, 253.7e6, 0.99e6, scales=(2, 4)),
    _cifar("densenet100", "mssar", 4.06, 21.13, 253.3e6, 0.99e6, scales=(1, 2, 4)),
)

# ILSVRC2012, one centre crop.
ILSVRC2012 = (
    _ilsvrc("resnet18", "none", 30.50, 11.07, 1.81e9, 10.9e6),
    _ilsvrc("resnet18", "se", 29.78, 10.27, 1.81e9, 13.8e6),
    _ilsvrc("resnet18", "mssar", 29.43, 10.19, 1.81e9, 13.8e6),
    _ilsvrc("resnet34", "none", 27.02, 8.77, 3.66e9, 21.7e6),
    _ilsvrc("resnet34", "se", 26.67, 8.43, 3.66e9, 27.3e6),
    _ilsvrc("resnet34", "mssar", 26.15, 8.35, 3.67e9, 27.4e6),
    _ilsvrc("resnext50", "none", 22.20, 6.12, 3.86e9, 25.0e6),
    _ilsvrc("resnext50", "se", 21.95, 5.93, 3.87e9, 27.5e6),
    _ilsvrc("resnext50", "mssar", 21.64, 5.78, 3.89e9, 27.6e6),
)

# The two coordinate sets, on CIFAR-100. The paper prints no number a network and names none, only
# "ResNets and DenseNets"; DenseNet-190 is left out, as in the paper's other ablations.
STRATEGY = tuple(
    Published(network, "mssar", {"strategy": strategy}, runs=runs)
    for network, runs in (("resnet20", 3), ("resnet32", 3), ("resnet56", 3), ("densenet100", 1))
    for strategy in ("regional", "sliding")
)
STRATEGY_GAIN = 0.2  # points, "∼": "the regional strategy outperforms the sliding strategy"

# Where a dense step's weights come from ("multi-level" and "single-level" in this place). The
# single-stage errors are to the digit those of scales (1,) in table 4: one of the two is a slip.
STAGE = (
    Published("densenet100", "mssar", {"stage": "multi"}, {"cifar10": 4.06, "cifar100": 21.13}),
    Published("densenet100", "mssar", {"stage": "single"}, {"cifar10": 4.45, "cifar100": 21.83}),
)
