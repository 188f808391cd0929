"""How far the gradients of a training step are from exact ones, in each way to compute it.

    python benchmarks/gradients.py resnet20-mssar-cifar100
    python benchmarks/gradients.py resnet20-mssar-cifar100 --precisions bf16,fp32 --stacks 1,4

The step is the lab's: crops of the data set, the kernels, on a GPU a CUDA graph, compiled if that
is asked for. Exact is plain PyTorch in float64 on the same batch. The network is as its run begins,
of several as one each with a seed of its own, and as it was trained. NET is a run's folder or
trained weights.

In per cent of a gradient's length, the root of its mean square over batches: `error`, how far it is
off; `steady`, the part of that which is the same in every batch and so does not average out, 0
where nothing of it is seen, and how large it may be (`most`, by two standard errors); `length`, by
how much it is too long along the exact one, with its standard error. `mssar` and the like are the
parameters of the layers alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reporting import append, heading
from torch import Tensor, nn

import mssar
from mssar.lab.data import load
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine.evaluate import Trained, trained
from mssar.lab.engine.execution import PRECISIONS, Execution, choose_device, settings
from mssar.lab.engine.feed import ArraysFeed, Resident, arrays_feed
from mssar.lab.engine.pace import own_lane
from mssar.lab.engine.stack import obstacle
from mssar.lab.engine.stacked import StackLearner
from mssar.lab.engine.step import Learner, drops
from mssar.lab.engine.world import World

STATES = ("begun", "trained")
LAYERS = "recalibrate"  # what a block calls its recalibration
MODES = ("graph", "compile")
CHUNK = 2**16  # numbers of a gradient that are multiplied at a time

Gradients = dict[str, Tensor]  # by a parameter's name


@dataclass
class Sums:
    """Of one gradient a batch, and of what it should have been."""

    errors: list[Tensor] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)  # squared, of the exact gradients
    along: list[float] = field(default_factory=list)  # of the error, with the exact gradient

    def add(self, found: Tensor, exact: Tensor) -> None:
        error = found.double() - exact
        self.errors.append(error.float())
        self.lengths.append(float(exact @ exact))
        self.along.append(float(error @ exact))

    def shares(self) -> dict[str, float]:
        """Of a gradient's length; there are two batches or more."""
        n, unit = len(self.errors), math.fsum(self.lengths) / len(self.lengths)
        # What is steady is in every two errors, and what is not is at right angles, in the mean.
        products = torch.zeros(n, n, dtype=torch.float64)
        for part in torch.stack(self.errors).split(CHUNK, 1):
            products += (part.double() @ part.double().T).cpu()
        square = float(products.trace()) / n
        products.fill_diagonal_(0)
        by_batch = products.sum(1) / (n - 1)
        steady = float(by_batch.mean())
        # Of a mean over pairs: by how much batches differ, and at least what right angles are by
        # chance.
        doubts = 2 * float(by_batch.std()) / n**0.5, 2**0.5 * float(products.norm()) / (n * (n - 1))
        along = math.fsum(self.along) / math.fsum(self.lengths)
        rest = [a - along * length for a, length in zip(self.along, self.lengths, strict=True)]
        spread = math.sqrt(math.fsum(r * r for r in rest) / (n - 1) / n) / unit
        return {
            "error": math.sqrt(square / unit),
            "steady": math.sqrt(max(0.0, steady) / unit),
            "steady_most": math.sqrt(max(0.0, steady + 2 * max(doubts)) / unit),
            "length": along,
            "length_error": spread,
        }


def exact(model: nn.Module) -> nn.Module:
    """In float64, by PyTorch's own operations."""
    made = copy.deepcopy(model).double().train()
    for module in made.modules():
        if isinstance(module, mssar.MSSAR):
            module.backend = "reference"
    return made


def gradients(model: nn.Module, x: Tensor, y: Tensor, smoothing: float = 0.0) -> Gradients:
    """Of the mean loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = F.cross_entropy(model(x.double()), y, label_smoothing=smoothing)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


class Way:
    """Networks of one kind, each with batches of its own, trained as one if there are several. At
    a rate of 0 they stay as they are."""

    def __init__(
        self, models: list[nn.Module], feeds: list[ArraysFeed], chosen: Trained, how: Execution
    ) -> None:
        recipe, self.count = chosen.run.recipe, len(feeds)
        copies = [copy.deepcopy(model) for model in models]
        self.learner: Learner
        if self.count == 1:
            self.learner = Learner(copies[0], feeds[0], recipe, how, World())
        else:
            classes = [chosen.classes] * self.count
            self.learner = StackLearner(copies, feeds, classes, recipe, how)
        self.learner.begin(0, 0, 0.0)

    def step(self, step: int) -> Iterator[Gradients]:
        """The gradients of each network."""
        learner = self.learner
        learner.step(step)
        found = {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}
        if isinstance(learner, StackLearner):
            yield from (learner.stack.parts(which, found) for which in range(self.count))
        else:
            yield found


def compared(
    models: list[nn.Module],
    chosen: Trained,
    data: Arrays,
    resident: dict[object, Resident],
    how: Execution,
    steps: int,
) -> dict[str, dict[str, float]]:
    """Of all parameters, and of the layers' alone, over so many batches a network."""
    recipe, device, stack = chosen.run.recipe, how.device, len(models)

    def feed(seed: int) -> ArraysFeed:
        return arrays_feed(data, resident, recipe, seed, device, World())

    way = Way(models, [feed(seed) for seed in range(stack)], chosen, how)
    truths = [exact(model).to(device) for model in models]
    batches = [feed(seed) for seed in range(stack)]
    for one in batches:
        one.begin(0, 0)
    groups = {"all": ""}
    if any(LAYERS in name for name, _ in models[0].named_parameters()):
        groups[chosen.run.recalibration] = LAYERS
    sums = {group: Sums() for group in groups}
    for step in range(steps):
        counter = torch.tensor(step, device=device)
        for one, truth, found in zip(batches, truths, way.step(step), strict=True):
            wanted = gradients(truth, *one.take(counter, one.sizes[step]), recipe.smoothing)
            for group, part in groups.items():
                names = [name for name in wanted if part in name]
                flat = [
                    torch.cat([by[name].reshape(-1) for name in names]) for by in (found, wanted)
                ]
                sums[group].add(*flat)
    return {group: some.shares() for group, some in sums.items()}


