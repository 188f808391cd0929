"""What the demo and the pages on fine-tuning and cost say in sentences, against the records."""

import re
import tomllib
from itertools import product
from statistics import fmean, stdev

from reproduced import recorded
from test_results import ROOT, WORDS

from mssar.lab import records, timings
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus


def test_the_demo_leads_with_the_larger_network():
    words = tomllib.loads((ROOT / WORDS).read_text())["demo"]
    drawn = {(one["against"], one["dataset"]): one for one in words["real"]}
    for (other, dataset), one in drawn.items():
        pair = (recorded("resnet56", kind, dataset) for kind in ("mssar", other))
        made = claim(other, *pair, None)
        assert (one["network"], one["verdict"]) == ("resnet56", made.verdict)
        assert (one["gain"], one["margin"]) == (round(made.gain, 2), round(made.margin, 2))
    assert [drawn[k, d]["published"] for d in ("cifar10", "cifar100") for k in ("none", "se")] == [
        *(0.93, 0.76, 1.36, 1.28)
    ]
    said = words["headline"]
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
