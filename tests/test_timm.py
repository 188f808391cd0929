"""Our networks in timm, and our layer in timm's networks."""

import importlib
import types
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import mssar

NAMES = [f"resnet{n}_mssar" for n in (8, 18, 20, 32, 34, 50, 56)]
NAMES += ["densenet100_mssar", "densenet190_mssar", "resnext50_mssar"]
SIZES = {"resnet8": 16, "densenet100": 8, "resnet18": 64}


@pytest.fixture(scope="module")
def timm(timm: types.ModuleType) -> types.ModuleType:
    """With our networks in it."""
    importlib.import_module("mssar.timm")
    return timm


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


def disturbed(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.5)
    return network


def test_they_are_listed(timm):
    assert sorted(timm.list_models("*_mssar")) == sorted(NAMES)
    assert {f"{n.removesuffix('mssar')}se" for n in NAMES} <= set(timm.list_models("*_se"))
    assert not timm.list_models("*_mssar", pretrained=True)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for resnet8_mssar"):
        timm.create_model("resnet8_mssar", pretrained=True)


@pytest.mark.parametrize("kind", ["se", "mssar"])
@pytest.mark.parametrize("name", SIZES)
def test_they_are_the_networks_of_create_model(timm, name, kind):
    ours = disturbed(mssar.create_model(name, kind, num_classes=5, in_chans=2)).double().eval()
    theirs = timm.create_model(f"{name}_{kind}", num_classes=5, in_chans=2).double().eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 2, SIZES[name], SIZES[name], dtype=torch.float64)
    with torch.inference_mode():
        assert_close(theirs(images), ours(images))
        features = theirs.forward_features(images)
        assert_close(features, ours.forward_features(images))
        assert_close(theirs.forward_head(features, pre_logits=True), features.mean((2, 3)))
        assert_close(theirs.forward_head(features), ours(images))


def test_they_can_be_shared(timm, x, tmp_path):
    made = disturbed(timm.create_model("resnet8_mssar", num_classes=7, scales=(1, 2))).eval()
    made.save_pretrained(tmp_path)
    loaded = mssar.from_pretrained(tmp_path)
    assert type(loaded) is mssar.networks.CifarResNet
    assert [m.scales for m in loaded.modules() if isinstance(m, mssar.MSSAR)] == [(1, 2)] * 3
    assert_close(loaded(x), made(x))
    made.reset_classifier(3, "max")
    made.reset_classifier(0)  # back to the mean
    mssar.save_pretrained(made, tmp_path / "features")
    assert_close(mssar.from_pretrained(tmp_path / "features")(x), made(x))
    grey = timm.create_model("resnet8_se", in_chans=1).eval()
    grey.save_pretrained(tmp_path / "grey")
    assert_close(mssar.from_pretrained(tmp_path / "grey")(x[:, :1]), grey(x[:, :1]))


@pytest.mark.parametrize("when", ["made", "changed"])
def test_with_another_pooling_they_are_not_what_create_model_makes(timm, tmp_path, when):
    made = timm.create_model("resnet8_mssar", **{"global_pool": "max"} if when == "made" else {})
    if when == "changed":
        made.reset_classifier(10, "max")
    with pytest.raises(ValueError, match="this CifarResNet has a module, a pooling or a class"):
        made.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_options_reach_the_layers(timm):
    net = timm.create_model("resnet8_mssar", scales=(1, 3), strategy="sliding", reduction=2)
    layer = net.layer1[0].recalibrate
    assert (layer.scales, layer.strategy, layer.reduction) == ((1, 3), "sliding", 2)
    single = timm.create_model("densenet100_mssar", stage="single")
    assert single.block1.steps[0].recalibrate.context_channels is None
    for option in ("drop_path_rate", "output_stride"):
        with pytest.raises(ValueError, match=f"resnet8 with 'mssar' has no option '{option}'"):
            timm.create_model("resnet8_mssar", **{option: 0.5})


def test_heads(timm, x):
    net = timm.create_model("resnet8_mssar").eval()
    assert (net.get_classifier(), net.get_classifier(name_only=True)) == (net.fc, "fc")
    with torch.inference_mode():
        y = net.forward_features(x)
        mean, peak = y.mean((2, 3)), y.amax((2, 3))
        for pool, expected in {
            "avg": mean,
            "max": peak,
            "avgmax": (mean + peak) / 2,
            "catavgmax": torch.cat((mean, peak), 1),
        }.items():
            net.reset_classifier(7, pool)
            assert_close(net.forward_head(y, pre_logits=True), expected)
            assert_close(net(x), F.linear(expected, net.fc.weight, net.fc.bias))
            net.reset_classifier(0, pool)
            assert_close(net(x), expected)
        net.reset_classifier(0, "")
        assert torch.equal(net(x), y)
    with pytest.raises(ValueError, match="a classifier needs a global_pool"):
        net.reset_classifier(7, "")
    made = timm.create_model("resnet8_mssar", num_classes=3, global_pool="catavgmax", drop_rate=1.0)
    assert not made(x).any()  # all is dropped, and the bias is zero
    assert made.eval()(x).all()


