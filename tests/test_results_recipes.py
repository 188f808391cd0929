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
from mssar.lab.report.welch import margin, p_value

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
