"""Steps a second of networks that are trained side by side on one GPU.

    python benchmarks/fleet.py
    python benchmarks/fleet.py --nets resnet20 --count 4 --modes graph,compile
    python benchmarks/fleet.py --count 12 --stacks 1,3,6
    python benchmarks/fleet.py --nets resnet20 --count 3 --stacks 1,3 --strategy sliding

The loop is the lab's: each network has a stream and a CUDA graph of its step (crops, forward,
backward, optimiser), takes turns of a few steps, and is never far ahead of the GPU. Random images
are in memory and made into batches once: an epoch's crops, tests and checkpoints are no part of
it. A row a network: steps a second of all of them together, and of one alone; with --stacks also of
as many networks of which each three, say, are trained as one (`mssar train --stack 3`), and of one
such stack. The networks with and without recalibration take turns; numbers are medians.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from reporting import append, heading, told
from torch import nn

import mssar
from mssar.coordinates import STRATEGIES
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine.execution import Execution, choose_device, settings
from mssar.lab.engine.feed import ArraysFeed, Resident
from mssar.lab.engine.pace import Pace, own_lane
from mssar.lab.engine.stacked import StackLearner
from mssar.lab.engine.step import Learner
from mssar.lab.engine.training import CHUNK
from mssar.lab.engine.world import World
from mssar.lab.recipes import CIFAR_RESNET, Crops, varied
from mssar.lab.run import Run
from mssar.networks.recalibration import OURS, RECALIBRATIONS
from mssar.networks.registry import architecture

Kind: TypeAlias = tuple[str, int]  # a recalibration, and how many networks are one
WINDOWS = 5  # of measuring, of which the median is taken
COUNT, BATCH = 8, 128
GOALS = {"resnet20": 870.0, "resnet56": 345.0}  # of so many with MS-SAR together, in graphs


class Member:
    """A network, or several that are trained as one, and its turns."""

    def __init__(self, runs: list[Run], data: Arrays, resident: Resident, how: Execution) -> None:
        self.lane, self.networks = own_lane(how), len(runs)
        self.done = 0
        recipe = runs[0].recipe
        with self.stream:
            feeds = [ArraysFeed(data, resident, recipe, r.seed, how.device, World()) for r in runs]
            self.learner: Learner
            if len(runs) == 1:
                self.learner = Learner(_built(runs[0]), feeds[0], recipe, how, World())
            else:
                classes = [len(data.classes)] * len(runs)
                self.learner = StackLearner(list(map(_built, runs)), feeds, classes, recipe, how)
            self.learner.begin(0, 0, 0.0)  # at a rate of 0 it takes as long, and nothing diverges
            self.learner.step(0)  # captured here
        self.turns = self._work(Pace(how.device, World()))

    @property
    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.lane) if self.lane else nullcontext()

    def _work(self, pace: Pace) -> Iterator[None]:
        while True:
            self.learner.counter.zero_()
            for step in range(len(self.learner.feed.sizes)):
                self.learner.step(step)
                self.done += self.networks
            yield from pace.kept()
            yield

    def turn(self) -> None:
        with self.stream:
            next(self.turns)


def _built(run: Run) -> nn.Module:
    return run.build(architecture(run.network).num_classes)


def fleet(
    net: str,
    kind: str,
    count: int,
    batch: int,
    how: Execution,
    stack: int = 1,
    strategy: str = "regional",
) -> list[Member]:
    """Networks that differ in their seeds, on the same images: as many as a turn takes."""
    size, classes = architecture(net).size[1:], architecture(net).num_classes
    draw = torch.Generator().manual_seed(0)
    steps = CHUNK if how.device.type == "cuda" else 1
    images = torch.randint(256, (steps * batch, *size, 3), dtype=torch.uint8, generator=draw)
    labels = torch.randint(classes, (steps * batch,), generator=draw)
    names = tuple(map(str, range(classes)))
    train, test = Split(images, labels), Split(images[:1], labels[:1])
    data = Arrays("random", names, train, test, (127.5,) * 3, (73.9,) * 3)  # of uniform bytes
    recipe = varied(CIFAR_RESNET, batch=batch, augmentation=Crops(padding=0))
    resident = Resident(data, 0, how.device)
    _wait(how.device)  # they read it on other streams
    options = {"strategy": strategy} if kind in OURS else {}
    runs = [Run(net, kind, options, recipe=recipe, seed=seed) for seed in range(count)]
    some = [runs[first : first + stack] for first in range(0, count, stack)]
    return [Member(each, data, resident, how) for each in some]


def rate(members: Sequence[Member], seconds: float, device: torch.device) -> float:
    """Steps a second of all together, from an idle device to an idle device."""
    _wait(device)
    before, begun = sum(m.done for m in members), time.perf_counter()
    while True:
        for member in members:
            member.turn()
        if time.perf_counter() - begun > seconds:
            break
    _wait(device)
    return (sum(m.done for m in members) - before) / (time.perf_counter() - begun)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    net: str, mode: str, wanted: argparse.Namespace, device: torch.device
) -> tuple[list[dict[str, Any]], int]:
    """A record for each kind of network; how many failed."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    how = Execution(device, precision, compile=mode == "compile")
    fleets, failed = dict[Kind, list[Member]](), 0
    with settings(how):
        for kind, stack in product(wanted.variants, wanted.stacks):
            begun, name = time.perf_counter(), f"{net} {mode}: {kind}{f' x{stack}' * (stack > 1)}"
            try:
                sizes = (wanted.count, wanted.batch, how, stack)
                fleets[kind, stack] = fleet(net, kind, *sizes, wanted.strategy)
            except Exception as why:
                told(name, why)
                failed += 1
            else:
                took = time.perf_counter() - begun
                print(f"{name} ready in {took:.1f} s", file=sys.stderr, flush=True)
        rates = in_windows(fleets, wanted, device)
    records = []
    for (kind, stack), (together, alone) in rates.items():
        said = {"net": net, "mode": mode, "batch": wanted.batch, "variant": kind, "stack": stack}
        said |= {"strategy": wanted.strategy} if kind in OURS else {}
        speeds = {
            "together": statistics.median(together),
            "alone": statistics.median(alone),
            "range": [min(together), max(together)],
        }
        records.append({"count": wanted.count, **said, **speeds})
    fleets.clear()
    if mode == "compile":
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return records, failed


