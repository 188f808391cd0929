"""Several runs in one process: company, what is finished, and starts that fail."""

import gc
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab import (
    CPU,
    Log,
    arrays,
    assert_same,
    learnt,
    one_step,
    opened,
    timeless,
    tiny,
    trained,
)

from mssar.lab import records
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import checkpoint, fleet
from mssar.lab.engine import training as engine
from mssar.lab.engine.clock import Clock
from mssar.lab.engine.pace import Pace
from mssar.lab.engine.result import NAME, finished
from mssar.lab.engine.step import Learner
from mssar.lab.records import Record, append, read
from mssar.lab.run import Run


def fleet_of(runs: list[Run], data: Arrays, folder: Path, log: Log, **kinds: Any) -> fleet.Outcome:
    return fleet.train(runs, lambda _: data, CPU, folder, log, **kinds)


def test_what_a_run_computes_does_not_depend_on_its_company(tmp_path):
    data = arrays()
    runs = [tiny(0), tiny(1, "mssar"), tiny(0, padding=0), tiny(2, epochs=1), tiny(3)]

    def into(_: Run, record: Record) -> None:
        append(tmp_path / "records.jsonl", record)

    outcome = fleet_of(runs, data, tmp_path, Log(), width=3, record=into)
    assert (outcome.left, outcome.failures, outcome.signal) == ([], [], None)
    assert {r.run["seed"] for r in outcome.records} == {0, 1, 2, 3}
    kept = sorted(read(tmp_path / "records.jsonl"), key=lambda r: r.id)
    assert kept == sorted(outcome.records, key=lambda r: r.id)
    together = [record.execution["together"] for record in kept]
    assert max(together) == 3  # on average over their turns
    assert min(together) >= 1
    for run in runs:
        alone = trained(run, data, tmp_path / "alone" / run.name)
        assert_same(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))
        (beside,) = [r for r in outcome.records if r.run == run.as_dict()]
        assert timeless(beside) == timeless(alone)


def test_turns_that_wait_for_the_gpu_are_no_company(tmp_path, monkeypatch):
    """Whoever is left alone waits in many short turns, which say nothing of how far it got."""
    log = Log()

    def waits(_: Pace):
        yield from [None] * (100 if len(log.records) == 2 else 1)

    monkeypatch.setattr(Pace, "caught_up", waits)
    runs = [tiny(0, epochs=3), tiny(1, epochs=3), tiny(2, epochs=4)]
    records = fleet_of(runs, arrays(), tmp_path, log, width=3).records
    assert [record.execution["together"] for record in records] == [3, 3, 2.5]


def test_a_training_hands_its_record_on_and_nobody_reads_it_back(tmp_path, monkeypatch):
    run = tiny(0, "mssar")
    monkeypatch.setattr(records, "parse", None)
    (handed,) = fleet_of([run], arrays(), tmp_path, Log()).records
    monkeypatch.undo()
    assert handed == finished(tmp_path / run.name)


def test_a_finished_run_is_let_go_before_the_next_begins(tmp_path, monkeypatch):
    """Its memory is the next one's, on a GPU that has room for one."""
    alive: list[weakref.ref[engine.Training]] = []
    beside = []
    prepare = engine.Training._prepare

    def watched(self: engine.Training) -> None:
        gc.collect()  # the first run is held by what torch imports at its first step
        beside.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(self))
        prepare(self)

    monkeypatch.setattr(engine.Training, "_prepare", watched)
    fleet_of([tiny(seed, epochs=1) for seed in range(3)], arrays(), tmp_path, Log())
    assert beside == [0, 0, 0]


def test_a_finished_run_is_not_trained_again(tmp_path):
    data, runs = arrays(), [tiny(0, epochs=1), tiny(1, epochs=1)]
    (first,) = fleet_of(runs[:1], data, tmp_path, Log()).records
    log, handed = Log(), []
    outcome = fleet_of(runs, data, tmp_path, log, record=lambda *both: handed.append(both))
    assert list(zip(runs, outcome.records, strict=True)) == handed
    assert outcome.records[0] == first
    assert [run for run, _, _ in log.started] == runs[1:]
    (message,) = log.messages
    assert message.startswith("resnet8 none tiny seed 0: finished before, in ")


def test_a_finished_run_of_another_precision_is_not_this_one(tmp_path):
    data, log, run = arrays(), Log(), tiny(0, epochs=1)
    fleet_of([run], data, tmp_path, log)
    other = replace(CPU, precision="bf16")
    with pytest.raises(ValueError, match="trained in fp32 and not in bf16: --precision fp32"):
        fleet.train([run], lambda _: data, other, tmp_path, log)


