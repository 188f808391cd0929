"""What README and results say in sentences of the paper's tables, against the records."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import fmean, median, stdev

from reproduced import NETWORKS, PAIRS, RECORDS, mean_gain, published, recorded
from test_results import PAGES, ROOT

from mssar.lab.experiments import paper
from mssar.lab.records import Record
from mssar.lab.report.groups import claim, judged, side
from mssar.lab.report.phrases import asset, plus_minus
from mssar.lab.report.tables import paper_tables
from mssar.lab.report.welch import margin, p_value

KINDS, DATA = ("none", "mssar"), ("cifar10", "cifar100")
Choice = Callable[[str, str, str], list[Record]]  # of the records of a cell


def test_what_is_said_of_the_tables_follows_from_the_records():
    """Numbers in sentences, and what the pictures' descriptions say."""
    readme, page = ((ROOT / name).read_text() for name in PAGES[:2])

    def errors(*cell: str) -> list[float]:
        return [r.error for r in recorded(*cell)]

    def gain(network: str, dataset: str = "cifar100"):
        ours, none = (recorded(network, kind, dataset) for kind in ("mssar", "none"))
        return claim("none", ours, none, None)

    small, large, ten = gain("resnet20"), gain("resnet56"), gain("resnet56", "cifar10")
    assert (small.verdict, large.verdict, ten.verdict) == ("holds", "holds", "holds")
    told = [plus_minus(one.gain, one.margin) for one in (large, ten)]
    assert f"the error by {told[0]} points on CIFAR-100 and by {told[1]} on CIFAR-10" in readme
    assert f"In ResNet-56 it gains {large.gain:.2f} points on CIFAR-100, which is what the" in page
    assert f"and {ten.gain:.2f} on CIFAR-10, where the paper's 0.93 lies in our interval" in page
    assert ten.gain - ten.margin < 0.93 < ten.gain + ten.margin
    assert f"In ResNet-20 on CIFAR-100 it gains {small.gain:.2f}, which is more" in page

    cell = ("resnet56", "none", "cifar100")
    main, scales = (published(table, *cell) for table in (paper.TABLE3, paper.TABLE4))
    ours = published(paper.TABLE3, "resnet56", "mssar", "cifar100")
    less = [published(paper.TABLE3, "resnet56", kind, "cifar10") for kind in ("none", "mssar")]
    assert f"the paper reports {main - ours:.2f} and {less[0] - less[1]:.2f}." in readme
    assert round(main - ours, 2) == round(large.gain, 2)
    mean, spread = fmean(errors(*cell)), stdev(errors(*cell))
    assert f"{scales} ± 0.14, in its table of scales, where the main table says {main}." in page
    assert f"Our {mean:.2f} ± {spread:.2f} is {mean - scales:.1f} points above that" in page
    assert mean - scales < margin((spread, len(errors(*cell))), (0.14, 3))
    assert f"With {scales} the paper's own gain would be {scales - ours:.2f} points" in page
    assert scales - ours < large.gain + large.margin
    assert published(paper.TABLE3, "resnet32", "mssar", "cifar100") == scales
    theirs = errors("resnet56", "mssar", "cifar100")
    over, wide = fmean(theirs) - ours, margin((stdev(theirs), len(theirs)), (0.21, 3))
    assert f"With MS-SAR both tables say {ours}, ± 0.21; ours is higher by " in page
    assert f"by {over:.2f} ± {wide:.2f}, Welch's interval" in page
    assert round(over, 1) == round(mean - main, 1) == 0.5
    assert "is 0.5 points above the paper's main table, without recalibration and with" in page
    assert f"is only {mean - scales:.1f} or {mean - main:.1f} points worse" in page
    assert f"two numbers for one network are {scales - main:.1f} points apart" in page
    small_gap = fmean(errors("resnet20", "none", "cifar100")) - 31.87
    assert f"on CIFAR-100 it is {small_gap:.1f} points worse than the paper" in page

    six = recorded("resnet56", "none", "cifar100") + recorded("resnet56", "mssar", "cifar100")
    assert {(r.execution["together"], r.execution["stacked"]) for r in six} == {(6, 3)}
    for kind in (
        "none",
        "mssar",
    ):  # seed 0: "the lowest error of the three", "second lowest of four"
        for place, dataset in ((0, "cifar100"), (1, "cifar10")):
            found = sorted(recorded("resnet56", kind, dataset), key=lambda r: r.error)
            assert (found[place].run["seed"], len(found)) == (0, 3 + place)
        last = 1 if kind == "none" else 2  # "the second without and the highest with MS-SAR"
        for place, dataset in ((0, "cifar100"), (last, "cifar10")):
            found = sorted(recorded("resnet20", kind, dataset), key=lambda r: r.error)
            assert (found[place].run["seed"], len(found)) == (0, 3)
    eight = [r for kind in ("none", "mssar") for r in recorded("resnet56", kind, "cifar10")]
    assert {(r.execution["together"], r.execution["stacked"]) for r in eight} == {(8, 4)}

    (said,) = re.findall(r"Test errors over 160 epochs, of .*?[.]", page)
    found = {
        (network, dataset, ours, other): claim(
            other, *(recorded(network, kind, dataset) for kind in (ours, other)), None
        ).verdict
        for network, dataset in product(NETWORKS, ("cifar10", "cifar100"))
        for ours, other in PAIRS
    }
    for network in NETWORKS:
        assert found[network, "cifar100", "mssar", "none"] == "holds"
        over = "none" if network == "resnet32" else "holds"
        assert found[network, "cifar100", "mssar", "se"] == over
    assert "on CIFAR-100 MS-SAR ends below none and SE, in ResNet-32 not beyond chan" in said
    for network in NETWORKS:
        assert found[network, "cifar10", "mssar", "se"] == "none"
        for ours in ("mssar", "se"):
            over = "none" if network == "resnet20" else "holds"
            assert found[network, "cifar10", ours, "none"] == over
    assert "on CIFAR-10 it ends level with SE, within chance, and in ResNet-32 and Res" in said
    assert said.endswith("and in ResNet-32 and ResNet-56 both end below none.")
    for described in (readme, page):  # with the means' verdicts, which are tested below
        assert (
            "against none all intervals exclude zero but that of ResNet-20 on CIFAR-10" in described
        )
        assert "mean on CIFAR-100 do, and that of the mean on CIFAR-10.](" in described


