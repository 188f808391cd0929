"""Sizes that a tracer leaves open: partitions by index, a graph for many sizes, exports for all."""

import copy
import time

import pytest
import torch
from test_coordinates import EXACT, FORMATS, assert_agree, laid_out, random
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend as Graphs
from torch.export import Dim, export
from torch.fx.experimental import symbolic_shapes
from torch.testing import assert_close

from mssar import Regional, Sliding, partition
from mssar.scales import Products, coordinate_sets

SIZES = [(8, 8), (7, 9), (4, 13), (5, 4), (12, 1), (1, 1)]  # even, ragged, a position a region
LAYERS = [
    pytest.param({}, id="nested"),
    pytest.param({"scales": (2, 3)}, id="separate"),
    pytest.param({"strategy": "sliding"}, id="sliding"),
]
asks = pytest.mark.skipif(
    not hasattr(symbolic_shapes, "has_static_value"), reason="since torch 2.8"
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


# --- By index, against what is done where sizes are known


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("scale", [1, 2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_ways_agree(size, scale, memory_format):
    grid = Regional(scale).grid(size)
    for way, by_runs, start, end in (
        (partition.mean_by_index, partition.mean_by_runs, size, grid),
        (partition.repeat_by_index, partition.repeat_by_runs, grid, size),
    ):
        x, y = laid_out(random(2, 3, *start), memory_format), random(2, 3, *start).requires_grad_()
        assert_agree(way(x, end), by_runs(y, end), x, y, seed=1)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("scales", [(1,), (3,), (2, 4, 1), (3, 2), (8, 4), (5, 6)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_products_do_what_regions_do(size, scales, memory_format):
    """Means, weights' average and its product with the map; gradients, too."""
    usual = coordinate_sets("regional", scales)
    found = []
    for sets in (usual, usual.as_products()):
        x = laid_out(random(2, 3, *size), memory_format)
        pools = sets.by_scale(sets.pool(x))
        weights = [random(2, 3, p[0, 0].numel(), seed=1).view_as(p) for p in pools]
        z = sets.average(weights, size)
        y = sets.multiply(x, z)
        (gradient,) = torch.autograd.grad(sum(p.square().sum() for p in pools) + y.sum(), x)
        means = [p.flatten(2) for p in pools]
        found.append([*means, sets.spread(z, size), *sets.spread_each(weights, size), y, gradient])
    assert_close(found[1], found[0], **EXACT)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 9), (1, 7)])
@pytest.mark.parametrize("scales", [(2, 1), (4, 1, 2), (5, 2)], ids=str)
def test_on_few_positions_regions_are_empty_that_nobody_consults(size, scales, monkeypatch):
    usual = coordinate_sets("regional", scales)
    monkeypatch.setattr("mssar.scales.is_open", lambda _: True)
    products, x = usual.as_products(), random(2, 3, *size)
    pools, fewer = (sets.by_scale(sets.pool(x)) for sets in (products, usual))
    for scale, found, right in zip(scales, pools, fewer, strict=True):
        assert found.shape == (2, 3, scale**2, 1)
        assert_close(found[found.ne(0)], right.flatten(), **EXACT)
    each = products.spread_each(pools, size)
    assert_close(each, usual.spread_each(fewer, size), **EXACT)
    average = products.spread(products.average(pools, size), size)
    assert_close(average, sum(each[1:], each[0]) / len(each), **EXACT)


@pytest.mark.parametrize("way", [partition.mean_by_index, partition.repeat_by_index])
def test_gradients_have_gradients(way):
    x = random(1, 1, 2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(way, (x, (1, 2) if "mean" in way.__name__ else (5, 3)))


@pytest.mark.parametrize("scale", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("size", SIZES)
def test_ways_over_windows_agree(size, scale):
    sliding = Sliding(scale)
    x, y = (random(2, 3, *size).requires_grad_() for _ in range(2))
    reach = sliding._reach(size, x.device)
    assert reach == sliding.radius(size)
    for axis in (2, 3):
        ours = partition.window_mean_by_index(x, axis, reach)
        theirs = partition.window_mean(y, axis, sliding.radius(size))
        assert_agree(ours, theirs, x, y, seed=1)


@pytest.mark.parametrize("root", [1, 2**12 - 1, 2**25 + 1])
def test_roots_of_open_sizes_are_exact(root):
    for extra, radius in ((-1, root - 1), (0, root), (1, root)):
        assert Sliding(1)._reach((root**2 + extra, 1), torch.device("cpu")) == radius


def test_what_is_infinite_stays_in_its_region():
    x = random(1, 1, 7, 7)
    x[..., 4, 4] = torch.inf  # beside a border on both axes
    assert_close(partition.mean_by_index(x, (2, 2)), partition.mean_by_runs(x, (2, 2)), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("products", [False, True])
def test_half_precision_sums_do_not_run_over(dtype, products):
    x = (torch.randn(1, 3, 64, 63) + 100.0).to(dtype).requires_grad_()
    if products:
        sets = Products((Regional(2),), 0)
        (pooled,) = (means.view(1, 3, 2, 2) for means in sets.by_scale(sets.pool(x)))
    else:
        pooled = partition.mean_by_index(x, (2, 2))
    assert pooled.dtype is dtype
    exact = partition.mean_by_runs(x.double(), (2, 2))
    assert_close(pooled.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    (found,) = torch.autograd.grad(pooled.sum(), x)
    (right,) = torch.autograd.grad(exact.sum(), x)
    assert_close(found, right, rtol=torch.finfo(dtype).eps, atol=0)


# --- torch.compile


# resnet8's last map is a quarter as wide: even, ragged, not square.
IMAGES = [(32, 32), (64, 64), (48, 48), (40, 40), (36, 36), (40, 64), (50, 33)]


@asks
@pytest.mark.parametrize("dynamic", [None, True], ids=["noticed", "said"])
def test_a_network_is_traced_for_many_sizes_at_once(unchecked, dynamic):
    network = unchecked.create_model("resnet8", "mssar").eval()
    graphs = Graphs("eager")
    compiled = torch.compile(network, backend=graphs, fullgraph=True, dynamic=dynamic)
    began = time.process_time()
    for size in IMAGES:
        x = torch.randn(2, 3, *size)
        assert_close(compiled(x), network(x))
    seconds = time.process_time() - began
    # One for the first size, one for squares, one for all others: 3 and 2.
    assert graphs.frame_count <= (3 if dynamic is None else 2)
    assert seconds < 60, seconds  # of a CPU: 9 to 20, where it was minutes


@asks
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("options", LAYERS)
def test_gradients_of_open_sizes(unchecked, options, memory_format):
    layer, graphs = unchecked.MSSAR(6, dtype=torch.float64, **options), Graphs("aot_eager")
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, backend=graphs, fullgraph=True, dynamic=True)
    for size in ((8, 12), (7, 9), (5, 30)):
        found = []
        for module, run in ((layer, layer), (twin, compiled)):
            x = laid_out(random(4, 6, *size), memory_format)
            y = run(x)
            y.backward(random(*y.shape, seed=1))
            found.append((y, x.grad, [p.grad for p in module.parameters()]))
            module.zero_grad()
        assert_close(found[1], found[0], **EXACT)
        assert found[1][0].stride() == found[0][0].stride()
        assert_close(list(twin.buffers()), list(layer.buffers()), **EXACT)
    assert graphs.frame_count == 2  # one forward and one backward


@asks
def test_axes_shorter_than_a_scale(unchecked):
    """They have a position a region: another graph than longer ones, and no other."""
    layer, graphs = unchecked.MSSAR(6, dtype=torch.float64).eval(), Graphs("eager")
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    for size in ((3, 7), (2, 8), (2, 30), (9, 3), (7, 2)):
        x = random(5, 6, *size)
        assert_close(compiled(x), layer(x), **EXACT)
    assert graphs.frame_count == 2  # short and long, long and short


# --- torch.export


def exported(
    module: nn.Module, x: Tensor, dims: dict[int, object], *, strict: bool = False
) -> nn.Module:
    return export(module, (x,), dynamic_shapes=(dims,), strict=strict).module()


@asks
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
@pytest.mark.parametrize("options", LAYERS)
def test_exports_for_any_size(unchecked, options, strict):
    layer = unchecked.MSSAR(6, dtype=torch.float64, **options).eval()
    dims = {0: Dim("n", min=1, max=64), 2: Dim("h", min=4, max=512), 3: Dim("w", min=4, max=512)}
    program = exported(layer, random(2, 6, 9, 8), dims, strict=strict)
    for shape in ((1, 6, 4, 4), (3, 6, 4, 5), (2, 6, 16, 24), (2, 6, 7, 7), (1, 6, 31, 5)):
        x = random(*shape)
        assert_close(program(x), layer(x), **EXACT)


@asks
@pytest.mark.parametrize("step", [1, 4], ids=["any", "multiples"])
def test_networks_export_for_any_size(unchecked, step):
    network = unchecked.create_model("resnet8", "mssar").double().eval()
    n, h, w = Dim("n", min=1, max=64), *(Dim(d, min=16 // step, max=128) for d in "hw")
    began = time.process_time()
    program = exported(network, random(2, 3, 32, 32), {0: n, 2: step * h, 3: step * w})
    seconds = time.process_time() - began
    for shape in ((1, 3, 64, 64), (3, 3, 128, 64), (2, 3, 72, 68)):
        x = random(*shape)
        assert_close(program(x), network(x), **EXACT)
    if step == 1:
        x = random(2, 3, 50, 37)
        assert_close(program(x), network(x), **EXACT)
    assert seconds < 30, seconds  # 4 to 7 on a CPU


@asks
@pytest.mark.parametrize("options", LAYERS[:2])
def test_maps_may_be_smaller_than_a_scale(unchecked, options):
    layer = unchecked.MSSAR(6, dtype=torch.float64, **options).eval()
    dims = {2: Dim("h", min=2, max=64), 3: Dim("w", min=2, max=64)}
    program = exported(layer, random(2, 6, 8, 8), dims)
    for size in ((2, 2), (3, 3), (2, 9), (3, 2), (4, 3), (5, 7)):
        x = random(2, 6, *size)
        assert_close(program(x), layer(x), **EXACT)


@asks
@pytest.mark.parametrize("scales", [(1, 2, 4), (2, 3), (8, 2)], ids=str)
def test_exports_in_half_precision_and_from_another_map(unchecked, scales):
    layer = unchecked.MSSAR(6, scales, context_channels=4, dtype=torch.bfloat16).eval()
    x, context = (torch.randn(2, c, 9, 10, dtype=torch.bfloat16) for c in (6, 4))
    dims = {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    program = export(layer, (x, context), dynamic_shapes=(dims, dims)).module()
    x, context = (torch.randn(2, c, 17, 13, dtype=torch.bfloat16) for c in (6, 4))
    assert program(x, context).dtype is torch.bfloat16
    assert_close(program(x, context), layer(x, context), atol=2e-2, rtol=2e-2)


@asks
def test_sets_of_ones_own_are_exported_as_they_are(unchecked):
    class Largest(unchecked.Regional):
        def pool(self, x):
            return torch.nn.functional.adaptive_max_pool2d(x, (self.scale, self.scale))

    layer = unchecked.MSSAR(6, (1, 2), Largest).eval()
    x = torch.randn(2, 6, 8, 8)
    assert_close(export(layer, (x,)).module()(x), layer(x))


@asks
def test_weights_are_exported(unchecked):
    class Looks(nn.Module):
        def __init__(self, scales: tuple[int, ...]) -> None:
            super().__init__()
            self.layer = unchecked.MSSAR(6, scales, dtype=torch.float64).eval()

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return self.layer.importance(x), self.layer.importance(x, per_scale=True)

    for scales in ((4, 1, 2), (2, 3), (1,)):
        looks = Looks(scales)
        program = exported(looks, random(2, 6, 8, 8), {2: Dim.DYNAMIC, 3: Dim.DYNAMIC})
        x = random(2, 6, 11, 7)
        assert_close(program(x), looks(x), **EXACT)


@asks
def test_exports_that_train_say_how_small_a_map_may_be(unchecked):
    """Regions that are empty would be counted by BN."""
    layer = unchecked.MSSAR(6, dtype=torch.float64)
    with pytest.raises(torch._dynamo.exc.UserError, match=r"h = Dim\('h', min=4, max=64\)"):
        exported(layer, random(2, 6, 8, 8), {2: Dim("h", min=2, max=64)})
    program = exported(copy.deepcopy(layer), random(2, 6, 8, 8), {2: Dim("h", min=4, max=64)})
    x = random(2, 6, 5, 8)
    assert_close(program(x), layer(x), **EXACT)


@asks
def test_an_exported_program_needs_nothing_of_ours(unchecked):
    layer = unchecked.MSSAR(6).eval()
    program = export(layer, (torch.randn(2, 6, 8, 8),), dynamic_shapes=({2: Dim("h", min=4)},))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [target for target in targets if "mssar" in target or "autograd" in target]
