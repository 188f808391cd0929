"""Tables: the paper's numbers and ours side by side, and what may be concluded."""

import json
from dataclasses import replace
from math import hypot
from statistics import stdev

import pytest
from test_experiments import ILSVRC, TABLE3, numbers, record_of, run_of

from mssar.lab.experiments import EXPERIMENTS
from mssar.lab.recipes import CIFAR_RESNET, varied
from mssar.lab.report import build, tables
from mssar.lab.report.collect import Collection
from mssar.lab.report.findings import claims, comparison, coverage
from mssar.lab.report.groups import claim, grouped, named, provenance
from mssar.lab.run import Run


def some(errors, network="resnet20", **run):
    return [record_of(run_of(network, seed=s, **run), error) for s, error in enumerate(errors)]


def table(name, recorded=()):
    return next(t for t in tables.paper_tables(recorded) if t.name == name)


def row(found, network, recalibration, dataset="cifar10", options=""):
    (chosen,) = [
        r
        for r in found.rows
        if (r.network, r.recalibration, r.dataset, r.options)
        == (network, recalibration, dataset, options)
    ]
    return chosen


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([7.8, 7.7, 7.9], [8.6, 8.5, 8.7], "holds"),
        ([8.6, 8.5, 8.7], [7.8, 7.7, 7.9], "reversed"),
        ([8.0, 8.6, 8.3], [8.1, 8.7, 8.4], "none"),
        ([8.0, 8.0, 8.0], [8.0, 8.0, 8.0], "unclear"),  # no spread is no certainty
        ([5.0, 5.0, 5.0], [7.5, 7.5, 7.5], "unclear"),
        ([7.0, 7.0], [9.0, 9.0, 9.0], "unclear"),
        ([7.0, 7.0, 7.0], [9.0], "unclear"),
        ([], [9.0, 9.0], "open"),
    ],
)
def test_a_claim_holds_only_beyond_chance(ours, theirs, verdict):
    a, b = some(ours, recalibration="mssar"), some(theirs)
    made = claim("none", a, b, 1.0)
    assert made.verdict == verdict
    if verdict in ("holds", "reversed", "none"):
        # Two groups of three with equal spreads have four degrees of freedom.
        t = 2.776445
        assert made.margin == pytest.approx(t * hypot(stdev(ours), stdev(theirs)) / 3**0.5)
    else:
        assert (made.margin, made.p) == (None, None)
    if ours:
        assert made.gain == pytest.approx(sum(theirs) / len(theirs) - sum(ours) / len(ours))


def test_every_table_is_there_with_the_papers_numbers_and_nothing_of_ours():
    made = tables.paper_tables([])
    assert [t.name for t in made] == list(EXPERIMENTS)
    assert all(r.mean is None and not r.runs and r.n == 0 for t in made for r in t.rows)
    assert all(r.claim is None or r.claim.verdict == "open" for t in made for r in t.rows)
    main = table("table3")
    for network, text in TABLE3.items():
        found = [
            row(main, network, kind, data).published
            for kind in ("none", "mssar")
            for data in ("cifar10", "cifar100")
        ]
        assert found == numbers(text)
    for network, text in ILSVRC.items():
        found = [row(table("ilsvrc"), network, k, "ilsvrc2012") for k in ("none", "se", "mssar")]
        assert [n for r in found for n in (r.published, r.published5)] == numbers(text)


def test_our_numbers_stand_beside_the_papers():
    recorded = some([8.8, 8.4, 8.6]) + some([7.8, 7.6, 7.7], recalibration="mssar")
    main = table("table3", recorded)
    plain, ours = row(main, "resnet20", "none"), row(main, "resnet20", "mssar")
    assert plain.mean == pytest.approx(8.6)
    assert plain.difference == pytest.approx(8.6 - 8.61)
    assert plain.claim is None
    assert ours.n == 3
    assert ours.runs == tuple(r.id for r in recorded[3:])
    assert ours.claim is not None
    assert ours.claim.gain == pytest.approx(0.9)
    assert ours.claim.published == pytest.approx(1.0)
    assert ours.claim.verdict == "holds"
    assert main.left == table("table3").left - 6


