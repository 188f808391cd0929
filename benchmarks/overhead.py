"""What recalibration costs in time: networks with none, SE, the obvious MS-SAR and this package's.

    python benchmarks/overhead.py --net resnet18 --batch 64 --size 224 --train --compile

Prints one row a recalibration: the median of timed steps, their 20th and 80th percentile, the
median over that of the network without recalibration, and peak memory on CUDA. Random data; the
variants take turns, so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mssar
from mssar.networks.registry import architecture


class Obvious(nn.Module):
    """MS-SAR as one first writes it: adaptive pooling, a branch a scale, nearest upsampling."""

    def __init__(self, channels: int, scales: tuple[int, ...] = (1, 2, 4)) -> None:
        super().__init__()
        hidden = max(1, channels // len(scales))
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


VARIANTS: dict[str, str | Callable[[int], nn.Module]] = {
    "none": "none",
    "se": "se",
    "obvious": Obvious,
    "mssar": "mssar",
}


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one step."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    begun = time.perf_counter()
    step()
    return (time.perf_counter() - begun) * 1e3


def prepare(name: str, wanted: argparse.Namespace, device: torch.device) -> Callable[[], object]:
    torch.manual_seed(0)
    model: nn.Module = mssar.create_model(wanted.net, VARIANTS[name], num_classes=10).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train(wanted.train)
    side = wanted.size or architecture(wanted.net).size[1]
    x = torch.randn(wanted.batch, 3, side, side, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    label = torch.randint(10, (wanted.batch,), device=device)
    run: Callable[[Tensor], Tensor] = torch.compile(model) if wanted.compile else model
    cast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")

    def train() -> None:
        model.zero_grad(set_to_none=True)
        with cast():
            loss = F.cross_entropy(run(x), label)
        loss.backward()

    @torch.inference_mode()
    def infer() -> None:
        with cast():
            run(x)

    return train if wanted.train else infer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--net", default="resnet20", choices=mssar.list_models())
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, help="side of an image")
    parser.add_argument("--train", action="store_true", help="forward and backward; else inference")
    parser.add_argument("--compile", action="store_true", help="torch.compile every variant")
    parser.add_argument("--rounds", type=int, default=20)
    wanted = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps, memory = {}, {}
    for name in VARIANTS:
        step = prepare(name, wanted, device)
        for _ in range(5):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            step()
            memory[name] = torch.cuda.max_memory_allocated() - held
        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(wanted.rounds):
        for name, step in steps.items():
            times[name].append(timed(step, device))
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    what = f"{'training' if wanted.train else 'inference'}{', compiled' if wanted.compile else ''}"
    print(f"{wanted.net}, batch {wanted.batch}, {what}, {where}, torch {torch.__version__}")
    print(f"{'':10}{'ms':>9}{'p20':>9}{'p80':>9}{'/ none':>9}{'MiB':>9}")
    middle = {name: torch.tensor(taken).quantile(0.5).item() for name, taken in times.items()}
    for name, taken in times.items():
        low, high = torch.tensor(taken).quantile(torch.tensor([0.2, 0.8])).tolist()
        room = f"{memory[name] / 2**20:9.0f}" if name in memory else ""
        ratio = middle[name] / middle["none"]
        print(f"{name:10}{middle[name]:9.2f}{low:9.2f}{high:9.2f}{ratio:9.3f}{room}")


if __name__ == "__main__":
    main()
