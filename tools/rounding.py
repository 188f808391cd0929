"""How exact gradients are: a table for docs/results-runs.md, which tools/write-results puts
there."""

from __future__ import annotations

import json
from pathlib import Path

import scales

from mssar.lab.report.phrases import spelt

WAYS = {"begun": "initial", "trained": "trained"}


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