def test_each_table_has_its_own_claim():
    def against(name, *which):
        made = row(table(name), *which).claim
        return made and made.against

    assert against("table3", "resnet56", "mssar") == "none"
    assert against("table3", "resnet56", "mssar", "cifar10", "reduction=3") == "none"
    assert against("table4", "resnet56", "mssar", "cifar10", "scales=1,2,4") == "mssar scales=1"
    assert against("table4", "resnet56", "mssar", "cifar10", "scales=2,4") == "mssar scales=1"
    assert against("table4", "resnet56", "mssar", "cifar10", "scales=2") == "none"
    narrow = ("mssar", "cifar10", "scales=2,4 reduction=3")
    assert against("table4", "resnet56", *narrow) == "mssar scales=1 reduction=3"
    regional = ("resnet56", "mssar", "cifar100", "strategy=regional")
    assert against("strategy", *regional) == "mssar strategy=sliding"
    assert against("strategy", *regional[:3], "strategy=sliding") is None
    assert row(table("strategy"), *regional).claim.published == 0.2
    multi = ("densenet100", "mssar", "cifar10", "stage=multi")
    assert against("stage", *multi) == "mssar stage=single"
    assert row(table("stage"), *multi).claim.published == pytest.approx(4.45 - 4.06)
    assert against("ilsvrc", "resnet18", "mssar", "ilsvrc2012") == "se"
    assert against("ilsvrc", "resnet18", "se", "ilsvrc2012") == "none"


def test_a_variant_of_the_recipe_is_held_against_the_papers():
    def recorded(errors, kind, **changes):
        runs = [run_of("resnet20", kind, "cifar100", seed=s) for s in range(len(errors))]
        varied_ = [replace(run, recipe=varied(run.recipe, **changes)) for run in runs]
        return [record_of(run, error) for run, error in zip(varied_, errors, strict=True)]

    made = table(
        "recipe",
        [
            *recorded([33.0, 33.1, 33.2], "none"),
            *recorded([32.9, 33.0, 33.5], "none", fill="mean"),
            *recorded([31.4, 31.5, 31.6], "none", weight_decay=5e-4),
            *recorded([31.2, 31.3, 31.4], "mssar"),
            *recorded([30.0, 30.1, 30.2], "mssar", weight_decay=5e-4),
        ],
    )
    larger = "weight_decay=0.0005"
    found = [
        (r.recalibration, r.options, r.claim and r.claim.against, r.outcome) for r in made.rows
    ]
    assert found == [
        ("none", "", None, ""),
        ("none", "decay=weights", "none", "open"),
        ("none", "fill=mean", "none", "none"),
        ("none", "init=torch", "none", "open"),
        ("none", larger, "none", "lower"),
        ("mssar", "", "none", "holds"),
        ("mssar", larger, f"none {larger}", "lower"),
    ]
    gains = {r.options: (r.claim.gain, r.claim.published) for r in made.rows if r.claim and r.n}
    assert gains["fill=mean"] == (pytest.approx(33.1 - 33.1333, abs=1e-3), None)
    assert gains[larger] == (pytest.approx(1.4), None)  # the last: that with MS-SAR
    assert row(made, "resnet20", "none", "cifar100", larger).difference == pytest.approx(-0.37)


@pytest.mark.parametrize("recipe", [{}, {"weight_decay": "much"}])
def test_a_strangers_recipe_is_no_reason_to_show_nothing(recipe):
    made = record_of(run_of(seed=5))
    strange = replace(made, run={**made.run, "recipe": {"epochs": len(made.epochs), **recipe}})
    ours = some([7.0, 7.1, 6.9], recalibration="mssar")
    assert row(table("table3", [*ours, strange]), "resnet20", "mssar").n == 3


