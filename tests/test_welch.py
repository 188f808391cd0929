"""Welch's interval and p-value against tables, closed forms and chance itself."""

from math import inf
from random import Random
from statistics import fmean, stdev

import pytest

from mssar.lab.report.welch import margin, p_value, quantile


# Student's two-sided 95 % quantiles as statistical tables print them.
@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (30, 2.042), (1e6, 1.960)]
)
def test_quantiles_are_those_of_the_tables(freedom, t):
    assert quantile(0.975, freedom) == pytest.approx(t, abs=5e-4)


def test_a_p_value_and_an_interval_agree():
    """At the interval's edge chance does as much once in twenty; and as Student's tables say."""
    for sides in (((0.3, 5), (0.2, 3)), ((0.1, 3), (0.1, 3)), ((0.0, 4), (0.4, 4))):
        assert p_value(margin(*sides), *sides) == pytest.approx(0.05)
        assert p_value(-margin(*sides), *sides) == pytest.approx(0.05)
    # Four degrees of freedom: t = 4.604 is the two-sided quantile of 1 %.
    edge = 4.604 * 0.1 * (2 / 3) ** 0.5
    assert p_value(edge, (0.1, 3), (0.1, 3)) == pytest.approx(0.01, abs=1e-5)
    assert p_value(0.1, (0, 3), (0, 3)) == 1  # nothing is known


def test_a_p_value_may_be_next_to_nothing():
    """With two degrees of freedom the share beyond t is 1 - t / √(t² + 2), about 1 / t²."""
    t = 1e9
    assert p_value(t, (0.0, 3), (3**0.5, 3)) == pytest.approx(1 / t**2, rel=1e-9, abs=0)


def test_one_exact_side_leaves_the_other_sides_interval():
    """With no spread on one side Welch's is Student's interval of the other's mean."""
    assert margin((0.3, 5), (0.0, 3)) == pytest.approx(2.776445 * 0.3 / 5**0.5)
    assert margin((0.0, 3), (0.3, 5)) == margin((0.3, 5), (0.0, 3))
    assert margin((0.0, 3), (0.0, 3)) == inf


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    draw = Random(0)

    def sample(n, spread):
        return [draw.gauss(0, spread) for _ in range(n)]

    missed = 0
    for _ in range(4000):
        a, b = sample(3, 0.1), sample(4, 0.4)
        chance = margin((stdev(a), len(a)), (stdev(b), len(b)))
        missed += abs(fmean(a) - fmean(b)) > chance
    assert 0.03 < missed / 4000 < 0.065


def test_of_several_pairs_the_interval_is_that_of_the_mean_difference():
    """Pairs that are alike are one with all their degrees of freedom; chance does what it says."""
    alike = ((0.2, 3), (0.2, 3))
    t = quantile(0.975, 12)  # three pairs of four
    assert margin(*alike * 3) == pytest.approx(t * 0.2 * (2 / 3 / 3) ** 0.5)
    assert p_value(margin(*alike * 3), *alike * 3) == pytest.approx(0.05)
    draw, missed = Random(1), 0
    for _ in range(4000):
        sides = [
            [draw.gauss(0, spread) for _ in range(n)]
            for n, spread in ((3, 0.5), (3, 0.1), (4, 0.1), (4, 0.2), (3, 0.2), (4, 0.1))
        ]
        means = [fmean(side) for side in sides]
        gain = fmean(a - b for a, b in zip(means[::2], means[1::2], strict=True))
        missed += abs(gain) > margin(*((stdev(side), len(side)) for side in sides))
    assert 0.03 < missed / 4000 < 0.065
