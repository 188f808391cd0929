"""Threads of a CPU: how many a run begins with, that it keeps them, and runs side by side."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from lab import CPU, Log, arrays, assert_same, learnt, opened, poison, tiny, trained

from mssar.lab.engine import checkpoint, fleet, hands, threads
from mssar.lab.engine import training as engine
from mssar.lab.engine.clock import Tempo
from mssar.lab.engine.step import Learner
from mssar.lab.engine.world import World
from mssar.surgery import foreign


@pytest.fixture
def two(monkeypatch):
    """Threads that torch may take, or says so: with two of them, where other tests have the cores,
    steps take a hundred times as long. As torch does, every thread of Python keeps a number."""
    kept = threading.local()
    monkeypatch.setattr(torch, "get_num_threads", lambda: getattr(kept, "number", 2))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(kept, "number", number))
    return 2


def with_threads(number):
    return replace(CPU, threads=number)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({8: 1.0, 7: 1.2, 4: 1.8, 1: 5.0}, 8),
        ({8: 1.0, 7: 1.02, 4: 1.8, 1: 5.0}, 7),  # nearly as quick, and a core is left
        ({8: 9.0, 7: 1.2, 4: 1.8, 1: 5.0}, 7),  # a neighbour has one of the cores
        ({8: 9.0, 7: 9.0, 4: 9.0, 1: 5.0}, 1),
        ({8: 90.0, 7: 12.0, 4: 18.0, 1: 50.0}, 8),  # its loops are long: it is not tried out
    ],
)
def test_the_number_that_is_quickest_is_taken(monkeypatch, seconds, chosen):
    scale = 0.02 if seconds[8] < 90 else 1  # of which all turns are soon done, or above a second
    found, turns, _ = tried_out(monkeypatch, seconds, scale)
    assert found == chosen
    if scale < 1:
        assert {turns.count(number) for number in (8, 7, 4, 1)} == {threads.TURNS + 1}


def tried_out(monkeypatch, seconds, scale, first=0.0):
    """What is chosen, the threads of every step, and how long it took. A number's first step takes
    so much more."""
    now, used, turns = 0.0, [1], []
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: used.__setitem__(0, n))

    def step():
        nonlocal now
        now += seconds[used[0]] * scale + first * (used[0] not in turns)
        turns.append(used[0])

    return threads.fastest(step, 8), turns, now


@pytest.mark.parametrize(
    ("seconds", "first", "chosen", "rounds"),
    [
        ({8: 0.1, 7: 0.15, 4: 0.2, 1: 0.6}, 0.0, 8, 3),
        ({8: 0.9, 7: 0.3, 4: 0.5, 1: 0.8}, 0.0, 7, 1),
        ({8: 0.9, 7: 0.3, 4: 0.5, 1: 0.8}, 4.0, 8, 0),  # that takes so long to begin
    ],
)
def test_slow_steps_are_tried_out_less_often(monkeypatch, seconds, first, chosen, rounds):
    """A time budget may be short, and a machine busy."""
    found, turns, took = tried_out(monkeypatch, seconds, 1, first)
    assert found == chosen
    assert turns.count(8) == (1 + rounds if rounds else 2)
    assert took <= threads.PATIENCE + sum(seconds.values()) + first


def test_where_there_is_one_nothing_is_tried():
    assert threads.fastest(pytest.fail, 1) == 1


def test_a_core_is_left_to_others_where_there_are_enough(monkeypatch):
    for cores, runs, each in ((1, 3, 1), (2, 3, 1), (4, 3, 1), (6, 3, 1), (8, 3, 2), (16, 3, 5)):
        monkeypatch.setattr(threads, "available", lambda cores=cores: cores)
        assert threads.beside(runs) == each
        side, share = hands.shared_out([tiny(s) for s in range(runs)], _load, CPU, runs, World())
        assert side * max(share, 1) <= max(cores, 1)
        assert (side, share) == ((1, 0) if cores == 1 else (min(3, cores), each))


def _load(_):
    return arrays()


def test_only_what_bears_it_is_side_by_side(two):
    runs = [tiny(0), tiny(1)]

    def shared(execution=CPU, load=_load, world=World()):  # noqa: B008, frozen
        return hands.shared_out(runs, load, execution, 2, world)

    def missing(_):
        raise ValueError("no such data set")

    assert shared() == (two, 1)
    assert shared(replace(CPU, deterministic=True)) == (two, 1)
    assert shared(with_threads(2)) == (1, 0)  # one has all that there are
    assert shared(replace(CPU, compile=True)) == (1, 0)
    assert shared(world=World(rank=0, size=2)) == (1, 0)
    assert shared(load=missing) == (1, 0)
    assert shared(load=lambda _: object()) == (1, 0)  # a folder of photographs


def test_networks_that_drop_at_random_are_trained_one_by_one(monkeypatch, two):
    """They draw from torch's own generator, and would wait for each other at every step."""
    runs, build = [tiny(0), tiny(1, "se")], foreign.build
    assert hands.shared_out(runs, _load, CPU, 2, World()) == (two, 1)

    def dropping(network, recalibration, *rest, **options):
        made = build(network, recalibration, *rest, **options)
        if recalibration == "se":
            made.fc = torch.nn.Sequential(torch.nn.Dropout(0.5), made.fc)
        return made

    monkeypatch.setattr(foreign, "build", dropping)
    assert hands.shared_out(runs, _load, CPU, 2, World()) == (1, 0)
    assert hands.shared_out([runs[0], tiny(2)], _load, CPU, 2, World()) == (two, 1)


