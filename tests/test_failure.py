"""A run that fails costs the others nothing, and says why in a line."""

import errno
import gc
import math
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import CPU, Log, arrays, assert_same, learnt, one_step, opened, poison, tiny, trained
from torch import Tensor, nn

from mssar.lab.engine import checkpoint, failure, fleet
from mssar.lab.engine import training as engine
from mssar.lab.engine.failure import DivergedError
from mssar.lab.engine.step import Learner
from mssar.lab.run import Run
from mssar.surgery import foreign


def fleet_of(runs: list[Run], folder: Path, log: Log, **kinds: Any) -> fleet.Outcome:
    return fleet.train(runs, lambda _: arrays(), CPU, folder, log, **kinds)


def unlucky(after: int, seed: int, trouble: Callable[[], None]) -> Callable[..., None]:
    """In place of Learner.step: the run of this seed meets trouble after some steps."""
    step, steps = Learner.step, 0

    def met(self: Learner, number: int) -> None:
        nonlocal steps
        if self.feed.seed == seed:
            if steps == after:
                trouble()
            steps += 1
        step(self, number)

    return met


def too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def too_much_for_a_capture() -> None:
    """The capture's end is what is raised then."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee also")
    except torch.OutOfMemoryError:
        raise RuntimeError("CUDA error: operation failed due to a previous error")  # noqa: B904


def mishap() -> None:
    raise KeyError("a mishap\nof two lines")


def mistake() -> None:
    raise ValueError("too many photographs cannot be read")


SMALLER = "; a smaller --batch or --fleet needs less"
TROUBLES = {  # and what is said of them, before what was kept and after it
    "memory": (too_much, r".*allocate", SMALLER),
    "capture": (too_much_for_a_capture, r"CUDA out of memory. Tried to allocate 2 GiB.", SMALLER),
    "exception": (mishap, r"KeyError: 'a mishap.*'", r"; .*/failure.txt says where"),
    "mistake": (mistake, "too many photographs cannot be read", ""),
    "loss": (None, r"the loss is nan in epoch \d, step 2", "; try a lower --lr"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """What runs learn that have no company."""
    folder = tmp_path_factory.mktemp("alone")
    for seed in (0, 2):
        trained(tiny(seed), arrays(), folder / str(seed))
    return {seed: learnt(folder / str(seed)) for seed in (0, 2)}


@pytest.mark.parametrize("kind", TROUBLES)
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_others_do_not_notice(tmp_path, monkeypatch, alone, kind, epoch):
    trouble, what, advice = TROUBLES[kind]
    after, runs, log = 3 * epoch + 1, [tiny(0), tiny(1), tiny(2)], Log()
    step = unlucky(after, 1, trouble) if trouble else poison(after, 1)
    monkeypatch.setattr(Learner, "step", step)
    outcome = fleet_of(runs, tmp_path, log, width=3)
    assert [r.run["seed"] for r in outcome.records] == [0, 2]
    assert outcome.left == []
    for record in outcome.records:
        assert record.interruptions == 0
    for seed, expected in alone.items():
        assert_same(learnt(tmp_path / runs[seed].name), expected)
    spoilt = tmp_path / runs[1].name
    kept = [path.name for path in checkpoint.checkpoints(spoilt)]
    assert kept == ["epoch-0001.safetensors"][:epoch]
    (reason,) = outcome.failures
    assert log.failures == [(runs[1], reason)]
    rest = (
        f"; {spoilt / kept[0]} is the last good checkpoint" if kept else "; nothing was saved yet"
    )
    assert re.fullmatch(f"resnet8 none tiny seed 1: {what}.*{re.escape(rest)}{advice}", reason)
    assert (spoilt / failure.NAME).exists() == (kind == "exception")
    if kept:  # and it goes on from there, when the trouble is over
        monkeypatch.undo()
        (record,) = fleet_of(runs[1:2], tmp_path, log).records
        assert record.interruptions == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_diverges_ends_and_the_others_finish(tmp_path, monkeypatch, value):
    runs, log = [tiny(0), tiny(1), tiny(2)], Log()
    monkeypatch.setattr(Learner, "step", poison(4, 1, value))
    outcome = fleet_of(runs, tmp_path, log, width=3)
    assert [r.run["seed"] for r in outcome.records] == [0, 2]
    (reason,) = outcome.failures
    assert log.failures == [(runs[1], reason)]
    assert "in epoch 2, step 2; " in reason  # the fifth step
    directory = tmp_path / runs[1].name
    (kept,) = checkpoint.checkpoints(directory)
    assert f"{kept} is the last good checkpoint" in reason
    assert kept.name == "epoch-0001.safetensors"
    assert all(t.isfinite().all() for t in learnt(directory).values())
    assert outcome.left == []
    assert not (directory / "record.json").exists()


def test_a_step_that_spoils_the_weights_behind_a_good_loss_is_not_saved(tmp_path):
    with opened(tiny(0), arrays(), tmp_path) as training:
        work = training.work()
        next(work)
        training.save()
        next(work)
        name, spoilt = next(iter(training.learner.model.named_parameters()))
        with torch.no_grad():
            spoilt[1, 2, 0, 1] = math.inf
        with pytest.raises(
            DivergedError, match=f"model.{name} is not finite after epoch 0, step 2"
        ):
            training.save()
    (kept,) = checkpoint.checkpoints(tmp_path)
    assert checkpoint.progress(kept).step == 1


def test_what_a_failed_run_had_is_free_at_once(tmp_path, monkeypatch):
    """Before anybody else has a turn: they may need its memory."""
    gone: list[bool] = []
    refs: list[weakref.ref[Learner]] = []
    step, log = unlucky(1, 0, mishap), Log()

    def watched(self: Learner, number: int) -> None:
        if self.feed.seed == 0:
            refs[:] = [weakref.ref(self)]
        elif log.failures:
            gone.append(refs[0]() is None)
        step(self, number)

    monkeypatch.setattr(Learner, "step", watched)
    gc.collect()
    gc.disable()  # so that only a sweep finds circles
    try:
        fleet_of([tiny(0), tiny(1)], tmp_path, log, width=2)
    finally:
        gc.enable()
    assert gone
    assert all(gone)


def test_out_of_memory_the_fleet_is_narrower_and_what_waits_is_not_lost(tmp_path, monkeypatch):
    """There is room for two. Who waits would fail as well, one after the other."""
    prepare, afloat = engine.Training._prepare, weakref.WeakSet[engine.Training]()

    def crowded(self: engine.Training) -> None:
        gc.collect()
        if len(afloat) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        afloat.add(self)
        prepare(self)

    monkeypatch.setattr(engine.Training, "_prepare", crowded)
    runs, log = [tiny(seed, epochs=1) for seed in range(5)], Log()
    outcome = fleet_of(runs, tmp_path, log, width=4)
    assert sorted(r.run["seed"] for r in outcome.records) == [0, 1, 3, 4]
    (reason,) = outcome.failures
    assert reason.startswith("resnet8 none tiny seed 2: CUDA out of memory.")
    assert log.messages == ["memory ran out: from now on 2 at once", reason]
    assert log.failures == []  # it never began


def test_out_of_memory_a_stack_counts_as_the_runs_that_it_has(tmp_path, monkeypatch):
    prepare = engine.Training._prepare

    def crowded(self: engine.Training) -> None:
        if self.run.recalibration == "se":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        prepare(self)

    monkeypatch.setattr(engine.Training, "_prepare", crowded)
    runs = [*(tiny(seed, epochs=2) for seed in range(4)), tiny(0, "se"), tiny(4), tiny(5)]
    log = Log()
    outcome = fleet_of(runs, tmp_path, log, width=6, stack=2)
    assert "memory ran out: from now on 4 at once" in log.messages
    assert [r.execution.get("stacked") for r in outcome.records] == [2] * 6


def test_a_folder_that_cannot_be_used_costs_only_its_run(tmp_path):
    runs = [tiny(seed, epochs=1) for seed in range(3)]
    spoilt = tmp_path / runs[0].name / "epoch-0001.safetensors"
    spoilt.parent.mkdir()
    spoilt.write_bytes(b"x")
    outcome = fleet_of(runs, tmp_path, Log(), width=2)
    assert [r.run["seed"] for r in outcome.records] == [1, 2]
    (reason,) = outcome.failures
    assert reason.endswith("can be read; remove it to begin anew")  # and not: nothing was saved yet
    with pytest.raises(ValueError, match=f"^no checkpoint in {spoilt.parent} can be read"):
        fleet_of(runs[:1], tmp_path, Log())


def test_what_is_said_to_be_kept_is_whole_and_of_the_run(tmp_path):
    run, other = tiny(0, epochs=3), tiny(1)
    assert failure.kept(run, tmp_path / "none") == "; nothing was saved yet"
    trained(run, arrays(), tmp_path)
    before, last = checkpoint.checkpoints(tmp_path)
    assert failure.kept(run, tmp_path) == f"; {last} is the last good checkpoint"
    assert failure.kept(other, tmp_path) == ""
    last.write_bytes(last.read_bytes()[:-1])
    assert failure.kept(run, tmp_path) == f"; {before} is the last good checkpoint"
    before.write_bytes(b"x")
    assert failure.kept(run, tmp_path) == ""


def test_a_network_that_begins_with_what_is_not_finite_is_named(tmp_path, monkeypatch):
    """And is not said to have diverged after its first epoch."""
    build = foreign.build

    def masked(*what: object, **how: object) -> nn.Module:
        made = build(*what, **how)
        made.register_buffer("aside", torch.tensor([math.inf]), persistent=False)
        if masked.persistent:
            made.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        return made

    monkeypatch.setattr(foreign, "build", masked)
    masked.persistent = True
    for stack in (1, 2):
        with pytest.raises(ValueError, match=r"^resnet8 begins with a mask that is not finite"):
            fleet_of([tiny(0), tiny(1)], tmp_path, Log(), width=2, stack=stack)
    assert list(tmp_path.iterdir()) == []
    masked.persistent = False
    assert fleet_of([tiny(0, epochs=1)], tmp_path, Log()).failures == []


def test_a_full_disk_is_everybodys_and_all_that_can_be_saved_is(tmp_path, monkeypatch):
    runs, real = [tiny(0), tiny(1)], checkpoint.write_whole

    def write(path: Path, content: bytes) -> None:
        if path.parent.name == runs[0].name:
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", write)
    with pytest.raises(OSError, match="No space left"):
        fleet_of(runs, tmp_path, Log(), width=2)
    (kept,) = checkpoint.checkpoints(tmp_path / runs[1].name)
    assert checkpoint.progress(kept).step == 3  # the other's epoch was to be closed


def refusing(name: str, code: int) -> Callable[..., None]:
    """In place of ``write_whole``: a folder of this name may not be written to."""
    real = checkpoint.write_whole

    def write(path: Path, content: bytes) -> None:
        if path.parent.name == name:
            raise OSError(code, os.strerror(code), str(path))
        real(path, content)

    return write


@pytest.mark.parametrize("kinds", [{"width": 1}, {"width": 2}, {"width": 2, "stack": 2}], ids=str)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EISDIR], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_written_is_one_runs_own(tmp_path, monkeypatch, code, kinds):
    runs = [tiny(0), tiny(1)]
    monkeypatch.setattr(checkpoint, "write_whole", refusing(runs[0].name, code))
    outcome = fleet_of(runs, tmp_path, Log(), **kinds)
    assert [record.run["seed"] for record in outcome.records] == [1]
    (reason,) = outcome.failures
    place = tmp_path / runs[0].name / "epoch-0001.safetensors"
    assert reason == f"{runs[0]}: {os.strerror(code)}: {place}; nothing was saved yet"


@pytest.mark.parametrize("stack", [1, 2])
def test_at_the_end_of_its_time_such_a_folder_is_one_runs_own(tmp_path, monkeypatch, stack):
    runs = [tiny(0), tiny(1)]
    monkeypatch.setattr(checkpoint, "write_whole", refusing(runs[0].name, errno.EACCES))
    with one_step(monkeypatch):
        outcome = fleet_of(runs, tmp_path, Log(), width=2, stack=stack)
    assert runs[1] in outcome.left
    if stack == 1:
        assert len(outcome.failures) == 1
    else:  # runs that are one take their steps together, and the other has kept it
        (kept,) = checkpoint.checkpoints(tmp_path / runs[1].name)
        assert checkpoint.progress(kept).step == 1


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_file_in_the_place_of_a_folder_is_one_runs_own(tmp_path, monkeypatch, stack, moment):
    runs = [tiny(0), tiny(1)]
    place = tmp_path / runs[0].name

    def replaced() -> None:
        if place.is_dir():
            place.rename(tmp_path / "elsewhere")
        place.touch()

    if moment == "before":
        replaced()
    else:
        monkeypatch.setattr(Learner, "step", unlucky(2, 0, replaced))
    outcome = fleet_of(runs, tmp_path, Log(), width=2, stack=stack)
    assert [record.run["seed"] for record in outcome.records] == [1]
    (reason,) = outcome.failures
    assert reason == f"{runs[0]}: Not a directory: {place}; nothing was saved yet"


def test_a_program_that_fails_in_such_a_folder_costs_the_others_nothing(tmp_path, monkeypatch):
    """The traceback has no place then."""
    runs = [tiny(0), tiny(1)]
    monkeypatch.setattr(Learner, "step", unlucky(1, 0, mishap))
    monkeypatch.setattr(failure, "write_whole", refusing(runs[0].name, errno.EACCES))
    outcome = fleet_of(runs, tmp_path, Log(), width=2)
    assert [record.run["seed"] for record in outcome.records] == [1]
    (reason,) = outcome.failures
    assert reason == f"{runs[0]}: KeyError: 'a mishap\\nof two lines'; nothing was saved yet"


def test_what_the_folder_of_all_runs_refuses_is_everybodys(tmp_path):
    own, missing = tmp_path / "own", tmp_path / "missing"
    own.mkdir()

    def is_everybodys(code: int, place: Path | None, folder: Path = own) -> bool:
        error = OSError(code, os.strerror(code), *([] if place is None else [str(place)]))
        return failure.is_everybodys(error, folder)

    assert not is_everybodys(errno.EACCES, own)
    assert not is_everybodys(errno.EPERM, own / "epoch-0001.safetensors")
    assert not is_everybodys(errno.ENAMETOOLONG, missing, missing)
    assert is_everybodys(errno.EACCES, missing, missing)  # it may not be made
    assert is_everybodys(errno.EACCES, tmp_path / "records.jsonl")
    assert is_everybodys(errno.EACCES, None)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE):
        assert is_everybodys(code, own / "epoch-0001.safetensors")
    assert not failure.is_everybodys(KeyError("own"), own)
