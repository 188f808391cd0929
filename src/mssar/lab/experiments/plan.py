"""What of the experiments is done, what is left and how long it will take."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from mssar.lab.experiments import EXPERIMENTS
from mssar.lab.experiments.cell import Cell
from mssar.lab.experiments.paper import ILSVRC2012, TABLE3
from mssar.lab.records import Record, later
from mssar.lab.run import Run
from mssar.lab.timings import Timing

IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "ilsvrc2012": 1_281_167}  # to train with
SIDES = {"cifar10": 32, "cifar100": 32, "ilsvrc2012": 224}  # of an image, in pixels

# As published, because counting takes seconds a network. A DenseNet's lack an eighth (its
# transitions), and what recalibration adds is below a hundredth: near enough for a time.
_MACS = {r.network: r.macs or 0.0 for r in TABLE3 + ILSVRC2012 if r.recalibration == "none"}


@dataclass(frozen=True)
class State:
    """Where one cell of an experiment stands."""

    experiment: str
    cell: Cell
    records: tuple[Record, ...]  # by seed, all there are
    missing: tuple[Run, ...]  # of the seeds asked for
    seconds_left: float | None  # for what is missing; None: nothing to tell it by

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def mean(self) -> float | None:
        """Of the last epoch's errors over seeds, in per cent."""
        return fmean(r.error for r in self.records) if self.records else None

    @property
    def mean5(self) -> float | None:
        """The same of top-5 errors."""
        return fmean(r.error5 for r in self.records) if self.records else None

    @property
    def stdev(self) -> float | None:
        """The sample standard deviation over seeds; one seed has none."""
        return stdev(r.error for r in self.records) if self.n > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        mean, published = self.mean, self.cell.published
        return None if mean is None or published is None else mean - published


@dataclass(frozen=True)
class Plan:
    """Every cell asked for, and the runs that are missing, each once and in order."""

    cells: tuple[State, ...]
    missing: tuple[Run, ...]
    seconds_left: float | None  # of a device; None: unknown until the first run is recorded


def plan_for(
    names: Iterable[str],
    records: Iterable[Record],
    *,
    hardware: str,
    nets: Collection[str] | None = None,
    datasets: Collection[str] | None = None,
    seeds: int = 3,
    precision: str | None = None,
    additional: bool = True,
    timings: Iterable[Timing] = (),
) -> Plan:
    """What is done and left of some experiments.

    Args:
        names: of ``EXPERIMENTS``.
        records: all there are; each counts wherever its run appears.
        hardware: as in a record's environment; only times measured on it are used.
        nets, datasets: only these; None for all.
        seeds: runs a cell, with seeds from 0.
        precision: only records of this count; None for any.
        additional: also other readings of the paper's rows.
        timings: of steps, for networks that have no record; those on other hardware do not count.

    On each data set the records of all cells are on the same data and in one precision, so that
    cells can be compared: what most of the runs asked for have, of several the first.
    """
    if seeds < 1:
        raise ValueError(f"seeds is the number of runs a cell, 1 or more; got {seeds}")
    records = list(records)
    estimate = Estimate(records, hardware, timings)
    chosen = [
        (name, cell)
        for name, cell in _chosen(list(dict.fromkeys(names)), nets, datasets)
        if additional or not cell.additional
    ]
    matching = [_matching(cell, records, precision) for _, cell in chosen]
    conditions = _conditions(record for some in matching for record in some)
    states = []
    for (name, cell), some in zip(chosen, matching, strict=True):
        found = dict[int, Record]()
        for record in some:
            # Of a run recorded twice the later one counts: who begins anew throws away the other.
            if record.conditions == conditions[cell.dataset]:
                later(found, record)
        missing = tuple(cell.run(seed) for seed in range(seeds) if seed not in found)
        done = tuple(found[seed] for seed in sorted(found))
        states.append(State(name, cell, done, missing, estimate.total(missing)))
    ordered = _ordered(states)
    return Plan(tuple(states), ordered, estimate.total(ordered))


def _chosen(
    names: Sequence[str], nets: Collection[str] | None, datasets: Collection[str] | None
) -> list[tuple[str, Cell]]:
    if not names:
        raise ValueError(f"name an experiment: {', '.join(EXPERIMENTS)}")
    _require_known("experiment", names, EXPERIMENTS)
    every = [(name, cell) for name in names for cell in EXPERIMENTS[name].cells()]
    where = f" in {', '.join(names)}"
    _require_known("network", nets, dict.fromkeys(c.row.network for _, c in every), where)
    _require_known("data set", datasets, dict.fromkeys(c.dataset for _, c in every), where)
    chosen = [
        (name, cell)
        for name, cell in every
        if (nets is None or cell.row.network in nets)
        and (datasets is None or cell.dataset in datasets)
    ]
    if not chosen:
        asked = f"{', '.join(nets or ['any network'])} on {', '.join(datasets or ['any data set'])}"
        raise ValueError(f"{', '.join(names)}: there is no {asked}")
    return chosen


