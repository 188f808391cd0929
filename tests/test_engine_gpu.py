"""Training on a CUDA device: graphs change nothing, nor does company, nor a stop on the way."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device import never_waiting
from lab import CPU, Log, arrays, learnt, timeless, tiny
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from mssar.lab import records
from mssar.lab.data import pictures
from mssar.lab.data.imagefolder import open_folder
from mssar.lab.engine.evaluate import evaluate, trained
from mssar.lab.engine.execution import Execution, settings
from mssar.lab.engine.feed import ArraysFeed, Resident
from mssar.lab.engine.fleet import train
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import Training
from mssar.lab.engine.world import World
from mssar.lab.recipes import Photographs, Recipe
from mssar.lab.run import Run

pytestmark = pytest.mark.gpu

KINDS = ("none", "se", "mssar")


def cuda(**how: object) -> Execution:
    return Execution(torch.device("cuda", 0), **{"precision": "fp32", "deterministic": True, **how})


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return


def run_all(
    runs: list[Run], how: Execution, folder: Path, width: int = 1, stack: int = 1
) -> list[dict[str, Tensor]]:
    data, log = arrays(200, 40), Log()
    outcome = train(runs, lambda _: data, how, folder, log, width=width, stack=stack)
    assert len(outcome.records) == len(runs), log.failures
    return [learnt(folder / run.name) for run in runs]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"decay": "weights", "weight_decay": 0.1, "fill": "mean"}])
def test_a_graph_computes_what_the_steps_do(kind, changes, tmp_path):
    run = tiny(recalibration=kind, **changes)
    (graph,) = run_all([run], cuda(), tmp_path / "graph")
    (eager,) = run_all([run], cuda(graph=False), tmp_path / "eager")
    assert same(graph, eager)


def test_a_graph_holds_the_average_and_a_rate_that_changes_by_the_step(tmp_path):
    gentle = {"schedule": "cosine", "warmup": 0.5, "smoothing": 0.1, "ema": 0.9}
    runs = [tiny(seed, "mssar", **gentle) for seed in (0, 1)]
    together = run_all(runs, cuda(), tmp_path / "graph", width=2)
    for run, found in zip(runs, together, strict=True):
        (eager,) = run_all([run], cuda(graph=False), tmp_path / "eager")
        assert same(found, eager)
        assert not torch.equal(found["average.fc.weight"], found["model.fc.weight"])
        score = evaluate(trained(tmp_path / "graph" / run.name), arrays(200, 40), cuda())
        (record,) = records.read(tmp_path / "graph" / run.name / "record.json")
        assert score.loss == record.epochs[-1].test_loss


@pytest.mark.parametrize("kind", [*KINDS, "simam"])
@pytest.mark.parametrize("graph", [True, False])
def test_networks_trained_as_one_begin_as_they_would_alone(kind, graph, tmp_path):
    assert_begun_as_alone(kind, graph, tmp_path)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("kind", ["eca", "cbam", "coord", "ela", "ge"])
@pytest.mark.parametrize("graph", [True, False])
def test_networks_with_modules_of_timms_begin_as_they_would_alone(kind, graph, tmp_path):
    assert_begun_as_alone(kind, graph, tmp_path)


def assert_begun_as_alone(kind: str, graph: bool, tmp_path: Path) -> None:
    """An epoch; after more of them rounding has led to other networks, alone as well."""
    runs = [tiny(seed, kind, epochs=1) for seed in range(6)]
    how = cuda(deterministic=False, graph=graph)
    together = run_all(runs, how, tmp_path / "stack", width=6, stack=3)
    for found, run in zip(together, runs, strict=True):
        (record,) = records.read(tmp_path / "stack" / run.name / "record.json")
        assert record.execution["stacked"] == 3
        (alone,) = run_all([run], how, tmp_path / "alone")
        off = (found["losses"] - alone["losses"]).abs() / alone["losses"]
        assert off[:5].max() < 1e-4, off
        assert off.max() < 2e-2, off


def test_networks_trained_as_one_are_tested_as_they_would_be_alone(tmp_path):
    runs = [tiny(seed, "mssar") for seed in range(3)]
    how = cuda(precision="bf16", deterministic=False)
    run_all(runs, how, tmp_path, width=3, stack=3)
    for run in runs:
        score = evaluate(trained(tmp_path / run.name), arrays(200, 40), how)
        (record,) = records.read(tmp_path / run.name / "record.json")
        assert score.loss == pytest.approx(record.epochs[-1].test_loss, rel=1e-2)


@pytest.mark.parametrize("begin", [0, 3])  # whichever step the graph is captured at
def test_a_graph_drops_what_its_steps_would(begin):
    run, data = tiny(1), arrays(200, 40)

    def losses(how: Execution, first: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(3 * 64, 4)
        )
        stream = torch.cuda.Stream()
        with settings(how), torch.cuda.stream(stream):
            feed = ArraysFeed(
                data, Resident(data, 1, how.device), run.recipe, 0, how.device, World()
            )
            learner = Learner(model, feed, run.recipe, how, World(), 7)
            learner.begin(0, first, 0.0)
            for step in range(first, 6):
                learner.step(step)
        torch.cuda.synchronize()
        return learner.losses[3:6].tolist()

    assert losses(cuda(), begin) == losses(cuda(graph=False), 0)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_run_that_is_out_of_memory_costs_the_others_nothing(tmp_path, monkeypatch, capturing):
    body = Learner._body

    def greedy(self: Learner, size: int, total: int) -> None:
        if self.feed.seed == 1 and torch.cuda.is_current_stream_capturing() == capturing:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        body(self, size, total)

    monkeypatch.setattr(Learner, "_body", greedy)
    runs, log = [tiny(seed, "mssar") for seed in (0, 1, 2)], Log()
    data = arrays(200, 40)
    outcome = train(runs, lambda _: data, cuda(), tmp_path / "fleet", log, width=3)
    assert [record.run["seed"] for record in outcome.records] == [0, 2]
    (reason,) = outcome.failures
    assert "out of memory" in reason
    assert reason.endswith("a smaller --batch or --fleet needs less")
    for run in (runs[0], runs[2]):
        (alone,) = run_all([run], cuda(), tmp_path / "alone")
        assert same(learnt(tmp_path / "fleet" / run.name), alone)


@pytest.mark.parametrize("width", [6, 2])  # all at once; later ones on streams of earlier ones
def test_a_fleet_learns_what_its_runs_learn_alone(tmp_path, width):
    runs = [tiny(seed, kind) for seed in (0, 1) for kind in KINDS]
    together = run_all(runs, cuda(), tmp_path / "together", width)
    for run, found in zip(runs, together, strict=True):
        (alone,) = run_all([run], cuda(), tmp_path / "alone")
        assert same(found, alone), run.label


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("width", [1, 3])
def test_deterministic_runs_leave_the_same_records_twice(
    tmp_path, monkeypatch, width, precision, kernels
):
    """Alone and in a fleet, by the kernels and by plain PyTorch."""
    if kernels:
        pytest.importorskip("triton", minversion="3.4")
    else:
        for module in ("mssar.fused", "mssar.layer"):
            monkeypatch.setattr(f"{module}.chosen", lambda *_: False)
    runs = [tiny(seed, "mssar") for seed in (0, 1, 2)]
    how, found = cuda(precision=precision), []
    for folder in (tmp_path / "first", tmp_path / "second"):
        weights = run_all(runs, how, folder, width)
        kept = [timeless(*records.read(folder / run.name / "record.json")) for run in runs]
        found.append((weights, kept))
    (first, kept), (second, again) = found
    assert kept == again
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("stop", [1, 5, 14])
def test_what_was_stopped_goes_on_bit_by_bit(stop, tmp_path, monkeypatch):
    monkeypatch.setattr("mssar.lab.engine.training.CHUNK", 1)
    run, data = tiny(recalibration="mssar"), arrays(200, 40)
    (whole,) = run_all([run], cuda(), tmp_path / "whole")
    folder = tmp_path / "parts"
    with settings(cuda()):
        training = Training(run, data, cuda(), folder / run.name, Log())
        work = training.work()
        with training.stream:
            for _ in range(stop):
                next(work)
        training.save()
        work.close()
        training.close()
    (resumed,) = run_all([run], cuda(), folder)
    assert same(resumed, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_losses_are_the_cpus(kind, tmp_path):
    run, data = tiny(recalibration=kind, epochs=1, drops=()), arrays(200, 40)
    for name, how in (("cpu", CPU), ("cuda", cuda())):
        train([run], lambda _: data, how, tmp_path / name, Log())
    found, expected = (learnt(tmp_path / name / run.name) for name in ("cuda", "cpu"))
    assert_close(found["losses"][:4], expected["losses"][:4], atol=1e-4, rtol=1e-4)


def test_a_step_never_waits():
    data, how, run = arrays(200, 40), cuda(deterministic=False), tiny(recalibration="mssar")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        feed = ArraysFeed(data, Resident(data, 1, how.device), run.recipe, 0, how.device, World())
        learner = Learner(run.build(4), feed, run.recipe, how, World())
        learner.begin(0, 0, 0.1)
        learner.step(0)
        with never_waiting():
            for step in range(1, 10):
                learner.step(step)
    torch.cuda.synchronize()
    assert int(learner.counter) == 10
    assert learner.losses[:10].isfinite().all()
    assert (learner.losses[:10] > 0).all()


def test_bf16_learns(tmp_path):
    run = tiny(epochs=8, drops=(6,), lr=0.1, padding=0, mirror=0.0)
    data, log = arrays(64, 40), Log()
    train([run], lambda _: data, cuda(precision="bf16", deterministic=False), tmp_path, log)
    errors = [epoch.test_error for _, epoch in log.epochs]
    assert errors[-1] < 25, errors  # chance is 75


def test_the_loss_is_told_while_an_epoch_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("mssar.lab.engine.training.TICK", -1)
    monkeypatch.setattr("mssar.lab.engine.training.CHUNK", 4)
    run, data, log = tiny(epochs=2, batch=4), arrays(400, 40), Log()
    train([run], lambda _: data, cuda(), tmp_path, log)
    losses = learnt(tmp_path / run.name)["losses"]
    last = [moment for _, moment in log.moments if moment.epoch == 2]
    assert len([moment for moment in last if moment.step < moment.steps]) > 2
    for moment in last:
        assert_close(moment.loss, float(losses[: moment.step][-50:].mean()))


def test_compiled_networks_train_from_the_command_line(tmp_path):
    """ResNet-20's blocks one by one, in the graph of a step."""
    words = ("resnet20", "--recalibration", "mssar", "--compile", "--epochs", "2", "--fleet", "1")
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "train", *words, "--runs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (record,) = records.read(tmp_path / "records.jsonl")
    assert record.execution["compile"]
    assert record.execution["graph"]
    assert record.epochs[1].train_loss < record.epochs[0].train_loss
    (folder,) = tmp_path.glob("arrangements-*")
    tested = subprocess.run(
        [sys.executable, "-m", "mssar", "eval", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stderr
    assert abs(json.loads(tested.stdout)["error"] - record.error) < 1  # not compiled, bf16


@pytest.mark.usefixtures("timm")
def test_stacks_of_others_modules_are_compiled_from_the_command_line(tmp_path):
    words = ("resnet20", "--modules", "cbam,coord", "--seeds", "2", "--stack", "2", "--fleet", "4")
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "compare", *words, "--compile", "--epochs", "2",
         "--seconds", "0", "--runs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = records.read(tmp_path / "records.jsonl")
    assert len(found) == 4
    for record in found:
        assert (record.execution["stacked"], record.execution["compile"]) == (2, True)
        assert record.epochs[1].train_loss < record.epochs[0].train_loss


def test_long_runs_are_compiled_without_being_told_to(tmp_path):
    """In a process of its own: the compiler cannot read through these tests' checks of types."""
    short = "from mssar.lab.engine import compiling; compiling.WORTH = 1.0"
    words = ("resnet20", "--recalibration", "mssar", "--epochs", "2", "--fleet", "1")
    program = f"{short}; from mssar.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *words, "--runs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--no-compile" in done.stdout + done.stderr
    (record,) = records.read(tmp_path / "records.jsonl")
    assert record.execution["compile"]


@pytest.mark.parametrize("network", ["resnet8", "resnet20"])
def test_graphs_of_deep_networks_are_compiled_block_by_block(network):
    run, how = replace(tiny(), network=network), cuda(compile=True, deterministic=False)
    data = arrays(64, 40)
    batches = ArraysFeed(data, Resident(data, 0, how.device), run.recipe, 0, how.device, World())
    learner = Learner(run.build(4), batches, run.recipe, how, World())
    assert (learner.blocks is None) == (network == "resnet8")


def test_the_current_stream_is_left_as_it_was(tmp_path):
    before = torch.cuda.current_stream()
    run_all([tiny(), tiny(1)], cuda(), tmp_path, width=2)
    assert torch.cuda.current_stream() == before


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("decode", ["workers", "gpu"])
def test_photographs_train_in_a_graph_beside_their_workers(tmp_path, decode):
    refusal = pictures.gpu_refuses(torch.device("cuda", 0)) if decode == "gpu" else ""
    if refusal:
        pytest.skip(refusal)
    draw = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 8)):
        for name, base in (("bright", 200), ("dark", 10)):
            folder = tmp_path / "tree" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(base, base + 45, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    augmentation = Photographs(size=32, resize=32, area=(0.5, 1.0), rotation=5, jitter=0.1)
    recipe = Recipe("small", epochs=3, batch=16, lr=0.05, drops=(2,), augmentation=augmentation)
    run = Run("resnet8", "mssar", {}, "imagefolder", recipe)
    data, how = open_folder(tmp_path / "tree"), cuda(workers=2, decode=decode)
    (record,) = train([run], lambda _: data, how, tmp_path / "runs", Log()).records
    assert record.error == 0


@pytest.mark.parametrize("chunk", [1, 16])  # found on the way, or at the epoch's end
def test_a_loss_that_is_not_finite_is_named(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("mssar.lab.engine.training.CHUNK", chunk)
    monkeypatch.setattr("mssar.lab.engine.training.TICK", -1)
    data, log = arrays(200, 40), Log()
    outcome = train([tiny(lr=1e20), tiny(1)], lambda _: data, cuda(), tmp_path, log, width=2)
    assert len(outcome.records) == 1
    (reason,) = outcome.failures
    assert "in epoch 1, step " in reason
    assert "nothing was saved yet" in reason


def test_eval_finds_the_record_s_error(tmp_path):
    run, data, log = tiny(recalibration="mssar"), arrays(200, 40), Log()
    (record,) = train([run], lambda _: data, cuda(), tmp_path, log).records
    score = evaluate(trained(tmp_path / run.name), data, cuda())
    assert score.error == record.error
    assert score.class_errors == record.class_errors
    cpu = evaluate(trained(tmp_path / run.name), data, CPU)
    assert_close(cpu.loss, score.loss, atol=1e-4, rtol=1e-4)
