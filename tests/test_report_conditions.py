"""What is compared was trained on the same data, in one precision, and differs in one thing."""

from dataclasses import replace

import pytest
from test_experiments import record_of, run_of
from test_report_tables import row, some, table

from mssar.lab.experiments.plan import plan_for
from mssar.lab.recipes import varied
from mssar.lab.report import build, tables
from mssar.lab.report.collect import Collection
from mssar.lab.report.comparison import comparisons
from mssar.lab.report.groups import grouped, named
from mssar.lab.run import Normalisation
from mssar.surgery import foreign

HALF = Normalisation((0.5,) * 3, (0.25,) * 3)
OWN = Normalisation(*foreign.IMAGENET)


def otherwise(recorded, precision="bf16", checksum="sha256:0"):
    """The same runs in another precision, or on other data of the name."""
    return [
        replace(
            r,
            id=f"{r.id}-{precision}-{checksum}",
            execution={**r.execution, "precision": precision},
            data={**r.data, "checksum": checksum},
        )
        for r in recorded
    ]


def test_runs_on_other_data_of_the_same_name_are_other_runs():
    other = {"checksum": "sha256:1", "classes": 10, "train": 50_000, "test": 10_000}
    recorded = [*some([8.0, 9.0]), record_of(run_of(seed=2), 50.0, data=other)]
    first, second = grouped(recorded)
    assert (first.n, first.mean) == (2, 8.5)
    assert second.mean == 50.0
    made = tables.paper_tables(recorded)
    assert row(made[0], "resnet20", "none").mean == 8.5
    shown = [r for t in made for line in t.rows for r in line.runs]
    assert [group.mean for group in tables.other_runs(grouped(recorded), shown)] == [50.0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"precision": "fp32"}, "precision=fp32"),
        ({"checksum": "sha256:0123456789"}, "data=01234567"),
    ],
)
def test_only_runs_on_the_same_data_in_one_precision_are_compared(other, said):
    """Else what rounding or the data do would count as the layer's."""
    strange = otherwise(some([9.0, 9.1, 9.2]), **other)
    plain, ours = some([7.5, 7.6, 7.7]), some([7.5, 7.6, 7.7], recalibration="mssar")
    for recorded in ([*strange, *plain, *ours], [*ours, *plain, *strange]):
        made = build.reproduction(Collection(recorded, [])).tables
        assert row(made[0], "resnet20", "none").mean == pytest.approx(7.6)
        assert row(made[0], "resnet20", "mssar").claim.verdict == "none"
        (line,) = made[-1].rows
        assert (line.mean, line.options, line.claim) == (pytest.approx(9.1), said, None)
        own = tables.own_table("others", "", "", grouped(recorded)).rows
        assert [line.claim.gain for line in own if line.claim] == [0]
    made = build.reproduction(Collection([*strange, *ours, *some([8.0], "resnet56")], [])).tables
    assert row(made[0], "resnet20", "mssar").claim.verdict == "open"  # nothing to hold it against
    assert row(made[0], "resnet20", "none").n == 0


def test_another_precision_is_another_run():
    exact, half = otherwise(some([7.0, 6.0]), "fp32"), some([8.0])
    groups = grouped([*half, *exact])
    assert [(g.name.recipe, g.n, g.mean) for g in groups] == [
        ("precision=bf16", 1, 8.0),
        ("precision=fp32", 2, 6.5),
    ]
    assert [g.name.recipe for g in grouped(exact)] == [""]  # nothing to tell it from
    assert row(table("table3", [*half, *exact]), "resnet20", "none").n == 2  # what most have
    assert row(table("table3", [*half, *exact[:1]]), "resnet20", "none").mean == 8.0  # the first
    asked = {"hardware": "", "nets": ["resnet20"], "datasets": ["cifar10"], "seeds": 2}
    for precision, seeds in ((None, []), ("bf16", [1]), ("fp32", []), ("tf32", [0, 1])):
        cell = plan_for(["table3"], [*half, *exact], precision=precision, **asked).cells[0]
        assert [run.seed for run in cell.missing] == seeds


@pytest.mark.parametrize(
    ("decay", "errors", "said"),
    [
        (5e-4, [7.0, 7.1, 6.9], True),  # no worse than with the layer
        (5e-4, [8.0, 8.1, 7.9], False),
        (5e-4, [7.0], False),  # too few to say
        (5e-5, [7.0, 7.1, 6.9], False),  # another finding
    ],
)
def test_a_weight_decay_that_does_as_much_is_said_beside_the_gain(decay, errors, said):
    ours = some([7.0, 7.1, 6.9], recalibration="mssar")
    plain = run_of()
    other = replace(plain, recipe=varied(plain.recipe, weight_decay=decay))
    more = [record_of(replace(other, seed=seed), error) for seed, error in enumerate(errors)]
    found = table("table3", [*some([8.5, 8.4, 8.6]), *ours, *more])
    remarks = {one.recalibration for one in found.rows if one.remark == tables.WEIGHT_DECAY}
    assert remarks == ({"mssar"} if said else set())


