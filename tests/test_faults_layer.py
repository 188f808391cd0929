"""The layer by its definition, whatever it is given; and the suite finds what is wrong."""

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from faults import layer, layer_cases  # noqa: E402
from faults.layer_cases import Case, drawn  # noqa: E402

from mssar import MSSAR, branch, partition  # noqa: E402

seeds = st.integers(0, 2**32).map(random.Random)


@settings(deadline=None, max_examples=40)
@given(draw=seeds)
def test_any_map(draw):
    case = drawn(draw)
    assert layer.judged(case) == [], case


@pytest.mark.parametrize("training", [True, False])
@settings(deadline=None, max_examples=25)
@given(draw=seeds, bad=st.sampled_from(list(layer_cases.BAD)))
def test_a_number_that_is_not_finite_goes_where_the_equations_say(training, draw, bad):
    case = drawn(draw, bad=bad, training=training, dtype=draw.choice(layer_cases.FOLLOWED))
    assert layer.judged(case) == [], case


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    case = Case((2, 6, 7, 9), (1, 2, 4), "sliding", training=True, compiled="aot_eager", seed=4)
    assert layer.judged(case) == []


def test_a_batch_of_none():
    assert layer.empty(random.Random(0), 8).wrong == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_large_map(monkeypatch, capfd):
    """By regions it is what is said; by windows it is more than what is said here."""
    monkeypatch.setattr(layer, "MAPS", layer.MAPS | {"sliding": 2.0})
    assert layer.large(64, 256).wrong == 1
    said = capfd.readouterr().err
    assert said.startswith("wrong: ['sliding', '64', '256']: ")
    # A map of 17 MB: what the allocator keeps and gives back counts, and differs from run to run.
    assert 2 < float(said.split(": ")[2].split()[0]) < 20


def test_a_case_is_what_it_prints():
    draw = random.Random(1)
    for _ in range(50):
        case = drawn(draw)
        assert layer_cases.parse(repr(case)) == case


@pytest.mark.parametrize("layout", layer_cases.LAYOUTS)
def test_numbers_are_the_same_wherever_they_lie(layout):
    for n in (1, 2):
        x = torch.randn(n, 3, 4, 5)
        assert torch.equal(layer_cases.laid_out(x, layout), x)


# --- Of a single image whose channels lie side by side, PyTorch's BN goes back in a wrong order


def hwc(x):
    """As an image comes: its batch of one has the stride of its columns."""
    return layer_cases.laid_out(x, "hwc")


LAYOUTS = {
    "contiguous": torch.clone,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "hwc": hwc,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("given_as", LAYOUTS)
@pytest.mark.parametrize("back", LAYOUTS)
@pytest.mark.parametrize(("scales", "strategy"), [((2, 4), "regional"), ((1, 3), "sliding")])
def test_gradients_of_a_single_image(training, given_as, back, scales, strategy):
    torch.manual_seed(0)
    first = torch.nn.BatchNorm2d(6).double().train(training)
    recalibrate = MSSAR(6, scales, strategy, dtype=torch.float64).train(training)
    x, slope = torch.randn(2, 1, 6, 8, 8, dtype=torch.float64)
    network = torch.nn.Sequential(first, recalibrate)

    def gradients(x, slope):
        parameters = list(network.parameters())
        # What the first norm is given is not the layer's, what comes back to it is.
        made = network(x.contiguous())
        return torch.autograd.grad(made, parameters, slope)

    expected = gradients(x, slope)
    for found, right in zip(gradients(x, LAYOUTS[back](slope)), expected, strict=True):
        torch.testing.assert_close(found, right)
    alone = LAYOUTS[given_as](x)
    for found, right in zip(
        torch.autograd.grad(
            recalibrate(alone), list(recalibrate.parameters()), LAYOUTS[back](slope)
        ),
        torch.autograd.grad(recalibrate(x), list(recalibrate.parameters()), slope),
        strict=True,
    ):
        torch.testing.assert_close(found, right)


# --- What is taken away is missed


def wrong(**fixed):
    draw = random.Random(5)
    return layer.row("", "", [drawn(draw, **fixed) for _ in range(12)]).wrong


def test_it_finds_gradients_in_the_wrong_order(monkeypatch):
    monkeypatch.setattr(branch, "settled", lambda x: x)
    assert wrong(shape=(1, 6, 13, 11), scales=(1, 3, 6), dtype="float64", strategy="regional",
                 layout="channels_last", training=False)  # fmt: skip


def test_it_finds_what_is_not_chosen_but_multiplied(monkeypatch):
    """A mean over a window from an integral image spreads what is not finite."""

    def by_integral(x, axis, radius):
        return partition.window_mean_by_index(x, axis, torch.tensor(radius))

    monkeypatch.setattr(partition, "window_mean", by_integral)
    assert wrong(strategy="sliding", dtype="float32", training=False) == 0
    assert wrong(strategy="sliding", dtype="float32", training=False, bad="nan")


def test_it_finds_a_wrong_border(monkeypatch):
    monkeypatch.setattr(partition, "runs", lambda length, parts: _floored(length, parts))
    assert wrong(strategy="regional", shape=(2, 6, 7, 9), scales=(2, 4))


def _floored(length, parts):
    cuts = [j * length // parts for j in range(parts + 1)]
    return [end - start for start, end in pairwise(cuts)]
