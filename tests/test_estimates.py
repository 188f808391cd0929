"""How long what is left of the experiments will take."""

from dataclasses import replace

import pytest
from test_experiments import HERE, key, plan, record_of, run_of
from test_timings import timing

from mssar.lab.recipes import varied
from mssar.lab.run import Run, usual_recipe


def left(recorded, *, network="resnet20", dataset="cifar10", recalibration="none"):
    """Seconds of one cell's single run, by records that are not its own."""
    (found,) = (
        s.seconds_left
        for s in plan("table3", recorded, nets=[network], datasets=[dataset], seeds=1).cells
        if s.cell.row.recalibration == recalibration and not s.cell.additional
    )
    return found


def test_without_a_record_of_the_hardware_the_time_is_unknown():
    assert plan("table3").seconds_left is None
    assert left([record_of(run_of(seed=5), hardware="another device")]) is None


def test_records_of_the_same_thing_give_the_median_of_their_times():
    others = [record_of(run_of(seed=s), seconds=t) for s, t in ((5, 100), (6, 300), (7, 900))]
    assert left(others) == pytest.approx(300)
    # Also from one data set to another of the same size, and not from another network.
    dear = record_of(run_of("resnet56"), seconds=1e6, macs=125_700_000)
    assert left([*others, dear], dataset="cifar100") == pytest.approx(300)


def test_a_run_among_others_costs_its_share():
    four = record_of(run_of(seed=5), seconds=1200, together=4)
    assert left([four]) == pytest.approx(300)


def test_a_shorter_run_is_scaled_by_its_images():
    usual = usual_recipe("resnet20", "cifar10")
    short = Run("resnet20", dataset="cifar10", recipe=usual, seed=9)
    half = Run("resnet20", dataset="cifar10", recipe=varied(usual, epochs=80), seed=9)
    assert left([record_of(half, seconds=320)]) == pytest.approx(640)
    few = record_of(
        short, seconds=320, data={"checksum": "0", "train": 5_000, "test": 9, "classes": 10}
    )
    assert left([few]) == pytest.approx(3200)


def test_the_same_network_with_another_recalibration_is_the_next_best():
    plain = record_of(run_of(seed=5), seconds=400)
    dear = record_of(run_of("resnet56"), seconds=9e6, macs=125_700_000)
    assert left([plain, dear], recalibration="mssar") == pytest.approx(400)


def test_windows_are_told_by_windows():
    def told(*recorded, **more):
        found = plan("strategy", recorded, nets=["resnet20", "resnet56"], seeds=1, **more).cells
        return {(s.cell.row.network, s.cell.row.options["strategy"]): s.seconds_left for s in found}

    regions = record_of(run_of(recalibration="mssar", seed=5), seconds=400, macs=40_800_000)
    assert told(regions)["resnet56", "sliding"] == pytest.approx(400 * 125.7 / 40.8)
    windows = run_of(recalibration="mssar", strategy="sliding", seed=5)
    found = told(regions, record_of(windows, seconds=1000, macs=40_800_000))
    assert found["resnet20", "regional"] == pytest.approx(400)
    assert found["resnet20", "sliding"] == pytest.approx(1000)
    assert found["resnet56", "regional"] == pytest.approx(400 * 125.7 / 40.8)
    assert found["resnet56", "sliding"] == pytest.approx(1000 * 125.7 / 40.8)
    step = timing(network="resnet56", options={}, environment={"hardware": HERE}, batch=128)
    found = told(regions, record_of(windows, seconds=1000, macs=40_800_000), timings=[step])
    assert found["resnet56", "regional"] != pytest.approx(400 * 125.7 / 40.8)
    assert found["resnet56", "sliding"] == pytest.approx(1000 * 125.7 / 40.8)


def test_another_network_is_scaled_by_multiply_adds_and_images():
    small = record_of(run_of("resnet20", seed=5), seconds=408, macs=40_800_000)
    assert left([small], network="resnet56") == pytest.approx(408 * 125.7 / 40.8)
    longer = 408 * 252.5 / 40.8 * 300 / 160
    assert left([small], network="densenet100") == pytest.approx(longer)
    photographs = plan("ilsvrc", [small], nets=["resnet18"], seeds=1)
    runs = 3 * 408 * 1810 / 40.8 * 1_281_167 / 50_000 * 100 / 160
    assert photographs.seconds_left == pytest.approx(runs)


def test_a_network_without_records_is_told_by_its_steps():
    small = record_of(run_of("resnet20", seed=5), seconds=408, macs=40_800_000)
    step = timing(recalibration="none", environment={"hardware": HERE}, median_ms=12.8)
    others = [
        replace(step, recalibration="mssar", median_ms=19.2),
        replace(step, what="inference", median_ms=1.0),
        replace(step, graph=False, median_ms=90.0),
        replace(step, size=(3, 224, 224), median_ms=500.0),
        replace(step, environment={"hardware": "another device"}, median_ms=1.0),
    ]
    images = 50_000 * 300

    def told(kind, *timings, records=(small,)):
        found = plan("table3", records, nets=["densenet100"], seeds=1, timings=timings).cells
        return next(s.seconds_left for s in found if s.cell.row.recalibration == kind)

    assert told("none", step, *others) == pytest.approx(images * 0.0128 / 64)
    assert told("mssar", step, *others) == pytest.approx(images * 0.0192 / 64)
    assert told("mssar", step) == pytest.approx(images * 0.0128 / 64)
    assert told("none", *others[1:]) == told("none")  # by multiply-adds
    recorded = record_of(run_of("densenet100", seed=5), seconds=77, macs=252_500_000)
    assert told("none", step, records=(small, recorded)) == pytest.approx(77)


def test_small_images_tell_a_networks_time_by_multiply_adds_only():
    # As many multiply-adds an image at 32×32 as a 49th of those at 224×224.
    tiny = record_of(run_of("resnet18", dataset="cifar10"), seconds=160, macs=1_810_000_000 // 49)
    found = plan("ilsvrc", [tiny], nets=["resnet18"], seeds=1).cells[0].seconds_left
    assert found == pytest.approx(160 * 49 * 1_281_167 / 50_000 * 100 / 160, rel=1e-6)


def test_what_is_left_adds_up_with_shared_runs_once():
    done = [record_of(run_of(seed=5), seconds=400)]
    both = plan(["table3", "strategy"], done, nets=["resnet20"], datasets=["cifar100"], seeds=2)
    assert [key(run)[1:] for run in both.missing if run.seed == 0] == [
        ("none", "cifar100", (), 0),
        ("mssar", "cifar100", (), 0),
        ("se", "cifar100", (), 0),
        ("mssar", "cifar100", ("strategy=sliding",), 0),
        ("mssar", "cifar100", ("reduction=3",), 0),
    ]
    assert both.seconds_left == pytest.approx(10 * 400)
    assert sum(s.seconds_left for s in both.cells) == pytest.approx(12 * 400)