def test_what_is_said_of_resnet32_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    gains = []
    for dataset in ("cifar100", "cifar10"):
        one = claim("", *(recorded("resnet32", kind, dataset) for kind in ("mssar", "none")), None)
        cells = (published(paper.TABLE3, "resnet32", kind, dataset) for kind in ("none", "mssar"))
        less = next(cells) - next(cells)
        assert abs(one.gain - less) < one.margin
        gains.append((one.gain, less))
    (hundred, theirs), (ten, less) = gains
    assert f"In ResNet-32 it gains {hundred:.2f} and {ten:.2f}; the paper's {theirs:.2f} an" in page
    assert f"{theirs:.2f} and {less:.2f} lie in our intervals, {less:.2f} at the very end" in page
    over = claim("", *(recorded("resnet32", kind, "cifar100") for kind in ("mssar", "se")), None)
    assert over.verdict == "none"
    assert f"in ResNet-32 {plus_minus(over.gain, over.margin)}, which may be chance" in page

    def above(network: str, kind: str, dataset: str) -> str:
        found = fmean(r.error for r in recorded(network, kind, dataset))
        return f"{found - published(paper.TABLE3, network, kind, dataset):.1f}"

    ours = [above("resnet32", "mssar", dataset) for dataset in ("cifar10", "cifar100")]
    assert f"with MS-SAR is {ours[0]} points above the paper on CIFAR-10 and {ours[1]} on" in page
    bare = [above("resnet32", "none", dataset) for dataset in ("cifar10", "cifar100")]
    assert (
        f"it is {bare[0].lstrip('-')} points below the paper on CIFAR-10 and {bare[1]} abo" in page
    )
    assert bare[0].startswith("-")
    of_all = [[above(network, k, "cifar100") for network in NETWORKS] for k in ("none", "mssar")]
    said = "by {}, {} and {} points, with MS-SAR by {}, {} and {}.".format(*of_all[0], *of_all[1])
    assert f"without recalibration {said.replace(' -', ' −')}" in page
    on_ten = [float(above(n, k, "cifar10")) for n, k in product(NETWORKS, ("none", "mssar"))]
    assert max(map(abs, on_ten)) <= 0.3  # "within 0.3 points … some above and some below"
    assert min(on_ten) < 0 < max(on_ten)
    assert max(float(above(n, "none", "cifar10")) for n in NETWORKS) < 0.1
    signs = [float(gap) > 0 for some in of_all for gap in some]
    assert signs == [True, True, True, False, True, True]  # "five of six errors are above"
    small = [above("resnet20", kind, "cifar10") for kind in ("mssar", "none")]
    assert (*small, of_all[1][0]) == ("-0.1", "-0.3", "-0.2")  # "0.1 to 0.2 points below"; "0.3"
    stopped = {
        (r.run["recalibration"], r.interruptions, r.code["commit"][:7], r.code["changed"])
        for r in RECORDS
        if r.run["network"] == "resnet32"
    }
    assert stopped == {(kind, 1, "9c8354d", False) for kind in ("none", "se", "mssar")}


