"""The kernels of a block's tail in training: all numbers and gradients as plain modules have them.

The modules compute in float64 what is expected. How far the kernels may be from that is said by
how far the same modules are from it in the kernels' own type.
"""

import copy

import pytest
import torch
from tails import (
    DEVICE,
    HALVES,
    LAYOUTS,
    SLACK,
    Case,
    Launched,
    Tail,
    apart,
    assert_as_good,
    exactly,
    worst,
)
from torch import nn

from mssar.kernels import device, tiling
from mssar.kernels.grids import grids
from mssar.kernels.tail import plan

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products", "rounded_halves")

CASES = [
    Case(),
    Case(layout="contiguous"),
    Case(5, (7, 7)),  # one hidden channel
    Case(24, (9, 5)),
    Case(24, (9, 5), layout="contiguous"),
    Case(70, (5, 6), scales=(1, 4), batch=2),  # two tiles of channels
    Case(40, (2, 3), layout="contiguous"),  # three tiles of channels
    Case(140, (2, 2), scales=(1,), batch=2),  # three tiles of products, both ways
    Case(140, (2, 2), scales=(1, 2), batch=2, reduction=16),  # the same with few hidden channels
    Case(size=(3, 2)),  # fewer rows than regions
    Case(size=(1, 1), batch=6),
    Case(size=(1, 1), batch=6, norm=False, layout="contiguous"),
    Case(size=(2, 33)),
    Case(6, (25, 26), scales=(1, 2)),  # cells that take several turns
    Case(6, (40, 36), scales=(1, 2), layout="contiguous"),
    Case(70, (20, 19), scales=(1, 2), batch=2),  # cells of some positions, taken one by one
    Case(64, (34, 35), scales=(1,), batch=2),  # and of more than that
    Case(size=(2, 2), batch=40, scales=(1, 2)),  # tiles of rows
    Case(size=(2, 1), batch=41, scales=(1,), norm=False),
    Case(scales=(1,)),
    Case(scales=(2, 3), size=(7, 7)),
    Case(scales=(2, 4), size=(2, 2)),  # the same grid twice
    Case(scales=(4, 1), norm=False, activation=None),
    Case(scales=(8,), size=(9, 8)),
    Case(24, (9, 8), scales=(8,), batch=2),
    Case(8, (17, 16), scales=(16, 1), batch=2),  # the finest grid there is
    Case(norm=False, shortcut=False, activation=None),  # MSSAR alone
    Case(norm=False),
    Case(shortcut=False),
    Case(activation=None),
    Case(shortcut=False, activation=None, scales=(2,)),
    Case(activation="silu"),
    Case(24, (9, 5), activation="silu", layout="contiguous"),
    Case(activation="silu", shortcut=False),
    Case(activation="silu", norm=False, scales=(2,)),
    Case(activation="silu", norm=False, shortcut=False, layout="contiguous"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_training_step_is_the_modules(case):
    assert_as_good(Tail(case), case.maps())


def test_slopes_of_zero():
    """With which residual blocks like to begin."""
    case = Case(24, (9, 5))
    tail = Tail(case)
    nn.init.zeros_(tail.norm.weight[::2])
    assert_as_good(tail, case.maps())


FROZEN = [
    Case(frozen="front"),  # its statistics given, the branches' the batch's
    Case(24, (9, 5), frozen="front", layout="contiguous", activation="silu"),
    Case(frozen="branches"),
    Case(frozen="branches", norm=False, shortcut=False, activation=None),
    Case(frozen="all"),  # fine-tuning
    Case(24, (9, 5), frozen="all", layout="contiguous"),
    Case(70, (2, 3), scales=(2, 1), batch=2, frozen="all", activation="silu"),
    Case(frozen="all", norm=False, activation=None),
    Case(batch=2, size=(1, 1), frozen="all"),
]


@pytest.mark.parametrize("case", FROZEN, ids=str)
def test_gradients_with_given_statistics(case):
    """They stay what they are; those that the batch moves do not."""
    tail = Tail(case)
    before = copy.deepcopy(tail.state_dict())
    given = [n for n, m in tail.named_modules() if not m.training and hasattr(m, "running_mean")]
    assert_as_good(tail, case.maps())
    after = tail.state_dict()
    counts = [name for name in after if name.endswith("num_batches_tracked")]
    for name in counts:
        owner = name.rpartition(".")[0]
        assert after[name] == before[name] + 2 * (owner not in given), name  # with the modules'
    for name in given:
        assert torch.equal(after[f"{name}.running_mean"], before[f"{name}.running_mean"])
        assert torch.equal(after[f"{name}.running_var"], before[f"{name}.running_var"])


@pytest.fixture
def one_processor(monkeypatch):
    """So that few tiles are many for it."""
    monkeypatch.setattr(device, "INTERPRETER", device.INTERPRETER._replace(processors=1))
    monkeypatch.setattr(tiling, "RESIDENT", 1)
    if DEVICE == "cuda":
        found = device.device_of(torch.device("cuda", 0))
        monkeypatch.setattr(plan, "device_of", lambda _: found._replace(processors=1))
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(24, (7, 7), batch=5),
        Case(8, (25, 27), batch=3, shortcut=False),  # cells that take several turns
        Case(70, (3, 3), scales=(1, 2), batch=3),  # regions that are not alike
        Case(20, (9, 9), scales=(4,), batch=2, activation=None, layout="contiguous"),
    ],
    ids=str,
)
def test_so_many_tiles_that_a_program_takes_several(case, dtype):
    maps = [x.to(dtype) for x in case.maps()]
    last, found = case.layout == "channels last", grids(case.size, case.scales)
    shape, here = tuple(maps[0].shape), plan.device_of(maps[0].device)
    assert tiling.over_map("sums", shape, last, found, here).each > 1
    assert_as_good(Tail(case), maps)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(24, (9, 5), layout="contiguous"),
        Case(16, (8, 8), batch=16, activation="silu"),
        Case(24, (7, 7), frozen="front"),
        Case(24, (7, 7), frozen="all", activation=None),
        Case(140, (1, 1), batch=16, scales=(1,), activation=None),
        Case(6, (24, 24), batch=8, scales=(1, 2)),  # means that are near each other
    ],
    ids=str,
)
def test_half_types_with_parameters_in_float32(case, dtype):
    assert_as_good(Tail(case), [x.to(dtype) for x in case.maps()])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("frozen", ["", "all"])
