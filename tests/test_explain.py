"""The importance that a network's layers give, against the layers themselves."""

import copy
import sys
from itertools import pairwise

import pytest
import torch
from lab import assert_same
from torch import nn

import mssar
from mssar import mosaic
from mssar.explain import Importance
from mssar.layer import MSSAR


def disturbed(network: nn.Module) -> nn.Module:
    """With statistics and scales that are not those of a beginner, so that weights differ."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias, 0, 0.5)
    return network


def build(name: str, recalibration: str = "mssar", **options: object) -> nn.Module:
    return disturbed(mssar.create_model(name, recalibration, 5, **options))


def densenet(**options: object) -> nn.Module:
    recalibration = options.pop("recalibration", MSSAR)
    return disturbed(mssar.networks.DenseNet(10, 6, 5, recalibration, **options))


class Twice(nn.Module):
    """One layer for two maps, the second named."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MSSAR(3, scales=(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x=self.layer(x)[..., :5])


NETWORKS = {
    "resnet": lambda: build("resnet8"),
    "se": lambda: build("resnet8", "se"),
    "sliding": lambda: build("resnet8", strategy="sliding"),
    "separate": lambda: build("resnet8", scales=(3, 2)),
    "densenet": densenet,
    "densenet single": lambda: densenet(stage="single"),
    "sequential": lambda: disturbed(nn.Sequential(nn.Conv2d(3, 4, 3), MSSAR(4), nn.Flatten())),
    "layer": lambda: disturbed(MSSAR(3)),
    "twice": lambda: disturbed(Twice()),
}


