"""What the kernels cannot do: asked for by name they say why, else it is left to the modules."""

import pytest
import torch
from changes import automatic
from tails import DEVICE, layer, maps
from torch import nn

import mssar
from mssar import fused, fusible

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")


def call(shortcut=None, norm=None, activation="relu", **options):
    def made(x):
        return fused.tail(x, layer(**options), norm, shortcut, activation)

    return made


def with_norm(change):
    norm = nn.BatchNorm2d(12).to(DEVICE)
    return call(norm=change(norm) or norm)


def on_another_device(x):
    return fused.tail(x, layer().to("meta"), None)


REFUSED = [
    (call(activation="gelu"), lambda x: x, "the activation is 'gelu'"),
    (call(context_channels=5), lambda x: x, "its weights come from another map"),
    (call(strategy="sliding"), lambda x: x, "windows slide"),
    (call(scales=(3, 7)), lambda x: x, "the scales need a grid finer than 16×16"),
    (with_norm(lambda _: nn.BatchNorm2d(5).to(DEVICE)), lambda x: x, "the norm is for 5 channels"),
    (with_norm(lambda _: nn.Identity()), lambda x: x, "Identity is no plain BatchNorm2d"),
    (with_norm(lambda n: n.to("meta")), lambda x: x, "x and the modules are on different devices"),
    (on_another_device, lambda x: x, "x and the modules are on different devices"),
    (
        call(shortcut=maps(4, 12, 1, 1)),
        lambda x: x,
        "the shortcut differs in shape, type or device",
    ),
    (
        call(shortcut=maps().bfloat16()),
        lambda x: x,
        "the shortcut differs in shape, type or device",
    ),
    (
        call(shortcut=maps().to("meta")),
        lambda x: x,
        "the shortcut differs in shape, type or device",
    ),
    (call(), lambda x: x.bfloat16(), "x is torch.bfloat16, the layer torch.float32"),
]


@pytest.mark.parametrize(("made", "change", "reason"), REFUSED)
def test_the_kernels_by_name_say_why_they_cannot(made, change, reason):
    with pytest.raises(ValueError, match="cannot run this MSSAR") as raised:
        made(change(maps()))
    assert str(raised.value) == f"backend='triton' cannot run this MSSAR: {reason}; use 'auto'"


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("made", "change", "reason"), REFUSED)
def test_left_to_choose_they_leave_it_to_the_modules(made, change, reason, monkeypatch):
    del reason
    monkeypatch.setattr("test_dispatch_errors.layer", automatic)
    assert made(change(maps())) is None


def test_vectors_with_gaps_are_left_to_the_modules():
    norm, layers = nn.BatchNorm2d(12).to(DEVICE), layer()
    norm.weight = nn.Parameter(torch.rand(12, 2, device=DEVICE)[:, 0])
    assert fusible.obstacle(layers, norm) == "a BatchNorm2d has parameters with gaps between them"
    plain = nn.BatchNorm2d(12).to(DEVICE)
    assert fusible.obstacle(layers, plain) is None
    x = maps()
    mssar.tail(x, plain, layers, x)
    plain.weight.data = torch.rand(12, 2, device=DEVICE)[:, 0]  # after a call, too
    with pytest.raises(ValueError, match="gaps between them"):
        mssar.tail(x, plain, layers, x)


def test_a_sample_of_more_numbers_than_an_int_counts():
    x = maps().as_strided((2, 12, 1 << 14, 1 << 14), (0, 0, 0, 0))
    with pytest.raises(ValueError, match="a sample has 2³¹ numbers or more, or 2²⁰ positions"):
        layer()(x)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :5], "made for 12 channels"),
        (lambda x: x[0], "N C H W"),
        (lambda x: x[:, :, :0], "H and W at least 1"),
        (lambda x: x[:1], "BN cannot train on a single value per channel: scale 1"),
    ],
)
def test_maps_that_do_not_fit_are_refused_as_ever(unchecked, change, message, backend):
    ours, x = unchecked.MSSAR(12, backend=backend).to(DEVICE), maps()
    with pytest.raises(ValueError, match=message):
        ours(change(x))


def test_types_that_the_kernels_do_not_take():
    with pytest.raises(ValueError, match=r"take torch.float32, .*got torch.float64: use .*ref"):
        layer()(maps().double())


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_single_value_is_refused_as_ever(backend):
    """Regions are not more than there are positions."""
    x, norm = maps(1, 12, 1, 1), nn.BatchNorm2d(12).to(DEVICE)
    ours = layer(scales=(2,), backend=backend)
    with pytest.raises(ValueError, match="BN cannot train on a single value per channel: scale 2"):
        ours(x)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        mssar.tail(x, norm, ours, x)
    assert mssar.tail(x, norm.eval(), ours.eval(), x).isfinite().all()


def test_an_activation_that_is_not_there():
    with pytest.raises(ValueError, match="'relu', 'silu' or None; got 'gelu'"):
        mssar.tail(maps(), None, layer(), activation="gelu")
