"""One test of a network: on a GPU a CUDA graph.  n batch, D classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mssar.lab.engine.capture import captured
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.feed import Feed
from mssar.lab.engine.world import World

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


@dataclass(frozen=True)
class Score:
    """A test's outcome; errors in per cent."""

    loss: float
    error: float
    error5: float
    class_errors: tuple[float, ...]


class Examiner:
    """The test of a network on all test images, over all processes."""

    def __init__(
        self, model: nn.Module, feed: Feed, classes: int, execution: Execution, world: World
    ) -> None:
        self.model, self.feed = model, feed
        self.execution, self.world = execution, world
        # for every class: images, wrong at first, not among five, sum of losses
        self.sums = torch.zeros(4, classes, dtype=torch.float64, device=execution.device)
        self.numbers = torch.arange(classes, device=execution.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> Iterator[None]:
        """Test, with a pause after every batch; where data live on the device, in one go."""
        was = self.model.training
        self.model.eval()
        try:
            if self.execution.graphed and self.world.size == 1 and not self.feed.loads:
                if self._graph is None:
                    self._graph = self._capture()
                self._graph.replay()
                return
            self.sums.zero_()
            self.feed.begin_test()
            for step in range(len(self.feed.tests)):
                self.feed.load_test(step)
                if self.feed.tests[step]:
                    self._body(step)
                yield
        finally:
            self.model.train(was)

    def score(self) -> Score:
        """The outcome; waits for the device."""
        return scored(self.world.sum(self.sums.clone()).cpu())

    @torch.no_grad()
    def _body(self, step: int) -> None:
        x, y = self.feed.take_test(step)
        with self.execution.autocast():
            logits = self.model(x)
        self.sums += tally(logits.float(), y, self.numbers)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for step in {size: step for step, size in enumerate(self.feed.tests)}.values():
            self._body(step)
        with captured(graph):
            self.sums.zero_()
            for step in range(len(self.feed.tests)):
                self._body(step)
        return graph


def tally(
    logits: Float[Tensor, "n D"], y: Int64[Tensor, " n"], classes: Int64[Tensor, " D"]
) -> Float[Tensor, "4 D"]:
    """Images of each class, those wrong at first, those not among five, sums of their losses."""
    losses = F.cross_entropy(logits, y, reduction="none")
    guesses = logits.topk(min(5, logits.shape[1]), 1).indices
    right = guesses == y[:, None]
    rows = torch.stack(
        [torch.ones_like(losses), 1.0 - right[:, 0].float(), 1.0 - right.any(1).float(), losses]
    )
    return rows.double() @ (y[:, None] == classes).double()


def scored(sums: Float[Tensor, "4 D"]) -> Score:
    """A test's outcome from what ``tally`` added up."""
    count, wrong, wrong5, loss = sums
    if not count.sum():
        raise ValueError("no test image could be read")
    by_class = 100 * wrong / count.clamp(min=1)
    return Score(
        float(loss.sum() / count.sum()),
        float(100 * wrong.sum() / count.sum()),
        float(100 * wrong5.sum() / count.sum()),
        tuple(by_class.tolist()),
    )