def test_other_runs_are_in_no_table_of_the_paper_but_in_one_of_their_own():
    short = run_of()
    short = replace(short, recipe=varied(short.recipe, epochs=3, drops=(1, 2)))
    recorded = [record_of(short, 20.0), *some([8.8])]
    made = tables.paper_tables(recorded)
    shown = [r for t in made for line in t.rows for r in line.runs]
    assert shown == [recorded[1].id] * len(shown)
    (group,) = tables.other_runs(grouped(recorded), shown)
    assert group.records == (recorded[0],)
    assert group.name.label == "resnet20 none epochs=3 drops=1,2"
    (line,) = tables.own_table("others", "Other runs", "", [group]).rows
    assert (line.mean, line.n, line.options) == (20.0, 1, "epochs=3 drops=1,2")


def test_runs_of_one_group_differ_in_their_seeds_alone():
    recorded = [*some([8.0, 9.0]), *some([7.0], recalibration="mssar"), *some([8.5])]
    first, second = grouped(recorded)
    assert [r.error for r in first.records] == [8.0, 9.0]  # the repeat of seed 0 does not count
    assert first.spread == pytest.approx(stdev([8.0, 9.0]))
    assert second.spread is None
    assert second.name.recalibration == "mssar"


def test_a_network_that_is_not_known_here_is_shown_as_it_is_named():
    made = record_of(run_of())
    strange = {**made.run, "network": "<script>alert(1)</script>", "options": {"a": [1, "<b>"]}}
    name = named(strange)
    assert name.network == "<script>alert(1)</script>"
    assert name.options == "a=1,<b>"
    (group,) = grouped([replace(made, run=strange)])
    assert group.mean == made.error


def test_provenance_says_how_to_get_a_number_again():
    code = {"version": "3", "commit": "abc", "changed": True, "source": "sha256:1"}
    said = provenance(record_of(run_of(seed=4), 8.25, together=2, code=code))
    assert said["seed"] == "4"
    assert said["error"] == "8.25%, last of 160 epochs"
    assert said["command"] == "mssar train"
    assert said["commit"] == "abc with changes"
    assert said["data"] == "cifar10, sha256:0"
    assert said["time"] == "1,600 s, 2 at once"
    assert json.loads(said["recipe"])["epochs"] == 160
    assert all(isinstance(text, str) and text for text in said.values())
    assert "begun by" not in said


def test_the_origin_says_how_earlier_parts_were_made_otherwise():
    resumed = record_of(run_of(), 8.25)
    resumed.environment["torch"] = "2.11.0"
    parts = [
        {"hardware": "Old GPU", "torch": "2.6.0"},
        "nonsense",
        {},
        {"torch": "2.11.0", "compile": True, "stacked": 1},
        {"torch": "2.11.0", "stacked": 1},  # as the last
    ]
    resumed.environment["earlier"] = parts
    begun = provenance(resumed)["begun by"]
    assert begun == "hardware Old GPU, torch 2.6.0; then compile True"
    for odd in ({"hardware": "Old GPU"}, "Old GPU", 3, [{}], None):
        resumed.environment["earlier"] = odd
        assert "begun by" not in provenance(resumed)


def test_findings_say_what_the_numbers_say():
    recorded = some([8.8, 8.4, 8.6]) + some([7.8, 7.6, 7.7], recalibration="mssar")
    made = tables.paper_tables(recorded)
    (said,) = claims(made)
    begins = "resnet20 on CIFAR-10: with MS-SAR the error is 0.90"
    other = "points lower than without recalibration"
    assert said == (
        f"{begins} ± 0.42 {other} (95 % interval, n=3; published: 1.00 lower). "
        "That is more than chance."
    )
    (said,) = claims(tables.paper_tables([*recorded[:2], *recorded[3:5]]))
    assert said == (
        f"{begins} {other} (published: 1.00 lower). With so few runs that may be chance."
    )
    (cover,) = coverage(made)
    assert cover.startswith("2 of the 106 cells")
    worse = some([8.0, 8.1, 8.2]) + some([8.4, 8.2, 8.3], recalibration="mssar")
    assert "0.20 ± 0.23 points higher than without" in claims(tables.paper_tables(worse))[0]
    same = some([8.0, 8.1, 8.2]) + some([8.1, 8.2, 8.0], recalibration="mssar")
    said = claims(tables.paper_tables(same))[0]
    assert said.endswith(". That may be chance.")
    assert claims(tables.paper_tables([])) == []


