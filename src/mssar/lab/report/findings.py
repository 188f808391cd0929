"""What comes out of the tables, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mssar.lab.report.content import Claim, Compared, Comparison, Difference, Row, Table
from mssar.lab.report.groups import ENOUGH, judged, side_of
from mssar.lab.report.phrases import plus_minus, scientific, spelt, wording
from mssar.lab.report.welch import LEVEL

OTHERS = {"none": "without recalibration", "se": "with SE"}
EMBEDDED = {"arrangements": "the embedded pictures"}  # in a sentence


def claims(
    made: Sequence[Table],
    drawn: Sequence[Difference] = (),
    beside: Sequence[Comparison] = (),
) -> list[str]:
    """Of the main tables; what is drawn in a sentence, of the rest a sentence each."""
    shown, level = {one.runs for one in drawn}, _level(_comparisons(drawn, made, beside))
    rows = [row for table in made if table.name in ("table3", "ilsvrc") for row in table.rows]
    told = [
        _finding(row, row.claim)
        for row in rows
        if row.claim and row.claim.gain is not None
        if row.recalibration == "mssar" and not row.additional and row.runs not in shown
    ]
    return [*_all(drawn, level), *told]


def _all(drawn: Sequence[Difference], level: float) -> list[str]:
    """Means; and where the error is lower, or higher, beyond chance: than without, and than with
    SE."""
    single = [one for one in drawn if not one.networks]
    said = []
    for verdict, how in (("holds", "lower"), ("reversed", "higher")):
        for against, other in OTHERS.items():
            of = [one for one in single if one.claim.against == against]
            where = [
                f"{one.network} on {_data(one.dataset)}"
                for one in of
                if one.claim.verdict == verdict
            ]
            if where:
                said.append(
                    f"With MS-SAR the error is {how} than {other}, beyond chance, in "
                    f"{len(where)} of {len(of)} cases: {', '.join(where)}."
                )
    means = _means([one for one in drawn if one.networks], level)
    if single and not said:
        alone = " of one network alone" if means else ""
        said = [f"Between MS-SAR and the others no difference{alone} is beyond chance."]
    return [*means, *said]


def _means(means: Sequence[Difference], level: float) -> list[str]:
    """A sentence for some networks and a data set."""
    alike = defaultdict[tuple[tuple[str, ...], str], list[Difference]](list)
    for one in means:
        alike[one.networks, one.dataset].append(one)
    said = []
    for (networks, dataset), some in alike.items():
        told = " and ".join(_apart_by(one.claim) for one in some)
        remark = "".join(f"; {one.remark}" for one in some if one.remark)
        said.append(
            f"On {_data(dataset)} the error with MS-SAR is, in the mean of "
            f"{', '.join(networks[:-1])} and {networks[-1]}, {told} (95\u00a0% intervals{remark})."
            f"{_doubts([one.claim for one in some], level)}"
        )
    return said


def _doubts(some: Sequence[Claim], level: float) -> str:
    """What may be chance: by itself, and beside all other comparisons."""
    alone = [one for one in some if one.verdict == "none"]
    beside = [one for one in some if one not in alone and one.p is not None and one.p >= level]
    said = ""
    for found, where in ((alone, ""), (beside, "beside all other comparisons ")):
        which = f"the difference to {' and '.join(spelt(one.against) for one in found)}"
        one = "these differences" if len(some) > 1 else "this difference"
        told = f"{where}{one if len(found) == len(some) else which} may be chance."
        said += f" {told[0].upper()}{told[1:]}" if found else ""
    return said


def _apart_by(claim: Claim) -> str:
    gain, other = claim.gain or 0.0, OTHERS.get(claim.against, f"with {claim.against}")
    how = "higher" if gain < 0 else "lower"
    return f"{plus_minus(abs(gain), claim.margin)} points {how} than {other}"


def _finding(row: Row, claim: Claim) -> str:
    what = " ".join(part for part in (row.network, row.options) if part)
    said = f"{what} on {_data(row.dataset)}: with MS-SAR the error is {_apart_by(claim)}"
    sources = [] if claim.margin is None else [f"95 % interval, n={row.n}"]
    sources += [] if claim.published is None else [f"published: {claim.published:.2f} lower"]
    said += f" ({'; '.join(sources)})" if sources else ""
    if claim.margin is None:
        return f"{said}. With so few runs that may be chance."
    verdict = "may be chance" if claim.verdict == "none" else "is more than chance"
    return f"{said}. That {verdict}."


def at_once(
    drawn: Sequence[Difference],
    made: Sequence[Table],
    beside: Sequence[Comparison] = (),
    picked: Sequence[Comparison] = (),
) -> list[str]:
    """How many comparisons there are, with those of a best one that was picked and all others, and
    which would hold together (Bonferroni)."""
    found = _comparisons(drawn, made, beside, picked)
    if len(found) < 2:
        return []
    count, level = len(found), _level(found)
    held = [f"{told} (p\u00a0=\u00a0{scientific(p)})" for p, told in sorted(found) if p < level]
    return [
        f"This page makes {count} comparisons. Where nothing differs, one in twenty still passes "
        f"by chance. If all {count} are to be right at once (Bonferroni: p below {level:.2g}), "
        f"what remains is: {'; '.join(held) or 'none'}."
    ]


def _comparisons(
    drawn: Sequence[Difference],
    made: Sequence[Table],
    beside: Sequence[Comparison],
    picked: Sequence[Comparison] = (),
) -> list[tuple[float, str]]:
    """Each once: p, and what is compared."""
    found: dict[tuple[object, ...], tuple[float, str]] = {}
    all_of_them = [
        *((_drawn(one), one.dataset, one.claim, one.runs) for one in drawn),
        *((_named(row.network, row), row.dataset, row.claim, row.runs)
          for table in made for row in table.rows),
        *((_named(of.network, row), of.dataset, row.claim, row.runs)
          for of in beside for row in of.rows),
        *((_named(of.network, best), of.dataset, claim, best.runs)
          for of in picked if (best := _best(of)) is not of.base for _, claim in _over_others(of)),
    ]  # fmt: skip
    for name, dataset, claim, runs in all_of_them:
        if claim and claim.p is not None and claim.gain is not None:
            told = f"{name} against {_other(claim)} on {_data(dataset)}"
            same = (runs, f"{claim.gain:.6f}", f"{claim.p:.4g}")  # several may make one
            found.setdefault(same, (claim.p, told))
    return list(found.values())


def _level(found: Sequence[object]) -> float:
    """What p must be below for all comparisons to hold at once."""
    return (1 - LEVEL) / max(1, len(found))


def _drawn(one: Difference) -> str:
    return f"MS-SAR in the {one.network}" if one.networks else f"{one.network} MS-SAR"


def _named(network: str, row: Row | Compared) -> str:
    return " ".join(part for part in (network, spelt(row.recalibration), row.options) if part)


def _other(claim: Claim) -> str:
    return " ".join(spelt(word) for word in claim.against.split())


def _data(name: str) -> str:
    return EMBEDDED.get(name, spelt(name))


def coverage(made: Sequence[Table]) -> list[str]:
    rows = [row for table in made if table.name != "others" for row in table.rows]
    done = sum(1 for row in rows if row.n)
    if not rows:
        return []
    return [
        f"{done} of the {len(rows)} cells of these tables have been run; "
        "the others say so, and `mssar reproduce` goes on with them."
    ]


def comparison(table: Table) -> list[str]:
    """What the layer does on real pictures; then the demo's outcome, and what to believe of it."""
    found = []
    for row in table.rows:
        spread = f" ± {row.spread:.2f}" if row.spread is not None else ""
        runs = "one run" if row.n == 1 else f"{row.n} runs"
        name = {"none": "no recalibration", "se": "SE", "mssar": "MS-SAR"}
        found.append(
            f"Here, with {name.get(row.recalibration, row.recalibration)}: "
            f"{row.mean or 0:.2f}{spread} % "
            f"of the test pictures wrong ({runs})."
        )
    ours = next((row for row in table.rows if row.recalibration == "mssar" and row.claim), None)
    found += [] if ours is None or ours.claim is None else _verdict(ours, ours.claim)
    return [wording()["demo"]["headline"], *found]


