"""Benchmarks of tails alone, of the host's time, of first steps and of fleets: what they count, and
that a part which fails leaves the rest."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import mssar
from mssar.lab.engine.execution import Execution
from mssar.networks.registry import architecture

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def load(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """A script by its name, on a CPU wherever the tests run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield importlib.import_module
    for file in BENCHMARKS.glob("*.py"):
        sys.modules.pop(file.stem, None)


# --- tails alone ---


@pytest.mark.parametrize("net", ["resnet18", "resnext50", "resnet20"])
def test_the_tails_are_those_of_the_networks(load, net):
    """Their maps, and layers as large as there."""
    op, seen = load("tail_op"), {}

    def see(layer: mssar.MSSAR, given: tuple[torch.Tensor, ...]) -> None:
        seen[tuple(given[0].shape[1:])] = layer

    with torch.device("meta"):
        model = mssar.create_model(net, "mssar", backend="reference")
        for module in model.modules():
            if isinstance(module, mssar.MSSAR):
                module.register_forward_pre_hook(see)
        model(torch.empty(2, *architecture(net).size))
    sizes = [size for size in op.BLOCKS if size.net == net]
    assert [(size.channels, size.side, size.side) for size in sizes] == list(seen)
    for size, there in zip(sizes, seen.values(), strict=True):
        layer = op.recalibration("mssar", net, CPU)(size.channels)
        assert [p.shape for p in layer.parameters()] == [p.shape for p in there.parameters()]


def test_a_tails_gradients_can_be_had_again(load):
    """As a graph that holds the backward pass alone has them again and again."""
    op = load("tail_op")
    size = op.Size("resnet20", 8, 6, 2)
    forward, backward, both = op.tail_steps("mssar", size, CPU, compiled=False)
    assert_close(backward(), both())
    assert_close(backward(), both())
    assert len(forward()) == op.SETS
    assert all(grad.abs().sum() > 0 for grad in backward()[0][:3])  # x, shortcut, BN's weight


def op_run(op: ModuleType, monkeypatch, tmp_path: Path, way: str, times: dict[str, float]) -> int:
    """A way of --op with these times in ms, as if there were a GPU; one kind of tail is broken."""

    def made(kind: str, *_, **__):
        if kind == "timm-se":
            raise torch.OutOfMemoryError("too large\nby far")
        return [lambda: None] * 3

    def turns(steps, *_):
        return {name: [times[name.split()[0]]] for name in steps}

    monkeypatch.setattr(op, "tail_steps", made)
    monkeypatch.setattr(op, "captured", lambda step: step)
    monkeypatch.setattr(op, "in_turns", turns)
    monkeypatch.setattr(op, "lane", lambda _: torch.no_grad())
    monkeypatch.setattr(op, "heading", lambda what, _: what)
    monkeypatch.setattr(op, "append", lambda path, _, found: path.write_text(json.dumps(found)))
    monkeypatch.setattr(op, "tidy", lambda: None)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros(2**20, dtype=torch.uint8))
    kinds, file = ["none", "timm-se", "mssar"], tmp_path / "op.json"
    wanted = argparse.Namespace(variants=kinds, seconds=0.0, rounds=1, json=file)
    return op.WAYS[way](wanted)


def test_a_blocks_row_says_what_a_tail_takes_more(load, monkeypatch, tmp_path, capsys):
    op = load("tail_op")
    times = {"none": 0.2 * op.SETS, "mssar": 0.25 * op.SETS}
    assert op_run(op, monkeypatch, tmp_path, "blocks", times) == 1, "one kind failed"
    said = capsys.readouterr().out
    assert "56×56×64: timm-se failed: OutOfMemoryError: too large\n" in said
    table = [line.split() for line in said.splitlines() if "failed" not in line][3:]
    assert [cells[:2] for cells in table] == [[str(size), size.net] for size in op.BLOCKS]
    assert all(cells[2:] == ["200.0", "-", "250.0", "50.0"] for cells in table)


