"""Coordinate sets against their definition, and the identities a partition obeys."""

import math
import re

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mssar import Regional, Sliding, partition

SETS = {"regional": Regional, "sliding": Sliding}
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
EXACT = {"rtol": 1e-10, "atol": 1e-10}

sizes = st.tuples(st.integers(1, 33), st.integers(1, 17))
scales = st.integers(1, 7)
seeds = st.integers(0, 2**16)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def laid_out(x: Tensor, memory_format: str) -> Tensor:
    return x.detach().clone(memory_format=FORMATS[memory_format]).requires_grad_()


def on_grid(pools: Tensor, regions: oracle.Regions) -> Tensor:
    return pools.unflatten(2, regions.grid)


def assert_agree(ours: Tensor, theirs: Tensor, x: Tensor, y: Tensor, seed: int) -> None:
    """Two results, and the gradients of a random linear functional of them."""
    torch.testing.assert_close(ours, theirs, **EXACT)
    functional = random(*ours.shape, seed=seed + 1)
    (dx,) = torch.autograd.grad(ours, x, functional)
    (dy,) = torch.autograd.grad(theirs, y, functional)
    torch.testing.assert_close(dx, dy, **EXACT)


# --- Against the definition


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("strategy", SETS)
@settings(deadline=None, max_examples=40)
@given(size=sizes, scale=scales, seed=seeds)
@example(size=(1, 1), scale=4, seed=0)
@example(size=(7, 7), scale=4, seed=0)
@example(size=(14, 14), scale=4, seed=0)
@example(size=(3, 2), scale=7, seed=0)
@example(size=(2, 9), scale=4, seed=0)
@example(size=(33, 17), scale=1, seed=0)
def test_pool_and_spread_follow_the_definition(strategy, memory_format, size, scale, seed):
    ours, theirs = SETS[strategy](scale), oracle.STRATEGIES[strategy](size, scale)
    assert ours.grid(size) == theirs.grid

    x, y = laid_out(random(2, 3, *size, seed=seed), memory_format), random(2, 3, *size, seed=seed)
    y.requires_grad_()
    assert_agree(ours.pool(x), on_grid(oracle.pool(y, theirs), theirs), x, y, seed)

    z = laid_out(random(2, 3, *theirs.grid, seed=seed), memory_format)
    t = random(2, 3, *theirs.grid, seed=seed).requires_grad_()
    spread = ours.spread(z, size)
    assert_agree(spread, oracle.spread(t.flatten(2), theirs, size), z, t, seed)
    if theirs.grid != (1, 1):  # there the formats are the same
        assert spread.is_contiguous(memory_format=FORMATS[memory_format])


@pytest.mark.parametrize(
    ("length", "scale", "sides"),
    [
        (7, 4, [2, 2, 2, 1]),
        (14, 4, [4, 3, 4, 3]),
        (7, 2, [4, 3]),
        (8, 4, [2, 2, 2, 2]),
        (3, 7, [1, 1, 1]),
        (1, 5, [1]),
    ],
)
def test_sides_of_regions(length, scale, sides):
    assert Regional(scale).runs(length) == sides
    # The same, seen from outside: a ramp's means tell where the borders are.
    ramp = torch.arange(length, dtype=torch.float64).view(1, 1, length, 1)
    starts = [sum(sides[:i]) for i in range(len(sides))]
    means = [start + (side - 1) / 2 for start, side in zip(starts, sides, strict=True)]
    assert Regional(scale).pool(ramp).flatten().tolist() == pytest.approx(means)
    assert Regional(scale).pool(ramp.mT).flatten().tolist() == pytest.approx(means)


# --- Identities of a partition


@settings(deadline=None, max_examples=60)
@given(size=sizes, scale=scales, data=st.data())
def test_order_inside_a_region_does_not_matter(size, scale, data):
    regions = oracle.regional(size, scale)
    members = data.draw(st.sampled_from(regions.members))
    order = data.draw(st.permutations(members))
    x = random(2, 3, *size)
    permuted = x.flatten(2).clone()
    permuted[:, :, members] = permuted[:, :, order]
    permuted = permuted.view_as(x)
    torch.testing.assert_close(Regional(scale).pool(permuted), Regional(scale).pool(x), **EXACT)


