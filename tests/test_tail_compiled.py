"""A block's tail under torch.compile: one graph, the modules' numbers, and cheap ops in it."""

import copy
import math
import sys

import pytest
import torch
from tails import DEVICE, differentiated, maps, worst
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from mssar.kernels.tail.call import Settings, read

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")


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


def test_compiled_graphs_call_ops_that_no_formula_slows_down(unchecked):
    """Autograd's dispatch key costs every call of an op with a formula, differentiated or not."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    called = []

    def keep(graph, _):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        called.append([n for n in names if n.startswith("mssar.")])
        return make_boxed_func(graph.forward)

    make = lambda c: unchecked.MSSAR(c, scales=(1, 2), backend="triton")  # noqa: E731
    net, x = unchecked.networks.BasicBlock(12, 12, 1, make).to(DEVICE), maps()
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    compiled(x).sum().backward()
    assert called == [["mssar.tail_forward.default"], ["mssar.tail_backward.default"]]
    for (name,) in called:
        op = name.removeprefix("mssar.").removesuffix(".default")
        kernels = torch._C._dispatch_dump(f"mssar::{op}")
        assert "\nAutograd" not in kernels, kernels
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [True, None])
def test_another_eps_is_another_graph_and_no_break(unchecked, dynamic):
    """Dynamo leaves floats open that differ, or all of them if it is told to."""
    from torch._dynamo.testing import CompileCounterWithBackend

    make = lambda c: unchecked.MSSAR(c, scales=(1, 2), backend="triton")  # noqa: E731
    net, x = unchecked.networks.BasicBlock(12, 12, 1, make).to(DEVICE), maps(4, 12, 4, 4)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter, dynamic=dynamic)
    for eps, graphs in ((1e-5, 1), (1e-3, 2), (0.5, 3), (1e-3, 3)):
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = eps
        with torch.no_grad():
            assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)
        assert counter.frame_count == graphs
    torch.compiler.reset()


@pytest.mark.parametrize("activation", ["relu", "silu", None])
@pytest.mark.parametrize("eps", [1e-5, 0.1, 1 / 3, 1e-12, 0, math.inf])
def test_settings_are_read_as_they_were_written(activation, eps):
    settings = Settings((1, 2, 4), (eps, 0.1, 1e-3), activation, True, False, True, "tf32")
    assert read(settings.written()) == settings
    assert read(settings._replace(scales=(3,), norm=False).written()).tensors == 10


def test_a_compiled_block_takes_any_batch_with_one_graph_more(unchecked, monkeypatch):
    jaxtyping = pytest.importorskip("jaxtyping")  # its checks take sizes to be numbers
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    from torch._dynamo.testing import CompileCounterWithBackend

    from mssar.networks.resnet import BasicBlock

    make = lambda c: unchecked.MSSAR(c, scales=(1, 2), backend="triton")  # noqa: E731
    net = BasicBlock(12, 12, 1, make).to(DEVICE)
    other = copy.deepcopy(net)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for batch, graphs in ((4, 1), (6, 2), (3, 2), (5, 2)):
        x = maps(batch, 12, 4, 4)
        probe, found = torch.randn_like(x), []
        for module, owner in ((compiled, net), (other, other)):
            found.append(differentiated(module, [x], owner, probe))
        names = ["out", "x", *(n for n, _ in net.named_parameters())]
        assert worst(*found, names)[0] < 1e-5
        assert counter.frame_count == graphs, "the second size makes sizes symbols, once"
    torch.compiler.reset()


def forward_derivative(call, x):
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize(
    ("transform", "ours"),
    [
        (lambda c, f, x: c(grad(lambda x: f(x).square().sum()))(x), False),
        (lambda c, f, x: c(vmap(f))(x[None]), False),
        (lambda c, f, x: forward_derivative(c(f), x), False),
        (lambda c, f, x: c(lambda x: functional_call(f, dict(f.named_parameters()), x))(x), True),
        (lambda c, f, x: c(f)(x), True),
    ],
    ids=["grad", "vmap", "forward", "call", "plain"],
)
def test_functions_of_functions_are_for_the_modules_when_compiled_too(
    unchecked, monkeypatch, transform, ours
):
    fused, called = sys.modules["mssar.fused"], []
    monkeypatch.setattr(fused, "chosen", lambda backend, _: backend == "auto")

    def keep(graph, _):
        called.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    layer, x = unchecked.MSSAR(12, (1, 2), backend="auto").to(DEVICE).eval(), maps(2, 12, 4, 4)
    torch.compiler.reset()
    found = transform(lambda call: torch.compile(call, backend=keep), layer, x)
    torch.compiler.reset()
    assert any(name.startswith("mssar.") for name in called) is ours
    layer.backend = "reference"
    assert_close(found, transform(lambda call: call, layer, x), rtol=1e-5, atol=1e-5)


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