def test_a_finished_run_on_other_data_is_not_this_one(tmp_path):
    data, run = arrays(), tiny(0, epochs=1)
    (first,) = fleet_of([run], data, tmp_path, Log()).records
    others = replace(data, train=replace(data.train, labels=data.train.labels.roll(1)))
    with pytest.raises(ValueError, match="trained on other data called tiny: those take it"):
        fleet_of([run], others, tmp_path, Log())
    assert fleet_of([run], data, tmp_path, Log()).records == [first]  # nothing is lost


def test_a_finished_run_is_what_its_record_says_not_its_folders_name(tmp_path):
    """The name has six digits of a hash, and a folder may be renamed."""
    data, run, other = arrays(), tiny(0, epochs=1), tiny(0, epochs=1, lr=0.5)
    (first,) = fleet_of([run], data, tmp_path, Log()).records
    (tmp_path / run.name).rename(tmp_path / other.name)
    with pytest.raises(ValueError, match=r"recipe.lr is 0.02 there and 0.5 here; another --runs"):
        fleet_of([other], data, tmp_path, Log())
    older = {**first.run, "recipe": {**first.run["recipe"], "lr": 0.5, "schedule": "steps"}}
    del older["recipe"]["factor"]  # what is usual may be said, or not
    path = tmp_path / other.name / NAME
    path.write_text(replace(first, run=older).as_line())
    assert len(fleet_of([other], data, tmp_path, Log()).records) == 1


def test_a_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    data, folder = arrays(), tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(engine.Training, "_feed", lambda _: _raise(MemoryError()))
        outcome = fleet_of([tiny(0), tiny(1)], data, folder, Log())
    assert len(outcome.failures) == 2
    assert list(folder.iterdir()) == []
    # What was there before stays.
    with opened(tiny(0), data, folder / tiny(0).name) as training:
        next(training.work())
        training.save()
    kept = sorted(folder.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.Training, "_feed", lambda _: _raise(MemoryError()))
        fleet_of([tiny(0)], data, folder, Log())
    assert sorted(folder.rglob("*")) == kept


def test_who_begins_anew_keeps_nothing_of_what_waits_for_its_turn(tmp_path, monkeypatch):
    """Or it would be found finished once the others are gone on with."""
    runs, data = [tiny(seed) for seed in range(3)], arrays()
    before = [r.id for r in fleet_of(runs, data, tmp_path, Log()).records]
    with one_step(monkeypatch):
        outcome = fleet_of(runs, data, tmp_path, Log(), budget=300, anew=True)
    assert outcome.left == runs
    assert [finished(tmp_path / run.name) for run in runs] == [None] * 3
    after = [r.id for r in fleet_of(runs, data, tmp_path, Log()).records]
    assert set(after).isdisjoint(before)
    whole = [r.id for r in fleet_of(runs, data, tmp_path, Log(), anew=True).records]
    assert len(set(whole) - {*after, *before}) == 3  # and each is trained once


def test_who_begins_anew_and_gets_nowhere_loses_nothing_of_what_waits(tmp_path, monkeypatch):
    runs, data = [tiny(seed) for seed in range(3)], arrays()
    fleet_of(runs, data, tmp_path, Log())
    expired = iter([False])  # as the first is made ready, and no more
    monkeypatch.setattr(Clock, "expired", lambda *_: next(expired, True))
    outcome = fleet_of(runs, data, tmp_path, Log(), budget=1, anew=True)
    assert (outcome.moved, outcome.left) == (False, runs)
    assert all(finished(tmp_path / run.name) for run in runs[1:])


def test_who_begins_anew_takes_nothing_from_another_process(tmp_path):
    runs, data = [tiny(seed) for seed in range(3)], arrays()
    before = {record.id for record in fleet_of(runs, data, tmp_path, Log()).records}
    other = tmp_path / runs[1].name
    kept = {path: path.read_bytes() for path in other.iterdir()}
    with checkpoint.held(other):
        outcome = fleet_of(runs, data, tmp_path, Log(), anew=True)
        assert {path: path.read_bytes() for path in other.iterdir()} == kept
    assert [r.run["seed"] for r in outcome.records] == [0, 2]
    assert before.isdisjoint(record.id for record in outcome.records)
    assert outcome.failures == [
        f"{runs[1]}: {other} is in use by another process; wait, or stop it"
    ]


@pytest.mark.parametrize(
    ("kinds", "seeds", "width", "stack", "sizes"),
    [
        (("none",), 4, 3, 2, [2, 2, 2, 2]),
        (("none", "se"), 3, 4, 4, [3, 3, 3, 3, 3, 3]),  # not the last of four with one of SE
        (("none",), 3, 3, 2, [1, 2, 2]),  # no more are left
        (("none",), 2, 1, 2, [1, 1]),
    ],
)
def test_a_fleet_has_whole_stacks(tmp_path, kinds, seeds, width, stack, sizes):
    runs = [tiny(seed, kind) for kind in kinds for seed in range(seeds)]
    records = fleet_of(runs, arrays(), tmp_path, Log(), width=width, stack=stack).records
    assert sorted(r.execution.get("stacked", 1) for r in records) == sizes