def compared(of: Comparison) -> list[str]:
    """Who comes out first and what that cost; no more than the runs allow to say."""
    where = f"{of.network} on {_data(of.dataset)}"
    found = [f"{where}: the lowest error is {_with_error(_best(of))}."]
    others = sorted(_over_others(of), key=lambda pair: pair[0].mean)
    close = [_with_error(row) for row, claim in others if claim.verdict != "holds"]
    if close:
        said = "No further from that than chance may be, or of too few runs to say"
        found.append(f"{said}: {', '.join(close)}.")
    if len(others) > len(close) and len(others) > 1:
        found.append("It was picked because it is the lowest: part of its lead may be chance.")
    timed = sorted((row for row in of.rows if row.ratio), key=lambda row: row.ratio or 0)
    if len(timed) > 1:
        said = ", ".join(f"{spelt(row.recalibration)} {row.ratio:.2f}" for row in timed)
        found.append(f"A step of training over one without recalibration: {said}.")
    return found


def _with_error(row: Compared) -> str:
    return f"{spelt(row.recalibration)} with {plus_minus(row.mean, row.spread)} % (n={row.n})"


def _best(of: Comparison) -> Compared:
    return min(of.rows, key=lambda row: row.mean)


def _over_others(of: Comparison) -> list[tuple[Compared, Claim]]:
    """How much lower the best row's error is than each other's."""
    best = _best(of)
    return [
        (row, judged(_kind(row), None, (side_of(best), side_of(row))))
        for row in of.rows
        if row is not best
    ]


def _kind(row: Compared) -> str:
    return f"{row.recalibration} {row.options}".rstrip()


def _verdict(row: Row, claim: Claim) -> list[str]:
    runs = "one run" if row.n == 1 else f"{row.n} runs"
    more = "; `mssar demo --seeds 3` makes three of each" if row.n < ENOUGH else ""
    said = {
        "holds": "MS-SAR is ahead of no recalibration by more than chance (95 % interval).",
        "reversed": "MS-SAR is behind no recalibration by more than chance (95 % interval).",
        "none": (
            "Between MS-SAR and no recalibration there is no difference that could not be chance."
        ),
        "unclear": f"From {runs} of MS-SAR nothing can be said about small differences{more}.",
    }.get(claim.verdict)
    return [said] if said else []
