"""What pages say of single scales and of all of them, against the records."""

from statistics import fmean, median, stdev

import pytest
from reproduced import RECORDS, published, recorded
from test_results import PAGES, ROOT

from mssar.lab.experiments import paper
from mssar.lab.experiments.plan import plan_for
from mssar.lab.records import Record
from mssar.lab.report import build
from mssar.lab.report.collect import collect
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus
from mssar.lab.report.welch import margin

CELL = "cifar100"


def runs(*scales: int) -> list[Record]:
    """Of ResNet-56 on CIFAR-100; without any, without recalibration. One scale alone is SE."""
    if scales == (1,):
        return recorded("resnet56", "se", CELL)
    kind = "mssar" if scales else "none"
    return recorded("resnet56", kind, CELL, scales=scales or (1, 2, 4))


def papers(*scales: int) -> tuple[float, float]:
    """Its mean and its standard deviation."""
    (row,) = (
        row
        for row in paper.TABLE4
        if row.network == "resnet56" and tuple(row.options.get("scales", ())) == scales
    )
    return row.errors[CELL], row.spread[CELL]


def told(gain: float, margin: float) -> str:
    return plus_minus(gain, margin).replace("-", "\N{MINUS SIGN}")


def test_what_is_said_of_one_scale_alone_follows_from_the_records():
    readme, page = ((ROOT / name).read_text() for name in PAGES[:2])
    singles = [runs(k) for k in (1, 2, 4)]
    made = [claim("none", some, runs(), None) for some in singles]
    assert {one.verdict for one in made} == {"none"}
    one, two, four = (told(each.gain, each.margin) for each in made)
    assert f"{one} points with scale 1, {two} with 2 and {four} with 4, where the paper" in readme
    gains = [papers()[0] - papers(k)[0] for k in (1, 2, 4)]
    assert "In the paper each gains, by {:.2f}, {:.2f} and {:.2f}.".format(*gains) in page
    assert f"where the paper has {min(gains):.1f} to {max(gains):.1f}." in readme
    main = published(paper.TABLE3, "resnet56", "none", CELL)
    assert f"which has {papers()[0]} without recalibration; with [the {main} of its ma" in page
    assert f"each would gain {papers()[0] - main:.2f} less." in page
    elsewhere = [
        ("resnet56", "cifar10"),
        ("resnet32", "cifar10"),
        ("resnet32", CELL),
        ("resnet20", CELL),
    ]
    for network, dataset in elsewhere:  # "in ResNet-56 on CIFAR-10, and in the smaller networks"
        pair = (recorded(network, kind, dataset) for kind in ("se", "none"))
        assert claim("none", *pair, None).verdict == "holds"
    above = []
    for k, some in zip((1, 2, 4), singles, strict=True):
        errors, (theirs, spread) = [r.error for r in some], papers(k)
        above.append((fmean(errors) - theirs, margin((stdev(errors), len(errors)), (spread, 3))))
    assert [gap > wide for gap, wide in above] == [True, False, True]
    one, two, four = (f"{gap:.2f} ± {wide:.2f}" for gap, wide in above)
    assert f"scales 1 and 4 beyond chance, by {one} and {four} points" in page
    assert f"Of scale 2 the seeds lie so far apart that little can be said ({two})" in page


def test_what_is_said_of_all_three_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    one, two, four = (claim("", runs(1, 2, 4), runs(k), None) for k in (1, 2, 4))
    assert [made.verdict for made in (one, two, four)] == ["holds", "none", "holds"]
    assert f"is {told(one.gain, one.margin)} points lower than with scale 1 alone" in page
    assert f"and {told(four.gain, four.margin)} lower than with scale 4 alone" in page
    assert f"Against scale 2 alone it is {told(two.gain, two.margin)}, which may be ch" in page
    narrow = recorded("resnet56", "mssar", CELL, reduction=3)
    wide, over_none = claim("", runs(1, 2, 4), narrow, None), claim("", narrow, runs(), None)
    assert over_none.verdict == "holds"  # "the narrow layers have the gain"
    assert f"({told(wide.gain, wide.margin)} here, which says little;" in page
    all_pairs = page.partition("The mean of the four is ")[2].partition(" points")[0]
    assert f"they are worse by {all_pairs})" in page
    assert papers(2, 4)[0] > max(papers(2)[0], papers(4)[0])  # "behind either of them"
    assert papers()[0] - papers(2)[0] > (papers()[0] - papers(1, 2, 4)[0]) / 2  # "most of"
    small = claim("", *(recorded("resnet20", kind, CELL) for kind in ("mssar", "none")), None)
    lines = page.partition("<!-- results: differences -->")[2].partition("<!-- end")[0]
    before, more = lines.count("chance |"), 5  # 2 and 4 each against none and three; narrow
    level = 0.05 / (before + more)
    assert before == 28
    assert "These are five comparisons more than those" in page
    assert f"If all {before + more} were to hold at once (p below {level:.2g})" in page
    assert four.p < level < small.p
    assert f"three scales against scale 4 alone would ({four.p:.2g})" in page
    assert f"MS-SAR against none just would no longer ({small.p:.2g})" in page


