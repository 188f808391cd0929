"""The paper's tables with our numbers in them, and a table of whatever else was run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mssar.lab.experiments import EXPERIMENTS
from mssar.lab.experiments.cell import Cell
from mssar.lab.experiments.paper import STRATEGY_GAIN
from mssar.lab.experiments.plan import State, plan_for
from mssar.lab.records import Record
from mssar.lab.report.content import Claim, Row, Table
from mssar.lab.report.groups import Group, claim, grouped

NOTES = {
    "table3": (
        "The paper's main result: the same networks, trained in the same way, with and without "
        "MS-SAR. Rows with reduction=3 have a narrower layer, which fits the published costs."
    ),
    "table4": (
        "Which scales matter? Scale 1 alone is Squeeze-and-Excitation: one region, the whole map. "
        "The claim is that several scales together are better than that, and one better than none. "
        "Rows with reduction=3 have narrower layers, which fit the published costs of ResNet-56."
    ),
    "strategy": (
        "Regions that tile the map, or a window around every position. The paper prints no error "
        f"here, and says that regions are about {STRATEGY_GAIN} points better."
    ),
    "stage": (
        "In a DenseNet the weights of new channels may come from all channels so far (multi) or "
        "from the new ones alone (single)."
    ),
    "recipe": (
        "What the paper does not say of its recipe had to be chosen; these rows choose otherwise: "
        "no weight decay of norms and biases (decay=weights), the mean colour around images that "
        "are cropped (fill=mean), PyTorch's initialisation (init=torch). The last of each kind "
        "have five times the paper's weight decay."
    ),
    "ilsvrc": "A thousand classes of photographs; top-1 error of one centre crop, top-5 beside it.",
}

WEIGHT_DECAY = "weight decay may do as much"  # as words.toml has it, with a link

Pick = Callable[[Cell, Sequence[Cell]], Cell | None]


def _find(
    cells: Sequence[Cell],
    cell: Cell,
    recalibration: str,
    recipe: Mapping[str, Any] | None = None,
    **options: object,
) -> Cell | None:
    """Another cell of the same network and data set, and by the same recipe if none is named."""
    for other in cells:
        row = other.row
        same = (row.network, other.dataset) == (cell.row.network, cell.dataset)
        alike = same and row.recalibration == recalibration and dict(other.options) == options
        if alike and other.recipe == (cell.recipe if recipe is None else recipe):
            return other
    return None


def _over_none(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    return None if cell.row.recalibration == "none" else _find(cells, cell, "none")


def _over_fewer_scales(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    if len(cell.options.get("scales", ())) > 1:
        return _find(cells, cell, "mssar", **{**cell.options, "scales": (1,)})
    return _over_none(cell, cells)


def _over_sliding(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    regional = cell.options.get("strategy") == "regional"
    return _find(cells, cell, "mssar", strategy="sliding") if regional else None


def _over_single(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    multi = cell.options.get("stage") == "multi"
    return _find(cells, cell, "mssar", stage="single") if multi else None


def _over_the_papers_recipe(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """With MS-SAR, over none by the same recipe."""
    if cell.row.recalibration == "none" and cell.recipe:
        return _find(cells, cell, "none", {})
    return _over_none(cell, cells)


def _over_the_one_before(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    lesser = {"mssar": "se", "se": "none"}.get(cell.row.recalibration)
    return _find(cells, cell, lesser) if lesser else None


# What each row is claimed to be better than.
AGAINST: dict[str, Pick] = {
    "table3": _over_none,
    "table4": _over_fewer_scales,
    "strategy": _over_sliding,
    "stage": _over_single,
    "recipe": _over_the_papers_recipe,
    "ilsvrc": _over_the_one_before,
}


def paper_tables(records: Iterable[Record]) -> list[Table]:
    """Every table of the paper, with what is recorded of it."""
    records = list(records)
    plan, groups = plan_for(EXPERIMENTS, records, hardware=""), grouped(records)
    tables = []
    for name, experiment in EXPERIMENTS.items():
        states = [state for state in plan.cells if state.experiment == name]
        left = {run.name for state in states for run in state.missing}
        title = experiment.title[0].upper() + experiment.title[1:]
        rows = zip(paper_rows(states), states, strict=True)
        remarked = tuple(
            replace(row, remark="; ".join(filter(None, (row.remark, WEIGHT_DECAY))))
            if row.claim and row.claim.against == "none" and _as_much(state, groups)
            else row
            for row, state in rows
        )
        tables.append(Table(name, title, NOTES[name], remarked, len(left)))
    return tables


def _as_much(state: State, groups: Sequence[Group]) -> bool:
    """Whether some larger weight decay helps the network without recalibration, and makes it no
    worse than the recalibration does. Runs too far apart to be called worse do not help beyond
    chance."""
    cell = state.cell
    if cell.row.recalibration == "none" or not state.n:
        return False
    none = replace(cell.run(0), recalibration="none", options={}).as_dict()
    usual = none["recipe"]["weight_decay"]

    def larger(run: Mapping[str, Any]) -> bool:
        decay = run["recipe"].get("weight_decay")
        if not isinstance(decay, float) or decay <= usual:
            return False
        return {**run, "seed": 0, "recipe": {**run["recipe"], "weight_decay": usual}} == none

    alike = [group for group in groups if group.conditions == state.records[0].conditions]
    plain = [r for group in alike if {**group.run, "seed": 0} == none for r in group.records]
    return any(
        claim("", state.records, group.records, None).verdict in ("none", "reversed")
        and claim("", group.records, plain, None).verdict == "holds"
        for group in alike
        if larger(group.run)
    )


def paper_rows(states: Sequence[State]) -> list[Row]:
    """Cells of a plan, each held against the one that it is claimed to be better than."""
    return [_row(state, states) for state in states]


def _row(state: State, states: Sequence[State]) -> Row:
    cell = state.cell
    beside = [one for one in states if one.experiment == state.experiment]
    other = AGAINST[state.experiment](cell, [one.cell for one in beside])
    made: Claim | None = None
    if other is not None:
        theirs = next(one for one in beside if one.cell is other)
        published = _gain(cell, other)
        said = " ".join((other.row.recalibration, *other.particulars))
        made = claim(said, state.records, theirs.records, published)
    return Row(
        network=cell.row.network,
        recalibration=cell.row.recalibration,
        options=" ".join(cell.particulars),
        dataset=cell.dataset,
        mean=state.mean,
        spread=state.stdev,
        n=state.n,
        runs=tuple(record.id for record in state.records),
        claim=made,
        experiment=state.experiment,
        published=cell.published,
        published_spread=cell.spread,
        difference=state.difference,
        published5=cell.published5,
        mean5=state.mean5 if cell.published5 is not None else None,
        additional=cell.additional,
        remark=cell.remark,
        left=len(state.missing),
        seconds_left=state.seconds_left,
    )


def _gain(cell: Cell, other: Cell) -> float | None:
    if cell.recipe:
        return None  # the paper has one recipe
    if cell.published is not None and other.published is not None:
        return other.published - cell.published
    return STRATEGY_GAIN if cell.options.get("strategy") == "regional" else None


def other_runs(groups: Iterable[Group], shown: Iterable[str]) -> list[Group]:
    """Those whose records are in no table of the paper."""
    known = set(shown)
    return [g for g in groups if not known.intersection(r.id for r in g.records)]


def own_table(name: str, title: str, note: str, groups: Sequence[Group]) -> Table:
    """A table without published numbers; each row is held against the same without the layer."""
    rows = []
    for group in groups:
        base = next((other for other in groups if _is_base(other, group)), None)
        made = claim("none", group.records, base.records, None) if base else None
        rows.append(
            Row(
                network=group.name.network,
                recalibration=group.name.recalibration,
                options=group.name.particulars,
                dataset=group.name.dataset,
                mean=group.mean,
                spread=group.spread,
                n=group.n,
                runs=tuple(record.id for record in group.records),
                claim=made,
            )
        )
    return Table(name, title, note, tuple(rows), 0)


def _is_base(other: Group, group: Group) -> bool:
    alike = ("network", "dataset", "recipe", "weights", "normalisation")
    same = all(other.run.get(name) == group.run.get(name) for name in alike)
    same = same and other.conditions == group.conditions
    ours, theirs = group.run["recalibration"], other.run["recalibration"]
    return same and theirs == "none" and ours != "none"
