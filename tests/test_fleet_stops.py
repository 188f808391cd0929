"""Several runs in one process that is to end: at its time, or by a signal."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import (
    Log,
    arrays,
    opened,
    poison,
    program,
    tiny,
)
from test_fleet import fleet_of

from mssar.lab.engine import checkpoint, fleet
from mssar.lab.engine import training as engine
from mssar.lab.engine.step import Learner
from mssar.lab.run import Run


def test_a_budget_ends_in_time_and_what_was_done_is_kept(tmp_path):
    data, log = arrays(), Log()
    runs = [tiny(0, epochs=1000), tiny(1, epochs=1000), tiny(2)]
    begun = time.monotonic()
    outcome = fleet_of(runs, data, tmp_path, log, width=2, budget=6.5)
    assert time.monotonic() - begun < 8  # a loaded machine; to the second below
    assert outcome.left == runs
    assert (outcome.records, outcome.signal) == ([], None)
    for run in runs[:2]:
        progress, _ = checkpoint.load(checkpoint.checkpoints(tmp_path / run.name)[-1])
        assert (progress.epoch, progress.step) > (0, 0)
    assert not (tmp_path / runs[2].name).exists()


def test_no_budget_at_all_begins_nothing(tmp_path):
    outcome = fleet_of([tiny(0)], arrays(), tmp_path, Log(), budget=0)
    assert outcome.left == [tiny(0)]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock of our own, on which a step takes a second and nothing else takes any."""
    now, step = 0.0, Learner.step

    def slow(self: Learner, number: int) -> None:
        nonlocal now
        now += 1
        step(self, number)

    def read_clock() -> float:
        return now

    monkeypatch.setattr(Learner, "step", slow)
    monkeypatch.setattr(fleet.time, "monotonic", read_clock)
    return read_clock


@pytest.mark.parametrize("width", [1, 6])
def test_a_budget_counts_the_turns_of_all_runs(tmp_path, clock, width):
    runs = [tiny(seed, epochs=20) for seed in range(width)]
    outcome = fleet_of(runs, arrays(), tmp_path, Log(), width=width, budget=22)
    assert clock() <= 20  # three seconds are kept for leaving; another hand may be at a step
    assert clock() >= 21 - 3 * width
    assert outcome.left == runs


class Times:
    """A clock of our own, on which steps and saves take what they are said to take."""

    def __init__(self, patch: pytest.MonkeyPatch, step: Callable[[int, int], float], save: float):
        self.now, self.seconds, self.calls = 0.0, step, dict[tuple[int, int], int]()
        real_step, real_save = Learner.step, checkpoint.write

        def slow_step(learner: Learner, number: int) -> None:
            key = learner.feed.seed, learner.feed.sizes[number]
            self.now += self.seconds(key[1], self.calls.get(key, 0))
            self.calls[key] = self.calls.get(key, 0) + 1
            real_step(learner, number)

        def slow_save(*words: Any) -> Path:
            self.now += save
            return real_save(*words)

        patch.setattr(Learner, "step", slow_step)
        patch.setattr(checkpoint, "write", slow_save)
        patch.setattr(fleet.time, "monotonic", lambda: self.now)


def assert_all_kept(folder: Path, runs: list[Run], steps: int) -> None:
    """As many steps as were made are in the newest checkpoints."""
    done = 0
    for run in runs:
        progress = checkpoint.progress(checkpoint.checkpoints(folder / run.name)[-1])
        done += 3 * progress.epoch + progress.step
    assert done == steps


def test_a_budget_is_used_to_its_end_however_long_compiling_takes(tmp_path, monkeypatch):
    """Once for each run's first step, and once more for its last batch, which is smaller."""
    times = Times(monkeypatch, lambda _, before: 1.0 if before else 20.0, save=0.3)
    runs = [tiny(seed, epochs=50) for seed in range(9)]
    budget = 2 * 9 * 20 + 100
    outcome = fleet_of(runs, arrays(), tmp_path, Log(), width=9, budget=budget)
    assert outcome.left == runs
    assert 0.95 * budget <= times.now <= budget
    assert sum(times.calls.values()) > 2 * 9 + 60
    assert_all_kept(tmp_path, runs, sum(times.calls.values()))


@pytest.mark.parametrize("budget", range(60, 70))
def test_the_time_that_saving_takes_is_kept_back(tmp_path, monkeypatch, budget):
    times = Times(monkeypatch, lambda *_: 1.0, save=4.0)
    runs = [tiny(seed, epochs=50) for seed in range(3)]
    fleet_of(runs, arrays(), tmp_path, Log(), width=3, budget=budget)
    assert budget - 3 * 4.0 - 3 <= times.now <= budget
    assert_all_kept(tmp_path, runs, sum(times.calls.values()))


