"""SIGKILL at any moment, and what is there when the same command is run again.

At random times; and at chosen calls to the file system: before, within what is written, after.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import samples
from faults.jobs import Job, Known, answer, fresh
from faults.nursery import Answer, Crew, Nursery, crew
from faults.site import serving
from faults.suite import Row, share

KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Case:
    """Kills in turn, each of the same command; what is not killed in time ends by itself."""

    name: str
    fates: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    kills: int
    trouble: str | None


def tried(crew: Crew, job: Job, home: Path, case: Case, **always: Any) -> Outcome:
    """Kill, look, and go on."""
    root, kills = fresh(job, home, case.name), 0
    try:
        for fate in case.fates:
            made = answer(crew, job, root, **always, **fate)
            if made.status not in (0, KILLED):
                return Outcome(kills, f"ended with {made.status}: {made.err[-300:]}")
            kills += made.status == KILLED
            if trouble := looked(job.sound, root):
                return Outcome(kills, f"after the kill, {trouble}")
        made = answer(crew, job, root, **always)
        if made.status:
            return Outcome(kills, f"does not go on: {made.status} {made.err[-300:]}")
        trouble = ended(job, root)
        return Outcome(kills, trouble and f"at the end, {trouble}")
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)


def looked(look: Callable[[Path], str | None], root: Path) -> str | None:
    try:
        return look(root)
    except (ValueError, OSError) as error:  # of what cannot be read
        return str(error)


def ended(job: Job, root: Path) -> str | None:
    """After a command that nothing befell."""
    return looked(job.done, root) or looked(job.tidy, root)


def at_times(name: str, count: int, longest: float, draw: random.Random) -> list[Case]:
    """Up to three kills in a row each, at random times."""
    cases, left = [], count
    while left > 0:
        few = min(left, draw.choice((1, 2, 3)))
        fates = [{"after": draw.uniform(0.01, longest)} for _ in range(few)]
        cases.append(Case(f"{name}-{len(cases)}", fates))
        left -= few
    return cases


def at_calls(
    name: str, count: int, calls: Sequence[str], word: str, draw: random.Random
) -> list[Case]:
    """At calls that have a word in them, different ones as long as there are any."""
    ways = [
        (number, when)
        for number, call in enumerate(calls, 1)
        if word in call
        for when in ("before", "half" if call.startswith("write") else "after")
    ]
    chosen: list[tuple[int, str]] = []
    while len(chosen) < count:
        chosen += draw.sample(ways, min(len(ways), count - len(chosen)))
    return [Case(f"{name}-{n}", [{"kill": way}]) for n, way in enumerate(chosen)]


def row(
    crew: Crew, fault: str, promise: str, job: Job, home: Path, cases: list[Case], **always: Any
) -> Row:
    kills = wrong = 0
    outcomes = crew.each(lambda case: tried(crew, job, home, case, **always), cases)
    for case, outcome in zip(cases, outcomes, strict=True):
        kills += outcome.kills
        if outcome.trouble:
            wrong += 1
            print(
                f"kills: {job.name} {case.name} {list(case.fates)}: {outcome.trouble}",
                file=sys.stderr,
            )
    return Row(fault, promise, kills, wrong)


def check(effort: float, seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary, crew() as people:
        home = Path(temporary).resolve()
        known, draw = Known(people, home), random.Random(f"kills {seed}")
        yield from _of_training(people, known, home, effort, draw)
        yield from _of_files(people, known, home, effort, draw)
        yield from _of_data(people, known, home, effort, draw)
        yield from _signals(people, known, home, effort, draw)


def probe(crew: Crew, job: Job, home: Path, **always: Any) -> Answer:
    """How long it takes and which calls it makes, undisturbed."""
    root = fresh(job, home, f"probe-{job.name.replace(' ', '-')}")
    made = answer(crew, job, root, **always)
    trouble = made.err if made.status else ended(job, root)
    shutil.rmtree(root.parent)
    if trouble:
        raise RuntimeError(f"{job.name}, undisturbed: {trouble}")
    return made


def _of_training(
    crew: Crew, known: Known, home: Path, effort: float, draw: random.Random
) -> Iterator[Row]:
    same = "goes on; weights and records as undisturbed, bit by bit"
    job = known.training()
    usual = probe(crew, job, home)
    cases = at_times("step", share(70, effort), usual.seconds, draw)
    yield row(crew, "SIGKILL at a random time in training", same, job, home, cases)
    both = known.training("--fleet", "2", "--tensorboard")
    cases = at_times("fleet", share(15, effort), usual.seconds, draw)
    yield row(crew, "SIGKILL in training two at once", same, both, home, cases)
    cases = at_calls("save", share(45, effort), usual.calls, "epoch-", draw)
    yield row(crew, "SIGKILL in a checkpoint's write", same, job, home, cases)
    job = known.recording()
    usual = probe(crew, job, home)
    cases = at_calls("record", share(30, effort), usual.calls, "records.jsonl", draw)
    promise = "no record lost, doubled or half"
    yield row(crew, "SIGKILL in a record's append", promise, job, home, cases)


def _of_files(
    crew: Crew, known: Known, home: Path, effort: float, draw: random.Random
) -> Iterator[Row]:
    promise = "the file before or the whole new one"
    for job, count in ((known.report(), 25), (known.weights(), 10)):
        usual = probe(crew, job, home)
        calls = at_calls("call", share(0.6 * count, effort), usual.calls, "", draw)
        times = at_times("time", share(0.4 * count, effort), usual.seconds, draw)
        fault = f"SIGKILL in `mssar {job.name}`"
        yield row(crew, fault, promise, job, home, calls + times)


def _of_data(
    crew: Crew, known: Known, home: Path, effort: float, draw: random.Random
) -> Iterator[Row]:
    with serving(samples.archive()) as url:
        job = known.fetching()
        usual = probe(crew, job, home, url=url)
        promise = "goes on from there; a data set is whole or not there"
        cases = at_calls("download", share(20, effort), usual.calls, "write cifar-10-binary", draw)
        cases += at_times("time", share(15, effort), usual.seconds, draw)
        fault = "SIGKILL in a download"
        yield row(crew, fault, promise, job, home, cases, url=url)
        rest = [c if "cifar-10-binary" not in c else "" for c in usual.calls]
        cases = at_calls("unpack", share(30, effort), rest, " ", draw)
        yield row(crew, "SIGKILL in an unpack", promise, job, home, cases, url=url)


# --- signals that can be answered ---


def _signals(
    crew: Crew, known: Known, home: Path, effort: float, draw: random.Random
) -> Iterator[Row]:
    job = known.training()
    usual = probe(crew, job, home)
    for number, word in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")):
        times = [draw.uniform(0.05, usual.seconds) for _ in range(share(10, effort))]

        def one(case: tuple[int, float], number: int = number) -> str | None:
            name, after = f"{signal.Signals(number).name}-{case[0]}", case[1]
            root = fresh(job, home, name)
            try:
                made = answer(crew, job, root, after=after, signal=number)
                return obeyed(made, number, root) or _gone_on(crew, job, root)
            finally:
                shutil.rmtree(root.parent, ignore_errors=True)

        found = list(crew.each(one, enumerate(times)))
        found += [_from_a_shell(crew, job, home, number) for _ in range(share(2, effort))]
        for trouble in filter(None, found):
            print(f"kills: {word}: {trouble}", file=sys.stderr)
        promise = f"one clear line, status {128 + number}; goes on, weights as undisturbed"
        wrong = sum(trouble is not None for trouble in found)
        yield Row(f"{word} at a random time in training", promise, len(found), wrong)


def obeyed(made: Answer, number: int, root: Path) -> str | None:
    """Saved, said and left; or it came to its end before it was asked."""
    said = [line for line in made.err.splitlines() if line.startswith("mssar: ")]
    if "Traceback" in made.err or len(said) > 1:
        return made.err
    if made.status == 0:
        return None
    if made.status != 128 + number or len(said) != 1 or made.err.splitlines()[-1] != said[0]:
        return f"{made.status} {made.err}"
    began = "begins" in made.err or "goes on in" in made.err
    if "stopped by a signal" in said[0] and began and not list(root.rglob("epoch-*.safetensors")):
        return f"nothing was saved: {made.err}"
    return None


def _gone_on(crew: Crew, job: Job, root: Path) -> str | None:
    made = answer(crew, job, root)
    return f"does not go on: {made.err}" if made.status else ended(job, root)


SHELL = """
import sys
from faults import samples
from mssar.__main__ import main
with samples.installed():
    main()
"""


def _from_a_shell(crew: Crew, job: Job, home: Path, number: int) -> str | None:
    """An interpreter of its own, stopped in an epoch."""
    root = fresh(job, home, f"shell-{number}")
    begun = [sys.executable, "-c", SHELL, *job.words]
    try:
        with subprocess.Popen(
            begun, cwd=root, env=Nursery.environment(), stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            before = process.stderr.readline()  # begins
            process.send_signal(number)
            err = before + process.stderr.read()
        made = Answer(process.returncode, 0.0, "", err)
        if made.status == 0:
            return f"it did not stop: {err}"
        return obeyed(made, number, root) or _gone_on(crew, job, root)
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)
