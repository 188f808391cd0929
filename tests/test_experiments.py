"""The paper's experiments: what they consist of, what is left of them, in which order."""

from collections import Counter
from itertools import pairwise
from statistics import mean, stdev

import pytest
import torch

import mssar
from mssar.lab import records
from mssar.lab.experiments import EXPERIMENTS, Experiment, paper
from mssar.lab.experiments.cell import Cell
from mssar.lab.experiments.plan import plan_for
from mssar.lab.recipes import CIFAR_DENSENET, CIFAR_RESNET, DEMO, ILSVRC2012
from mssar.lab.records import Epoch, Record
from mssar.lab.report.tables import paper_rows
from mssar.lab.run import Run, run_from_dict, usual_recipe

HERE = "a device"
CIFAR = ("resnet20", "resnet32", "resnet56", "densenet100", "densenet190")

# Retyped from the paper: CIFAR-10 and CIFAR-100 without and with MS-SAR.
TABLE3 = {
    "resnet20": "8.61 31.87 7.61 31.09",
    "resnet32": "7.51 30.63 6.68 29.41",
    "resnet56": "6.97 29.07 6.04 27.71",
    "densenet100": "4.67 22.45 4.16 21.13",
    "densenet190": "3.46 17.34 3.32 16.92",
}
# ResNet-56 on CIFAR-10 and CIFAR-100 with deviations, DenseNet-100 on both.
TABLE4 = {
    None: "6.97 0.05 29.41 0.14 4.67 22.45",
    (1,): "6.80 0.06 28.99 0.15 4.45 21.83",
    (2,): "6.55 0.05 28.31 0.17 4.35 21.33",
    (4,): "6.48 0.06 28.74 0.18 4.39 21.79",
    (1, 2): "6.38 0.07 28.28 0.19 4.29 21.42",
    (1, 4): "6.11 0.14 28.05 0.22 4.32 21.27",
    (2, 4): "6.35 0.09 28.87 0.27 4.33 21.23",
    (1, 2, 4): "6.04 0.11 27.71 0.21 4.06 21.13",
}
# Top-1 and top-5: none, SE, MS-SAR.
ILSVRC = {
    "resnet18": "30.50 11.07 29.78 10.27 29.43 10.19",
    "resnet34": "27.02 8.77 26.67 8.43 26.15 8.35",
    "resnext50": "22.20 6.12 21.95 5.93 21.64 5.78",
}


def cells(name):
    return EXPERIMENTS[name].cells()


def numbers(text):
    return [float(word) for word in text.split()]


def run_of(network="resnet20", recalibration="none", dataset="cifar10", seed=0, **options):
    recipe = usual_recipe(network, dataset)
    return Run(network, recalibration, options, dataset, recipe, seed)


def record_of(run, error=8.0, seconds=1600.0, together=1, hardware=HERE, macs=40_800_000, **more):
    """A record as the engine writes it, through its line; an epoch for each of the recipe."""
    course = {"train_loss": 1.0, "train_error": 9.0, "test_loss": 1.0, "test_error5": error / 4}
    lasting = {"lr": 0.1, "seconds": seconds / run.recipe.epochs, "test_error": error, **course}
    fields = {
        "id": f"{run.name}-{error}",
        "run": run.as_dict(),
        "data": {"checksum": "sha256:0", "classes": 10, "train": 50_000, "test": 10_000},
        "execution": {"device": "cuda", "precision": "bf16", "together": together},
        "environment": {"hardware": hardware},
        "code": {"version": "0", "commit": None, "changed": None},
        "command": "mssar train",
        "params": 272_474,
        "macs": macs,
        "epochs": tuple(Epoch(i + 1, **lasting) for i in range(run.recipe.epochs)),
        "error": error,
        "error5": error / 4,
        "class_errors": (error,) * 10,
        "seconds": seconds,
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T01:00:00+00:00",
        "interruptions": 0,
        **more,
    }
    return records.parse(Record(**fields).as_line())


def plan(names, recorded=(), **asked):
    return plan_for([names] if isinstance(names, str) else names, recorded, hardware=HERE, **asked)


def key(run):
    return (run.network, run.recalibration, run.dataset, tuple(run.particulars), run.seed)


# --- what the experiments consist of ---


