"""The benchmark of gradients: what it counts, against sums by hand."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from lab import arrays, tiny
from test_benchmark_scripts import load  # noqa: F401, a fixture
from torch import nn

import mssar
from mssar.lab.engine.evaluate import Trained
from mssar.lab.engine.execution import Execution

CPU = torch.device("cpu")


@pytest.fixture
def bench(load):  # noqa: F811
    return load("gradients")


def drawn(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).double()


def test_an_error_is_in_shares_of_the_gradient(bench):
    """One that is always the same is steady, and counts as such however few batches there are."""
    exact = drawn(5, 400)
    exact /= exact.norm(dim=1, keepdim=True)
    always = drawn(1, 400, seed=1)[0]
    always *= 0.1 / always.norm()
    sums = bench.Sums()
    for g in exact:
        sums.add(g + always, g)
    found = sums.shares()
    assert found["error"] == pytest.approx(0.1)
    assert found["steady"] == pytest.approx(0.1)
    assert 0.1 <= found["steady_most"] < 0.15
    assert found["length"] == pytest.approx(float((exact @ always).mean()))


def test_long_gradients_count_for_more(bench):
    """By hand: errors of 1 and 3 in gradients of 1 and 7, the second along the gradient."""
    sums = bench.Sums()
    sums.add(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]).double())
    sums.add(torch.tensor([10.0, 0.0]), torch.tensor([7.0, 0.0]).double())
    found = sums.shares()
    assert found["error"] == pytest.approx(math.sqrt(10 / 50))
    assert found["length"] == pytest.approx(21 / 50)
    assert found["steady"] == 0  # they are at right angles


def test_what_averages_out_is_not_steady(bench):
    exact, off = drawn(200, 400), 0.1 * drawn(200, 400, seed=1)
    sums = bench.Sums()
    for g, error in zip(exact, off, strict=True):
        sums.add((g + error).float(), g)
    found = sums.shares()
    assert found["error"] == pytest.approx(0.1, rel=0.02)
    assert found["steady"] < 0.005  # a mean of 200 errors is 0.007 long by chance
    assert found["steady"] < found["steady_most"] < 0.01
    assert abs(found["length"]) < 4 * found["length_error"]
    assert found["length_error"] == pytest.approx(0.1 / math.sqrt(200 * 400), rel=0.2)


@pytest.mark.parametrize("batches", [2, 5, 40])
def test_the_most_that_may_be_steady_is_rarely_too_little(bench, batches):
    """Also of few batches, whose estimate is often below zero; and it is no wild guess."""
    within = []
    for seed in range(60):
        sums = bench.Sums()
        for g, error in zip(drawn(batches, 300), drawn(batches, 300, seed + 1), strict=True):
            always = 0.02 * drawn(1, 300, seed=1000)[0]
            sums.add(g + 0.1 * error + always, g)
        most = sums.shares()["steady_most"]
        within.append(most >= 0.02)
        assert most < 0.1
    assert sum(within) > {2: 40, 5: 54, 40: 57}[batches]


def test_what_may_be_steady_counts_how_much_batches_differ(bench):
    """An error whose direction is always the same, and whose length is not."""
    always, within = drawn(1, 50, seed=1000)[0], 0
    always *= 0.02 / always.norm()
    exact = drawn(40, 50)
    exact /= exact.norm(dim=1, keepdim=True)
    for seed in range(100):
        sums = bench.Sums()
        for g, size in zip(exact, 1 + 2 * drawn(40, 1, seed + 1), strict=True):
            sums.add(g + size * always, g)
        within += sums.shares()["steady_most"] >= 0.02
    assert within > 92


def test_a_gradient_that_is_too_short_is_found_to_be(bench):
    sums = bench.Sums()
    for g in drawn(9, 50):
        sums.add(0.97 * g, g)
    found = sums.shares()
    assert found["length"] == pytest.approx(-0.03)
    assert found["length_error"] == pytest.approx(0, abs=1e-12)


def network(kind: str) -> Trained:
    run = tiny(3, kind)
    return Trained(run, None, run.build(4))


def begun(chosen: Trained, count: int) -> list[nn.Module]:
    """As runs begin, each with a seed of its own."""
    return [replace(chosen.run, seed=chosen.run.seed + i).build(4) for i in range(count)]


@pytest.mark.parametrize("kind", ["none", "mssar", "simam"])
@pytest.mark.parametrize("stack", [1, 3])
def test_float32_is_nearly_exact_alone_and_in_stacks(bench, kind, stack):
    """Each network's gradients are compared with its own, of its own batch."""
    chosen, how = network(kind), Execution(CPU)
    found = bench.compared(begun(chosen, stack), chosen, arrays(), {}, how, 2)
    assert list(found) == ["all"] + ["mssar"] * (kind == "mssar")  # SimAM has no parameters
    for shares in found.values():
        assert 0 < shares["error"] < 1e-4
        assert abs(shares["length"]) < 1e-4


def test_what_is_exact_is_plain_pytorch_in_training(bench):
    chosen = network("mssar")
    made = bench.exact(chosen.model.eval())
    assert all(m.training for m in made.modules())
    assert not any(m.training for m in chosen.model.modules())
    layers = [m for m in made.modules() if isinstance(m, mssar.MSSAR)]
    assert {layer.backend for layer in layers} == {"reference"}
    assert {p.dtype for p in made.parameters()} == {torch.float64}


