"""Which scales: a table for docs/results-scales.md, and docs/assets/scales.svg.
tools/write-results puts them there."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mssar.lab.experiments.plan import State, plan_for
from mssar.lab.records import Record
from mssar.lab.report.content import Claim
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus

WIDTH, SIZE = 6.4, 12  # inches and points, as the courses are drawn
NETWORK, DATASET = "resnet56", "cifar100"
FULL = "1, 2, 4"
NOTHING, FLAT = "nothing", "positions"
DATA = {"cifar10": "CIFAR-10, %", "cifar100": "CIFAR-100, %"}
Table = tuple[list[str], list[list[str]], int]  # head, lines, and how many columns are text


def subsets(known: Sequence[Record]) -> list[State]:
    """The paper's rows that have records: none, a scale, two and three; then narrower layers."""
    made = plan_for(["table4"], known, hardware="", nets=[NETWORK], datasets=[DATASET])
    return [state for state in made.cells if state.n]


def name(state: State) -> str:
    """As in ``1, 4``, or ``1, 4 narrow``."""
    scales = ", ".join(map(str, state.cell.options.get("scales", ()))) or "none"
    return scales + " narrow" * state.cell.additional


def errors(known: Sequence[Record]) -> Table:
    """Ours and the paper's, and how much lower than without and than with all scales."""
    found = subsets(known)
    none, full = ({name(state): state for state in found}[one] for one in ("none", FULL))
    lines = []
    for state in found:
        line = [name(state), f"{plus_minus(state.mean, state.stdev)} (n={state.n})"]
        line.append(plus_minus(state.cell.published, state.cell.spread))
        line += ["", ""] if state is none else told(compared(state, none))
        line.append("" if state is full else told(compared(full, state))[0])
        lines.append(line)
    head = ["scales", "ours", "the paper", "lower than none", "the paper"]
    return [*head, f"{FULL} lower than it"], lines, 1


def compared(ours: State, theirs: State) -> Claim:
    """How much lower the first is."""
    before, after = theirs.cell.published, ours.cell.published
    published = None if before is None or after is None else before - after
    return claim(theirs.cell.label, ours.records, theirs.records, published)


def told(made: Claim) -> tuple[str, str]:
    """A difference with its interval; and the paper's."""
    published = "–" if made.published is None else f"{made.published:.2f}"
    ours = plus_minus(made.gain, made.margin)
    return ours.replace("-", "\N{MINUS SIGN}"), published.replace("-", "\N{MINUS SIGN}")


def held(file: Path) -> Table:
    """Errors of trained networks some of whose scales no longer look (benchmarks/held.py)."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    nets = list(dict.fromkeys(line["net"] for line in lines))
    rows: dict[str, list[str]] = {}
    for line in lines:
        way = text_of_held(line["held"])
        more = "" if way == NOTHING else plus_minus(*paired(line))
        row = rows.setdefault(way, [way])
        row += [f"{line['error']:.2f}", more.replace("-", "\N{MINUS SIGN}")]
    head = [cell for net in nets for cell in (DATA[net.rpartition("-")[2]], "more")]
    return ["held", *head], list(rows.values()), 1


def paired(line: dict[str, Any]) -> tuple[float, float]:
    """How many points the error rises, with its 95 % interval for other test images: of images
    that are judged twice only those count whose judgement changed."""
    lost, won, n = line["lost"], line["won"], line["tested"]
    spread = math.sqrt(lost + won - (lost - won) ** 2 / n)
    return 100 * (lost - won) / n, 1.96 * 100 * spread / n


def text_of_held(held: list[int] | str) -> str:
    """As the table names it."""
    return FLAT if held == "flat" else ", ".join(map(str, held)) or NOTHING


def draw(file: Path, known: Sequence[Record], colours: dict[str, str]) -> None:
    """Every run, the mean, and the paper's mean ± its standard deviation."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "mssar", "svg.fonttype": "none", "font.size": SIZE})
    import matplotlib.pyplot as plt

    found = subsets(known)
    figure, axis = plt.subplots(figsize=(WIDTH, 0.42 * len(found) + 1.2), layout="constrained")
    for y, state in enumerate(found):
        kind = {"none": "none", "1": "se", "1 narrow": "se"}.get(name(state), "mssar")
        runs = [record.error for record in state.records]
        axis.plot(runs, [y] * len(runs), "o", color=colours[kind], markersize=4, alpha=0.5)
        axis.plot(state.mean, y, "|", color=colours[kind], markersize=18, markeredgewidth=2.5)
        axis.errorbar(
            state.cell.published, y + 0.3, xerr=state.cell.spread, fmt="o", fillstyle="none",
            color="#000000", markersize=5, linewidth=1,
        )  # fmt: skip
        axis.text(
            1, y, f"{plus_minus(state.mean, state.stdev)}", transform=axis.get_yaxis_transform(),
            ha="right", va="center", fontsize=SIZE - 1.5,
        )  # fmt: skip
    axis.set_yticks(range(len(found)), [name(state) for state in found])
    axis.set_ylim(len(found) - 0.4, -0.6)
    low, high = axis.get_xlim()
    axis.set_xlim(low, high + 0.3 * (high - low))  # for the numbers
    axis.set_xticks([tick for tick in axis.get_xticks() if low < tick < high])
    axis.set_ylabel("scales")
    axis.set_xlabel("test error on CIFAR-100, %")
    axis.tick_params(left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    keys = [
        mpl.lines.Line2D([], [], color=colours["mssar"], marker="o", alpha=0.5, linestyle="",
                         label="a run"),
        mpl.lines.Line2D([], [], color=colours["mssar"], marker="|", markersize=12,
                         markeredgewidth=2.5, linestyle="", label="their mean"),
        mpl.lines.Line2D([], [], color="#000000", marker="o", fillstyle="none",
                         label="the paper, ± deviation"),
    ]  # fmt: skip
    figure.legend(handles=keys, loc="outside upper center", ncols=3, frameon=False, fontsize=SIZE)
    figure.patch.set_facecolor("white")
    figure.savefig(file, metadata={"Date": None})