def test_only_what_the_paper_claims_can_hold():
    """SE is not in its main table, and reduction=3 is another reading of its row."""
    none, ours = [8.8, 8.4, 8.6], [7.8, 7.6, 7.7]
    narrow = some(ours, recalibration="mssar", reduction=3)
    recorded = some(none) + some(ours, recalibration="mssar") + some(ours, recalibration="se")
    main = table("table3", [*recorded, *narrow])
    told = {
        (kind, options): row(main, "resnet20", kind, options=options).outcome
        for kind, options in (("none", ""), ("mssar", ""), ("se", ""), ("mssar", "reduction=3"))
    }
    assert list(told.values()) == ["", "holds", "lower", "lower"]
    worse = table("table3", some(ours) + some(none, recalibration="se"))
    assert row(worse, "resnet20", "se").outcome == "higher"
    few = table("table3", some(ours) + some(none[:2], recalibration="se"))
    assert row(few, "resnet20", "se").outcome == "unclear"


def test_the_demo_claims_no_more_than_its_runs_allow():
    def said(none, ours):
        groups = grouped(some(none) + some(ours, recalibration="mssar"))
        return comparison(tables.own_table("demo", "", "", groups))

    first = "Here, with no recalibration: 5.20 % of the test pictures wrong (one run)."
    assert said([5.2], [4.4])[1] == first
    assert said([5.2], [4.4])[-1].startswith("From one run of MS-SAR nothing can be said about")
    assert said([5.2] * 3, [4.4] * 2)[-1].startswith("From 2 runs of MS-SAR nothing can be said")
    assert "no difference that could not be chance" in said([5.2, 4.6, 5.0], [4.4, 4.9, 5.1])[-1]
    assert "ahead of no recalibration" in said([5.2, 5.1, 5.3], [4.4, 4.5, 4.6])[-1]
    assert "behind no recalibration" in said([4.2, 4.1, 4.3], [5.4, 5.5, 5.6])[-1]
    assert said([5.2] * 3, [4.4] * 3)[-1].endswith("can be said about small differences.")
    headline = said([5.2], [4.4])[0]
    assert headline.startswith("On real pictures, trained as in the paper, a ResNet-56 gets")
    nothing = tables.own_table("demo", "", "", grouped(Collection().records))
    assert comparison(nothing) == [headline]


def test_of_a_run_recorded_twice_the_later_one_counts():
    old, new = some([8.0])[0], replace(some([9.0])[0], finished="2026-03-01T00:00:00+00:00")
    for recorded in ([old, new], [new, old]):
        (group,) = grouped(recorded)
        assert group.records == (new,)
        assert row(table("table3", recorded), "resnet20", "none").mean == 9.0


def test_curves_come_as_the_tables_have_them_whatever_order_records_are_in():
    decayed = replace(run_of(), recipe=varied(CIFAR_RESNET, weight_decay=5e-4))
    tuned = replace(run_of(dataset="cifar100"), recipe=varied(CIFAR_RESNET, fill="mean"))
    fruit = Run("resnet20", dataset="fruit", recipe=CIFAR_RESNET)
    recorded = [
        record_of(fruit),
        record_of(tuned),
        record_of(decayed),
        *some([7.0], recalibration="mssar"),
        *some([6.8], network="resnet56", recalibration="mssar", scales=(1, 2)),
        *some([33.0], dataset="cifar100"),
        *some([8.0]),
    ]
    expected = [
        ("resnet20 none", "cifar10"),
        ("resnet20 none", "cifar100"),
        ("resnet20 mssar", "cifar10"),
        ("resnet56 mssar scales=1,2", "cifar10"),  # table 4
        ("resnet20 none fill=mean", "cifar100"),
        ("resnet20 none weight_decay=0.0005", "cifar10"),  # in no table, but on the paper's data
        ("resnet20 none", "fruit"),
    ]
    for order in (recorded, recorded[::-1]):
        page = build.reproduction(Collection(list(order)))
        assert [(curve.label, curve.dataset) for curve in page.curves] == expected
