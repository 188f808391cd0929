"""How many threads of a CPU a run computes with.

Sums depend on it in their last bits, so a run keeps the number that it began with. Threads of small
loops wait for each other hundreds of times a step: where another program takes one of their cores
away, all of them wait for that one. A run with fewer threads is then the faster one, and runs with
one thread each, side by side, never wait at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

TURNS = 5  # of every number of threads, of which the median counts
PATIENCE = 4.0  # seconds of trying, after which fewer turns, or none, must do
LONG = 1.0  # seconds of a step whose loops are so long that waiting at their ends is little
NEARLY = 1.05  # of the fastest is as good, with fewer threads


def available() -> int:
    """As many as torch would take: cores, or what OMP_NUM_THREADS says."""
    return torch.get_num_threads()


def beside(runs: int) -> int:
    """For each of so many runs that compute at once. Where there is more than a core for each, one
    is left to other programs."""
    return max(1, (available() - 1) // runs)


@contextmanager
def using(number: int) -> Iterator[None]:
    """What is computed within is computed with so many threads; 0: with as many as before. Other
    threads of Python have their own number."""
    before = torch.get_num_threads()
    if number in (0, before):
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest(step: Callable[[], None], most: int) -> int:
    """The number of threads that a step is quickest with, here and now: in turns, so that whatever
    else runs slows all of them alike. Of those that are nearly as quick, the fewest."""
    tried = sorted({most, most - 1, most // 2, 1} - {0})
    if len(tried) == 1:
        return most
    times: dict[int, list[float]] = {number: [] for number in tried}
    end = time.perf_counter() + PATIENCE
    for number in reversed(tried):  # libraries set themselves up, for every number anew
        if _timed(step, number) > LONG and _timed(step, number) > LONG:
            return most
        if time.perf_counter() > end:
            return most
    for _ in range(TURNS):
        for number in tried:
            times[number].append(_timed(step, number))
        if time.perf_counter() > end:
            break
    rule = {number: median(found) for number, found in times.items()}
    best = min(rule.values())
    return next(number for number in tried if rule[number] <= NEARLY * best)


def _timed(step: Callable[[], None], number: int) -> float:
    with using(number):
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
