"""What README and results say in sentences of the paper's tables, against the records."""

import re
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev

from reproduced import NETWORKS, PAIRS, README, RECORDS, RESULTS, mean_gain, published, recorded
from test_results import ROOT

from mssar.lab.experiments import paper
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import asset, plus_minus
from mssar.lab.report.tables import paper_tables
from mssar.lab.report.welch import margin

KINDS, DATA = ("none", "mssar"), ("cifar10", "cifar100")


def test_what_is_said_of_the_tables_follows_from_the_records():
    """Numbers in sentences, and what the pictures' descriptions say."""
    readme, page = README, RESULTS

    def errors(*cell: str) -> list[float]:
        return [r.error for r in recorded(*cell)]

    def gain(network: str, dataset: str = "cifar100"):
        ours, none = (recorded(network, kind, dataset) for kind in ("mssar", "none"))
        return claim("none", ours, none, None)

    small, large, ten = gain("resnet20"), gain("resnet56"), gain("resnet56", "cifar10")
    assert (small.verdict, large.verdict, ten.verdict) == ("holds", "holds", "holds")
    told = [plus_minus(one.gain, one.margin) for one in (large, ten)]
    home = (ROOT / "docs" / "index.md").read_text()
    for short in (readme, home):
        assert f"error by {told[0]} points on CIFAR-100 and by {told[1]} on CIFAR-10" in short
    assert "the paper has 1.36 and 0.93." in home
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
    for kind, (place, dataset) in product(KINDS, ((0, "cifar100"), (1, "cifar10"))):
        found = sorted(recorded("resnet56", kind, dataset), key=lambda r: r.error)
        assert (found[place].run["seed"], len(found)) == (0, 3 + place)
    weights = (ROOT / "docs" / "networks.md").read_text()
    assert (
        "in ResNet-56 the lowest of three on CIFAR-100 and the second lowest of four on" in weights
    )
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
    page = RESULTS
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
    ends = [f(some) for some in of_all[::-1] for f in (min, max)]
    said = "**On CIFAR-100 ours are {} to {} points higher** with MS-SAR, and {} to {} without."
    assert said.format(*ends) in page
    assert "without recalibration by {}, {} and {} points, with MS-SAR".format(*of_all[0]) in page
    assert "and {} points, with MS-SAR by {}, {} and {}.".format(of_all[0][2], *of_all[1]) in page
    on_ten = [float(above(n, k, "cifar10")) for n, k in product(NETWORKS, ("none", "mssar"))]
    assert max(map(abs, on_ten)) <= 0.3  # "within 0.3 points … some above and some below"
    assert "Without the layer and with it, **on CIFAR-10 within 0.3 points**." in page
    narrow = {
        d: fmean(r.error for r in recorded("resnet56", "mssar", d, reduction=3))
        - published(paper.TABLE3, "resnet56", "mssar", d)
        for d in DATA
    }
    (scale,) = (
        r for r in paper.TABLE4 if r.network == "resnet56" and r.options.get("scales") == (1,)
    )
    se = [fmean(r.error for r in recorded("resnet56", "se", d)) - scale.errors[d] for d in DATA]
    far = sorted(abs(gap) for gap in (*narrow.values(), *se))
    assert f"so is `reduction=3`, by {far[0]:.1f} to {far[-1]:.1f}. |" in page
    assert min(on_ten) < 0 < max(on_ten)
    assert max(float(above(n, "none", "cifar10")) for n in NETWORKS) < 0.1
    signs = [float(gap) > 0 for some in of_all for gap in some]
    assert all(signs)
    assert "on CIFAR-100 all six of our errors are above the paper's main table" in page
    assert "since there all six errors are above the paper's." in page
    small = [above("resnet20", kind, "cifar10").lstrip("-") for kind in ("mssar", "none")]
    said = "is {} points below the paper with MS-SAR and {} without recalibration; on CIFAR-100 it"
    assert f"{said.format(*small)} is {of_all[1][0]} above with MS-SAR." in page
    assert f"ResNet-20 on the same images is {of_all[1][0]} points from the paper." in page
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
    page = RESULTS
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
    assert f"in all four pairs, by {min(lower)} to {max(lower)} points" in page
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
    page = RESULTS
    changed = {r.id for r in RECORDS if r.code["changed"] is not False}
    shown = {run for table in paper_tables(RECORDS) for row in table.rows for run in row.runs}
    assert not changed & shown
    assert len(changed) == 4
    assert "All that count come from clean commits." in page
    for kind, name in product(KINDS, DATA):
        made = "ca6150e" if (kind, name) == ("mssar", "cifar100") else "c2d8267"
        assert {r.code["commit"][:7] for r in recorded("resnet20", kind, name)[:2]} == {made}


def test_what_is_said_of_the_networks_on_cifar10_follows_from_the_records():
    page = RESULTS
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
