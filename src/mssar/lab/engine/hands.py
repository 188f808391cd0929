"""Runs on a CPU that compute at the same time, each in a thread of its own.

Tiny networks gain little from several threads each, and lose much where these wait for each other:
a run a core gains more, and none waits for another. torch lets go of the interpreter while it
computes. What runs share must bear it: data on the way from files, which workers are started for,
compiled programs, which know their number of threads, and torch's generator, which networks that
drop at random draw from, are for one run at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

from mssar.lab.data import Data
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import threads
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.step import drops
from mssar.lab.engine.world import World
from mssar.lab.run import Run
from mssar.surgery import foreign

T = TypeVar("T")


def shared_out(
    runs: Sequence[Run],
    load: Callable[[str], Data],
    execution: Execution,
    width: int,
    world: World,
) -> tuple[int, int]:
    """How many of some runs compute at once, and with how many threads each; (1, 0): one at a time,
    with as many as suit it."""
    width = min(width, len(runs))
    one = 1, 0
    if width < 2 or execution.device.type != "cpu" or execution.compile or world.size > 1:
        return one
    each = execution.threads or (1 if execution.deterministic else threads.beside(width))
    hands = min(width, threads.available() // each)
    if hands < 2 or not all(_in_memory(load, name) for name in {run.dataset for run in runs}):
        return one
    return one if any(map(_drops, runs)) else (hands, each)


def _in_memory(load: Callable[[str], Data], name: str) -> bool:
    try:
        return isinstance(load(name), Arrays)
    except ValueError:  # said when a run of it begins
        return False


def _drops(run: Run) -> bool:
    try:
        with torch.device("meta"):
            return drops(foreign.build(run.network, run.recalibration, **dict(run.options)))
    except ValueError:  # said when it begins
        return False


class Round(Generic[T]):
    """Some things that are each to be gone on with, by several hands, until one is at its end.

    ``turn`` goes on with one of them, and says whether it can go on further; None: there is no time
    for it. Whichever waits longest is next, so that all get equally far.
    """

    def __init__(self, things: Iterable[T], turn: Callable[[T], bool | None]) -> None:
        self.turn, self.moved = turn, False
        self.ended: list[T] = []
        self.failed: list[tuple[T, Exception]] = []
        self._waiting, self._over = deque(things), threading.Event()

    def work(self, hands: int) -> None:
        """Until one of them has ended or failed, or there is no time for any."""
        workers = [threading.Thread(target=self._hand, daemon=True) for _ in range(hands)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:  # an interrupt that is meant: nobody computes on behind its back
            self._over.set()
            for worker in workers:
                if worker.ident is not None:  # it was started
                    worker.join()

    def _hand(self) -> None:
        while not self._over.is_set():
            try:
                one = self._waiting.popleft()
            except IndexError:  # more hands than things
                return
            try:
                going = self.turn(one)
            except Exception as error:
                self.failed.append((one, error))
                self._over.set()
                return
            if going is None:
                continue
            self.moved = True
            if going:
                self._waiting.append(one)
            else:
                self.ended.append(one)
                self._over.set()
