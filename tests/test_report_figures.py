"""Figures: courses over seeds, errors over cost, measured times."""

from dataclasses import replace

import pytest
from lab import Log, arrays, opened, tiny
from test_experiments import record_of, run_of
from test_timings import timing

from mssar.lab.engine import checkpoint
from mssar.lab.records import Epoch
from mssar.lab.report import figures
from mssar.lab.report.groups import grouped


def course(record, errors):
    epochs = tuple(
        Epoch(i + 1, 0.1, 1 / (i + 1), e + 1, 2.0 / (i + 1), e, e / 2, 10.0 + i)
        for i, e in enumerate(errors)
    )
    return replace(record, epochs=epochs, error=errors[-1], error5=errors[-1] / 2)


def test_a_curve_is_the_mean_over_seeds_with_the_lowest_and_highest():
    courses = ([50.0, 30.0, 9.0], [54.0, 20.0, 8.0])
    made = [course(record_of(run_of(seed=s), 9.0 - s), e) for s, e in enumerate(courses)]
    (curve,) = figures.curves(grouped(made))
    assert curve.n == 2
    assert not curve.going
    assert curve.mean["test_error"] == [52.0, 25.0, 8.5]
    assert curve.low["test_error"] == [50.0, 20.0, 8.0]
    assert curve.high["test_error"] == [54.0, 30.0, 9.0]
    assert curve.mean["train_error"] == [53.0, 26.0, 9.5]
    assert curve.mean["train_loss"] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert curve.low.keys() == curve.high.keys() == set(figures.QUANTITIES)


def test_a_run_on_its_way_has_a_curve_of_its_own(tmp_path):
    log, run = Log(), tiny(seed=5, recalibration="mssar", epochs=4)
    with opened(run, arrays(), tmp_path, log) as training:
        for _ in training.work():
            if len(log.epochs) == 2:
                break
    progress = checkpoint.progress(checkpoint.checkpoints(tmp_path)[-1])
    (curve,) = figures.curves([], [progress])
    assert curve.going
    assert curve.epochs == 4
    assert curve.label.endswith("seed 5")
    assert curve.mean["test_error"] == [e.test_error for _, e in log.epochs]
    progress.run["network"] = 3
    assert figures.curves([], [progress]) == []


def test_points_are_the_papers_and_ours():
    made = [record_of(run_of(seed=s), 8.0 + s, macs=40_813_184) for s in range(2)]
    every = figures.points(grouped(made), published=True)
    ours = [p for p in every if not p.published]
    assert len(every) - 1 == 10 * 2 + 9
    (own,) = ours
    assert (own.error, own.n, own.macs) == (8.5, 2, 40_813_184)
    theirs = [p for p in every if (p.network, p.recalibration) == ("resnet20", "none")]
    assert {(p.dataset, p.error, p.macs) for p in theirs if p.published} == {
        ("cifar10", 8.61, 40.8e6),
        ("cifar100", 31.87, 40.8e6),
    }
    assert figures.points(grouped(made), published=False) == ours


def test_times_are_over_what_was_measured_in_turns_with_them():
    base = timing(recalibration="none", options={}, median_ms=2.0, p20_ms=1.9, p80_ms=2.1)
    ours = timing(recalibration="mssar", options={}, median_ms=5.0, p20_ms=4.9, p80_ms=5.1)
    old = replace(base, median_ms=9.0, p20_ms=9.0, p80_ms=9.0, made="2019-01-01T00:00:00+00:00")
    found = figures.times([old, base, ours])
    assert [(t.recalibration, t.ms, t.ratio) for t in found] == [
        ("none", 2.0, 1.0),
        ("mssar", 5.0, 2.5),
    ]
    assert found[0].hardware == base.environment["hardware"]


def test_times_taken_in_other_ways_stand_apart():
    usual = timing(graph=True, compile=False)
    for change, said in (({"graph": False}, "bf16, no graphs"), ({"compile": True}, "compiled")):
        other = replace(usual, median_ms=0.5, p80_ms=9.0, **change)
        first, second = figures.times([usual, other])
        assert first.precision == "bf16"
        assert said in second.precision
        assert (first.ms, second.ms) == (usual.median_ms, 0.5)
    (found,) = figures.times([usual])
    assert found.options == ""  # all of them are the default
    assert found.dataset == "32×32"
    assert figures.times([replace(usual, options={"scales": [1, 2]})])[0].options == "scales=1,2"
    strange = figures.times([replace(usual, network="<b>")])[0]
    assert strange.options.startswith("scales=1,2,4 ")
