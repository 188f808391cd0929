"""Several runs in one process, taking turns; on a GPU each has its own stream and graphs, and on a
CPU as many compute at once as there are cores for (``hands``).

One small network does not fill a large chip: on an H200 four ResNet-20 take twice as long as one.
What a run computes does not depend on its company, but for rounding where runs of one network are
trained as a single wide one (``stack``).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mssar.lab.data import Data
from mssar.lab.engine import checkpoint, failure, hands, memory, resumption, threads
from mssar.lab.engine.clock import RESERVE, Clock, Typical
from mssar.lab.engine.execution import Execution, settings
from mssar.lab.engine.feed import Resident
from mssar.lab.engine.observer import Observer
from mssar.lab.engine.pace import own_lane
from mssar.lab.engine.result import finished
from mssar.lab.engine.stacked import Member, StackedTrainings
from mssar.lab.engine.stacking import Stacking
from mssar.lab.engine.training import Training, throw_away
from mssar.lab.engine.world import World
from mssar.lab.records import Record
from mssar.lab.run import Run

CAUTION = 1.25  # by how much what a run still needs may be underestimated


@dataclass
class Outcome:
    """What became of a list of runs."""

    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: list[Run] = field(default_factory=list)  # not finished in time
    signal: int | None = None  # that ended it
    moved: bool = False  # a run has made a step here
    short: float | None = None  # seconds that a budget would have needed for a first step


def train(
    runs: Sequence[Run],
    load: Callable[[str], Data],
    execution: Execution,
    folder: Path,
    observer: Observer,
    *,
    width: int = 1,
    stack: int = 1,
    budget: float | None = None,
    world: World | None = None,
    record: Callable[[Run, Record], None] = lambda *_: None,
    anew: bool = False,
) -> Outcome:
    """Train runs, ``width`` at a time, each in its own folder under ``folder``.

    Of these up to ``stack`` that differ in seed or data alone are trained as one network. Runs that
    are finished in their folder are not trained again, and those that were begun go on, unless all
    are to begin ``anew``. ``load`` gives a data set by its name; ``record`` is handed every
    finished run with its record. A run that fails is among the failures, and the others go on;
    where all failed by mistakes of the user's, the first is raised.
    """
    if width < 1:
        raise ValueError(f"the width of a fleet is 1 or more; got {width}")
    world, clock, waiting = world or World(), Clock(budget), deque(dict.fromkeys(runs))
    begun = time.monotonic()
    stacking = Stacking(stack, load, execution, folder, world, anew)
    fleet = _Fleet(
        load, execution, folder, observer, width, stacking, world, record, anew, clock, waiting,
        tuple(waiting),
    )  # fmt: skip
    entries = -(-width // stack)
    fleet.hands, fleet.share = hands.shared_out(list(waiting), load, execution, entries, world)
    with clock.listening(), settings(execution):
        fleet.work()
    outcome = fleet.outcome
    outcome.signal, outcome.moved = clock.signal, fleet.moved
    if outcome.left and not (outcome.moved or outcome.records or outcome.failures or clock.signal):
        outcome.short = time.monotonic() - begun + RESERVE
    return outcome


@dataclass(eq=False)
class _Entry:
    """A run that is being trained, or several that are trained as one."""

    training: Training | StackedTrainings
    work: Iterator[None]
    prepared: float  # seconds it took to make ready
    new: bool = True  # until it had a turn


@dataclass
class _Fleet:
    load: Callable[[str], Data]
    execution: Execution
    folder: Path
    observer: Observer
    width: int
    stacking: Stacking
    world: World
    record: Callable[[Run, Record], None]
    anew: bool
    clock: Clock
    waiting: deque[Run]
    asked: tuple[Run, ...]
    outcome: Outcome = field(default_factory=Outcome)
    mistakes: list[str] = field(default_factory=list)  # among the failures
    untidy: bool = False  # since a failure
    begun: set[Run] = field(default_factory=set)  # here: what they have is not thrown away again
    resident: dict[object, Resident] = field(default_factory=dict)
    starts: Typical = field(default_factory=Typical)  # making ready and the first turn
    hands: int = 1  # that many compute at once
    share: int = 0  # of a CPU's threads, for each of them
    moved: bool = False  # whether anybody has made a step
    lacking: tuple[Run, int] | None = None  # who had no room for a stack, and when
    cleared: bool = False  # what is to begin anew has nothing from before
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what several hands change
    # Streams that are free again. Memory is kept by stream: the next run finds the last one's.
    lanes: list[torch.cuda.Stream | None] = field(default_factory=list)

    def work(self) -> None:
        active: list[_Entry] = []
        try:
            while self.waiting or active:
                self._launch(active)
                going = bool(active) and self._round(active)
                if self.anew and self.moved and not self.cleared:
                    self._throw_away()
                if not going:
                    self._save(active)
                    break
                self._sweep()
        except Exception:  # of the machine, or of what all runs share: they lose nothing
            if self.world.size == 1:  # saving is for all processes, and this may be one of them
                with suppress(OSError):
                    self._save(active)
            raise
        finally:
            self.outcome.left = [*_runs(active), *self.waiting]
            while active:
                self._leave(active[-1], active)
        outcome = self.outcome
        if not (outcome.records or outcome.left) and len(self.mistakes) == len(outcome.failures):
            for mistake in self.mistakes:
                raise ValueError(mistake)

    # Each in a function of its own: nothing may keep a finished run, or the next lacks its memory.

    def _launch(self, active: list[_Entry]) -> None:
        while self.waiting and (room := self.width - len(_runs(active))) > 0:
            if self._expired(active, self.starts.seconds) or self._holds(active, room):
                return
            if self.clock.end is not None and any(entry.new for entry in active):
                return  # how long it takes to begin is known once the first has begun
            run = self.waiting.popleft()
            try:
                if self._lacks_room(run, active, room):
                    self.waiting.appendleft(run)
                    return
                if entry := self._begin(run, room):
                    active.append(entry)
            except Exception as error:
                said = self._failed(error, run, active)
                if active:
                    self.observer.said(said)
            self._sweep()

    def _lacks_room(self, run: Run, active: list[_Entry], room: int) -> bool:
        """Whether a run waits until a stack makes room, or a part of its own would go by itself.
        Beside runs that are none, which may take for ever, a part goes."""
        if len(_runs(active)) == len(active):
            return False
        if (run, room) != self.lacking:  # a round is too short to ask in each
            self.lacking = (run, room) if self.stacking.whole(run, self.waiting) > room else None
        return self.lacking is not None

    def _round(self, active: list[_Entry]) -> bool:
        """A turn for everybody who has time for one, or many at once; False when nobody has."""
        # Where time is short the others are begun when the first has had a turn, not its last one.
        beginning = self.clock.end is not None and self.waiting and any(b.new for b in active)
        if (count := self._hands(active)) > 1 and not beginning:
            return self._side_by_side(active, count)
        moved = False
        for entry in list(active):
            try:
                going = self._turn_in_time(entry, active)
            except Exception as error:
                self._lose(entry, active, error)
                return True  # its memory is for the others: they have their turns once it is free
            moved = moved or going is not None
            if going is False:
                self._arrive(entry, active)
        return moved

    def _hands(self, active: list[_Entry]) -> int:
        """How many compute at once. What was begun elsewhere has the threads that it began with."""
        each = max((t.progress.threads for b in active for t in b.training.trainings), default=0)
        if self.hands == 1 or each <= self.share:
            return self.hands
        return max(1, min(self.hands, threads.available() // each))

    def _side_by_side(self, active: list[_Entry], count: int) -> bool:
        """Turns for everybody, so many at once, until one has ended or nobody has time."""
        turns = hands.Round(active, lambda entry: self._turn_in_time(entry, active))
        turns.work(count)
        for entry, _ in turns.failed:  # first: whatever happens now, what failed is not saved
            self._leave(entry, active)
        for entry in turns.ended:
            self._arrive(entry, active)
        for entry, error in turns.failed:
            self._lost(entry, active, error)
        return turns.moved or bool(turns.failed)

    def _turn_in_time(self, entry: _Entry, active: list[_Entry]) -> bool | None:
        """Whether an entry can go on after its turn; None if there is no time for one."""
        due = self.starts if entry.new else entry.training.turns
        if self._expired(active, due.seconds):
            return None
        before = entry.training.position
        going = self._turn(entry)
        self.moved = True
        if entry.training.position != before:  # else it waited, or was tested: many short turns
            entry.training.company.add(len(_runs(active)))
        return going

    def _arrive(self, entry: _Entry, active: list[_Entry]) -> None:
        self._leave(entry, active)
        self.lanes.append(entry.training.lane)
        for training in entry.training.trainings:
            if training.record:
                self._done(training.run, training.record)

    def _expired(self, active: list[_Entry], seconds: float) -> bool:
        """Whether it is time, if what takes so long is done before everybody is saved."""
        saving = sum(entry.training.saves.seconds for entry in active if not entry.new)
        behind = max((entry.training.behind for entry in active), default=0.0)
        return self.world.any(self.clock.expired(seconds + saving + behind), self.execution.device)

    def _holds(self, active: list[_Entry], room: int) -> bool:
        """Whether a run comes to its end in time if it is not joined by others, and else not."""
        runs, left = len(_runs(active)), self.clock.left
        more = min(room, self.stacking.most)
        for entry in active:
            work = entry.training.left / self._slower(entry.training.company.average)  # if alone
            if work * self._slower(runs) <= left < CAUTION * work * self._slower(runs + more):
                return True
        return False

    def _slower(self, runs: float) -> float:
        """How many times as long a run takes among so many."""
        return max(1.0, runs / self.hands)

    def _save(self, active: list[_Entry]) -> None:
        """Everybody, although one cannot be saved."""
        full: Exception | None = None
        for entry in [entry for entry in active if not (entry.new or entry.training.saved)]:
            try:
                entry.training.save()
            except Exception as error:
                runs = [training.run for training in entry.training.trainings]
                if self._is_everybodys(error, runs):
                    full = error
                else:
                    self._lose(entry, active, error)
        if full:
            raise full

    def _begin(self, run: Run, room: int) -> _Entry | None:
        directory = self.folder / run.name
        anew = self.anew and run not in self.begun
        done = finished(directory) if self.world.leads and not anew else None
        if done:
            checksum = self.load(run.dataset).checksum
            resumption.require_done(done, run, checksum, self.execution.precision, directory)
        if self.world.any(done is not None, self.execution.device):
            if done:
                self._done(run, done)
                self.observer.said(f"{run}: finished before, in {directory}")
            return None
        begun = time.monotonic()
        lane = self.lanes.pop() if self.lanes else own_lane(self.execution)
        training: Training | StackedTrainings | None
        if mates := self.stacking.mates(run, self.waiting, room):
            training = self._stack([run, *mates], lane)
        else:
            training = self._training(run, lane)
        return _Entry(training, training.work(), time.monotonic() - begun) if training else None

    def _throw_away(self) -> None:
        """What waits for its turn to begin anew, or failed in it, loses what it has once another
        has had one: whoever stops then must not find it finished, and go on with old and new."""
        self.cleared = True
        for run in self.asked if self.world.leads else ():
            directory = self.folder / run.name
            if run not in self.begun and directory.exists():
                with suppress(ValueError, OSError), checkpoint.held(directory):  # else in its turn
                    throw_away(directory)
                    self.begun.add(run)

    def _training(
        self, run: Run, lane: torch.cuda.Stream | None, member: Member | None = None
    ) -> Training:
        made = Training(
            run,
            self.load(run.dataset),
            self.execution.of(run.name),
            self.folder / run.name,
            self.observer,
            world=self.world,
            resident=self.resident,
            lane=lane,
            anew=self.anew and run not in self.begun,
            member=member,
            share=self.share,
        )
        self.begun.add(run)
        return made

    def _stack(self, runs: list[Run], lane: torch.cuda.Stream | None) -> StackedTrainings | None:
        """Runs stacked; None where they cannot be, and are to be tried one by one."""
        trainings = list[Training]()
        try:
            with torch.cuda.stream(lane) if lane else nullcontext():
                members = self.stacking.members(runs, self.resident)
            for run, member in zip(runs, members, strict=True):
                trainings.append(self._training(run, lane, member))
            return StackedTrainings(trainings)
        except Exception as error:
            for training in trainings:
                training.close()
            self._take_apart(runs, error)
            return None

    def _take_apart(self, runs: list[Run], error: Exception) -> None:
        """Have runs that were to be one go on by themselves."""
        if self._is_everybodys(error, runs):
            raise error
        self.untidy = True
        self.stacking.split(runs, self.waiting)
        self.observer.said(
            f"{runs[0].label}: {len(runs)} runs that were trained as one are tried from their last "
            f"checkpoints on, each by itself, since {failure.reason_of_several(error)}"
        )

    def _turn(self, entry: _Entry) -> bool:
        """Let a run go on to its next pause; False when it has ended."""
        training, begun = entry.training, time.monotonic()
        before = training.progress.step
        try:
            with training.stream:
                next(entry.work)
        except StopIteration:
            return False
        if entry.new:
            if self.world.any(self.clock.end is not None, self.execution.device):
                training.save()  # to know how long it takes
            with self.lock:
                self.starts.add(entry.prepared + time.monotonic() - begun)
        elif training.progress.step > before:
            training.turns.add(time.monotonic() - begun)
        entry.new = False
        return True

    def _leave(self, entry: _Entry, active: list[_Entry]) -> None:
        active.remove(entry)
        entry.work.close()  # type: ignore[attr-defined]
        entry.training.close()

    def _lose(self, entry: _Entry, active: list[_Entry], error: Exception) -> None:
        self._leave(entry, active)
        self._lost(entry, active, error)

    def _lost(self, entry: _Entry, active: list[_Entry], error: Exception) -> None:
        runs = [training.run for training in entry.training.trainings]
        if len(runs) == 1:
            self.observer.failed(runs[0], self._failed(error, runs[0], active))
            return
        self._take_apart(runs, error)

    def _failed(self, error: Exception, run: Run, others: list[_Entry]) -> str:
        """Note that a run cannot go on, and why. What is no fault of one run is raised."""
        if self._is_everybodys(error, [run]):
            raise error
        if self.world.size > 1 and not isinstance(error, failure.DivergedError):
            raise error  # the other processes know nothing of it
        if isinstance(error, ValueError):
            self.mistakes.append(str(error))
        self.untidy = True
        said = failure.reason(error, run, self.folder / run.name)
        self.outcome.failures.append(said)
        if memory.lacking(error) is not None and 0 < (fitted := len(_runs(others))) < self.width:
            self.width = fitted  # or all that wait would fail, one after the other
            self.observer.said(f"memory ran out: from now on {self.width} at once")
        return said

    def _is_everybodys(self, error: Exception, runs: list[Run]) -> bool:
        return failure.is_everybodys(error, *(self.folder / run.name for run in runs))

    def _sweep(self) -> None:
        """Free what a failed run had; an exception may keep it in a circle."""
        if not self.untidy:
            return
        self.untidy = False
        gc.collect()
        if self.execution.device.type == "cuda":
            with suppress(RuntimeError):  # a broken device says so soon enough
                torch.cuda.empty_cache()

    def _done(self, run: Run, record: Record) -> None:
        self.record(run, record)
        self.outcome.records.append(record)


def _runs(active: Iterable[_Entry]) -> list[Run]:
    return [training.run for entry in active for training in entry.training.trainings]