@pytest.mark.parametrize(("each", "at_once"), [(2, 1), (1, 2)])
def test_runs_that_go_on_have_no_more_threads_than_there_are(
    tmp_path, monkeypatch, two, each, at_once
):
    """They keep what they began with, one by one, and are not side by side with them."""
    data, runs, step = arrays(), [tiny(0), tiny(1)], Learner.step
    for run in runs:
        with opened(run, data, tmp_path / run.name, execution=with_threads(each)) as training:
            next(training.work())
            training.save()
    used, now, most, lock = set(), [], [], threading.Lock()

    def watched(self, number):
        used.add(torch.get_num_threads())
        with lock:
            now.append(self)
            most.append(len(now))
        time.sleep(0.01)
        step(self, number)
        with lock:
            now.remove(self)

    monkeypatch.setattr(Learner, "step", watched)
    outcome = fleet.train(runs, lambda _: data, CPU, tmp_path, Log(), width=2)
    assert len(outcome.records) == 2
    assert used == {each}
    assert max(most) == at_once <= two // each


def test_what_runs_compute_side_by_side_is_what_each_computes_alone(tmp_path, monkeypatch, two):
    data, step, lock = arrays(), Learner.step, threading.Barrier(2, timeout=30)
    runs = [tiny(0), tiny(1, "mssar"), tiny(2, epochs=1)]
    met, seen = [], set()

    def watched(self, number):
        seen.add(torch.get_num_threads())
        if len(met) < 2:  # the first two steps wait for each other: they are taken at once
            met.append(self)
            lock.wait()
        step(self, number)

    monkeypatch.setattr(Learner, "step", watched)
    outcome = fleet.train(runs, lambda _: data, CPU, tmp_path, Log(), width=3)
    assert (outcome.left, outcome.failures) == ([], [])
    assert met[0] is not met[1]
    assert seen == {1}
    assert torch.get_num_threads() == two
    monkeypatch.setattr(Learner, "step", step)
    for run in runs:
        trained(run, data, tmp_path / "alone" / run.name, execution=with_threads(1))
        assert_same(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))
    assert {record.environment["threads"] for record in outcome.records} == {1}


