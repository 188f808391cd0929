"""Records: what is written is read, what is broken is named, and nothing is lost."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab import program

from mssar.lab import records
from mssar.lab.recipes import CIFAR_RESNET, varied
from mssar.lab.records import SCHEMA, Epoch, Record
from mssar.lab.run import Run, run_from_dict

TWO = varied(CIFAR_RESNET, epochs=2)


def epoch(number: int) -> Epoch:
    return Epoch(number, 0.1, 1.0 / number, 50.0, 1.25, 40.0, 1 / 3, 2.5)


def record(name: str = "a", **changes: Any) -> Record:
    made = Record(
        id=name,
        run=Run("densenet100", "mssar", {"scales": (1, 2)}, recipe=TWO, seed=3).as_dict(),
        data={"checksum": "sha256:00", "classes": 3, "train": 20, "test": 10},
        execution={"device": "cpu", "precision": "fp32", "together": 1},
        environment={"hardware": "Prozeßor “x”\u2028", "torch": "2"},
        code={"version": "1", "commit": None},
        command='mssar train "a b"',
        params=10,
        macs=20,
        epochs=(epoch(1), epoch(2)),
        error=40.0,
        error5=1 / 3,
        class_errors=(0.0, 20.0, 100.0),
        seconds=5.0,
        started="2020-01-01T00:00:00+00:00",
        finished="2020-01-01T00:00:05+00:00",
        interruptions=1,
    )
    return replace(made, **changes)


def changed(within: str = "", **changes: Any) -> str:
    """A record's line with some fields, or some of an object in it, replaced."""
    found = json.loads(record().as_line())
    inner = found["epochs"][0] if within == "epochs" else found[within] if within else found
    inner.update(changes)
    return json.dumps(found)


def without(name: str, within: str = "") -> str:
    found = json.loads(record().as_line())
    inner = found["epochs"][0] if within == "epochs" else found[within] if within else found
    del inner[name]
    return json.dumps(found)


def test_a_record_survives_its_line():
    line = record().as_line()
    assert records.parse(line) == record()
    assert "\n" not in line
    assert run_from_dict(records.parse(line).run) == Run(
        "densenet100", "mssar", {"scales": (1, 2)}, recipe=TWO, seed=3
    )


def test_a_file_and_a_folder_are_read_in_order(tmp_path):
    for name in "bac":
        records.append(tmp_path / "two.jsonl", record(name))
    records.append(tmp_path / "one.jsonl", record("d"))
    (tmp_path / "notes.txt").write_text("no record")
    assert [r.id for r in records.read(tmp_path / "two.jsonl")] == ["b", "a", "c"]
    assert [r.id for r in records.read(tmp_path)] == ["d", "b", "a", "c"]


