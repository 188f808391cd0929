"""What pages say of every combination of scales, against the records."""

import json
from itertools import combinations
from statistics import fmean, median, pstdev, stdev, variance

from reproduced import README, RECORDS, RESULTS, published, recorded
from test_results import ROOT

from mssar.lab.experiments import paper
from mssar.lab.experiments.plan import plan_for
from mssar.lab.records import Record
from mssar.lab.report import welch
from mssar.lab.report.content import Claim
from mssar.lab.report.groups import claim, judged, side
from mssar.lab.report.phrases import plus_minus
from mssar.lab.report.welch import margin

CELL = "cifar100"
SCALES = ((), (1,), (2,), (4,), (1, 2), (1, 4), (2, 4), (1, 2, 4))
FINE = ((2,), (4,), (2, 4))  # without the whole map


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


def compared(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Claim:
    """How much lower the first scales' error is."""
    return claim("", runs(*ours), runs(*theirs), None)


def test_what_is_said_of_gains_over_none_follows_from_the_records():
    readme, page = README, RESULTS
    over = {scales: compared(scales, ()) for scales in SCALES[1:]}
    good = {scales for scales, made in over.items() if made.verdict == "holds"}
    assert good == {scales for scales in SCALES if 1 in scales and len(scales) > 1}
    assert {over[scales].verdict for scales in over.keys() - good} == {"none"}
    ends = [f(over[scales].gain for scales in good) for f in (min, max)]
    assert "gain {:.2f} to {:.2f} points over no recalibration".format(*ends) in page
    short = "by {:.2f} to {:.2f} points; scales 1 and 4 alone gain nothing beyond chance"
    assert short.format(*ends) in page
    two, four, both = (told(over[s].gain, over[s].margin) for s in ((1, 2), (1, 4), (1, 2, 4)))
    assert f"with a finer one: {two} points with 2, {four} with 4, {both} with both." in readme
    for one, other in combinations(good, 2):  # "by no more than chance"
        assert compared(one, other).verdict == "none"
    alone = told(over[2,].gain, over[2,].margin)
    assert f"of 2 alone little can be said ({alone})" in readme
    every = compared((1, 2, 4), (2,))
    assert every.verdict == "none"
    by = told(every.gain, every.margin)
    assert f"({alone}; all three scales are better than it by {by}, which may be chance)" in page
    two, four = (compared((1, 2, 4), scales) for scales in ((1, 2), (1, 4)))
    assert f"by {told(two.gain, two.margin)} than 1 and 2, and by" in page
    assert f"and by {told(four.gain, four.margin)} than 1 and 4. In the paper they are" in page
    theirs = [papers(*scales)[0] - papers(1, 2, 4)[0] for scales in ((1, 2), (1, 4))]
    assert "In the paper they are, by {:.2f} and {:.2f}.".format(*theirs) in page


def added() -> Claim:
    """Scale 1 in addition to finer ones: the mean of three differences."""
    return judged("", None, *((side(runs(1, *fine)), side(runs(*fine))) for fine in FINE))


def interaction() -> tuple[float, float, float]:
    """How much less scale 1 gains alone than beside finer ones, its interval and p."""
    signs = dict.fromkeys(FINE, 1 / 3) | {(1, *fine): -1 / 3 for fine in FINE}
    signs |= {(): -1, (1,): 1}
    errors = {scales: [r.error for r in runs(*scales)] for scales in signs}
    found = sum(weight * fmean(errors[scales]) for scales, weight in signs.items())
    parts = [
        (w * w * variance(errors[k]) / len(errors[k]), len(errors[k])) for k, w in signs.items()
    ]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / (n - 1) for part, n in parts)
    width = welch.quantile(0.975, freedom) * total**0.5
    return found, width, welch._beyond(found / total**0.5, freedom)


