"""Sweeps for tests, of runs that nobody trains."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from lab import arrays, tiny, trained

from mssar.durable import write_whole
from mssar.lab import records
from mssar.lab.cluster import sweep
from mssar.lab.cluster.sweep import Order, Sweep
from mssar.lab.records import Record
from mssar.lab.run import Run

HOW = {"device": "cpu", "precision": "fp32", "threads": 1}


def begun(place: Path, *shares: list[Run], **more: object) -> Sweep:
    files = {run.name: str(place / "all.jsonl") for share in shares for run in share}
    return sweep.begin(Order(["train", "resnet8"], str(place / "runs"), files, HOW, **more), shares)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return trained(tiny(epochs=1), arrays(), tmp_path_factory.mktemp("run"))


def finish(made: Sweep, run: Run, record: Record, **changes: object) -> Record:
    """As if it had been trained."""
    done = replace(record, **{"run": run.as_dict(), "id": f"of seed {run.seed}", **changes})
    place = Path(made.order.runs) / run.name / "record.json"
    write_whole(place, done.as_line().encode() + b"\n")
    return done


def seeds(path: Path) -> list[int]:
    return sorted(record.run["seed"] for record in records.read(path))


def runs(count: int) -> list[Run]:
    return [tiny(seed, epochs=1) for seed in range(count)]


@contextmanager
def held(made: Sweep, task: int) -> Iterator[None]:
    """By somebody else."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with made.taken(task):
            inside.set()
            done.wait(20)

    other = threading.Thread(target=hold)
    other.start()
    inside.wait(20)
    try:
        yield
    finally:
        done.set()
        other.join()
