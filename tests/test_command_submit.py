"""``--submit`` as its user meets it, but for what is trained by it."""

import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from lab import tiny_everywhere
from sweeps import HOW, held, record
from typer.testing import CliRunner

from mssar.lab import cli, records
from mssar.lab.cluster import collect, local, slurm, sweep
from mssar.lab.cluster.sweep import Order, Sweep
from mssar.lab.commands.train import changed
from mssar.lab.records import Record
from mssar.lab.run import Run, usual_recipe

__all__ = ["record"]  # a fixture


TRAIN = ("train", "resnet8", "--dataset", "cifar10", "--device", "cpu")


def in_one(asked: list[Run]) -> dict[str, str]:
    return dict.fromkeys([run.name for run in asked], "runs/records.jsonl")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*TRAIN, "--submit", "pbs"], "--submit is slurm or local; got 'pbs'"),
        ([*TRAIN, "--tasks", "2"], "--tasks goes with --submit"),
        ([*TRAIN, "--dry-run"], "--dry-run goes with --submit"),
        ([*TRAIN, "--submit", "local", "--sbatch", "mem=1G"], "--sbatch goes with --submit slurm"),
        ([*TRAIN, "--submit", "local", "--restart"], "with --submit name other --runs"),
        ([*TRAIN, "--submit", "slurm"], "needs the time of each task: --time-budget 4h"),
        (
            [*TRAIN, "--submit", "slurm", "--time-budget", "1h", "--sbatch", "time=9"],
            "Slurm's limit is what --time-budget says",
        ),
        (
            [*TRAIN, "--submit", "slurm", "--time-budget", "1h", "--sbatch", "=9"],
            "--sbatch is one of sbatch's options, as partition=gpu; got '=9'",
        ),
        ([*TRAIN, "--submit", "slurm", "--time-budget", "1h"], "Slurm's sbatch, which is not here"),
        (
            ["train", "resnet8", "--device", "cuda:1", "--submit", "slurm", "--time-budget", "1h"],
            "on a cluster --device is cuda or cpu; got 'cuda:1'",
        ),
        (
            ["train", "resnet8", "--device", "cuda:1", "--submit", "local"],
            "takes every GPU of CUDA_VISIBLE_DEVICES; got 'cuda:1'",
        ),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
):
    tiny_everywhere(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, ValueError)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_it_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where neither Slurm nor a GPU is."""
    tiny_everywhere(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["reproduce", "table3", "--nets", "resnet20", "--seeds", "3", "--dry-run"]
    words += ["--submit", "slurm", "--time-budget", "4h", "--sbatch", "partition=gpu"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.exception
    said = result.stdout.splitlines()
    assert said[:6] == [
        "would submit 24 runs in 6 tasks (slurm)",
        "  --job-name=mssar",
        "  --time=240",
        "  --requeue",
        "  --gpus-per-node=1",
        "  --partition=gpu",
    ]
    assert [line for line in said if line.startswith("task")] == [
        f"task {number}:" for number in range(6)
    ]
    assert len({line for line in said if line.startswith("  cifar")}) == 24
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "resnet8", "--dataset", "cifar10"],
        ["reproduce", "table3", "--nets", "resnet20", "--datasets", "cifar10", "--seeds", "1"],
        ["compare", "resnet8", "--modules", "none,mssar", "--dataset", "cifar10"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("way", ["slurm", "local"])
def test_a_dry_run_needs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], way: str
):
    """They may be on the cluster alone; what is submitted needs them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "require", lambda: None)
    words = [*words, "--data-dir", str(tmp_path), "--device", "cpu"]
    words += ["--submit", way, "--time-budget", "4h"]
    result = CliRunner().invoke(cli.app, [*words, "--dry-run"])
    assert result.exit_code == 0, result.exception
    assert "would submit " in result.stdout
    assert result.stderr.count("no CIFAR-10 in") == 1
    assert [*tmp_path.iterdir()] == []
    result = CliRunner().invoke(cli.app, words)
    assert "no CIFAR-10 in" in str(result.exception)


def test_a_dry_run_without_data_leaves_out_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
):
    monkeypatch.chdir(tmp_path)
    recipe = changed(usual_recipe("resnet8", "cifar10"), {"epochs": 1})
    run = Run("resnet8", dataset="cifar10", recipe=recipe)
    records.append(Path("runs/records.jsonl"), replace(record, run=run.as_dict()))
    words = [*TRAIN, "--epochs", "1", "--seed", "0,1", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(cli.app, [*words, "--submit", "local", "--dry-run"])
    assert result.exit_code == 0, result.exception
    assert "would submit 1 run in 1 task" in result.stdout
    assert run.name not in result.stdout


def test_what_ends_while_it_is_asked_for_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its record may have come just after they were collected."""
    tiny_everywhere(monkeypatch)
    monkeypatch.chdir(tmp_path)
    recipe = usual_recipe("resnet8", "cifar10")
    asked = [Run("resnet8", dataset="cifar10", recipe=recipe, seed=seed) for seed in (0, 1)]
    made = sweep.begin(Order([], "runs", in_one(asked), HOW), [asked])
    made.handed_to(host="here")
    words = ["train", "resnet8", "--dataset", "cifar10", "--device", "cpu", "--seed", "0,1"]
    real = collect.collect
    with ExitStack() as task:
        task.enter_context(held(made, 0))

        def ends(of: Sweep) -> tuple[list[Record], list[str]]:
            found = real(of)
            task.close()
            return found

        monkeypatch.setattr(collect, "collect", ends)
        result = CliRunner().invoke(cli.app, [*words, "--submit", "local", "--dry-run"])
    assert result.exit_code == 0, result.exception
    assert "nothing is left to submit" in result.stderr
    assert "2 runs under way already" in result.stderr


def test_who_waits_for_what_another_cancels_says_that_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_everywhere(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def work(made: Sweep, *_: object) -> tuple[list[int], None]:
        made.mark_cancelled(0)
        return [-signal.SIGTERM], None  # before it listened

    monkeypatch.setattr(local, "work", work)
    result = CliRunner().invoke(cli.app, [*TRAIN, "--submit", "local"])
    assert result.exit_code == 128 + signal.SIGTERM
    assert "stopped by a signal; 1 run saved or waiting" in result.stderr


def test_nothing_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for verb in ("train", "reproduce", "compare"):
        result = CliRunner().invoke(cli.app, [verb, "--status"])
        assert (result.exit_code, result.exception) == (0, None)
        assert "nothing was submitted from runs" in result.stdout


def test_who_submits_meanwhile_waits_until_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_everywhere(monkeypatch)
    monkeypatch.chdir(tmp_path)
    recipe = usual_recipe("resnet8", "cifar10")
    asked = [Run("resnet8", dataset="cifar10", recipe=recipe)]
    words = ["train", "resnet8", "--dataset", "cifar10", "--device", "cpu", "--submit", "local"]
    said = list[str]()

    def other() -> None:
        said.append(CliRunner().invoke(cli.app, words).output)

    with sweep.alone(Path("runs")):
        second = threading.Thread(target=other)
        second.start()
        second.join(1)
        assert not said
        made = sweep.begin(Order([], "runs", in_one(asked), HOW), [asked])
        made.handed_to(host="here")
        task = ExitStack()
        task.enter_context(held(made, 0))
    with task:
        second.join(60)
    assert "1 run under way already" in said[0]
    assert "nothing is left to submit" in said[0]
    assert len(sweep.sweeps(Path("runs"))) == 1