def test_figures_have_the_colours_of_the_page_and_say_how_many_runs():
    drawn = (ROOT / "docs" / "assets" / "courses.svg").read_text()
    hues = [re.findall(rf"--{k}: (#\w+);", asset("page.css"))[0] for k in ("none", "se", "mssar")]
    used = set(re.findall(r"stroke: (#\w{6})", drawn)) - {"#000000", "#ffffff"}
    assert used == set(hues)
    for network, dataset in product(NETWORKS, ("cifar10", "cifar100")):
        for kind, name in (("none", "none"), ("se", "SE"), ("mssar", "MS-SAR")):
            found = [r.error for r in recorded(network, kind, dataset)]
            assert f">{name} {fmean(found):.2f} (n={len(found)})<" in drawn
    gains = (ROOT / "docs" / "assets" / "gains.svg").read_text()
    for dataset, other in product(("cifar10", "cifar100"), ("none", "se")):
        made = [
            claim("", *(recorded(network, kind, dataset) for kind in ("mssar", other)), None)
            for network in NETWORKS
        ]
        for one in (*made, mean_gain("mssar", other, dataset)):
            assert f">{plus_minus(one.gain, one.margin)}<" in gains
    assert {hues[0], hues[1]} < set(re.findall(r"(?:stroke|fill): (#\w{6})", gains))
    for figure in (drawn, gains):  # on a phone 400 pixels wide, and letters have nine or more
        (wide,) = re.findall(r'viewBox="0 0 ([\d.]+) ', figure)
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", figure)]
        sizes += [float(size) for size in re.findall(r"font: ([\d.]+)px", figure)]
        assert min(sizes) * 400 / float(wide) > 9


def test_what_is_said_of_se_and_of_the_width_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    for dataset, near, far in (("cifar10", 0.06, "better"), ("cifar100", 0.15, "worse")):
        none, se, ours = (recorded("resnet56", kind, dataset) for kind in ("none", "se", "mssar"))
        over, before = claim("", ours, se, None), claim("", se, none, None)
        (row,) = (r for r in paper.TABLE4 if r.network == "resnet56" and
                  r.options.get("scales") == (1,))  # fmt: skip
        theirs, errors = row.errors[dataset], [r.error for r in se]
        wide = margin((stdev(errors), len(errors)), (near, 3))
        off = abs(fmean(errors) - theirs)
        assert off > wide
        assert f"{off:.2f} ± {wide:.2f} {'points ' * (far == 'better')}{far} than" in page
        gained = theirs - published(paper.TABLE3, "resnet56", "mssar", dataset)
        assert f"The paper has {gained:.2f}" in page
        told = plus_minus(over.gain, over.margin)
        if dataset == "cifar100":
            assert (over.verdict, before.verdict) == ("holds", "none")
            assert f"In ResNet-56 it is {over.gain:.2f} points. There SE" in page
            said = plus_minus(before.gain, before.margin).replace("-", "−")
            assert f"that we could see ({said})" in page
            small = claim("", *(recorded("resnet20", k, dataset) for k in ("mssar", "se")), None)
            assert f"In ResNet-20 it is {small.gain:.2f} points" in page
        else:
            assert (over.verdict, before.verdict) == ("none", "holds")
            ten = claim("", ours, none, None)
            assert f"SE gains {before.gain:.2f} points and MS-SAR {ten.gain:.2f};" in page
            assert f"between them {told}." in page
            assert over.gain + over.margin < gained  # "outside our interval"
    lower = []
    for network, dataset in product(("resnet20", "resnet56"), ("cifar10", "cifar100")):
        narrow, ours = (
            fmean(r.error for r in recorded(network, "mssar", dataset, reduction=reduction))
            for reduction in (3, 1)
        )
        lower.append(round(narrow - ours, 1))
        theirs = published(paper.TABLE3, network, "mssar", dataset)
        assert narrow - theirs > abs(ours - theirs)  # "further"
    assert (min(lower), max(lower)) == (0.1, 0.6)
    for network in ("resnet20", "resnet32"):  # "SE fits the training set best", beyond chance
        fitted = {
            kind: [
                replace(r, error=r.epochs[-1].train_error)
                for r in recorded(network, kind, "cifar100")
            ]
            for kind in ("none", "se", "mssar")
        }
        for other in ("none", "mssar"):
            assert claim("", fitted["se"], fitted[other], None).verdict == "holds"


