"""What the paper leaves open of its recipe: a table for docs/results-paper.md, which
tools/write-results puts there."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import scales

from mssar.lab.experiments.plan import State, plan_for
from mssar.lab.records import Record
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus, spelt

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


def name(state: State) -> str:
    """As in ``fill=mean``; empty for the paper's."""
    return " ".join(state.cell.particulars)


def _lower(ours: State, theirs: State) -> str:
    return scales.told(claim("", ours.records, theirs.records, None))[0]
