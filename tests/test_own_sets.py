"""A coordinate set of one's own in the layer."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import adaptive_max_pool2d, interpolate
from torch.testing import assert_close

import mssar
from mssar.coordinates import Regional, Sliding


@dataclass(frozen=True)
class Columns:
    """The map cut into ``scale`` parts from left to right."""

    scale: int

    def grid(self, size):
        return 1, min(self.scale, size[1])

    def pool(self, x):
        parts = x.tensor_split(self.grid(x.shape[-2:])[1], 3)
        return torch.cat([part.mean((2, 3), keepdim=True) for part in parts], 3)

    def spread(self, z, size):
        counts = torch.tensor([len(p) for p in torch.arange(size[1]).tensor_split(z.shape[3])])
        return z.repeat_interleave(counts, 3).expand(-1, -1, *size)


class Others(Columns):
    pass


@dataclass(frozen=True)
class Peaks(Regional):
    """Regions that are pooled otherwise."""

    def pool(self, x):
        return adaptive_max_pool2d(x, self.grid(x.shape[-2:]))


@dataclass(frozen=True)
class Blended(Regional):
    """Regions whose weights are drawn otherwise."""

    def spread(self, z, size):
        return interpolate(z, size, mode="bilinear")


@dataclass(frozen=True)
class Rows(Sliding):
    """Windows that are as wide as the map."""

    def pool(self, x):
        return super().pool(x).mean(3, keepdim=True).expand_as(x)


def test_of_one_region_it_is_the_paper_s():
    layer, x = mssar.MSSAR(6, (1,), Columns), torch.randn(3, 6, 5, 7)
    theirs = mssar.MSSAR(6, (1,))
    theirs.branches.load_state_dict(layer.branches.state_dict())
    assert_close(layer(x), theirs(x))


def test_every_position_is_weighted_by_its_region():
    layer, x = mssar.MSSAR(6, (1, 3), Columns).eval(), torch.randn(2, 6, 5, 7)
    whole, parts = layer.importance(x, per_scale=True)
    for columns in ([0, 1, 2], [3, 4], [5, 6]):
        gate = layer.branches[1](x[..., columns].mean((2, 3), keepdim=True)).sigmoid()
        assert_close(parts[..., columns], gate.expand(-1, -1, 5, len(columns)))
    assert_close(layer(x), x * (whole + parts) / 2)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("strategy", [Peaks, Blended, Rows])
def test_what_is_derived_from_ours_is_asked(strategy):
    """It may do otherwise what the kernels do for regions and windows."""
    layer, x = mssar.MSSAR(6, (1, 2), strategy).eval(), torch.randn(2, 6, 5, 7)
    for branch in layer.branches:
        torch.nn.init.normal_(branch.norm2.weight)
    z = torch.zeros_like(x)
    for own, branch in zip(map(strategy, (1, 2)), layer.branches, strict=True):
        z += own.spread(branch(own.pool(x)).sigmoid(), (5, 7)) / 2
    assert_close(layer(x), x * z)
    assert_close(mssar.tail(x, None, layer, activation=None), x * z)


def test_it_is_explained_counted_and_inserted():
    net = mssar.create_model("resnet8", "mssar", scales=(1, 2), strategy=Columns).eval()
    x, seen = torch.randn(2, 3, 16, 16), []
    layer = net.layer1[0].recalibrate
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = mssar.explain(net, x)["layer1.0.recalibrate"]
    assert_close(found.z, layer.importance(seen[0]))
    plain = mssar.create_model("resnet8")
    before = copy.deepcopy(plain)
    plan = mssar.insert(plain, (1, 2), strategy=Columns)
    assert plan.macs == mssar.cost(plain, (3, 32, 32)).recalibration_macs
    assert "unfused" in plan.entries[0].runs
    assert torch.equal(plain.eval()(x), before.eval()(x))


def test_its_weights_are_for_it_alone():
    saved = mssar.MSSAR(6, (1, 2), Columns).state_dict()
    mssar.MSSAR(6, (1, 2), Columns).load_state_dict(saved)
    for strategy in (Others, "regional"):
        with pytest.raises(RuntimeError, match="trained for a strategy of one's own"):
            mssar.MSSAR(6, (1, 2), strategy).load_state_dict(saved)


def test_what_is_no_set_is_refused(unchecked):
    with pytest.raises(ValueError, match="strategy is one of regional, sliding, or makes a set"):
        unchecked.MSSAR(6, strategy=3)
    with pytest.raises(ValueError, match=r"has scale, grid, pool and spread; .* made int"):
        unchecked.MSSAR(6, strategy=int)
    with pytest.raises(ValueError, match="has a module, a pooling or a class of its own"):
        unchecked.create_model("resnet8", "mssar", strategy=Columns).save_pretrained("nowhere")
