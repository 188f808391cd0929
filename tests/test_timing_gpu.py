"""Timing on a CUDA device: with a graph and without, and what a step holds."""

import math
from dataclasses import replace

import pytest
import torch

from mssar.lab.engine import timing as engine
from mssar.lab.engine.execution import Execution, settings
from mssar.lab.engine.pace import own_lane
from mssar.lab.recipes import CIFAR_RESNET, varied
from mssar.lab.run import Run
from mssar.lab.timings import WHAT, parse, ratio

pytestmark = pytest.mark.gpu


def run(kind: str = "none", batch: int = 64) -> Run:
    return Run("resnet8", kind, {}, "cifar10", varied(CIFAR_RESNET, batch=batch))


def cuda(graph: bool = True) -> Execution:
    return Execution(torch.device("cuda", 0), "bf16", graph=graph)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("what", WHAT)
def test_times_are_finite_with_a_graph_and_without(what, graph):
    found = engine.measure([run(k) for k in ("none", "se", "mssar")], what, cuda(graph), 0.1)
    for timing in found:
        assert parse(timing.as_line()) == timing
        assert 0 < timing.median_ms < math.inf
        assert 0 < ratio(timing, found) < math.inf
        assert timing.repeats % engine.TURN == 0
        assert timing.graph == graph


def test_memory_is_the_networks_own(monkeypatch):
    """At least weights, momentum and gradients; more for a larger batch; the same in any order,
    with a graph or without. Deterministic, for a search may choose other workspaces each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def peaks(batch: int, *kinds: str, graph: bool = True) -> dict[str, int]:
        how = replace(cuda(graph), deterministic=True)
        found = engine.measure([run(kind, batch) for kind in kinds], "training", how, 0.01)
        return {timing.recalibration: timing.peak_bytes for timing in found}

    small, large = peaks(64, "none", "mssar"), peaks(256, "none", "mssar")
    for kind, peak in small.items():
        weights = sum(p.numel() * p.element_size() for p in run(kind).build(10).parameters())
        assert 3 * weights < peak < large[kind] / 2
    assert small["none"] < small["mssar"]
    for other in (peaks(64, "mssar", "none"), peaks(64, "none", "mssar", graph=False)):
        for kind, peak in small.items():
            assert other[kind] == pytest.approx(peak, rel=0.05)


def test_inference_needs_less_memory_than_training():
    (step,), (passed,) = (engine.measure([run("mssar")], w, cuda(), 0.01) for w in WHAT)
    assert 0 < passed.peak_bytes < step.peak_bytes


@pytest.mark.parametrize("graph", [True, False])
def test_the_network_stays_as_it_was(graph):
    how = cuda(graph)
    with settings(how), torch.cuda.stream(own_lane(how)):
        feed = engine.random_feed(run(), how)
        subject = engine.Stepping(run("mssar"), feed, how)
        engine.in_turns([subject], 0.1, how.device)
        state = subject.state()
        assert int(subject.counter) == engine.TURN + 1  # all steps of a turn are within the epoch
        losses = subject.losses.clone()
    torch.cuda.synchronize()
    assert len(losses) == engine.TURN + 1
    assert (losses > 0).all()
    assert losses.isfinite().all()
    for name, tensor in state.items():
        assert tensor.isfinite().all(), name
    expected = dict(run("mssar").build(10).named_parameters())
    for name, p in subject.model.named_parameters():
        assert torch.equal(p.cpu(), expected[name]), name


def test_everything_is_given_back():
    engine.measure([run()], "training", cuda(), 0.01)
    before = torch.cuda.memory_allocated()
    for what in WHAT:
        engine.measure([run("mssar", 256)], what, cuda(), 0.01)
    assert torch.cuda.memory_allocated() - before < 2**27  # a library's workspace a stream
