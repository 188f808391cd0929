"""Numbers that are hard on a block's tail: far from zero, far from each other, none at all."""

import copy

import pytest
import torch
from tails import Case, Tail, apart, assert_as_good, differentiated, exactly

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products", "rounded_halves")


@pytest.mark.parametrize("case", [Case(), Case(batch=8, layout="contiguous")], ids=str)
def test_a_mean_far_from_zero_does_not_drown_the_variance(case):
    """Squares about 0 would leave nothing of it: 1000² and 1 are 20 bits apart, as is a float32."""
    tail, inputs = Tail(case), case.maps()
    inputs[0] += 1000
    probe = torch.randn_like(inputs[0])
    tail.norm.momentum = 1.0
    expected = exactly(tail, inputs, probe)
    found = differentiated(tail.kernels, inputs, tail, probe)
    assert apart(found[0], expected[0]) < 3e-4
    assert apart(tail.norm.running_var, inputs[0].double().var((0, 2, 3))) < 1e-3


@pytest.mark.parametrize(("mean", "corner"), [(30, 20), (1000, 30), (0, 300)])
@pytest.mark.parametrize("scales", [(1,), (1, 2)], ids=str)
def test_an_odd_corner_does_not_drown_it_either(mean, corner, scales):
    """Padding makes corners odd: squares about one of them would be far from the mean again."""
    case = Case(8, (16, 16), batch=4, scales=scales, shortcut=False, activation=None)
    tail, inputs = Tail(case), case.maps()
    inputs[0] += mean
    inputs[0][:, :, 0, 0] += corner
    tail.norm.momentum = 1.0
    differentiated(tail.kernels, inputs, tail, torch.randn_like(inputs[0]))
    expected = inputs[0].double().var((0, 2, 3))
    assert apart(tail.norm.running_var, expected) < (5e-5 if mean == 1000 else 7e-6)


def test_a_value_far_off_spoils_nothing_else():
    """The first of a map is among those that the means of its regions are measured from."""
    case = Case(8, (16, 16), batch=4, scales=(1, 2))
    tail, inputs = Tail(case), [x.bfloat16() for x in case.maps()]
    inputs[0][0, :, 0, 0] = 300.0
    assert_as_good(tail, inputs)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "case", [Case(), Case(70, (2, 2), batch=2, reduction=7, activation=None)], ids=str
)
def test_what_is_not_a_number_goes_where_it_goes_in_the_modules(case, value, train):
    tail, inputs = Tail(case).train(train), case.maps()
    inputs[0][1, 3, 1, 1] = float(value)
    with torch.no_grad():
        expected, found = copy.deepcopy(tail)(*inputs), tail.kernels(*inputs)
    assert not expected.isfinite().all()
    if value == "inf" and not train:
        # Regions are told from cells by products, where 0 · inf is NaN, in this sample alone.
        assert not found[1].isfinite().all()
        found, expected = (torch.cat((y[:1], y[2:])) for y in (found, expected))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize("case", [Case(), Case(70, (1, 2), scales=(1,))], ids=str)
def test_the_same_bits_whatever_memory_held(case):
    """Twice the same; and with memory that is new filled with NaN, as torch does when asked."""
    tail, inputs = Tail(case), case.maps()
    probe = torch.randn_like(inputs[0])
    first, second = (differentiated(tail.kernels, inputs, tail, probe) for _ in range(2))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        third = differentiated(tail.kernels, inputs, tail, probe)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b, c in zip(tail.names(inputs), first, second, third, strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c), name
