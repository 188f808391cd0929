"""Steps, tests and one run against plain PyTorch.  n batch, D classes."""

import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lab import CPU, Log, arrays, feed, learnt, opened, poison, program, tiny, trained

import mssar
from mssar.lab.engine import feed as feeds
from mssar.lab.engine import training as engine
from mssar.lab.engine.examine import Examiner, tally
from mssar.lab.engine.execution import Execution, choose_device, keep_compiled, settings
from mssar.lab.engine.fleet import train
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import DivergedError
from mssar.lab.engine.world import World
from mssar.lab.recipes import ILSVRC2012

ALONE = World()


@pytest.mark.parametrize(
    ("recalibration", "changes"),
    [
        ("none", {}),
        ("mssar", {"weight_decay": 0.05}),
        ("mssar", {"weight_decay": 0.5, "decay": "weights"}),
        ("none", {"nesterov": False, "momentum": 0.8}),
        ("none", {"nesterov": False, "momentum": 0.0, "weight_decay": 0.0}),
    ],
)
def test_a_step_is_the_textbooks(recalibration, changes):
    """Two epochs of three batches, the last of each smaller; the learning rate drops between."""
    data, run = arrays(), tiny(1, recalibration, **changes)
    recipe = run.recipe
    learner = Learner(run.build(4), feed(data, run), recipe, CPU, ALONE)
    model, source = run.build(4).to(memory_format=torch.channels_last), feed(data, run)
    speeds = [torch.zeros_like(p) for p in model.parameters()]
    for epoch, lr in enumerate((0.02, 0.002)):
        learner.begin(epoch, 0, recipe.lr_at(epoch))
        source.begin(epoch, 0)
        for step, size in enumerate((16, 16, 5)):
            learner.step(step)
            x, y = source.take(torch.tensor(step), size)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            torch.testing.assert_close(learner.losses[step], loss.detach(), rtol=1e-6, atol=1e-6)
            assert learner.wrong[step] == (logits.argmax(1) != y).sum()
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for (name, p), slope, speed in zip(
                    model.named_parameters(), slopes, speeds, strict=True
                ):
                    spared = name == "fc.bias" or "bn" in name or "norm" in name
                    spared = spared or "downsample.1" in name
                    decay = 0.0 if spared and "decay" in changes else recipe.weight_decay
                    slope = slope + decay * p
                    speed.mul_(recipe.momentum).add_(slope)
                    p -= lr * (slope + recipe.momentum * speed if recipe.nesterov else speed)
        for name, tensor in model.state_dict().items():
            found = learner.model.state_dict()[name]
            torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6)
    for (name, _), speed in zip(model.named_parameters(), speeds, strict=True):
        if recipe.momentum:
            found = learner.state()[f"momentum.{name}"]
            torch.testing.assert_close(found, speed, rtol=1e-5, atol=1e-5)


def test_a_step_is_that_of_torchs_optimiser():
    data, run = arrays(), tiny(1, weight_decay=0.01)
    learner = Learner(run.build(4), feed(data, run), run.recipe, CPU, ALONE)
    model, source = run.build(4).to(memory_format=torch.channels_last), feed(data, run)
    optimiser = torch.optim.SGD(
        model.parameters(), 0.02, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=False
    )
    learner.begin(0, 0, 0.02)
    source.begin(0, 0)
    for step, size in enumerate((16, 16, 5)):
        learner.step(step)
        x, y = source.take(torch.tensor(step), size)
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    for found, expected in zip(learner.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 8])  # fewer and more than five
def test_the_test_is_a_plain_computation(monkeypatch, classes):
    monkeypatch.setattr(feeds, "EVALUATION_BATCH", 9)
    data, run = arrays(test=25, classes=classes), tiny()
    model = run.build(classes)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_var.uniform_(0.5, 2)
    source = feed(data, run)
    examiner = Examiner(model, source, classes, CPU, ALONE)
    model.train()
    for _ in range(2):  # a second test starts from nothing
        assert len(list(examiner.run())) == 3
    assert model.training
    score = examiner.score()
    mean, std = torch.tensor(data.mean).view(3, 1, 1), torch.tensor(data.std).view(3, 1, 1)
    losses, wrong, wrong5 = [], [0] * classes, 0
    model.eval()
    with torch.no_grad():
        for image, label in zip(data.test.images, data.test.labels.tolist(), strict=True):
            logits = model((((image.permute(2, 0, 1)) - mean) / std)[None])[0]
            losses.append(float(logits.logsumexp(0) - logits[label]))
            before = int((logits > logits[label]).sum())
            wrong[label] += before > 0
            wrong5 += before > 4
    count = [data.test.labels.tolist().count(c) for c in range(classes)]
    assert score.loss == pytest.approx(sum(losses) / 25, rel=1e-5)
    assert score.error == pytest.approx(100 * sum(wrong) / 25)
    assert score.error5 == pytest.approx(100 * wrong5 / 25)
    assert score.class_errors == pytest.approx([100 * w / n for w, n in zip(wrong, count)])  # noqa: B905
    assert 0 < score.error < 100


