"""What a network's recalibration can be told: one table, for the networks, runs and commands.

Without torch, since the command's help is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One of them: who takes it, and what it is where nobody says."""

    kind: Any  # the type of its values
    defaults: dict[str, Any]  # by recalibration; others have no such option
    help: str
    example: str = ""  # as it is written, where it is no word
    staged: bool = False  # only in networks that take stage="multi" | "single"


# What is computed; of ours ``backend`` says by what.
OPTIONS = {
    "scales": Option(tuple[int, ...], {"mssar": (1, 2, 4)}, "For mssar, as 1,2,4.", "1,2,4"),
    "strategy": Option(str, {"mssar": "regional"}, "For mssar: regional or sliding."),
    "reduction": Option(
        int, {"se": 1, "mssar": 1, "cbam": 16, "coord": 16}, "For se, mssar, cbam, coord."
    ),
    "stage": Option(
        str, {"se": "multi", "mssar": "multi"}, "For DenseNets: multi or single.", staged=True
    ),
}


def defaults(recalibration: str, *, staged: bool) -> dict[str, Any]:
    """The options that a recalibration has in a network, as they are where nobody says."""
    return {
        name: option.defaults[recalibration]
        for name, option in OPTIONS.items()
        if recalibration in option.defaults and (staged or not option.staged)
    }