def test_a_tails_speed_is_in_bytes_that_must_move(load, monkeypatch, tmp_path, capsys):
    op = load("tail_op")
    times = {"copy": 0.001, "none": 1.0, "mssar": 2.0}
    assert op_run(op, monkeypatch, tmp_path, "memory", times) == 1, "one kind failed"
    found = {r["op"]: r for r in json.loads((tmp_path / "op.json").read_text())}
    of_map = 2 * 256 * 128 * 28 * 28
    for name, maps in (("mssar forward", 4), ("mssar backward", 7)):
        r = found[name]
        assert r["median_ms"] == pytest.approx(2.0 / op.SETS)
        assert r["terabytes_a_second"] == pytest.approx(maps * of_map * op.SETS / 2.0 / 1e9)
        assert r["share"] == pytest.approx(r["terabytes_a_second"] / (2 * 2**20 / 0.001 / 1e9))
        assert r["share"] == pytest.approx(found[name.replace("mssar", "none")]["share"] / 2)
    assert "28×28×128" in capsys.readouterr().out


# --- the host ---


def test_a_row_is_blocks_one_after_the_other(load):
    host = load("host")
    size = host.Size("resnet18", 5, 6, 2)
    made = host.subject("mssar", 3, size, CPU, compiled=False)
    made.row.train()
    out = made.run(made.maps, made.shortcut)
    wanted = made.shortcut
    for tail, x in zip(made.row.tails, made.maps, strict=True):
        wanted = F.relu(tail.recalibrate(tail.norm(x)) + wanted)
    assert_close(out, wanted)
    out.backward(made.grad)
    for tensor in (*made.row.parameters(), *made.maps, made.shortcut):
        assert tensor.grad is not None


def calls(host: ModuleType, kind: str, blocks: int) -> tuple[object, list[bool]]:
    """A row, and a list that grows with every block's forward pass: whether it was in training."""
    made, seen = host.subject(kind, blocks, host.Size("resnet18", 4, 6, 2), CPU, compiled=False), []
    for tail in made.row.tails:
        tail.register_forward_hook(lambda tail, *_: seen.append(tail.training))
    return made, seen


def test_what_is_read_is_read_around_each_part(load):
    host = load("host")
    laps = []
    for blocks in (host.SHORT, host.LONG):
        made, seen = calls(host, "none", blocks)
        laps.append(made.lap(lambda seen=seen: float(len(seen))))
        assert seen == [True] * 2 * blocks + [False] * 2 * blocks  # a mode's first is not read
    assert host.a_block(*laps) == {"forward": 1.0, "backward": 0.0, "inference": 1.0}


def test_launches_are_counted_part_by_part(load, monkeypatch):
    """By a profiler that takes a block's pass for two kernels and a copy."""
    host = load("host")

    class Profiler:
        def __init__(self, activities: object) -> None: ...

        def start(self) -> None:
            self.before = len(seen)

        def stop(self) -> None:
            self.count = len(seen) - self.before

        def export_chrome_trace(self, path: str) -> None:
            block = [{"cat": "kernel"}, {"cat": "cpu_op"}, {"cat": "kernel"}, {"cat": "gpu_memcpy"}]
            events = [*block * self.count, {"cat": "cuda_runtime"}, {"ph": "M"}]
            Path(path).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    made, seen = calls(host, "none", 3)
    assert host.launches(made) == {"forward": 9.0, "backward": 0.0, "inference": 9.0}


def test_the_hosts_time_is_a_blocks(load, monkeypatch):
    """On a clock that only blocks move: what a row takes however long it is drops out."""
    host, now = load("host"), [0.0]

    class Clocked:
        def __init__(self, blocks: int, each: float) -> None:
            self.took = 50.0 + blocks * each

        def lap(self, read: Callable[[], float]) -> dict[str, float]:
            begun = read()
            now[0] += self.took
            return dict.fromkeys(host.PARTS, read() - begun)

    monkeypatch.setattr(host, "microseconds", lambda: now[0])
    each = {"none": 20.0, "mssar": 35.0}
    pairs = {k: (Clocked(host.SHORT, us), Clocked(host.LONG, us)) for k, us in each.items()}
    found = host.host_time(pairs, 3)
    for kind, us in each.items():
        assert found[kind] == pytest.approx(dict.fromkeys(host.PARTS, us))


