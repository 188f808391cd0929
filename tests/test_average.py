"""The average of weights, smoothed labels, a rate that changes by the step, and dropping."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import CPU, arrays, assert_same, feed, learnt, opened, timeless, tiny, trained
from torch import Tensor, nn

from mssar.lab.engine.evaluate import evaluate
from mssar.lab.engine.evaluate import trained as opened_again
from mssar.lab.engine.step import Learner
from mssar.lab.engine.world import World
from mssar.networks import weights

GENTLE: dict[str, Any] = {"schedule": "cosine", "warmup": 0.5, "smoothing": 0.1}


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def part(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in found.items() if k.startswith(prefix)}


def test_the_average_is_that_of_a_loop_and_the_weights_do_not_notice():
    data, run = arrays(), tiny(1, "mssar", ema=0.75)
    learner = Learner(run.build(4), feed(data, run), run.recipe, CPU, World())
    without = tiny(1, "mssar")
    plain = Learner(without.build(4), feed(data, without), without.recipe, CPU, World())
    expected = numbers(learner.model)
    assert_same(numbers(learner.tested), expected)  # it begins as the network does
    for one in (learner, plain):
        one.begin(0, 0, 0.02)
    for step in range(3):
        for one in (learner, plain):
            one.step(step)
        for name, now in learner.model.state_dict().items():
            if now.is_floating_point():
                expected[name] += 0.25 * (now - expected[name])
            else:
                expected[name] = now.clone()
    found = part(learner.state(), "average.")
    assert int(found["bn1.num_batches_tracked"]) == 3
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert_same(plain.state(), {k: t for k, t in learner.state().items() if "average." not in k})
    assert plain.tested is plain.model


@pytest.mark.parametrize("pauses", [1, 2, 4, 6])
def test_what_was_stopped_ends_as_if_it_had_not_been(tmp_path, pauses):
    run, data = tiny(3, "mssar", ema=0.9, **GENTLE), arrays()
    whole = trained(run, data, tmp_path / "whole")
    with opened(run, data, tmp_path / "parts") as training:
        work = training.work()
        for _ in range(pauses):
            next(work)
        training.save()
        work.close()
    parts = trained(run, data, tmp_path / "parts")
    assert timeless(parts) == timeless(whole)
    assert_same(learnt(tmp_path / "parts"), learnt(tmp_path / "whole"))
    assert [epoch.lr for epoch in whole.epochs] == [run.recipe.lr_of(e, 2, 3) for e in (0, 1)]


def test_the_average_is_what_is_tested_and_what_a_reader_gets(tmp_path):
    run, data = tiny(3, ema=0.9), arrays()
    record = trained(run, data, tmp_path)
    tensors = learnt(tmp_path)
    chosen = opened_again(tmp_path)
    assert_same(numbers(chosen.model), part(tensors, "average."))
    assert evaluate(chosen, data, CPU).loss == record.epochs[-1].test_loss
    assert_same(weights.read(newest(tmp_path)).tensors, part(tensors, "average."))
    chosen.model.load_state_dict(part(tensors, "model."))
    assert evaluate(chosen, data, CPU).loss != record.epochs[-1].test_loss


def newest(directory: Path) -> Path:
    return sorted(directory.glob("epoch-*.safetensors"))[-1]


def test_smoothed_labels_belong_to_all_classes_a_little():
    data, run = arrays(), tiny(1, smoothing=0.2)
    learner = Learner(run.build(4), feed(data, run), run.recipe, CPU, World())
    source = feed(data, run)
    for one in (learner, source):
        one.begin(0, 0, *([0.02] if one is learner else []))
    model = run.build(4).to(memory_format=torch.channels_last)
    x, y = source.take(torch.tensor(0), 16)
    learner.step(0)
    wanted = 0.8 * F.one_hot(y, 4) + 0.2 / 4
    expected = -(wanted * model(x).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(learner.losses[0], expected.detach(), rtol=1e-6, atol=1e-6)


class Dropping(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.drop, self.fc = nn.Dropout(share), nn.Linear(3 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(self.drop(x.flatten(1)))
        return made


def test_what_a_step_drops_follows_from_its_number_and_the_seed_alone():
    run, data = tiny(1, momentum=0.0, nesterov=False), arrays()

    def losses(seed: int, *steps: int) -> list[float]:
        torch.manual_seed(0)
        learner = Learner(Dropping(0.5), feed(data, run), run.recipe, CPU, World(), seed)
        learner.begin(0, 0, 0.0)
        torch.manual_seed(len(steps))  # whatever else was drawn
        before = torch.random.get_rng_state()
        for step in steps:
            learner.counter.fill_(step)
            learner.step(step)
        assert torch.equal(torch.random.get_rng_state(), before)
        return learner.losses.tolist()

    whole = losses(7, 0, 1, 2)
    assert losses(7, 2)[2] == whole[2]
    assert losses(8, 2)[2] != whole[2]
