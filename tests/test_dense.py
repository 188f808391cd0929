"""Dense steps that carry their main vector's means along: as the modules have them."""

import contextlib
import copy
import re

import pytest
import torch
from tails import DEVICE, LAYOUTS, Launched, apart, differentiated, keep_off_zero
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mssar
from mssar import fused
from mssar.networks.densenet import DenseBlock

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")

SLACK = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


def blocks(scales=(1, 2, 4), growth=6, inputs=10, steps=2, package=mssar):
    """The same block with both back ends, with numbers as after some training."""
    block = package.networks.densenet.DenseBlock
    made = []
    for backend in ("triton", "reference"):

        def layer(channels, context_channels, backend=backend):
            options = {"context_channels": context_channels, "backend": backend}
            return package.MSSAR(channels, scales, **options)

        made.append(block(steps, inputs, growth, layer, "multi").to(DEVICE))
    for module in made[0].modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    made[1].load_state_dict(made[0].state_dict())
    for name, module in [*made[0].named_modules(), *made[1].named_modules()]:
        if isinstance(module, nn.BatchNorm2d):  # BN of a few values is well-conditioned then
            module.eps = 1e-2 if name.endswith("norm1") else 3e-2
    return made


def inputs(size, channels=10, batch=4, layout="channels last"):
    x = torch.randn(batch, channels, *size, device=DEVICE) + 0.5
    return x.contiguous(memory_format=LAYOUTS[layout])


def assert_alike(ours, theirs, x, slack=SLACK[torch.float32]):
    """Outputs and gradients of everything, and what is left in running statistics."""
    exact = copy.deepcopy(theirs).double()
    with torch.no_grad():
        probe = torch.randn_like(copy.deepcopy(theirs)(x))
    expected = differentiated(exact, [x.double()], exact, probe.double())
    found = differentiated(ours, [x], ours, probe)
    plain = differentiated(theirs, [x], theirs, probe)
    names = ["out", "x", *(name for name, _ in ours.named_parameters())]
    for name, a, b, c in zip(names, found, plain, expected, strict=True):
        assert apart(a, c) <= slack + 3 * apart(b, c), name
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name), atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        ((8, 8), "channels last", {}),
        ((7, 9), "contiguous", {"steps": 3}),
        ((5, 4), "channels last", {"growth": 40, "inputs": 30, "steps": 3}),
        ((4, 4), "channels last", {"growth": 12, "inputs": 24}),
        ((3, 5), "contiguous", {"growth": 1, "inputs": 1, "scales": (1,)}),
        ((8, 8), "channels last", {"scales": (1, 2)}),  # cells that are no scale's regions
        ((7, 9), "channels last", {"scales": (2, 3)}),  # nor is one scale within the other
        ((2, 3), "channels last", {}),  # two scales with the same regions
        ((9, 8), "channels last", {"scales": (4, 1)}),
        ((8, 8), "channels last", {"steps": 1}),
    ],
    ids=str,
)
def test_a_training_step_is_the_modules(size, layout, options):
    ours, theirs = blocks(**options)
    x = inputs(size, options.get("inputs", 10), layout=layout)
    assert ours._fused(x)
    assert_alike(ours, theirs, x)


def test_a_cell_of_many_positions():
    # Three samples: of two, the norm of scale 1 keeps the difference of two means that are nearly
    # the same, and how that is rounded differs from CPU to CPU.
    ours, theirs = blocks(growth=4, steps=2)
    assert_alike(ours, theirs, inputs((34, 33), batch=3))


@pytest.mark.parametrize("size", [(8, 8), (7, 5)], ids=str)
def test_evaluation_has_gradients_too(size):
    ours, theirs = (block.eval() for block in blocks())
    assert_alike(ours, theirs, inputs(size))


@pytest.mark.parametrize("batch", [1, 5])
def test_evaluation_uses_running_statistics(batch):
    ours, theirs = (block.eval() for block in blocks())
    x = inputs((9, 8), batch=batch)
    with torch.no_grad():
        expected = theirs(x)
        torch.testing.assert_close(ours(x), expected, atol=2e-6, rtol=1e-5)
        with Launched() as names:
            found = ours(x)
    assert names == ["region_means", "dense_step", "dense_step"]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_some_layers_train_and_some_do_not():
    ours, theirs = blocks()
    for block in (ours, theirs):
        block.steps[0].recalibrate.eval()
    assert_alike(ours, theirs, inputs((8, 8)))


