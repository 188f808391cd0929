"""What pages say of runs that were trained again, of precision and of gradients."""

import json
from collections.abc import Callable
from itertools import combinations, product
from statistics import fmean, stdev

from reproduced import (
    NETWORKS,
    README,
    RECORDS,
    RESULTS,
    compiled,
    earlier,
    everything,
    precise,
    recorded,
)
from test_results import ROOT

from mssar.lab.records import Record
from mssar.lab.report.groups import claim, judged, side
from mssar.lab.report.phrases import plus_minus
from mssar.lab.report.welch import quantile
from mssar.networks.weights import read

KINDS, DATA = ("none", "mssar"), ("cifar10", "cifar100")
Choice = Callable[[str, str, str], list[Record]]  # of the records of a cell


def test_what_is_said_of_precision_follows_from_the_records():
    page = RESULTS
    found, none = precise(), recorded("resnet20", "none", "cifar100")
    assert {r.execution["precision"] for r in found} == {"tf32"}
    assert [r.run for r in found] == [r.run for r in none]
    assert all(r.data == other.data for r, other in zip(found, none, strict=True))
    assert not any(r.code["changed"] for r in found)
    errors = [r.error for r in found]
    told = "have {:.2f}, {:.2f} and {:.2f} %".format(*errors)
    trained = fmean(r.epochs[-1].train_error for r in found)
    said = f"{told} ({plus_minus(fmean(errors), stdev(errors))}; {trained:.2f} % in training)"
    made = claim("", found, none, None)
    every = claim("", found, everything("resnet20", "none", "cifar100"), None)
    assert (made.verdict, every.verdict) == ("none", "none")
    assert f"{said}: lower by {plus_minus(made.gain, made.margin)} points" in page
    said = f"(p = {made.p:.2f}; against all five trainings in bfloat16 "
    assert f"{said}{plus_minus(every.gain, every.margin)})" in page
    gap = fmean(r.error for r in none) - 31.87
    assert round(3 * made.gain / gap) == 1
    assert made.gain + made.margin > gap / 2  # "and may be most of it"
    assert "it is about a third of the gap, and may be most of it." in page
    assert {r.execution["stacked"] for r in found} == {len(found)}