def test_records_come_from_clean_commits_but_for_those_that_the_page_names():
    page = (ROOT / "docs" / "results.md").read_text()
    changed = {r.id for r in RECORDS if r.code["changed"] is not False}
    shown = {run for table in paper_tables(RECORDS) for row in table.rows for run in row.runs}
    assert not changed & shown
    assert len(changed) == 4
    assert "All that count come from clean commits." in page
    again = [recorded("resnet20", kind, name)[:2] for kind, name in product(KINDS, DATA)]
    assert {r.code["commit"][:7] for some in again for r in some} == {"c2d8267"}


def everything(network: str, kind: str, dataset: str) -> list[Record]:
    """Both records of what was trained twice."""
    counts = recorded(network, kind, dataset)
    return [r for r in RECORDS if any(r.run == one.run for one in counts)]


def earlier(network: str, kind: str, dataset: str) -> list[Record]:
    """As the page said before they were trained again."""
    found: dict[int, Record] = {}
    for record in everything(network, kind, dataset):
        before = found.setdefault(record.run["seed"], record)
        if record.finished < before.finished:
            found[record.run["seed"]] = record
    return list(found.values())


def test_what_is_said_of_runs_that_were_trained_twice_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()

    def told(choose: Choice, other: str, *nets: str) -> list[str]:
        found = [
            judged(
                "", None,
                *(tuple(side(choose(net, kind, d)) for kind in ("mssar", other)) for net in nets),
            )
            for d in ("cifar100", "cifar10")
        ]  # fmt: skip
        return [plus_minus(one.gain, one.margin) for one in found]

    a, b = told(earlier, "none", "resnet20")
    c, d = told(earlier, "none", *NETWORKS)
    e, f = told(earlier, "se", *NETWORKS)
    assert f"instead, MS-SAR gained {a} points on CIFAR-100 and {b} on CIFAR-10 in ResNet" in page
    assert (
        f"and in the mean of three networks {c} and {d}; over SE in the mean {e} and {f}." in page
    )
    assert f"with [their earlier trainings](#provenance) it was {f}, with both" in page
    a, b = told(everything, "none", "resnet20")
    c, d = told(everything, "none", *NETWORKS)
    e, f = told(everything, "se", *NETWORKS)
    assert f"as five runs, it is {a} and {b}, {c} and {d}; over SE {e} and {f}." in page
    assert {len(everything("resnet20", k, d)) for k, d in product(KINDS, DATA)} == {5}
    assert f"with both {f}. In ResNet-56" in page
    assert f"five runs each, it is {b}, beyond chance." in page
    three = claim("", *(recorded("resnet20", kind, "cifar10") for kind in ("mssar", "none")), None)
    assert f"may be chance ({plus_minus(three.gain, three.margin)} points)" in page

    def changes(kind: str) -> list[float]:
        return [
            before.error - after.error
            for name in DATA
            for before, after in zip(
                earlier("resnet20", kind, name), recorded("resnet20", kind, name), strict=True
            )
            if before.id != after.id
        ]

    lower = changes("mssar")
    assert f"than before, by {min(lower):.2f} to {max(lower):.2f} points" in page
    assert sorted(change > 0 for change in changes("none")) == [False, False, True, True]
    new = [r for r in recorded("resnet20", "mssar", "cifar100") if r.run["seed"] < 2]
    before, after = (
        [r.error for r in some] for some in (earlier("resnet20", "mssar", "cifar100"), new)
    )
    sides, gap = [(stdev(e), len(e)) for e in (before, after)], fmean(before) - fmean(after)
    said = f"{plus_minus(gap, margin(*sides))} points, p = {p_value(gap, *sides):.2f}"
    assert f"That may be chance (on CIFAR-100 {said})" in page


def test_what_is_said_of_windows_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    ours, theirs = (
        recorded("resnet20", "mssar", "cifar100", strategy=s) for s in ("regional", "sliding")
    )
    errors = [
        plus_minus(fmean(e), stdev(e)) for e in ([r.error for r in s] for s in (ours, theirs))
    ]
    made = claim("", ours, theirs, paper.STRATEGY_GAIN)
    assert made.verdict == "none"
    assert abs(made.gain - paper.STRATEGY_GAIN) < made.margin / 2  # "well within"
    assert f"{errors[0]} % with regions and {errors[1]} % with windows, three seeds each" in page
    assert f"{plus_minus(made.gain, made.margin)} points, which may be chance, and the" in page
    over = claim("", theirs, recorded("resnet20", "none", "cifar100"), None)
    assert over.verdict == "holds"
    assert f"windows gain {plus_minus(over.gain, over.margin)} points." in page
    alone = median(epoch.seconds for r in theirs for epoch in r.epochs[-20:])
    eight = [r for kind, name in product(KINDS, DATA) for r in recorded("resnet20", kind, name)[:2]]
    assert {(r.execution["compile"], r.execution["stacked"]) for r in eight} == {(True, 4)}
    fast = median(epoch.seconds for r in eight for epoch in r.epochs)
    assert f"take {alone:.1f} s an epoch, and eight with regions or without the layer" in page
    assert f"compiled as two stacks, {fast:.1f}." in page