@pytest.mark.usefixtures("rounded_halves")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_as_near_as_the_modules(dtype):
    ours, theirs = blocks()
    x = inputs((8, 8), batch=8)
    keep_off_zero(theirs, [x])
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    probe = torch.randn(8, 22, 8, 8, device=DEVICE)
    expected = differentiated(exact, [x.double()], exact, probe.double())
    with torch.autocast(DEVICE, dtype):
        found = differentiated(ours, [x], ours, probe)
        plain = differentiated(theirs, [x], theirs, probe)
    # All branches at once: each has two hidden channels, whose gradients are small by chance.
    names = ["out", "x", *(re.sub(r"\.\d+", "", name) for name, _ in ours.named_parameters())]
    for kind in dict.fromkeys(names):
        a, b, c = (
            torch.cat([t.flatten() for name, t in zip(names, made, strict=True) if name == kind])
            for made in (found, plain, expected)
        )
        assert apart(a, c) <= SLACK[dtype] + 3 * apart(b, c), kind


def test_ops_and_direct_calls_are_the_same():
    ours, _ = blocks()
    x, other = inputs((6, 5)), copy.deepcopy(ours)
    probe = torch.randn(4, 22, 6, 5, device=DEVICE)
    direct = differentiated(ours, [x], ours, probe)
    with Launched() as names:
        watched = differentiated(other, [x], other, probe)
    forth = ["region_means", *["dense_step", "track"] * 2]
    assert names == [*forth, *["dense_step_backward"] * 2, "region_means_backward"]
    for a, b in zip([*direct, *ours.buffers()], [*watched, *other.buffers()], strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_over_cells_and_back(size, layout):
    x = inputs(size, 5, layout=layout).requires_grad_()
    cells = torch.ops.mssar.region_means(x, [1, 2])
    expected = mssar.Regional(4).pool(x).permute(0, 2, 3, 1).flatten(0, 2)
    assert cells.shape == (len(expected), 16)
    torch.testing.assert_close(cells[:, :5], expected, atol=1e-6, rtol=1e-5)
    assert not cells[:, 5:].any()
    probe = torch.randn_like(cells)
    (found,) = torch.autograd.grad(cells, x, probe)
    (wanted,) = torch.autograd.grad(expected, x, probe[:, :5])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert found.stride() == x.stride()


def test_means_are_carried_on():
    ours, _ = blocks(steps=1, inputs=12)
    x, layer = inputs((7, 6), 12), ours.steps[0].recalibrate
    (bound,) = ours._fused(x)
    cells = fused.region_means(x, layer)
    out, carried = fused.dense_step(ours.steps[0].convolve(x), cells, bound, carry=True)
    assert carried.shape == (4 * 16, 32)
    torch.testing.assert_close(carried[:, :12], cells[:, :12], atol=0, rtol=0)
    expected = mssar.Regional(4).pool(out).permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(carried[:, 12:18], expected, atol=1e-6, rtol=1e-5)
    assert not carried[:, 18:].any()


@pytest.mark.parametrize("which", [0, 1], ids=["out", "means"])
def test_one_of_two_results_is_used(which):
    ours, _ = blocks(steps=1)
    x, layer = inputs((6, 6)), ours.steps[0].recalibrate
    new = inputs((6, 6), 6).requires_grad_()
    grads = []
    for mode in (contextlib.nullcontext(), Launched()):  # directly, and by the op
        with mode:
            (bound,) = ours._fused(x)
            made = fused.dense_step(new, fused.region_means(x, layer), bound, carry=True)
            grads.append(torch.autograd.grad(made[which].square().sum(), new)[0])
    z = layer.importance(new, x).detach()
    out = z * new
    value = out if which == 0 else mssar.Regional(4).pool(out)
    (expected,) = torch.autograd.grad(value.square().sum(), new)
    for found in grads:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Launched])
