"""torch.fx: a layer is one node, a block's end is its steps, and all of it computes the same."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.testing import assert_close


def targets(traced: fx.GraphModule, op: str) -> list:
    return [node.target for node in traced.graph.nodes if node.op == op]


def assert_agree(network: nn.Module, traced: nn.Module, x: torch.Tensor) -> None:
    """In both modes, and after a step's statistics: the two share their modules."""
    for train in (True, False):
        network.train(train)
        traced.train(train)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        expected = network(x)
        network.load_state_dict(before)
        assert_close(traced(x), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options", [{}, {"scales": (2, 3)}, {"strategy": "sliding"}], ids=["nested", "other", "sliding"]
)
def test_a_layer_is_one_node(unchecked, options):
    layer = unchecked.MSSAR(6, **options).double()
    network = nn.Sequential(nn.Conv2d(3, 6, 3), layer, nn.ReLU()).double()
    traced = fx.symbolic_trace(network)
    assert targets(traced, "call_module") == ["0", "1", "2"]
    assert traced.get_submodule("1") is layer
    assert_agree(network, traced, torch.randn(2, 3, 9, 8, dtype=torch.float64))


def test_a_layer_by_itself(unchecked):
    layer, x = unchecked.MSSAR(6).double().eval(), torch.randn(2, 6, 7, 9, dtype=torch.float64)
    traced = fx.symbolic_trace(layer)
    assert not traced.training
    assert_agree(layer, traced, x)
    layer = unchecked.MSSAR(6, context_channels=5)
    traced = fx.symbolic_trace(layer)
    inputs = torch.randn(2, 6, 7, 9), torch.randn(2, 5, 7, 9)
    assert targets(traced, "placeholder") == ["x", "context"]
    assert_close(traced(*inputs), layer(*inputs))


def test_a_blocks_end_is_its_steps(unchecked):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.recalibrate = nn.BatchNorm2d(6), unchecked.MSSAR(6)

        def forward(self, x, y):
            return unchecked.tail(x, self.norm, self.recalibrate, y, "silu")

    block = Block()
    traced = fx.symbolic_trace(block)
    assert targets(traced, "call_module") == ["norm", "recalibrate"]
    assert targets(traced, "call_function") == [operator.add, F.silu]
    x, y = torch.randn(2, 2, 6, 7, 9)
    assert_close(traced(x, y), block(x, y))


@pytest.mark.parametrize("recalibration", ["none", "se", "mssar"])
@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50", "resnext50"])
def test_networks_are_traced(unchecked, name, recalibration):
    network = unchecked.create_model(name, recalibration, num_classes=5)
    traced = fx.symbolic_trace(network)
    layers = [n for n, m in network.named_modules() if isinstance(m, unchecked.MSSAR)]
    assert [t for t in targets(traced, "call_module") if t in layers] == layers
    if name in ("resnet20", "resnet18"):
        size = 16 if name == "resnet20" else 64
        assert_agree(network.double(), traced, torch.randn(2, 3, size, size).double())


@pytest.mark.parametrize("stage", ["multi", "single"])
def test_densenets_are_traced(unchecked, stage):
    network = unchecked.networks.DenseNet(
        16, 6, recalibration=unchecked.MSSAR, stage=stage
    ).double()
    traced = fx.symbolic_trace(network)
    found = [n for n in traced.graph.nodes if str(n.target).endswith("recalibrate")]
    assert len(found) == 6
    assert {len(node.args) for node in found} == {2 if stage == "multi" else 1}
    assert_agree(network, traced, torch.randn(3, 3, 12, 12).double())


@pytest.mark.usefixtures("torchvision")
def test_torchvision_extracts_features(unchecked):
    from torchvision.models.feature_extraction import create_feature_extractor

    network = unchecked.create_model("resnet8", "mssar").eval()
    wanted = {"layer1": "layer1", "layer2.0.recalibrate": "weighed", "layer3.0.conv2": "inside"}
    extractor = create_feature_extractor(network, wanted)
    kept = {}
    for name, key in wanted.items():
        network.get_submodule(name).register_forward_hook(
            lambda _, __, y, key=key: kept.__setitem__(key, y)
        )
    x = torch.randn(2, 3, 16, 16)
    network(x)
    found = extractor(x)
    assert found.keys() == kept.keys()
    for key, value in found.items():
        assert_close(value, kept[key])
