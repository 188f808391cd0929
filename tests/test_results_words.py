"""What pages say in sentences of results and costs, against the records."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev

from test_results import PAGES, ROOT

from mssar.lab import records, timings
from mssar.lab.experiments import paper
from mssar.lab.report import tables
from mssar.lab.report.content import Claim
from mssar.lab.report.differences import differences
from mssar.lab.report.findings import claims
from mssar.lab.report.groups import claim, judged, side
from mssar.lab.report.phrases import asset, plus_minus
from mssar.lab.report.welch import margin, p_value

RECORDS = records.read(ROOT / "records")
NETWORKS = ("resnet20", "resnet32", "resnet56")
PAIRS = (("se", "none"), ("mssar", "se"), ("mssar", "none"))


def recorded(
    network: str, kind: str, dataset: str, weight_decay: float = 1e-4, reduction: int = 1
) -> list[records.Record]:
    """At the width of the text and by the paper's recipe, where nothing else is said."""
    return [
        r
        for r in RECORDS
        if (r.run["network"], r.run["recalibration"], r.run["dataset"]) == (network, kind, dataset)
        and r.run["options"].get("reduction", 1) == reduction
        and r.run["recipe"]["weight_decay"] == weight_decay
    ]


def mean_gain(ours: str, theirs: str, dataset: str, networks: tuple[str, ...] = NETWORKS) -> Claim:
    pairs = [
        (side(recorded(network, ours, dataset)), side(recorded(network, theirs, dataset)))
        for network in networks
    ]
    return judged(theirs, None, *pairs)


def published(table: tuple, network: str, kind: str, dataset: str) -> float:
    """With all scales."""
    (row,) = (
        row
        for row in table
        if (row.network, row.recalibration) == (network, kind)
        and dict(row.options).get("scales", (1, 2, 4)) == (1, 2, 4)
    )
    return row.errors[dataset]


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
        assert "SE those of ResNet-20, ResNet-56 and the mean on CIFAR-100 do.](" in described


def test_what_is_said_of_the_mean_follows_from_the_records():
    readme, page = ((ROOT / name).read_text() for name in PAGES[:2])
    gains = {
        (*pair, dataset): mean_gain(*pair, dataset)
        for pair, dataset in product(PAIRS, ("cifar10", "cifar100"))
    }
    told = {cell: plus_minus(one.gain, one.margin) for cell, one in gains.items()}
    theirs = {
        dataset: fmean(
            published(paper.TABLE3, network, "none", dataset)
            - published(paper.TABLE3, network, "mssar", dataset)
            for network in NETWORKS
        )
        for dataset in ("cifar10", "cifar100")
    }
    none = told["mssar", "none", "cifar100"], told["mssar", "none", "cifar10"]
    papers = f"{theirs['cifar100']:.2f} and {theirs['cifar10']:.2f}"
    assert f"three networks is {none[0]} and {none[1]}; the paper's {papers}." in readme
    assert f"it gains {none[0]} points on CIFAR-100 and {none[1]} on CIFAR-10. The paper" in page
    assert f"The paper has {papers}. On" in page
    apart = {
        dataset: abs(paper_has - gains["mssar", "none", dataset].gain)
        < gains["mssar", "none", dataset].margin
        for dataset, paper_has in theirs.items()
    }
    assert apart == {"cifar10": True, "cifar100": False}  # "in our interval", "below it"
    larger = [mean_gain("mssar", "none", d, NETWORKS[1:]) for d in ("cifar100", "cifar10")]
    rest = " and ".join(plus_minus(one.gain, one.margin) for one in larger)
    fewer = [
        fmean(
            published(paper.TABLE3, network, "none", dataset)
            - published(paper.TABLE3, network, "mssar", dataset)
            for network in NETWORKS[1:]
        )
        for dataset in ("cifar100", "cifar10")
    ]
    assert abs(fewer[0] - larger[0].gain) < larger[0].margin
    assert fewer[1] - larger[1].gain > larger[1].margin
    assert f"Without ResNet-20 the mean is {rest}." in readme
    papers = f"{fewer[0]:.2f}, inside, and {fewer[1]:.2f}, above"
    assert f"Without ResNet-20 the mean is {rest}, where the paper has {papers}." in page
    over_se = told["mssar", "se", "cifar100"]
    assert f"in the mean {over_se} points on CIFAR-100, where ResNet-32 alone may be" in readme
    smaller = mean_gain("mssar", "se", "cifar100", NETWORKS[:2])
    assert f"(without it {plus_minus(smaller.gain, smaller.margin)})" in readme
    assert f"no difference beyond chance ({told['mssar', 'se', 'cifar10']})" in readme
    assert f"in the mean by {over_se} points. In ResNet-56" in page
    assert f"in the mean {told['mssar', 'se', 'cifar10']} points." in page
    for cell, one in gains.items():
        assert one.verdict == ("none" if cell == ("mssar", "se", "cifar10") else "holds")
    parts = {
        (network, kind): stdev(found) ** 2 / len(found)
        for network, kind in product(NETWORKS, ("none", "mssar"))
        for found in [[r.error for r in recorded(network, kind, "cifar10")]]
    }
    assert round(3 * parts["resnet20", "none"] / sum(parts.values())) == 2  # "two thirds"
    made = tables.paper_tables(RECORDS)
    said = claims(made, differences(made))[1]  # the page's sentence has the caveat
    assert said.startswith("On CIFAR-100 the error with MS-SAR is, in the mean of resnet56, resn")
    assert said.endswith("intervals; resnet20: weight decay alone does as much).")


