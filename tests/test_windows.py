"""Window means as a kernel: Sliding's numbers in every type, layout and size, and its gradient.

Without a CUDA device Triton's interpreter runs the kernels, if told so before it is imported.
"""

import os

import pytest
import torch
from torch.testing import assert_close

from mssar import Sliding

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from mssar.kernels.windows import op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SIZES = [(8, 8), (7, 9), (3, 2), (1, 1), (16, 5)]
SCALES = (1, 2, 4)
# The interpreter cuts bfloat16 off where a GPU rounds: one step in the last place, not half of one.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

means = torch.ops.mssar.window_means
adjoint = torch.ops.mssar.window_means_backward


def random(*shape, memory_format="channels_last", dtype=torch.float32):
    x = torch.randn(shape, device=DEVICE).to(dtype) + 1
    return x.contiguous(memory_format=FORMATS[memory_format])


def radii_of(x, scales=SCALES):
    return [Sliding(scale).radius(tuple(x.shape[-2:])) for scale in scales]


def assert_near(found, expected, tolerance=1e-6):
    assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def gradient(pooled, x, probes):
    return torch.autograd.grad(list(pooled), x, list(probes))[0]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_means_are_those_of_sliding(dtype, size, memory_format):
    x = random(2, 3, *size, memory_format=memory_format, dtype=dtype)
    scales = (1, 3)
    for scale, mean in zip(scales, means(x, radii_of(x, scales)), strict=True):
        assert (mean.dtype, mean.stride()) == (dtype, x.stride())
        assert_near(mean, Sliding(scale).pool(x.double()), TOLERANCE[dtype])


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_gradient_of_all_scales_together(size, memory_format):
    x = random(2, 3, *size, memory_format=memory_format).requires_grad_()
    probes = [torch.randn_like(x) for _ in SCALES]
    found = gradient(means(x, radii_of(x)), x, probes)
    assert found.stride() == x.stride()
    assert_near(found, gradient([Sliding(scale).pool(x) for scale in SCALES], x, probes), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_in_half_types(dtype):
    x = random(2, 3, 4, 5, dtype=dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    probes = [torch.randn_like(x) for _ in SCALES]
    found = gradient(means(x, radii_of(x)), x, probes)
    pooled = [Sliding(scale).pool(wide) for scale in SCALES]
    assert_near(
        found, gradient(pooled, wide, [probe.double() for probe in probes]), 2 * TOLERANCE[dtype]
    )


def test_radii_at_the_ends():
    """Nothing but the position; all rows but the last; more than the map has."""
    x = random(1, 3, 4, 6)
    alone, three, all_of_it, more = means(x, [0, 2, 5, 1000])
    assert torch.equal(alone, x)
    assert_near(three[:, :, 0, 0], x[:, :, :3, :3].mean((2, 3)))
    assert_near(three[:, :, 3, 4], x[:, :, 1:, 2:].mean((2, 3)))
    assert_near(all_of_it, x.mean((2, 3), keepdim=True).expand_as(x))
    assert torch.equal(more, all_of_it)


@pytest.mark.parametrize(
    ("shape", "longest"),
    [((17, 1, 9, 2), 128), ((1, 2, 2, 18), 16), ((1, 2, 17, 18), 16)],
    ids=["two tiles", "turned", "one axis after the other"],
)
def test_large_maps_in_small_tiles(monkeypatch, shape, longest):
    for name, value in (("LONGEST", longest), ("TILE", 256), ("PROGRAMS", 1)):
        monkeypatch.setattr(op, name, value)
    x = random(*shape).requires_grad_()
    found, expected = means(x, radii_of(x, [3])), [Sliding(3).pool(x)]
    assert_near(found[0], expected[0])
    probe = [torch.randn_like(x)]
    assert_near(gradient(found, x, probe), gradient(expected, x, probe), 2e-6)


def test_any_strides():
    x = random(3, 9, 12, 5).permute(1, 3, 0, 2)[::2, :, :, 1::2]
    grads = [torch.ones((), device=DEVICE).expand_as(x)]  # what sum() sends back
    (found,) = means(x, [1])
    assert found.stride() == torch.empty_like(x).stride()
    (expected,) = means(x.contiguous(), [1])
    assert torch.equal(found, expected)
    (ones,) = means(torch.ones_like(x), [1])
    assert_near(ones, torch.ones_like(x))
    assert torch.equal(adjoint(grads, x, [1]), adjoint([grads[0].contiguous()], x, [1]))
    assert means(x[:0], [1])[0].shape == (0, *x.shape[1:])
    assert means(x, []) == []


def test_large_values_leave_nothing_behind():
    """A running sum in float32 alone would keep ±1e-3 of a value that has left the window."""
    x = random(1, 2, 12, 4)
    x[:, :, 1] = 3e4
    (mean,) = means(x, [1])
    assert_near(mean[:, :, 4:], Sliding(4).pool(x[:, :, 3:])[:, :, 1:])


def test_gradients_of_some_scales():
    x = random(1, 2, 2, 2).requires_grad_()
    pooled = means(x, radii_of(x))
    probe = torch.randn_like(x)
    assert_near(gradient([pooled[1]], x, [probe]), gradient([Sliding(2).pool(x)], x, [probe]), 2e-6)
    some = gradient([means(x, radii_of(x))[k] for k in (0, 2)], x, [probe, 2 * probe])
    assert_near(some, adjoint([probe, 2 * probe], x, [radii_of(x)[k] for k in (0, 2)]))


def test_the_adjoint_has_the_means_as_its_gradient():
    x = random(1, 2, 3, 4)
    grads = [torch.randn_like(x).requires_grad_() for _ in range(2)]
    found = torch.autograd.grad(adjoint(grads, x, [1, 2]), grads, x)
    for ours, theirs in zip(found, means(x, [1, 2]), strict=True):
        assert torch.equal(ours, theirs)


def test_twice_the_same():
    x = random(2, 3, 4, 4)
    first, second = (means(x, [1, 2]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(adjoint(first, x, [1, 2]), adjoint(first, x, [1, 2]))


@pytest.mark.parametrize("memory_format", FORMATS)
def test_they_are_sound_ops(memory_format):
    x = random(1, 2, 1, 3, memory_format=memory_format)
    torch.library.opcheck(means, (x.clone().requires_grad_(), [1, 3]))
    grads = [torch.randn_like(x).requires_grad_() for _ in range(2)]
    torch.library.opcheck(adjoint, (grads, x, [1, 3]))