def test_no_second_derivatives(mode):
    ours, _ = blocks(steps=1)
    x = inputs((4, 4)).requires_grad_()

    def twice():
        (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
        grad.sum().backward()

    with mode(), pytest.raises(RuntimeError, match="no second derivatives"):
        twice()


# --- Which way a block goes


def test_what_stands_in_the_way():
    x = inputs((8, 8))
    ours, theirs = blocks()
    assert ours._fused(x)
    assert not theirs._fused(x)
    handle = ours.steps[1].recalibrate.register_forward_hook(lambda *_: None)
    assert not ours._fused(x)  # they are called
    handle.remove()
    ours.steps[1].recalibrate.backend = "auto"
    assert not ours._fused(x)
    ours.steps[0].recalibrate.backend = "auto"
    assert bool(ours._fused(x)) == x.is_cuda
    assert not blocks(scales=(1,), growth=2)[1]._fused(x)


def test_asked_for_by_name_they_say_what_stands_in_the_way():
    x = inputs((8, 8))
    ours, _ = blocks()
    with pytest.raises(ValueError, match="single value"):
        ours(inputs((8, 8), batch=1))
    with pytest.raises(ValueError, match=r"x is torch\.float16, the layer torch\.float32"):
        ours(x.half())
    ours.steps[0].recalibrate.branches[0].norm1.eval()
    with pytest.raises(ValueError, match="norms train and others do not"):
        ours(x)
    ours, _ = blocks()
    ours.steps[1].recalibrate.branches[2].norm2 = nn.InstanceNorm2d(6)
    with pytest.raises(ValueError, match="InstanceNorm2d is no plain BatchNorm2d"):
        ours(x)
    with pytest.raises(ValueError, match="finer than 16×16"):
        blocks(scales=(5, 7))[0](x)


def test_sliding_windows_go_their_own_way():
    def layer(channels, context_channels):
        options = {"context_channels": context_channels, "backend": "triton"}
        return mssar.MSSAR(channels, (1, 2), "sliding", **options)

    block = DenseBlock(2, 4, 4, layer, "multi").to(DEVICE)
    with Launched() as names:
        block(inputs((5, 5), 4))
    assert "dense_step" not in names


@pytest.mark.parametrize("kind", ["", ".recalibrate"])
def test_a_step_of_ones_own_is_called(kind):
    """Or a layer: a subclass may do anything, and here gives the square."""
    ours, theirs = blocks()
    for net in (ours, theirs):
        module = net.get_submodule(f"steps.1{kind}")
        plain = type(module).forward
        own = {"forward": lambda self, *x, plain=plain: plain(self, *x).square()}
        module.__class__ = type("Squared", (type(module),), own)
    x = inputs((4, 4))
    with Launched() as names:
        found = ours(x)
    assert names == []
    torch.testing.assert_close(found, theirs(x))


# --- Compilers


@pytest.fixture
def filled():
    """Memory that nothing was written to, such as lies between sections, is the same each time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_ops_are_what_they_say(filled):
    del filled
    ours, _ = blocks(steps=1, inputs=4)
    x = torch.randn(3, 4, 5, 4, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.mssar.region_means.default, (x, [1, 2, 4]))
    (bound,) = ours._fused(x)
    new = torch.randn(3, 6, 5, 4, device=DEVICE, requires_grad=True)
    cells = torch.ops.mssar.region_means(x, [1, 2, 4]).detach().requires_grad_()
    for carry in (True, False):
        settings = bound.settings(None, "ieee").written()
        arguments = (new, cells, bound.trained, [], carry, settings)
        torch.library.opcheck(torch.ops.mssar.dense_step.default, arguments)
        arguments = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        torch.library.opcheck(torch.ops.mssar.dense_step_forward.default, arguments)


def test_compiled_whole(unchecked):
    ours, theirs = blocks(package=unchecked)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=graphs, fullgraph=True)
    for batch in (3, 7):
        x = inputs((4, 5), batch=batch).requires_grad_()
        probe = torch.randn(batch, 22, 4, 5, device=DEVICE)
        expected = differentiated(theirs, [x], theirs, probe)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        found = [y, *torch.autograd.grad(y, [x, *ours.parameters()], probe)]
        for a, b in zip(found, expected, strict=True):
            assert apart(a, b) <= 1e-4
    assert graphs.frame_count == 1
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name), atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.gpu
def test_a_captured_step_replays():
    ours, _ = blocks()
    x = inputs((8, 8), batch=64)
    probe = torch.randn(64, 22, 8, 8, device=DEVICE)

    def step():
        for p in ours.parameters():
            p.grad = None
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = ours(x)
        y.backward(probe.to(y.dtype))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    expected = {name: p.grad.clone() for name, p in ours.named_parameters()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    graph.replay()
    torch.cuda.synchronize()
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=0, rtol=0, msg=name)