def test_what_is_said_of_rounding_follows_from_the_records():
    page = RESULTS
    plain, fast = compiled(False), compiled(True)
    made = claim("", fast, plain, None)
    assert made.verdict == "none"
    told = [
        "{:.2f}, {:.2f}, {:.2f} and {:.2f} %".format(*(r.error for r in s)) for s in (plain, fast)
    ]
    fitted = [fmean(r.epochs[-1].train_error for r in some) for some in (plain, fast)]
    said = f"has {told[0]} uncompiled and {told[1]} compiled, lower by "
    assert f"{said}{plus_minus(made.gain, made.margin)} points, with training errors of" in page
    assert "training errors of {:.2f} and {:.2f} %.".format(*fitted) in page

    every = everything("resnet20", "mssar", "cifar100")
    by_process = _by(every, lambda r: r.code["commit"])
    assert [len(some) for some in by_process] == [3, 2, 4, 4]
    lucky = by_process[1]
    assert "({:.2f} and {:.2f} %), also compiled".format(*lucky) in page
    assert all(r.execution["compile"] for r in every if r.error in lucky)
    assert max(lucky) < min(error for some in by_process if some is not lucky for error in some)
    by_seed = _by(every, lambda r: r.run["seed"])
    all_of_them = [r.error for r in every]
    alike = f"{_within(by_seed):.2f}"
    assert alike == f"{stdev(all_of_them):.2f}"
    assert f"differ as much within a seed (a standard deviation of {alike}) as in all." in page
    assert f"on CIFAR-100 has ± {alike} over {len(every)} trainings)" in README
    first, last = (fmean(some) for some in (by_process[0], by_process[3]))
    second = fmean([*lucky, by_process[0][2]])
    told = f"{first:.2f}, {second:.2f} and {last:.2f} %"
    assert f"had {told} in these tables, in turn." in page
    assert (
        f"ResNet-20 with MS-SAR on CIFAR-100, trained again, came out at {told} [in turn]" in page
    )
    assert f"within one process these runs differ by {_within(by_process):.2f} only." in page
    others = [
        r
        for r in RECORDS
        if (r.run["network"], r.run["dataset"]) == ("resnet20", "cifar100")
        and r.id not in {one.id for one in every}
        and r.execution.get("stacked", 1) > 1
    ]
    usual = recorded("resnet20", "none", "cifar100")[0].run["recipe"]
    ways = [
        r.run["recipe"] == usual and r.run["options"].get("strategy") != "sliding" for r in others
    ]
    alike, unlike = (
        _by(
            [r for r, way in zip(others, ways, strict=True) if way is wanted],
            lambda r: (r.code["commit"], json.dumps({**r.run, "seed": 0})),
        )
        for wanted in (True, False)
    )
    assert f"by the paper's recipe runs differ by {_within(alike):.2f}, by other" in page
    assert f"by other recipes and with windows by {_within(unlike):.2f}." in page

    mixed = {
        r.code["commit"]
        for r in everything("resnet20", "mssar", "cifar10")
        if r.execution.get("stacked") == 4  # in a process with four of this network
    }
    five, eight = (
        [r for r in every if (r.code["commit"] in mixed) is beside] for beside in (True, False)
    )
    assert (len(five), len(eight)) == (5, 8)
    assert {r.execution["stacked"] for r in every} == {4}
    assert max(r.error for r in five) < min(r.error for r in eight)
    lower = claim("", five, eight, None)
    said = f"eight are {plus_minus(lower.gain, lower.margin)} points above them (p = {lower.p:.2f},"
    assert said in page

    rare = 1 / _as_close(all_of_them, [len(some) for some in by_process], by_process)
    assert f"one in {round(rare, -2):,.0f} ways to divide them" in page
    means = [fmean(some) for some in by_process]
    told = "{:.2f}, {:.2f}, {:.2f} and {:.2f} % in the mean".format(*means)
    assert f"{told} ({plus_minus(fmean(means), stdev(means))})" in page
    without = _by(everything("resnet20", "none", "cifar100"), lambda r: r.code["commit"])
    two = [fmean(some) for some in without]
    assert "the two without recalibration {:.2f} and {:.2f} %.".format(*two) in page
    # Welch's t with processes instead of runs, all of them with the spread of those with MS-SAR.
    far = quantile(0.975, len(means) - 1) * stdev(means)
    gained = fmean(two) - fmean(means)
    wide = far * (1 / len(means) + 1 / len(two)) ** 0.5
    assert gained > wide
    assert f"as what varies MS-SAR gains {plus_minus(gained, wide)} points." in page
    one = fmean(r.error for r in recorded("resnet20", "se", "cifar100"))
    assert len({r.code["commit"] for r in recorded("resnet20", "se", "cifar100")}) == 1
    ends = f"{one - max(means):.2f} to {one - min(means):.2f}"
    over, wide = one - fmean(means), far * (1 / len(means) + 1) ** 0.5
    assert over < wide
    told = f"with {one:.2f} %, which is {ends} points above each of the four, but "
    assert f"{told}{plus_minus(over, wide)} if it varies as they do." in page
    se = [r for d in DATA for r in recorded("resnet20", "se", d)]  # six as one: both data sets
    assert {(r.execution["stacked"], r.code["commit"][:7]) for r in se} == {(6, "d1dac52")}
    assert len(se) == 6
    counts = [r.code["commit"][:7] for r in recorded("resnet20", "none", "cifar100")]
    assert counts == ["c2d8267", "c2d8267", "ce75316"]

    weights = (ROOT / "docs" / "networks.md").read_text()
    assert min(all_of_them) == lucky[0]
    assert (
        f"lowest error, {lucky[0]:.2f} %, and their mean is {fmean(all_of_them):.2f} %." in weights
    )
    noted = read("resnet20-mssar-cifar100").note["record"]
    assert [r.error for r in every if r.id == noted] == [lucky[0]]
    for (kind, dataset), place in {
        ("none", "cifar100"): 1,
        ("none", "cifar10"): 1,
        ("mssar", "cifar10"): 2,
    }.items():
        found = sorted(everything("resnet20", kind, dataset), key=lambda r: r.error)
        noted = read(f"resnet20-{kind}-{dataset}").note["record"]
        assert ([r.id for r in found].index(noted), len(found)) == (place, 5)
    said = "the second lowest without recalibration on both data sets, and the third with MS-SAR on"
    assert f"where five were trained of each, {said} CIFAR-10." in weights
    off = {
        cell: abs(mine.error - fmean(r.error for r in everything(*cell)))
        for cell in product(("resnet20", "resnet56"), KINDS, DATA)
        for noted in [read("{}-{}-{}".format(*cell)).note["record"]]
        for mine in everything(*cell)
        if mine.id == noted
    }
    lucky = off.pop(("resnet20", "mssar", "cifar100"))
    assert len(off) == 7
    assert lucky > 2 * max(off.values())  # "The others are nearer to theirs"


