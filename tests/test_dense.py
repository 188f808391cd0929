"""Dense steps that carry their main vector's sums along: as the modules have them."""

import copy
import re

import pytest
import torch
from tails import DEVICE, LAYOUTS, Launched, apart, differentiated, keep_off_zero
from torch import nn

import mssar
from mssar.kernels import fused, plan
from mssar.networks.densenet import DenseBlock

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")

SLACK = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


def blocks(scales=(1, 2, 4), growth=6, inputs=10, steps=2):
    """The same block with both back ends, with numbers as after some training."""

    def layer(channels, context_channels, backend):
        return mssar.MSSAR(channels, scales, context_channels=context_channels, backend=backend)

    made = []
    for backend in ("triton", "reference"):

        def factory(channels, context_channels, backend=backend):
            return layer(channels, context_channels, backend)

        made.append(DenseBlock(steps, inputs, growth, factory, "multi").to(DEVICE))
    for module in made[0].modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-2  # BN of a few values is well-conditioned then
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    made[1].load_state_dict(made[0].state_dict())
    for module in made[1].modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-2
    return made


def inputs(size, channels=10, batch=6, layout="channels last"):
    x = torch.randn(batch, channels, *size, device=DEVICE)
    return x.contiguous(memory_format=LAYOUTS[layout])


@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        ((8, 8), "channels last", {}),
        ((7, 9), "contiguous", {}),
        ((4, 4), "channels last", {"growth": 12, "inputs": 10}),
        ((5, 4), "channels last", {"scales": (1, 4)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("later", [True, False], ids=["few rows", "many rows"])
def test_a_training_step_is_the_modules(size, layout, options, later, monkeypatch):
    if not later:  # as if there were: the last program adds up statistics
        monkeypatch.setattr(plan, "LATER", 0)
    ours, theirs = blocks(**options)
    x = inputs(size, layout=layout)
    with torch.no_grad():
        probe = torch.randn_like(copy.deepcopy(theirs)(x))
    exact = copy.deepcopy(theirs).double()
    expected = differentiated(exact, [x.double()], exact, probe.double())
    with Launched() as names:
        found = differentiated(ours, [x], ours, probe)
    assert names.count("dense_step") == 2
    plain = differentiated(theirs, [x], theirs, probe)
    wanted = ["out", "x", *(name for name, _ in ours.named_parameters())]
    for name, a, b, c in zip(wanted, found, plain, expected, strict=True):
        assert apart(a, c) <= SLACK[torch.float32] + 3 * apart(b, c), name
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name), atol=2e-6, rtol=1e-5, msg=name)


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


@pytest.mark.parametrize("batch", [1, 5])
def test_evaluation_uses_running_statistics(batch):
    ours, theirs = (block.eval() for block in blocks())
    x = inputs((9, 8), batch=batch)
    with torch.no_grad(), Launched() as names:
        found = ours(x)
    assert names.count("dense_eval") == 2
    with torch.no_grad():
        torch.testing.assert_close(found, theirs(x), atol=2e-6, rtol=1e-5)


def test_evaluation_with_gradients_takes_the_modules():
    ours, theirs = (block.eval() for block in blocks())
    x = inputs((8, 8)).requires_grad_()
    with Launched() as names:
        found = torch.autograd.grad(ours(x).square().sum(), x)
    assert not names
    torch.testing.assert_close(found, torch.autograd.grad(theirs(x).square().sum(), x))


@pytest.mark.parametrize("size", [(8, 8), (7, 5)], ids=str)
def test_sums_over_regions_and_back(size):
    x = inputs(size).requires_grad_()
    rows = torch.ops.mssar.region_sums(x, [1, 2, 4])
    pieces = []
    for scale in (4, 1, 2):  # the finest first, the others as they are given
        regional = mssar.Regional(scale)
        areas = regional.areas(size, x)
        if areas is None:
            h, w = regional.grid(size)
            areas = size[0] * size[1] / (h * w)
        pieces.append((regional.pool(x) * areas).permute(0, 2, 3, 1).flatten(0, 2))
    expected = torch.cat(pieces)
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)
    probe = torch.randn_like(rows)
    (found,) = torch.autograd.grad(rows, x, probe)
    (wanted,) = torch.autograd.grad(expected, x, probe)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_stands_in_the_way():
    x = inputs((8, 8))
    ours, _ = blocks()
    assert ours._fused(x)
    assert not blocks(scales=(1,))[0]._fused(x)  # no scale is as fine as the rows are
    assert not ours._fused(inputs((2, 2)))  # two scales with the same regions
    assert not ours._fused(inputs((8, 8), batch=1))  # BN of one value: the modules say so
    handle = ours.steps[1].recalibrate.register_forward_hook(lambda *_: None)
    assert not ours._fused(x)
    handle.remove()
    ours.steps[0].recalibrate.branches[0].norm1.eval()
    assert not ours._fused(x)


@pytest.mark.parametrize("kind", ["", ".recalibrate", ".recalibrate.branches.1"])
def test_a_step_of_ones_own_is_called(kind):
    """Or a layer, or a branch: a subclass may do anything, and here gives the square."""
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


def test_the_last_rows_are_not_made():
    ours, _ = blocks(steps=1)
    x = inputs((8, 8))
    rows = fused.region_sums(x, ours.steps[0].recalibrate)
    new = ours.steps[0].convolve(x)
    _, carried = fused.step(new, rows, ours.steps[0].recalibrate, carry=True)
    _, nothing = fused.step(new, rows, ours.steps[0].recalibrate, carry=False)
    assert carried.shape == (rows.shape[0], 16)
    assert nothing.numel() == 0
    torch.testing.assert_close(carried[:, :10], rows, atol=0, rtol=0)


def test_ops_are_what_they_say():
    ours, _ = blocks(steps=1, inputs=4)
    x = torch.randn(4, 4, 5, 4, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.mssar.region_sums.default, (x, [1, 2, 4]))
    branches = ours.steps[0].recalibrate.branches
    params = [p for branch in branches for p in fused._parameters(branch)]
    new = torch.randn(4, 6, 5, 4, device=DEVICE, requires_grad=True)
    rows = torch.ops.mssar.region_sums(x, [1, 2, 4]).detach().requires_grad_()
    arguments = (new, rows, params, [1, 2, 4], [0.0, 1e-2, 1e-2], True, "fp32")
    torch.library.opcheck(torch.ops.mssar.dense_step.default, arguments)


def test_compiled_whole(unchecked):
    net = unchecked.create_model("densenet100", "mssar", backend="triton").block1.to(DEVICE)
    net.steps = net.steps[:2]
    x = inputs((4, 4), channels=24)
    expected = net(x)
    found = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected)


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
