"""How a verb that trains ends: what is not done is said, and the exit status tells."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer

from mssar.lab.commands.console import complain, counted, say

if TYPE_CHECKING:
    from mssar.lab.engine.fleet import Outcome

LEFT_OVER = 75  # exit status: stopped in time, run again to go on


def leave(outcome: Outcome, again: str) -> None:
    """Say what is not done, and exit with the status that fits."""
    from mssar.lab.engine.world import leads

    complain(outcome.failures if leads() else ())
    if outcome.short is not None:
        # Not status 75: who calls again would do so for ever.
        if not leads():
            raise typer.Exit(2)
        least = math.ceil(2 * outcome.short)
        raise ValueError(
            f"nothing was trained: the time budget ended before the first step. To come so far and "
            f"to save takes {outcome.short:.1f} s; --time-budget {least}s or more gets somewhere"
        )
    if outcome.left and leads():
        runs = counted(len(outcome.left), "run")
        why = "stopped by a signal" if outcome.signal else "the time budget is used up"
        say(f"mssar: {why}; {runs} saved or waiting; {again} goes on")
    if outcome.signal and not outcome.left and leads():
        say("mssar: stopped by a signal; all runs had ended by then")
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)
    if outcome.failures:
        raise typer.Exit(1)
    if outcome.left:
        raise typer.Exit(LEFT_OVER)
