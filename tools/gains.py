"""docs/assets/gains.svg: how much lower errors are with MS-SAR. tools/write-results draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mssar.lab.report.content import Claim
from mssar.lab.report.phrases import plus_minus

WIDTH, SIZE = 6.4, 12  # inches and points, as the courses are drawn
APART = 0.36  # of lines that belong together, where names are 1 apart


@dataclass(frozen=True)
class Panel:
    title: str
    rows: Mapping[str, Sequence[Claim]]  # by network, the lowest last


def draw(file: Path, panels: Sequence[Panel], colours: Mapping[str, str]) -> None:
    """Points with their intervals and numbers, and rings where the paper's are."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "mssar", "svg.fonttype": "none", "font.size": SIZE})
    import matplotlib.pyplot as plt

    names = list(panels[0].rows)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(WIDTH, 0.62 * len(names) + 1.35), layout="constrained", sharey=True
    )
    for axis, panel in zip(axes, panels, strict=True):
        axis.axvline(0, color="#000000", linewidth=1)
        for place, claims in enumerate(panel.rows.values()):
            for number, claim in enumerate(claims):
                y = place + APART * (number - (len(claims) - 1) / 2)
                colour = colours[claim.against]
                axis.errorbar(claim.gain, y, xerr=claim.margin, fmt="o", color=colour, markersize=6)
                if claim.published is not None:
                    axis.plot(
                        claim.published, y, "o", markersize=7, fillstyle="none", color="#000000"
                    )
                told = plus_minus(claim.gain, claim.margin).replace("-", "\N{MINUS SIGN}")
                axis.text(
                    1, y, told, transform=axis.get_yaxis_transform(), ha="right", va="center",
                    fontsize=SIZE - 1.5,
                )  # fmt: skip
        axis.set_title(panel.title, fontsize=SIZE)
        axis.set_xlim(-1.2, 4.4)
        axis.set_xticks(range(-1, 3))
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.45, -0.55)
        axis.tick_params(left=False)
        axis.spines[["top", "right", "left"]].set_visible(False)
    keys = [
        mpl.lines.Line2D([], [], color=colours["none"], marker="o", label="against none"),
        mpl.lines.Line2D([], [], color=colours["se"], marker="o", label="against SE"),
        mpl.lines.Line2D(
            [], [], color="#000000", marker="o", fillstyle="none", linestyle="", label="the paper"
        ),
    ]
    figure.legend(handles=keys, loc="outside upper center", ncols=3, frameon=False, fontsize=SIZE)
    figure.supxlabel("points lower with MS-SAR, with 95 % intervals", fontsize=SIZE)
    figure.patch.set_facecolor("white")
    figure.savefig(file, metadata={"Date": None})
