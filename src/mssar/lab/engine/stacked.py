"""Runs whose networks are trained as one (``stack``), step by step together.  G runs, n batch.

Each run is a :class:`Training` as ever, with a folder, checkpoints and a record of its own. In the
place of a learner and an examiner it has a :class:`Member`: whoever comes to a step or a test first
takes it for all, and the others find it taken.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mssar.lab.engine.checkpoint import Progress
from mssar.lab.engine.clock import Typical
from mssar.lab.engine.examine import Examiner, Score, scored, tally
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.failure import DivergedError
from mssar.lab.engine.feed import ArraysFeed
from mssar.lab.engine.pace import Company
from mssar.lab.engine.stack import Stack
from mssar.lab.engine.step import Learner
from mssar.lab.engine.world import World
from mssar.lab.recipes import Recipe

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

    from mssar.lab.engine.training import Training


class Feeds:
    """The batches of all runs, side by side."""

    loads = False

    def __init__(self, feeds: Sequence[ArraysFeed], channels: int) -> None:
        first = feeds[0]
        for feed in feeds:
            if (feed.sizes, feed.tests, feed.size) != (first.sizes, first.tests, first.size):
                raise ValueError("runs on data of different sizes cannot be trained as one")
        self.feeds, self.channels = feeds, channels
        self.sizes, self.totals, self.tests = first.sizes, first.totals, first.tests

    def begin(self, epoch: int, step: int) -> None:
        for feed in self.feeds:
            feed.begin(epoch, step)

    def load(self, step: int) -> None:
        """It is there."""

    def take(self, counter: Int64[Tensor, ""], size: int) -> tuple[Tensor, Tensor]:
        """n channels H W, and labels n G."""
        return self._beside([feed.take(counter, size) for feed in self.feeds])

    def begin_test(self) -> None:
        """It is there."""

    load_test = load

    def take_test(self, step: int) -> tuple[Tensor, Tensor]:
        taken: dict[int, tuple[Tensor, Tensor]] = {}  # a data set is read once
        for feed in self.feeds:
            if id(feed.resident) not in taken:
                taken[id(feed.resident)] = feed.take_test(step)
        return self._beside([taken[id(feed.resident)] for feed in self.feeds])

    def unreadable(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def _beside(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        images = [x for x, _ in batches]
        n, _, height, width = images[0].shape
        if empty := self.channels - sum(x.shape[1] for x in images):
            images.append(images[0].new_zeros(n, height, width, empty).permute(0, 3, 1, 2))
        return torch.cat(images, 1), torch.stack([y for _, y in batches], 1)


class Heads:
    """Whose logits are whose: networks with as many classes are judged in one go."""

    def __init__(self, classes: Sequence[int]) -> None:
        self.classes = classes
        self.groups = [(d, len(list(alike))) for d, alike in groupby(classes)]

    def losses(
        self, logits: Float[Tensor, "n _"], y: Int64[Tensor, "n G"], smoothing: float
    ) -> tuple[Float[Tensor, " G"], Int64[Tensor, " G"]]:
        """Of each network the sum of a batch's losses, and how many are wrong."""
        sums, wrong, at = [], [], 0
        parts = logits.split([d * count for d, count in self.groups], 1)
        for (d, count), part in zip(self.groups, parts, strict=True):
            own, labels = part.reshape(-1, d), y[:, at : at + count].reshape(-1)
            found = F.cross_entropy(own, labels, reduction="none", label_smoothing=smoothing)
            sums.append(found.view(-1, count).sum(0))
            wrong.append((own.argmax(1) != labels).view(-1, count).sum(0))
            at += count
        return torch.cat(sums), torch.cat(wrong)


