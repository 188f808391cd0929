"""What a residual block's tail (BN, recalibration, addition, relu) asks of the host.

    python benchmarks/host.py
    python benchmarks/host.py --variants none,mssar --modes eager

A row a variant: microseconds of host time a block, its launches on the device (kernels, copies and
fills) and its allocations, for the forward and the backward pass of training and for inference.
In eager PyTorch, and compiled without graphs, where a row of blocks is compiled as one.

Maps are so small that the device is always done first, and it is waited for after a few blocks, so
that its queue never fills. Blocks stand in a row, each with parameters of its own, the output of
one being the shortcut of the next; a number is the difference between a long and a short row for
each block that the long one has more. What a call takes whatever it is for is so left out. Times
are medians; the variants take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import WARM_UP, MissingError, cast
from reporting import append, heading, told
from tail_op import TAILS, Size, Tail, random_map, recalibration
from torch import Tensor, nn

SHORT, LONG = 2, 8  # blocks in a row
PARTS = ("forward", "backward", "inference")
LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset")  # by what the profiler calls them
MODES = ("eager", "compile")

Laps = dict[str, float]


class Row(nn.Module):
    """Tails one after the other, each recalibrating a map of its own."""

    def __init__(self, kind: str, blocks: int, size: Size, device: torch.device) -> None:
        super().__init__()
        made = recalibration(kind, size.net, device)
        self.tails = nn.ModuleList(Tail(size.channels, made) for _ in range(blocks))

    def forward(self, maps: Sequence[Tensor], shortcut: Tensor) -> Tensor:
        for number, tail in enumerate(self.tails):
            shortcut = tail(maps[number], shortcut)
        return shortcut


@dataclass
class Subject:
    """A row that can be run, part by part."""

    run: Callable[[Sequence[Tensor], Tensor], Tensor]
    row: Row
    maps: list[Tensor]
    shortcut: Tensor
    grad: Tensor

    def lap(self, read: Callable[[], float]) -> Laps:
        """What each part adds to a reading. The device is idle before each of them.

        A network stays in its mode for many steps. The first call in another one binds tensors
        anew, so it is not read.
        """
        device = self.shortcut.device
        self.row.train()
        with cast(device):
            self.run(self.maps, self.shortcut)
        for tensor in (*self.row.parameters(), *self.maps, self.shortcut):
            tensor.grad = None
        wait(device)
        begun = read()
        with cast(device):
            out = self.run(self.maps, self.shortcut)
        forward = read() - begun
        wait(device)
        begun = read()
        out.backward(self.grad)
        backward = read() - begun
        del out
        self.row.eval()
        with torch.inference_mode(), cast(device):
            self.run(self.maps, self.shortcut)
            wait(device)
            begun = read()
            self.run(self.maps, self.shortcut)
            inference = read() - begun
        wait(device)
        return dict(zip(PARTS, (forward, backward, inference), strict=True))


Pairs = dict[str, tuple[Subject, Subject]]  # a short and a long row of each variant


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def subject(kind: str, blocks: int, size: Size, device: torch.device, *, compiled: bool) -> Subject:
    """A row, warmed up."""
    maps = partial(random_map, size, device)
    row = Row(kind, blocks, size, device).to(device)
    run: Any = torch.compile(row, dynamic=False) if compiled else row
    own = [maps().requires_grad_() for _ in range(blocks)]
    made = Subject(run, row, own, maps().requires_grad_(), maps())
    for _ in range(WARM_UP):
        made.lap(time.perf_counter)
    return made


def microseconds() -> float:
    return time.perf_counter_ns() / 1e3


def allocations() -> float:
    return float(torch.cuda.memory_stats()["allocation.all.allocated"])


def launches(subject: Subject) -> Laps:
    """How often each part starts something on the device, by the profiler."""
    found = []
    for number in range(len(PARTS)):
        reads = iter(range(2 * len(PARTS)))
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        )

        # A part is read before and after: it is what is profiled between these two readings.
        def read(number: int = number, reads: Any = reads, profiler: Any = profiler) -> float:
            now = next(reads)
            if now == 2 * number:
                profiler.start()
            elif now == 2 * number + 1:
                torch.cuda.synchronize()
                profiler.stop()
            return 0.0

        subject.lap(read)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            found.append(float(launched(json.loads(path.read_text()))))
    return dict(zip(PARTS, found, strict=True))


def launched(trace: dict[str, Any]) -> int:
    """Kernels, copies and fills in a trace."""
    return sum(event.get("cat") in LAUNCHES for event in trace["traceEvents"])


def a_block(short: Laps, long: Laps) -> Laps:
    """What one block adds."""
    return {part: (long[part] - short[part]) / (LONG - SHORT) for part in short}


def host_time(pairs: Pairs, repeats: int) -> dict[str, Laps]:
    """Microseconds of each part of a block, in turns."""
    laps: dict[str, tuple[list[Laps], list[Laps]]] = {kind: ([], []) for kind in pairs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for kind, pair in pairs.items():
                for taken, one in zip(laps[kind], pair, strict=True):
                    taken.append(one.lap(microseconds))
    finally:
        gc.enable()
    return {kind: a_block(*map(middle, pair)) for kind, pair in laps.items()}


def middle(laps: Sequence[Laps]) -> Laps:
    return {part: statistics.median(lap[part] for lap in laps) for part in PARTS}


def prepare(mode: str, wanted: argparse.Namespace, device: torch.device) -> tuple[Pairs, int]:
    """A short and a long row of each variant that can be made; how many failed."""
    made, failed = Pairs(), 0
    for kind in wanted.variants:
        begun = time.perf_counter()
        try:
            short, long = (
                subject(kind, blocks, wanted.map, device, compiled=mode == "compile")
                for blocks in (SHORT, LONG)
            )
        except MissingError as why:
            print(f"{mode}: {kind} left out: {why}", flush=True)
        except Exception as why:
            told(f"{mode}: {kind}", why)
            failed += 1
        else:
            made[kind] = (short, long)
            took = time.perf_counter() - begun
            print(f"{mode}: {kind} ready in {took:.1f} s", file=sys.stderr, flush=True)
    return made, failed


def counted(pair: tuple[Subject, Subject]) -> Laps | None:
    """Launches a block; None where the profiler does not see the device."""
    try:
        found = a_block(*map(launches, pair))
    except Exception as why:
        told("counting launches", why)
        return None
    return found if any(found.values()) else None


def show(
    mode: str,
    pairs: Pairs,
    times: dict[str, Laps],
    wanted: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Print a mode's table; a record a variant and part."""
    records, rows = [], []  # printed together: the profiler has things to say
    for kind, pair in pairs.items():
        allocated, started = a_block(*(one.lap(allocations) for one in pair)), counted(pair)
        row = f"{kind:12}"
        for part in PARTS:
            count = started[part] if started else None
            row += f"{times[kind][part]:11.1f}{'?' if count is None else f'{count:.1f}':>8}"
            row += f"{allocated[part]:8.1f}"
            found = {"launches": count, "allocations": allocated[part]}
            said = {"host": kind, "mode": mode, "part": part, "host_us": times[kind][part]}
            records.append(said | found)
        rows.append(row)
    what = f"{mode}, a block's tail of {wanted.map}, batch {wanted.map.batch}"
    print("\n" + heading(what, device))
    print(f"{'':12}" + "".join(f"{part:>27}" for part in PARTS))
    print(f"{'':12}" + f"{'µs':>11}{'launch':>8}{'alloc':>8}" * len(PARTS))
    print("\n".join(rows), flush=True)
    return records


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--variants", default="none,timm-se,mssar", help=f"some of {','.join(TAILS)}")
    add("--modes", default=",".join(MODES), help="%(default)s, or one of them")
    add("--batch", type=int, default=2)
    add("--channels", type=int, default=64)
    add("--side", type=int, default=8)
    add("--repeats", type=int, default=200, help="%(default)s")
    add("--json", type=Path, metavar="FILE", help="append a line a variant and part")
    wanted = parser.parse_args(argv)
    wanted.map = Size("resnet18", wanted.side, wanted.channels, wanted.batch)
    wanted.variants, modes = wanted.variants.split(","), wanted.modes.split(",")
    for what, asked, known in (("variant", wanted.variants, TAILS), ("mode", modes, MODES)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"no {what} {unknown[0]!r}; there are {', '.join(known)}")
    if not torch.cuda.is_available():
        print("host.py needs a CUDA device: on a CPU host and device are one", file=sys.stderr)
        return 2
    if "compile" in modes:  # variants share code, and none may be given up on
        torch._dynamo.config.cache_size_limit = 64
    device, failed = torch.device("cuda"), 0
    timed: dict[str, tuple[Pairs, dict[str, Laps]]] = {}
    for mode in modes:
        pairs, lost = prepare(mode, wanted, device)
        timed[mode], failed = (pairs, host_time(pairs, wanted.repeats)), failed + lost
    for mode, (pairs, times) in timed.items():  # after all times: a profiler may leave traces
        append(wanted.json, device, show(mode, pairs, times, wanted, device))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
