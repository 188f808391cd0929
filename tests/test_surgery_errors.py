"""What cannot be operated on is refused in one line, and left as it is."""

import copy

import pytest
import torch
from foreign import build
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import AveragedModel

KNOWN = (
    "it has no block of torchvision's or timm's ResNets.*where names the modules whose maps are "
)


@pytest.fixture
def mssar(unchecked):
    return unchecked


@pytest.fixture
def resnet(torchvision):
    return build("torchvision resnet, basic", torchvision)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"where": "layer9.*"}, r"no module is named 'layer9\.\*'; close to it: layer"),
        ({"where": ["layer1.0.bn3"]}, r"no module is named 'layer1\.0\.bn3'; .*layer1\.0\.bn2"),
        ({"where": ["avgpool"]}, "'avgpool': a AdaptiveAvgPool2d does not say how many channels"),
        ({"where": ["layer1.0", "layer1.0.bn2"]}, "'layer1.0.bn2' lies in 'layer1.0'; name one"),
        ({"where": []}, "where names no modules"),
        ({"where": lambda name, module: False}, "was true for none of the"),  # noqa: ARG005
        ({"where": lambda name, module: not name}, "name a module in it"),  # noqa: ARG005
        ({"where": lambda module: True}, r"as in lambda name, module: …; got one of \(module\)$"),  # noqa: ARG005
        ({"where": nn.GroupNorm}, "nothing to recalibrate: this ResNet has no GroupNorm$"),
        ({"where": int}, "a class of them, or a function of name and module; got the class int"),
        ({"where": 3}, "where is 'blocks', 'se', names of modules, a class .*got 3"),
        ({"where": [3]}, "got 3 among the names"),
        ({"where": "se"}, "nothing to replace in this ResNet: it has no SEModule"),
        ({"init": "zero"}, "init is 'identity' or 'random'; got 'zero'"),
        ({"optimizer": "sgd"}, "optimizer is a torch.optim.Optimizer; got str"),
        ({"reduction": "all"}, "reduction is a whole number of at least 1; got 'all'"),
        ({"scales": (2, 2)}, "scales are different whole numbers"),
        ({"size": (3, 64)}, r"size is C, H, W of one image.*\(3, 64\)"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_what_is_asked_for_wrongly(mssar, resnet, options, words):
    before = copy.deepcopy(resnet)
    with pytest.raises(ValueError, match=words) as error:
        mssar.insert(resnet, **options)
    assert "\n" not in str(error.value)
    assert repr(resnet) == repr(before)
    assert all(
        torch.equal(a, b) for a, b in zip(resnet.parameters(), before.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("dla34", "DlaTree, DlaBasic, DlaRoot"), ("repvgg_a0", "RepVggBlock"), ("vgg11", "ConvMlp")],
)
def test_blocks_that_are_not_known_are_named(mssar, name, kinds):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=f"it has {kinds}, and no block of .*where='") as error:
        mssar.insert(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "module",
    [nn.Conv1d(3, 8, 1), nn.Conv3d(3, 8, 1), nn.BatchNorm1d(8), nn.ConvTranspose3d(3, 8, 1)],
)
@pytest.mark.parametrize("around", [lambda m: m, lambda m: nn.Sequential(nn.ReLU(), m)])
def test_what_makes_no_maps_is_refused(mssar, module, around):
    words = f"^'0': a {type(module).__name__} makes no map N C H W, which the layer takes$"
    with pytest.raises(ValueError, match=words):
        mssar.insert(nn.Sequential(around(module)), where=["0"])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
def test_what_may_be_quantised_is_not_yet(mssar, torchvision):
    model = torchvision.models.quantization.resnet18(num_classes=2, quantize=False)
    with pytest.raises(ValueError, match="this QuantizableResNet: it has QuantizableBasicBlock"):
        mssar.insert(model)
    assert len(mssar.insert(model, where="*.bn2").entries) == 8


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.* are deprecated:UserWarning")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda _: None, "model is a torch.nn.Module; got NoneType"),
        (lambda _: Plain(), f"nothing to recalibrate in this Plain: {KNOWN}meant$"),
        (
            lambda _: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            f"nothing to recalibrate in this Sequential: {KNOWN}meant, as in where='1'$",
        ),
        (
            lambda _: nn.Sequential(  # rather than a gate, or what classifies
                nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1)
            ),
            f"nothing to recalibrate in this Sequential: {KNOWN}meant, as in where='0'$",
        ),
        (torch.compile, "insert into the network before OptimizedModule wraps it"),
        (nn.DataParallel, "insert into the network before DataParallel wraps it"),
        (AveragedModel, "insert into the network before AveragedModel wraps it"),
        (torch.fx.symbolic_trace, "a ResNet is a traced network; insert into the one it was"),
        (lambda net: torch.jit.trace(net.eval(), torch.randn(1, 3, 32, 32)), "a traced network"),
        (lambda _: nn.Sequential(nn.LazyConv2d(4, 1)), "'0' is not initialised yet"),
        (
            lambda _: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2))),
            "'0' is a quantised Linear: insert before that",
        ),
    ],
)
def test_networks_that_are_no_networks_any_more(mssar, resnet, model, words):
    made = model(resnet)
    with pytest.raises(ValueError, match=words) as error:
        mssar.insert(made)
    assert "\n" not in str(error.value)


def test_what_has_no_numbers_takes_no_time(mssar, torchvision):
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    with pytest.raises(ValueError, match=r"^measure=True needs a network with numbers; this one"):
        mssar.insert(model, measure=True)
    assert len(mssar.insert(model).entries) == 8  # nothing was changed before, and it can be