def _as_close(errors: list[float], sizes: list[int], found: list[list[float]]) -> float:
    """The share of all ways to divide them into groups of these sizes, in which those of a group
    are as close to each other as in what was found: the squares of sums tell."""
    first, second, third, last = sizes
    least = sum(sum(some) ** 2 / len(some) for some in found) - 1e-9
    shifted = [error - fmean(errors) for error in errors]
    least -= len(errors) * fmean(errors) ** 2
    every = range(len(errors))
    close = ways = 0
    for a in combinations(every, first):
        rest = [i for i in every if i not in a]
        one = sum(shifted[i] for i in a) ** 2 / first
        for b in combinations(rest, second):
            left = [shifted[i] for i in rest if i not in b]
            two = one + sum(shifted[i] for i in b) ** 2 / second
            whole = sum(left)
            for c in combinations(left, third):
                some = sum(c)
                ways += 1
                close += two + some**2 / third + (whole - some) ** 2 / last >= least
    return close / ways


def _by(some: list[Record], key: Callable[[Record], object]) -> list[list[float]]:
    """Errors of those that are alike."""
    found: dict[object, list[float]] = {}
    for record in some:
        found.setdefault(key(record), []).append(record.error)
    return list(found.values())


def _within(groups: list[list[float]]) -> float:
    """The standard deviation of what is alike."""
    squares = sum((error - fmean(some)) ** 2 for some in groups for error in some)
    return (squares / sum(len(some) - 1 for some in groups)) ** 0.5


def test_what_is_said_of_gradients_follows_from_what_was_measured():
    page = RESULTS
    lines = (ROOT / "records" / "gradients.ndjson").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if line["group"] == "all"]
    assert len(found) == 14
    assert not any(line["changed"] for line in found)
    for state in ("begun", "trained"):  # "Compiling and stacking change nothing"
        ways = [x for x in found if "mssar" in x["net"] and x["state"] == state]
        assert len(ways) == 4
        assert max(x["error"] for x in ways) / min(x["error"] for x in ways) < 1.02
        for x, y in product(ways, ways):
            both = (x["length_error"] ** 2 + y["length_error"] ** 2) ** 0.5
            assert abs(x["length"] - y["length"]) <= 2 * both
    errors = {
        kind: [100 * x["error"] for x in found if x["precision"] == kind]
        for kind in ("bf16", "tf32", "fp32")
    }
    coarse = [x for x in found if x["precision"] == "bf16"]
    shorter = sorted(-100 * x["length"] for x in coarse)
    said = f"off by {min(errors['bf16']):.0f} to {max(errors['bf16']):.0f} %, and "
    assert f"{said}{shorter[0]:.1f} to {shorter[-1]:.1f} % too short along the exact one" in page
    steady = {
        kind: {
            f"{100 * x['steady']:.1f}"
            for x in coarse
            if x["state"] == "trained" and kind in x["net"]
        }
        for kind in KINDS
    }
    assert f"with MS-SAR {'or'.join(steady['mssar'])} % seem steady, in all four ways" in page
    assert f"of the {'or'.join(steady['none'])} % without it we are less sure. In TF32" in page
    assert not any(x["steady"] for x in coarse if x["state"] == "begun")
    said = "In TF32 it is off by {:.0f} to {:.0f} %, in".format(*sorted(errors["tf32"]))
    assert f"{said} float32 by {min(errors['fp32']):.1f} to {max(errors['fp32']):.1f} %." in page
    bare = [100 * x["error"] for x in coarse if "none" in x["net"]]
    for rough, fine in zip(bare, errors["tf32"], strict=True):
        assert round(4 * fine / rough) == 1
    assert "are off by a quarter of what bfloat16's are." in page


