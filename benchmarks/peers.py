"""What benchmarks/overhead.py compares, and how it is timed: networks without recalibration, with
this package's, and with other people's."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mssar
import mssar.tail
from mssar.networks.registry import architecture

WARM_UP = 3  # steps before any is timed or captured: libraries search and set themselves up

SETS = 4  # of maps, for the fused tail alone

Step = Callable[[], object]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Workload:
    """A network, what is done with it, and what recalibrating it may cost."""

    name: str
    net: str
    batch: int
    size: int
    train: bool
    mode: str
    device: str = "cuda"
    goal: float | None = None  # time over the network without recalibration, less 1

    def __str__(self) -> str:
        what = "training" if self.train else "inference"
        return f"{self.net}, batch {self.batch}, {self.size}×{self.size}, {what}, {self.mode}"


class MissingError(Exception):
    """A variant needs something that is not here; the others can go on."""


class Obvious(nn.Module):
    """MS-SAR as one first writes it: adaptive pooling, a branch a scale, nearest upsampling."""

    def __init__(
        self, channels: int, scales: tuple[int, ...] = (1, 2, 4), reduction: int = 1
    ) -> None:
        super().__init__()
        hidden = max(1, channels // (len(scales) * reduction))
        self.scales = scales
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, hidden, 1, bias=False),
                nn.BatchNorm2d(hidden),
                nn.ReLU(),
                nn.Conv2d(hidden, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.Sigmoid(),
            )
            for _ in scales
        )

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        z = torch.zeros_like(x)
        for scale, branch in zip(self.scales, self.branches, strict=True):
            z = z + F.interpolate(branch(F.adaptive_avg_pool2d(x, scale)), size=size)
        return x * (z / len(self.scales))


def has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def plain(recalibration: str, net: str, _: torch.device) -> nn.Module:
    """A network in plain PyTorch."""
    return mssar.create_model(net, recalibration, backend="reference")


def own(recalibration: str, net: str, device: torch.device) -> nn.Module:
    """This package's best: fused kernels where they can be."""
    backend = "triton" if has_triton(device) else "auto"
    return mssar.create_model(net, recalibration, backend=backend)


def fused(recalibration: str, net: str, device: torch.device) -> nn.Module:
    """The same, and nothing where there are no fused kernels."""
    if not has_triton(device):
        raise MissingError("fused kernels need a CUDA device and Triton")
    if architecture(net).staged:
        raise MissingError("a DenseNet's steps have no tail to fuse")
    return own(recalibration, net, device)


def obvious(net: str, _: torch.device) -> nn.Module:
    reduction = architecture(net).defaults.get("reduction", 1)
    return mssar.create_model(net, partial(Obvious, reduction=reduction))


def of_timm(file: str, kind: str, options: dict[str, Any], net: str, _: torch.device) -> nn.Module:
    """A module of timm's; a DenseNet's recalibrates the new channels by themselves."""
    if importlib.util.find_spec("timm") is None:
        raise MissingError("timm is not installed")
    try:
        module = importlib.import_module(f"timm.layers.{file}")  # not all are in timm.layers itself
    except (ImportError, RuntimeError) as why:  # such as a torchvision for another torch
        raise MissingError(f"timm cannot be imported: {why}") from None
    if not hasattr(module, kind):
        raise MissingError(f"this timm has no {kind}")
    made = getattr(module, kind)
    return mssar.create_model(net, lambda channels: made(channels, **options))


SIXTEENTH: dict[str, Any] = {"rd_ratio": 1 / 16}
# Gather-excite without parameters, each position weighted by the mean of the 7 × 7 around the
# nearest of every fourth: timm's global extent is SE again, and its MLP fails to build in 1.0.30.
EXTENT: dict[str, Any] = {"extent": 4, "use_mlp": False}

VARIANTS: dict[str, Callable[[str, torch.device], nn.Module]] = {
    "none": partial(plain, "none"),
    "none-fused": partial(fused, "none"),
    "timm-se": partial(of_timm, "squeeze_excite", "SEModule", SIXTEENTH),
    "timm-cbam": partial(of_timm, "cbam", "CbamModule", SIXTEENTH),
    "timm-eca": partial(of_timm, "eca", "EcaModule", {}),
    "timm-ge": partial(of_timm, "gather_excite", "GatherExcite", EXTENT),
    "se": partial(own, "se"),
    "obvious": obvious,
    "mssar-reference": partial(plain, "mssar"),
    "mssar": partial(own, "mssar"),
}
BASES = ("none", "none-fused")  # costs are over the faster of these
OURS = "mssar"