@settings(deadline=None, max_examples=60)
@given(size=sizes.filter(lambda size: size != (1, 1)), scale=st.integers(2, 7), data=st.data())
def test_a_value_moved_over_a_border_changes_two_regions(size, scale, data):
    regions = oracle.regional(size, scale)
    width = size[1]
    neighbours = [(p, p + 1) for p in range(math.prod(size)) if (p + 1) % width]
    neighbours += [(p, p + width) for p in range(math.prod(size) - width)]
    crossing = [(p, q) for p, q in neighbours if regions.of[p] != regions.of[q]]
    here, there = data.draw(st.sampled_from(crossing))

    x = random(1, 1, *size)
    moved = x.flatten().clone()
    moved[here] -= 10.0
    moved[there] += 10.0
    change = (Regional(scale).pool(moved.view_as(x)) - Regional(scale).pool(x)).flatten()
    expected = torch.zeros_like(change)
    expected[regions.of[here]] = -10.0 / len(regions.members[regions.of[here]])
    expected[regions.of[there]] = 10.0 / len(regions.members[regions.of[there]])
    torch.testing.assert_close(change, expected, **EXACT)
    assert int((change.abs() > 1e-6).sum()) == 2


@pytest.mark.parametrize("side", [1, 2, 7, 16])
def test_one_window_over_a_square_is_one_region(side):
    x = random(2, 3, side, side)
    torch.testing.assert_close(
        Sliding(1).pool(x), Regional(1).spread(Regional(1).pool(x), (side, side)), **EXACT
    )
    torch.testing.assert_close(
        Sliding(1).pool(x), x.mean((2, 3), keepdim=True).expand_as(x), **EXACT
    )


@pytest.mark.parametrize("strategy", SETS)
@settings(deadline=None, max_examples=40)
@given(size=sizes, scale=scales)
def test_a_constant_stays_itself(strategy, size, scale):
    constant = random(2, 3, 1, 1).expand(2, 3, *size)
    coordinates = SETS[strategy](scale)
    torch.testing.assert_close(
        coordinates.spread(coordinates.pool(constant), size), constant.contiguous(), **EXACT
    )


def test_regions_of_one_position_are_the_map():
    x = random(2, 3, 4, 3)
    assert Regional(4).pool(x) is x