@pytest.mark.parametrize("size", [(16, 16), (13, 10)], ids=["even", "ragged"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_layers_multiply_their_inputs_by_what_is_told(name, size):
    network, images = NETWORKS[name]().eval(), torch.randn(2, 3, *size)
    passed: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    handles = [
        layer.register_forward_hook(
            lambda _, x, options, y, n=n: passed.append((n, x[0] if x else options["x"], y)),
            with_kwargs=True,
        )
        for n, layer in network.named_modules()
        if isinstance(layer, MSSAR)
    ]
    found = mssar.explain(network, images)
    for handle in handles:
        handle.remove()
    assert [block.name for block in found.blocks] == [n for n, _, _ in passed]
    for block, (_, x, y) in zip(found.blocks, passed, strict=True):
        torch.testing.assert_close(x * block.z, y)
        assert block.channels == x.shape[1]
        assert len(block.per_scale) == len(block.scales)
        torch.testing.assert_close(sum(block.per_scale) / len(block.scales), block.z)
        torch.testing.assert_close(block.mean, block.z.mean(1))
        torch.testing.assert_close(sum(block.mean_per_scale) / len(block.scales), block.mean)
        assert block.z.std() > 0.003  # or else any weights would have passed
    with torch.no_grad():
        assert torch.equal(found.logits, network(images))


def test_weights_are_those_of_the_layer_alone():
    network, images = NETWORKS["sequential"]().eval(), torch.randn(2, 3, 14, 9)
    (block,) = mssar.explain(network, images).blocks
    with torch.no_grad():
        alone = network[1].importance(network[0](images), per_scale=True)
    assert all(torch.equal(a, b) for a, b in zip(block.per_scale, alone, strict=True))


def test_regions_are_kept_and_not_maps():
    network = NETWORKS["resnet"]()
    for block in mssar.explain(network, torch.randn(2, 3, 32, 32)).blocks:
        assert [weights.shape[2:] for weights in block.regions] == [(1, 1), (2, 2), (4, 4)]


def test_se_gives_every_position_the_same():
    for block in mssar.explain(NETWORKS["se"](), torch.randn(2, 3, 11, 16)).blocks:
        assert block.scales == (1,)
        assert torch.equal(block.z, block.z[:, :, :1, :1].expand_as(block.z))


@pytest.mark.parametrize("name", ["resnet", "densenet"])
def test_the_model_is_left_as_it_was(name):
    network = NETWORKS[name]().train()
    frozen = [m for n, m in network.named_modules() if n.endswith(("bn1", "norm1"))]
    for module in frozen:  # as one fine-tunes
        module.eval()
    before = copy.deepcopy(network.state_dict())
    flags = [module.training for module in network.modules()]
    assert len(set(flags)) == 2
    explanation = mssar.explain(network, torch.randn(3, 3, 16, 16))
    assert_same(network.state_dict(), before)
    assert [module.training for module in network.modules()] == flags
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in network.modules())
    assert not any(module._forward_pre_hooks_with_kwargs for module in network.modules())
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(block.z.requires_grad for block in explanation.blocks)


def test_the_model_is_left_as_it_was_also_on_error():
    network = NETWORKS["resnet"]().train()
    network.layer2[0].conv2.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mssar.explain(network, torch.randn(2, 3, 16, 16))
    assert all(module.training for module in network.modules())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_what_is_told_does_not_change_with_the_model():
    network = NETWORKS["layer"]()
    images = torch.randn(2, 3, 8, 8)
    (block,) = mssar.explain(network, images).blocks
    before = block.z.clone()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        images.zero_()
    assert torch.equal(block.z, before)


def test_a_network_in_bfloat16_is_told_of_in_float32():
    network, images = NETWORKS["resnet"](), torch.randn(2, 3, 16, 16)
    exact = mssar.explain(network, images)
    rough = mssar.explain(network.bfloat16(), images)
    assert rough.logits.dtype == rough.blocks[0].z.dtype == torch.float32
    torch.testing.assert_close(rough.blocks[0].z, exact.blocks[0].z, atol=0.03, rtol=0)


def test_a_layer_is_found_by_name():
    found = mssar.explain(NETWORKS["resnet"](), torch.randn(1, 3, 16, 16))
    assert isinstance(found["layer2.0.recalibrate"], Importance)
    assert found["layer2.0.recalibrate"] is found.blocks[1]
    with pytest.raises(KeyError, match=r"no layer 'layer2'; there are layer1\.0\.recalibrate, "):
        found["layer2"]


def test_mistakes_are_said(unchecked):
    image = torch.randn(1, 3, 16, 16)
    with pytest.raises(ValueError, match="nothing to explain: CifarResNet has no MSSAR in it"):
        unchecked.explain(unchecked.create_model("resnet8"), image)
    network = unchecked.create_model("resnet8", "mssar")
    for wrong in (image[0], image.to(torch.uint8)):
        with pytest.raises(ValueError, match="images are N C H W of floating point numbers"):
            unchecked.explain(network, wrong)

    for wrong, kind in ((image.numpy(), "ndarray"), (None, "NoneType"), ("cat.png", "str")):
        with pytest.raises(ValueError, match=f"^images are N C H W, a torch.Tensor; got {kind}$"):
            unchecked.explain(network, wrong)
        with pytest.raises(ValueError, match=f"^explain looks into a network.*; got {kind}$"):
            unchecked.explain(wrong, image)

    class Idle(nn.Module):
        def __init__(self, returned):
            super().__init__()
            self.layer, self.returned = unchecked.MSSAR(3), returned

        def forward(self, _):
            return self.returned

    with pytest.raises(ValueError, match="no MSSAR of this Idle was called"):
        unchecked.explain(Idle(image), image)
    with pytest.raises(ValueError, match="returns one tensor here; got dict"):
        unchecked.explain(Idle({}), image)


def test_they_say_what_they_are_in_one_line():
    found = mssar.explain(NETWORKS["resnet"](), torch.randn(2, 3, 16, 12))
    assert repr(found) == (
        "Explanation(batch of 2, 3 layers: 'layer1.0.recalibrate' … 'layer3.0.recalibrate')"
    )
    assert repr(found.blocks[1]) == (
        "Importance('layer2.0.recalibrate': 32 channels of 8×6, regional scales 1, 2, 4, "
        "batch of 2)"
    )


@pytest.mark.parametrize("name", ["resnet", "se", "sliding", "twice"])
def test_the_picture_holds_every_mean_map_in_its_place(name):
    found = mssar.explain(NETWORKS[name](), torch.randn(3, 3, 13, 10))
    ranges = [block.mean.new_tensor((0.0, 1.0)) for block in found.blocks]
    canvas = mosaic.mosaic(found.blocks, 2, ranges)
    cell, rows = mosaic.SIDE + mosaic.GAP, len(mosaic._rows(found.blocks))
    for column, block in enumerate(found.blocks):
        several = len(block.scales) > 1
        for row, maps in enumerate([*block.mean_per_scale, *([block.mean] if several else [])]):
            for image in range(2):
                top, left = mosaic._top(image * rows + row, rows), column * cell
                shown = canvas[top : top + mosaic.SIDE, left : left + mosaic.SIDE]
                height, width = block.size
                y = torch.arange(height) * mosaic.SIDE // height + 1
                x = torch.arange(width) * mosaic.SIDE // width + 1
                torch.testing.assert_close(shown[y][:, x], maps[image])
    assert canvas.isnan().any()  # between the maps there is nothing


def test_a_notebook_shows_a_picture_where_it_can(monkeypatch):
    pytest.importorskip("matplotlib")
    found = mssar.explain(densenet(), torch.randn(1, 3, 8, 8))
    assert found._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert found._repr_png_() is None


def test_of_many_layers_some_are_drawn():
    chosen = mosaic._spaced(range(48), 16)
    assert (len(chosen), chosen[0], chosen[-1]) == (16, 0, 47)
    assert max(b - a for a, b in pairwise(chosen)) <= 4
    assert mosaic._spaced(range(3), 16) == [0, 1, 2]
