"""Timings: what is written is read, what is broken is named, and what is measured is fair."""

import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab import CPU
from test_records import record

from mssar.lab import records, timings
from mssar.lab.engine import timing as engine
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.step import Learner
from mssar.lab.recipes import CIFAR_RESNET, varied
from mssar.lab.run import Run
from mssar.lab.timings import SCHEMA, Timing, ratio
from mssar.networks.recalibration import RECALIBRATIONS


def timing(**changes: Any) -> Timing:
    made = Timing(
        network="densenet100",
        recalibration="mssar",
        options={"scales": [1, 2, 4], "strategy": "regional", "reduction": 1, "stage": "multi"},
        size=(3, 32, 32),
        classes=10,
        what="training",
        batch=64,
        precision="bf16",
        graph=True,
        compile=False,
        median_ms=1 / 3,
        p20_ms=0.1 + 0.2,
        p80_ms=7.0,
        repeats=99,
        peak_bytes=2**40,
        environment={"hardware": "Prozeßor “x”\u2028", "torch": "2"},
        code={"version": "1", "commit": None},
        command='mssar bench "a b"',
        made="2020-01-01T00:00:00+00:00",
    )
    return replace(made, **changes)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(timing().as_line()), **changes})


def without(name: str) -> str:
    found = json.loads(timing().as_line())
    del found[name]
    return json.dumps(found)


# --- the file ---


@pytest.mark.parametrize("peak", [None, 1])
def test_a_timing_survives_its_line(peak):
    made = timing(peak_bytes=peak)
    assert timings.parse(made.as_line()) == made
    assert "\n" not in made.as_line()


def test_every_timing_is_kept_in_order(tmp_path):
    path = tmp_path / "new" / "folder" / "gpu.jsonl"
    made = [timing(batch=batch) for batch in (3, 2, 3)]  # the same twice is two measurements
    for one in made:
        timings.append(path, one)
    assert timings.read(path) == timings.read(path.parent) == made
    assert timings.read(tmp_path / "missing.jsonl") == []


