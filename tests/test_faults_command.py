"""The command over torn files, a few; in one test, for what runs the command takes seconds."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faults import command
from faults.files.sandbox import tree
from faults.jobs import Known
from faults.nursery import Answer, crew

from mssar.lab.engine import checkpoint

CHEAP = ["eval", "weights", "report", "reproduce", "data check", "data get"]


def test_torn_files_end_the_command_in_a_line(tmp_path, monkeypatch, capsys):
    every = command.uses

    def few(known: Known) -> list[command.Use]:
        return [replace(use, count=2) for use in every(known) if use.name in CHEAP]

    monkeypatch.setattr(command, "uses", few)
    with crew(2) as people:
        rows = list(command.rows(people, Known(people, tmp_path), 1, seed=5))
    assert sum(row.wrong for row in rows) == 0, capsys.readouterr().err
    assert [row.fault.split("`")[1] for row in rows] == [f"mssar {name}" for name in CHEAP]
    assert sum(row.tried for row in rows) == 2 * 8


def test_another_run_is_told_in_a_short_line():
    """Found by the suite: of a name of 5,000 letters, all of them."""
    there = {"recipe": {"name": "a" * 5000}, "b" * 5000: 1}
    for here in ({"recipe": {"name": "x"}, "b" * 5000: 1}, there | {"b" * 5000: 2}):
        with pytest.raises(ValueError, match=r"^folder holds another run: ") as error:
            checkpoint.require_same(there, here, Path("folder"))
        assert len(str(error.value)) < 300


GOOD = "mssar: some.safetensors is no safetensors file\n"


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (Answer(2, 0.1, "", GOOD), None),
        (Answer(0, 0.1, "1 %", ""), None),
        (Answer(2, 0.1, "", ""), "status 2"),
        (Answer(2, 0.1, "", GOOD + GOOD), "status 2"),
        (Answer(1, 0.1, "", "Traceback (most recent call last):\n" + GOOD), "said"),
        (Answer(139, 0.1, "", GOOD), "status 139"),
        (Answer(2, 0.1, "", "mssar: \x1b[2J\n"), "said"),
        (Answer(2, 0.1, "", f"mssar: {'a' * 2000}\n"), "a line of 2,007 letters"),
    ],
)
def test_what_is_not_as_promised_is_found(made, wrong, tmp_path):
    use = command.Use("eval", [], "some.safetensors", command.torn, 1)
    before = tree(tmp_path, Path())
    found = command.trouble(use, made, tmp_path, before, before)
    assert found is None if wrong is None else found.startswith(wrong)


def test_what_is_written_elsewhere_is_found(tmp_path):
    fine = Answer(0, 0.1, "", "")
    use = command.Use("report", [], "runs/records.jsonl", command.said, 1, "page.html")
    before = tree(tmp_path, Path())
    (tmp_path / "page.html").touch()
    page = tree(tmp_path, Path())
    assert command.trouble(use, fine, tmp_path, before, page) is None
    failed = Answer(2, 0.1, "", GOOD)
    assert command.trouble(use, failed, tmp_path, before, page) == "left page.html behind"
    (tmp_path / "other").touch()
    found = command.trouble(use, fine, tmp_path, before, tree(tmp_path, Path()))
    assert found == f"touched {tmp_path / 'other'}"
