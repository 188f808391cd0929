"""The layer against its definition, its identities, its types and layouts, and its errors."""

import copy
import pickle
from collections.abc import Iterator
from typing import NamedTuple

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mssar import MSSAR
from mssar.scales import Nested, Separate

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}  # BN of few values magnifies what is rounded
SIZES = [(8, 8), (7, 9), (3, 2), (1, 1)]  # even, ragged, fewer rows than regions, degenerate


def randomise(layer: MSSAR) -> MSSAR:
    """Parameters and running statistics as after some training, so that none hides as 0 or 1."""
    for name, value in layer.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 2.0)
        elif value.is_floating_point():
            value.normal_(0.3, 0.7)
    return layer


def make(*args, seed: int = 0, **kwargs) -> MSSAR:
    torch.manual_seed(seed)
    return randomise(MSSAR(*args, **{"dtype": torch.float64, **kwargs}))


def maps(*shape: int, memory_format: str = "contiguous") -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    return x.clone(memory_format=FORMATS[memory_format]).requires_grad_()


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Of a linear functional of all outputs, the same one for the same shapes."""
    generator = torch.Generator().manual_seed(1)
    functionals = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    functionals = [f.to(y.dtype) for f, y in zip(functionals, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, inputs, functionals))


def assert_all_close(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or EXACT))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert_all_close(ours, theirs, rtol=0, atol=0)


# --- Against the definition


class Case(NamedTuple):
    size: tuple[int, int]
    channels: int = 6
    batch: int = 2
    scales: tuple[int, ...] = (1, 2, 4)
    strategy: str = "regional"
    reduction: int = 1
    context: int | None = None
    training: bool = True
    memory_format: str = "contiguous"
    seed: int = 0


small = st.tuples(st.integers(1, 9), st.integers(1, 9))
cases = st.builds(
    Case,
    size=st.one_of(small, small, small, st.tuples(st.integers(1, 33), st.integers(1, 17))),
    channels=st.integers(3, 7),
    batch=st.integers(2, 3),
    scales=st.one_of(
        st.sampled_from([(1, 2, 4), (1, 3, 6), (4, 1, 2), (2, 6), (2, 3), (4, 6, 1)]),
        st.lists(st.integers(1, 7), min_size=1, max_size=3, unique=True).map(tuple),
    ),
    strategy=st.sampled_from(["regional", "sliding"]),
    reduction=st.integers(1, 3),
    context=st.one_of(st.none(), st.integers(1, 6)),
    training=st.booleans(),
    memory_format=st.sampled_from(list(FORMATS)),
    seed=st.integers(0, 2**16),
)


@settings(deadline=None, max_examples=300)
@given(case=cases)
@example(case=Case((1, 1)))
@example(case=Case((7, 7)))
@example(case=Case((7, 7), scales=(2, 3), memory_format="channels last"))
@example(case=Case((3, 2), scales=(1, 3, 6), context=5))
@example(case=Case((33, 17), scales=(4, 6), training=False))
@example(case=Case((33, 17), strategy="sliding", context=3, memory_format="channels last"))
def test_the_layer_follows_the_definition(case):
    layer = make(
        case.channels,
        case.scales,
        case.strategy,
        case.reduction,
        case.context,
        seed=case.seed,
    ).train(case.training)
    state = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    weights = [state[name].requires_grad_() for name, _ in layer.named_parameters()]
    inputs = [maps(case.batch, case.channels, *case.size, memory_format=case.memory_format)]
    if case.context:
        inputs += [maps(case.batch, case.context, *case.size, memory_format=case.memory_format)]

    y = layer(*inputs)
    after = {name: value.clone() for name, value in layer.state_dict().items()}
    z, per_scale = layer.importance(*inputs), layer.importance(*inputs, per_scale=True)
    expected = oracle.mssar(
        inputs[0],
        inputs[1] if case.context else None,
        state,
        scales=case.scales,
        strategy=case.strategy,
        training=case.training,
    )

    ours = [y, z, *per_scale]
    theirs = [expected.y, expected.importance, *expected.per_scale]
    assert_all_close(ours, theirs)
    assert_all_close(
        gradients(ours, inputs + list(layer.parameters())),
        gradients(theirs, inputs + weights),
    )
    for name, value in after.items():
        torch.testing.assert_close(value, expected.updates.get(name, state[name].detach()), **EXACT)


@pytest.mark.parametrize("size", [(7, 9), (5, 1), (1, 5)])
def test_a_single_image_trains_on_its_regions(size):
    layer, x = make(6, (2, 4)), maps(1, 6, *size)
    state = copy.deepcopy(layer.state_dict())
    expected = oracle.mssar(x, None, state, scales=(2, 4), strategy="regional", training=True)
    torch.testing.assert_close(layer(x), expected.y, **EXACT)
    for name, value in expected.updates.items():
        torch.testing.assert_close(layer.state_dict()[name], value, **EXACT)


def test_what_a_branch_returns_of_one_image_may_be_changed_in_its_place():
    branch, x = make(6, (2,)).branches[0], maps(1, 6, 3, 2)
    parameters = [x, *branch.parameters()]
    for strange in (False, True):
        y = branch(x).expm1()
        expected = gradients([_strange(y) if strange else y], parameters)
        y = branch(x)
        y.expm1_()
        assert_all_close(gradients([_strange(y) if strange else y], parameters), expected)


def _strange(y: Tensor) -> Tensor:
    """Whose gradient has channels side by side, and a stride of N that means nothing."""
    return y.permute(2, 3, 1, 0).reshape(6, 6)


def test_an_image_that_is_kept_gathers_no_hooks():
    layer, x = make(6, (2, 4)), maps(1, 6, 7, 9)
    for _ in range(3):
        layer(x)
    assert not x._backward_hooks


@pytest.mark.parametrize("memory_format", FORMATS)
def test_a_single_image_under_functional_transforms(memory_format):
    """Its gradient is set right on its way back to a norm, whoever asks for it."""
    layer, norm = make(6, (2, 4)).eval(), torch.nn.BatchNorm2d(6).double().eval()
    x = maps(1, 6, 7, 9, memory_format=memory_format)

    def loss(x: Tensor) -> Tensor:
        return layer(norm(x)).square().sum()

    (expected,) = torch.autograd.grad(loss(x), x, create_graph=True)
    point = x.detach()
    torch.testing.assert_close(torch.func.grad(loss)(point), expected.detach(), **EXACT)
    torch.testing.assert_close(torch.func.jacrev(loss)(point), expected.detach(), **EXACT)
    several = torch.stack([point, point])
    found = torch.func.vmap(torch.func.grad(loss))(several)
    torch.testing.assert_close(found, torch.stack([expected, expected]).detach(), **EXACT)
    direction = torch.randn_like(point)
    _, along = torch.func.jvp(loss, (point,), (direction,))
    torch.testing.assert_close(along, (expected * direction).sum().detach(), **EXACT)
    (second,) = torch.autograd.grad((expected * direction).sum(), x)
    _, twice = torch.func.jvp(torch.func.grad(loss), (point,), (direction,))
    torch.testing.assert_close(second, twice, **EXACT)


# --- Identities


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_one_global_region_is_squeeze_excite(size, training):
    layer, x = make(6, (1,)).train(training), maps(3, 6, *size)
    branch = layer.branches[0]

    def norm(v: Tensor, bn: torch.nn.BatchNorm2d) -> Tensor:
        statistics = (None, None) if training else (bn.running_mean, bn.running_var)
        return F.batch_norm(v, *statistics, bn.weight, bn.bias, training, eps=1e-5)

    hidden = norm(F.linear(x.mean((2, 3)), branch.reduce.weight.flatten(1)), branch.norm1).relu()
    gate = norm(F.linear(hidden, branch.expand.weight.flatten(1)), branch.norm2).sigmoid()
    torch.testing.assert_close(layer(x), x * gate[:, :, None, None], **EXACT)


@pytest.mark.parametrize("scales", [(1, 2, 4), (2, 3)])
@pytest.mark.parametrize("strategy", ["regional", "sliding"])
def test_importance_is_a_mean_of_weights_between_0_and_1(strategy, scales):
    layer, x = make(6, scales, strategy), maps(2, 6, 7, 9)
    z, per_scale = layer.importance(x), layer.importance(x, per_scale=True)
    for weights in (z, *per_scale):
        assert weights.shape == x.shape
        assert bool(((weights > 0) & (weights < 1)).all())
        assert weights.std() > 1e-3
    torch.testing.assert_close(torch.stack(per_scale).mean(0), z, **EXACT)
    torch.testing.assert_close(x * z, layer(x), **EXACT)


@pytest.mark.parametrize("scales", [(1, 2, 4), (2, 3), (1, 3, 6)])
@pytest.mark.parametrize("size", SIZES[:3])
def test_order_inside_the_finest_regions_does_not_matter(size, scales):
    layer, x = make(6, scales), maps(2, 6, *size).detach()
    # Positions are alike where they share a region at every scale.
    together: dict[tuple[int, ...], list[int]] = {}
    regions = [oracle.regional(size, scale) for scale in scales]
    for position in range(size[0] * size[1]):
        together.setdefault(tuple(r.of[position] for r in regions), []).append(position)
    order = torch.arange(size[0] * size[1])
    for members in together.values():
        order[members] = torch.tensor(members).roll(1)
    permuted = x.flatten(2)[:, :, order].view_as(x)
    torch.testing.assert_close(layer.importance(permuted), layer.importance(x), **EXACT)
    # Across regions it does.
    rolled = x.flatten(2).roll(1, 2).view_as(x)
    assert (layer.importance(rolled) - layer.importance(x)).abs().amax() > 1e-3


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scales", [(1, 2, 4), (6, 3), (1,)])
def test_nested_regions_only_save_work(scales, size, memory_format):
    layer = make(6, scales, context_channels=5)
    assert isinstance(layer.sets, Nested)
    general = copy.deepcopy(layer)
    general.sets = Separate(layer.sets.sets)
    inputs = [maps(2, c, *size, memory_format=memory_format) for c in (6, 5)]
    results = []
    for each in (layer, general):
        outputs = [each(*inputs), each.importance(*inputs)]
        outputs += each.importance(*inputs, per_scale=True)
        results.append(outputs + gradients(outputs, inputs + list(each.parameters())))
    assert_all_close(*results)


def test_scales_that_do_not_nest_are_kept_apart():
    assert isinstance(make(6, (2, 3)).sets, Separate)
    assert isinstance(make(6, (1, 2, 4), "sliding").sets, Separate)


# --- Layout, types and randomness


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("scales", [(1, 2, 4), (2, 3), (4,)])
@pytest.mark.parametrize("strategy", ["regional", "sliding"])
def test_the_memory_format_stays(strategy, scales, channels, size):
    scales = scales[-channels:]
    layer = make(channels, scales, strategy)
    x = maps(2, channels, *size)
    results = []
    for name, memory_format in FORMATS.items():
        given_x = x.detach().clone(memory_format=memory_format).requires_grad_()
        y = layer(given_x)
        assert y.is_contiguous(memory_format=memory_format), name
        results.append([y, *gradients([y], [given_x, *layer.parameters()])])
    assert_all_close(*results)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
@pytest.mark.parametrize("strategy", ["regional", "sliding"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype(dtype, strategy, size, training):
    layer = make(6, (1, 2, 4), strategy).to(dtype).train(training)
    x = maps(8, 6, *size).detach().to(dtype).requires_grad_()
    # From what was rounded to this type already, so that only the arithmetic differs.
    state = {name: value.detach().double() for name, value in layer.state_dict().items()}
    exact_x = x.detach().double().requires_grad_()
    expected = oracle.mssar(
        exact_x, None, state, scales=(1, 2, 4), strategy=strategy, training=training
    ).y
    y = layer(x)
    assert y.dtype == dtype
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    torch.testing.assert_close(
        gradients([y], [x])[0].double(), gradients([expected], [exact_x])[0], **tolerance
    )


@pytest.mark.parametrize("strategy", ["regional", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_back_the_type_of_x(dtype, strategy):
    layer = make(6, (1, 2, 4), strategy, dtype=torch.float32)
    x = maps(8, 6, 7, 9).detach().to(dtype)
    expected = copy.deepcopy(layer).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        y, z = layer(x), layer.importance(x)
    assert y.dtype == dtype
    tolerance = {"rtol": TOLERANCE[torch.bfloat16], "atol": TOLERANCE[torch.bfloat16]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    torch.testing.assert_close(x.double() * z.double(), expected, **tolerance)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("scales", [(1, 2, 4), (2, 3)])
@pytest.mark.parametrize("strategy", ["regional", "sliding"])
def test_twice_the_same(strategy, scales, memory_format):
    results = []
    for _ in range(2):
        layer = make(16, scales, strategy, dtype=torch.float32)
        x = maps(4, 16, 31, 29, memory_format=memory_format).detach().float().requires_grad_()
        y = layer(x)
        results.append([y, *gradients([y], [x, *layer.parameters()]), *layer.buffers()])
    assert_same(*results)


# --- Parameters


def through_pickle(layer: MSSAR) -> MSSAR:
    return pickle.loads(pickle.dumps(layer))


def through_state_dict(layer: MSSAR) -> MSSAR:
    fresh = make(6, (1, 2, 4), context_channels=5, seed=7)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    return fresh


def through_meta(layer: MSSAR) -> MSSAR:
    fresh = MSSAR(6, (1, 2, 4), context_channels=5, device="meta", dtype=torch.float64)
    assert all(t.is_meta for t in (*fresh.parameters(), *fresh.buffers()))
    fresh = fresh.to_empty(device="cpu")
    fresh.load_state_dict(layer.state_dict(), strict=True)
    return fresh


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "through", [copy.deepcopy, through_pickle, through_state_dict, through_meta]
)
def test_a_copy_gives_the_same(through, training):
    layer = make(6, (1, 2, 4), context_channels=5)
    other = through(layer)
    assert other is not layer
    inputs = [maps(2, 6, 7, 9), maps(2, 5, 7, 9)]
    results = []
    for each in (layer.train(training), other.train(training)):
        y = each(*inputs)
        results.append([y, *gradients([y], inputs + list(each.parameters())), *each.buffers()])
    assert_same(*results)
    assert not {t.data_ptr() for t in layer.parameters()} & {
        t.data_ptr() for t in other.parameters()
    }


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device_and_dtype_reach_every_parameter(device, dtype):
    layer = MSSAR(6, device=device, dtype=dtype)
    for name, value in layer.state_dict().items():
        assert value.device.type == device, name
        whole = name.endswith(("num_batches_tracked", "coordinates"))
        expected = torch.long if whole else dtype
        assert value.dtype == expected, name


@pytest.mark.parametrize(
    ("channels", "scales", "reduction", "width"),
    [
        (64, (1, 2, 4), 1, 21),  # ⌊64 / 3⌋
        (64, (1, 2, 4), 3, 7),
        (64, (1,), 16, 4),
        (256, (1, 2), 16, 8),
        (16, (1, 2, 4), 3, 1),
        (3, (1, 2, 4), 5, 1),  # never less than one
    ],
)
def test_the_hidden_width(channels, scales, reduction, width):
    layer = MSSAR(channels, scales, reduction=reduction, context_channels=10)
    for branch in layer.branches:
        assert branch.reduce.out_channels == width
        assert branch.reduce.weight.shape == (width, 10, 1, 1)
        assert branch.expand.weight.shape == (channels, width, 1, 1)
    assert sum(p.numel() for p in layer.parameters()) == len(scales) * (
        10 * width + width * channels + 2 * width + 2 * channels
    )


def test_the_defaults_are_the_papers():
    """Scales 1, 2 and 4, regions, and a third of the channels inside."""
    layer, x = randomise(MSSAR(12, dtype=torch.float64)), maps(2, 12, 7, 9)
    assert [branch.reduce.out_channels for branch in layer.branches] == [4, 4, 4]
    expected = oracle.mssar(
        x, None, layer.state_dict(), scales=(1, 2, 4), strategy="regional", training=True
    )
    torch.testing.assert_close(layer(x), expected.y, **EXACT)


def test_the_names_of_the_state():
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    one = ["reduce.weight", *(f"norm1.{n}" for n in norm)]
    one += ["expand.weight", *(f"norm2.{n}" for n in norm)]
    expected = [f"branches.{number}.{name}" for number in range(2) for name in one]
    expected = ["coordinates", *expected]
    assert list(MSSAR(4, (1, 3)).state_dict()) == expected
    assert list(MSSAR(4, (1, 3), "sliding", context_channels=7).state_dict()) == expected


# --- Pools

KINDS = [("regional", (1, 2, 4)), ("regional", (2, 3)), ("sliding", (1, 2))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("strategy", "scales"), KINDS)
def test_pools_stand_for_their_map(strategy, scales, size):
    layer = make(6, scales, strategy, context_channels=5)
    inputs = [maps(2, 6, *size), maps(2, 5, *size)]
    results = []
    for context in (inputs[1], layer.pool(inputs[1])):
        outputs = [layer(inputs[0], context), layer.importance(inputs[0], context)]
        results.append(outputs + gradients(outputs, inputs + list(layer.parameters())))
    assert_all_close(*results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("strategy", "scales"), KINDS)
def test_pools_grow_by_channels(strategy, scales, size):
    layer = make(6, scales, strategy, context_channels=5)
    x, a, b = maps(2, 6, *size), maps(2, 2, *size), maps(2, 3, *size)
    grown, whole = layer.pool(a).extend(layer.pool(b)), layer.pool(torch.cat((a, b), 1))
    assert_all_close(list(grown.maps), list(whole.maps))
    assert grown.size == whole.size == size
    assert grown.sets == whole.sets == layer.sets
    outputs = [layer(x, grown)], [layer(x, torch.cat((a, b), 1))]
    assert_all_close(*(y + gradients(y, [x, a, b]) for y in outputs))
