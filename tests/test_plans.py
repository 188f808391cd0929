"""The paper's experiments: what is left of them, in which order, and what is recorded of them."""

from itertools import pairwise
from statistics import mean, stdev

import pytest
from test_experiments import CIFAR, ILSVRC, cells, key, plan, record_of, run_of

from mssar.lab import records
from mssar.lab.experiments import EXPERIMENTS, Experiment
from mssar.lab.experiments.cell import Cell
from mssar.lab.recipes import CIFAR_DENSENET, CIFAR_RESNET, DEMO, ILSVRC2012
from mssar.lab.report.tables import paper_rows
from mssar.lab.run import Run, run_from_dict

# --- sharing ---


def test_a_run_of_several_experiments_is_trained_once():
    every = plan(EXPERIMENTS, seeds=1)
    assert len({run.name for run in every.missing}) == len(every.missing)
    # Shared with table 3: in table 4, on two data sets, two rows of each network and ResNet-56 with
    # scale 1 alone, which is SE, and all scales at reduction 3; a regional row of each network; the
    # multi-stage ones; both rows by the paper's recipe.
    assert len(every.missing) == 32 + (46 - 8 - 2 - 2) + (8 - 4) + (4 - 2) + (7 - 2) + 9


def test_one_record_counts_wherever_its_run_appears():
    done = record_of(run_of("densenet100", "mssar", "cifar100"), error=21.5)
    found = [(s.experiment, s.mean) for s in plan(EXPERIMENTS, [done]).cells if s.n]
    assert found == [("table3", 21.5), ("table4", 21.5), ("strategy", 21.5), ("stage", 21.5)]


def test_another_reading_comes_last_unless_an_experiment_is_about_it(monkeypatch):
    narrow = ("resnet20", "mssar", "cifar10", ("reduction=3",), 0)
    order = [key(run) for run in plan(["table3", "table4"], seeds=1).missing]
    assert order.index(narrow) == len(order) - (6 + 12)  # table 3's, and table 4's other scales
    row = next(cell.row for cell in cells("table3") if cell.additional)
    own = Experiment("own", "", lambda: (Cell(row, "cifar10", {"reduction": 3}),))
    monkeypatch.setitem(EXPERIMENTS, "own", own)
    for names in (["table3", "own"], ["own", "table3"]):
        order = [key(run) for run in plan(names, seeds=1).missing]
        assert order.count(narrow) == 1
        assert order.index(narrow) in (2, 3)  # after the baseline and its partner, beside SE


def test_other_readings_can_be_left_out():
    every, printed = (plan(EXPERIMENTS, additional=told) for told in (True, False))
    assert [s.cell for s in every.cells if not s.cell.additional] == [s.cell for s in printed.cells]
    assert not any("reduction=3" in run.particulars for run in printed.missing)
    assert {run.recipe for run in printed.missing} <= {CIFAR_RESNET, CIFAR_DENSENET, ILSVRC2012}
    assert len(every.missing) - len(printed.missing) == 3 * (6 + 12 + 5)


# --- order ---


@pytest.mark.parametrize("names", [list(EXPERIMENTS), ["table4"], ["ilsvrc", "table3"]])
def test_no_seed_begins_before_the_one_before_is_complete(names):
    missing = plan(names, seeds=3).missing
    assert all(a.seed <= b.seed for a, b in pairwise(missing))
    rounds = [[key(r)[:-1] for r in missing if r.seed == seed] for seed in range(3)]
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize("names", [list(EXPERIMENTS), ["table3"], ["table4"], ["ilsvrc"]])
def test_mssar_follows_its_baseline(names):
    missing = plan(names, seeds=2, additional=False).missing
    baselines = [i for i, run in enumerate(missing) if run.recalibration == "none"]
    assert baselines
    for i in baselines:
        network, _, dataset, _, seed = key(missing[i])
        assert key(missing[i + 1]) == (network, "mssar", dataset, (), seed)


def test_networks_go_from_cheap_to_dear_and_cifar10_comes_first():
    missing = plan(EXPERIMENTS, seeds=1).missing[:-23]  # but for other readings
    stops = list(dict.fromkeys((run.network, run.dataset) for run in missing))
    small = [(net, data) for net in CIFAR for data in ("cifar10", "cifar100")]
    assert stops == small + [(net, "ilsvrc2012") for net in ILSVRC]


def test_what_is_recorded_is_left_out_and_the_rest_keeps_its_order():
    before = plan("table3", seeds=2).missing
    done = [record_of(run) for run in before[::3]]
    after = plan("table3", done, seeds=2)
    assert after.missing == tuple(r for i, r in enumerate(before) if i % 3)
    everything = plan("table3", [record_of(run) for run in before], seeds=2)
    assert everything.missing == ()
    assert everything.seconds_left == 0


# --- matching and means ---


