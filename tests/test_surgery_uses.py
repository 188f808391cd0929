"""What people do with a network after MS-SAR was put into it."""

import copy

import pytest
import torch
import torch.distributed as dist
from foreign import NAMES, build, seeded
from tails import DEVICE, EVALUATED, TRAINED, Launched
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import mssar

SMALL = (2, 3, 32, 32)


def block(name: str, torchvision) -> nn.Module:
    """A library's own, at a width that the interpreter gets through."""
    if name == "torchvision basic":
        return torchvision.models.resnet.BasicBlock(6, 6)
    if name == "torchvision bottleneck":
        return torchvision.models.resnet.Bottleneck(12, 3)
    if name == "torchvision regnet":
        kind = torchvision.models.regnet.ResBottleneckBlock
        return kind(6, 6, 1, nn.BatchNorm2d, nn.ReLU, group_width=3)
    pytest.importorskip("timm")
    from timm.layers import DropPath
    from timm.models import regnet, resnet

    return {
        "timm basic": lambda: resnet.BasicBlock(6, 6, act_layer=nn.SiLU),
        "timm drop path": lambda: resnet.BasicBlock(6, 6, drop_path=DropPath(0.5)),
        "timm bottleneck": lambda: resnet.Bottleneck(12, 3, act_layer=nn.Hardswish),
        "timm regnet": lambda: regnet.Bottleneck(6, 6, group_size=3),
    }[name]()


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    "name",
    [
        "torchvision basic", "torchvision bottleneck", "torchvision regnet", "timm basic",
        "timm bottleneck", "timm regnet", "timm drop path",
    ],
)  # fmt: skip
def test_residual_blocks_take_the_fused_tail(torchvision, name):
    pytest.importorskip("triton")
    model = block(name, torchvision).to(DEVICE)
    width = 12 if "bottleneck" in name else 6
    x = torch.randn(2, width, 5, 6, device=DEVICE)
    mssar.insert(model, (1, 2), reduction=1, init="random", backend="triton", size=(width, 5, 6))
    plain = copy.deepcopy(model)
    plain.recalibrate.backend = "reference"
    for training, ops in ((True, TRAINED), (False, EVALUATED)):
        with Launched() as names:
            ours = seeded(model, x, training)
        assert names == ops
        theirs = seeded(plain, x, training)
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("exact_products")
def test_the_kernels_leave_the_output_unchanged_too(torchvision):
    pytest.importorskip("triton")
    model = block("torchvision basic", torchvision).to(DEVICE)
    before, x = copy.deepcopy(model), torch.randn(2, 6, 5, 6, device=DEVICE)
    mssar.insert(model, backend="triton", size=(6, 5, 6))
    for training in (False, True):
        found = seeded(model, x, training)
        assert_close(found, seeded(before, x, training), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_compiled(unchecked, torchvision, training):
    kinds = torchvision.models
    model = nn.Sequential(
        kinds.resnet.BasicBlock(6, 6), kinds.mobilenetv2.InvertedResidual(6, 6, 1, 2)
    )
    unchecked.insert(model, size=(6, 8, 8))
    x = torch.randn(2, 6, 8, 8)
    expected = seeded(model, x, training)
    assert_close(
        seeded(torch.compile(model, backend="eager", fullgraph=True), x, training), expected
    )


# One of each kind: what drops, has SE or is a variant of another is no other program.
EXPORTED = [n for n in NAMES if n not in {"timm resnet, drop path", "timm regnet, se",
                                          "timm resnet v2, basic", "timm resnet v2, norms last",
                                          "timm sknet, bottleneck", "timm senet, bottleneck",
                                          "timm convnext, convolutions"}]  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_exported(unchecked, torchvision, name):
    model = build(name, torchvision).eval()
    unchecked.insert(model)
    x = torch.randn(SMALL)
    program = torch.export.export(model, (x,), strict=False)
    assert not any("mssar" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(SMALL)
    assert_close(program.module()(x), model(x))


@pytest.mark.parametrize(
    "name", ["torchvision resnet, basic", "timm mobilenet v3", "timm densenet"]
)
def test_traced_by_fx(unchecked, torchvision, name):
    model = build(name, torchvision)
    before = torch.fx.symbolic_trace(copy.deepcopy(model))
    unchecked.insert(model)
    traced, x = torch.fx.symbolic_trace(model), torch.randn(SMALL)
    for training in (False, True):
        assert_close(seeded(traced, x, training), seeded(before, x, training))
    layers = [n for n in traced.graph.nodes if str(n.target).endswith("recalibrate")]
    assert len(layers) == sum(isinstance(m, unchecked.MSSAR) for m in model.modules())


def test_features_by_name(unchecked, torchvision):
    from torchvision.models.feature_extraction import create_feature_extractor

    model = build("torchvision resnet, basic", torchvision).eval()
    unchecked.insert(model)
    x, seen = torch.randn(SMALL), []
    model.layer2.register_forward_hook(lambda _m, _i, y: seen.append(y))
    model(x)
    found = create_feature_extractor(model, ["layer2", "layer2.0.recalibrate"])(x)
    assert_close(found["layer2"], seen[0])
    assert found["layer2.0.recalibrate"].shape == seen[0].shape


def test_gradient_checkpoints_and_averages(torchvision):
    timm = pytest.importorskip("timm")
    model = build("timm resnet, basic", torchvision)
    mssar.insert(model)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    x = torch.randn(SMALL)
    plain = copy.deepcopy(model)
    model.set_grad_checkpointing(True)
    seeded(model, x, True).square().mean().backward()
    seeded(plain, x, True).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad)
    first = model.layer1[0].recalibrate.branches[0].norm2
    with torch.no_grad():
        first.bias += 1
    ema.update(model)
    assert_close(ema.module.layer1[0].recalibrate.branches[0].norm2.bias, first.bias / 2)


def test_distributed(torchvision, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = build("torchvision resnet, basic", torchvision)
        mssar.insert(model)
        plain, x = copy.deepcopy(model), torch.randn(SMALL)
        seeded(DistributedDataParallel(model), x, True).square().mean().backward()
        seeded(plain, x, True).square().mean().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad, other.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["timm resnet, bottleneck", "timm mobilenet v2"])
def test_autocast_and_half(torchvision, name):
    model = build(name, torchvision)
    before, x = copy.deepcopy(model), torch.randn(SMALL)
    mssar.insert(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seeded(model, x, False), seeded(before, x, False))
    model, before, x = model.bfloat16(), before.bfloat16(), x.bfloat16()
    assert torch.equal(seeded(model, x, False), seeded(before, x, False))


def test_synchronised_norms_are_made_of_all_norms(torchvision):
    model = build("torchvision mobilenet v2", torchvision)
    mssar.insert(model)
    kept = {name for name, m in model.named_modules() if isinstance(m, mssar.MSSAR)}
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert {name for name, m in model.named_modules() if isinstance(m, mssar.MSSAR)} == kept
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert all(type(m) is nn.SyncBatchNorm for m in norms)


def test_an_explanation(torchvision):
    model = build("torchvision resnet, basic", torchvision)
    mssar.insert(model)
    found = mssar.explain(model, torch.randn(SMALL))
    assert [block.name for block in found.blocks] == [
        f"layer{i}.0.recalibrate" for i in (1, 2, 3, 4)
    ]
    assert all(torch.equal(block.z, torch.full_like(block.z, 0.5)) for block in found.blocks)


def test_a_detector_keeps_its_anchors(torchvision):
    # It has them in a plain attribute, where counting multiply-adds had left some without numbers.
    detection = torchvision.models.detection
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4), torchvision.models.resnet.BasicBlock(8, 8))
    backbone.out_channels = 8
    anchors = detection.anchor_utils.AnchorGenerator(((16,),), ((0.5, 1.0),))
    model = detection.RetinaNet(backbone, 3, 64, 64, anchor_generator=anchors)
    images, target = torch.rand(2, 3, 64, 64), {"boxes": torch.tensor([[9.0, 9.0, 40.0, 30.0]])}
    targets = [target | {"labels": torch.tensor([label])} for label in (1, 2)]
    before = model(list(images), targets)
    plan = mssar.insert(model)
    assert plan.names == ["backbone.1"]
    assert model(list(images), targets) == before
