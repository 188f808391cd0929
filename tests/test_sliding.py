"""Sliding windows: borders, reach, accuracy on large maps, and a cost that ignores the scale."""

import oracle
import pytest
import torch
from test_coordinates import EXACT, FORMATS, laid_out, random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mssar import Sliding


def test_border_windows_divide_by_what_they_hold():
    # √(3·3) / 3 = 1: windows of 3 × 3, of which a corner holds 4 positions and an edge 6.
    x = torch.arange(1.0, 10.0, dtype=torch.float64).view(1, 1, 3, 3)
    means = [[3.0, 3.5, 4.0], [4.5, 5.0, 5.5], [6.0, 6.5, 7.0]]
    torch.testing.assert_close(Sliding(3).pool(x)[0, 0], torch.tensor(means, dtype=x.dtype))
    # √(1·4) / 1 = 2: along a row of four the outer windows hold three positions.
    x = torch.tensor([[[[1.0, 2.0, 3.0, 10.0]]]], dtype=torch.float64)
    means = [[2.0, 4.0, 4.0, 5.0]]
    torch.testing.assert_close(Sliding(1).pool(x)[0, 0], torch.tensor(means, dtype=x.dtype))
    # √(2·3) / 3 < 1: everyone for himself.
    x = random(1, 2, 2, 3)
    torch.testing.assert_close(Sliding(3).pool(x), x)


@pytest.mark.parametrize(
    ("size", "scale", "radius"),
    [
        ((7, 7), 7, 1),  # 7/7 in floating point could fall below 1
        ((49, 49), 7, 7),
        ((3, 12), 2, 3),
        ((3, 12), 6, 1),
        ((3, 12), 7, 0),
        ((33, 17), 1, 23),
        ((224, 224), 224, 1),
        ((224, 224), 225, 0),
    ],
)
def test_the_window_reaches_whole_steps_exactly(size, scale, radius):
    assert Sliding(scale).radius(size) == radius
    # The middle of a map that is zero except there: every window that reaches it sees it.
    h, w = size[0] // 2, size[1] // 2
    x = torch.zeros(1, 1, *size, dtype=torch.float64)
    x[..., h, w] = 1.0
    seen = Sliding(scale).pool(x)[0, 0] > 1e-9
    expected = torch.zeros(size, dtype=torch.bool)
    expected[max(0, h - radius) : h + radius + 1, max(0, w - radius) : w + radius + 1] = True
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("scale", [1, 2, 7, 32, 224, 300])
@pytest.mark.parametrize(
    "make",
    [
        lambda shape: torch.randn(shape) + 1.0,
        torch.rand,
        lambda shape: 0.1 * torch.randn(shape) + 8.0,
    ],
    ids=["around 1", "in [0, 1]", "around 8"],
)
def test_large_maps_keep_their_accuracy(make, scale, memory_format):
    """A float32 integral image of such a map is off by about 1e-3."""
    x = make((1, 3, 224, 224)).contiguous(memory_format=FORMATS[memory_format])
    pooled = Sliding(scale).pool(x)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled.double(), oracle.window_means(x, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "scale"), [((5, 4), 2), ((9, 1), 3), ((6, 6), 1)])
def test_the_fast_exact_means_are_the_definition(size, scale):
    x = random(2, 3, *size)
    expected = oracle.pool(x, oracle.sliding(size, scale)).unflatten(2, size)
    torch.testing.assert_close(oracle.window_means(x, scale), expected, **EXACT)


class Elements(TorchDispatchMode):
    """Counts the elements that operations write; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.add(func._schema.name)
            for result in out if isinstance(out, tuple | list) else [out]:
                self.written += result.numel() if isinstance(result, Tensor) else 0
        return out


# They read a whole window for each element they write: counting those would be no measure.
HEAVY = ("conv", "pool", "mm", "matmul", "einsum", "im2col", "unfold")


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_cost_of_sliding_does_not_depend_on_the_scale(memory_format):
    x = laid_out(torch.randn(1, 4, 128, 128), memory_format)
    forward, backward = {}, {}
    for scale in (2, 4, 16, 64):
        with Elements() as ahead:
            pooled = Sliding(scale).pool(x)
        with Elements() as back:
            pooled.backward(torch.ones_like(pooled))
        assert not [n for n in ahead.names | back.names if any(word in n for word in HEAVY)]
        forward[scale], backward[scale] = ahead.written / x.numel(), back.written / x.numel()
    for passes, limit in ((forward, 40), (backward, 80)):
        assert max(passes.values()) <= 3 * min(passes.values()), passes
        assert max(passes.values()) <= limit, passes
