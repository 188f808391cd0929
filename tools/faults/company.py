"""Runs beside other runs, and processes beside other processes.

What a run computes, and what is kept of it, does not depend on its company: others that fail, more
processes on its folder or on the file of its record. What happens among processes that train one
network is in ``ranks``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # a laboratory in miniature is there

import torch
from lab import CPU, Log, arrays, learnt, timeless, tiny, trained
from torch import Tensor

from faults import ranks
from faults.suite import Row, share
from mssar.lab import records
from mssar.lab.engine import fleet
from mssar.lab.engine.step import Learner
from mssar.lab.records import Epoch, Record

WIDTH = 8
GROWTH = 4 << 20  # bytes that a fleet may grow by once it is warm: what docs/ promise
Memory = list[tuple[int, int]]  # steps that all runs have made, and bytes held then


def check(effort: float, seed: int) -> Iterator[Row]:
    torch.set_num_threads(1)
    yield long(share(6000, effort, 400))
    yield failing(share(24, effort), random.Random(f"{seed}/failing"))
    yield one_folder(share(30, effort, 2))
    yield one_file(4, share(150, effort, 10))
    yield from ranks.check(effort, seed)


def server() -> ForkServerContext:
    """Where processes come from that have this module, and so torch, already."""
    found = get_context("forkserver")
    found.set_forkserver_preload(["faults.company"])
    return found


# --- a fleet for a long time


def long(steps: int) -> Row:
    """A fleet of eight in a process of its own, and how its memory grows after a third of it."""
    with server().Pool(1) as pool:
        seen = pool.apply(sailed, (steps,))
    warm = [point for point in seen if point[0] >= steps / 3]
    slope = _slope(warm)
    grown = slope * (warm[-1][0] - warm[0][0])
    if grown > GROWTH:
        print(f"wrong: a fleet grows by {slope:.0f} bytes a step: {seen}", file=sys.stderr)
    remark = f"{slope * 1000 / 1024:+.0f} KiB in 1,000 steps, {seen[-1][0]:,} steps"
    return Row(
        f"a fleet of {WIDTH} for a long time", "memory stays flat", 1, int(grown > GROWTH), remark
    )


def sailed(steps: int) -> Memory:
    """So many steps of a fleet in all, and the memory it had at the end of each epoch."""
    torch.set_num_threads(1)
    seen: Memory = []
    made, step = 0, Learner.step

    def counted(self: Learner, number: int) -> None:
        nonlocal made
        step(self, number)
        made += 1

    class Watching(Log):
        """Keeps nothing of what it is told: a list of it would grow."""

        def moved(self, *_: Any) -> None:
            pass

        def passed(self, *_: Any) -> None:
            seen.append((made, _resident()))

    Learner.step = counted  # type: ignore[method-assign]
    epochs, batch = 8, 8
    data = arrays(max(batch, steps * batch // (WIDTH * epochs)), 8)
    runs = [tiny(seed, "mssar" if seed % 2 else "none", epochs=epochs, batch=batch, drops=())
            for seed in range(WIDTH)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        outcome = fleet.train(runs, lambda _: data, CPU, Path(folder), Watching(), width=WIDTH)
    assert len(outcome.records) == WIDTH, outcome.failures
    return seen


def _resident() -> int:
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


def _slope(points: Memory) -> float:
    """Bytes a step, by least squares."""
    at, held = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    at = at - at.mean()
    return float((at * held).sum() / (at * at).sum())


# --- runs that fail beside others


def too_much(_: Learner) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def no_number(learner: Learner) -> None:
    with torch.no_grad():
        next(learner.model.parameters()).fill_(float("nan"))


TROUBLES: dict[str, Callable[[Learner], None]] = {"memory": too_much, "loss": no_number}


@contextmanager
def met(troubles: dict[int, tuple[int, str]]) -> Iterator[Counter[int]]:
    """Runs of some seeds meet trouble at some step; how many steps every seed has made."""
    step, made = Learner.step, Counter[int]()

    def spoilt(self: Learner, number: int) -> None:
        at, kind = troubles.get(self.feed.seed, (-1, ""))
        if made[self.feed.seed] == at:
            TROUBLES[kind](self)
        made[self.feed.seed] += 1
        step(self, number)

    Learner.step = spoilt  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Learner.step = step  # type: ignore[method-assign]


def failing(fleets: int, draw: random.Random) -> Row:
    """Of eight runs one to three fail, anywhere; the others do as alone, no step twice."""
    data, wrong, failed = arrays(), 0, 0
    runs = [tiny(seed, "mssar" if seed % 2 else "none") for seed in range(WIDTH)]
    steps = 3 * runs[0].recipe.epochs
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        alone = {run.seed: timeless(trained(run, data, place / "alone" / run.name)) for run in runs}
        weights = {run.seed: learnt(place / "alone" / run.name) for run in runs}
        for number in range(fleets):
            unlucky = draw.sample(range(WIDTH), draw.randint(1, 3))
            troubles = {s: (draw.randrange(steps), draw.choice(list(TROUBLES))) for s in unlucky}
            with met(troubles) as made:
                outcome = fleet.train(
                    runs, lambda _: data, CPU, place / str(number), Log(), width=WIDTH
                )
            failed += len(outcome.failures)
            good = len(outcome.failures) == len(unlucky) and not outcome.left
            found = {record.run["seed"]: record for record in outcome.records}
            for run in runs:
                if run.seed not in troubles:
                    learned = learnt(place / str(number) / run.name)
                    good &= made[run.seed] == steps and run.seed in found
                    good &= good and timeless(found[run.seed]) == alone[run.seed]
                    good &= _same(learned, weights[run.seed])
            if not good:
                wrong += 1
                print(f"wrong: {troubles} in a fleet: {outcome.failures}", file=sys.stderr)
    return Row(
        f"a loss made NaN, memory made to run out, in fleets of {WIDTH}",
        "the others bit by bit as alone, no step of theirs lost or done twice",
        fleets,
        wrong,
        f"{failed} runs made to fail",
    )


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[n], expected[n]) for n in found
    )


# --- several processes on one folder


def contend(words: tuple[Path, float]) -> str:
    """Train a run in a folder that others want as well; the record's id, or what was said."""
    place, delay = words
    torch.set_num_threads(1)
    ranks.until(delay)
    try:
        outcome = fleet.train(
            [tiny(3, "mssar")],
            lambda _: arrays(),
            CPU,
            place,
            Log(),
            record=lambda _, record: records.append(place / "records.jsonl", record),
        )
    except ValueError as error:
        return str(error)
    return outcome.records[0].id