def test_what_is_said_of_other_recipes_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    none, ours = (recorded("resnet20", kind, "cifar100") for kind in KINDS)
    changes = ({"fill": "mean"}, {"decay": "weights"}, {"init": "torch"})
    others = [recorded("resnet20", "none", "cifar100", **change) for change in changes]
    made = [claim("", some, none, None) for some in others]
    assert [one.verdict for one in made] == ["holds", "none", "none"]
    told = [plus_minus(one.gain, one.margin).replace("-", "−") for one in made]
    mean = fmean(r.error for r in others[0])
    assert f"by {told[0]} points (p = {made[0].p:.2f}, one of four such comparisons), to" in page
    far = fmean(r.error for r in none) - 31.87
    said = f"to {mean:.2f} %, which leaves {mean - 31.87:.1f} of the {far:.1f} points to the"
    assert said in page
    assert f"beyond chance: {told[1]} and {told[2]} points." in page
    for some in others:  # "lower than by each of these three variants without it"
        assert claim("", ours, some, None).verdict == "holds"


def test_what_is_said_of_the_networks_on_cifar10_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    wide = []
    for kind, words, spread in (
        ("none", "without recalibration {} where it has {} ± {}", 0.05),
        ("mssar", "with MS-SAR {} where it has {} ± {}", 0.11),
    ):
        found = [r.error for r in recorded("resnet56", kind, "cifar10")]
        theirs = published(paper.TABLE4, "resnet56", kind, "cifar10")
        assert theirs == published(paper.TABLE3, "resnet56", kind, "cifar10")
        assert words.format(plus_minus(fmean(found), stdev(found)), theirs, spread) in page
        wide.append((fmean(found) - theirs, margin((stdev(found), len(found)), (spread, 3))))
    (first, close), (second, near) = wide
    assert f"Both differences, {first + 1e-9:.2f} and {second:.2f} points, are within" in page
    assert f"Welch's interval (± {close:.2f} and {near:.2f}, if" in page
    assert first < close
    assert second < near


def test_what_is_said_of_the_weight_decay_follows_from_the_records():
    readme, page = ((ROOT / name).read_text() for name in PAGES[:2])
    more = recorded("resnet20", "none", "cifar100", weight_decay=5e-4)
    none, ours = (recorded("resnet20", kind, "cifar100") for kind in ("none", "mssar"))
    better, left = claim("", more, none, None), claim("", ours, more, None)
    assert (better.verdict, left.verdict) == ("holds", "none")
    assert f"better by {plus_minus(better.gain, better.margin)} points" in page
    mean = fmean(r.error for r in more)
    assert f"which takes it {31.87 - mean:.1f} points below the paper's 31.87" in page
    assert f"do not take {claim('', ours, none, None).gain:.1f} points for what you would" in page
    both = recorded("resnet20", "mssar", "cifar100", weight_decay=5e-4)
    beside, itself = claim("", both, more, None), claim("", both, ours, None)
    assert (beside.verdict, itself.verdict) == ("none", "none")
    told = plus_minus(beside.gain, beside.margin)
    assert f"MS-SAR's error is lower by {told} points (p = {beside.p:.2f}): about half" in page
    assert f"itself is {plus_minus(itself.gain, itself.margin)} points better with it." in page
    assert f"With it in both, MS-SAR gains {told} points, which may be chance." in readme
    assert f"no difference beyond chance left ({plus_minus(left.gain, left.margin)} points)" in page
    over = claim("", more, recorded("resnet20", "se", "cifar100"), None)
    assert over.verdict == "holds"
    assert f"paper's recipe is {plus_minus(over.gain, over.margin)} points worse than it" in page
    assert f"does as much without the layer (an error of {mean:.2f} %)" in readme
    recipes = [{**rs[0].run["recipe"], "weight_decay": None} for rs in (more, none)]
    assert recipes[0] == recipes[1]  # "otherwise by the same recipe"
