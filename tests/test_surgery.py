"""MS-SAR put into networks of timm and torchvision, and taken out again."""

import copy
import io
import pickle

import pytest
import torch
from foreign import NAMES, build, seeded
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.surgery.ends import Holder

SIZE = (2, 3, 48, 48)


@pytest.fixture
def network(request, torchvision):
    return build(request.param, torchvision)


@pytest.fixture
def resnet(torchvision):
    """Of torchvision, with a basic block a stage."""
    return build("torchvision resnet, basic", torchvision)


def layers(model: nn.Module) -> list[mssar.MSSAR]:
    return [m for m in model.modules() if isinstance(m, mssar.MSSAR)]


def same(a: nn.Module, b: nn.Module) -> None:
    """Modules, names and numbers."""
    assert repr(a) == repr(b)
    assert [(n, type(m)) for n, m in a.named_modules()] == [
        (n, type(m)) for n, m in b.named_modules()
    ]
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for mine, other in zip(a.modules(), b.modules(), strict=True):
        assert mine.__dict__.keys() == other.__dict__.keys()


@pytest.mark.parametrize("network", NAMES, indirect=True)
def test_insertion_changes_nothing_and_removal_undoes_it(network):
    before, x = copy.deepcopy(network), torch.randn(SIZE)
    plan = mssar.insert(network)
    assert len(layers(network)) == len(plan.entries) > 0
    assert ("unfused" in str(plan)) is ("Dense" in str(plan))
    for training in (False, True):
        assert torch.equal(seeded(network, x, training), seeded(before, x, training))
    mssar.remove(network)
    same(network, before)


@pytest.mark.parametrize("network", NAMES, indirect=True)
def test_an_inserted_network_learns_and_is_saved_and_loaded(network, torchvision, request):
    mssar.insert(network)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    x = torch.randn(SIZE)
    for _ in range(2):
        optimizer.zero_grad()
        seeded(network, x, True).square().mean().backward()
        reached = [b.norm2.weight.grad for layer in layers(network) for b in layer.branches]
        assert all(grad.abs().sum() > 0 for grad in reached)  # from the first step on
        optimizer.step()
    assert all(b.reduce.weight.grad.abs().sum() > 0 for b in layers(network)[-1].branches)

    other = build(request.node.callspec.params["network"], torchvision)
    mssar.insert(other)
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(seeded(other, x, False), seeded(network, x, False))


@pytest.mark.parametrize("network", NAMES, indirect=True)
def test_the_second_time_is_refused(network):
    count = len(mssar.insert(network).entries)
    before = copy.deepcopy(network)
    kind = type(network).__name__
    with pytest.raises(
        ValueError, match=rf"put into this {kind} already \({count} layers.*mssar.remove"
    ):
        mssar.insert(network)
    same(network, before)


def test_a_copy_and_a_pickle_are_whole(resnet):
    mssar.insert(resnet)
    x, pristine = torch.randn(SIZE), copy.deepcopy(resnet)
    for twin in (pristine, pickle.loads(pickle.dumps(resnet))):
        assert torch.equal(seeded(twin, x, False), seeded(resnet, x, False))
        mssar.remove(twin)
        assert not layers(twin)
    assert len(layers(resnet)) == 4


def test_random_layers_change_the_output_and_leave_the_weights(resnet):
    before, x = copy.deepcopy(resnet), torch.randn(SIZE)
    mssar.insert(resnet, init="random")
    assert torch.equal(resnet.layer1[0].bn2.weight, before.layer1[0].bn2.weight)
    assert not torch.equal(seeded(resnet, x, False), seeded(before, x, False))
    mssar.remove(resnet)
    same(resnet, before)


def test_weights_from_before_are_doubled_when_they_are_loaded(torchvision):
    for name in ("torchvision resnet, basic", "torchvision mobilenet v2", "timm convnext"):
        before, other = build(name, torchvision), build(name, torchvision)
        mssar.insert(other)
        found = before.state_dict()
        with pytest.raises(RuntimeError, match=r"Missing key.*recalibrate"):
            other.load_state_dict(found)
        other.load_state_dict(found, strict=False)
        x = torch.randn(SIZE)
        assert torch.equal(seeded(other, x, False), seeded(before, x, False))


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("layer[34].*", ["layer3.0", "layer4.0"]),
        (["layer1.0", "layer4.*"], ["layer1.0", "layer4.0"]),
        ("*.bn2", [f"layer{i}.0.bn2" for i in (1, 2, 3, 4)]),
        (["conv1"], ["conv1"]),
        (lambda name, module: isinstance(module, nn.Sequential) and name[-1] == "2", ["layer2"]),
    ],
)
def test_where_names_modules(resnet, where, names):
    before, x = copy.deepcopy(resnet), torch.randn(SIZE)
    plan = mssar.insert(resnet, where=where)
    assert plan.names == names
    for training in (False, True):
        assert_close(seeded(resnet, x, training), seeded(before, x, training))
    mssar.remove(resnet)
    same(resnet, before)


def test_where_is_a_class_of_modules(resnet):
    norms = [name for name, module in resnet.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert mssar.insert(resnet, where=nn.BatchNorm2d).names == norms


def test_what_cannot_be_doubled_has_a_gain():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8), nn.SiLU()))
    before, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    mssar.insert(model, where=["1"])
    assert model[1].gain == 2
    assert "1.gain" in model.state_dict()
    assert torch.equal(seeded(model, x, True), seeded(before, x, True))
    mssar.remove(model)
    same(model, before)


