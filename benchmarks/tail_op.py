"""A residual block's tail alone (BN, recalibration, addition, relu), for overhead.py --op.

Without recalibration, and with modules of timm's, it is PyTorch's operations, compiled; with MS-SAR
it is the fused kernels. All are timed as CUDA graphs, in training, bf16, channels_last.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from peers import (
    BASE,
    OURS,
    TIMM,
    WARM_UP,
    MissingError,
    Step,
    captured,
    cast,
    has_triton,
    in_turns,
    lane,
)
from reporting import append, heading, told
from torch import Tensor, nn

import mssar
import mssar.tail
from mssar.lab.engine.timing import percentiles
from mssar.networks.recalibration import RECALIBRATIONS
from mssar.networks.registry import architecture
from mssar.networks.resnet import BasicBlock

SETS = 4  # of maps: for large ones together more than the L2 cache
USUAL = (BASE, OURS)
# Maps that a tail must move. Forward: x for its statistics; x and shortcut, to write the output.
# Backward: the output, its gradient and x, to write the shortcut's gradient; that and x, to write
# the gradient of x.
MAPS = {"forward": 4, "backward": 7}


@dataclass(frozen=True)
class Size:
    """A block's map, in the network that has it."""

    net: str
    side: int
    channels: int
    batch: int = 256

    def __str__(self) -> str:
        return f"{self.side}×{self.side}×{self.channels}"


MEMORY = (Size("resnet18", 56, 64), Size("resnet18", 28, 128))
BLOCKS = (
    *(Size("resnet18", 56 >> i, 64 << i) for i in range(4)),
    *(Size("resnext50", 56 >> i, 256 << i) for i in range(4)),
    *(Size("resnet20", 32 >> i, 16 << i, 128) for i in range(3)),
)


def recalibration(kind: str, net: str, device: torch.device) -> Callable[[int], nn.Module]:
    """What recalibrates a network's blocks: from channels to a module."""
    if kind == BASE:
        return RECALIBRATIONS[BASE]
    if kind == OURS:
        backend = "triton" if has_triton(device) else "auto"
        return partial(mssar.MSSAR, backend=backend, **architecture(net).defaults)
    return TIMM[kind]


TAILS = (BASE, *TIMM, OURS)


class Tail(nn.Module):
    """The end of one of this package's residual blocks."""

    def __init__(self, channels: int, recalibrate: Callable[[int], nn.Module]) -> None:
        super().__init__()
        block = BasicBlock(channels, channels, recalibration=recalibrate)
        self.norm, self.recalibrate = block.last_norm, block.recalibrate

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return mssar.tail(x, self.norm, self.recalibrate, shortcut)


def random_map(size: Size, device: torch.device) -> Tensor:
    """As a convolution leaves it: in bf16 on CUDA, where autocast is on."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (size.batch, size.channels, size.side, size.side)
    drawn = torch.randn(shape, device=device, dtype=dtype)
    return drawn.contiguous(memory_format=torch.channels_last)


def tail_steps(
    kind: str, size: Size, device: torch.device, *, compiled: bool
) -> tuple[Step, Step, Step]:
    """Forward, backward, and one after the other, each once for each of several sets of maps."""
    tail = Tail(size.channels, recalibration(kind, size.net, device)).to(device)
    wanted = tuple(tail.parameters())
    run: Any = torch.compile(tail, dynamic=False) if compiled else tail

    maps = partial(random_map, size, device)
    sets = [(maps().requires_grad_(), maps().requires_grad_(), maps()) for _ in range(SETS)]

    def forward() -> list[Tensor]:
        with cast(device, graphed=True):
            return [run(x, shortcut) for x, shortcut, _ in sets]

    def backward(outs: Sequence[Tensor] | None = None) -> list[Any]:
        return [
            torch.autograd.grad(out, (x, shortcut, *wanted), grad, retain_graph=outs is None)
            for out, (x, shortcut, grad) in zip(outs or kept, sets, strict=True)
        ]

    def both() -> list[Any]:
        return backward(forward())

    kept = forward()
    return forward, backward, both


def asked(wanted: argparse.Namespace) -> list[str]:
    return [kind for kind in TAILS if kind in wanted.variants]


def graphs(
    kinds: Sequence[str], size: Size, parts: Sequence[str]
) -> tuple[dict[tuple[str, str], Step], int]:
    """Graphs of the parts of each kind's tail that can be made, and how many kinds failed."""
    device, made, failed = torch.device("cuda"), dict[tuple[str, str], Step](), 0
    for kind in kinds:
        try:
            # A graph of a backward pass runs it again: what is kept for it may not be given away.
            with functorch_config.patch(donated_buffer=False):
                steps = tail_steps(kind, size, device, compiled=kind != OURS)
                for part, step in zip(("forward", "backward", "both"), steps, strict=True):
                    if part in parts:
                        for _ in range(WARM_UP):
                            step()
                        made[kind, part] = captured(step)
        except MissingError as why:
            print(f"{size}: {kind} left out: {why}", flush=True)
        except Exception as why:
            told(f"{size}: {kind}", why)
            failed += 1
    return made, failed


