"""Runs that are trained as one: each ends where it would by itself, but for rounding."""

import shutil
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import CPU, Log, arrays, assert_same, learnt, opened, timeless, tiny, trained

from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import checkpoint, fleet
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.stacked import StackLearner
from mssar.lab.engine.step import Learner
from mssar.lab.engine.world import World
from mssar.lab.run import Run


def two() -> dict[str, Arrays]:
    """Data of as many images, with four and with seven classes."""
    return {"tiny": arrays(), "other": replace(arrays(classes=7), name="other")}


def runs() -> list[Run]:
    """Four of one network, two of them on other data, and one of another network."""
    made = [tiny(0, "mssar"), tiny(1, "mssar"), tiny(0, "mssar"), tiny(2, "mssar"), tiny(0)]
    names = ["tiny", "other", "other", "tiny", "tiny"]
    return [replace(run, dataset=name) for run, name in zip(made, names, strict=True)]


def sail(runs: list[Run], folder: Path, log: Log | None = None, **how: Any) -> fleet.Outcome:
    return fleet.train(runs, two().__getitem__, CPU, folder, log or Log(), **how)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.usefixtures("smooth")
def test_runs_as_one_end_where_they_would_alone(tmp_path):
    log = Log()
    outcome = sail(runs(), tmp_path, log, width=8, stack=8)
    assert (outcome.left, outcome.failures) == ([], [])
    assert len(outcome.records) == 5
    for run in runs():
        alone = trained(run, two()[run.dataset], tmp_path / "alone" / run.name)
        assert_near(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))
        (found,) = [r for r in outcome.records if r.run == run.as_dict()]
        beside, by_itself = timeless(found), timeless(alone)
        assert beside["execution"].pop("stacked", 1) == (4 if run.recalibration == "mssar" else 1)
        for epoch, other in zip(beside.pop("epochs"), by_itself.pop("epochs"), strict=True):
            assert epoch["lr"] == other["lr"]
            for loss in ("train_loss", "test_loss"):
                assert epoch[loss] == pytest.approx(other[loss], rel=1e-3)
        for name in ("error", "error5", "class_errors"):
            del beside[name], by_itself[name]
        assert beside == by_itself
        assert found.error == found.epochs[-1].test_error
        assert len(found.class_errors) == len(two()[run.dataset].classes)


def test_what_begins_slowly_is_slow_for_all_of_a_stack(tmp_path, monkeypatch):
    """As compiling, which the first one's first step does for all."""
    step = StackLearner.step

    def slow(self: StackLearner, number: int) -> None:
        time.sleep(0.6 * (self.epoch == number == 0))
        step(self, number)

    monkeypatch.setattr(StackLearner, "step", slow)
    records = sail([tiny(seed) for seed in (0, 1, 2)], tmp_path, width=3, stack=3).records
    first = [record.epochs[0].seconds for record in records]
    assert min(first) > 0.6
    assert max(first) - min(first) < 0.3


@pytest.mark.usefixtures("timm", "smooth")
def test_runs_with_a_module_of_timms_are_trained_as_one(tmp_path):
    """With norms and their statistics: each one's checkpoint is as if it had been alone."""
    chosen = [tiny(seed, "coord") for seed in (0, 1, 2)]
    records = sail(chosen, tmp_path, width=3, stack=3).records
    assert [record.execution["stacked"] for record in records] == [3, 3, 3]
    for run in chosen:
        trained(run, two()["tiny"], tmp_path / "alone" / run.name)
        assert_near(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))


@pytest.mark.parametrize("width", [2, 4])
def test_runs_of_stacks_are_counted_beside_each_other(tmp_path, width):
    records = sail([tiny(seed) for seed in range(4)], tmp_path, width=width, stack=2).records
    how = [(r.execution["together"], r.execution["stacked"]) for r in records]
    assert how == [(width, 2)] * 4


def test_what_is_nobodys_stays_zero():
    """Whatever weight decay and momentum do."""
    data, each = arrays(), [tiny(seed, "mssar", weight_decay=0.1) for seed in (0, 1)]
    stacking = fleet.Stacking(2, lambda _: data, CPU, Path("nowhere"), World(), anew=True)
    learner = stacking.members(each, {})[0].all
    assert isinstance(learner, StackLearner)
    learner.begin(0, 0, 0.1)
    for step in range(3):
        learner.step(step)
    for parameter, mask in learner.stack.masks():
        assert mask.sum() < mask.numel()
        assert not parameter[mask == 0].any()
        assert parameter[mask == 1].all()


