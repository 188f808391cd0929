"""When to stop: how long things take as a rule, the end of a time budget, and signals."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from types import FrameType

RESERVE = 3.0  # seconds of a time budget kept for leaving: one with torch, two on a busy machine
IMPATIENCE = 0.5  # seconds after which a second interrupt is meant
RECENT = 9  # times of late that say how long something takes
BLOCKS = 16  # of an epoch
EPOCHS = 3  # of late that say how long one takes
# That ask to stop. Schedulers send the last two before they end a job; not every system has them.
SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
begun: float | None = None  # the process, where a command is all that it does


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


class Tempo:
    """How fast epochs go: the median of the last three. Until there are three, by the steps so far.

    Of these the median over blocks, and the time from the last step to the next epoch: what is
    compiled in a few of them, or waited for, is no rule. Within a block steps may be as uneven as
    they like: photographs come in bursts.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self._block = steps, math.ceil(steps / BLOCKS)
        self._epochs = deque[float](maxlen=EPOCHS)
        self._late = deque[float](maxlen=2 * BLOCKS)  # seconds a step, of a block each
        self._between = Typical()
        self._whole: float | None = None  # since when, if the epoch was not gone on with
        self._begun = 0.0  # the block
        self._done = 0  # steps of it
        self._ended: float | None = None  # the epoch's steps
        self._first: float | None = None  # when the first step here was done, which may compile
        self._since = 0  # steps

    def begin(self, step: int) -> None:
        """The steps of an epoch, from this one on."""
        now = time.monotonic()
        if self._ended is not None:
            self._between.add(now - self._ended)
            if self._whole is not None:
                self._epochs.append(now - self._whole)
        self._whole = None if step else now
        self._begun, self._done, self._ended = now, 0, None

    def step(self) -> None:
        """One is done."""
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._since += 1
        self._done += 1
        if self._done == self._block:
            self._close()

    def end(self) -> None:
        """All of them are done."""
        if self._done:
            self._close()
        self._ended = time.monotonic()

    def _close(self) -> None:
        now = time.monotonic()
        self._late.append((now - self._begun) / self._done)
        self._begun, self._done = now, 0

    def early(self, epochs: float) -> float | None:
        """For so many, before there is a block: by the steps after the first, if there are any."""
        if self._first is None or not self._since:
            return None
        return epochs * self.steps * (time.monotonic() - self._first) / self._since

    def seconds(self, epochs: float) -> float | None:
        """For so many; None where nothing tells."""
        if len(self._epochs) == EPOCHS:
            return epochs * median(self._epochs)
        if not self._late:
            return None
        between = self._between.seconds
        if not between and self._ended is not None:
            between = time.monotonic() - self._ended
        # After an epoch's last step its test comes, however much of the epoch is left.
        return epochs * self.steps * median(self._late) + math.ceil(epochs) * between


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
        """The first of ``SIGNALS`` asks to stop; a later interrupt is obeyed at once.

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
        for number in SIGNALS:
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