def tidy() -> None:
    """Leave nothing of a size to the next."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def against_memory(wanted: argparse.Namespace) -> int:
    """The tail's speed in bytes that must move, beside that of a copy; how many failed."""
    device, kinds, failed = torch.device("cuda"), asked(wanted), 0
    for size in MEMORY:
        bytes_ = 2 * size.batch * size.channels * size.side**2  # of a map in bf16
        with lane(device):
            source = torch.randint(256, (2**30,), dtype=torch.uint8, device=device)
            made, lost = graphs(kinds, size, tuple(MAPS))
            steps: dict[str, Step] = {"copy": partial(torch.empty_like(source).copy_, source)}
            steps |= {f"{kind} {part}": step for (kind, part), step in made.items()}
            moved = {f"{kind} {part}": SETS * MAPS[part] * bytes_ for kind, part in made}
            moved["copy"] = 2 * source.numel()
            times = in_turns(steps, device, wanted.seconds, wanted.rounds)
            del made, steps, source
        failed += lost
        speed = {name: moved[name] / percentiles(taken)[1] / 1e9 for name, taken in times.items()}
        print("\n" + heading(f"tail of {size}, batch {size.batch}", device))
        print(f"{'':18}{'ms':>10}{'TB/s':>9}{'of copy':>9}")
        records = []
        for name, taken in times.items():
            once = percentiles(taken)[1] / (1 if name == "copy" else SETS)
            share = speed[name] / speed["copy"]
            print(f"{name:18}{once:10.3f}{speed[name]:9.2f}{share:9.0%}", flush=True)
            said = {"side": size.side, "channels": size.channels, "batch": size.batch}
            found = {"median_ms": once, "terabytes_a_second": speed[name], "share": share}
            records.append({"op": name, **said, **found})
        append(wanted.json, device, records)
        tidy()
    return 1 if failed else 0


def by_block(wanted: argparse.Namespace) -> int:
    """What a tail's forward and backward take in every block of the networks; how many failed."""
    device, kinds, failed = torch.device("cuda"), asked(wanted), 0
    columns = "".join(f"{kind:>11}" for kind in kinds)
    print("\n" + heading("µs of a tail, forward and backward", device))
    print(f"{'':26}{columns}{'more':>11}")
    for size in BLOCKS:
        with lane(device):
            made, lost = graphs(kinds, size, ("both",))
            steps = {kind: step for (kind, _), step in made.items()}
            times = in_turns(steps, device, wanted.seconds, wanted.rounds) if steps else {}
            del made, steps
        failed += lost
        took = {kind: 1e3 * percentiles(taken)[1] / SETS for kind, taken in times.items()}
        row = "".join(f"{took[kind]:11.1f}" if kind in took else f"{'-':>11}" for kind in kinds)
        more = f"{took[OURS] - took[BASE]:11.1f}" if {OURS, BASE} <= took.keys() else f"{'-':>11}"
        print(f"{size!s:14}{size.net:12}{row}{more}", flush=True)
        said = {"net": size.net, "side": size.side, "channels": size.channels, "batch": size.batch}
        append(wanted.json, device, [{"op": k, **said, "median_us": v} for k, v in took.items()])
        tidy()
    return 1 if failed else 0


WAYS: dict[str, Callable[[argparse.Namespace], int]] = {
    "memory": against_memory,
    "blocks": by_block,
}
SECONDS = {"memory": 3.0, "blocks": 1.0}  # of measuring, a size
