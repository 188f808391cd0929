"""The paper's experiments: what they consist of."""

import pytest
import torch

import mssar
from mssar.lab import records
from mssar.lab.experiments import EXPERIMENTS, paper
from mssar.lab.experiments.plan import plan_for
from mssar.lab.recipes import CIFAR_DENSENET, CIFAR_RESNET, ILSVRC2012, varied
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run, usual_recipe

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
    [
        ("table3", 32, 3),
        ("table4", 46, 3),
        ("strategy", 8, 3),
        ("stage", 4, 1),
        ("recipe", 7, 3),
        ("ilsvrc", 9, 1),
    ],
)
def test_each_experiment_has_so_many_runs_and_the_papers_seeds(name, count, seeds):
    assert len(plan(name, seeds=1).missing) == count
    assert len(plan(name, seeds=3).missing) == 3 * count
    assert max(cell.row.runs for cell in cells(name)) == seeds


def test_the_recipe_is_varied_in_what_the_paper_leaves_open_one_thing_at_a_time():
    found = [(cell.label, cell.published, cell.additional) for cell in cells("recipe")]
    none = ("", " decay=weights", " fill=mean", " init=torch", " weight_decay=0.0005")
    mssar = ("", " weight_decay=0.0005")
    assert found == [
        *((f"resnet20 none{said} on cifar100", 31.87, bool(said)) for said in none),
        *((f"resnet20 mssar{said} on cifar100", 31.09, bool(said)) for said in mssar),
    ]
    for cell in cells("recipe"):
        run = cell.run(3)
        assert run.seed == 3
        assert run.recipe == varied(CIFAR_RESNET, **cell.recipe)
        assert (run.recipe == CIFAR_RESNET) == (not cell.additional)
    assert len({cell.run(0).name for cell in cells("recipe")}) == 7


def test_every_run_can_be_built_and_has_the_papers_recipe():
    every = [cell.run(0) for name in EXPERIMENTS for cell in cells(name) if not cell.recipe]
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