def test_a_module_in_a_half_type_without_autocast(frozen, dtype):
    case = Case(frozen=frozen)
    assert_as_good(Tail(case).to(dtype), [x.to(dtype) for x in case.maps()])


def test_a_float32_map_under_autocast():
    """The products are taken in bfloat16 on a GPU; the map, and all else, stays as it is."""
    case = Case(norm=False, shortcut=False, activation=None)
    tail, x = Tail(case), case.map()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = tail.kernels(x)
    assert y.dtype is torch.float32
    assert apart(y, copy.deepcopy(tail).double()(x.double())) < 1e-2


STRIDES = {
    "channels left out": lambda x: x.repeat(1, 2, 1, 1)[:, ::2],
    "an edge left out": lambda x: torch.nn.functional.pad(x, (1, 2, 0, 1))[:, :, :-1, 1:-2],
    "rows and columns swapped": lambda x: x.transpose(2, 3),
    "one number further": lambda x: (
        torch.empty(x.numel() + 1, device=x.device)[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    ),
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strides", list(STRIDES)[:4])
def test_an_input_of_any_strides(strides, layout):
    case = Case(scales=(2,), layout=layout)
    x, shortcut = case.maps()
    assert_as_good(Tail(case), [STRIDES[strides](x), shortcut])


@pytest.mark.parametrize("strides", ["other layout", *STRIDES])
def test_a_shortcut_and_a_gradient_of_any_strides(strides):
    case = Case(scales=(2,))
    turn = STRIDES.get(strides, torch.Tensor.contiguous)
    x, shortcut, probe = case.map(), turn(case.map()), turn(case.map())
    assert x.stride() != shortcut.stride() or shortcut.storage_offset()
    assert_as_good(Tail(case), [x, shortcut], probe)


def test_the_gradient_of_a_sum():
    """One number, expanded."""
    case = Case(scales=(2,))
    tail, (x, shortcut) = Tail(case), case.maps()
    assert_as_good(tail, [x, shortcut], torch.ones((), device=DEVICE).expand_as(x))
    x.requires_grad_()
    (found,) = torch.autograd.grad(tail.kernels(x, shortcut).sum(), x)
    (expected,) = torch.autograd.grad(tail.kernels(x, shortcut), x, torch.ones_like(x))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_gradients_of_some_inputs_only(activation):
    case = Case(activation=activation, scales=(2,))
    tail, inputs = Tail(case), case.maps()
    probe = torch.randn_like(inputs[0])
    expected = dict(zip(tail.names(inputs), exactly(tail, inputs, probe), strict=True))
    for wanted in (["x"], ["shortcut"], ["norm.weight", "layer.branches.0.expand.weight"]):
        named = dict(zip(("x", "shortcut"), (x.detach() for x in inputs), strict=True))
        named |= dict(tail.named_parameters())
        for name, value in named.items():
            value.requires_grad_(name in wanted)
        y = tail.kernels(named["x"], named["shortcut"])
        found = torch.autograd.grad(y, [named[name] for name in wanted], probe)
        assert worst(found, [expected[name] for name in wanted], wanted)[0] < 1e-5


class Arguments(Launched):
    """What the ops are called with."""

    def __enter__(self):
        super().__enter__()
        self.seen = {}
        return self.seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mssar":
            self.seen[func] = args
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("turned", [False, True])
def test_they_are_sound_ops(turned, monkeypatch):
    jaxtyping = pytest.importorskip("jaxtyping")  # its checks do not know shapes that vary
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    case = Case(12, (2, 3), scales=(1,), batch=2)
    tail, inputs = Tail(case), [x.transpose(2, 3) if turned else x for x in case.maps()]
    with Arguments() as seen:
        tail.kernels(inputs[0].requires_grad_(), inputs[1]).sum().backward()
    with torch.no_grad(), Arguments() as more:
        tail.eval().kernels(*inputs)
    ops = torch.ops.mssar
    assert list(more) == [ops.tail_forward.default]
    assert list(seen) == [ops.tail_forward.default, ops.track.default, ops.tail_backward.default]
    for op, arguments in [(ops.tail.default, seen[ops.tail_forward.default]), *seen.items()]:
        leaves, shape = torch.utils._pytree.tree_flatten(arguments)
        leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        if op is ops.tail.default:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    leaf.requires_grad_()
        arguments = torch.utils._pytree.tree_unflatten(leaves, shape)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills the gaps between sections
        try:
            torch.library.opcheck(op, arguments)
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_plain_modules_have_the_gradients_of_their_outputs():
    """What everything here is held against."""
    case = Case(5, (3, 4), 3)
    tail = Tail(case).double()
    inputs = [x.double().requires_grad_() for x in case.maps()]

    def call(x, shortcut, *_):
        return tail(x, shortcut)

    assert torch.autograd.gradcheck(call, (*inputs, *tail.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(256, (14, 14), 136),  # many programs of one warp
        Case(512, (7, 7), 70),
        Case(64, (56, 56), 16),
        Case(64, (33, 17), 33),
        Case(128, (7, 7), 33),
        Case(48, (4, 4), 256),  # many rows
        Case(1024, (5, 4), 33),
    ],
    ids=str,
)
def test_large_maps(case, layout, dtype):
    case = Case(**{**vars(case), "layout": layout})
    assert_as_good(Tail(case), [x.to(dtype) for x in case.maps()])
