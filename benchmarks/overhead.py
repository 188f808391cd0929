"""What recalibration costs: networks with none, this package's MS-SAR, and other people's modules.

    python benchmarks/overhead.py --workload resnet18-train resnet18-infer --json overhead.jsonl
    python benchmarks/overhead.py --workload 'resnet18-eager-*' --variants none,timm-se,mssar
    python benchmarks/overhead.py --net timm:resnet50 --train --variants none,timm-se,mssar
    python benchmarks/overhead.py --net resnet20 --batch 64 --train --mode compile
    python benchmarks/overhead.py --op blocks

Prints a table a workload, and at the end one of them all. A row is a variant: the median of timed
steps, their 20th and 80th percentile, the median over that of the network without recalibration,
and on CUDA the peak memory of a step, over that network's. Random data, channels_last; on CUDA
bf16 autocast with fp32 parameters, on a CPU fp32. A training step is zero_grad, forward,
cross-entropy and backward, without an optimiser. A step takes as long as the device or the host
needs for it, whichever is longer. The variants take turns, so that a machine that slows down slows
all of them down. For inference all variants alike keep their BN, which is not folded into
convolutions.

--op times the tail alone (BN, recalibration, addition, relu): against the memory it has to move,
or with --op blocks the tails of all blocks of the networks.

Variants: none; timm-se, timm-cbam, timm-eca and timm-ge (single-stage in a DenseNet); se,
mssar-reference (plain PyTorch) and mssar; obvious, which is MS-SAR as one first writes it. Those
that need timm are left out without it. The exit status is 1 if a variant failed otherwise.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import tail_op
import torch
from peers import (
    BASE,
    OURS,
    VARIANTS,
    MissingError,
    Ready,
    Times,
    Workload,
    cast,
    in_turns,
    lane,
    ready,
)
from reporting import append, heading, percent, told, verdict
from torch import nn

from mssar.lab.engine.timing import percentiles
from mssar.surgery.foreign import architecture

MODES = ("eager", "graph", "compile", "compile+graph")
MEMORY_GOAL = 0.05  # of training on CUDA
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # which all processes of a run share


def _preset(name: str, batch: int, goal: float | None) -> Workload:
    """By its name: network, how unless it is compiled and graphed, what, batch if not the usual."""
    net, *how, what = name.removesuffix(f"-{batch}").split("-")
    size = architecture(net).size[1]
    if what == "cpu":
        return Workload(name, net, batch, size, False, "compile", "cpu", goal)
    mode = how[0] if how else "compile+graph"
    return Workload(name, net, batch, size, what == "train", mode, "cuda", goal)


WORKLOADS = {
    name: _preset(name, batch, goal)
    for name, batch, goal in (
        ("resnet18-train", 256, 0.03),
        ("resnet34-train", 256, 0.03),
        ("resnext50-train", 256, 0.03),
        ("resnet18-infer", 256, 0.02),
        ("resnet34-infer", 256, 0.02),
        ("resnext50-infer", 256, 0.02),
        ("resnet20-train", 128, 0.10),
        ("resnet56-train", 128, 0.10),
        ("densenet100-train", 64, 0.10),
        ("resnet18-cpu", 8, 0.03),
        # As people run networks before they look for speed, and in batches that leave a GPU idle.
        ("resnet18-eager-train", 256, 0.08),
        ("resnet18-eager-infer", 256, 0.08),
        ("resnet18-eager-train-32", 32, 0.25),
        ("resnet18-eager-infer-32", 32, 0.30),
        ("resnet18-compile-train", 256, 0.06),
        ("resnet18-compile-infer", 256, None),
        ("resnet18-compile-train-32", 32, None),
        ("resnet18-compile-infer-32", 32, None),
        ("resnet18-train-32", 32, None),
        ("resnet18-infer-32", 32, None),
    )
}


def prepare(work: Workload, variants: Sequence[str]) -> tuple[dict[str, Ready], int]:
    """All variants that can be made, and how many failed."""
    device, made, failed = torch.device(work.device), dict[str, Ready](), 0
    x = torch.randn(work.batch, 3, work.size, work.size, device=device)
    label = torch.randint(architecture(work.net).num_classes, (work.batch,), device=device)
    data = (x.contiguous(memory_format=torch.channels_last), label)
    pool = torch.cuda.graph_pool_handle() if "graph" in work.mode else None
    if device.type == "cuda":  # a library's workspace stays: the first would be charged for it
        with cast(device):
            nn.Linear(64, 64, device=device)(torch.randn(64, 64, device=device)).sum().backward()
    for name in variants:
        begun = time.perf_counter()
        try:
            made[name] = ready(name, work, data, pool)
        except MissingError as why:
            print(f"{work.name}: {name} left out: {why}", flush=True)
        except Exception as why:
            told(f"{work.name}: {name}", why)
            failed += 1
        else:
            took = time.perf_counter() - begun
            print(f"{work.name}: {name} ready in {took:.1f} s", file=sys.stderr, flush=True)
    return made, failed


def summary(work: Workload, made: dict[str, Ready], times: Times) -> list[dict[str, Any]]:
    """A record a variant."""
    found = {name: percentiles(taken) for name, taken in times.items()}
    base = found[BASE][1] if BASE in found else None
    plain = made[BASE].peak if BASE in made else None
    records = []
    for name, (low, middle, high) in found.items():
        peak = made[name].peak
        record = {
            "workload": work.name,
            **{key: value for key, value in asdict(work).items() if key != "name"},
            "variant": name,
            "median_ms": middle,
            "p20_ms": low,
            "p80_ms": high,
            "rounds": len(times[name]),
            "cost": middle / base - 1 if base else None,
            "peak_bytes": peak,
            "memory": peak / plain - 1 if peak and plain else None,
        }
        records.append(record)
    return records


def show(work: Workload, records: Sequence[dict[str, Any]]) -> None:
    print("\n" + heading(f"{work.name}: {work}", torch.device(work.device)))
    print(f"{'':16}{'ms':>10}{'p20':>10}{'p80':>10}{'cost':>11}{'MiB':>9}{'memory':>11}")
    for r in records:
        room = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**20:9.0f}"
        taken = f"{r['median_ms']:10.3f}{r['p20_ms']:10.3f}{r['p80_ms']:10.3f}"
        cost, memory = percent(r["cost"]), percent(r["memory"])
        print(f"{r['variant']:16}{taken}{cost:>11}{room:>9}{memory:>11}".rstrip())
    for r in records:
        if r["variant"] == OURS and work.goal is not None:
            print(f"{OURS}: time {verdict(r['cost'], work.goal)}")
            if work.train and r["memory"] is not None:
                print(f"{OURS}: memory {verdict(r['memory'], MEMORY_GOAL)}")
    sys.stdout.flush()


def show_all(works: Sequence[Workload], records: Sequence[dict[str, Any]]) -> None:
    """What every workload costs, in a line each."""
    costs = {(r["workload"], r["variant"]): r for r in records}
    names = [name for name in VARIANTS if any(r["variant"] == name != BASE for r in records)]
    wide = max(len(work.name) for work in works)
    heads = "".join(f"{name:>{max(10, len(name) + 2)}}" for name in names)
    print(f"\n{'cost':{wide}}{f'{BASE}, ms':>12}{heads}{'goal':>8}")
    for work in works:
        base = costs.get((work.name, BASE))
        row = f"{work.name:{wide}}{base['median_ms'] if base else float('nan'):12.3f}"
        for name in names:
            r = costs.get((work.name, name))
            row += f"{percent(r['cost']) if r else '-':>{max(10, len(name) + 2)}}"
        if work.goal is not None:
            row += f"{100 * work.goal:+6.0f} %"
            ours = costs.get((work.name, OURS))
            if ours and ours["cost"] is not None:
                row += "  met" if ours["cost"] <= work.goal else "  missed"
        print(row)
    sys.stdout.flush()


def measure(work: Workload, wanted: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Print a workload's table; its records, and how many variants failed."""
    device, records = torch.device(work.device), list[dict[str, Any]]()
    with lane(device):
        made, failed = prepare(work, wanted.variants)
        if made and not wanted.compile_only:
            steps = {name: one.step for name, one in made.items()}
            times = in_turns(steps, device, wanted.seconds, wanted.rounds)
            records = summary(work, made, times)
            show(work, records)
            append(wanted.json, device, records)
    return records, failed