@pytest.mark.parametrize("name", SIZES)
def test_maps_on_the_way(timm, name):
    images = torch.randn(2, 3, SIZES[name], SIZES[name])
    net = timm.create_model(f"{name}_mssar").eval()
    modules, kept = [info["module"] for info in net.feature_info], {}
    for module in set(modules) - {"relu"}:  # which is a function
        net.get_submodule(module).register_forward_hook(
            lambda _, __, y, module=module: kept.__setitem__(module, y)
        )
    with torch.inference_mode():
        last, found = net.forward_intermediates(images)
        assert torch.equal(last, net.forward_features(images))
        assert torch.equal(last, found[-1])
        for info, y in zip(net.feature_info, found, strict=True):
            assert y.shape[1] == info["num_chs"]
            assert y.shape[2] * info["reduction"] == SIZES[name]
            assert torch.equal(y, kept.get(info["module"], y)), info
        assert len(kept) == len(found) - 1
        some = timm.create_model(f"{name}_mssar", features_only=True, out_indices=(1, -2)).eval()
        assert some.feature_info.module_name() == [modules[1], modules[-2]]
        some.load_state_dict({f"model.{n}": t for n, t in net.state_dict().items()}, strict=False)
        for y, expected in zip(some(images), (found[1], found[-2]), strict=True):
            assert torch.equal(y, expected)
        (early,) = net.forward_intermediates(images, [1], stop_early=True, intermediates_only=True)
        assert torch.equal(early, found[1])
    with pytest.raises(ValueError, match=f"there are maps 0 to {len(found) - 1}; got"):
        net.forward_intermediates(images, [len(found)])


@pytest.mark.parametrize("name", ["resnet8", "densenet100"])
def test_nothing_is_kept_that_is_not_needed(timm, name):
    images = torch.randn(2, 3, 16, 16)
    net = timm.create_model(f"{name}_mssar", features_only=True, out_indices=(0, 2))
    sum(y.square().sum() for y in net(images)).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_maps_have_their_names_in_torch_fx(timm, unchecked, name):
    from timm.models import create_feature_extractor

    net = timm.create_model(f"{name}_mssar").eval()
    ours = unchecked.create_model(name, "mssar").eval()
    ours.load_state_dict(net.state_dict())
    traced = create_feature_extractor(ours, [info["module"] for info in net.feature_info])
    images = torch.randn(2, 3, SIZES[name], SIZES[name])
    with torch.inference_mode():
        found = net.forward_intermediates(images)[1]
        for y, expected in zip(traced(images).values(), found, strict=True):
            assert_close(y, expected)


# --- weights ---


def saved(network: nn.Module, path, prefix: str = "") -> str:
    state = {f"{prefix}{name}": value for name, value in network.state_dict().items()}
    if prefix:
        state["momentum.conv1.weight"] = torch.zeros(1)  # as the lab's checkpoints have it
    safetensors.torch.save_file(state, path)
    return str(path)


@pytest.mark.parametrize("prefix", ["", "model."], ids=["weights", "checkpoint"])
def test_a_file_of_ones_own(timm, x, tmp_path, prefix):
    source = disturbed(mssar.create_model("resnet8", "mssar")).eval()
    overlay = {"file": saved(source, tmp_path / "net.safetensors", prefix)}
    make = partial(
        timm.create_model, "resnet8_mssar", pretrained=True, pretrained_cfg_overlay=overlay
    )
    with torch.inference_mode():
        assert_close(make().eval()(x), source(x))
        other = make(num_classes=3).eval()  # the head is new, the rest is not
        assert_close(other.forward_features(x), source.forward_features(x))
        grey = make(in_chans=1).eval()
        assert_close(grey(x[:, :1]), source(x[:, :1].expand_as(x)), rtol=1e-4, atol=1e-5)
        maps = make(features_only=True).eval()(x)
        assert_close(maps[-1], source.forward_features(x))
    with pytest.raises(RuntimeError, match=r"trained for regional scales 1, 2, 4, this MSSAR is"):
        make(scales=(4, 2, 1))


# --- as timm's scripts use them ---


def test_parameters_are_grouped_from_the_stem_to_the_head(timm):
    from timm.models import group_parameters

    expected = {"resnet8": (5, 5), "densenet100": (5, 50), "resnet18": (6, 10)}
    for name, counts in expected.items():
        net = timm.create_model(f"{name}_mssar")
        for coarse, count in zip((True, False), counts, strict=True):
            groups = group_parameters(net, net.group_matcher(coarse))
            assert sorted(n for names in groups.values() for n in names) == sorted(
                n for n, _ in net.named_parameters()
            )
            assert len(groups) == count
            assert all(n.startswith(("conv1", "bn1")) for n in groups[0])
            assert all(n.startswith(("fc", "norm")) for n in groups[count - 1])
            order = [n.split(".")[0] for i in range(1, count - 1) for n in groups[i]]
            modules = [n for n, _ in net.named_children()]
            assert order == sorted(order, key=modules.index)