def test_what_cannot_be_stacked_has_the_whole_fleet(tmp_path):
    runs = [tiny(seed, ema=0.9) for seed in range(3)]
    records = fleet_of(runs, arrays(), tmp_path, Log(), width=3, stack=2).records
    assert [r.execution["together"] for r in records] == [3, 3, 3]


def test_a_stack_does_not_wait_for_a_long_run_to_end(tmp_path):
    long, stacked = tiny(0, ema=0.9, epochs=9), [tiny(seed, epochs=3) for seed in range(4)]
    *made, last = fleet_of([long, *stacked], arrays(), tmp_path, Log(), width=4, stack=4).records
    assert [r.execution.get("stacked", 1) for r in made] == [3, 3, 3, 1]
    assert last.run == long.as_dict()


def broken(monkeypatch: pytest.MonkeyPatch, *what: object) -> None:
    """A run that cannot begin, by its recalibration and seed."""
    prepare = engine.Training._prepare

    def breaks(self: engine.Training) -> None:
        if (self.run.recalibration, self.run.seed) == what:
            raise RuntimeError("broken")
        prepare(self)

    monkeypatch.setattr(engine.Training, "_prepare", breaks)


def test_nobody_waits_for_what_is_left_of_a_stack(tmp_path, monkeypatch):
    """Of two one cannot begin, and the other takes long: a stack goes in parts beside it."""
    broken(monkeypatch, "none", 1)
    runs = [tiny(seed, epochs=12) for seed in (0, 1)] + [tiny(seed, "se") for seed in range(4)]
    log = Log()
    outcome = fleet_of(runs, arrays(), tmp_path, log, width=4, stack=4)
    assert len(outcome.failures) == 1
    stacked = {r.run["seed"]: r.execution.get("stacked", 1) for r in outcome.records[:4]}
    assert stacked == {0: 3, 1: 3, 2: 3, 3: 1}
    assert outcome.records[4].run["recalibration"] == "none"  # the last to end


def test_what_cannot_begin_anew_is_not_found_finished_afterwards(tmp_path, monkeypatch):
    runs, data = [tiny(seed) for seed in range(3)], arrays()
    old = {record.id for record in fleet_of(runs, data, tmp_path, Log()).records}
    with monkeypatch.context() as patch:
        broken(patch, "none", 0)
        ends = iter([False] * 6)
        patch.setattr(Clock, "expired", lambda *_: next(ends, True))
        outcome = fleet_of(runs, data, tmp_path, Log(), anew=True)
        assert (outcome.moved, len(outcome.failures)) == (True, 1)
        assert outcome.left
    made = fleet_of(runs, data, tmp_path, Log()).records
    assert len(made) == 3
    assert old.isdisjoint(record.id for record in made)


def test_runs_that_are_at_other_places_or_finished_do_not_wait_for_each_other(tmp_path):
    pair, runs = (
        [tiny(seed, epochs=6) for seed in (0, 1)],
        [tiny(seed, epochs=3) for seed in range(4)],
    )
    data = arrays()
    fleet_of(runs[:1], data, tmp_path, Log(), width=1)
    ends = iter([False] * 8)  # in the middle of the next one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "expired", lambda *_: next(ends, True))
        assert fleet_of(runs[1:2], data, tmp_path, Log()).left == runs[1:2]
    made = fleet_of([*pair, *runs], data, tmp_path, Log(), width=3, stack=4).records
    found = {(r.run["recipe"]["epochs"], r.run["seed"]): r.execution for r in made}
    assert [found[3, seed].get("stacked", 1) for seed in range(4)] == [1, 1, 2, 2]
    assert found[6, 0]["stacked"] == 2
    assert found[6, 0]["together"] > 2  # the third beside them, and not after them


def test_nobody_is_thrown_away_for_a_first_step_that_failed(tmp_path, monkeypatch):
    runs, data = [tiny(seed) for seed in range(3)], arrays()
    fleet_of(runs, data, tmp_path, Log())

    def breaks(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("broken")

    monkeypatch.setattr(Learner, "step", breaks)
    outcome = fleet_of(runs, data, tmp_path, Log(), anew=True)
    assert (outcome.moved, outcome.left, len(outcome.failures)) == (False, runs[1:], 1)
    assert all(finished(tmp_path / run.name) for run in runs[1:])


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("width", [0, -1])
def test_a_fleet_of_none_is_refused(tmp_path, width):
    with pytest.raises(ValueError, match="1 or more"):
        fleet_of([tiny(0)], arrays(), tmp_path, Log(), width=width, budget=1.1)