@dataclass
class Ready:
    """A variant that can be timed."""

    step: Step
    peak: int | None  # bytes of CUDA memory: weights, gradients and maps


def cast(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 on CUDA. Nothing is kept between steps, so that a graph holds all casts."""
    on = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=False)


def step_of(model: nn.Module, work: Workload, data: tuple[Tensor, Tensor]) -> Step:
    (x, label), device = data, data[0].device
    run: Any = torch.compile(model, dynamic=False) if "compile" in work.mode else model

    def train() -> None:
        model.zero_grad(set_to_none=True)
        with cast(device):
            loss = F.cross_entropy(run(x), label)
        loss.backward()

    @torch.inference_mode()
    def infer() -> None:
        with cast(device):
            run(x)

    return train if work.train else infer


def captured(step: Step, pool: Any = None) -> Step:
    """A CUDA graph of a step. Gradients that it makes keep their place; graphs of one pool share
    room for everything else. An old graph that is collected meanwhile would break this one."""

    def replay(_kept: Step = step) -> None:  # the graph works on what belongs to the step
        graph.replay()

    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()
    try:
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            step()
    finally:
        gc.enable()
    return replay


def ready(name: str, work: Workload, data: tuple[Tensor, Tensor], pool: Any = None) -> Ready:
    """A variant, made, warmed up, and captured where its mode says so."""
    torch.manual_seed(0)
    device, peak = data[0].device, None
    cuda = device.type == "cuda"
    gc.collect()
    held = torch.cuda.memory_allocated() if cuda else 0
    model = VARIANTS[name](work.net, device).to(device).train(work.train)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step = step_of(model, work, data)
    for _ in range(WARM_UP):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
    if cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - held
    if "graph" in work.mode:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        step = captured(step, pool)
        step()
    return Ready(step, peak)


def lane(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own for warming up, capture and replay alike; a CPU has none."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()


def in_turns(steps: dict[str, Step], device: torch.device, seconds: float, rounds: int) -> Times:
    """Milliseconds of each step: rounds in an order that rotates, the first of them not counted."""
    names, times = list(steps), {name: list[float]() for name in steps}
    turn = _round_on_gpu if device.type == "cuda" else _round
    turn(list(steps.values()))
    end, done = time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < end:
        first = done % len(names)
        order = names[first:] + names[:first]
        for name, taken in zip(order, turn([steps[name] for name in order]), strict=True):
            times[name].append(taken)
        done += 1
    return times


def _round(steps: Sequence[Step]) -> list[float]:
    found = []
    for step in steps:
        begun = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - begun))
    return found


def _round_on_gpu(steps: Sequence[Step]) -> list[float]:
    """One step is not timed: while it runs the others are issued."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    steps[-1]()
    marks[0].record()
    for step, mark in zip(steps, marks[1:], strict=True):
        step()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(times, dtype=torch.float64).quantile(at).tolist()
    return low, middle, high


class Tail(nn.Module):
    """The end of a residual block, fused."""

    def __init__(self, channels: int, recalibrate: nn.Module) -> None:
        super().__init__()
        self.norm, self.recalibrate = nn.BatchNorm2d(channels), recalibrate

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return mssar.tail.tail(x, self.norm, self.recalibrate, shortcut)


TAILS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda _: mssar.tail.Nothing("triton"),
    "mssar": lambda channels: mssar.MSSAR(channels, backend="triton"),
}


def tail_pair(channels: int, side: int, batch: int, kind: str = "mssar") -> tuple[Step, Step]:
    """Forward and backward of a fused tail, once for each of several sets of maps: together these
    are larger than the L2 cache."""
    device = torch.device("cuda")
    tail = Tail(channels, TAILS[kind](channels)).to(device)
    wanted = tuple(tail.parameters())

    def maps() -> Tensor:
        drawn = torch.randn(batch, channels, side, side, device=device, dtype=torch.bfloat16)
        return drawn.contiguous(memory_format=torch.channels_last)

    sets = [(maps().requires_grad_(), maps().requires_grad_(), maps()) for _ in range(SETS)]

    def forward() -> list[Tensor]:
        with cast(device):
            return [tail(x, shortcut) for x, shortcut, _ in sets]

    outs = forward()

    def backward() -> list[Any]:
        return [
            torch.autograd.grad(out, (x, shortcut, *wanted), grad, retain_graph=True)
            for out, (x, shortcut, grad) in zip(outs, sets, strict=True)
        ]

    return forward, backward
