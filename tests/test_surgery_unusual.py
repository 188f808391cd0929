"""Identity at birth where norms, hooks and modules are not what they are as a rule."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from foreign import build, seeded
from torch import nn
from torch.nn.utils import parametrize, prune

import mssar
from mssar.surgery.ends import Recalibrated
from mssar.surgery.insertion import holders

SIZE = (2, 3, 40, 40)
pytestmark = pytest.mark.usefixtures("torchvision")  # which timm imports, and may have to be helped


def resnet(torchvision, norm=nn.BatchNorm2d):
    kinds = torchvision.models.resnet
    model = kinds.ResNet(kinds.BasicBlock, [1, 2, 1, 1], num_classes=5, norm_layer=norm)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.ndim == 1 and name.endswith(("weight", "bias")):
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def unchanged(model: nn.Module, **options) -> mssar.surgery.Plan:
    """Put in and taken out, the output stays what it was."""
    before, x = copy.deepcopy(model), torch.randn(SIZE)
    plan = mssar.insert(model, size=SIZE[1:], **options)
    for training in (False, True):
        assert torch.equal(seeded(model, x, training), seeded(before, x, training))
    mssar.remove(model)
    for training in (False, True):
        assert torch.equal(seeded(model, x, training), seeded(before, x, training))
    return plan


@pytest.mark.parametrize("kind", ["frozen", "group", "instance", "instance with scale", "own"])
def test_norms_of_other_kinds(torchvision, kind):
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) + 1  # which doubling its tensors does not double

    norm = {
        "frozen": torchvision.ops.FrozenBatchNorm2d,
        "group": partial(nn.GroupNorm, 8),
        "instance": nn.InstanceNorm2d,  # has nothing to double
        "instance with scale": partial(nn.InstanceNorm2d, affine=True),
        "own": Own,
    }[kind]
    plan = unchanged(resnet(torchvision, norm))
    assert len(plan.entries) == 5
    assert not any("shortcut" in entry.runs for entry in plan.entries)


def test_timm_freezes_norms(torchvision):
    timm = pytest.importorskip("timm")
    model = resnet(torchvision)
    timm.utils.freeze(model, ["layer1", "layer2.0"])
    assert type(model.layer1[0].bn2).__name__ == "FrozenBatchNorm2d"
    assert len(unchanged(model).entries) == 5


class Half(nn.Module):
    def forward(self, x):
        return x / 2


def test_tensors_that_are_made_anew_at_every_call(torchvision):
    model = resnet(torchvision)
    prune.random_unstructured(model.layer1[0].conv2, "weight", 0.5)
    assert [e.name for e in _insert(model, ["layer1.0.conv2"]).entries] == ["layer1.0.conv2"]
    model = resnet(torchvision)
    parametrize.register_parametrization(model.layer1[0].bn2, "weight", Half())
    assert len(_insert(model, "blocks").entries) == 5


def _insert(model: nn.Module, where) -> mssar.surgery.Plan:
    """Neither can be copied."""
    x = torch.randn(SIZE)
    before = seeded(model, x, False)
    plan = mssar.insert(model, where=where, size=SIZE[1:])
    assert torch.equal(seeded(model, x, False), before)
    return plan


def test_hooks_that_change_a_map(torchvision):
    model = resnet(torchvision)
    model.layer1[0].bn2.register_forward_hook(lambda _m, _i, y: y + 1)
    assert unchanged(model).names[0] == "layer1.0"


@pytest.mark.parametrize("name", ["timm convnext", "torchvision convnext"])
def test_hooks_that_change_what_is_wrapped(torchvision, name):
    model = build(name, torchvision)
    block = next(m for m in model.modules() if type(m).__name__ in ("ConvNeXtBlock", "CNBlock"))
    inside = block.mlp if name.startswith("timm") else block.block
    inside.register_forward_hook(lambda _m, _i, y: y + 0.1)
    unchanged(model)


@pytest.mark.parametrize(
    "name", ["timm densenet", "torchvision densenet", "torchvision resnet, basic"]
)
def test_norms_that_are_of_another_type_than_products(torchvision, name):
    """A block may begin with one."""
    model = build(name, torchvision).bfloat16().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    x = torch.randn(SIZE).bfloat16()
    before = model(x)
    mssar.insert(model)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_what_the_end_takes_apart_is_called_where_it_has_hooks(torchvision, library, late):
    if library == "timm":
        regnet = pytest.importorskip("timm").models.regnet
        model: nn.Module = regnet.Bottleneck(6, 6, group_size=3)
        hooked = [model.conv3]
    else:
        kind = torchvision.models.regnet.ResBottleneckBlock
        model = kind(6, 6, 1, nn.BatchNorm2d, nn.ReLU, group_width=3)
        hooked = [model.f, model.f.c]
    before, x, seen = copy.deepcopy(model), torch.randn(2, 6, 8, 8), []
    if late:
        mssar.insert(model, size=(6, 8, 8))
    for module in hooked:
        module.register_forward_hook(lambda m, _i, _y: seen.append(m))
    if not late:
        mssar.insert(model, size=(6, 8, 8))
    assert torch.equal(seeded(model, x, True), seeded(before, x, True))
    assert set(seen) == set(hooked)


@pytest.mark.parametrize("kind", ["LambdaLR", "LinearLR", "OneCycleLR"])
def test_beside_frozen_weights_a_schedule_holds_for_layers_too(torchvision, kind):
    model = resnet(torchvision).requires_grad_(False)
    groups = [{"params": [model.fc.weight]}, {"params": [model.fc.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
    options = {"LambdaLR": (lambda step: 0.5**step,), "LinearLR": (), "OneCycleLR": (0.3, 9)}[kind]
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, *options)
    model.fc.requires_grad_(True)
    mssar.insert(model, optimizer=optimizer)
    model(torch.randn(SIZE)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    assert {p for g in optimizer.param_groups for p in g["params"]} == {
        p for p in model.parameters() if p.requires_grad
    }
    for group, matrices in zip(optimizer.param_groups, (True, False), strict=True):
        assert all((p.ndim > 1) is matrices for p in group["params"])


def test_mobilenet_v4():
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv4_conv_small_050", num_classes=5)
    assert len(unchanged(model).entries) == 12


def test_bottlenecks_that_end_narrow_are_not_reduced():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        narrow, mixed, even = map(timm.create_model, ("regnetz_b16", "gernet_s", "resnet51q"))
    for model, hidden in (
        (narrow, {48: 16, 96: 32, 192: 64, 288: 96}),
        (mixed, {48: 16, 384: 8, 560: 186}),
        (even, {256: 5, 512: 10, 1536: 32}),  # some are as wide as their middle
    ):
        found = {e.channels: e.hidden for e in mssar.insert(model, dry_run=True).entries}
        assert {channels: found[channels] for channels in hidden} == hidden


def test_a_norm_that_does_not_say_its_channels_has_those_of_its_convolution():
    timm = pytest.importorskip("timm")
    model = timm.create_model("regnetz_c16_evos", num_classes=5)
    plan = unchanged(model)
    assert {e.channels for e in plan.entries} == {48, 96, 192, 288}


def test_a_shared_block_is_counted_as_often_as_it_is_called(torchvision):
    model = resnet(torchvision)
    model.layer1 = nn.Sequential(model.layer1[0], model.layer1[0])
    plain = mssar.cost(model, SIZE[1:])
    plan = mssar.insert(copy.deepcopy(model), size=SIZE[1:])
    unchanged(model)
    mssar.insert(model)
    assert plan.macs == mssar.cost(model, SIZE[1:]).macs - plain.macs


def test_what_others_use_too_is_not_doubled(torchvision):
    model = resnet(torchvision)
    model.layer1 = nn.Sequential(model.layer1[0], copy.deepcopy(model.layer1[0]))
    model.layer1[1].bn2 = model.layer1[0].bn2
    words = r"'layer1.0.bn2.weight' has another use, .*init='identity' would double"
    with pytest.raises(ValueError, match=words):
        mssar.insert(model)
    model.layer1[1].bn2 = copy.deepcopy(model.layer1[0].bn2)
    model.layer1[1].bn2.weight = model.layer1[0].bn2.weight
    with pytest.raises(ValueError, match=words):
        mssar.insert(model)
    unchanged(model, where="layer[234].*")
    kind = torchvision.models.mobilenetv2.InvertedResidual
    pair = nn.Sequential(kind(6, 6, 1, 2), kind(6, 6, 1, 2))
    pair[1].conv[3] = pair[0].conv[3]
    with pytest.raises(ValueError, match=r"'0.conv.3' and '1.conv.3' are one module"):
        mssar.insert(pair, size=(6, 8, 8))


def test_a_wrapper_within_is_found(unchecked, torchvision):
    model = nn.Sequential(nn.DataParallel(resnet(torchvision)))
    with pytest.raises(ValueError, match="before DataParallel wraps it"):
        unchecked.insert(model)


def test_maps_are_what_modules_say():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2)), nn.Flatten())
    with pytest.raises(ValueError, match="'0' makes 1×2×12×12, and no map of 8 channels"):
        mssar.insert(model, where=["0"], size=(3, 8, 8))
    model = nn.Sequential(nn.Flatten(), nn.GroupNorm(2, 192))
    with pytest.raises(ValueError, match="'1' makes 1×192, and no map of 192 channels"):
        mssar.insert(model, where=["1"], size=(3, 8, 8))


def test_a_size_that_the_network_does_not_take(torchvision):
    model = resnet(torchvision)
    plan = mssar.insert(model, size=(5, 32, 32), dry_run=True)
    assert plan.macs is None
    assert "not counted at 5×32×32: " in str(plan)
    with pytest.raises(ValueError, match="cannot be timed with 4×5×32×32: Given groups"):
        mssar.insert(model, size=(5, 32, 32), measure=True)


def test_other_colours_than_the_configuration_says():
    timm = pytest.importorskip("timm")
    plan = mssar.insert(timm.create_model("resnet10t", in_chans=1))
    assert plan.size == (1, 176, 176)
    assert plan.macs > 0


def test_squeezes_come_back_in_the_type_the_network_has():
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv3_small_050", num_classes=5)
    mssar.insert(model, where="se")
    mssar.remove(model.bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_squeezes_that_stayed_on_meta_do_not_come_back():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model("mobilenetv3_small_050", num_classes=5)
    plan = mssar.insert(model, where="se")
    assert len(holders(model.to_empty(device="cpu"))) == len(plan.entries)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="cannot be put back"):
        mssar.remove(model, optimizer)
    assert len(holders(model)) == len(plan.entries)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("wrong", [(None, None), ("model", "sgd")])
def test_removal_says_what_it_needs(unchecked, wrong):
    model, optimizer = wrong
    model = nn.Identity() if model else None
    with pytest.raises(ValueError, match=r"is a torch\.(nn\.Module|optim\.Optimizer); got"):
        unchecked.remove(model, optimizer)


def test_a_norm_of_ones_own_is_wrapped(torchvision):
    model = resnet(torchvision, nn.InstanceNorm2d)
    mssar.insert(model)
    assert isinstance(model.layer1[0].bn2, Recalibrated)
    assert model.layer1[0].bn2.gain == 2


def test_layer_norms_of_timm_that_act_too():
    """They say how many channels they make by the shape that they norm."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_efficientnet_ln", num_classes=5)
    assert [entry.channels for entry in unchanged(model).entries] == [24, 32, 48, 64]


def test_a_configuration_that_is_no_mapping_says_nothing_of_images(torchvision):
    model = resnet(torchvision)
    model.default_cfg = SimpleNamespace(input_size=(3, 64, 64))  # not timm's
    assert mssar.insert(model, dry_run=True).size == (3, 224, 224)
