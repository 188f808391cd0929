"""The paper's networks: what they are, where they are recalibrated, how they are asked for."""

import math
from functools import partial
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.networks import BasicBlock, Bottleneck, CifarResNet, DenseNet
from mssar.networks.densenet import DenseBlock
from mssar.networks.recalibration import RECALIBRATIONS
from mssar.options import OPTIONS, defaults
from mssar.scales import Nested, Separate

CIFAR = ("resnet8", "resnet20", "resnet32", "resnet56", "densenet100", "densenet190")
CHOICES = [
    pytest.param({"scales": (1, 2, 4)}, id="nested"),
    pytest.param({"scales": (2, 3)}, id="separate"),
    pytest.param({"scales": (1, 2), "strategy": "sliding"}, id="sliding"),
]


def randomise(network: nn.Module) -> None:
    """Statistics and affine parameters that a mistake would show in."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("resnet18", "resnet18"),
        ("resnet34", "resnet34"),
        ("resnet50", "resnet50"),
        ("resnext50", "resnext50_32x4d"),
    ],
)
def test_torchvision_weights_load_as_they_are(torchvision, ours, theirs):
    source = getattr(torchvision.models, theirs)().eval()
    randomise(source)
    network = mssar.create_model(ours).eval()
    network.load_state_dict(source.state_dict(), strict=True)
    x = torch.randn(2, 3, 96, 64)
    with torch.inference_mode():
        expected = source(x)
        assert_close(network(x), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.01, "logits that are all alike would agree with anything"


@pytest.mark.parametrize("stage", ["multi", "single"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", CHOICES)
def test_carried_pools_give_what_the_plain_definition_gives(options, train, stage):
    block = DenseBlock(4, 6, 5, partial(mssar.MSSAR, **options), stage).double().train(train)
    randomise(block)
    x = torch.randn(3, 6, 7, 8, dtype=torch.float64, requires_grad=True)
    carried = block(x)
    probe = torch.randn_like(carried)
    inputs = [x, *block.parameters()]
    gradients = torch.autograd.grad((carried * probe).sum(), inputs)

    plain = x
    for step in block.steps:  # the definition: new channels weighted by the whole main vector
        new = step.conv1(F.relu(step.norm1(plain)))
        new = step.conv2(F.relu(step.norm2(new)))
        context = (plain,) if stage == "multi" else ()
        plain = torch.cat((plain, step.recalibrate(new, *context)), 1)
    assert_close(carried, plain, atol=1e-11, rtol=0)
    expected = torch.autograd.grad((plain * probe).sum(), inputs)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("options", CHOICES)
def test_a_dense_step_pools_only_its_new_channels(options, monkeypatch):
    pooled = []
    for kind in (Nested, Separate):
        pool = kind.pool
        monkeypatch.setattr(
            kind, "pool", lambda self, x, pool=pool: (pooled.append(x.shape[1]), pool(self, x))[1]
        )
    block = DenseBlock(4, 6, 5, partial(mssar.MSSAR, **options), "multi")
    block(torch.randn(2, 6, 8, 8))
    assert pooled == [6, 5, 5, 5]  # the block's input once, then each step's k but the last's


class Zero(nn.Module):
    def forward(self, x, *_):
        return x * 0


@pytest.mark.parametrize(("kind", "inputs"), [(BasicBlock, 16), (Bottleneck, 256)])
def test_a_residual_block_recalibrates_before_the_addition(kind, inputs):
    block = kind(inputs, inputs // kind.expansion, 1, lambda _: Zero()).eval()
    x = torch.randn(2, inputs, 8, 8)
    assert_close(block(x), x.relu())  # nothing but the shortcut is left, and relu after it
    projecting = kind(inputs, inputs, 2, lambda _: Zero()).eval()
    assert_close(projecting(x), projecting.downsample(x).relu())


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_a_residual_block_recalibrates_after_its_last_norm(kind):
    block = kind(64, 64, 1, mssar.MSSAR).eval()
    randomise(block)
    x = torch.randn(2, 64, 8, 8)
    u = block.bn1(block.conv1(x)).relu()
    u = block.bn2(block.conv2(u))
    if kind is Bottleneck:
        u = block.bn3(block.conv3(u.relu()))
        assert block.recalibrate.channels == 256, "a bottleneck is recalibrated at full width"
    shortcut = x if block.downsample is None else block.downsample(x)
    assert_close(block(x), (u * block.recalibrate.importance(u) + shortcut).relu())


@pytest.mark.parametrize("stage", ["multi", "single"])
def test_a_dense_step_recalibrates_before_concatenation(stage):
    block = DenseBlock(2, 6, 5, lambda *_, **__: Zero(), stage).eval()
    x = torch.randn(2, 6, 8, 8)
    assert_close(block(x), F.pad(x, (0, 0, 0, 0, 0, 10)))


def test_convolutions_start_as_he_and_others_start_them():
    network = mssar.create_model("resnet34", num_classes=1000)
    wide = network.layer4[1].conv1.weight
    assert_close(wide.std().item(), math.sqrt(2 / (512 * 9)), rtol=0.02, atol=0)
    narrow = network.layer2[0].downsample[0].weight
    assert_close(narrow.std().item(), math.sqrt(2 / 128), rtol=0.05, atol=0)
    assert network.fc.bias.count_nonzero() == 0
    assert network.fc.weight.abs().max() <= 1 / math.sqrt(512)
    dense = DenseNet(40, 24)
    grown = dense.block3.steps[5].conv2.weight
    assert_close(grown.std().item(), math.sqrt(2 / (24 * 9)), rtol=0.05, atol=0)


def test_a_recalibration_keeps_its_own_initialisation():
    def ours(channels: int) -> nn.Module:
        layer = nn.Conv2d(channels, channels, 1)
        nn.init.constant_(layer.weight, 0.125)
        return layer

    network = mssar.create_model("resnet20", recalibration=ours)
    assert all(block.recalibrate.weight.eq(0.125).all() for block in network.layer2)


def test_list_models_names_the_papers_networks_and_two_more():
    expected = ["resnet8", "resnet20", "resnet32", "resnet56", "densenet100", "densenet190"]
    assert mssar.list_models() == [*expected, "resnet18", "resnet34", "resnet50", "resnext50"]


@pytest.mark.parametrize("recalibration", ["none", "se", "mssar"])
@pytest.mark.parametrize("name", mssar.list_models())
def test_every_network_classifies(name, recalibration):
    if name == "densenet190":  # 9 G multiply-adds an image: its shapes must be enough
        with torch.device("meta"):
            network = mssar.create_model(name, recalibration)
            assert network(torch.empty(2, 3, 32, 32)).shape == (2, 10)
        return
    network = mssar.create_model(name, recalibration).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.inference_mode():
        logits = network(x)
        assert logits.shape == (2, 10 if name in CIFAR else 1000)
        assert logits.isfinite().all()
        # Each image is judged by itself, and as the parts judge it.
        assert_close(network(x[:1]), logits[:1], atol=1e-9, rtol=1e-9)
        features = network.forward_features(x)
        assert features.shape[:2] == (2, network.num_features)
        assert_close(network.forward_head(features), logits)


@pytest.mark.parametrize("name", ["resnet20", "densenet100", "resnet18"])
def test_images_may_have_other_channels(name):
    three = mssar.create_model(name, "mssar").eval()
    one = mssar.create_model(name, "mssar", in_chans=1).eval()
    state = three.state_dict()
    state["conv1.weight"] = state["conv1.weight"].sum(1, keepdim=True)
    one.load_state_dict(state, strict=True)
    grey = torch.randn(2, 1, 32, 32)
    with torch.inference_mode():  # grey is all colours alike
        assert_close(one(grey), three(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet20", "densenet100", "resnext50"])
def test_the_head_can_be_left_out_and_replaced(name):
    x = torch.randn(2, 3, 32, 32)
    network = mssar.create_model(name, "mssar", num_classes=0).eval()
    with torch.inference_mode():
        pooled = network.forward_features(x).mean((2, 3))
        assert_close(network(x), pooled)
        assert_close(network.forward_head(network.forward_features(x), pre_logits=True), pooled)
        network.reset_classifier(7)
        assert_close(network(x), F.linear(pooled, network.fc.weight, network.fc.bias))
        assert network.get_classifier() is network.fc
        assert network.num_classes == network.fc.out_features == 7
        network.reset_classifier(0)
        assert_close(network(x), pooled)
    with pytest.raises(ValueError, match="got -1"):
        network.reset_classifier(-1)


def test_a_new_head_is_where_and_what_the_network_is():
    network = mssar.create_model("resnet20").to(torch.bfloat16)
    network.reset_classifier(3)
    assert network.fc.weight.dtype is torch.bfloat16


def test_se_is_ms_sar_at_scale_one():
    torch.manual_seed(1)
    se = mssar.create_model("resnet20", "se").eval()
    one = mssar.create_model("resnet20", "mssar", scales=(1,)).eval()
    one.load_state_dict(se.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert_close(se(x), one(x), rtol=0, atol=0)


def test_a_callable_recalibrates_any_network():
    asked = []

    def ours(channels: int) -> nn.Module:
        asked.append(channels)
        return nn.Identity()

    mssar.create_model("resnext50", recalibration=ours)
    assert asked == [256] * 3 + [512] * 4 + [1024] * 6 + [2048] * 3
    asked.clear()
    mssar.create_model("densenet100", recalibration=ours)
    assert asked == [12] * 48


@pytest.mark.parametrize("recalibration", ["mssar", mssar.MSSAR, partial(mssar.MSSAR, scales=(1,))])
def test_a_densenet_is_multi_stage_where_it_can_be(recalibration):
    with torch.device("meta"):
        multi = mssar.create_model("densenet100", recalibration)
        single = mssar.create_model("densenet100", recalibration, stage="single")
        asked = mssar.create_model("densenet100", nn.Identity)
    assert multi.block1.steps[2].recalibrate.context_channels == 24 + 2 * 12
    assert single.block1.steps[2].recalibrate.context_channels is None
    assert {network.block1.stage for network in (single, asked)} == {"single"}


@pytest.mark.parametrize("name", ["resnet50", "resnext50"])
def test_bottlenecks_reduce_by_sixteen_unless_told(name):
    with torch.device("meta"):
        found = [
            mssar.create_model(name, "mssar", **options).layer1[0].recalibrate.reduction
            for options in ({}, {"reduction": 4})
        ]
    assert found == [16, 4]


@pytest.mark.parametrize(
    ("name", "recalibration", "options", "message"),
    [
        ("resnet21", "none", {}, "no network 'resnet21'; there are resnet8"),
        ("resnet20", "senet", {}, "one of none, se, mssar, .*, or a callable .* got 'senet'"),
        ("resnet20", "none", {"scales": (1,)}, "no option 'scales'; its options: it has none"),
        ("resnet20", "none", {"backend": "triton"}, "no option 'backend'"),
        ("resnet20", "se", {"scales": (1,)}, "no option 'scales'; its options: reduction, backend"),
        ("resnet20", "mssar", {"stage": "multi"}, "has no option 'stage'"),
        ("densenet100", "none", {"stage": "multi"}, "has no option 'stage'"),
        ("densenet100", "mssar", {"stage": "both"}, "'multi' or 'single'; got 'both'"),
        ("densenet100", nn.ReLU, {"stage": "multi"}, "does not take context_channels"),
        ("resnet20", nn.Identity, {"reduction": 2}, "has no option 'reduction'"),
        ("resnet20", nn.Identity(), {}, r"callable from channels to a module; got Identity\(\)"),
        ("resnet20", lambda _: None, {}, "made NoneType for 16"),
        ("densenet100", lambda _: None, {}, "made NoneType for 12"),
        ("resnet20", "none", {"num_classes": 2.5}, "num_classes is 0 .* got 2.5"),
        ("resnet20", "none", {"num_classes": True}, "num_classes is 0 .* got True"),
        ("resnet20", "none", {"in_chans": 0}, "in_chans is a whole number of at least 1; got 0"),
        ("densenet100", "mssar", {"in_chans": 1.5}, "in_chans is a whole .* got 1.5"),
        ("resnet18", "none", {"in_chans": "RGB"}, "in_chans is a whole .* got 'RGB'"),
    ],
)
def test_what_cannot_be_built_is_said(unchecked, name, recalibration, options, message):
    with pytest.raises(ValueError, match=message):
        unchecked.create_model(name, recalibration, **options)


@pytest.mark.parametrize("depth", [8, 14, 44, 110])
def test_any_depth_of_6n_plus_2(depth):
    network = CifarResNet(depth)
    convolutions = [
        m for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)
    ]
    assert len(convolutions) + 1 == depth  # and the linear layer; projections do not count


def test_depths_that_do_not_fit_are_said():
    with pytest.raises(ValueError, match=r"6n\+2 layers.*got 21"):
        CifarResNet(21)
    with pytest.raises(ValueError, match=r"6n\+4 layers.*got 101"):
        DenseNet(101)


@pytest.mark.parametrize(
    "make", [partial(CifarResNet, 8), partial(DenseNet, 10, 12, stage="multi")]
)
def test_a_recalibrated_network_learns(make):
    network = make(recalibration=mssar.MSSAR)
    x, label = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(network(x), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 2, "an untrained network knows nothing"
    assert losses[-1] < 1, f"a few images are soon learnt by heart: {losses}"
    untouched = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert not untouched


def test_the_table_of_options_has_what_each_recalibration_takes_and_its_own_defaults():
    for name, option in OPTIONS.items():
        assert option.defaults.keys() <= RECALIBRATIONS.keys(), name
    for kind, factory in RECALIBRATIONS.items():
        own = signature(factory).parameters
        taken = defaults(kind, staged=False)
        for name, default in taken.items():
            assert own[name].default == default, (kind, name)
        if kind != "se":  # MS-SAR with one scale, whatever else it takes
            assert {name for name in OPTIONS if name in own} == taken.keys(), kind
