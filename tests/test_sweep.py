"""Sweeps in their files: who has which run, what is collected, what is said of it."""

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab import tiny, tiny_everywhere
from sweeps import HOW, begun, finish, held, record, runs, seeds

from mssar.lab import records
from mssar.lab.cluster import collect, local, slurm, status, sweep
from mssar.lab.cluster.sweep import Note, Order
from mssar.lab.commands.task import carry_out, goes_on
from mssar.lab.engine import checkpoint
from mssar.lab.engine.clock import Clock
from mssar.lab.engine.fleet import Outcome
from mssar.lab.records import Record
from mssar.lab.run import Initial, Run

__all__ = ["record"]  # a fixture


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
    [({"record_in": {}}, "record_in: there is no file for "), ({"how": {"x": 1}}, "how.'x': unkn")],
)
def test_what_no_task_could_carry_out_is_no_sweep(tmp_path: Path, changes: dict, said: str):
    path = begun(tmp_path, runs(2)).folder / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=said):
        sweep.read(path.parent)


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


def test_status_tells_done_from_stopped_failed_and_lost(tmp_path: Path, record: Record):
    made = begun(tmp_path, *([run] for run in runs(6)))
    assert {task.state for task in status.tasks(made)} == {"never submitted"}
    made.handed_to(host="somewhere", pids=[0] * 6)
    finish(made, made.runs[0], record)
    made.note(1, Note(left=1, signal=15))
    made.note(2, Note(failures=["the loss is nan"]))
    place = Path(made.order.runs) / made.runs[3].name
    progress = checkpoint.Progress(made.runs[3].as_dict(), "", "fp32", "", "", epoch=1)
    place.mkdir()
    checkpoint.save(place, progress, {"x": torch.zeros(1)})
    with held(made, 5):
        found = status.tasks(made)
    assert [task.state for task in found] == [
        "done",
        "stopped",
        "failed",
        "lost",
        "lost",
        "running on somewhere",
    ]
    assert [task.recorded for task in found] == [1, 0, 0, 0, 0, 0]
    assert [task.begun for task in found] == [0, 0, 0, 1, 0, 0]
    assert [task.going for task in found] == [False] * 5 + [True]
    assert found[2].failures == ("the loss is nan",)


