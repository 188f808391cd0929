"""Differences in the page's first figure and sentences: of each network, in the mean, at once."""

from dataclasses import replace

import pytest
from test_experiments import record_of, run_of
from test_report_tables import some

from mssar.lab.recipes import varied
from mssar.lab.report import tables
from mssar.lab.report.differences import differences
from mssar.lab.report.findings import at_once, claims
from mssar.lab.report.groups import claim
from mssar.lab.report.intervals import drawn
from mssar.lab.report.phrases import scientific
from mssar.lab.report.welch import p_value


def test_the_page_says_how_many_comparisons_it_makes_and_which_hold_at_once():
    def runs(none, se, ours, network="resnet56"):
        kinds = {"none": none, "se": se, "mssar": ours}
        return [
            r for k, errors in kinds.items() for r in some(errors, network=network, recalibration=k)
        ]

    # Against none SE and MS-SAR; against SE, which the table of scales has, MS-SAR. That table's
    # scale 1 is the same SE, and counts once.
    none, se, ours = [7.0, 7.1, 6.9], [6.6, 7.0, 6.8], [6.0, 6.1, 5.9]
    recorded = runs(none, se, ours)
    made = tables.paper_tables(recorded)
    (said,) = at_once([], made)
    assert "MS-SAR scales=1,2,4 against MS-SAR scales=1 on CIFAR-10" in said
    assert said.startswith("This page makes 3 ")
    (said,) = at_once(differences(made), made)
    assert "resnet56 MS-SAR against SE on CIFAR-10" in said
    assert said.startswith("This page makes 3 comparisons.")
    assert "(Bonferroni: p below 0.017)" in said
    p = p_value(1.0, (0.1, 3), (0.1, 3))
    assert f"resnet56 MS-SAR against none on CIFAR-10 (p\u00a0=\u00a0{p:.1g}); " in said
    assert "SE against none" not in said
    (said,) = at_once([], tables.paper_tables(runs(*[[7.0, 7.4, 6.9]] * 3)))
    assert said.endswith("what remains is: none.")
    assert at_once([], tables.paper_tables(recorded[:3])) == []
    (small,) = at_once(  # which no table compares with SE
        differences(made := tables.paper_tables(runs(none, se, ours, "resnet20"))), made
    )
    assert small.startswith("This page makes 3 ")


@pytest.mark.parametrize(
    ("p", "told"), [(0.0016, "0.002"), (2.3e-8, "2·10⁻⁸"), (3e-12, "3·10⁻¹²"), (9.6e-5, "0.0001")]
)
def test_small_numbers_have_their_powers_raised(p, told):
    assert scientific(p) == told


def test_differences_are_drawn_where_there_are_runs_enough():
    none, se, ours = [7.0, 7.1, 6.9], [6.6, 7.0, 6.8], [6.0, 6.1, 5.9]
    recorded = [
        r
        for network in ("resnet20", "resnet56")
        for kind, errors in {"none": none, "se": se, "mssar": ours}.items()
        for r in some(errors, network=network, recalibration=kind)
    ]
    made = tables.paper_tables([*recorded, *some(ours, recalibration="mssar", reduction=3)])
    found = differences(made)
    told = [(one.network, one.claim.against, one.claim.published) for one in found]
    assert told == [  # the paper compares ResNet-56 with scale 1 alone
        ("mean of 2 resnets", "none", pytest.approx((6.97 - 6.04 + 8.61 - 7.61) / 2)),
        ("mean of 2 resnets", "se", None),
        ("resnet56", "none", pytest.approx(6.97 - 6.04)),
        ("resnet56", "se", pytest.approx(6.80 - 6.04)),
        ("resnet20", "none", pytest.approx(8.61 - 7.61)),
        ("resnet20", "se", None),
    ]
    by_hand = claim("se", recorded[6:9], recorded[3:6], None)
    for one in (found[3].claim, found[5].claim):
        assert (one.gain, one.margin, one.p) == pytest.approx(
            (by_hand.gain, by_hand.margin, by_hand.p)
        )
    # As many runs again as alike: the same difference, and a narrower interval.
    mean = found[1].claim
    assert mean.gain == pytest.approx(by_hand.gain)
    assert mean.margin < by_hand.margin / 2**0.5
    of = drawn(found)
    zero = of.zero.left
    for one, line in zip(found, of.lines, strict=True):
        scale = (line.x - zero) / one.claim.gain
        assert line.interval.left == pytest.approx(
            zero + scale * (one.claim.gain - one.claim.margin), abs=0.5
        )
        assert (line.paper is None) == (one.claim.published is None)
        assert line.numbers.text == f"{one.claim.gain:.2f} ± {one.claim.margin:.2f}"
    assert [text.text for text, _ in of.headings] == [
        "mean of 2 resnets on CIFAR-10",
        "resnet56 on CIFAR-10",
        "resnet20 on CIFAR-10",
    ]
    assert claims(made, found) == [
        "On CIFAR-10 the error with MS-SAR is, in the mean of resnet56 and resnet20, 1.00 ± 0.13 "
        "points lower than without recalibration and 0.80 ± 0.22 points lower than with SE "
        "(95\u00a0% intervals).",
        "With MS-SAR the error is lower than without recalibration, beyond chance, in 2 of 2 "
        "cases: resnet56 on CIFAR-10, resnet20 on CIFAR-10.",
        "With MS-SAR the error is lower than with SE, beyond chance, in 2 of 2 cases: "
        "resnet56 on CIFAR-10, resnet20 on CIFAR-10.",
    ]
    few = tables.paper_tables(recorded[:2] + recorded[6:8])
    assert differences(few) == []
    assert drawn([]) is None
    assert "With so few runs that may be chance." in claims(few, [])[0]


