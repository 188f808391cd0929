"""The demo's training alone, and beside a program that keeps a core busy.

    python benchmarks/busy.py
    python benchmarks/busy.py --rounds 5 --images 10000 --epochs 8

Its three runs (resnet8 without recalibration, with SE and with MS-SAR) on a part of its pictures,
each time in a process of its own. Two ways: one run after the other with all threads, and side by
side as `mssar demo` does it. A neighbour is a program that does nothing but count, at the lowest
priority, in a session of its own: Linux may share cores out between sessions first. The four take
turns and the shortest times count, so that whatever else runs here disturbs least. It trains on
the CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reporting import append, heading, told

from mssar.lab import data
from mssar.lab.commands.demo import NETWORK, RECALIBRATIONS
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine.execution import Execution
from mssar.lab.engine.fleet import train
from mssar.lab.engine.observer import Observer
from mssar.lab.recipes import DEMO, varied
from mssar.lab.run import Run

CPU = torch.device("cpu")
WAYS = {"one by one": 1, "side by side": len(RECALIBRATIONS)}  # so many at once
COUNT = """
import os
os.nice(19)
print(flush=True)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
SLOWER = 2.5  # times beside a neighbour, at most


def trained(width: int, images: int, epochs: int, threads: int) -> tuple[float, int]:
    """Seconds of training, and the threads of a run."""
    found = data.load("arrangements")
    assert isinstance(found, Arrays)
    tests = max(1, len(found.test) * images // len(found.train))
    pictures = replace(found, train=part(found.train, images), test=part(found.test, tests))
    recipe = varied(DEMO, epochs=epochs, drops=())
    runs = [Run(NETWORK, kind, dataset="arrangements", recipe=recipe) for kind in RECALIBRATIONS]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        how = Execution(CPU, threads=threads)
        outcome = train(runs, lambda _: pictures, how, Path(folder), Observer(), width=width)
        took = time.perf_counter() - begun
    if outcome.failures:
        raise RuntimeError(outcome.failures[0])
    return took, outcome.records[0].environment["threads"]


def part(whole: Split, images: int) -> Split:
    return Split(whole.images[:images], whole.labels[:images])


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A program beside this one, or none."""
    if not busy:
        yield
        return
    with subprocess.Popen(
        [sys.executable, "-c", COUNT], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def timed(way: str, busy: bool, wanted: argparse.Namespace) -> tuple[float, int]:
    """The same in a process of its own."""
    # One by one as it was: with all threads, whatever goes on beside.
    threads = torch.get_num_threads() if WAYS[way] == 1 else 0
    words = [str(number) for number in (WAYS[way], wanted.images, wanted.epochs, threads)]
    with neighbour(busy):
        done = subprocess.run(
            [sys.executable, __file__, "--child", *words],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    seconds, used = done.stdout.split()
    return float(seconds), int(used)


def measure(wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each way."""
    times: dict[str, dict[bool, list[float]]] = {way: {False: [], True: []} for way in WAYS}
    threads = dict[str, int]()
    for number in range(wanted.rounds):
        for busy in (False, True):
            for way in WAYS:
                seconds, threads[way] = timed(way, busy, wanted)
                times[way][busy].append(seconds)
                said = f"{number + 1}: {way}, {'busy' if busy else 'alone'}: {seconds:.1f} s"
                print(said, file=sys.stderr, flush=True)
    return [
        {
            "way": way,
            "threads": threads[way],
            "images": wanted.images,
            "epochs": wanted.epochs,
            "alone": min(found[False]),
            "busy": min(found[True]),
            "range": [max(found[False]), max(found[True])],
        }
        for way, found in times.items()
    ]


def show(records: Sequence[dict[str, Any]], where: str) -> None:
    print("\n" + where)
    print(f"{'':16}{'threads':>8}{'alone':>10}{'busy':>10}{'slower':>9}")
    for r in records:
        row = f"{r['way']:16}{r['threads']:8}{r['alone']:8.1f} s{r['busy']:8.1f} s"
        print(f"{row}{r['busy'] / r['alone']:8.2f}×")
    before, now = records
    slower, longer = now["busy"] / now["alone"], now["alone"] / before["alone"]
    met = {True: "met", False: "missed"}
    print(f"beside a neighbour {slower:.2f}×  goal {SLOWER}×: {met[slower <= SLOWER]}")
    print(f"alone {longer:.2f}× as long as one by one  goal 1×: {met[longer <= 1]}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of each; the shortest counts; %(default)s")
    add("--images", type=int, default=2000, help="of the demo's 10,000; %(default)s")
    add("--epochs", type=int, default=1, help="of the demo's 8; %(default)s")
    add("--json", type=Path, metavar="FILE", help="append a line a way")
    add("--child", type=int, nargs=4, help=argparse.SUPPRESS)
    wanted = parser.parse_args(argv)
    if wanted.child:
        seconds, threads = trained(*wanted.child)
        print(f"{seconds} {threads}")
        return 0
    if min(wanted.rounds, wanted.images // 64, wanted.epochs) < 1:
        parser.error("--rounds and --epochs are 1 or more, --images 64")
    try:
        records = measure(wanted)
    except Exception as why:
        told("busy", why)
        return 1
    append(wanted.json, CPU, records)
    show(records, heading("seconds of the demo's training", CPU))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
