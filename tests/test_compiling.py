"""Whether runs are compiled although nobody asked for it."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab import CPU, Log, arrays, tiny
from test_cli import run as command

from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine import checkpoint, compiling, runner
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.fleet import Outcome
from mssar.lab.experiments.plan import plan_for
from mssar.lab.run import Run, usual_recipe

GPU = Execution(torch.device("cuda", 0), "bf16")
NOWHERE = Path("nowhere")


def cifar(_name: str) -> Arrays:
    """As large as it is, without its memory."""

    def split(count: int) -> Split:
        images = torch.zeros(1, 32, 32, 3, dtype=torch.uint8).expand(count, -1, -1, -1)
        return Split(images, torch.zeros(1, dtype=torch.int64).expand(count))

    names = tuple(map(str, range(10)))
    return Arrays("cifar10", names, split(50_000), split(10_000), (127.5,) * 3, (60.0,) * 3)


def runs(network: str, kind: str = "mssar", seeds: int = 1, **options: object) -> list[Run]:
    recipe = usual_recipe(network, "cifar10")
    return [Run(network, kind, options, "cifar10", recipe, seed) for seed in range(seeds)]


def worth(asked: list[Run], how: Execution = GPU, folder: Path = NOWHERE, **more) -> set[str]:
    """Labels of the networks that all runs of are compiled; of others none may be."""
    found = compiling.worth(asked, cifar, how, folder, **more)
    labels = {run.label for run in asked if run.name in found}
    assert found == {run.name for run in asked if run.label in labels}
    return labels


@pytest.fixture
def able(monkeypatch):
    """A GPU, Triton and a compiler of C, as far as one looks."""
    monkeypatch.setattr(compiling, "able", lambda _: True)
    monkeypatch.setattr(compiling.kernels, "AVAILABLE", True)
    monkeypatch.setenv("CC", sys.executable)


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (runs("resnet56"), set()),
        (runs("resnet56", seeds=2), {"resnet56 mssar"}),
        (runs("resnet20", seeds=3), set()),
        (runs("resnet20", seeds=8), {"resnet20 mssar"}),
        # Each network is compiled by itself: what one saves must pay for it.
        (runs("resnet56", "none") + runs("resnet56", "se") + runs("resnet56"), set()),
        (runs("resnet56", "none", 2) + runs("resnet56"), {"resnet56 none"}),
        (runs("resnet56", seeds=9) + runs("resnet20"), {"resnet56 mssar"}),
        (runs("resnet56") + runs("resnet56", reduction=3), set()),
        # A DenseNet is compiled whole, which takes minutes; the others are not measured.
        (runs("densenet100", seeds=3) + runs("resnet56", seeds=2), {"resnet56 mssar"}),
        (runs("resnet56", "eca", 3), set()),
        (runs("resnet56", seeds=9, strategy="sliding"), {"resnet56 mssar strategy=sliding"}),
    ],
    ids=lambda value: f"{len(value)} {value[0].label}" if isinstance(value, list) else "",
)
def test_long_runs_of_repeated_blocks_pay_for_it(asked, wanted):
    assert worth(asked) == wanted


@pytest.mark.usefixtures("able")
def test_all_of_a_table_leaves_out_its_densenets():
    states = plan_for(["table3"], [], hardware="").missing
    found = {label.split()[0] for label in worth(list(states))}
    assert found == {"resnet32", "resnet56"}  # three ResNet-20 on each data set are too short


def begun(run: Run, folder: Path, epoch: int, *makers: checkpoint.Maker) -> None:
    progress = checkpoint.Progress(run.as_dict(), "", "bf16", "", "", epoch, makers=[*makers])
    (folder / run.name).mkdir(exist_ok=True)
    checkpoint.write(folder / run.name, progress, checkpoint.Brought({"x": torch.zeros(1)}))


@pytest.mark.usefixtures("able")
def test_what_is_done_counts_no_more(tmp_path):
    asked = runs("resnet56", seeds=4)
    for run in asked[1:]:
        begun(run, tmp_path, 160)
    assert worth(asked)
    assert not worth(asked, folder=tmp_path)
    assert worth(asked, folder=tmp_path, anew=True)


@pytest.mark.usefixtures("able")
def test_what_was_begun_goes_on_as_it_was_begun(tmp_path):
    """With less to go it would not pay any more, and the rest would be rounded otherwise."""
    asked = runs("resnet56", seeds=4)
    names = [run.name for run in asked]

    def found(some=asked, **more):
        return compiling.worth(some, cifar, GPU, tmp_path, **more)

    begun(asked[0], tmp_path, 10)  # by a version that did not say
    assert found(asked[:2]) == {*names[:2]}
    begun(asked[0], tmp_path, 20, {"compile": False}, {"compile": True})
    assert found(asked[:1]) == found(asked[:1], budget=9.0) == {names[0]}
    assert found(asked[:2]) == {*names[:2]}  # the program is there, or soon will be
    assert found(asked[:2], budget=9.0) == {names[0]}
    begun(asked[0], tmp_path, 30, {"compile": True}, {"compile": False})
    assert not found(asked[:2])  # one alone is too short
    assert found() == {*names[1:]}
    begun(asked[1], tmp_path, 30, {"compile": True})
    assert found() == {*names[1:]}
    (tmp_path / names[0] / "epoch-0040.safetensors").touch()  # spoilt
    assert found() == found(anew=True) == {*names}


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    "how",
    [CPU, replace(GPU, graph=False), replace(GPU, deterministic=True)],
    ids=["a CPU", "no graphs", "deterministic"],
)
def test_elsewhere_it_is_left_to_the_user(how):
    assert not worth(runs("resnet56", seeds=4), how)


@pytest.mark.usefixtures("able")
def test_a_short_budget_is_for_training(monkeypatch):
    long = runs("resnet56", seeds=4)
    assert worth(long, budget=540)
    assert not worth(long, budget=160)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not worth(long)  # of several processes none has a graph


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("missing", ["a GPU", "Triton", "a compiler"])
def test_without_what_compiles_nothing_is(missing, monkeypatch):
    long = runs("resnet56", seeds=4)
    assert worth(long)
    if missing == "a GPU":
        monkeypatch.setattr(compiling, "able", lambda _: False)
    elif missing == "Triton":
        monkeypatch.setattr(compiling.kernels, "AVAILABLE", False)
    else:
        monkeypatch.setenv("CC", "/no/such/compiler")
    assert not worth(long)


@pytest.mark.parametrize("may", [True, False])
def test_it_is_settled_before_the_first_run_begins(may, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "worth", lambda *_, **__: frozenset({tiny().name}))
    monkeypatch.setattr(runner, "loader", lambda _: lambda _: arrays())
    seen, log = [], Log()

    def train(_runs, _load, how, *_, **__):
        seen.append(how)
        return Outcome()

    monkeypatch.setattr(runner, "train", train)
    runner.carry_out(
        [tiny()], CPU, tmp_path, watching=lambda: nullcontext(log), record_in={}, may_compile=may
    )
    (how,) = seen
    assert how.of(tiny().name) == replace(CPU, compile=may)
    assert how.of("another") == CPU
    assert "compiled" not in how.as_dict()
    assert [tiny().label in message for message in log.messages] == [True] * may


@pytest.mark.parametrize(
    ("words", "may", "compiled"),
    [([], True, False), (["--compile"], False, True), (["--no-compile"], False, False)],
)
def test_who_says_so_decides(words, may, compiled, tmp_path, monkeypatch):
    seen = []

    def carry_out(_runs, how, *_, may_compile, **__):
        seen.append((may_compile, how.compile))
        return Outcome()

    monkeypatch.setattr(runner, "carry_out", carry_out)
    command("train", "resnet8", "--device", "cpu", "--runs", str(tmp_path), *words)
    assert seen == [(may, compiled)]


def test_what_is_compared_is_trained_as_it_is_timed(tmp_path, monkeypatch):
    seen = []

    def carry_out(_runs, how, *_, may_compile, **__):
        seen.append((may_compile, how.compile))
        return Outcome()

    monkeypatch.setattr(runner, "carry_out", carry_out)
    words = ("--device", "cpu", "--runs", str(tmp_path), "--seconds", "0")
    command("compare", "resnet8", "--modules", "none,mssar", *words)
    assert seen == [(False, False)]
