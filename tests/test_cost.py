"""Parameters and multiply-adds, held against exact counts and the paper's."""

import copy
import importlib
import threading

import numpy as np
import pytest
import torch
from torch import nn

import mssar
from mssar.lab.experiments import paper
from mssar.networks.registry import architecture


def build(name, recalibration="none", num_classes=None, **options):
    with torch.device("meta"):
        return mssar.create_model(name, recalibration, num_classes, **options)


def cost_of(name, *arguments, **options):
    return mssar.cost(build(name, *arguments, **options), architecture(name).size)


@pytest.mark.parametrize(
    ("params", "name", "arguments", "options"),
    [
        (272_474, "resnet20", (), {}),
        (466_906, "resnet32", (), {}),
        (855_770, "resnet56", (), {}),
        (306_530, "resnet20", ("mssar",), {}),
        (284_768, "resnet20", ("mssar",), {"reduction": 3}),
        (769_162, "densenet100", (), {}),
        (800_032, "densenet100", ("none", 100), {}),
        (25_624_430, "densenet190", (), {}),
        (11_689_512, "resnet18", (), {}),
        (21_797_672, "resnet34", (), {}),
        (25_557_032, "resnet50", (), {}),
        (25_028_904, "resnext50", (), {}),
    ],
)
def test_parameters_are_exact(params, name, arguments, options):
    found = cost_of(name, *arguments, **options)
    assert found.params == params
    assert sum(p.numel() for p in build(name, *arguments, **options).parameters()) == params


@pytest.mark.parametrize("row", [r for r in paper.TABLE4 if r.network == "resnet56"])
def test_resnet_multiply_adds_fit_the_ablation_at_reduction_3(row):
    options = {} if row.recalibration == "none" else {"reduction": 3, **row.options}
    assert cost_of("resnet56", row.recalibration, **options).macs == pytest.approx(
        row.macs, abs=0.1e6
    )


@pytest.mark.parametrize("row", [r for r in paper.TABLE4 if r.network == "densenet100"])
def test_densenet_multiply_adds_fit_the_ablation_without_transitions(row):
    found = cost_of("densenet100", row.recalibration, **row.options)
    transitions = found["transition1"].macs + found["transition2"].macs
    assert found.macs - transitions == pytest.approx(row.macs, abs=0.2e6)
    assert transitions == 216 * 108 * 32**2 + 300 * 150 * 16**2


def test_the_papers_baselines():
    assert cost_of("resnet20").macs == 40_813_184
    assert cost_of("resnet32").macs == pytest.approx(69.1e6, abs=0.05e6)
    assert cost_of("resnet56").macs == pytest.approx(125.7e6, abs=0.05e6)
    assert cost_of("densenet100").macs == pytest.approx(287.9e6, abs=0.05e6)
    assert cost_of("densenet190").macs == pytest.approx(9.30e9, abs=0.005e9)
    assert cost_of("resnet18").macs == pytest.approx(1.81e9, abs=0.005e9)
    assert cost_of("resnet34").macs == pytest.approx(3.66e9, abs=0.005e9)


def test_the_recalibrations_share_is_the_difference():
    for name, options in (("resnet20", {"scales": (1, 4)}), ("densenet100", {"stage": "single"})):
        plain, with_it = cost_of(name), cost_of(name, "mssar", **options)
        assert with_it.recalibration_params == with_it.params - plain.params > 0
        assert with_it.recalibration_macs == with_it.macs - plain.macs > 0
        assert plain.recalibration_params == plain.recalibration_macs == 0


def test_the_formulas_of_the_method():
    layer = nn.Sequential(mssar.MSSAR(48, scales=(1, 2, 4)))
    found = mssar.cost(layer, (48, 16, 16))
    hidden = 16
    assert found.macs == 2 * 48 * hidden * (1 + 4 + 16)
    assert found.params == 3 * (2 * 48 * hidden + 2 * hidden + 2 * 48)
    sliding = mssar.cost(nn.Sequential(mssar.MSSAR(48, strategy="sliding")), (48, 16, 16))
    assert sliding.macs == 3 * 2 * 48 * hidden * 16 * 16


