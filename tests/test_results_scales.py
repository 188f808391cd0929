"""What pages say of single scales and of all of them, against the records."""

from statistics import fmean, stdev

import pytest
from reproduced import RECORDS, recorded
from test_results import PAGES, ROOT

from mssar.lab.experiments import paper
from mssar.lab.records import Record
from mssar.lab.report import build
from mssar.lab.report.collect import collect
from mssar.lab.report.groups import claim, judged, side
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
    mean = judged("none", None, *((side(some), side(runs())) for some in singles))
    said = told(mean.gain, mean.margin)
    assert mean.verdict == "none"
    assert f"in the mean of the three {said} points over no recalibration" in page
    assert f"(in the mean {said} points), where the paper has 0.4 to 1.1" in readme
    for some in singles:
        assert claim("none", some, runs(), None).verdict == "none"
    gains = [papers()[0] - papers(k)[0] for k in (1, 2, 4)]
    assert "by {:.2f}, {:.2f} and {:.2f}.".format(*gains) in page
    assert (f"{min(gains):.1f}", f"{max(gains):.1f}") == ("0.4", "1.1")
    above = []
    for k, some in zip((1, 2, 4), singles, strict=True):
        errors, (theirs, spread) = [r.error for r in some], papers(k)
        above.append((fmean(errors) - theirs, margin((stdev(errors), len(errors)), (spread, 3))))
    assert [gap > wide for gap, wide in above] == [True, False, True]
    one, two, four = (f"{gap:.2f} ± {wide:.2f}" for gap, wide in above)
    assert f"scales 1 and 4 beyond chance, by {one} and {four} points" in page
    assert f"the seeds of scale 2 lie far apart ({two})" in page


def test_what_is_said_of_all_three_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    one, two, four = (claim("", runs(1, 2, 4), runs(k), None) for k in (1, 2, 4))
    assert [made.verdict for made in (one, two, four)] == ["holds", "none", "holds"]
    assert f"is {told(one.gain, one.margin)} points lower than with scale 1 alone" in page
    assert f"and {told(four.gain, four.margin)} lower than with scale 4 alone" in page
    assert f"Against scale 2 alone it is {told(two.gain, two.margin)}, which may be ch" in page
    small = claim("", *(recorded("resnet20", kind, CELL) for kind in ("mssar", "none")), None)
    level = 0.05 / 33
    assert four.p < level < small.p
    assert (f"{level:.2g}", f"{four.p:.2g}", f"{small.p:.2g}") == ("0.0015", "0.0014", "0.0016")
    assert "(p below 0.0015), three scales against scale 4 alone would (0.0014)" in page
    assert "MS-SAR against none just would no longer (0.0016)" in page


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


def test_what_is_said_of_how_single_scales_were_trained_follows_from_the_records():
    made = [r for r in RECORDS if tuple(r.run["options"].get("scales", ())) in ((2,), (4,))]
    assert len(made) == 6
    for record in made:
        assert record.code["commit"].startswith("65f0197")
        assert (record.code["changed"], record.interruptions) == (False, 1)
        assert record.command == (
            "mssar reproduce table4 --nets resnet56 --datasets cifar100 --fleet 9 --stack 3"
        )
        assert (record.execution["stacked"], record.execution["compile"]) == (3, True)
        assert round(record.seconds / record.execution["together"]) in (133, 134, 135)
    assert all("earlier" not in record.environment for record in made)  # the same machine


def test_the_number_of_comparisons_is_that_of_the_page():
    found = build.reproduction(collect([ROOT / "records"])).findings
    (said,) = (one for one in found if "comparisons" in one)
    assert said.startswith("This page makes 30 comparisons.")
    assert (
        "(The *Reproduction* page makes 30 comparisons"
        in (ROOT / "docs" / "results.md").read_text()
    )