def test_each_weight_decay_is_judged_by_itself_and_on_the_same_terms():
    def decayed(errors, decay):
        plain = run_of("densenet100")
        made = replace(plain, recipe=varied(plain.recipe, weight_decay=decay))
        return [record_of(replace(made, seed=s), e) for s, e in enumerate(errors)]

    def remark(*more):
        none, ours = some([8.5, 8.4, 8.6], "densenet100"), [7.0, 7.1, 6.9]
        ours = some(ours, "densenet100", recalibration="mssar")
        found = table("table3", [*none, *ours, *(r for some in more for r in some)])
        return row(found, "densenet100", "mssar").remark

    own = "4.06 in table 4 and in the text"
    worse, good = decayed([7.8, 7.9, 8.0], 5e-4), decayed([7.0, 7.1, 6.9], 2e-4)
    assert remark(worse) == own
    assert remark(worse, decayed([90.0, 30.0, 10.0], 0.1)) == own  # diverged: far from good
    assert remark(decayed([7.0, 7.1], 2e-4), decayed([7.2, 6.9], 3e-4)) == own  # two of each
    assert remark(decayed([7.0, 7.1], 2e-4), decayed([6.9], 2e-4)) == own  # seed 0 twice
    assert remark(otherwise(good, "fp32")) == remark(otherwise(good, checksum="sha256:1")) == own
    assert remark(worse, good) == f"{own}; {tables.WEIGHT_DECAY}"


@pytest.mark.parametrize(
    "change",
    [{"decay": "weights"}, {"init": "torch"}, {"fill": "mean"}, {"fill": "mean", "init": "torch"}],
)
def test_what_the_paper_does_not_say_makes_another_recipe(change):
    """However good such runs are: no cell, no comparison and no doubt of one has them."""

    def otherwise(errors, kind="none", **more):
        made = run_of(recalibration=kind)
        made = replace(made, recipe=varied(made.recipe, **change, **more))
        return [record_of(replace(made, seed=s), e) for s, e in enumerate(errors)]

    papers = [*some([8.5, 8.4, 8.6]), *some([7.0, 7.1, 6.9], recalibration="mssar")]
    none, ours = otherwise([2.0, 2.1, 1.9]), otherwise([1.0, 1.1, 0.9], "mssar")
    decayed = otherwise([6.0, 6.1, 5.9], weight_decay=5e-4)
    for recorded in ([*papers, *none, *ours, *decayed], [*decayed, *ours, *none, *papers]):
        made = build.reproduction(Collection(recorded, []))
        alone = build.reproduction(Collection(papers, []))
        assert made.tables[:-1] == alone.tables  # with gains and remarks
        assert made.differences == alone.differences
        said = " ".join(f"{name}={value}" for name, value in change.items())
        rows = {(row.recalibration, row.options): row for row in made.tables[-1].rows}
        assert {frozenset(options.split()) for _, options in rows} == {
            frozenset(said.split()),
            frozenset(f"weight_decay=0.0005 {said}".split()),
        }
        (gained,) = (row for row in rows.values() if row.claim)  # over none by the same recipe
        assert (gained.recalibration, gained.claim.gain) == ("mssar", pytest.approx(1.0))
    planned = plan_for(["table3"], [*none, *ours, *decayed], hardware="", nets=["resnet20"])
    assert not any(state.n for state in planned.cells)
    (beside,) = comparisons(grouped([*papers, *none]), [], every=True)[:1]
    assert [row.mean for row in beside.rows] == pytest.approx([8.5, 7.0])


def missing(library):
    raise ValueError(f"{library} cannot be imported")


def test_other_colours_make_another_comparison():
    """Rows of each are held against none of the same, and their names say which."""

    def seen(errors, kind="none", normalisation=None):
        made = replace(run_of("resnet18", kind, "imagefolder"), normalisation=normalisation)
        return [record_of(replace(made, seed=s), e) for s, e in enumerate(errors)]

    usual = [*seen([8.0, 8.1, 7.9]), *seen([7.0, 7.1, 6.9], "mssar")]
    other = [*seen([5.0, 5.1, 4.9], normalisation=HALF), *seen([4.5, 4.6, 4.4], "mssar", HALF)]
    said = "mean=0.5,0.5,0.5 std=0.25,0.25,0.25"
    for recorded in ([*usual, *other], [*other, *usual]):
        groups = grouped(recorded)
        both = {one.recipe: one for one in comparisons(groups, [], every=True)}
        assert both.keys() == {"", said}
        assert [row.mean for row in both[""].rows] == pytest.approx([8.0, 7.0])
        assert [row.mean for row in both[said].rows] == pytest.approx([5.0, 4.5])
        rows = tables.own_table("others", "", "", groups).rows
        gains = {row.options: row.claim.gain for row in rows if row.claim}
        assert gains == {"": pytest.approx(1.0), said: pytest.approx(0.5)}


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.usefixtures("timm")
def test_colours_are_named_where_a_network_usually_has_others(monkeypatch, here):
    def name(network, normalisation, dataset="imagefolder"):
        run = run_of(network, "none", dataset)
        return named(replace(run, normalisation=normalisation).as_dict())

    if not here:
        monkeypatch.setattr(foreign, "imported", missing)
    half = Normalisation((0.5,) * 3, (0.5,) * 3)
    keras = Normalisation(foreign.MEAN, (1.0,) * 3)
    assert name("torchvision:resnet50_keras", keras).particulars == ""
    own = "mean=0.485,0.456,0.406 std=0.229,0.224,0.225"
    assert name("torchvision:resnet50_keras", None).particulars == own
    assert name("torchvision:mobilenet_v2", None).particulars == ""
    assert name("resnet18", OWN).particulars == own  # made by hand: the command leaves that out
    said = "mean=0.5,0.5,0.5 std=0.5,0.5,0.5"
    assert name("timm:test_resnet", half).particulars == ("" if here else said)
    assert name("timm:test_resnet", None).particulars == (own if here else "")
    assert name("resnet20", half, "cifar10").particulars == said


@pytest.mark.parametrize("strange", [3, {"mean": "x"}, {}, [[0.5], [0.5]]])
def test_strangers_colours_are_no_reason_to_show_nothing(strange):
    made = record_of(run_of("resnet18", dataset="imagefolder"))
    groups = grouped([made, replace(made, run={**made.run, "normalisation": strange})])
    assert [group.mean for group in groups] == [8.0, 8.0]
