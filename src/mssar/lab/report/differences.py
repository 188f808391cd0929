"""How much lower the error is with MS-SAR than without it or with SE, in each network and in the
mean of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mssar.lab.report.content import Claim, Difference, Row, Table
from mssar.lab.report.groups import judged, known_mean, side_of
from mssar.lab.report.phrases import wording
from mssar.lab.report.tables import WEIGHT_DECAY

SE = "mssar scales=1"  # as the table of scales calls it


def differences(made: Sequence[Table]) -> list[Difference]:
    """Of the main table's networks, the deepest first, where there are runs enough of both; and
    before them the means over networks of one family."""
    rows = {table.name: [row for row in table.rows if row.n] for table in made}
    main = rows.get("table3", [])
    ours = [row for row in main if row.recalibration == "mssar" and not row.additional]
    networks = list(dict.fromkeys(row.network for row in ours))
    ours.sort(key=lambda row: -networks.index(row.network))
    datasets = list(dict.fromkeys(row.dataset for row in main))
    found = [
        _Compared(Difference(row.network, row.dataset, claim, row.runs, row.remark), row, other)
        for row in ours
        for claim, other in _claims(row, main, rows.get("table4", []))
        if claim.margin is not None
    ]
    means = sorted(_means(found), key=lambda one: datasets.index(one.dataset))
    return [*means, *(one.found for one in found)]


def on_real_pictures() -> list[Difference]:
    """Those of the package's own records that every installation has."""
    found = (dict(one) for one in wording()["demo"]["real"])
    return [Difference(one.pop("network"), one.pop("dataset"), Claim(**one), ()) for one in found]


class _Compared(NamedTuple):
    found: Difference
    row: Row
    other: Row


def _claims(row: Row, main: Sequence[Row], scales: Sequence[Row]) -> Iterator[tuple[Claim, Row]]:
    """And the row of the main table that it is compared with."""
    others = {
        other.recalibration: other
        for other in main
        if (other.network, other.dataset) == (row.network, row.dataset)
    }
    if row.claim and (none := others.get(row.claim.against)):
        yield row.claim, none
    if se := others.get("se"):
        for other in scales:  # the paper's own comparison, where there is one
            if other.runs == row.runs and other.claim and other.claim.against == SE:
                yield Claim(**{**vars(other.claim), "against": "se"}), se
                return
        yield judged("se", None, (side_of(row), side_of(se))), se


def _means(found: Sequence[_Compared]) -> Iterator[Difference]:
    """Over those of a family that have every comparison that any of it has, if there are two."""
    families = defaultdict[tuple[str, str], list[_Compared]](list)
    for one in found:
        families[one.row.network.rstrip("0123456789"), one.row.dataset].append(one)
    for (family, dataset), some in families.items():
        against = defaultdict[str, list[_Compared]](list)
        for one in some:
            against[one.found.claim.against].append(one)
        common = set.intersection(*({one.row.network for one in ones} for ones in against.values()))
        for other, ones in against.items():
            of = [one for one in ones if one.row.network in common] if len(common) > 1 else ones
            if len(of) > 1:
                yield _mean(f"mean of {len(of)} {family}s", dataset, other, of)


def _mean(name: str, dataset: str, other: str, of: Sequence[_Compared]) -> Difference:
    published = known_mean([one.found.claim.published for one in of])
    pairs = ((side_of(one.row), side_of(one.other)) for one in of)
    doubted = [one.row.network for one in of if other == "none" and WEIGHT_DECAY in one.row.remark]
    return Difference(
        name,
        dataset,
        judged(other, published, *pairs),
        tuple(run for one in of for run in one.row.runs),
        "; ".join(f"{network}: {WEIGHT_DECAY}" for network in doubted),
        networks=tuple(one.row.network for one in of),
    )
