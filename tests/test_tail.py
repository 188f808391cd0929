"""A block's tail by kernels: it trains, compiles and replays with the modules' numbers."""

import copy
import math
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from device import never_waiting
from tails import (
    DEVICE,
    EVALUATED,
    TRAINED,
    Case,
    Launched,
    Tail,
    apart,
    differentiated,
    launched,
    layer,
    maps,
)
from torch import nn
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import mssar
from mssar.kernels.launch import Kernel
from mssar.kernels.tail.op import NO_SECOND

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
    assert len(buffers) == 3 * len(norms) + 1  # the layer's coordinates
    for (name, a), b, c in zip(buffers.items(), theirs.buffers(), wide.buffers(), strict=True):
        assert a.dtype is b.dtype, name
        if name.endswith("num_batches_tracked"):
            assert a == b == 3, name
        else:
            assert_close(a.double(), c.double(), rtol=2e-6, atol=2e-6, msg=name)


def test_running_statistics_of_half_types():
    case = Case()
    ours, x = Tail(case).to(torch.bfloat16), [x.to(torch.bfloat16) for x in case.maps()]
    theirs = copy.deepcopy(ours)
    ours.kernels(*x), theirs(*x)
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert a.dtype is b.dtype, name
        assert_close(a.double(), b.double(), rtol=2**-6, atol=2**-6, msg=name)


def test_a_networks_step_and_what_it_leaves():
    """Loss, gradients and statistics: as near to float64 as the reference comes."""
    torch.manual_seed(1)
    ours = mssar.create_model("resnet8", "mssar", backend="triton").to(DEVICE)
    theirs = mssar.create_model("resnet8", "mssar", backend="reference").to(DEVICE)
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
            counts = [b for n, b in network.named_buffers() if n.endswith("num_batches_tracked")]
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


def test_a_network_without_recalibration_has_nothing_to_fuse():
    network = mssar.create_model("resnet8", "none").to(DEVICE)
    assert "tail=unfused (recalibrated by Identity)" in repr(network)
    assert launched(network, maps(4, 3, 8, 8)) == []


# --- What a pass takes


class Taken:
    """Launches and allocations meanwhile."""

    def __init__(self, monkeypatch):
        self.launches, self.empty, self.empty_like = [], 0, 0
        call, empty, empty_like = Kernel.__call__, torch.empty, torch.empty_like

        def launch(kernel, *args):
            function = kernel.function
            self.launches.append(getattr(function, "fn", function).__name__)
            call(kernel, *args)

        def count(name, real):
            def made(*args, **options):
                setattr(self, name, getattr(self, name) + 1)
                return real(*args, **options)

            return made

        monkeypatch.setattr(Kernel, "__call__", launch)
        monkeypatch.setattr(torch, "empty", count("empty", empty))
        monkeypatch.setattr(torch, "empty_like", count("empty_like", empty_like))

    def take(self):
        found = self.launches, self.empty + self.empty_like
        self.launches, self.empty, self.empty_like = [], 0, 0
        return found


FORWARD = ["sums", "prepare", "reduce", "expand", "apply"]
BACKWARD = ["gather", "gates", "settle", "expand_backward", "reduce_backward", "scatter"]


@pytest.mark.parametrize(
    ("case", "tracked"),
    [
        (Case(), ["track"]),
        (Case(scales=(1,), activation="silu", layout="contiguous"), ["track"]),
        (Case(norm=False, shortcut=False, activation=None), ["track"]),
        (Case(frozen="front"), ["track"]),
        (Case(frozen="all"), []),
    ],
    ids=str,
)
def test_launches_and_allocations_of_a_pass(case, tracked, monkeypatch):
    """Each costs time that small maps do not have; whoever adds one says so here."""
    tail, inputs = Tail(case), [x.requires_grad_() for x in case.maps()]
    probe = torch.randn_like(inputs[0])
    torch.autograd.grad(tail.kernels(*inputs), inputs, probe)  # plans are made once
    taken = Taken(monkeypatch)
    y = tail.kernels(*inputs)
    launches, allocations = taken.take()
    assert launches == [*FORWARD, *tracked], "a forward pass is five launches, and one that tracks"
    assert allocations == 3, "the output, what the gradient needs, and what it does not"
    torch.autograd.grad(y, inputs, probe)
    launches, allocations = taken.take()
    assert launches == BACKWARD, "a backward pass is six launches"
    assert allocations == 3 + (case.activation is not None), (
        "gradients of x, of parameters, and behind the activation; and what is not kept"
    )
    with torch.inference_mode():
        tail.eval().kernels(*inputs)
    launches, allocations = taken.take()
    assert (launches, allocations) == (FORWARD, 3), "evaluation is five launches"


# --- Gradients, however they are asked for


