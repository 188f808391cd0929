"""Torn and hostile files: whatever a user's file can reach, with what really happens to files and
with what people do to them on purpose.

    python -m faults.files --only lines --effort 0.1
    python -m faults.files case lines 0 17

The second repeats the case that the first printed.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module

from faults.files.sandbox import ADVICE, Family, Outcome, run
from faults.suite import Row, share

MODULES = {  # and the families that are theirs: a process imports what it needs
    "lines": ("lines",),
    "networks": ("signed", "crafted", "folders"),
    "archives": ("archives", "bombs"),
    "batches": ("batches", "package"),
    "images": ("images", "odd"),
    "foreign": ("foreign", "pickles"),
    "special": ("special",),
}
PROCESSES = 2


def families(only: str = "") -> dict[str, Family]:
    """All, or those that are named."""
    known = [name for names in MODULES.values() for name in names]
    wanted = only.split(",") if only else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"no family {name!r}; there are {', '.join(known)}")
    found = [
        family
        for module, names in MODULES.items()
        if set(names) & set(wanted)
        for family in import_module(f"faults.files.{module}").FAMILIES
    ]
    return {family.name: family for family in found if family.name in wanted}


def check(effort: float, seed: int, only: str = "") -> Iterator[Row]:
    chosen = families(only)
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for name, outcome in run(
        [(name, share(family.count, effort)) for name, family in chosen.items()], seed, PROCESSES
    ):
        row = outcome.row or next(iter(chosen[name].promises))
        outcomes[name, row].append(outcome)
        if outcome.ended == "wrong":
            print(
                f"{name} {outcome.number}: {outcome.what}: {outcome.said}\n"
                f"    {ADVICE} case {name} {seed} {outcome.number}",
                file=sys.stderr,
                flush=True,
            )
    for name, family in chosen.items():
        for row, promise in family.promises.items():
            if found := outcomes[name, row]:
                yield summary(row, promise, found, family.mebibytes)


def summary(row: str, promise: str, found: list[Outcome], allowed: int) -> Row:
    ended = Counter(outcome.ended for outcome in found)
    most = math.ceil(max(outcome.grown for outcome in found) / (1 << 20))
    remark = f"{ended['refused']:,} refused, {ended['read']:,} read; {most:,} of {allowed:,} MiB"
    return Row(row, promise, len(found), ended["wrong"], remark)
