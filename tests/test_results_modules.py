"""What pages say of others' modules in MS-SAR's place, against the records."""

import re
import sys
from dataclasses import replace
from statistics import fmean

from reproduced import RECORDS, earlier, everything, recorded
from test_results import ROOT

from mssar.lab import timings
from mssar.lab.records import Record
from mssar.lab.report.content import ORDER, Claim
from mssar.lab.report.groups import claim
from mssar.lab.report.phrases import plus_minus, spelt

sys.path.insert(0, str(ROOT / "tools"))
import modules

PAGE = (ROOT / "docs" / "results-modules.md").read_text()


def runs(kind: str, **changes: float) -> list[Record]:
    return recorded("resnet20", kind, "cifar100", **changes)


def compared(ours: list[Record], theirs: list[Record]) -> Claim:
    return claim("", ours, theirs, None)


def by_top5(found: list[Record]) -> list[Record]:
    return [replace(record, error=record.error5) for record in found]


def told(made: Claim) -> str:
    return plus_minus(made.gain, made.margin)


def test_the_table_has_a_row_a_module_and_says_what_is_left():
    rows = re.findall(r"^\| (\S+) \| (.+?) \|", PAGE, re.MULTILINE)
    said = {name: error for name, error in rows if name not in ("module", "---")}
    assert [*said] == [spelt(kind) for kind in ORDER]
    for kind in ORDER:
        found = runs(kind)
        assert said[spelt(kind)].endswith(f"(n={len(found)})" if found else "no record yet")
    left = ", ".join(spelt(kind) for kind in ORDER if not runs(kind))
    assert f"(<!-- results: modules_left -->{left}<!-- end of results -->)" in PAGE


def test_time_and_memory_stand_in_the_table_when_all_were_measured():
    known = [kind for kind in ORDER if runs(kind)]
    like = next(
        one
        for one in timings.read(ROOT / "records" / "timings")
        if (one.network, one.recalibration, one.what) == ("resnet20", "none", "training")
    )
    measured = [
        replace(
            like,
            recalibration=kind,
            options=runs(kind)[0].run["options"],
            median_ms=like.median_ms * n,
            p20_ms=like.p20_ms * n,
            p80_ms=like.p80_ms * n,
            peak_bytes=like.peak_bytes * (n + 1),
            made="2099-01-01T00:00:00+00:00",
        )
        for n, kind in enumerate(known, 1)
    ]
    head, lines, _ = modules.errors(RECORDS, measured)
    assert head[-2:] == ["a step, over none", "memory, over none"]
    said = {line[0]: line[-2:] for line in lines}
    assert {len(line) for line in lines} == {len(head)}
    for n, kind in enumerate(known, 1):
        assert said[spelt(kind)] == [f"{n:.2f}", f"{(n + 1) / 2:.2f}"]
    head, lines, _ = modules.errors(RECORDS, measured[:-1])  # that of one is not known
    assert head[-1] == "multiply-adds"
    assert {len(line) for line in lines} == {len(head)}


def test_what_is_said_of_gather_excite_follows_from_the_records():
    none, se, ge, ours = (runs(kind) for kind in ("none", "se", "ge", "mssar"))
    over, beside = compared(ge, none), compared(se, ge)
    assert (over.verdict, beside.verdict) == ("holds", "none")
    assert ge[0].params == none[0].params  # "has no parameter"
    assert f"Its error is {told(over)} points below none, only just beyond chance" in PAGE
    assert f"(p = {over.p:.2g}), and that" in PAGE
    assert f"It is {told(beside)} above SE's." in PAGE
    first, every = (of("resnet20", "none", "cifar100") for of in (earlier, everything))
    others = [compared(ge, first), compared(ge, every)]
    assert [one.verdict for one in others] == ["none", "none"]
    assert len(every) == 5
    told_of = "with the earlier ones it is {}, with all five {}."
    assert told_of.format(*map(told, others)) in PAGE
    errors = [fmean(r.epochs[-1].train_error for r in found) for found in (ge, none, se, ours)]
    assert errors[0] == max(errors)
    said = "its training error is {:.2f} %, none's {:.2f}, SE's {:.2f} and MS-SAR's {:.2f}."
    assert said.format(*errors) in PAGE
    gained = compared(ours, ge)
    assert gained.verdict == "none"
    assert f"**MS-SAR is {told(gained)} points below it,** which may be chance" in PAGE
    assert f"(p = {gained.p:.1g})" in PAGE
    trainings = everything("resnet20", "mssar", "cifar100")
    all_of_them = compared(trainings, ge)
    assert all_of_them.verdict == "holds"
    assert f"all {len(trainings)} of its trainings are {told(all_of_them)} below it" in PAGE
    fifth = compared(by_top5(ours), by_top5(ge))
    assert f"In top-5 error it is {told(fifth)} points" in PAGE
    assert min(over.p, gained.p, fifth.p) > 0.05 / 28  # "none of gather-excite's would hold"


def test_what_is_said_of_the_weight_decay_and_of_the_seconds_follows_from_the_records():
    decayed, ge = runs("none", weight_decay=5e-4), runs("ge")
    made, errors = compared(decayed, ge), [r.error for r in decayed]
    assert made.verdict == "holds"  # "may do more", "only just beyond chance"
    assert f"brings the error to {fmean(errors):.2f} ± " in PAGE
    just = f"only just beyond chance, too (p = {made.p:.2g})."
    assert f"which is {told(made)} below gather-excite's, {just}" in PAGE
    others = {r.run["recalibration"] for r in RECORDS if r.run["recipe"]["weight_decay"] == 5e-4}
    assert others == {"none", "mssar"}  # "tried with MS-SAR alone"
    taken = fmean(r.seconds / r.execution["together"] for r in ge)
    assert f"in about {round(taken)} seconds of an H200" in PAGE
