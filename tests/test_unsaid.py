"""What the paper does not say and a recipe may: what decays, what is around an image before it is
cropped, and how weights begin.  8×8 pixels, unless said."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from lab import CPU, Log, arrays, assert_same, feed, learnt, opened, tiny, trained
from test_feed import plain_crop
from torch import Tensor, nn

from mssar.lab import records
from mssar.lab.engine import fleet
from mssar.lab.engine.feed import arrays_feed, crop, generator
from mssar.lab.engine.step import Learner, decaying
from mssar.lab.engine.world import World
from mssar.lab.recipes import CIFAR_RESNET, UNWRITTEN, varied
from mssar.lab.run import Initial, Run, begin_as_in_torch, run_from_dict

ROOT = Path(__file__).parent.parent
UNSAID = {"decay": "weights", "init": "torch", "fill": "mean"}


# --- what decays ---


def undecayed(model: nn.Module) -> set[str]:
    """Norms' parameters and all biases, by their modules."""
    return {
        f"{name}.{own}"
        for name, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
        if own == "bias" or isinstance(module, nn.BatchNorm2d)
    }


@pytest.mark.parametrize("kind", ["none", "se", "mssar"])
def test_of_a_loss_without_slope_weights_shrink_and_nothing_else_moves(kind):
    """Decay by hand: w − lr · decay · w · (1 + momentum), Nesterov's first step from rest."""
    run = tiny(1, kind, decay="weights", weight_decay=0.5)
    learner = Learner(run.build(4), feed(arrays(), run), run.recipe, CPU, World())
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.set_lr(0.02)
    for p in learner.model.parameters():
        p.grad = torch.zeros_like(p)
    learner.optimiser.step()
    kept = undecayed(learner.model)
    assert {"bn1.weight", "bn1.bias", "fc.bias"} < kept
    for name, p in learner.model.named_parameters():
        factor = 1.0 if name in kept else 1 - 0.02 * 0.5 * 1.9
        torch.testing.assert_close(p.detach(), factor * before[name], rtol=1e-6, atol=0)


def test_on_all_parameters_it_is_one_group_in_the_networks_order():
    """As it was before there was a choice."""
    model = tiny(0, "mssar").build(4)
    (group,) = decaying(model, "all")
    assert group.keys() == {"params"}
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
    parted = [p for group in decaying(model, "weights") for p in group["params"]]
    assert {id(p) for p in parted} == {id(p) for p in group["params"]}
    assert len(parted) == len(group["params"])


def test_a_checkpoint_has_the_same_tensors_whatever_decays():
    runs = [tiny(0, "mssar", decay=decay) for decay in ("all", "weights")]
    learners = [Learner(r.build(4), feed(arrays(), r), r.recipe, CPU, World()) for r in runs]
    one, other = ({name: t.shape for name, t in learner.state().items()} for learner in learners)
    assert list(one.items()) == list(other.items())


@pytest.mark.usefixtures("smooth")
@pytest.mark.parametrize("kind", ["none", "mssar"])
def test_runs_as_one_decay_as_each_would_alone(kind, tmp_path):
    changes = {**UNSAID, "weight_decay": 0.5}
    chosen = [tiny(seed, kind, **changes) for seed in (0, 1, 2)]
    made = fleet.train(chosen, lambda _: arrays(), CPU, tmp_path, log := Log(), width=3, stack=3)
    assert [r.execution["stacked"] for r in made.records] == [3, 3, 3], log.failures
    for run in chosen:
        alone, usual = tmp_path / "alone" / run.name, tmp_path / "usual" / run.name
        trained(run, arrays(), alone)
        found, expected = learnt(tmp_path / run.name), learnt(alone)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4, msg=name)
        trained(replace(run, recipe=varied(run.recipe, decay="all")), arrays(), usual)
        shift = learnt(usual)["model.bn1.weight"] - expected["model.bn1.weight"]
        assert shift.abs().max() > 0.01  # far beyond what is let pass above


@pytest.mark.parametrize("pauses", [2, 5])
def test_what_was_stopped_goes_on_to_the_same_bits(pauses, tmp_path):
    run, data = tiny(5, "mssar", **UNSAID, weight_decay=0.1), arrays()
    trained(run, data, tmp_path / "whole")
    with opened(run, data, tmp_path / "cut") as training:
        work = training.work()
        for _ in range(pauses):
            next(work)
        training.save()
        work.close()
    assert trained(run, data, tmp_path / "cut").interruptions == 1
    assert_same(learnt(tmp_path / "cut"), learnt(tmp_path / "whole"))