def measured(
    net: str, chosen: Trained, data: Arrays, wanted: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A line for every state, way and group of parameters."""
    resident: dict[object, Resident] = {}
    seed, most = chosen.run.seed, max(wanted.stacks)
    states = {
        "begun": [replace(chosen.run, seed=seed + i).begun(chosen.classes) for i in range(most)],
        "trained": [chosen.model] * most,
    }
    ways = product(STATES, wanted.precisions, wanted.stacks, wanted.modes)
    for state, precision, stack, mode in ways:
        how = Execution(device, precision, compile=mode == "compile")
        lane = own_lane(how)  # a graph is not captured on the default stream
        with settings(how), torch.cuda.stream(lane) if lane else nullcontext():
            models = [
                model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                for model in states[state][:stack]
            ]
            found = compared(models, chosen, data, resident, how, wanted.steps)
        for group, shares in found.items():
            told = {"net": net, "seed": seed, "state": state, "precision": precision}
            told |= {"stack": stack, "mode": mode, "group": group, "batches": stack * wanted.steps}
            yield told | shares
        if mode == "compile":
            torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def row(line: dict[str, Any]) -> str:
    what = f"{line['state']:8}{line['precision']:>6}{line['stack']:>4}  {line['mode']:9}"
    names = ("error", "steady", "steady_most", "length", "length_error")
    error, steady, most, length, spread = (100 * line[name] for name in names)
    told = f"{error:10.4f}{steady:10.4f}{most:10.4f}{length:+11.4f} ± {spread:.4f}"
    return f"{what}{line['group']:8}{line['batches']:>6}{told}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("nets", nargs="+", metavar="NET")
    device = choose_device()
    modes = "graph,compile" if device.type == "cuda" else "graph"
    add("--precisions", default="bf16,fp32", help=f"some of {','.join(PRECISIONS)}; %(default)s")
    add("--stacks", default="1,4", help="networks trained as one; %(default)s")
    add("--modes", default=modes, help=f"some of {','.join(MODES)} (and graphed); %(default)s")
    add("--steps", type=int, default=100, help="batches of each network; %(default)s")
    add("--data-dir", type=Path, help="where data sets lie")
    add("--json", type=Path, metavar="FILE", help="append a line a row")
    wanted = parser.parse_args(argv)
    for name, known in (("precisions", PRECISIONS), ("modes", MODES)):
        some = getattr(wanted, name).split(",")
        if unknown := [one for one in some if one not in known]:
            parser.error(f"--{name} are of {', '.join(known)}; got {unknown[0]!r}")
        setattr(wanted, name, some)
    try:
        wanted.stacks = [int(stack) for stack in wanted.stacks.split(",")]
    except ValueError:
        parser.error(f"--stacks are numbers, as 1,4; got {wanted.stacks}")
    if wanted.steps < 2 or min(wanted.stacks) < 1:
        parser.error("--steps is 2 or more, --stacks 1")
    for net in wanted.nets:
        chosen = trained(Path(net))
        data = load(chosen.run.dataset, wanted.data_dir)
        if not isinstance(data, Arrays):
            parser.error(f"{net} was trained on photographs; this is for small images")
        if drops(chosen.model):
            parser.error(f"{net} drops at random, and so has no gradient to compare with")
        if max(wanted.stacks) > 1 and (reason := obstacle([chosen.model])):
            parser.error(f"{net} cannot be trained as one with others: {reason}; pass --stacks 1")
        data = chosen.run.normalised(data)
        assert isinstance(data, Arrays)
        whole = len(data.train) // chosen.run.recipe.batch
        if wanted.steps > whole:
            parser.error(f"--steps is {whole} at most, an epoch's whole batches")
        print(heading(f"{net}: gradients against float64's, in % of their length", device))
        heads = f"{'error':>10}{'steady':>10}{'most':>10}{'length':>11}"
        print(f"{'':8}{'':>6}{'×':>4}  {'':9}{'':8}{'n':>6}{heads}", flush=True)
        for line in measured(net, chosen, data, wanted, device):
            print(row(line), flush=True)
            append(wanted.json, device, [line])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
