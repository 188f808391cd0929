"""``mssar bench`` as its user meets it."""

import json
from pathlib import Path

import pytest
import typer
from test_timings import timing
from typer.testing import CliRunner, Result

from mssar.lab import timings
from mssar.lab.commands import bench as command
from mssar.lab.engine import timing as engine
from mssar.lab.engine.execution import Execution
from mssar.lab.run import Run
from mssar.lab.timings import Timing, ratio

QUICK = ("--batch", "4", "--seconds", "0.05", "--device", "cpu")


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Result:
    app = typer.Typer(rich_markup_mode="rich")
    app.command()(command.bench)
    return CliRunner().invoke(app, list(words))


def run(*words: str) -> Result:
    result = invoke(*words)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_every_measurement_is_shown_and_added_to_the_file():
    file = Path("kept/cpu.jsonl")
    timings.append(file, timing())
    result = run("resnet8", *QUICK, "--records", str(file))
    older, *found = timings.read(file)
    assert older == timing()
    assert [(t.what, t.recalibration) for t in found] == [
        (what, kind) for what in ("training", "inference") for kind in ("none", "se", "mssar")
    ]
    for t in found:
        assert (t.network, t.batch, t.size, t.classes) == ("resnet8", 4, (3, 32, 32), 10)
        assert (t.precision, t.graph, t.compile, t.peak_bytes) == ("fp32", False, False, None)
        assert t.options == {
            "none": {},
            "se": {"reduction": 1},
            "mssar": {"scales": [1, 2, 4], "strategy": "regional", "reduction": 1},
        }[t.recalibration]  # fmt: skip
        shown = f"resnet8 {t.what} {t.recalibration} 4 {command._digits(t.median_ms)} "
        (line,) = [
            line for line in map(" ".join, map(str.split, result.stdout.splitlines()))
            if line.startswith(shown)
        ]  # fmt: skip
        assert line.endswith(f" {ratio(t, found):.2f}")
    assert found[0].environment["hardware"] in result.stdout
    assert f"timings: {file}" in result.stdout
    assert "resnet8 training, batch 4: setting up se" in result.stderr


def test_json_is_all_that_is_printed_and_nothing_is_kept(tmp_path):
    words = ("--recalibration", "se,none,se", "--what", "inference", "--json", "--precision")
    found = json.loads(run("resnet8", *QUICK, *words, "bf16").stdout)
    assert [t["recalibration"] for t in found] == ["se", "none"]
    assert [t["ratio"] for t in found] == [found[0]["median_ms"] / found[1]["median_ms"], 1.0]
    for t in found:
        del t["ratio"]
        assert timings.parse(json.dumps(t)).precision == "bf16"
    assert list(tmp_path.iterdir()) == []


def test_without_none_there_is_no_ratio():
    (found,) = json.loads(
        run("resnet8", *QUICK, "--recalibration", "se", "--what", "inference", "--json").stdout
    )
    assert found["ratio"] is None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Run], str, Execution, float]]:
    """What would be measured, in order."""
    seen: list[tuple[list[Run], str, Execution, float]] = []

    def measure(runs: list[Run], what: str, how: Execution, seconds: float, _: object) -> object:
        seen.append((runs, what, how, seconds))
        return [
            timing(network=run.network, recalibration=run.recalibration, what=what) for run in runs
        ]

    monkeypatch.setattr(engine, "measure", measure)
    return seen


def test_batches_are_the_recipes(measured):
    run("resnet20", "densenet100", "resnext50", "resnet20", "--what", "training", "--device", "cpu")
    groups = [({r.network for r in runs}, {r.recipe.batch for r in runs}) for runs, *_ in measured]
    assert groups == [({"resnet20"}, {128}), ({"densenet100"}, {64}), ({"resnext50"}, {32})]
    assert [seconds for *_, seconds in measured] == [3.0] * 3


def test_memory_is_shown_in_mebibytes(measured):
    assert measured == []
    assert "1,048,576" in run("resnet20", "--device", "cpu").stdout


def test_what_was_measured_is_kept_when_a_later_one_fails(monkeypatch):
    file = Path("cpu.jsonl")

    def measure(runs: list[Run], what: str, *_: object) -> list[Timing]:
        if what == "inference":
            raise KeyboardInterrupt
        return [timing(recalibration=run.recalibration) for run in runs]

    monkeypatch.setattr(engine, "measure", measure)
    assert invoke("resnet20", "--device", "cpu", "--records", str(file)).exit_code == 130
    assert [t.recalibration for t in timings.read(file)] == ["none", "se", "mssar"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet21",), "no network 'resnet21'; there are resnet8, "),
        (("resnet20", "resnet21"), "no network 'resnet21'"),
        (
            ("resnet20", "--recalibration", "none,cbma"),
            "none, se, mssar, eca, cbam, coord, ela, ge, simam; got 'cbma'",
        ),
        (("resnet20", "--recalibration", ""), "coord, ela, ge, simam; got ''"),
        (("resnet20", "--what", "trainning"), "--what is training or inference, or training,infe"),
        (("resnet20", "--batch", "1"), "batch is 2 or more, for BN; got 1"),
        (("resnet20", "--batch", "0"), "batch is 2 or more, for BN; got 0"),
        (("resnet20", "--seconds", "0"), "--seconds is above 0; got 0"),
        (("resnet20", "--seconds", "nan"), "--seconds is above 0; got nan"),
        (("resnet20", "--seconds", "inf"), "--seconds is above 0; got inf"),
        (("resnet20", "--precision", "fp8"), "precision is one of bf16, tf32, fp32; got 'fp8'"),
        (("resnet20", "--device", "tpu"), "device is auto, cpu, cuda or cuda:N; got 'tpu'"),
        (("resnet20", "--records", "."), ". is a folder; --records takes a file"),
        (("resnet20", "--records", "old.jsonl"), "old.jsonl, line 1: schema 99, and 1 is read"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(measured, words, message):
    Path("old.jsonl").write_text('{"schema": 99}\n')
    found = invoke(*words).exception
    assert isinstance(found, ValueError)
    (line,) = str(found).splitlines()
    assert message in line
    assert measured == []


def test_help_has_an_example_and_every_option():
    said = run("--help").stdout
    assert "mssar bench resnet20" in said
    for option in (
        *("--recalibration", "--batch", "--what", "--precision", "--device", "--compile"),
        *("--seconds", "--records", "--json"),
    ):
        assert option in said
