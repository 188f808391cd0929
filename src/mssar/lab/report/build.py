"""From what was found to a page: the reproduction's, the demo's, or a comparison's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import mssar
from mssar.lab import data
from mssar.lab.data import sample
from mssar.lab.engine.evaluate import trained
from mssar.lab.recipes import DEMO
from mssar.lab.records import Record
from mssar.lab.report import figures, tables
from mssar.lab.report.collect import Collection
from mssar.lab.report.comparison import comparisons
from mssar.lab.report.content import Comparison, Difference, Explained, Page, Table
from mssar.lab.report.differences import differences, on_real_pictures
from mssar.lab.report.findings import at_once, claims, compared, comparison, coverage
from mssar.lab.report.groups import Group, Name, grouped, named, provenance
from mssar.lab.report.maps import explained
from mssar.lab.timings import Timing
from mssar.networks.registry import NETWORKS
from mssar.networks.weights import PRETRAINED, read

DEMO_NOTE = (
    "Every picture holds the same six shapes, in the same colours and textures; which two stand "
    "next to the disc is the class. Small differences are chance."
)
OTHER_NOTE = (
    "Runs that are not part of the paper, or not comparable with the tables above: other data, "
    "another precision, other recipes, other networks."
)
SAMPLE_NOTE = (
    "The network is `{}`, whose weights come with the package. The pictures are real test images, "
    "chosen by a rule: ten classes evenly from all, and of each the image whose pixels have "
    "the smallest SHA-256."
)
PAPERS = ("cifar10", "cifar100", "ilsvrc2012")  # data; they come before a reader's own
SEEN = 2  # networks whose layers are shown, of runs; and in the demo, of weights that come with us


class Maps:
    """What layers see, of runs whose folders and data are here, and of the package's own weights;
    made once a finished run."""

    def __init__(self, data_dir: Path | None, say: Callable[[str], None]) -> None:
        self.data_dir, self.say = data_dir, say
        self._made: dict[tuple[Path, str], Explained] = {}

    def of(self, runs: Sequence[tuple[Path, str]]) -> tuple[list[Explained], list[str]]:
        """Of runs, each its folder or weights and its record's id; and what was in the way."""
        hindrances = []
        for run in runs:
            if run not in self._made:
                self.say(f"looking at what {run[0].name} sees")
                try:
                    self._made[run] = self._one(run[0])
                except (ValueError, TypeError, RuntimeError, OSError) as error:  # tried again later
                    hindrances.append(f"{run[0]}: what its layers see is not shown: {error}")
        return [self._made[run] for run in runs if run in self._made], hindrances

    def _one(self, place: Path) -> Explained:
        chosen = trained(place)
        if place.is_file():  # weights of ours: the same pictures everywhere, whatever data are here
            images = chosen.noted(sample.load(chosen.run.dataset))
            return explained(chosen, images, sample.COUNT, note=SAMPLE_NOTE.format(place.stem))
        return explained(chosen, data.load(chosen.run.dataset, self.data_dir))


def reproduction(found: Collection, maps: Maps | None = None, *, live: bool = False) -> Page:
    """The paper's tables with ours beside them, and whatever else was run."""
    made = tables.paper_tables(found.records)
    shown = [run for table in made for row in table.rows for run in row.runs]
    groups = _in_order(grouped(found.records), shown)
    drawn = differences(made)
    beside = comparisons(groups, found.timings)
    shown += [run for one in beside for row in one.rows for run in row.runs]
    others = tables.other_runs(groups, shown)
    if others:
        made.append(tables.own_table("others", "Other runs", OTHER_NOTE, others))
    return _page(
        found,
        "reproduction",
        "MS-SAR: the paper and our runs",
        (*claims(made, drawn, beside), *at_once(drawn, made, beside), *coverage(made)),
        made,
        groups,
        maps,
        beside,
        drawn,
        live=live,
    )


def demo(found: Collection, maps: Maps | None = None, *, live: bool = False) -> Page:
    """None, SE and MS-SAR on the embedded pictures; other runs are not the demo's."""
    found = replace(
        found,
        records=[r for r in found.records if _of_demo(r.run)],
        going={f: p for f, p in found.going.items() if _of_demo(p.run)},
    )
    groups = grouped(found.records)
    made = tables.own_table("demo", "None, SE and MS-SAR", DEMO_NOTE, groups)
    return _page(
        found,
        "demo",
        "MS-SAR in a minute",
        comparison(made),
        [made],
        groups,
        maps,
        drawn=on_real_pictures(),
        live=live,
    )


