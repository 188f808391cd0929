"""What is collected of a sweep: every record once, whoever collects, and however often."""

import threading
from pathlib import Path

import pytest
from sweeps import HOW, begun, finish, record, runs, seeds

from mssar.lab import records
from mssar.lab.cluster import collect, sweep
from mssar.lab.cluster.sweep import Order
from mssar.lab.records import Record
from mssar.lab.run import Run

__all__ = ["record"]  # a fixture


def test_collecting_again_adds_nothing(tmp_path: Path, record: Record):
    made = begun(tmp_path, runs(2), runs(3)[2:])
    every = tmp_path / "all.jsonl"
    assert collect.collect(made) == ([], [])
    assert not every.exists()
    for run in made.runs[:2]:
        finish(made, run, record)
    added, _ = collect.collect(made)
    assert len(added) == 2
    before = every.read_bytes()
    assert collect.collect(made) == ([], [])
    assert every.read_bytes() == before
    finish(made, made.runs[2], record)
    assert [r.run["seed"] for r in collect.collect(made)[0]] == [2]
    assert seeds(every) == [0, 1, 2]


def test_many_collect_at_once_while_many_finish(tmp_path: Path, record: Record):
    made = begun(tmp_path, *([run] for run in runs(24)))
    added, over = list[int](), threading.Event()

    def collecting() -> None:
        last = False
        while not last:
            last = over.is_set()  # once more when all are there
            found, problems = collect.collect(made)
            added.extend(r.run["seed"] for r in found)
            assert not problems

    def finishing(share: list[Run]) -> None:
        for run in share:
            finish(made, run, record)

    workers = [threading.Thread(target=finishing, args=(made.runs[n::6],)) for n in range(6)]
    collectors = [threading.Thread(target=collecting) for _ in range(4)]
    for thread in (*collectors, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in collectors:
        thread.join()
    assert seeds(tmp_path / "all.jsonl") == [*range(24)]
    assert sorted(added) == [*range(24)]  # each was one collector's


@pytest.mark.parametrize("finished", ["1970-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
def test_a_run_that_was_claimed_twice_is_one_record_whatever_clocks_say(
    tmp_path: Path, record: Record, finished: str
):
    first, second = begun(tmp_path, runs(1)), begun(tmp_path, runs(1))
    kept = finish(first, first.runs[0], record)
    assert collect.collect(first) == ([kept], [])
    finish(second, second.runs[0], record, id="another", finished=finished)
    assert collect.collect(second) == collect.collect(first) == ([], [])
    assert records.read(tmp_path / "all.jsonl") == [kept]


def test_the_same_run_on_other_data_or_in_another_precision_is_another(
    tmp_path: Path, record: Record
):
    made = begun(tmp_path, runs(1))
    finish(made, made.runs[0], record)
    collect.collect(made)
    finish(made, made.runs[0], record, data={**record.data, "checksum": "other"})
    assert len(collect.collect(made)[0]) == 1
    finish(made, made.runs[0], record, execution={**record.execution, "precision": "bf16"})
    assert len(collect.collect(made)[0]) == 1


def test_a_damaged_record_is_named_and_costs_no_other(tmp_path: Path, record: Record):
    made = begun(tmp_path, runs(2))
    torn = Path(made.order.runs) / made.runs[0].name / "record.json"
    finish(made, made.runs[0], record)
    torn.write_text(torn.read_text()[:100])
    finish(made, made.runs[1], record)
    added, (problem,) = collect.collect(made)
    assert [r.run["seed"] for r in added] == [1]
    assert str(torn) in problem


def test_each_record_goes_to_its_own_file(tmp_path: Path, record: Record):
    asked = runs(3)
    names = {run.name: str(tmp_path / f"{run.seed % 2}.jsonl") for run in asked}
    made = sweep.begin(Order([], str(tmp_path / "runs"), names, HOW), [asked])
    for run in asked:
        finish(made, run, record)
    added, problems = collect.collect(made)
    assert (len(added), problems) == (3, [])
    assert (seeds(tmp_path / "0.jsonl"), seeds(tmp_path / "1.jsonl")) == ([0, 2], [1])
    assert collect.collect(sweep.read(made.folder)) == ([], [])


def test_half_a_line_among_the_records_does_not_count(tmp_path: Path, record: Record):
    made = begun(tmp_path, runs(1))
    done = finish(made, made.runs[0], record)
    (tmp_path / "all.jsonl").write_text(done.as_line()[:-1])  # cut off by a full disk, say
    assert collect.collect(made) == ([done], [])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (".bashrc", "", "a file of records ends in .jsonl"),
        ("link.jsonl", "", "a file of records ends in .jsonl"),  # to .bashrc
        ("loop.jsonl", None, "it is a link that leads to itself"),
        ("new/folder.jsonl", None, "there is no such folder"),
        ("mine.jsonl", '{"text": "x"}\n', "it holds something else"),
        ("mine.jsonl", "words\n", "it holds something else"),
        ("mine.jsonl", b"\xff", "not text in UTF-8"),
    ],
)
def test_a_strangers_sweep_adds_to_no_file_of_mine(
    tmp_path, monkeypatch, record, name, content, said
):
    monkeypatch.chdir(tmp_path)
    Path("link.jsonl").symlink_to(".bashrc")
    Path("loop.jsonl").symlink_to("loop.jsonl")
    if content is not None:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    made = begun(tmp_path, runs(1))
    made.order.record_in.update({run.name: name for run in made.runs})
    finish(made, made.runs[0], record)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    added, problems = collect.collect(made)
    assert (added, problems) == ([], [f"{made.name}: nothing is recorded in {name}: {said}"])
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
