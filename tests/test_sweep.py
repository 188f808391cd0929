"""Sweeps in their files: who has which run, and what a task does with its share."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from lab import tiny, tiny_everywhere
from sweeps import begun, held, runs, seeds

from mssar.lab.cluster import collect, slurm, sweep
from mssar.lab.cluster.sweep import Note
from mssar.lab.commands.task import carry_out, goes_on
from mssar.lab.engine.clock import Clock
from mssar.lab.engine.fleet import Outcome
from mssar.lab.run import Initial


@pytest.mark.parametrize(
    ("count", "tasks", "sizes"), [(8, 2, [4, 4]), (7, 3, [2, 2, 3]), (2, 5, [1, 1]), (0, 3, [])]
)
def test_every_run_is_dealt_once_and_in_order(count: int, tasks: int, sizes: list[int]):
    dealt = sweep.deal(runs(count), tasks)
    assert [len(share) for share in dealt] == sizes
    assert [run for share in dealt for run in share] == runs(count)


def test_runs_that_can_be_trained_as_one_are_dealt_together():
    mixed = [tiny(seed, kind) for seed in range(3) for kind in ("none", "mssar")]
    first, second = sweep.deal(mixed, 2, stack=3)
    assert {run.recalibration for run in first} == {"none"}
    assert {run.recalibration for run in second} == {"mssar"}


def test_what_is_written_is_read(tmp_path: Path):
    weights = Initial("net.safetensors", "0" * 64, tmp_path / "net.safetensors")
    shares = [[tiny(0), replace(tiny(1, "mssar"), weights=weights)], [tiny(2)]]
    made = begun(tmp_path, *shares, budget=9.5, stack=2)
    found = sweep.read(made.folder)
    assert found == made
    assert found.runs[1].weights.path == weights.path  # which equality leaves out
    assert sweep.sweeps(tmp_path / "runs") == [made]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "schema None"),
        ('{"schema": 1}', "written by an older mssar"),
        ('{"schema": 2}', "weights"),
        ("[", "not JSON"),
        (None, "no sweep"),
    ],
)
def test_what_is_no_sweep_is_named(tmp_path: Path, content: str | None, said: str):
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        sweep.read(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"record_in": {}}, "record_in: there is no file for "),
        ({"how": {"x": 1}}, "how.'x': unkn"),
    ],
)
def test_what_no_task_could_carry_out_is_no_sweep(tmp_path: Path, changes: dict, said: str):
    path = begun(tmp_path, runs(2)).folder / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=said):
        sweep.read(path.parent)


def test_a_sweep_is_of_the_runs_around_it_wherever_it_says_that_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder of runs may be moved, and a stranger's may name another's."""
    made = begun(tmp_path, runs(1))
    moved = (tmp_path / "runs").rename(tmp_path / "moved") / "sweeps" / made.name
    assert sweep.read(moved).order.runs == str(tmp_path / "moved")
    monkeypatch.chdir(moved)
    assert sweep.read(Path()).order.runs == str(tmp_path / "moved")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"failures": 3}', "failures: expected array; got 3"),
        ("[1]", "expected object"),
        ("{", "Expecting"),
    ],
)
def test_a_note_and_a_job_that_cannot_be_read_are_named(tmp_path: Path, content: str, said: str):
    made = begun(tmp_path, runs(2))
    for name in ("task-0.json", "job.json"):
        (made.folder / name).write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        made.notes()
    assert str(error.value).count("task-0.json") == 1
    if content != '{"failures": 3}':
        with pytest.raises(ValueError, match=said) as error:
            _ = made.job
        assert "job.json" in str(error.value)


@pytest.mark.parametrize("number", [7, "", "--me", "7 8", None])
def test_a_job_of_slurms_has_a_number(tmp_path: Path, number: object):
    made = begun(tmp_path, runs(1))
    made.handed_to(slurm=number)
    with pytest.raises(ValueError, match=r"job.json: slurm: expected the number of a job; got "):
        _ = made.job
    made.handed_to(slurm="7")
    assert made.job == {"slurm": "7"}


def test_a_task_that_was_started_twice_waits_for_itself(tmp_path: Path):
    made = begun(tmp_path, runs(1), runs(2)[1:])
    reached = threading.Event()

    def twin() -> None:
        with made.taken(0):
            reached.set()

    with held(made, 0):
        assert made.is_taken(0)
        assert not made.is_taken(1)
        second = threading.Thread(target=twin)
        second.start()
        assert not reached.wait(0.5)
    second.join(20)
    assert reached.is_set()
    assert not made.is_taken(0)


def test_a_task_trains_its_share_and_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_everywhere(monkeypatch)
    monkeypatch.setattr("sys.argv", ["task"])
    made = begun(tmp_path, runs(1), runs(2)[1:])
    made.note(1, Note(left=1, signal=15))  # of when it was stopped
    outcome = carry_out(made.folder, 1)
    assert [r.run["seed"] for r in outcome.records] == [1]
    assert outcome.records[0].command == "mssar train resnet8"
    assert made.notes() == {1: Note()}
    assert seeds(tmp_path / "all.jsonl") == []  # it writes in the run's folder alone
    collect.collect(made)
    assert seeds(tmp_path / "all.jsonl") == [1]
    with pytest.raises(ValueError, match="has tasks 0 to 1; got 2"):
        carry_out(made.folder, 2)


def test_why_a_task_failed_is_in_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_everywhere(monkeypatch)
    monkeypatch.setattr("sys.argv", ["task"])
    made = begun(tmp_path, [replace(runs(1)[0], dataset="cifar10")])
    monkeypatch.setattr("mssar.lab.data.load", lambda *_: json.loads("no data"))
    with pytest.raises(ValueError, match="Expecting value"):
        carry_out(made.folder, 0)
    assert made.notes()[0].left == 1
    assert "Expecting value" in made.notes()[0].failures[0]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(), False),
        (Outcome(left=runs(1), moved=True), True),  # its time is used up
        (Outcome(left=runs(1), moved=True, signal=signal.SIGUSR1), True),
        (Outcome(left=runs(1), moved=True, signal=signal.SIGUSR2), True),
        (Outcome(left=runs(1), signal=signal.SIGUSR2), False),  # for ever
        (
            Outcome(left=runs(1), moved=True, signal=signal.SIGTERM),
            False,
        ),  # cancelled, or Slurm sees to it
        (Outcome(left=runs(1), short=1.0), False),  # for ever
        (Outcome(failures=["nan"]), False),
    ],
)
def test_what_is_queued_again(outcome: Outcome, expected: bool):
    assert goes_on(outcome) is expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_what_a_scheduler_warns_by_asks_to_stop(number: signal.Signals):
    clock, before = Clock(None), signal.getsignal(number)
    with clock.listening():
        assert not clock.expired(0)
        os.kill(os.getpid(), number)
        assert clock.expired(0)
    assert clock.signal == number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("budget", "minutes", "seconds"), [(5, 2, 5), (90, 2, 60), (3600, 60, 3540), (3601, 61, 3600)]
)
def test_the_time_budget_follows_the_limit(budget: float, minutes: int, seconds: float):
    assert slurm.limit(budget) == (minutes, seconds)


def test_options_of_the_user_count_most():
    found = slurm.parameters("mssar", 240, True, ["gpus_per_node=a100:2", "--exclusive", "mem=8G"])
    assert found == {
        "job-name": "mssar",
        "time": 240,
        "requeue": True,
        "gpus-per-node": "a100:2",
        "exclusive": True,
        "mem": "8G",
    }
    assert "gpus-per-node" not in slurm.parameters("mssar", 240, False)