def test_records_are_matched_however_the_options_were_said(tmp_path):
    said = [
        run_of("resnet56", "mssar", scales=(1, 2, 4), reduction=1, strategy="regional"),
        run_of("resnet56", "mssar", seed=1),
        run_from_dict(run_of("resnet56", "mssar", seed=2, scales=(1, 2, 4)).as_dict()),
    ]
    for run, error in zip(said, (6.0, 6.1, 6.5), strict=True):
        records.append(tmp_path / "some.jsonl", record_of(run, error))
    found = plan(["table3", "table4"], records.read(tmp_path), seeds=3)
    assert [s.n for s in found.cells if s.n] == [3, 3]
    for state in found.cells:
        if state.n:
            assert state.missing == ()
            assert state.mean == pytest.approx(mean((6.0, 6.1, 6.5)))
            assert state.mean5 == pytest.approx(mean((6.0, 6.1, 6.5)) / 4)
            assert state.stdev == pytest.approx(stdev((6.0, 6.1, 6.5)))
            assert state.difference == pytest.approx(6.2 - 6.04)


@pytest.mark.parametrize(
    "other",
    [
        run_of("resnet20", "mssar"),
        run_of("resnet20", dataset="cifar100"),
        Run("resnet20", dataset="cifar10", recipe=DEMO),
        Run("resnet20", dataset="arrangements", recipe=DEMO),
    ],
    ids=lambda run: run.name,
)
def test_another_run_is_no_match(other):
    (state,) = (
        s
        for s in plan("table3", [record_of(other)]).cells
        if (s.cell.row.network, s.cell.row.recalibration, s.cell.dataset)
        == ("resnet20", "none", "cifar10")
    )
    assert state.n == 0
    assert state.mean is state.mean5 is state.stdev is state.difference is None
    assert len(state.missing) == 3


def test_a_repeat_replaces_nothing_and_is_no_second_seed():
    again = [record_of(run_of(), 8.4), record_of(run_of(), 7.0)]
    state = plan("table3", again).cells[0]
    assert (state.n, state.mean, state.stdev) == (1, 8.4, None)
    assert [run.seed for run in state.missing] == [1, 2]


def test_seeds_beyond_those_asked_for_count_too():
    done = [record_of(run_of(seed=seed), error) for seed, error in ((7, 8.0), (1, 9.0))]
    state = plan("table3", done, seeds=1).cells[0]
    assert [r.run["seed"] for r in state.records] == [1, 7]
    assert state.mean == 8.5
    assert [run.seed for run in state.missing] == [0]


# --- choosing, errors, rows ---


def test_networks_and_data_sets_can_be_chosen():
    found = plan("table3", nets=["resnet20", "densenet100"], datasets=["cifar100"], seeds=1)
    assert {(r.network, r.dataset) for r in found.missing} == {
        ("resnet20", "cifar100"),
        ("densenet100", "cifar100"),
    }
    assert len(found.missing) == 4 + 2


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        ([], {}, "name an experiment: table3, table4, strategy, stage, recipe, ilsvrc"),
        (["table9"], {}, "no experiment 'table9'; there are table3, table4"),
        (["table4"], {"nets": ["resnet20"]}, "'resnet20' in table4; there are resnet56, dense"),
        (["stage"], {"datasets": ["cifar"]}, "'cifar' in stage; there are cifar10, cifar100"),
        (["table3"], {"seeds": 0}, "1 or more; got 0"),
        (
            ["table3", "ilsvrc"],
            {"nets": ["resnet20"], "datasets": ["ilsvrc2012"]},
            "table3, ilsvrc: there is no resnet20 on ilsvrc2012",
        ),
    ],
)
def test_mistakes_are_named_with_what_would_do(names, asked, message):
    with pytest.raises(ValueError, match=message):
        plan(names, **asked)


def test_an_experiment_named_twice_is_one():
    assert len(plan(["stage", "stage"]).cells) == 4


def test_rows_hold_what_a_table_prints():
    done = [record_of(run_of("resnet56", "mssar", seed=s), e) for s, e in ((0, 6.0), (1, 6.4))]
    rows = paper_rows(plan("table4", done, nets=["resnet56"], datasets=["cifar10"]).cells)
    assert len(rows) == 8 + 7
    row = rows[7]
    assert (row.experiment, row.network, row.recalibration) == ("table4", "resnet56", "mssar")
    assert (row.options, row.dataset) == ("scales=1,2,4", "cifar10")
    assert (row.published, row.published_spread, row.n, row.left) == (6.04, 0.11, 2, 1)
    assert (row.mean, row.spread) == (pytest.approx(6.2), pytest.approx(stdev((6.0, 6.4))))
    assert row.difference == pytest.approx(0.16)
    assert row.seconds_left == pytest.approx(1600)
    assert (rows[0].options, rows[0].mean, rows[0].left) == ("", None, 3)
    assert (rows[1].options, rows[1].remark) == ("scales=1", "SE, with BN")
    narrow = paper_rows(plan("table3", nets=["resnet20"]).cells)[-1]
    assert (narrow.options, narrow.additional) == ("reduction=3", True)