@pytest.mark.parametrize("stack", [1, 2])
def test_smoothed_labels_are_smoothed_in_both(bench, stack):
    run = tiny(3, "none", smoothing=0.1)
    chosen = Trained(run, None, run.build(4))
    found = bench.compared(begun(chosen, stack), chosen, arrays(), {}, Execution(CPU), 2)
    assert found["all"]["error"] < 1e-4


def test_a_coarser_precision_is_further_off(bench):
    chosen = network("mssar")
    found = bench.compared([chosen.model], chosen, arrays(), {}, Execution(CPU, "bf16"), 2)
    assert 0.003 < found["all"]["error"] < 0.5
    assert 0.003 < found["mssar"]["error"] < 0.5


def test_a_wrong_gradient_is_noticed(bench, monkeypatch):
    """As one of a single layer would be."""
    chosen, how = network("mssar"), Execution(CPU)
    right = bench.Way.step

    def wrong(way, step):
        for found in right(way, step):
            yield {
                name: 1.5 * g if "recalibrate" in name and name.endswith("weight") else g
                for name, g in found.items()
            }

    monkeypatch.setattr(bench.Way, "step", wrong)
    found = bench.compared([chosen.model], chosen, arrays(), {}, how, 2)
    assert 0.3 < found["mssar"]["length"] <= 0.5
    assert 0 < found["all"]["length"] < found["mssar"]["length"]


def test_a_table_is_printed_and_kept(bench, monkeypatch, tmp_path, capsys):
    chosen, file = network("mssar"), tmp_path / "lines.ndjson"
    for parameter in chosen.model.parameters():  # not as it began
        parameter.data.mul_(1.5)
    before = {name: t.clone() for name, t in chosen.model.state_dict().items()}
    monkeypatch.setattr(bench, "trained", lambda _: chosen)
    monkeypatch.setattr(bench, "load", lambda *_: arrays())
    words = ["NET", "--precisions", "fp32", "--stacks", "1,2", "--steps", "2", "--json", str(file)]
    assert bench.main(words) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ways = [(x["state"], x["stack"], x["group"], x["batches"]) for x in lines]
    assert ways == [
        (state, stack, group, 2 * stack)
        for state in ("begun", "trained")
        for stack in (1, 2)
        for group in ("all", "mssar")
    ]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(lines)
    alone = bench.compared(begun(chosen, 1), chosen, arrays(), {}, Execution(CPU), 2)
    assert {name: lines[0][name] for name in alone["all"]} == pytest.approx(alone["all"], rel=0.05)
    assert all(torch.equal(t, before[name]) for name, t in chosen.model.state_dict().items())


def test_networks_that_are_mixed_up_in_a_stack_are_noticed(bench, monkeypatch):
    chosen, how = network("mssar"), Execution(CPU)

    class Mixed(bench.StackLearner):
        def __init__(self, models, *rest):
            super().__init__([copy.deepcopy(models[0]) for _ in models], *rest)

    monkeypatch.setattr(bench, "StackLearner", Mixed)
    found = bench.compared(begun(chosen, 2), chosen, arrays(), {}, how, 2)
    assert found["all"]["error"] > 0.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--precisions", "fp16"], "--precisions are of bf16, tf32, fp32; got 'fp16'"),
        (["--modes", "eager"], "--modes are of graph, compile; got 'eager'"),
        (["--stacks", "two"], "--stacks are numbers, as 1,4; got two"),
        (["--steps", "1"], "--steps is 2 or more, --stacks 1"),
        (["--steps", "9"], "--steps is 2 at most, an epoch's whole batches"),
    ],
)
def test_a_mistake_is_told(bench, monkeypatch, capsys, words, said):
    monkeypatch.setattr(bench, "trained", lambda _: network("none"))
    monkeypatch.setattr(bench, "load", lambda *_: arrays())
    with pytest.raises(SystemExit):
        bench.main(["NET", *words])
    assert said in capsys.readouterr().err


def test_what_drops_at_random_is_refused(bench, monkeypatch, capsys):
    chosen = network("none")
    chosen.model.dropped = nn.Dropout(0.5)
    monkeypatch.setattr(bench, "trained", lambda _: chosen)
    monkeypatch.setattr(bench, "load", lambda *_: arrays())
    with pytest.raises(SystemExit):
        bench.main(["NET", "--steps", "2"])
    assert "NET drops at random, and so has no gradient to compare with" in capsys.readouterr().err


def test_what_cannot_be_stacked_is_refused_before_anything_is_measured(bench, monkeypatch, capsys):
    chosen = network("none")
    chosen.model.more = nn.Bilinear(2, 2, 2)
    monkeypatch.setattr(bench, "trained", lambda _: chosen)
    monkeypatch.setattr(bench, "load", lambda *_: arrays())
    with pytest.raises(SystemExit):
        bench.main(["NET", "--steps", "2"])
    said = "NET cannot be trained as one with others: more is a Bilinear; pass --stacks 1"
    assert said in capsys.readouterr().err