@pytest.mark.parametrize(("field", "usual"), [("decay", "all"), ("init", "he"), ("fill", "black")])
def test_a_folder_of_the_usual_run_is_not_gone_on_with(field, usual, tmp_path):
    trained(tiny(5), arrays(), tmp_path)
    changed = tiny(5, **{field: UNSAID[field]})
    said = f"{field} is None there and '{UNSAID[field]}' here"  # what is usual is not written
    with pytest.raises(ValueError, match=said):
        trained(changed, arrays(), tmp_path)
    assert trained(tiny(5, **{field: usual}), arrays(), tmp_path).run == tiny(5).as_dict()


# --- what is around an image ---


@pytest.mark.parametrize("padding", [0, 2])
def test_around_an_image_there_is_black_or_exactly_nothing_once_normalised(padding):
    data = arrays()
    data = replace(data, train=replace(data.train, images=data.train.images.clamp(min=1)))
    black, mean = (feed(data, tiny(3, padding=padding, fill=fill)) for fill in ("black", "mean"))
    for source in (black, mean):
        source.begin(1, 0)
    draw = generator(3, 1)
    order = torch.randperm(37, generator=draw)
    top, left = torch.randint(2 * padding + 1, (2, 37), generator=draw)
    mirrored = torch.rand(37, generator=draw) < 0.5
    colour = black.normalise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten()
    seen = 0
    for step, batch in enumerate(order.split(16)):
        (x, _), (z, labels) = (f.take(torch.tensor(step), len(batch)) for f in (black, mean))
        assert z.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels, data.train.labels[batch])
        for place, i in enumerate(batch.tolist()):
            shown = torch.ones_like(data.train.images[i])
            at = (int(top[i]), int(left[i]), bool(mirrored[i]), padding)
            inside = plain_crop(shown, *at).permute(2, 0, 1).bool()
            assert torch.equal(z[place][inside], x[place][inside])  # to the bit
            outside = z[place][~inside]
            assert not outside.any()
            assert not outside.signbit().any()  # zeros as padding after normalising has them
            around = x[place].masked_select(~inside).view(3, -1)
            assert torch.equal(around, colour[:, None].expand_as(around))
            seen += outside.numel()
    assert (seen > 0) is (padding > 0)


def test_a_mean_around_is_what_padding_after_normalising_gives():
    """As many trainers have it: normalise, pad with zeros, crop."""
    data, run = arrays(), tiny(4, padding=3, fill="mean", mirror=0.0)
    source = feed(data, run)
    source.begin(0, 0)
    draw = generator(4, 0)
    order = torch.randperm(37, generator=draw)
    top, left = torch.randint(7, (2, 37), generator=draw)
    normalised = source.normalise(data.train.images.permute(0, 3, 1, 2))
    padded = nn.functional.pad(normalised, (3, 3, 3, 3))
    x, _ = source.take(torch.tensor(0), 16)
    for found, i in zip(x, order[:16].tolist(), strict=True):
        assert torch.equal(found, padded[i, :, top[i] : top[i] + 8, left[i] : left[i] + 8])


def test_runs_with_either_share_what_is_on_the_device():
    data, resident = arrays(), {}
    for fill in ("black", "mean", "black"):
        recipe = tiny(0, fill=fill).recipe
        source = arrays_feed(data, resident, recipe, 0, CPU.device, World())
        assert (source.beyond is not None) is (fill == "mean")
    assert len(resident) == 1


def test_tests_are_as_they_were():
    data = arrays()
    black, mean = (feed(data, tiny(fill=fill)) for fill in ("black", "mean"))
    assert torch.equal(black.take_test(0)[0], mean.take_test(0)[0])