def test_what_is_said_of_se_by_network_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    told = [mean_gain("se", "none", dataset) for dataset in ("cifar10", "cifar100")]
    alone = [plus_minus(one.gain, one.margin) for one in told]
    assert f"gains {alone[0]} points on CIFAR-10 and {alone[1]} on CIFAR-100, in the mean." in page
    by_network = {
        network: claim("", *(recorded(network, k, "cifar100") for k in ("se", "none")), None).gain
        for network in NETWORKS
    }
    first, second, last = (f"{gain:.2f}".replace("-", "−") for gain in by_network.values())
    assert f"ResNet-20 and ResNet-32 gain {first} and {second}, ResNet-56 {last}," in page
    for network in NETWORKS[:2]:  # a difference of differences: twice their mean, one turned round
        sides = [
            (stdev(r.error for r in runs), len(runs))
            for net in (network, "resnet56")
            for runs in (recorded(net, kind, "cifar100") for kind in ("se", "none"))
        ]
        half = (by_network[network] - by_network["resnet56"]) / 2
        assert f"{p_value(half, *sides):.3f}" == "0.010"
    assert "from either of them it differs with p = 0.010, a comparison" in page
    smaller = mean_gain("mssar", "se", "cifar100", NETWORKS[:2])
    said = plus_minus(smaller.gain, smaller.margin)
    assert f"Without ResNet-56 MS-SAR is better than SE by {said} points." in page


def test_what_is_said_of_other_measures_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()

    def measured(measure: Callable[[records.Record], float], ours: str, dataset: str, *nets: str):
        """Over SE or none, by network or in the mean."""
        return {
            other: judged(
                other,
                None,
                *(
                    tuple(
                        side([replace(r, error=measure(r)) for r in recorded(net, kind, dataset)])
                        for kind in (ours, other)
                    )
                    for net in nets or NETWORKS
                ),
            )
            for other in ("none", "se")
        }

    def loss(record: records.Record) -> float:
        return record.epochs[-1].test_loss

    five = measured(lambda r: r.error5, "mssar", "cifar100")
    none, se = (plus_minus(five[k].gain, five[k].margin) for k in ("none", "se"))
    assert f"top-5 error is {none} points below that without recalibration and {se} bel" in page
    for network in NETWORKS:  # "beyond chance in each of the networks"
        alone = measured(lambda r: r.error5, "mssar", "cifar100", network)
        assert {one.verdict for one in alone.values()} == {"holds"}
    losses = measured(loss, "mssar", "cifar100")
    none, se = (f"{losses[k].gain:.3f} ± {losses[k].margin:.3f}" for k in ("none", "se"))
    assert f"its test loss is {none} and {se} lower." in page
    small = measured(loss, "mssar", "cifar10")["se"]
    told = f"{small.gain:.3f} ± {small.margin:.3f}".replace("-", "−")
    assert f"its test loss is not below SE's ({told})" in page
    pairs = {
        dataset: [
            tuple(side(recorded(net, "mssar", dataset, reduction=wide)) for wide in (1, 3))
            for net in ("resnet20", "resnet56")
        ]
        for dataset in ("cifar10", "cifar100")
    }
    four = judged("", None, *pairs["cifar10"], *pairs["cifar100"])
    two = judged("", None, *pairs["cifar10"])
    said = f"{plus_minus(four.gain, four.margin)} points (p = {four.p:.2f})"
    assert f"The mean of the four is {said}, on CIFAR-10 {plus_minus(two.gain, two.margin)}" in page


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
    assert f"without recalibration {said}" in page
    on_ten = [float(above(n, k, "cifar10")) for n, k in product(NETWORKS, ("none", "mssar"))]
    assert max(map(abs, on_ten)) < 0.3  # "within 0.3 points … some above and some below"
    assert min(on_ten) < 0 < max(on_ten)
    assert max(float(above(n, "none", "cifar10")) for n in NETWORKS) < 0.1
    assert min(float(gap) for some in of_all for gap in some) > 0  # "all six errors are above"
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