def test_table_3_has_the_published_errors():
    found = {
        (c.row.network, c.row.recalibration, c.dataset): c.published
        for c in cells("table3")
        if not c.additional
    }
    unpublished = {(f"resnet{n}", "se", d) for n in (20, 32, 56) for d in ("cifar10", "cifar100")}
    assert {cell for cell, error in found.items() if error is None} == unpublished
    found = {cell: error for cell, error in found.items() if error is not None}
    wanted = {}
    for network, text in TABLE3.items():
        where = [(r, d) for r in ("none", "mssar") for d in ("cifar10", "cifar100")]
        wanted |= {(network, *w): n for w, n in zip(where, numbers(text), strict=True)}
    assert found == wanted


def test_table_3_has_the_resnets_at_reduction_3_at_its_end():
    *main, a, b, c, d, e, f = cells("table3")
    assert len(main) == 26
    assert not any(cell.additional for cell in main)
    last = [(x.row.network, x.dataset, x.run(0).options["reduction"]) for x in (a, b, c, d, e, f)]
    nets = ("resnet20", "resnet32", "resnet56")
    assert last == [(net, data, 3) for net in nets for data in ("cifar10", "cifar100")]
    assert all(x.additional for x in (a, b, c, d, e, f))
    recalibrated = [cell.run(0) for cell in main if cell.row.recalibration == "mssar"]
    assert {run.options["reduction"] for run in recalibrated} == {1}


def test_table_4_has_the_published_errors_and_deviations():
    found = {}
    for c in cells("table4"):
        scales = c.options.get("scales")
        found[c.row.network, scales, c.dataset] = (c.published, c.spread)
    wanted = {}
    for scales, text in TABLE4.items():
        c10, d10, c100, d100, dense10, dense100 = numbers(text)
        wanted["resnet56", scales, "cifar10"] = (c10, d10)
        wanted["resnet56", scales, "cifar100"] = (c100, d100)
        wanted["densenet100", scales, "cifar10"] = (dense10, None)
        wanted["densenet100", scales, "cifar100"] = (dense100, None)
    assert found == wanted


def test_narrow_layers_alone_fit_the_costs_of_table_4():
    """ResNet-56's, at every combination of scales, within 0.1 M; other widths do not."""
    apart: dict[int, list[float]] = {1: [], 2: [], 3: [], 4: []}
    narrow = [c for c in cells("table4") if c.additional and c.dataset == "cifar10"]
    assert len(narrow) == 7
    for cell in narrow:
        for reduction, found in apart.items():
            options = {**cell.options, "reduction": reduction}
            net = mssar.create_model("resnet56", "mssar", num_classes=10, **options)
            found.append(abs(mssar.cost(net, (3, 32, 32)).macs - cell.row.macs) / 1e6)
    assert max(apart[3]) < 0.1 < min(max(apart[k]) for k in (1, 2, 4))
    assert min(apart[1]) > 0.1  # the text's in no row


def test_ilsvrc_has_the_published_errors():
    found = {
        (c.row.network, c.row.recalibration): (c.published, c.published5) for c in cells("ilsvrc")
    }
    wanted = {}
    for network, text in ILSVRC.items():
        top1, top5 = numbers(text)[::2], numbers(text)[1::2]
        for kind, both in zip(("none", "se", "mssar"), zip(top1, top5, strict=True), strict=True):
            wanted[network, kind] = both
    assert found == wanted
    assert {c.dataset for c in cells("ilsvrc")} == {"ilsvrc2012"}


def test_stage_has_the_published_errors_and_says_what_is_odd_about_them():
    found = {(c.row.options["stage"], c.dataset): c.published for c in cells("stage")}
    assert found == {
        ("multi", "cifar10"): 4.06,
        ("multi", "cifar100"): 21.13,
        ("single", "cifar10"): 4.45,
        ("single", "cifar100"): 21.83,
    }
    single = next(row for row in paper.STAGE if row.options["stage"] == "single")
    odd = next(
        row
        for row in paper.TABLE4
        if row.network == "densenet100" and row.options.get("scales") == (1,)
    )
    assert single.errors == odd.errors
    assert all("scales=1" in c.remark for c in cells("stage") if c.row is single)


