"""What `records/` and the paper have of a cell, for tests of what pages say."""

from typing import Any

from test_results import ROOT

from mssar.lab import records
from mssar.lab.recipes import varied
from mssar.lab.report.content import Claim
from mssar.lab.report.groups import judged, side
from mssar.lab.run import usual_recipe

RECORDS = records.read(ROOT / "records")
README = (ROOT / "README.md").read_text()
RESULTS = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("results*.md")))
NETWORKS = ("resnet20", "resnet32", "resnet56")
PAIRS = (("se", "none"), ("mssar", "se"), ("mssar", "none"))


def recorded(
    network: str,
    kind: str,
    dataset: str,
    reduction: int = 1,
    scales: tuple[int, ...] = (1, 2, 4),
    strategy: str = "regional",
    **changes: Any,
) -> list[records.Record]:
    """As in the text and by the paper's recipe, where nothing else is said; of a run that was
    recorded twice the later one."""
    recipe = varied(usual_recipe(network, dataset), **changes).as_dict()
    found: dict[int, records.Record] = {}
    for r in RECORDS:
        if (
            (r.run["network"], r.run["recalibration"], r.run["dataset"]) == (network, kind, dataset)
            and r.run["options"].get("reduction", 1) == reduction
            and tuple(r.run["options"].get("scales", (1, 2, 4))) == scales
            and r.run["options"].get("strategy", "regional") == strategy
            and r.run["recipe"] == recipe
        ):
            records.later(found, r)
    return [found[seed] for seed in sorted(found)]


def everything(network: str, kind: str, dataset: str) -> list[records.Record]:
    """All records of what was trained more than once."""
    counts = recorded(network, kind, dataset)
    return [r for r in RECORDS if any(r.run == one.run for one in counts)]


def earlier(network: str, kind: str, dataset: str) -> list[records.Record]:
    """The first of each."""
    found: dict[int, records.Record] = {}
    for record in everything(network, kind, dataset):
        before = found.setdefault(record.run["seed"], record)
        if record.finished < before.finished:
            found[record.run["seed"]] = record
    return list(found.values())


def precise() -> list[records.Record]:
    """ResNet-20 without recalibration on CIFAR-100, in TF32."""
    lines = (ROOT / "records" / "precision.ndjson").read_text().splitlines()
    return [records.parse(line) for line in lines]


def compiled(wanted: bool) -> list[records.Record]:
    """ResNet-20 with MS-SAR on CIFAR-100, one after the other by the same code."""
    found = [
        r
        for r in everything("resnet20", "mssar", "cifar100")
        if r.code["commit"][:7] in ("dcbc174", "ca6150e") and r.execution["compile"] is wanted
    ]
    assert [r.run["seed"] for r in found] == [0, 1, 2, 3]
    assert len({r.code["source"] for r in found}) == 1
    return found


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