@pytest.mark.parametrize("memory_format", FORMATS)
def test_all_ways_agree(memory_format):
    """Which one is taken hangs on the device; the tests' has not all of them."""
    x, z = random(2, 3, 8, 12), random(2, 3, 4, 2)
    g = random(2, 3, 8, 12, seed=1)
    ways = [partition.combine_repeated, partition.combine_by_rows, partition.combine_by_cells]
    for op in (torch.mul, torch.add):
        found = []
        for way in [*ways, partition.combine_ragged]:
            inputs = laid_out(x, memory_format), laid_out(z, memory_format)
            y = way(op, *inputs)
            found.append((y, *torch.autograd.grad(y, inputs, g)))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], **EXACT)
    means = [partition.mean_by_runs, partition.mean_by_windows, partition.mean_by_cells]
    found = []
    for way in [*means, partition.mean_by_cells_last, partition.mean_by_index]:
        inputs = (laid_out(x, memory_format),)
        y = way(*inputs, (4, 2))
        found.append((y, *torch.autograd.grad(y, inputs, z)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **EXACT)


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, *args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", [(16, 16), (14, 14)])
def test_the_way_back_adds_one_axis_at_a_time_and_divides_few(size, memory_format):
    """On a CPU sums over two axes take ten times as long, and a division is a pass over its map."""
    x = laid_out(random(4, 8, *size), memory_format)
    z = laid_out(random(4, 8, 4, 4), memory_format)
    y, means = Regional(4).multiply(x, z), Regional(4).pool(x)
    assert y.stride() == x.stride()
    with Recorded() as back:
        torch.autograd.backward((y, means), (torch.ones_like(y), torch.ones_like(means)))
    added = [args[1] for name, *args in back.calls if name == "sum"]
    assert added
    assert all(len(axes) == 1 for axes in added)
    divided = [args[0].numel() for name, *args in back.calls if name == "div"]
    assert divided == [z.numel()]


@settings(deadline=None, max_examples=60)
@given(size=sizes, scale=scales)
@example(size=(7, 7), scale=4)
@example(size=(3, 2), scale=7)
def test_regions_cover_the_map_once(size, scale):
    x = random(2, 3, *size)
    regional = Regional(scale)
    rows = torch.tensor(regional.runs(size[0]), dtype=torch.float64)
    columns = torch.tensor(regional.runs(size[1]), dtype=torch.float64)
    assert (int(rows.sum()), int(columns.sum())) == size
    total = (regional.pool(x) * rows[:, None] * columns).sum((2, 3))
    torch.testing.assert_close(total, x.sum((2, 3)), **EXACT)


def test_adaptive_pooling_is_no_partition():
    """From 7 to 2 its cells are [0, 4) and [3, 7): the middle row and column count twice."""
    x = random(1, 1, 7, 7)
    adaptive, ours = F.adaptive_avg_pool2d(x, 2), Regional(2).pool(x)
    assert (adaptive - ours).abs().amax() > 0.01
    partition = torch.stack(
        [
            x[..., :4, :4].mean((2, 3)),
            x[..., :4, 4:].mean((2, 3)),
            x[..., 4:, :4].mean((2, 3)),
            x[..., 4:, 4:].mean((2, 3)),
        ],
        2,
    ).unflatten(2, (2, 2))
    torch.testing.assert_close(ours, partition, **EXACT)
    # Every position counts in one region of ours, and four times in the middle of the other's.
    for pooled, areas, middle in (
        (Regional(2).pool, torch.tensor([[16.0, 12.0], [12.0, 9.0]]), 1.0),
        (lambda m: F.adaptive_avg_pool2d(m, 2), torch.full((2, 2), 16.0), 4.0),
    ):
        m = torch.zeros(1, 1, 7, 7, requires_grad=True)
        (count,) = torch.autograd.grad((pooled(m) * areas).sum(), m)
        assert float(count[0, 0, 3, 3]) == pytest.approx(middle)
        assert float(count[0, 0, 0, 0]) == pytest.approx(1.0)


# --- Coarser regions as unions of finer ones

nested = st.tuples(scales, st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] * pair[1]))


@pytest.mark.parametrize("memory_format", FORMATS)
@settings(deadline=None, max_examples=40)
@given(size=sizes, pair=nested, seed=seeds)
@example(size=(7, 7), pair=(2, 4), seed=0)
@example(size=(3, 2), pair=(2, 8), seed=0)
@example(size=(5, 17), pair=(4, 8), seed=0)
@example(size=(1, 1), pair=(1, 4), seed=0)
def test_coarser_pools_follow_from_finer_ones(memory_format, size, pair, seed):
    coarse, fine = map(Regional, pair)
    regions, finer = oracle.regional(size, pair[0]), oracle.regional(size, pair[1])
    x, y = laid_out(random(2, 3, *size, seed=seed), memory_format), random(2, 3, *size, seed=seed)
    y.requires_grad_()
    coarsened = coarse.coarsen(fine.pool(x), fine.areas(size, x))
    assert_agree(coarsened, on_grid(oracle.pool(y, regions), regions), x, y, seed)
    torch.testing.assert_close(coarsened, coarse.pool(x), **EXACT)

    # And the other way, drawn on the finer grid: all finer regions of one take its value.
    z = laid_out(random(2, 3, *regions.grid, seed=seed), memory_format)
    t = random(2, 3, *regions.grid, seed=seed).requires_grad_()
    owners = [regions.of[members[0]] for members in finer.members]
    refined = on_grid(torch.stack([t.flatten(2)[:, :, o] for o in owners], 2), finer)
    on_fine = coarse.spread(z, fine.grid(size))
    assert_agree(on_fine, refined, z, t, seed)
    torch.testing.assert_close(fine.spread(on_fine, size), coarse.spread(z, size), **EXACT)