def test_what_was_cancelled_before_it_began_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of four tasks one was lost before, one begins and saves, the others wait for a machine."""
    made = begun(tmp_path, *([run] for run in runs(4)))
    made.handed_to(slurm="7")
    queue, asked = ["1|PENDING||None\n", "2|PENDING||None\n", "3|PENDING||None\n"], []

    def ask(*words: str) -> str:
        asked.append(words)
        return "".join(queue) if words[0] == "squeue" else ""

    monkeypatch.setattr(slurm, "require", lambda: None)
    monkeypatch.setattr(slurm, "_ask", ask)
    status.cancel(made)
    assert ("scancel", "7") in asked
    assert [task.state for task in status.tasks(made)] == ["lost", *["pending"] * 3]
    made.note(1, Note(left=1, signal=15))
    queue.clear()
    states = [task.state for task in status.tasks(made)]
    assert states == ["lost", "stopped", "cancelled", "cancelled"]


@pytest.mark.parametrize("source", ["squeue", "sacct", "neither"])
def test_what_others_cancelled_is_not_lost_where_slurm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    made = begun(tmp_path, *([run] for run in runs(9)))
    made.handed_to(slurm="7")
    made.note(0, Note(left=1, signal=15))
    said = {
        "squeue": "".join(f"7_{task}|CANCELLED\n" for task in (0, 2, 3, 5, 7, 8)),
        "sacct": "7_0|CANCELLED by 0\n7_1|FAILED\n7_[2-3,5%4]|CANCELLED by 0\n"
        "7_4|NODE_FAIL\n7_6|COMPLETED\n7_[7-8:1]|CANCELLED\n",
    }

    def ask(*words: str) -> str:
        if words[0] == "squeue":
            return said["squeue"] if "CANCELLED" in words and source == "squeue" else ""
        assert words[0] == "sacct"
        if source != "sacct":
            raise ValueError("sacct: Slurm accounting storage is disabled")
        return said["sacct"]

    monkeypatch.setattr(slurm, "require", lambda: None)
    monkeypatch.setattr(slurm, "_ask", ask)
    end = "lost" if source == "neither" else "cancelled"
    states = ["stopped", "lost", end, end, "lost", end, "lost", end, end]
    assert [task.state for task in status.tasks(made)] == states
    source = "neither"  # Slurm forgets
    assert [task.state for task in status.tasks(made)] == states


def test_accounting_that_is_not_there_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = begun(tmp_path, runs(1))
    made.handed_to(slurm="7")
    for command in ("sbatch", "squeue", "scancel"):
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [task.state for task in status.tasks(made)] == ["lost"]
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\ncase $* in *CANCELLED*) echo '7|CANCELLED';; esac\n"
    )
    assert [task.state for task in status.tasks(made)] == ["cancelled"]  # a plain job


def killed(*_: object, **__: object) -> None:
    """In place of training: there is no time to leave a note."""
    raise KeyboardInterrupt


def test_a_task_that_goes_on_is_cancelled_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = begun(tmp_path, *([run] for run in runs(2)))
    made.handed_to(slurm="7")
    monkeypatch.setattr(slurm, "states", lambda _: {})  # it was started by hand
    monkeypatch.setattr("sys.argv", ["task"])
    for task in range(2):
        made.mark_cancelled(task)
    with held(made, 0):
        assert [task.state for task in status.tasks(made)] == ["running", "cancelled"]

    monkeypatch.setattr("mssar.lab.engine.runner.carry_out", killed)
    with pytest.raises(KeyboardInterrupt):
        carry_out(made.folder, 0)
    monkeypatch.setattr(slurm, "cancelled", lambda _: set())
    assert [task.state for task in status.tasks(made)] == ["lost", "cancelled"]


@pytest.mark.parametrize(("restarts", "state"), [(None, "cancelled"), ("1", "lost")])
def test_a_task_that_is_cancelled_while_slurm_starts_it_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str | None, state: str
):
    """It is killed before it listens. Started once more, it was cancelled before."""
    made = begun(tmp_path, runs(1))
    made.handed_to(slurm="7")
    made.mark_cancelled(0)
    monkeypatch.setattr(slurm, "states", lambda _: {})
    monkeypatch.setattr(slurm, "cancelled", lambda _: set())
    monkeypatch.setattr("sys.argv", ["task"])
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)

    monkeypatch.setattr("mssar.lab.engine.runner.carry_out", killed)
    with pytest.raises(KeyboardInterrupt):
        carry_out(made.folder, 0)
    assert [task.state for task in status.tasks(made)] == [state]


def test_processes_that_a_signal_ends_before_they_listen_are_not_lost(tmp_path: Path):
    made = begun(tmp_path, *([run] for run in runs(2)))
    wait = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    at_once = [sys.executable, "-S", "-c", ""]

    def look() -> None:
        try:
            os.kill(made.job["pids"][0], 0)
        except ProcessLookupError:  # it is over
            os.kill(os.getpid(), signal.SIGTERM)

    statuses, told = local.work(made, [at_once, wait], [], look, lambda: None)
    assert (statuses, told) == ([0, -signal.SIGTERM], signal.SIGTERM)
    assert [task.state for task in status.tasks(made)] == ["lost", "cancelled"]


def test_what_a_sweep_is_at_is_under_way_and_what_it_lost_is_not(tmp_path: Path):
    made = begun(tmp_path, runs(2), runs(3)[2:])
    made.handed_to(host="here", pids=[0, 0])
    with held(made, 1):
        assert status.under_way(tmp_path / "runs") == {made.runs[2].name}
    assert status.under_way(tmp_path / "runs") == set()


def test_of_another_machine_processes_are_not_signalled(tmp_path: Path):
    made = begun(tmp_path, runs(1))
    made.handed_to(host="another", pids=[1])
    with held(made, 0), pytest.raises(ValueError, match="works on another; cancel it there"):
        status.cancel(made)
    assert not made.is_cancelled(0)


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


def test_slurm_is_not_asked_about_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
):
    """Nor needed to look at it, on a machine that has none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    made = begun(tmp_path, runs(1), runs(2)[1:])
    made.handed_to(slurm="7")
    finish(made, made.runs[0], record)
    with pytest.raises(ValueError, match="which is not here"):
        status.states(made)
    finish(made, made.runs[1], record)
    assert status.states(made) == {}
    assert status.under_way(tmp_path / "runs") == set()