TIMES = "p20_ms, median_ms, p80_ms: expected milliseconds in ascending order"
BAD = {
    "half a line": (timing().as_line()[:200], "not JSON"),
    "no object": ("[]", "a timing is a JSON object; got list"),
    "a record": (record().as_line(), ": missing"),
    "NaN": (changed(median_ms=float("nan")), "median_ms: not finite"),
    "infinity": (changed(environment={"a": [float("inf")]}), "environment.a[0]: not finite"),
    "1e999": (changed(p80_ms=77.25).replace("77.25", "1e999"), "p80_ms: not finite"),
    "1e999 deep": (changed(code={"a": [77.25]}).replace("77.25", "1e999"), "code.a[0]: not finite"),
    "a field missing": (without("repeats"), "repeats: missing"),
    "an unknown field": (changed(note="x"), "note: unknown"),
    "no schema": (without("schema"), "schema None, and 1 is read here: not a timing of mssar"),
    "a later schema": (changed(schema=SCHEMA + 1), "written by a newer mssar; update this one"),
    "text for a number": (changed(median_ms="1"), "median_ms: expected float; got '1'"),
    "true for a number": (changed(batch=True), "batch: expected int; got True"),
    "true for memory": (changed(peak_bytes=True), "peak_bytes: expected int | null; got True"),
    "a number for true": (changed(graph=1), "graph: expected bool; got 1"),
    "null for text": (changed(command=None), "command: expected str; got None"),
    "what else": (changed(what="both"), "what: expected training or inference; got 'both'"),
    "two sides": (changed(size=[32, 32]), "size: expected array of length 3; got [32, 32]"),
    "one colour": (changed(size=[1, 32, 32]), "size[0]: expected int >= 3; got 1"),
    "no height": (changed(size=[3, 0, 32]), "size[1]: expected int >= 1; got 0"),
    "a side in words": (changed(size=[3, "x", 32]), "size[1]: expected int; got 'x'"),
    "no image": (changed(batch=0), "batch: expected int >= 1; got 0"),
    "no repeat": (changed(repeats=0), "repeats: expected int >= 1; got 0"),
    "no memory": (changed(peak_bytes=0), "peak_bytes: expected int >= 1; got 0"),
    "no time": (changed(p20_ms=0), TIMES),
    "a median too low": (changed(median_ms=0.2), TIMES),
    "a median too high": (changed(median_ms=7.1), TIMES),
    "longer than a float": (changed(p80_ms=10**400), "p80_ms: too large a number"),
    "no hardware": (changed(environment={}), "environment.hardware: expected str; got None"),
    "no time of day": (changed(made="yesterday"), "made: expected a time in UTC, ISO 8601"),
    "no zone": (changed(made="2020-01-01T00:00:00"), "made: expected a time in UTC"),
    "another zone": (changed(made="2020-01-01T00:00:00+01:00"), "made: expected a time in UTC"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, kind):
    line, message = BAD[kind]
    path = tmp_path / "gpu.jsonl"
    path.write_text(f"{timing().as_line()}\n\n{line}\n{timing().as_line()}\n")
    with pytest.raises(ValueError, match="line 3") as found:
        timings.read(path)
    (said,) = str(found.value).splitlines()
    assert said.startswith(f"{path}, line 3: ")
    assert message in said


def test_what_could_not_be_read_is_not_written(tmp_path):
    path = tmp_path / "gpu.jsonl"
    for bad in (timing(median_ms=float("nan")), timing(what="x"), timing(made="now")):
        with pytest.raises(ValueError, match=r"JSON compliant|what|made"):
            timings.append(path, bad)
    assert not path.exists()


def test_a_record_is_no_timing_and_a_timing_no_record(tmp_path):
    timings.append(tmp_path / "a.jsonl", timing())
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*: missing"):
        records.read(tmp_path)


def test_a_line_left_unfinished_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "gpu.jsonl"
    half = timing().as_line()[:100]
    path.write_text(half)
    timings.append(path, timing())
    first, second = path.read_text().splitlines()
    assert first == half
    assert timings.parse(second) == timing()


def test_a_ratio_is_to_what_was_measured_in_turns_with_it():
    plain = timing(recalibration="none", options={}, median_ms=0.5)
    ours = timing(median_ms=2.0)
    assert ratio(ours, [plain, ours]) == 4.0
    assert ratio(plain, [plain, ours]) == 1.0
    assert ratio(ours, [ours]) is None
    for other in (
        {"made": "2020-01-01T00:00:01+00:00"},
        {"what": "inference"},
        {"batch": 63},
        {"network": "densenet190"},
        {"precision": "fp32"},
        {"graph": False},
        {"environment": {"hardware": "another"}},
    ):
        assert ratio(ours, [replace(plain, **other), ours]) is None, other


# --- measuring ---


def test_percentiles_lie_between_neighbours():
    assert engine.percentiles([5.0, 1.0, 2.0, 4.0, 3.0, 0.0]) == (1.0, 2.5, 4.0)
    assert engine.percentiles([10.0, 30.0, 20.0]) == pytest.approx((14.0, 20.0, 26.0))
    for value in (0.1, 1 / 3, 12.34567):
        assert engine.percentiles([value] * 7) == (value,) * 3


class Machine:
    """A clock that only work moves, by more and more: the machine slows down all the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowing: float) -> None:
        self.now, self.slowing, self.log = 0.0, slowing, ""
        monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def subject(self, name: str, cost: float) -> engine.Subject:
        def step(_: int) -> None:
            self.log += name
            self.now += cost * (1 + self.slowing * self.now)

        return SimpleNamespace(execution=CPU, rewind=lambda: None, step=step)


def test_subjects_take_turns_for_the_time_given(monkeypatch):
    machine = Machine(monkeypatch, slowing=0.0)
    subjects = [machine.subject("a", 0.125), machine.subject("b", 0.25), machine.subject("c", 0.5)]
    found = engine.in_turns(subjects, 3.5, CPU.device)
    assert machine.log == "abc" * 12
    assert machine.now == 3 * 3.5
    assert found == [[125.0] * 12, [250.0] * 12, [500.0] * 12]


def test_a_slow_step_is_timed_three_times_all_the_same(monkeypatch):
    machine = Machine(monkeypatch, slowing=0.0)
    found = engine.in_turns([machine.subject("a", 100.0)], 0.5, CPU.device)
    assert found == [[100_000.0] * 3]


def test_a_machine_that_slows_down_does_not_change_the_ratio(monkeypatch):
    machine = Machine(monkeypatch, slowing=0.05)
    subjects = [machine.subject("a", 0.1), machine.subject("b", 0.15)]
    (_, one, _), (_, two, _) = map(engine.percentiles, engine.in_turns(subjects, 20.0, CPU.device))
    assert two / one == pytest.approx(1.5, rel=0.02)
    machine.now = 0.0
    (_, one, _), (_, two, _) = (
        engine.percentiles(engine.in_turns([subject], 20.0, CPU.device)[0]) for subject in subjects
    )
    assert two / one > 2  # one after the other


def test_on_a_gpu_a_step_that_is_not_timed_goes_ahead(monkeypatch):
    now, issued = 0.0, []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

        def synchronize(self) -> None:
            issued.append("wait")

    def step(number: int) -> None:
        nonlocal now
        issued.append(number)
        now += 10.0**number

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert engine.turn(step, torch.device("cuda")) == [10.0, 100.0, 1000.0, 10000.0]
    assert issued == [0, 1, 2, 3, 4, "wait"]


def run(kind: str = "none", batch: int = 2) -> Run:
    return Run("resnet8", kind, {}, "cifar10", varied(CIFAR_RESNET, batch=batch))


class Slow(torch.nn.Module):
    def __init__(self, _channels: int, **_options: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x


@pytest.mark.parametrize("what", timings.WHAT)
def test_a_slow_module_takes_longer(monkeypatch, what):
    """Three blocks that each wait for 50 ms cannot take less than 150."""
    monkeypatch.setitem(RECALIBRATIONS, "mssar", Slow)
    said: list[str] = []
    before = torch.get_rng_state()
    found = engine.measure([run(), run("mssar")], what, CPU, 0.01, said.append)
    assert torch.equal(torch.get_rng_state(), before)
    plain, slowed = found
    assert slowed.p20_ms >= 150
    assert ratio(slowed, found) > 1
    assert ratio(slowed, found) == slowed.median_ms / plain.median_ms
    assert plain.repeats == slowed.repeats >= 3
    assert [timings.parse(one.as_line()) for one in found] == found
    *ready, about = said
    assert ready == [f"resnet8 {what}, batch 2: setting up {kind}" for kind in ("none", "mssar")]
    takes = re.fullmatch(rf"resnet8 {what}, batch 2: measuring in turns, about (\S+) s", about)
    assert float(takes[1]) >= 0.45  # three steps, however few seconds were asked for


@pytest.mark.parametrize(
    ("end", "ready", "needed"),
    [(-1.0, 0, 0.02), (15.0, 1, 27.0), (35.0, 2, 18.0), (36.0, 2, None)],
)
def test_what_would_take_too_long_is_not_measured(monkeypatch, end, ready, needed):
    """A step takes three seconds, to set up takes three steps, and so does measuring."""
    now = [0.0]

    class Ticking(torch.nn.Module):
        def __init__(self, *_: int, **__: object) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            return x

    monkeypatch.setitem(RECALIBRATIONS, "mssar", Ticking)
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    runs, said = [run("mssar"), run("mssar")], list[str]()
    if needed is None:
        assert len(engine.measure(runs, "training", CPU, 0.01, said.append, end)) == 2
    else:
        with pytest.raises(engine.TooLongError) as error:
            engine.measure(runs, "training", CPU, 0.01, said.append, end)
        assert error.value.seconds == pytest.approx(needed)
        assert error.value.known == (ready > 0)
    assert sum("setting up" in one for one in said) == ready
    assert sum("measuring" in one for one in said) == (needed is None)


def test_what_is_timed_is_a_step_of_training():
    """Losses and gradients are those of a batch; with a learning rate of 0 the weights stay."""
    feed = engine.random_feed(run(batch=16), CPU)
    subject = engine.Stepping(run("se", 16), feed, CPU)
    expected = run("se", 16).build(10)
    x, y = feed.take(torch.tensor(0), 16)
    loss = torch.nn.functional.cross_entropy(expected(x), y)
    loss.backward()
    engine.in_turns([subject], 0.0, CPU.device)
    torch.testing.assert_close(subject.losses, loss.detach().view(1))
    for mine, theirs in zip(subject.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3)


def test_what_is_timed_is_compiled_as_training_compiles_it(monkeypatch):
    """Block by block where there are graphs, the first steps without one too."""
    monkeypatch.setattr(Execution, "graphed", property(lambda self: self.graph))
    graphed: list[bool] = []
    monkeypatch.setattr(Learner, "step", lambda self, _: graphed.append(self.graphed))
    one, how = replace(run("mssar"), network="resnet20"), replace(CPU, compile=True, graph=True)
    subject, *_ = engine._made_ready(one, "training", engine.random_feed(one, how), how)
    assert graphed == [False] * engine.WARM_UP + [True]
    assert subject.blocks is not None
    assert subject.forward is subject.model


def test_what_is_timed_is_a_pass_without_gradients():
    subject = engine.Passing(run("mssar"), engine.random_feed(run(), CPU), CPU)
    seen: list[torch.Tensor] = []
    subject.forward.register_forward_hook(lambda *call: seen.append(call[-1]))
    engine.in_turns([subject], 0.0, CPU.device)
    expected = run("mssar").build(10).eval()(subject.x)
    assert len(seen) == 3
    for logits in seen:
        assert not logits.requires_grad
        torch.testing.assert_close(logits, expected.detach())