def test_means_are_over_networks_that_have_all_comparisons():
    none, se, ours = [7.0, 7.1, 6.9], [6.0, 6.4, 6.2], [6.2, 6.1, 6.3]

    def runs(network, dataset="cifar10", **kinds):
        return [
            r
            for kind, errors in kinds.items()
            for r in some(errors, network=network, recalibration=kind, dataset=dataset)
        ]

    whole = {"none": none, "se": se, "mssar": ours}
    recorded = [
        *runs("resnet20", **whole),
        *runs("resnet32", none=none, mssar=ours),  # no SE: in no mean
        *runs("resnet56", **whole),
        *runs("densenet100", **whole),  # of another family, and alone there
        *runs("resnet20", "cifar100", none=ours, mssar=none),
        *runs("resnet32", "cifar100", none=ours, mssar=none),
    ]
    made = tables.paper_tables(recorded)
    found = [one for one in differences(made) if one.networks]
    assert [(one.networks, one.dataset, one.claim.against, one.claim.verdict) for one in found] == [
        (("resnet56", "resnet20"), "cifar10", "none", "holds"),
        (("resnet56", "resnet20"), "cifar10", "se", "none"),
        (("resnet32", "resnet20"), "cifar100", "none", "reversed"),
    ]
    said = claims(made, differences(made))
    assert said[0].endswith(
        "0.80 ± 0.13 points lower than without recalibration and 0.00 ± 0.22 points lower than "
        "with SE (95\u00a0% intervals). The difference to SE may be chance."
    )
    assert said[1] == (
        "On CIFAR-100 the error with MS-SAR is, in the mean of resnet32 and resnet20, 0.80 ± 0.13 "
        "points higher than without recalibration (95\u00a0% intervals)."
    )


def test_in_a_mean_each_network_counts_alike_and_its_runs_are_named():
    first = some([9.0, 9.1, 8.9]) + some([8.0, 8.2, 8.1], recalibration="mssar")
    more = [some(e, network="resnet32", recalibration=k) for k, e in (
        ("none", [7.0, 7.1, 6.9, 7.3, 6.7]), ("mssar", [6.9, 6.8, 6.7, 7.0, 6.6]),
    )]  # fmt: skip
    mean, large, small = differences(tables.paper_tables([*first, *more[0], *more[1]]))
    assert mean.claim.gain == pytest.approx((0.9 + 0.2) / 2)
    assert mean.claim.gain == pytest.approx((large.claim.gain + small.claim.gain) / 2)
    assert mean.runs == large.runs + small.runs
    assert {*mean.runs} == {r.id for r in (*first[3:], *more[1])}


def test_only_a_doubt_of_the_gain_goes_with_a_mean():
    """What a larger weight decay does as well, against none; not other remarks."""
    none, se, ours = [9.0, 9.1, 8.9], [8.6, 8.4, 8.5], [8.0, 8.1, 7.9]
    decayed = [
        record_of(replace(run, recipe=varied(run.recipe, weight_decay=5e-4)), error)
        for run, error in ((run_of("resnet20", seed=s), e) for s, e in enumerate(ours))
    ]
    recorded = [
        r
        for network in ("resnet20", "resnet32")
        for kind, errors in (("none", none), ("se", se), ("mssar", ours))
        for r in some(errors, network=network, recalibration=kind)
    ]
    made = tables.paper_tables(recorded + decayed)
    found = differences(made)
    remark = "resnet20: weight decay may do as much"
    assert [(one.claim.against, one.remark) for one in found[:2]] == [("none", remark), ("se", "")]
    assert claims(made, found)[0].endswith(f"intervals; {remark}).")
    assert drawn(found).headings[0][1] == "see text"
    assert [one.remark for one in differences(tables.paper_tables(recorded))] == [""] * 6


@pytest.mark.parametrize(
    ("shift", "doubt"),
    [
        (0.05, " This difference may be chance."),
        (0.4, " Beside all other comparisons this difference may be chance."),
        (2.0, ""),
    ],
)
def test_a_mean_that_would_not_hold_beside_all_others_is_doubted(shift, doubt):
    none = [7.4, 6.8, 7.1]
    recorded = [
        r
        for network in ("resnet20", "resnet32", "resnet56")
        for kind, lower in (("none", 0.0), ("mssar", shift))
        for r in some([error - lower for error in none], network=network, recalibration=kind)
    ]
    made = tables.paper_tables(recorded)
    found = differences(made)
    said = claims(made, found)[0]
    assert said.endswith(f"points lower than without recalibration (95\u00a0% intervals).{doubt}")
    assert (found[0].claim.p < 0.05 / 4) == (not doubt)
    assert (found[0].claim.p < 0.05) == (shift > 0.1)


def test_a_mean_may_be_beyond_chance_where_no_network_is():
    alone = [[7.4, 6.8, 7.1], [6.4, 7.0, 6.7]]
    recorded = [
        r
        for network in ("resnet20", "resnet32", "resnet56")
        for kind, errors in zip(("none", "mssar"), alone, strict=True)
        for r in some(errors, network=network, recalibration=kind)
    ]
    made = tables.paper_tables(recorded)
    found = differences(made)
    assert [one.claim.verdict for one in found] == ["holds", "none", "none", "none"]
    assert claims(made, found)[1:] == [
        "Between MS-SAR and the others no difference of one network alone is beyond chance."
    ]
    single = tables.paper_tables(recorded[:6])
    assert claims(single, differences(single)) == [
        "Between MS-SAR and the others no difference is beyond chance."
    ]
