"""One step of gradient descent: on a GPU a CUDA graph.  n batch, D classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mssar.lab.engine.average import Average
from mssar.lab.engine.blocks import Compiled, repeated
from mssar.lab.engine.capture import captured
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.feed import Feed, generator
from mssar.lab.engine.world import World, synchronise_norms
from mssar.lab.recipes import Recipe
from mssar.lab.run import GENERATOR

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

WARM_UP = 3  # steps before a capture: libraries set themselves up in the first ones


class Learner:
    """A network, its momentum, perhaps its average, and the step that changes them.

    Learning rate, step counter and the losses of an epoch live on the device: a step never waits
    for the host, nor the host for a step. ``seed`` is for networks that drop at random; of a
    ``stacked`` network there are so many losses.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        recipe: Recipe,
        execution: Execution,
        world: World,
        seed: int | None = None,
        stacked: tuple[int, ...] = (),
    ) -> None:
        device, shape = execution.device, (*stacked, len(feed.sizes))
        self.feed, self.execution, self.world = feed, execution, world
        if world.size > 1 and execution.sync_bn:
            model = synchronise_norms(model, device)
        self.model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.lr, self._rate = torch.zeros((), device=device), 0.0
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(shape, device=device)  # means over the global batch
        self.wrong = torch.zeros(shape, dtype=torch.int64, device=device)
        self.optimiser = torch.optim.SGD(
            decaying(self.model, recipe.decay),
            lr=self.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        if recipe.momentum:  # from zero the first step is what it would be without a buffer
            for p in self.model.parameters():
                self.optimiser.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.smoothing, self.average = recipe.smoothing, None
        if recipe.ema:
            self.average = Average(self.model, recipe.ema)
        self.seed = seed if drops(self.model) else None
        self.epoch = 0
        self.blocks = self._compiled_blocks()
        self.forward = self._wrapped()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _compiled_blocks(self) -> Compiled | None:
        """Where a graph hides what calling them one by one costs, and they repeat."""
        found = repeated(self.model) if self.execution.compile and self.graphed else []
        return Compiled(found, dynamic=False) if found else None

    def _wrapped(self) -> Callable[[Tensor], Tensor]:
        forward: Any = self.model
        if self.execution.compile and not self.blocks:
            # There are two sizes of batches. A program for any size would be slower, and once the
            # last batch was met every network after it would get one.
            forward = torch.compile(forward, dynamic=False)
        if self.world.size > 1:
            on = [self.execution.device] if self.execution.device.type == "cuda" else None
            # The leader's running statistics are shared before each test; training needs none.
            names = signature(DistributedDataParallel).parameters  # torch 2.13 has a new one
            sync = (
                "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
            )
            options: dict[str, Any] = {"device_ids": on, sync: False}
            forward = DistributedDataParallel(forward, **options)
        made: Callable[[Tensor], Tensor] = forward
        return made

    @property
    def graphed(self) -> bool:
        """A graph of one process's step; gradients are averaged over processes without one."""
        return self.execution.graphed and self.world.size == 1

    @property
    def tested(self) -> nn.Module:
        """What is tested: the average, where there is one."""
        return self.average.model if self.average else self.model

    def begin(self, epoch: int, step: int, lr: float) -> None:
        self.epoch = epoch
        self.feed.begin(epoch, step)
        self.counter.fill_(step)
        self.set_lr(lr)
        self.model.train()

    def set_lr(self, lr: float) -> None:
        """For the steps from here on."""
        if lr != self._rate:
            self.lr.fill_(lr)
            self._rate = lr

    def step(self, step: int) -> None:
        """Issue a step of the current epoch."""
        self.feed.load(step)
        size, total = self.feed.sizes[step], self.feed.totals[step]
        if self.graphed and size not in self._graphs:
            self._graphs[size] = self._capture(size, total)
        with self._drawing(step):
            if self.graphed:
                self._graphs[size].replay()
            else:
                self._body(size, total)

    @contextmanager
    def _drawing(self, step: int) -> Iterator[None]:
        """What a network drops follows from the step alone: not from what came before, of which a
        resumed run knows nothing, nor from other runs."""
        if self.seed is None:
            yield
            return
        seed = generator(self.seed, self.epoch, step, self.world.rank).initial_seed()
        with GENERATOR, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if self.execution.device.type == "cuda":
                torch.cuda.manual_seed(seed)  # a graph draws from here, too
            yield

    def _body(self, size: int, total: int) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        x, y = self.feed.take(self.counter, size)
        # An epoch's last batch is no reason to compile anything twice.
        full = size == max(self.feed.sizes)
        with self.execution.autocast(), self.blocks() if self.blocks and full else nullcontext():
            logits = self.forward(x)
        loss, wrong = self._judged(logits.float(), y)
        loss = loss / total
        # Gradients are averaged over processes, losses are shares of one mean.
        share = loss * self.world.size if self.world.size > 1 else loss
        share.backward(torch.ones_like(share))
        self._differentiated()
        self.optimiser.step()
        if self.average:
            self.average.update()
        with torch.no_grad():
            at = self.counter.view(1)
            self.losses.index_copy_(-1, at, loss.detach().unsqueeze(-1))
            self.wrong.index_copy_(-1, at, wrong.unsqueeze(-1))
            self.counter += 1

    def _judged(
        self, logits: Float[Tensor, "n D"], y: Int64[Tensor, " n"]
    ) -> tuple[Tensor, Tensor]:
        """The sum of a batch's losses, and how many are wrong."""
        smoothing = self.smoothing
        loss = F.cross_entropy(logits, y, reduction="sum", label_smoothing=smoothing)
        missed = logits.argmax(1) != y
        if self.feed.loads:  # a file that cannot be read has no label
            missed &= y >= 0
        return loss, missed.sum()

    def _differentiated(self) -> None:
        """Once gradients are there."""

    def _capture(self, size: int, total: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with self._unchanged():
            for _ in range(WARM_UP):
                self.counter.zero_()  # a batch that is there, whichever step this is
                self._body(size, total)
            self.optimiser.zero_grad(set_to_none=True)
            with captured(graph, pool):
                self._body(size, total)
        return graph

    @contextmanager
    def rehearsal(self) -> Iterator[Callable[[], None]]:
        """A step that may be taken any number of times: afterwards everything is as before."""
        size, total = self.feed.sizes[0], self.feed.totals[0]
        self.model.train()

        def step() -> None:
            self.counter.zero_()
            with self._drawing(0):
                self._body(size, total)

        with self._unchanged():
            yield step
            self.optimiser.zero_grad(set_to_none=True)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Whatever happens within, everything a step changes is as before afterwards."""
        changing = [self.counter, self.losses, self.wrong, *self.state().values()]
        kept = [t.detach().clone() for t in changing]
        yield
        with torch.no_grad():
            for tensor, before in zip(changing, kept, strict=True):
                tensor.copy_(before)

    def state(self) -> dict[str, Tensor]:
        """Everything learnt, by name: the network, its momentum and its average."""
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            if (buffer := self.optimiser.state[p].get("momentum_buffer")) is not None:
                found[f"momentum.{name}"] = buffer
        if self.average:
            found |= {f"average.{n}": t for n, t in self.average.model.state_dict().items()}
        return found

    def buffers(self) -> list[Tensor]:
        averaged = self.average.model.buffers() if self.average else ()
        return [*self.model.buffers(), *averaged]


def decaying(model: nn.Module, decay: str) -> list[dict[str, Any]]:
    """A network's parameters, by whether weight decay is for them: for all, or for weights alone,
    those of more than one dimension, as norms' parameters and biases are not."""
    found = list(model.parameters())
    if decay == "all":
        return [{"params": found}]
    weights, others = ([p for p in found if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def drops(model: nn.Module) -> bool:
    """Whether a network drops something at random in training: values, maps or whole paths."""
    names = ("p", "drop_prob", "drop_rate")  # torch's and torchvision's; timm's
    found = [getattr(module, name, 0) for module in model.modules() for name in names]
    return any(isinstance(share, (int, float)) and share > 0 for share in found)