def test_without_a_device_there_is_no_hosts_time(load, capsys):
    assert load("host").main([]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "needs a CUDA device" in said.err


# --- first steps ---


def test_only_the_first_step_finds_nothing_on_disk(load, monkeypatch, tmp_path, capsys):
    """Each other process finds what the first left, and nothing of another's; one fails."""
    script, asked, found = load("first_step"), [], []

    def process(command, env, **_):
        kernels, compiled = (Path(env[name]) for name in script.CACHES)
        found.append({file.name for file in kernels.glob("*")} if kernels.exists() else set())
        kernels.mkdir(exist_ok=True, parents=True)
        sizes = command[command.index("--child") + 1 :]
        asked.append(sizes)
        (kernels / sizes[-1]).touch()
        assert compiled.parent == kernels.parent
        if sizes[-1] == "33x224":
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nKeyError: 'x'\n")
        times = {"none": 0.1, "mssar": 0.5 if sizes[-1] == "48x224" else 1.5, "next": 0.05}
        return SimpleNamespace(returncode=0, stdout=f"said\n{json.dumps([times])}\n", stderr="")

    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert script.main([]) == 1
    first = "32x224"
    assert asked == [[first]] * 2 + [[first, s] for s in ("48x224", "33x224", "32x256", "32x200")]
    assert found == [set()] + [{first}] * 5
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "an odd batch failed: KeyError: 'x'\n" in said
    table = {line[:18].strip(): line[18:].split() for line in said.splitlines()[-5:]}
    assert table == {
        "first": ["32", "224", "0.100", "1.500", "0.050", "8.0", "met"],
        "kernels on disk": ["32", "224", "0.100", "1.500", "0.050"],
        "another batch": ["48", "224", "0.100", "0.500", "0.050", "0.3", "missed"],
        "larger images": ["32", "256", "0.100", "1.500", "0.050", "2.0", "met"],
        "smaller images": ["32", "200", "0.100", "1.500", "0.050", "2.0", "met"],
    }


def test_a_size_is_new_to_both_networks_and_mssar_comes_second(load, monkeypatch):
    """After a step of another size, which nobody counts."""
    script, steps = load("first_step"), []
    plain = script.Network.step

    def step(self, batch: int, size: int) -> float:
        with_layer = any(isinstance(m, mssar.MSSAR) for m in self.model.modules())
        steps.append(("mssar" if with_layer else "none", batch, size))
        return plain(self, batch, size) and float(len(steps))

    monkeypatch.setattr(script.Network, "step", step)
    found = script.child("resnet8", "eager", [(2, 32), (3, 40)])
    assert steps[0][1:] not in ((2, 32), (3, 40))
    begun = len(steps) - 6
    assert all(kind == "none" for kind, *_ in steps[:begun])
    order = [("none", 0), ("mssar", 0), ("mssar", 0), ("none", 1), ("mssar", 1), ("mssar", 1)]
    assert steps[begun:] == [(kind, *((2, 32), (3, 40))[at]) for kind, at in order]
    numbers = [begun + number for number in range(1, 7)]
    assert [list(took.values()) for took in found] == [numbers[:3], numbers[3:]]


# --- fleets ---


def test_a_fleet_is_timed_beside_one_alone(load, tmp_path, capsys):
    fleet, file = load("fleet"), tmp_path / "fleet.jsonl"
    asked = ["--nets", "resnet8", "--count", "2", "--batch", "2", "--seconds", "0"]
    assert fleet.main([*asked, "--stacks", "1,2", "--json", str(file)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    records = [json.loads(line) for line in file.read_text().splitlines()]
    bases = {r["stack"]: r for r in records if r["variant"] == "none"}
    for cells, r in zip(table, records, strict=True):
        base = bases[r["stack"]]
        assert cells[:4] == ["resnet8", "graph", r["variant"], str(r["stack"])]
        assert cells[4::2] == [f"{r['together']:.1f}", f"{r['alone']:.1f}"]
        assert cells[5::2] == [f"{r[k] / base[k]:.0%}" for k in ("together", "alone")]
        low, high = r["range"]
        assert 0 < low <= r["together"] <= high
        assert (r["count"], r["batch"]) == (2, 2)
    kinds = [(r["variant"], r["stack"]) for r in records]
    assert kinds == [("none", 1), ("none", 2), ("mssar", 1), ("mssar", 2)]


def test_fleets_may_have_sliding_windows(load, tmp_path, capsys):
    fleet, file = load("fleet"), tmp_path / "fleet.jsonl"
    asked = ["--nets", "resnet8", "--count", "2", "--batch", "2", "--seconds", "0", "--stacks", "2"]
    assert fleet.main([*asked, "--strategy", "sliding", "--json", str(file)]) == 0
    said = [json.loads(line).get("strategy") for line in file.read_text().splitlines()]
    assert said == [None, "sliding"]
    assert "batch 2, sliding" in capsys.readouterr().out
    (member,) = fleet.fleet("resnet8", "mssar", 2, 2, Execution(CPU), 2, "sliding")
    layers = [m for m in member.learner.model.modules() if isinstance(m, mssar.MSSAR)]
    assert {layer.strategy for layer in layers} == {"sliding"}


def test_a_stack_counts_as_many_steps_as_it_has_networks(load):
    fleet = load("fleet")
    one, three, rest = (fleet.fleet("resnet8", "none", n, 2, Execution(CPU), 3) for n in (1, 3, 4))
    assert [len(members) for members in (one, three, rest)] == [1, 1, 2]
    for members, steps in ((one, [1]), (three, [3]), (rest, [3, 1])):
        for member in members:
            member.turn()
        assert [member.done for member in members] == steps


@pytest.mark.parametrize("stacks", ["0", "3", "1,x"])
def test_stacks_that_cannot_be_are_refused(load, stacks, capsys):
    with pytest.raises(SystemExit):
        load("fleet").main(["--nets", "resnet8", "--count", "2", "--stacks", stacks])
    assert (
        "--stacks are numbers" in (said := capsys.readouterr().err) or "a stack has 1 to 2" in said
    )


def test_a_rate_counts_the_steps_of_those_who_take_part(load, monkeypatch):
    """On a clock that only turns move, a second each."""
    fleet, now = load("fleet"), [0.0]

    class Member:
        done = 100  # before

        def turn(self) -> None:
            self.done += 16
            now[0] += 1.0

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    members = [Member() for _ in range(3)]
    assert fleet.rate(members[:2], 5.0, CPU) == pytest.approx(16.0)
    assert [member.done for member in members] == [148, 148, 100], "two took three turns each"


def test_a_network_that_fails_leaves_the_other(load, monkeypatch, capsys):
    fleet = load("fleet")
    plain = fleet.fleet

    def broken(net: str, kind: str, *rest: object) -> object:
        if kind == "mssar":
            raise torch.OutOfMemoryError("too large\nby far")
        return plain(net, kind, *rest)

    monkeypatch.setattr(fleet, "fleet", broken)
    asked = ["--nets", "resnet8", "--count", "1", "--batch", "2", "--seconds", "0"]
    assert fleet.main(asked) == 1
    said = capsys.readouterr().out
    assert "resnet8 graph: mssar failed: OutOfMemoryError: too large\n" in said
    assert said.splitlines()[-1].split()[:3] == ["resnet8", "graph", "none"]


def test_a_fleets_goals_are_for_eight_of_them_in_graphs(load):
    fleet = load("fleet")
    aimed = {"net": "resnet20", "variant": "mssar", "mode": "graph", "count": 8, "batch": 128}
    aimed |= {"stack": 1, "strategy": "regional"}
    assert fleet.goal(aimed) == 870
    assert fleet.goal(aimed | {"net": "resnet56"}) == 345
    others = {"net": "resnet8", "variant": "none", "mode": "compile", "count": 4, "batch": 64}
    others |= {"stack": 2, "strategy": "sliding"}
    assert [fleet.goal(aimed | {key: value}) for key, value in others.items()] == [None] * 7


# --- beside a neighbour ---


def test_a_neighbour_is_there_while_it_is_measured_and_gone_afterwards(load):
    busy, before = load("busy"), _children()
    with busy.neighbour(True):
        (child,) = _children() - before
    assert not Path(f"/proc/{child}").exists()
    with busy.neighbour(False):
        assert _children() == before


def _children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_shortest_times_of_each_way_are_held_against_the_goals(
    load, monkeypatch, tmp_path, capsys
):
    busy, file = load("busy"), tmp_path / "busy.jsonl"
    times = iter([9.0, 8.0, 90.0, 14.0, 8.5, 7.0, 80.0, 15.0])
    monkeypatch.setattr(busy, "timed", lambda way, _, __: (next(times), busy.WAYS[way]))
    assert busy.main(["--rounds", "2", "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["way"], r["alone"], r["busy"]) for r in lines] == [
        ("one by one", 8.5, 80.0),
        ("side by side", 7.0, 14.0),
    ]
    said = capsys.readouterr().out
    assert "beside a neighbour 2.00×  goal 2.5×: met" in said
    assert "alone 0.82× as long as one by one  goal 1×: met" in said


def test_what_is_timed_is_the_demos_training(load):
    seconds, threads = load("busy").trained(1, 64, 1, 1)
    assert seconds > 0
    assert threads == 1
    with pytest.raises(SystemExit):
        load("busy").main(["--images", "10"])


# --- photographs ---


@pytest.mark.usefixtures("torchvision")
def test_photographs_that_are_made_up_are_a_data_set_a_core_can_decode(load, tmp_path):
    decode = load("decode")
    decode.made_up(tmp_path, 4)
    folder = decode.open_folder(tmp_path)
    assert (len(folder.train), len(folder.test), len(folder.classes)) == (4, 2, 2)
    threads = torch.get_num_threads()
    assert decode.core(folder, torch.arange(4), rounds=1) > 0
    assert torch.get_num_threads() == threads


# --- photographs ---


def test_photographs_are_written_once_and_by_their_split(load, tmp_path):
    fruit = load("fruit")
    rows = [
        {"dataset": split, "finegrained_cat": kind, "image_data": photograph}
        for split, kind, photograph in (
            ("train", "Anjou", b"one"),
            ("test", "Anjou", b"two"),
            ("test", "Anjou", b"two"),  # as the package has them
            ("test", "Kaiser", b"three"),
            ("val", "Kaiser", b"four"),
        )
    ]
    assert fruit.write(rows, tmp_path) == {"train": 1, "val": 2}
    found = {
        p.relative_to(tmp_path).parent.as_posix(): p.read_bytes() for p in tmp_path.rglob("*.jpg")
    }
    assert found == {"train/Anjou": b"one", "val/Anjou": b"two", "val/Kaiser": b"three"}


# --- deployed ---


def test_files_take_turns_and_are_those_of_the_networks(load, capsys, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs the extra export")
    deploy = load("deploy")
    x = torch.randn(1, 3, 32, 32)
    for scales in deploy.SCALES.values():
        torch.manual_seed(0)
        path = deploy.exported("resnet8", scales, "onnx", tmp_path)
        torch.manual_seed(0)
        plain = mssar.create_model("resnet8", "none").eval()
        (found,) = deploy.running(path, 1)(x)
        assert_close(torch.from_numpy(found), plain(x))  # inserted, it computes what it did
        assert (b"recalibrate" in path.read_bytes()) is bool(scales)
    order: list[int] = []
    times = deploy.in_turns([lambda _, at=at: order.append(at) for at in range(3)], x, 4)
    assert order == [0, 1, 2] * (4 + deploy.WARM_UP)
    assert min(times) > 0
    deploy.main(["resnet8", "--format", "torch", "--turns", "2"])
    heading, _, line = capsys.readouterr().out.strip().splitlines()
    assert heading.startswith("one image, threads: 1")
    assert line.split()[:2] == ["resnet8", ".pt2"]
