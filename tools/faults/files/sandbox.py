"""A process of its own for hostile files: watched, measured, and with a tree around it that nobody
may touch.

A case is made from the seed, its family and its number, and from nothing else; so a process that
crashed or hung is replaced by one that goes on with the next case, and a case can be repeated.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unicodedata import category

TOOLS = Path(__file__).parents[2]
PATIENCE = 30.0  # seconds a case; most take a few milliseconds
START = 120.0  # seconds until the first case
ROOM = 6 << 30  # bytes of addresses beyond what a process began with: a net below the bounds
OUTSIDE = ("above.txt", "beside/kept.txt", "target-not/kept.txt")
ADVICE = "python -m faults.files"


class WrongError(Exception):
    """What came out is not what was promised."""


@dataclass
class Case:
    """One hostile file: where it may lie, what it is, and by what a refusal must call it."""

    random: Random
    number: int
    folder: Path  # all that it may write into
    row: str = ""
    what: str = ""
    names: tuple[str, ...] = ()

    def begin(self, row: str, what: str, *names: str) -> None:
        self.row, self.what, self.names = row, what, names

    @property
    def payload(self) -> Path:
        """A file that only what is executed would make."""
        return self.folder.parent / "executed"


@dataclass(frozen=True)
class Family:
    """Files of one kind: how many at effort 1, and the memory that one may cost."""

    name: str
    promises: dict[str, str]  # by row
    count: int
    mebibytes: int
    prepare: Callable[[Path], Any]
    attempt: Callable[[Any, Case], None]


@dataclass(frozen=True)
class Outcome:
    """How a case ended: read, refused or wrong."""

    number: int
    row: str
    what: str
    ended: str
    said: str = ""
    grown: int = 0  # bytes that were held beyond those before
    seconds: float = 0.0


def unclear(error: ValueError, names: tuple[str, ...]) -> str:
    """What a refusal lacks of one clear line; nothing if it is one."""
    said = str(error)
    if type(error) is not ValueError and not type(error).__module__.startswith("mssar"):
        return "not ours"
    if not said.strip() or any(category(letter) == "Cc" for letter in said):
        return "not one line"
    if len(said) > 1000:
        return f"{len(said):,} letters long"
    if names and not any(name in said for name in names):
        return f"does not name {names[0]}"
    return ""


def judged(family: Family, made: Any, case: Case) -> tuple[str, str]:
    """How a case ends, and what it says."""
    try:
        family.attempt(made, case)
    except WrongError as wrong:
        return "wrong", str(wrong)
    except ValueError as error:
        lack = unclear(error, case.names)
        said = f"{type(error).__name__}: {error}"
        return ("wrong", f"{lack}: {said:.300}") if lack else ("refused", said[:300])
    except BaseException as error:  # a panic of Rust's is no Exception
        return "wrong", f"{type(error).__name__}: {error}"[:400]
    return "read", ""


def tree(place: Path, without: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a place but one folder: kind, size and time of change."""
    found = {}
    for folder, inner, names in os.walk(place):
        inner[:] = [name for name in inner if Path(folder, name) != without]
        for name in (*inner, *names):
            status = os.lstat(Path(folder, name))
            found[os.path.join(folder, name)] = (
                (status.st_mode, status.st_size, status.st_mtime_ns)
                if name not in inner
                else (status.st_mode, 0, 0)
            )
    return found


