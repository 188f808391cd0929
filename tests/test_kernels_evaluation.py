"""The kernels of a block's tail in evaluation: the modules' numbers, and none that are moved."""

import copy

import pytest
import torch
from tails import DEVICE, HALVES, SLACK, Case, Tail, apart

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products", "rounded_halves")


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(layout="contiguous"),
        Case(70, (3, 4), 2, scales=(1,)),
        Case(size=(1, 1), batch=1),
        Case(size=(9, 5), batch=1, scales=(2, 3), norm=False),
        Case(size=(2, 2), batch=40, shortcut=False),
        Case(activation="silu", layout="contiguous"),
        Case(norm=False, shortcut=False, activation=None, scales=(1, 4)),
    ],
    ids=str,
)
def test_evaluation_is_the_modules(case):
    tail, inputs = Tail(case).eval(), case.maps()
    before = copy.deepcopy(tail.state_dict())
    with torch.inference_mode():
        found = tail.kernels(*inputs)
    assert found.stride() == inputs[0].stride()
    assert apart(found, copy.deepcopy(tail).double()(*(x.double() for x in inputs))) < 1e-6
    for name, value in tail.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("norm", [True, False])
def test_evaluation_with_many_hidden_channels(norm):
    """More than a tile of products has."""
    case = Case(140, (3, 2), scales=(1,), batch=2, norm=norm)
    tail, inputs = Tail(case).eval(), case.maps()
    with torch.inference_mode():
        ours, theirs = tail.kernels(*inputs), tail(*inputs)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "case", [Case(24, (9, 5), scales=(1, 2)), Case(70, (2, 2), batch=2)], ids=str
)
def test_evaluation_in_half_types(case, dtype):
    tail, inputs = Tail(case).eval(), [x.to(dtype) for x in case.maps()]
    expected = copy.deepcopy(tail).double()(*(x.double() for x in inputs))
    with torch.inference_mode(), torch.autocast(DEVICE, dtype):
        ours, theirs = tail.kernels(*inputs), tail(*inputs)
    assert ours.dtype is dtype
    assert apart(ours, expected) <= SLACK[dtype] + 3 * apart(theirs, expected)