def test_where_nothing_is_there_are_no_records(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    assert records.read(tmp_path / "missing.jsonl") == []
    assert records.read(tmp_path) == []


BAD = {
    "half a line": (record().as_line()[:200], "not JSON"),
    "no object": ("[]", "a record is a JSON object; got list"),
    "a number": ("3", "a record is a JSON object; got int"),
    "text": ("epoch 1", "not JSON"),
    "a control character": ('{"id": "a\x01"}', "Invalid control character at column 10"),
    "NaN": (changed(error=float("nan")), "error: not finite"),
    "infinity": (changed("epochs", train_loss=float("inf")), "epochs[0].train_loss: not finite"),
    "1e999": (changed(error=77.25).replace("77.25", "1e999"), "error: not finite"),
    "1e999 in an epoch": (
        changed("epochs", test_loss=77.25).replace("77.25", "-1e999"),
        "epochs[0].test_loss: not finite",
    ),
    "1e999 of a class": (changed(class_errors=[77.25]).replace("77.25", "1e999"), "class_errors"),
    "no hardware": (changed("environment", hardware=None), "environment.hardware: expected str"),
    "together with none": (changed("execution", together=0), "execution.together: expected float"),
    "images in words": (changed("data", train="x"), "data.train: expected int; got 'x'"),
    "time below nothing": (changed(seconds=-5.0), "seconds: expected float >= 0.0; got -5.0"),
    "1e999 in the data": (changed("data", classes=77.25).replace("77.25", "1e999"), "data"),
    "a number too large": (changed(class_errors=[10**400]), "class_errors[0]: too large a number"),
    "a loss too large": (changed("epochs", test_loss=1e308), "epochs[0].test_loss: too large"),
    "no multiply-adds": (changed(macs=0), "macs: expected int >= 1; got 0"),
    "an epoch too few": (
        changed(epochs=json.loads(record().as_line())["epochs"][:1]),
        "epochs: 1,",
    ),
    "a name on two lines": (changed(**{"a\nmssar: b": 1}), r"'a\nmssar: b': unknown"),
    "a long name": (changed(**{"a" * 500: 1}), "a" * 60 + ": unknown"),
    "a long schema": (changed(schema="1" * 500), "schema '" + "1" * 59 + ", and"),
    "a field missing": (without("macs"), "macs: missing"),
    "an epoch's field missing": (without("lr", "epochs"), "epochs[0].lr: missing"),
    "a run's field missing": (without("seed", "run"), "run.seed: expected int"),
    "an unknown field": (changed(note="x"), "note: unknown"),
    "an epoch's unknown field": (changed("epochs", top1=1.0), "epochs[0].top1: unknown"),
    "no schema": (without("schema"), "schema None, and 1 is read here: not a record of mssar"),
    "a later schema": (changed(schema=SCHEMA + 1), "written by a newer mssar; update this one"),
    "a schema in words": (changed(schema="1"), "schema '1', and 1 is read here: not a record"),
    "text for a number": (changed(error="40"), "error: expected float; got '40'"),
    "a fraction for a number": (changed(params=1.5), "params: expected int; got 1.5"),
    "true for a number": (changed(params=True), "params: expected int; got True"),
    "true for an error": (changed(error=True), "error: expected float; got True"),
    "null for a number": (changed(seconds=None), "seconds: expected float; got None"),
    "a number for text": (changed(id=7), "id: expected str; got 7"),
    "a list for a run": (changed(run=[]), "run: expected object; got []"),
    "a number for epochs": (changed(epochs=3), "epochs: expected"),
    "no epoch": (changed(epochs=[]), "epochs: there is none"),
    "an epoch that is none": (changed(epochs=[3]), "epochs[0]: expected object; got 3"),
    "an epoch out of order": (changed("epochs", epoch=2), "epochs: number 1 says it is 2"),
    "text for a class": (changed(class_errors=["x"]), "class_errors[0]: expected float; got 'x'"),
    "true for a class": (changed(class_errors=[True]), "class_errors[0]: expected float"),
    "true for a seed": (changed("run", seed=True), "run.seed: expected int"),
    "over a hundred per cent": (changed(error=100.5), "error: expected float <= 100.0; got 100.5"),
    "below nothing": (changed(class_errors=[-1]), "class_errors[0]: expected float >= 0.0; got -1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, kind):
    line, message = BAD[kind]
    path = tmp_path / "records.jsonl"
    path.write_text(f"{record().as_line()}\n\n{line}\n{record('b').as_line()}\n")
    with pytest.raises(ValueError, match="line 3") as found:
        records.read(path)
    (said,) = str(found.value).splitlines()
    assert said.startswith(f"{path}, line 3: ")
    assert message in said


def test_what_is_not_text_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(record().as_line().encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match="not text in UTF-8") as found:
        records.read(path)
    assert str(path) in str(found.value)


def test_a_line_ends_where_json_says_so(tmp_path):
    """Not at separators that Python's splitlines knows besides, which JSON allows in strings."""
    path = tmp_path / "records.jsonl"
    found = json.loads(record().as_line())
    path.write_text(json.dumps(found, ensure_ascii=False) + "\n", "utf-8")
    assert records.read(path) == [record()]


def test_a_record_that_could_not_be_read_is_not_written(tmp_path):
    path = tmp_path / "records.jsonl"
    for bad in (record(error=float("nan")), record(error=101.0), record(epochs=())):
        with pytest.raises(ValueError, match=r"JSON compliant|expected float <= 100|there is none"):
            records.append(path, bad)
    assert not path.exists()


def test_a_record_is_appended_once(tmp_path):
    path = tmp_path / "new" / "folder" / "records.jsonl"
    for name in ("a", "b", "a", "b"):
        records.append(path, record(name))
    assert [r.id for r in records.read(path)] == ["a", "b"]
    before = path.read_bytes()
    records.append(path, record("a", seconds=1.0))
    assert path.read_bytes() == before


def test_a_line_left_unfinished_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "records.jsonl"
    half = record("b").as_line()[:100]
    path.write_text(half)
    records.append(path, record("a"))
    first, second = path.read_text().splitlines()
    assert first == half
    assert records.parse(second) == record("a")


def test_half_a_record_does_not_count_as_that_record(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(record("a").as_line()[:100])
    records.append(path, record("a"))
    assert records.parse(path.read_text().splitlines()[-1]) == record("a")


class Full:
    """A disk that is full, or whatever else befalls it, after some bytes."""

    fate: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __init__(self, path: Path, space: int) -> None:
        self.file, self.space = open(path, "xb"), space  # noqa: SIM115

    def write(self, content: bytes) -> int:
        self.file.write(content[: self.space])
        raise self.fate

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def full(space: int) -> Any:
    """In place of Path.open: what is written does not fit."""
    read = Path.open

    def opened(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return Full(path, space) if "x" in mode else read(path, mode, *rest, **more)

    return opened


@pytest.mark.parametrize("space", [0, 1, 300])
@pytest.mark.parametrize("before", ["", record("a").as_line() + "\n", "half a line"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, space, before):
    path = tmp_path / "records.jsonl"
    path.write_text(before)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full(space))
        with pytest.raises(OSError, match=f"No space left.*{path.name}'"):
            records.append(path, record("b"))
    assert path.read_text() == before
    assert {p.name for p in tmp_path.iterdir()} == {path.name, f".{path.name}.lock"}
    records.append(path, record("b"))  # the lock was let go
    assert records.parse(path.read_text().splitlines()[-1]) == record("b")


def test_what_the_disk_does_not_confirm_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    records.append(path, record("a"))

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Input/output"):
            records.append(path, record("b"))
    assert records.read(path) == [record("a")]


def test_an_interrupt_in_the_middle_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    records.append(path, record("a"))
    with monkeypatch.context() as patch:
        patch.setattr(Full, "fate", KeyboardInterrupt())
        patch.setattr(Path, "open", full(100))
        with pytest.raises(KeyboardInterrupt):
            records.append(path, record("b"))
    assert records.read(path) == [record("a")]


def test_a_record_that_lacks_only_the_end_of_its_line_is_not_doubled(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(record("a").as_line())
    records.append(path, record("a"))
    assert records.read(path) == [record("a")]
    records.append(path, record("b"))
    assert records.read(path) == [record("a"), record("b")]


def test_a_file_keeps_its_mode_and_a_link_to_it_stays_one(tmp_path):
    path, link = tmp_path / "there" / "records.jsonl", tmp_path / "link.jsonl"
    records.append(path, record("a"))
    path.chmod(0o664)
    link.symlink_to(path)
    records.append(link, record("b"))
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o664
    assert records.read(path) == [record("a"), record("b")]
    assert {p.name for p in tmp_path.iterdir()} == {"there", "link.jsonl"}


APPENDING = """
import sys
from pathlib import Path
from mssar.lab import records
path, name = Path(sys.argv[1]), sys.argv[2]
from test_records import record
print("ready", flush=True)
input()
for number in range(15):
    records.append(path, record(f"{name}{number}"))
    records.append(path, record(f"common{number}"))
"""


def test_two_processes_lose_nothing(tmp_path):
    path = tmp_path / "records.jsonl"
    with program(APPENDING, path, "x") as one, program(APPENDING, path, "y") as two:
        for process in (one, two):
            assert process.stdout.readline() == "ready\n"
        for process in (one, two):
            print(file=process.stdin, flush=True)
        assert one.wait(60) == two.wait(60) == 0
    found = [r.id for r in records.read(path)]
    assert sorted(found) == sorted(f"{n}{i}" for n in ("x", "y", "common") for i in range(15))