def test_what_is_said_of_runs_that_were_trained_twice_follows_from_the_records():
    page = RESULTS

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
    assert f"instead, MS-SAR gains {a} points on CIFAR-100 and {b} on CIFAR-10 in ResNet" in page
    assert (
        f"and in the mean of three networks {c} and {d}; over SE in the mean {e} and {f}." in page
    )
    assert f"with [their first trainings](results-runs.md#provenance) it was {f}, with all" in page
    a, b = told(everything, "none", "resnet20")
    c, d = told(everything, "none", *NETWORKS)
    e, f = told(everything, "se", *NETWORKS)
    assert f"the three others, it is {a} and {b}, {c} and {d}; over SE {e} and {f}." in page
    counted = {(k, d): len(everything("resnet20", k, d)) for k, d in product(KINDS, DATA)}
    assert counted == dict.fromkeys(counted, 5) | {("mssar", "cifar100"): 13}
    assert f"with all {f}. In ResNet-56" in page
    assert f"five runs each, it is {b}, beyond chance." in page
    three = claim("", *(recorded("resnet20", kind, "cifar10") for kind in ("mssar", "none")), None)
    assert f"may be chance ({plus_minus(three.gain, three.margin)} points)" in page

    before = {k: {d: earlier("resnet20", k, d) for d in DATA} for k in KINDS}
    again = [
        (first, record)
        for d in DATA
        for first in before["mssar"][d]
        for record in everything("resnet20", "mssar", d)
        if record.run == first.run and record.code["commit"].startswith("c2d8267")
    ]
    gone = [first.error - second.error for first, second in again]
    assert min(gone) > 0  # "all four"
    assert len(gone) == 4
    wide = quantile(0.975, len(gone) - 1) * stdev(gone) / len(gone) ** 0.5
    assert f"than before (in their mean by {plus_minus(fmean(gone), wide)} points)" in page
    narrow = {d: recorded("resnet20", "mssar", d, reduction=3) for d in DATA}
    ten = claim("", before["mssar"]["cifar10"], narrow["cifar10"], None).p
    assert f"by the [first trainings](results-runs.md#provenance) it was not, {ten:.2f})" in page
    pairs = [(side(before["mssar"][d]), side(narrow[d])) for d in DATA]
    pairs += [
        (
            side(recorded("resnet56", "mssar", d)),
            side(recorded("resnet56", "mssar", d, reduction=3)),
        )
        for d in DATA
    ]
    four = judged("", None, *pairs)
    assert f"by the first trainings {plus_minus(four.gain, four.margin)}), on CIFAR-10" in page
    mean = recorded("resnet20", "none", "cifar100", fill="mean")
    colour = claim("", mean, before["none"]["cifar100"], None)
    assert colour.verdict == "none"
    said = f"{plus_minus(colour.gain, colour.margin)}, which may be chance)"
    assert f"against the [first trainings](results-runs.md#provenance) {said}" in page