def side_by_side(
    found: Collection, maps: Maps | None = None, *, timed: Sequence[Timing] = ()
) -> Page:
    """Recalibrations of the same network, whatever they are; beside errors are the steps that were
    ``timed`` for this, if there are any."""
    groups = grouped(found.records)
    beside = comparisons(groups, timed or found.timings, every=True)
    return _page(
        found,
        "comparison",
        "Recalibrations compared",
        [*(line for one in beside for line in compared(one)), *at_once((), (), beside, beside)],
        (),
        groups,
        maps,
        beside,
    )


def _of_demo(run: dict[str, Any]) -> bool:
    recipe = run.get("recipe")
    named = isinstance(recipe, dict) and recipe.get("name") == DEMO.name
    return named and run.get("dataset") == "arrangements"


def _page(
    found: Collection,
    kind: Literal["reproduction", "demo", "comparison"],
    title: str,
    findings: Sequence[str],
    made: Sequence[Table],
    groups: Sequence[Group],
    maps: Maps | None,
    beside: Sequence[Comparison] = (),
    drawn: Sequence[Difference] = (),
    *,
    live: bool = False,
) -> Page:
    seen, hindrances = maps.of(_worth_seeing(found, kind)) if maps else ([], [])
    return Page(
        kind=kind,
        title=title,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=mssar.__version__,
        findings=tuple(findings),
        differences=tuple(drawn),
        tables=tuple(made),
        comparisons=tuple(beside),
        curves=tuple(figures.curves(groups, found.going.values())),
        points=tuple(figures.points(groups, published=kind == "reproduction")),
        times=tuple(figures.times(found.timings)),
        explained=tuple(seen),
        problems=(*found.problems, *hindrances),
        provenance={record.id: provenance(record) for record in found.records},
        live=live,
    )


def _in_order(groups: Iterable[Group], shown: Sequence[str]) -> list[Group]:
    """As the tables show their runs; then others, those on the paper's data first."""
    places = {run: place for place, run in reversed([*enumerate(shown)])}

    def place(group: Group) -> tuple[bool, int]:
        found = (places.get(record.id, len(shown)) for record in group.records)
        return group.name.dataset not in PAPERS, min(found)

    return sorted(groups, key=place)


def _worth_seeing(found: Collection, kind: str) -> list[tuple[Path, str]]:
    """Finished runs with MS-SAR, a network and data set once; in the demo SE's too. Those by the
    usual recipe come first, then those with usual options; what room is left has others of the
    same network and data set.

    And weights that come with the package, if the page has their record and no such run; in the
    demo before all, since its pictures are real.
    """
    wanted = ("mssar", "se") if kind == "demo" else ("mssar",)

    def order(record: Record) -> tuple[bool, bool, int, int]:
        name = named(record.run)
        place = wanted.index(name.recalibration), record.run["seed"]
        return bool(name.recipe), bool(name.options), *place

    here = (record for record in found.records if record.id in found.folders)
    local = [record for record in here if record.run["recalibration"] in wanted]
    first: dict[tuple[str, str, str], tuple[Path, str]] = {}
    others: dict[Name, tuple[Path, str]] = {}
    for record in sorted(local, key=order):
        name, one = named(record.run), (found.folders[record.id], record.id)
        first.setdefault((name.network, name.dataset, name.recalibration), one)
        others.setdefault(name, one)
    runs = list(dict.fromkeys((*first.values(), *others.values())))[:SEEN]
    if kind == "demo":
        return [*((path, path.stem) for path in _own_weights()[:SEEN]), *runs]
    whose = {record.id: (named(record.run), record.run["seed"]) for record in found.records}
    shown = {whose[name] for _, name in runs}  # they bear these names on the page
    notes = ((path, read(path).note or {}) for path in _own_weights())
    packed = ((path, note.get("record", "")) for path, note in notes)
    ours = [(path, name) for path, name in packed if name in whose and whose[name] not in shown]
    return [*runs, *ours]


def _own_weights() -> list[Path]:
    """Those with MS-SAR, of data sets of which there are images; the deepest network first."""
    names = {path: path.stem.split("-") for path in PRETRAINED.values()}  # NETWORK-KIND-DATASET
    found = [
        path for path, (_, kind, on) in names.items() if kind == "mssar" and sample.there_is(on)
    ]
    found.sort(key=lambda path: names[path][2])
    return sorted(found, key=lambda path: [*NETWORKS].index(names[path][0]), reverse=True)
