"""What the benchmarks compare, and how it is timed: networks without recalibration, with this
package's, and with other people's."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mssar
from mssar.lab.engine.timing import turn
from mssar.networks.registry import architecture
from mssar.surgery.foreign import build, imported, is_foreign

WARM_UP = 3  # steps before any is timed or captured: libraries search and set themselves up

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


def without(net: str, _: torch.device) -> nn.Module:
    """A network without recalibration."""
    return build(net)


def plain(recalibration: str, net: str, _: torch.device) -> nn.Module:
    """A network in plain PyTorch."""
    return build(net, recalibration, backend="reference")


def own(recalibration: str, net: str, device: torch.device) -> nn.Module:
    """This package's best: fused kernels where they can be."""
    backend = "triton" if has_triton(device) else "auto"
    return build(net, recalibration, backend=backend)


def obvious(net: str, _: torch.device) -> nn.Module:
    if is_foreign(net):
        raise MissingError("it is not put into networks of others")
    reduction = architecture(net).defaults.get("reduction", 1)
    return mssar.create_model(net, partial(Obvious, reduction=reduction))


def of_timm(file: str, kind: str, options: dict[str, Any], channels: int) -> nn.Module:
    """A module of timm's for so many channels."""
    if importlib.util.find_spec("timm") is None:
        raise MissingError("timm is not installed")
    try:
        module = importlib.import_module(f"timm.layers.{file}")  # not all are in timm.layers itself
    except (ImportError, RuntimeError) as why:  # such as a torchvision for another torch
        raise MissingError(f"timm cannot be imported: {why}") from None
    if not hasattr(module, kind):
        raise MissingError(f"this timm has no {kind}")
    made: nn.Module = getattr(module, kind)(channels, **options)
    return made


def with_timm(name: str, net: str, _: torch.device) -> nn.Module:
    """A DenseNet's recalibrates the new channels by themselves; timm's networks have a place."""
    if not is_foreign(net):
        return mssar.create_model(net, TIMM[name])
    library, short = net.split(":", 1)
    if library != "timm":
        raise MissingError(f"{library} has no place for it")

    def attention(channels: int, **_kind: Any) -> nn.Module:
        return TIMM[name](channels)

    made: nn.Module = imported("timm").create_model(short, block_args={"attn_layer": attention})
    return made


SIXTEENTH: dict[str, Any] = {"rd_ratio": 1 / 16}
# Gather-excite without parameters, each position weighted by the mean of the 7 × 7 around the
# nearest of every fourth: timm's global extent is SE again, and its MLP fails to build in 1.0.30.
EXTENT: dict[str, Any] = {"extent": 4, "use_mlp": False}

TIMM: dict[str, Callable[[int], nn.Module]] = {
    "timm-se": partial(of_timm, "squeeze_excite", "SEModule", SIXTEENTH),
    "timm-cbam": partial(of_timm, "cbam", "CbamModule", SIXTEENTH),
    "timm-eca": partial(of_timm, "eca", "EcaModule", {}),
    "timm-ge": partial(of_timm, "gather_excite", "GatherExcite", EXTENT),
}
VARIANTS: dict[str, Callable[[str, torch.device], nn.Module]] = {
    "none": without,
    **{name: partial(with_timm, name) for name in TIMM},
    "se": partial(own, "se"),
    "obvious": obvious,
    "mssar-reference": partial(plain, "mssar"),
    "mssar": partial(own, "mssar"),
}
BASE = "none"  # whose time costs are over
OURS = "mssar"


@dataclass
class Ready:
    """A variant that can be timed."""

    step: Step
    peak: int | None  # bytes of CUDA memory: weights, gradients and maps


def cast(device: torch.device, graphed: bool = False) -> AbstractContextManager[Any]:
    """bf16 on CUDA. With a graph nothing is kept for later, so that it holds all casts."""
    on = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=not graphed)


def step_of(model: nn.Module, work: Workload, data: tuple[Tensor, Tensor]) -> Step:
    (x, label), device = data, data[0].device
    run: Any = torch.compile(model, dynamic=False) if "compile" in work.mode else model
    graphed = "graph" in work.mode

    def train() -> None:
        model.zero_grad(set_to_none=True)
        with cast(device, graphed):
            loss = F.cross_entropy(run(x), label)
        loss.backward()

    @torch.inference_mode()
    def infer() -> None:
        with cast(device, graphed):
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

    def once(name: str) -> list[float]:
        return turn(lambda _: steps[name](), device)

    for name in names:
        once(name)
    end, done = time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < end:
        first = done % len(names)
        for name in names[first:] + names[:first]:
            times[name] += once(name)
        done += 1
    return times
