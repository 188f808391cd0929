"""What pages say of ResNet-20's recipe and of windows."""

from statistics import fmean, median, stdev

from reproduced import README, RECORDS, RESULTS, compiled, precise, recorded
from test_results import ROOT

from mssar.lab.experiments import paper
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus

KINDS = ("none", "mssar")


def test_the_number_of_comparisons_counts_recipes_and_windows():
    page = RESULTS
    none, se, ours = (recorded("resnet20", kind, "cifar100") for kind in ("none", "se", "mssar"))
    changes = ({"fill": "mean"}, {"decay": "weights"}, {"init": "torch"})
    others = [recorded("resnet20", "none", "cifar100", **change) for change in changes]
    more, both = (recorded("resnet20", k, "cifar100", weight_decay=5e-4) for k in KINDS)
    windows = recorded("resnet20", "mssar", "cifar100", strategy="sliding")
    pairs = [(other, none) for other in (*others, more)]
    pairs += [(ours, other) for other in (*others, more)]
    pairs += [(more, se), (both, more), (both, ours), (ours, windows), (windows, none)]
    pairs += [(precise(), none), (compiled(True), compiled(False))]
    level = 0.05 / (45 + len(pairs))
    said = f"With the {len(pairs)} comparisons that we had meant to make of [other recipes and"
    assert said in page
    assert f"there are {45 + len(pairs)} (p below {level:.2g}), and of those that hold" in page
    assert min(claim("", *pair, None).p for pair in pairs) > level
    gone = claim("", *(recorded("resnet56", k, "cifar100") for k in ("mssar", "se")), None)
    assert f"in ResNet-56 on CIFAR-100, {gone.p:.2g}, would just fall out, too." in page
    kept = claim("", *(recorded("resnet56", k, "cifar10") for k in ("se", "none")), None)
    assert kept.p < level < gone.p  # of the others, the one that comes nearest to it


def test_what_is_said_of_windows_follows_from_the_records():
    page = RESULTS
    ours, theirs = (
        recorded("resnet20", "mssar", "cifar100", strategy=s) for s in ("regional", "sliding")
    )
    errors = [
        plus_minus(fmean(e), stdev(e)) for e in ([r.error for r in s] for s in (ours, theirs))
    ]
    made = claim("", ours, theirs, paper.STRATEGY_GAIN)
    assert made.verdict == "none"
    assert abs(made.gain - paper.STRATEGY_GAIN) < made.margin / 2  # "well within"
    said = f"{errors[0]} % with regions and {errors[1]} % with windows, four seeds and three:"
    gained = plus_minus(made.gain, made.margin)
    assert f"{said} {gained} points, so no difference" in page
    assert f"**Cannot be told:** {gained} points in ResNet-20 on CIFAR-100." in page
    assert (len(ours), len(theirs)) == (4, 3)
    method = (ROOT / "docs" / "method.md").read_text()
    assert (
        f"(in ResNet-20 [we see](results-scales.md#regions-or-windows) no difference, {gained}"
        in method
    )
    over = claim("", theirs, recorded("resnet20", "none", "cifar100"), None)
    assert over.verdict == "holds"
    assert f"windows gain {plus_minus(over.gain, over.margin)} points." in page
    alone = median(epoch.seconds for r in theirs for epoch in r.epochs[-20:])
    eight = [r for r in RECORDS if "--seed 0,1 --fleet 8 --stack 4 --compile" in r.command]
    assert len(eight) == 8
    assert {(r.execution["compile"], r.execution["stacked"]) for r in eight} == {(True, 4)}
    fast = median(epoch.seconds for r in eight for epoch in r.epochs)
    assert f"three ResNet-20 with windows take {alone:.1f} s an epoch. Eight of which" in page
    assert f"compiled and as two stacks, take {fast:.1f}." in page


def test_what_is_said_of_other_recipes_follows_from_the_records():
    page = RESULTS
    none, ours = (recorded("resnet20", kind, "cifar100") for kind in KINDS)
    changes = ({"fill": "mean"}, {"decay": "weights"}, {"init": "torch"})
    others = [recorded("resnet20", "none", "cifar100", **change) for change in changes]
    made = [claim("", some, none, None) for some in others]
    assert [one.verdict for one in made] == ["holds", "none", "none"]
    told = [plus_minus(one.gain, one.margin).replace("-", "−") for one in made]
    mean = fmean(r.error for r in others[0])
    assert f"by {told[0]} points (p = {made[0].p:.2f}, one of five such comparisons;" in page
    far = fmean(r.error for r in none) - 31.87
    said = f"to {mean:.2f} %, which leaves {mean - 31.87:.1f} of the {far:.1f} points to the"
    assert said in page
    assert f"beyond chance: {told[1]} and {told[2]} points." in page
    for some in others:  # "lower than by each of these three variants without it"
        assert claim("", ours, some, None).verdict == "holds"


def test_what_is_said_of_the_weight_decay_follows_from_the_records():
    readme, page = README, RESULTS
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
    assert f"MS-SAR's error is lower by {told} points (p = {beside.p:.2f}), which" in page
    assert f"itself is {plus_minus(itself.gain, itself.margin)} points better with it." in page
    for short in (readme, page):
        assert f"With it in both, MS-SAR gains {told} points, which may be chance." in short
    same = plus_minus(left.gain, left.margin).replace("-", "−")
    assert f"no difference left that we could see ({same} points)" in page
    over = claim("", more, recorded("resnet20", "se", "cifar100"), None)
    assert over.verdict == "holds"
    assert f"paper's recipe is {plus_minus(over.gain, over.margin)} points worse than it" in page
    with_it = fmean(r.error for r in ours)
    said = f"may do as much without the layer ({mean:.2f} %, where MS-SAR has {with_it:.2f} %"
    assert f"{said}: a difference of {same})" in readme
    assert f"{said})" in page
    recipes = [{**rs[0].run["recipe"], "weight_decay": None} for rs in (more, none)]
    assert recipes[0] == recipes[1]  # "otherwise by the same recipe"