def test_one_scale_alone_is_trained_once_as_se():
    """Its networks begin alike and compute alike, so their records are the same."""
    trained_as_se = [c for c in cells("table4") if c.options.get("scales") == (1,)]
    assert {c.row.network for c in trained_as_se} == {"resnet56", "densenet100"}
    for cell in trained_as_se:
        run = cell.run(0)
        assert (run.recalibration, run.dataset) == ("se", cell.dataset)
        torch.manual_seed(run.seed)
        one = mssar.create_model(run.network, "mssar", **cell.options).state_dict()
        torch.manual_seed(run.seed)
        se = mssar.create_model(run.network, "se", **run.options).state_dict()
        assert one.keys() == se.keys()
        assert all(torch.equal(one[name], se[name]) for name in one)
    recorded = record_of(run_of("resnet56", "se"), error=6.3)
    states = plan(["table3", "table4"], [recorded], nets=["resnet56"], datasets=["cifar10"]).cells
    found = {(state.experiment, state.cell.label) for state in states if state.mean == 6.3}
    assert found == {
        ("table3", "resnet56 se on cifar10"),
        ("table4", "resnet56 mssar scales=1 on cifar10"),
    }


def test_strategy_invents_no_errors():
    found = [(c.row.network, c.run(0).options["strategy"], c.dataset) for c in cells("strategy")]
    nets = ("resnet20", "resnet32", "resnet56", "densenet100")
    assert found == [(n, s, "cifar100") for n in nets for s in ("regional", "sliding")]
    assert all(c.published is c.spread is None for c in cells("strategy"))
    assert paper.STRATEGY_GAIN == 0.2


@pytest.mark.parametrize(
    ("name", "count", "seeds"),
    [("table3", 32, 3), ("table4", 46, 3), ("strategy", 8, 3), ("stage", 4, 1), ("ilsvrc", 9, 1)],
)
def test_each_experiment_has_so_many_runs_and_the_papers_seeds(name, count, seeds):
    assert len(plan(name, seeds=1).missing) == count
    assert len(plan(name, seeds=3).missing) == 3 * count
    assert max(cell.row.runs for cell in cells(name)) == seeds


def test_without_a_number_of_seeds_there_are_as_many_as_the_papers():
    found = Counter(run.network for run in plan("table3", seeds=None).missing)
    resnet = 3 * 8  # seeds; none, se, mssar, reduction 3 on two data sets
    dense = 1 * 4
    assert found == dict(zip(CIFAR, [resnet] * 3 + [dense] * 2, strict=True))


def test_every_run_can_be_built_and_has_the_papers_recipe():
    every = [cell.run(0) for name in EXPERIMENTS for cell in cells(name)]
    kinds = {}  # one run each will do; the cheapest network comes first
    for run in every:
        kinds.setdefault((run.recalibration, *run.particulars), run)
    for run in kinds.values():
        run.check()
    for run in every:
        dense = CIFAR_DENSENET if run.network.startswith("densenet") else CIFAR_RESNET
        assert run.recipe == (ILSVRC2012 if run.dataset == "ilsvrc2012" else dense)


def test_a_label_says_what_the_cell_is_about():
    labels = {c.label for name in ("table4", "strategy") for c in cells(name)}
    assert "resnet56 mssar scales=1,4 on cifar10" in labels
    assert "resnet20 mssar strategy=regional on cifar100" in labels


# --- sharing ---


def test_a_run_of_several_experiments_is_trained_once():
    every = plan(EXPERIMENTS, seeds=1)
    assert len(set(map(key, every.missing))) == len(every.missing)
    # Shared with table 3: in table 4, on two data sets, two rows of each network and ResNet-56 with
    # scale 1 alone, which is SE, and all scales at reduction 3; a regional row of each network; the
    # multi-stage ones.
    assert len(every.missing) == 32 + (46 - 8 - 2 - 2) + (8 - 4) + (4 - 2) + 9


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


# --- order ---


@pytest.mark.parametrize("names", [list(EXPERIMENTS), ["table4"], ["ilsvrc", "table3"]])
def test_no_seed_begins_before_the_one_before_is_complete(names):
    missing = plan(names, seeds=3).missing
    assert all(a.seed <= b.seed for a, b in pairwise(missing))
    rounds = [[key(r)[:-1] for r in missing if r.seed == seed] for seed in range(3)]
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize("names", [list(EXPERIMENTS), ["table3"], ["table4"], ["ilsvrc"]])
def test_mssar_follows_its_baseline(names):
    missing = plan(names, seeds=2).missing
    baselines = [i for i, run in enumerate(missing) if run.recalibration == "none"]
    assert baselines
    for i in baselines:
        network, _, dataset, _, seed = key(missing[i])
        assert key(missing[i + 1]) == (network, "mssar", dataset, (), seed)


def test_networks_go_from_cheap_to_dear_and_cifar10_comes_first():
    missing = plan(EXPERIMENTS, seeds=1).missing[:-6]  # but for reduction 3
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
        ([], {}, "name an experiment: table3, table4, strategy, stage, ilsvrc"),
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
