"""Stopping and going on: a run that was interrupted ends as if it had not been."""

import contextlib
import errno
import json
import math
import os
import pickle
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lab import CPU, Log, arrays, assert_same, learnt, opened, program, timeless, tiny, trained

from mssar.lab.engine import checkpoint
from mssar.lab.engine import feed as feeds
from mssar.lab.engine.result import NAME as RECORD
from mssar.lab.engine.result import finished
from mssar.lab.engine.training import Training

RUN = tiny(5)
PAUSES = 7  # of an epoch: three steps, three batches of the test, one after saving


@pytest.fixture(autouse=True)
def _small_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "EVALUATION_BATCH", 10)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "EVALUATION_BATCH", 10)
        return timeless(trained(RUN, arrays(), folder)), folder


def stopped(directory: Path, pauses: int) -> Training:
    """A run that got so far, saved and ended."""
    with opened(RUN, arrays(), directory) as training:
        work = training.work()
        for _ in range(pauses):
            next(work)
        training.save()
        work.close()
    return training


@pytest.mark.parametrize("pauses", range(1, 2 * PAUSES + 1))
def test_stopped_anywhere_it_ends_the_same(tmp_path, unbroken, pauses):
    expected, folder = unbroken
    training = stopped(tmp_path, pauses)
    epochs, rest = divmod(pauses, PAUSES)
    assert (training.progress.epoch, training.progress.step) == (epochs, min(rest, 3))
    log = Log()
    record = trained(RUN, arrays(), tmp_path, log)
    assert timeless(record) == expected
    assert_same(learnt(tmp_path), learnt(folder))
    assert record.interruptions == 1
    assert record.id == training.progress.id
    assert record.started == training.progress.started
    assert [epoch for _, epoch, _ in log.started] == [epochs]


def test_stopped_at_every_pause_it_ends_the_same(tmp_path, unbroken):
    """The test begins anew after a stop, so that the pauses after it are reached together."""
    expected, folder = unbroken
    pauses = 0
    while finished(tmp_path) is None:
        with opened(RUN, arrays(), tmp_path) as training:
            work = training.work()
            before = training.progress.epoch, training.progress.step
            for _ in work:
                if (training.progress.epoch, training.progress.step) != before:
                    training.save()
                    break
            work.close()
        pauses += 1
    record = finished(tmp_path)
    assert timeless(record) == expected
    assert_same(learnt(tmp_path), learnt(folder))
    assert record.interruptions == pauses - 1 == 2 * (3 + 1)
    with_times = sum(epoch.seconds for epoch in record.epochs)
    assert record.seconds == pytest.approx(with_times)


def test_runs_on_the_device_are_counted_before_a_stop_too(tmp_path):
    """So that a run's share of its seconds is not that of its last part alone."""
    with opened(RUN, arrays(), tmp_path) as training:
        work = training.work()
        for _ in range(PAUSES):
            next(work)
            training.company.add(9)
        training.save()
    with opened(RUN, arrays(), tmp_path) as training:
        turns = 0
        for _ in training.work():
            if finished(tmp_path) is None:
                training.company.add(1)
                turns += 1
    wanted = math.ceil(100 * (9 * PAUSES + turns) / (PAUSES + turns)) / 100
    assert 1 < wanted < 9
    assert finished(tmp_path).execution["together"] == wanted


def test_without_saving_it_goes_on_from_the_last_epoch(tmp_path, unbroken):
    expected, folder = unbroken
    with opened(RUN, arrays(), tmp_path) as training:
        work = training.work()
        for _ in range(PAUSES + 2):
            next(work)
    assert timeless(trained(RUN, arrays(), tmp_path)) == expected
    assert_same(learnt(tmp_path), learnt(folder))


STALLING = """
import sys, time
from lab import *
from mssar.lab.engine.step import Learner
torch.set_num_threads(1)
steps, step = 0, Learner.step
def stall(self, number):
    global steps
    if steps == 5:
        print("in the middle of the second epoch", flush=True)
        time.sleep(60)
    step(self, number)
    steps += 1
Learner.step = stall
trained(tiny(5), arrays(), Path(sys.argv[1]))
"""


def test_a_killed_process_is_made_good(tmp_path, unbroken):
    """Its lock does not bar the folder either."""
    expected, folder = unbroken
    with program(STALLING, tmp_path) as process:
        assert process.stdout.readline() == "in the middle of the second epoch\n"
        with pytest.raises(ValueError, match="is in use by another process; wait, or stop it"):
            Training(RUN, arrays(), CPU, tmp_path, Log())
        process.kill()
        process.wait()
    (kept,) = checkpoint.checkpoints(tmp_path)
    assert kept.name == "epoch-0001.safetensors"
    assert (tmp_path / ".lock").exists()
    record = trained(RUN, arrays(), tmp_path)
    assert timeless(record) == expected
    assert record.interruptions == 1
    assert_same(learnt(tmp_path), learnt(folder))


