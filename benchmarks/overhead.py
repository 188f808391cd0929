"""What recalibration costs: networks with none, this package's MS-SAR, and other people's modules.

    python benchmarks/overhead.py --workload resnet18-train resnet18-infer --json overhead.jsonl
    python benchmarks/overhead.py --net resnet20 --batch 64 --train --mode compile
    python benchmarks/overhead.py --op

Prints a table a workload. A row is a variant: the median of timed steps, their 20th and 80th
percentile, the median over that of the faster network without recalibration (plain, or with this
package's fused tail), and on CUDA the peak memory of a step, over that of the plain network.
Random data, channels_last; on CUDA bf16 autocast with fp32 parameters, on a CPU fp32. A training
step is zero_grad, forward, cross-entropy and backward, without an optimiser. The variants take
turns, so that a machine that slows down slows all of them down. For inference all variants alike
keep their BN, which is not folded into convolutions.

--op times the fused tail alone (BN, MS-SAR, addition, relu) against the memory it has to move.

Variants: none and none-fused; timm-se, timm-cbam, timm-eca and timm-ge (single-stage in a
DenseNet); se, mssar-reference (plain PyTorch) and mssar; obvious, which is MS-SAR as one first
writes it. Those that need timm, CUDA or Triton are left out where these are missing. The exit
status is 1 if a variant failed otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peers import (
    BASES,
    OURS,
    SETS,
    TAILS,
    VARIANTS,
    WARM_UP,
    MissingError,
    Ready,
    Step,
    Times,
    Workload,
    captured,
    cast,
    in_turns,
    lane,
    percentiles,
    ready,
    tail_pair,
)
from torch import nn

import mssar
from mssar.lab.engine import provenance
from mssar.networks.registry import architecture

MODES = ("eager", "graph", "compile", "compile+graph")
MEMORY_GOAL = 0.05  # of training on CUDA
OPS = ((56, 64, 256), (28, 128, 256))  # side, channels, batch
# Maps that a tail must move. Forward: x for its statistics; x and shortcut, to write the output.
# Backward: the output, its gradient and x, to write the shortcut's gradient; that and x, to write
# the gradient of x.
MAPS = {"forward": 4, "backward": 7}
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # which all processes of a run share


def _preset(name: str, batch: int, goal: float) -> Workload:
    net, what = name.split("-")
    cpu, size = what == "cpu", architecture(net).size[1]
    how = ("compile", "cpu") if cpu else ("compile+graph", "cuda")
    return Workload(name, net, batch, size, what == "train", *how, goal)


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
            traceback.print_exc(limit=-3)
            said = (str(why).strip() or "no reason given").splitlines()[0]
            print(f"{work.name}: {name} failed: {type(why).__name__}: {said}", flush=True)
            failed += 1
        else:
            took = time.perf_counter() - begun
            print(f"{work.name}: {name} ready in {took:.1f} s", file=sys.stderr, flush=True)
    return made, failed


def summary(work: Workload, made: dict[str, Ready], times: Times) -> list[dict[str, Any]]:
    """A record a variant."""
    found = {name: percentiles(taken) for name, taken in times.items()}
    base = min((found[name][1] for name in BASES if name in found), default=None)
    plain = made["none"].peak if "none" in made else None
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
    where = provenance.hardware(torch.device(work.device))
    print(f"\n{work.name}: {work}, {where}, {', '.join(f'{k} {v}' for k, v in versions().items())}")
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


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def verdict(share: float | None, goal: float) -> str:
    if share is None:
        return f"unknown without {BASES[0]}  goal {100 * goal:+.0f} %"
    return f"{percent(share)}  goal {100 * goal:+.0f} %: {'met' if share <= goal else 'missed'}"


def versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("triton", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def append(path: Path | None, device: torch.device, records: Sequence[dict[str, Any]]) -> None:
    if path is None:
        return
    code = {k: v for k, v in provenance.code().items() if k != "version"}
    common = {"hardware": provenance.hardware(device), **versions(), **code}
    with path.open("a") as file:
        file.writelines(json.dumps(record | common) + "\n" for record in records)


def measure(work: Workload, wanted: argparse.Namespace) -> int:
    """Print a workload's table; how many variants failed."""
    device = torch.device(work.device)
    with lane(device):
        made, failed = prepare(work, wanted.variants)
        if made and not wanted.compile_only:
            steps = {name: one.step for name, one in made.items()}
            times = in_turns(steps, device, wanted.seconds, wanted.rounds)
            records = summary(work, made, times)
            show(work, records)
            append(wanted.json, device, records)
    return failed


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


