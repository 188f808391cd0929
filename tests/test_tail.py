"""A block's tail by kernels: it trains, compiles and replays with the modules' numbers."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from tails import DEVICE, EVALUATED, TRAINED, Case, Launched, Tail, apart, launched, maps, worst
from torch import nn
from torch.testing import assert_close

import mssar

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")


def test_running_statistics_as_batch_norm_keeps_them():
    case = Case(9, (5, 3), scales=(1, 3))
    ours = Tail(case)
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm, momentum in zip(norms, (0.3, 0.1, 1.0, 0.05, 0.0), strict=True):
        norm.momentum = momentum
    theirs, wide = copy.deepcopy(ours), copy.deepcopy(ours).double()
    for _ in range(3):
        inputs = case.maps()
        with torch.no_grad():
            ours.kernels(*inputs), theirs(*inputs), wide(*(x.double() for x in inputs))
    buffers = dict(ours.named_buffers())
    assert len(buffers) == 3 * len(norms)
    for (name, a), b, c in zip(buffers.items(), theirs.buffers(), wide.buffers(), strict=True):
        assert a.dtype is b.dtype, name
        if name.endswith("num_batches_tracked"):
            assert a == b == 3, name
        else:
            assert_close(a.double(), c, rtol=2e-6, atol=2e-6, msg=name)


def test_running_statistics_of_half_types():
    case = Case()
    ours, x = Tail(case).to(torch.bfloat16), [x.to(torch.bfloat16) for x in case.maps()]
    theirs = copy.deepcopy(ours)
    ours.kernels(*x), theirs(*x)
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert a.dtype is b.dtype, name
        assert_close(a.double(), b.double(), rtol=2**-6, atol=2**-6, msg=name)


@pytest.mark.parametrize("recalibration", ["mssar", "none"])
def test_a_networks_step_and_what_it_leaves(recalibration):
    """Loss, gradients and statistics: as near to float64 as the reference comes."""
    torch.manual_seed(1)
    ours = mssar.create_model("resnet8", recalibration, backend="triton").to(DEVICE)
    theirs = mssar.create_model("resnet8", recalibration, backend="reference").to(DEVICE)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    wide = copy.deepcopy(theirs).double()
    x, label = maps(6, 3, 8, 8), torch.arange(6, device=DEVICE)
    found = []
    with Launched() as names:
        for network in (ours, theirs, wide):
            images = x.double() if network is wide else x
            loss = F.cross_entropy(network(images), label)
            loss.backward()
            grads = [p.grad for p in network.parameters()]
            buffers = [b for b in network.buffers() if b.is_floating_point()]
            counts = [b for b in network.buffers() if not b.is_floating_point()]
            assert all(count == 1 for count in counts)
            found.append([loss.detach().reshape(1), *grads, *buffers])
    assert names == TRAINED * 3 + ["tail_backward"] * 3
    names = ["loss", *(n for n, _ in ours.named_parameters())]
    names += [n for n, b in ours.named_buffers() if b.is_floating_point()]
    for name, a, b, c in zip(names, *found, strict=True):
        assert apart(a, c) <= 1e-5 + 3 * apart(b, c), name

    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.inference_mode():
        expected = theirs.eval()(x)
        assert launched(ours.eval(), x) == EVALUATED * 3
        assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


# --- Compiled


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_compiled_block_is_one_graph_with_the_same_numbers(unchecked, train, compiler):
    from mssar.networks.resnet import BasicBlock

    make = lambda c: unchecked.MSSAR(c, scales=(1, 2), backend="triton")  # noqa: E731
    net = BasicBlock(12, 12, 1, make).to(DEVICE).train(train)
    other, x = copy.deepcopy(net), maps()
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend=compiler)
    if not train:
        with torch.inference_mode():
            assert_close(compiled(x), other(x), rtol=1e-5, atol=1e-5)
        return
    for _ in range(2):
        probe = torch.randn_like(x)
        ours, theirs = compiled(x), other(x)
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(ours, list(net.parameters()), probe)
        expected = torch.autograd.grad(theirs, list(other.parameters()), probe)
        assert worst(found, expected, [n for n, _ in net.named_parameters()])[0] < 1e-4
    for name, value in net.named_buffers():
        assert_close(value, other.get_buffer(name), rtol=1e-5, atol=1e-5, msg=name)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "product", [lambda: nn.Conv2d(12, 6, 1), lambda: nn.Conv2d(12, 6, 1, groups=2, bias=False)]
)
def test_a_product_that_is_replaced_is_compiled_as_it_is(unchecked, product):
    ours = unchecked.MSSAR(12, (1, 2), backend="reference").eval()
    ours.branches[0].reduce = product()
    x = torch.randn(4, 12, 6, 6)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert_close(compiled(x), ours(x))


# --- On a GPU


def steps(net, x, optimiser, count):
    for _ in range(count):
        optimiser.zero_grad(set_to_none=True)
        loss = net(x).square().mean()
        loss.backward()
        optimiser.step()
    return loss


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_replays_as_a_graph(unchecked, dtype):
    from mssar.networks.resnet import BasicBlock

    torch.manual_seed(0)
    net, x = BasicBlock(64, 64, 1, unchecked.MSSAR).cuda(), maps(32, 64, 14, 14)
    net = net.to(memory_format=torch.channels_last)
    assert net.extra_repr() == "tail=fused on CUDA"
    other = copy.deepcopy(net)

    def step(network):
        network.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = network(x).square().mean()
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(net)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(net)
    net.load_state_dict(other.state_dict())
    for _ in range(3):
        graph.replay()
        expected = step(other)
        assert_close(loss, expected, rtol=1e-5, atol=0)
        for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
            assert apart(a.grad, b.grad) < 1e-3, name
    for name, value in net.named_buffers():
        assert_close(value, other.get_buffer(name), rtol=1e-4, atol=1e-5, msg=name)
        assert not name.endswith("num_batches_tracked") or value == 3


@pytest.mark.gpu
@pytest.mark.parametrize("recalibration", ["mssar", "none"])
def test_no_step_waits_for_the_device(unchecked, recalibration):
    network = unchecked.create_model("resnet8", recalibration, backend="auto").cuda()
    assert "tail=fused on CUDA" in repr(network)
    x = maps(8, 3, 32, 32)
    optimiser = torch.optim.SGD(network.parameters(), 0.01)
    steps(network, x, optimiser, 3)
    with torch.inference_mode():
        network.eval()(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = steps(network.train(), x, optimiser, 2)
        with torch.inference_mode():
            network.eval()(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(loss.item())