def test_what_there_is_no_time_to_begin_is_left_and_the_others_go_on(tmp_path, monkeypatch):
    times = Times(monkeypatch, lambda _, before: 1.0 if before else 10.0, save=0.0)
    runs = [tiny(0, epochs=1), tiny(1, epochs=50), tiny(2)]
    outcome = fleet_of(runs, arrays(), tmp_path, Log(), width=2, budget=51)
    assert outcome.left == runs[1:]
    assert [r.run["seed"] for r in outcome.records] == [0]
    assert times.calls.keys() == {(0, 16), (0, 5), (1, 16), (1, 5)}  # 40 s, and two steps
    assert 48 <= times.now <= 49
    assert not (tmp_path / runs[2].name).exists()


@pytest.mark.parametrize(
    ("budget", "done", "steps"),
    [
        (91, {0, 1}, 13),  # alone the second run needs 45 s of 60, and 90 beside another
        (61, {0}, 14),  # it cannot be done: the third begins beside it
        (141, {0, 1}, 64),  # there is time for both
    ],
)
def test_what_can_still_be_finished_is_finished_first(tmp_path, monkeypatch, budget, done, steps):
    times = Times(monkeypatch, lambda *_: 1.0, save=0.0)
    runs = [tiny(0, epochs=5), tiny(1, epochs=20), tiny(2, epochs=50)]
    outcome = fleet_of(runs, arrays(), tmp_path, Log(), width=2, budget=budget)
    assert {record.run["seed"] for record in outcome.records} == done
    third = sum(count for (seed, _), count in times.calls.items() if seed == 2)
    assert abs(third - steps) <= 1
    assert budget - 3 <= times.now <= budget


def test_out_of_time_a_spoilt_run_is_not_saved_and_the_other_is(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(engine, "TICK", math.inf)
    monkeypatch.setattr(Learner, "step", poison(1, 0))
    runs = [tiny(0), tiny(1)]
    outcome = fleet_of(runs, arrays(), tmp_path, Log(), width=2, budget=7)
    assert 4 <= clock() <= 5  # in the first epoch, the spoilt step taken
    assert runs[1] in outcome.left
    progress, _ = checkpoint.load(checkpoint.checkpoints(tmp_path / runs[1].name)[-1])
    assert (progress.epoch, progress.step) >= (0, 2)
    for path in checkpoint.checkpoints(tmp_path / runs[0].name):
        assert all(t.isfinite().all() for t in checkpoint.load(path)[1].values())


TRAINING = """
import sys
from pathlib import Path
from lab import *
from mssar.lab.engine import fleet
torch.set_num_threads(1)
class Speaking(Log):
    def passed(self, run, epoch, left):
        print(epoch.epoch, flush=True)
runs = [tiny(0, epochs=2000), tiny(1, epochs=2000)]
outcome = fleet.train(runs, lambda _: arrays(), CPU, Path(sys.argv[1]), Speaking(), width=2)
print("signal", outcome.signal, "left", [run.seed for run in outcome.left])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_saving(tmp_path, number):
    with program(TRAINING, tmp_path) as process:
        assert process.stdout.readline() == "1\n"
        os.kill(process.pid, number)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 0
    assert said.splitlines()[-1] == f"signal {int(number)} left [0, 1]"
    for seed in (0, 1):
        run = tiny(seed, epochs=2000)
        log = Log()
        with opened(run, arrays(), tmp_path / run.name, log) as training:
            assert (training.progress.epoch, training.progress.step) > (0, 0)
            next(training.work())
        assert training.progress.interruptions == 1


def test_handlers_of_signals_are_as_before(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    fleet_of([tiny(0, epochs=1)], arrays(), tmp_path, Log())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


STALLING = """
import sys, time
from lab import *
from mssar.lab.engine import fleet
from mssar.lab.engine.step import Learner
torch.set_num_threads(1)
steps, step = 0, Learner.step
def stall(self, number):
    global steps
    if steps == 4:
        print("stalled", flush=True)
        time.sleep(5)
        print("awake", flush=True)
        time.sleep(60)
    step(self, number)
    steps += 1
Learner.step = stall
fleet.train([tiny(0)], lambda _: arrays(), CPU, Path(sys.argv[1]), Log())
"""


def test_a_signal_that_comes_twice_is_one(tmp_path):
    """A scheduler tells a process and its parent, which tells the process again."""
    script = STALLING.replace("time.sleep(5)", "time.sleep(1)").replace("time.sleep(60)", "pass")
    with program(script, tmp_path, quiet=True) as process:
        assert process.stdout.readline() == "stalled\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=20)
        assert process.returncode == 0, told
    last = checkpoint.checkpoints(tmp_path / tiny(0).name)[-1]
    progress, _ = checkpoint.load(last)
    assert (progress.epoch, progress.step) == (1, 2)  # the fifth step was finished and kept


def test_a_second_interrupt_is_not_waited_for(tmp_path):
    with program(STALLING, tmp_path, quiet=True) as process:
        assert process.stdout.readline() == "stalled\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.8)
        assert process.poll() is None  # the first was taken note of
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=20)
        assert process.returncode != 0
    assert "awake" not in said
    assert "KeyboardInterrupt" in told
    (kept,) = checkpoint.checkpoints(tmp_path / tiny(0).name)
    assert checkpoint.load(kept)[0].epoch == 1
