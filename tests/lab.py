"""A laboratory in miniature: tiny data, tiny runs, and an observer that keeps all it is told.

N images of 8×8; what class one is of shows in which quarter of it is bright.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from mssar.lab import cli, data
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine import checkpoint
from mssar.lab.engine.clock import Clock
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.feed import ArraysFeed, Resident
from mssar.lab.engine.observer import Moment
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import Training
from mssar.lab.engine.world import World, joined
from mssar.lab.recipes import Crops, Recipe, varied
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run

CPU = Execution(torch.device("cpu"))
# 37 images: an epoch is batches of 16, 16 and 5. The learning rate drops after the first.
TINY = Recipe("tiny", epochs=2, batch=16, lr=0.02, drops=(1,), augmentation=Crops(padding=1))


def split(count: int, classes: int = 4, seed: int = 0, strength: int = 120) -> Split:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    images = torch.randint(0, 256 - strength, (count, 8, 8, 3), generator=draw, dtype=torch.uint8)
    for number, label in enumerate(labels.tolist()):
        top, left = 4 * (label % 2), 4 * (label // 2 % 2)
        images[number, top : top + 4, left : left + 4, label // 4] += strength
    return Split(images, labels)


def arrays(train: int = 37, test: int = 24, classes: int = 4, **kinds: Any) -> Arrays:
    first, second = split(train, classes, 0, **kinds), split(test, classes, 1, **kinds)
    pixels = first.images.double().flatten(0, 2)
    mean, std = (tuple(v.tolist()) for v in (pixels.mean(0), pixels.std(0)))
    return Arrays("tiny", tuple(map(str, range(classes))), first, second, mean, std)


def plant(root: Path, size: tuple[int, int], **splits: tuple[int, int]) -> Path:
    """A tree of photographs: so many bright and dark ones of each split."""
    draw = np.random.default_rng(0)
    for split, counts in splits.items():
        for name, base, count in zip(("bright", "dark"), (200, 10), counts, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(base, base + 45, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def tiny(seed: int = 0, recalibration: str = "none", **changes: Any) -> Run:
    return Run("resnet8", recalibration, {}, "tiny", varied(TINY, **changes), seed)


def feed(data: Arrays, run: Run, world: World = World()) -> ArraysFeed:  # noqa: B008, frozen
    resident = Resident(data, run.recipe.augmentation.padding, CPU.device)
    return ArraysFeed(data, resident, run.recipe, run.seed, CPU.device, world)


class Log:
    """An observer; what it was told lies in its lists."""

    def __init__(self) -> None:
        self.started: list[tuple[Run, int, Path]] = []
        self.moments: list[tuple[Run, Moment]] = []
        self.epochs: list[tuple[Run, Epoch]] = []
        self.records: list[tuple[Run, Record]] = []
        self.failures: list[tuple[Run, str]] = []
        self.messages: list[str] = []

    def began(self, run: Run, epoch: int, directory: Path) -> None:
        self.started.append((run, epoch, directory))

    def moved(self, run: Run, moment: Moment) -> None:
        self.moments.append((run, moment))

    def passed(self, run: Run, epoch: Epoch, left: float) -> None:
        assert left >= 0
        self.epochs.append((run, epoch))

    def ended(self, run: Run, record: Record) -> None:
        self.records.append((run, record))

    def failed(self, run: Run, reason: str) -> None:
        self.failures.append((run, reason))

    def said(self, message: str) -> None:
        self.messages.append(message)


@contextlib.contextmanager
def opened(
    run: Run, data: Arrays, directory: Path, log: Log | None = None, execution: Execution = CPU
) -> Iterator[Training]:
    training = Training(run, data, execution, directory, log or Log())
    with contextlib.closing(training):
        yield training


def trained(
    run: Run, data: Arrays, directory: Path, log: Log | None = None, execution: Execution = CPU
) -> Record:
    """The record of a run trained to its end, or from where it was stopped."""
    log = log or Log()
    with opened(run, data, directory, log, execution) as training:
        for _ in training.work():
            pass
    return log.records[-1][1]


def learnt(directory: Path) -> dict[str, Tensor]:
    """Weights, statistics, momentum and the last epoch's losses, from the newest checkpoint."""
    return checkpoint.load(checkpoint.checkpoints(directory)[-1])[1]


def timeless(record: Record) -> dict[str, Any]:
    """A record without what differs between two runs of the same thing."""
    found = asdict(record)
    for name in ("id", "seconds", "started", "finished", "interruptions", "command"):
        del found[name]
    del found["execution"]["together"]
    for epoch in found["epochs"]:
        del epoch["seconds"]
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def poison(after: int, seed: int, value: float = float("nan")) -> Callable[..., None]:
    """In place of Learner.step: the weights of the run of this seed are spoilt after some steps."""
    step, steps = Learner.step, 0

    def spoilt(self: Learner, number: int) -> None:
        nonlocal steps
        if self.feed.seed == seed:
            if steps == after:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(value)
            steps += 1
        step(self, number)

    return spoilt


@contextlib.contextmanager
def one_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time budget that is used up when a step was taken, however fast or slow the machine."""
    step, taken = Learner.step, list[int]()

    def counted(self: Learner, number: int) -> None:
        step(self, number)
        taken.append(number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", counted)
        patch.setattr(Clock, "expired", lambda *_: bool(taken))
        yield


@contextlib.contextmanager
def program(code: str, *words: object, quiet: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own, which finds this module; killed if it is still there."""
    paths = [str(Path(__file__).parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        env=env,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


class Crew:
    """Processes that train together, as torchrun would start them; they live for several tests."""

    def __init__(self, size: int) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        context = get_context("spawn")
        self.lines: list[Connection] = []
        self.members = []
        for rank in range(size):
            here, there = context.Pipe()
            member = context.Process(target=_serve, args=(there, rank, size, port), daemon=True)
            member.start()
            there.close()
            self.lines.append(here)
            self.members.append(member)

    def __call__(self, job: Callable[..., Any], *words: Any) -> list[Any]:
        """What the job, called with the world and some words, returns in every process."""
        for line in self.lines:
            line.send((job, words))
        answers = []
        for line in self.lines:
            assert line.poll(120), "no answer"
            answers.append(pickle.loads(line.recv_bytes()))
        for good, answer in answers:
            assert good, answer
        return [answer for _, answer in answers]

    def close(self) -> None:
        for line, member in zip(self.lines, self.members, strict=True):
            with contextlib.suppress(OSError):
                line.send(None)
            member.join(20)
            if member.is_alive():
                member.kill()
                member.join()
            member.close()
            line.close()


def _serve(line: Connection, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with joined(CPU.device) as world:
        while (task := line.recv()) is not None:
            job, words = task
            try:
                answer = True, job(world, *words)
            except Exception:
                answer = False, traceback.format_exc()
            line.send_bytes(pickle.dumps(answer))


def tiny_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data set is tiny, in this process and in those that it starts."""
    made = arrays(37, 24, 10)
    monkeypatch.setattr(data, "load", lambda _name, _data_dir=None: made)
    here = Path(__file__).parent
    paths = [here / "tiny", here, here.parent / "src", os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def tiny_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to work in, with tiny data sets."""
    tiny_everywhere(monkeypatch)
    monkeypatch.chdir(tmp_path)


def run_command(*words: str) -> str:
    """What a command prints that ends well."""
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output