@pytest.mark.parametrize("padding", [4, 1])
def test_the_order_of_crop_and_mirror_image_does_not_matter(padding):
    """All that may come out, counted: an image cropped at one of the offsets and mirrored, as it is
    done here, or mirrored first and cropped then. Offsets are drawn evenly and by themselves, so
    that either is as probable as the other, whatever the probability of a mirror image."""
    image = torch.randint(256, (12, 10, 3), dtype=torch.uint8)
    offsets = list(product(range(2 * padding + 1), repeat=2))
    top, left = torch.tensor(offsets).unbind(1)
    for mirrored in (False, True):
        padded = nn.functional.pad(image, (0, 0, *[padding] * 4))[None]
        which, flags = torch.zeros_like(top), torch.full(top.shape, mirrored)
        here = crop(padded, which, top, left, flags, (12, 10))
        first = image.flip(1) if mirrored else image
        there = [plain_crop(first, t, u, False, padding) for t, u in offsets]
        assert outcomes(here) == outcomes(there)
        assert len(outcomes(here)) == len(offsets)
        if mirrored:  # one by one they differ
            assert any(not torch.equal(a, b) for a, b in zip(here, there, strict=True))


def outcomes(images: list[Tensor] | Tensor) -> Counter[bytes]:
    return Counter(bytes(image.contiguous().numpy()) for image in images)


# --- how weights begin ---


def layers() -> dict[str, nn.Module]:
    """A ResNet-8's, one after the other, each as PyTorch makes it."""
    made: dict[str, nn.Module] = {"conv1": nn.Conv2d(3, 16, 3, bias=False)}
    for stage, (inputs, width) in enumerate(((16, 16), (16, 32), (32, 64)), 1):
        block = f"layer{stage}.0"
        made[f"{block}.conv1"] = nn.Conv2d(inputs, width, 3, bias=False)
        made[f"{block}.conv2"] = nn.Conv2d(width, width, 3, bias=False)
        if inputs != width:
            made[f"{block}.downsample.0"] = nn.Conv2d(inputs, width, 1, bias=False)
    return made | {"fc": nn.Linear(64, 7)}


def test_layers_begin_as_pytorch_makes_them():
    network = Run("resnet8", seed=1).build(7)
    usual = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.manual_seed(3)
    begin_as_in_torch(network)
    found = network.state_dict()
    torch.manual_seed(3)
    expected = {f"{n}.{own}": t for n, m in layers().items() for own, t in m.state_dict().items()}
    assert {name for name, t in found.items() if t.ndim > 1} < expected.keys() < found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected.get(name, usual[name])), name


@pytest.mark.parametrize(
    ("network", "kind"), [("resnet8", "mssar"), ("resnet20", "se"), ("densenet100", "mssar")]
)
def test_a_recalibration_begins_as_ever(network, kind):
    run = Run(network, kind, recipe=varied(CIFAR_RESNET, init="torch"), seed=3)
    torch.manual_seed(5)
    found, again = (run.build(7).state_dict() for _ in range(2))
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # the global generator was left alone
    assert_same(found, again)
    he = replace(run, recipe=CIFAR_RESNET).build(7).state_dict()
    for name, tensor in found.items():
        drawn = "recalibrate" not in name and (tensor.ndim > 1 or name == "fc.bias")
        assert torch.equal(tensor, he[name]) is not drawn, name
        if drawn and tensor.ndim > 1:  # evenly, up to 1 / √inputs; He's has no bound
            assert tensor.abs().max() <= tensor[0].numel() ** -0.5, name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"network": "timm:resnet18"}, "timm:resnet18 is another library's: leave out --init"),
        ({"network": "torchvision:resnet18"}, "torchvision:resnet18 is another library's"),
        ({"weights": Initial("mine.safetensors", "0" * 64)}, "begins with mine.safetensors: leave"),
    ],
)
def test_only_networks_of_ours_that_begin_from_scratch_are_initialised_otherwise(changes, said):
    given = {"network": "resnet18", **changes}
    run = Run(**given)
    with pytest.raises(ValueError, match=f"init=torch is for networks of this package .*{said}"):
        replace(run, recipe=varied(CIFAR_RESNET, init="torch"))


# --- as it is written ---


def test_runs_from_before_keep_their_names():
    """A record is written as it was; what is usual is not said."""
    every = records.read(ROOT / "records")
    assert len(every) >= 98
    for record in every:
        assert run_from_dict(record.run).as_dict() == record.run
    run = Run("resnet20", dataset="cifar100", seed=0)
    assert run.name == "cifar100-resnet20-none-seed0-2ce78c"
    usual = {name: UNWRITTEN[name] for name in UNSAID}
    assert replace(run, recipe=varied(CIFAR_RESNET, **usual)).as_dict() == run.as_dict()
    names = {
        replace(run, recipe=varied(CIFAR_RESNET, **{name: value})).name
        for name, value in UNSAID.items()
    }
    assert len(names | {run.name}) == 4
