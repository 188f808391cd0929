"""``mssar train``, ``eval`` and ``demo`` as their users meet them."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import arrays, learnt, one_step, poison
from test_cli import fail
from typer.testing import CliRunner, Result

import mssar.__main__ as program
from mssar.lab import cli, data, records
from mssar.lab.commands import demo as demo_command
from mssar.lab.commands.train import train as train_command
from mssar.lab.engine import checkpoint
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import Training
from mssar.lab.recipes import DEMO, Crops, Photographs, Recipe, varied

SHORT = ("--epochs", "2", "--batch", "16", "--lr", "0.02", "--padding", "1")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every data set is tiny, and runs land in a folder of the test's own."""
    real, made = data.load, arrays(37, 24, 10)

    def load(name: str, data_dir: Path | None = None) -> data.Data:
        if name in ("cifar10", "arrangements") and data_dir is None:
            return made
        return real(name, data_dir)

    monkeypatch.setattr(data, "load", load)
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def run(*words: str) -> Result:
    result = invoke(*words)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def made() -> list[records.Record]:
    return records.read(Path("runs/records.jsonl"))


def test_every_combination_is_a_run_and_a_record():
    said = run(
        "train", "resnet8", "--dataset", "cifar10", "--recalibration", "none,mssar",
        "--seed", "0,1", "--scales", "1,2", *SHORT,
        "--drops", "1", "--factor", "0.5", "--momentum", "0.8",
        "--no-nesterov", "--weight-decay", "0.001", "--mirror", "0",
    ).stdout  # fmt: skip
    found = made()
    assert [(r.run["recalibration"], r.run["seed"]) for r in found] == [
        ("none", 0),
        ("mssar", 0),
        ("none", 1),
        ("mssar", 1),
    ]
    assert found[0].run["options"] == {}
    assert found[1].run["options"] == {"scales": [1, 2], "strategy": "regional", "reduction": 1}
    assert found[0].run["recipe"] == {
        "name": "cifar_resnet",
        "epochs": 2,
        "batch": 16,
        "lr": 0.02,
        "drops": [1],
        "factor": 0.5,
        "momentum": 0.8,
        "nesterov": False,
        "weight_decay": 0.001,
        "augmentation": {"kind": "crops", "padding": 1, "mirror": 0.0},
    }
    assert [epoch.lr for epoch in found[0].epochs] == [0.02, 0.01]
    for record in found:
        assert f"{record.error:.2f}%" in said
        assert f"{record.params:,}" in said
    assert f"{found[1].error - found[0].error:+.2f}" in said


def test_several_data_sets_a_seed_of_each_before_the_next():
    run("train", "resnet8", "--dataset", "cifar10,arrangements", "--seed", "1,0", *SHORT)
    found = [(r.run["seed"], r.run["dataset"], r.run["recipe"]["name"]) for r in made()]
    assert found == [
        (1, "cifar10", "cifar_resnet"),
        (1, "arrangements", "demo"),
        (0, "cifar10", "cifar_resnet"),
        (0, "arrangements", "demo"),
    ]


def test_what_is_there_is_neither_trained_again_nor_thrown_away_unasked(capsys, monkeypatch):
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT)
    run(*words)
    (before,) = made()
    line = fail(capsys, monkeypatch, *words)
    assert "holds this run already; --resume goes on, --restart begins all runs" in line
    assert "finished before" in run(*words, "--resume").stderr
    assert [r.id for r in made()] == [before.id]
    run(*words, "--restart")
    assert [r.id == before.id for r in made()] == [True, False]
    first, second = made()
    assert first.epochs[-1].test_loss == second.epochs[-1].test_loss


def test_a_restart_that_cannot_begin_throws_nothing_away(capsys, monkeypatch):
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT)
    run(*words)
    (folder,) = Path("runs").glob("cifar10-*")
    before = learnt(folder)
    capsys.readouterr()
    fail(capsys, monkeypatch, *words, "--restart", "--data-dir", "nowhere")
    assert learnt(folder).keys() == before.keys()
    assert len(made()) == 1