def tidy(work: Workload) -> None:
    """Leave nothing of a workload to the next."""
    if "compile" in work.mode:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def compile_ahead(
    works: Sequence[Workload], wanted: argparse.Namespace, argv: Sequence[str]
) -> None:
    """Fill the compiler's cache on disk from several processes; whatever fails there fails again
    here. What they found to be fast while they shared a GPU is thrown away."""
    before = choices()

    def child(work: Workload, variant: str) -> None:
        begun, named = time.perf_counter(), ["--workload", work.name] if wanted.workload else []
        what = [*argv, *named, "--variants", variant, "--mode", "compile", "--compile-only"]
        subprocess.run([sys.executable, __file__, *what], capture_output=True, check=False)
        took = time.perf_counter() - begun
        print(f"{work.name}: {variant} compiled in {took:.1f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(wanted.jobs) as pool:
        compiled = [work for work in works if "compile" in work.mode]
        jobs = [pool.submit(child, work, name) for work in compiled for name in wanted.variants]
    for job in jobs:
        job.result()
    for choice in choices() - before:
        choice.unlink()


def choices() -> set[Path]:
    """What the compiler found to be fast."""
    return set(Path(os.environ[CACHE]).rglob("*.best_config"))


@contextmanager
def shared_cache() -> Iterator[None]:
    """The compiler's cache in a directory that goes away again; or where the user wants it."""
    if os.environ.get(CACHE):
        yield
        return
    # A process that compiles may still write when all is done.
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as directory:
        os.environ[CACHE] = directory
        try:
            yield
        finally:
            del os.environ[CACHE]


def _network(name: str) -> str:
    try:
        architecture(name)
    except ValueError as why:
        raise argparse.ArgumentTypeError(str(why)) from None
    return name


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Workload]]:
    """The command line, and the workloads that it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    named = "".join(f"\n  {work.name}: {work}" for work in WORKLOADS.values())
    add("--workload", nargs="+", metavar="NAME", help=f"all, or some of (* is any){named}")
    add("--net", type=_network, help="instead of a workload, also timm:NAME; resnet20")
    add("--batch", type=int, help="with --net; 128")
    add("--size", type=int, help="with --net: side of an image; the network's own")
    add("--train", action="store_true", help="with --net: forward and backward; else inference")
    add("--mode", choices=MODES, help="the workload's own; with --net eager")
    fewer = f"; all, with --op {','.join(tail_op.USUAL)}"
    add("--variants", help=f"some of {','.join(VARIANTS)}{fewer}")
    add("--seconds", type=float, help="of measuring; 10 a workload, 3 or 1 a size of --op")
    add("--rounds", type=int, default=8, help="at least so many; %(default)s")
    add("--jobs", type=int, default=0, help="processes that compile ahead; each needs memory")
    add("--json", type=Path, metavar="FILE", help="append a line a variant")
    what = "the tail alone: against a copy, or by block"
    add("--op", nargs="?", const="memory", choices=list(tail_op.WAYS), help=what)
    add("--compile-only", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args(argv)
    known = tail_op.TAILS if wanted.op else tuple(VARIANTS)
    usual = tail_op.USUAL if wanted.op else known
    wanted.variants = wanted.variants.split(",") if wanted.variants else list(usual)
    if unknown := [name for name in wanted.variants if name not in known]:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(known)}")
    if wanted.rounds < 1:
        parser.error(f"--rounds is 1 or more; got {wanted.rounds}")
    cuda = torch.cuda.is_available()
    if wanted.op and not cuda:
        parser.error("--op needs a CUDA device")
    if wanted.seconds is None:
        wanted.seconds = tail_op.SECONDS[wanted.op] if wanted.op else 10.0
    if wanted.workload and (wanted.net or wanted.batch or wanted.size or wanted.train):
        parser.error("--net, --batch, --size and --train are for a workload without a name")
    works = []
    for asked in wanted.workload or []:
        found = [w for w in WORKLOADS.values() if asked == "all" or fnmatch(w.name, asked)]
        if not found:
            parser.error(f"no workload {asked!r}; there are all, {', '.join(WORKLOADS)}")
        works += [work for work in found if work not in works]
    if not works:
        net, device = wanted.net or "resnet20", "cuda" if cuda else "cpu"
        size = wanted.size or architecture(net).size[1]
        works = [Workload(net, net, wanted.batch or 128, size, wanted.train, "eager", device)]
    works = [replace(work, mode=wanted.mode or work.mode) for work in works]
    if lost := [work for work in works if work.device == "cuda" and not cuda]:
        if wanted.workload != ["all"]:
            parser.error(f"{lost[0].name} needs a CUDA device")
        print(f"left out without a CUDA device: {', '.join(work.name for work in lost)}")
    works = [work for work in works if work not in lost]
    if wanted.mode and "graph" in wanted.mode and any(work.device == "cpu" for work in works):
        parser.error("a CPU has no graphs; --mode is eager or compile there")
    return wanted, works


def main(argv: Sequence[str]) -> int:
    wanted, works = parsed(argv)
    torch.backends.cudnn.benchmark = True  # shapes stay the same: worth a search
    if wanted.op:
        return tail_op.WAYS[wanted.op](wanted)
    compiled = any("compile" in work.mode for work in works)
    ahead = compiled and wanted.jobs and not wanted.compile_only
    records, failed = list[dict[str, Any]](), 0
    # The first thing, since torch._dynamo names a directory when it is imported.
    with shared_cache() if ahead else nullcontext():
        if compiled:  # variants share code, and none may be given up on
            torch._dynamo.config.cache_size_limit = 64
        if ahead:
            compile_ahead(works, wanted, argv)
        for work in works:
            try:
                found, lost = measure(work, wanted)
            except Exception as why:  # the other workloads go on
                found, lost = [], 1
                told(work.name, why)
            records, failed = records + found, failed + lost
            tidy(work)
    if len(works) > 1 and records:
        show_all(works, records)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
