"""Whether runs are compiled although nobody asked for it."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from lab import CPU, Log, arrays, tiny
from test_cli import run as command

from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine import compiling, runner
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.fleet import Outcome
from mssar.lab.run import Run, usual_recipe

GPU = Execution(torch.device("cuda", 0), "bf16")


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


@pytest.fixture(autouse=True)
def _able(monkeypatch):
    monkeypatch.setattr(compiling, "_can_compile", lambda _: True)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (runs("resnet56"), False),
        (runs("resnet56", seeds=2), True),
        (runs("resnet20", seeds=3), False),
        (runs("resnet20", seeds=8), True),
        # Each network is compiled by itself: what one saves must pay for one.
        (runs("resnet56", "none") + runs("resnet56", "se") + runs("resnet56"), False),
        (runs("resnet56", "none", 3) + runs("resnet56", "se", 3) + runs("resnet56", seeds=3), True),
        (runs("resnet56") + runs("resnet56", reduction=3), False),
        (runs("densenet100", seeds=3), False),  # whole it takes minutes
        (runs("resnet56", "eca", 3), False),  # not measured
    ],
    ids=lambda value: value if isinstance(value, bool) else f"{len(value)} {value[0].label}",
)
def test_long_runs_of_repeated_blocks_pay_for_it(asked, wanted):
    assert compiling.pays(asked, cifar, GPU) is wanted


@pytest.mark.parametrize(
    "how",
    [CPU, replace(GPU, graph=False), replace(GPU, deterministic=True)],
    ids=["a CPU", "no graphs", "deterministic"],
)
def test_elsewhere_it_is_left_to_the_user(how):
    assert compiling.pays(runs("resnet56", seeds=4), cifar, GPU)
    assert not compiling.pays(runs("resnet56", seeds=4), cifar, how)


def test_a_short_budget_is_for_training(monkeypatch):
    long = runs("resnet56", seeds=4)
    assert compiling.pays(long, cifar, GPU, budget=540)
    assert not compiling.pays(long, cifar, GPU, budget=160)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not compiling.pays(long, cifar, GPU)  # of several processes none has a graph


def test_without_a_compiler_of_c_there_is_none(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "able", lambda _: True)
    monkeypatch.setattr(compiling.kernels, "AVAILABLE", True)
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert not compiling.pays(runs("resnet56", seeds=4), cifar, GPU)


@pytest.mark.parametrize("may", [True, False])
def test_it_is_settled_before_the_first_run_begins(may, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "pays", lambda *_: True)
    monkeypatch.setattr(runner, "loader", lambda _: lambda _: arrays())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen, log = [], Log()

    def train(_runs, _load, how, *_, **__):
        seen.append(how)
        return Outcome()

    monkeypatch.setattr(runner, "train", train)
    runner.carry_out(
        [tiny()], CPU, tmp_path, watching=lambda: nullcontext(log), record_in={}, may_compile=may
    )
    assert seen == [replace(CPU, compile=may)]
    assert ["--no-compile" in message for message in log.messages] == [True] * may


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