def against_memory(wanted: argparse.Namespace) -> None:
    """The fused tail's speed in bytes that must move, beside that of a copy."""
    device = torch.device("cuda")
    for side, channels, batch in OPS:
        size = 2 * batch * channels * side**2  # of a map in bf16
        with lane(device):
            source = torch.randint(256, (2**30,), dtype=torch.uint8, device=device)
            steps: dict[str, Step] = {"copy": partial(torch.empty_like(source).copy_, source)}
            moved = {"copy": 2 * source.numel()}
            for kind in TAILS:
                pair = tail_pair(channels, side, batch, kind)
                for (part, maps), step in zip(MAPS.items(), pair, strict=True):
                    for _ in range(WARM_UP):
                        step()
                    steps[f"{kind} {part}"] = captured(step)
                    moved[f"{kind} {part}"] = SETS * maps * size
            times = in_turns(steps, device, wanted.seconds, wanted.rounds)
        speed = {name: moved[name] / percentiles(taken)[1] / 1e9 for name, taken in times.items()}
        print(f"\ntail of {side}×{side}×{channels}, batch {batch}, {provenance.hardware(device)}")
        print(f"{'':16}{'ms':>10}{'TB/s':>9}{'of copy':>9}")
        records = []
        for name, taken in times.items():
            once = percentiles(taken)[1] / (1 if name == "copy" else SETS)
            share = speed[name] / speed["copy"]
            print(f"{name:16}{once:10.3f}{speed[name]:9.2f}{share:9.0%}", flush=True)
            said = {"side": side, "channels": channels, "batch": batch, "median_ms": once}
            records.append({"op": name, **said, "terabytes_a_second": speed[name], "share": share})
        append(wanted.json, device, records)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Workload]]:
    """The command line, and the workloads that it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    known = "".join(f"\n  {work.name}: {work}" for work in WORKLOADS.values())
    add("--workload", nargs="+", metavar="NAME", help=f"all, or some of{known}")
    add("--net", choices=mssar.list_models(), help="instead of a workload; resnet20")
    add("--batch", type=int, help="with --net; 128")
    add("--size", type=int, help="with --net: side of an image; the network's own")
    add("--train", action="store_true", help="with --net: forward and backward; else inference")
    add("--mode", choices=MODES, help="the workload's own; with --net eager")
    add("--variants", default=",".join(VARIANTS), help="some of %(default)s")
    add("--seconds", type=float, default=10.0, help="of measuring, a workload; %(default)s")
    add("--rounds", type=int, default=20, help="at least so many; %(default)s")
    add("--jobs", type=int, default=0, help="processes that compile ahead; each needs memory")
    add("--json", type=Path, metavar="FILE", help="append a line a variant")
    add("--op", action="store_true", help="the fused tail alone, against a copy")
    add("--compile-only", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args(argv)
    wanted.variants = wanted.variants.split(",")
    if unknown := [name for name in wanted.variants if name not in VARIANTS]:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    if wanted.rounds < 1:
        parser.error(f"--rounds is 1 or more; got {wanted.rounds}")
    cuda = torch.cuda.is_available()
    if wanted.op and not cuda:
        parser.error("--op needs a CUDA device")
    if wanted.workload and (wanted.net or wanted.batch or wanted.size or wanted.train):
        parser.error("--net, --batch, --size and --train are for a workload without a name")
    names = list(WORKLOADS) if wanted.workload == ["all"] else wanted.workload or []
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"no workload {unknown[0]!r}; there are all, {', '.join(WORKLOADS)}")
    works = [WORKLOADS[name] for name in names]
    if not names:
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
        against_memory(wanted)
        return 0
    compiled = any("compile" in work.mode for work in works)
    ahead = compiled and wanted.jobs and not wanted.compile_only
    failed = 0
    # The first thing, since torch._dynamo names a directory when it is imported.
    with shared_cache() if ahead else nullcontext():
        if compiled:  # variants share code, and none may be given up on
            torch._dynamo.config.cache_size_limit = 64
        if ahead:
            compile_ahead(works, wanted, argv)
        for work in works:
            failed += measure(work, wanted)
            tidy(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