@pytest.mark.parametrize("stepped", [False, True])
def test_a_restart_that_is_stopped_is_told_how_it_goes_on(monkeypatch, stepped):
    """Before the first step what waits is as it was, and --resume would find it finished."""
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--seed", "0,1")
    run(*words)
    before = {record.id for record in made()}
    where, name = (Learner, "step") if stepped else (Training, "_prepare")
    does = getattr(where, name)

    def stopping(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return does(*given)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, stopping)
        stopped = invoke(*words, "--restart")
    assert stopped.exit_code == 128 + signal.SIGTERM
    again = "--resume" if stepped else "--restart"
    instead = " with --resume instead of --restart"
    assert f"2 runs saved or waiting; the same command{instead * stepped} goes on" in stopped.stderr
    assert "finished before" not in run(*words, again).stderr
    assert before.isdisjoint(record.id for record in made()[2:])
    assert len(made()) == 4


def test_what_is_advised_of_a_torn_run_leaves_the_finished_ones_alone():
    """--restart was advised, which begins all runs of the command anew."""
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--seed", "0,1", "--resume")
    run(*words)
    torn, done = sorted(Path("runs").glob("cifar10-*"))
    (torn / "record.json").unlink()
    for path in checkpoint.checkpoints(torn):
        path.write_bytes(path.read_bytes()[:100])
    kept = {path.name: path.read_bytes() for path in done.iterdir()}
    line = invoke(*words).stderr.splitlines()[-1]
    advised = re.search(r"no checkpoint in (\S+) can be read; remove it to begin anew$", line)
    shutil.rmtree(advised[1])
    run(*words)
    assert kept == {path.name: path.read_bytes() for path in done.iterdir()}
    assert (torn / "record.json").exists()


def test_a_run_goes_on_in_its_own_precision(capsys, monkeypatch):
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT)
    run(*words)
    (folder,) = Path("runs").glob("cifar10-*")
    (folder / "record.json").unlink()
    (folder / "epoch-0002.safetensors").unlink()
    capsys.readouterr()
    line = fail(capsys, monkeypatch, *words, "--resume", "--precision", "bf16")
    assert "is trained in fp32, not in bf16: --precision fp32 goes on" in line
    run(*words, "--resume")


def test_shorter_training_drops_at_the_same_shares():
    run("train", "resnet8", "--dataset", "cifar10", "--epochs", "4", "--batch", "16")
    assert made()[0].run["recipe"]["drops"] == [2, 3]  # of 4, as 80 and 120 of 160


def test_a_budget_that_is_used_up_is_status_75_and_the_rest_is_done_later(monkeypatch):
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT)
    with one_step(monkeypatch):
        stopped = invoke(*words, "--time-budget", "5m")
    assert stopped.exit_code == 75
    assert "the time budget is used up; 1 run saved or waiting" in stopped.stderr
    assert made() == []
    run(*words, "--resume", "--time-budget", "5m")
    assert len(made()) == 1


def test_a_budget_too_short_for_a_step_says_so_and_what_would_do(capsys, monkeypatch):
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--resume", "--time-budget", "1s")
    line = fail(capsys, monkeypatch, *words)  # three seconds are kept for leaving
    assert line.startswith("mssar: nothing was trained: the time budget ended before the first")
    assert re.search(r"--time-budget \d+s or more gets somewhere", line)
    assert list(Path("runs").glob("*/*")) == []


def test_a_budget_counts_from_the_start_of_the_process(capsys, monkeypatch):
    """A job with that limit was killed before it had saved: imports had not counted."""
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--time-budget", "1h")
    monkeypatch.setattr(sys, "argv", ["mssar", *words])
    with monkeypatch.context() as patch:
        patch.setattr(program, "SAID", {})  # signals stay as they are
        # As if an hour went by in the import of the command.
        patch.setattr(time, "monotonic", lambda real=time.monotonic: real() - 3600)
        patch.setattr(cli, "main", lambda *begun, run=cli.main: (patch.undo(), run(*begun)))
        with pytest.raises(SystemExit) as stop:
            program.main()
    assert stop.value.code == 2
    assert re.search(r"To come so far and to save takes 360\d\.\d s", capsys.readouterr().err)
    # What is called in a process that does other things as well counts from the call.
    run(*words)


def test_a_loss_that_is_not_finite_is_status_1_and_the_others_are_finished():
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--lr", "1e30", "--seed", "0,1")
    stopped = invoke(*words)
    assert stopped.exit_code == 1
    lines = [line for line in stopped.stderr.splitlines() if line.startswith("mssar: ")]
    assert len(lines) == 2
    assert "in epoch 1, step " in lines[0]
    assert made() == []


