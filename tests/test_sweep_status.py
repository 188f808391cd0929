"""What is said of a sweep: done, under way, stopped, cancelled, failed or lost."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sweeps import begun, finish, held, record, runs

from mssar.lab.cluster import local, slurm, status
from mssar.lab.cluster.sweep import Note
from mssar.lab.commands.task import carry_out
from mssar.lab.engine import checkpoint
from mssar.lab.engine.clock import Clock
from mssar.lab.records import Record

__all__ = ["record"]  # a fixture


def test_status_tells_done_from_stopped_failed_and_lost(tmp_path: Path, record: Record):
    made = begun(tmp_path, *([run] for run in runs(6)))
    assert {task.state for task in status.tasks(made)} == {"never submitted"}
    made.handed_to(host="somewhere")
    finish(made, made.runs[0], record)
    made.note(1, Note(left=1, signal=15))
    made.note(2, Note(failures=["the loss is nan"]))
    place = Path(made.order.runs) / made.runs[3].name
    progress = checkpoint.Progress(made.runs[3].as_dict(), "", "fp32", "", "", epoch=1)
    place.mkdir()
    checkpoint.write(place, progress, checkpoint.Brought({"x": torch.zeros(1)}))
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
    over = tmp_path / "over"
    at_once = [sys.executable, "-S", "-c", f"open({str(over)!r}, 'w')"]

    def look() -> None:
        if over.exists():
            time.sleep(0.5)  # for its end
            os.kill(os.getpid(), signal.SIGTERM)

    statuses, told = local.work(made, [at_once, wait], [], look, lambda: None)
    assert (statuses, told) == ([0, -signal.SIGTERM], signal.SIGTERM)
    assert [task.state for task in status.tasks(made)] == ["lost", "cancelled"]


def test_what_a_sweep_is_at_is_under_way_and_what_it_lost_is_not(tmp_path: Path):
    made = begun(tmp_path, runs(2), runs(3)[2:])
    made.handed_to(host="here")
    with held(made, 1):
        assert status.under_way(tmp_path / "runs") == {made.runs[2].name}
    assert status.under_way(tmp_path / "runs") == set()


def test_of_another_machine_processes_are_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made, here = begun(tmp_path, runs(1)), platform.node()
    made.handed_to(host=here)
    monkeypatch.setattr(platform, "node", lambda: "another")  # where it was started again
    with held(made, 0):
        monkeypatch.setattr(platform, "node", lambda: here)
        with pytest.raises(ValueError, match="works on another; cancel it there"):
            status.cancel(made)
    assert not made.is_cancelled(0)


def test_who_is_told_to_stop_is_who_has_the_task_now(tmp_path: Path):
    """Of one that was killed somebody else may have the number."""
    made, clock = begun(tmp_path, runs(1)), Clock(None)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as bystander:
        made.handed_to(host=platform.node(), pids=[bystander.pid])
        with clock.listening(), held(made, 0):
            assert made.held_by(0) == (platform.node(), os.getpid())
            status.cancel(made)
        assert bystander.poll() is None
        bystander.kill()
    assert clock.signal == signal.SIGTERM
    assert made.is_cancelled(0)
    assert made.held_by(0) is None


def test_what_the_killed_left_behind_tells_nobody_to_stop(tmp_path: Path):
    """Another process has its number by now, and the task is begun anew, or looked at."""
    made = begun(tmp_path, runs(1))
    holder = made.folder / ".task-0.holder"
    stale = json.dumps({"host": platform.node(), "pid": 1})
    holder.write_text(stale)
    assert not made.is_taken(0)
    assert not holder.exists()
    holder.write_text(stale)
    with held(made, 0):
        assert made.held_by(0) == (platform.node(), os.getpid())


def test_of_whom_nothing_is_known_nobody_is_told_to_stop(tmp_path: Path):
    made = begun(tmp_path, runs(1))
    made.handed_to(host=platform.node())
    with held(made, 0):
        (made.folder / ".task-0.holder").unlink()
        with pytest.raises(ValueError, match=r"begins or ends just now \(ask again\)"):
            status.cancel(made)
    assert not made.is_cancelled(0)


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
