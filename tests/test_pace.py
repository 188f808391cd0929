"""Runs that share a GPU, with stand-ins for its events: who waits, and who does not."""

import pytest
import torch

from mssar.lab.engine import pace
from mssar.lab.engine.clock import Typical
from mssar.lab.engine.pace import Company, Pace
from mssar.lab.engine.world import World

GPU = torch.device("cuda", 0)


class Event:
    """Done after so many questions, or when it is waited for."""

    def __init__(self, questions):
        self.left, self.waited = questions, False

    def query(self):
        self.left -= 1
        return self.left < 0

    def synchronize(self):
        self.waited, self.left = True, 0


@pytest.fixture
def events(monkeypatch):
    """Events to be recorded, in their order, and those that were."""
    made, recorded = [], []

    def mark():
        recorded.append(made.pop(0))
        return recorded[-1]

    monkeypatch.setattr(pace, "mark", mark)
    monkeypatch.setattr(pace.time, "sleep", lambda _: None)
    return made, recorded


def pauses(waiting):
    return sum(1 for _ in waiting)


def test_a_run_goes_ahead_by_two_chunks_and_then_pauses(events):
    made, recorded = events
    made += [Event(3), Event(5), Event(7), Event(0)]
    own = Pace(GPU, World())
    assert pauses(own.kept()) == 0
    assert pauses(own.kept()) == 0
    assert pauses(own.kept()) == 3  # until the first is done; the others are not asked
    assert [event.left for event in recorded] == [-1, 5, 7]
    assert pauses(own.kept()) == 5


def test_at_the_end_everything_is_done(events):
    made, recorded = events
    made += [Event(3), Event(5), Event(2), Event(1)]
    own = Pace(GPU, World())
    assert pauses(own.kept()) + pauses(own.kept()) == 0
    assert pauses(own.caught_up()) == 3 + 5 + 2
    assert all(event.left < 0 for event in recorded)
    assert pauses(own.caught_up()) == 1


def test_several_processes_wait_and_pause_equally_often(events):
    made, recorded = events
    made += [Event(3), Event(5)]
    own = Pace(GPU, World(rank=1, size=2))
    assert pauses(own.caught_up()) == 0
    assert pauses(own.caught_up()) == 0
    assert all(event.waited for event in recorded)


def test_a_cpu_is_never_behind():
    own = Pace(torch.device("cpu"), World())
    assert pauses(own.kept()) == 0
    assert pauses(own.caught_up()) == 0


def test_only_who_never_shared_was_alone():
    company = Company()
    assert company.mean == 1
    for runs in (1, 1, 1, 1):
        company.add(runs)
    assert company.mean == 1
    company.add(2)
    assert company.mean == 1.2
    for _ in range(1000):
        company.add(1)
    assert company.mean == 1.01
    crowd = Company()
    for runs in (4, 4, 4, 3):
        crowd.add(runs)
    assert crowd.mean == 3.75


def test_what_takes_long_now_and_then_is_no_rule():
    typical = Typical()
    assert typical.seconds == 0
    for seconds in (60.0, 0.1, 60.0, 0.1, 0.3, 0.1):
        typical.add(seconds)
    assert typical.seconds == 0.1
    for _ in range(9):
        typical.add(2.0)
    assert typical.seconds == 2.0  # the rule of late


def test_how_far_a_gpu_is_behind_is_from_issue_to_end(events, monkeypatch):
    made, _ = events
    now = 0.0

    def sleep(_):
        nonlocal now
        now += 1

    monkeypatch.setattr(pace.time, "sleep", sleep)
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    made += [Event(3), Event(2)]
    own = Pace(GPU, World())
    assert pauses(own.kept()) == 0
    assert own.behind.seconds == 0
    now = 10.0
    assert pauses(own.caught_up()) == 3 + 2
    assert own.behind.seconds == 5  # of 13, since 0, and 5, since 10