class StackLearner(Learner):
    """The step of all networks."""

    def __init__(
        self,
        networks: Sequence[nn.Module],
        feeds: Sequence[ArraysFeed],
        classes: Sequence[int],
        recipe: Recipe,
        execution: Execution,
    ) -> None:
        self.stack, self.heads = Stack(networks), Heads(classes)
        feed, count = Feeds(feeds, self.stack.channels), (self.stack.count,)
        super().__init__(self.stack.network, feed, recipe, execution, World(), stacked=count)
        self.shared = self.stack.masks()
        # By how gradients lie, which may differ between an epoch's batches and its last one. None
        # is ever let go: a CUDA graph reads them wherever they are.
        self.masks: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
        self.examiner = StackExaminer(self.stack.network, feed, self.heads, execution)
        self.begun: tuple[int, int] | None = None  # the epoch, and the step that it went on from
        self.done = 0  # steps of it
        self.examined: int | None = None  # the epoch of the last test
        self.testing: Iterator[None] = iter(())

    def _judged(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads.losses(logits, y, self.smoothing)

    def _differentiated(self) -> None:
        grads = [p.grad for p, _ in self.shared if p.grad is not None]
        laid = tuple(grad.stride() for grad in grads)
        if laid not in self.masks:  # as gradients lie, or each pair would be a launch of its own
            pairs = zip(grads, self.shared, strict=True)
            self.masks[laid] = [torch.empty_like(grad).copy_(mask) for grad, (_, mask) in pairs]
        torch._foreach_mul_(grads, self.masks[laid])


class StackExaminer(Examiner):
    """The test of all networks."""

    def __init__(self, model: nn.Module, feed: Feeds, heads: Heads, execution: Execution) -> None:
        super().__init__(model, feed, max(heads.classes), execution, World())
        self.heads = heads
        self.sums = self.sums.repeat(len(heads.classes), 1, 1)

    @torch.no_grad()
    def _body(self, step: int) -> None:
        x, y = self.feed.take_test(step)
        with self.execution.autocast():
            logits = self.model(x).float().split(list(self.heads.classes), 1)
        for own, labels, sums in zip(logits, y.unbind(1), self.sums, strict=True):
            sums[:, : own.shape[1]] += tally(own, labels, self.numbers[: own.shape[1]])

    def score_of(self, which: int) -> Score:
        return scored(self.sums[which, :, : self.heads.classes[which]].cpu())


class Member:
    """One run's place: its learner and its examiner."""

    def __init__(self, learner: StackLearner, feed: ArraysFeed, which: int) -> None:
        self.all, self.feed, self.which = learner, feed, which

    @property
    def losses(self) -> Tensor:
        return self.all.losses[self.which]

    @property
    def wrong(self) -> Tensor:
        return self.all.wrong[self.which]

    def state(self) -> dict[str, Tensor]:
        """As :meth:`Learner.state` has it for a network alone."""
        kinds = defaultdict[str, dict[str, Tensor]](dict)  # "model" and "momentum"
        for name, tensor in self.all.state().items():
            kind, _, own = name.partition(".")
            kinds[kind][own] = tensor
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in kinds.items()
            for name, tensor in self.all.stack.parts(self.which, tensors).items()
        }

    def buffers(self) -> list[Tensor]:
        """None that other processes would have to be told of: there are no others."""
        return []

    def begin(self, epoch: int, step: int, lr: float) -> None:
        if self.all.begun != (epoch, step):
            self.all.begin(epoch, step, lr)
            self.all.begun, self.all.done = (epoch, step), step

    def set_lr(self, lr: float) -> None:
        self.all.set_lr(lr)

    def step(self, step: int) -> None:
        if step == self.all.done:
            self.all.step(step)
            self.all.done += 1

    def run(self) -> Iterator[None]:
        if self.all.examined != self.all.epoch:
            self.all.examined = self.all.epoch
            self.all.testing = self.all.examiner.run()
        for _ in self.all.testing:  # from where another has paused in it
            yield

    def score(self) -> Score:
        return self.all.examiner.score_of(self.which)


class StackedTrainings:
    """Trainings of one stack, in the place of one: at a pause each is where the others are."""

    def __init__(self, trainings: list[Training]) -> None:
        self.trainings, self.leader = trainings, trainings[0]
        self.lane = self.leader.lane
        self.company = Company()
        self.turns, self.saves = Typical(), Typical()
        for training in trainings:
            training.company = self.company

    @property
    def stream(self) -> AbstractContextManager[object]:
        return self.leader.stream

    @property
    def progress(self) -> Progress:
        return self.leader.progress

    @property
    def position(self) -> tuple[int, int]:
        return self.leader.position

    @property
    def behind(self) -> float:
        return self.leader.behind

    @property
    def left(self) -> float:
        return self.leader.left

    @property
    def saved(self) -> bool:
        return all(training.saved for training in self.trainings)

    def save(self) -> None:
        """All of them, although the folder of one cannot be written."""
        trouble: OSError | None = None
        with self.saves.timed():
            for training in self.trainings:
                try:
                    training.save()
                except OSError as error:
                    trouble = error
            if trouble:
                raise trouble

    def work(self) -> Iterator[None]:
        """Until all have ended. If the folder of one cannot be written, the others are kept."""
        try:
            yield from self._work()
        except OSError:
            self._keep()
            raise

    def _work(self) -> Iterator[None]:
        for training in self.trainings:
            training.since = time.monotonic()
        first, *others = [training.work() for training in self.trainings]
        for _ in first:
            for training, work in zip(self.trainings[1:], others, strict=True):
                while training.position < self.leader.position:
                    next(work)
            yield
        for work in others:
            for _ in work:
                pass

    def _keep(self) -> None:
        """Whoever has counted all steps that the networks have taken."""
        member = self.leader.learner
        assert isinstance(member, Member)
        for training in self.trainings:
            if not training.saved and training.progress.step == member.all.done:
                with suppress(OSError, DivergedError):
                    training.save()

    def close(self) -> None:
        for training in self.trainings:
            training.close()
