"""What a page is made of: everything that can be read, and a line for everything that cannot."""

import json
import os
from dataclasses import asdict

import pytest
import torch
from lab import Log, arrays, opened, tiny, trained
from safetensors.torch import save_file
from test_records import changed, epoch, record, without
from test_timings import timing

from mssar.lab import records
from mssar.lab.engine.checkpoint import Progress
from mssar.lab.engine.result import finished
from mssar.lab.report.collect import collect

PROGRESS = asdict(Progress(tiny().as_dict(), "", "fp32", "", ""))


def test_one_bad_line_costs_that_line(tmp_path):
    good = [record("a").as_line(), record("b").as_line(), record("c").as_line()]
    bad = {
        "error: expected float": changed(error=None),
        "error: not finite": good[0].replace('"error":40.0', '"error":NaN'),
        "error5: missing": without("error5"),
        "written by a newer mssar; update this one": changed(schema=2),
        "not JSON": good[0][: len(good[0]) // 2],
        "a record is a JSON object; got list": "[]",
        "seconds: not finite": good[0].replace("2.5", "1e999"),
    }
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join([good[0], *bad.values(), good[1], "", good[2]]))
    found = collect([tmp_path])
    assert [one.id for one in found.records] == ["a", "b", "c"]
    assert len(found.problems) == len(bad)
    for number, (reason, problem) in enumerate(zip(bad, found.problems, strict=True), 2):
        assert problem.startswith(f"{file}, line {number}: ")
        assert reason in problem
        assert "\n" not in problem


def test_files_that_hold_nothing_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.jsonl").write_text("[" * 100_000)
    (tmp_path / "d.jsonl").write_text(record().as_line())
    found = collect([tmp_path, tmp_path / "e.jsonl"])
    assert len(found.records) == 1
    reasons = (
        "a.jsonl: empty",
        "b.jsonl: not text in UTF-8",
        "c.jsonl, line 1",
        "e.jsonl: No such",
    )
    for problem, reason in zip(found.problems, reasons, strict=True):
        assert reason in problem


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_named_and_not_waited_for(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    names = ("a.jsonl", "run/epoch-0001.safetensors", "record.json")
    for name in names:
        os.mkfifo(tmp_path / name)
    (tmp_path / "d.jsonl").write_text(record().as_line())
    found = collect([tmp_path])
    assert len(found.records) == 1
    assert sorted(found.problems) == sorted(
        f"{tmp_path / name}: not a regular file" for name in names
    )
    for read in (records.read, finished):
        with pytest.raises(ValueError, match="not a regular file"):
            read(tmp_path / "a.jsonl" if read is records.read else tmp_path)


def test_records_and_timings_may_lie_anywhere_below(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "times.jsonl").write_text(timing().as_line() + "\n" + record("x").as_line())
    (tmp_path / "top.jsonl").write_text(record("y").as_line())
    found = collect([tmp_path, tmp_path / "top.jsonl"])
    assert found.timings == [timing()]
    assert sorted(one.id for one in found.records) == ["x", "y"]
    assert not found.problems


def test_a_run_counts_once_and_its_folder_is_known(tmp_path):
    folder = tmp_path / "runs" / "one"
    made = trained(tiny(recalibration="mssar"), arrays(), folder)
    (tmp_path / "records.jsonl").write_text(made.as_line() + "\n")
    found = collect([tmp_path])
    assert [one.id for one in found.records] == [made.id]
    assert found.folders == {made.id: folder}
    assert not found.going


def test_an_unfinished_run_shows_its_course_so_far(tmp_path):
    folder = tmp_path / "going"
    run, log = tiny(epochs=3), Log()
    with opened(run, arrays(), folder, log) as training:
        for _ in training.work():
            if len(log.epochs) == 2:
                break
    found = collect([tmp_path])
    (progress,) = found.going.values()
    assert list(found.going) == [folder]
    assert [entry["epoch"] for entry in progress.history] == [1, 2]
    assert progress.history[0]["test_error"] == log.epochs[0][1].test_error
    assert not found.records


def test_a_broken_checkpoint_is_named_and_the_one_before_is_read(tmp_path):
    folder, log = tmp_path / "going", Log()
    with opened(tiny(epochs=3), arrays(), folder, log) as training:
        for _ in training.work():
            if len(log.epochs) == 2:
                break
    (folder / "epoch-0002.safetensors").write_bytes(b"nothing")
    found = collect([tmp_path])
    assert len(found.going[folder].history) == 1
    (problem,) = found.problems
    assert "epoch-0002.safetensors is no readable checkpoint" in problem


@pytest.mark.parametrize("text", ["{}", json.dumps({"schema": 1}), "null", "0"])
def test_a_record_of_a_run_that_is_none_is_named(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    found = collect([tmp_path])
    assert not found.records
    assert len(found.problems) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"run": None},
        {"run": []},
        {"history": 3},
        {"epoch": "<b>"},
        {"history": [{"test_error": 10**400}]},
        {"history": [{**asdict(epoch(1)), "test_error": "<b>"}]},
        {"history": [{**asdict(epoch(1)), "colour": "red"}]},
        {"schema": "x" * 500},
    ],
)
def test_a_checkpoint_that_says_nonsense_is_named(tmp_path, changes):
    said = {"mssar": json.dumps({**PROGRESS, **changes})}
    save_file({"x": torch.zeros(1)}, tmp_path / "epoch-0001.safetensors", said)
    found = collect([tmp_path])
    assert not found.going
    (problem,) = found.problems
    assert "epoch-0001.safetensors is no readable checkpoint" in problem
    assert len(problem) < 400


def test_a_deep_checkpoint_is_named(tmp_path):
    deep = '{"schema": 1, "run": ' + "[" * 100_000 + "]" * 100_000 + "}"
    save_file({"x": torch.zeros(1)}, tmp_path / "epoch-0001.safetensors", {"mssar": deep})
    assert len(collect([tmp_path]).problems) == 1


def test_folders_that_vanish_are_not_there(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(record(name).as_line())
    scan = os.scandir

    def vanishing(path):
        if str(path).endswith("a"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert [one.id for one in collect([tmp_path]).records] == ["b"]
