"""When to stop: how long things take as a rule, the end of a time budget, and signals."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

RESERVE = 1.0  # seconds of a time budget kept for leaving
IMPATIENCE = 0.5  # seconds after which a second interrupt is meant
RECENT = 9  # times of late that say how long something takes


class Typical:
    """How long something takes as a rule: the median of late. Compiling is long, and no rule."""

    def __init__(self) -> None:
        self.seconds = 0.0  # not known is no time
        self._late = deque[float](maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self._late.append(seconds)
        self.seconds = sorted(self._late)[(len(self._late) - 1) // 2]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What is done within counts, unless it fails."""
        begun = time.monotonic()
        yield
        self.add(time.monotonic() - begun)


class Clock:
    """How much of a budget is left, and whether a signal came."""

    def __init__(self, budget: float | None) -> None:
        self.end = None if budget is None else time.monotonic() + budget
        self.signal: int | None = None

    @property
    def left(self) -> float:
        """Seconds, without what is kept for leaving."""
        return math.inf if self.end is None else self.end - time.monotonic() - RESERVE

    def expired(self, needed: float) -> bool:
        """Whether it is time to stop, if so many seconds are needed for what must still be done."""
        if self.signal is not None:
            return True
        return needed > self.left

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
