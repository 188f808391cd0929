"""``--submit local``: processes of this machine, which may be killed or told to stop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab import assert_same, learnt, timeless, tiny_folder  # noqa: F401, a fixture
from lab import run_command as mssar
from slurm import until
from typer.testing import CliRunner

from mssar.lab import cli, records
from mssar.lab.cluster import local, status, sweep

WORDS = ["train", "resnet8", "--recalibration", "none,mssar", "--seed", "0,1", "--batch", "16",
         "--dataset", "cifar10", "--lr", "0.02", "--device", "cpu", "--threads", "1"]  # fmt: skip
TWO = ["--submit", "local", "--tasks", "2"]


pytestmark = pytest.mark.usefixtures("tiny_folder")


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mssar", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def begun(*tasks: int) -> sweep.Sweep:
    """The sweep, as soon as these of its tasks have something to lose."""
    until(lambda: bool(sweep.sweeps(Path("runs"))))
    (made,) = sweep.sweeps(Path("runs"))
    places = [[Path("runs", run.name) for run in share] for share in made.shares]
    places = [places[task] for task in tasks]
    until(lambda: all(any(any(p.glob("epoch-*")) for p in share) for share in places))
    return made


def test_a_process_is_killed_and_all_comes_out_as_if_one_had_trained_it():
    with started(*WORDS, "--epochs", "40", *TWO) as process:
        made = begun(1)
        holder = made.held_by(1)
        assert holder is not None
        os.kill(holder[1], signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "task 1 ended with signal 9" in said
    assert [task.state for task in status.tasks(made)] == ["done", "lost"]
    before = records.read(Path("runs/records.jsonl"))
    assert 2 <= len(before) < 4
    again = [*WORDS, "--epochs", "40", "--submit", "local", "--resume"]
    assert f"({4 - len(before)} of {4 - len(before)})" in mssar(*again)
    assert "4 of 4 runs recorded" in mssar("train", "--status")
    assert "nothing is left to submit" in mssar(*again)

    found = records.read(Path("runs/records.jsonl"))
    assert found[: len(before)] == before
    assert len(found) == 4
    mssar(*WORDS, "--epochs", "40", "--runs", "alone")
    alone = {str(record.run): record for record in records.read(Path("alone/records.jsonl"))}
    for record in found:
        assert timeless(record) == timeless(alone.pop(str(record.run)))
    for place in Path("alone").glob("cifar10-*"):
        assert_same(learnt(Path("runs", place.name)), learnt(place))


def test_processes_go_on_without_the_one_that_started_them_until_they_are_cancelled():
    with started(*WORDS, "--epochs", "2000", *TWO) as process:
        made = begun(0, 1)
        process.kill()
        process.communicate()
    then = {*Path("runs").glob("*/epoch-*")}
    until(lambda: not then & {*Path("runs").glob("*/epoch-*")})  # all have been replaced
    again = mssar(*WORDS, "--epochs", "2000", *TWO, "--resume", "--dry-run")
    assert "nothing is left to submit" in again
    assert "task 0, running on" in mssar("train", "--status")
    assert "cancelled; what was begun is saved" in mssar("train", "--cancel")
    until(lambda: not status.states(made))
    assert {number: (note.left, note.signal) for number, note in made.notes().items()} == {
        0: (2, signal.SIGTERM),
        1: (2, signal.SIGTERM),
    }


def test_what_is_told_to_stop_is_saved():
    with started(*WORDS, "--epochs", "2000", *TWO) as process:
        begun(0, 1)
        process.terminate()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by a signal; 4 runs saved or waiting" in said
    assert "task 1, stopped: 0 of 2, 1 begun" in mssar("train", "--status")


def test_what_is_compared_is_trained_by_others_and_shown_here():
    words = ["compare", "resnet8", "--modules", "none,mssar", "--dataset", "cifar10", "--seeds"]
    more = ["--epochs", "1", "--batch", "16", "--seconds", "0", "--device", "cpu", "--json"]
    result = CliRunner().invoke(cli.app, [*words, "1", *more, "--submit", "local"])
    assert "(2 of 2)" in result.stderr, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["recalibration"] for row in rows] == ["none", "mssar"]
    (made,) = sweep.sweeps(Path("runs/compare"))
    assert [run.recalibration for run in made.shares[0]] == ["none", "mssar"]
    assert "2 of 2 runs recorded" in mssar("compare", "--status")
    assert "would submit 2 runs" in mssar(*words, "2", *more, "--submit", "local", "--dry-run")


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a,3")
    assert local.gpus() == ["GPU-5a", "3"]
    made = sweep.begin(sweep.Order([], "runs", {}, {}), [])
    say = [sys.executable, "-S", "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    nothing = lambda: None  # noqa: E731
    statuses, _ = local.work(made, [say] * 3, local.gpus(), nothing, nothing)
    assert statuses == [0, 0, 0]
    assert [made.log(task).read_text() for task in range(3)] == ["GPU-5a\n", "3\n", "GPU-5a\n"]
