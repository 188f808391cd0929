"""Several processes, one network: the same as one process with all of the batch.

Two processes by gloo live for the whole file; a job is a function that both of them call.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import CPU, Crew, Log, arrays, assert_same, feed, learnt, plant, poison, tiny, trained
from torch import Tensor, nn

from mssar.lab.data.imagefolder import open_folder
from mssar.lab.engine import checkpoint, fleet
from mssar.lab.engine import feed as feeds
from mssar.lab.engine.examine import Examiner
from mssar.lab.engine.result import NAME as RECORD
from mssar.lab.engine.result import finished
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import Training
from mssar.lab.engine.world import SynchronisedBatchNorm2d, World, joined, launched
from mssar.lab.engine.world import synchronise_norms as synchronise
from mssar.lab.recipes import Photographs, Recipe
from mssar.lab.records import Record
from mssar.lab.run import Run


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with contextlib.closing(Crew(2)) as found:
        yield found


def batch(dtype: torch.dtype, offset: float) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, 3, 4, 5, generator=draw, dtype=torch.float64) * 2 + offset
    return x.to(dtype), torch.randn(2, 7, 3, 4, 5, generator=draw, dtype=torch.float64).to(dtype)


def normalised(
    norm: nn.BatchNorm2d, dtype: torch.dtype, offset: float, part: slice
) -> dict[str, Tensor]:
    """Two steps of a norm on a part of a batch, its gradients in the second, then a test."""
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    whole, slopes = batch(dtype, offset)
    norm.train()
    norm(whole[0, part])
    x = whole[1, part].clone().requires_grad_()
    y = norm(x)
    (y * slopes[1, part]).sum().backward()
    norm.eval()
    return {
        "y": y.detach(),
        "x": x.grad,
        "weight": norm.weight.grad,
        "bias": norm.bias.grad,
        "mean": norm.running_mean,
        "variance": norm.running_var,
        "batches": norm.num_batches_tracked,
        "test": norm(whole[0, part]).detach(),
    }


def synchronised(world: World, dtype: torch.dtype, offset: float, momentum: float | None) -> Any:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    norm = SynchronisedBatchNorm2d(3, momentum=momentum, dtype=wide)
    return normalised(norm, dtype, offset, slice(0, 4) if world.leads else slice(4, 7))


@pytest.mark.parametrize(
    ("dtype", "offset", "momentum", "tolerance"),
    [
        (torch.float32, 0.0, 0.1, 1e-5),
        (torch.float32, 100.0, 0.3, 5e-4),  # of the mean's own rounding
        (torch.float32, 0.0, None, 1e-5),
        (torch.float64, 0.0, 0.1, 1e-12),
        (torch.bfloat16, 0.0, 0.1, 3e-2),
    ],
)
def test_bn_over_processes_is_bn_of_the_whole_batch(crew, dtype, offset, momentum, tolerance):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    norm = nn.BatchNorm2d(3, momentum=momentum, dtype=wide)
    expected = normalised(norm, dtype, offset, slice(0, 7))
    one, two = crew(synchronised, dtype, offset, momentum)
    found = {
        **{k: torch.cat([one[k], two[k]]) for k in ("y", "x", "test")},  # 4 and 3 images
        **{k: one[k] + two[k] for k in ("weight", "bias")},  # a sum over images
        **{k: one[k] for k in ("mean", "variance", "batches")},
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in ("mean", "variance", "batches"):
        assert torch.equal(one[name], two[name])


def test_every_norm_is_made_to_agree_and_keeps_its_state():
    model = tiny(0, "mssar").build(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    found = synchronise(model, CPU.device)
    assert [type(m) for m in found.modules()] == [
        SynchronisedBatchNorm2d if kind is nn.BatchNorm2d else kind for kind in kinds
    ]
    assert kinds.count(nn.BatchNorm2d) > 3
    assert_same(found.state_dict(), before)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(found(x), tiny(0, "mssar").build(4)(x))  # by itself as ever


def taught(
    world: World, recalibration: str, folder: Path | None, pauses: int = -1, **kinds: Any
) -> dict[str, Any]:
    """Train a run to its end, or save and stop after some pauses."""
    sync_bn, changes = kinds.get("sync_bn", True), kinds.get("changes", {})
    log = Log()
    with pytest.MonkeyPatch.context() as patch:  # in this process, too, where the world is alone
        patch.setattr(feeds, "EVALUATION_BATCH", 10)
        training = Training(
            tiny(5, recalibration, **changes),
            arrays(test=23),
            replace(CPU, sync_bn=sync_bn),
            folder / str(world.rank),
            log,
            world=world,
        )
    losses, epoch = [], training.progress.epoch
    with contextlib.closing(training):
        work = training.work()
        for number, _ in enumerate(work, 1):
            if training.progress.epoch != epoch:
                epoch = training.progress.epoch
                losses.append(world.sum(training.learner.losses.clone()))
            if number == pauses:
                training.save()
                break
        work.close()
    state = {name: tensor.clone() for name, tensor in training.learner.state().items()}
    score = training.examiner.score() if pauses < 0 else None
    history = training.progress.history
    records = [record for _, record in log.records]
    return {
        "losses": losses, "state": state, "score": score, "log": history, "records": records,
        "norms": [line for line in log.messages if "BN" in line],
    }  # fmt: skip


def job(world: World, words: tuple[Any, ...], kinds: dict[str, Any]) -> dict[str, Any]:
    return taught(world, *words, **kinds)


@pytest.mark.parametrize(
    ("recalibration", "changes"),
    [
        ("none", {}),
        ("mssar", {}),
        ("none", {"ema": 0.8, "schedule": "cosine", "smoothing": 0.1}),
        ("none", {"decay": "weights", "weight_decay": 0.1, "fill": "mean"}),
    ],
)
def test_two_processes_train_as_one(crew, tmp_path, recalibration, changes):
    """In batches of 16, 16 and 5: the last is 3 images here and 2 there."""
    alone = taught(World(), recalibration, tmp_path / "alone", changes=changes)
    one, two = crew(job, (recalibration, tmp_path / "both"), {"changes": changes})
    for found, expected in zip(one["losses"], alone["losses"], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(one["state"], two["state"])  # weights, momentum and running statistics
    for name, tensor in alone["state"].items():
        torch.testing.assert_close(
            one["state"][name], tensor, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert one["score"] == two["score"]
    assert one["score"].loss == pytest.approx(alone["score"].loss, rel=1e-4)
    for ours, theirs in zip(one["log"], alone["log"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["train_error"] == pytest.approx(theirs["train_error"])
        assert ours["test_error"] == pytest.approx(theirs["test_error"])
    (record,) = one["records"]
    assert record.execution["processes"] == 2


def test_only_the_leader_writes(crew, tmp_path):
    one, two = crew(job, ("none", tmp_path), {})
    names = {path.name for path in (tmp_path / "0").iterdir()}
    assert names == {".lock", RECORD, "epoch-0001.safetensors", "epoch-0002.safetensors"}
    assert not (tmp_path / "1").exists()
    assert two["records"] == []
    assert finished(tmp_path / "0") == one["records"][0]
    kept = learnt(tmp_path / "0")
    assert_same({name: kept[name] for name in one["state"]}, one["state"])


def test_bn_by_itself_trains_and_is_tested_with_the_leaders_statistics(crew, tmp_path):
    changes = {"epochs": 8, "drops": (6,), "lr": 0.1, "padding": 0, "mirror": 0.0}
    one, two = crew(job, ("none", tmp_path), {"sync_bn": False, "changes": changes})
    assert_same(one["state"], two["state"])
    assert one["score"] == two["score"]
    assert one["score"].error < 25  # chance is 75
    run, data = tiny(5, **changes), arrays(test=23)
    model = run.build(4)
    found = {k.removeprefix("model."): v for k, v in one["state"].items() if k.startswith("model.")}
    model.load_state_dict(found)
    examiner = Examiner(model, feed(data, run), 4, CPU, World())
    for _ in examiner.run():
        pass
    assert examiner.score().loss == pytest.approx(one["score"].loss, rel=1e-5)
    assert examiner.score().class_errors == one["score"].class_errors
    whole = crew(job, ("none", tmp_path / "whole"), {"changes": changes})[0]
    assert not torch.equal(whole["losses"][0], one["losses"][0])  # it is another thing


def warned(world: World, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        taught(world, "mssar", folder, changes={"epochs": 1})
    return [str(warning.message) for warning in found]


def test_training_together_is_warned_of_nothing(crew, tmp_path):
    assert crew(warned, tmp_path) == [[], []]


@pytest.mark.parametrize("pauses", [2, 4, 6])  # in mid-epoch, during the test, after the epoch
def test_two_processes_go_on_where_they_stopped(crew, tmp_path, pauses):
    unbroken, _ = crew(job, ("mssar", tmp_path / "unbroken"), {})
    crew(job, ("mssar", tmp_path / "stopped", pauses), {})
    assert finished(tmp_path / "stopped" / "0") is None
    one, two = crew(job, ("mssar", tmp_path / "stopped"), {})
    assert_same(one["state"], unbroken["state"])
    assert_same(two["state"], unbroken["state"])
    (record,), (expected,) = one["records"], unbroken["records"]
    assert record.class_errors == expected.class_errors
    for ours, theirs in zip(record.epochs, expected.epochs, strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-6)
        assert ours.train_error == theirs.train_error
        assert (ours.test_loss, ours.test_error) == (theirs.test_loss, theirs.test_error)
    assert record.interruptions == 1


def test_bn_that_changes_on_the_way_is_said_and_recorded(crew, tmp_path):
    """Over 8 images of each process's own, then over all 16."""
    crew(job, ("none", tmp_path, 2), {"sync_bn": False})
    one, two = crew(job, ("none", tmp_path), {})
    (line,) = one["norms"]
    assert "BN was over 8 images of a step so far, and is over 16 from here" in line
    assert two["norms"] == []
    (record,) = one["records"]
    assert record.execution["bn_over"] == [8, 16]