def test_what_is_said_of_scale_1_in_addition_follows_from_the_records():
    page = RESULTS
    two, four, mean = compared((1, 2), (2, 4)), compared((1, 4), (2, 4)), added()
    assert {made.verdict for made in (two, four, mean)} == {"holds"}
    assert f"is {told(two.gain, two.margin)} points higher than with 1 and 2, and" in page
    assert f"and {told(four.gain, four.margin)} higher than with 1 and 4, which were tra" in page
    assert f"in addition lowers the error by {told(mean.gain, mean.margin)} points" in page
    two, four, one = compared((1, 2), (1,)), compared((1, 4), (1,)), compared((1,), ())
    assert {made.verdict for made in (two, four)} == {"holds"}
    assert f"scale 2 lowers the error by {told(two.gain, two.margin)} points, scale 4 by" in page
    assert f"scale 4 by {told(four.gain, four.margin)}." in page
    less = told(*interaction()[:2])
    said = f"gains nothing ({told(one.gain, one.margin)}), which is {less} points less than beside"
    assert said in page
    theirs = [papers(*fine)[0] - papers(1, *fine)[0] for fine in FINE]
    said = (
        "scale 1 in addition to them gains {2:.2f}, and to 4 alone {1:.2f}, but to 2 alone {0:.2f}"
    )
    assert said.format(*theirs) in page
    pairs = [papers(*scales)[0] for scales in SCALES if len(scales) == 2]
    assert papers(2, 4)[0] == max(pairs) > max(papers(2)[0], papers(4)[0])


def test_what_is_said_of_the_papers_other_columns_is_theirs():
    page = RESULTS
    cells = {
        (row.network, tuple(row.options.get("scales", ()))): row.errors for row in paper.TABLE4
    }
    dense = {scales: cells["densenet100", scales][CELL] for scales in SCALES if len(scales) == 2}
    assert min(dense, key=dense.get) == (2, 4)
    ten = [cells["resnet56", scales]["cifar10"] for scales in ((2, 4), (1, 2))]
    assert "they are as good as 1 and 2 ({} and {}).".format(*ten) in page
    level = claim("", *(recorded("resnet56", kind, "cifar10") for kind in ("mssar", "se")), None)
    assert level.verdict == "none"  # "gains as much as all three do"


def test_what_is_said_of_the_papers_gains_follows_from_the_records():
    readme, page = README, RESULTS
    bad = ((1,), (2,), (4,), (2, 4))
    gains = [papers()[0] - papers(*scales)[0] for scales in bad]
    said = "scales alone {:.2f}, {:.2f} and {:.2f}, and 2 and 4 together {:.2f}."
    assert said.format(*gains) in page
    others = [gains[0], *gains[2:]]
    assert f"where the paper has {min(others):.1f} to {max(others):.1f};" in readme
    main = published(paper.TABLE3, "resnet56", "none", CELL)
    assert f"which has {papers()[0]} without recalibration; with [the {main} of its ma" in page
    assert f"each would gain {papers()[0] - main:.2f} less." in page
    above = {}
    for scales in SCALES:
        errors, (theirs, spread) = [r.error for r in runs(*scales)], papers(*scales)
        above[scales] = (fmean(errors) - theirs, margin((stdev(errors), len(errors)), (spread, 3)))
    assert [gap > wide for gap, wide in map(above.get, bad)] == [True, False, True, True]
    one, two, four, both = (told(*above[scales]) for scales in bad)
    assert f"scales 1 and 4 beyond chance, by {one} and {four} points" in page
    assert f"and so are 2 and 4 together, by {both}; scale 2 by {two}." in page
    near = [above[scales] for scales in ((1, 2), (1, 4))]
    assert all(abs(gap) < wide for gap, wide in near)
    every = told(*above[1, 2, 4])
    said = "within chance ({} and {}); with all three ours is {} higher."
    assert said.format(*(told(*one) for one in near), every) in page
    elsewhere = [
        ("resnet56", "cifar10"),
        ("resnet32", "cifar10"),
        ("resnet32", CELL),
        ("resnet20", CELL),
    ]
    for network, dataset in elsewhere:  # "in ResNet-56 on CIFAR-10, and in the smaller networks"
        pair = (recorded(network, kind, dataset) for kind in ("se", "none"))
        assert claim("none", *pair, None).verdict == "holds"


