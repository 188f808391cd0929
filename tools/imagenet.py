"""What the paper's ILSVRC2012 table asks for in time, cores and bytes: docs/imagenet.md's numbers.

Arithmetic on what was measured (records/costs.toml: steps, decoding) and the recipe.
tools/write-results writes it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from costs import Costs, Table

from mssar.lab.data.imagefolder import ILSVRC2012 as SIZE
from mssar.lab.experiments.paper import ILSVRC2012 as ROWS
from mssar.lab.recipes import ILSVRC2012 as RECIPE
from mssar.lab.report.phrases import spelt

GPUS = (1, 8, 64)
CORES = 16  # beside each GPU, as where decoding was measured
BATCH = 256  # a GPU, as where steps were measured
BYTES = 138 * 2**30  # of the training set's tar file
NAMES = {"resnet18": "ResNet-18", "resnet34": "ResNet-34", "resnext50": "ResNeXt-50"}
TRAIN, TEST = SIZE[1:]


@dataclass(frozen=True)
class Measured:
    """Of one GPU, and what feeds it."""

    steps: dict[tuple[str, str], float]  # ms of a training step, by network and recalibration
    testing: float  # time of a pass over that of a training step
    workers: float  # photographs a second of CORES cores
    decoder: float  # of the GPU's decoder with cutting, as the reader uses it
    core: float  # of one core
    decoding: float  # ms of the GPU's decoder, for a photograph

    @classmethod
    def of(cls, costs: Costs) -> Measured:
        steps = {}
        for network in NAMES:
            row = costs["overhead"][f"{network}-train"]
            for kind, percent in (("none", 0), ("se", row["se"]), ("mssar", row["mssar"])):
                steps[network, kind] = row["without_ms"] * (1 + percent / 100)
        passed = costs["overhead"]["resnet18-infer"]["without_ms"]
        reading = costs["photographs"]
        return cls(
            steps,
            passed / steps["resnet18", "none"],
            reading["workers"]["rate"],
            reading["gpu"]["rate"],
            reading["core"]["rate"],
            reading["gpu"]["decoding_ms"],
        )

    def rate(self, network: str, kind: str) -> float:
        """Photographs a second that one GPU trains on."""
        return BATCH / self.steps[network, kind] * 1000

    def hours(self, network: str, kind: str, gpus: int, *, fed: bool) -> float:
        """Of a whole training; fed by so many cores as there are, or by whatever it takes."""
        alone = (TRAIN + TEST * self.testing) / self.rate(network, kind)
        reading = (TRAIN + TEST) / self.workers if fed else 0.0
        return RECIPE.epochs * max(alone, reading) / gpus / 3600


def rates(costs: Costs) -> Table:
    """What GPUs take in."""
    found = Measured.of(costs)
    lines = []
    for row in ROWS:
        one = found.rate(row.network, row.recalibration)
        step = f"{found.steps[row.network, row.recalibration]:.2f}"
        name = [NAMES[row.network], spelt(row.recalibration)]
        lines.append([*name, step, *(f"{one * gpus:,.0f}" for gpus in GPUS)])
    return ["network", "recalibration", "ms per step", *_gpus()], lines, 2


def feeding(costs: Costs) -> Table:
    """Cores and bytes that keep GPUs busy, of the networks without recalibration."""
    found = Measured.of(costs)
    lines = []
    for network, name in NAMES.items():
        one = found.rate(network, "none")
        cores = [f"{math.ceil(one * gpus / found.core):,}" for gpus in GPUS]
        lines.append([name, *cores, *(f"{one * gpus * BYTES / TRAIN / 1e9:.1f}" for gpus in GPUS)])
    head = ["network", *(f"cores, {g}" for g in _gpus()), *(f"GB/s, {g}" for g in _gpus())]
    return head, lines, 1


def hours(costs: Costs) -> Table:
    """Of every row, by the GPUs alone and with the cores that were measured."""
    found = Measured.of(costs)
    lines = []
    for row in ROWS:
        line = [NAMES[row.network], spelt(row.recalibration)]
        for fed in (False, True):
            for gpus in GPUS:
                spent = found.hours(row.network, row.recalibration, gpus, fed=fed)
                line.append(f"{spent:.1f}" if gpus == 1 else f"{spent:.2f}")
        lines.append(line)
    sums = [f"{_all(found, gpus, fed=fed):.1f}" for fed in (False, True) for gpus in GPUS]
    lines.append(["all nine, one after the other", "", *sums])
    head = ["network", "recalibration", *_gpus(), *(f"{g}, fed" for g in _gpus())]
    return head, lines, 2


def summary(costs: Costs) -> str:
    """What follows, in words."""
    found = Measured.of(costs)
    fastest = found.rate("resnet18", "none")
    many = GPUS[-1]
    alone, fed = (_side_by_side(found, fed=fed) for fed in (False, True))
    lines = [
        f"An epoch is {TRAIN:,} training and {TEST:,} test photographs, and the recipe has "
        f"{RECIPE.epochs} epochs in batches of {RECIPE.batch:,}. A training photograph has "
        f"{BYTES / TRAIN / 1000:.0f} kB on average ({BYTES >> 30} GiB in all).",
        f"One core of a server CPU decodes and crops at least {found.core:,.0f} photographs per "
        "second.",
        f"A GPU with {CORES} cores beside it gets {found.workers:,.0f} photographs per second, "
        f"{found.workers / fastest:.0%} of what ResNet-18 can take and "
        f"{found.workers / found.rate('resnext50', 'none'):.0%} of what ResNeXt-50 can.",
        f"The GPU's own decoder needs {found.decoding} ms per photograph, so "
        f"{1000 / found.decoding:,.0f} per second: enough for ResNet-18. Our reader gets "
        f"{found.decoder:,.0f} out of it, because it crops the photographs one by one.",
        f"On {many} GPUs the recipe's batch leaves {RECIPE.batch // many} photographs per GPU. Then"
        " the host, not the GPU, sets the pace. Eight runs at once, on eight GPUs each, keep "
        f"{RECIPE.batch // 8} per GPU: the nine rows then take {alone:.1f} hours, or {fed:.1f} "
        f"with {CORES} cores per GPU.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _gpus() -> list[str]:
    return ["1 GPU", *(f"{gpus} GPUs" for gpus in GPUS[1:])]


def _all(found: Measured, gpus: int, *, fed: bool) -> float:
    return sum(found.hours(row.network, row.recalibration, gpus, fed=fed) for row in ROWS)


def _side_by_side(found: Measured, *, fed: bool) -> float:
    """Hours of all rows, on eight times eight GPUs: each takes the longest run that is left."""
    ends = [0.0] * 8
    spent = (found.hours(row.network, row.recalibration, 8, fed=fed) for row in ROWS)
    for one in sorted(spent, reverse=True):
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


TABLES = {"imagenet_rates": rates, "imagenet_feeding": feeding, "imagenet_hours": hours}
