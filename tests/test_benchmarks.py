"""The benchmark of what recalibration costs: its table, its records, and what it compares."""

import importlib
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import mssar

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--net", "resnet8", "--batch", "2", "--size", "8", "--seconds", "0", "--rounds", "3"]


@pytest.fixture
def script(monkeypatch) -> Iterator[types.ModuleType]:
    """The script as a module; what it sets for its own process is taken back."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    yield importlib.import_module("overhead")
    for file in BENCHMARKS.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def overhead(script, monkeypatch) -> types.ModuleType:
    """On a CPU, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return script


def rows(text: str) -> dict[str, list[str]]:
    """The table's cells by variant."""
    lines = text.split("\n\n", 1)[-1].splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["ms"])
    found = (line.replace(" %", "%").split() for line in lines[head + 1 :])
    return {cells[0]: cells[1:] for cells in found}


@pytest.mark.parametrize("train", [[], ["--train"]], ids=["inference", "training"])
def test_a_row_and_a_record_a_variant(overhead, capsys, tmp_path, train):
    file = tmp_path / "overhead.jsonl"
    asked = ["--variants", "obvious,none,mssar", "--json", str(file)]
    assert overhead.main([*TINY, *train, *asked]) == 0
    said = capsys.readouterr()
    table = rows(said.out)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert list(table) == [r["variant"] for r in records] == ["obvious", "none", "mssar"]
    middle = {r["variant"]: r["median_ms"] for r in records}
    for r in records:
        ms, low, high, cost = table[r["variant"]]
        assert 0 < r["p20_ms"] <= r["median_ms"] <= r["p80_ms"]
        assert r["cost"] == pytest.approx(r["median_ms"] / middle["none"] - 1)
        assert (ms, low, high) == tuple(f"{r[k]:.3f}" for k in ("median_ms", "p20_ms", "p80_ms"))
        assert cost == f"{100 * r['cost']:+.1f}%"
        assert (r["net"], r["batch"], r["size"], r["train"]) == ("resnet8", 2, 8, bool(train))
        assert (r["mode"], r["device"], r["rounds"], r["peak_bytes"]) == ("eager", "cpu", 3, None)
        assert r["torch"] == torch.__version__
        assert r["source"].startswith("sha256:")
    assert len(re.findall(r"ready in [\d.]+ s", said.err)) == 3
    overhead.main([*TINY, "--variants", "none", "--json", str(file)])
    assert len(file.read_text().splitlines()) == 4, "records are appended"


def test_costs_are_over_the_network_without_recalibration(overhead, capsys):
    work = replace(overhead.WORKLOADS["resnet18-train"], device="cpu")  # whose name is shown
    times = {"none": [10.0, 20.0, 9.0], "timm-se": [12.0, 10.0, 11.0], "mssar": [10.2] * 3}
    peaks = {"none": 100, "timm-se": 90, "mssar": 106}
    made = {name: overhead.Ready(lambda: None, peak) for name, peak in peaks.items()}
    found = {r["variant"]: r for r in overhead.summary(work, made, times)}
    assert [found[name]["cost"] for name in times] == pytest.approx([0.0, 0.1, 0.02])
    assert [found[name]["memory"] for name in times] == pytest.approx([0.0, -0.1, 0.06])
    overhead.show(work, list(found.values()))
    said = capsys.readouterr().out
    assert "mssar: time +2.0 %  goal +3 %: met" in said
    assert "mssar: memory +6.0 %  goal +5 %: missed" in said


def test_at_the_end_every_workload_has_a_line(overhead, capsys):
    names = ("resnet18-eager-train", "resnet18-eager-train-32", "resnet18-train-32")
    works = [overhead.WORKLOADS[name] for name in names]
    times = [{"none": 10.0, "mssar": 10.7}, {"none": 4.0, "timm-se": 4.8, "mssar": 5.1}, {}]
    made = {name: overhead.Ready(lambda: None, None) for name in overhead.VARIANTS}
    records = []
    for work, taken in zip(works, times, strict=True):
        records += overhead.summary(work, made, {name: [ms] for name, ms in taken.items()})
    overhead.show_all(works, records)
    head, *lines = capsys.readouterr().out.replace(" %", "%").strip().splitlines()
    assert head.split() == ["cost", "none,", "ms", "timm-se", "mssar", "goal"]
    assert [line.split() for line in lines] == [
        [names[0], "10.000", "-", "+7.0%", "+8%", "met"],
        [names[1], "4.000", "+20.0%", "+27.5%", "+25%", "missed"],
        [names[2], "nan", "-", "-"],
    ]