def test_masks_lie_as_gradients_do_and_stay_where_they_are():
    """As gradients do, so that all are multiplied in a few launches. A step that was captured with
    some masks reads them for ever, though gradients of another batch lie otherwise."""
    data, each = arrays(), [tiny(seed, "mssar") for seed in (0, 1)]
    stacking = fleet.Stacking(2, lambda _: data, CPU, Path("nowhere"), World(), anew=True)
    learner = stacking.members(each, {})[0].all
    learner.begin(0, 0, 0.1)
    learner.step(0)
    (first,) = learner.masks.values()
    for (parameter, owned), mask in zip(learner.shared, first, strict=True):
        assert mask.stride() == parameter.grad.stride()
        assert torch.equal(mask, owned)
        parameter.grad = torch.ones_like(parameter).transpose(0, 1).contiguous().transpose(0, 1)
    learner._differentiated()
    again, other = learner.masks.values()
    assert again is first
    for (parameter, owned), mask in zip(learner.shared, other, strict=True):
        assert mask.stride() == parameter.grad.stride()
        assert torch.equal(parameter.grad, owned)


@pytest.mark.parametrize("turns", [2, 4, 7])
def test_an_interrupted_stack_goes_on_to_the_same_bits(tmp_path, turns):
    """In an epoch, in its test, and in the next."""
    chosen = runs()[:3]
    sail(chosen, tmp_path / "whole", width=3, stack=3)
    stacking = fleet.Stacking(3, two().__getitem__, CPU, tmp_path / "cut", World(), anew=False)
    crew = fleet.StackedTrainings(
        [
            fleet.Training(
                run, two()[run.dataset], CPU, tmp_path / "cut" / run.name, Log(), member=b
            )
            for run, b in zip(chosen, stacking.members(chosen, {}), strict=True)
        ]
    )
    work = crew.work()
    for _ in range(turns):
        next(work)
    assert len({training.position for training in crew.trainings}) == 1
    assert not crew.saved
    crew.save()
    assert crew.saved
    work.close()
    crew.close()
    outcome = sail(chosen, tmp_path / "cut", width=3, stack=3)
    assert [record.interruptions for record in outcome.records] == [1, 1, 1]
    assert [record.execution["stacked"] for record in outcome.records] == [3, 3, 3]
    for run in chosen:
        assert_same(learnt(tmp_path / "cut" / run.name), learnt(tmp_path / "whole" / run.name))


def test_a_run_of_a_stack_goes_on_by_itself_and_runs_by_themselves_in_a_stack(tmp_path):
    first, second = runs()[0], runs()[3]
    for run in (first, second):
        with opened(run, two()["tiny"], tmp_path / run.name) as training:
            work = training.work()
            for _ in range(2 + run.seed):  # not equally far
                next(work)
            training.save()
    outcome = sail([first, second], tmp_path, width=2, stack=2)
    assert ["stacked" in record.execution for record in outcome.records] == [False, False]
    for run in (first, second):
        trained(run, two()["tiny"], tmp_path / "alone" / run.name)
        assert_same(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))


@pytest.mark.usefixtures("timm", "smooth")
@pytest.mark.parametrize("kind", ["mssar", "coord"])
def test_who_was_in_a_stack_ends_alone_where_it_would_have(tmp_path, kind):
    chosen = [tiny(seed, kind) for seed in (0, 1, 2)]
    stacking = fleet.Stacking(3, two().__getitem__, CPU, tmp_path, World(), anew=False)
    crew = fleet.StackedTrainings(
        [
            fleet.Training(run, two()["tiny"], CPU, tmp_path / run.name, Log(), member=member)
            for run, member in zip(chosen, stacking.members(chosen, {}), strict=True)
        ]
    )
    work = crew.work()
    for _ in range(4):
        next(work)
    crew.save()
    work.close()
    crew.close()
    for run in chosen:
        assert trained(run, two()["tiny"], tmp_path / run.name).interruptions == 1
        trained(run, two()["tiny"], tmp_path / "alone" / run.name)
        assert_near(learnt(tmp_path / run.name), learnt(tmp_path / "alone" / run.name))


@pytest.mark.parametrize("anew", [False, True])
def test_a_loss_that_is_not_finite_takes_a_stack_apart(tmp_path, monkeypatch, anew):
    """Nobody knows whose it was: each goes on from its last epoch, and one of them fails."""
    chosen, log = [tiny(seed) for seed in (0, 1, 2)], Log()
    begin = StackLearner.begin

    def spoilt(self: StackLearner, epoch: int, step: int, lr: float) -> None:
        if epoch == 1:
            with torch.no_grad():
                self.stack.state(1)["conv1.weight"].fill_(float("nan"))
        begin(self, epoch, step, lr)

    monkeypatch.setattr(StackLearner, "begin", spoilt)
    outcome = sail(chosen, tmp_path, log, width=3, stack=3, anew=anew)
    assert outcome.failures == []  # the fault was not the run's own
    (said,) = (m for m in log.messages if "from their last checkpoints on, each by itself" in m)
    assert said.endswith("since of one or more of them the loss is nan in epoch 2, step 1")
    assert "seed" not in said
    assert [record.interruptions for record in outcome.records] == [1, 1, 1]
    assert all("stacked" not in record.execution for record in outcome.records)
    for run in chosen:
        last = checkpoint.progress(checkpoint.checkpoints(tmp_path / run.name)[-1])
        assert last.epoch == 2