@pytest.mark.parametrize(
    "case", [Case(scales=(1, 2)), Case(scales=(2,), activation="silu")], ids=str
)
def test_ops_and_eager_calls_launch_the_same(case):
    """A mode that looks on sees ops; without one there are none. The numbers are the same."""
    tail, inputs = Tail(case), case.maps()
    probe, other = torch.randn_like(inputs[0]), copy.deepcopy(tail)
    found = differentiated(tail.kernels, inputs, tail, probe)
    with Launched() as names:
        seen = differentiated(other.kernels, inputs, other, probe)
    assert names == [*TRAINED, "tail_backward"]
    for name, a, b in zip(tail.names(inputs), found, seen, strict=True):
        assert torch.equal(a, b), name
        assert a.stride() == b.stride(), name
    for name, buffer in tail.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    """The kernels count in memory that the graph holds."""
    case = Case(scales=(1, 2))
    tail, inputs = Tail(case), [x.requires_grad_() for x in case.maps()]
    y, probe = tail.kernels(*inputs), torch.randn_like(inputs[0])
    wanted = [*inputs, *tail.parameters()]
    first = torch.autograd.grad(y, wanted, probe, retain_graph=True)
    second = torch.autograd.grad(y, wanted, probe)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", ["as it was", "lost"])  # as offloading to pinned memory does
def test_what_is_kept_may_be_kept_elsewhere(layout):
    case = Case(scales=(1, 2), activation="silu")
    tail, inputs = Tail(case), case.maps()
    probe, other, kept = torch.randn_like(inputs[0]), copy.deepcopy(tail), []
    expected = differentiated(tail.kernels, inputs, tail, probe)

    def pack(x):
        kept.append(x.shape)
        if layout == "lost":
            return torch.empty(x.shape, dtype=x.dtype).copy_(x)
        return x.detach().cpu().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(DEVICE)):
        found = differentiated(other.kernels, inputs, other, probe)
    assert len(kept) == 3, "x, the shortcut, and the rest in one"
    for name, a, b in zip(tail.names(inputs), found, expected, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    case = Case(scales=(1, 2))
    tail, inputs = Tail(case), case.maps()
    probe, other = torch.randn_like(inputs[0]), copy.deepcopy(tail)
    expected = differentiated(tail.kernels, inputs, tail, probe)
    x, shortcut = (x.detach().requires_grad_() for x in inputs)
    y = checkpoint(other.kernels, x, shortcut, use_reentrant=reentrant)
    y.backward(probe)
    found = [y.detach(), x.grad, shortcut.grad, *(p.grad for p in other.parameters())]
    for name, a, b in zip(tail.names(inputs), found, expected, strict=True):
        assert torch.equal(a, b), name
    assert other.norm.num_batches_tracked == 2, "it is computed twice, as by modules"


@pytest.mark.parametrize("through", ["eager", "op"])
def test_there_are_no_second_derivatives(through):
    ours, x = layer(scales=(1,)), maps(2, 12, 2, 2).requires_grad_()

    def twice():
        (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
        grad.sum().backward()

    with Launched() if through == "op" else nullcontext(), pytest.raises(RuntimeError) as raised:
        twice()
    assert str(raised.value) == NO_SECOND
    ours.backend = "reference"
    twice()
    assert x.grad.any()


def forward_derivative(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (lambda call, x: torch.func.grad(lambda x: call(x).sum())(x), "torch.func transforms it"),
        (lambda call, x: torch.func.vmap(call)(x[None]), "torch.func transforms it"),
        (lambda call, x: torch.func.jvp(call, (x,), (x,))[1], "torch.func transforms it"),
        (torch.no_grad()(forward_derivative), "forward derivatives are asked for"),
    ],
    ids=["grad", "vmap", "jvp", "forward"],
)
def test_functions_of_functions_are_for_the_reference(transform, reason):
    ours, x = layer(scales=(1,)).eval(), maps(2, 12, 2, 2)
    with pytest.raises(ValueError, match="cannot run this MSSAR: " + re.escape(reason)):
        transform(ours, x)
    ours.backend = "reference"
    assert transform(ours, x).any()


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
def test_no_step_waits_for_the_device(unchecked):
    network = unchecked.create_model("resnet8", "mssar", backend="auto").cuda()
    assert "tail=fused on CUDA" in repr(network)
    x = maps(8, 3, 32, 32)
    optimiser = torch.optim.SGD(network.parameters(), 0.01)
    steps(network, x, optimiser, 3)
    with torch.inference_mode():
        network.eval()(x)
    torch.cuda.synchronize()
    with never_waiting():
        loss = steps(network.train(), x, optimiser, 2)
        with torch.inference_mode():
            network.eval()(x)
    assert math.isfinite(loss.item())
