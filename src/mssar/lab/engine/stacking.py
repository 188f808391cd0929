"""Which runs are trained as one network, and their places in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch

from mssar.lab.data import Data
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine import checkpoint
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.feed import Resident, arrays_feed
from mssar.lab.engine.result import finished
from mssar.lab.engine.stack import obstacle
from mssar.lab.engine.stacked import Member, StackLearner
from mssar.lab.engine.world import World
from mssar.lab.run import Run


class Stacking:
    """Stacks of up to ``most`` runs: of one network and recipe, with as far to go."""

    def __init__(
        self,
        most: int,
        load: Callable[[str], Data],
        execution: Execution,
        folder: Path,
        world: World,
        anew: bool,
    ) -> None:
        if most < 1:
            raise ValueError(f"a stack has 1 network or more; got {most}")
        if most > 1 and world.size > 1:
            raise ValueError("several processes train one network at a time: leave out --stack")
        if most > 1 and execution.deterministic:
            raise ValueError(
                "networks trained as one round otherwise: leave out --stack or --deterministic"
            )
        self.most, self.load, self.execution, self.world = most, load, execution, world
        self.folder, self.anew = folder, anew
        self.alone: set[Run] = set()  # that are not stacked again
        self._known: dict[Run, bool] = {}  # whether they can be stacked

    def whole(self, run: Run, waiting: Iterable[Run]) -> int:
        """How many runs its stack would be with room enough."""
        return 1 + len(self._mates(run, waiting, self.most))

    def mates(self, run: Run, waiting: deque[Run], room: int) -> list[Run]:
        """Waiting runs, taken from the others, to be trained as one with this."""
        found = self._mates(run, waiting, min(self.most, room))
        for other in found:
            waiting.remove(other)
        # Those on one data set side by side: their losses are taken in one go.
        return sorted(found, key=lambda other: (other.dataset != run.dataset, other.dataset))

    def _mates(self, run: Run, waiting: Iterable[Run], most: int) -> list[Run]:
        if most < 2 or run in self.alone or not self._stackable(run):
            return []
        if (place := self._position(run)) is None:
            return []
        data, how = self.load(run.dataset), self.execution.of(run.name)
        found = (
            other
            for other in waiting
            if other not in self.alone
            if other.differs_in_seed_or_data(run)
            if self.execution.of(other.name) == how  # else one is compiled, the other was begun
            if self._fits(other, data, place)
        )
        return list(islice(found, most - 1))

    def _fits(self, other: Run, data: Data, place: tuple[int, int]) -> bool:
        """Whether a run has as many images and as far to go."""
        try:
            return _same_sizes(self.load(other.dataset), data) and self._position(other) == place
        except (ValueError, OSError):  # of its data or its folder: said when its own turn comes
            return False

    def members(self, runs: Sequence[Run], resident: dict[object, Resident]) -> list[Member]:
        """Their places in one network, each begun as it would be by itself."""
        device, recipe = self.execution.device, runs[0].recipe
        networks, feeds, classes = [], [], []
        for run in runs:
            data = run.normalised(self.load(run.dataset))
            assert isinstance(data, Arrays)
            classes.append(len(data.classes))
            networks.append(run.begun(classes[-1]))
            feeds.append(arrays_feed(data, resident, recipe, run.seed, device, self.world))
        how = self.execution.of(runs[0].name)
        learner = StackLearner(networks, feeds, classes, recipe, how)
        return [Member(learner, feed, which) for which, feed in enumerate(feeds)]

    def split(self, runs: Sequence[Run], waiting: deque[Run]) -> None:
        """Have runs go on by themselves, before all others."""
        for run in reversed(runs):
            self.alone.add(run)
            waiting.appendleft(run)

    def _stackable(self, run: Run) -> bool:
        if run not in self._known:
            data = self.load(run.dataset)
            self._known[run] = isinstance(data, Arrays) and not run.recipe.ema
            if self._known[run]:
                with torch.device("meta"):
                    self._known[run] = obstacle([run.build(len(data.classes))]) is None
        return self._known[run]

    def _position(self, run: Run) -> tuple[int, int] | None:
        """Where a run goes on; None if it is finished."""
        directory = self.folder / run.name
        if self.anew:
            return 0, 0
        if finished(directory):
            return None
        found = checkpoint.newest(directory, lambda _: None)
        return (found[0].epoch, found[0].step) if found else (0, 0)


def _same_sizes(one: Data, other: Data) -> bool:
    """Whether data sets have as many images, and of one size."""
    if not (isinstance(one, Arrays) and isinstance(other, Arrays)):
        return False
    return all(
        a.images.shape == b.images.shape
        for a, b in ((one.train, other.train), (one.test, other.test))
    )