def peak() -> int:
    """The most memory held since it was last forgotten, in bytes."""
    with open("/proc/self/status") as status:
        line = next((line for line in status if line.startswith("VmHWM")), None)
    return int(line.split()[1]) << 10 if line else 0


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def work(family: Family, seed: int, numbers: range, place: Path) -> Iterator[Outcome]:
    """In this process, one after another."""
    target = place / "target"
    target.mkdir(parents=True)
    for name in OUTSIDE:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    made = family.prepare(place / "made")
    os.chdir(target)
    before = tree(place, target)
    for number in numbers:
        random = Random(f"{seed}/{family.name}/{number}")
        case = Case(random, number, target)
        forget_peak()
        held, begun = peak(), time.monotonic()
        ended, said = judged(family, made, case)
        grown, seconds = peak() - held, time.monotonic() - begun
        if (after := tree(place, target)) != before:
            ended, said = "wrong", f"touched {sorted(set(after.items()) ^ set(before.items()))}"
            case.payload.unlink(missing_ok=True)
            before = tree(place, target)
        if grown > family.mebibytes << 20:
            ended, said = "wrong", f"{grown >> 20:,} MiB, {family.mebibytes:,} allowed; {said}"
        yield Outcome(number, case.row, case.what, ended, said, grown, seconds)


def serve(family: Family, seed: int, numbers: range) -> None:
    """As a child: a line of JSON for each case, and before it one that says which it is."""
    import torch

    torch.set_num_threads(1)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with open("/proc/self/statm") as sizes:
        mapped = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="mssar-files-") as place:
        for outcome in work(family, seed, numbers, Path(place).resolve()):
            said.write(json.dumps(vars(outcome)) + "\n")
            said.flush()
        os.chdir("/")


@dataclass
class Child:
    """A process with its share of a family's cases."""

    family: str
    seed: int
    numbers: range
    done: int = 0  # of its numbers
    running: subprocess.Popen[bytes] | None = None
    rest: bytes = b""
    heard: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        left = self.numbers[self.done :]
        bounds = map(str, (left.start, left.stop, left.step))
        source = TOOLS.parent / "src"
        paths = f"{TOOLS}{os.pathsep}{source}"
        self.rest, self.heard = b"", time.monotonic() + START
        self.running = subprocess.Popen(
            [sys.executable, "-m", "faults.files", "serve", self.family, str(self.seed), *bounds],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MSSAR_DATA": "/none"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def outcomes(self) -> list[Outcome]:
        """What it has said since; a crash and a case that does not end are wrong, and the next
        process goes on after them."""
        assert self.running is not None
        assert self.running.stdout is not None
        said = os.read(self.running.stdout.fileno(), 1 << 16)
        lines = (self.rest + said).split(b"\n")
        self.rest = lines.pop()
        found = [Outcome(**json.loads(line)) for line in lines]
        self.done += len(found)
        if found:
            self.heard = time.monotonic()
        if not said:
            self.running.stdout.close()
            status = self.running.wait()
            self.running = None
            if self.done < len(self.numbers):
                found.append(self.lost(f"the process ended with {status}"))
        return found

    def overdue(self) -> list[Outcome]:
        if self.running is None or time.monotonic() < self.heard + PATIENCE:
            return []
        self.stop()
        return [self.lost(f"not ended after {PATIENCE:.0f} s")]

    def lost(self, why: str) -> Outcome:
        number = self.numbers[self.done]
        self.done += 1
        return Outcome(number, "", "", "wrong", why)

    def stop(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait()
            assert self.running.stdout is not None
            self.running.stdout.close()
            self.running = None


def run(
    families: list[tuple[str, int]], seed: int, processes: int
) -> Iterator[tuple[str, Outcome]]:
    """The first cases of families, so many of each, by several processes at a time."""
    waiting = [
        Child(name, seed, range(part, count, processes))
        for name, count in families
        for part in range(processes)
        if part < count
    ]
    running: list[Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(waiting.pop(0))
                running[-1].start()
            pipes = {c.running.stdout: c for c in running if c.running and c.running.stdout}
            ready, _, _ = select.select(list(pipes), [], [], 1.0)
            for child in running[:]:
                spoken = child.running is not None and child.running.stdout in ready
                for outcome in (child.outcomes() if spoken else []) + child.overdue():
                    yield child.family, outcome
                if child.running is None:
                    if child.done < len(child.numbers):
                        child.start()
                    else:
                        running.remove(child)
    finally:
        for child in running:
            child.stop()