def test_a_folder_is_for_one_training_at_a_time(tmp_path):
    with (
        opened(RUN, arrays(), tmp_path),
        pytest.raises(ValueError, match=f"{tmp_path} is in use by another process"),
        opened(RUN, arrays(), tmp_path),
    ):
        pytest.fail("two at once")
    with opened(RUN, arrays(), tmp_path):  # free again
        pass


def test_the_last_two_checkpoints_are_kept(tmp_path):
    run = tiny(0, epochs=4)
    with opened(run, arrays(), tmp_path) as training:
        for _ in training.work():
            names = [path.name for path in checkpoint.checkpoints(tmp_path)]
            epoch = training.progress.epoch
            assert names == [f"epoch-{e:04}.safetensors" for e in (epoch - 1, epoch) if e > 0]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {".lock", "epoch-0003.safetensors", "epoch-0004.safetensors", RECORD}


def test_checkpoints_are_ordered_by_number_not_by_name(tmp_path):
    names = ["epoch-9999", "epoch-9999-step-00020", "epoch-9999-step-100000", "epoch-10000"]
    for name in reversed(names):
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "epoch-best.safetensors").touch()
    (tmp_path / ".epoch-0007.safetensors.part").touch()
    assert [path.stem for path in checkpoint.checkpoints(tmp_path)] == names


def test_a_checkpoint_that_does_not_say_what_its_weights_are_for(tmp_path):
    """As they were before layers had their coordinates in them."""
    run, whole, folder = tiny(5, "mssar"), tmp_path / "whole", tmp_path / "stopped"
    expected = timeless(trained(run, arrays(), whole))
    shutil.copytree(whole, folder)
    (folder / RECORD).unlink()
    (folder / "epoch-0002.safetensors").unlink()
    progress, tensors = checkpoint.load(folder / "epoch-0001.safetensors")
    older = {n: t for n, t in tensors.items() if not n.endswith(".coordinates")}
    assert len(older) == len(tensors) - 3
    checkpoint.write(folder, progress, checkpoint.Brought(older))
    assert timeless(trained(run, arrays(), folder)) == expected
    assert_same(learnt(folder), learnt(whole))


SPOILT = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "other bytes": lambda content: b"\xff" * len(content),
    "its first byte lost": lambda content: content[1:],
    "without its progress": lambda _: safetensors.torch.save({"x": torch.zeros(1)}),
    "of a later program": lambda _: safetensors.torch.save(
        {"x": torch.zeros(1)}, {"mssar": json.dumps({"schema": 2})}
    ),
    "one bit of a weight": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "one bit of its history": lambda content: re.sub(
        rb"test_error.....",
        lambda found: found[0][:-1] + bytes([found[0][-1] ^ 1]),
        content,
        count=1,
    ),
    "progress that is none": lambda _: safetensors.torch.save({}, {"mssar": "[1]"}),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_checkpoint_is_passed_over_with_a_word(tmp_path, unbroken, kind):
    expected, folder = unbroken
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / RECORD).unlink()
    newest = tmp_path / "epoch-0002.safetensors"
    newest.write_bytes(SPOILT[kind](newest.read_bytes()))
    log = Log()
    record = trained(RUN, arrays(), tmp_path, log)
    (message,) = log.messages
    assert message.startswith(f"{newest} is no readable checkpoint (")
    assert message.endswith("; going back to the checkpoint before it")
    assert [epoch for _, epoch, _ in log.started] == [1]
    assert timeless(record) == expected
    assert_same(learnt(tmp_path), learnt(folder))


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    progress = checkpoint.Progress(RUN.as_dict(), "sha256:1", "fp32", "a", "b", epoch=1)
    tensors = {"x": torch.arange(40.0)}
    path = checkpoint.write(tmp_path, progress, checkpoint.Brought(tensors))
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with contextlib.suppress(ValueError):
            found, there = checkpoint.load(path)  # it says less, but nothing else
            assert content.count(b"mssar.numbers") + content.count(b"mssar.header") == 2
            flipped = path.read_bytes()
            assert flipped.count(b"mssar.numbers") + flipped.count(b"mssar.header") == 1
            assert found == progress
            assert_same(there, tensors)


def test_checkpoints_from_before_there_were_checksums_are_read(tmp_path):
    progress = checkpoint.Progress(RUN.as_dict(), "sha256:1", "fp32", "a", "b", epoch=1)
    tensors = {"x": torch.arange(40.0)}
    path = tmp_path / "epoch-0001.safetensors"
    notes = {"mssar": json.dumps(asdict(progress))}
    path.write_bytes(checkpoint.Brought(tensors).file(notes))
    found, there = checkpoint.load(path)
    assert found == checkpoint.progress(path) == progress
    assert_same(there, tensors)


