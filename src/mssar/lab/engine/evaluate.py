"""The error of a run's network on its test images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mssar.lab.data import Data
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine.checkpoint import Progress, load, newest
from mssar.lab.engine.examine import Examiner, Score
from mssar.lab.engine.execution import Execution, settings
from mssar.lab.engine.feed import ArraysFeed, Feed, FolderFeed, Resident
from mssar.lab.engine.pace import own_lane
from mssar.lab.engine.world import World
from mssar.lab.run import Run, run_from_dict
from mssar.networks import weights
from mssar.networks.sharing import WEIGHTS
from mssar.surgery.foreign import hollow, is_foreign, require_room
from mssar.surgery.heads import classes, head

LARGEST = 10_000  # pixels of a side


@dataclass(frozen=True)
class Trained:
    """A run as its last checkpoint has it, or a file of its weights, which has a note."""

    run: Run
    progress: Progress
    model: nn.Module
    note: dict[str, Any] | None = None

    @property
    def classes(self) -> int:
        """How many it tells apart."""
        return classes(self.model)

    def noted(self, test: Split) -> Arrays:
        """Its data set as the note knows it: names and colours, with these test images alone."""
        assert self.note
        mean, std = (tuple(255 * value for value in self.note[name]) for name in ("mean", "std"))
        none = Split(test.images[:0], test.labels[:0])
        return Arrays(self.run.dataset, tuple(self.note["classes"]), none, test, mean, std)


def trained(
    directory: Path,
    say: Callable[[str], None] = lambda message: None,  # noqa: ARG005
) -> Trained:
    """The network of a run's folder, from its last checkpoint, or of one checkpoint file, or of a
    file or folder of weights, or of weights that come with the package, by their name."""
    directory = weights.located(directory)
    if (shared := directory / WEIGHTS).is_file():
        directory = shared
    if not directory.exists():
        raise ValueError(
            f"there is no {directory}; a run's folder is what `mssar train` names, and there are "
            f"weights by the names {', '.join(weights.PRETRAINED)}"
        )
    if directory.is_file() and (published := _published(directory)):
        return published
    found = load(directory) if directory.is_file() else newest(directory, say)
    if found is None:
        raise ValueError(f"{directory} holds no checkpoint; name a run's folder, as in runs/…")
    progress, tensors = found
    state = weights.of_checkpoint(tensors)
    with _naming(directory):
        run = run_from_dict(progress.run)
        last = state.get(f"{_head(run)}.weight")
        if last is None or last.ndim < 2:
            raise ValueError("no network of mssar is in it")
        require_room(run.network, state, num_classes=len(last))
        model = run.build(len(last))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{directory} does not fit {run.label}: {reason:.200}") from None
    return Trained(run, progress, model)


def _head(run: Run) -> str:
    if not is_foreign(run.network):
        return "fc"
    return head(hollow(run.network))  # whatever is inserted, and however many classes there are


def _published(path: Path) -> Trained | None:
    """What ``mssar weights`` wrote; None if this is something else."""
    try:
        found = weights.read(path)
    except ValueError:
        return None
    if found.note is None or "run" not in found.note:
        return None
    try:
        progress = Progress(
            **{name: found.note[name] for name in ("run", "data", "epoch")},
            precision="",
            id=found.note["record"],
            started="",
        )
    except KeyError as error:
        raise ValueError(f"{path}: its note lacks {error}") from None
    with _naming(path):
        _check_note(found.note)
        run = run_from_dict(progress.run)
        require_room(run.network, found.tensors, num_classes=found.classes or 0)
        model = run.build(found.classes or 0)
    found.put(model)
    return Trained(run, progress, model, found.note)


def _check_note(note: dict[str, Any]) -> None:
    """What pictures need of it; see :func:`mssar.lab.engine.weights.file`."""
    for name, kind, allowed in (
        ("classes", str, lambda found: True),  # noqa: ARG005
        ("size", int, lambda found: len(found) == 3 and 0 < min(found) <= max(found) <= LARGEST),
        ("mean", float, lambda found: len(found) == 3 and all(map(math.isfinite, found))),
        ("std", float, lambda found: len(found) == 3 and 0 < min(found) <= max(found) < math.inf),
    ):
        found = note.get(name)
        if not isinstance(found, list) or not all(type(one) is kind for one in found):
            raise ValueError(f"its note has no {name}, a list of {kind.__name__}")
        if not allowed(found):
            raise ValueError(f"its note has {name} {found!r:.60}")
    if type(note["epoch"]) is not int or not isinstance(note["data"], str):
        raise ValueError("its note has no epoch, or no data")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever is wrong with what a file says of its network, in one line that names the file."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} holds no network that can be built: {reason:.200}") from None


def evaluate(
    chosen: Trained,
    data: Data,
    execution: Execution,
    say: Callable[[str], None] = lambda message: None,  # noqa: ARG005
) -> Score:
    """Its score on a data set's test images."""
    if len(data.classes) != chosen.classes:
        raise ValueError(
            f"{chosen.run.label} was trained for {chosen.classes} classes; "
            f"{data.name} has {len(data.classes)}"
        )
    data = chosen.run.normalised(data)
    recipe, world, device = chosen.run.recipe, World(), execution.device
    lane = own_lane(execution)  # a graph is captured on any stream but the default one
    with settings(execution), torch.cuda.stream(lane) if lane else nullcontext():
        feed: Feed
        if isinstance(data, Arrays):
            feed = ArraysFeed(data, Resident(data, 0, device), recipe, 0, device, world)
        else:
            feed = FolderFeed(
                data, recipe, 0, execution, world, lambda path, why: say(f"{path}: {why}")
            )
        model = chosen.model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        examiner = Examiner(model, feed, len(data.classes), execution, world)
        try:
            for _ in examiner.run():
                pass
            return examiner.score()
        finally:
            feed.close()