@pytest.mark.parametrize("format_of_z", FORMATS)
@pytest.mark.parametrize("memory_format", FORMATS)
@settings(deadline=None, max_examples=30)
@given(size=sizes, scale=scales, seed=seeds)
@example(size=(8, 8), scale=4, seed=0)
@example(size=(7, 7), scale=4, seed=0)
@example(size=(3, 2), scale=7, seed=0)
def test_multiply_is_x_times_the_spread_map(memory_format, format_of_z, size, scale, seed):
    regions = oracle.regional(size, scale)
    x = laid_out(random(2, 3, *size, seed=seed), memory_format)
    z = laid_out(random(2, 3, *regions.grid, seed=seed + 1), format_of_z)
    ours = Regional(scale).multiply(x, z)
    theirs = x * oracle.spread(z.flatten(2), regions, size)
    torch.testing.assert_close(ours, theirs, **EXACT)
    assert ours.is_contiguous(memory_format=FORMATS[memory_format])
    functional = random(*ours.shape, seed=seed + 2)
    for ours_grad, theirs_grad in zip(
        torch.autograd.grad(ours, (x, z), functional),
        torch.autograd.grad(theirs, (x, z), functional),
        strict=True,
    ):
        torch.testing.assert_close(ours_grad, theirs_grad, **EXACT)


@pytest.mark.parametrize("strategy", SETS)
@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_run_over(dtype, scale, strategy):
    """A 64 × 64 map of values around 100 sums to six times float16's largest number."""
    x = (torch.randn(1, 3, 64, 64) + 100.0).to(dtype)
    if strategy == "sliding":
        exact = oracle.window_means(x, scale)
    else:
        regions = oracle.regional((64, 64), scale)
        exact = on_grid(oracle.pool(x.double(), regions), regions)
    pooled = SETS[strategy](scale).pool(x).double()
    torch.testing.assert_close(pooled, exact, rtol=torch.finfo(dtype).eps, atol=0)


# --- Wrong arguments


@pytest.mark.parametrize("scale", [0, -1, 1.5, True, "2"])
@pytest.mark.parametrize("kind", ["Regional", "Sliding"])
def test_a_wrong_scale_is_refused(unchecked, kind, scale):
    with pytest.raises(ValueError, match=rf"whole number of at least 1.*got {scale!r}$"):
        getattr(unchecked, kind)(scale)


@pytest.mark.parametrize("shape", [(3, 7, 7), (1, 2, 3, 7, 7), (2, 3, 0, 7), (2, 3, 7, 0)])
@pytest.mark.parametrize("kind", ["Regional", "Sliding"])
def test_what_is_no_map_is_refused(unchecked, kind, shape):
    with pytest.raises(ValueError, match=rf"N C H W.*shape {re.escape(str(shape))}"):
        getattr(unchecked, kind)(2).pool(torch.ones(shape))


def test_values_that_do_not_fit_the_regions_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"7×3 has 4×3 regions; got .* \(2, 3, 4, 4\)"):
        unchecked.Regional(4).spread(torch.ones(2, 3, 4, 4), (7, 3))
    with pytest.raises(ValueError, match=r"7×3 has 7×3 regions; got .* \(2, 3, 4, 4\)"):
        unchecked.Sliding(4).spread(torch.ones(2, 3, 4, 4), (7, 3))
    with pytest.raises(ValueError, match=r"at least one row.*got size \(0, 3\)"):
        unchecked.Regional(4).spread(torch.ones(2, 3, 4, 4), (0, 3))


def test_large_regions_lose_no_digits():
    x = torch.rand(1, 2, 224, 224) + 1
    for scale in (1, 2, 4):
        exact = Regional(scale).pool(x.double())
        torch.testing.assert_close(Regional(scale).pool(x).double(), exact, atol=1e-6, rtol=0)