def test_modules_add_up():
    found = cost_of("resnet20", "mssar")
    top = [entry for entry in found.modules if "." not in entry.name]
    assert sum(e.params for e in top) == found.params
    assert sum(e.macs for e in top) == found.macs
    assert found["conv1"].macs == 3 * 16 * 9 * 32 * 32
    assert found["layer2.0.downsample.0"].params == 16 * 32
    with pytest.raises(KeyError, match="no module 'conv9'"):
        found["conv9"]
    shown = str(found)
    assert "layer3.2.recalibrate" in shown
    assert "layer3.2.conv1" not in shown
    assert shown.splitlines()[-1].split() == ["total", "306,530", "41,032,928"]


class Own(nn.Module):
    """A stranger's network, with the layer twice inside another module."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.recalibrate = nn.Sequential(mssar.MSSAR(8), mssar.MSSAR(8, scales=(1,)))

    def forward(self, x):
        return self.recalibrate(self.body(x))


def test_a_recalibration_within_another_counts_once():
    found = mssar.cost(Own(), (3, 10, 10))
    assert found.recalibration_params == found["recalibrate"].params
    assert found.params == found.recalibration_params + found["body"].params
    assert found["body"].macs == 3 * 8 * 9 * 8 * 8


def test_a_layer_alone_is_all_recalibration():
    found = mssar.cost(mssar.MSSAR(6), (6, 8, 8))
    assert found.recalibration_params == found.params == 3 * (2 * 6 * 2 + 2 * 2 + 2 * 6)
    assert found.recalibration_macs == found.macs == 2 * 6 * 2 * 21


def test_a_network_is_left_as_it_was():
    network = mssar.create_model("resnet20", "mssar")
    network.layer1.eval()
    before = copy.deepcopy(network.state_dict())
    modes = {name: m.training for name, m in network.named_modules()}
    mssar.cost(network, (3, 32, 32))
    assert {name: m.training for name, m in network.named_modules()} == modes
    assert network.state_dict().keys() == before.keys()
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])
    assert network.bfloat16().conv1.weight.dtype is torch.bfloat16
    assert mssar.cost(network, (3, 32, 32)).macs == 41_032_928


def test_a_network_that_fails_is_left_as_it_was_too(unchecked):
    network = unchecked.create_model("resnet20")
    with pytest.raises(RuntimeError, match="channel"):
        unchecked.cost(network, (4, 32, 32))
    assert network.training
    assert network.conv1.weight.device.type == "cpu"


class Remembering(nn.Module):
    """As a detector keeps its anchors: what it made for the last image, in plain attributes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.anchors, self.images = torch.ones(()), 0
        self.maps, self.by_size = [], {"none": None}

    def forward(self, x):
        self.anchors, self.images = self.anchors.to(x.device), self.images + len(x)
        y = self.by_size[x.shape] = self.conv(x) * self.anchors
        self.maps.append(y)
        return y


def test_what_a_network_writes_down_of_an_image_without_numbers_is_gone():
    network = Remembering()
    maps, by_size = network.maps, network.by_size
    assert mssar.cost(network, (3, 2, 2)).macs == 48
    assert network.anchors.device.type == "cpu"
    assert network.images == 0
    assert network.maps is maps
    assert network.by_size is by_size
    assert maps == []
    assert by_size == {"none": None}
    network(torch.randn(2, 3, 5, 5))
    assert network.images == 2
    assert [y.device.type for y in network.maps] == ["cpu"]
    assert torch.is_tensor(by_size[2, 3, 5, 5])


@pytest.mark.parametrize(
    "size",
    [
        (3, 32),
        (3, 0, 32),
        (1, 3, 32, 32),
        32,
        None,
        "332",
        (3, 32.0, 32),
        (3, None, 32),
        (3, True, 9),
    ],
)
def test_a_size_is_one_image(unchecked, size):
    with pytest.raises(ValueError, match="C, H, W of one image"):
        unchecked.cost(nn.Conv2d(3, 3, 1), size)


def test_an_image_is_no_size(unchecked):
    for image in (torch.zeros(1, 3, 8, 8), np.zeros((1, 3, 8, 8))):
        words = rf"got a {type(image).__name__} of shape \(1, 3, 8, 8\)$"
        with pytest.raises(ValueError, match=words) as error:
            unchecked.cost(nn.Conv2d(3, 3, 1), image)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="such as") as error:
        unchecked.cost(nn.Conv2d(3, 3, 1), [torch.zeros(9, 9)])
    assert "\n" not in str(error.value)