def test_a_module_that_stands_in_two_places_is_exchanged_in_both():
    shared = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    mssar.insert(model, where=["0"])
    assert model[0] is model[2]
    assert isinstance(model[2], Holder)
    mssar.remove(model)
    assert model[0] is model[2] is shared


@pytest.mark.parametrize(
    "name", ["timm mobilenet v3", "torchvision efficientnet", "timm regnet, se", "timm senet"]
)
def test_squeezes_are_replaced_on_request(torchvision, name):
    model = build(name, torchvision)
    before, x = copy.deepcopy(model), torch.randn(SIZE)
    plain = mssar.cost(model, SIZE[1:])
    plan = mssar.insert(model, where="se", size=SIZE[1:])
    found = mssar.cost(model, SIZE[1:])
    assert (plan.params, plan.macs) == (found.params - plain.params, found.macs - plain.macs)
    assert len(plan.entries) == sum("Squeeze" in type(m).__name__ or "SEM" in type(m).__name__
                                    for m in before.modules())  # fmt: skip
    assert "the output changes" in str(plan)
    assert not any("Squeeze" in type(m).__name__ for m in model.modules())
    seeded(model, x, True).square().mean().backward()
    assert all(layer.branches[0].norm2.weight.grad.abs().sum() > 0 for layer in layers(model))
    mssar.remove(model)
    for module in before.modules():
        module.zero_grad()
    same(model.train(), _stepped(before, model))


def _stepped(model: nn.Module, like: nn.Module) -> nn.Module:
    """With the running statistics that a training step left in another."""
    model.load_state_dict({**model.state_dict(), **dict(like.named_buffers())})
    return model.train()


def test_a_dry_run_leaves_the_network_alone(resnet):
    before, drawn = copy.deepcopy(resnet), torch.random.get_rng_state()
    plan = mssar.insert(resnet, dry_run=True, measure=True, size=(3, 32, 32))
    same(resnet, before)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not plan.done
    assert "would go into ResNet" in str(plan)
    assert plan.after.step > 0
    assert "training step" in str(plan)


def test_a_frozen_network_is_measured_too(resnet):
    """Of its step there is no backward before the layers, which are trained, are in it."""
    plan = mssar.insert(resnet.requires_grad_(False), measure=True, size=(3, 32, 32))
    assert plan.before.step > 0
    assert plan.after.step > 0


@pytest.mark.parametrize("network", NAMES, indirect=True)
def test_the_plan_counts_what_the_network_then_costs(network):
    size = (3, 64, 64)
    plain = mssar.cost(network, size)
    plan = mssar.insert(network, size=size)
    found = mssar.cost(network, size)
    assert plan.params == found.recalibration_params == found.params - plain.params
    assert plan.macs == found.recalibration_macs == found.macs - plain.macs
    assert (plan.params_before, plan.macs_before) == (plain.params, plain.macs)


@pytest.mark.parametrize(
    ("model", "side"),
    [
        (lambda models: models.vgg11_bn(num_classes=10), 224),
        (lambda models: models.resnet18(num_classes=10), 224),
        (lambda _: mssar.create_model("resnet8"), 32),
        (lambda _: mssar.create_model("resnet18"), 224),
    ],
)
def test_multiply_adds_are_of_images_that_the_network_is_made_for(torchvision, model, side):
    with torch.device("meta"):
        plan = mssar.insert(model(torchvision.models), where=nn.BatchNorm2d, dry_run=True)
    assert plan.size == (3, side, side)


def test_reductions(torchvision):
    basic, wide = (build(f"torchvision {n}", torchvision) for n in ("resnet, basic", "resnext"))
    assert [e.hidden for e in mssar.insert(basic).entries] == [
        64 // 3,
        128 // 3,
        256 // 3,
        512 // 3,
    ]
    assert [e.hidden for e in mssar.insert(wide).entries] == [256 // 48, 512 // 48, 1024 // 48, 42]
    mssar.remove(wide)
    plan = mssar.insert(wide, (1, 2), reduction=4)
    assert [e.hidden for e in plan.entries] == [32, 64, 128, 256]  # C / 8
    assert all(layer.scales == (1, 2) for layer in layers(wide))


def test_layers_are_where_their_block_is_and_of_its_kind(resnet):
    resnet.layer4.double()
    resnet.layer3[0].bn2 = nn.SyncBatchNorm(256)
    resnet.layer2.eval()
    mssar.insert(resnet)
    made = layers(resnet)
    assert [next(layer.parameters()).dtype for layer in made] == [torch.float32] * 3 + [
        torch.float64
    ]
    assert [type(layer.branches[0].norm1) for layer in made] == [
        nn.BatchNorm2d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.BatchNorm2d,
    ]  # fmt: skip
    assert [layer.training for layer in made] == [True, False, True, True]


def test_an_optimiser_gains_the_parameters_beside_their_like(resnet):
    matrices = [p for p in resnet.parameters() if p.ndim > 1]
    vectors = [p for p in resnet.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mssar.insert(resnet, optimizer=optimizer)
    for group, dimensions in zip(optimizer.param_groups, (True, False), strict=True):
        assert all((p.ndim > 1) is dimensions for p in group["params"])
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(resnet.parameters())
    resnet(torch.randn(SIZE)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    mssar.remove(resnet, optimizer)
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(resnet.parameters())
    assert set(optimizer.state) == set(resnet.parameters())


def test_beside_frozen_weights_parameters_get_a_group_of_their_own(resnet):
    optimizer = torch.optim.SGD(resnet.fc.parameters(), 0.1)
    mssar.insert(resnet, optimizer=optimizer)
    assert set(optimizer.param_groups[1]["params"]) == {
        p for layer in layers(resnet) for p in layer.parameters()
    }