def test_a_workload_that_fails_leaves_the_others(overhead, capsys, monkeypatch):
    def measuring(work, _):
        if work.net == "resnet18":
            raise torch.OutOfMemoryError("too large\nby far")
        made = {"none": overhead.Ready(lambda: None, None)}
        return overhead.summary(work, made, {"none": [2.0]}), 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(overhead, "measure", measuring)
    monkeypatch.setattr(overhead, "tidy", lambda _: None)
    asked = ["--workload", "resnet18-infer", "resnet34-infer", "--mode", "eager"]
    assert overhead.main(asked) == 1
    said = capsys.readouterr().out
    assert "resnet18-infer failed: OutOfMemoryError: too large\n" in said
    assert re.search(r"resnet34-infer +2.000 +\+2 %$", said.strip())


def test_without_a_network_to_compare_with_there_is_no_cost(overhead, capsys):
    assert overhead.main([*TINY, "--variants", "mssar"]) == 0
    assert len(rows(capsys.readouterr().out)["mssar"]) == 3


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["--variants", "none,sse"], "no variant 'sse'; there are none, timm-se"),
        (["--workload", "resnet19-train"], "no workload 'resnet19-train'; there are all, resnet18"),
        (["--workload", "resnet18-*-test"], "no workload 'resnet18-*-test'; there are all"),
        (["--workload", "resnet18-train"], "resnet18-train needs a CUDA device"),
        (["--workload", "resnet18-cpu", "--batch", "2"], "for a workload without a name"),
        (["--mode", "graph"], "a CPU has no graphs"),
        (["--op"], "--op needs a CUDA device"),
        (["--op", "blocks"], "--op needs a CUDA device"),
        (["--op", "--variants", "obvious"], "no variant 'obvious'; there are none, timm-se"),
    ],
)
def test_what_cannot_be_is_refused(overhead, capsys, asked, reason):
    with pytest.raises(SystemExit) as stopped:
        overhead.main(asked)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_what_is_missing_is_left_out_and_what_fails_is_told(overhead, capsys, monkeypatch):
    def broken(*_):
        raise torch.OutOfMemoryError("too large\nby far")

    monkeypatch.setitem(overhead.VARIANTS, "obvious", broken)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # nor is timm needed
    assert overhead.main([*TINY, "--variants", "none,timm-se,obvious,mssar"]) == 1
    said = capsys.readouterr().out
    assert "resnet8: timm-se left out: timm is not installed\n" in said
    assert "resnet8: obvious failed: OutOfMemoryError: too large\n" in said
    assert list(rows(said)) == ["none", "mssar"]