def test_what_is_no_network_is_not_counted(unchecked):
    for wrong, kind in ((None, "NoneType"), ("resnet20", "str"), (nn.Conv2d, "type")):
        with pytest.raises(ValueError, match=f"^cost counts a module; got {kind}$"):
            unchecked.cost(wrong)
    sizes = (3, 4, 5), [3, 4, 5], torch.Size((3, 4, 5)), tuple(np.array([3, 4, 5]))
    assert {unchecked.cost(nn.Conv2d(3, 2, 1), size).macs for size in sizes} == {120}


def test_shared_modules_and_tensors_keep_their_numbers():
    shared, tied = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, bias=False)
    tied.weight = shared.weight
    model = nn.Sequential(shared, nn.BatchNorm2d(4), shared, tied)
    model.append(model[1])
    before = copy.deepcopy(model.state_dict())
    assert mssar.cost(model, (4, 5, 5)).macs == 3 * 16 * 25
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Within(nn.Module):
    """In whose midst another network of its kind runs in another thread."""

    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.others = nn.Conv2d(3, 4, 1), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.others[0] is not None:
            image = torch.ones(1, 3, 2, 2)
            thread = threading.Thread(target=lambda: self.others[0](image).sum().backward())
            thread.start()
            thread.join()
        return self.conv(x)


def test_networks_in_other_threads_are_not_counted():
    """Nor do they take a module for one that was left: runs are trained side by side."""
    plain = nn.Sequential(Within(), nn.Conv2d(4, 5, 1))
    alone = mssar.cost(plain, (3, 6, 7))
    assert [e.macs for e in alone.modules] == [12 * 42, 12 * 42, 20 * 42]
    beside = mssar.cost(nn.Sequential(Within(plain), nn.Conv2d(4, 5, 1)), (3, 6, 7))
    assert beside == alone
    assert plain[1].weight.grad is not None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.slow
def test_the_comparison_holds_every_published_count():
    # Without the shape checks, which would double its half minute.
    rows = importlib.import_module("mssar.lab.experiments.counts").compare()
    published = (*paper.TABLE3, *paper.TABLE4, *paper.ILSVRC2012)
    assert {(r.network, r.recalibration) for r in rows} == {
        (r.network, r.recalibration) for r in published
    }
    twice = [r for r in published if r.recalibration == "mssar" and r.network[:7] != "densene"]
    twice = [r for r in twice if architecture(r.network).size[1] == 32]
    assert len(rows) == len(published) + len(twice)
    # Where nothing is remarked, published and own numbers agree to the last digit printed.
    silent = [row for row in rows if not row.remark]
    assert silent
    for row in silent:
        assert abs(row.params.difference) < 0.01e6
        assert abs(row.macs.difference) < 0.05e6
    # What the paper counted for its ResNets is reduction 3, cut off at two digits.
    for row in rows:
        if row.table == "3" and row.reduction == 3:
            assert 0 <= row.params.difference < 0.01e6
    far = [row for row in rows if row.macs.difference and abs(row.macs.difference) > 0.1e9]
    assert {row.network for row in far} == {"resnext50"}
    assert all("ResNet-50" in row.remark or "3.86 G" in row.remark for row in far)


def test_the_published_numbers_are_as_printed():
    by_name = {(r.network, r.recalibration): r for r in paper.TABLE3}
    assert by_name["resnet56", "mssar"].errors == {"cifar10": 6.04, "cifar100": 27.71}
    assert by_name["densenet190", "mssar"].params == 32.7e6
    assert len(paper.TABLE3) == 10
    assert len(paper.TABLE4) == 16
    assert len(paper.ILSVRC2012) == 9
    # The three scales together are the best of each column, as the paper says of its table.
    for network in ("resnet56", "densenet100"):
        rows = [r for r in paper.TABLE4 if r.network == network]
        for data in ("cifar10", "cifar100"):
            assert min(rows, key=lambda r: r.errors[data]).options == {"scales": (1, 2, 4)}