def test_a_size_of_another_order_says_so(mssar, torchvision):
    model = torchvision.models.resnet18(num_classes=2)
    assert "(size is C, H, W of an image)" in str(mssar.insert(model, size=(32, 32, 3)))


def test_what_has_it_by_birth(mssar):
    with pytest.raises(ValueError, match=r"was made with 3 MSSAR in it, the first 'layer1.0.recal"):
        mssar.insert(mssar.create_model("resnet8", "mssar"))


@pytest.mark.parametrize("name", ["resnet8", "densenet100"])
def test_what_has_another_recalibration_in_the_layers_place(mssar, name):
    net = mssar.create_model(name, "simam")
    with pytest.raises(
        ValueError, match=r"'(layer1\.0|block1\.steps\.0)' was made with a .* SimAM"
    ):
        mssar.insert(net)
    assert any(type(module).__name__ == "SimAM" for module in net.modules())


def test_nothing_to_remove(mssar, resnet):
    with pytest.raises(ValueError, match="nothing was inserted into this ResNet"):
        mssar.remove(resnet)


def test_an_optimiser_of_another_network(mssar, resnet):
    """As that of the network which this one is a copy of."""
    before = copy.deepcopy(resnet.state_dict())
    optimizer = torch.optim.SGD(copy.deepcopy(resnet).parameters(), 0.1)
    with pytest.raises(ValueError, match="optimizer has none of this network's parameters: pass"):
        mssar.insert(resnet, optimizer=optimizer)
    assert len(optimizer.param_groups) == 1
    assert resnet.state_dict().keys() == before.keys()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_an_optimiser_of_matrices_alone(mssar, resnet):
    """It took the layers, and failed at its next step."""
    before = copy.deepcopy(resnet.state_dict())
    optimizer = torch.optim.Muon([resnet.fc.weight])
    for _ in range(2):
        with pytest.raises(ValueError, match="torch's Muon takes matrices alone, and layers have"):
            mssar.insert(resnet, optimizer=optimizer)
        resnet.requires_grad_(False)  # where the layers are all that is trained
    resnet.requires_grad_(True)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    assert resnet.state_dict().keys() == before.keys()
    mssar.insert(resnet, optimizer=torch.optim.SGD(list(resnet.parameters())[:-2], 0.1))


@pytest.mark.parametrize("where", ["blocks", "layer3.*", "layer3.0"])
def test_a_block_that_is_not_as_it_was_is_named(mssar, resnet, where):
    resnet.layer3[0].bn2 = nn.BatchNorm1d(256)
    with pytest.raises(ValueError, match=r"^'layer3\.0': a BatchNorm1d makes no map N C H W"):
        mssar.insert(resnet, where=where)


def test_a_norm_that_does_not_say_its_channels_has_those_before_it(mssar, torchvision):
    """As an EvoNorm, or what stands for a norm that is gone."""
    model = torchvision.models.resnet18(norm_layer=lambda _: nn.Identity()).eval()
    x = torch.randn(1, 3, 64, 64)
    before = model(x)
    assert {entry.channels for entry in mssar.insert(model).entries} == {64, 128, 256, 512}
    assert torch.equal(model(x), before)


def test_what_was_fused_since_is_not_half_removed(mssar, resnet):
    mssar.insert(resnet.eval())
    block = resnet.layer3[0]
    block.conv2 = fuse_conv_bn_eval(block.conv2, block.bn2)
    block.bn2 = nn.Identity()
    before = {name: t.clone() for name, t in resnet.state_dict().items()}
    words = r"^'layer3\.0' has no longer the bn2.weight and bn2.bias that insert doubled"
    with pytest.raises(ValueError, match=words) as error:
        mssar.remove(resnet)
    assert "\n" not in str(error.value)
    after = resnet.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_changed_or_trained_is_left_alone(mssar, torchvision):
    with torch.inference_mode():
        made = build("torchvision resnet, basic", torchvision)
        with pytest.raises(ValueError, match=r"'conv1\.weight' was made under torch\.infer"):
            mssar.insert(made)
    trained = torch.optim.SGD(made.parameters(), 0.1)
    state, before = copy.deepcopy(made.state_dict()), repr(made)
    with pytest.raises(
        ValueError, match=r"insert into copy\.deepcopy\(model\), made outside"
    ) as error:
        mssar.insert(made, optimizer=trained)
    assert "\n" not in str(error.value)
    assert repr(made) == before
    assert len(trained.param_groups[0]["params"]) == len(list(made.parameters()))
    assert all(torch.equal(tensor, state[name]) for name, tensor in made.state_dict().items())
    usual = copy.deepcopy(made)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"^insert outside torch\.inference_mode"),
    ):
        mssar.insert(usual)
    mssar.insert(usual)
    assert not any(p.is_inference() for p in usual.parameters())


def test_what_a_state_dict_has_besides_tensors_is_no_hindrance(mssar, resnet):
    class Noting(nn.Identity):
        def get_extra_state(self):
            return {"made": "by hand"}

        def set_extra_state(self, state):
            assert state == {"made": "by hand"}

    resnet.note = Noting()
    assert mssar.insert(resnet).done


def test_a_long_reason_ends_at_a_word(mssar):
    class Dreary(nn.Sequential):
        def forward(self, x):
            raise RuntimeError("something " * 40 + "\nelse" + str(x))

    said = str(mssar.insert(Dreary(nn.Conv2d(3, 8, 1)), where="0", dry_run=True))
    reason = said.partition("not counted at ")[2].partition(": ")[2]
    assert reason == "something " * 19 + "…"