def chance(ours: list, theirs: list) -> float:
    """How often Welch's t is so far from 0 by chance."""
    found = claim("", ours, theirs, None).p
    assert found is not None
    return found


def test_what_is_said_of_chance_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    table = page.split("<!-- results: differences -->")[1].split("<!-- end")[0]
    assert table.count("against") == 28
    assert "and this table has 28. Eight differences would also be" in page
    assert f"(Bonferroni, p below {0.05 / 28:.4f})" in page
    found = {}
    for network, dataset in product(NETWORKS, ("cifar10", "cifar100")):
        none, se, ours = (recorded(network, kind, dataset) for kind in ("none", "se", "mssar"))
        narrow = recorded(network, "mssar", dataset, reduction=3)
        pairs = {"se none": (se, none), "ours se": (ours, se), "ours none": (ours, none)}
        pairs |= {"ours narrow": (ours, narrow)} if narrow else {}
        for name, pair in pairs.items():
            found[network, dataset, name] = chance(*pair)
    for dataset, (ours, theirs) in product(("cifar10", "cifar100"), PAIRS):
        name = f"{ours} {theirs}".replace("mssar", "ours")
        found["mean", dataset, name] = mean_gain(ours, theirs, dataset).p
    assert len(found) == 28
    beyond = {cell: f"{p:.1g}" for cell, p in found.items() if p < 0.05 / len(found)}
    assert beyond == {
        ("mean", "cifar100", "ours none"): "2e-08",
        ("mean", "cifar100", "ours se"): "2e-06",
        ("mean", "cifar100", "se none"): "0.0009",
        ("resnet56", "cifar10", "ours none"): "0.0002",
        ("resnet56", "cifar10", "se none"): "0.0008",
        ("resnet56", "cifar100", "ours se"): "0.0008",
        ("resnet32", "cifar100", "ours none"): "0.001",
        ("resnet20", "cifar100", "ours none"): "0.002",
    }
    assert "(MS-SAR against none p = 2·10⁻⁸ and against SE 2·10⁻⁶, SE against none 0.0009)" in page
    small = [f"{found[network, 'cifar100', 'ours none']:.4f}" for network in NETWORKS]
    assert f"in ResNet-20 and ResNet-32 ({small[0]} and {small[1]})" in page
    assert "against SE in ResNet-56 (0.0008); on CIFAR-10 MS-SAR and SE against none in " in page
    assert "in ResNet-56 (0.0002 and 0.0008). MS-SAR" in page
    assert f"in ResNet-56 on CIFAR-100, p = {small[2]}, and in the mean on CIFAR-10, " in page
    assert f"{found['mean', 'cifar10', 'ours none']:.4f}, just miss that" in page
    assert f"which is less certain (p = {found['resnet20', 'cifar100', 'ours se']:.3f})" in page
    assert f"only just (p = {found['resnet56', 'cifar10', 'ours narrow']:.4f})" in page


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
        assert narrow > ours > published(paper.TABLE3, network, "mssar", dataset)  # "further"
    assert (min(lower), max(lower)) == (0.1, 0.4)
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
    changed = [r for r in RECORDS if r.code["changed"] is not False]
    assert {(r.run["network"], r.run["dataset"], r.run["seed"]) for r in changed} == {
        ("resnet20", "cifar10", 0), ("resnet20", "cifar10", 1)
    }  # fmt: skip
    assert {r.run["recalibration"] for r in changed} == {"none", "mssar"}
    assert len(changed) == 4
    assert "All come from clean commits but our first four runs" in page


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
    more = recorded("resnet20", "none", "cifar100", 5e-4)
    none, ours = (recorded("resnet20", kind, "cifar100") for kind in ("none", "mssar"))
    better, left = claim("", more, none, None), claim("", ours, more, None)
    assert (better.verdict, left.verdict) == ("holds", "none")
    assert f"better by {plus_minus(better.gain, better.margin)} points" in page
    mean = fmean(r.error for r in more)
    assert f"which takes it {31.87 - mean:.1f} points below the paper's 31.87" in page
    assert f"no difference beyond chance left ({plus_minus(left.gain, left.margin)} points)" in page
    over = claim("", more, recorded("resnet20", "se", "cifar100"), None)
    assert over.verdict == "holds"
    assert f"paper's recipe is {plus_minus(over.gain, over.margin)} points worse than it" in page
    assert f"does as much without the layer (an error of {mean:.2f} %)" in readme
    recipes = [{**rs[0].run["recipe"], "weight_decay": None} for rs in (more, none)]
    assert recipes[0] == recipes[1]  # "otherwise by the same recipe"


