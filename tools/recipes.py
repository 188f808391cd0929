"""What the paper leaves open of its recipe, and how exact gradients are: tables for
docs/results.md, which tools/write-results puts there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import scales

from mssar.lab.experiments.plan import State, plan_for
from mssar.lab.records import Record
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus, spelt

WAYS = {"begun": "initial", "trained": "trained"}
WORDS = {
    "": "the paper's",
    "decay=weights": "no weight decay of norms and biases",
    "fill=mean": "mean colour around the images",
    "init=torch": "PyTorch's initialisation",
    "weight_decay=0.0005": "weight decay 5·10⁻⁴",
}


def variants(known: Sequence[Record]) -> scales.Table:
    """Errors by recipe, and how much lower than by the paper's and, with MS-SAR, than without."""
    states = plan_for(["recipe"], known, hardware="").cells
    found = {(state.cell.row.recalibration, name(state)): state for state in states if state.n}
    lines = []
    for (kind, recipe), state in found.items():
        line = [spelt(kind), WORDS[recipe], f"{plus_minus(state.mean, state.stdev)} (n={state.n})"]
        line.append(f"{fmean(r.epochs[-1].train_error for r in state.records):.2f}")
        line.append(_lower(state, found[kind, ""]) if recipe else "")
        line.append(_lower(state, found["none", recipe]) if kind != "none" else "")
        lines.append(line)
    head = ["layer", "recipe", "test error, %", "training, %"]
    return [*head, "lower than by the paper's", "than none"], lines, 2


def gradients(path: Path) -> scales.Table:
    """How exact they are, a line a network, its state and a way to compute them."""
    lines = []
    for line in map(json.loads, path.read_text("utf-8").splitlines()):
        if line["group"] == "all":
            shares = [100 * line[part] for part in ("error", "steady", "length", "length_error")]
            error, steady, length, spread = (f"{round(share, 2) + 0.0:.2f}" for share in shares)
            way = [line["precision"], *[f"{line['stack']} as one"] * (line["stack"] > 1)]
            way += ["compiled"] * (line["mode"] == "compile")
            row = [spelt(line["net"].split("-")[1]), WAYS[line["state"]], ", ".join(way)]
            lines.append([*row, error, steady, f"{length.replace('-', '−')} ± {spread}"])
    return ["layer", "weights", "computed in", "error, %", "steady, %", "length, %"], lines, 3


def name(state: State) -> str:
    """As in ``fill=mean``; empty for the paper's."""
    return " ".join(state.cell.particulars)


def _lower(ours: State, theirs: State) -> str:
    return scales.told(claim("", ours.records, theirs.records, None))[0]
