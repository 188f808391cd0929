"""A run on its way from nothing, or from a checkpoint, to a record."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from mssar.durable import write_whole
from mssar.lab.data import Data
from mssar.lab.data.imagefolder import Folder
from mssar.lab.engine import checkpoint, failure, provenance, result, resumption, threads
from mssar.lab.engine.clock import Tempo, Typical
from mssar.lab.engine.examine import Examiner, Score
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.failure import DivergedError
from mssar.lab.engine.feed import Feed, FolderFeed, Resident, arrays_feed
from mssar.lab.engine.observer import Moment, Observer
from mssar.lab.engine.pace import Company, Pace, mark, own_lane
from mssar.lab.engine.stacked import Member
from mssar.lab.engine.step import Learner
from mssar.lab.engine.world import World
from mssar.lab.recipes import Photographs
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run

CHUNK = 16  # steps that a GPU is given at a time
TICK = 0.5  # seconds between looks at the loss
LOOK = 48  # steps between them, where several processes look


def throw_away(directory: Path) -> None:
    """What a run left that is to begin anew."""
    checkpoint.discard(directory, result.NAME, failure.NAME, "events.out.tfevents.*")


class Training:
    """A run's network, data and folder, for as long as it is trained.

    :meth:`work` pauses every few steps; at every pause :meth:`save` may be called, and a training
    opened on that folder later goes on from there. ``share`` is how many threads of a CPU it begins
    with, if that was not asked for; 0: what suits it.
    """

    def __init__(
        self,
        run: Run,
        data: Data,
        execution: Execution,
        directory: Path,
        observer: Observer,
        *,
        world: World | None = None,
        resident: dict[object, Resident] | None = None,
        lane: torch.cuda.Stream | None = None,
        anew: bool = False,
        member: Member | None = None,
        share: int = 0,
    ) -> None:
        self.run, self.execution, self.directory = run, execution, directory
        self.data = run.normalised(data)
        self.observer, self.world = observer, world or World()
        self.anew = anew  # what is in the folder is thrown away, once all else is ready
        self.company = Company()
        self.since: float | None = None  # when it began, if not by itself
        self.stacked = member.all.stack.count if member else 1  # runs trained as one, with this
        self.turns, self.saves = Typical(), Typical()  # how long they take
        self.lane = lane or own_lane(execution)
        self.record: Record | None = None  # at its end, in the process that leads
        self._kept: tuple[int, int] | None = None  # epoch and step of the last save
        self._clock = self._begun = time.monotonic()
        self._images = 0  # since then
        self._pace = Pace(execution.device, self.world)
        self._asked: tuple[torch.cuda.Event, Tensor, int] | None = None
        self._resident, self._member = {} if resident is None else resident, member
        self._share = share
        self._open = ExitStack()
        made = not directory.exists()
        if self.world.leads:
            self._open.enter_context(checkpoint.held(directory))
        try:
            with self._open, self.stream:
                self._prepare()
                self._open = self._open.pop_all()
        except BaseException:
            if made:  # what did not begin leaves nothing behind
                checkpoint.abandon(directory)
            raise

    def _prepare(self) -> None:
        self.feed: Feed
        self.learner: Learner | Member
        self.examiner: Examiner | Member
        if self._member:
            self.feed, self.learner, self.examiner = self._member.feed, self._member, self._member
        else:
            self._prepare_alone()
        if self.anew and self.world.leads:
            throw_away(self.directory)
        self.progress = resumption.progress(self) or checkpoint.Progress(
            self.run.as_dict(),
            self.data.checksum,
            self.execution.precision,
            str(uuid.uuid4()),
            result.now(),
        )
        self._before = Company(self.progress.turns, self.progress.beside)
        maker = provenance.maker(self.execution, self.world.size, self.stacked)
        if self.progress.makers[-1:] != [maker]:
            self.progress.makers.append(maker)
        resumption.note_norms(self)
        if self.execution.device.type == "cuda":
            torch.cuda.synchronize()  # what was made here may be used on another stream
        elif self.world.size == 1:
            self.progress.threads = self.progress.threads or self._threads()
        self._tempo = Tempo(len(self.feed.sizes))

    def _threads(self) -> int:
        """How many a run that begins is to have."""
        how, most = self.execution, threads.available()
        if how.threads or how.deterministic:  # the same on every machine, and beside other runs
            return how.threads or 1
        if self._share:
            return self._share
        if most == 1 or how.compile or not isinstance(self.learner, Learner):
            return most
        with self.learner.rehearsal() as step:
            return threads.fastest(step, most)

    def _prepare_alone(self) -> None:
        self.feed = self._feed()
        self._open.callback(self.feed.close)
        classes = len(self.data.classes)
        recipe, execution, seed = self.run.recipe, self.execution, self.run.seed
        # Of several processes the leader begins, and tells the others.
        begins = self.world.leads and (self.anew or not checkpoint.checkpoints(self.directory))
        model = self.run.begun(classes) if begins else self.run.build(classes)
        learner = Learner(model, self.feed, recipe, execution, self.world, seed)
        self.learner = learner
        self.examiner = Examiner(learner.tested, self.feed, classes, execution, self.world)

    def _feed(self) -> Feed:
        recipe, device = self.run.recipe, self.execution.device
        if isinstance(self.data, Folder):
            if not isinstance(recipe.augmentation, Photographs):
                raise ValueError(f"the recipe {recipe.name} is for small images, not photographs")
            say = self.observer.said

            # Not a method: a run that refers to itself would not be freed at its end.
            def report(path: Path, reason: str) -> None:
                say(f"{path} cannot be read and is left out: {reason}")

            return FolderFeed(self.data, recipe, self.run.seed, self.execution, self.world, report)
        return arrays_feed(self.data, self._resident, recipe, self.run.seed, device, self.world)

    @property
    def trainings(self) -> list[Training]:
        """As :class:`StackedTrainings` has several."""
        return [self]

    @property
    def position(self) -> tuple[int, int]:
        """Epochs, and steps of the next one, that are done."""
        return self.progress.epoch, self.progress.step

    @property
    def stream(self) -> AbstractContextManager[object]:
        """Within it, what is done on a GPU is done on the run's own stream, beside others."""
        return torch.cuda.stream(self.lane) if self.lane else nullcontext()

    # --- saving ---

    def save(self) -> None:
        """Keep everything, to go on from here. Every process must call it; the leader writes."""
        with self.saves.timed(), self.stream:
            losses = self._finite_losses(len(self.feed.sizes))
            wrong = self.world.sum(self.learner.wrong.clone())
            sums = {"losses": losses.to(wrong.device), "wrong": wrong}
            state = checkpoint.Brought(self.learner.state() | sums)
            self._require_good(state)
            if self.world.leads:
                self.progress.seconds += self._lap()
                company = self._company
                self.progress.turns, self.progress.beside = company.turns, company.runs
                checkpoint.write(self.directory, self.progress, state)
            self._kept = self.position
            self.world.wait()  # whoever leaves first has the others stopped

    @property
    def _company(self) -> Company:
        """Since its beginning, here and before it was stopped."""
        before, here = self._before, self.company
        return Company(before.turns + here.turns, before.runs + here.runs)

    def _require_good(self, state: checkpoint.Brought) -> None:
        """The last step may have spoilt what its own loss does not show yet."""
        spoilt = state.spoilt()
        if self.world.any(spoilt is not None, self.execution.device):
            when = f"after epoch {self.progress.epoch}, step {self.progress.step}"
            what = f"{spoilt or 'a weight'} is not finite {when}"
            raise DivergedError(what, self.run, self.directory)

    @property
    def saved(self) -> bool:
        """Whether nothing was done since."""
        return self._kept == self.position

    @property
    def left(self) -> float:
        """Seconds to its end, at the pace since it began here, in the company since then; 0 where
        nothing tells."""
        share = self._images / sum(self.feed.totals)  # epochs since then
        done = self.progress.epoch + self.progress.step / len(self.feed.sizes)
        epochs = self.run.recipe.epochs - done
        return (time.monotonic() - self._begun) / share * epochs if share else 0.0

    @property
    def behind(self) -> float:
        """Seconds that the GPU needs for what it was given: saving waits for it."""
        return self._pace.behind.seconds

    def close(self) -> None:
        self._open.close()

    # --- the loop ---

    def work(self) -> Iterator[None]:
        """Train to the end; a pause every few steps. Saves after every epoch."""
        number = self.progress.threads if self.execution.device.type == "cpu" else 0
        with closing(self._work()) as work:
            while True:
                with threads.using(number):
                    try:
                        next(work)
                    except StopIteration:
                        return
                yield

    def _work(self) -> Generator[None, None, None]:
        recipe, progress, learner = self.run.recipe, self.progress, self.learner
        steps = len(self.feed.sizes)
        resumed = bool(progress.epoch or progress.step)
        progress.interruptions += resumed
        self.observer.began(self.run, progress.epoch, self.directory)
        if recipe.batch > (images := sum(self.feed.totals)):
            batch = f"a batch of {recipe.batch:,} is more than all {images:,} images"
            self.observer.said(f"{self.run}: {batch}: an epoch is one step")
        if 0 < progress.step < steps:
            where = f"epoch {progress.epoch + 1} from step {progress.step + 1}"
            self.observer.said(f"{self.run}: goes on in {where}")
        # Of a stack all began with the first, which compiles for all.
        self._clock = self._begun = self._looked = self.since or time.monotonic()
        self._images = 0
        while progress.epoch < recipe.epochs:
            lr = recipe.lr_of(progress.epoch, steps - 1, steps)  # the last is what is recorded
            learner.begin(progress.epoch, progress.step, lr)
            self._tempo.begin(progress.step)
            for step in range(progress.step, steps):
                learner.set_lr(recipe.lr_of(progress.epoch, step, steps))
                learner.step(step)
                progress.step = step + 1
                self._images += self.feed.totals[step]
                self._tempo.step()
                yield from self._pause(step)
            yield from self._pace.caught_up()
            self._tempo.end()
            self._look(steps)
            self.world.share(learner.buffers())
            for _ in self.examiner.run():
                yield
            yield from self._pace.caught_up()
            score = self.examiner.score()
            self._close_epoch(lr, score)
            yield
        self.feed.close()
        self._finish()

    def _pause(self, step: int) -> Iterator[None]:
        if self.execution.device.type == "cuda":
            if (step + 1) % CHUNK:
                return
            yield from self._pace.kept()
        if self.world.size > 1:  # all look at the same step, for they add up their losses
            if (step + 1) % LOOK == 0:
                self._look(step + 1)
        elif time.monotonic() - self._looked > TICK:
            self._glance(step + 1)
        yield

    def _glance(self, steps: int) -> None:
        """See how the loss is. On a GPU what is asked for at one pause is read at a later one:
        waiting for it would leave the other runs without work."""
        if self.execution.device.type != "cuda":
            self._look(steps)
        elif self._asked is None:
            copy = torch.empty_like(self.learner.losses, device="cpu", pin_memory=True)
            copy.copy_(self.learner.losses, non_blocking=True)
            self._asked = (mark(), copy, steps)
        elif self._asked[0].query():
            _, copy, then = self._asked
            self._asked = None
            self._tell(self._require_finite(copy[:then]))

    def _look(self, steps: int) -> None:
        """See how the loss is now, and tell."""
        self._asked = None
        self._tell(self._finite_losses(steps))

    def _tell(self, losses: Tensor) -> None:
        self._looked = time.monotonic()
        epoch, steps, total = self.progress.epoch + 1, len(losses), len(self.feed.sizes)
        loss = float(losses[-50:].mean())
        seconds = time.monotonic() - self._begun
        left = self._left(self.run.recipe.epochs - self.progress.epoch - steps / total)
        moment = Moment(epoch, steps, total, loss, self._images, seconds, left)
        self.observer.moved(self.run, moment)

    def _finite_losses(self, steps: int) -> Tensor:
        """The epoch's losses so far; one that is not finite ends the run before it is saved."""
        return self._require_finite(self.world.sum(self.learner.losses[:steps].clone()).cpu())

    def _require_finite(self, losses: Tensor) -> Tensor:
        strange = (~losses.isfinite()).nonzero().flatten().tolist()
        if strange:
            when = f"in epoch {self.progress.epoch + 1}, step {strange[0] + 1}"
            self._diverge(float(losses[strange[0]]), when)
        return losses

    def _left(self, epochs: float) -> float:
        """Seconds for so many epochs, by what they took of late, or by the first one's steps."""
        seconds = self._tempo.seconds(epochs)
        if seconds is not None:
            return seconds
        past: list[float] = [found["seconds"] for found in self.progress.history]
        if past:
            return epochs * median(past)
        early = self._tempo.early(epochs)
        if early is not None:
            return early
        spent = self.progress.seconds + time.monotonic() - self._clock
        return epochs * spent * len(self.feed.sizes) / self.progress.step

    def _diverge(self, loss: float, when: str) -> None:
        raise DivergedError(f"the loss is {loss} {when}", self.run, self.directory)

    def _close_epoch(self, lr: float, score: Score) -> None:
        progress = self.progress
        if not math.isfinite(score.loss):
            self._diverge(score.loss, f"in the test after epoch {progress.epoch + 1}")
        totals = torch.tensor(self.feed.totals, dtype=torch.float64)
        losses = self.world.sum(self.learner.losses.double().clone()).cpu()
        wrong = self.world.sum(self.learner.wrong.double().clone()).cpu()
        epoch = Epoch(
            epoch=progress.epoch + 1,
            lr=lr,
            train_loss=float((losses * totals).sum() / totals.sum()),
            train_error=float(100 * wrong.sum() / totals.sum()),
            test_loss=score.loss,
            test_error=score.error,
            test_error5=score.error5,
            seconds=progress.seconds + self._lap(),
        )
        progress.history.append(asdict(epoch))
        progress.class_errors = list(score.class_errors)
        progress.epoch, progress.step, progress.seconds = epoch.epoch, 0, 0.0
        self.save()
        self.observer.passed(self.run, epoch, self._left(self.run.recipe.epochs - epoch.epoch))

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._clock = self._clock, time.monotonic()
        return self._clock - before

    # --- the end ---

    def _finish(self) -> None:
        unreadable = self.feed.unreadable() if self.feed.loads else None
        if not self.world.leads:
            return
        self.record = result.record(
            self.run,
            self.data,
            self.progress,
            self.execution,
            processes=self.world.size,
            together=self._company.mean,
            stacked=self.stacked,
            unreadable=unreadable,
        )
        write_whole(self.directory / result.NAME, self.record.as_line().encode() + b"\n")
        self.observer.ended(self.run, self.record)
