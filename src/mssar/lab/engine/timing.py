"""How long a step of training takes, and a pass through the network, by recalibration.

The step is the training loop's own, on random images that are there already: what a data set
takes to be read is no part of it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch

from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine import provenance
from mssar.lab.engine.capture import captured
from mssar.lab.engine.execution import Execution, settings
from mssar.lab.engine.feed import ArraysFeed, Feed, Resident, generator
from mssar.lab.engine.pace import own_lane
from mssar.lab.engine.result import now
from mssar.lab.engine.step import Learner
from mssar.lab.engine.world import World
from mssar.lab.recipes import Crops, varied
from mssar.lab.run import Run
from mssar.lab.timings import Timing
from mssar.surgery.foreign import architecture

WARM_UP = 2  # steps before any is timed: libraries search and set themselves up in the first
TURN = 4  # steps that are timed one after the other on a GPU
FEWEST = 3  # steps that are timed, however long they take


class TooLongError(Exception):
    """There is no time for it; before anything is set up nobody knows how long that takes."""

    def __init__(self, seconds: float, *, known: bool = True) -> None:
        super().__init__(f"it takes {seconds:.3g} s more, or longer")
        self.seconds, self.known = seconds, known


class Subject(Protocol):
    """What is timed, step by step."""

    execution: Execution

    def rewind(self) -> None:
        """Before a turn: its steps are counted from 0."""

    def step(self, step: int) -> None:
        """Issue a step."""


class Stepping(Learner):
    """A step of training. The learning rate is 0: it takes as long, and nothing diverges."""

    def __init__(self, run: Run, feed: Feed, execution: Execution) -> None:
        model = run.build(architecture(run.network).num_classes)
        super().__init__(model, feed, run.recipe, execution, World())
        self.begin(0, 0, 0.0)

    def rewind(self) -> None:
        self.counter.zero_()


class Passing:
    """A batch through the network, as it is after training."""

    def __init__(self, run: Run, feed: Feed, execution: Execution) -> None:
        self.execution = execution
        model = run.build(architecture(run.network).num_classes).to(execution.device).eval()
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward = torch.compile(model) if execution.compile else model
        feed.begin(0, 0)
        first = torch.zeros((), dtype=torch.int64, device=execution.device)
        self.x, _ = feed.take(first, feed.sizes[0])
        self._graph: torch.cuda.CUDAGraph | None = None

    def rewind(self) -> None:
        """Every pass is the same."""

    def step(self, step: int) -> None:  # noqa: ARG002
        if not self.execution.graphed:
            self._body()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with captured(graph):
                self._body()
            self._graph = graph
        self._graph.replay()

    @torch.no_grad()
    def _body(self) -> None:
        with self.execution.autocast():
            self.forward(self.x)


SUBJECTS: dict[str, Callable[[Run, Feed, Execution], Subject]] = {
    "training": Stepping,
    "inference": Passing,
}


def measure(
    runs: Sequence[Run],
    what: str,
    execution: Execution,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
    end: float = math.inf,
) -> list[Timing]:
    """Time runs of one network that differ in recalibration, in turns, for so long each.

    Where that would take longer than ``end``, of ``time.monotonic``, a :class:`TooLongError` says
    so, as soon as it is known.
    """
    network, batch = runs[0].network, runs[0].recipe.batch
    assert all((run.network, run.recipe.batch) == (network, batch) for run in runs)
    device, made, heading = execution.device, now(), f"{network} {what}, batch {batch}"
    lane = own_lane(execution)
    with settings(execution), torch.cuda.stream(lane) if lane else nullcontext():
        if time.monotonic() + seconds * len(runs) > end:
            raise TooLongError(seconds * len(runs), known=False)
        feed = random_feed(runs[0], execution)
        if lane:  # a library's workspace stays: whoever came first would be charged for it
            _made_ready(runs[0], what, feed, replace(execution, graph=False))
        ready: list[tuple[Subject, int | None, float]] = []
        takes = slowest = 0.0
        for run in runs:
            tell(f"{heading}: setting up {run.recalibration}")
            before = time.monotonic()
            ready.append(_made_ready(run, what, feed, execution))
            slowest = max(slowest, time.monotonic() - before)
            turns, rest = FEWEST * sum(turn for *_, turn in ready), len(runs) - len(ready)
            takes = max(seconds * len(runs), turns)
            if time.monotonic() + takes + slowest * rest > end:  # and the others have turns, too
                takes = max(takes, turns * len(runs) / len(ready))
                raise TooLongError(takes + slowest * rest)
        tell(f"{heading}: measuring in turns, about {takes:.3g} s")
        times = in_turns([subject for subject, *_ in ready], seconds, device)
        peaks = [peak for _, peak, _ in ready]
        del ready
    if execution.compile:
        torch.compiler.reset()  # it gives up on a function that it has compiled often
    if lane:
        gc.collect()
        torch.cuda.empty_cache()
    return [
        _timing(run, what, execution, taken, peak, made)
        for run, taken, peak in zip(runs, times, peaks, strict=True)
    ]


def random_feed(run: Run, execution: Execution) -> ArraysFeed:
    """Random images and labels of the size and number that a turn of the run takes."""
    chosen, device, batch = architecture(run.network), execution.device, run.recipe.batch
    count = batch * (TURN + 1 if device.type == "cuda" else 1)
    draw = generator(0)
    shape = (count, *chosen.size[1:], 3)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=draw)
    labels = torch.randint(chosen.num_classes, (count,), generator=draw)
    names = tuple(map(str, range(chosen.num_classes)))
    train, test = Split(images, labels), Split(images[:1], labels[:1])
    data = Arrays("random", names, train, test, (127.5,) * 3, (73.9,) * 3)  # of uniform bytes
    recipe = varied(run.recipe, augmentation=Crops(padding=0))
    return ArraysFeed(data, Resident(data, 0, device), recipe, 0, device, World())


def _made_ready(
    run: Run, what: str, feed: Feed, execution: Execution
) -> tuple[Subject, int | None, float]:
    """Something to time; on a GPU the most memory that a step of it takes, network, momentum,
    gradients and maps; and about how many seconds a turn takes."""
    device, peak = execution.device, None
    cuda = device.type == "cuda"
    if cuda:
        gc.collect()  # here, and not while memory is watched
    before = torch.cuda.memory_allocated(device) if cuda else 0
    subject = SUBJECTS[what](run, feed, execution)
    # Without a graph at first: what one holds is not seen when it is replayed.
    subject.execution = replace(execution, graph=False)
    for _ in range(WARM_UP):
        begun = time.monotonic()
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        subject.rewind()
        subject.step(0)
    if cuda:
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    took = (time.monotonic() - begun) * (TURN + 1 if cuda else 1)
    subject.execution = execution
    subject.rewind()
    subject.step(0)  # the graph is captured
    return subject, peak, took


def in_turns(
    subjects: Sequence[Subject], seconds: float, device: torch.device
) -> list[list[float]]:
    """Milliseconds of each subject's steps. They take turns until all had so many seconds on
    average: a machine that slows down slows all of them down."""
    found: list[list[float]] = [[] for _ in subjects]
    end = time.perf_counter() + seconds * len(subjects)
    while len(found[0]) < FEWEST or time.perf_counter() < end:
        for times, subject in zip(found, subjects, strict=True):
            subject.rewind()
            times += turn(subject.step, device)
    return found


def turn(step: Callable[[int], object], device: torch.device) -> list[float]:
    """Milliseconds of a step, on a GPU of several. There one is not timed: while it runs the others
    are issued, as when training. A turn begins with a device that has nothing to do, so that a host
    that falls behind cannot hide behind another's steps."""
    if device.type != "cuda":
        begun = time.perf_counter()
        step(0)
        return [1e3 * (time.perf_counter() - begun)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TURN + 1)]
    step(0)
    marks[0].record()
    for number, mark in enumerate(marks[1:], 1):
        step(number)
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, the median and the 80th, interpolated."""
    at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(times, dtype=torch.float64).quantile(at).tolist()
    return low, middle, high


def _timing(
    run: Run, what: str, execution: Execution, times: list[float], peak: int | None, made: str
) -> Timing:
    chosen = architecture(run.network)
    low, middle, high = percentiles(times)
    return Timing(
        network=run.network,
        recalibration=run.recalibration,
        options=run.as_dict()["options"],
        size=chosen.size,
        classes=chosen.num_classes,
        what=what,
        batch=run.recipe.batch,
        precision=execution.precision,
        graph=execution.graphed,
        compile=execution.compile,
        median_ms=middle,
        p20_ms=low,
        p80_ms=high,
        repeats=len(times),
        peak_bytes=peak,
        environment=provenance.environment(execution.device),
        code=provenance.code(),
        command=provenance.command(),
        made=made,
    )
