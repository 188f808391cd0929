"""How runs share a GPU: each on a stream of its own, none waiting while others could work."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mssar.lab.engine.clock import Typical
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.world import World

AHEAD = 2  # chunks of steps that a GPU may have before it
NAP = 0.0005  # seconds between questions whether it is done


def own_lane(execution: Execution) -> torch.cuda.Stream | None:
    """A stream for one run at a time; a CPU has none."""
    return torch.cuda.Stream(execution.device) if execution.device.type == "cuda" else None


def mark() -> torch.cuda.Event:
    """Behind what the current stream was given so far."""
    made = torch.cuda.Event()
    made.record()
    return made


class Pace:
    """How far a run is ahead of its GPU.

    Its methods pause until the GPU is near enough. To wait instead would leave the other runs
    without work. Several processes have no other runs, and must pause equally often: they wait.
    """

    def __init__(self, device: torch.device, world: World) -> None:
        self.device, self.world = device, world
        self.behind = Typical()  # from issuing a chunk until it is known to be done
        self._marks = deque[tuple[torch.cuda.Event, float]]()

    def kept(self) -> Iterator[None]:
        """Called after every chunk: until few are waiting for the GPU."""
        return self._until(AHEAD)

    def caught_up(self) -> Iterator[None]:
        """Until it has done all it was given."""
        return self._until(0)

    def _until(self, left: int) -> Iterator[None]:
        if self.device.type != "cuda":
            return
        self._marks.append((mark(), time.monotonic()))
        while len(self._marks) > left:
            event, issued = self._marks[0]
            if self.world.size > 1:
                event.synchronize()
            while not event.query():
                time.sleep(NAP)
                yield
            self._marks.popleft()
            self.behind.add(time.monotonic() - issued)


@dataclass
class Company:
    """How many runs shared the device, at every turn with steps. Only one that never shared it was
    alone."""

    turns: int = 0
    runs: int = 0

    def add(self, runs: int) -> None:
        self.turns, self.runs = self.turns + 1, self.runs + runs

    @property
    def average(self) -> float:
        return self.runs / self.turns if self.turns else 1.0

    @property
    def mean(self) -> float:
        """To two digits, up: what a run took of the device is its time over this."""
        found = math.ceil(100 * self.average) / 100
        return int(found) if found.is_integer() else found