@pytest.mark.usefixtures("smooth")
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_folder_that_is_lost_costs_the_others_of_a_stack_nothing(tmp_path, monkeypatch, broken):
    """Its second epoch cannot be kept; theirs is, also of those whose turn comes after it."""
    chosen = [tiny(seed, epochs=3) for seed in (0, 1, 2)]
    lost, step, alone = tmp_path / chosen[broken].name, Learner.step, Counter[int]()

    def counted(self: Learner, number: int) -> None:
        alone[self.epoch] += type(self) is Learner
        step(self, number)

    monkeypatch.setattr(Learner, "step", counted)

    class Losing(Log):
        def passed(self, run, epoch, left):
            super().passed(run, epoch, left)
            if epoch.epoch == 1 and run == chosen[2]:  # the last of them
                shutil.rmtree(lost)
                lost.write_text("no folder")

    log = Losing()
    outcome = sail(chosen, tmp_path, log, width=3, stack=3)
    (failed,) = outcome.failures
    assert f"seed {broken}" in failed
    (said,) = (m for m in log.messages if "each by itself" in m)
    assert said.startswith("resnet8 none: 3 runs that were trained as one are tried from")
    assert said.endswith("Not a directory")
    others = [run for run in chosen if run != chosen[broken]]
    assert [record.run["seed"] for record in outcome.records] == [run.seed for run in others]
    assert [record.interruptions for record in outcome.records] == [1, 1]
    assert alone == {0: 0, 1: 0, 2: 6}  # no step of the second epoch was taken again
    for run in others:
        trained(run, two()["tiny"], tmp_path / "whole" / run.name)
        assert_near(learnt(tmp_path / run.name), learnt(tmp_path / "whole" / run.name))


def test_what_has_no_room_as_one_is_trained_one_by_one(tmp_path, monkeypatch):
    def crowded(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(fleet.Stacking, "members", crowded)
    log = Log()
    outcome = sail([tiny(seed, epochs=1) for seed in (0, 1, 2)], tmp_path, log, width=3, stack=3)
    assert sorted(record.run["seed"] for record in outcome.records) == [0, 1, 2]
    assert log.messages[0].endswith(
        "each by itself, since CUDA out of memory. Tried to allocate 2 GiB."
    )


def test_who_diverges_fails_and_the_others_do_not(tmp_path):
    chosen = [tiny(seed, lr=1e30 if seed == 1 else 0.02) for seed in (0, 1, 2)]
    outcome = sail(chosen, tmp_path, width=3, stack=3)
    assert len(outcome.records) == 2  # of other recipes: they were never one
    same = [tiny(seed, lr=1e30) for seed in (3, 4)]
    outcome = sail(same, tmp_path, width=2, stack=2)
    assert len(outcome.failures) == 2
    assert not outcome.records


@pytest.mark.parametrize(
    ("how", "world", "stack", "words"),
    [
        (CPU, World(), 0, "a stack has 1 network or more; got 0"),
        (Execution(CPU.device, deterministic=True), World(), 2, "leave out --stack or --determ"),
        (CPU, World(0, 2), 2, "several processes train one network at a time"),
    ],
)
def test_stacks_that_cannot_be_are_refused(tmp_path, how, world, stack, words):
    with pytest.raises(ValueError, match=words):
        fleet.train([tiny()], lambda _: arrays(), how, tmp_path, Log(), stack=stack, world=world)


def test_a_folder_that_cannot_be_read_is_its_own_runs_trouble(tmp_path):
    chosen = [tiny(seed) for seed in (0, 1, 2)]
    broken = tmp_path / chosen[2].name / "epoch-0001.safetensors"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no checkpoint")
    outcome = sail(chosen, tmp_path, width=3, stack=3)
    assert [record.run["seed"] for record in outcome.records] == [0, 1]
    assert [record.execution["stacked"] for record in outcome.records] == [2, 2]
    (said,) = outcome.failures
    assert str(broken.parent) in said


def test_runs_are_one_only_if_all_are_compiled_or_none():
    runs, data = [tiny(seed) for seed in range(4)], arrays()
    how = replace(CPU, compiled=frozenset({runs[1].name, runs[3].name}))
    stacking = fleet.Stacking(4, lambda _: data, how, Path("nowhere"), World(), anew=True)
    waiting = deque(runs[1:])
    assert stacking.mates(runs[0], waiting, 4) == [runs[2]]
    assert list(waiting) == [runs[1], runs[3]]