def test_the_demo_leads_with_the_larger_network():
    said = tomllib.loads((ROOT / PAGES[2]).read_text())["demo"]["headline"]
    said = said.replace("\N{NO-BREAK SPACE}", " ")
    assert "ResNet-20" not in said
    for dataset, name in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        (told,) = re.findall(rf"on {name} (.*?) runs", said)
        for kind, words in (("mssar", "with MS-SAR"), ("se", "with SE"), ("none", "without")):
            found = [r.error for r in recorded("resnet56", kind, dataset)]
            assert f"{plus_minus(fmean(found), stdev(found))} % {words}" in told
            assert str(len(found)) in told.split("(")[1]
    lower = {
        (other, dataset)
        for other, dataset in product(("none", "se"), ("cifar10", "cifar100"))
        if claim(
            other,
            *(recorded("resnet56", kind, dataset) for kind in ("mssar", other)),
            None,
        ).verdict
        == "holds"
    }
    assert lower == {("none", "cifar10"), ("none", "cifar100"), ("se", "cifar100")}
    assert "more than chance over none on both, over SE on CIFAR-100 only (95 % interv" in said


def test_what_is_said_of_the_fruit_follows_from_the_records():
    page = " ".join((ROOT / "docs" / "finetune.md").read_text().split())
    found = records.read(ROOT / "records" / "fruit.jsonl")
    kinds = {
        "Anjou": 35, "Cantaloupe": 39, "Conference": 44, "Galia": 32, "Golden Delicious": 45,
        "Granny Smith": 58, "Honeydew": 36, "Kaiser": 29, "Orange": 56, "Pink Lady": 59,
        "Red Delicious": 50, "Royal Gala": 64, "Satsuma": 68, "Watermelon": 46,
    }  # fmt: skip
    assert sum(kinds.values()) == found[0].data["test"] == 661
    share = [fmean(r.class_errors[place] for r in found) for place in range(len(kinds))]
    wrong = {kind: share[n] * count for n, (kind, count) in enumerate(kinds.items())}
    worst = sorted(wrong, key=wrong.get)[-5:]
    assert {*worst} == {"Anjou", "Golden Delicious", "Orange", "Royal Gala", "Satsuma"}
    part = 100 * sum(wrong[kind] for kind in worst) / sum(wrong.values())
    assert f"Five of the 14 kinds make {part:.0f} % of the errors" in page
    for kind, error in zip(kinds, share, strict=True):
        if kind in worst:
            assert 25 < error < 51  # "a quarter to a half"
        if kind in ("Watermelon", "Red Delicious"):
            assert error < 1
    for network, params, macs in (("mobilenet_v2", 21, 1.1), ("resnet50_keras", 11, 0.4)):
        none, ours = (
            next(
                r for r in found if (r.run["network"].split(":")[1], r.run["recalibration"]) == cell
            )
            for cell in ((network, "none"), (network, "mssar"))
        )
        assert round(100 * (ours.params / none.params - 1)) == params
        assert round(100 * (ours.macs / none.macs - 1), 1) == macs
    assert "add 21 % to MobileNetV2's parameters and 11 % to ResNet-50's, 1.1 and 0.4 %" in page


def test_what_is_said_of_the_small_networks_cost_follows_from_what_was_measured():
    costs = tomllib.loads((ROOT / "records" / "costs.toml").read_text())["overhead"]
    took = {
        one.recalibration: one.median_ms
        for one in timings.read(ROOT / "records" / "timings")
        if (one.network, one.what) == ("resnet56", "training")
    }
    more, compiled = 100 * (took["mssar"] / took["none"] - 1), costs["resnet56-train"]
    said = (
        f"A CIFAR ResNet-56 trains {more:.0f} % slower in a CUDA graph, and compiled "
        f"{compiled['mssar']:.0f} % (timm's SE {compiled['se']:.0f} %)."
    )
    assert said in (ROOT / "README.md").read_text()
