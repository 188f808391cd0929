"""Recalibrations beside each other, from records and timings to a table and a figure."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from statistics import mean, stdev

import pytest
from test_experiments import record_of, run_of
from test_timings import timing

from mssar.lab.experiments import EXPERIMENTS
from mssar.lab.report import build, page, plane
from mssar.lab.report.collect import Collection
from mssar.lab.report.comparison import ORDER, comparisons
from mssar.lab.report.findings import at_once
from mssar.lab.report.findings import compared as findings
from mssar.lab.report.groups import grouped
from mssar.lab.report.markup import filled
from mssar.lab.report.tables import paper_tables
from mssar.lab.report.welch import margin

ERRORS = {"none": (8.0, 8.4, 8.6), "eca": (7.5, 7.9, 7.1), "mssar": (7.0, 7.2, 7.4)}


def recorded(errors=ERRORS, **run):
    return [
        record_of(run_of(recalibration=kind, seed=seed, **run), error, params=1000 + len(kind))
        for kind, those in errors.items()
        for seed, error in enumerate(those)
    ]


def at_once_of(made):
    return [line for line in at_once((), (), [made]) if "This page" in line]


def timed(kinds=tuple(ERRORS), **changes):
    said = {"network": "resnet20", "batch": 128, "made": "2026-01-01T00:00:00+00:00", **changes}
    options = {"mssar": run_of(recalibration="mssar").as_dict()["options"]}
    return [
        timing(
            recalibration=kind,
            options=options.get(kind, {}),
            **{"p20_ms": 9.0, "median_ms": 10.0 + place, "p80_ms": 30.0, **said},
        )
        for place, kind in enumerate(kinds)
    ]


def test_a_row_has_error_counts_time_and_memory_together():
    (made,) = comparisons(grouped(recorded()), timed())
    assert (made.network, made.dataset, made.recipe) == ("resnet20", "cifar10", "")
    assert [row.recalibration for row in made.rows] == ["none", "eca", "mssar"]
    none, eca, ours = made.rows
    assert (eca.mean, eca.spread, eca.n) == (mean(ERRORS["eca"]), stdev(ERRORS["eca"]), 3)
    assert none.claim is None
    assert ours.claim.gain == pytest.approx(mean(ERRORS["none"]) - mean(ERRORS["mssar"]))
    assert ours.claim.margin == pytest.approx(
        margin(*((stdev(ERRORS[kind]), 3) for kind in ("mssar", "none")))
    )
    assert (none.outcome, ours.outcome) == ("", "lower")
    assert (eca.params, eca.macs) == (1003, 40_800_000)
    assert (eca.ms, eca.low, eca.high, eca.ratio, eca.peak) == (11.0, 9.0, 30.0, 1.1, 2**40)
    assert "batch 128, bf16" in made.measured
    assert len(ours.runs) == 3


@pytest.mark.parametrize(
    ("none", "eca", "outcome"),
    [
        ((8.0, 8.4, 8.6), (7.5, 8.9, 7.1), "none"),
        ((8.0, 8.1), (7.0, 7.1), "unclear"),
        ((7.0, 7.1, 7.2), (8.0, 8.1, 8.2), "higher"),
    ],
)
def test_a_difference_has_an_interval_where_there_are_runs_enough(none, eca, outcome):
    (made,) = comparisons(grouped(recorded({"none": none, "eca": eca})), [])
    row = made.rows[1]
    assert row.outcome == outcome
    assert (row.claim.margin is None) is (outcome == "unclear")
    text = page.tables(build.side_by_side(Collection(recorded({"none": none, "eca": eca}), [])))
    assert f'data-verdict="{outcome}"' in text


def test_times_are_of_one_set_that_was_measured_in_turns():
    older = timed(median_ms=20.0)
    newer = timed(("none", "mssar"), made="2026-02-01T00:00:00+00:00", median_ms=5.0)
    (made,) = comparisons(grouped(recorded()), [*newer, *older])
    assert [row.ms for row in made.rows] == [20.0] * 3  # all three, though older
    (made,) = comparisons(grouped(recorded()), timed(network="resnet56"))
    assert made.measured == ""
    assert {row.ms for row in made.rows} == {None}


def test_times_are_of_steps_as_the_runs_took_them():
    """However full or late other sets are."""
    mine, later = timed(("none", "mssar")), {"made": "2026-03-01T00:00:00+00:00"}
    others = [
        *timed(batch=256, median_ms=5.0, **later),
        *timed(precision="fp32", median_ms=6.0, **later),
    ]
    for measured in ([*mine, *others], [*others, *mine]):
        (made,) = comparisons(grouped(recorded()), measured)
        assert [row.ms for row in made.rows] == [10.0, None, 11.0]
    again = timed(("none", "mssar"), median_ms=7.0, **later)
    for measured in ([*mine, *again], [*again, *mine]):
        (made,) = comparisons(grouped(recorded()), measured)
        assert [row.ms for row in made.rows] == [7.0, None, 7.0]
    (made,) = comparisons(grouped(recorded()), others)
    assert (made.measured, {row.ms for row in made.rows}) == ("", {None})


def test_how_each_was_trained_is_said_where_it_differs():
    """By what code, compiled or not, and in stacks of how many."""
    alike = [replace(r, code={"version": "1", "commit": "a" * 40}) for r in recorded()]
    (made,) = comparisons(grouped(alike), timed())
    assert made.made == ""
    assert "Not all were trained alike" not in page.html(build.side_by_side(Collection(alike)))
    other = {"commit": "b" * 40, "changed": False}
    mixed = [
        replace(
            r,
            code={**r.code, **(other if r.run["recalibration"] == "mssar" else {})},
            execution={**r.execution, **({"stacked": 3} if r.run["seed"] == 2 else {})},
        )
        for r in alike
    ]
    (made,) = comparisons(grouped(mixed), timed())
    assert made.made == (
        "none, ECA by `aaaaaaa`, uncompiled and by `aaaaaaa`, uncompiled, 3 as one; "
        "MS-SAR by `bbbbbbb`, uncompiled and by `bbbbbbb`, uncompiled, 3 as one"
    )
    said = page.html(build.side_by_side(Collection(mixed)))
    assert "trained alike, which may change errors by chance: none, ECA by <code>aaaaaaa" in said


def test_other_recipes_data_and_networks_are_other_comparisons():
    other = [replace(r, data={**r.data, "checksum": "sha256:1"}, id=f"{r.id}x") for r in recorded()]
    assert len(comparisons(grouped([*recorded(), *other, *recorded(network="resnet56")]), [])) == 3
    exact = [replace(r, execution={**r.execution, "precision": "fp32"}) for r in recorded()]
    both = comparisons(grouped([*recorded(), *exact]), [])
    assert [made.recipe for made in both] == ["precision=bf16", "precision=fp32"]
    assert [len(made.rows) for made in both] == [3, 3]
    only = {"none": (8.0,), "mssar": (7.0,)}
    assert comparisons(grouped(recorded(only)), []) == []  # the paper's tables have it
    assert len(comparisons(grouped(recorded(only)), [], every=True)) == 1


def test_the_papers_tables_are_not_disturbed():
    usual = [r for r in recorded() if r.run["recalibration"] != "eca"]
    assert paper_tables(recorded()) == paper_tables(usual)
    assert len(paper_tables(recorded())) == len(EXPERIMENTS)
    made = build.reproduction(Collection(recorded(), timed()))
    assert len(made.comparisons) == 1
    assert "others" not in [table.name for table in made.tables]  # it stands above
    assert build.reproduction(Collection(usual, [])).comparisons == ()


def test_findings_say_no_more_than_the_runs_allow():
    (made,) = comparisons(grouped(recorded()), timed())
    first, close, picked, times = findings(made)
    *told, counted = build.side_by_side(Collection(recorded(), timed())).findings
    assert told == [first, close, picked, times]
    assert counted.startswith("This page makes 3 comparisons.")  # two with none, and the best's
    assert "resnet20 MS-SAR against none on CIFAR-10 (p" in counted
    assert first == "resnet20 on CIFAR-10: the lowest error is MS-SAR with 7.20 ± 0.20 % (n=3)."
    assert "ECA with 7.50 ± 0.40 % (n=3)" in close
    assert "none" not in close
    assert picked == "It was picked because it is the lowest: part of its lead may be chance."
    assert times.endswith("none 1.00, ECA 1.10, MS-SAR 1.20.")
    (alone,) = comparisons(grouped(recorded({"eca": (7.0,), "mssar": (9.0,)})), [])
    assert "MS-SAR with 9.00 % (n=1)" in findings(alone)[1]
    assert picked not in findings(alone)
    (made,) = comparisons(grouped(recorded({"none": (7.0, 7.1, 7.2), "eca": (8.0, 8.2, 8.1)})), [])
    assert at_once_of(made) == []  # the best against the other is the other against none
    worse = {"none": (7.0, 7.1, 7.2), "eca": (8.0, 8.2, 8.1), "mssar": (8.5, 8.2, 8.4)}
    (made,) = comparisons(grouped(recorded(worse)), [])
    (line,) = at_once((), (), [made], [made])
    assert line.startswith("This page makes 2 comparisons.")  # none's with each, once


def test_the_page_has_a_table_and_a_figure_without_scripts():
    made = build.side_by_side(Collection(recorded(), timed()))
    text = page.html(made)
    article = re.search(r'<article class="results comparison".*?</article>', text, re.DOTALL)[0]
    assert '<td role="cell" class="mean" data-value="7.5">' in article
    assert "7.50 ± 0.40" in article
    assert "1,048,576" in article  # MiB
    drawing = ET.fromstring(re.search(r"<svg.*?</svg>", article, re.DOTALL)[0])
    dots = {g.get("data-recalibration"): g.find("circle") for g in drawing.findall("g")}
    assert dots.keys() == {"none", "eca", "mssar"}
    at = {kind: (float(c.get("cx")), float(c.get("cy"))) for kind, c in dots.items()}
    assert at["none"][0] < at["eca"][0] < at["mssar"][0]  # slower to the right
    assert at["none"][1] < at["eca"][1] < at["mssar"][1]  # fewer errors further down
    assert "not drawn" not in article
    some = page.tables(build.side_by_side(Collection(recorded(), timed(("none", "mssar")))))
    assert "Not timed with these, and so not drawn: ECA." in some
    untimed = page.tables(build.side_by_side(Collection(recorded(), [])))
    assert "<svg" not in untimed
    assert "The time was not measured with the batch and in the precision of these runs." in untimed


def test_names_in_the_figure_do_not_overlap():
    points = [
        plane.Point(kind, kind, (10 + i % 3 / 10,) * 3, (5 + i / 50, 4.9, 5.3))
        for i, kind in enumerate(ORDER)
    ]
    drawn = plane.plane(points, "x", "y", "a & b")
    drawing = ET.fromstring(filled("plane.svg", drawn=drawn))
    assert drawing.get("aria-label") == "a & b; in numbers above."
    names = [t for t in drawing.findall("text") if t.get("class") == "name"]
    assert {t.text for t in names} == set(ORDER)
    boxes = []
    for t in names:
        left, bottom = float(t.get("x")), float(t.get("y")) + 3
        boxes.append(plane.Box(left, bottom - 13, left + 6.5 * len(t.text), bottom))
    assert not [(a, b) for a in boxes for b in boxes if a is not b and a.meets(b)]


@pytest.mark.parametrize("numbers", [(1.0, 1.0), (0.0, 0.0), (3.2, 1e4), (61.2, 61.3)])
def test_axes_have_a_few_round_numbers(numbers):
    axis = plane.Axis(numbers, 0, 100)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 11
    assert len({text for _, text in ticks}) == len(ticks)
    for number, text in ticks:
        assert float(text) == pytest.approx(number)
        assert 0 <= axis.at(number) <= 100
