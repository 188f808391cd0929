"""Power cuts: what a program did to the disk is written down, and the power cut after every call.

What may then be left, by :mod:`faults.disk_model`, is read by the program itself: always the state
before or the state after, and the state after once the program was told that it is done.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from faults import samples
from faults.calls import Call, Watcher, watched
from faults.disk_model import Disk, lay, seen
from faults.suite import Row, share
from mssar.durable import write_whole
from mssar.lab import lines
from mssar.lab.data import cifar, fetch
from mssar.lab.engine import checkpoint

STATES = 200  # that are tried after a call, at most

Forgotten = Callable[[Call], bool]  # what the program might have forgotten to call


@dataclass(frozen=True)
class Scene:
    """What is done, step by step, in a folder; and how to see how much of it is there.

    ``look`` says how many steps a folder shows, or raises where it shows anything else.
    """

    name: str
    prepare: Callable[[Path], None]
    steps: list[Callable[[Path], Any]]
    look: Callable[[Path], int]


# --- a run's checkpoints: in a new folder, the oldest let go ---


def _progress(epoch: int) -> checkpoint.Progress:
    return checkpoint.Progress({"network": "x"}, "sha256:0", "fp32", "id", "now", epoch=epoch)


def _tensors(epoch: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(300.0) + epoch, "counter": torch.tensor(epoch)}


def _save(epoch: int) -> Callable[[Path], Any]:
    brought = checkpoint.Brought(_tensors(epoch))
    return lambda root: checkpoint.write(root / "runs" / "run", _progress(epoch), brought)


def _newest(root: Path) -> int:
    said: list[str] = []
    found = checkpoint.newest(root / "runs" / "run", said.append)
    if said:
        raise ValueError(said[0])
    if found is None:
        return 0
    progress, tensors = found
    for name, expected in _tensors(progress.epoch).items():
        if not torch.equal(tensors[name], expected):
            raise ValueError(f"{name} is not what it was in epoch {progress.epoch}")
    return progress.epoch


# --- a file of lines, in a new folder; what is lacking is added again ---

LINES = [f'{{"id":"{n}","epochs":"{"x" * 700}"}}' for n in range(3)]


def _append(number: int) -> Callable[[Path], Any]:
    return lambda root: lines.append(
        root / "new" / "records.jsonl", LINES[number], unless=f'"id":"{number}"'
    )


def _lines(root: Path) -> int:
    path = root / "new" / "records.jsonl"
    found = list(lines.read(path, "record", str))
    if found != LINES[: len(found)]:
        raise ValueError("lines are lost, or half there")
    for number in range(len(LINES)):  # as a run that goes on does
        _append(number)(root)
    if list(lines.read(path, "record", str)) != LINES:
        raise ValueError("lines are lost or doubled when it goes on")
    return len(found)


# --- a page in place of another ---

PAGES = [b"the page before" * 40, b"the page after" * 60, b"the page after that" * 30]


def _page(root: Path) -> int:
    return PAGES.index((root / "report.html").read_bytes())


# --- a data set, from its archive to its folder ---


def _fetched(root: Path) -> None:
    (root / f"{samples.layout().forms[0].archive}.part").write_bytes(samples.archive())


def _data(root: Path) -> int:
    found = cifar.find("cifar10", root)
    if found is None:
        part = root / f"{samples.layout().forms[0].archive}.part"
        if part.read_bytes() != samples.archive():
            raise ValueError("neither the data set nor its archive is there")
        return 0
    if not samples.are_whole(root):
        raise ValueError("half a data set has the name of a whole one")
    return 1


SCENES = [
    Scene("checkpoints", lambda _: None, [_save(n) for n in (1, 2, 3, 4)], _newest),
    Scene("records", lambda _: None, [_append(n) for n in range(3)], _lines),
    Scene(
        "a page",
        lambda root: write_whole(root / "report.html", PAGES[0]),
        [
            lambda root: write_whole(root / "report.html", PAGES[1]),
            lambda root: write_whole(root / "report.html", PAGES[2]),
        ],
        _page,
    ),
    Scene("a data set", _fetched, [lambda root: fetch.get("cifar10", root)], _data),
]


def traced(scene: Scene, root: Path) -> tuple[Disk, list[Call], list[int]]:
    """The disk before, all calls, and how many there were after each step."""
    scene.prepare(root)
    disk, watcher, ends = Disk(root), Watcher(), []
    with watched(root, watcher):
        for step in scene.steps:
            step(root)
            ends.append(len(watcher.calls))
    return disk, watcher.calls, ends


def cut(
    scene: Scene, most: int, draw: random.Random, forgotten: Forgotten = lambda _: False
) -> Iterator[str | None]:
    """For every state after every call: None, or what is wrong with it."""
    with tempfile.TemporaryDirectory() as temporary, samples.installed():
        root, place = Path(temporary, "disk").resolve(), Path(temporary, "after")
        root.mkdir()
        disk, calls, ends = traced(scene, root)
        for number in range(len(calls) + 1):
            if number and not forgotten(calls[number - 1]):
                disk.make(calls[number - 1])
            returned = sum(end <= number for end in ends)
            tried = set()
            for tree in disk.after_a_cut(most, draw):
                key = hash(tuple(tree.items()))
                if key in tried:
                    continue
                tried.add(key)
                place.mkdir()
                lay(tree, place)
                last = f"call {number}, {calls[number - 1] if number else 'none yet'}"
                yield _judged(scene, place, returned, last)
                shutil.rmtree(place)
        if disk.now() != seen(root):  # a call went by unseen
            yield f"{scene.name}: the calls seen do not make what is there"


def _judged(scene: Scene, place: Path, returned: int, last: str) -> str | None:
    there = sorted(seen(place))
    try:
        found = scene.look(place)
    except Exception as error:
        return f"{scene.name}, cut after {last}: {error}; {there}"
    if found not in (returned, returned + 1):
        return f"{scene.name}, cut after {last}: {found} of {returned} steps are there; {there}"
    return None


def check(effort: float, seed: int) -> Iterator[Row]:
    for scene in SCENES:
        yield _row(scene, share(STATES, effort, least=20), random.Random(f"{seed} {scene.name}"))


def _row(scene: Scene, most: int, draw: random.Random) -> Row:
    tried = wrong = 0
    for trouble in cut(scene, most, draw):
        tried += 1
        if trouble:
            wrong += 1
            if wrong <= 3:
                print(f"power: {trouble}", file=sys.stderr)
    return Row(
        f"power cut in writing {scene.name}",
        "the state before or after; after, once it returned",
        tried,
        wrong,
    )