def test_a_run_that_fails_is_a_line_at_the_end_and_status_1(monkeypatch):
    monkeypatch.setattr(Learner, "step", poison(4, 1))
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--seed", "0,1,2", "--fleet", "3")
    stopped = invoke(*words)
    assert stopped.exit_code == 1
    assert [r.run["seed"] for r in made()] == [0, 2]
    line = stopped.stderr.splitlines()[-1]
    assert line.startswith("mssar: resnet8 none cifar10 seed 1: the loss is nan in epoch 2, step 2")
    assert line.endswith("epoch-0001.safetensors is the last good checkpoint; try a lower --lr")
    monkeypatch.undo()
    for record in made():
        assert f"{record.error:.2f}%" in stopped.stdout


def test_every_field_of_a_recipe_is_an_option():
    named = {f.name for kind in (Recipe, Crops, Photographs) for f in fields(kind)}
    assert named - {"name", "augmentation"} <= set(signature(train_command).parameters)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet21",), "no network 'resnet21'; there are resnet8, "),
        (("resnet8", "--dataset", "mnist"), "no data set 'mnist'; there are arrangements, "),
        (("resnet8", "--recipe", "mine"), "no recipe 'mine'; there are cifar_resnet, "),
        (("resnet8", "--recalibration", "cbma"), "got 'cbma'"),
        (("resnet8", "--scales", "1,2"), "nothing that is trained here takes --scales"),
        (("resnet8", "--recalibration", "mssar", "--scales", "1,1"), "got (1, 1)"),
        (("resnet8", "--lr", "0"), "lr is above 0; got 0.0"),
        (("resnet8", "--lr", "nan"), "lr is above 0; got nan"),
        (("resnet8", "--epochs", "0"), "epochs is 1 or more; got 0"),
        (("resnet8", "--drops", "5,3"), "ascending order, as in 80,120; got (5, 3)"),
        (("resnet8", "--drops", "x"), "--drops takes whole numbers"),
        (("resnet8", "--decay", "some"), "decay is all or weights; got 'some'"),
        (("resnet8", "--init", "zeros"), "init is he or torch; got 'zeros'"),
        (("resnet8", "--fill", "white"), "fill is black or mean; got 'white'"),
        (("timm:resnet18", "--init", "torch"), "timm:resnet18 is another library's"),
        (("resnet8", "--rotation", "5"), "has no 'rotation'; it has batch, decay, drops, "),
        (("resnet8", "--area", "1"), "--area takes two numbers"),
        (("resnet8", "--seed", "-1"), "a seed is a whole number from 0"),
        (("resnet8", "--seed", ""), "--seed takes whole numbers, as in 0,1,2; got none"),
        (("resnet8", "--batch", "1"), "batch is 2 or more, for BN; got 1"),
        (("resnet8", "--precision", "fp8"), "precision is one of bf16, tf32, fp32; got 'fp8'"),
        (("resnet8", "--device", "tpu"), "device is auto, cpu, cuda or cuda:N; got 'tpu'"),
        (("resnet8", "--device", "mps"), "device is auto, cpu, cuda or cuda:N; got 'mps'"),
        (("resnet8", "--decode", "disk"), "--decode is auto, workers or gpu; got 'disk'"),
        (("resnet8", "--time-budget", "soon"), "such as 90s, 9m or 1h30m; got 'soon'"),
        (("resnet8", "--resume", "--restart"), "say one of them"),
        (("resnet8", "--stack", "3", "--fleet", "2"), "--stack 3 needs a --fleet of 3 or more"),
        (("resnet8", "--dataset", "imagefolder"), "say where: --data-dir DIR"),
        (("resnet8", "--dataset", "cifar100", "--data-dir", "."), "mssar data get cifar100"),
        (("resnet8", "--recipe", "ilsvrc2012"), "ilsvrc2012 is for photographs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, monkeypatch, words, message):
    if "--dataset" not in words:
        words = (*words, "--dataset", "cifar10")
    assert message in fail(capsys, monkeypatch, "train", *words)
    assert not list(Path("runs").rglob("*.safetensors"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(capsys, monkeypatch):
    line = fail(capsys, monkeypatch, "train", "resnet8", "--device", "cuda")
    assert "no CUDA device is there" in line


@pytest.mark.parametrize("more", [[], ["--resume"], ["--restart"], ["--tensorboard"]], ids=str)
def test_a_file_in_the_place_of_a_runs_folder_does_not_stop_the_others(more):
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT, "--seed", "0,1")
    run(*words)
    first, second = sorted(Path("runs").glob("cifar10-*"))
    for folder in (first, second):
        shutil.rmtree(folder)
    first.touch()
    stopped = invoke(*words, *more)
    assert stopped.exit_code == 1
    assert stopped.stderr.splitlines()[-1].endswith(
        f"seed 0: Not a directory: {first}; nothing was saved yet"
    )
    assert [r.run["seed"] for r in made()] == [0, 1, 1]


def test_a_full_disk_is_one_line_and_keeps_what_was_saved(capsys, monkeypatch):
    real, calls = checkpoint.write_whole, []

    def write(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", write)
    words = ("train", "resnet8", "--dataset", "cifar10", *SHORT)
    monkeypatch.setattr(sys, "argv", ["mssar", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mssar: ")]
    assert len(said) == 1
    assert "No space left on device: " in said[0]
    assert "epoch-0002.safetensors" in said[0]
    (folder,) = Path("runs").glob("cifar10-*")
    assert [p.name for p in checkpoint.checkpoints(folder)] == ["epoch-0001.safetensors"]
    monkeypatch.setattr(checkpoint, "write_whole", real)
    run(*words, "--resume")
    assert made()[0].interruptions == 1


def test_sigterm_saves_and_says_so(tmp_path):
    """The real command on the real embedded data, stopped in its first epoch."""
    words = ("train", "resnet8", "--batch", "32", "--runs", str(tmp_path / "r"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "mssar", *words], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr
        assert "begins" in process.stderr.readline()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by a signal; 1 run saved or waiting" in said
    (folder,) = (tmp_path / "r").glob("arrangements-*")
    (kept,) = checkpoint.checkpoints(folder)
    assert kept.name.startswith("epoch-0000-step-")
    steps = int(kept.stem.split("-")[-1])
    losses = learnt(folder)["losses"]
    assert (losses[:steps] > 0).all()
    assert not losses[steps:].any()


def test_tensorboard_gets_every_epoch():
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    run("train", "resnet8", "--dataset", "cifar10", *SHORT, "--tensorboard")
    (file,) = Path("runs").rglob("events.out.tfevents.*")
    events = event_accumulator.EventAccumulator(str(file)).Reload()
    (record,) = made()
    found = [(e.step, round(e.value, 3)) for e in events.Scalars("error/test")]
    assert found == [(e.epoch, round(e.test_error, 3)) for e in record.epochs]


# --- eval ---


def trained_folder() -> tuple[Path, records.Record]:
    run("train", "resnet8", "--dataset", "cifar10", "--recalibration", "mssar", *SHORT)
    (folder,) = Path("runs").glob("cifar10-*")
    return folder, made()[-1]


def test_eval_finds_the_error_of_the_record():
    folder, record = trained_folder()
    found = json.loads(run("eval", str(folder), "--json").stdout)
    assert found["error"] == record.error
    assert tuple(found["class_errors"]) == record.class_errors
    assert found["run"] == record.run
    said = run("eval", str(folder), "--classes").stdout
    assert "resnet8 mssar, tiny, epoch 2 of 2" in said
    assert f"error {record.error:.2f}%" in said
    earlier = json.loads(run("eval", str(checkpoint.checkpoints(folder)[0]), "--json").stdout)
    assert earlier["error"] == record.epochs[0].test_error


def test_eval_names_what_is_wrong(capsys, monkeypatch, tmp_path):
    assert "there is no nowhere" in fail(capsys, monkeypatch, "eval", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in fail(capsys, monkeypatch, "eval", "empty")
    folder, _ = trained_folder()
    capsys.readouterr()
    _, last = checkpoint.checkpoints(folder)
    last.write_bytes(last.read_bytes()[:-100])
    assert "going back to the checkpoint before it" in run("eval", str(folder)).stderr
    line = fail(capsys, monkeypatch, "eval", str(last))
    assert f"{last} is no readable checkpoint" in line


# --- demo ---


def test_the_demo_compares_three_and_says_what_to_believe(monkeypatch):
    quick = varied(DEMO, epochs=1, drops=(), batch=16)
    monkeypatch.setattr(demo_command, "DEMO", quick)
    monkeypatch.setattr(demo_command, "SECONDS", 0.01)
    said = run("demo", "--seeds", "2").stdout
    found = records.read(Path("runs/demo/records.jsonl"))
    assert [(r.run["seed"], r.run["recalibration"]) for r in found] == [
        (seed, kind) for seed in (0, 1) for kind in ("none", "se", "mssar")
    ]
    assert "2 runs each, 24 test images" in said
    again = run("demo", "--seeds", "2").stdout
    assert again == said
