"""``mssar reproduce`` as its users meet it."""

import json
from pathlib import Path

import pytest
from lab import one_step, tiny_everywhere
from test_cli import fail
from test_command_train import _small, invoke, run  # noqa: F401, a fixture

from mssar.lab import records
from mssar.lab.experiments import cell
from mssar.lab.recipes import CIFAR_RESNET, varied


@pytest.fixture
def _quick(monkeypatch):
    quick = varied(CIFAR_RESNET, epochs=1, drops=(), batch=16, padding=1)
    monkeypatch.setattr(cell, "usual_recipe", lambda *_: quick)


@pytest.mark.usefixtures("_quick")
def test_reproduce_runs_what_is_missing_and_then_nothing():
    words = ("reproduce", "table3", "--nets", "resnet20", "--datasets", "cifar10", "--seeds", "1")
    assert "nothing is left to run" in run(*words, "--no-additional").stdout
    assert [r.run["options"].get("reduction") for r in records.read(Path("records"))] == [
        None,
        1,
        1,
    ]
    said = run(*words).stdout
    found = records.read(Path("records"))
    assert [(r.run["recalibration"], r.run["options"].get("reduction")) for r in found] == [
        ("none", None),
        ("mssar", 1),
        ("se", 1),
        ("mssar", 3),
    ]
    assert Path("records/table3.jsonl").is_file()
    assert "nothing is left to run" in said
    ours = found[0].error
    line = ["resnet20", "none", "cifar10", "8.61", f"{ours:.2f}", "1", f"{ours - 8.61:+.2f}"]
    assert [*line, "done"] in map(str.split, said.splitlines())
    again = run(*words)
    assert again.stderr == ""
    assert len(records.read(Path("records"))) == 4
    more = json.loads(run("reproduce", "--list", "table3", "--seeds", "2", "--json").stdout)
    assert {cell["outcome"] for cell in more["cells"]} == {"", "open", "unclear"}
    left = {(c["network"], c["dataset"]): c["left"] for c in more["cells"]}
    assert left["resnet20", "cifar10"] == 1
    assert left["resnet20", "cifar100"] == 2
    assert more["seconds_left"] > 0
    file = Path("records/table3.jsonl")
    first, rest = file.read_text().split("\n", 1)
    assert '"precision":"fp32"' in first
    file.write_text(first.replace('"precision":"fp32"', '"precision":"bf16"') + "\n" + rest)
    listed = run("reproduce", "--list", *words[1:]).stdout
    assert "1 run left" in listed  # one in bf16 is not comparable with three in fp32
    said = run(*words).stderr
    assert "1 of 1 run to train: recorded, but not in fp32, as is usual here" in said


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("more", [(), ("--submit", "local", "--device", "cpu")])
def test_reproduce_files_a_record_under_its_experiment(more, monkeypatch):
    """Of two that share a run, under the one that was named first."""
    tiny_everywhere(monkeypatch)
    words = ("--nets", "resnet20", "--datasets", "cifar100", "--seeds", "1")
    run("reproduce", "strategy", "table3", *words, *more)

    def filed(name: str) -> list[tuple[str, str | None]]:
        found = [r.run for r in records.read(Path(f"records/{name}.jsonl"))]
        return [(one["recalibration"], one["options"].get("strategy")) for one in found]

    assert sorted(filed("strategy")) == [("mssar", "regional"), ("mssar", "sliding")]
    assert sorted(filed("table3")) == [("mssar", "regional"), ("none", None), ("se", None)]
    assert "nothing is left to run" in run("reproduce", "strategy", "table3", *words).stdout


@pytest.mark.usefixtures("_quick")
def test_reproduce_goes_on_where_its_budget_ended(monkeypatch):
    words = ("reproduce", "table3", "--nets", "resnet20", "--datasets", "cifar10", "--seeds", "1")
    with one_step(monkeypatch):
        stopped = invoke(*words, "--time-budget", "5m")
    assert stopped.exit_code == 75
    assert "the same command goes on" in stopped.stderr
    run(*words, "--time-budget", "5m")
    assert len(records.read(Path("records"))) == 4


def test_reproduce_names_what_it_knows(capsys, monkeypatch):
    line = fail(capsys, monkeypatch, "reproduce")
    assert (
        "name an experiment (table3, table4, strategy, stage, recipe, ilsvrc), or pass --list"
        in line
    )
    assert "table3" in fail(capsys, monkeypatch, "reproduce", "table9")
    assert "resnet20" in fail(capsys, monkeypatch, "reproduce", "table3", "--nets", "vgg")
    Path("records").mkdir()
    Path("records/old.jsonl").write_text('{"schema": 99}\n')
    line = fail(capsys, monkeypatch, "reproduce", "--list")
    assert "records/old.jsonl, line 1: schema 99, and 1 is read here" in line
