"""What was measured (records/costs.toml), as the tables and numbers that pages show.

tools/write-results writes them: a table by its name in TABLES, a single number by where it stands
in the file, as `first_step.first.mssar`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Costs = dict[str, dict[str, Any]]
Table = tuple[list[str], list[list[str]], int]  # head, lines, how many columns are text

# Rows, by workload.
BRIEF = {
    "resnet18-eager-train": "eager, batch 256, training",
    "resnet18-eager-train-32": "eager, batch 32, training",
    "resnet18-compile-train": "`torch.compile`, batch 256, training",
    "resnet18-train": "compiled, in a CUDA graph, batch 256, training",
}
EAGER = {
    "resnet18-eager-train": "eager, batch 256, training",
    "resnet18-eager-infer": "eager, batch 256, inference",
    "resnet18-eager-train-32": "eager, batch 32, training",
    "resnet18-eager-infer-32": "eager, batch 32, inference",
    "resnet18-compile-train": "`torch.compile`, no graphs, batch 256, training",
    "resnet18-eager-train-memory": "memory of training, eager, batch 256",
}
GRAPHED = {
    "resnet18-train": "ResNet-18, training",
    "resnet34-train": "ResNet-34, training",
    "resnext50-train": "ResNeXt-50, training",
    "resnet20-train": "ResNet-20, training",
    "resnet56-train": "ResNet-56, training",
    "resnet18-infer": "ResNet-18, inference",
}
INSERTED = {
    "inserted-eager": "eager, batch 128, training",
    "inserted-eager-memory": "memory of training, eager, batch 128",
    "inserted-compile": "`torch.compile`, no graphs, batch 128, training",
}
SIDE_BY_SIDE = {
    "resnet20-eight": "ResNet-20, eight together",
    "resnet20-alone": "ResNet-20, alone",
    "resnet56-eight": "ResNet-56, eight together",
    "resnet56-alone": "ResNet-56, alone",
}
FIRST = {
    "first": "nothing on disk",
    "kernels-on-disk": "kernels on disk, a new process",
    "another-batch": "another batch, 48",
    "an-odd-batch": "an odd batch, 33",
    "larger-images": "larger images, 256×256",
    "smaller-images": "smaller images, 200×200",
}
READERS = {
    "torchvision": "torchvision's `ImageFolder` and a `DataLoader` of 16 workers",
    "workers": "ours, 16 workers decode and crop, the GPU does the rest",
    "gpu": "ours, the GPU decodes too",
    "core": "one core of a server CPU (AMD EPYC, two cores, shared), decode and crop, at least",
}
HEADS = {
    "without_ms": "without, ms",
    "none": "without",
    "mssar": "MS-SAR",
    "se": "timm's SE",
    "rate": "photographs per second",
    "share_before": "before",
    "share_goal": "goal",
}  # the others are called as they are in the file


def read(root: Path) -> Costs:
    found: Costs = tomllib.loads((root / "records" / "costs.toml").read_text("utf-8"))
    for row in found["fleet"].values():
        row["share"] = round(100 * row["mssar"] / row["none"])
    return found


def quoted(costs: Costs, name: str) -> str:
    """A single number, as `first_step.first.mssar`, or what stands in [hardware]."""
    kind, *rest = name.split(".")
    found: Any = costs[kind]
    for key in rest:
        found = found[key]
    return found if isinstance(found, str) else _shown(kind, rest[-1], found)


def _shown(kind: str, key: str, value: float) -> str:
    """As precise as it is in the file; times of steps are over those without, with a sign."""
    if key == "without_ms":
        return f"{value:.2f}"
    if kind == "overhead":
        return f"{value:+} %".replace("-", "−")
    if key.startswith("share"):
        return f"{value} %"
    return f"{value:,}"


def _missed(row: dict[str, Any], key: str) -> bool:
    """Whether this is a goal that is missed: of costs, which should be low, or of a share."""
    if key == "share_goal":
        return bool(row["share"] < row[key])
    return key == "goal" and bool(row["mssar"] > row[key])


def _table(kind: str, rows: dict[str, str], title: str, shown: str) -> Callable[[Costs], Table]:
    """A row a measurement, with what is shown of it; goals that are missed say so."""
    columns = shown.split()

    def cell(row: dict[str, Any], key: str) -> str:
        if key not in row:
            return ""
        return _shown(kind, key, row[key]) + (", missed" if _missed(row, key) else "")

    def made(costs: Costs) -> Table:
        lines = []
        for name, label in rows.items():
            lines.append([label, *(cell(costs[kind][name], key) for key in columns)])
        return [title, *(HEADS.get(key, key) for key in columns)], lines, 1

    return made


NETWORK = "ResNet-18 at 224×224"
CIFAR = "batch 128, CIFAR"
TABLES: dict[str, Callable[[Costs], Table]] = {
    "cost_brief": _table("overhead", BRIEF, "how it is run", "se mssar"),
    "cost_eager": _table("overhead", EAGER, NETWORK, "mssar se"),
    "cost_eager_all": _table("overhead", EAGER, NETWORK, "before mssar se goal"),
    "cost_inserted": _table("overhead", INSERTED, "timm's ResNet-50", "mssar se"),
    "cost_graphed": _table("overhead", GRAPHED, "", "without_ms mssar se"),
    "cost_graphed_all": _table("overhead", GRAPHED, "", "without_ms mssar se before goal"),
    "fleet": _table("fleet", SIDE_BY_SIDE, CIFAR, "none mssar share share_before share_goal"),
    "first_steps": _table("first_step", FIRST, "", "none mssar goal before"),
    "photographs": _table("photographs", READERS, "", "rate"),
}
