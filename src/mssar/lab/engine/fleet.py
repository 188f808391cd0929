"""Several runs in one process, taking turns; on a GPU each has its own stream and graphs.

One small network does not fill a large chip: on an H200 four ResNet-20 take twice as long as one.
What a run computes does not depend on its company.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from mssar.lab import records
from mssar.lab.data import Data
from mssar.lab.engine.execution import Execution, settings
from mssar.lab.engine.feed import Resident
from mssar.lab.engine.observer import Observer
from mssar.lab.engine.result import finished
from mssar.lab.engine.training import DivergedError, Training
from mssar.lab.engine.world import World
from mssar.lab.records import Record
from mssar.lab.run import Run

RESERVE = 1.0  # seconds of a time budget kept for leaving
MEMORY = 10.0  # seconds in which a long turn comes to count half
IMPATIENCE = 0.5  # seconds after which a second interrupt is meant


@dataclass
class Outcome:
    """What became of a list of runs."""

    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: list[Run] = field(default_factory=list)  # not finished in time
    signal: int | None = None  # that ended it


class Clock:
    """When to stop: at a signal, or so long before the budget ends that saving fits in."""

    def __init__(self, budget: float | None) -> None:
        self.end = None if budget is None else time.monotonic() + budget
        self.signal: int | None = None
        self._last = time.monotonic()
        self.longest = 0.0  # turn of late: the next may take as long, and so may saving

    def expired(self, runs: int = 1) -> bool:
        """Whether it is time, if each of so many runs is to have a turn and then be saved."""
        if self.signal is not None:
            return True
        needed = 2 * runs * self.longest + RESERVE
        return self.end is not None and time.monotonic() + needed > self.end

    @contextmanager
    def turn(self, *, first: bool = False) -> Iterator[None]:
        """A run's turn. Its first is not like the others: caches are cold, graphs are captured."""
        begun = time.monotonic()
        yield
        now = time.monotonic()
        if not first:  # long ones, such as compiling for a last batch, are forgotten in time
            faded = self.longest * 0.5 ** ((now - self._last) / MEMORY)
            self.longest = max(faded, now - begun)
        self._last = now

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first SIGTERM or interrupt asks to stop; a later interrupt is obeyed at once.

        A second SIGTERM, or an interrupt that comes with the first signal, says nothing new:
        schedulers signal a process and its parent, which passes it on.
        """
        asked = math.inf

        def ask(number: int, _frame: FrameType | None) -> None:
            nonlocal asked
            if number == signal.SIGINT and time.monotonic() > asked + IMPATIENCE:
                raise KeyboardInterrupt
            if self.signal is None:
                self.signal, asked = number, time.monotonic()

        before = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(
    runs: Sequence[Run],
    load: Callable[[str], Data],
    execution: Execution,
    folder: Path,
    observer: Observer,
    *,
    width: int = 1,
    budget: float | None = None,
    world: World | None = None,
    record: Callable[[Record], None] = lambda _: None,
    anew: bool = False,
) -> Outcome:
    """Train runs, ``width`` at a time, each in its own folder under ``folder``.

    Runs that are finished there are not trained again, and those that were begun go on, unless all
    are to begin ``anew``. ``load`` gives a data set by its name; ``record`` is handed the record of
    every finished run.
    """
    if width < 1:
        raise ValueError(f"the width of a fleet is 1 or more; got {width}")
    clock = Clock(budget)
    fleet = _Fleet(load, execution, folder, observer, width, world or World(), record, anew, clock)
    with clock.listening(), settings(execution):
        fleet.work(deque(dict.fromkeys(runs)))
    fleet.outcome.signal = clock.signal
    return fleet.outcome


@dataclass
class _Fleet:
    load: Callable[[str], Data]
    execution: Execution
    folder: Path
    observer: Observer
    width: int
    world: World
    record: Callable[[Record], None]
    anew: bool
    clock: Clock
    outcome: Outcome = field(default_factory=Outcome)
    resident: dict[object, Resident] = field(default_factory=dict)
    begun: set[Training] = field(default_factory=set)  # that had a turn
    # Streams that are free again. Memory is kept by stream: the next run finds the last one's.
    lanes: list[torch.cuda.Stream | None] = field(default_factory=list)

    def work(self, waiting: deque[Run]) -> None:
        sailing: list[tuple[Training, Iterator[None]]] = []
        try:
            while waiting or sailing:
                if self._expired(len(sailing)):
                    self._save(sailing)
                    break
                self._launch(waiting, sailing)
                self._round(sailing)
        except ValueError:  # of one run, its folder or its files: the others lose nothing
            if self.world.size == 1:  # saving is for all processes, and this may be one of them
                self._save(sailing)
            raise
        finally:
            self.outcome.left = [training.run for training, _ in sailing] + list(waiting)
            for training, work in sailing:
                work.close()  # type: ignore[attr-defined]
                training.close()

    # Each in a function of its own: nothing may keep a finished run, or the next lacks its memory.

    def _launch(self, waiting: deque[Run], sailing: list[tuple[Training, Iterator[None]]]) -> None:
        while waiting and len(sailing) < self.width:
            if begun := self._begin(waiting.popleft()):
                sailing.append((begun, begun.work()))

    def _round(self, sailing: list[tuple[Training, Iterator[None]]]) -> None:
        """A turn for everybody."""
        for training, work in list(sailing):
            with self.clock.turn(first=training not in self.begun):
                going = self._turn(training, work)
            self.begun.add(training)
            training.company.add(len(sailing))
            if not going:
                sailing.remove((training, work))
                self.begun.discard(training)
                self.lanes.append(training.lane)
                training.close()

    def _expired(self, runs: int) -> bool:
        return self.world.any(self.clock.expired(max(1, runs)), self.execution.device)

    def _save(self, sailing: list[tuple[Training, Iterator[None]]]) -> None:
        for training, work in list(sailing):
            try:
                training.save()
            except DivergedError as reason:
                self._fail(training, reason)
                sailing.remove((training, work))
                training.close()

    def _begin(self, run: Run) -> Training | None:
        directory = self.folder / run.name
        done = finished(directory) if self.world.leads and not self.anew else None
        if self.world.any(done is not None, self.execution.device):
            if done:
                self._done(done)
                self.observer.said(f"{run.label}, seed {run.seed}: finished before, in {directory}")
            return None
        return Training(
            run,
            self.load(run.dataset),
            self.execution,
            directory,
            self.observer,
            world=self.world,
            resident=self.resident,
            lane=self.lanes.pop() if self.lanes else None,
            anew=self.anew,
        )

    def _turn(self, training: Training, work: Iterator[None]) -> bool:
        """Let a run go on to its next pause; False when it has ended."""
        try:
            with training.stream:
                next(work)
        except StopIteration:
            if self.world.leads and (done := finished(training.directory)):
                self._done(done)
            return False
        except DivergedError as reason:
            self._fail(training, reason)
            return False
        return True

    def _fail(self, training: Training, reason: DivergedError) -> None:
        self.outcome.failures.append(str(reason))
        self.observer.failed(training.run, str(reason))

    def _done(self, record: Record) -> None:
        self.record(record)
        self.outcome.records.append(record)


def into(path: Path) -> Callable[[Record], None]:
    """A place for records: a file they are appended to."""
    return lambda record: records.append(path, record)