@pytest.mark.parametrize("images", [20, 21, 22, 3])
def test_a_test_pauses_as_often_in_every_process(monkeypatch, images):
    """Processes speak to each other between pauses: they must not be at different ones."""
    monkeypatch.setattr(feeds, "EVALUATION_BATCH", 5)
    run, data = tiny(), arrays(test=images)
    pauses, tested = set(), 0
    for rank in range(4):
        source = feed(data, run, World(rank, 4))
        examiner = Examiner(run.build(4), source, 4, CPU, ALONE)
        pauses.add(len(list(examiner.run())))
        tested += int(examiner.sums[0].sum())
    assert len(pauses) == 1
    assert tested == images


def test_a_tally_leaves_out_what_has_no_class():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    found = tally(logits, torch.tensor([0, 2, 1, -100]), torch.arange(3))
    losses = -logits.log_softmax(1)
    expected = [[1, 1, 1], [0, 1, 1], [0, 0, 0], [losses[0, 0], losses[2, 1], losses[1, 2]]]
    torch.testing.assert_close(found, torch.tensor(expected).double())


def test_nothing_to_test_is_said():
    run = tiny()
    examiner = Examiner(run.build(4), feed(arrays(), run), 4, CPU, ALONE)
    with pytest.raises(ValueError, match="no test image"):
        examiner.score()


@pytest.mark.parametrize(
    ("recalibration", "precision"), [("none", "fp32"), ("mssar", "fp32"), ("none", "bf16")]
)
def test_training_learns_what_is_easy(tmp_path, recalibration, precision):
    data = arrays(train=64, test=40)
    run = tiny(0, recalibration, epochs=8, drops=(6,), lr=0.1, padding=0, mirror=0.0)
    execution = replace(CPU, precision=precision)
    record = trained(run, data, tmp_path / "run", execution=execution)
    assert record.execution["precision"] == precision
    assert record.error < 25  # chance is 75
    assert record.epochs[-1].train_error < 25
    assert record.epochs[-1].train_loss < record.epochs[0].train_loss / 2


def test_a_record_says_what_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "TICK", math.inf)
    data, run, log = arrays(), tiny(3, "mssar"), Log()
    record = trained(run, data, tmp_path / "run", log)
    assert record.run == run.as_dict()
    assert record.data == {"checksum": data.checksum, "classes": 4, "train": 37, "test": 24}
    assert [(e.epoch, e.lr) for e in record.epochs] == [(1, 0.02), (2, pytest.approx(0.002))]
    assert (record.error, record.error5) == (record.epochs[-1].test_error, 0.0)
    assert sum(record.class_errors) / 4 == pytest.approx(record.error)  # classes of one size
    assert record.params == sum(p.numel() for p in run.build(4).parameters())
    assert (record.interruptions, record.execution["processes"]) == (0, 1)
    assert record.seconds == sum(e.seconds for e in record.epochs) > 0
    assert log.epochs == [(run, e) for e in record.epochs]
    assert log.started == [(run, 0, tmp_path / "run")]
    assert [(m.epoch, m.step, m.steps) for _, m in log.moments] == [(1, 3, 3), (2, 3, 3)]
    assert [m.images for _, m in log.moments] == [37, 74]
    losses = learnt(tmp_path / "run")["losses"].double()
    expected = float(losses @ torch.tensor([16.0, 16, 5]).double() / 37)
    assert record.epochs[-1].train_loss == pytest.approx(expected)


@pytest.mark.parametrize("batch", [37, 38])
def test_a_batch_larger_than_the_data_is_said(tmp_path, batch):
    run, log = tiny(batch=batch, epochs=1), Log()
    train([run], lambda _: arrays(37), CPU, tmp_path, log)
    said = f"{run}: a batch of 38 is more than all 37 images: an epoch is one step"
    assert log.messages == ([said] if batch == 38 else [])


def test_an_observer_sees_the_loss_of_every_step_so_far(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "TICK", -1)  # look after every step
    data, run, log = arrays(), tiny(0, epochs=1), Log()
    trained(run, data, tmp_path, log)
    moments = [moment for _, moment in log.moments]
    assert [m.step for m in moments] == [1, 2, 3, 3]
    assert [m.images for m in moments] == [16, 32, 37, 37]
    losses = learnt(tmp_path)["losses"]
    for moment in moments:
        assert moment.loss == pytest.approx(float(losses[: moment.step].mean()))


def test_diverging_before_anything_was_saved_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(Learner, "step", poison(0, 0))
    with pytest.raises(DivergedError, match=r"nan in epoch 1, step 1; nothing was saved yet; try"):
        trained(tiny(0), arrays(), tmp_path)