def test_what_is_said_of_training_errors_and_widths_follows_from_the_records():
    page = RESULTS
    narrow = recorded("resnet56", "mssar", CELL, reduction=3)
    cells = {scales: runs(*scales) for scales in SCALES} | {"narrow": narrow}
    last = {
        k: f"{fmean(r.epochs[-1].train_error for r in some):.2f} %" for k, some in cells.items()
    }
    assert (
        f"is {last[1,]} with scale 1, {last[1, 2]} with 1 and 2, {last[1, 4]} with 1 and 4" in page
    )
    assert f"and {last[1, 2, 4]} with all three; {last[()]} without recalibration, " in page
    assert f"{last[2,]} with scale 2, {last[4,]} with 4, {last[2, 4]} with 2 and 4, and" in page
    assert f"and {last['narrow']} with narrow layers." in page
    assert len({r.params for scales in SCALES if len(scales) == 2 for r in runs(*scales)}) == 1
    wide = claim("", runs(1, 2, 4), narrow, None)
    assert f"({told(wide.gain, wide.margin)} here, which says little;" in page
    all_pairs = page.partition("The mean of the four is ")[2].partition(" points")[0]
    assert f"they are worse by {all_pairs})" in page


def test_what_is_said_of_their_number_follows_from_the_records():
    page = RESULTS
    lines = page.partition("<!-- results: differences -->")[2].partition("<!-- end")[0]
    before = lines.count("chance |")
    assert before == 28
    narrow = recorded("resnet56", "mssar", CELL, reduction=3)
    more = [claim("", narrow, runs(), None)]
    for scales in SCALES:
        if scales not in ((), (1,), (1, 2, 4)):  # these are above
            more += [compared(scales, ()), compared((1, 2, 4), scales)]
    more += [compared((1, 2), (2, 4)), compared((1, 4), (1,))]
    more += [fine := compared((1, 4), (2, 4)), coarse := compared((1, 2), (1,)), mean := added()]
    chances = [made.p for made in more] + [interaction()[2]]
    level = 0.05 / (before + len(chances))
    assert f"These are {len(chances)} comparisons more than those" in page
    assert f"If all {before + len(chances)} were to hold at once (p below {level:.2g})" in page
    beyond = [p for p in chances if p < level]
    assert beyond == [fine.p, coarse.p, mean.p, chances[-1]]
    assert {f"{p:.1g}" for p in beyond[:3]} == {"0.0006"}
    assert "in addition in the mean (p = 0.0006 each), and how much less it gains alone" in page
    assert f"gains alone ({chances[-1]:.1g})." in page
    small, middle = (
        claim("", *(recorded(network, kind, CELL) for kind in ("mssar", "none")), None).p
        for network in ("resnet20", "resnet32")
    )
    assert level < middle < small
    said = f"none in ResNet-32 on CIFAR-100 has {middle:.2g}, which just would no longer."
    assert said in page


def test_the_figure_has_every_cell():
    drawn = (ROOT / "docs" / "assets" / "scales.svg").read_text()
    cells = {", ".join(map(str, scales)) or "none": runs(*scales) for scales in SCALES}
    cells["1, 2, 4 narrow"] = recorded("resnet56", "mssar", CELL, reduction=3)
    for name, some in cells.items():
        errors = [r.error for r in some]
        assert f">{plus_minus(fmean(errors), stdev(errors))}<" in drawn
        assert f">{name}<" in drawn


def test_what_is_said_of_how_they_were_trained_follows_from_the_records():
    page = RESULTS

    def commits(*some: Record) -> set[str]:
        return {record.code["commit"][:7] for record in some}

    first = commits(*runs(), *runs(1, 2, 4))
    second = commits(*runs(1), *recorded("resnet56", "mssar", CELL, reduction=3))
    made = [*runs(2), *runs(4)]
    pairs = [record for scales in SCALES if len(scales) == 2 for record in runs(*scales)]
    every = (first, second, commits(*made), commits(*pairs))
    (first,), (second,), (third,), (fourth,) = every
    assert f"by commit `{first}`, narrow and scale 1 by `{second}`, scales 2 and 4 alone by" in page
    assert f"alone by `{third}`, all pairs by `{fourth}`, in one process" in page
    for record in pairs:
        assert (record.code["changed"], record.interruptions) == (False, 0)
        assert (record.execution["stacked"], record.execution["together"]) == (3, 9)
        seconds = [epoch.seconds for epoch in record.epochs]
        assert round(median(seconds[27:]), 1) == 8.1
        assert round(median(seconds[1:27])) == 9
    assert (
        f"have {fmean(r.seconds / 9 for r in pairs):.0f} s each: 8.1 s an epoch, and 9 in" in page
    )
    errors = "{:.2f}, {:.2f} and {:.2f} %".format(*(r.error for r in runs(1, 2)))
    assert [r.run["seed"] for r in runs(1, 2)] == [0, 1, 2]
    assert f"now the same seeds have {errors}." in page
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
    found = plan_for(["table4"], RECORDS, hardware="", nets=["resnet56"], datasets=[CELL])
    assert [run.options["reduction"] for run in found.missing] == [3] * 18
    page = RESULTS
    assert "trains what is missing: 18 runs with narrow layers" in page


