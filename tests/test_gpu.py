"""The reference on a CUDA device: the CPU's numbers, every type and layout, no waiting."""

import copy

import pytest
import torch
import torch.nn.functional as F
from device import never_waiting
from torch.testing import assert_close

import mssar

pytestmark = pytest.mark.gpu

LAYERS = [
    pytest.param({}, id="nested"),
    pytest.param({"scales": (2, 3)}, id="separate"),
    pytest.param({"strategy": "sliding"}, id="sliding"),
]
SIZES = [(8, 8), (14, 14), (7, 9), (3, 2), (1, 1)]
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


def gradients(layer, x, probe):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad((y * probe).sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", LAYERS)
def test_agrees_with_the_cpu(options, size, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    layer = mssar.MSSAR(6, dtype=torch.float64, **options)
    x = torch.randn(3, 6, *size, dtype=torch.float64).contiguous(memory_format=memory_format)
    probe = torch.randn_like(x)
    expected = gradients(copy.deepcopy(layer), x, probe)
    found = gradients(layer.cuda(), x.cuda(), probe.cuda())
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours.cpu(), theirs, atol=1e-9, rtol=1e-9)
    assert found[0].stride() == expected[0].stride()


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", LAYERS)
def test_every_type(options, dtype):
    layer = mssar.MSSAR(6, **options).cuda().eval().to(dtype)
    x = torch.randn(4, 6, 14, 14, device="cuda", dtype=dtype)
    y = layer(x)
    assert y.dtype is dtype
    assert_close(y.double(), layer.double()(x.double()), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", LAYERS)
def test_autocast_keeps_the_maps_type_and_layout(options, dtype):
    layer = mssar.MSSAR(6, **options).cuda()
    x = torch.randn(4, 6, 14, 14, device="cuda", dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype is dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_close(y.float(), layer(x.float()), atol=6e-2, rtol=0)


@pytest.mark.parametrize("size", [(14, 14), (7, 9), (33, 17)], ids=str)
@pytest.mark.parametrize("options", LAYERS)
def test_deterministic(options, size, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    layer = mssar.MSSAR(32, **options).cuda()
    x = torch.randn(16, 32, *size, device="cuda")
    probe = torch.randn_like(x)
    expected = gradients(copy.deepcopy(layer), x, probe)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradients(copy.deepcopy(layer), x, probe) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, c in zip(first, second, expected, strict=True):
        assert torch.equal(a, b)
        assert (a - c).norm() <= 5e-3 * c.norm()  # other kernels, in TensorFloat-32


def test_sliding_is_accurate_on_large_maps():
    x = torch.rand(1, 2, 224, 224, device="cuda") + 1
    for scale in (1, 2, 7, 32, 224):
        window = mssar.Sliding(scale)
        assert_close(window.pool(x).double(), window.pool(x.double()), atol=1e-5, rtol=0)


# The graph keeps what it captured on a stream of its own.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("size", [(32, 32), (7, 7)], ids=str)
@pytest.mark.parametrize("options", LAYERS)
def test_never_waits_for_the_device_and_replays_as_a_graph(options, size, unchecked):
    layer = unchecked.MSSAR(12, **options).cuda()
    x = torch.randn(8, 12, *size, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).square().sum().backward()
    torch.cuda.synchronize()
    with never_waiting():
        layer(x).square().sum().backward()
    x.grad = None
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    twin = x.detach().clone().requires_grad_()
    expected = layer(twin)
    expected.square().sum().backward()
    assert_close(y, expected)
    assert_close(gradient, twin.grad, atol=1e-5, rtol=1e-4)


# Whether it has been said before depends on what ran before.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiles_to_kernels(unchecked):
    network = unchecked.networks.CifarResNet(8, recalibration=unchecked.MSSAR).cuda()
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True)
    x = torch.randn(16, 3, 28, 28, device="cuda").contiguous(memory_format=torch.channels_last)
    label = torch.arange(16, device="cuda") % 10
    losses = [F.cross_entropy(net(x), label) for net in (network, compiled)]
    assert_close(losses[1], losses[0], atol=1e-3, rtol=1e-3)
    for loss in losses:
        loss.backward()
    assert_close(compiled.fc.weight.grad, network.fc.weight.grad, atol=2e-3, rtol=2e-2)