def test_the_figure_has_every_cell():
    drawn = (ROOT / "docs" / "assets" / "scales.svg").read_text()
    cells = {", ".join(map(str, k)) or "none": runs(*k) for k in ((), (1,), (2,), (4,), (1, 2, 4))}
    cells["1, 2, 4 narrow"] = recorded("resnet56", "mssar", CELL, reduction=3)
    for name, some in cells.items():
        errors = [r.error for r in some]
        assert f">{plus_minus(fmean(errors), stdev(errors))}<" in drawn
        assert f">{name}<" in drawn


def test_layers_of_one_scale_and_of_three_are_of_one_size():
    """ "About the same number of parameters"."""
    sizes = [runs(*scales)[0].params for scales in ((1,), (2,), (4,), (1, 2, 4))]
    assert max(sizes) / min(sizes) == pytest.approx(1, abs=0.002)


def test_what_is_said_of_how_they_were_trained_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()

    def commits(*some: Record) -> set[str]:
        return {record.code["commit"][:7] for record in some}

    first = commits(*runs(), *runs(1, 2, 4))
    second = commits(*runs(1), *recorded("resnet56", "mssar", CELL, reduction=3))
    made = [*runs(2), *runs(4)]
    for found in (first, second, commits(*made)):
        assert len(found) == 1
    told = (first.pop(), second.pop(), commits(*made).pop())
    assert (
        "by commit `{}`, narrow and scale 1 by `{}`, scales 2 and 4 by `{}`".format(*told) in page
    )
    for record in made:
        assert (record.code["changed"], record.interruptions) == (False, 1)
        assert record.command == (
            "mssar reproduce table4 --nets resnet56 --datasets cifar100 --fleet 9 --stack 3"
        )
        assert "earlier" not in record.environment  # "on the same machine"
        assert (record.execution["stacked"], record.execution["compile"]) == (3, True)
        assert record.execution["together"] == 10
        seconds = [epoch.seconds for epoch in record.epochs]
        assert round(median(seconds[14:]), 1) == 8.0  # nine at once
        assert seconds[11] / median(seconds[14:]) > 1.2  # twelve; stopped in epoch 13
    shares = fmean(record.seconds / 10 for record in made)
    right = fmean(
        sum(e.seconds for e in record.epochs[:12]) / 12
        + sum(e.seconds for e in record.epochs[12:]) / 9
        for record in made
    )
    assert f"have {shares:.0f} s each by their records, which count ten runs at once" in page
    assert abs(right - 144) < 1.5
    assert "so about 144 s is right" in page


def test_narrow_rows_are_left_as_the_page_says():
    """Nine runs with two scales, then 18 with narrow layers."""
    found = plan_for(["table4"], RECORDS, hardware="", nets=["resnet56"], datasets=[CELL])
    wide = [run.options.get("reduction") == 1 for run in found.missing]
    assert (wide.count(True), wide.count(False)) == (9, 18)
    page = (ROOT / "docs" / "results.md").read_text()
    assert "nine runs with two scales, then 18 with narrow layers" in page


def test_the_number_of_comparisons_is_that_of_the_page():
    found = build.reproduction(collect([ROOT / "records"])).findings
    (said,) = (one for one in found if "comparisons" in one)
    assert said.startswith("This page makes 30 comparisons.")
    assert (
        "(The *Reproduction* page makes 30 comparisons"
        in (ROOT / "docs" / "results.md").read_text()
    )