def _require_known(
    kind: str, asked: Iterable[str] | None, known: Collection[str], where: str = ""
) -> None:
    for name in asked or ():
        if name not in known:
            raise ValueError(f"no {kind} {name!r}{where}; there are {', '.join(known)}")


def _matching(cell: Cell, records: Iterable[Record], precision: str | None) -> list[Record]:
    wanted = cell.run(0).as_dict()
    return [
        record
        for record in records
        if {**record.run, "seed": 0} == wanted and precision in (None, record.conditions[1])
    ]


def _conditions(records: Iterable[Record]) -> dict[str, tuple[str, str]]:
    """By data set, those of most runs; of as many, those that come first."""
    found: dict[str, dict[tuple[str, str], set[str]]] = {}
    for record in records:
        of = found.setdefault(record.run["dataset"], {}).setdefault(record.conditions, set())
        of.add(json.dumps(record.run, sort_keys=True))
    return {name: max(runs, key=lambda one: len(runs[one])) for name, runs in found.items()}


def _ordered(states: Iterable[State]) -> tuple[Run, ...]:
    """The missing runs, each once, so that whenever time runs out there is something to compare.

    All of seed 0 comes before any of seed 1: every comparison once says more than one comparison
    three times. Within a seed, other readings of a row come last; networks go from cheap to
    dear, so that most comparisons come early; CIFAR-10 before CIFAR-100; and on each the baseline
    comes first and MS-SAR as the paper has it right after, so that two runs make a comparison.
    Variants follow, which then have both to be held against.
    """
    found: dict[str, tuple[Run, bool]] = {}
    for state in states:
        for run in state.missing:
            _, before = found.get(run.name, (run, True))
            found[run.name] = (run, before and state.cell.additional)

    def place(one: tuple[Run, bool]) -> tuple[object, ...]:
        run, additional = one
        dataset = list(IMAGES).index(run.dataset)
        return run.seed, additional, _work(run), run.network, dataset, _variant(run)

    return tuple(run for run, _ in sorted(found.values(), key=place))


def _variant(run: Run) -> int:
    if run.recalibration == "none":
        return 0
    return 1 if run.recalibration == "mssar" and not run.particulars else 2


def _work(run: Run) -> float:
    """Multiply-adds of a training: of its network without recalibration, forwards."""
    return _MACS[run.network] * IMAGES[run.dataset] * run.recipe.epochs


class Estimate:
    """Seconds of a device that runs will take, by those recorded on the same hardware.

    Best are records of the same network with the same recalibration and options, next those of
    the same network, then its steps as timed alone, and else records of any, by their
    multiply-adds: a rough guess, since small networks do not fill a chip. Windows, which take
    several times as long, are told by records with windows where there are any. Of several the
    median counts.
    """

    def __init__(
        self, records: Iterable[Record], hardware: str, timings: Iterable[Timing] = ()
    ) -> None:
        self.records = [
            r for r in records if r.environment.get("hardware") == hardware and r.data.get("train")
        ]
        self.timings = [t for t in timings if t.environment["hardware"] == hardware]

    def total(self, runs: Iterable[Run]) -> float | None:
        """Of all of them; None if one is unknown."""
        total = 0.0
        for run in runs:
            seconds = self.seconds(run)
            if seconds is None:
                return None
            total += seconds
        return total

    def seconds(self, run: Run) -> float | None:
        """Of one run; None where nothing is recorded on this hardware."""
        wanted = run.as_dict()

        def alike(record: Record, *names: str) -> bool:
            # The same augmentation makes images of the same size.
            sizes = (record.run["recipe"].get("augmentation"), wanted["recipe"]["augmentation"])
            return sizes[0] == sizes[1] and all(record.run[n] == wanted[n] for n in names)

        images = IMAGES[run.dataset] * run.recipe.epochs
        way = _strategy(wanted)
        known = [r for r in self.records if _strategy(r.run) == way] or self.records
        same = [r for r in known if alike(r, "network", "recalibration", "options")]
        same = same or [r for r in known if alike(r, "network")]
        if same:
            return images * median(map(_seconds_an_image, same))
        if timed := [t for t in self.timings if _of(t, run)]:
            with_it = [t for t in timed if t.recalibration == run.recalibration] or timed
            return images * median(t.median_ms / 1000 / t.batch for t in with_it)
        rates = [_seconds_an_image(r) / r.macs for r in known if r.macs]
        return _work(run) * median(rates) if rates else None


def _of(timing: Timing, run: Run) -> bool:
    """Whether it is of such a run's steps, in a graph as the lab trains, with any layer."""
    same = (timing.network, timing.what, timing.graph) == (run.network, "training", True)
    alike = _strategy({"options": timing.options}) == _strategy(run.as_dict())
    return same and alike and timing.size[1] == SIDES[run.dataset]


def _strategy(run: Mapping[str, Any]) -> str:
    """Networks without the layer count as those with regions, which take about as long."""
    return str(run["options"].get("strategy", "regional"))


def _seconds_an_image(record: Record) -> float:
    """A run's share of the device: runs that took turns on it all measured the same time."""
    share = record.seconds / record.execution.get("together", 1)
    return float(share / (record.data["train"] * len(record.epochs)))