def test_where_no_checkpoint_can_be_read_nothing_is_begun_anew_in_silence(tmp_path):
    path = tmp_path / "epoch-0001.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=f"no checkpoint in {tmp_path} can be read; remove it"):
        trained(RUN, arrays(), tmp_path)
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(RUN, seed=6), "holds another run: seed is 5 there and 6 here"),
        (tiny(5, lr=0.5), "holds another run: recipe.lr is 0.02 there and 0.5 here"),
        (
            tiny(5, padding=0),
            "holds another run: recipe.augmentation.padding is 1 there and 0 here",
        ),
        (tiny(5, "se"), "holds another run: recalibration is 'none' there and 'se' here"),
    ],
)
def test_anothers_checkpoint_is_refused(tmp_path, unbroken, other, message):
    _, folder = unbroken
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before = learnt(tmp_path)
    with pytest.raises(ValueError, match=message):
        trained(other, arrays(), tmp_path)
    assert_same(learnt(tmp_path), before)
    with opened(RUN, arrays(), tmp_path):  # the folder was let go
        pass


def test_other_data_of_the_same_name_is_refused(tmp_path):
    stopped(tmp_path, 2)
    data = arrays()
    others = replace(data, train=replace(data.train, labels=data.train.labels.roll(1)))
    with pytest.raises(ValueError, match=str(tmp_path)):
        trained(RUN, others, tmp_path)


def test_other_classes_are_refused(tmp_path):
    stopped(tmp_path, 2)
    with pytest.raises(ValueError, match=str(tmp_path)):
        trained(RUN, arrays(classes=5), tmp_path)


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        self.file.write(content[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["open", "write", "fsync", "replace"])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, unbroken, where):
    expected, folder = unbroken
    stopped(tmp_path, PAUSES)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    plain = Path.open
    patches = {
        "open": (Path, "open", refuse),
        "write": (Path, "open", lambda path, *words: Full(plain(path, *words))),
        "fsync": (os, "fsync", refuse),
        "replace": (Path, "replace", refuse),
    }
    with opened(RUN, arrays(), tmp_path) as training:
        work = training.work()
        next(work)
        with monkeypatch.context() as patch:
            patch.setattr(*patches[where])
            with pytest.raises(OSError, match="No space left"):
                training.save()
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert timeless(trained(RUN, arrays(), tmp_path)) == expected
    assert_same(learnt(tmp_path), learnt(folder))


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "file"
    for content in (b"first", b"2nd"):
        checkpoint.write_whole(path, content)
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file"]


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch, unbroken):
    expected, _ = unbroken
    stopped(tmp_path, 3)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for place, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(place, name, never)
    monkeypatch.setattr(pickle, "Unpickler", never)
    assert timeless(trained(RUN, arrays(), tmp_path)) == expected
    with pytest.raises(AssertionError, match="unpickled"):
        torch.load(tmp_path)


def test_stopped_before_its_record_it_is_only_recorded(tmp_path, unbroken):
    expected, folder = unbroken
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / RECORD).unlink()
    log = Log()
    assert timeless(trained(RUN, arrays(), tmp_path, log)) == expected
    assert (log.epochs, log.moments) == ([], [])
    assert timeless(finished(tmp_path)) == expected


def test_a_spoilt_record_is_named(tmp_path):
    assert finished(tmp_path) is None
    (tmp_path / RECORD).write_text('{"half')
    with pytest.raises(ValueError, match=f"{tmp_path / RECORD}: not JSON"):
        finished(tmp_path)


def test_what_was_just_saved_is_never_let_go(tmp_path):
    """Even where later checkpoints lie about that cannot be read."""
    for epoch in (3, 4):
        (tmp_path / f"epoch-{epoch:04}.safetensors").write_bytes(b"spoilt")
    progress = checkpoint.Progress(RUN.as_dict(), "sha256:0", "fp32", "a", "now", epoch=1)
    path = checkpoint.write(tmp_path, progress, checkpoint.Brought({"x": torch.arange(3)}))
    assert path.exists()
    found, tensors = checkpoint.newest(tmp_path, lambda _: None)
    assert found == progress
    assert tensors["x"].tolist() == [0, 1, 2]


def test_a_file_of_ours_is_one_of_safetensors(tmp_path):
    """Its library reads what it would have written, whatever types and layouts there are."""
    draw = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 2, 4, 5, generator=draw)
    tensors = {
        "counter": torch.tensor(7),
        "map": maps.to(memory_format=torch.channels_last),
        "half": maps.half(),
        "brain": maps.bfloat16()[:, 1],
        "names ü": torch.arange(-3, 3, dtype=torch.int32),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 3),
        "double": maps[0].double(),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(checkpoint.Brought(tensors).file({"mssar": '{"ü": 1}', "b": ""}))
    assert_same(safetensors.torch.load_file(path), tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"mssar": '{"ü": 1}', "b": ""}
    assert path.stat().st_size < 2 * 1024 + sum(t.nbytes for t in tensors.values())
    assert checkpoint.Brought(tensors).spoilt() is None
    tensors["brain"][1, 2, 3] = torch.nan
    assert checkpoint.Brought(tensors).spoilt() == "brain"


@pytest.mark.parametrize("pauses", [3, 5])  # all steps done, the test not yet
def test_the_time_left_is_a_number_after_any_stop(tmp_path, pauses):
    stopped(tmp_path, pauses)
    log = Log()
    trained(RUN, arrays(), tmp_path, log)
    assert all(0 <= moment.left < 3600 for _, moment in log.moments)
    assert log.moments[0][1].left > 0