def in_windows(
    fleets: dict[Kind, list[Member]], wanted: argparse.Namespace, device: torch.device
) -> dict[Kind, tuple[list[float], list[float]]]:
    """Rates of each fleet, and of one of its networks or stacks alone, in turns."""
    rates = {kind: (list[float](), list[float]()) for kind in fleets}
    window = wanted.seconds / WINDOWS
    for members in fleets.values():
        rate(members, min(0.5, window), device)
    for _ in range(WINDOWS):
        for kind, members in fleets.items():
            rates[kind][0].append(rate(members, window, device))
            rates[kind][1].append(rate(members[:1], window, device))
    return rates


def goal(record: dict[str, Any]) -> float | None:
    """What was aimed at, in the setting it was aimed at."""
    names = ("variant", "mode", "count", "batch", "stack", "strategy")
    aimed = tuple(record.get(n) for n in names) == ("mssar", "graph", COUNT, BATCH, 1, "regional")
    return GOALS.get(record["net"]) if aimed else None


def show(records: Sequence[dict[str, Any]], wanted: argparse.Namespace, where: str) -> None:
    print("\n" + where)
    together = f"{wanted.count} together"
    heads = f"{'stack':>6}{together:>12}{'of none':>9}{'alone':>9}{'of none':>9}{'goal':>7}"
    print(f"{'':27}{heads}")
    for r in records:
        same = ("net", "mode", "stack")
        bases = [b for b in records if b["variant"] == "none" and all(b[k] == r[k] for k in same)]
        row = f"{r['net']:10}{r['mode']:9}{r['variant']:8}{r['stack']:6}"
        for part, wide in (("together", 12), ("alone", 9)):
            share = f"{r[part] / bases[0][part]:9.0%}" if bases else f"{'':9}"
            row += f"{r[part]:{wide}.1f}{share}"
        if (wished := goal(r)) is not None:
            row += f"{wished:7.0f}  {'met' if r['together'] >= wished else 'missed'}"
        print(row.rstrip())
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--nets", default="resnet20,resnet56", help="%(default)s")
    add("--variants", default="none,mssar", help=f"some of {','.join(RECALIBRATIONS)}; %(default)s")
    add("--modes", default="graph", help="graph, compile (and graphed), or both; %(default)s")
    add("--count", type=int, default=COUNT, help="networks side by side; %(default)s")
    add("--stacks", default="1", help="networks trained as one, as 1,3,6; %(default)s")
    add("--strategy", default="regional", choices=STRATEGIES, help="of se and mssar; %(default)s")
    add("--batch", type=int, default=BATCH, help="%(default)s")
    add("--seconds", type=float, default=5.0, help="of measuring, a number; %(default)s")
    add("--json", type=Path, metavar="FILE", help="append a line a network and variant")
    wanted = parser.parse_args(argv)
    wanted.variants = wanted.variants.split(",")
    nets, modes = wanted.nets.split(","), wanted.modes.split(",")
    lists = (
        ("network", nets, mssar.list_models()),
        ("variant", wanted.variants, list(RECALIBRATIONS)),
        ("mode", modes, ["graph", "compile"]),
    )
    for what, asked, known in lists:
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"no {what} {unknown[0]!r}; there are {', '.join(known)}")
    try:
        wanted.stacks = [int(stack) for stack in wanted.stacks.split(",")]
    except ValueError:
        parser.error(f"--stacks are numbers, as 1,3,6; got {wanted.stacks}")
    if not all(1 <= stack <= wanted.count for stack in wanted.stacks):
        parser.error(f"a stack has 1 to {wanted.count} networks, the --count; got {wanted.stacks}")
    if wanted.count < 1 or wanted.batch < 2:
        parser.error(f"--count is 1 or more, --batch 2; got {wanted.count} and {wanted.batch}")
    if "compile" in modes:  # each of them has the same code, and none may be given up on
        torch._dynamo.config.cache_size_limit = 64
    device, records, failed = choose_device(), list[dict[str, Any]](), 0
    for mode in modes:
        for net in nets:
            try:
                found, lost = measure(net, mode, wanted, device)
            except Exception as why:  # the other networks go on
                found, lost = [], 1
                told(f"{net} {mode}", why)
            append(wanted.json, device, found)
            records, failed = records + found, failed + lost
    if records:
        how = f"batch {wanted.batch}, {wanted.strategy}"
        show(records, wanted, heading(f"steps a second, {how}", device))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