def test_variants_take_turns(overhead):
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    times = overhead.in_turns(steps, torch.device("cpu"), 0, 4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"  # the first is not counted
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys("abc", 4)


class Machine:
    """A host and a device that work beside each other, as torch.cuda.Event sees them."""

    def __init__(self) -> None:
        self.host = self.device = 0.0  # when each is done with what it was given

    def step(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def event(self, enable_timing: bool) -> types.SimpleNamespace:
        assert enable_timing
        made = types.SimpleNamespace()

        def record() -> None:
            made.at = max(self.host, self.device)

        def synchronize() -> None:
            self.host = max(self.host, made.at)

        made.record, made.synchronize = record, synchronize
        made.elapsed_time = lambda other: other.at - made.at
        return made


def test_a_step_takes_as_long_as_the_slower_of_host_and_device(overhead, monkeypatch):
    """Whoever had the turn before: a device that has much to do would hide a slow host."""
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    work = {"none": (2.0, 9.0), "mssar": (11.0, 10.0), "se": (6.0, 3.0)}  # host, device
    steps = {name: partial(machine.step, *both) for name, both in work.items()}
    times = overhead.in_turns(steps, torch.device("cuda"), 0, 3)
    for name, both in work.items():
        assert times[name] == pytest.approx([max(both)] * len(times[name]))
        assert len(times[name]) >= 3


class Compiler:
    """As torch._dynamo: there when it is asked for, and naming a directory then."""

    @property
    def config(self) -> types.SimpleNamespace:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "default")
        return types.SimpleNamespace()


@pytest.mark.parametrize("named", [False, True], ids=["its own", "the user's"])
def test_compiling_ahead_leaves_the_users_cache_as_it_was(overhead, monkeypatch, tmp_path, named):
    """What the processes found to be fast is gone when it is measured, and nothing else."""
    users, found, seen = tmp_path / "users", set(), set()
    monkeypatch.setattr(torch, "_dynamo", Compiler())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(users))
    users.mkdir()
    (users / "old.best_config").touch()

    def cache() -> Path:
        seen.add(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        return max(seen)

    def compiling(command, **_):
        name = command[command.index("--compile-only") - 3]
        for kind in ("py", "best_config"):
            (cache() / f"{name}.{kind}").touch()

    def measuring(*_):
        found.update(file.name for file in cache().iterdir())
        return [], 0

    monkeypatch.setattr("subprocess.run", compiling)
    monkeypatch.setattr(overhead, "measure", measuring)
    monkeypatch.setattr(overhead, "tidy", lambda _: None)
    asked = ["--mode", "compile", "--jobs", "2", "--variants", "none,mssar"]
    assert overhead.main([*TINY, *asked]) == 0
    assert found == {"none.py", "mssar.py"} | ({"old.best_config"} if named else set())
    assert len(seen) == 1, "all processes share it"
    assert (seen == {users}) == named
    assert list(tmp_path.iterdir()) == [users]
    assert (users / "old.best_config").exists()
    assert ("TORCHINDUCTOR_CACHE_DIR" in os.environ) == named


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("reduction", [1, 16])
@pytest.mark.usefixtures("script")
def test_the_obvious_layer_is_the_layer(reduction, train):
    layer = mssar.MSSAR(96, reduction=reduction, dtype=torch.float64).train(train)
    other = sys.modules["peers"].Obvious(96, reduction=reduction).double().train(train)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
        learnt = [t for name, t in layer.state_dict().items() if name != "coordinates"]
        for old, new in zip(learnt, other.state_dict().values(), strict=True):
            new.copy_(old)
    x = torch.randn(3, 96, 8, 8, dtype=torch.float64)
    assert_close(other(x), layer(x))


@pytest.mark.parametrize(("net", "kept"), [("resnext50", 16), ("resnet18", 1)])
def test_the_obvious_network_has_as_many_parameters(overhead, net, kept):
    made = overhead.VARIANTS["obvious"](net, torch.device("cpu"))
    count = sum(p.numel() for p in made.parameters())
    assert count == sum(p.numel() for p in mssar.create_model(net, "mssar").parameters())
    first = next(m for m in made.modules() if type(m).__name__ == "Obvious")
    assert first.branches[0][0].out_channels == first.branches[0][0].in_channels // (3 * kept)


GOALS = {
    ("eager", True, 256): 0.08,
    ("eager", False, 256): 0.08,
    ("eager", True, 32): 0.25,
    ("eager", False, 32): 0.30,
    ("compile", True, 256): 0.06,
    ("compile+graph", True, 256): 0.03,
    ("compile+graph", False, 256): 0.02,
    ("compile", False, 8): 0.03,  # a CPU's
}


def test_every_goal_is_there(overhead):
    small = {"resnet20": 128, "resnet56": 128, "densenet100": 64}
    for name, work in overhead.WORKLOADS.items():
        goal = GOALS.get((work.mode, work.train, work.batch))
        if work.net in small:
            goal = 0.1
            assert (work.mode, work.batch) == ("compile+graph", small[work.net])
        assert work.goal == goal, name
        assert ("train" in name.split("-")) == work.train
    goals = [work.goal for work in overhead.WORKLOADS.values()]
    assert len([goal for goal in goals if goal]) == 15


def test_workloads_can_be_asked_for_by_a_pattern(overhead, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = ["resnet18-compile-train", "resnet18-eager-*", "resnet18-*-train"]
    _, works = overhead.parsed(["--workload", *asked])
    assert [work.name.removeprefix("resnet18-") for work in works] == [
        "compile-train",
        "eager-train",
        "eager-infer",
        "eager-train-32",
        "eager-infer-32",
    ]
    assert {work.mode for work in works[1:]} == {"eager"}
    assert [work.batch for work in works] == [256, 256, 256, 32, 32]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["none", "obvious", "mssar"])
@pytest.mark.usefixtures("script")
def test_a_graphs_replay_is_a_step(variant):
    """It fills the gradients again, with those that a step makes."""
    peers = sys.modules["peers"]
    device = torch.device("cuda")
    work = peers.Workload("tiny", "resnet8", 8, 32, True, "graph")
    with peers.lane(device):
        x = torch.randn(8, 3, 32, 32, device=device)
        data = (x.contiguous(memory_format=torch.channels_last), torch.arange(8, device=device))
        model = peers.VARIANTS[variant]("resnet8", device).to(device).train()
        step = peers.step_of(model, work, data)
        for _ in range(3):
            step()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        replay = peers.captured(step, torch.cuda.graph_pool_handle())
        for p in model.parameters():
            p.grad.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert_close(p.grad, grad, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_on_a_gpu_memory_is_measured(script, capsys, tmp_path, mode):
    file = tmp_path / "overhead.jsonl"
    asked = ["--train", "--mode", mode, "--variants", "none,mssar", "--json", str(file)]
    assert script.main([*TINY[:2], "--batch", "64", *TINY[6:], *asked]) == 0
    table = rows(capsys.readouterr().out)
    for line in file.read_text().splitlines():
        r = json.loads(line)
        weights = sum(p.numel() for p in mssar.create_model("resnet8").parameters())
        assert r["peak_bytes"] > 2 * 4 * weights
        assert table[r["variant"]][4] == f"{r['peak_bytes'] / 2**20:.0f}"
