"""Batch norms that become part of the convolutions before them, and those that cannot."""

import pytest
import torch
from test_export import disturbed
from torch import Tensor, nn
from torch.testing import assert_close

from mssar.folding import fold


class Uses(nn.Module):
    """One convolution and one norm, put together in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3, affine=way != "not affine")

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.conv(x)
        if self.way == "read twice":
            return self.norm(y) + y
        if self.way == "returned":
            return self.norm(y), y
        if self.way == "convolved twice":
            return self.norm(self.conv(y))
        if self.way == "normed twice":
            return self.norm(self.norm(y))
        if self.way == "in between":
            return self.norm(y.relu())
        return self.norm(y)


@pytest.mark.parametrize(
    ("way", "count"),
    [
        *(("plain", 1), ("not affine", 1), ("read twice", 0), ("returned", 0)),
        *(("convolved twice", 0), ("normed twice", 0), ("in between", 0)),
    ],
)
def test_only_norms_that_have_a_convolution_to_themselves_are_folded(way, count):
    model = disturbed(Uses(way)).double().eval()
    x = torch.randn(2, 3, 5, 6).double()
    before = model(x)
    assert fold(model, x) == count
    assert isinstance(model.norm, nn.Identity) == bool(count)
    assert_close(model(x), before)


def test_norms_of_other_kinds_are_folded(timm):
    """Synchronised ones, and timm's, which act; what they do besides is left."""
    x = torch.randn(2, 3, 5, 6)
    for norm, act in (
        (nn.SyncBatchNorm(4), nn.Identity()),
        (timm.layers.BatchNormAct2d(4, act_layer=nn.SiLU), nn.SiLU()),
    ):
        model = disturbed(nn.Sequential(nn.Conv2d(3, 4, 3), norm)).eval()
        before = model(x)
        assert fold(model, x) == 1
        assert_close(model(x), before)
        assert_close(act(model[0](x)), before)


def test_norms_that_train_have_hooks_or_keep_nothing_are_not_folded():
    x = torch.randn(2, 3, 5, 6)
    trains, hooked, forgets = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in "abc")
    hooked.eval()[1].register_forward_hook(lambda *_: None)
    forgets[1] = nn.BatchNorm2d(3, track_running_stats=False)
    for model in (trains, hooked, forgets.eval()):
        assert fold(model, x) == 0
