"""Runs for a command: all that they need is there before the first begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from mssar.lab import data, records
from mssar.lab.data import Data, places
from mssar.lab.engine import clock, compiling
from mssar.lab.engine.execution import Execution, keep_compiled
from mssar.lab.engine.fleet import Outcome, train
from mssar.lab.engine.observer import Observer
from mssar.lab.engine.world import joined
from mssar.lab.records import Record
from mssar.lab.run import Run

FLEET = 4  # runs at once on a GPU, where nobody said


def whole_stacks(runs: int, stack: int) -> int:
    """How many runs at once are as many, or more, in whole stacks."""
    return stack * math.ceil(runs / stack)


def loader(data_dir: Path | None) -> Callable[[str], Data]:
    """Data sets by name, each read once."""
    found: dict[str, Data] = {}

    def load(name: str) -> Data:
        if name not in found:
            found[name] = data.load(name, data_dir)
        return found[name]

    return load


def carry_out(
    runs: Sequence[Run],
    how: Execution,
    folder: Path,
    *,
    watching: Callable[[], AbstractContextManager[Observer]],
    data_dir: Path | None = None,
    width: int | None = None,
    stack: int = 1,
    budget: float | None = None,
    record_in: Mapping[Run, Path],
    anew: bool = False,
    may_compile: bool = False,
) -> Outcome:
    """Train runs, alone or with the processes that torchrun started.

    ``watching`` is entered by the process that leads. ``record_in`` has the file for each one's
    record; it is empty where those in their folders are enough. ``may_compile``: where that pays,
    and nobody has said.
    """
    begun = clock.begun or time.monotonic()
    load = loader(data_dir)
    for run in runs:
        run.check()
    for name in dict.fromkeys(run.dataset for run in runs):
        load(name)  # what is missing is said before anything begins
    if may_compile and not how.compile:
        compiled = compiling.worth(runs, load, how, folder, budget=budget, anew=anew)
        how = replace(how, compiled=compiled)
    if how.device.type == "cuda" or how.compile:
        # A tree of photographs is the user's own.
        own = {run.dataset for run in runs} <= {"cifar10", "cifar100"}
        keep_compiled(places.folder(data_dir if own else None))
    for file in dict.fromkeys(record_in.values()):
        records.read(file)  # and so is a file that records cannot be added to

    def record(run: Run, made: Record) -> None:
        if record_in:
            records.append(record_in[run], made)

    with joined(how.device) as world:
        at_once = width or whole_stacks(FLEET if how.device.type == "cuda" else 1, stack)
        ready = time.monotonic() - begun
        with watching() if world.leads else nullcontext(Observer()) as observer:
            if how.compiled:
                names = ", ".join(sorted({r.label for r in runs if r.name in how.compiled}))
                observer.said(f"compiled first, in a minute or so (--no-compile: not): {names}")
            outcome = train(
                runs,
                load,
                how,
                folder,
                observer,
                width=at_once if world.size == 1 else 1,
                stack=stack,
                budget=None if budget is None else budget - ready,
                world=world,
                record=record,
                anew=anew,
            )
    if outcome.short is not None:
        outcome.short += ready
    return outcome