def test_what_one_process_began_two_can_end(crew, tmp_path):
    taught(World(), "none", tmp_path, 2)
    one, two = crew(job, ("none", tmp_path), {})
    assert one["norms"] == []
    assert "bn_over" not in one["records"][0].execution
    alone = taught(World(), "none", tmp_path / "alone")
    torch.testing.assert_close(one["losses"][0], alone["losses"][0], rtol=1e-5, atol=1e-5)
    assert_same(one["state"], two["state"])


def sailed(world: World, folder: Path, spoilt: bool, budget: float | None) -> tuple[Any, ...]:
    """A fleet of two runs; the second process may have less time than the first."""
    step = Learner.step
    if spoilt:
        Learner.step = poison(4, 0)
    try:
        outcome = fleet.train(
            [tiny(0), tiny(1)],
            lambda _: arrays(),
            CPU,
            folder / str(world.rank),
            Log(),
            width=2,
            budget=None if world.leads else budget,
            world=world,
        )
    finally:
        Learner.step = step
    left = [run.seed for run in outcome.left]
    return outcome.records, outcome.failures, left


def test_a_fleet_of_two_processes(crew, tmp_path):
    (records, failures, left), others = crew(sailed, tmp_path, False, None)
    assert (failures, left) == ([], [])
    assert others == ([], [], [])
    for record in records:
        run = tiny(record.run["seed"])
        alone = trained(run, arrays(), tmp_path / "alone" / run.name)
        for ours, theirs in zip(record.epochs, alone.epochs, strict=True):
            assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-5)
    again, _ = crew(sailed, tmp_path, False, None)  # what is finished stays so, for both
    assert again[0] == records