def one_folder(rounds: int, processes: int = 3) -> Row:
    """They begin at the same moment, or shortly after each other."""
    wrong, refused = 0, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        server().Pool(processes) as pool,
    ):
        expected = timeless(trained(tiny(3, "mssar"), arrays(), Path(folder) / "alone"))
        pool.map(contend, [(Path(folder) / f"warm{n}", 0.0) for n in range(processes)], 1)
        for number in range(rounds):
            place, now = Path(folder) / str(number), ranks.soon()
            begins = [now + 0.02 * number * n / processes for n in range(processes)]
            answers = pool.map(contend, [(place, begin) for begin in begins], 1)
            kept = records.read(place / "records.jsonl")
            said = [a for a in answers if "is in use by another process; wait, or stop it" in a]
            refused += len(said)
            good = len(kept) == 1 and timeless(kept[0]) == expected
            good &= all(answer in said or answer == kept[0].id for answer in answers)
            if not good:
                wrong += 1
                print(f"wrong: {processes} on one folder: {answers}, {kept}", file=sys.stderr)
    return Row(
        f"{processes} processes on one run's folder",
        "one trains, the others are told; one record, as alone",
        rounds,
        wrong,
        f"{refused} told",
    )


# --- several processes on one file of records


def record(name: str) -> Record:
    """A record that can be; its numbers are of no interest."""
    epoch = Epoch(1, 0.1, 1.0, 50.0, 1.0, 50.0, 0.0, 1.0)
    run = {"network": "resnet8", "recalibration": "none", "options": {}, "dataset": "tiny"}
    return Record(
        id=name,
        run={**run, "recipe": {"epochs": 1}, "seed": 0},
        data={"checksum": "x", "classes": 2, "train": 4, "test": 4},
        execution={"together": 1},
        environment={"hardware": "none", "much": "x" * 9000},  # more than a page of memory
        code={},
        command="",
        params=1,
        macs=1,
        epochs=(epoch,),
        error=50.0,
        error5=0.0,
        class_errors=(50.0, 50.0),
        seconds=1.0,
        started="",
        finished="",
        interruptions=0,
    )


def adding(path: Path, name: str, count: int) -> None:
    """Records of its own, and those that everybody adds."""
    for number in range(count):
        records.append(path, record(f"{name}-{number}"))
        records.append(path, record(f"common-{number}"))


def one_file(processes: int, count: int) -> Row:
    """All add at once; somebody reads all the while."""
    context, torn, reads = server(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        names = [chr(ord("a") + n) for n in range(processes)]
        writers = [context.Process(target=adding, args=(path, name, count)) for name in names]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            reads += 1
            try:
                records.read(path)
            except ValueError as error:
                torn += 1
                print(f"wrong: read while others add: {error!s:.200}", file=sys.stderr)
        failed = [writer.exitcode for writer in writers if writer.exitcode]
        found = Counter(kept.id for kept in records.read(path))
    expected = Counter(f"{name}-{n}" for name in [*names, "common"] for n in range(count))
    off = (found - expected) + (expected - found)
    wrong = off.total() + torn + len(failed)
    if off or failed:
        print(f"wrong: {processes} on one file: {dict(off)}, status {failed}", file=sys.stderr)
    return Row(
        f"records added to one file by {processes} processes, and read all the while",
        "none lost, doubled or torn",
        2 * count * processes,
        wrong,
        f"{reads:,} reads",
    )