def held_lines() -> list[dict]:
    return [json.loads(x) for x in (ROOT / "records/held.ndjson").read_text().splitlines()]


def held() -> dict[str, dict[str, tuple[float, float]]]:
    """By data set and way: how much the error rises, and half the interval's width."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for line in held_lines():
        lost, won, n = line["lost"], line["won"], line["tested"]
        assert (line["trained"], n, line["changed"]) == (5000, 10_000, False)
        each = [1] * lost + [-1] * won + [0] * (n - lost - won)  # images, by what became of them
        interval = 1.96 * pstdev(each) / n**0.5
        of = found.setdefault(line["net"].removeprefix("resnet56-mssar-"), {})
        of[str(line["held"])] = 100 * fmean(each), 100 * interval
    return found


def test_what_is_said_of_scales_that_are_held_follows_from_what_was_measured():
    page = RESULTS
    ten, hundred = held()["cifar10"], held()["cifar100"]
    one, two, four, fine, flat = (
        told(*hundred[way]) for way in ("[1]", "[2]", "[4]", "[2, 4]", "flat")
    )
    assert f"is {one} points higher, with the two finer ones held {fine}, with either" in page
    assert f"either of them alone {two} and {four}." in page
    assert (
        f"it is {told(*ten['[1]'])} with scale 1 held, and {told(*ten['[2, 4]'])} with both" in page
    )
    more = hundred["[1, 2, 4]"][0] - hundred["[1]"][0]
    assert f"holding the finer ones costs {more:.2f} points more on CIFAR-100" in page
    assert f"{flat} points on CIFAR-100, {told(*ten['flat'])} on CIFAR-10." in page
    for of in (ten, hundred):  # "beyond chance"
        assert abs(of["flat"][0]) < of["flat"][1]
        assert of["[1]"][0] > of["[1]"][1]
    assert (
        f"And {sum(hundred['flat']):.2f} points, where the interval ends, would be nearly" in page
    )
    assert 0.4 < sum(hundred["flat"]) / compared((1, 2, 4), ()).gain < 0.5
    se = claim("", *(recorded("resnet56", kind, "cifar10") for kind in ("se", "none")), None)
    assert f"on CIFAR-10 it has ({told(se.gain, se.margin)})." in page
    lines = {
        (line["net"].removeprefix("resnet56-mssar-"), str(line["held"])): line
        for line in held_lines()
    }
    assert len(lines) - 2 == 16  # "sixteen intervals"
    last, all_held = lines[CELL, "flat"], lines[CELL, "[1, 2, 4]"]
    assert f"{last['lost']} of CIFAR-100 are lost by it and {last['won']} won" in page
    none = fmean(r.error for r in runs())
    said = f"the error is {all_held['error']:.2f} % on CIFAR-100, where a network that was trained"
    assert f"{said} without the layer has {none:.2f} %" in page
    losses = [lines[CELL, way]["loss"] for way in ("[4]", "[]")]
    assert "the test loss lower ({:.3f} instead of {:.3f})".format(*losses) in page
    table = page.partition("<!-- results: held -->")[2].partition("<!-- end")[0]
    assert f"| positions | 28.23 | {flat} | 6.19 | {told(*ten['flat'])} |" in table
    assert "| nothing | 27.98 |  | 6.23 |  |" in table