def test_a_run_that_diverges_ends_in_every_process(crew, tmp_path):
    for records, failures, left in crew(sailed, tmp_path, True, None):
        (reason,) = failures
        assert "nan in epoch 2, step 2; " in reason
        assert left == []
        assert {record.run["seed"] for record in records} <= {1}
    (kept,) = checkpoint.checkpoints(tmp_path / "0" / tiny(0).name)
    assert kept.name == "epoch-0001.safetensors"


def test_when_one_process_must_stop_all_do(crew, tmp_path):
    for records, failures, left in crew(sailed, tmp_path, False, 0.0):
        assert (records, failures, left) == ([], [], [0, 1])


def refused(world: World, folder: Path) -> str:
    with pytest.raises(ValueError, match="shared equally") as found:
        taught(world, "none", folder, changes={"batch": 15})
    return str(found.value)


def test_a_batch_that_cannot_be_shared_is_refused_by_all(crew, tmp_path):
    expected = "a batch of 15 cannot be shared equally by 2 processes"
    assert crew(refused, tmp_path) == [expected, expected]


def pictured(world: World, tree: Path, folder: Path) -> list[Record]:
    small = Photographs(size=16, resize=16)
    recipe = Recipe("small", epochs=3, batch=8, lr=0.05, drops=(), augmentation=small)
    run, data = Run("resnet8", "none", {}, "imagefolder", recipe), open_folder(tree)
    lenient = replace(CPU, unreadable=1.0)

    def batches(files, root, parts, _, *, tally, **_how):  # without torchvision
        for part in parts:
            paths = [root / files.paths[number] for number in part.tolist()]
            tally.add(len(part), [(path, "") for path in paths if path.stem == "1"])
            images = torch.randint(256, (len(part), 3, 16, 16), dtype=torch.uint8)
            yield images, files.labels[part]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "batches", batches)
        return fleet.train([run], lambda _: data, lenient, folder, Log(), world=world).records


def test_a_file_that_any_process_cannot_read_is_counted_once(crew, tmp_path):
    """To be tested on, a file is one process's; to train on, in every epoch another's."""
    tree = plant(tmp_path / "tree", (20, 24), train=(10, 9), val=(4, 3))  # two of each called 1
    (record,), others = crew(pictured, tree, tmp_path / "both")
    (alone,) = pictured(World(), tree, tmp_path / "alone")
    assert record.data["unreadable"] == alone.data["unreadable"] == 4
    assert others == []


def conversation(world: World) -> tuple[Any, ...]:
    mine = torch.tensor([float(world.rank + 1)])
    world.share([shared := mine.clone()])
    flags = [world.any(flag, CPU.device) for flag in (False, world.leads, not world.leads, True)]
    names = world.union(["both", str(world.rank)])
    return launched(), world.size, world.sum(mine).item(), shared.item(), flags, names


def test_processes_agree(crew):
    for answer in crew(conversation):
        assert answer == (True, 2, 3.0, 1.0, [False, True, True, True], {"both", "0", "1"})


def test_one_process_needs_nobody(monkeypatch):
    for size in (None, "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
        with joined(CPU.device) as world:
            assert (world, world.leads, launched()) == (World(0, 1), True, False)
            assert world.any(True, CPU.device)
            assert not world.any(False, CPU.device)
    assert not torch.distributed.is_initialized()