@pytest.mark.parametrize("name", ["resnet8", "densenet100"])
def test_maps_that_are_computed_twice_have_the_same_gradients(timm, name):
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = []
    for twice in (False, True):
        torch.manual_seed(0)
        net = timm.create_model(f"{name}_mssar").double()
        calls = []
        net.conv1.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        net.set_grad_checkpointing(twice)
        net(images).square().sum().backward()
        assert len(calls) == 1 + twice
        found.append([p.grad for p in net.parameters()])
    assert_close(*found)


def test_a_training_step_and_averages(timm, tmp_path):
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV2, ModelEmaV3, NativeScaler

    net = timm.create_model("resnet8_mssar", num_classes=4, drop_rate=0.1, scales=(1, 3))
    optimizer = create_optimizer_v2(net, opt="sgd", lr=0.1, weight_decay=1e-4, layer_decay=0.9)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=3)
    averages = [ModelEmaV2(net, decay=0.9995), ModelEmaV3(net, decay=0.9995)]
    images, label = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    before = [p.detach().clone() for p in net.parameters()]
    for step in range(3):
        loss = LabelSmoothingCrossEntropy()(net(images), label)
        optimizer.zero_grad()
        NativeScaler(device="cpu")(loss, optimizer, parameters=net.parameters(), clip_grad=1.0)
        scheduler.step(step + 1)
        for average in averages:
            average.update(net)
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    saver = CheckpointSaver(
        net,
        optimizer,
        model_ema=averages[0],
        checkpoint_dir=str(tmp_path),
        recovery_dir=str(tmp_path),
    )
    saver.save_checkpoint(0, metric=1.0)
    for ema in (False, True):
        again = timm.create_model("resnet8_mssar", num_classes=4, scales=(1, 3))
        timm.models.load_checkpoint(again, str(tmp_path / "last.pth.tar"), use_ema=ema)
        source = (averages[0].module if ema else net).eval()
        assert_close(again.eval()(images), source(images))


def test_validation(timm):
    from PIL import Image
    from timm.data import create_transform, resolve_data_config
    from timm.utils import AverageMeter, accuracy

    net = timm.create_model("resnet8_mssar", num_classes=6, in_chans=3, global_pool=None).eval()
    config = resolve_data_config({}, model=net)
    assert config == timm.data.resolve_model_data_config(net)
    assert config["input_size"] == (3, 32, 32)
    photograph = timm.data.resolve_model_data_config(timm.create_model("resnet18_mssar"))
    assert (photograph["input_size"], photograph["crop_pct"]) == ((3, 224, 224), 0.875)
    transform, top1 = create_transform(**config), AverageMeter()
    noise = np.random.default_rng(0).integers(0, 256, (12, 40, 50, 3), dtype=np.uint8)
    images = torch.stack([transform(Image.fromarray(pixels)) for pixels in noise])
    assert images.shape == (12, 3, 32, 32)
    expected = (images[0].mean((1, 2)) * torch.tensor(config["std"])) + torch.tensor(config["mean"])
    assert_close(expected, torch.full((3,), 0.5), atol=0.05, rtol=0)
    with torch.inference_mode():
        label = net(images).argmax(1)
        for batch, wanted in zip(images.split(5), label.split(5), strict=True):
            first, _ = accuracy(net(batch), wanted, topk=(1, 5))
            top1.update(first.item(), len(batch))
    assert top1.avg == 100


# --- our layer in theirs ---


@pytest.mark.parametrize(
    "options", [{}, {"scales": (1, 2), "reduction": 4}], ids=["usual", "other"]
)
def test_the_layer_as_attn_layer(timm, options):
    layer = partial(mssar.MSSAR, **options) if options else mssar.MSSAR
    net = timm.create_model("resnet18", num_classes=4, block_args={"attn_layer": layer})
    layers = [m for m in net.modules() if isinstance(m, mssar.MSSAR)]
    assert [m.channels for m in layers] == [64, 64, 128, 128, 256, 256, 512, 512]
    assert {m.scales for m in layers} == {options.get("scales", (1, 2, 4))}
    images, label = torch.randn(4, 3, 64, 64), torch.arange(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(net(images), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(m.branches[0].reduce.weight.grad.any() for m in layers)
    block = net.layer2[1].eval()  # where the layer is: after the last norm, before the addition
    y = torch.randn(2, 128, 6, 6)
    inside = block.bn2(block.conv2(block.act1(block.bn1(block.conv1(y)))))
    assert_close(block(y), (inside * block.se.importance(inside) + y).relu())
