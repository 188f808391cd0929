"""What pages say of means over networks, of other measures and of chance, against the records."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev

from reproduced import NETWORKS, PAIRS, README, RECORDS, RESULTS, mean_gain, published, recorded

from mssar.lab import records
from mssar.lab.experiments import paper
from mssar.lab.report import tables
from mssar.lab.report.differences import differences
from mssar.lab.report.findings import claims
from mssar.lab.report.groups import claim, judged, side
from mssar.lab.report.phrases import plus_minus
from mssar.lab.report.welch import p_value


def test_what_is_said_of_the_mean_follows_from_the_records():
    readme, page = README, RESULTS
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
    short = f"In the mean of three networks by {none[0]} points on CIFAR-100 and by {none[1]} on"
    assert f"{short} CIFAR-10, where the paper has {papers}." in page
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
    assert f"**On CIFAR-100 yes,** in the mean by {over_se} points." in page
    smaller = mean_gain("mssar", "se", "cifar100", NETWORKS[:2])
    assert f"(without ResNet-56 it is {plus_minus(smaller.gain, smaller.margin)})" in readme
    little = gains["mssar", "se", "cifar10"]
    ten = plus_minus(little.gain, little.margin)
    assert f"on CIFAR-10 {ten}, too little to be sure of after so many comparisons." in readme
    assert f"not shown:** {ten} points, too little after so many comparisons." in page
    assert f"In the mean it is {ten} points, but p = {little.p:.4f} does not survive" in page
    assert f"in the mean by {over_se} points. In ResNet-56" in page
    for cell, one in gains.items():
        assert one.verdict == "holds", cell
    parts = {
        (network, kind): stdev(found) ** 2 / len(found)
        for network, kind in product(NETWORKS, ("none", "mssar"))
        for found in [[r.error for r in recorded(network, kind, "cifar10")]]
    }
    assert round(3 * parts["resnet20", "none"] / sum(parts.values())) == 2  # "two thirds"
    made = tables.paper_tables(RECORDS)
    said = claims(made, differences(made))[1]  # the page's sentence has the caveat
    assert said.startswith("On CIFAR-100 the error with MS-SAR is, in the mean of resnet56, resn")
    assert said.endswith("intervals; resnet20: weight decay may do as much).")


def test_what_is_said_of_se_by_network_follows_from_the_records():
    page = RESULTS
    told = [mean_gain("se", "none", dataset) for dataset in ("cifar10", "cifar100")]
    alone = [plus_minus(one.gain, one.margin) for one in told]
    assert f"gains {alone[0]} points on CIFAR-10 and {alone[1]} on CIFAR-100, in the mean." in page
    by_network = {
        network: claim("", *(recorded(network, k, "cifar100") for k in ("se", "none")), None).gain
        for network in NETWORKS
    }
    first, second, last = (f"{gain:.2f}".replace("-", "−") for gain in by_network.values())
    assert f"ResNet-20 and ResNet-32 gain {first} and {second}, ResNet-56 {last}," in page
    chances = []
    for network in NETWORKS[:2]:  # a difference of differences: twice their mean, one turned round
        sides = [
            (stdev(r.error for r in runs), len(runs))
            for net in (network, "resnet56")
            for runs in (recorded(net, kind, "cifar100") for kind in ("se", "none"))
        ]
        half = (by_network[network] - by_network["resnet56"]) / 2
        chances.append(f"{p_value(half, *sides):.3f}")
    assert "from them it differs with p = {} and {}, comparisons".format(*chances) in page
    smaller = mean_gain("mssar", "se", "cifar100", NETWORKS[:2])
    said = plus_minus(smaller.gain, smaller.margin)
    assert f"Without ResNet-56 MS-SAR is better than SE by {said} points." in page


def test_what_is_said_of_other_measures_follows_from_the_records():
    page = RESULTS

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
    for network in NETWORKS:
        alone = measured(lambda r: r.error5, "mssar", "cifar100", network)
        assert {one.verdict for one in alone.values()} == {"holds"}
        alone = measured(loss, "mssar", "cifar100", network)
        assert {one.verdict for one in alone.values()} == {"holds"}
    losses = measured(loss, "mssar", "cifar100")
    none, se = (f"{losses[k].gain:.3f} ± {losses[k].margin:.3f}" for k in ("none", "se"))
    said = "Both are beyond chance in each of the networks."
    assert f"its test loss is {none} and {se} lower. {said}" in page
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
    said = f"{plus_minus(four.gain, four.margin)} points (p = {four.p:.3f}; by the first"
    assert f"The mean of the four is {said}" in page
    assert f"), on CIFAR-10 {plus_minus(two.gain, two.margin)}, which we looked at" in page


def chance(ours: list, theirs: list) -> float:
    """How often Welch's t is so far from 0 by chance."""
    found = claim("", ours, theirs, None).p
    assert found is not None
    return found


def test_what_is_said_of_chance_follows_from_the_records():
    page = RESULTS
    table = page.split("<!-- results: differences -->")[1].split("<!-- end")[0]
    assert table.count("against") == 28
    assert "and this table has 28. Seven differences would also be" in page
    assert "are 28; seven of them also hold if all are to hold at once (Bonferroni)." in page
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
        ("mean", "cifar100", "ours none"): "3e-08",
        ("mean", "cifar100", "ours se"): "5e-06",
        ("mean", "cifar100", "se none"): "0.0005",
        ("resnet56", "cifar10", "ours none"): "0.0002",
        ("resnet56", "cifar10", "se none"): "0.0008",
        ("resnet56", "cifar100", "ours se"): "0.0008",
        ("resnet32", "cifar100", "ours none"): "0.001",
    }
    assert "(MS-SAR against none p = 3·10⁻⁸ and against SE 5·10⁻⁶, SE against none 0.0005)" in page
    small = [f"{found[network, 'cifar100', 'ours none']:.4f}" for network in NETWORKS]
    assert f"MS-SAR against none in ResNet-32 ({small[1]})" in page
    assert "against SE in ResNet-56 (0.0008); on CIFAR-10 MS-SAR and SE against none in " in page
    assert "in ResNet-56 (0.0002 and 0.0008). MS-SAR" in page
    assert f"in ResNet-56 on CIFAR-100, p = {small[2]}, and in the mean on CIFAR-10, " in page
    assert f"{found['mean', 'cifar10', 'ours none']:.4f}, just miss that" in page
    assert f"which is less certain (p = {found['resnet20', 'cifar100', 'ours se']:.3f}, and" in page
    narrow = {cell[:2]: p for cell, p in found.items() if cell[2] == "ours narrow"}
    assert f"beyond chance in ResNet-20 (p = {narrow['resnet20', 'cifar10']:.3f}; by the" in page
    assert f"only just not in ResNet-56 (p = {narrow['resnet56', 'cifar10']:.4f})" in page
    assert min(p for (_, dataset), p in narrow.items() if dataset == "cifar100") > 0.05
    assert "; on CIFAR-100 in neither. The mean of the four" in page