def test_weights_that_are_spoilt_are_not_saved_in_mid_epoch(tmp_path, monkeypatch):
    """Stopping between two looks at the loss must not make a bad checkpoint the newest."""
    data, run = arrays(), tiny(0)
    monkeypatch.setattr(Learner, "step", poison(4, 0))
    with opened(run, data, tmp_path) as training:
        work = training.work()
        while (training.progress.epoch, training.progress.step) < (1, 2):
            next(work)
        try:
            training.save()
        except DivergedError as reason:
            assert "epoch 2, step 2" in str(reason)  # noqa: PT017, either is well
    assert all(t.isfinite().all() for t in learnt(tmp_path).values())


def test_a_recipe_for_photographs_is_refused_for_small_images(tmp_path):
    run = replace(tiny(), recipe=ILSVRC2012)
    with pytest.raises(ValueError, match="the recipe ilsvrc2012 is for photographs; not tiny"):
        trained(run, arrays(), tmp_path)
    with opened(tiny(), arrays(), tmp_path):  # the folder was let go
        pass


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp16", "precision is one of bf16, tf32, fp32; got 'fp16'"),
        ("tf32", "precision tf32 needs a CUDA device; a CPU has bf16 and fp32"),
    ],
)
def test_a_precision_that_is_not_there_is_refused(precision, message):
    with pytest.raises(ValueError, match=message):
        Execution(torch.device("cpu"), precision)


def test_a_device_that_is_not_there_is_refused():
    assert choose_device("cpu") == torch.device("cpu")
    for wanted in ("gpu", "meta", "cuda:x", ""):
        with pytest.raises(ValueError, match=f"auto, cpu, cuda or cuda:N; got '{wanted}'"):
            choose_device(wanted)
    if not torch.cuda.is_available():
        assert choose_device() == torch.device("cpu")
        with pytest.raises(ValueError, match="no CUDA device is there, and 'cuda' was asked for"):
            choose_device("cuda")


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_torchs_switches_are_as_before(before):
    def switches() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with settings(replace(CPU, deterministic=True)):
            assert switches() == (True, False)
        assert switches() == before
    finally:
        torch.use_deterministic_algorithms(False)


COMPILING = """
from dataclasses import replace
from lab import *
from torch._dynamo.testing import CompileCounter
from mssar.lab.engine.execution import settings
torch.set_num_threads(1)
counter, compiled = CompileCounter(), torch.compile
torch.compile = lambda model, **kinds: compiled(model, backend=counter, **kinds)
data, how = arrays(), replace(CPU, compile=True)
with settings(how):
    for classes in range(4, 9):
        for seed in (0, 1):
            run = tiny(seed)
            learner = Learner(run.build(classes), feed(data, run), run.recipe, how, World())
            learner.begin(0, 0, 0.1)
            learner.step(0)
            learner.step(2)
            print(counter.frame_count, flush=True)
"""


def test_a_program_is_compiled_once_for_all_seeds_and_anew_for_every_network():
    """One for each of two batches; also the ninth, although by default the compiler keeps eight
    of a class and then none."""
    with program(COMPILING) as process:  # by itself: checked shapes cannot be traced
        said, _ = process.communicate(timeout=120)
    assert said.split() == [str(2 + 2 * (number // 2)) for number in range(10)]


def test_compiled_kernels_are_kept_beside_the_data_unless_said_otherwise(tmp_path, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    monkeypatch.setenv(names[0], "elsewhere")
    monkeypatch.setenv(names[1], "")  # so that it is put back
    monkeypatch.delenv(names[1])
    (tmp_path / "file").touch()
    keep_compiled(tmp_path / "file")  # cannot be written: as it was
    assert names[1] not in os.environ
    keep_compiled(tmp_path)
    assert os.environ[names[0]] == "elsewhere"
    assert os.environ[names[1]] == str(tmp_path / "compiled" / mssar.__version__ / "triton")


KEEPING = """
import os, sys
from pathlib import Path
for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ.pop(name, None)
from mssar.lab.engine.execution import keep_compiled
from mssar.lab.run import Run
Run("resnet8", "mssar").check()
import torch._dynamo.package
keep_compiled(Path(sys.argv[1]))
import torch
compiled = torch.compile(lambda x: x.sin() + 1)
print(float(compiled(torch.zeros(3)).sum()))
"""


def test_what_the_compiler_itself_chose_is_nobodys_choice(tmp_path):
    """It puts its own folder where a user would, as soon as it is imported."""
    with program(KEEPING, tmp_path) as process:
        said, _ = process.communicate(timeout=240)
    assert said.split() == ["3.0"]
    kept = tmp_path / "compiled" / mssar.__version__ / "inductor"
    assert any(path.is_file() for path in kept.rglob("*.py"))


def test_bytes_are_normalised_in_their_own_layout():
    data = arrays()
    x = data.train.images[:5].permute(0, 3, 1, 2)
    found = feeds.Normalise(data, CPU.device)(x)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
    torch.testing.assert_close(found, ((x.double() - mean) / std).float())
    assert found.is_contiguous(memory_format=torch.channels_last)
