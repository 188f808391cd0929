"""How long the first training step takes, with no kernels on disk, and the first one of a new size.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --json first.jsonl

A row a step: seconds of it without recalibration and with MS-SAR, and of the step with MS-SAR that
follows, when nothing is new any more. The first row is the first step ever: Triton's and the
compiler's caches are folders of their own, empty. Each further row is a process of its own: it
finds the kernels of the first step on disk, takes that step, and then one of another size, for
which it finds none. Before anything is timed, a small network without recalibration was trained
for a step, so that what CUDA and cuDNN take to begin is left out; the network without
recalibration always goes first, so that what cuDNN takes to choose is its. cuDNN does not search.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers import BASE, OURS, VARIANTS, Workload, step_of
from reporting import append, heading

import mssar

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
LIMIT = 300  # seconds that a process may take
SETTING = ("resnet18", "eager", 32, 224)  # that the goals are for


@dataclass(frozen=True)
class Case:
    """A step after the first one, and how long it may take; one of the same size is from disk."""

    name: str
    batch: int
    size: int
    goal: float | None = None


def cases(batch: int, size: int) -> list[Case]:
    """What is measured from a batch of images of a size on; the first with nothing on disk."""
    return [
        Case("first", batch, size, 8.0),
        Case("kernels on disk", batch, size),
        Case("another batch", batch * 3 // 2, size, 0.3),
        Case("an odd batch", batch + 1, size, 0.3),
        Case("larger images", batch, size + 32, 2.0),
        Case("smaller images", batch, size - 24, 2.0),
    ]


# --- in a process of its own ---


class Network:
    """A network that is trained on random data of any size."""

    def __init__(self, kind: str, net: str, mode: str, device: torch.device) -> None:
        self.net, self.mode, self.device = net, mode, device
        self.model = VARIANTS[kind](net, device).to(device).train()
        self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def step(self, batch: int, size: int) -> float:
        """Seconds of a step, from nothing under way to nothing under way."""
        draw = torch.randn(batch, 3, size, size, device=self.device)
        x = draw.contiguous(memory_format=torch.channels_last)
        label = torch.zeros(batch, dtype=torch.int64, device=self.device)
        work = Workload("", self.net, batch, size, True, self.mode, self.device.type)
        step = step_of(self.model, work, (x, label))
        self._wait()
        begun = time.perf_counter()
        step()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def child(net: str, mode: str, sizes: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Steps of these sizes one after the other, each without recalibration first."""
    torch.backends.cudnn.benchmark = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(2):
        Network(BASE, net, "eager", device).step(4, 64)
    networks = {kind: Network(kind, net, mode, device) for kind in (BASE, OURS)}
    found = []
    for batch, size in sizes:
        took = {kind: network.step(batch, size) for kind, network in networks.items()}
        found.append({**took, "next": networks[OURS].step(batch, size)})
    return found


# --- around them ---


def measured(sizes: Sequence[tuple[int, int]], wanted: argparse.Namespace, caches: Path) -> Any:
    """The last step's times, by a process with these caches; or why there are none."""
    asked = [sys.executable, __file__, "--net", wanted.net, "--mode", wanted.mode, "--child"]
    asked += [f"{batch}x{size}" for batch, size in sizes]
    where = {name: str(caches / folder) for name, folder in CACHES.items()}
    try:
        done = subprocess.run(
            asked, env=os.environ | where, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"took more than {LIMIT} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        print("\n".join(said[-8:]), file=sys.stderr, flush=True)
        return said[-1]
    return json.loads(done.stdout.splitlines()[-1])[-1]


def measure(wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """A record a case, or a line about why there is none. The first fills the others' caches."""
    chosen = cases(wanted.batch, wanted.size)
    first, records = (chosen[0].batch, chosen[0].size), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="first-step-", ignore_cleanup_errors=True) as folder:
        kept = Path(folder, "kept")
        kept.mkdir()
        for number, case in enumerate(chosen):
            caches = kept if number == 0 else Path(folder, str(number))
            if number:
                shutil.copytree(kept, caches)
            other = (case.batch, case.size)
            found = measured([first] if other == first else [first, other], wanted, caches)
            if isinstance(found, str):
                print(f"{case.name} failed: {found}", flush=True)
                continue
            print(f"{case.name}: {found[OURS]:.2f} s", file=sys.stderr, flush=True)
            aimed = (wanted.net, wanted.mode, wanted.batch, wanted.size) == SETTING
            goal = case.goal if aimed else None
            said = {"case": case.name, "batch": case.batch, "size": case.size, "goal": goal}
            records.append({"net": wanted.net, "mode": wanted.mode, **said, **found})
    return records


def show(records: Sequence[dict[str, Any]], wanted: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("\n" + heading(f"{wanted.net}, {wanted.mode}, seconds of a first training step", device))
    print(f"{'':18}{'batch':>6}{'size':>6}{BASE:>9}{OURS:>9}{'then':>9}{'goal':>9}")
    for r in records:
        row = f"{r['case']:18}{r['batch']:6}{r['size']:6}"
        row += "".join(f"{r[part]:9.3f}" for part in (BASE, OURS, "next"))
        if r["goal"] is not None:
            row += f"{r['goal']:9.1f}  {'met' if r[OURS] <= r['goal'] else 'missed'}"
        print(row)
    append(wanted.json, device, records)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    net, mode, batch, size = SETTING
    add("--net", default=net, choices=mssar.list_models(), help="%(default)s")
    add("--mode", default=mode, choices=("eager", "compile"), help="%(default)s")
    add("--batch", type=int, default=batch, help="of the first step; %(default)s")
    add("--size", type=int, default=size, help="side of its images; %(default)s")
    add("--json", type=Path, metavar="FILE", help="append a line a row")
    add("--child", nargs="+", help=argparse.SUPPRESS)
    wanted = parser.parse_args(argv)
    if wanted.child:
        sizes = [(int(batch), int(size)) for batch, size in (s.split("x") for s in wanted.child)]
        print(json.dumps(child(wanted.net, wanted.mode, sizes)))
        return 0
    if wanted.batch < 2 or wanted.size < 32:
        parser.error(f"--batch is 2 or more and --size 32; got {wanted.batch} and {wanted.size}")
    records = measure(wanted)
    if records:
        show(records, wanted)
    return 0 if len(records) == len(cases(wanted.batch, wanted.size)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
