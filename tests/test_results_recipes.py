"""What pages say of ResNet-20: of its recipe, of windows and of runs that were trained twice."""

from collections.abc import Callable
from itertools import product
from statistics import fmean, median, stdev

from reproduced import NETWORKS, RECORDS, recorded
from test_results import PAGES, ROOT

from mssar.lab.experiments import paper
from mssar.lab.records import Record
from mssar.lab.report.groups import claim, judged, side
from mssar.lab.report.phrases import plus_minus
from mssar.lab.report.welch import quantile

KINDS, DATA = ("none", "mssar"), ("cifar10", "cifar100")
Choice = Callable[[str, str, str], list[Record]]  # of the records of a cell


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

    before = {k: {d: earlier("resnet20", k, d) for d in DATA} for k in KINDS}
    after = {k: {d: recorded("resnet20", k, d) for d in DATA} for k in KINDS}

    def lower(kind: str) -> list[float]:
        pairs = (zip(before[kind][d], after[kind][d], strict=True) for d in DATA)
        return [old.error - new.error for some in pairs for old, new in some if old.id != new.id]

    gone = lower("mssar")
    assert f"than before, by {min(gone):.2f} to {max(gone):.2f} points, in the mean" in page
    wide = quantile(0.975, len(gone) - 1) * stdev(gone) / len(gone) ** 0.5
    assert f"in the mean of the four seeds by {plus_minus(fmean(gone), wide)} (p = 0.02)" in page
    assert sorted(change > 0 for change in lower("none")) == [False, False, True, True]
    first, second, _ = (r.epochs[-1].train_error for r in after["mssar"]["cifar100"])
    three = [r.epochs[-1].train_error for r in before["mssar"]["cifar100"]]
    said = "({:.2f} and {:.2f} % where the three before had {:.2f}, {:.2f} and {:.2f})"
    assert said.format(first, second, *three) in page
    narrow = {d: recorded("resnet20", "mssar", d, reduction=3) for d in DATA}
    ten, hundred = (claim("", before["mssar"][d], narrow[d], None).p for d in DATA)
    assert (
        f"with the [earlier trainings](#provenance) it was not, {ten:.2f} and {hundred:.2f})"
        in page
    )
    pairs = [(side(before["mssar"][d]), side(narrow[d])) for d in DATA]
    pairs += [
        (
            side(recorded("resnet56", "mssar", d)),
            side(recorded("resnet56", "mssar", d, reduction=3)),
        )
        for d in DATA
    ]
    four = judged("", None, *pairs)
    assert f"earlier {plus_minus(four.gain, four.margin)}), on CIFAR-10" in page
    mean = recorded("resnet20", "none", "cifar100", fill="mean")
    colour = claim("", mean, before["none"]["cifar100"], None)
    assert colour.verdict == "none"
    said = f"(#provenance) {plus_minus(colour.gain, colour.margin)}, which may be chance)"
    assert f"against the [earlier trainings]{said}" in page


def test_the_number_of_comparisons_counts_recipes_and_windows():
    page = (ROOT / "docs" / "results.md").read_text()
    none, se, ours = (recorded("resnet20", kind, "cifar100") for kind in ("none", "se", "mssar"))
    changes = ({"fill": "mean"}, {"decay": "weights"}, {"init": "torch"})
    others = [recorded("resnet20", "none", "cifar100", **change) for change in changes]
    more, both = (recorded("resnet20", k, "cifar100", weight_decay=5e-4) for k in KINDS)
    windows = recorded("resnet20", "mssar", "cifar100", strategy="sliding")
    pairs = [(other, none) for other in (*others, more)]
    pairs += [(ours, other) for other in (*others, more)]
    pairs += [(more, se), (both, more), (both, ours), (ours, windows), (windows, none)]
    level = 0.05 / (45 + len(pairs))
    said = f"With the {len(pairs)} comparisons of [other recipes]"
    assert said in page
    assert f"there are {45 + len(pairs)} (p below {level:.2g}), and the same would remain." in page
    assert min(claim("", *pair, None).p for pair in pairs) > level
    kept = claim("", *(recorded("resnet56", k, "cifar100") for k in ("mssar", "se")), None)
    assert kept.p < level  # of those above, the one that comes nearest to it


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
    assert f"three ResNet-20 with windows take {alone:.1f} s an epoch. Eight of which" in page
    assert f"compiled and as two stacks, take {fast:.1f}." in page


def test_what_is_said_of_other_recipes_follows_from_the_records():
    page = (ROOT / "docs" / "results.md").read_text()
    none, ours = (recorded("resnet20", kind, "cifar100") for kind in KINDS)
    changes = ({"fill": "mean"}, {"decay": "weights"}, {"init": "torch"})
    others = [recorded("resnet20", "none", "cifar100", **change) for change in changes]
    made = [claim("", some, none, None) for some in others]
    assert [one.verdict for one in made] == ["holds", "none", "none"]
    told = [plus_minus(one.gain, one.margin).replace("-", "−") for one in made]
    mean = fmean(r.error for r in others[0])
    assert f"by {told[0]} points (p = {made[0].p:.2f}, one of four such comparisons;" in page
    far = fmean(r.error for r in none) - 31.87
    said = f"to {mean:.2f} %, which leaves {mean - 31.87:.1f} of the {far:.1f} points to the"
    assert said in page
    assert f"beyond chance: {told[1]} and {told[2]} points." in page
    for some in others:  # "lower than by each of these three variants without it"
        assert claim("", ours, some, None).verdict == "holds"


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
    said = (
        f"(an error of {mean:.2f} %, which MS-SAR is below by {plus_minus(left.gain, left.margin)})"
    )
    assert f"may do as much without the layer {said}" in readme
    recipes = [{**rs[0].run["recipe"], "weight_decay": None} for rs in (more, none)]
    assert recipes[0] == recipes[1]  # "otherwise by the same recipe"