@pytest.mark.usefixtures("two")
def test_a_run_that_fails_side_by_side_does_not_disturb_the_others(tmp_path, monkeypatch):
    data, runs = arrays(), [tiny(0), tiny(1), tiny(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", poison(after=4, seed=1))
        outcome = fleet.train(runs, lambda _: data, CPU, tmp_path, Log(), width=3)
    assert [record.run["seed"] for record in sorted(outcome.records, key=_seed)] == [0, 2]
    assert len(outcome.failures) == 1
    for run in (runs[0], runs[2]):
        trained(run, data, tmp_path / "alone" / run.name, execution=with_threads(1))
        assert_same(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))


def _seed(record):
    return record.run["seed"]


@pytest.mark.usefixtures("two")
def test_a_budget_ends_runs_side_by_side_and_all_are_saved(tmp_path):
    data, runs = arrays(), [tiny(seed, epochs=5000) for seed in range(3)]
    begun = time.monotonic()
    outcome = fleet.train(runs, lambda _: data, CPU, tmp_path, Log(), width=3, budget=7)
    assert 3 < time.monotonic() - begun < 20  # a loaded machine
    assert outcome.left == runs
    assert outcome.short is None
    far = [checkpoint.newest(tmp_path / run.name, print)[0] for run in runs]  # all were begun
    assert all((progress.epoch, progress.step) > (0, 0) for progress in far)


def test_a_resumed_run_has_the_threads_that_it_began_with(tmp_path, monkeypatch, two):
    data, run, step, used = arrays(), tiny(0), Learner.step, []
    torch.set_num_threads(1)
    whole = trained(run, data, tmp_path / "whole", execution=with_threads(two))
    assert whole.environment["threads"] == 2

    def watched(self, number):
        used.append(torch.get_num_threads())
        step(self, number)

    monkeypatch.setattr(Learner, "step", watched)
    with opened(run, data, tmp_path / "run", execution=with_threads(2)) as training:
        work = training.work()
        next(work)
        work.close()
        training.save()
    record = trained(run, data, tmp_path / "run")  # where torch would take one
    assert set(used) == {2}
    assert torch.get_num_threads() == 1
    assert record.environment["threads"] == 2
    assert_same(learnt(tmp_path / "run"), learnt(tmp_path / "whole"))


@pytest.mark.usefixtures("two")
def test_other_threads_than_a_run_began_with_are_refused(tmp_path):
    with opened(tiny(0), arrays(), tmp_path, execution=with_threads(2)) as training:
        next(training.work())
        training.save()
    with (
        pytest.raises(ValueError, match="is trained with --threads 2, not 1"),
        opened(tiny(0), arrays(), tmp_path, execution=with_threads(1)),
    ):
        pass


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("kind", [{}, {"ema": 0.9}])
def test_trying_out_leaves_no_trace(tmp_path, kind):
    data, run = arrays(), tiny(0, "mssar", **kind)
    tried = trained(run, data, tmp_path / "tried")
    chosen = tried.environment["threads"]
    assert chosen in (1, 2)
    trained(run, data, tmp_path / "told", execution=with_threads(chosen))
    assert_same(learnt(tmp_path / "tried"), learnt(tmp_path / "told"))


@pytest.mark.usefixtures("two")
def test_deterministic_runs_have_one_thread_wherever_they_run(tmp_path, monkeypatch):
    monkeypatch.setattr(engine.threads, "fastest", pytest.fail)
    with opened(tiny(0), arrays(), tmp_path, execution=replace(CPU, deterministic=True)) as found:
        assert found.progress.threads == 1


@pytest.mark.parametrize("number", [-1, 513])
def test_a_number_that_no_machine_has_is_refused(tmp_path, number):
    with pytest.raises(ValueError, match="threads is 1 to 512"):
        with_threads(number)
    with opened(tiny(0), arrays(), tmp_path) as training:
        next(training.work())
        training.progress.threads = number
        training.save()
    with pytest.raises(ValueError, match=rf"threads: expected int [<>]= (0|512); got {number}"):
        checkpoint.load(checkpoint.checkpoints(tmp_path)[-1])


# --- how long it will take ---


def estimates(monkeypatch, steps, step, between, epochs):
    """What is said to be left after every epoch, and what then is; by a clock of our own."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tempo, said, ends = Tempo(steps), [], []
    for epoch in range(epochs):
        tempo.begin(0)
        for number in range(steps):
            now += step(epoch, number)
            tempo.step()
        tempo.end()
        now += between(epoch)
        said.append(tempo.seconds(epochs - epoch - 1))
        ends.append(now)
    return [(left, ends[-1] - end) for left, end in zip(said, ends, strict=True)][:-1]


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        (50, lambda epoch, number: 600 if (epoch, number) in ((0, 0), (0, 49)) else 1),  # compiled
        (157, lambda epoch, number: 20 if epoch == 0 and number < 40 else 1),  # waited at first
        (160, lambda _, number: 8.0 if number % 8 == 0 else 0.01),  # photographs come in bursts
        (3, lambda epoch, number: 60 if (epoch, number) == (0, 0) else 1),
    ],
)
def test_the_time_left_is_within_a_factor_of_two_after_the_first_epoch(monkeypatch, steps, step):
    for said, left in estimates(monkeypatch, steps, step, lambda _: 3.0, 8):
        assert left / 2 <= said <= 2 * left


def test_the_time_left_of_a_run_whose_first_step_is_slow(tmp_path, monkeypatch):
    step, slept = Learner.step, []

    def slow(self, number):
        if not slept:
            slept.append(time.sleep(3.0))
        time.sleep(0.05)
        step(self, number)

    said, passed = [], []

    class Watching(Log):
        def passed(self, run, epoch, left):  # noqa: ARG002
            said.append(left)
            passed.append(time.monotonic())

    monkeypatch.setattr(Learner, "step", slow)
    trained(tiny(0, epochs=5), arrays(), tmp_path, Watching())
    for left, then in zip(said[:-1], passed[:-1], strict=True):
        assert (passed[-1] - then) / 2 <= left <= 2 * (passed[-1] - then)
    assert said[-1] == 0


def test_a_first_step_that_compiles_is_no_rule_for_the_others(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tempo = Tempo(391)
    tempo.begin(0)
    assert tempo.early(160) is None
    for seconds in (60.0, *(0.01,) * 15):
        now += seconds
        tempo.step()
    assert tempo.seconds(160) is None  # not a block yet
    assert tempo.early(160) == pytest.approx(160 * 391 * 0.01)


def test_the_time_left_is_told_from_the_first_step_on(tmp_path, monkeypatch):
    """Where a block of steps takes minutes, nothing else tells it in these."""
    step, log = Learner.step, Log()

    def slow(self, number):
        time.sleep(0.1)
        step(self, number)

    monkeypatch.setattr(Learner, "step", slow)
    monkeypatch.setattr("mssar.lab.engine.training.TICK", 0.0)
    trained(tiny(0, epochs=1, batch=2), arrays(), tmp_path, log)
    first, *_, last = [moment for _, moment in log.moments]
    assert first.step == 1
    left = last.seconds - first.seconds
    assert left / 2 <= first.left <= 2 * left
