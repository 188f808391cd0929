"""``mssar compare`` as its user meets it."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab import arrays, one_step
from test_cli import fail
from test_experiments import record_of
from typer.testing import CliRunner, Result

from mssar.lab import cli, data, records, timings
from mssar.lab.commands import submission
from mssar.lab.commands.train import combinations
from mssar.lab.run import Run

DATA = arrays(20, 12, 4)
QUICK = ("resnet8", "--dataset", "cifar10", "--epochs", "1", "--batch", "8", "--device", "cpu")
OURS = ("--modules", "none,simam,mssar", "--seconds", "0.01")


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "load", lambda *_: DATA)
    monkeypatch.chdir(tmp_path)


def invoke(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, ["compare", *words])
    assert result.exit_code == status, result.output + repr(result.exception)
    return result


def test_everything_is_trained_once_recorded_timed_and_shown():
    said = invoke(*QUICK, *OURS, "--seeds", "2").stdout
    found = records.read(Path("runs/compare/records.jsonl"))
    assert [(r.run["seed"], r.run["recalibration"]) for r in found] == [
        (seed, kind) for seed in (0, 1) for kind in ("none", "simam", "mssar")
    ]
    measured = timings.read(Path("runs/compare/timings.jsonl"))
    assert [(t.recalibration, t.what, t.batch) for t in measured] == [
        (kind, "training", 8) for kind in ("none", "simam", "mssar")
    ]
    lines = [" ".join(line.split()) for line in said.splitlines()]
    (mine,) = [line for line in lines if line.startswith("simam ")]
    assert "(n=2)" in mine
    assert f"{found[1].params:,} {found[1].macs:,} {measured[1].median_ms:.4g}" in mine
    assert mine.endswith(f"{measured[1].median_ms / measured[0].median_ms:.2f}")
    assert "recalibrations compared" in Path("runs/compare/report.html").read_text("utf-8")

    again = invoke(*QUICK, *OURS, "--seeds", "2", "--json")
    assert "begins" not in again.stderr
    assert records.read(Path("runs/compare/records.jsonl")) == found
    assert timings.read(Path("runs/compare/timings.jsonl")) == measured
    rows = json.loads(again.stdout)["rows"]
    assert [row["n"] for row in rows] == [2, 2, 2]
    assert rows[1]["ms"] == measured[1].median_ms


def test_times_are_those_of_this_very_call():
    """Not of another batch or of compiled steps, though these were measured later."""
    words = (*QUICK[:-4], "--device", "cpu", "--modules", "none,simam", "--seeds", "1")
    place = Path("runs/compare/timings.jsonl")

    def shown(batch: int) -> list[float]:
        said = invoke(*words, "--batch", str(batch), "--seconds", "0.01", "--json").stdout
        return [row["ms"] for row in json.loads(said)["rows"]]

    first, other = shown(8), shown(10)
    mine = timings.read(place)[:2]
    assert first == [one.median_ms for one in mine] != other
    late = {"made": "2099-01-01T00:00:00+00:00", "median_ms": 1e3, "p80_ms": 1e4}
    timings.append(place, *(replace(one, compile=True, **late) for one in mine))
    for changed in ({"hardware": "another machine"}, {"torch": "1.9.0"}):
        elsewhere = {"environment": mine[0].environment | changed}
        timings.append(place, *(replace(one, **elsewhere, **late) for one in mine))
    newer = {"code": mine[0].code | {"source": "sha256:another"}}
    timings.append(place, *(replace(one, **newer, **late) for one in mine))
    assert shown(8) == first
    assert shown(10) == other
    assert len(timings.read(place)) == 12  # nothing was measured again


def test_a_budget_holds_for_timing_too():
    words = (*QUICK, "--modules", "none,simam", "--seeds", "1")
    place, long = Path("runs/compare/timings.jsonl"), ("--seconds", "40", "--time-budget", "1m")
    for _ in range(2):  # not 75, or it would be called for ever
        late = invoke(*words, *long, status=1)
        assert "simam" in late.stdout  # the table is there all the same
        assert "all is trained, and there was no time to time steps" in str(late.exception)
    assert not place.exists()
    briefly = (*words, "--seconds", "2", "--time-budget")
    said = str(invoke(*briefly, "9s", status=1).exception)
    told = re.search(r"give a --time-budget of (\d+)s and as much more as it takes to set up", said)
    invoke(*briefly, f"{int(told[1]) + 10}s")
    assert [t.recalibration for t in timings.read(place)] == ["none", "simam"]


def test_what_is_trained_and_has_no_time_left_is_timed_by_the_same_command(monkeypatch):
    """Where the training, and not the timing, took most of the budget."""
    words = (*QUICK, "--modules", "none,simam", "--seeds", "1", "--seconds", "0.1")
    place = Path("runs/compare/timings.jsonl")
    carry_out, clock, ahead = submission.carry_out, time.monotonic, [0.0]

    def slow(*given: Any, **more: Any) -> Any:
        made = carry_out(*given, **more)
        ahead[0] += 40.0
        return made

    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])
    with monkeypatch.context() as patch:
        patch.setattr(submission, "carry_out", slow)
        stopped = invoke(*words, "--time-budget", "45s", status=75)
    assert "too little is left of the time budget to time steps; the same" in stopped.stderr
    assert not place.exists()
    invoke(*words, "--time-budget", "45s")
    assert [t.recalibration for t in timings.read(place)] == ["none", "simam"]


def test_timings_that_cannot_be_read_are_named_before_anything_is_trained(capsys, monkeypatch):
    place = Path("runs/compare/timings.jsonl")
    place.parent.mkdir(parents=True)
    place.write_text('{"half')
    line = fail(capsys, monkeypatch, "compare", *QUICK, "--modules", "none", "--seeds", "1")
    assert line.startswith(f"mssar: {place}, line 1: not JSON")
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_what_is_recorded_beside_is_not_trained_again_and_what_is_left_goes_on(monkeypatch):
    place = Path("kept/compare.jsonl")
    known = combinations(["resnet8"], ["none"], {}, "cifar10", [0], None, {"epochs": 1, "batch": 8})
    done = record_of(known[0], 50.0)
    here = {**done.data, "checksum": DATA.checksum}
    other = record_of(known[0], 40.0, data={**here, "checksum": "sha256:other"})
    how = {"execution": {**done.execution, "precision": "fp32"}}
    bf16 = replace(record_of(known[0], 30.0, data=here), finished="2027-01-01T00:00:00+00:00")
    mine = record_of(known[0], 50.0, data=here, **how)
    for name, record in (("table3", mine), ("x", replace(other, **how)), ("y", bf16)):
        records.append(Path(f"kept/{name}.jsonl"), record)
    words = (*QUICK, "--modules", "none,simam", "--seeds", "1", "--records", str(place))
    with one_step(monkeypatch):
        stopped = invoke(*words, "--time-budget", "5m", status=75)
    assert "the same command goes on" in stopped.stderr
    rows = json.loads(invoke(*words, "--seconds", "0", "--json").stdout)["rows"]
    assert [(row["recalibration"], row["n"], row["ms"]) for row in rows] == [
        ("none", 1, None),
        ("simam", 1, None),
    ]
    assert rows[0]["mean"] == 50.0  # as recorded, on these images
    assert [r.run["recalibration"] for r in records.read(place)] == ["simam"]


def test_options_go_to_those_that_take_them():
    kinds = ["none", "se", "cbam", "simam", "mssar"]
    given = {"reduction": 4}
    asked = combinations(["resnet20"], kinds, given, "cifar10", range(2), None, {"epochs": 16})
    assert {r.recalibration: r.options.get("reduction") for r in asked} == {
        "none": None,
        "se": 4,
        "cbam": 4,
        "simam": None,
        "mssar": 4,
    }
    assert [r.seed for r in asked] == [0] * 5 + [1] * 5
    assert len({r.recipe for r in asked}) == 1
    assert asked[0].recipe.epochs == 16
    assert asked[0].recipe.drops == (8, 12)  # at the same shares of its length
    assert asked[0] == Run("resnet20", "none", {}, "cifar10", asked[0].recipe, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet21",), "no network 'resnet21'; there are resnet8, "),
        (("resnet8", "--modules", "none,cbma"), "simam; got 'cbma'"),
        (("resnet8", "--modules", ""), "simam; got ''"),
        (("resnet8", "--recipe", "mine"), "no recipe 'mine'; there are "),
        (
            ("resnet8", "--modules", "none,simam", "--reduction", "2"),
            "nothing that is trained here takes --reduction",
        ),
        (("resnet8", "--seconds", "-1"), "--seconds is 0 or more; got -1"),
        (("resnet8", "--timings", "x.json"), "--timings is a file that ends in .jsonl; got x.json"),
        (("resnet8", "--modules", "none", "--batch", "1"), "batch is 2 or more"),
        (("resnet8", "--seeds", "0"), "Invalid value for '--seeds'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(capsys, monkeypatch, words, message):
    assert message in fail(capsys, monkeypatch, "compare", *words)
    assert not Path("runs").exists()


def test_help_has_examples():
    said = invoke("--help").stdout
    assert "mssar compare resnet20 --dataset cifar100 --seeds 3 --time-budget 9m" in said
    for option in ("--modules", "--seeds", "--reduction", "--records", "--fleet", "--json"):
        assert option in said
